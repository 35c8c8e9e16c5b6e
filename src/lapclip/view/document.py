"""One document: sentences, tables, charts and images as typed data; `html`, `markdown` and JSON are its renderings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lapclip.errors import one_line, shortened
from lapclip.units import UNKNOWN, count, duration, energy, is_number, number, percent, rate, size

Kind = Literal["text", "count", "number", "share", "seconds", "bytes", "rate", "joules"]
FORMATS: Mapping[Kind, Callable[[Any], str]] = {
    "count": count, "number": number, "share": percent, "seconds": duration, "bytes": size, "rate": rate,
    "joules": energy,
}  # fmt: skip
KINDS: Mapping[str, Kind] = {"": "text", **{kind: kind for kind in FORMATS}}
Look = Literal["line", "faint", "dots", "level"]
MAX_DOTS = 60  # more of them would hide the line
# What tells lines apart without their colours: stroke and gap in turn, none for a solid line.
DASHES = ((), (10, 4), (3, 3), (12, 3, 3, 3), (5, 7), (12, 3, 3, 3, 3, 3))
LEVELS = ((1, 4), (5, 3, 1, 3))  # of reference lines
NUM_COLOURS = 6
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Table:
    """Rows of values under columns that know their kind; the caption says what they are, the note what they mean."""

    caption: str
    columns: Mapping[str, Kind]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    @property
    def is_number(self) -> list[bool]:
        """By column, whether it is aligned at its right."""
        return [kind != "text" for kind in self.columns.values()]

    @property
    def cells(self) -> list[list[str]]:
        """As people read them."""
        kinds = self.columns.values()
        return [[shown(*cell) for cell in zip(row, kinds, strict=True)] for row in self.rows]


def columns_of(spec: str) -> dict[str, Kind]:
    """The columns of `step: count, message`: names with their kind, or text."""
    named = (column.partition(": ") for column in spec.split(", "))
    return {name: KINDS[kind] for name, _, kind in named}


def shown(value: Any, kind: Kind = "text", most: int = 300) -> str:
    if kind != "text" and not isinstance(value, str):
        return FORMATS[kind](value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return UNKNOWN
    return f"{value:g}" if isinstance(value, float) else shortened(one_line(value), most)


@dataclass(frozen=True)
class Line:
    """One line of a chart; lines of one colour belong together."""

    label: str
    points: Points
    number: int  # in its chart: decides colour and dashes
    look: Look = "line"

    @property
    def colour(self) -> int:
        return self.number % NUM_COLOURS

    @property
    def dash(self) -> tuple[int, ...]:
        """No two lines of one kind in a chart have the same, nor beyond six the same with the same colour."""
        if self.look == "level":
            return LEVELS[self.number % len(LEVELS)]
        return DASHES[(self.number + self.number // NUM_COLOURS) % len(DASHES)]

    @property
    def has_dots(self) -> bool:
        return len(self.points) == 1 or (self.look == "dots" and len(self.points) <= MAX_DOTS)

    def data(self) -> dict[str, Any]:
        x, y = ([digits(point[axis]) for point in self.points] for axis in (0, 1))
        look = {"colour": self.colour, "dash": self.dash, "look": self.look, "has_dots": self.has_dots}
        return {"label": one_line(self.label), "x": x, "y": y} | look


@dataclass(frozen=True)
class Chart:
    """Lines over the steps of a run, or over minutes where several runs share it."""

    title: str
    about: str
    lines: list[Line]
    is_share: bool = False  # shown in percent
    from_zero: bool = False
    is_log_y: bool = False
    log_x: int = 0  # the base of a logarithmic axis
    bands: list[tuple[float, float, str]] = field(default_factory=list)  # phases: from, to, label
    marks: list[tuple[float, str]] = field(default_factory=list)  # what happened where
    axis: str = "step"
    span: tuple[float, float] = (0.0, 1.0)  # of the axis, the same for all charts of a page

    @property
    def in_words(self) -> str:
        """Where each line begins and ends, for screen readers, print and Markdown."""
        show = percent if self.is_share else number
        return ", ".join(
            f"{line.label} {'' if line.look == 'level' else f'{show(line.points[0][1])} to '}{show(line.points[-1][1])}"
            for line in self.lines
            if line.look != "faint" and line.points
        )

    def data(self) -> dict[str, Any]:
        """For the script of a page."""
        lines = [line.data() for line in self.lines]
        return vars(self) | {"lines": lines, "span": list(map(digits, self.span))}


def digits(value: float) -> float:
    """As many as an eye can tell apart on a chart."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class HeatMap:
    """Rows by columns; each cell has a strength from 0 to 1, or None, and says what it is when pointed at."""

    title: str
    about: str
    rows: list[str]  # their names
    columns: list[str]  # their names, or the two ends
    strengths: list[list[float | None]]
    hints: list[list[str]] = field(default_factory=list)
    has_diagonal: bool = False  # which is framed


@dataclass(frozen=True)
class Range:
    """A share, or a difference of shares, with its 95% interval; `mark` is what to compare it with."""

    name: str
    value: float
    interval: Sequence[float] | None
    mark: float


@dataclass(frozen=True)
class Ranges:
    """Intervals below one another on one axis."""

    title: str
    ranges: list[Range]
    is_difference: bool = False
    kind: Kind = "share"
    num_alike: int = 3  # in a row that have one colour

    def place(self, value: float) -> float:
        """Of a value on the axis, which begins at 0 or below, in percent of its length."""
        ends = [end for r in self.ranges for end in (r.value, r.mark, *(r.interval or ()))]
        low, high = min(0.0, *ends), max(ends)
        return round(100 * (value - low) / (high - low or 1.0), 2)

    def words(self, value: float) -> str:
        return f"{100 * value:+.1f}" if self.is_difference else FORMATS[self.kind](value)


@dataclass(frozen=True)
class Found:
    """An image that was found for a caption."""

    media_type: str
    content: bytes
    score: float | None
    is_right: bool


@dataclass(frozen=True)
class Query:
    """A caption, and what the model found for it, best first."""

    text: str
    rank: int | None  # of the correct image, from 1
    found: list[Found]

    @property
    def rank_words(self) -> str:
        rank = "an unknown rank" if self.rank is None else f"rank {self.rank:,}"
        return "a correct image comes first" if self.rank == 1 else f"a correct image is at {rank}"


@dataclass(frozen=True)
class Section:
    """Sentences, tables, charts and images; the renderers decide how they look. Tables without rows are omitted."""

    title: str
    words: list[str] = field(default_factory=list)
    points: list[str] = field(default_factory=list)  # a list of sentences
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    heat_maps: list[HeatMap] = field(default_factory=list)
    ranges: list[Ranges] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)
    text: str = ""  # shown as it is
    is_wide: bool = False  # not beside another one, however few columns it has

    def __post_init__(self) -> None:
        self.tables[:] = [table for table in self.tables if table.rows]


@dataclass(frozen=True)
class Document:
    """A page to keep; `tiles` are the few numbers shown large: what, how much, compared with what."""

    title: str
    kicker: str  # the command that writes it
    about: str
    sections: list[Section]
    tiles: list[tuple[str, str, str]] = field(default_factory=list)
    footer: str = ""

    def __post_init__(self) -> None:
        self.sections[:] = [s for s in self.sections if s != Section(s.title)]  # those with content


def find(tree: Any, *names: str) -> float | None:
    """A number in dictionaries of dictionaries, or None."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if is_number(tree) else None
