"""What a run reports: typed events, one JSON object a line; everything that shows a run reads these."""

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Evaluated(Event):
    """Recall over the held-out pool, as `lapclip eval --json` prints it."""

    step: int
    recall: dict[str, Any]
    is_best: bool
    elapsed_seconds: float


@dataclass(frozen=True)
class Warned(Event):
    """Something the person should know; training goes on."""

    step: int
    message: str
    hint: str


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
    kind.__name__: kind for kind in (Started, Step, Evaluated, Warned, Saved, Finished, Failed)
}


def to_line(event: Event) -> str:
    record = {"version": VERSION, "event": type(event).__name__} | dataclasses.asdict(event)
    return json.dumps(record, separators=(",", ":")) + "\n"


def from_line(line: str) -> Event | None:
    """The event of a line; None for a torn line or an event of a later version."""
    try:
        record = json.loads(line)
        kind = KINDS[record.pop("event")]
        known = {f.name for f in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in record.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_events(path: Path) -> Iterator[Event]:
    """All events of a file, oldest first; lines that cannot be read are passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            event = from_line(line)
            if event is not None:
                yield event
