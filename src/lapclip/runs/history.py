"""One account of a run: its events as a `History` in bounded memory, and with its folder as a `Summary`.

Terminal, page, report, `runs`, `compare` and every `--json` read these and derive nothing themselves.
"""

import math
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, Generic, Literal, TypeVar

from lapclip.config import BUDGETS
from lapclip.files import Held
from lapclip.runs.events import (
    KINDS_OF_MEMORY,
    PARTS,
    Continued,
    Evaluated,
    Event,
    Failed,
    Finished,
    Follower,
    Inspected,
    Interpolated,
    Paused,
    Saved,
    Started,
    Step,
    Warned,
    failure_in,
)
from lapclip.runs.run import Run, read_own
from lapclip.units import is_number

State = Literal["running", "paused", "finished", "stopped", "failed", "crashed"]
OVER = ("finished", "stopped", "failed", "crashed")
DIRECTIONS = ("text_to_image", "image_to_text")  # of recall
KS = (1, 5, 10)  # of recall@k

MAX_STEPS = 2000
MAX_INSPECTIONS = 500
MAX_EVALUATIONS = 500
MAX_WARNINGS = 200
MAX_MARKS = 200  # starts and pauses
MAX_CONFIG_BYTES = 1 << 20
MAX_NEW = 2000  # events returned by one `read`; the history has seen them all
NUM_RECENT = 10  # steps whose mean a person can read
NUM_RECENT_INSPECTIONS = 5
SMOOTHED = ("loss", "accuracy", "grad_norm", "pairs_per_second")
SETUP_SECONDS = 10  # granted to a folder without a lock and without events
OVERFIT_LOSS = 1.1  # times its lowest: less than that does no harm yet
ENDED_EARLY = "lr-still-high"  # a kind of warning about the end of a run, which a resumed one no longer has
RISING_LOSS = ("over-fitting", "loss-rises-recall-too")  # kinds of warnings that judge it; the last one holds
AT_THE_END = (ENDED_EARLY, *RISING_LOSS)  # kinds of warnings; the report says this of the whole run
MEMORISED, SATURATED = 0.8, 0.98  # of the pairs of a batch: training knows most of them, or nearly all
LOSS_SPREAD = 4.0  # by the root of the pool: 4 sigmas, where an image's loss has a spread of about 1
MAX_GAP = 300  # seconds between two readings of the power that are still taken together

E = TypeVar("E")


class Thinned(Generic[E]):
    """Keeps at most so many of what it is given, evenly spread, and always the last one."""

    def __init__(self, max_size: int):
        self.max_size = max_size
        self.stride = 1
        self.count = 0
        self.kept: list[E] = []
        self.last: E | None = None

    def add(self, item: E) -> None:
        self.last = item
        if self.count % self.stride == 0:
            self.kept.append(item)
            if len(self.kept) >= self.max_size:  # leaves room for the last one
                self.kept = self.kept[::2]
                self.stride *= 2
        self.count += 1

    def __iter__(self) -> Iterator[E]:
        yield from self.kept
        if self.last is not None and (not self.kept or self.kept[-1] is not self.last):
            yield self.last

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keep(self, is_kept: Callable[[E], bool]) -> None:
        """Goes on with only some of them."""
        self.kept = list(filter(is_kept, self))
        self.last = self.kept[-1] if self.kept else None


@dataclass
class Pause:
    """Training that waited; `seconds` is None when nothing recorded its end."""

    step: int
    seconds: float | None = None


@dataclass
class History:
    """The events of a run so far. What a killed process reported beyond its last checkpoint is dropped on resume."""

    started: Started | None = None  # the last time
    starts: list[Started] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    steps: Thinned[Step] = field(default_factory=lambda: Thinned(MAX_STEPS))
    inspections: Thinned[Inspected] = field(default_factory=lambda: Thinned(MAX_INSPECTIONS))
    evaluations: Thinned[Evaluated] = field(default_factory=lambda: Thinned(MAX_EVALUATIONS))
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))  # since the last start
    recent_inspections: deque[Inspected] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_INSPECTIONS))
    warnings: list[Warned] = field(default_factory=list)
    best: Evaluated | None = None
    interpolated: Interpolated | None = None  # at the end, while it is
    saved: Saved | None = None
    paused: Paused | None = None  # while it is
    finished: Finished | None = None  # while it is
    failed: Failed | None = None
    last: Event | None = None
    num_steps: int = 0  # done, by the last event that has a step
    joules: float | None = None  # in all, where the power could be read
    power_seconds: float = 0.0  # over which the power is known
    energy: Thinned[tuple[int, float]] = field(default_factory=lambda: Thinned(MAX_STEPS))  # step, joules
    last_power: tuple[float, float] | None = None  # when it was last read, and the watts

    def add(self, event: Event) -> None:
        self.last = event
        self.num_steps = getattr(event, "step", self.num_steps)
        match event:
            case Started():
                self.start(event)
            case Step():
                self.paused = None
                self.steps.add(event)
                self.recent.append(event)
            case Inspected():
                self.count_energy(event)
                self.inspections.add(event)
                self.recent_inspections.append(event)
            case Evaluated():
                self.evaluations.add(event)
                if event.is_best:
                    self.best = event
            case Interpolated():
                self.interpolated = event
            case Warned():
                self.warnings = [*self.warnings[-MAX_WARNINGS + 1 :], event]
            case Saved():
                self.saved = event
            case Paused():
                self.paused = event
                self.pauses = [*self.pauses[-MAX_MARKS:], Pause(event.step)]
            case Continued():
                self.paused = None
                if self.pauses:
                    self.pauses[-1].seconds = event.paused_seconds
            case Finished():
                self.finished = event
            case Failed():
                self.failed = event

    def extend(self, events: Iterable[Event]) -> "History":
        for event in events:
            self.add(event)
        return self

    def start(self, event: Started) -> None:
        self.started = event
        self.starts = [*self.starts[-MAX_MARKS:], event]
        self.paused = self.finished = self.failed = self.interpolated = self.last_power = None
        self.recent.clear()
        self.recent_inspections.clear()
        for seen in (self.steps, self.inspections, self.evaluations):
            seen.keep(lambda other: other.step <= event.step)
        self.energy.keep(lambda mark: mark[0] <= event.step)
        self.warnings = [w for w in self.warnings if w.step <= event.step and w.kind != ENDED_EARLY]
        if self.best is not None and self.best.step > event.step:
            self.best = max((e for e in self.evaluations if e.is_best), key=lambda e: e.step, default=None)

    def count_energy(self, event: Inspected) -> None:
        """Adds the energy between two power readings; a longer gap counts as unknown."""
        watts, before = event.readings.get("power_watts"), self.last_power
        self.last_power = None if watts is None else (event.time, watts)
        if before is not None and watts is not None and 0 < (elapsed := event.time - before[0]) <= MAX_GAP:
            self.joules = (self.joules or 0.0) + elapsed * (watts + before[1]) / 2
            self.power_seconds += elapsed
        if self.joules is not None:
            self.energy.add((event.step, self.joules))

    def recently(self, name: str) -> float | None:
        """The mean of a number over the last few steps; None before the first."""
        steps = self.recent or ([self.step] if self.step else [])
        return fmean(getattr(step, name) for step in steps) if steps else None

    @property
    def step(self) -> Step | None:
        return self.steps.last

    @property
    def inspected(self) -> Inspected | None:
        return self.inspections.last

    @property
    def evaluated(self) -> Evaluated | None:
        return self.evaluations.last

    @property
    def has_had_its_budget(self) -> bool:
        return self.finished is not None and self.finished.reason == "budget"

    @property
    def newest(self) -> Finished | Step | None:
        """Counts the pairs, epochs and seconds; not every step is written down, but the end is."""
        return self.finished or self.step

    @property
    def seconds(self) -> float:
        """Of training."""
        newest = self.newest or self.started
        return newest.seconds if newest else 0.0

    @property
    def num_epochs(self) -> float:
        return self.finished.epochs if self.finished else self.step.epoch if self.step else 0.0

    @property
    def num_pairs_seen(self) -> int:
        return self.newest.num_pairs_seen if self.newest else 0

    @property
    def pairs_per_second(self) -> float | None:
        """Over the whole run."""
        return self.num_pairs_seen / self.seconds if self.newest and self.seconds > 0 else None

    @property
    def progress(self) -> float:
        """From 0 to 1; after a resume by the budget it has now."""
        if self.has_had_its_budget:
            return 1.0
        if self.recent:
            return min(1.0, self.recent[-1].progress)
        started = self.started
        if started and started.total_steps:
            return min(1.0, self.num_steps / started.total_steps)
        return min(1.0, started.seconds / (60 * started.minutes)) if started and started.minutes else 0.0

    @property
    def total_steps(self) -> int | None:
        """When its budget is used up; under a budget of minutes an estimate."""
        if self.has_had_its_budget:
            return self.num_steps
        if self.recent and self.recent[-1].progress > 0:
            return round(self.recent[-1].step / self.recent[-1].progress)
        return self.started.total_steps if self.started else None

    @property
    def recall(self) -> dict[str, Any] | None:
        """Of the best checkpoint."""
        if self.finished and self.finished.recall:
            return self.finished.recall
        return best.recall if (best := self.best or self.evaluated) else None

    @property
    def best_step(self) -> int | None:
        if self.finished and self.finished.recall:
            return self.finished.best_step
        return best.step if (best := self.best or self.evaluated) else None

    @property
    def is_interpolated(self) -> bool:
        """Whether the best model is between the pretrained one and a checkpoint."""
        return self.interpolated is not None and self.interpolated.chosen < 1

    @property
    def general(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Recall over the general source before training, and of the best model so far."""
        if self.interpolated and self.interpolated.general:
            return self.interpolated.general[0], self.interpolated.general[self.interpolated.place]
        first, now = next(iter(self.evaluations), None), self.best or self.evaluated
        before, after = first and first.step == 0 and first.general, now and now.general
        return (before, after) if before and after else None

    @property
    def over_fits(self) -> str:
        """What shows that a run that used up its budget over-fits: recall does not rise, and validation loss does."""
        known = [(e.loss, e.recall["num_images"]) for e in self.evaluations if e.loss is not None]
        lowest, num_images = min(known, default=(math.inf, 1))
        judged = [w.kind for w in self.warnings if w.kind in RISING_LOSS][-1:]
        rose, accuracy = "while validation loss rises", self.recently("accuracy") or 0.0
        recent = min((loss for loss, _ in known[-2:]), default=0.0)  # one high value is no rise
        if not self.has_had_its_budget or accuracy < MEMORISED or judged == ["loss-rises-recall-too"]:
            return ""
        if is_chance(self.recall) and recent > OVERFIT_LOSS * lowest:
            memorised = f"a training accuracy of {accuracy:.0%}, {rose}"
            return f"recall is not significantly above chance with {memorised}"
        is_seen = self.stalled_since is not None and recent >= loss_limit(lowest, num_images)
        return f"mean recall has not risen since step {self.stalled_since:,}, {rose}" if is_seen else ""

    @property
    def stalled_since(self) -> int | None:
        """The step from which on mean recall has not risen; None if it may still rise."""
        return stalled_since([(e.step, mean_recall(e.recall)) for e in self.evaluations])

    @property
    def is_saturated(self) -> bool:
        """Whether more training is no use: recall is 1, or no longer rises with nearly all training pairs matched."""
        is_perfect = self.recall is not None and mean_recall(self.recall) == 1
        knows_pairs = (self.recently("accuracy") or 0.0) >= SATURATED
        return is_perfect or (knows_pairs and self.stalled_since is not None)

    @property
    def peak_memory(self) -> int | None:
        """Bytes of the process; before the end, the maximum that was seen."""
        if self.finished and self.finished.peak_memory_bytes:
            return self.finished.peak_memory_bytes
        return max((i.memory_peak for i in self.inspections), default=None)

    @property
    def chance(self) -> float | None:
        """Of the accuracy in a batch, where each of several equal captions is correct."""
        if self.started is None:
            return None
        known = [step.chance or 1 / step.num_different for step in self.recent if step.num_different]
        return fmean(known) if known else 1 / self.started.batch_size

    @property
    def data_share(self) -> float | None:
        """The share of training that was spent waiting for batches."""
        steps = [s for s in self.steps if s.pairs_per_second > 0]
        whole = sum(self.started.batch_size / s.pairs_per_second for s in steps) if self.started else 0.0
        return min(1.0, sum(s.data_seconds for s in steps) / whole) if whole > 0 else None

    @property
    def parts(self) -> dict[str, float] | None:
        """Seconds of a step by part, the mean of the last few that were profiled."""
        seen = self.recent_inspections
        return {part: fmean(look.parts[part] for look in seen) for part in PARTS} if seen else None

    @property
    def mean_parts(self) -> dict[str, tuple[float, float]]:
        """By part of a step, its mean seconds over the run, as a share and as such."""
        seen = [i.parts for i in self.inspections if any(i.parts.values())]
        seconds = {part: fmean(parts[part] for parts in seen) for part in (PARTS if seen else ())}
        return {part: (own / sum(seconds.values()), own) for part, own in seconds.items()}

    @property
    def memory_by_kind(self) -> dict[str, int | None]:
        """The maximum bytes of each kind; None for what was not measured."""
        kinds = KINDS_OF_MEMORY if self.inspected else ()
        held = {kind: [i.memory[kind] for i in self.inspections] for kind in kinds}
        return {kind: max((n for n in own if n is not None), default=None) for kind, own in held.items()}

    @property
    def core_shares(self) -> list[float]:
        """The mean share of time that each core was busy."""
        seen = [cores for i in self.inspections if (cores := i.readings.get("cores"))]
        num_cores = min(map(len, seen), default=0)
        return [fmean(cores[number] for cores in seen) for number in range(num_cores)]

    @property
    def power_source(self) -> str | None:
        """Which part of the machine the power readings are of."""
        named = {i.readings.get("power_of") for i in self.inspections if "power_watts" in i.readings}
        return " and ".join(sorted(filter(None, named))) or None

    def readings(self, name: str) -> list[float]:
        return [i.readings[name] for i in self.inspections if name in i.readings]


def mean_recall(recall: dict[str, Any]) -> float:
    """What makes one evaluation better than another: all six recalls together, steadier than any one of them."""
    return sum(recall[way][f"recall@{k}"] for way in DIRECTIONS for k in KS) / 6


def stalled_since(recalls: Sequence[tuple[int, float]]) -> int | None:
    """The step of the highest recall, if a third of at least 4 evaluations came after it; None if it may still rise."""
    step, highest = max(recalls, key=lambda one: one[1], default=(0, 0.0))
    num_after = sum(other > step for other, _ in recalls)
    return step if len(recalls) >= 4 and 3 * num_after >= len(recalls) and highest < 1 else None


def loss_limit(lowest: float, num_images: int) -> float:
    """A validation loss from which on it is clearly above its lowest, and does harm."""
    return max(OVERFIT_LOSS * lowest, lowest + LOSS_SPREAD / math.sqrt(max(1, num_images)))


def is_chance(recall: dict[str, Any] | None) -> bool:
    """Whether no recall, in either direction, is significantly above chance; False where one was not measured."""
    ways = [recall[way] for way in DIRECTIONS] if recall else []
    ends = [(way.get(f"interval@{k}"), way[f"chance@{k}"]) for way in ways for k in KS]
    is_measurable = any(chance < 1 for _, chance in ends)  # not with one caption for all images
    return is_measurable and all(interval and interval[0] <= chance for interval, chance in ends)


def num_independent(recall: dict[str, Any]) -> int:
    """Results, text → image, that say something of their own: images, or captions that images share."""
    return recall["text_to_image"].get("num_units", recall["num_images"])


def is_as_good(
    recall: float, loss: float, num_images: int, highest: float | None, best: tuple[float, float]
) -> bool:
    """Whether mean recall is the highest so far, or within one standard error of it and no worse than the present best.

    `best` has mean recall and validation loss of the present best checkpoint: worse is worse in both. Of two within the
    noise the later one has learned more: among 18 validation images an early peak is luck.
    """
    if highest is None or recall >= highest:
        return True
    error = math.sqrt(max(0.0, highest * (1 - highest)) / num_images)
    return recall >= highest - error and (recall >= best[0] or loss <= best[1])


class Summary:
    """How a run stands, by its lock and its events; `read` brings it up to date, and costs little if nothing is new."""

    def __init__(self, run: Run):
        self.run = run
        self.follower = Follower(run.path / "events.jsonl")
        self.history = History()
        self.lock = Held()
        self.state: State = "running"
        self.is_preparing = True  # running, and not yet training
        self.machine: dict[str, Any] = {}

    def read(self) -> tuple[list[Event], bool]:
        """Takes in what is new. Returns the last of it, and whether it does not simply follow what was known before:
        the run resumed from an earlier step, the file is another one, or more came than is returned.
        """
        lock = self.run.read_lock()  # before the events: a process writes its end, then releases the run
        new: deque[Event] = deque(maxlen=MAX_NEW)
        num_restarts, is_reset = self.follower.num_restarts, False
        for count, event in enumerate(self.follower.new(), 1):
            if self.follower.num_restarts != num_restarts:
                num_restarts, is_reset, self.history = self.follower.num_restarts, True, History()
            self.history.add(event)
            new.append(event)
            is_reset = is_reset or isinstance(event, Started) or count > MAX_NEW
        if self.follower.num_restarts != num_restarts:  # it was emptied
            is_reset, self.history = True, History()
        if is_reset or not self.machine:
            self.machine = self.run.load_machine()
        self.update(lock, self.history)
        if self.history.last is None and self.state == "stopped":
            made = self.run.path.stat().st_mtime if self.run.path.exists() else 0.0
            age_seconds = time.time() - max(self.run.last_change(), made)
            self.is_preparing = age_seconds < SETUP_SECONDS  # it may not have its lock yet
            self.state = "running" if self.is_preparing else "stopped"
        return list(new), is_reset

    def update(self, lock: Held, history: History) -> None:
        """The state by this lock and these events; those from before the lock was taken are of an earlier process."""
        self.lock, self.history = lock, history
        since = lock.taken or 0.0
        last = history.last if history.last and history.last.time >= since else None
        has_begun = last is not None or (history.started is not None and history.started.time >= since)
        if lock.owner is None and failure_in(lock.said):
            self.state = "failed"
        elif isinstance(last, Finished):  # also while its process still holds the lock to write the report
            self.state = "finished" if last.reason == "budget" else "stopped"
        elif lock.owner is not None:
            self.state = "paused" if last and history.paused else "running"
        elif last is None:  # nobody ever took the run; or whoever did was gone before its first event
            self.state = "stopped" if lock.pid is None else "crashed"
        else:
            self.state = "failed" if isinstance(last, Failed) else "crashed"
        self.is_preparing = self.state == "running" and not has_begun

    @property
    def state_words(self) -> str:
        return "being set up" if self.is_preparing else self.state

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def failed(self) -> Failed | None:
        """Why it failed."""
        return (failure_in(self.lock.said) or self.history.failed) if self.state == "failed" else None

    @property
    def seconds_left(self) -> float | None:
        """Of training, while it is being trained."""
        recent = self.history.recent
        return recent[-1].seconds_left if recent and not self.is_over and not self.is_preparing else None

    @property
    def recall_1(self) -> float | None:
        """Recall@1, text to image, of the best checkpoint so far."""
        return self.history.recall["text_to_image"]["recall@1"] if self.history.recall else None

    @property
    def num_validation(self) -> int | None:
        """The images that recall is measured over."""
        return self.history.recall["num_images"] if self.history.recall else None

    @property
    def updated(self) -> float | None:
        """The time of the last event."""
        return max((e.time for e in (self.history.last, self.failed) if e is not None), default=None)

    @property
    def bench_speed(self) -> float | None:
        """Pairs a second that `lapclip bench` measured for this model here."""
        bench = self.machine.get("bench")
        speed: Any = bench.get("pairs_per_second") if isinstance(bench, dict) else None
        return float(speed) if type(speed) in (int, float) and 1e-6 <= speed <= 1e15 else None

    @property
    def bench_share(self) -> float | None:
        """The present speed as a share of what `lapclip bench` measured."""
        speed = self.history.recently("pairs_per_second")
        return speed / self.bench_speed if self.bench_speed and speed is not None else None

    @cached_property
    def config(self) -> tuple[str, dict[str, Any]]:
        """The settings file and its settings by name; also of a version that knew other settings."""
        try:
            text = read_own(self.run.path / "config.toml", self.run.path, MAX_CONFIG_BYTES).decode("utf-8")
            tables = tomllib.loads(text)
        except (OSError, ValueError, RecursionError):
            return "", {}
        sections = [table for table in tables.values() if isinstance(table, dict)]
        return text, {name: value for section in sections for name, value in section.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """Without the size where the model has the shape of a pretrained one."""
        settings = self.config[1]
        is_shaped = settings.get("shape") and settings.get("tune")
        return {name: value for name, value in settings.items() if not (is_shaped and name == "size")}

    @property
    def reasons(self) -> dict[str, str]:
        """Why each automatic choice was made."""
        return self.machine.get("reasons", {})

    @property
    def general(self) -> dict[str, Any] | None:
        """What a pretrained model forgets: recall over the general source before training, and of the best model."""
        before, now = self.history.general or (None, None)
        return {"source": self.settings.get("general"), "before": before, "now": now} if before else None

    @property
    def interpolated(self) -> dict[str, Any] | None:
        """The models between the pretrained and the trained one, for programs."""
        return asdict(self.history.interpolated) if self.history.interpolated else None

    @property
    def over_fits(self) -> str:
        """What was measured of a run that over-fits, and what helps; else nothing."""
        has_no_crops = self.settings.get("crop") == 1 and "crop" not in self.reasons
        helps = "more pairs would help most" + ", then random crops: `--crop 0.6`" * has_no_crops
        return f"{seen}: the model over-fits; {helps}" if (seen := self.history.over_fits) else ""

    @property
    def doubled(self) -> str:
        """The flag that gives it twice its budget, in the kind it has."""
        budgets = ((budget, self.settings.get(budget)) for budget in BUDGETS)
        return next((f" {twice(name, amount)}" for name, amount in budgets if is_number(amount)), "")

    def document(self) -> dict[str, Any]:
        """Everything the live view shows, for programs."""
        history, step, seen = self.history, self.history.step, self.history.inspected
        readings, memory = seen.readings if seen else {}, None
        if seen:
            totals = {"used": seen.memory_used, "peak": seen.memory_peak, "limit": seen.memory_limit}
            memory = seen.memory | totals
        return {
            "run": str(self.run.path),
            "state": self.state,
            "step": step.step if step else history.num_steps,
            "steps": history.started.total_steps if history.started else None,
            "progress": history.progress,
            "seconds": history.seconds,
            "seconds_left": 0.0 if self.state == "finished" else self.seconds_left,
            **{name: history.recently(name) for name in SMOOTHED},
            "chance": history.chance,
            "temperature": step.temperature if step else None,
            "lr": step.lr if step else None,
            "bench_share": self.bench_share,
            "parts": history.parts,
            "memory": memory,
            "cores": readings.get("cores"),
            "readings": readings,
            "recall": history.evaluated.recall if history.evaluated else None,
            "recall_step": history.evaluated.step if history.evaluated else None,
            "general": self.general,
            "interpolated": self.interpolated,
            "warnings": [asdict(warning) for warning in history.warnings],
        }

    def results(self) -> dict[str, Any]:
        """What a run came to so far, as `runs compare` shows it; None for what is not known."""
        history, recall = self.history, self.history.recall or {}
        found, back = recall.get("text_to_image", {}), recall.get("image_to_text", {})
        return {
            "state": self.state,
            "num_validation": self.num_validation,
            **{f"recall@{k}": found.get(f"recall@{k}") for k in KS},
            "recall@1, picture -> words": back.get("recall@1"),
            "held-out loss": history.best.loss if history.best else None,
            "training loss": history.recently("loss"),
            "steps": history.num_steps,
            "epochs": history.num_epochs,
            "seconds": history.seconds,
            "pairs_per_second": history.pairs_per_second,
            "peak_memory_bytes": history.peak_memory,
            "num_parameters": history.started.num_parameters if history.started else None,
            "joules": history.joules,
        }


def twice(budget: str, amount: float) -> str:
    """The flag that sets this budget to about twice the amount."""
    return f"--{budget} {float(f'{2 * amount:.2g}'):.12g}"


def have_same_validation(summaries: Iterable[Summary]) -> bool:
    """Whether recall and validation loss can be compared; runs that were not evaluated do not matter."""
    seen = [summary for summary in summaries if summary.history.recall]
    data = {str(summary.machine["data"]) for summary in seen if summary.machine.get("data")}
    return len(data) <= 1 and len({summary.num_validation for summary in seen}) <= 1


def summarize(run: Run) -> Summary:
    """A run as it stands now, read whole."""
    summary = Summary(run)
    summary.read()
    return summary
