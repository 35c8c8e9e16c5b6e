"""From plain results to figures: execution plans, single operations, sizes; each device beside the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lapclip.autotune.results import Candidate, Measured
from lapclip.bench.lines import draw_crossovers, draw_lines, in_order, legend_of
from lapclip.bench.paper import (
    INK,
    PALE,
    PAPER,
    QUIET,
    STRONG,
    count,
    drawing,
    duration,
    new_figure,
    printable,
    shortened,
    wrapped,
)
from lapclip.bench.sizes import SizeResult
from lapclip.step.step import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lapclip.bench.ops import OpTiming

PANELS_IN_A_ROW = 3
USUAL_SIZE = 512  # of the operations taken apart
NOTABLE_DRIFT = 0.05
PARTS = (  # name, field, colour, hatching; in the order they happen
    ("allocate", "allocate_seconds", "#cccccc", ""),
    ("launch", "launch_seconds", "#56b4e9", "//"),
    ("compute", "compute_seconds", "#0072b2", ""),
    ("synchronise", "synchronise_seconds", "#e69f00", ".."),
)


def draw_steps(measured: Measured, chosen: Plan, title: str) -> Figure:
    """Pairs a second of each candidate, fastest first; the chosen one says so, a rejected one says why."""
    timed = [c for c in measured.candidates if c.rejected is None and c.pairs_per_second is not None]
    timed.sort(key=speed, reverse=True)
    others = [c for c in measured.candidates if c not in timed]
    rows = timed + others
    with drawing():
        figure = new_figure(title, 1.4 + 0.43 * len(rows))
        axes = figure.add_subplot()
        longest = max((speed(c) * (1 + (c.spread or 0)) for c in timed), default=1.0)
        gap = longest * 0.012
        for place, candidate in enumerate(timed):
            draw_bar(axes, place, candidate, is_chosen=candidate.plan == chosen, gap=gap)
        for place, candidate in enumerate(others, start=len(timed)):
            axes.text(gap, place, wrapped(why_not(candidate), 112), va="center", fontsize=8.5)
        axes.set_yticks(range(len(rows)), [wrapped(printable(c.plan.in_words()), 32) for c in rows])
        for label, candidate in zip(axes.get_yticklabels(), rows, strict=True):
            label.set_fontweight("bold" if candidate.plan == chosen else "normal")
            label.set_color(INK if candidate in timed else PALE)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, longest * 1.35)  # room for the words behind the longest bar
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        if timed:
            axes.set_xlabel(
                "pairs per second; the whisker spans the middle half of the steps" + drifted(measured)
            )
        else:
            axes.set_xticks([])
        return figure


def draw_bar(axes: Axes, place: int, candidate: Candidate, *, is_chosen: bool, gap: float) -> None:
    spread = candidate.spread or 0.0
    reach = speed(candidate) * spread
    axes.barh(place, speed(candidate), height=0.62, color=STRONG if is_chosen else QUIET)
    if reach:
        axes.errorbar(speed(candidate), place, xerr=reach, color=INK, capsize=4, linewidth=1.4)
    give_or_take = f" \N{PLUS-MINUS SIGN} {spread:.0%}" if spread else ""
    axes.text(
        speed(candidate) + reach + gap,
        place,
        f"{per_second(speed(candidate))}{give_or_take}{', chosen' if is_chosen else ''}",
        va="center",
        fontsize=9,
        fontweight="bold" if is_chosen else "normal",
    )


def speed(candidate: Candidate) -> float:
    return candidate.pairs_per_second or 0.0


def per_second(pairs: float) -> str:
    return f"{pairs:,.0f}" if pairs >= 10 else f"{pairs:.2g}"


def why_not(candidate: Candidate) -> str:
    if candidate.rejected is None:
        return "not timed"
    timed = f" at {per_second(speed(candidate))} pairs/s" if candidate.pairs_per_second else ""
    return f"rejected{timed}: {candidate.rejected}"


def drifted(measured: Measured) -> str:
    if abs(measured.drift) < NOTABLE_DRIFT:
        return ""
    became = "slower" if measured.drift > 0 else "faster"
    return f"\nsteps became {abs(measured.drift):.0%} {became} while this was measured"


def draw_ops(timings: Sequence[OpTiming]) -> Figure:
    """A panel for each operation, time against size; below, what one call at the usual size consists of."""
    ops = list(dict.fromkeys(timing.op for timing in timings))
    devices = in_order(timing.device for timing in timings)
    apart = taken_apart(timings)
    columns = min(PANELS_IN_A_ROW, len(ops))
    num_rows = -(-len(ops) // columns)
    heights = [2.6] * num_rows + [1.2 + 0.3 * len(apart)]
    with drawing():
        figure = new_figure("Single operations: time of one call among many", 0.7 + sum(heights))
        grid = figure.add_gridspec(num_rows + 1, columns, height_ratios=heights)
        for number, op in enumerate(ops):
            axes = figure.add_subplot(grid[divmod(number, columns)])
            draw_op(axes, [t for t in timings if t.op == op], devices)
            if number % columns == 0:
                axes.set_ylabel("microseconds")
        figure.align_ylabels()
        figure.legend(*legend_of(devices), loc="outside upper right", ncols=len(devices))
        draw_parts(figure.add_subplot(grid[num_rows, :]), apart)
        return figure


def draw_op(axes: Axes, timings: Sequence[OpTiming], devices: Sequence[str]) -> None:
    lines = {
        device: sorted((float(t.size), t.seconds * 1e6) for t in timings if t.device == device)
        for device in devices
    }
    draw_lines(axes, lines)
    num_said = draw_crossovers(axes, lines)
    axes.set_title(shortened(timings[0].op), fontweight="bold", pad=7 + 12 * num_said)
    sizes = sorted({timing.size for timing in timings})
    few = sizes[:: -(-len(sizes) // 5)]
    axes.set_xticks(few, [str(size) for size in few])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size")


def taken_apart(timings: Sequence[OpTiming]) -> list[OpTiming]:
    """Of each operation and device the usual size, or the nearest that was measured."""
    ops, devices = list(dict.fromkeys(t.op for t in timings)), in_order(t.device for t in timings)
    of_each: dict[tuple[int, int], list[OpTiming]] = {}
    for timing in timings:
        of_each.setdefault((ops.index(timing.op), devices.index(timing.device)), []).append(timing)
    return [min(of_each[place], key=lambda t: abs(t.size - USUAL_SIZE)) for place in sorted(of_each)]


def draw_parts(axes: Axes, timings: Sequence[OpTiming]) -> None:
    """Each bar is one call by itself, in shares; the first call is said in words, since it would hide the rest."""
    from matplotlib.patches import Patch

    for place, timing in enumerate(timings):
        parts = [max(0.0, getattr(timing, field)) for _, field, _, _ in PARTS]
        whole, left = sum(parts) or 1.0, 0.0
        for (_, _, colour, hatch), part in zip(PARTS, parts, strict=True):
            bars = axes.barh(place, part / whole, left=left, height=0.66, color=colour, edgecolor=PAPER)
            bars[0].set(hatch=hatch, linewidth=0.5)
            left += part / whole
        said = f"{duration(sum(parts))}; the first call {duration(max(0.0, timing.first_call_seconds))} more"
        axes.text(1.012, place, said, va="center", fontsize=8.5)
    axes.set_title("One call by itself, its inputs made anew", fontweight="bold", pad=26)
    names = [f"{shortened(t.op)} {t.size}, {shortened(t.device)}" for t in timings]
    axes.set_yticks(range(len(timings)), names, fontsize=8.5)
    axes.set_ylim(len(timings) - 0.4, -0.6)
    axes.set_xlim(0, 1.36)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25%", "50%", "75%", "100%"])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_bounds(0, 1)
    patches = [Patch(facecolor=colour, hatch=hatch, edgecolor=PAPER) for _, _, colour, hatch in PARTS]
    axes.legend(
        patches,
        [name for name, *_ in PARTS],
        loc="lower left",
        bbox_to_anchor=(-0.006, 1.0),
        borderaxespad=0.2,
        ncols=len(PARTS),
    )


def draw_sizes(results: Sequence[SizeResult]) -> Figure:
    """Pairs a second and memory against parameters; what was estimated is hollow and dashed."""
    devices = in_order(result.device for result in results)
    sizes = {float(result.num_parameters): shortened(result.size) for result in results}
    guesses = {(result.device, float(result.num_parameters)) for result in results if result.is_estimate}
    speeds = lines_of(results, devices, lambda result: result.pairs_per_second)
    slowness = {device: [(x, 1 / y) for x, y in points] for device, points in speeds.items()}
    with drawing():
        figure = new_figure("Sizes: how fast, and how much memory", 8.2)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        draw_lines(above, speeds, guesses)
        draw_crossovers(above, slowness, names=sizes, guesses=guesses)
        above.set_ylabel("pairs per second")
        draw_lines(below, lines_of(results, devices, lambda result: result.memory_bytes / 1e9), guesses)
        below.set_ylabel("memory, GB")
        names = [f"{size} {count(number)}" for number, size in sizes.items()]
        below.set_xticks(list(sizes), names, rotation=35, ha="right", rotation_mode="anchor")
        below.set_xticks([], minor=True)
        below.set_xlabel("size and its parameters")
        handles, said = legend_of(devices, has_guesses=bool(guesses))
        figure.legend(handles, said, loc="outside upper right", ncols=len(said))
        return figure


def lines_of(
    results: Sequence[SizeResult], devices: Sequence[str], value: Callable[[SizeResult], float]
) -> dict[str, list[tuple[float, float]]]:
    return {
        device: sorted((float(r.num_parameters), value(r)) for r in results if r.device == device)
        for device in devices
    }
