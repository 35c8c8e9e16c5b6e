"""A part of a report under a title of its own."""

from dataclasses import dataclass, field

from lapclip.report.curves import Chart
from lapclip.report.machinery import Gradients
from lapclip.report.record import Query
from lapclip.report.table import Table


@dataclass(frozen=True)
class Section:
    """Sentences, tables, charts and pictures; the writers of HTML and Markdown decide how they look."""

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
