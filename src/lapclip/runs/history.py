"""What a run's events come to, in bounded memory: the curves, tables and last words that every view shows."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Generic, TypeVar

from lapclip.runs.events import (
    Continued,
    Evaluated,
    Event,
    Failed,
    Finished,
    Inspected,
    Paused,
    Saved,
    Started,
    Step,
    Warned,
)

MOST_STEPS = 2000
MOST_INSPECTIONS = 500
MOST_EVALUATIONS = 500
MOST_EPOCHS = 1000
MOST_WARNINGS = 200
NUM_RECENT = 10  # steps whose mean a person can read
NUM_RECENT_INSPECTIONS = 5
LONGEST_GAP = 300  # seconds between two readings of the power that are still taken together

E = TypeVar("E")


class Thinned(Generic[E]):
    """Keeps at most so many of what it is given, evenly spread, and always the last one."""

    def __init__(self, most: int):
        self.most = most
        self.stride = 1
        self.count = 0
        self.kept: list[E] = []
        self.last: E | None = None

    def add(self, item: E) -> None:
        self.last = item
        if self.count % self.stride == 0:
            self.kept.append(item)
            if len(self.kept) >= self.most:  # leaves room for the last one
                self.kept = self.kept[::2]
                self.stride *= 2
        self.count += 1

    def __iter__(self) -> Iterator[E]:
        yield from self.kept
        if self.last is not None and (not self.kept or self.kept[-1] is not self.last):
            yield self.last

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keep(self, items: Iterable[E]) -> None:
        """Goes on with only these."""
        self.kept = list(items)
        self.last = self.kept[-1] if self.kept else None


@dataclass
class Epoch:
    """One time over the data, from the steps that were written down."""

    number: int  # from 1
    step_before: int = 0  # the last one before it
    num_steps: int = 0  # that were written down
    loss: float = 0.0  # their mean
    accuracy: float = 0.0
    temperature: float = 0.0  # at its end
    seconds_before: float = 0.0  # of training, when it began
    seconds: float = 0.0  # of training, in this epoch
    seconds_at_end: float = 0.0  # of training, since the run's start
    step: int = 0  # its last one so far
    joules: float | None = None  # None where the power could not be read
    evaluated: Evaluated | None = None  # the last one in it

    def add(self, event: Step) -> None:
        self.num_steps += 1
        self.loss += (event.loss - self.loss) / self.num_steps
        self.accuracy += (event.accuracy - self.accuracy) / self.num_steps
        self.temperature, self.step = event.temperature, event.step
        self.seconds, self.seconds_at_end = event.seconds - self.seconds_before, event.seconds


@dataclass
class History:
    """A run so far. What a killed process reported beyond its last checkpoint is taken back when the run goes on."""

    started: Started | None = None  # the last time
    num_starts: int = 0
    steps: Thinned[Step] = field(default_factory=lambda: Thinned(MOST_STEPS))
    inspections: Thinned[Inspected] = field(default_factory=lambda: Thinned(MOST_INSPECTIONS))
    evaluations: Thinned[Evaluated] = field(default_factory=lambda: Thinned(MOST_EVALUATIONS))
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))  # since the last start
    recent_inspections: deque[Inspected] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_INSPECTIONS))
    warnings: list[Warned] = field(default_factory=list)
    epochs: dict[int, Epoch] = field(default_factory=dict)
    best: Evaluated | None = None
    saved: Saved | None = None
    paused: Paused | None = None  # while it is
    finished: Finished | None = None  # while it is
    failed: Failed | None = None
    last: Event | None = None
    joules: float | None = None  # in all, where the power could be read
    last_power: tuple[float, float] | None = None  # when it was last read, and the watts

    def add(self, event: Event) -> None:
        self.last = event
        match event:
            case Started():
                self.start(event)
            case Step():
                self.paused = None
                self.steps.add(event)
                self.recent.append(event)
                self.epoch_of(event.epoch).add(event)
            case Inspected():
                self.count_energy(event)
                self.inspections.add(event)
                self.recent_inspections.append(event)
            case Evaluated():
                self.evaluations.add(event)
                if event.is_best:
                    self.best = event
                if self.epochs:
                    self.epochs[max(self.epochs)].evaluated = event
            case Warned():
                self.warnings = [*self.warnings[-MOST_WARNINGS + 1 :], event]
            case Saved():
                self.saved = event
            case Paused():
                self.paused = event
            case Continued():
                self.paused = None
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
        self.num_starts += 1
        self.paused = self.finished = self.failed = self.last_power = None
        self.recent.clear()
        self.recent_inspections.clear()
        self.steps.keep(step for step in self.steps if step.step <= event.step)
        self.inspections.keep(i for i in self.inspections if i.step <= event.step)
        self.evaluations.keep(e for e in self.evaluations if e.step <= event.step)
        self.warnings = [w for w in self.warnings if w.step <= event.step]
        if self.best is not None and self.best.step > event.step:
            self.best = max((e for e in self.evaluations if e.is_best), key=lambda e: e.step, default=None)
        again = (self.taken_back(epoch, event.step) for epoch in self.epochs.values())
        self.epochs = {epoch.number: epoch for epoch in again if epoch.num_steps}

    def taken_back(self, epoch: Epoch, step: int) -> Epoch:
        """The epoch as it was at that step, as far as its steps are still known."""
        if epoch.step <= step:
            return epoch
        evaluated = epoch.evaluated if epoch.evaluated and epoch.evaluated.step <= step else None
        earlier = replace(epoch, num_steps=0, loss=0.0, accuracy=0.0, seconds=0.0, evaluated=evaluated)
        for kept in self.steps:
            if number_of(kept.epoch) == epoch.number:
                earlier.add(kept)
        return earlier

    def epoch_of(self, epoch: float) -> Epoch:
        """The epoch that a step belongs to; of very many, every second one is let go."""
        number = number_of(epoch)
        if number not in self.epochs:
            before = self.epochs[max(self.epochs)] if self.epochs else Epoch(0)
            if len(self.epochs) >= MOST_EPOCHS:
                self.epochs = dict(list(self.epochs.items())[::2])
            self.epochs[number] = Epoch(number, before.step, seconds_before=before.seconds_at_end)
        return self.epochs[number]

    def count_energy(self, event: Inspected) -> None:
        """Adds the power between two readings to the epoch it fell in; over a longer gap nobody knows."""
        watts, before = event.readings.get("power_watts"), self.last_power
        self.last_power = None if watts is None else (event.time, watts)
        if before is None or watts is None or not self.epochs:
            return
        elapsed = event.time - before[0]
        if not 0 < elapsed <= LONGEST_GAP:
            return
        joules = elapsed * (watts + before[1]) / 2
        here = self.epochs[max(self.epochs)]
        here.joules = (here.joules or 0.0) + joules
        self.joules = (self.joules or 0.0) + joules

    @property
    def chance(self) -> float | None:
        """Of the accuracy in a batch; equal captions count once, since each of them is right."""
        if self.started is None:
            return None
        known = [step.num_different for step in self.recent if step.num_different]
        return 1 / (fmean(known) if known else self.started.batch_size)

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


def number_of(epoch: float) -> int:
    """From 1; a step that ends an epoch exactly is its last."""
    return max(1, math.ceil(epoch))
