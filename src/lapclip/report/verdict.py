"""What can be concluded of a run, each only where its data carries it: pure judgements, no words."""

import math
from dataclasses import dataclass
from statistics import median

from lapclip.events import Evaluated
from lapclip.report.record import Record, find

LEAST_EVALUATIONS = 4
CLEARLY_RISEN = 0.03  # of the validation loss, over its lowest
SLOWER = 0.85  # of the speed at the start
NEAR_LIMIT = 0.9  # of the memory it may use
WAITS = 0.1  # share of time spent waiting for data that is worth a word


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


def last_quarter(record: Record) -> Change | None:
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


def validation_rise(record: Record) -> Change | None:
    """From the lowest validation loss to the last, if it has clearly risen."""
    losses = [
        (e.step, e.loss) for e in record.history.evaluations if e.loss is not None and math.isfinite(e.loss)
    ]
    if len(losses) < 3:
        return None
    low_step, low = min(losses, key=lambda pair: pair[1])
    last_step, last = losses[-1]
    return Change(low_step, low, last_step, last) if last > low + CLEARLY_RISEN * abs(low) else None


def has_training_loss_fallen(record: Record, since: Change) -> bool:
    """Whether the training loss is clearly lower at the end than around the earlier step."""
    steps = list(record.history.steps)
    near = max(1, since.step_after // 20)
    then = [s.loss for s in steps if abs(s.step - since.step_before) <= near]
    now = [s.loss for s in steps if s.step > since.step_after - 2 * near]
    return bool(then and now) and median(now) < (1 - CLEARLY_RISEN) * median(then)


def slowdown(record: Record) -> Change | None:
    """Pairs a second early and late, while it looked at the same share of each picture; None when not slower."""
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


def memory_share(record: Record) -> tuple[int, int] | None:
    """Most memory used and what it may use, when these came close."""
    last = record.history.inspected
    if last is None or last.memory_limit <= 0 or last.memory_peak < NEAR_LIMIT * last.memory_limit:
        return None
    return last.memory_peak, last.memory_limit


def is_near_chance(record: Record) -> bool:
    """Whether it found hardly more than guessing would."""
    found = find(record.recall, "text_to_image", "recall@10")
    chance = find(record.recall, "text_to_image", "chance@10")
    return found is not None and chance is not None and found < min(0.9, 2 * chance)
