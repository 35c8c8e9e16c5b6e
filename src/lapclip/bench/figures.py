"""Charts of execution plans, single operations and sizes, drawn by matplotlib, which is loaded only when asked for.

Everything is told apart by marks, hatching and words as well as by colour.
"""

import logging
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lapclip.autotune.plans import Candidate, Measured
from lapclip.bench.ops import OpTiming
from lapclip.bench.sizes import SizeResult
from lapclip.config import Plan
from lapclip.errors import MissingPackage, one_line
from lapclip.machine.device import processor
from lapclip.units import duration, rate, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, DOTS_PER_INCH = 10.0, 120  # 1200 pixels
INK, PAPER = "#222222", "#ffffff"
STRONG, QUIET = "#0072b2", "#c8c8c8"
# Okabe and Ito's colours, which the colour-blind tell apart; the CPU is always the first.
STYLES = (("#0072b2", "o"), ("#e69f00", "s"), ("#009e73", "^"), ("#cc79a7", "D"))
LOOK: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a device's name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "legend.fontsize": 9,
}
HOLLOW: dict[str, Any] = {"markerfacecolor": PAPER, "linestyle": "--"}  # what was estimated
PANELS_IN_A_ROW = 3
TYPICAL_SIZE = 512  # of the operations that are broken down into parts
NOTABLE_DRIFT = 0.05
PARTS = (  # name, field, colour, hatching; in the order they happen
    ("allocate", "allocate_seconds", "#cccccc", ""),
    ("launch", "launch_seconds", "#56b4e9", "//"),
    ("compute", "compute_seconds", "#0072b2", ""),
    ("synchronise", "synchronise_seconds", "#e69f00", ".."),
)

Points = Mapping[float, float]  # value by size


@contextmanager
def drawing() -> Iterator[None]:
    """Within it figures are made and saved: with our look, without the user's own settings, and quietly."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would report that it lists fonts, or that it cannot cache the list
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box is drawn instead
            import matplotlib

            with matplotlib.rc_context():
                matplotlib.rcdefaults()
                matplotlib.rcParams.update(LOOK)
                yield
    except ImportError:
        raise MissingPackage("charts need matplotlib, which is not installed", "plot") from None
    finally:
        logger.setLevel(level)


def new_figure(title: str, height_inches: float) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(wrapped(title, 90), x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def wrapped(text: str, width: int, max_lines: int = 2) -> str:
    return "\n".join(textwrap.wrap(one_line(text), width, max_lines=max_lines, placeholder=" ..."))


def label(name: str) -> str:
    """A name that fits beside others."""
    return one_line(name) if len(name) <= 24 else one_line(name)[:21] + "..."


def draw_steps(measured: Measured, chosen: Plan, title: str) -> "Figure":
    """Pairs a second of each candidate, fastest first; the chosen one is marked, a rejected one gives the reason."""

    def speed(candidate: Candidate) -> float:
        return 0.0 if candidate.rejected is not None else candidate.pairs_per_second or 0.0

    rows = sorted(measured.candidates, key=speed, reverse=True)
    longest = max(speed(c) * (1 + (c.spread or 0)) for c in rows) or 1.0
    with drawing():
        figure = new_figure(title, 1.4 + 0.43 * len(rows))
        axes = figure.add_subplot()
        for place, candidate in enumerate(rows):
            is_chosen, reach = candidate.plan == chosen, speed(candidate) * (candidate.spread or 0.0)
            colour = STRONG if is_chosen else QUIET
            axes.barh(place, speed(candidate), height=0.62, color=colour, xerr=reach or None, capsize=4)
            said = [rate(candidate.pairs_per_second) if candidate.pairs_per_second else "not timed"]
            said[0] += f" \N{PLUS-MINUS SIGN} {candidate.spread:.0%}" if candidate.spread else ""
            said += ["chosen"] * is_chosen + [f"rejected: {candidate.rejected}"] * bool(candidate.rejected)
            left, weight = speed(candidate) + reach + longest * 0.012, "bold" if is_chosen else "normal"
            axes.text(left, place, wrapped(", ".join(said), 112), va="center", fontsize=8.5, weight=weight)
        axes.set_yticks(range(len(rows)), [wrapped(candidate.plan.in_words(), 32) for candidate in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, longest * 1.35)  # room for the words after the longest bar
        became = f"{abs(measured.drift):.0%} {'slower' if measured.drift > 0 else 'faster'}"
        note = f"\nsteps became {became} during measurement"
        note = note if abs(measured.drift) >= NOTABLE_DRIFT else ""
        axes.set_xlabel(f"pairs per second; whiskers span the interquartile range of the steps{note}")
        return figure


def draw_ops(timings: Sequence[OpTiming]) -> "Figure":
    """A panel for each operation, time against size; below, what one call at a typical size consists of."""
    ops = list(dict.fromkeys(timing.op for timing in timings))
    devices = in_order(timing.device for timing in timings)
    lines = {
        (op, d): {t.size: t for t in timings if (t.op, t.device) == (op, d)} for op in ops for d in devices
    }
    typical = [min(of.values(), key=lambda t: abs(t.size - TYPICAL_SIZE)) for of in lines.values() if of]
    columns = min(PANELS_IN_A_ROW, len(ops))
    num_rows = -(-len(ops) // columns)
    heights = [2.6] * num_rows + [1.2 + 0.3 * len(typical)]
    with drawing():
        figure = new_figure("Single operations: time per call, in blocks of calls", 0.7 + sum(heights))
        grid = figure.add_gridspec(num_rows + 1, columns, height_ratios=heights)
        for number, op in enumerate(ops):
            axes = figure.add_subplot(grid[divmod(number, columns)])
            micros = {d: {float(n): t.seconds * 1e6 for n, t in lines[op, d].items()} for d in devices}
            draw_lines(axes, micros)
            axes.set_title(label(op), fontweight="bold")
            sizes = sorted({timing.size for timing in timings if timing.op == op})
            ticks = sizes[:: -(-len(sizes) // 5)]
            axes.set_xticks(ticks, list(map(str, ticks)))
            axes.set_xticks([], minor=True)
            axes.set_xlabel("size")
            axes.set_ylabel("microseconds" if number % columns == 0 else "")
        add_legend(figure, devices)
        draw_parts(figure.add_subplot(grid[num_rows, :]), typical)
        return figure


def draw_parts(axes: "Axes", timings: Sequence[OpTiming]) -> None:
    """Each bar is one call by itself, in shares; the first call is given in words, since it would hide the rest."""
    parts = [[max(0.0, getattr(timing, field)) for _, field, _, _ in PARTS] for timing in timings]
    places, left = range(len(timings)), [0.0] * len(timings)
    for number, (name, _, colour, hatch) in enumerate(PARTS):
        shares = [own[number] / (sum(own) or 1.0) for own in parts]
        look: dict[str, Any] = {"height": 0.66, "color": colour, "edgecolor": PAPER, "hatch": hatch}
        axes.barh(places, shares, left=left, label=name, **look)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    for place, (timing, own) in enumerate(zip(timings, parts, strict=True)):
        first = f"{duration(sum(own))}; the first call {duration(max(0.0, timing.first_call_seconds))} more"
        axes.text(1.012, place, first, va="center", fontsize=8.5)
    axes.set_title("A single call with new inputs", fontweight="bold", pad=26)
    axes.set_yticks(places, [f"{label(t.op)} {t.size}, {label(t.device)}" for t in timings], fontsize=8.5)
    axes.set_ylim(len(timings) - 0.4, -0.6)
    axes.set_xlim(0, 1.36)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25%", "50%", "75%", "100%"])
    axes.legend(loc="lower left", bbox_to_anchor=(-0.006, 1.0), borderaxespad=0.2, ncols=len(PARTS))


def draw_sizes(results: Sequence[SizeResult]) -> "Figure":
    """Pairs a second and memory against parameters; what was estimated is hollow and dashed."""
    devices = in_order(result.device for result in results)
    sizes = {float(result.num_parameters): label(result.size) for result in results}
    estimated = {(result.device, float(result.num_parameters)) for result in results if result.is_estimate}

    def lines(value: Callable[[SizeResult], float]) -> dict[str, Points]:
        return {d: {float(r.num_parameters): value(r) for r in results if r.device == d} for d in devices}

    with drawing():
        figure = new_figure("Sizes: speed and memory", 8.2)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        draw_lines(above, lines(lambda result: result.pairs_per_second), estimated)
        above.set_ylabel("pairs per second")
        draw_lines(below, lines(lambda result: result.memory_bytes / 1e9), estimated)
        below.set_ylabel("memory, GB")
        names = [f"{size} {short_count(number)}" for number, size in sizes.items()]
        below.set_xticks(list(sizes), names, rotation=35, ha="right", rotation_mode="anchor")
        below.set_xticks([], minor=True)
        below.set_xlabel("size and its parameters")
        add_legend(figure, devices, has_estimates=bool(estimated))
        return figure


def draw_lines(
    axes: "Axes", lines: Mapping[str, Points], estimated: Collection[tuple[str, float]] = ()
) -> None:
    """One line a device on logarithmic axes; estimates, which are of the largest sizes, are hollow and dashed."""
    axes.loglog()
    axes.grid(axis="y")
    for number, (device, points) in enumerate(lines.items()):
        colour, mark = STYLES[number % len(STYLES)]
        measured = [point for point in sorted(points.items()) if (device, point[0]) not in estimated]
        if guessed := sorted(points.items() - set(measured)):
            axes.plot(*zip(*measured[-1:], *guessed, strict=True), color=colour, marker=mark, **HOLLOW)
        if measured:
            axes.plot(*zip(*measured, strict=True), color=colour, marker=mark)
    axes.margins(0.08, 0.12)
    axes.yaxis.set_major_formatter(lambda value, _: short_count(value))


def add_legend(figure: "Figure", devices: Sequence[str], *, has_estimates: bool = False) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for number, device in enumerate(devices):
        colour, mark = STYLES[number % len(STYLES)]
        handles.append(Line2D([], [], color=colour, marker=mark, label=label(device)))
    if has_estimates:
        handles.append(Line2D([], [], color=INK, marker="o", label="estimated, not measured", **HOLLOW))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))


def in_order(devices: Iterable[str]) -> list[str]:
    """Each device once, the CPU first."""
    return sorted(dict.fromkeys(devices), key=lambda name: name != processor().name)
