"""What was measured before, per machine, torch and work: one small JSON file in the user's cache folder each."""

import hashlib
import json
import time
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from lapclip import __version__
from lapclip.autotune.measure import NO_MEMORY
from lapclip.autotune.results import Candidate, Measured
from lapclip.errors import UserError
from lapclip.files import cache_folder, write_atomically
from lapclip.machine.device import DEVICES, present_devices
from lapclip.machine.hardware import Machine
from lapclip.step.step import Plan

MOST_DAYS = 30
MOST_BYTES = 5_000_000
T = TypeVar("T")


def folder_for(machine: Machine, facts: dict[str, Any]) -> Path:
    """Where is kept what was measured of something on this machine."""
    here = [machine.chip, machine.system, machine.num_cores, machine.memory_bytes]
    here += [device.about() for device in present_devices()]
    return cache_folder() / "measured" / digest([__version__, torch.__version__, here, facts])


def digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def recall(
    folder: Path, plans: Iterable[Plan], is_allowed: Callable[[Plan], bool] | None = None
) -> Measured | None:
    """Of the newest that timed all these plans, what it found of them and of others that are allowed; not when old."""
    found = [measured for path in folder.glob("*.json") if (measured := measured_from(load(path)))]
    wanted = set(plans)
    newest = max((m for m in found if wanted <= m.plans), key=lambda measured: measured.when, default=None)
    if newest is None:
        return None
    allowed = (c for c in newest.candidates if c.plan in wanted or (is_allowed and is_allowed(c.plan)))
    return replace(newest, candidates=tuple(allowed))


def remember(folder: Path, measured: Measured) -> None:
    """Keeps what was measured, but not what may be otherwise tomorrow."""
    if any(candidate.rejected == NO_MEMORY for candidate in measured.candidates):
        return
    plans = sorted(json.dumps(asdict(plan), sort_keys=True) for plan in measured.plans)
    store(folder / f"{digest(plans)}.json", asdict(measured))


def measured_from(stored: dict[str, Any] | None) -> Measured | None:
    """None for what is not as we write it."""
    if stored is None or not isinstance(stored.get("candidates"), list):
        return None
    candidates = [candidate_from(candidate) for candidate in stored["candidates"]]
    known = [candidate for candidate in candidates if candidate is not None]
    if len(known) < len(candidates):
        return None
    return rebuilt(Measured, stored | {"candidates": tuple(known)})


def candidate_from(stored: Any) -> Candidate | None:
    if not isinstance(stored, dict):
        return None
    plan = rebuilt(Plan, stored.get("plan"))
    if plan is None or plan.device not in DEVICES or min(plan.threads, plan.chunk) < 1:
        return None
    candidate = rebuilt(Candidate, stored | {"plan": plan})
    is_rated = candidate is not None and candidate.pairs_per_second is not None
    return None if is_rated and candidate.pairs_per_second <= 0 else candidate  # type: ignore[union-attr, operator]


def rebuilt(kind: type[T], stored: Any) -> T | None:
    """A dataclass of plain values from JSON, where each is there and of its type; a file may be anybody's."""
    if not isinstance(stored, dict):
        return None
    hints = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if not all(name in stored and is_of(hints[name], stored[name]) for name in names):
        return None
    return kind(**{name: stored[name] for name in names})


def is_of(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(is_of(option, value) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(hint) or hint)


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
        if path.stat().st_size > MOST_BYTES:
            return None
        stored = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(stored, dict) or not is_of(float, stored.get("when")):
        return None
    return stored if 0 <= time.time() - stored["when"] < MOST_DAYS * 86400 else None
