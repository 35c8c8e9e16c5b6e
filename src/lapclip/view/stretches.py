"""A run in stretches, epochs or tenths, and the phases its loss went through."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from lapclip.runs.events import Step
from lapclip.runs.history import Summary, find

MOST_ROWS = 40
NUM_POINTS = 40  # the loss is cut into phases at one of these
LEAST_POINTS = 5  # of a phase
STEEP, FLAT = 1.5, 0.33  # times the mean fall of the run
NOTABLE = 0.1  # of the loss: who loses that much is on no plateau


@dataclass(frozen=True)
class Stretch:
    """An epoch, or a tenth of a run."""

    label: str
    step: int  # its last one
    loss: float  # mean
    accuracy: float  # mean
    temperature: float  # at its end
    seconds: float  # of training
    pairs_per_second: float | None
    recall: float | None  # recall@1, words -> image, at the last evaluation in it
    validation_loss: float | None
    joules: float | None


@dataclass(frozen=True)
class Stretches:
    """What the table of a run is made of."""

    kind: str  # epoch, or tenth
    rows: list[Stretch]


def stretches_of(record: Summary) -> Stretches:
    """Epochs; tenths of what was trained when it is less than two epochs."""
    last = record.history.step
    if last is None:
        return Stretches("tenth", [])
    return (
        Stretches("epoch", epochs(record))
        if record.history.num_epochs >= 2
        else Stretches("tenth", tenths(record))
    )


def epochs(record: Summary) -> list[Stretch]:
    history = record.history
    started = history.started
    rows = []
    for number, epoch in sorted(history.epochs.items()):
        rest = history.num_epochs - number + 1
        part = f", {rest:.0%} of it" if rest < 0.995 else ""
        pairs = (epoch.step - epoch.step_before) * (started.batch_size if started else 0)
        evaluated = epoch.evaluated
        rows.append(
            Stretch(
                f"{number}{part}",
                epoch.step,
                epoch.loss,
                epoch.accuracy,
                epoch.temperature,
                epoch.seconds,
                pairs / epoch.seconds if pairs and epoch.seconds > 0 else None,
                find(evaluated.recall, "text_to_image", "recall@1") if evaluated else None,
                evaluated.loss if evaluated else None,
                epoch.joules,
            )
        )
    return rows


def tenths(record: Summary) -> list[Stretch]:
    steps = list(record.history.steps)
    rows = []
    before: Step | None = None
    low = 0.0
    for tenth in range(1, 11):
        high = steps[-1].step * tenth / 10
        own = [step for step in steps if low < step.step <= high]
        if own:
            rows.append(stretch_of(f"{tenth}/10", own, before, record))
            before = own[-1]
        low = high
    return rows


def stretch_of(label: str, own: Sequence[Step], before: Step | None, record: Summary) -> Stretch:
    last, first_step = own[-1], before.step if before else 0
    seconds = last.seconds - (before.seconds if before else 0.0)
    pairs = last.num_pairs_seen - (before.num_pairs_seen if before else 0)
    evaluated = [e for e in record.history.evaluations if first_step < e.step <= last.step]
    return Stretch(
        label,
        last.step,
        fmean(step.loss for step in own),
        fmean(step.accuracy for step in own),
        last.temperature,
        seconds,
        pairs / seconds if seconds > 0 else None,
        find(evaluated[-1].recall, "text_to_image", "recall@1") if evaluated else None,
        evaluated[-1].loss if evaluated else None,
        joules_between(list(record.history.energy), first_step, last.step),
    )


def joules_between(energy: Sequence[tuple[int, float]], first: int, last: int) -> float | None:
    """Energy between two steps, None where the power was not read; between readings it grows evenly."""
    joules = joules_until(energy, last) - joules_until(energy, first)
    return joules if joules > 0 else None


def joules_until(energy: Sequence[tuple[int, float]], step: int) -> float:
    before = (0, 0.0)
    for mark in energy:
        if mark[0] >= step:
            between = mark[0] - before[0]
            return before[1] + (mark[1] - before[1]) * ((step - before[0]) / between if between else 1.0)
        before = mark
    return before[1]


def thinned(rows: list[Stretch]) -> list[Stretch]:
    """Few enough for a table, evenly spread over the steps; the first and the last one stay."""
    if len(rows) <= MOST_ROWS:
        return rows
    first, last = rows[0].step, rows[-1].step
    wanted = (first + (last - first) * n / (MOST_ROWS - 1) for n in range(MOST_ROWS))
    steps = [row.step for row in rows]
    places = {min(bisect_left(steps, step), len(rows) - 1) for step in wanted}
    return [rows[place] for place in sorted(places | {0, len(rows) - 1})]


@dataclass(frozen=True)
class Phase:
    """A part of the run over which the loss fell along about one line."""

    name: str  # steep, gradual, plateau or rising
    start: float  # in epochs, or in tenths
    end: float
    loss_before: float
    loss_after: float

    @property
    def slope(self) -> float:
        """Per epoch, or per tenth."""
        return (self.loss_after - self.loss_before) / (self.end - self.start)


def phases_of(record: Summary, kind: str) -> list[Phase]:
    """At most three lines that follow the loss best, named by how fast it falls beside the run's mean."""
    points = loss_points(list(record.history.steps), kind)
    if len(points) < 2 * LEAST_POINTS or any(b[0] <= a[0] for a, b in pairwise(points)):
        return []  # too few, or steps that do not go on: there is no slope
    cuts = best_cuts(points)
    fitted = [fit(points[i : j + 1]) for i, j in zip([0, *cuts], [*cuts, len(points) - 1], strict=True)]
    start, end = points[0][0], points[-1][0]
    fall = (fitted[0][2] - fitted[-1][3]) / (end - start)
    phases: list[Phase] = []
    for first, last, before, after in fitted:
        name = named((after - before) / (last - first), fall)
        if name == "plateau" and before - after > NOTABLE * abs(before):
            name = "gradual"  # slow beside the rest of the run, and still a good part of the loss
        phase = Phase(name, first, last, before, after)
        if phases and phases[-1].name == phase.name:
            earlier = phases.pop()
            phase = Phase(phase.name, earlier.start, last, earlier.loss_before, after)
        phases.append(phase)
    return phases


def named(slope: float, fall: float) -> str:
    if fall <= 0:
        return "rising" if slope > 0 else "falling"
    if slope > FLAT * fall:
        return "rising"
    return "steep" if -slope >= STEEP * fall else "gradual" if -slope >= FLAT * fall else "plateau"


def loss_points(steps: Sequence[Step], kind: str) -> list[tuple[float, float]]:
    """The mean loss of up to forty equal parts of the run, over epochs or tenths."""
    last = steps[-1] if steps else None
    if last is None or last.step <= 0:
        return []
    parts = min(NUM_POINTS, len(steps) // 2)
    unit = last.epoch / last.step if kind == "epoch" else 10 / last.step
    points = []
    for part in range(parts):
        own = steps[part * len(steps) // parts : (part + 1) * len(steps) // parts]
        points.append((fmean(s.step for s in own) * unit, fmean(s.loss for s in own)))
    return points


def best_cuts(points: Sequence[tuple[float, float]]) -> list[int]:
    """Where to cut so that three lines follow the points with the least squared error."""
    last = len(points) - 1
    error = {
        (i, j): squared_error(points[i : j + 1])
        for i in range(last)
        for j in range(i + LEAST_POINTS - 1, last + 1)
    }
    options: dict[tuple[int, ...], float] = {(): error[0, last]}
    for i in range(LEAST_POINTS - 1, last - LEAST_POINTS + 2):
        options[i,] = error[0, i] + error[i, last]
        for j in range(i + LEAST_POINTS - 1, last - LEAST_POINTS + 2):
            options[i, j] = error[0, i] + error[i, j] + error[j, last]
    best = min(options.values())
    # A cut must earn its place: the simplest description that is nearly as good.
    for cuts in sorted(options, key=lambda cuts: (len(cuts), options[cuts])):
        if options[cuts] <= 1.15 * best + 1e-12:
            return list(cuts)
    return []


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The middle of the points and the slope of the line that fits them best."""
    x, y = fmean(p[0] for p in points), fmean(p[1] for p in points)
    spread = sum((p[0] - x) ** 2 for p in points)
    return x, y, sum((p[0] - x) * (p[1] - y) for p in points) / spread if spread else 0.0


def squared_error(points: Sequence[tuple[float, float]]) -> float:
    x, y, slope = line_through(points)
    return sum((p[1] - y - slope * (p[0] - x)) ** 2 for p in points)


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Where the best line begins and ends, and its height there."""
    x, y, slope = line_through(points)
    first, last = points[0][0], points[-1][0]
    return first, last, y + slope * (first - x), y + slope * (last - x)
