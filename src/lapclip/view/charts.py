"""The curves of a run, or of several runs over one another, with the phases of training."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, TypeVar

from lapclip.errors import one_line, shortened, shortened_path
from lapclip.runs.events import Evaluated
from lapclip.runs.history import SMOOTHED, Summary
from lapclip.runs.run import RUNS
from lapclip.units import duration, is_number
from lapclip.view.document import Chart, Line, Points, find

MAX_POINTS = 600  # of a line; in a terminal each costs time that training could have
RECALL = "text → image, over the validation set"
SCHEDULE = ("warmup", "whole_from", "keep_patches")  # settings that divide a run into phases
SHARES: Any = {"is_share": True, "from_zero": True}
T = TypeVar("T")


class Phase(StrEnum):
    """A part of the training schedule; its value labels the charts."""

    WARMUP = "warm-up"
    LEARNING = "learning"
    WHOLE_IMAGES = "all patches"


def charts_of(summary: Summary) -> list[Chart]:
    """Every curve of one run; those without data are omitted."""
    history = summary.history
    steps, evaluations, last = list(history.steps), list(history.evaluations), float(history.num_steps)
    first = min(float(steps[0].step), last - 1) if steps else 0.0  # a single step needs an axis too
    first = min([first, *(float(e.step) for e in evaluations)])  # a pretrained model is evaluated before
    span = (first, last or 1.0)

    def points(name: str) -> Points:
        return [(s.step, getattr(s, name)) for s in steps]

    def both(label: str, name: str) -> list[Line]:
        means = smooth(points(name), history.recently(name))
        return [Line("each step", thin(points(name)), 0, "faint"), Line(label, thin(means), 0)]

    def level(label: str, height: float | None, number: int = 4) -> Line:
        """A reference line."""
        return Line(label, [] if height is None else [(x, height) for x in span], number, "level")

    def recall(measured: Sequence[tuple[int, dict[str, Any]]]) -> list[Line]:
        lines = []
        for place, k in enumerate((1, 10)):
            found = known((step, recall["text_to_image"][f"recall@{k}"]) for step, recall in measured)
            chance = measured[-1][1]["text_to_image"][f"chance@{k}"] if measured else None
            lines += [Line(f"recall@{k}", found, place, "dots"), level(f"chance, @{k}", chance, place)]
        return lines

    own = recall([(e.step, e.recall) for e in evaluations])
    general = recall([(e.step, e.general) for e in evaluations if e.general])
    source = shortened_path(one_line(summary.settings.get("general", "")), 40)
    validation = known((e.step, e.loss) for e in evaluations)
    loss = [*both("training", "loss"), Line("validation", validation, 1, "dots")]
    accuracy = [*both("training", "accuracy"), level("chance", history.chance)]
    norm = [*both("mean", "grad_norm"), level("clipping norm", find(summary.settings, "clip_norm"))]
    speed = [*both("mean", "pairs_per_second"), level("measured by bench", summary.bench_speed)]
    in_batch = "how often the correct item is the nearest in the batch, averaged over both directions"
    charts = [
        Chart("Loss", "of the training batches, and over the validation set", loss),
        Chart("Accuracy", in_batch, accuracy, **SHARES),
        Chart("Recall", RECALL, own, **SHARES),
        Chart(f"Recall on {source} (general)", "text → image: what the model forgets", general, **SHARES),
        Chart("Temperature", "a lower value contrasts pairs more", [Line("learned", thin(points("temperature")), 0)]),
        Chart("Learning rate", "", [Line("lr", thin(points("lr")), 0)], from_zero=True),
        Chart("Gradient norm", "before clipping", norm, is_log_y=all(s.grad_norm > 0 for s in steps)),
        Chart("Pairs per second", "without evaluation and saving", speed, from_zero=True),
    ]  # fmt: skip
    return with_data(charts, bands=phases(summary), marks=marks_of(summary), span=span)


def with_data(charts: Iterable[Chart], **shared: Any) -> list[Chart]:
    """Those charts that have more than reference lines, without their empty lines."""
    full = [replace(chart, lines=[line for line in chart.lines if line.points], **shared) for chart in charts]
    return [chart for chart in full if any(line.look != "level" for line in chart.lines)]


def known(points: Iterable[tuple[float, float | None]]) -> Points:
    return [(x, y) for x, y in points if is_number(y)]


def smooth(points: Points, last: float | None = None) -> Points:
    """The mean over about a thirtieth of the run around each point; `last` is the mean that is told elsewhere."""
    reach = len(points) // 60 + (len(points) > 15)
    sums = list(accumulate((y for _, y in points), initial=0.0))
    smoothed = []
    for place, (x, _) in enumerate(points):
        near = min(reach, place, len(points) - 1 - place)  # symmetric: the ends are not pulled inwards
        low, high = place - near, place + near + 1
        smoothed.append((x, (sums[high] - sums[low]) / (high - low)))
    return smoothed if last is None else [*smoothed[:-1], *((x, last) for x, _ in points[-1:])]


def thin(points: list[T], most: int = MAX_POINTS) -> list[T]:
    """At most so many, evenly spread, the last one among them."""
    every = -(-len(points) // most) or 1
    kept = points[::every]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def phases(summary: Summary) -> list[tuple[float, float, Phase]]:
    """From step, to step and phase, by the progress at each step; a resumed run may go through one twice."""
    warmup, whole_from, keeps = (find(summary.settings, name) for name in SCHEDULE)
    bands: list[tuple[float, float, Phase]] = []
    for step in summary.history.steps:
        is_whole = whole_from is not None and (keeps or 1) < 1 and step.progress > whole_from
        phase = Phase.WHOLE_IMAGES if is_whole else Phase.LEARNING
        phase = Phase.WARMUP if step.progress <= (warmup or 0) else phase
        start = bands[-1][1] if bands else step.step
        if bands and bands[-1][2] == phase:
            start = bands.pop()[0]
        bands.append((start, step.step, phase))
    return bands


def phases_in_words(summary: Summary) -> list[str]:
    """What the shaded parts of the charts are."""
    seen = {phase for _, _, phase in phases(summary)}
    warmup, whole_from, keeps = (find(summary.settings, name) or 0.0 for name in SCHEDULE)
    said = []
    if Phase.WARMUP in seen and warmup:
        said.append(f"the warm-up, {warmup:.0%} of the run, in which the learning rate rises")
    if Phase.WHOLE_IMAGES in seen:
        said.append(f"the part from {whole_from:.0%} on, with all patches instead of {keeps:.0%} of them")
    return [f"Shaded: {'; '.join(said)}."] if said else []


def marks_of(summary: Summary) -> list[tuple[float, str]]:
    history = summary.history
    marks = [(float(start.step), "resumed") for start in history.starts[1:] if start.step]
    for pause in history.pauses:
        marks.append((pause.step, "paused" if pause.seconds is None else f"paused {duration(pause.seconds)}"))
    return [*marks, (history.num_steps, "end" if summary.is_over else "now")] if history.step else marks


def overlaid(summaries: Sequence[Summary]) -> list[Chart]:
    """The curves of several runs over the minutes of training, which they all have."""
    histories, names = [summary.history for summary in summaries], [name_of(summary) for summary in summaries]
    most = max(100, 1600 // len(summaries))

    def of_steps(name: str) -> list[Line]:
        curves = [[(s.seconds / 60, getattr(s, name)) for s in history.steps] for history in histories]
        ends = [history.recently(name) if name in SMOOTHED else None for history in histories]
        return [Line(names[n], thin(smooth(points, ends[n]), most), n) for n, points in enumerate(curves)]

    def of_evaluations(value: Callable[[Evaluated], float | None]) -> list[Line]:
        lines = []
        for number, history in enumerate(histories):
            clock = [(s.step, s.seconds / 60) for s in history.steps]
            points = known((between(clock, e.step), value(e)) for e in history.evaluations)
            lines.append(Line(names[number], points, number, "dots"))
        return lines

    def of_recall(k: int) -> list[Line]:
        return of_evaluations(lambda e: e.recall["text_to_image"][f"recall@{k}"])

    charts = [
        Chart("Loss", "of the training batches", of_steps("loss")),
        Chart("Validation loss", "over the validation set", of_evaluations(lambda e: e.loss)),
        Chart("Recall@1", RECALL, of_recall(1), **SHARES),
        Chart("Recall@10", RECALL, of_recall(10), **SHARES),
        Chart("Accuracy", "in the batch", of_steps("accuracy"), **SHARES),
        Chart("Temperature", "", of_steps("temperature")),
        Chart("Learning rate", "", of_steps("lr"), from_zero=True),
        Chart("Gradient norm", "before clipping", of_steps("grad_norm"), is_log_y=True),
        Chart("Pairs per second", "", of_steps("pairs_per_second"), from_zero=True),
    ]
    longest = max(history.seconds / 60 for history in histories)
    return with_data(charts, axis="minutes of training", span=(0.0, longest or 1.0))


def name_of(summary: Summary) -> str:
    """Of a run in `runs/` here its name, else its path; to be read, not to be typed."""
    return shortened(one_line(str(summary.run.path).removeprefix(f"{RUNS}/")), 40)


def between(marks: Iterable[tuple[int, float]], step: int) -> float:
    """The value at a step, from 0 at step 0 and linear between the marks."""
    before = (0, 0.0)
    for mark in marks:
        if mark[0] >= step:
            width = mark[0] - before[0]
            return before[1] + (mark[1] - before[1]) * ((step - before[0]) / width if width else 1.0)
        before = mark
    return before[1]
