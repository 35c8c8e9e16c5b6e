"""What was measured, as plain values that go into a cache, a table and JSON; and the plan that is chosen from them."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from lapclip.step.step import Plan

HOPELESS = 1.5  # times as slow as the best: taken no further
TIE = 0.05  # whoever is this near to the fastest is as fast
MOST_NOISE = 0.2  # beyond that a difference is one, however noisy the machine
PRECISIONS = ("fp32", "bf16", "fp16")  # among equals, in this order


@dataclass(frozen=True)
class Candidate:
    """One execution plan, and how fast it was, or why it was not taken further."""

    plan: Plan
    pairs_per_second: float | None = None  # the median; None when it was never timed
    spread: float | None = None  # half the distance of the quartiles, as a share of the median
    first_call_seconds: float | None = None  # of the first step, compilation included
    rejected: str | None = None


@dataclass(frozen=True)
class Measured:
    """Candidates timed in turn in one process."""

    candidates: tuple[Candidate, ...]
    when: float  # seconds since 1970
    seconds: float  # it took
    drift: float = 0.0  # by which share a step became slower from the first rounds to the last

    @property
    def plans(self) -> set[Plan]:
        return {candidate.plan for candidate in self.candidates}


@dataclass(frozen=True)
class Budget:
    """How long a run is, in seconds or in pairs; compiling must pay within it."""

    seconds: float | None = None
    num_pairs: int | None = None


def choose(candidates: Iterable[Candidate], budget: Budget | None = None) -> Candidate | None:
    """The fastest not refused; among equals one chunk, uncompiled, more threads, then fp32 on the processor."""
    rated = [c for c in candidates if c.pairs_per_second is not None and c.rejected is None]
    if not rated:
        return None
    worth = {c: rate_over(c, budget or Budget()) for c in rated}
    best = max(rated, key=lambda c: worth[c])
    equal = (c for c in rated if worth[c] >= worth[best] * (1 - no_difference(c, best)))
    return min(equal, key=order_among_equals)


def no_difference(one: Candidate, other: Candidate) -> float:
    """Which share is none: 5%, or what the rounds of both differed by."""
    noise = ((one.spread or 0.0) + (other.spread or 0.0)) / 2
    return min(max(TIE, noise), MOST_NOISE)


def rate_over(candidate: Candidate, budget: Budget) -> float:
    """Pairs a second over a whole run, the time that compiling takes included."""
    rate = candidate.pairs_per_second
    assert rate is not None
    lost = (candidate.first_call_seconds or 0.0) if candidate.plan.compile else 0.0
    if budget.seconds is not None:
        return rate * max(0.0, 1 - lost / budget.seconds)
    return rate if budget.num_pairs is None else budget.num_pairs / (lost + budget.num_pairs / rate)


def remark_on(candidate: Candidate, measured: Measured) -> str | None:
    """Why a candidate was refused, or how far behind it fell."""
    rates = [c.pairs_per_second for c in measured.candidates if c.pairs_per_second is not None]
    if candidate.rejected is not None or candidate.pairs_per_second is None:
        return candidate.rejected
    factor = max(rates) / candidate.pairs_per_second
    return f"takes {factor:.1f}x as long" if factor > HOPELESS else None


def order_among_equals(candidate: Candidate) -> tuple:
    plan = candidate.plan
    return (
        -plan.chunk,
        plan.compile,
        -plan.threads,
        PRECISIONS.index(plan.precision),
        plan.device != "cpu",
        not plan.keep_memory,
    )


def reasons_for(choice: Candidate, measured: Measured) -> dict[str, str]:
    """Why each part of the chosen plan, in words; a part that had no rival has no reason."""
    reasons = {}
    for part in (field.name for field in fields(Plan)):
        chosen = getattr(choice.plan, part)
        others = dict.fromkeys(getattr(c.plan, part) for c in measured.candidates)
        said = [
            words
            for other in others
            if other != chosen
            and (pair := likest_pair(choice, measured.candidates, part, other))
            and (words := comparison(*pair, part))
        ]
        if said:
            reasons[part] = "; ".join(said)
    return reasons


def likest_pair(
    choice: Candidate, candidates: Iterable[Candidate], part: str, other: Any
) -> tuple[Candidate, Candidate] | None:
    """Two candidates that differ in one part alone, one with the chosen value and one with another; near the choice."""
    by_plan = {candidate.plan: candidate for candidate in candidates}
    pairs = [
        (by_plan[like], rival)
        for rival in by_plan.values()
        if getattr(rival.plan, part) == other
        and (like := replace(rival.plan, **{part: getattr(choice.plan, part)})) in by_plan
        and by_plan[like].pairs_per_second is not None
    ]
    return min(pairs, key=lambda pair: num_differences(pair[0].plan, choice.plan), default=None)


def num_differences(one: Plan, other: Plan) -> int:
    return sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(Plan))


def comparison(chosen: Candidate, rival: Candidate, part: str) -> str | None:
    """How two compare; nothing where the other won, in company of which neither was chosen."""
    named = in_words(part, getattr(rival.plan, part))
    if rival.pairs_per_second is None:
        return f"{named}: {rival.rejected}"
    assert chosen.pairs_per_second is not None
    factor = chosen.pairs_per_second / rival.pairs_per_second
    if factor >= 1.15:
        return f"{factor:.1f} times as fast as {named}"
    if factor >= 1 + TIE:
        return f"{factor - 1:.0%} faster than {named}"
    if factor >= 1 - TIE:
        return f"as fast as {named}"
    return (
        f"{named} is {1 / factor - 1:.0%} faster and takes long to begin with" if part == "compile" else None
    )


def in_words(part: str, value: Any) -> str:
    """The value of a part of a plan, as a thing that another can be faster than."""
    if part == "threads":
        return "1 thread" if value == 1 else f"{value} threads"
    if part == "chunk":
        return f"chunks of {value}"
    if part == "compile":
        return "compiled" if value else "uncompiled"
    if part == "keep_memory":
        return "with freed memory kept" if value else "with freed memory given back"
    return f"`{value}`"


def spread_of(seconds: list[float]) -> float:
    """Half the distance of the quartiles as a share of the median; of fewer than four values, of the extremes."""
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) >= 4 else (
        min(seconds), 0.0, max(seconds)
    )  # fmt: skip
    return (high - low) / 2 / statistics.median(seconds)
