"""A table as people read it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = re.compile(
    r"|-|not measured|[+-]?[\d,.]+(e[+-]?\d+)? ?(%|s|ms|min|h|J|Wh|W|GB|MB|kB)?( \d+ (s|min))?|\d+/10(, \d+% of it)?"
)


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers; the caption says what they are, the note what they mean."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def is_numbers(self, column: int) -> bool:
        """Whether a column is to be aligned at its right."""
        cells = [row[column] for row in self.rows]
        return any(cells) and all(NUMBER.fullmatch(cell) for cell in cells)
