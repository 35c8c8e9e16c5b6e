"""A run in words: what was trained on what, what it came to and what limited it.

Each sentence stands only where the run's data carries it.
"""

import math
from collections import Counter
from dataclasses import dataclass
from statistics import median

from lapclip.errors import code, one_line, shortened
from lapclip.runs.events import Evaluated
from lapclip.runs.history import Summary, find
from lapclip.units import count, duration, epochs, listed, plural, rate, share, size, times

LEAST_EVALUATIONS = 4
CLEARLY_RISEN = 0.03  # of the held-out loss, over its lowest
SLOWER = 0.85  # of the speed at the start
NEAR_LIMIT = 0.9  # of the memory it may use
WAITS = 0.1  # share of time spent waiting for data that is worth a word
# The warnings that say most about a result, the gravest first.
GRAVEST = (
    "collapsed", "exploding-gradients", "vanishing-gradients", "over-fitting", "scale-pinned", "data-bound",
    "memory-near-limit", "slower", "slept", "duplicate-captions", "small-pool", "lr-still-high",
    "loss-rises-recall-too",
)  # fmt: skip


def sentences(record: Summary) -> list[str]:
    """The summary, what matters most first."""
    said = [what_and_how_long(record), how_it_ended(record), result(record), whether_it_improved(record)]
    said += [validation(record), *limits(record), interruptions(record), warnings(record)]
    return [sentence for sentence in said if sentence]


def what_and_how_long(record: Summary) -> str:
    settings, history, started = record.settings, record.history, record.history.started
    size_name, source = settings.get("size"), settings.get("source")
    model = f"A {code(size_name)} model" if size_name else "A model"
    parameters = f" of {count(started.num_parameters)} parameters" if started else ""
    on = f" on {code(source)}" if source else ""
    if started is None:
        return f"{model}{on} was prepared, but no training was recorded."
    pairs = f", {count(started.num_train)} pairs"
    last = record.history.step
    if last is None and not record.history.finished:
        return f"{model}{parameters}{on}{pairs}: training began, and no step was recorded."
    seen = (record.history.finished or last).num_pairs_seen  # type: ignore[union-attr]
    over = seen / started.num_train if started.num_train else 0.0
    return (
        f"{model}{parameters} was trained{on}{pairs}, in batches of {count(started.batch_size)}: "
        f"{plural(record.history.num_steps, 'step')}, {count(seen)} pairs or {epochs(over)} times over the data, in "
        f"{duration(history.seconds)} of training on {code(started.device)} ({rate(history.pairs_per_second)} pairs/s)."
    )


def how_it_ended(record: Summary) -> str:
    history = record.history
    done = f" at {history.step.progress:.0%} of its budget" if history.step else ""
    saved = f"the last checkpoint is of step {count(history.saved.step)}" if history.saved else ""
    match record.state:
        case "finished":
            return "It used up its budget."
        case "stopped":
            if not record.history.num_steps:
                return "It was stopped before its first step." if history.started else ""
            return f"It was stopped{done}; everything until then is saved."
        case "failed":
            why = shortened(one_line(record.failed.message if record.failed else "").rstrip("."))
            return f"It failed{done}: {why}" + (f"; {saved}." if saved else "; nothing had been saved.")
        case "crashed":
            kept = f"; {saved}" if saved else "; nothing had been saved"
            return (
                f"Its process ended without a word{done}, killed or with the machine{kept}. "
                "What follows is what it had written down until then."
            )
        case "running":
            return f"It is still running{done}: this is how it stands now."
        case "paused" if history.paused:
            return f"It is paused{done}: {shortened(one_line(history.paused.reason))}."
    return ""


def result(record: Summary) -> str:
    recall = record.history.recall
    found, chance = find(recall, "text_to_image", "recall@1"), find(recall, "text_to_image", "chance@1")
    if found is None:
        if not record.history.num_steps:
            return ""
        return (
            "It was never evaluated, so how well it finds is not known; `lapclip eval` measures a checkpoint."
        )
    among = find(recall, "num_images")
    images = f" among {count(among)}" if among else ""
    said = f"Words find their image{images} first in {share(found)} of cases (chance {share(chance)})"
    ten, chance = (find(recall, "text_to_image", name) for name in ("recall@10", "chance@10"))
    if ten is not None:
        said += f" and within the first ten in {share(ten)} (chance {share(chance)})"
    back = find(recall, "image_to_text", "recall@1")
    if back is not None:
        said += f"; images find their words first in {share(back)}"
    if (
        record.history.best_step is not None
        and record.history.best_step != record.history.num_steps
        and len(record.history.evaluations) > 1
    ):
        num_evaluations = len(record.history.evaluations)
        said += f". That is step {count(record.history.best_step)}, the best of {num_evaluations} evaluations"
    if is_guessable(record):
        said += ". Where guessing is right so often, that says nothing"
    elif is_near_chance(record):
        said += ". This is hardly more than guessing"
    return said + "."


def whether_it_improved(record: Summary) -> str:
    change = last_quarter(record)
    if change is None:
        return ""
    said = f"from {share(change.before)} at step {count(change.step_before)} to {share(change.after)}"
    points = f"{100 * change.noise:.1f} points"
    if change.direction > 0:
        return f"It was still improving at the end: recall@1 rose {said}."
    if change.direction < 0:
        return f"It became worse at the end: recall@1 fell {said}, more than chance explains ({points})."
    return (
        f"It was no longer clearly improving at the end: recall@1 went {said}, "
        f"and chance alone may move it by {points}."
    )


def validation(record: Summary) -> str:
    rise = validation_rise(record)
    if rise is not None:
        said = (
            f"The held-out loss was lowest at step {count(rise.step_before)} ({rise.before:.3f}) and rose "
            f"to {rise.after:.3f}"
        )
        quarter = last_quarter(record)
        if quarter and quarter.direction > 0:
            return f"{said}, while recall still rose."
        if has_training_loss_fallen(record, rise):
            return f"{said} while the training loss fell: it began to learn the training pairs by heart."
        return f"{said}."
    losses = [e.loss for e in record.history.evaluations if e.loss is not None]
    return "The held-out loss did not rise." if len(losses) >= 3 else ""


def limits(record: Summary) -> list[str]:
    said = []
    waiting = record.history.data_share
    if waiting is not None and len(record.history.steps) > 3:
        if waiting >= WAITS:
            said.append(f"Data limited it: {share(waiting)} of the time it waited for the next batch.")
        else:
            said.append(
                f"Computing limited it, not data: {share(waiting)} of the time it waited for a batch."
            )
    slower = slowdown(record)
    if slower is not None:
        said.append(
            f"It became slower: from {rate(slower.before)} to {rate(slower.after)} pairs/s over the same kind of step."
        )
    if (bench := record.bench_speed) and record.history.pairs_per_second:
        said.append(
            f"`lapclip bench` had measured {rate(bench)} pairs/s; "
            f"it ran at {record.history.pairs_per_second / bench:.0%} of that."
        )
    if memory := memory_share(record):
        said.append(f"Memory came near its limit: {size(memory[0])} of the {size(memory[1])} it may use.")
    return said


def interruptions(record: Summary) -> str:
    parts = []
    resumed = len(record.history.starts) - 1
    if resumed > 0:
        parts.append(f"it was taken up again {times(resumed)}")
    waited = [pause.seconds for pause in record.history.pauses if pause.seconds is not None]
    if record.history.pauses:
        seconds = f", {duration(sum(waited))} in all, not counted as training" if waited else ""
        parts.append(f"it paused {times(len(record.history.pauses))}{seconds}")
    return f"On the way {listed(parts)}." if parts else ""


def warnings(record: Summary) -> str:
    """How many there were, and the gravest one."""
    seen = record.history.warnings
    if not seen:
        return ""
    gravest = min(seen, key=lambda w: GRAVEST.index(w.kind) if w.kind in GRAVEST else len(GRAVEST))
    different = len(Counter(w.kind or w.message for w in seen))
    rest = f"{plural(different, 'kind')} of warning" if different > 1 else "One warning"
    which = ", the gravest" if different > 1 else ""
    return f"{rest}{which}: {shortened(one_line(gravest.message))} (step {count(gravest.step)})."


@dataclass(frozen=True)
class Change:
    """A number then and later, with the steps."""

    step_before: int
    before: float
    step_after: int
    after: float
    noise: float = 0.0  # what chance alone may change it by

    @property
    def direction(self) -> int:
        """1 risen, -1 fallen, 0 within the noise."""
        difference = self.after - self.before
        return 0 if abs(difference) <= self.noise else 1 if difference > 0 else -1


def recall_1(evaluated: Evaluated) -> float | None:
    return find(evaluated.recall, "text_to_image", "recall@1")


def last_quarter(record: Summary) -> Change | None:
    """How recall@1 changed over the last quarter of the run; two standard errors count as noise."""
    known = [(e.step, r, e) for e in record.history.evaluations if (r := recall_1(e)) is not None]
    if len(known) < LEAST_EVALUATIONS:
        return None
    step, after, evaluated = known[-1]
    earlier = [k for k in known[:-1] if k[0] <= 0.75 * step]
    num_captions = find(evaluated.recall, "num_captions") or 0
    if not earlier or num_captions < 1:
        return None
    step_before, before, _ = earlier[-1]
    middle = (before + after) / 2
    noise = 2 * math.sqrt(max(middle * (1 - middle), 1 / num_captions) / num_captions)
    return Change(step_before, before, step, after, noise)


def validation_rise(record: Summary) -> Change | None:
    """From the lowest held-out loss to the last, if it has clearly risen."""
    losses = [
        (e.step, e.loss) for e in record.history.evaluations if e.loss is not None and math.isfinite(e.loss)
    ]
    if len(losses) < 3:
        return None
    low_step, low = min(losses, key=lambda pair: pair[1])
    last_step, last = losses[-1]
    return Change(low_step, low, last_step, last) if last > low + CLEARLY_RISEN * abs(low) else None


def has_training_loss_fallen(record: Summary, since: Change) -> bool:
    """Whether the training loss is clearly lower at the end than around the earlier step."""
    steps = list(record.history.steps)
    near = max(1, since.step_after // 20)
    then = [s.loss for s in steps if abs(s.step - since.step_before) <= near]
    now = [s.loss for s in steps if s.step > since.step_after - 2 * near]
    return bool(then and now) and median(now) < (1 - CLEARLY_RISEN) * median(then)


def slowdown(record: Summary) -> Change | None:
    """Pairs a second early and late, while it looked at the same share of each image; None when not slower."""
    whole_from = find(record.settings, "whole_from")
    keeps = find(record.settings, "keep_patches")
    end = whole_from if whole_from and keeps is not None and keeps < 1 else 1.1
    steps = [s for s in record.history.steps if s.progress < end]
    if len(steps) < 40:
        return None
    fifth = len(steps) // 5
    early, late = steps[fifth // 2 : fifth + fifth // 2], steps[-fifth:]
    before, after = (median(s.pairs_per_second for s in part) for part in (early, late))
    return Change(early[0].step, before, late[-1].step, after) if after < SLOWER * before else None


def memory_share(record: Summary) -> tuple[int, int] | None:
    """Most memory used and what it may use, when these came close."""
    last = record.history.inspected
    if last is None or last.memory_limit <= 0 or last.memory_peak < NEAR_LIMIT * last.memory_limit:
        return None
    return last.memory_peak, last.memory_limit


def is_guessable(record: Summary) -> bool:
    """Whether the pool is so small, or its captions so alike, that guessing is right as often as not."""
    chance = find(record.history.recall, "text_to_image", "chance@1")
    return chance is not None and chance >= 0.5


def is_near_chance(record: Summary) -> bool:
    """Whether it found hardly more than guessing would."""
    found = find(record.history.recall, "text_to_image", "recall@10")
    chance = find(record.history.recall, "text_to_image", "chance@10")
    return found is not None and chance is not None and found < min(0.9, 2 * chance)
