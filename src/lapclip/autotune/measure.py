"""Execution plans in, how fast each is out: checked, warmed up, then timed in turn until the time is used up.

A busy or hot minute falls on all of them alike, because they take turns in an order that changes from round to round.
"""

import statistics
import time
from collections.abc import Generator, Sequence
from dataclasses import replace

from lapclip.autotune.parity import Probe, disagreement, first_line, num_probed, reference
from lapclip.autotune.rehearsal import Rig, Work, loss_of, placed_model, some_batch, some_patches
from lapclip.autotune.results import HOPELESS, Candidate, Measured, spread_of
from lapclip.machine.device import device_named, processor, ran_out_of_memory, release_memory
from lapclip.model.clip import shape_of
from lapclip.step.step import Plan

MOST_ROUNDS = 9
BLOCK_SECONDS = 0.4  # a block of steps lasts about so long, or one step
MOST_DRIFT = 0.1  # from round to round, before the machine is given a rest
REST_SECONDS = 3.0
MOST_RESTS = 2

NO_MEMORY = "out of memory"

Progress = str  # what is being done, for whoever waits


def measure(
    work: Work, plans: Sequence[Plan], *, seconds: float, least_rounds: int = 3, patience: float = 1.0
) -> Generator[Progress, None, Measured]:
    """Times plans for about so many seconds; a step in low precision that takes longer than `patience` stops
    the search for how much slower it is."""
    started = time.perf_counter()
    rigs = Rigs(work)
    tried: dict[Plan, Candidate] = {}
    has_exact = any(plan.precision == "fp32" for plan in plans)
    for plan in plans:
        yield f"trying {plan.in_words()}"
        is_claimed = plan.precision in device_named(plan.device).precisions()
        tried[plan] = check_plan(rigs, plan, patience if has_exact and not is_claimed else None)
    entered = [plan for plan in plans if tried[plan].rejected is None]
    block_seconds = min(BLOCK_SECONDS, seconds / ((least_rounds + 2) * len(plans)))
    times, failed = yield from race(rigs, entered, least_rounds, block_seconds, until=started + seconds)
    tried |= failed
    rigs.clear()
    best = min(times.values(), key=statistics.median, default=[])
    candidates = tuple(
        rated(tried[plan], times[plan], best, work.batch_size) if plan in times else tried[plan]
        for plan in plans
    )
    drift = drift_of(best) if best else 0.0
    return Measured(candidates, time.time(), time.perf_counter() - started, drift)


class Rigs:
    """One rig a device, made when it is needed; compiled ones apart. The weights of all begin equal."""

    def __init__(self, work: Work):
        self.work = work
        self.made: dict[tuple[str, bool], Rig] = {}

    def rig(self, plan: Plan) -> Rig:
        if (plan.device, plan.compile) not in self.made:
            self.made[plan.device, plan.compile] = Rig(self.work, plan.device, compile=plan.compile)
        return self.made[plan.device, plan.compile]

    def problem(self, plan: Plan) -> str | None:
        """What the parity gate says of a plan; on models of its own, whose weights no step has changed."""
        num_pairs = num_probed(plan, self.work.batch_size)
        probe = Probe(
            some_batch(self.work, num_pairs),
            some_patches(self.work, num_pairs),
            loss_of(self.work),
            shape_of(self.work.model).text_length,
        )
        right = reference(placed_model(self.work, processor()), probe, plan)
        model = placed_model(self.work, device_named(plan.device), compile=plan.compile)
        return disagreement(model, probe, right, plan)

    def drop(self, plan: Plan) -> None:
        """Lets go of what failed."""
        self.made.pop((plan.device, plan.compile), None)
        device_named(plan.device).release_memory()

    def clear(self) -> None:
        devices = [rig.device for rig in self.made.values()]
        self.made.clear()
        for device in devices:
            device.release_memory()
        release_memory()


def check_plan(rigs: Rigs, plan: Plan, patience: float | None) -> Candidate:
    """Whether a plan is right, and not hopelessly slow; its first step, which compiles and takes memory."""
    try:
        if plan.precision != "fp32" and patience is not None:
            num_pairs, factor = slower_than_fp32(rigs, plan, patience)
            if factor > HOPELESS:
                of = "a step" if num_pairs == rigs.work.batch_size else f"a step of {num_pairs} pairs"
                return Candidate(plan, rejected=f"{of} takes {factor:.1f} times as long as in fp32")
        if not plan.is_plain and (problem := rigs.problem(plan)):
            return Candidate(plan, rejected=problem)
        first = rigs.rig(plan).step(plan)
    except (RuntimeError, MemoryError) as error:
        rejected = in_short(error)
    else:
        return Candidate(plan, first_call_seconds=first)
    rigs.drop(plan)
    return Candidate(plan, rejected=rejected)


def in_short(error: BaseException) -> str:
    return NO_MEMORY if ran_out_of_memory(error) else f"fails: {first_line(error)}"


def slower_than_fp32(rigs: Rigs, plan: Plan, patience: float) -> tuple[int, float]:
    """By which factor a step in some precision is slower, with as many pairs as patience allows."""
    rig, exact = rigs.rig(plan), replace(plan, precision="fp32")
    num_pairs, factor = min(2, rigs.work.batch_size), 1.0
    while True:
        seconds: dict[Plan, list[float]] = {plan: [], exact: []}
        for number in range(3):
            for one in (plan, exact):
                took = rig.step_of_few(one, num_pairs)
                if number > 0:  # the first one warms up
                    seconds[one].append(took)
        factor = statistics.median(seconds[plan]) / statistics.median(seconds[exact])
        if num_pairs == rigs.work.batch_size or statistics.median(seconds[plan]) > patience / 2:
            return num_pairs, factor
        num_pairs = min(2 * num_pairs, rigs.work.batch_size)


def race(
    rigs: Rigs, plans: Sequence[Plan], least_rounds: int, block_seconds: float, until: float
) -> Generator[Progress, None, tuple[dict[Plan, list[float]], dict[Plan, Candidate]]]:
    """Seconds of a step, block by block, and what failed; who falls far behind drops out and keeps what it has."""
    seconds: dict[Plan, list[float]] = {plan: [] for plan in plans}
    failed: dict[Plan, Candidate] = {}
    num_steps: dict[Plan, int] = {}
    running, before, num_rests = list(plans), None, 0
    for number in range(MOST_ROUNDS):
        for plan in running[:: -1 if number % 2 else 1]:
            yield f"round {number + 1}: {plan.in_words()}"
            try:
                rig = rigs.rig(plan)
                if plan not in num_steps:
                    num_steps[plan] = num_in_block(rig.step(plan), block_seconds)
                if plan != before:
                    rig.step(plan)  # untimed: caches and allocator still are as the one before left them
                seconds[plan].append(statistics.mean(rig.step(plan) for _ in range(num_steps[plan])))
            except (RuntimeError, MemoryError) as error:
                failed[plan] = Candidate(plan, rejected=in_short(error))
            before = plan
        for plan in [plan for plan in running if plan in failed]:
            running.remove(plan)
            seconds.pop(plan)
            rigs.drop(plan)
        if not running:
            break
        if number >= least_rounds - 1 and time.perf_counter() > until:
            break
        medians = {plan: statistics.median(seconds[plan]) for plan in running}
        best = min(medians, key=lambda plan: medians[plan])
        running = [plan for plan in running if medians[plan] <= HOPELESS * medians[best] or number == 0]
        is_hot = seconds[best][-1] > (1 + MOST_DRIFT) * seconds[best][0]
        if is_hot and num_rests < MOST_RESTS and time.perf_counter() + REST_SECONDS < until:
            yield "letting the machine cool down"
            time.sleep(REST_SECONDS)
            num_rests += 1
    return seconds, failed


def num_in_block(step_seconds: float, block_seconds: float = BLOCK_SECONDS) -> int:
    return max(1, round(block_seconds / step_seconds))


def rated(candidate: Candidate, seconds: list[float], best: list[float], batch_size: int) -> Candidate:
    """By how much slower than the best it was round by round, so that a busy round counts for both."""
    factor = statistics.median(own / other for own, other in zip(seconds, best, strict=False))
    rate = batch_size / (statistics.median(best) * factor)
    return replace(candidate, pairs_per_second=rate, spread=spread_of(seconds))


def drift_of(seconds: list[float]) -> float:
    """How much slower the last third of the rounds was than the first."""
    third = max(1, len(seconds) // 3)
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third]) - 1
