"""How a run learned: what it finds, its table by epoch, the phases of its loss, temperature, gradients, difficulty."""

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import StatisticsError, fmean, linear_regression, median
from typing import Any

from lapclip.errors import one_line
from lapclip.runs.events import Step
from lapclip.runs.history import History, Summary
from lapclip.runs.run import read_own
from lapclip.units import count, is_number, number, percent
from lapclip.view.charts import between
from lapclip.view.document import Found, HeatMap, Query, Section, Table, columns_of, find

MAX_SNAPSHOT_BYTES = 8 << 20
MAX_IMAGE_BYTES = 1 << 16  # a 96 px JPEG has a tenth of that
MAX_QUERIES = 12
MEDIA_TYPES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PN": "image/png"}  # by the first bytes
MAX_ROWS = 40
NUM_COLUMNS = 48  # of the heat map
NUM_POINTS = 40  # the loss is divided into phases at one of these
MIN_POINTS = 5  # of a phase
STEEP, FLAT = 1.5, 0.33  # times the mean fall of the run
NOTABLE = 0.1  # share of the loss: a phase that loses more is no plateau


def found_section(summary: Summary) -> Section:
    step, queries = read_queries(summary.run.path, summary.history)
    if not queries:
        return Section("What it finds")
    first = sum(query.rank == 1 for query in queries)
    words = (
        f"Captions of the validation set, and the images found for them, best first, at step {count(step)}. "
        f"For {first} of these {len(queries)} the correct one comes first."
    )
    return Section("What it finds", [words], queries=queries)


def read_queries(folder: Path, history: History) -> tuple[int | None, list[Query]]:
    """What the last snapshot that is still there shows; older ones are thinned."""
    for evaluated in reversed(list(history.evaluations)):
        if evaluated.snapshot is None:
            continue
        path = folder / evaluated.snapshot
        try:
            queries = json.loads(read_own(path, folder, MAX_SNAPSHOT_BYTES))["queries"]
            return evaluated.step, [read_query(query, path.parent) for query in queries[:MAX_QUERIES]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return None, []


def read_query(query: dict[str, Any], folder: Path) -> Query:
    found = []
    for one in query["found"][:6]:
        try:
            content = read_own(folder / str(one["picture"]), folder, MAX_IMAGE_BYTES)
        except (OSError, ValueError):
            continue
        if media_type := MEDIA_TYPES.get(content[:3]):
            found.append(Found(media_type, content, find(one, "score"), bool(one.get("is_right"))))
    rank = find(query, "rank")
    return Query(one_line(query["text"]), None if rank is None else int(rank), found)


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


@dataclass(frozen=True)
class Stretches:
    """What the table of a run is made of."""

    kind: str  # epoch, or tenth
    rows: list[Stretch]


def stretches_of(history: History) -> Stretches:
    """Epochs, or tenths of a run of less than two epochs; of very many epochs several are one stretch."""
    kind = "epoch" if history.num_epochs >= 2 else "tenth"
    num_steps = max(1, history.step.step) if history.step else 1
    rows: list[Stretch] = []
    number, step, seconds, pairs, joules = 0, 0, 0.0, 0, 0.0  # at the end of the stretch before

    def number_of(step: Step) -> int:
        return max(1, math.ceil(step.epoch if kind == "epoch" else 10 * step.step / num_steps))

    for n, steps in groupby(history.steps, number_of):
        own = list(steps)
        last, used = own[-1], between(history.energy, own[-1].step)
        evaluated = [e for e in history.evaluations if step < e.step <= last.step][-1:]
        took = last.seconds - seconds
        rows.append(
            Stretch(
                label=label_of(kind, number + 1, n, history.num_epochs),
                step=last.step,
                loss=fmean(s.loss for s in own),
                accuracy=fmean(s.accuracy for s in own),
                temperature=last.temperature,
                seconds=took,
                pairs_per_second=(last.num_pairs_seen - pairs) / took if took > 0 else None,
                recall=evaluated[0].recall["text_to_image"]["recall@1"] if evaluated else None,
                validation_loss=evaluated[0].loss if evaluated else None,
                joules=used - joules if used > joules else None,
            )
        )
        number, step, seconds, pairs, joules = n, last.step, last.seconds, last.num_pairs_seen, used
    return Stretches(kind, rows)


def label_of(kind: str, first: int, last: int, num_epochs: float) -> str:
    if kind == "tenth":
        return f"{last}/10"
    rest = num_epochs - last + 1
    name = f"{first} to {last}" if first < last else str(last)
    return f"{name}, {rest:.0%} of it" if rest < 0.995 else name


def thinned(rows: list[Stretch]) -> list[Stretch]:
    """Few enough for a table, evenly spread over the steps; the first and the last one stay."""
    if len(rows) <= MAX_ROWS:
        return rows
    first, last = rows[0].step, rows[-1].step
    steps = [row.step for row in rows]
    targets = (first + (last - first) * n / (MAX_ROWS - 1) for n in range(MAX_ROWS))
    places = {min(bisect_left(steps, step), len(rows) - 1) for step in targets}
    return [rows[place] for place in sorted(places | {0, len(rows) - 1})]


def stretches_section(history: History, stretches: Stretches) -> Section:
    if not stretches.rows:
        return Section("By epoch")
    words = []
    if stretches.kind == "tenth":
        words.append(
            "The run has fewer than two epochs, so these are tenths of it; loss and accuracy are means."
        )
    rows = thinned(stretches.rows)
    if len(rows) < len(stretches.rows):
        words.append(f"{len(rows)} of {math.ceil(history.num_epochs):,} epochs, evenly spread.")
    columns = columns_of(
        f"{stretches.kind}, loss: number, accuracy: share, temperature: number, recall@1: share, time: seconds, "
        "pairs/s: rate, energy: joules"
    )
    cells = [
        (r.label, r.loss, r.accuracy, number(r.temperature, 4), r.recall, r.seconds, r.pairs_per_second, r.joules)
        for r in rows
    ]  # fmt: skip
    title = "By epoch" if stretches.kind == "epoch" else "By tenth of the run"
    note = f"chance of accuracy {percent(history.chance)}" if history.chance else ""
    if note and history.recall:
        note += f", of recall@1 {percent(history.recall['text_to_image']['chance@1'])}"
    return Section(title, words, tables=[Table(title, columns, cells, note)])


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
    points = loss_points(list(history.steps), kind)
    if len(points) < 2 * MIN_POINTS or any(b[0] <= a[0] for a, b in pairwise(points)):
        return []  # too few, or steps that do not advance: there is no slope
    cuts = best_cuts(points)
    fitted = [fit(points[i : j + 1])[0] for i, j in zip([0, *cuts], [*cuts, len(points) - 1], strict=True)]
    fall = (fitted[0].loss_before - fitted[-1].loss_after) / (points[-1][0] - points[0][0])
    phases: list[Phase] = []
    for line in fitted:
        name = named(line, fall)
        first = phases.pop() if phases and phases[-1].name == name else line
        phases.append(Phase(name, first.start, line.end, first.loss_before, line.loss_after))
    return phases


def named(line: Phase, fall: float) -> str:
    if fall <= 0:
        return "rising" if line.slope > 0 else "falling"
    if line.slope > FLAT * fall:
        return "rising"
    if -line.slope >= STEEP * fall:
        return "steep"
    lost = line.loss_before - line.loss_after
    is_flat = -line.slope < FLAT * fall and lost <= NOTABLE * abs(line.loss_before)
    return "plateau" if is_flat else "gradual"


def loss_points(steps: Sequence[Step], kind: str) -> list[tuple[float, float]]:
    """The mean loss of up to forty equal parts of the run, over epochs or tenths."""
    if not steps or steps[-1].step <= 0:
        return []
    parts = min(NUM_POINTS, len(steps) // 2)
    unit = (steps[-1].epoch if kind == "epoch" else 10) / steps[-1].step
    points = []
    for part in range(parts):
        own = steps[part * len(steps) // parts : (part + 1) * len(steps) // parts]
        points.append((fmean(s.step for s in own) * unit, fmean(s.loss for s in own)))
    return points


def best_cuts(points: Sequence[tuple[float, float]]) -> list[int]:
    """Where to cut so that at most three lines follow the points with the least squared error."""
    last = len(points) - 1
    error = {
        (i, j): fit(points[i : j + 1])[1] for i in range(last) for j in range(i + MIN_POINTS - 1, last + 1)
    }
    options: dict[tuple[int, ...], float] = {(): error[0, last]}
    for i in range(MIN_POINTS - 1, last - MIN_POINTS + 2):
        options[i,] = error[0, i] + error[i, last]
        for j in range(i + MIN_POINTS - 1, last - MIN_POINTS + 2):
            options[i, j] = error[0, i] + error[i, j] + error[j, last]
    # A cut must earn its place: the simplest description that is nearly as good.
    good = [cuts for cuts, total in options.items() if total <= 1.15 * min(options.values()) + 1e-12]
    return list(sorted(good, key=lambda cuts: (len(cuts), options[cuts]))[0]) if good else []


def fit(points: Sequence[tuple[float, float]]) -> tuple[Phase, float]:
    """The best line through the points, and its squared error."""
    xs, ys = zip(*points, strict=True)
    try:
        slope, at_zero = linear_regression(xs, ys)
    except StatisticsError:  # no extent
        slope, at_zero = 0.0, fmean(ys)
    heights = [at_zero + slope * x for x in xs]
    error = sum((y - height) ** 2 for y, height in zip(ys, heights, strict=True))
    return Phase("", xs[0], xs[-1], heights[0], heights[-1]), error


def phases_section(history: History, kind: str) -> Section:
    phases = phases_of(history, kind)
    if not phases:
        return Section("Phases of the loss")
    rows = [
        (p.name, f"{p.start:.1f} to {p.end:.1f}", p.loss_before, p.loss_after, f"{p.slope:+.3f}")
        for p in phases
    ]
    note = (
        "measured: up to three straight lines that follow the loss best; steep falls at least "
        f"{STEEP} times as fast as the run's mean, a plateau less than {FLAT} times"
    )
    columns = columns_of(f"phase, {kind}s, loss before: number, after: number, per {kind}: number")
    table = Table("Phases of the loss", columns, rows, note)
    return Section("Phases of the loss", tables=[table])


def gradients_section(history: History) -> Section:
    """Whether a layer's gradient vanishes or explodes is said by the run's own warnings."""
    seen = [i for i in history.inspections if i.grad_norms]
    if not seen:
        return Section("Gradients by layer")
    layers = list(dict.fromkeys(name for i in seen for name in i.grad_norms))
    columns = min(NUM_COLUMNS, len(seen))
    parts = [seen[c * len(seen) // columns : (c + 1) * len(seen) // columns] for c in range(columns)]
    norms = [[middle([i.grad_norms.get(layer) for i in part]) for part in parts] for layer in layers]
    places = [round(place * (columns - 1)) for place in (0, 0.5, 1)]
    rows = [(layer, [row[place] for place in places]) for layer, row in zip(layers, norms, strict=True)]
    header = columns_of("layer, start: number, middle: number, end: number")
    blocks = [row for row in rows if row[0].partition(".")[2].isdecimal()]
    towers = [[block for block in blocks if block[0].startswith(tower)] for tower in ("image.", "text.")]
    shown = [(layer, *ends) for tower in towers for layer, ends in ends_of(tower)]
    tables = [Table("Gradient norm by layer", header, shown)] if shown else []
    logs = [[math.log10(norm) if norm else None for norm in row] for row in norms]
    known = [log for row in logs for log in row if log is not None]
    if not known:
        return Section("Gradients by layer", tables=tables)
    low, high = min(known), max(known)
    strengths = [
        [None if log is None else (log - low) / (high - low) if high > low else 0.5 for log in row]
        for row in logs
    ]
    steps = [f"step {part[-1].step:,}" for part in (parts[0], parts[-1])]
    about = f"From {number(10**low)} (faint) to {number(10**high)} (strong), logarithmic."
    heat = HeatMap("Gradient norm of every layer over the run", about, layers, steps, strengths)
    return Section("Gradients by layer", tables=tables, heat_maps=[heat])


def ends_of(rows: list[Any]) -> list[Any]:
    """The first, the middle and the last."""
    return [rows[place] for place in sorted({0, len(rows) // 2, len(rows) - 1})] if rows else []


def middle(values: Sequence[object]) -> float | None:
    known = [float(v) for v in values if is_number(v)]
    return found if known and math.isfinite(found := median(known)) else None


def difficulty_words(num_choices: float | None) -> str:
    return (
        f"How often a caption finds its own image among {count(num_choices)}, when the others are easy, medium or hard "
        "negatives: the thirds of the images whose captions are least, somewhat and most similar (rare words count "
        "more). The captions decide, not the model."
    )


def negatives_section(history: History) -> Section:
    measured = [e for e in history.evaluations if isinstance(e.recall.get("negatives"), dict)]
    if not measured:
        return Section("By difficulty")
    levels = ("easy", "medium", "hard", "chance")
    rows = [
        (f"{name}, step {count(e.step)}", *(find(e.recall, "negatives", level) for level in levels))
        for name, e in (("first", measured[0]), ("last", measured[-1]))
    ]
    columns = columns_of("evaluation, easy: share, medium: share, hard: share, chance: share")
    table = Table("Accuracy by difficulty", columns, rows if len(measured) > 1 else rows[-1:])
    words = difficulty_words(find(measured[-1].recall, "negatives", "num_choices"))
    return Section("By difficulty", [words], tables=[table])
