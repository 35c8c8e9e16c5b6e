"""Signs that nothing is learned, or less than could be: in the steps, the gradients and the evaluations."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

from lapclip.config import MAX_SCALE, Config
from lapclip.diagnose.finding import Finding
from lapclip.runs.events import Evaluated, Event, Inspected, Started, Step, mean_recall

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
MIN_DIFFERENT = 0.6  # of a batch; drawn scenes have 1.0, the names of a hundred classes 0.57 of 128
MIXED = 0.3  # of a batch: with more different captions than this a larger batch brings others
HIGH_RATE = 0.1  # of the highest learning rate; below, hardly anything is learned any more
MIN_STEPS = 10  # in a run of fewer steps the last one is far from the end of the schedule
BLOCK_STEPS = 50  # judged together: single long gradients are usual and are shortened
SOME_STEPS = 10  # of a block that must be far too long
FAR_LONGER = 10.0  # than usual; runs that learned, in batches of 8, had single ones 20 times as long
LOSS_ROSE = 1.1  # times its lowest: longer gradients while the loss falls are learning
MUCH_DECAY = 1.0  # of the weights; 0.1 is usual
NUM_INSPECTIONS = 5  # in a row, about half a minute
VANISHED = 1e-4  # of the longest in its tower; 0.02 in runs that learned, 0.002 at far too high a rate
SMALL_POOL = 100  # images; below, ten points of recall are within the noise
GOOD_POOL = 512  # images; four points
SIGMAS = 1.96  # of a 95% interval
NUM_LAST = 3  # evaluations that must agree; random wobble seldom does three times
LOSS_RISES = 1.1  # times its lowest: less than that does no harm yet
LOSS_SPREAD = 4.0  # by the root of the pool: 4 sigmas, where an image's loss has a spread of about 1
NUM_LEVEL = 4  # evaluations after the lowest loss, before recall that does not rise counts as over
MAX_VALIDATION = 0.3  # share of the images that may be advised to hold out


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
        if len(self.different) < DUPLICATE_STEPS or fmean(self.different) >= MIN_DIFFERENT * batch_size:
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
    if last.step < MIN_STEPS or last.lr <= HIGH_RATE * peak:
        return None
    message = (
        f"training ends at {last.progress:.0%} of its budget, with the learning rate at {last.lr / peak:.0%} of its"
        " highest; the fine steps that a falling rate brings have not been made"
    )
    return Finding("lr-still-high", message, f"go on to the end: `lapclip train --resume {name}`")


class Exploding:
    """The gradient is far longer than it used to be, again and again, and the loss rises."""

    def __init__(self, config: Config):
        self.config = config
        self.reset()

    def reset(self) -> None:
        self.block: list[Step] = []
        self.usual = self.lowest_loss = float("inf")
        self.norms: dict[str, float] = {}  # of the layers, when last looked at

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.reset()
        if isinstance(event, Inspected):
            self.norms = event.grad_norms
        if not isinstance(event, Step):
            return
        self.block.append(event)
        if len(self.block) < BLOCK_STEPS:
            return
        norms, loss = sorted(step.grad_norm for step in self.block), fmean(step.loss for step in self.block)
        often = norms[-SOME_STEPS]
        is_far = often >= FAR_LONGER * max(self.usual, self.config.train.clip_norm)
        if self.usual < float("inf") and is_far and loss >= LOSS_ROSE * self.lowest_loss:
            yield self.in_words(often, loss)
        self.usual, self.lowest_loss = min(self.usual, median(norms)), min(self.lowest_loss, loss)
        self.block = []

    def in_words(self, norm: float, loss: float) -> Finding:
        layers = {layer: length for layer, length in self.norms.items() if layer != "scale"}
        where = f", the longest in `{max(layers, key=lambda layer: layers[layer])}`" if layers else ""
        message = (
            f"gradients explode: again and again {norm:.3g} or longer, where {self.usual:.2g} was usual{where};"
            f" the loss has risen from {self.lowest_loss:.2f} to {loss:.2f}"
        )
        return Finding("exploding-gradients", message, f"start again with {calmer(self.config)}")


class Vanishing:
    """A layer's gradient is next to nothing beside the others of its tower: it does not learn."""

    def __init__(self, config: Config):
        self.config = config
        self.inspections: deque[Inspected] = deque(maxlen=NUM_INSPECTIONS)

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.inspections.clear()
        if not isinstance(event, Inspected) or not event.grad_norms:
            return
        self.inspections.append(event)
        if len(self.inspections) < NUM_INSPECTIONS:
            return
        each = [vanished(inspected.grad_norms) for inspected in self.inspections]
        always = [layer for layer in each[-1] if all(layer in layers for layers in each)]
        if always:
            yield self.in_words(always, event.grad_norms)

    def in_words(self, layers: list[str], norms: dict[str, float]) -> Finding:
        first = layers[0]
        among = {layer: norm for layer, norm in norms.items() if layer.split(".")[0] == first.split(".")[0]}
        longest = max(among, key=lambda layer: among[layer])
        who = f"`{first}` and {'another layer' if len(layers) == 2 else f'{len(layers) - 1} others'} hardly learn"
        message = (
            f"{who if len(layers) > 1 else f'`{first}` hardly learns'}: the gradient of `{first}` is"
            f" {norms[first]:.1e} long, that of `{longest}` {norms[longest]:.1e}"
        )
        return Finding("vanishing-gradients", message, f"start again with {calmer(self.config)}")


def vanished(norms: dict[str, float]) -> list[str]:
    """The layers whose gradient is nothing beside the longest one of their tower, which itself is not nothing."""
    found = []
    for tower in ("image", "text"):
        own = {layer: norm for layer, norm in norms.items() if layer.startswith(f"{tower}.")}
        longest = max(own.values(), default=0.0)
        found += [layer for layer, norm in own.items() if longest > 0 and norm < VANISHED * longest]
    return found


def calmer(config: Config) -> str:
    """The setting that most likely makes gradients what they should be."""
    if config.train.weight_decay >= MUCH_DECAY:
        return "less weight decay, which shrinks the weights: `--weight-decay 0.1`"
    return f"a lower learning rate: `--lr {(config.train.lr or 1e-3) / 3:.1g}`"


@dataclass(frozen=True)
class Point:
    """One evaluation, as far as it matters here."""

    step: int
    loss: float
    recall: float  # the mean of all six
    num_images: int
    training_loss: float | None  # since the evaluation before
    epoch: float

    @property
    def noise(self) -> float:
        """Half of the interval that the true recall lies in; never nothing, also at 0 and 1."""
        share = (self.recall * self.num_images + 1) / (self.num_images + 2)
        return SIGMAS * math.sqrt(share * (1 - share) / self.num_images)


class Evaluations:
    """Validation loss and recall over the whole run."""

    def __init__(self, config: Config):
        self.config = config
        self.points: list[Point] = []
        self.losses: list[float] = []  # of training, since the last evaluation
        self.started: Started | None = None
        self.epoch = 0.0

    def look(self, event: Event) -> Iterator[Finding]:
        match event:
            case Started():
                self.started, self.losses = event, []
                self.points = [point for point in self.points if point.step <= event.step]
            case Step():
                self.losses.append(event.loss)
                self.epoch = event.epoch
            case Evaluated():
                num_images = event.recall["num_images"]
                if num_images < SMALL_POOL:
                    yield small_pool(num_images, self.config, self.started)
                if event.loss is None:
                    return
                training = fmean(self.losses) if self.losses else None
                self.losses = []
                if self.points and self.points[-1].num_images != num_images:
                    self.points = []  # other images cannot be compared
                recall = mean_recall(event.recall)
                self.points.append(Point(event.step, event.loss, recall, num_images, training, self.epoch))
                if finding := judge(self.points):
                    yield finding


def judge(points: list[Point]) -> Finding | None:
    """What a rising loss means: nothing bad while recall rises, over-fitting when it falls or stays."""
    lowest = min(range(len(points)), key=lambda n: points[n].loss)
    after = points[lowest + 1 :]
    last = points[-NUM_LAST:]
    best = points[lowest]
    limit = max(LOSS_RISES * best.loss, best.loss + LOSS_SPREAD / math.sqrt(best.num_images))
    if len(after) < NUM_LAST or any(point.loss < limit for point in last):
        return None
    is_by_heart = has_fallen(best.training_loss, points[-1].training_loss)
    now, noise = fmean(point.recall for point in last), points[-1].noise
    rose = f"validation loss has risen from {best.loss:.2f} at step {best.step} to {points[-1].loss:.2f}"
    if now > best.recall + noise:
        return Finding(
            "loss-rises-recall-too",
            f"{rose}, but recall rises too, from {best.recall:.0%} to {now:.0%} on average: it finds more, and is only"
            " too sure of what it gets wrong",
            "nothing to do: `best` is chosen by recall",
        )
    highs = [fmean(point.recall for point in points[n : n + NUM_LAST]) for n in range(len(points) - NUM_LAST)]
    fell = max(highs, default=now) > now + noise
    is_level = len(after) >= NUM_LEVEL and now <= best.recall + noise / 2 and best.num_images >= SMALL_POOL
    if not is_by_heart or not (fell or is_level):
        return None
    what = (
        f"recall falls, from {max(highs):.0%} to {now:.0%} on average" if fell else "recall no longer rises"
    )
    kept = max(points, key=lambda point: point.recall)
    return Finding(
        "over-fitting",
        f"{rose} and {what}, while training loss falls: it memorises its pairs; `best` keeps step {kept.step}",
        f"train on more pairs, or end at the lowest loss: `--epochs {float(f'{best.epoch:.2g}'):g}`",
    )


def has_fallen(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now < before


def small_pool(num_images: int, config: Config, started: Started | None) -> Finding:
    points = 100 * SIGMAS * math.sqrt(0.25 / num_images)
    message = (
        f"recall is measured over {num_images} images only: it may be up to {points:.0f} points off, and smaller"
        " differences mean nothing"
    )
    share = config.data.validation_share
    validation = share / (1 - share) * started.num_train if started else math.inf
    if config.data.source.startswith("synthetic") or num_images < 0.9 * validation:
        return Finding("small-pool", message, f"in a next run hold out more: `--num-validation {GOOD_POOL}`")
    total = num_images + (started.num_train if started else 0)
    advised = min(MAX_VALIDATION, max(2 * share, math.ceil(100 * 2 * SMALL_POOL / total) / 100))
    return Finding("small-pool", message, f"in a next run hold out more: `--validation-share {advised:.2g}`")
