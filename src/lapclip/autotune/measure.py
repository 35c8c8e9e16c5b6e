"""Execution plans in, how fast each is out: checked, warmed up, then timed in turn until the time is used up.

What is timed is what trains: the real model, optimizer and update over one batch. A busy or hot minute affects all
plans alike, because they take turns in an order that changes from round to round.
"""

import statistics
import time
from collections.abc import Generator, Sequence
from dataclasses import replace

from lapclip.autotune.parity import disagreement, first_line, num_probed, reference
from lapclip.autotune.plans import HOPELESS, Candidate, Measured, spread_of
from lapclip.autotune.work import Work
from lapclip.config import Plan
from lapclip.machine.device import device_named, processor, ran_out_of_memory, set_up_process
from lapclip.machine.sensors import CoreUsage
from lapclip.step.optim import build_optimizer
from lapclip.step.step import Inputs, Update, fixed_length

MAX_ROUNDS = 9
BLOCK_SECONDS = 0.4  # of steps timed together; at least one step


class Rig:
    """The model of some work on one device; runs any plan with that device and compilation."""

    def __init__(self, work: Work, plan: Plan):
        self.work, self.device = work, device_named(plan.device)
        model = work.new_model(self.device, compile=plan.compile)
        optimizer = build_optimizer(model, work.train)
        self.update = Update(model, optimizer, work.loss_fn, work.train.clip_norm, plan)
        self.length = fixed_length(self.device, plan.compile, model.size.text_length)
        self.inputs = self.random_inputs(work.batch_size)

    def random_inputs(self, num_pairs: int) -> Inputs:
        return self.work.inputs(self.work.random_batch(num_pairs), self.device, self.length)

    def step(self, plan: Plan, num_pairs: int | None = None) -> float:
        """Runs one whole step, of the whole batch or of a few pairs at once; how many seconds it took."""
        inputs = self.inputs
        if num_pairs is not None:
            plan, inputs = replace(plan, chunk=num_pairs), self.random_inputs(num_pairs)
        self.update.plan = plan
        set_up_process(plan.threads, keep_memory=plan.keep_memory)
        self.device.synchronize()
        started = time.perf_counter()
        self.update.run(inputs)
        return time.perf_counter() - started


class Rigs:
    """One rig per device, made when it is needed; compiled ones apart. The weights of all start equal."""

    def __init__(self, work: Work):
        self.work = work
        self.made: dict[tuple[str, bool], Rig] = {}

    def rig(self, plan: Plan) -> Rig:
        if (plan.device, plan.compile) not in self.made:
            self.made[plan.device, plan.compile] = Rig(self.work, plan)
        return self.made[plan.device, plan.compile]

    def problem(self, plan: Plan) -> str | None:
        """What the parity check finds wrong with a plan; on models of its own, whose weights no step has changed."""
        work = self.work
        batch = work.random_batch(num_probed(plan, work.batch_size))
        expected = reference(work.new_model(processor()), work, batch, plan)
        model = work.new_model(device_named(plan.device), compile=plan.compile)
        return disagreement(model, work, batch, expected, plan)

    def drop(self, plan: Plan) -> None:
        """Releases what failed."""
        self.made.pop((plan.device, plan.compile), None)
        device_named(plan.device).release_memory()


def measure(
    work: Work, plans: Sequence[Plan], *, seconds: float, min_rounds: int = 3, patience: float = 1.0
) -> Generator[str, None, Measured]:
    """Times plans for about so many seconds; a step in low precision that takes longer than `patience` stops the
    search for how much slower it is."""
    started = time.perf_counter()
    rigs = Rigs(work)
    tried: dict[Plan, Candidate] = {}
    has_exact = any(plan.precision == "fp32" for plan in plans)
    for plan in plans:
        yield f"trying {plan.in_words()}"
        has_hardware = plan.precision in device_named(plan.device).precisions()
        tried[plan] = check_plan(rigs, plan, patience if has_exact and not has_hardware else None)
    block_seconds = min(BLOCK_SECONDS, seconds / ((min_rounds + 2) * len(plans)))
    usage = CoreUsage()
    times = yield from race(rigs, tried, min_rounds, block_seconds, until=started + seconds)
    other_cores = usage.read().get("other_cores", 0.0)
    for plan in plans:
        rigs.drop(plan)
    processor().release_memory()
    best = min(times.values(), key=statistics.median, default=[])
    for plan, own in times.items():
        # By how much slower than the best it was round by round, so that a busy round counts for both.
        factor = statistics.median(one / other for one, other in zip(own, best, strict=False))
        rate = work.batch_size / (statistics.median(best) * factor)
        tried[plan] = replace(tried[plan], pairs_per_second=rate, spread=spread_of(own))
    third = max(1, len(best) // 3)  # by how much the last third of the rounds was slower than the first
    drift = statistics.median(best[-third:]) / statistics.median(best[:third]) - 1 if best else 0.0
    return Measured(tuple(tried.values()), time.time(), drift, other_cores)


def check_plan(rigs: Rigs, plan: Plan, patience: float | None) -> Candidate:
    """Whether a plan is correct, and not hopelessly slow; its first step, which compiles and allocates."""
    try:
        if plan.precision != "fp32" and patience is not None:
            num_pairs, factor = slower_than_fp32(rigs, plan, patience)
            if factor > HOPELESS:
                slow = f"a step of {num_pairs} pairs takes {factor:.1f} times as long as in fp32"
                return Candidate(plan, rejected=slow)
        if not plan.is_plain and (problem := rigs.problem(plan)):
            return Candidate(plan, rejected=problem)
        return Candidate(plan, first_call_seconds=rigs.rig(plan).step(plan))
    except (RuntimeError, MemoryError) as error:
        rejected = failed_candidate(plan, error)
    rigs.drop(plan)  # outside of `except`, whose error holds on to the activations
    return rejected


def failed_candidate(plan: Plan, error: BaseException) -> Candidate:
    if ran_out_of_memory(error):
        return Candidate(plan, rejected="out of memory", ran_out_of_memory=True)
    return Candidate(plan, rejected=f"fails: {first_line(error)}")


def slower_than_fp32(rigs: Rigs, plan: Plan, patience: float) -> tuple[int, float]:
    """By which factor a step in some precision is slower, with as many pairs as patience allows."""
    rig, exact = rigs.rig(plan), replace(plan, precision="fp32")
    num_pairs = min(2, rigs.work.batch_size)
    while True:
        # The first step of each warms up.
        seconds = [(rig.step(plan, num_pairs), rig.step(exact, num_pairs)) for _ in range(3)][1:]
        own, other = (statistics.median(column) for column in zip(*seconds, strict=True))
        if num_pairs == rigs.work.batch_size or own > patience / 2:
            return num_pairs, own / other
        num_pairs = min(2 * num_pairs, rigs.work.batch_size)


def race(
    rigs: Rigs, tried: dict[Plan, Candidate], min_rounds: int, block_seconds: float, until: float
) -> Generator[str, None, dict[Plan, list[float]]]:
    """Seconds of a step, block by block; a plan that falls far behind stops with what it has, one that fails is
    rejected."""
    seconds: dict[Plan, list[float]] = {plan: [] for plan in tried if tried[plan].rejected is None}
    num_steps: dict[Plan, int] = {}
    running, before = list(seconds), None
    for number in range(MAX_ROUNDS):
        for plan in running[:: -1 if number % 2 else 1]:
            yield f"round {number + 1}: {plan.in_words()}"
            try:
                rig = rigs.rig(plan)
                if plan not in num_steps:
                    num_steps[plan] = num_in_block(rig.step(plan), block_seconds)
                if plan != before:
                    rig.step(plan)  # untimed: caches and allocator still are as the plan before left them
                seconds[plan].append(statistics.mean(rig.step(plan) for _ in range(num_steps[plan])))
            except (RuntimeError, MemoryError) as error:
                tried[plan] = failed_candidate(plan, error)
            before = plan
        for plan in [plan for plan in running if tried[plan].rejected]:
            del seconds[plan]
            rigs.drop(plan)
        running = [plan for plan in running if plan in seconds]
        if not running or (number >= min_rounds - 1 and time.perf_counter() > until):
            break
        medians = {plan: statistics.median(seconds[plan]) for plan in running}
        slowest = HOPELESS * min(medians.values())
        running = [plan for plan in running if medians[plan] <= slowest or number == 0]
    return seconds


def num_in_block(step_seconds: float, block_seconds: float = BLOCK_SECONDS) -> int:
    return max(1, round(block_seconds / step_seconds))
