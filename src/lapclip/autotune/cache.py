"""What was measured before, per machine, torch version and work: small JSON files in the user's cache folder."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from lapclip import __version__
from lapclip.autotune.plans import Measured
from lapclip.config import Plan
from lapclip.errors import UserError
from lapclip.files import cache_folder, read_bounded, write_atomically
from lapclip.machine.device import DEVICES, present_devices
from lapclip.machine.hardware import Machine

MAX_DAYS = 30
MAX_BYTES = 5_000_000
T = TypeVar("T")


def folder_for(machine: Machine, facts: dict[str, Any]) -> Path:
    """The folder of what was measured of something on this machine."""
    here = [machine.chip, machine.system, machine.num_cores, machine.memory_bytes]
    here += [device.about() for device in present_devices()]
    return cache_folder() / "measured" / digest([__version__, torch.__version__, here, facts])


def digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def recall(
    folder: Path, plans: Iterable[Plan], is_allowed: Callable[[Plan], bool] | None = None
) -> Measured | None:
    """The newest measurement of all these plans, with what it found of others that are allowed; None if too old."""
    expected = set(plans)
    found = [m for path in folder.glob("*.json") if (m := load(path, Measured)) and expected <= m.plans]
    sound = [m for m in found if all(p.device in DEVICES and min(p.threads, p.chunk) >= 1 for p in m.plans)]
    if not sound:
        return None
    newest = max(sound, key=lambda m: m.when)
    allowed = (c for c in newest.candidates if c.plan in expected or (is_allowed and is_allowed(c.plan)))
    return replace(newest, candidates=tuple(allowed))


def remember(folder: Path, measured: Measured) -> None:
    """Stores a measurement, unless memory ran out or other programs disturbed it, which may be different tomorrow."""
    if not measured.is_disturbed and not any(c.ran_out_of_memory for c in measured.candidates):
        name = digest(sorted(plan.in_words() for plan in measured.plans))
        store(folder / f"{name}.json", asdict(measured))


def store(path: Path, result: dict[str, Any]) -> None:
    """Stores a result with the time of its measurement; a cache that cannot be written is no reason to stop."""
    with suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"when": time.time()} | result))


def load(path: Path, kind: type[T]) -> T | None:
    """A stored result that is not too old, as a dataclass or dictionary of that type; None for any other file."""
    try:
        stored = msgspec.json.decode(read_bounded(path, MAX_BYTES))
        age_seconds = time.time() - stored["when"]
        return msgspec.convert(stored, kind) if 0 <= age_seconds < MAX_DAYS * 86400 else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
        return None  # a file may hold anything
