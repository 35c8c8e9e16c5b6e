"""The scaling study: how fast each named size trains on each device, and where an accelerator begins to pay.

Every size looks at whole images, so that sizes compare. Each is measured in a process of its own, whose memory is its
own; past the memory there is, it is estimated.
"""

import json
import multiprocessing
import signal
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from lapclip.autotune.cache import folder_for, load, store
from lapclip.autotune.measure import Rigs, num_in_block
from lapclip.autotune.parity import first_line
from lapclip.autotune.plans import spread_of
from lapclip.autotune.resolve import CHARACTER_SIZES, SHARE_OF_MEMORY
from lapclip.autotune.work import Work
from lapclip.config import Plan, load_config
from lapclip.data.tokenizer import NUM_CHARACTERS
from lapclip.data.workers import STOPPING, start_worker
from lapclip.errors import UserError
from lapclip.machine.device import DEFAULT_THREADS, Device, processor, ran_out_of_memory, set_up_process
from lapclip.machine.hardware import limit_openmp_spinning, read_machine
from lapclip.model.clip import flops_per_pair, shape_of
from lapclip.train.prepare import draft_of
from lapclip.units import StagedWork

STUDIED = ("nano", "tiny", "small", "base", "medium", "large", "huge")
EPOCH_PAIRS = 10_000
MAX_STEP_SECONDS = 20.0  # a larger size is measured with fewer pairs
NUM_BLOCKS = 3
WAIT_SECONDS = 0.2
VOCABULARY = 4096  # of a size that is only estimated

# What the documents that lapclip grew from predicted of an accelerator against the processor, by parameters.
PREDICTED = ((50e6, 0.1), (100e6, 0.3), (200e6, 0.8), (500e6, 1.5), (float("inf"), 3.0))


@dataclass(frozen=True)
class SizeResult:
    """One size on one device, measured, or estimated where it does not fit into memory."""

    size: str
    num_parameters: int
    device: str
    batch_size: int
    chunk: int
    pairs_per_second: float
    spread: float | None  # half the distance of the quartiles, as a share of the median
    memory_bytes: int
    epoch_seconds: float
    is_estimate: bool
    flops_per_second: float = 0.0  # of the products, which is what an estimate of a larger size is made from


def predicted_speed_up(num_parameters: int) -> float:
    return next(factor for limit, factor in PREDICTED if num_parameters < limit)


def study_sizes(
    devices: Sequence[Device], names: Sequence[str] = STUDIED, *, fresh: bool, max_memory: float | None
) -> StagedWork[list[SizeResult]]:
    """Every size on every device, smallest first."""
    machine = read_machine()
    results: list[SizeResult] = []
    for device in devices:
        free = device.free_bytes(machine.available_bytes) * SHARE_OF_MEMORY
        room = max_memory * 1e9 if max_memory else free
        last: SizeResult | None = None
        for name in names:
            yield f"`{name}` on {device.name}"
            about = {"size": name, "device": device.name, "max_memory": max_memory}
            file = folder_for(machine, about) / "size.json"
            found = None if fresh else load(file, SizeResult)
            if found is None:
                found = yield from measure_or_estimate(name, device.name, room, last)
                if not found.is_estimate:
                    store(file, asdict(found))
            results.append(found)
            last = found if not found.is_estimate else last
    return results


def measure_or_estimate(
    name: str, device: str, room: float, smaller: SizeResult | None
) -> StagedWork[SizeResult]:
    """Measures one size, in a new process; estimates it when it does not fit."""
    config = load_config(flags={"size": name})
    shape, vocab_size = shape_of(config.model), NUM_CHARACTERS if name in CHARACTER_SIZES else VOCABULARY
    work = Work(config.model, config.train, vocab_size, shape.text_length)
    memory_bytes = work.step_bytes(1)
    if memory_bytes <= room or smaller is None:
        found = yield from in_a_process(name, device, room, smaller.flops_per_second if smaller else None)
        if found is not None:
            return found
    if smaller is None:
        raise UserError(f"`{name}` does not fit into memory here", hint="close other programs and try again")
    # At the rate of the largest size that was measured. With one pair a chunk the towers run forward twice: four
    # passes' worth of products instead of three.
    flops = 4 * flops_per_pair(shape, num_tokens=shape.text_length)
    pairs_per_second = smaller.flops_per_second / flops
    return replace(
        smaller,
        size=name,
        num_parameters=work.num_parameters,
        chunk=1,
        pairs_per_second=pairs_per_second,
        spread=None,
        memory_bytes=memory_bytes,
        epoch_seconds=EPOCH_PAIRS / pairs_per_second,
        is_estimate=True,
        flops_per_second=0.0,
    )


def in_a_process(name: str, device: str, room: float, rate: float | None) -> StagedWork[SizeResult | None]:
    """None when the process died, as one does that takes more memory than there is."""
    spawn = multiprocessing.get_context("spawn")
    answers, answer = spawn.Pipe(duplex=False)
    process = spawn.Process(target=send_size, args=(answer, name, device, room, rate), daemon=True)
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # Ctrl-C is for us, who then end it
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    answer.close()  # ours; the process holds its own, and its end is then seen
    try:
        while not answers.poll(WAIT_SECONDS):
            yield f"`{name}` on {device}"
        answered = json.loads(answers.recv_bytes())
        if "problem" in answered:
            raise UserError(answered["problem"], hint="measure the CPU only: `--device cpu`")
        return msgspec.convert(answered, SizeResult)
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def send_size(answer: Connection, *asked: Any) -> None:
    """What the process does; it ends with the one who started it."""
    start_worker(None)
    limit_openmp_spinning()
    try:
        answered = asdict(measure_size(*asked))
    except (RuntimeError, MemoryError) as error:
        if ran_out_of_memory(error):
            return
        answered = {"problem": first_line(error)}
    except UserError as error:
        answered = {"problem": error.message}
    answer.send_bytes(json.dumps(answered).encode())


def measure_size(name: str, device: str, room: float, rate: float | None) -> SizeResult:
    """Times the step of one size here, with as many pairs as a step of tolerable length has."""
    flags = {"size": name, "device": device, "max_memory": room / 1e9, "keep_patches": 1.0}
    config = load_config(flags=flags)
    _, draft = draft_of(config)
    work = draft.work
    plan = Plan(device, "fp32", DEFAULT_THREADS, draft.resolve()[0].train.chunk or 1)
    flops = flops_per_pair(shape_of(config.model), num_tokens=work.num_tokens)  # of one pass
    if rate is not None:
        limit = max(4, int(MAX_STEP_SECONDS * rate / (3 * flops)))
        work = replace(work, train=replace(work.train, batch_size=min(work.batch_size, limit)))
        plan = replace(plan, chunk=min(plan.chunk, work.batch_size))
    set_up_process(plan.threads)
    rigs = Rigs(work)
    if not plan.is_plain and (problem := rigs.problem(plan)):
        hint = "measure the CPU only: `--device cpu`"
        raise UserError(f"`{device}` gives wrong results for `{name}`: {problem}", hint=hint)
    rig = rigs.rig(plan)
    rig.step(plan)
    num_steps = num_in_block(alone := rig.step(plan))
    seconds = [alone] if num_steps == 1 else []
    while len(seconds) < NUM_BLOCKS:
        seconds.append(statistics.mean(rig.step(plan) for _ in range(num_steps)))
    pairs_per_second = work.batch_size / statistics.median(seconds)
    num_passes = 3 if plan.chunk >= work.batch_size else 4
    return SizeResult(
        size=name,
        num_parameters=draft.work.num_parameters,
        device=device,
        batch_size=work.batch_size,
        chunk=plan.chunk,
        pairs_per_second=pairs_per_second,
        spread=spread_of(seconds),
        memory_bytes=rig.device.peak_bytes(),
        epoch_seconds=EPOCH_PAIRS / pairs_per_second,
        is_estimate=False,
        flops_per_second=num_passes * flops * pairs_per_second,
    )


def speed_up(results: Sequence[SizeResult], result: SizeResult) -> float | None:
    """How much faster than the processor, at the same size."""
    cpu = processor().name
    reference = next((r.pairs_per_second for r in results if (r.size, r.device) == (result.size, cpu)), None)
    return result.pairs_per_second / reference if reference and result.device != cpu else None
