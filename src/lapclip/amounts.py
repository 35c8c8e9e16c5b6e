"""Amounts as people write them: `500` steps, `5m` of training, `20%` of a battery."""

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
    if not 0 <= percent <= 100:
        raise ValueError
    return percent


def is_due(every: str, steps: int, seconds: float) -> bool:
    """Whether so many steps or seconds since the last time are enough."""
    least_steps, least_seconds = parse_every(every)
    return steps >= least_steps or seconds >= least_seconds
