"""What a run reports: typed events, one JSON object a line; everything that shows a run reads these.

msgspec checks each line against the types below, so that no view breaks on a line that is torn, forged or damaged:
numbers are finite and within their bounds, texts printable, and nested values have the keys that views rely on.
"""

import dataclasses
import json
import os
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Meta

from lapclip.files import open_regular

VERSION = 1
MAX_SECONDS = 1e11  # since 1970, or of training: what can still be written as a date
LARGE = 1e30  # what can still be added up and squared
HUGE = 1.7e308

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Number = Annotated[float, Meta(ge=-LARGE, le=LARGE)]
AboveZero = Annotated[float, Meta(ge=1e-12, le=MAX_SECONDS)]
Finite = Annotated[float, Meta(ge=-HUGE, le=HUGE)]
# What keeps a validation set from being larger: one of two settings, or the source itself.
ValidationLimit = Literal["num_validation", "validation_share", "source"]


@dataclass(frozen=True)
class Event:
    """Something that happened, and when."""

    time: Seconds = field(default_factory=time.time, kw_only=True)  # seconds since 1970


@dataclass(frozen=True)
class Started(Event):
    """A process took the run up; steps reported earlier but later than `step` were lost and come again."""

    step: Count
    seconds: Seconds  # of training, so far
    pid: Count
    num_parameters: Count
    num_train: Positive  # pairs in an epoch
    batch_size: Positive
    chunk: Positive
    device: str
    threads: Count
    minutes: AboveZero | None
    total_steps: Positive | None
    validation_limit: ValidationLimit | None = None
    num_trained: Count | None = None  # parameters, where some are frozen


@dataclass(frozen=True)
class Step(Event):
    """One optimizer update."""

    step: Count
    epoch: Seconds
    num_pairs_seen: Count
    loss: Number
    accuracy: Share  # in the batch, both directions
    lr: Number
    temperature: AboveZero
    grad_norm: Number
    pairs_per_second: Number
    data_seconds: Finite  # spent waiting for the batch
    seconds: Seconds  # of training, so far
    progress: Share
    seconds_left: Seconds
    num_different: Count | None = None  # captions of the batch, equal ones counted once
    chance: Share | None = None  # of the accuracy: the share of combinations that are correct


@dataclass(frozen=True)
class Inspected(Event):
    """One step looked at closely, and the machine meanwhile; every few seconds."""

    step: Count
    parts: dict[str, Seconds]  # seconds of this step by part, in the order of PARTS
    # By kind, in the order of KINDS_OF_MEMORY; None for what is not measured.
    memory: dict[str, Count | None]  # bytes
    memory_used: Count  # bytes, of the process and its children, now
    memory_peak: Count
    memory_limit: Count  # what it may use
    grad_norms: dict[str, Any]  # by layer, before clipping: `image.patches`, `image.0`, ..., `text.out`
    readings: dict[str, Any]  # of `sensors`: cores, temperature, power, battery, swap; only what can be read


PARTS = ("data", "transfer", "forward", "backward", "optimizer", "other")
KINDS_OF_MEMORY = ("parameters", "gradients", "optimizer", "activations", "data")


@dataclass(frozen=True)
class Evaluated(Event):
    """Recall over the validation set, as `lapclip eval --json` prints it."""

    step: Count
    recall: dict[str, Any]
    is_best: bool
    elapsed_seconds: Finite
    loss: Number | None = None  # over the validation set, in batches as in training
    snapshot: str | None = None  # file in the run folder: example searches at this step
    general: dict[str, Any] | None = None  # recall over the general source, likewise


@dataclass(frozen=True)
class Interpolated(Event):
    """Recall of the models between the pretrained one (alpha 0) and the trained one (1); the chosen one is the best."""

    step: Count
    alphas: list[Share]
    recall: list[dict[str, Any]]  # of each, over the validation set
    general: list[dict[str, Any]] | None  # of each, over the general source
    chosen: Share

    @property
    def place(self) -> int:
        return self.alphas.index(self.chosen)


@dataclass(frozen=True)
class Warned(Event):
    """Something the person should know; training goes on."""

    step: Count
    message: str
    hint: str
    kind: str = ""  # for programs: `collapsed`, `data-bound`, ...


@dataclass(frozen=True)
class Paused(Event):
    """Training waits, with everything saved, until `reason` no longer holds."""

    step: Count
    reason: str


@dataclass(frozen=True)
class Continued(Event):
    """Training goes on after a pause, which is not counted as training."""

    step: Count
    paused_seconds: Seconds


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is on the disk."""

    step: Count
    checkpoint: str
    bytes: Count
    elapsed_seconds: Finite


@dataclass(frozen=True)
class Finished(Event):
    """The run ended well: its budget is used up, or somebody stopped it and everything is saved."""

    reason: str  # "budget" or "stopped"
    step: Count
    epochs: Seconds
    seconds: Seconds
    num_pairs_seen: Count
    pairs_per_second: Number
    peak_memory_bytes: Count
    num_parameters: Count
    recall: dict[str, Any] | None  # of the best checkpoint
    best_step: Count | None
    checkpoint: str | None  # the best one


@dataclass(frozen=True)
class Failed(Event):
    """The run ended badly; the last checkpoint is still good."""

    message: str
    hint: str


KINDS = {kind.__name__: kind for kind in Event.__subclasses__()}

# The keys of nested values that views rely on, with their bounds; there may be more.
SHARE, AMOUNT, FINITE = (0, 1), (0, 2**63), (-HUGE, HUGE)
WAY: dict[str, Any] = {f"{what}@{k}": SHARE for what in ("recall", "chance") for k in (1, 5, 10)}
WAY |= {"median_rank": AMOUNT, "interval@10": [SHARE, SHARE]}
RECALL: dict[str, Any] = {
    **dict.fromkeys(("num_images", "num_captions"), AMOUNT),
    **dict.fromkeys(("text_to_image", "image_to_text"), WAY),
    "in_batch": {"accuracy": SHARE, "chance": SHARE, "batch_size": AMOUNT},
}
NEGATIVES = {"easy": SHARE, "medium": SHARE, "hard": SHARE, "chance": SHARE, "num_choices": AMOUNT}
READINGS: dict[str, Any] = {
    **dict.fromkeys(("other_cores", "memory_available", "swap_used", "swapped_bytes", "power_watts"), AMOUNT),
    "temperature": (-300, 1000),
    "speed_limit": SHARE,
    "battery": (0, 100),
    "is_plugged": bool,
    "power_of": str,
}
# Would steer a terminal, or break a page.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Head(msgspec.Struct):
    """What every line has."""

    version: Literal[1]
    event: str
    time: Seconds


def to_line(event: Event) -> str:
    record = {"version": VERSION, "event": type(event).__name__} | dataclasses.asdict(event)
    # By far the most lines: seven digits, and thousandths, are enough for every view.
    if isinstance(event, Step):
        for name, value in record.items():
            if isinstance(value, float):
                record[name] = round(value, 3) if abs(value) >= 1e4 else float(f"{value:.7g}")
    return json.dumps(record, separators=(",", ":")) + "\n"


HEAD = msgspec.json.Decoder(Head)
DECODERS = {kind: msgspec.json.Decoder(kind) for kind in KINDS.values()}
UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def from_line(line: bytes | str) -> Event | None:
    """The event of a line; None for a torn line, a later version, or what its class does not allow."""
    if line[:1] not in ("{", b"{"):
        return None
    try:
        try:
            event = DECODERS[KINDS[HEAD.decode(line).event]].decode(line)
        except UNREADABLE:  # perhaps JSON only to Python: with `NaN`, or half a character in a text
            record = clean(json.loads(line))
            event = msgspec.convert(record, KINDS[msgspec.convert(record, Head).event])
        return event if type(event) is Step else checked(event)
    except UNREADABLE:
        return None


def checked(event: Event) -> Event:
    """The event with printable texts and sound nested values; raises when what views rely on is missing."""
    values = {name: clean(value) for name, value in vars(event).items() if not isinstance(value, int | float)}
    match event:
        case Inspected():
            values["parts"] = {part: event.parts[part] for part in PARTS}
            values["memory"] = {kind: event.memory[kind] for kind in KINDS_OF_MEMORY}
            values["grad_norms"] = {k: v for k, v in values["grad_norms"].items() if fits(v, (0, HUGE))}
            shapes = READINGS | {"cores": [SHARE] * len(values["readings"].get("cores") or [])}
            read = values["readings"].items()
            values["readings"] = {k: v for k, v in read if fits(v, shapes.get(k, FINITE))}
        case Evaluated():
            if not is_recall(values["recall"]):
                raise ValueError
            is_own = event.snapshot and re.fullmatch(r"snapshots/[\w-]+\.json", event.snapshot)
            values["snapshot"] = event.snapshot if is_own else None
            values["general"] = values["general"] if is_recall(values["general"]) else None
        case Interpolated():
            measured = values["recall"], values["recall"] if event.general is None else values["general"]
            is_whole = all(len(each) == len(event.alphas) and all(map(is_recall, each)) for each in measured)
            if not is_whole or event.chosen not in event.alphas:
                raise ValueError
        case Finished():
            values["recall"] = values["recall"] if is_recall(values["recall"]) else None
    return replace(event, **values)


def fits(value: Any, shape: Any) -> bool:
    """Whether a value is of a shape: a type, bounds of a number, a list of shapes, or a dict of keys it must have."""
    match shape:
        case type():
            return type(value) is shape
        case tuple():
            return type(value) in (int, float) and shape[0] <= value <= shape[1]
        case list():
            return type(value) is list and len(value) == len(shape) and all(map(fits, value, shape))
    return type(value) is dict and all(name in value and fits(value[name], shape[name]) for name in shape)


def is_recall(value: Any) -> bool:
    """`negatives` came later, and may be too few pairs to say."""
    return fits(value, RECALL) and (not value.get("negatives") or fits(value["negatives"], NEGATIVES))


def clean(value: Any) -> Any:
    """A value without unprintable characters; numbers that are not finite become None."""
    match value:
        case str():
            return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
        case float() | int() if not -HUGE <= value <= HUGE:
            return None
        case dict():
            return {clean(name): clean(inner) for name, inner in value.items()}
        case list():
            return [clean(inner) for inner in value]
    return value


def failure_in(said: dict[str, Any] | None) -> Failed | None:
    """The failure that could only be written into the lock, since the disk was full."""
    event = from_line(json.dumps({"version": VERSION, "event": "Failed"} | said)) if said else None
    return event if isinstance(event, Failed) else None


def read_events(path: Path) -> Iterator[Event]:
    """All events of a file, oldest first; lines that cannot be read are passed over."""
    return Follower(path).new()


MAX_LINE = 1 << 20  # bytes; what is longer is no event
MAX_OVERLONG = 1024  # pieces of that length are passed over at a time: a file with holes can claim any size
MAX_IDENTITY = 128  # bytes of the first line, which has the time of the start in it


class Follower:
    """Reads a file of events while it is written; of a file of any size no more than MAX_LINE bytes are held.

    Only whole lines count. A file that was cut short or replaced by another is read again from its start, which
    `num_restarts` tells.
    """

    def __init__(self, path: Path):
        self.path = path
        self.identity = self.offset = self.num_restarts = 0
        self.last_byte = b""  # before the offset

    @property
    def place(self) -> str:
        """How far which file has been read."""
        return f"{self.identity}-{self.offset}"

    def new(self) -> Iterator[Event]:
        """Every event that was added since the last call."""
        try:
            with open_regular(self.path) as file:
                if self.offset and not self.is_same(file):
                    self.num_restarts, self.offset = self.num_restarts + 1, 0
                file.seek(self.offset)
                num_overlong = 0
                while num_overlong < MAX_OVERLONG and (line := file.readline(MAX_LINE)):
                    num_overlong += len(line) == MAX_LINE
                    if len(line) < MAX_LINE and not line.endswith(b"\n"):
                        return  # still being written
                    if self.offset == 0:
                        self.identity = identify(file, line[:MAX_IDENTITY])
                    self.offset, self.last_byte = self.offset + len(line), line[-1:]
                    if event := from_line(line):
                        yield event
        except OSError:  # not there yet, or not at the moment
            return

    def is_same(self, file: BinaryIO) -> bool:
        """Whether it is the file that was read before, and still has there what was read last."""
        if identify(file, file.readline(MAX_IDENTITY)) != self.identity:
            return False
        file.seek(self.offset - 1)
        return file.read(1) == self.last_byte


def identify(file: BinaryIO, beginning: bytes) -> int:
    """A number that another file would not have: a new one often gets the inode of the one that was deleted."""
    return zlib.crc32(beginning, os.fstat(file.fileno()).st_ino & 0xFFFFFFFF)
