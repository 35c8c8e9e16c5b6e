"""Amounts as people write and read them: `500` steps, `5m` of training, `20%` of a battery, 3m05s, 1.25 GB, 3.1%."""

import math

SECONDS = {"s": 1, "m": 60, "h": 3600}


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


def duration(seconds: float) -> str:
    """3m05s, or 1h02m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def milliseconds(seconds: float) -> str:
    """8.3 ms, 125 ms, 1.25 s."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:.{0 if seconds >= 0.1 else 1}f} ms"


def percent(share: float) -> str:
    """25%, 3.1%, 0.003%: a small share with the digits that tell it from nothing."""
    if share >= 0.0995 or share == 0 or math.isnan(share):
        return f"{share:.0%}"
    return f"{share:.1%}" if share >= 0.0005 else f"{100 * share:.1g}%"


def plural(count: int, thing: str) -> str:
    """1 thread, 2,000 threads."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def size(num_bytes: float) -> str:
    """1.25 GB, 120 MB, 3.4 kB."""
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
