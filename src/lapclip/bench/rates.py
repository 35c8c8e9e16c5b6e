"""How fast a device multiplies and copies, and what PyTorch here is made of: a device in, one number out."""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from lapclip.machine.device import Device

BLOCK_SECONDS = 0.02  # long against the clock and one synchronisation, short enough for many
LONG_SECONDS = 0.1  # a call that takes this long is not tried again to learn how long
MOST_CALLS = 1 << 14
NUM_LAUNCHES = 16  # a device that is this far behind may make the next call wait
NUM_BLOCKS = 3
COPY_BYTES = 1 << 28  # source and target together: far more than the caches of a laptop
SHARE_OF_FREE = 1 / 8


@dataclass(frozen=True)
class Block:
    """Calls in a row on a device that was idle before, and is again after."""

    num_calls: int
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
    return Block(num_calls, (ended - started) / num_calls, (launched - started) / num_launches)


def calls_in_block(call: Callable[[], object], device: Device) -> int:
    """How many calls make a block of about `BLOCK_SECONDS`; also warms up."""
    num_calls = 1
    while True:
        elapsed_seconds = time_block(call, device, num_calls).seconds * num_calls
        if elapsed_seconds < LONG_SECONDS:  # may be another program's turn on this core, and not the calls
            again = min(time_block(call, device, num_calls).seconds for _ in range(2))
            elapsed_seconds = min(elapsed_seconds, again * num_calls)
        if elapsed_seconds >= BLOCK_SECONDS / 2 or num_calls >= MOST_CALLS:
            return num_calls
        # Waiting at the end has a price of its own, so that one call says little about many: grow by degrees.
        wanted = math.ceil(num_calls * BLOCK_SECONDS / max(elapsed_seconds, 1e-9))
        num_calls = min(max(wanted, num_calls + 1), 8 * num_calls, MOST_CALLS)


def best_seconds(call: Callable[[], object], device: Device, *, budget_seconds: float) -> float:
    """Seconds of one call in the fastest block: what other programs take away is no property of the device."""
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
    share = budget_seconds / len(sizes)
    best = 0.0
    for size in sizes:
        seconds = product_seconds(device, size, budget_seconds=share)
        best = max(best, 2 * size**3 / seconds / 1e9)
        if seconds * 8 > share:  # twice the size is eight times the work
            break
    device.release_memory()
    return best


def product_seconds(device: Device, size: int, *, budget_seconds: float) -> float:
    left, right, product = (torch.rand(size, size, device=device.torch) for _ in range(3))
    return best_seconds(lambda: torch.mm(left, right, out=product), device, budget_seconds=budget_seconds)


def bandwidth_gbs(device: Device, *, most_bytes: int = COPY_BYTES, budget_seconds: float = 1.0) -> float:
    """Billions of bytes read and written a second while copying far more than the caches hold."""
    num_numbers = min(most_bytes, int(free_bytes(device) * SHARE_OF_FREE)) // 8  # two copies of four bytes
    seconds = copy_seconds(device, num_numbers, budget_seconds=budget_seconds)
    device.release_memory()
    return 8 * num_numbers / seconds / 1e9


def copy_seconds(device: Device, num_numbers: int, *, budget_seconds: float) -> float:
    source, target = (torch.ones(num_numbers, device=device.torch) for _ in range(2))
    return best_seconds(lambda: target.copy_(source), device, budget_seconds=budget_seconds)


def free_bytes(device: Device) -> int:
    return device.free_bytes(psutil.virtual_memory().available)


def about_torch() -> dict[str, Any]:
    """Version, instructions, libraries and threads of the PyTorch that does the work."""
    return {
        "version": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    } | parse_build(torch.__config__.show())


def parse_build(text: str) -> dict[str, str | None]:
    """The libraries named in what PyTorch says of its build; None for what is not in it."""
    blas = re.search(r"\bBLAS_INFO=(\w+)", text)
    openmp = re.search(r"\bOpenMP (\d+)(?: \(a\.k\.a\. OpenMP ([\d.]+)\))?", text)
    return {"blas": blas and blas[1], "openmp": openmp and (openmp[2] or openmp[1])}
