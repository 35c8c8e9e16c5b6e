"""Pure: which plans are worth timing, given what was asked for, what is there, and how much memory may be used."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from lapclip.autotune.results import PRECISIONS
from lapclip.config import DeviceConfig, PrecisionName
from lapclip.machine.device import Device, has_glibc
from lapclip.machine.hardware import Machine
from lapclip.step.step import Plan


def thread_counts(machine: Machine, default: int) -> list[int]:
    """The performance cores, all cores, and half of them; most first. What torch chose is always among them."""
    fast = min(machine.num_performance_cores or default, machine.num_cores)
    return sorted({default, fast, machine.num_cores, max(1, fast // 2)}, reverse=True)


def all_plans(
    asked: DeviceConfig,
    devices: Iterable[Device],
    threads: Sequence[int],
    chunks: Sequence[int],
    *,
    compile: bool,
) -> list[Plan]:
    """Every combination that may matter, for `lapclip bench`.

    Other precisions and compilation are tried once a device; bf16 also without hardware for it, to say what it costs.
    Threads feed an accelerator, but do not compute on it.
    """
    plans: list[Plan] = []
    for device in devices:
        precisions = [asked.precision] if asked.precision else in_order({*device.precisions(), "bf16"})
        first = first_plan(device, precisions[0], threads[0], chunks[0], asked)
        counts = threads[:1] if device.is_accelerator else threads
        plans += [replace(first, threads=num, chunk=chunk) for num, chunk in product(counts, chunks)]
        plans += [replace(first, precision=precision) for precision in precisions[1:]]
        plans += [replace(first, compile=True)] if compile and not first.compile else []
    return plans + freeing(plans, asked)


def first_plan(
    device: Device, precision: PrecisionName, threads: int, chunk: int, asked: DeviceConfig
) -> Plan:
    return Plan(
        device.name,
        precision,
        threads,
        chunk,
        bool(asked.compile),
        keep_memory=asked.keep_memory is not False,
    )


def in_order(precisions: Iterable[PrecisionName]) -> list[PrecisionName]:
    return sorted(precisions, key=PRECISIONS.index)


def few_plans(
    asked: DeviceConfig, devices: Iterable[Device], threads: Sequence[int], chunks: Sequence[int]
) -> list[Plan]:
    """One of each device and precision, and from the first of these one step in each direction: for `lapclip train`."""
    plans: list[Plan] = []
    for device in devices:
        precisions = [asked.precision] if asked.precision else in_order(device.precisions())
        first = first_plan(device, precisions[0], threads[0], chunks[0], asked)
        others = [replace(first, precision=precision) for precision in precisions[1:]]
        others += [replace(first, chunk=chunk) for chunk in chunks[1:]]
        if not device.is_accelerator:
            others += [replace(first, threads=num) for num in threads[1:]]
        plans += [first, *others]
    return plans + freeing(plans, asked)


def freeing(plans: Sequence[Plan], asked: DeviceConfig) -> list[Plan]:
    """The first plan with an allocator that gives memory back, where that can be chosen."""
    plain = [plan for plan in plans if plan.is_plain]
    if asked.keep_memory is not None or not plain or not has_glibc():
        return []
    return [replace(plain[0], keep_memory=False)]
