"""What is measured before a run begins: taken from the cache, or quickly, within a twentieth of the run's budget."""

from collections.abc import Callable, Generator, Sequence

from lapclip.autotune.cache import folder_for, recall, remember
from lapclip.autotune.measure import Progress, measure
from lapclip.autotune.plans import few_ways, thread_counts
from lapclip.autotune.rehearsal import Rig, Work
from lapclip.autotune.resolve import SHARE_OF_MEMORY, settle_chunk, total_steps
from lapclip.autotune.results import Measured
from lapclip.config import Config, DeviceConfig
from lapclip.machine.device import Device, default_threads, device_named, present_devices, processor
from lapclip.machine.hardware import Machine
from lapclip.model.clip import count_parameters, flops_per_pair, shape_of
from lapclip.step.loss import NEEDS_BIAS
from lapclip.step.step import Way

SHARE_OF_BUDGET = 0.05
MOST_SECONDS = 10.0  # a candidate
STEPS_EACH = 4  # two to warm up, two to time
LEAST_SECONDS = 0.5  # of allowance, below which nothing is begun
MANY_FLOPS = 1e12  # a second, which no laptop's step exceeds by much
Combine = Callable[[DeviceConfig, Sequence[Device], Sequence[int], Sequence[int]], list[Way]]
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
    chunk, _ = settle_chunk(asked, work.batch_size, num_parameters, room)
    if asked.train.chunk is not None:
        return [min(asked.train.chunk, work.batch_size)]
    return sorted({max(1, -(-chunk // 2**halved)) for halved in range(num)}, reverse=True)


def ways_for(
    asked: Config, work: Work, machine: Machine, *, combine: Combine = few_ways, num_chunks: int = 2
) -> list[Way]:
    """The ways that a run could take: on each device the largest chunk that fits, and halves of it."""
    threads = [asked.device.threads] if asked.device.threads else thread_counts(machine, default_threads())
    ways: list[Way] = []
    for device in devices_for(asked.device):
        chunks = chunks_on(device, asked, work, machine, num_chunks)
        ways += combine(asked.device, [device], threads, chunks)
    return ways


def try_out(
    asked: Config, settled: Config, work: Work, machine: Machine, num_train: int
) -> Generator[Progress, None, Measured | None]:
    """Times what was not asked for; None where there is no choice, or no time for one."""
    ways = ways_for(asked, work, machine)
    if len(ways) < 2:
        return None
    folder = folder_for(machine, work.key())
    if (known := recall(folder, ways, lambda way: is_allowed(way, asked, ways))) is not None:
        return known
    steps = total_steps(settled.train, num_train, work.batch_size)
    minutes = settled.train.minutes
    if steps is not None and steps * SHARE_OF_BUDGET < STEPS_EACH * len(ways):
        return None
    if minutes is not None:
        flops = 3 * work.batch_size * flops_per_pair(shape_of(work.model), num_tokens=work.num_tokens)
        at_best = max(LEAST_SECONDS, STEPS_EACH * len(ways) * flops / MANY_FLOPS)
        if minutes * 60 * SHARE_OF_BUDGET < at_best:
            return None
    yield "measuring which way trains fastest here"
    step_seconds = guess_step_seconds(work, ways[0])
    budget_seconds = minutes * 60 if minutes is not None else (steps or 0) * step_seconds
    allowed = min(SHARE_OF_BUDGET * budget_seconds, max(MOST_SECONDS, STEPS_EACH * step_seconds) * len(ways))
    if STEPS_EACH * step_seconds * len(ways) > allowed:
        return None
    measured = yield from measure(work, ways, seconds=allowed, least_rounds=2)
    remember(folder, measured)
    return measured


def is_allowed(way: Way, asked: Config, ways: Sequence[Way]) -> bool:
    """Whether a way that was timed for another reason is as asked, and its chunk fits."""
    device = asked.device
    wanted = {
        "precision": device.precision,
        "threads": device.threads,
        "compile": device.compile,
        "keep_memory": device.keep_memory,
    }
    is_asked = all(value is None or getattr(way, part) == value for part, value in wanted.items())
    chunks = [other.chunk for other in ways if other.device == way.device]
    has_chunk = way.chunk in chunks if asked.train.chunk else way.chunk <= max(chunks, default=0)
    return is_asked and has_chunk


def guess_step_seconds(work: Work, way: Way) -> float:
    """On the processor: from a step of two pairs, longer than their share, or of the whole batch if that is short."""
    rig = Rig(work, processor().name)
    plain = Way(processor().name, "fp32", threads=way.threads, chunk=work.batch_size)
    guess = min(rig.step_of_few(plain, FEW) for _ in range(2)) * work.batch_size / FEW
    return guess if guess > LEAST_SECONDS else min(rig.step(plain) for _ in range(2))
