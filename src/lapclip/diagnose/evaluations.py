"""Signs in the evaluations: a pool too small to tell, and a held-out loss that rises, with recall or without."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from lapclip.config import Config
from lapclip.diagnose.finding import Finding
from lapclip.runs.events import Evaluated, Event, Started, Step, mean_recall

SMALL_POOL = 100  # images; below, ten points of recall are within the noise
GOOD_POOL = 512  # images; four points
SIGMAS = 1.96  # 95% sure
NUM_LAST = 3  # evaluations that must agree; random wobble seldom does three times
LOSS_RISES = 1.1  # times its lowest: less than that does no harm yet
LOSS_SPREAD = 4.0  # by the root of the pool: 4 sigmas, where an image's loss has a spread of about 1
NUM_LEVEL = 4  # evaluations after the lowest loss, before recall that does not rise counts as over
MOST_VALIDATION = 0.3  # share of the images that may be advised to hold out


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
    """Held-out loss and recall over the whole run."""

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
    rose = f"held-out loss has risen from {best.loss:.2f} at step {best.step} to {points[-1].loss:.2f}"
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
        f"{rose} and {what}, while training loss falls: it learns its pairs by heart; `best` keeps step {kept.step}",
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
    wanted = min(MOST_VALIDATION, max(2 * share, math.ceil(100 * 2 * SMALL_POOL / total) / 100))
    return Finding("small-pool", message, f"in a next run hold out more: `--validation-share {wanted:.2g}`")
