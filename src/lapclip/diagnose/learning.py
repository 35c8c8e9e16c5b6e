"""Signs that nothing is learned, or less than could be: in the steps, the gradients and the evaluations."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from lapclip.config import MAX_SCALE, Config
from lapclip.data.advice import data_command
from lapclip.runs.events import Evaluated, Event, Inspected, Started, Step, Warned
from lapclip.runs.history import (
    ENDED_EARLY,
    MEMORISED,
    loss_limit,
    mean_recall,
    num_independent,
    stalled_since,
)

USUAL_LR = 2e-3  # the highest of `autotune.resolve.RECIPES`
MUCH_DECAY = 1.0  # of the weights; 0.1 is usual

CHANCE_STEPS = 100  # together: 1,600 choices even in batches of 8, so that chance can be told from a little
CHANCE_FROM = 0.15  # of the run: `nano` leaves chance in the first tenth, at a tenth of its rate in a fifth
CHANCE_SIGMAS = 3.0  # above chance is no longer chance; at a hundredth of its rate `nano` was by a third
STUCK = 0.02  # of the loss: what halves of the window may differ by; a loss that still falls differs by more
HIGH_LR, SURE_STEPS = 5e-3, 30  # so high a rate is known to collapse: fewer steps are enough to be sure


class Collapsed:
    """Accuracy stays at chance, and the loss at that of guessing, once the learning rate has been high for a while."""

    def __init__(self, config: Config):
        self.config = config
        self.window = SURE_STEPS if (config.train.lr or 0.0) > HIGH_LR else CHANCE_STEPS
        self.steps: deque[Step] = deque(maxlen=self.window)

    def look(self, event: Event) -> Iterator[Warned]:
        if not isinstance(event, Step) or event.progress < self.config.train.warmup:
            return
        self.steps.append(event)
        if len(self.steps) < self.window or event.progress < CHANCE_FROM:
            return
        size = self.config.train.batch_size or 2
        num_different = fmean(step.num_different or size for step in self.steps)
        if num_different < 2:
            return
        accuracy = fmean(step.accuracy for step in self.steps)
        chance = fmean(step.chance or 1 / num_different for step in self.steps)
        error = math.sqrt(chance * (1 - chance) / (2 * size * self.window))
        # The softmax loss of embeddings that are all equal; equal captions do not count.
        guessing = math.log(size - size * chance + 1)
        losses, half = [step.loss for step in self.steps], self.window // 2
        before, after = fmean(losses[:half]), fmean(losses[half:])
        is_flat = abs(after - before) <= STUCK * abs(before)
        is_guessing = self.config.train.loss == "sigmoid" or after >= (1 - STUCK) * guessing
        if accuracy <= chance + CHANCE_SIGMAS * error and is_flat and is_guessing:
            yield self.warned(event, accuracy, guessing)

    def warned(self, event: Step, accuracy: float, guessing: float) -> Warned:
        train = self.config.train
        message = f"nothing is learned after {event.step} steps: accuracy is {accuracy:.1%}, as by chance"
        if train.loss != "sigmoid":
            message += f", and the loss stays at {event.loss:.2f}, which is ln {math.exp(guessing):.0f}"
        if (train.lr or USUAL_LR) > USUAL_LR:
            why = "the learning rate is too high and has made all embeddings the same"
            hint = f"start again with a lower learning rate: `--lr {USUAL_LR:g}`"
        elif (train.weight_decay or 0.0) >= MUCH_DECAY:
            why = "the weight decay is too high and has made all embeddings the same"
            hint = "start again with less weight decay: `--weight-decay 0.1`"
        else:
            why = "all embeddings are the same, or the captions do not describe their images"
            show = data_command("show", (data := self.config.data).source, data, data.format)
            hint = f"check that captions and images match: `{show}`"
        return Warned(event.step, f"{message}; {why}", hint, "collapsed")


NEAR_LIMIT = 0.99  # of the limit: the last steps towards it are small
PINNED_STEPS = 200  # some steps at the limit are usual when learning is fast
PINNED_LOW_STEPS = 30  # no run that learned was at the other limit


class Pinned:
    """The temperature stays where it is not allowed to go further."""

    def __init__(self, config: Config):
        self.config = config
        self.side: Literal["high", "low"] | None = None
        self.since = 0
        self.num_train = math.inf

    def look(self, event: Event) -> Iterator[Warned]:
        self.num_train = event.num_train if isinstance(event, Started) else self.num_train
        if not isinstance(event, Step):
            return
        scale, before = 1 / event.temperature, self.side
        self.side = "high" if scale >= NEAR_LIMIT * MAX_SCALE else "low" if scale <= 1 / NEAR_LIMIT else None
        if self.side != before:
            self.since = event.step
        num_steps = event.step - self.since
        held = f"the temperature has been at its limit of {event.temperature:.2g} for {num_steps} steps"
        train = self.config.train
        if self.side == "low" and num_steps >= PINNED_LOW_STEPS:
            message = f"{held}: the model cannot separate the pairs, and the similarities hardly differ"
            hint = f"start again with a lower learning rate: `--lr {(train.lr or USUAL_LR) / 3:.1g}`"
            yield Warned(event.step, message, hint, "scale-pinned")
        if self.side == "high" and num_steps >= PINNED_STEPS:
            size = train.batch_size or 2
            message = f"{held}: the model separates {size} pairs easily, and a lower one would be unstable"
            harder = f"; in the next run, make the task harder: `--batch-size {2 * size}`"
            hint = "harmless while recall rises" + harder * (2 * size <= self.num_train)
            yield Warned(event.step, message, hint, "scale-pinned")


DUPLICATE_STEPS = 10  # together: single batches vary
MIN_DIFFERENT = 0.6  # of a batch; drawn scenes have 1.0, the names of a hundred classes 0.57 of 128
MIXED = 0.3  # of a batch: with more different captions than this a larger batch brings others


class Duplicates:
    """Many pairs of a batch share their caption."""

    def __init__(self, config: Config):
        self.batch_size = config.train.batch_size or 2
        self.different: deque[int] = deque(maxlen=DUPLICATE_STEPS)
        self.num_train = math.inf

    def look(self, event: Event) -> Iterator[Warned]:
        self.num_train = event.num_train if isinstance(event, Started) else self.num_train
        if not isinstance(event, Step) or event.num_different is None:
            return
        self.different.append(event.num_different)
        batch_size, found = self.batch_size, fmean(self.different)
        if len(self.different) < DUPLICATE_STEPS or found >= MIN_DIFFERENT * batch_size:
            return
        what = f"a batch of {batch_size} pairs has about {found:.0f} different captions"
        told = f"each image is contrasted with {found - 1:.0f} instead of {batch_size - 1} captions"
        if round(found) == 1:
            what = f"all {batch_size} pairs of a batch have the same caption"
            told = "there is nothing to contrast"
        hint = "write captions that describe how the images differ"
        if (
            found >= MIXED * batch_size and 4 * batch_size <= self.num_train
        ):  # an epoch has at least two steps
            hint = f"use more different captions per batch: `--batch-size {2 * batch_size}`"
        message = f"{what}; equal captions are not contrasted, so {told}"
        yield Warned(event.step, message, hint, "duplicate-captions")


HIGH_RATE = 0.1  # of the highest learning rate; below, hardly anything is learned any more
MIN_STEPS = 10  # in a run of fewer steps the last one is far from the end of the schedule


def rate_still_high(config: Config, last: Step, step: int, name: str) -> Warned | None:
    """At the end: what is learned while the learning rate decays has not been learned."""
    peak = config.train.lr or USUAL_LR
    if last.step < MIN_STEPS or last.lr <= HIGH_RATE * peak:
        return None
    done, rate = f"{last.progress:.0%} of its budget", f"{last.lr / peak:.0%} of its peak"
    message = f"training ends at {done}, with the learning rate at {rate}"
    hint = f"the model would improve further while it decays: `lapclip train --resume {name}`"
    return Warned(step, message, hint, ENDED_EARLY)


EXPLODING_BLOCK = 50  # judged together: single long gradients are usual and are shortened
EXPLODING_STEPS = 10  # of a block that must be far too long
EXPLODING_TIMES = 10.0  # than usual; runs that learned, in batches of 8, had single ones 20 times as long
EXPLODING_LOSS = 1.1  # times its lowest: longer gradients while the loss falls are learning


class Exploding:
    """The gradient is far longer than it used to be, again and again, and the loss rises."""

    def __init__(self, config: Config):
        self.config = config
        self.block: list[Step] = []
        self.usual = self.lowest_loss = math.inf
        self.norms: dict[str, float] = {}  # of the layers, when last looked at

    def look(self, event: Event) -> Iterator[Warned]:
        if isinstance(event, Inspected):
            self.norms = {layer: norm for layer, norm in event.grad_norms.items() if layer != "scale"}
        if not isinstance(event, Step):
            return
        self.block.append(event)
        if len(self.block) < EXPLODING_BLOCK:
            return
        norms, loss = sorted(step.grad_norm for step in self.block), fmean(step.loss for step in self.block)
        often = norms[-EXPLODING_STEPS]
        is_far = often >= EXPLODING_TIMES * max(self.usual, self.config.train.clip_norm)
        if self.usual < math.inf and is_far and loss >= EXPLODING_LOSS * self.lowest_loss:
            where = f", the largest in `{max(self.norms, key=self.norms.__getitem__)}`" if self.norms else ""
            rose = f"the loss has risen from {self.lowest_loss:.2f} to {loss:.2f}"
            norm = f"the norm is often {often:.3g} or more, before it was {self.usual:.2g}"
            message = f"gradients explode: {norm}{where}; {rose}"
            yield Warned(event.step, message, calmer(self.config), "exploding-gradients")
        self.usual, self.lowest_loss = min(self.usual, median(norms)), min(self.lowest_loss, loss)
        self.block = []


NUM_INSPECTIONS = 5  # in a row, about half a minute
VANISHED_SHARE = 1e-4  # of the longest in its tower; 0.02 in runs that learned, 0.002 at far too high a rate


class Vanishing:
    """A layer's gradient is next to nothing beside the others of its tower: it does not learn."""

    def __init__(self, config: Config):
        self.config = config
        self.recent: deque[list[str]] = deque(maxlen=NUM_INSPECTIONS)  # the layers that had vanished

    def look(self, event: Event) -> Iterator[Warned]:
        if not isinstance(event, Inspected) or not event.grad_norms:
            return
        norms = {layer: norm for layer, norm in event.grad_norms.items() if "." in layer}
        largest_norms = {layer: max(tower_of(layer, norms).values()) for layer in norms}
        self.recent.append([layer for layer in norms if norms[layer] < VANISHED_SHARE * largest_norms[layer]])
        layers = [layer for layer in self.recent[-1] if all(layer in each for each in self.recent)]
        if len(self.recent) < NUM_INSPECTIONS or not layers:
            return
        first = layers[0]
        largest = max(tower_of(first, norms), key=norms.__getitem__)
        others = "another layer" if len(layers) == 2 else f"{len(layers) - 1} others"
        who = f"`{first}` and {others} hardly learn" if len(layers) > 1 else f"`{first}` hardly learns"
        message = f"{who}: gradient norm {norms[first]:.1e} in `{first}`, {norms[largest]:.1e} in `{largest}`"
        yield Warned(event.step, message, calmer(self.config), "vanishing-gradients")


def tower_of(layer: str, norms: dict[str, float]) -> dict[str, float]:
    tower = layer.partition(".")[0]
    return {other: norm for other, norm in norms.items() if other.partition(".")[0] == tower}


def calmer(config: Config) -> str:
    """The setting that most likely makes gradients normal again."""
    if (config.train.weight_decay or 0.0) >= MUCH_DECAY:
        return "start again with less weight decay: `--weight-decay 0.1`"
    return f"start again with a lower learning rate: `--lr {(config.train.lr or USUAL_LR) / 3:.1g}`"


SMALL_POOL = 100  # images; below, ten points of recall are within the noise
GOOD_POOL = 512  # images; four points
SIGMAS = 1.96  # of a 95% interval
NUM_LAST = 3  # evaluations that must agree; random wobble seldom does three times
NUM_LEVEL = 4  # evaluations after the lowest loss, before recall that does not rise counts as over
MAX_LEVEL = 0.1  # the noise of SMALL_POOL: over fewer images a larger rise is not called level
MAX_VALIDATION = 0.3  # maximum share that is advised


@dataclass(frozen=True)
class Point:
    """One evaluation, as far as it matters here."""

    step: int
    loss: float
    recall: float  # the mean of all six
    num_images: int
    accuracy: float  # of training, since the evaluation before
    epoch: float
    is_best: bool  # became the checkpoint `best`

    @property
    def noise(self) -> float:
        """Half of the interval that the true recall lies in; never nothing, also at 0 and 1."""
        share = (self.recall * self.num_images + 1) / (self.num_images + 2)
        return SIGMAS * math.sqrt(share * (1 - share) / self.num_images)


class Evaluations:
    """Validation loss and recall over the whole run, also over several processes."""

    def __init__(self, config: Config):
        self.config = config
        self.points: list[Point] = []
        self.accuracies: list[float] = []  # of training, since the last evaluation
        self.started: Started | None = None
        self.epoch = 0.0

    def look(self, event: Event) -> Iterator[Warned]:
        match event:
            case Started():
                self.started, self.accuracies = event, []
                self.points = [point for point in self.points if point.step <= event.step]
            case Step():
                self.accuracies.append(event.accuracy)
                self.epoch = event.epoch
            case Evaluated():
                num_images = event.recall["num_images"]
                if num_images < SMALL_POOL:
                    yield small_pool(event, self.config, self.started)
                if event.loss is None:
                    return
                accuracy = fmean(self.accuracies or [0.0])
                self.accuracies = []
                if self.points and self.points[-1].num_images != num_images:
                    self.points = []  # other images cannot be compared
                recall = mean_recall(event.recall)
                found = (recall, num_images, accuracy, self.epoch, event.is_best)
                self.points.append(Point(event.step, event.loss, *found))
                if warned := judge(self.points):
                    yield warned


def judge(points: list[Point]) -> Warned | None:
    """What a rising loss means: nothing bad while recall rises, over-fitting when it falls or stays."""
    best = min(points, key=lambda point: point.loss)
    num_after = len(points) - 1 - points.index(best)
    last, current = points[-NUM_LAST:], points[-1]
    limit = loss_limit(best.loss, best.num_images)
    if num_after < NUM_LAST or any(point.loss < limit for point in last):
        return None
    now, noise = fmean(point.recall for point in last), current.noise
    rose = f"validation loss has risen from {best.loss:.2f} at step {best.step} to {current.loss:.2f}"
    if now > best.recall + noise:
        what = f"but mean recall rises too, from {best.recall:.0%} to {now:.0%}"
        why = "the model finds more, and is only overconfident in its mistakes"
        hint = "nothing to do: `best` is chosen by recall"
        return Warned(current.step, f"{rose}, {what}: {why}", hint, "loss-rises-recall-too")
    means = (fmean(point.recall for point in points[n : n + NUM_LAST]) for n in range(len(points) - NUM_LAST))
    highest = max(means, default=now)
    fell = highest > now + noise
    is_level = num_after >= NUM_LEVEL and now <= best.recall + min(noise, MAX_LEVEL) / 2
    is_stalled = stalled_since([(point.step, point.recall) for point in points]) is not None
    if current.accuracy < MEMORISED or not is_stalled or not (fell or is_level):
        return None
    what = f"mean recall falls, from {highest:.0%} to {now:.0%}" if fell else "recall no longer rises"
    kept = max((point.step for point in points if point.is_best), default=current.step)
    learned = f"with a training accuracy of {current.accuracy:.0%} the pairs are memorised"
    message = f"{rose} and {what}: {learned}; `best` is step {kept}"
    hint = f"train on more pairs, or stop at the lowest validation loss: `--epochs {float(f'{best.epoch:.2g}'):g}`"
    return Warned(current.step, message, hint, "over-fitting")


def small_pool(event: Evaluated, config: Config, started: Started | None) -> Warned:
    num_images, (low, high) = event.recall["num_images"], event.recall["text_to_image"]["interval@10"]
    num_units = num_independent(event.recall)
    is_shared = 2 * num_units < num_images
    what = f"recall is measured over {f'{num_units} different captions' if is_shared else f'{num_images} images'} only"
    of_ten = f": the 95% interval of recall@10, text → image, is {low:.0%} to {high:.0%}"
    message = what + of_ten * (num_images > 10)  # else it is always 100%
    share, limit = config.data.validation_share or 0.0, started.validation_limit if started else None
    num_all = num_images + (started.num_train if started else 0)
    larger = min(MAX_VALIDATION, max(2 * share, math.ceil(100 * 2 * SMALL_POOL / num_all) / 100))
    hint = "use a source with more validation images"
    if is_shared:
        hint = "use images with more different captions; of class folders, `lapclip eval` gives zero-shot accuracy"
    elif limit == "num_validation" and config.data.num_validation < GOOD_POOL:
        hint = f"in the next run, use a larger validation set: `--num-validation {GOOD_POOL}`"
    elif limit == "validation_share" and larger > share:
        hint = f"in the next run, use a larger validation set: `--validation-share {larger:.2g}`"
    return Warned(event.step, message, hint, "small-pool")
