"""What a report is made of: sections of sentences, tables, charts and images, which say nothing of how they look."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lapclip.view.charts import Chart
from lapclip.view.found import Query

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


@dataclass(frozen=True)
class Gradients:
    """The length of each layer's gradient over the run: rows are layers, columns stretches of time."""

    layers: list[str]
    steps: list[int]  # the last one of each column
    norms: list[list[float | None]]  # by layer, then column; medians

    def at(self, layer: str, place: float) -> float | None:
        """About the start (0), the middle (0.5) or the end (1)."""
        row = self.norms[self.layers.index(layer)]
        return row[round(place * (len(row) - 1))]


@dataclass(frozen=True)
class Section:
    """Sentences, tables, charts and images; the writers of HTML and Markdown decide how they look."""

    title: str
    words: list[str] = field(default_factory=list)
    points: list[str] = field(default_factory=list)  # a list of sentences
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    gradients: Gradients | None = None
    queries: list[Query] = field(default_factory=list)
    text: str = ""  # shown as it is

    @property
    def has_content(self) -> bool:
        parts = (self.words, self.points, self.tables, self.charts, self.gradients, self.queries, self.text)
        return any(map(bool, parts))
