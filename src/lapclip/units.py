"""Numbers as people write and read them: `500` steps, `5m` of training, 3m05s, 1.25 GB, 3.1%; a dash where unknown.
And how far long work is: generators yield `Progress`, and return their result.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

UNKNOWN = "-"
NOT_MEASURED = "not measured"
SECONDS = {"s": 1, "m": 60, "h": 3600}
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far long work is; `cli.screen.follow` shows it."""

    what: str  # is being done: `packing images`
    done: int = 0
    total: int = 0  # 0 while it is unknown
    num_unreadable: int = 0  # of those done
    needed_bytes: int = 0  # of disk space, for all of it


LongWork = Generator[Progress, None, T]  # yields how far it is, and returns its result
StagedWork = Generator[str, None, T]  # yields what it does now, likewise


def finished(work: Generator[object, None, T]) -> T:
    """The result of work whose progress is not shown."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def parse_every(text: str) -> tuple[float, float]:
    """Steps and seconds of `500`, `90s`, `5m` or `1h`, the other one endless; ValueError for anything else."""
    unit = SECONDS.get(text[-1:])
    amount = int(text) if unit is None else float(text[:-1]) * unit
    if not 0 < amount < math.inf:
        raise ValueError
    return (amount, math.inf) if unit is None else (math.inf, amount)


def parse_percent(text: str) -> float:
    """20 of `20%` or `20`; ValueError for anything else."""
    percent = float(text.removesuffix("%"))
    if not (percent == 0 or 1 <= percent <= 100):  # 0.2 may be meant as a share
        raise ValueError
    return percent


def is_due(every: str, steps: int, seconds: float) -> bool:
    """Whether so many steps or seconds since the last time are enough."""
    least_steps, least_seconds = parse_every(every)
    return steps >= least_steps or seconds >= least_seconds


def duration(seconds: float | None) -> str:
    """0 s, 42 us, 8.3 ms, 120 ms, 8.3 s, 54 s, 3m05s, 1h02m."""
    if not is_number(seconds):
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.{0 if seconds >= 1e-5 else 1}f} us"
    if seconds < 1:
        return f"{seconds * 1000:.{0 if seconds >= 0.1 else 1}f} ms"
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def percent(share: float | None) -> str:
    """100%, 36.4%, 0.003%: a small share with the digits that tell it from nothing."""
    if not is_number(share):
        return UNKNOWN
    if share in (0, 1):
        return f"{share:.0%}"
    return f"{share:.1%}" if abs(share) >= 0.0005 else f"{100 * share:.1g}%"


def plural(count: int, thing: str) -> str:
    """1 thread, 2,000 threads."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def size(num_bytes: float | None) -> str:
    """1.25 GB, 120 MB, 3.4 kB."""
    if not is_number(num_bytes):
        return UNKNOWN
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.{2 if num_bytes < 1e10 else 1}f} GB"
    if num_bytes >= 1e5 or num_bytes == 0:
        return f"{num_bytes / 1e6:.{0 if num_bytes >= 1e7 else 1}f} MB"
    return f"{num_bytes / 1e3:.1f} kB"


def age(seconds: float) -> str:
    """How long ago, in words."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{plural(int(seconds // length), unit)} ago"
    return "just now"


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def number(value: float | None, digits: int = 3) -> str:
    if not is_number(value):
        return UNKNOWN
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"


def count(value: float | None) -> str:
    return UNKNOWN if not is_number(value) else f"{value:,.0f}"


def short_count(value: float) -> str:
    """76.7M, 1.01B, 512: as short as a label must be."""
    for letter, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def rate(value: float | None) -> str:
    """Pairs a second; slow ones with a digit after the point."""
    if not is_number(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def epochs(value: float) -> str:
    """Times over the data; a part of one to two digits."""
    return f"{value:.2g}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def energy(joules: float | None) -> str:
    if not is_number(joules):
        return NOT_MEASURED
    return f"{joules:,.0f} J" if joules < 36_000 else f"{joules / 3600:,.1f} Wh"


def listed(things: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return things[0] if len(things) == 1 else f"{', '.join(things[:-1])} and {things[-1]}" if things else ""


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
