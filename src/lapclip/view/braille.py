"""Numbers drawn with characters: a curve of braille dots, a bar, a row of columns; each exactly as wide as asked."""

import math
from collections.abc import Iterable, Sequence

Point = tuple[float, float]

BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # the bits of a cell, by column, from its top
COLUMNS = " ▁▂▃▄▅▆▇█"
GAP_IN_LINE = 4  # dots from one of a dotted line to the next

# What a terminal without these characters gets; every one of them still says something.
ASCII = {
    **{BRAILLE + bits: "." for bits in range(1, 256)},
    **{ord(column): level for column, level in zip(COLUMNS, " ..::++##", strict=True)},
    BRAILLE: " ",
    ord("━"): "=",
    ord("╸"): "-",
    ord("─"): "-",
    ord("·"): "-",
    ord("…"): "~",
    ord("°"): " ",
}


def resample(points: Iterable[Point], count: int, span: tuple[float, float]) -> list[float | None]:
    """The mean in each of `count` equal stretches of the span of x; between two known ones a straight line."""
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
    return fill(means)


def fill(values: list[float | None]) -> list[float | None]:
    """Straight lines between the known values; before the first and after the last there is nothing."""
    filled = list(values)
    before: int | None = None
    for place, value in enumerate(values):
        if value is None:
            continue
        if before is not None and place - before > 1:
            start = values[before]
            assert start is not None
            for between in range(before + 1, place):
                filled[between] = start + (value - start) * (between - before) / (place - before)
        before = place
    return filled


def bounds(values: Iterable[float], *, lowest: float | None = None) -> tuple[float, float]:
    """The range to draw; never an empty one."""
    known = [value for value in values if math.isfinite(value)]
    low = lowest if lowest is not None else min(known, default=0.0)
    high = max(known, default=low)
    return low, high if high > low else low + (abs(low) or 1.0) / 10


def curve(
    points: Iterable[Point],
    width: int,
    height: int,
    *,
    across: tuple[float, float],
    up: tuple[float, float],
    line: float | None = None,
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
        for x in range(0, 2 * width, GAP_IN_LINE):
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


def bar(share: float, width: int) -> tuple[str, str]:
    """The full part and the rest of a bar, together `width` cells."""
    halves = round(min(1.0, max(0.0, share)) * 2 * width) if math.isfinite(share) else 0
    full = "━" * (halves // 2) + "╸" * (halves % 2)
    return full, "─" * (width - len(full))


def columns(shares: Sequence[float]) -> str:
    """One cell for each share of 0..1, filled from below; what is not nothing can be seen."""
    top = len(COLUMNS) - 1
    return "".join(
        COLUMNS[min(top, max(1 if share > 0 else 0, round(share * top)))] if math.isfinite(share) else " "
        for share in shares
    )
