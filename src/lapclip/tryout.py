"""What is measured before a run begins: taken from the cache, or quickly, within a twentieth of the run's budget."""

from collections.abc import Generator, Sequence

from lapclip.config import Config, DeviceConfig
from lapclip.device import Device, default_threads, device_named, present_devices, processor
from lapclip.machine import Machine
from lapclip.measure.cache import folder_for, recall, remember
from lapclip.measure.race import Progress, measure
from lapclip.measure.rehearsal import Rig, Work
from lapclip.measure.results import Measured
from lapclip.measure.ways import few_ways, thread_counts
from lapclip.settle import SHARE_OF_MEMORY, total_steps
from lapclip.step import Way

SHARE_OF_BUDGET = 0.05
MOST_SECONDS = 10.0  # a candidate
STEPS_EACH = 4  # two to warm up, two to time
LEAST_SECONDS = 0.5  # of allowance, below which nothing is begun
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


def ways_for(asked: Config, chunk: int, machine: Machine) -> list[Way]:
    """The ways that a run could take: with the largest chunk that fits, and half of it."""
    threads = [asked.device.threads] if asked.device.threads else thread_counts(machine, default_threads())
    chunks = [chunk] if asked.train.chunk or chunk < 2 else [chunk, (chunk + 1) // 2]
    return few_ways(asked.device, devices_for(asked.device), threads, chunks)


def try_out(
    asked: Config, settled: Config, work: Work, machine: Machine, num_train: int
) -> Generator[Progress, None, Measured | None]:
    """Times what was not asked for; None where there is no choice, or no time for one."""
    assert settled.train.chunk is not None
    ways = ways_for(asked, settled.train.chunk, machine)
    if len(ways) < 2:
        return None
    folder = folder_for(machine, work.key())
    if (known := recall(folder, ways)) is not None:
        return known
    steps = total_steps(settled.train, num_train, work.batch_size)
    if steps is not None and steps * SHARE_OF_BUDGET < STEPS_EACH * len(ways):
        return None
    minutes = settled.train.minutes
    if minutes is not None and minutes * 60 * SHARE_OF_BUDGET < LEAST_SECONDS:
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


def guess_step_seconds(work: Work, way: Way) -> float:
    """On the processor: from a step of two pairs, longer than their share, or of the whole batch if that is short."""
    rig = Rig(work, processor().name)
    plain = Way(processor().name, "fp32", threads=way.threads, chunk=work.batch_size)
    guess = min(rig.step_of_few(plain, FEW) for _ in range(2)) * work.batch_size / FEW
    return guess if guess > LEAST_SECONDS else min(rig.step(plain) for _ in range(2))
