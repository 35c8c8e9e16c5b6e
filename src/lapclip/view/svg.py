"""Charts as SVG that stands inside a page: for print, and for readers whose browser runs no scripts."""

import math
from collections.abc import Sequence
from html import escape

from lapclip.errors import one_line
from lapclip.units import number, share
from lapclip.view.charts import Chart, Line, thin
from lapclip.view.section import Gradients

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 20, 30
MOST_POINTS = 160  # of a line
NUM_SHADES = 9
CELL = 14  # height of a row of the heat map
LABELS = 100


def draw(chart: Chart) -> str:
    """A chart with axes, phases and lines."""
    ys = [y for line in chart.lines for _, y in line.points if not chart.is_log or y > 0]
    left, right = chart.span
    low, high = bounds(ys, chart)

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - left) / (right - left) if right > left else 0.5)

    def at_y(y: float) -> float:
        place = (height(y, chart) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, place))

    parts = []
    for band in chart.bands:
        start, end = at_x(max(left, band.start)), at_x(min(right, band.end))
        if end > start:
            kind = {"warm-up": "warm", "whole images": "whole"}.get(band.label, "plain")
            parts.append(
                f'<rect class="band {kind}" x="{start:.1f}" y="{TOP}" width="{end - start:.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"/>'
            )
            if end - start > 5.2 * len(band.label):
                parts.append(
                    f'<text class="phase" x="{(start + end) / 2:.0f}" y="{TOP - 6}">{said(band.label)}</text>'
                )
    for y in y_ticks(low, high, chart):
        parts.append(f'<path class="grid" d="M{LEFT} {at_y(y):.1f}H{WIDTH - RIGHT}"/>')
        label = share(y) if chart.is_share else f"{y:,.6g}"
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{at_y(y) + 4:.1f}">{shorter(label)}</text>')
    for x in ticks(left, right, 7):
        parts.append(f'<text class="x" x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 15}">{x:,g}</text>')
    parts.append(
        f'<text class="x" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 2}">{said(chart.axis)}</text>'
    )
    for mark in chart.marks:
        if left <= mark.at < right:
            parts.append(
                f'<path class="mark" d="M{at_x(mark.at):.1f} {TOP}V{HEIGHT - BOTTOM}">'
                f"<title>{said(mark.label)}</title></path>"
            )
    parts += [draw_line(line, at_x, at_y, chart) for line in chart.lines]
    label = f"{chart.title}: {in_words(chart)}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said(label)}">{"".join(parts)}</svg>'


def draw_line(line: Line, at_x, at_y, chart: Chart) -> str:  # type: ignore[no-untyped-def]
    points = [(at_x(x), at_y(y)) for x, y in thin(line.points, MOST_POINTS) if not chart.is_log or y > 0]
    if not points:
        return ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    drawn = stroke(line, f"M{path}")
    if line.has_dots:
        drawn += "".join(
            f'<circle class="dot c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points
        )
    return drawn


def stroke(line: Line, path: str) -> str:
    dash = f' stroke-dasharray="{" ".join(map(str, line.dash))}"' if line.dash else ""
    return f'<path class="line c{line.colour} {line.look}"{dash} d="{path}"/>'


def draw_key(line: Line) -> str:
    """A piece of the line, to stand beside its name."""
    return f'<svg class="key" viewBox="0 0 36 6" aria-hidden="true">{stroke(line, "M0 3H36")}</svg>'


def in_words(chart: Chart) -> str:
    """Where each line begins and ends: the chart for those who hear it."""
    show = share if chart.is_share else number
    said = []
    for line in chart.lines:
        if line.look == "faint" or not line.points:
            continue
        first, last = line.points[0], line.points[-1]
        if line.look == "level":
            said.append(f"{line.label} {show(last[1])}")
        else:
            said.append(f"{line.label} {show(first[1])} to {show(last[1])}")
    return ", ".join(said)


def height(y: float, chart: Chart) -> float:
    return math.log10(max(y, 1e-30)) if chart.is_log else y


def bounds(ys: Sequence[float], chart: Chart) -> tuple[float, float]:
    """What the axis spans, a little more than the values; equal ones are given room."""
    heights = [height(y, chart) for y in ys] or [0.0, 1.0]
    low, high = min(heights), max(heights)
    if chart.from_zero:
        low = min(0.0, low)
    if high <= low:
        low, high = (
            (low - 0.5, high + 0.5)
            if chart.is_log
            else (low - abs(low) / 2 - 1e-9, high + abs(high) / 2 + 1e-9)
        )
    room = 0.05 * (high - low)
    return (low if chart.from_zero else low - room), high + room


def y_ticks(low: float, high: float, chart: Chart) -> list[float]:
    if not chart.is_log:
        return ticks(low, high, 6)
    if high - low < 1.2:
        return ticks(10**low, 10**high, 4)
    return [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within a range."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    found = [round(n * step, 12) for n in range(first, first + most + 2) if n * step <= high + 1e-9 * step]
    return [tick for tick in found if tick > 0] if low > 0 else found


def shorter(label: str) -> str:
    return label.replace(".0%", "%")


def draw_heat(gradients: Gradients) -> str:
    """Layers from top to bottom, the run from left to right; the stronger the colour, the longer the gradient."""
    columns = len(gradients.steps)
    norms = [n for row in gradients.norms for n in row if n is not None and n > 0]
    if not norms:
        return ""
    low, high = math.log10(min(norms)), math.log10(max(norms))
    width = (WIDTH - LABELS) / columns
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(gradients.norms):
        for x, norm in enumerate(row):
            if norm is not None and norm > 0:
                share = (math.log10(norm) - low) / (high - low) if high > low else 0.5
                shade = min(NUM_SHADES - 1, int(share * NUM_SHADES))
                paths.setdefault(shade, []).append(
                    f"M{LABELS + x * width:.1f} {y * CELL}h{width:.1f}v{CELL}h-{width:.1f}z"
                )
    cells = "".join(f'<path class="h{shade}" d="{"".join(paths[shade])}"/>' for shade in sorted(paths))
    names = "".join(
        f'<text class="y" x="{LABELS - 6}" y="{y * CELL + 11}">{said(layer)}</text>'
        for y, layer in enumerate(gradients.layers)
    )
    bottom = len(gradients.layers) * CELL
    axis = (
        f'<text class="left" x="{LABELS}" y="{bottom + 14}">step {gradients.steps[0]:,}</text>'
        f'<text class="y" x="{WIDTH}" y="{bottom + 14}">step {gradients.steps[-1]:,}</text>'
    )
    label = f"gradient norm by layer, from {number(min(norms))} (faint) to {number(max(norms))} (strong), logarithmic"
    return (
        f'<svg class="heat" viewBox="0 0 {WIDTH} {bottom + 20}" role="img" aria-label="{said(label)}">'
        f"{cells}{names}{axis}</svg>"
    )


def said(text: object) -> str:
    return escape(one_line(text))
