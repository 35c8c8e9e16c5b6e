"""The curves of a run, or of several over one another, as plain numbers, with the phases they went through."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lapclip.errors import one_line, shortened
from lapclip.runs.events import Evaluated, Step
from lapclip.runs.history import Summary, find
from lapclip.units import duration, is_number

MOST_POINTS = 600  # of a line, in a page of one run
MOST_DOTS = 60  # beyond, they would hide the line
Look = Literal["line", "faint", "dots", "level"]
# What tells lines apart for those who do not see their colours: stroke and gap in turn, none for a whole line.
DASHES = ((), (10, 4), (3, 3), (12, 3, 3, 3), (5, 7), (12, 3, 3, 3, 3, 3))
LEVELS = ((1, 4), (5, 3, 1, 3))  # of straight lines to compare with
NUM_COLOURS = 6
Points = list[tuple[float, float]]


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
        return len(self.points) == 1 or (self.look == "dots" and len(self.points) <= MOST_DOTS)


@dataclass(frozen=True)
class Band:
    """A phase of the run, from one place on the axis to another."""

    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Mark:
    """Something that happened at one place."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Lines over the steps of a run, or over minutes where several runs share it."""

    title: str
    about: str
    lines: list[Line]
    is_share: bool = False  # shown in percent
    from_zero: bool = False
    is_log: bool = False
    bands: list[Band] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    axis: str = "step"
    span: tuple[float, float] = (0.0, 1.0)  # of the axis, the same for all charts of a page


def charts_of(record: Summary) -> list[Chart]:
    """Every curve of one run; those without data are left out."""
    steps, evaluations = list(record.history.steps), list(record.history.evaluations)
    bands, marks = phases(record), marks_of(record)
    span = span_of(record)

    def of_steps(value: Callable[[Step], float]) -> Points:
        return [(s.step, value(s)) for s in steps]

    def both(label: str, value: Callable[[Step], float]) -> list[Line]:
        points = of_steps(value)
        return [Line("each step", thin(points), 0, "faint"), Line(label, thin(smooth(points)), 0)]

    chance = record.history.chance
    charts = [
        Chart(
            "Loss",
            "of the training batches, and over the held-out pairs",
            [
                *both("training", lambda s: s.loss),
                Line("held-out", known((e.step, e.loss) for e in evaluations), 1, "dots"),
            ],
        ),
        Chart(
            "Accuracy",
            "how often an image's own words are the nearest of its batch, and the other way round",
            [*both("training", lambda s: s.accuracy), level("chance", chance, span)],
            is_share=True,
            from_zero=True,
        ),
        recall_chart(evaluations, span),
        Chart(
            "Temperature",
            "tau, learned: the smaller, the more sharply it tells pairs apart",
            [Line("tau", thin(of_steps(lambda s: s.temperature)), 0)],
        ),
        Chart("Learning rate", "", [Line("lr", thin(of_steps(lambda s: s.lr)), 0)], from_zero=True),
        Chart(
            "Gradient norm",
            "before it is clipped",
            [
                *both("mean", lambda s: s.grad_norm),
                level("clipped above", find(record.settings, "clip_norm"), span),
            ],
            is_log=all(s.grad_norm > 0 for s in steps),
        ),
        Chart(
            "Pairs a second",
            "evaluation and saving apart",
            [
                *both("mean", lambda s: s.pairs_per_second),
                level("measured by bench", record.bench_speed, span),
            ],
            from_zero=True,
        ),
    ]
    shared = {"bands": bands, "marks": marks, "span": span}
    return [Chart(**{**vars(chart), **shared}) for chart in map(without_empty, charts) if chart.lines]


def span_of(record: Summary) -> tuple[float, float]:
    """From the first step to the last; also a single one needs an axis."""
    first = next(iter(record.history.steps), None)
    last = float(record.history.num_steps)
    return (min(float(first.step), last - 1), last) if first else (0.0, 1.0)


def recall_chart(evaluations: Sequence[Evaluated], span: tuple[float, float]) -> Chart:
    lines: list[Line] = []
    for number, k in enumerate((1, 10)):
        points = known((e.step, find(e.recall, "text_to_image", f"recall@{k}")) for e in evaluations)
        chance = find(evaluations[-1].recall, "text_to_image", f"chance@{k}") if evaluations else None
        lines += [Line(f"recall@{k}", points, number, "dots"), level(f"chance, @{k}", chance, span, number)]
    return Chart("Recall", "words to image, over the held-out pairs", lines, is_share=True, from_zero=True)


def without_empty(chart: Chart) -> Chart:
    lines = [line for line in chart.lines if line.points]
    is_only_level = all(line.look == "level" for line in lines)
    return Chart(**{**vars(chart), "lines": [] if is_only_level else lines})


def known(points: object) -> Points:
    return [(x, y) for x, y in points if is_number(y)]  # type: ignore[attr-defined]


def level(label: str, height: float | None, span: tuple[float, float], number: int = 4) -> Line:
    """A straight line to compare with."""
    return Line(label, [] if height is None else [(x, height) for x in span], number, "level")


def smooth(points: Points) -> Points:
    """The mean over about a thirtieth of the run around each point."""
    reach = len(points) // 60 + (len(points) > 15)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    smoothed = []
    for place, (x, _) in enumerate(points):
        near = min(
            reach, place, len(points) - 1 - place
        )  # even-sided, so that the ends are not pulled inwards
        low, high = place - near, place + near + 1
        smoothed.append((x, (sums[high] - sums[low]) / (high - low)))
    return smoothed


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many, evenly spread, the last one among them."""
    every = -(-len(points) // most) or 1
    kept = points[::every]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def phases(record: Summary) -> list[Band]:
    """Warm-up, learning, whole images: by how far the run was at each step, which a resumed run may do twice."""
    warmup = find(record.settings, "warmup") or 0.0
    whole_from, keeps = find(record.settings, "whole_from"), find(record.settings, "keep_patches")
    is_parted = whole_from is not None and keeps is not None and keeps < 1
    bands: list[Band] = []
    for step in record.history.steps:
        if step.progress <= warmup:
            label = "warm-up"
        else:
            label = "whole images" if is_parted and step.progress > (whole_from or 0) else "learning"
        if bands and bands[-1].label == label:
            bands[-1] = Band(bands[-1].start, step.step, label)
        else:
            bands.append(Band(bands[-1].end if bands else step.step, step.step, label))
    return bands


def phases_in_words(record: Summary) -> list[str]:
    """What the shaded parts of the charts are."""
    bands = {band.label for band in phases(record)}
    warmup, whole_from = find(record.settings, "warmup"), find(record.settings, "whole_from")
    said = []
    if "warm-up" in bands and warmup:
        said.append(f"the warm-up, {warmup:.0%} of the run, in which the learning rate rises")
    if "whole images" in bands and whole_from:
        keeps = find(record.settings, "keep_patches") or 0.0
        said.append(
            f"the part from {whole_from:.0%} on, which sees whole images instead of {keeps:.0%} of them"
        )
    return [f"Shaded: {'; '.join(said)}."] if said else []


def marks_of(record: Summary) -> list[Mark]:
    marks = [Mark(start.step, "resumed") for start in record.history.starts[1:] if start.step]
    for pause in record.history.pauses:
        how_long = f" {duration(pause.seconds)}" if pause.seconds is not None else ""
        marks.append(Mark(pause.step, f"paused{how_long}"))
    if record.history.step is not None:
        marks.append(
            Mark(record.history.num_steps, "now" if record.state in ("running", "paused") else "end")
        )
    return marks


def overlaid(records: Sequence[Summary]) -> list[Chart]:
    """The curves of several runs over the minutes of training, which is what they all have."""
    most = max(100, 1600 // len(records))

    def lines_of(value: Callable[[Step], float]) -> list[Line]:
        return [
            Line(
                name_of(record),
                thin(smooth([(s.seconds / 60, value(s)) for s in record.history.steps]), most),
                n,
            )
            for n, record in enumerate(records)
        ]

    def evaluated(value: Callable[[Evaluated], float | None]) -> list[Line]:
        return [
            Line(
                name_of(r), known((minutes_at(r, e.step), value(e)) for e in r.history.evaluations), n, "dots"
            )
            for n, r in enumerate(records)
        ]

    charts = [
        Chart("Loss", "of the training batches", lines_of(lambda s: s.loss)),
        Chart("Held-out loss", "over the held-out pairs", evaluated(lambda e: e.loss)),
        *(
            Chart(
                f"Recall@{k}",
                "words to image, over the held-out pairs",
                evaluated(lambda e, k=k: find(e.recall, "text_to_image", f"recall@{k}")),  # type: ignore[misc]
                is_share=True,
                from_zero=True,
            )
            for k in (1, 10)
        ),
        Chart("Accuracy", "in the batch", lines_of(lambda s: s.accuracy), is_share=True, from_zero=True),
        Chart("Temperature", "tau", lines_of(lambda s: s.temperature)),
        Chart("Learning rate", "", lines_of(lambda s: s.lr), from_zero=True),
        Chart("Gradient norm", "before it is clipped", lines_of(lambda s: s.grad_norm), is_log=True),
        Chart("Pairs a second", "", lines_of(lambda s: s.pairs_per_second), from_zero=True),
    ]
    longest = max((record.history.seconds / 60 for record in records), default=0.0)
    shared = {"axis": "minutes of training", "span": (0.0, longest or 1.0)}
    return [Chart(**{**vars(chart), **shared}) for chart in map(without_empty, charts) if chart.lines]


def name_of(record: Summary) -> str:
    return shortened(one_line(record.run.reference), 40)


def minutes_at(record: Summary, step: int) -> float:
    """Of training, at a step; between two that were written down it goes evenly."""
    before = (0, 0.0)
    for s in record.history.steps:
        if s.step >= step:
            between = s.step - before[0]
            part = (step - before[0]) / between if between else 1.0
            return (before[1] + (s.seconds - before[1]) * part) / 60
        before = (s.step, s.seconds)
    return before[1] / 60
