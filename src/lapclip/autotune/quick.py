"""What is measured before a run starts.

The speed of its execution plans is taken from the cache, or measured within a twentieth of the run's budget; where
neither is possible, a step or two of the usual plan are timed.
"""

from collections.abc import Generator, Sequence
from typing import Any

from lapclip.autotune.cache import folder_for, recall, remember
from lapclip.autotune.measure import Rig, measure
from lapclip.autotune.plans import Measured, asked_parts, plans_on, thread_counts
from lapclip.autotune.resolve import Draft, devices_for, resolve_chunk, typical_rate
from lapclip.autotune.work import Work
from lapclip.config import Plan
from lapclip.machine.device import DEFAULT_THREADS, processor
from lapclip.model.clip import flops_per_pair

SHARE_OF_BUDGET = 0.05
MAX_SECONDS = 10.0  # per candidate
STEPS_EACH = 4  # two to warm up, two to time
MIN_SECONDS = 0.5  # of allowance, below which nothing is started
MANY_FLOPS = 1e12  # a second, which no laptop's step exceeds by much
FEW = 2  # pairs, to estimate the time of a step from


def plans_for(
    draft: Draft, *, num_chunks: int = 2, thorough: bool = False, compile: bool = False
) -> list[Plan]:
    """The plans that a run could use: on each device the largest chunk that fits, and halves of it."""
    asked = asked_parts(draft.config)
    threads = [asked["threads"]] if "threads" in asked else thread_counts(draft.machine, DEFAULT_THREADS)
    plans: list[Plan] = []
    for device in devices_for(draft.config):
        largest = resolve_chunk(draft, device).value
        chunks = sorted({-(-largest // 2**halved) for halved in range(num_chunks)}, reverse=True)
        if "chunk" in asked:
            chunks = [min(asked["chunk"], draft.work.batch_size)]
        plans += plans_on(device, asked, threads, chunks, thorough=thorough, compile=compile)
    return plans


def try_out(draft: Draft) -> Generator[str, None, Measured | None]:
    """Times what was not asked for; None where there is no choice, or no time for one."""
    plans, work, budget = plans_for(draft), draft.work, draft.budget
    if len(plans) < 2:
        return None
    folder, asked = folder_for(draft.machine, work.key()), asked_parts(draft.config)
    if (known := recall(folder, plans, lambda plan: is_allowed(plan, asked, plans))) is not None:
        return known
    num_steps = STEPS_EACH * len(plans)
    if budget.steps is not None and budget.steps * SHARE_OF_BUDGET < num_steps:
        return None
    if budget.seconds is not None:
        flops = 3 * work.batch_size * flops_per_pair(work.size, num_tokens=work.num_tokens)
        if budget.seconds * SHARE_OF_BUDGET < max(MIN_SECONDS, num_steps * flops / MANY_FLOPS):
            return None
    yield "measuring which execution plan is fastest"
    step_seconds = guess_step_seconds(work, plans[0].threads)
    budget_seconds = budget.seconds or (budget.steps or 0) * step_seconds
    allowed = min(SHARE_OF_BUDGET * budget_seconds, max(MAX_SECONDS, STEPS_EACH * step_seconds) * len(plans))
    if num_steps * step_seconds > allowed:
        return None
    measured = yield from measure(work, plans, seconds=allowed, min_rounds=2)
    remember(folder, measured)
    return measured


def time_a_step(draft: Draft) -> Generator[str, None, float | None]:
    """Pairs per second on the CPU where no plans were compared, if the augmentation depends on them."""
    work, asked, cpu = draft.work, asked_parts(draft.config), processor().name
    depends = draft.budget.seconds is not None and draft.undecided_looks
    if not depends or asked.get("device", cpu) != cpu or FEW / typical_rate(draft.config) > MIN_SECONDS:
        return None
    yield "timing a training step"
    return work.batch_size / guess_step_seconds(work, asked.get("threads", DEFAULT_THREADS))


def is_allowed(plan: Plan, asked: dict[str, Any], plans: Sequence[Plan]) -> bool:
    """Whether a plan that was timed for another reason is as asked, and its chunk fits."""
    is_asked = all(getattr(plan, part) == value for part, value in asked.items() if part != "chunk")
    chunks = [other.chunk for other in plans if other.device == plan.device]
    return is_asked and (plan.chunk in chunks if "chunk" in asked else plan.chunk <= max(chunks, default=0))


def guess_step_seconds(work: Work, threads: int) -> float:
    """On the CPU: from a step of two pairs, longer than their share, or of the whole batch if that is short."""
    plain = Plan(processor().name, "fp32", threads, chunk=work.batch_size)
    rig = Rig(work, plain)
    guess = min(rig.step(plain, FEW) for _ in range(2)) * work.batch_size / FEW
    return guess if guess > MIN_SECONDS else min(rig.step(plain) for _ in range(2))
