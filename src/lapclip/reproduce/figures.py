"""The documents' figures beside those of a run of their experiment: whether they agree, and why."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median
from typing import Any

from lapclip.autotune.plans import Candidate
from lapclip.bench.steps import StepsResult
from lapclip.runs.history import Summary
from lapclip.units import count, duration, energy, is_number, number, percent, plural, size
from lapclip.view.document import find
from lapclip.view.learning import Stretch, stretches_of

NUM_PARAMETERS, NUM_EPOCHS, NUM_STEPS, BATCH_SIZE, LR = 76_736_001, 15, 18, 12, 3e-4  # steps: of an epoch
# By epoch: training loss, training accuracy, temperature; validation accuracy.
EPOCHS = {1: (3.25, 0.079, 0.07), 5: (2.75, 0.121, 0.11), 10: (2.15, 0.182, 0.15), 15: (1.89, 0.227, 0.18)}
VALIDATION = {1: 0.125, 5: 0.146, 10: 0.125, 15: 0.125}
# Shares of a step; the documents' loading and preprocessing are one part here.
PARTS = {"data": 0.044, "transfer": 0.0, "forward": 0.40, "backward": 0.513, "optimizer": 0.043}
# Layers by our names; at epoch 10.
GRADIENTS = {
    "image.0": 0.023,
    "image.6": 0.018,
    "image.11": 0.015,
    "text.0": 0.031,
    "text.5": 0.027,
    "image.out": 0.042,
}
NEGATIVES = {"easy": 0.95, "medium": 0.28, "hard": 0.08}
FULL_ONLY = "needs the full command, without `--quick`"


class Verdict(StrEnum):
    """What a row comes to."""

    AGREES = "agrees"
    DIFFERS = "differs"
    CANNOT_HOLD = "cannot hold"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """One figure of the documents, and ours."""

    figure: str
    documents: str
    lapclip: str
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Evidence:
    """What the rows are made from; what was not measured is None or empty."""

    summary: Summary  # of the documents' experiment
    own: Summary  # of as many minutes with lapclip's data and recipe
    steps: StepsResult | None = None  # execution plans of this model
    bandwidth_gbs: float | None = None
    # By device and operation, the size from which on it is faster than the CPU.
    crossovers: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @property
    def epochs(self) -> dict[int, Stretch]:
        kind, stretches = stretches_of(self.summary.history, NUM_EPOCHS)
        return {int(s.label): s for s in stretches if s.label.isdecimal()} if kind == "epoch" else {}

    def fastest(self, is_wanted: Callable[[Candidate], bool]) -> float | None:
        """Pairs a second of the fastest execution plan of a kind."""
        timed = self.steps.measured.candidates if self.steps else ()
        speeds = [c.pairs_per_second for c in timed if c.pairs_per_second and not c.rejected and is_wanted(c)]
        return max(speeds, default=None)


def compared(
    figure: str,
    theirs: float | tuple[float, float],
    ours: float | None,
    show: Callable[[float], str],
    why: str,
    *,
    within: float = 0.1,
    missing: str = FULL_ONLY,
    cannot: str = "",
) -> Row:
    """A number beside the documents', or beside their range; `within` is a share of theirs, of a share in points."""
    low, high = theirs if isinstance(theirs, tuple) else (theirs, theirs)
    documents = show(low) if low == high else f"{show(low)} to {show(high)}"
    shown = str(Verdict.NOT_MEASURED) if ours is None else show(ours)
    if cannot:
        return Row(figure, documents, shown, Verdict.CANNOT_HOLD, cannot)
    if ours is None:
        return Row(figure, documents, shown, Verdict.NOT_MEASURED, missing)
    margins = (within, within) if show is percent else (within * low, within * high)
    agrees = low - margins[0] <= ours <= high + margins[1]
    return Row(figure, documents, shown, Verdict.AGREES if agrees else Verdict.DIFFERS, why)


def rows_of(evidence: Evidence) -> list[Row]:
    """Every figure of the documents."""
    kinds = (time_rows, learning_rows, validation_rows, memory_rows, step_rows, gradient_rows, negative_rows)
    return [row for rows in (*kinds, device_rows, energy_rows) for row in rows(evidence)]


def time_rows(evidence: Evidence) -> Iterator[Row]:
    history, machine = evidence.summary.history, evidence.summary.machine
    started, epochs = history.started, evidence.epochs
    threads = started.threads if started else 0
    here = f"on another machine: {machine.get('chip', 'unknown')}, {plural(threads, 'thread')}"
    shape = "512 wide, 12 layers and 8 heads in both towers; the towers they draw would have 105 million"
    parameters = started.num_parameters if started else None
    yield compared("parameters", NUM_PARAMETERS, parameters, count, shape, within=0)
    each = median(e.seconds for e in epochs.values()) if epochs else None
    seconds = "{:.3g} s".format
    yield compared("time of an epoch", (155.0, 162.0), each, seconds, here)
    yield compared("time of a batch", (7.0, 9.0), each and each / NUM_STEPS, seconds, here)
    whole = history.seconds if len(epochs) == NUM_EPOCHS else None
    yield compared("time of 15 epochs", 39 * 60.0, whole, duration, here)
    saved = history.saved.bytes if history.saved else None
    bytes_of = "the weights and the two averages of AdamW: 3 numbers of 4 bytes for each parameter"
    yield compared("checkpoint", 920e6, saved, size, bytes_of, within=0.02)


def learning_rows(evidence: Evidence) -> Iterator[Row]:
    epochs = evidence.epochs
    guessed = "guessing has a loss of ln 12 = 2.48, knowing the category about ln 3 = 1.10; less is memorised"
    learned = "guessing gives 8.3%, the category alone 32% at most; more than that is memorised"
    initial = "the initial value, as in CLIP"
    for n, (loss, accuracy, temperature) in EPOCHS.items():
        own: dict[str, Any] = vars(epochs[n]) if n in epochs else {}
        yield compared(f"training loss, epoch {n}", loss, own.get("loss"), number, guessed)
        figure = f"training accuracy, epoch {n}"
        yield compared(figure, accuracy, own.get("accuracy"), percent, learned, within=0.03)
        # AdamW changes a single parameter by about the learning rate in a step, and by no more.
        most = EPOCHS[1][2] * math.exp(n * NUM_STEPS * LR)
        bound = f"AdamW moves its logarithm by at most {LR:g} a step: {most:.3f} after {n * NUM_STEPS} steps"
        cannot = bound if temperature > 1.1 * most else ""
        ours = own.get("temperature")
        yield compared(f"temperature, epoch {n}", temperature, ours, number, initial, cannot=cannot)


def validation_rows(evidence: Evidence) -> Iterator[Row]:
    few = "over 24 pairs in two batches of 12: guessing gives 8.3%, and each answer counts for 2 points"
    evaluated = {e.step: e for e in evidence.summary.history.evaluations}
    for n, theirs in VALIDATION.items():
        event = evaluated.get(n * NUM_STEPS)
        ours = find(event.recall, "in_batch", "accuracy") if event else None
        yield compared(f"validation accuracy, epoch {n}", theirs, ours, percent, few, within=0.11)
    rising = "theirs rises, which is over-fitting; the documents call it good generalisation"
    for n, theirs in ((1, 2.77), (NUM_EPOCHS, 5.25)):
        event = evaluated.get(n * NUM_STEPS)
        yield compared(f"validation loss, epoch {n}", theirs, event.loss if event else None, number, rising)


def memory_rows(evidence: Evidence) -> Iterator[Row]:
    history = evidence.summary.history
    held = history.memory_by_kind
    whole = "the whole process, torch and its libraries included"
    yield compared("peak memory", 3.0e9, history.peak_memory, size, whole, within=0.2)
    numbers = "76.7 million numbers of 4 bytes are 0.31 GB"
    yield compared("memory of parameters", 2.5e9, held.get("parameters"), size, "", cannot=numbers)
    yield compared("memory of gradients", 0.3e9, held.get("gradients"), size, "one number for each parameter")
    averages = "AdamW keeps two numbers for each parameter: 0.61 GB"
    yield compared("memory of the optimizer", 0.1e9, held.get("optimizer"), size, "", cannot=averages)
    yield compared(
        "memory of data", 0.1e9, held.get("data"), size, "batches of 12 images of 224 px, and those prepared"
    )
    if activations := held.get("activations"):
        rest = "most of what the documents count as parameters"
        yield Row("memory of activations", "not listed", size(activations), Verdict.DIFFERS, rest)


def step_rows(evidence: Evidence) -> Iterator[Row]:
    own = evidence.summary.history.mean_parts
    why = "means of profiled steps; the backward pass computes some activations again, to save memory"
    for part, theirs in PARTS.items():
        ours = own[part][0] if own else None
        yield compared(f"share of a step: {part}", theirs, ours, percent, why, within=0.03)


def gradient_rows(evidence: Evidence) -> Iterator[Row]:
    """The documents' are of epoch 10."""
    first, last = 9 * NUM_STEPS, 10 * NUM_STEPS
    seen = [i.grad_norms for i in evidence.summary.history.inspections if first < i.step <= last]
    why = "before clipping, medians of epoch 10; it depends on the initial weights"
    for layer, theirs in GRADIENTS.items():
        norms = [norms[layer] for norms in seen if is_number(norms.get(layer))]
        ours = median(norms) if norms else None
        figure = f"gradient norm of `{layer}`, epoch 10"
        yield compared(figure, theirs, ours, number, why, within=0.5)


def negative_rows(evidence: Evidence) -> Iterator[Row]:
    recall = evidence.own.history.recall or {}
    why = "lapclip's own run, on other data: 24 pairs are too few to divide"
    for level, theirs in NEGATIVES.items():
        ours = find(recall, "negatives", level)
        yield compared(f"accuracy among {level} negatives", theirs, ours, percent, why, within=0)


def device_rows(evidence: Evidence) -> Iterator[Row]:
    cpu = evidence.fastest(lambda c: c.plan.device == "cpu" and c.plan.precision == "fp32")
    other = evidence.fastest(lambda c: c.plan.device != "cpu" and c.plan.precision == "fp32")
    none_here = "there is no accelerator here; `lapclip bench` measures one where there is"
    times = "{:.2g}x".format
    wrong = "three values for one comparison; small products were timed one by one, which mostly times the waiting"
    yield compared(
        "speed of the CPU, compared with the GPU",
        (2.5, 8.8),
        cpu and other and cpu / other,
        times,
        "",
        cannot=wrong,
    )
    found = [f"{op} from {n:g}" for by_op in evidence.crossovers.values() for op, n in by_op.items() if n]
    rule = "100M parameters, batches of 32, a million values"
    ours = ", ".join(found) or str(Verdict.NOT_MEASURED)
    verdict = Verdict.DIFFERS if found else Verdict.NOT_MEASURED
    why = "measured for each machine, not a rule" if found else none_here
    yield Row("GPU worthwhile from", rule, ours, verdict, why)
    low = evidence.fastest(lambda c: c.plan.device == "cpu" and c.plan.precision != "fp32")
    which = (
        "whether half precision pays depends on the instructions of the CPU, so it is measured (bf16 here)"
    )
    yield compared("time in half precision, of fp32's", 41 / 39, cpu and low and cpu / low, times, which)
    chosen = evidence.steps.choice.plan.threads if evidence.steps else None
    cores = evidence.summary.machine.get("num_cores")
    why = f"the fastest of those tried on {cores} cores; on an M1, torch itself takes the 4 performance cores"
    yield compared("threads", 8, chosen, count, why, within=0)
    shares = evidence.summary.history.core_shares
    busy = "mean over all cores and the whole run, by any program"
    yield compared("cores busy", (0.70, 0.92), fmean(shares) if shares else None, percent, busy, within=0.03)
    width = "one copy of a large block; the documents give the chip's 68 GB/s, of which 60 can be used"
    yield compared("memory bandwidth", 60.0, evidence.bandwidth_gbs, "{:.3g} GB/s".format, width)


def energy_rows(evidence: Evidence) -> Iterator[Row]:
    history, epochs = evidence.summary.history, evidence.epochs
    known = [e.joules for e in epochs.values() if e.joules]
    unread = "the power of this machine cannot be read"
    source = f"the power of the {history.power_source}, measured; the documents assume 35 W"
    yield compared(
        "energy of an epoch", 5460.0, fmean(known) if known else None, energy, source, missing=unread
    )
    accuracy = epochs[NUM_EPOCHS].accuracy if NUM_EPOCHS in epochs else None
    ours = 100 * accuracy / (history.joules / 3600) if accuracy is not None and history.joules else None
    points = "points of training accuracy, most of them memorised"
    yield compared("accuracy per watt-hour", 1.0, ours, "{:.1f} points".format, points, missing=unread)
    unseen = "the temperature of this machine cannot be read"
    hottest = max(history.readings("temperature"), default=None)
    yield compared(
        "highest CPU temperature", 72.0, hottest, "{:.0f} °C".format, "on another machine", missing=unseen
    )
