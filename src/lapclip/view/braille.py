"""Numbers drawn with characters: a curve of braille dots, or a row of columns; each exactly as wide as asked."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

Point = tuple[float, float]
Span = tuple[float, float]  # its two ends

BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # the bits of a cell, by column, from its top
COLUMNS = " ▁▂▃▄▅▆▇█"
DOT_GAP = 4  # between the dots of a dotted line


def resample(points: Iterable[Point], count: int, span: Span) -> list[float | None]:
    """The mean in each of `count` equal intervals of the span of x, interpolated between known ones."""
    known = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not known or count < 1:
        return [None] * max(0, count)
    first, last = span
    scale = (count - 1) / (last - first) if last > first else 0.0
    sums, counts = [0.0] * count, [0] * count
    for x, y in known:
        place = min(count - 1, max(0, round((x - first) * scale)))
        sums[place] += y
        counts[place] += 1
    means = [total / number if number else None for total, number in zip(sums, counts, strict=True)]
    places = [(place, mean) for place, mean in enumerate(means) if mean is not None]
    for (left, low), (right, high) in pairwise(places):
        for place in range(left + 1, right):
            means[place] = low + (high - low) * (place - left) / (right - left)
    return means


def bounds(values: Iterable[float], *, lowest: float | None = None) -> Span:
    """The range to draw; never an empty one."""
    known = [value for value in values if math.isfinite(value)]
    low = lowest if lowest is not None else min(known, default=0.0)
    high = max(known, default=low)
    return low, high if high > low else low + (abs(low) or 1.0) / 10


def curve(
    points: Iterable[Point], width: int, height: int, *, across: Span, up: Span, line: float | None = None
) -> list[str]:
    """The curve in `height` rows of `width` braille cells, with a dotted line at the height of `line`."""
    num_rows, (low, high) = 4 * height, up
    cells = [[0] * width for _ in range(height)]

    def dot(x: int, y: int) -> None:
        cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]

    def row_of(value: float) -> int:
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return round((1 - share) * (num_rows - 1))

    if line is not None and math.isfinite(line):
        for x in range(0, 2 * width, DOT_GAP):
            dot(x, row_of(line))
    before: int | None = None
    for x, value in enumerate(resample(points, 2 * width, across)):
        if value is None:
            before = None
            continue
        row = row_of(value)
        start = row if before is None or before == row else before + (1 if row > before else -1)
        for y in range(min(start, row), max(start, row) + 1):
            dot(x, y)
        before = row
    return ["".join(chr(BRAILLE + cell) if cell else " " for cell in row) for row in cells]


def columns(shares: Sequence[float]) -> str:
    """One cell for each share of 0..1, filled from below; the smallest use is visible."""
    top = len(COLUMNS) - 1
    return "".join(
        COLUMNS[min(top, max(1 if share > 0 else 0, round(share * top)))] if math.isfinite(share) else " "
        for share in shares
    )
