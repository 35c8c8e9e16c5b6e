"""Signs in the machine: waiting for data, memory that runs short, and training that has become slower."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from lapclip.config import Config
from lapclip.runs.events import Event, Inspected, Started, Step, Warned

RAN_OUT = "memory-ran-out"  # kind of the warning after which smaller chunks make steps slower by design
DATA_STEPS = 50  # at least, and
DATA_SECONDS = 10.0  # at least, looked at together: the first batches are always waited for
MUCH_WAITING = 0.25  # of the time of a step: without it, a third more would be learned
NEAR_LIMIT = 0.9  # of the memory it may use
LITTLE_LEFT = 0.05  # of the machine's memory: below, systems begin to swap
MIN_LEFT = 200_000_000  # bytes, where the machine's own memory is not known
NUM_INSPECTIONS = 2  # in a row: memory of a moment is no sign
BLOCK_SECONDS = 20.0  # of training, and
BLOCK_STEPS = 10  # at least, whose median speed counts as one: a hiccup is no change of speed
NUM_BLOCKS = 3  # in a row that must hold a level; a minute, so that opening a page is not said
MUCH_SLOWER = 0.8  # of the level that was held; single steps of a usual run wobble by 0.85
MORE_WAITING = 0.15  # of the time: then it is the data, and `data-bound` says so
BUSY_CORES = 0.3  # cores' worth of other programs more than before
SWAPPED_BYTES = 50_000_000  # in those blocks; a little swapping is usual
LIMITED = 0.95  # of full speed
HOT, HOTTER = 80.0, 8.0  # degrees, and more than before


def chunk_after(event: Event, chunk: int) -> int:
    """The chunk from here on: a process starts with its own, and halves it when memory runs out."""
    if isinstance(event, Started):
        return event.chunk
    return max(1, chunk // 2) if isinstance(event, Warned) and event.kind == RAN_OUT else chunk


class DataBound:
    """A good part of the time of a step is spent waiting for its batch."""

    def __init__(self, config: Config):
        self.config = config
        self.steps: deque[tuple[float, float]] = deque()  # seconds of waiting, and in all
        self.waited = self.seconds = 0.0  # of those

    def look(self, event: Event) -> Iterator[Warned]:
        if not isinstance(event, Step):
            return
        step_seconds = (self.config.train.batch_size or 1) / event.pairs_per_second
        waited = min(event.data_seconds, step_seconds)
        self.steps.append((waited, step_seconds))
        self.waited, self.seconds = self.waited + waited, self.seconds + step_seconds
        while len(self.steps) > DATA_STEPS and self.seconds - self.steps[0][1] >= DATA_SECONDS:
            waited, step_seconds = self.steps.popleft()
            self.waited, self.seconds = self.waited - waited, self.seconds - step_seconds
        is_enough = len(self.steps) >= DATA_STEPS and self.seconds >= DATA_SECONDS
        if is_enough and (share := self.waited / self.seconds) >= MUCH_WAITING:
            message = f"{share:.0%} of the time is spent waiting for data: preparing batches is too slow"
            more = f"use more worker processes: `--workers {(self.config.data.workers or 0) + 1}`"
            hint = "store decoded images: `--pack`" if self.config.data.pack is False else more
            yield Warned(event.step, message, hint, "data-bound")


class MemoryNearLimit:
    """The run holds nearly all the memory it may, or the machine has hardly any left."""

    def __init__(self, config: Config):
        self.config = config
        self.chunk = config.train.chunk or config.train.batch_size or 1
        self.num_near = 0

    def look(self, event: Event) -> Iterator[Warned]:
        self.chunk = chunk_after(event, self.chunk)
        if isinstance(event, Warned) and event.kind == RAN_OUT:
            self.num_near = 0
        if not isinstance(event, Inspected):
            return
        message = self.what_is_near(event)
        self.num_near = self.num_near + 1 if message else 0
        if message and self.num_near >= NUM_INSPECTIONS:
            yield Warned(event.step, message, self.hint(), "memory-near-limit")

    def what_is_near(self, event: Inspected) -> str | None:
        limit, is_own = event.memory_limit, bool(self.config.device.max_memory)
        if event.memory_used > NEAR_LIMIT * limit:
            allowed = "allowed by `--max-memory`" if is_own else "available"
            return f"training uses {event.memory_used / 1e9:.2f} of {limit / 1e9:.2f} GB of memory {allowed}"
        left = event.readings.get("memory_available")
        # A limit that was asked for says nothing about the machine.
        if left is not None and left < max(0 if is_own else LITTLE_LEFT * limit, MIN_LEFT):
            return f"only {left / 1e9:.2f} GB of memory is free: the machine will soon swap, which is slow"
        return None

    def hint(self) -> str:
        is_resnet = self.config.model.size == "resnet-tiny"  # computed in groups of 32, and never again
        if self.chunk > (32 if is_resnet else 1):
            return f"halve the chunk, with the same gradients: `--chunk {self.chunk // 2}`"
        if not (self.config.model.recompute or is_resnet):
            return "recompute activations instead of storing them: `--recompute`"
        if is_resnet or self.config.model.size == "nano":
            return "close other programs"
        return f"`{self.config.model.size}` hardly fits: choose a smaller `--size`"


@dataclass
class Block:
    """Some seconds of training."""

    speeds: list[float] = field(default_factory=list)  # pairs a second, of each step
    waiting: list[float] = field(default_factory=list)  # share of each step
    readings: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class Slower:
    """Throughput has fallen below the level it once held, and stays there."""

    def __init__(self, config: Config):
        self.config, self.chunk = config, config.train.chunk or 1
        self.is_whole = False
        self.reset()

    def reset(self) -> None:
        """Forgets the level, where another speed is to be expected from here on."""
        self.block = Block()
        self.last: deque[Block] = deque(maxlen=NUM_BLOCKS)
        self.best: list[Block] = []  # that held the highest level so far
        self.finding: tuple[str, str] | None = None  # message and hint

    def look(self, event: Event) -> Iterator[Warned]:
        self.chunk = chunk_after(event, self.chunk)
        if isinstance(event, Warned) and event.kind == RAN_OUT:
            self.reset()  # smaller chunks are slower by design
        if isinstance(event, Inspected):
            self.block.readings.append(event.readings)
        if not isinstance(event, Step):
            return
        train = self.config.train
        if not self.is_whole and event.progress >= train.whole_from:
            self.is_whole = True
            if (train.keep_patches or 1.0) < 1:
                self.reset()  # whole images take longer
                return
        step_seconds = (train.batch_size or 1) / event.pairs_per_second
        self.block.speeds.append(event.pairs_per_second)
        self.block.waiting.append(min(1.0, event.data_seconds / step_seconds))
        self.block.seconds += step_seconds
        if self.block.seconds >= BLOCK_SECONDS and len(self.block.speeds) >= BLOCK_STEPS:
            self.last.append(self.block)
            self.block = Block()
            self.finding = self.judge()
        if self.finding:
            yield Warned(event.step, *self.finding, "slower")

    def judge(self) -> tuple[str, str] | None:
        if len(self.last) < NUM_BLOCKS:
            return None
        speeds, best = ([median(block.speeds) for block in blocks] for blocks in (self.last, self.best))
        if not best or min(speeds) > min(best):
            self.best, best = list(self.last), speeds
        before, now = (fmean(w for b in blocks for w in b.waiting) for blocks in (self.best, self.last))
        if max(speeds) > MUCH_SLOWER * min(best) or now - before > MORE_WAITING:
            return None
        readings = [[r for b in blocks for r in b.readings] for blocks in (self.best, self.last)]
        why, hint = likely_cause(readings[0], readings[1], self.chunk)
        usual, current = fmean(best), fmean(speeds)
        slower = f"{1 - current / usual:.0%} slower, {current:.0f} pairs/s instead of {usual:.0f}"
        return f"training is {slower}: {why}", hint


def likely_cause(before: list[dict[str, Any]], now: list[dict[str, Any]], chunk: int) -> tuple[str, str]:
    """Why it is slower and what to do, from what changed in the readings; what cannot be read says nothing."""
    cool = "improve the cooling: use a hard surface or a cooler place"
    if any(values(before, "is_plugged")) and not all(values(now, "is_plugged")):
        return "the machine runs on battery", "plug it in"
    swapped = values(now, "swapped_bytes")
    if swapped and swapped[-1] - swapped[0] > SWAPPED_BYTES:
        smaller = f", or resume with `--chunk {chunk // 2}`" if chunk > 1 else ""
        return "memory is low and the machine swaps", f"close programs{smaller}"
    if (limits := values(now, "speed_limit")) and fmean(limits) < LIMITED:
        return f"the machine is hot and limits its speed to {fmean(limits):.0%}", cool
    others, usual = values(now, "other_cores"), values(before, "other_cores")
    if others and fmean(others) - (fmean(usual) if usual else 0.0) > BUSY_CORES:
        return f"other programs keep {fmean(others):.1f} cores busy", "close programs that you do not need"
    degrees, cooler = values(now, "temperature"), values(before, "temperature")
    if degrees and cooler and fmean(degrees) >= HOT and fmean(degrees) - fmean(cooler) >= HOTTER:
        return f"the machine is hot ({fmean(degrees):.0f} °C)", cool
    return "probably heat or another program", "check what else is running, and improve the cooling"


def values(readings: list[dict[str, Any]], name: str) -> list[Any]:
    return [reading[name] for reading in readings if reading.get(name) is not None]
