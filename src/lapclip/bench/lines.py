"""Lines over sizes on logarithmic axes, one a device, and where a device overtakes the processor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lapclip.bench.paper import COLOURS, INK, MARKS, PALE, PAPER, count, shortened
from lapclip.machine.device import processor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D

Points = Sequence[tuple[float, float]]  # size and value, ascending
Guesses = Collection[tuple[str, float]]  # device and size of what was estimated


def draw_lines(axes: Axes, lines: Mapping[str, Points], guesses: Guesses = ()) -> None:
    """One line a device, in the order given; what was estimated is hollow and dashed."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(axis="y")
    for number, (device, points) in enumerate(lines.items()):
        look = look_of(number)
        for start, end in pairwise(points):
            is_guess = (device, start[0]) in guesses or (device, end[0]) in guesses
            axes.plot(
                *zip(start, end, strict=True),
                **{**look, "marker": "", "linestyle": "--" if is_guess else "-"},
            )
        for size, value in points:
            hollow = {"markerfacecolor": PAPER} if (device, size) in guesses else {}
            axes.plot([size], [value], **{**look, "linestyle": "", **hollow}, zorder=3)
    axes.margins(0.08, 0.12)
    label_logarithmic(axes.yaxis)


def look_of(number: int) -> dict:
    """Later lines are thinner, so that an equal one below them is still seen."""
    thin = min(number, 2)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "linewidth": 3.2 - 0.9 * thin,
        "markersize": 8.5 - 1.5 * thin,
        "markeredgewidth": 1.6,
    }


def legend_of(devices: Sequence[str], *, has_guesses: bool = False) -> tuple[list[Line2D], list[str]]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look_of(number)) for number in range(len(devices))]
    names = [shortened(device) for device in devices]
    if has_guesses:
        handles.append(Line2D([], [], color=INK, marker="o", markerfacecolor=PAPER, linestyle="--"))
        names.append("estimated, not measured")
    return handles, names


def draw_crossovers(
    axes: Axes,
    slowness: Mapping[str, Points],
    *,
    names: Mapping[float, str] | None = None,
    guesses: Guesses = (),
) -> int:
    """Marks where each device overtakes the processor, in words above the axes; returns how many lines these take."""
    reference = slowness.get(processor().name, [])
    said = []
    for device, points in slowness.items():
        if device == processor().name or (size := overtakes(reference, points)) is None:
            continue
        if size == min(shared_sizes(reference, points)):
            said.append(f"{shortened(device)} is ahead throughout")
            continue
        is_guess = (device, size) in guesses or (processor().name, size) in guesses
        name = names[size] if names else f"{size:.0f}"
        said.append(f"{shortened(device)} is ahead from {name} on{', by estimate' if is_guess else ''}")
        axes.axvline(size, color=PALE, linestyle=":", linewidth=1.4, zorder=0)
    above = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom", "fontsize": 8.5}
    if said:
        axes.annotate("\n".join(said), (0, 1), (0, 4), **above)  # type: ignore[arg-type]
    return len(said)


def overtakes(reference: Points, other: Points) -> float | None:
    """The smallest size from which on the other takes less time at every size that both have; None if it never does."""
    found = None
    for size in sorted(shared_sizes(reference, other), reverse=True):
        if dict(other)[size] >= dict(reference)[size]:
            break
        found = size
    return found


def shared_sizes(reference: Points, other: Points) -> set[float]:
    return {size for size, _ in reference} & {size for size, _ in other}


def label_logarithmic(axis: Axis) -> None:
    """Plain numbers: powers of ten are hard to read, and over a short range too few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: count(value))
    axis.set_minor_formatter(NullFormatter())


def in_order(devices: Iterable[str]) -> list[str]:
    """Each device once, the processor first."""
    return sorted(dict.fromkeys(devices), key=lambda name: name != processor().name)
