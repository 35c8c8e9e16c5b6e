"""Signs in the steps that nothing is learned, or less than could be."""

import math
from collections import deque
from collections.abc import Iterator
from statistics import fmean

from lapclip.config import MAX_SCALE, Config
from lapclip.diagnose.finding import Finding
from lapclip.diagnose.gradients import MUCH_DECAY
from lapclip.runs.events import Event, Started, Step

CHANCE_STEPS = 100  # together: 1,600 choices even in batches of 8, so that chance can be told from a little
CHANCE_FROM = 0.15  # of the run: `nano` leaves chance in the first tenth, at a tenth of its rate in a fifth
CHANCE_SIGMAS = 3.0  # above chance is no longer chance; at a hundredth of its rate `nano` was by a third
STUCK = 0.02  # of the loss: what halves of the window may differ by; a loss that still falls differs by more
USUAL_LR = 1e-3  # the highest that a size is trained with by default
NEAR_LIMIT = 0.99  # of the limit: the last steps towards it are small
HIGH_LR, SURE_STEPS = 5e-3, 30  # so high a rate is known to collapse: fewer steps are enough to be sure
PINNED_STEPS = 200  # some steps at the limit are usual when learning is fast
PINNED_LOW_STEPS = 30  # no run that learned was at the other limit
DUPLICATE_STEPS = 10  # together: single batches vary
FEW_DIFFERENT = 0.6  # of a batch; drawn scenes have 1.0, the names of a hundred classes 0.57 of 128
MIXED = 0.3  # of a batch: with more different captions than this a larger batch brings others
HIGH_RATE = 0.1  # of the highest learning rate; below, hardly anything is learned any more
LEAST_STEPS = 10  # in a run of fewer steps the last one is far from the end of the schedule


class Collapsed:
    """Accuracy stays at chance, and the loss at that of guessing, once the learning rate has been high for a while."""

    def __init__(self, config: Config):
        self.config = config
        self.window = SURE_STEPS if (config.train.lr or 0.0) > HIGH_LR else CHANCE_STEPS
        self.steps: deque[Step] = deque(maxlen=self.window)

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.steps.clear()
        if not isinstance(event, Step) or event.progress < self.config.train.warmup:
            return
        self.steps.append(event)
        if len(self.steps) == self.window and event.progress >= CHANCE_FROM and self.is_stuck():
            yield self.in_words()

    def is_stuck(self) -> bool:
        batch_size, different = self.config.train.batch_size or 2, self.num_different()
        chance = 1 / different
        num_choices = 2 * batch_size * self.window
        limit = chance + CHANCE_SIGMAS * math.sqrt(chance * (1 - chance) / num_choices)
        losses = [step.loss for step in self.steps]
        if fmean(step.accuracy for step in self.steps) > limit or different < 2:
            return False
        half = self.window // 2
        before, after = fmean(losses[:half]), fmean(losses[half:])
        is_flat = abs(after - before) <= STUCK * abs(before)
        return is_flat and (self.config.train.loss == "sigmoid" or after >= (1 - STUCK) * self.guessing())

    def num_different(self) -> float:
        batch_size = self.config.train.batch_size or 2
        return fmean(step.num_different or batch_size for step in self.steps)

    def guessing(self) -> float:
        """The softmax loss of embeddings that are all alike; equal captions do not count."""
        batch_size = self.config.train.batch_size or 2
        return math.log(batch_size - batch_size / self.num_different() + 1)

    def in_words(self) -> Finding:
        lr, loss = self.config.train.lr or USUAL_LR, self.steps[-1].loss
        accuracy = fmean(step.accuracy for step in self.steps)
        said = f"after {self.steps[-1].step} steps nothing is learned: accuracy is {accuracy:.1%}, which is chance"
        if self.config.train.loss != "sigmoid":
            said += f", and the loss stays at {loss:.2f}, which is ln {math.exp(self.guessing()):.0f}"
        if lr > USUAL_LR:
            why = "; so high a learning rate has made all embeddings alike"
            return Finding("collapsed", said + why, f"start again with a lower one: `--lr {USUAL_LR:g}`")
        if self.config.train.weight_decay >= MUCH_DECAY:
            why = "; so much weight decay has made all embeddings alike"
            return Finding("collapsed", said + why, "start again with less: `--weight-decay 0.1`")
        why = "; all embeddings are alike, or the captions say nothing about their images"
        source = self.config.data.source
        return Finding(
            "collapsed", said + why, f"look whether they belong together: `lapclip data show {source}`"
        )


class Pinned:
    """The temperature stays where it is not allowed to go further."""

    def __init__(self, config: Config):
        self.config = config
        self.since: dict[str, int] = {}

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.since.clear()
        if not isinstance(event, Step):
            return
        scale = 1 / event.temperature
        side = "high" if scale >= NEAR_LIMIT * MAX_SCALE else "low" if scale <= 1 / NEAR_LIMIT else None
        self.since = {side: self.since.get(side, event.step)} if side else {}
        if side and event.step - self.since[side] >= (PINNED_STEPS if side == "high" else PINNED_LOW_STEPS):
            yield self.in_words(side, event)

    def in_words(self, side: str, event: Step) -> Finding:
        num_steps = event.step - self.since[side]
        held = f"the temperature has been at its limit of {event.temperature:.2g} for {num_steps} steps"
        if side == "low":
            lr = (self.config.train.lr or USUAL_LR) / 3
            why = ": it cannot tell pairs apart and makes all differences small"
            return Finding("scale-pinned", held + why, f"start again with a lower rate: `--lr {lr:.1g}`")
        batch_size = self.config.train.batch_size or 2
        why = f": telling {batch_size} pairs apart has become easy, and sharper than this makes training unstable"
        return Finding(
            "scale-pinned",
            held + why,
            f"fine while recall rises; in a next run `--batch-size {2 * batch_size}` gives more to tell apart",
        )


class Duplicates:
    """Many pairs of a batch share their caption."""

    def __init__(self, config: Config):
        self.config = config
        self.different: deque[int] = deque(maxlen=DUPLICATE_STEPS)

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.different.clear()
        if not isinstance(event, Step) or event.num_different is None:
            return
        self.different.append(event.num_different)
        batch_size = self.config.train.batch_size or 2
        if len(self.different) < DUPLICATE_STEPS or fmean(self.different) >= FEW_DIFFERENT * batch_size:
            return
        found = fmean(self.different)
        if round(found) == 1:
            what = f"all {batch_size} pairs of a batch have the same caption"
            told = "there is nothing to tell apart"
        else:
            what = f"a batch of {batch_size} pairs has about {found:.0f} different captions"
            told = f"an image is told apart from {found - 1:.0f} captions and not from {batch_size - 1}"
        message = f"{what}; equal ones are not contrasted, so {told}"
        hint = "say more than that in the captions: what tells one image from the next"
        if found >= MIXED * batch_size:
            hint = f"`--batch-size {2 * batch_size}` brings more different ones together"
        yield Finding("duplicate-captions", message, hint)


def rate_still_high(config: Config, last: Step, name: str) -> Finding | None:
    """At the end: the part of learning that comes with a falling rate has not happened."""
    peak = config.train.lr or USUAL_LR
    if last.step < LEAST_STEPS or last.lr <= HIGH_RATE * peak:
        return None
    message = (
        f"training ends at {last.progress:.0%} of its budget, with the learning rate at {last.lr / peak:.0%} of its"
        " highest; the fine steps that a falling rate brings have not been made"
    )
    return Finding("lr-still-high", message, f"go on to the end: `lapclip train --resume {name}`")
