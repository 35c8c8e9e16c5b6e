"""What was measured before, per machine, torch and work: one small JSON file in the user's cache folder each."""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lapclip.errors import UserError
from lapclip.machine import Machine, cache_folder
from lapclip.measure.results import Candidate, Measured
from lapclip.run import write_atomically
from lapclip.step import Way

VERSION = 1  # of the step: to be raised when its speed changes
MOST_DAYS = 30


def folder_for(machine: Machine, facts: dict[str, Any]) -> Path:
    """Where is kept what was measured of something on this machine."""
    here = [machine.chip, machine.system, machine.num_cores, machine.memory_bytes]
    return cache_folder() / "measured" / digest([VERSION, torch.__version__, here, facts])


def digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def recall(folder: Path, ways: Iterable[Way]) -> Measured | None:
    """The newest that timed all these ways, unless it is old."""
    found = [measured for path in folder.glob("*.json") if (measured := measured_from(load(path)))]
    wanted = set(ways)
    return max((m for m in found if wanted <= m.ways), key=lambda measured: measured.when, default=None)


def remember(folder: Path, measured: Measured) -> None:
    ways = sorted(json.dumps(asdict(way), sort_keys=True) for way in measured.ways)
    store(folder / f"{digest(ways)}.json", asdict(measured))


def measured_from(stored: dict[str, Any] | None) -> Measured | None:
    """None for what is not as we write it."""
    try:
        candidates = tuple(Candidate(**c | {"way": Way(**c["way"])}) for c in (stored or {})["candidates"])
        return Measured(**(stored or {}) | {"candidates": candidates})
    except (TypeError, KeyError, AttributeError):
        return None


def store(path: Path, result: dict[str, Any]) -> None:
    """Keeps a result with the moment it was measured; a cache that cannot be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"when": time.time()} | result))
    except (OSError, UserError):
        return


def load(path: Path) -> dict[str, Any] | None:
    """A result that was kept and is not old."""
    try:
        stored = json.loads(path.read_text("utf-8"))
        is_fresh = 0 <= time.time() - float(stored["when"]) < MOST_DAYS * 86400
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return stored if is_fresh else None


def age(seconds: float) -> str:
    """How long ago, in words."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
