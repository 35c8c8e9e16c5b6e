"""How long single operations take on each device, size by size, and from which size a device is worth its price.

Times are those of blocks: many calls in a row, the device waited for around them and never between them. Waiting
after each call would time the waiting: for small inputs it is far longer than the work, and no model is run that way.

- allocate: making the memory of the inputs there, the first time.
- first call: what the very first call at a size takes beyond a steady one (compiling, planning, first memory).
- launch: handing a call over, on a device that returns before it is done. The processor computes inside the call;
  there it is the fixed cost, the time of the same operation on the smallest input.
- compute: the rest of a call.
- synchronise: waiting for a device that has nothing to do; a block pays it once.

Times are medians over rounds; in a round each device has its turn, so that a machine that slows down slows all of them.
Results are allocated in each call, as in a model; the process should be set up as for training, or on Linux large
results are faulted in anew each time.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lapclip.bench.rates import NUM_BLOCKS, Block, calls_in_block, free_bytes, time_block
from lapclip.machine.device import Device

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
HEADS, HEAD_WIDTH = 4, 64
LONGEST_CALL_SECONDS = 2.0
SHARE_OF_FREE = 1 / 4
ROUND_SECONDS = 0.15  # a size of an operation on a device, unless three blocks take longer
MOST_BLOCKS = 7


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
    """An operation, the shape of its inputs, how many numbers it may hold at once, and how its work grows."""

    run: Callable[..., object]
    num_inputs: int
    shape: Callable[[int], tuple[int, ...]]
    num_held: Callable[[int], int]
    power: int = 2  # of the size


def square(size: int) -> tuple[int, ...]:
    return (size, size)


def tokens(size: int) -> tuple[int, ...]:
    return (1, HEADS, size, HEAD_WIDTH)


def layer_norm(rows: Tensor) -> Tensor:
    return F.layer_norm(rows, rows.shape[-1:])


OPS = {
    "product": Op(torch.mm, 2, square, lambda size: 3 * size**2, power=3),
    # Where nothing is fused, the scores of all tokens are held, before and after the softmax.
    "attention": Op(
        F.scaled_dot_product_attention, 3, tokens, lambda size: HEADS * (4 * size * HEAD_WIDTH + 2 * size**2)
    ),
    "layer norm": Op(layer_norm, 1, square, lambda size: 2 * size**2),
    "copy": Op(torch.clone, 1, square, lambda size: 2 * size**2),
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
    """Times each operation at each size on each device; a size that is too slow or too large there is left out."""
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
                yield from (timing for timing in timings if timing.seconds <= LONGEST_CALL_SECONDS)
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
    device.synchronize()
    seconds = []
    for _ in range(NUM_BLOCKS):
        started = time.perf_counter()
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def fixed_seconds(op: Op, device: Device) -> float:
    """What a call costs that has nothing to compute."""
    work = prepare(op, 1, device)
    return statistics.median(time_block(work.call, device, work.num_calls).seconds for _ in range(NUM_BLOCKS))


def fits(op: Op, size: int, device: Device, num_devices: int) -> bool:
    """Whether it needs at most a quarter of what is free; devices may share one memory, and hold theirs at once."""
    num_bytes = 4 * op.num_held(size)
    return num_bytes * num_devices <= free_bytes(device) * SHARE_OF_FREE


def ends(op: Op, size: int, last: OpTiming | None) -> bool:
    """Whether a call should end in time, from how long the size before took."""
    return last is None or last.seconds * (size / last.size) ** op.power <= LONGEST_CALL_SECONDS


def prepare(op: Op, size: int, device: Device) -> Prepared:
    """Makes the inputs on the device and calls the operation until it is warm."""
    device.synchronize()
    started = time.perf_counter()
    inputs = [torch.zeros(op.shape(size), device=device.torch) for _ in range(op.num_inputs)]
    device.synchronize()
    allocate_seconds = time.perf_counter() - started
    for tensor in inputs:
        tensor.uniform_(-1, 1)

    def call() -> object:
        return op.run(*inputs)

    first = time_block(call, device, 1)
    return Prepared(device, call, calls_in_block(call, device), allocate_seconds, first.seconds)


def time_in_turn(prepared: Sequence[Prepared]) -> list[list[Block]]:
    """Blocks of each, in rounds; at least three, and more while they are short."""
    blocks: list[list[Block]] = [[] for _ in prepared]
    started = time.perf_counter()
    for number in range(MOST_BLOCKS):
        if number >= NUM_BLOCKS and time.perf_counter() - started > ROUND_SECONDS * len(prepared):
            break
        for work, own in zip(prepared, blocks, strict=True):
            own.append(time_block(work.call, work.device, work.num_calls))
    return blocks


def overtakes(timings: Iterable[OpTiming], op: str, device: str, reference: str = "cpu") -> int | None:
    """The size from which on a device is faster than the reference, at it and at every larger one both have done."""
    seconds: dict[int, dict[str, float]] = defaultdict(dict)
    for timing in timings:
        if timing.op == op and timing.device in (device, reference):
            seconds[timing.size][timing.device] = timing.seconds
    found = None
    for size in sorted(seconds, reverse=True):
        if len(seconds[size]) < 2:
            continue
        if seconds[size][device] >= seconds[size][reference]:
            break
        found = size
    return found
