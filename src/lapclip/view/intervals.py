"""Measured shares with their intervals, and classes taken for one another, as SVG that stands inside a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from lapclip.errors import shortened
from lapclip.units import share
from lapclip.view.svg import LABELS, NUM_SHADES, said, shorter, ticks

WIDTH = 440
ROW, NAME, VALUE = 22, 138, 52  # height of a range's row, widths of its name and number
MOST_WIDE = 520  # of a confusion, where its cells do not become too small
CELL_MOST, CELL_LEAST = 22, 5
MOST_NAMED = 40  # classes; more would be written over one another
LONGEST = 16  # letters of a class


@dataclass(frozen=True)
class Range:
    """A share, or a difference of shares, with its interval; `mark` is what to compare it with."""

    name: str
    value: float
    interval: Sequence[float] | None
    mark: float

    @property
    def ends(self) -> list[float]:
        """All that the drawing must reach."""
        return [self.value, self.mark, *(self.interval or ())]


def draw_ranges(ranges: Sequence[Range], title: str) -> str:
    """One row each: a dot for the value, a bar for the interval, a tick for the mark."""
    ends = [end for r in ranges for end in r.ends]
    is_difference = all(r.mark == 0 for r in ranges)
    room = 0.05 * (max(ends) - min(ends)) or 0.01
    low, high = (min(ends) - room, max(ends) + room) if is_difference else (0.0, min(1.0, max(ends) + room))

    def at(value: float) -> float:
        return NAME + (WIDTH - NAME - VALUE) * (value - low) / (high - low)

    bottom = ROW * len(ranges)
    parts = []
    for tick in ticks(low, high, 5):
        label = shorter(share(tick)) if not is_difference else f"{100 * tick:+g}" if tick else "0"
        parts.append(f'<path class="grid" d="M{at(tick):.1f} 0V{bottom}"/>')
        parts.append(f'<text class="x" x="{at(tick):.1f}" y="{bottom + 15}">{label}</text>')
    heard = []
    for number, r in enumerate(ranges):
        middle = ROW * (number + 0.5)
        value = f"{100 * r.value:+.1f}" if is_difference else share(r.value)
        parts.append(f'<text class="y" x="{NAME - 10}" y="{middle + 4:.0f}">{said(r.name)}</text>')
        if r.interval:
            start, end = map(at, r.interval)
            parts.append(f'<path class="range c{number // 3 % 6}" d="M{start:.1f} {middle}H{end:.1f}"/>')
        parts.append(f'<path class="mark" d="M{at(r.mark):.1f} {middle - 8}V{middle + 8}"/>')
        parts.append(f'<circle class="dot c{number // 3 % 6}" cx="{at(r.value):.1f}" cy="{middle}" r="3.5"/>')
        parts.append(f'<text class="y value" x="{WIDTH - 4}" y="{middle + 4:.0f}">{value}</text>')
        heard.append(f"{r.name} {value}")
    label = said(f"{title}: {', '.join(heard)}")
    return (
        f'<svg class="ranges" viewBox="0 0 {WIDTH} {bottom + 20}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def draw_confusion(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Classes by the names they were given: the stronger the colour, the larger the share of the row."""
    number = len(labels)
    names = [shortened(str(label), LONGEST) for label in labels] if number <= MOST_NAMED else []
    left = LABELS + 10 if names else 4
    cell = max(CELL_LEAST, min(CELL_MOST, (MOST_WIDE - left - 4) // max(1, number)))
    top = 8 + round(6.2 * max(map(len, names), default=0)) if names else 4
    width, height = left + cell * number + (60 if names else 4), top + cell * number + 4
    parts = []
    for y, row in enumerate(counts):
        total = sum(row)
        for x, count in enumerate(row):
            if count:
                shade = min(NUM_SHADES - 1, int(count / total * NUM_SHADES))
                hint = f"{labels[y]} taken for {labels[x]}" if x != y else f"{labels[y]}"
                parts.append(
                    f'<path class="h{shade}" d="M{left + x * cell} {top + y * cell}h{cell}v{cell}h-{cell}z">'
                    f"<title>{said(f'{hint}: {count:,} of {total:,}')}</title></path>"
                )
        parts.append(
            f'<rect class="own" x="{left + y * cell}" y="{top + y * cell}" width="{cell}" height="{cell}"/>'
        )
    for place, name in enumerate(names):
        middle = (place + 0.5) * cell + 4
        parts.append(f'<text class="y" x="{left - 6}" y="{top + middle:.1f}">{said(name)}</text>')
        parts.append(
            f'<text transform="translate({left + middle:.1f} {top - 5}) rotate(-60)">{said(name)}</text>'
        )
    right = sum(row[place] for place, row in enumerate(counts))
    label = f"{right:,} of {sum(map(sum, counts)):,} images of {number:,} classes are named rightly"
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{1.2 * width:.0f}px" role="img" '
        f'aria-label="{said(label)}">{"".join(parts)}</svg>'
    )
