"""Pure: which execution plans are worth timing, which of those that were timed is chosen, and why."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

import msgspec

from lapclip.config import PLAN, Config, Plan, PrecisionName, TrainConfig, value_of
from lapclip.machine.device import DEFAULT_THREADS, Device, has_glibc
from lapclip.machine.hardware import Machine, num_usable_cores

HOPELESS = 1.5  # times as slow as the best: not timed any further
TIE = 0.05  # a difference up to this share counts as none
MAX_NOISE = 0.2  # a larger difference counts, however noisy the machine
MAX_OTHER_CORES = 0.5  # a step waits for its slowest thread: one busy core makes fewer threads look faster
PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")  # preferred in this order if equally fast
ROUNDING_UP = 0.005  # of a timed run: half of its first step, whose length is not known yet


@dataclass(frozen=True)
class Candidate:
    """An execution plan, and how fast it was or why it was rejected."""

    plan: Plan
    pairs_per_second: Annotated[float, msgspec.Meta(gt=0)] | None = None  # the median; None if never timed
    spread: float | None = None  # half the interquartile range, as a share of the median
    first_call_seconds: float | None = None  # of the first step, compilation included
    rejected: str | None = None
    ran_out_of_memory: bool = False  # which may be different another day


@dataclass(frozen=True)
class Measured:
    """Candidates timed in turn in one process."""

    candidates: tuple[Candidate, ...]
    when: float  # seconds since 1970
    drift: float = 0.0  # by which share a step became slower from the first rounds to the last
    other_cores: float = 0.0  # cores' worth of CPU time that other programs used while plans were timed

    @property
    def plans(self) -> set[Plan]:
        return {candidate.plan for candidate in self.candidates}

    @property
    def is_disturbed(self) -> bool:
        return self.other_cores > MAX_OTHER_CORES

    @property
    def trusted(self) -> tuple[Candidate, ...]:
        """To choose from; of a disturbed measurement all plans of an accelerator, but of the CPU only the usual one."""
        on_cpu = [c for c in self.candidates if c.plan.device == "cpu" and c.rejected is None]
        if not self.is_disturbed or not on_cpu:
            return self.candidates
        usual = min(on_cpu, key=lambda c: (c.plan.threads != DEFAULT_THREADS, order_among_equals(c)))
        return tuple(c for c in self.candidates if c.plan.device != "cpu" or c is usual)

    @property
    def others_in_words(self) -> str:
        return f"other programs used {self.other_cores / num_usable_cores():.0%} of the CPU during this measurement"


@dataclass(frozen=True)
class Budget:
    """How long a run is: a number of steps, or seconds of training."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, train: TrainConfig, num_pairs: int, batch_size: int) -> "Budget":
        if train.minutes is not None:
            return cls(seconds=train.minutes * 60)
        if train.epochs is not None:
            return cls(steps=max(1, round(train.epochs * num_pairs / batch_size)))
        return cls(steps=train.steps)

    def num_epochs(self, num_pairs: int, batch_size: int, pairs_per_second: float) -> float:
        """About how many times each of the pairs is used, at some speed."""
        seen = self.steps * batch_size if self.steps is not None else (self.seconds or 0.0) * pairs_per_second
        return seen / num_pairs

    def share_done(self, step: int, seconds: float) -> float:
        """How much of the budget is used: 1 at its end."""
        if self.steps is not None:
            return step / self.steps
        assert self.seconds is not None, "one of them is the budget"
        return seconds / self.seconds

    def middle(self, share: float, step: int) -> float:
        """The middle of the step that starts now, where the schedule is read: else the first would not learn."""
        if self.steps is not None:
            return share + 0.5 / self.steps
        return share + (0.5 * share / step if step else ROUNDING_UP)


def plan_of(config: Config) -> Plan:
    """The execution plan of a resolved run."""
    parts = {name: value_of(config, name) for name in PLAN}
    assert parts["device"] != "auto" and None not in parts.values(), "resolved"
    return Plan(**parts)


def asked_parts(config: Config) -> dict[str, Any]:
    """The parts of a plan that were asked for."""
    parts = {name: value_of(config, name) for name in PLAN}
    return {name: value for name, value in parts.items() if value not in (None, "auto")}


def thread_counts(machine: Machine, default: int) -> list[int]:
    """The performance cores, all cores, and half of them, largest first; torch's own choice is always included."""
    fast = min(machine.num_performance_cores or default, machine.num_cores)
    return sorted({default, fast, machine.num_cores, max(1, fast // 2)}, reverse=True)


def plans_on(
    device: Device,
    asked: dict[str, Any],
    threads: Sequence[int],
    chunks: Sequence[int],
    *,
    thorough: bool = False,
    compile: bool = False,
) -> list[Plan]:
    """The first plan, and those that differ from it in one part; with `thorough` all pairs of threads and chunk.

    `thorough` also tries bf16 without hardware for it, to report its cost. Threads feed an accelerator, but do not
    compute on it.
    """
    possible = {*device.precisions(), *(("bf16",) if thorough else ())}
    precisions = [asked["precision"]] if "precision" in asked else sorted(possible, key=PRECISIONS.index)
    counts = threads[:1] if device.is_accelerator else threads
    extra = {"compile": asked.get("compile", False), "keep_memory": asked.get("keep_memory", True)}
    first = Plan(device.name, precisions[0], counts[0], chunks[0], **extra)
    plans = [first, *(replace(first, precision=precision) for precision in precisions[1:])]
    for num, chunk in product(counts, chunks):
        if thorough or num == counts[0] or chunk == chunks[0]:
            plans.append(replace(first, threads=num, chunk=chunk))
    if compile:
        plans.append(replace(first, compile=True))
    if "keep_memory" not in asked and first.is_plain and has_glibc():
        plans.append(replace(first, keep_memory=False))
    return list(dict.fromkeys(plans))


def choose(
    candidates: Iterable[Candidate], budget: Budget | None = None, batch_size: int = 1
) -> Candidate | None:
    """The fastest over the budget; among equals the largest chunk, uncompiled, more threads, then fp32 on the CPU."""
    rated = [c for c in candidates if c.pairs_per_second is not None and c.rejected is None]
    if not rated:
        return None
    rates = {c: rate_over(c, budget or Budget(), batch_size) for c in rated}
    best = max(rated, key=lambda c: rates[c])
    noise = {c: ((c.spread or 0.0) + (best.spread or 0.0)) / 2 for c in rated}  # of their rounds
    equal = (c for c in rated if rates[c] >= rates[best] * (1 - min(max(TIE, noise[c]), MAX_NOISE)))
    return min(equal, key=order_among_equals)


def rate_over(candidate: Candidate, budget: Budget, batch_size: int) -> float:
    """Pairs a second over a whole run, compilation included."""
    rate = candidate.pairs_per_second
    assert rate is not None
    lost = (candidate.first_call_seconds or 0.0) if candidate.plan.compile else 0.0
    if budget.seconds is not None:
        return rate * max(0.0, 1 - lost / budget.seconds)
    num_pairs = (budget.steps or 0) * batch_size
    return num_pairs / (lost + num_pairs / rate) if num_pairs else rate


def order_among_equals(candidate: Candidate) -> tuple:
    plan = candidate.plan
    precision = PRECISIONS.index(plan.precision)
    return -plan.chunk, plan.compile, -plan.threads, precision, plan.device != "cpu", not plan.keep_memory


def remark_on(candidate: Candidate, measured: Measured) -> str | None:
    """Why a candidate was rejected, or how far behind it fell."""
    if candidate.rejected is not None or candidate.pairs_per_second is None:
        return candidate.rejected
    factor = max(c.pairs_per_second or 0.0 for c in measured.candidates) / candidate.pairs_per_second
    return f"takes {factor:.1f}x as long" if factor > HOPELESS else None


def reasons_for(choice: Candidate, measured: Measured) -> dict[str, str]:
    """Why each part of the chosen plan, in words; a part that had no rival has no reason.

    The chosen value is compared with each other value by two plans that differ in nothing else, close to the choice.
    """
    by_plan = {candidate.plan: candidate for candidate in measured.candidates}
    chosen = vars(choice.plan)
    closest = sorted(by_plan, key=lambda plan: sum(own != chosen[part] for part, own in vars(plan).items()))
    reasons = {}
    for part in PLAN:
        said: dict[Any, str | None] = {}  # by the other value
        for plan in closest:
            like = by_plan.get(replace(plan, **{part: chosen[part]}))
            if like and like.plan != plan and like.pairs_per_second is not None:
                said.setdefault(getattr(plan, part), comparison(like, by_plan[plan], part))
        if any(said.values()):
            reasons[part] = "; ".join(filter(None, said.values()))
    return reasons


def comparison(chosen: Candidate, rival: Candidate, part: str) -> str | None:
    """How two compare; nothing where the rival won, together with other parts that were not chosen."""
    value = getattr(rival.plan, part)
    named = {
        "threads": f"{value} thread{'s' * (value != 1)}",
        "chunk": f"chunks of {value}",
        "compile": "compiled" if value else "uncompiled",
        "keep_memory": f"with freed memory {'kept' if value else 'released'}",
    }.get(part, f"`{value}`")
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
    return f"{named} is {1 / factor - 1:.0%} faster, but slow to start" if part == "compile" else None


def spread_of(seconds: list[float]) -> float:
    """Half the interquartile range as a share of the median; of fewer than four values, half the whole range."""
    low, high = min(seconds), max(seconds)
    if len(seconds) >= 4:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(seconds)
