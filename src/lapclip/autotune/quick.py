"""What is measured before a run begins: taken from the cache, or quickly, within a twentieth of the run's budget."""

from collections.abc import Callable, Generator, Sequence

from lapclip.autotune.cache import folder_for, recall, remember
from lapclip.autotune.measure import Progress, measure
from lapclip.autotune.plans import few_plans, thread_counts
from lapclip.autotune.rehearsal import Rig, Work
from lapclip.autotune.resolve import SHARE_OF_MEMORY, resolve_chunk, total_steps
from lapclip.autotune.results import Measured
from lapclip.config import Config, DeviceConfig
from lapclip.machine.device import Device, default_threads, device_named, present_devices, processor
from lapclip.machine.hardware import Machine
from lapclip.model.clip import count_parameters, flops_per_pair, shape_of
from lapclip.step.loss import NEEDS_BIAS
from lapclip.step.step import Plan

SHARE_OF_BUDGET = 0.05
MOST_SECONDS = 10.0  # a candidate
STEPS_EACH = 4  # two to warm up, two to time
LEAST_SECONDS = 0.5  # of allowance, below which nothing is begun
MANY_FLOPS = 1e12  # a second, which no laptop's step exceeds by much
Combine = Callable[[DeviceConfig, Sequence[Device], Sequence[int], Sequence[int]], list[Plan]]
FEW = 2  # pairs, to guess the length of a step from


def devices_for(asked: DeviceConfig) -> list[Device]:
    """The one asked for, which must be there, or all there are."""
    return list(present_devices()) if asked.device == "auto" else [device_named(asked.device)]


def room_on(devices: Sequence[Device], asked: DeviceConfig, machine: Machine) -> dict[str, int]:
    """Memory that may be used on each device, in bytes."""
    if asked.max_memory is not None:
        return {device.name: int(asked.max_memory * 1e9) for device in devices}
    return {
        device.name: int(device.free_bytes(machine.available_bytes) * SHARE_OF_MEMORY) for device in devices
    }


def chunks_on(device: Device, asked: Config, work: Work, machine: Machine, num: int) -> list[int]:
    """The largest chunk that fits on a device, and so many halves of it."""
    num_parameters = count_parameters(
        shape_of(work.model), vocab_size=work.vocab_size, has_bias=work.train.loss in NEEDS_BIAS
    )
    room = room_on([device], asked.device, machine)[device.name]
    chunk, _ = resolve_chunk(asked, work.batch_size, num_parameters, room)
    if asked.train.chunk is not None:
        return [min(asked.train.chunk, work.batch_size)]
    return sorted({max(1, -(-chunk // 2**halved)) for halved in range(num)}, reverse=True)


def plans_for(
    asked: Config, work: Work, machine: Machine, *, combine: Combine = few_plans, num_chunks: int = 2
) -> list[Plan]:
    """The plans that a run could use: on each device the largest chunk that fits, and halves of it."""
    threads = [asked.device.threads] if asked.device.threads else thread_counts(machine, default_threads())
    plans: list[Plan] = []
    for device in devices_for(asked.device):
        chunks = chunks_on(device, asked, work, machine, num_chunks)
        plans += combine(asked.device, [device], threads, chunks)
    return plans


def try_out(
    asked: Config, resolved: Config, work: Work, machine: Machine, num_train: int
) -> Generator[Progress, None, Measured | None]:
    """Times what was not asked for; None where there is no choice, or no time for one."""
    plans = plans_for(asked, work, machine)
    if len(plans) < 2:
        return None
    folder = folder_for(machine, work.key())
    if (known := recall(folder, plans, lambda plan: is_allowed(plan, asked, plans))) is not None:
        return known
    steps = total_steps(resolved.train, num_train, work.batch_size)
    minutes = resolved.train.minutes
    if steps is not None and steps * SHARE_OF_BUDGET < STEPS_EACH * len(plans):
        return None
    if minutes is not None:
        flops = 3 * work.batch_size * flops_per_pair(shape_of(work.model), num_tokens=work.num_tokens)
        at_best = max(LEAST_SECONDS, STEPS_EACH * len(plans) * flops / MANY_FLOPS)
        if minutes * 60 * SHARE_OF_BUDGET < at_best:
            return None
    yield "measuring which plan trains fastest here"
    step_seconds = guess_step_seconds(work, plans[0])
    budget_seconds = minutes * 60 if minutes is not None else (steps or 0) * step_seconds
    allowed = min(SHARE_OF_BUDGET * budget_seconds, max(MOST_SECONDS, STEPS_EACH * step_seconds) * len(plans))
    if STEPS_EACH * step_seconds * len(plans) > allowed:
        return None
    measured = yield from measure(work, plans, seconds=allowed, least_rounds=2)
    remember(folder, measured)
    return measured


def is_allowed(plan: Plan, asked: Config, plans: Sequence[Plan]) -> bool:
    """Whether a plan that was timed for another reason is as asked, and its chunk fits."""
    device = asked.device
    wanted = {
        "precision": device.precision,
        "threads": device.threads,
        "compile": device.compile,
        "keep_memory": device.keep_memory,
    }
    is_asked = all(value is None or getattr(plan, part) == value for part, value in wanted.items())
    chunks = [other.chunk for other in plans if other.device == plan.device]
    has_chunk = plan.chunk in chunks if asked.train.chunk else plan.chunk <= max(chunks, default=0)
    return is_asked and has_chunk


def guess_step_seconds(work: Work, plan: Plan) -> float:
    """On the processor: from a step of two pairs, longer than their share, or of the whole batch if that is short."""
    rig = Rig(work, processor().name)
    plain = Plan(processor().name, "fp32", threads=plan.threads, chunk=work.batch_size)
    guess = min(rig.step_of_few(plain, FEW) for _ in range(2)) * work.batch_size / FEW
    return guess if guess > LEAST_SECONDS else min(rig.step(plain) for _ in range(2))
