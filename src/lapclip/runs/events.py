"""What a run reports: typed events, one JSON object a line; everything that shows a run reads these."""

import dataclasses
import json
import math
import os
import time
import typing
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO

from lapclip.runs import intake

VERSION = 1


@dataclass(frozen=True)
class Event:
    """Something that happened, and when."""

    time: float = field(default_factory=time.time, kw_only=True)  # seconds since 1970


@dataclass(frozen=True)
class Started(Event):
    """A process took the run up; steps reported earlier but later than `step` were lost and come again."""

    step: int
    seconds: float  # of training, so far
    pid: int
    num_parameters: int
    num_train: int  # pairs in an epoch
    batch_size: int
    chunk: int
    device: str
    threads: int
    minutes: float | None
    total_steps: int | None


@dataclass(frozen=True)
class Step(Event):
    """One optimizer update."""

    step: int
    epoch: float
    num_pairs_seen: int
    loss: float
    accuracy: float  # in the batch, both directions
    lr: float
    temperature: float
    grad_norm: float
    pairs_per_second: float
    data_seconds: float  # spent waiting for the batch
    seconds: float  # of training, so far
    progress: float
    seconds_left: float
    num_different: int | None = None  # captions of the batch, equal ones counted once


@dataclass(frozen=True)
class Inspected(Event):
    """One step looked at closely, and the machine meanwhile; every few seconds."""

    step: int
    parts: dict[str, float]  # seconds of this step by part, in the order of PARTS
    memory: dict[
        str, int | None
    ]  # bytes by kind, in the order of KINDS_OF_MEMORY; None for what is not measured
    memory_used: int  # bytes, of the process and its children, now
    memory_peak: int
    memory_limit: int  # what it may use
    grad_norms: dict[str, float]  # by layer, before clipping: `image.patches`, `image.0`, ..., `text.out`
    readings: dict[str, Any]  # of `sensors`: cores, temperature, power, battery, swap; only what can be read


PARTS = ("data", "transfer", "forward", "backward", "optimizer", "other")
KINDS_OF_MEMORY = ("parameters", "gradients", "optimizer", "activations", "data")


@dataclass(frozen=True)
class Evaluated(Event):
    """Recall over the held-out pool, as `lapclip eval --json` prints it."""

    step: int
    recall: dict[str, Any]
    is_best: bool
    elapsed_seconds: float
    loss: float | None = None  # over the pool, in batches as in training
    snapshot: str | None = None  # file in the run folder: what it thinks now


def mean_recall(recall: dict[str, Any]) -> float:
    """What makes one evaluation better than another: all six recalls together, steadier than any one of them."""
    ways = ("text_to_image", "image_to_text")
    return sum(recall[way][f"recall@{k}"] for way in ways for k in (1, 5, 10)) / 6


def is_as_good(recall: dict[str, Any], highest: float | None) -> bool:
    """Whether it is the highest so far, or no further from it than chance may put it, by one standard error.

    Of two that cannot be told apart the later one has learned more: among 18 held-out images an early stroke of luck
    is nothing.
    """
    if highest is None:
        return True
    error = math.sqrt(max(0.0, highest * (1 - highest)) / recall["num_images"])
    return mean_recall(recall) >= highest - error


@dataclass(frozen=True)
class Warned(Event):
    """Something the person should know; training goes on."""

    step: int
    message: str
    hint: str
    kind: str = ""  # for programs: `collapsed`, `data-bound`, ...


@dataclass(frozen=True)
class Paused(Event):
    """Training waits, with everything saved, until `reason` no longer holds."""

    step: int
    reason: str


@dataclass(frozen=True)
class Continued(Event):
    """Training goes on after a pause, which is not counted as training."""

    step: int
    paused_seconds: float


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is on the disk."""

    step: int
    checkpoint: str
    bytes: int
    elapsed_seconds: float


@dataclass(frozen=True)
class Finished(Event):
    """The run ended well: its budget is used up, or somebody stopped it and everything is saved."""

    reason: str  # "budget" or "stopped"
    step: int
    epochs: float
    seconds: float
    num_pairs_seen: int
    pairs_per_second: float
    peak_memory_bytes: int
    num_parameters: int
    recall: dict[str, Any] | None  # of the best checkpoint
    best_step: int | None
    checkpoint: str | None  # the best one


@dataclass(frozen=True)
class Failed(Event):
    """The run ended badly; the last checkpoint is still good."""

    message: str
    hint: str


KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (Started, Step, Inspected, Evaluated, Warned, Paused, Continued, Saved, Finished, Failed)
}


def to_line(event: Event) -> str:
    record = {"version": VERSION, "event": type(event).__name__} | dataclasses.asdict(event)
    if isinstance(event, Step):  # by far the most lines: seven digits are enough for every view
        record |= {name: short(value) for name, value in record.items() if isinstance(value, float)}
    return json.dumps(record, separators=(",", ":")) + "\n"


def short(value: float) -> float:
    """With seven digits, and at least thousandths: a time keeps them too."""
    return round(value, 3) if abs(value) >= 1e4 else float(f"{value:.7g}")


def from_line(line: bytes | str) -> Event | None:
    """The event of a line; None for a torn line, a later version, or what is not as its class promises."""
    if line[:1] not in ("{", b"{"):
        return None
    try:
        record = json.loads(line if isinstance(line, str) else line.decode())
        if record["version"] != VERSION:
            return None
        kind = KINDS[record["event"]]
        numbers, others = CHECKS[kind]
        values = {}
        for name, default, types, low, high in numbers:
            value = record.get(name, default)
            if type(value) not in types or (value is not None and not low <= value <= high):
                return None
            values[name] = value
        for name, default, take in others:
            values[name] = take(record.get(name, default))
        return kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def failure_in(said: dict[str, Any] | None) -> Failed | None:
    """The failure that could only be written into the lock, since the disk was full."""
    event = from_line(json.dumps({"version": VERSION, "event": "Failed"} | said)) if said else None
    return event if isinstance(event, Failed) else None


TAKES: dict[Any, Callable[[Any], Any]] = {
    str: intake.words,
    "recall": intake.recall,
    "parts": partial(intake.seconds_of, parts=PARTS),
    "memory": partial(intake.bytes_of, kinds=KINDS_OF_MEMORY),
    "grad_norms": intake.grad_norms,
    "readings": intake.readings,
    "snapshot": intake.snapshot,
}
REQUIRED = object()  # no value of a record is of its type, so that a missing one is refused like a wrong one


def checks_of(kind: type[Event]) -> tuple[list[tuple], list[tuple]]:
    """How the fields of an event are checked: numbers by type and range, others by what their name or type asks for."""
    numbers: list[tuple] = []
    others: list[tuple] = []
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        hint = hints[f.name]
        options = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
        default = REQUIRED if f.default is dataclasses.MISSING else f.default
        if options[0] in intake.BY_TYPE:
            types = (*options, int) if options[0] is float else options
            numbers.append((f.name, default, types, *intake.RANGES.get(f.name, intake.BY_TYPE[options[0]])))
        else:
            take = TAKES.get(f.name) or TAKES[options[0]]
            others.append((f.name, default, intake.or_none(take) if NoneType in options else take))
    return numbers, others


CHECKS = {kind: checks_of(kind) for kind in KINDS.values()}


def read_events(path: Path) -> Iterator[Event]:
    """All events of a file, oldest first; lines that cannot be read are passed over."""
    return Follower(path).new()


LONGEST_LINE = 1 << 20  # bytes; what is longer is no event
PORTION = 1 << 20
LONGEST_IDENTITY = 128  # bytes of the first line, which has the time of the start in it


class Follower:
    """Reads a file of events while it is written.

    Only whole lines count. A file that was cut short or replaced by another is read anew from its start, which
    `num_restarts` tells; of a file of any size no more than a portion is held.
    """

    def __init__(self, path: Path, place: str = ""):
        self.path = path
        self.identity, self.offset = parse_place(place)
        self.num_restarts = 0
        self.is_in_long_line = False

    @property
    def place(self) -> str:
        """Where reading stands, for another follower to go on from."""
        return f"{self.identity}-{self.offset}"

    def new(self) -> Iterator[Event]:
        """Every event that was added since the last call."""
        try:
            with self.path.open("rb") as file:
                if self.offset and not self.can_go_on(file):
                    self.num_restarts += 1
                    self.offset, self.is_in_long_line = 0, False
                file.seek(self.offset)
                yield from self.read_on(file)
        except OSError:  # not there yet, or not at the moment
            return

    def can_go_on(self, file: BinaryIO) -> bool:
        """Whether it is still the same file, reaches to where reading stands, and a line ends there."""
        if identify(file, file.read(LONGEST_IDENTITY)) != self.identity:
            return False
        if self.offset > os.fstat(file.fileno()).st_size:
            return False
        file.seek(self.offset - 1)
        return self.is_in_long_line or file.read(1) == b"\n"

    def read_on(self, file: BinaryIO) -> Iterator[Event]:
        rest, read = b"", self.offset
        while portion := file.read(PORTION):
            read += len(portion)
            portion = rest + portion
            if self.offset == 0:  # while its first line is torn a file has no name yet, and no place
                self.identity = identify(file, portion)
            *lines, rest = portion.split(b"\n")
            for line in lines:
                event = None if self.is_in_long_line else from_line(line)
                self.is_in_long_line = False
                self.offset += len(line) + 1
                if event is not None:
                    yield event
            if len(rest) > LONGEST_LINE:
                self.offset, rest, self.is_in_long_line = read, b"", True


def identify(file: BinaryIO, beginning: bytes) -> int:
    """A number that another file would not have: a new one often gets the inode of the one that was deleted."""
    first_line = beginning[:LONGEST_IDENTITY].partition(b"\n")[0]
    return zlib.crc32(first_line, os.fstat(file.fileno()).st_ino & 0xFFFFFFFF)


def parse_place(place: str) -> tuple[int, int]:
    identity, _, offset = place.partition("-")
    is_one = len(place) < 40 and identity.isdecimal() and offset.isdecimal()
    return (int(identity), int(offset)) if is_one else (0, 0)
