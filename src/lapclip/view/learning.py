"""How a run learned: what it finds, its table by epoch, the phases of its loss, temperature, gradients, difficulty."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any, TypeVar

from lapclip.errors import one_line
from lapclip.runs.events import Step
from lapclip.runs.history import History, Summary, mean_recall
from lapclip.runs.run import read_own
from lapclip.units import count, is_number, number, percent
from lapclip.view.charts import between
from lapclip.view.document import Found, HeatMap, Query, Section, Table, columns_of, find

MAX_SNAPSHOT_BYTES = 8 << 20
MAX_IMAGE_BYTES = 1 << 16  # a 96 px JPEG has a tenth of that
MAX_QUERIES = 12
MEDIA_TYPES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PN": "image/png"}  # by the first bytes
MAX_ROWS = 40  # of the table by epoch
NUM_COLUMNS = 48  # of the heat map
NUM_POINTS = 40  # the loss is divided into phases at one of these
MIN_POINTS = 5  # of a phase
STEEP, FLAT = 1.5, 0.33  # times the mean fall of the run
NOTABLE = 0.1  # share of the loss: a phase that loses more is no plateau
LEVELS = ("easy", "medium", "hard", "chance")
T = TypeVar("T")


def found_section(summary: Summary) -> Section:
    """What the last snapshot that is still there shows; older ones are thinned."""
    for evaluated in reversed(list(summary.history.evaluations)):
        queries = read_queries(summary.run.path, evaluated.snapshot) if evaluated.snapshot else []
        queries = list({query.text: query for query in queries}.values())  # a class name is asked only once
        if queries:
            first = sum(query.rank == 1 for query in queries)
            words = (
                "Captions of the validation set, and the images found for them, best first, at step "
                f"{count(evaluated.step)}. For {first} of these {len(queries)}, a correct image is first."
            )
            return Section("Retrieval examples", [words], queries=queries)
    return Section("Retrieval examples")


def read_queries(folder: Path, snapshot: str) -> list[Query]:
    """None where the snapshot is gone, damaged, or no small file of this run."""
    path, queries = folder / snapshot, []
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        for query in json.loads(read_own(path, folder, MAX_SNAPSHOT_BYTES))["queries"][:MAX_QUERIES]:
            found = []
            for one in query["found"][:6]:
                with suppress(OSError, ValueError):
                    content = read_own(path.parent / str(one["picture"]), path.parent, MAX_IMAGE_BYTES)
                    if kind := MEDIA_TYPES.get(content[:3]):
                        found.append(Found(kind, content, find(one, "score"), bool(one.get("is_right"))))
            rank = find(query, "rank")
            queries.append(Query(one_line(query["text"]), None if rank is None else int(rank), found))
    return queries


def interpolation_section(history: History) -> Section:
    title = "Between the pretrained and the trained model"
    if (event := history.interpolated) is None:
        return Section(title)
    words = (
        "Weighted means of the weights of both models (WiSE-FT). The one with the highest mean recall over the "
        "validation set is kept, if it finds at least one image more than the trained model."
    )
    rows = []
    for place, (alpha, recall) in enumerate(zip(event.alphas, event.recall, strict=True)):
        found, other = recall["text_to_image"], event.general and event.general[place]["text_to_image"]
        row = [f"{alpha:g}", mean_recall(recall), found["recall@1"], found["recall@10"]]
        rows.append([*row, *([other["recall@10"]] if other else []), place == event.place])
    general = ", general recall@10: share" * bool(event.general)
    shares = "mean recall: share, recall@1: share, recall@10: share"
    columns = columns_of(f"share of the trained model, {shares}{general}, kept")
    note = "mean recall: of both directions at 1, 5 and 10; recall: text → image"
    return Section(title, [words], tables=[Table(title, columns, rows, note)])


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
    recall: float | None  # recall@1, text to image, at the last evaluation in it
    validation_loss: float | None
    joules: float | None


def stretches_of(history: History, most: int = MAX_ROWS) -> tuple[str, list[Stretch]]:
    """Epochs, several to a row when there are more than so many; tenths when less than two epochs were trained."""
    kind = "epoch" if history.num_epochs >= 2 else "tenth"
    each = math.ceil(history.num_epochs / most) if kind == "epoch" else 1  # epochs to a row
    last_step = history.step.step if history.step else 0
    parts: dict[int, list[Step]] = {}
    for step in history.steps:
        done = step.epoch / each if kind == "epoch" else 10 * step.step / max(1, last_step)
        parts.setdefault(max(1, math.ceil(done)), []).append(step)
    begins = [own[0].step for own in parts.values()] + [math.inf]
    rows: list[Stretch] = []
    step_before, seconds_before, pairs_before = 0, 0.0, 0
    for place, (part, own) in enumerate(parts.items()):
        last = own[-1]
        seconds, pairs = last.seconds - seconds_before, last.num_pairs_seen - pairs_before
        joules = between(history.energy, last.step) - between(history.energy, step_before)
        evaluated = [e for e in history.evaluations if begins[place] <= e.step < begins[place + 1]][-1:]
        row = Stretch(
            label=epochs_words(part, each, history.num_epochs) if kind == "epoch" else f"{part}/10",
            step=last.step,
            loss=fmean(step.loss for step in own),
            accuracy=fmean(step.accuracy for step in own),
            temperature=last.temperature,
            seconds=seconds,
            pairs_per_second=pairs / seconds if pairs > 0 and seconds > 0 else None,
            recall=evaluated[0].recall["text_to_image"]["recall@1"] if evaluated else None,
            validation_loss=evaluated[0].loss if evaluated else None,
            joules=joules if joules > 0 else None,
        )
        rows.append(row)
        step_before, seconds_before, pairs_before = last.step, last.seconds, last.num_pairs_seen
    return kind, rows


def epochs_words(part: int, each: int, num_epochs: float) -> str:
    first, last = (part - 1) * each + 1, min(part * each, math.ceil(num_epochs))
    if last > first:
        return f"{first:,} to {last:,}"
    done = num_epochs - first + 1
    return str(first) if done >= 0.995 else f"{first}, {done:.0%} of it"


def stretches_section(history: History, kind: str, stretches: Sequence[Stretch]) -> Section:
    if not stretches:
        return Section("By epoch")
    words = ["The run has fewer than two epochs, so these are tenths of it; loss and accuracy are means."]
    columns = columns_of(
        f"{kind}, loss: number, accuracy: share, temperature: number, recall@1: share, time: seconds, "
        "pairs/s: rate, energy: joules"
    )
    rows = []
    for r in stretches:
        learned = (r.label, r.loss, r.accuracy, number(r.temperature, 4), r.recall)
        rows.append((*learned, r.seconds, r.pairs_per_second, r.joules))
    title = "By epoch" if kind == "epoch" else "By tenth of the run"
    note = f"chance: accuracy {percent(history.chance)}" if history.chance else ""
    if note and history.recall:
        note += f", recall@1 {percent(history.recall['text_to_image']['chance@1'])}"
    return Section(title, words if kind == "tenth" else [], tables=[Table(title, columns, rows, note)])


@dataclass(frozen=True)
class Phase:
    """A part of the run over which the loss fell along about one line."""

    name: str  # steep, gradual, plateau, rising or falling
    start: float  # in epochs, or in tenths
    end: float
    loss_before: float
    loss_after: float

    @property
    def slope(self) -> float:
        """Per epoch, or per tenth."""
        return (self.loss_after - self.loss_before) / (self.end - self.start)


def phases_of(history: History, kind: str) -> list[Phase]:
    """At most three lines that follow the loss best, named by how fast it falls compared with the run's mean."""
    steps = list(history.steps)
    unit = (steps[-1].epoch if kind == "epoch" else 10) / max(1, steps[-1].step) if steps else 0.0
    parts = split(steps, min(NUM_POINTS, len(steps) // 2))  # each is one point: its mean loss
    points = [(fmean(s.step for s in own) * unit, fmean(s.loss for s in own)) for own in parts]
    last = len(points) - 1
    if len(points) < 2 * MIN_POINTS or any(b[0] <= a[0] for a, b in pairwise(points)):
        return []  # too few, or steps that do not advance: there is no slope
    lines = {(i, j): fit(points[i : j + 1]) for i in range(last) for j in range(i + MIN_POINTS - 1, last + 1)}
    errors: dict[tuple[tuple[int, int], ...], float] = {}  # by the ends of one, two or three lines
    for num_cuts in range(3):
        for cuts in combinations(range(1, last), num_cuts):
            ends = tuple(pairwise((0, *cuts, last)))
            if all(end in lines for end in ends):
                errors[ends] = sum(lines[end][1] for end in ends)
    # A cut must earn its place: the simplest description that is nearly as good.
    limit = 1.15 * min(errors.values()) + 1e-12
    good = [ends for ends, error in errors.items() if error <= limit] or [((0, last),)]
    fitted = [lines[end][0] for end in min(good, key=lambda ends: (len(ends), errors[ends]))]
    fall = (fitted[0].loss_before - fitted[-1].loss_after) / (points[-1][0] - points[0][0])
    phases: list[Phase] = []
    for line in fitted:
        name = named(line, fall)
        first = phases.pop() if phases and phases[-1].name == name else line
        phases.append(Phase(name, first.start, line.end, first.loss_before, line.loss_after))
    return phases


def named(line: Phase, fall: float) -> str:
    if fall <= 0 or line.slope > FLAT * fall:
        return "rising" if line.slope > 0 else "falling"
    if -line.slope >= STEEP * fall:
        return "steep"
    lost = line.loss_before - line.loss_after
    is_flat = -line.slope < FLAT * fall and lost <= NOTABLE * abs(line.loss_before)
    return "plateau" if is_flat else "gradual"


def split(items: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """In parts of about equal length."""
    ends = [part * len(items) // num_parts for part in range(num_parts + 1)] if num_parts else []
    return [items[start:end] for start, end in pairwise(ends)]


def fit(points: Sequence[tuple[float, float]]) -> tuple[Phase, float]:
    """The best line through the points, and its squared error."""
    xs, ys = zip(*points, strict=True)
    slope, at_zero = linear_regression(xs, ys)
    # Within the losses that were measured: a line may go on below zero.
    heights = [min(max(at_zero + slope * x, min(ys)), max(ys)) for x in xs]
    error = sum((y - height) ** 2 for y, height in zip(ys, heights, strict=True))
    return Phase("", xs[0], xs[-1], heights[0], heights[-1]), error


def phases_section(history: History, kind: str) -> Section:
    rows = [
        (p.name, f"{p.start:.1f} to {p.end:.1f}", p.loss_before, p.loss_after, f"{p.slope:+.3f}")
        for p in phases_of(history, kind)
    ]
    note = (
        f"up to three straight lines fitted to the loss; steep falls at least {STEEP} times as fast as the run's mean, "
        f"a plateau less than {FLAT} times, and by at most {NOTABLE:.0%} of the loss"
    )
    columns = columns_of(f"phase, {kind}s, loss before: number, after: number, per {kind}: number")
    return Section("Phases of the loss", tables=[Table("Phases of the loss", columns, rows, note)])


def gradients_section(history: History) -> Section:
    """Whether a layer's gradient vanishes or explodes is said by the run's own warnings."""
    seen = [i for i in history.inspections if i.grad_norms]
    parts = split(seen, min(NUM_COLUMNS, len(seen)))
    layers = list(dict.fromkeys(name for i in seen for name in i.grad_norms))
    norms = [[middle([i.grad_norms.get(layer) for i in part]) for part in parts] for layer in layers]
    logs = [[math.log10(norm) if norm else None for norm in row] for row in norms]
    known = [log for row in logs for log in row if log is not None]
    if not known:
        return Section("Gradients by layer")
    low, high = min(known), max(known)
    strengths = [
        [None if log is None else (log - low) / (high - low) if high > low else 0.5 for log in row]
        for row in logs
    ]
    rows = [(layer, row[0], row[len(row) // 2], row[-1]) for layer, row in zip(layers, norms, strict=True)]
    columns = columns_of("layer, start: number, middle: number, end: number")
    steps = [f"step {part[-1].step:,}" for part in (parts[0], parts[-1])]
    about = f"From {number(10**low)} (faint) to {number(10**high)} (strong), logarithmic."
    heat = HeatMap("Gradient norm of every layer over the run", about, layers, steps, strengths)
    table = Table("Gradient norm by layer", columns, rows)
    return Section("Gradients by layer", tables=[table], heat_maps=[heat])


def middle(values: Sequence[object]) -> float | None:
    known = [float(v) for v in values if is_number(v)]
    return found if known and math.isfinite(found := median(known)) else None


def negatives_section(history: History) -> Section:
    measured = [e for e in history.evaluations if isinstance(e.recall.get("negatives"), dict)]
    ends = {"first": measured[0], "last": measured[-1]} if measured else {}
    return difficulty_section({f"{n}, step {count(e.step)}": e.recall["negatives"] for n, e in ends.items()})


def difficulty_section(measured: Mapping[str, Any]) -> Section:
    """The accuracies of evaluations by their name; of all of them the same choices."""
    rows = [(name, *(find(one, level) for level in LEVELS)) for name, one in measured.items()]
    if not rows:
        return Section("By difficulty")
    num_choices = find(list(measured.values())[-1], "num_choices")
    words = (
        f"How often a caption finds its own image among {count(num_choices)}, when the others are easy, medium or hard "
        "negatives: the thirds of the images whose captions are least, somewhat and most similar (rare words count "
        "more). This depends on the captions only."
    )
    columns = columns_of(", ".join(["evaluation", *(f"{level}: share" for level in LEVELS)]))
    return Section("By difficulty", [words], tables=[Table("Accuracy by difficulty", columns, rows)])
