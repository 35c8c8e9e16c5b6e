"""How fast a device multiplies and copies; how long single operations take on each device, size by size.

Times are those of blocks: many calls in a row, the device waited for around them and never between them. Waiting
after each call would time the waiting: for small inputs it is far longer than the work, and no model is run that way.

- allocate: making the memory of the inputs there, the first time.
- first call: what the very first call at a size takes beyond a steady one (compiling, planning, first memory).
- launch: handing a call over, on a device that returns before it is done. The CPU computes inside the call;
  there it is the fixed cost, the time of the same operation on the smallest input.
- compute: the rest of a call.
- synchronise: waiting for a device that has nothing to do; a block pays it once.

Times are medians over rounds; in a round each device has its turn, so that a machine that slows down slows all of them.
Results are allocated in each call, as in a model; the process should be set up as for training, or on Linux large
results are faulted in again each time.
"""

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from torch.nn import functional as F

from lapclip.machine.device import Device

BLOCK_SECONDS = 0.02  # long against the clock and one synchronisation, short enough for many
LONG_SECONDS = 0.1  # a call that takes this long is not tried again to learn how long
MAX_CALLS = 1 << 14
NUM_LAUNCHES = 16  # a device that is this far behind may make the next call wait
NUM_BLOCKS = 3
COPY_BYTES = 1 << 28  # source and target together: far more than the caches of a laptop
COPY_SHARE = 1 / 8  # of free memory

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
HEADS, HEAD_WIDTH = 4, 64
MAX_CALL_SECONDS = 2.0
OPS_SHARE = 1 / 4  # of free memory
ROUND_SECONDS = 0.15  # a size of an operation on a device, unless three blocks take longer
MAX_BLOCKS = 7


class Block(NamedTuple):
    """Calls in a row on a device that was idle before, and is again after."""

    seconds: float  # of one call: its share of the whole block
    launch_seconds: float  # of one call, until it was handed over; over the first calls


def time_block(call: Callable[[], object], device: Device, num_calls: int) -> Block:
    """Times calls in a row; the device is waited for around the block, never between its calls."""
    device.synchronize()
    started = time.perf_counter()
    num_launches = min(num_calls, NUM_LAUNCHES)
    for _ in range(num_launches):
        call()
    launched = time.perf_counter()
    for _ in range(num_calls - num_launches):
        call()
    device.synchronize()
    ended = time.perf_counter()
    return Block((ended - started) / num_calls, (launched - started) / num_launches)


def calls_in_block(call: Callable[[], object], device: Device) -> int:
    """How many calls make a block of about `BLOCK_SECONDS`; also warms up."""
    num_calls = 1
    while True:
        elapsed_seconds = time_block(call, device, num_calls).seconds * num_calls
        if elapsed_seconds < LONG_SECONDS:  # may be another program's turn on this core, and not the calls
            again = min(time_block(call, device, num_calls).seconds for _ in range(2))
            elapsed_seconds = min(elapsed_seconds, again * num_calls)
        if elapsed_seconds >= BLOCK_SECONDS / 2 or num_calls >= MAX_CALLS:
            return num_calls
        # Waiting at the end has a price of its own, so that one call says little about many: grow by degrees.
        enough = math.ceil(num_calls * BLOCK_SECONDS / max(elapsed_seconds, 1e-9))
        num_calls = min(max(enough, num_calls + 1), 8 * num_calls, MAX_CALLS)


def best_seconds(call: Callable[[], object], device: Device, *, budget_seconds: float) -> float:
    """Seconds of one call in the fastest block, which other programs disturbed least."""
    num_calls = calls_in_block(call, device)
    until = time.perf_counter() + budget_seconds
    blocks: list[float] = []
    while len(blocks) < NUM_BLOCKS or time.perf_counter() < until:
        blocks.append(time_block(call, device, num_calls).seconds)
    return min(blocks)


def gemm_gflops(
    device: Device, *, sizes: Sequence[int] = (512, 1024, 2048), budget_seconds: float = 1.5
) -> float:
    """Billions of operations a second in fp32 products of square matrices, at the size that suits the device best."""
    share, best = budget_seconds / len(sizes), 0.0
    for size in sizes:
        left, right, product = (torch.rand(size, size, device=device.torch) for _ in range(3))
        seconds = best_seconds(partial(torch.mm, left, right, out=product), device, budget_seconds=share)
        best = max(best, 2 * size**3 / seconds / 1e9)
        del left, right, product
        if seconds * 8 > share:  # twice the size is eight times the work
            break
    device.release_memory()
    return best


def bandwidth_gbs(device: Device, *, max_bytes: int = COPY_BYTES, budget_seconds: float = 1.0) -> float:
    """Billions of bytes read and written a second while copying far more than the caches hold."""
    num_numbers = min(max_bytes, int(free_bytes(device) * COPY_SHARE)) // 8  # two copies of four bytes
    source, target = (torch.ones(num_numbers, device=device.torch) for _ in range(2))
    seconds = best_seconds(partial(target.copy_, source), device, budget_seconds=budget_seconds)
    del source, target
    device.release_memory()
    return 8 * num_numbers / seconds / 1e9


def free_bytes(device: Device) -> int:
    return device.free_bytes(psutil.virtual_memory().available)


def about_torch() -> dict[str, Any]:
    """Version, instructions, libraries and threads of the PyTorch that does the work."""
    about = {"version": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()}
    return about | {"threads": torch.get_num_threads()} | parse_build(torch.__config__.show())


def parse_build(text: str) -> dict[str, str | None]:
    """The libraries named in what PyTorch says of its build; None for what is not in it."""
    blas = re.search(r"\bBLAS_INFO=(\w+)", text)
    openmp = re.search(r"\bOpenMP (\d+)(?: \(a\.k\.a\. OpenMP ([\d.]+)\))?", text)
    return {"blas": blas and blas[1], "openmp": openmp and (openmp[2] or openmp[1])}


@dataclass(frozen=True)
class OpTiming:
    """One operation at one size on one device; seconds are of one call."""

    device: str
    op: str
    size: int
    seconds: float
    allocate_seconds: float
    first_call_seconds: float
    launch_seconds: float
    compute_seconds: float
    synchronise_seconds: float
    num_calls: int  # in a block


@dataclass(frozen=True)
class Op:
    """An operation, how many numbers it may hold at once, how its work grows, and the shape of its inputs."""

    run: Callable[..., object]
    num_inputs: int
    num_held: Callable[[int], int]
    power: int = 2  # of the size
    shape: Callable[[int], tuple[int, ...]] = lambda size: (size, size)


OPS = {
    "product": Op(torch.mm, 2, lambda size: 3 * size**2, power=3),
    "attention": Op(
        F.scaled_dot_product_attention,
        3,
        # Where nothing is fused, the scores of all tokens are held, before and after the softmax.
        lambda size: HEADS * (4 * size * HEAD_WIDTH + 2 * size**2),
        shape=lambda size: (1, HEADS, size, HEAD_WIDTH),
    ),
    "layer norm": Op(lambda rows: F.layer_norm(rows, rows.shape[-1:]), 1, lambda size: 2 * size**2),
    "copy": Op(torch.clone, 1, lambda size: 2 * size**2),
}


@dataclass(frozen=True)
class Prepared:
    """An operation with its inputs where they are needed, called before and so warm."""

    device: Device
    call: Callable[[], object]
    num_calls: int
    allocate_seconds: float
    first_seconds: float  # of the very first call, all of it


def time_ops(devices: Sequence[Device], sizes: Sequence[int] = SIZES) -> Iterator[OpTiming]:
    """Times each operation at each size on each device; a size that is too slow or too large there is omitted."""
    idle = {device.name: idle_seconds(device) for device in devices}
    for name, op in OPS.items():
        fixed = {device.name: fixed_seconds(op, device) for device in devices}
        last: dict[str, OpTiming] = {}
        try:
            for size in sorted(sizes):
                able = [device for device in devices if ends(op, size, last.get(device.name))]
                able = [device for device in able if fits(op, size, device, len(able))]
                timings = list(time_size(name, size, able, idle=idle, fixed=fixed))
                last |= {timing.device: timing for timing in timings}
                yield from (timing for timing in timings if timing.seconds <= MAX_CALL_SECONDS)
        finally:
            for device in devices:
                device.release_memory()


def time_size(
    name: str, size: int, devices: Sequence[Device], *, idle: dict[str, float], fixed: dict[str, float]
) -> Iterator[OpTiming]:
    """Times an operation at one size on all devices in turn; holds their inputs meanwhile."""
    prepared = [prepare(OPS[name], size, device) for device in devices]
    for work, blocks in zip(prepared, time_in_turn(prepared), strict=True):
        device = work.device
        seconds = statistics.median(block.seconds for block in blocks)
        handed_over = statistics.median(block.launch_seconds for block in blocks)
        launch_seconds = min(handed_over if device.is_accelerator else fixed[device.name], seconds)
        yield OpTiming(
            device=device.name,
            op=name,
            size=size,
            seconds=seconds,
            allocate_seconds=work.allocate_seconds,
            first_call_seconds=max(work.first_seconds - seconds, 0.0),
            launch_seconds=launch_seconds,
            compute_seconds=seconds - launch_seconds,
            synchronise_seconds=idle[device.name],
            num_calls=work.num_calls,
        )


def idle_seconds(device: Device) -> float:
    """What waiting for a device costs that has nothing to do."""
    torch.zeros(1, device=device.torch)  # the first use of a device sets it up
    return statistics.median(time_block(lambda: None, device, 1).seconds for _ in range(NUM_BLOCKS))


def fixed_seconds(op: Op, device: Device) -> float:
    """What a call costs that has nothing to compute."""
    work = prepare(op, 1, device)
    return statistics.median(time_block(work.call, device, work.num_calls).seconds for _ in range(NUM_BLOCKS))


def fits(op: Op, size: int, device: Device, num_devices: int) -> bool:
    """Whether it needs at most a quarter of what is free; devices may share one memory, and hold theirs at once."""
    return 4 * op.num_held(size) * num_devices <= free_bytes(device) * OPS_SHARE


def ends(op: Op, size: int, last: OpTiming | None) -> bool:
    """Whether a call should end in time, from how long the size before took."""
    return last is None or last.seconds * (size / last.size) ** op.power <= MAX_CALL_SECONDS


def prepare(op: Op, size: int, device: Device) -> Prepared:
    """Makes the inputs on the device and calls the operation until it is warm."""
    device.synchronize()
    started = time.perf_counter()
    inputs = [torch.zeros(op.shape(size), device=device.torch) for _ in range(op.num_inputs)]
    device.synchronize()
    allocate_seconds = time.perf_counter() - started
    for tensor in inputs:
        tensor.uniform_(-1, 1)

    call = partial(op.run, *inputs)
    first = time_block(call, device, 1)
    return Prepared(device, call, calls_in_block(call, device), allocate_seconds, first.seconds)


def time_in_turn(prepared: Sequence[Prepared]) -> list[list[Block]]:
    """Blocks of each, in rounds; at least three, and more while they are short."""
    blocks: list[list[Block]] = [[] for _ in prepared]
    started = time.perf_counter()
    for number in range(MAX_BLOCKS):
        if number >= NUM_BLOCKS and time.perf_counter() - started > ROUND_SECONDS * len(prepared):
            break
        for work, own in zip(prepared, blocks, strict=True):
            own.append(time_block(work.call, work.device, work.num_calls))
    return blocks


def overtakes(reference: Mapping[float, float], other: Mapping[float, float]) -> float | None:
    """From seconds by size: the size from which on the other is faster, at it and at every larger one both have."""
    found = None
    for size in sorted(reference.keys() & other.keys(), reverse=True):
        if other[size] >= reference[size]:
            break
        found = size
    return found


def crossovers(timings: Iterable[OpTiming], reference: str = "cpu") -> dict[str, dict[str, float | None]]:
    """By device and op, the size from which on it is faster than the reference."""
    seconds: dict[str, dict[str, dict[float, float]]] = {}
    for timing in timings:
        seconds.setdefault(timing.device, {}).setdefault(timing.op, {})[timing.size] = timing.seconds
    usual = seconds.pop(reference, {})
    ops = dict.fromkeys(op for own in (usual, *seconds.values()) for op in own)
    found = {}
    for device, own in seconds.items():
        found[device] = {op: overtakes(usual.get(op, {}), own.get(op, {})) for op in ops}
    return found
