"""The three things `lapclip bench` can measure, each ready to be shown: for programs, for people, as an image."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lapclip.autotune.cache import folder_for, load, rebuilt, store
from lapclip.autotune.quick import devices_for
from lapclip.autotune.results import Measured
from lapclip.bench.figures import draw_ops, draw_sizes, draw_steps
from lapclip.bench.ops import OpTiming, time_ops
from lapclip.bench.page import Table
from lapclip.bench.sizes import predicted_speed_up, speed_up, study_sizes
from lapclip.bench.steps import as_json, bench_steps
from lapclip.bench.tables import (
    crossovers,
    drift_in_words,
    ops_table,
    reasons_table,
    sizes_table,
    steps_table,
)
from lapclip.config import Config
from lapclip.data.open import Data
from lapclip.machine.device import Device, default_threads, processor, set_up_process
from lapclip.machine.hardware import read_machine
from lapclip.units import age

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    """One measurement, in every form it is shown in."""

    json: dict[str, Any]
    tables: list[Table]
    remarks: list[str]
    draw: "Callable[[], Figure]"


Work = Generator[str, None, Section]


def steps_section(config: Config, data: Data, command: str, *, compile: bool, fresh: bool) -> Work:
    """Execution plans of the run that `command` would train."""
    result = yield from bench_steps(config, data, compile=compile, fresh=fresh)
    rate = (
        f", at about {result.predicted:,.0f} pairs/s while its images are prepared"
        if result.predicted
        else ""
    )
    remarks = [
        f"`{command}` trains this way{rate}",
        f"measured {age(time.time() - result.measured.when)}; `--fresh` measures again",
        *compiling_in_words(result.measured),
    ]
    if said := drift_in_words(result.measured.drift):
        remarks.append(said)
    title = f"{config.model.size}, batches of {result.resolved.train.batch_size}"
    return Section(
        as_json(result),
        [steps_table(result), reasons_table(result)],
        remarks,
        lambda: draw_steps(result.measured, result.choice.plan, title),
    )


def compiling_in_words(measured: Measured) -> Iterator[str]:
    """When compiling pays, for each plan that was tried compiled."""
    rates = {candidate.plan: candidate.pairs_per_second for candidate in measured.candidates}
    for candidate in measured.candidates:
        plain = rates.get(replace(candidate.plan, compile=False))
        rate, first = candidate.pairs_per_second, candidate.first_call_seconds
        if not candidate.plan.compile or not plain or not rate or not first:
            continue
        gain = rate / plain - 1
        if gain <= 0:
            yield f"compiling takes {first:.0f} s and gains nothing on {candidate.plan.device}"
        else:
            pays = first * (1 + gain) / gain / 60
            yield (
                f"compiling takes {first:.0f} s and gains {gain:.0%} on {candidate.plan.device}:"
                f" it pays in runs of more than {pays:.0f} minutes, and `lapclip train` then compiles"
            )


def ops_section(config: Config, *, fresh: bool) -> Work:
    """Single operations."""
    devices = with_processor(devices_for(config.device))
    file = folder_for(read_machine(), {"ops": [device.name for device in devices]}) / "ops.json"
    known = None if fresh else load(file)
    timings = timings_from(known)
    when = known["when"] if known and timings else time.time()
    if not timings:
        set_up_process(
            default_threads()
        )  # as in training: an allocator that gives memory back triples large copies
        for timing in time_ops(devices):
            yield f"{timing.op} of {timing.size} on {timing.device}"
            timings.append(timing)
        store(file, {"ops": [asdict(timing) for timing in timings]})
    found = crossovers(timings)
    remarks = [crossing(device, op, size) for device, sizes in found.items() for op, size in sizes.items()]
    if not found:
        remarks.append("no accelerator was timed that could overtake the processor")
    remarks.append(
        "size n is n x n numbers, or n tokens; the first call is what it takes more than the others; launch is what"
        " handing over takes, on the processor the time of the smallest call"
    )
    remarks.append(f"measured {age(time.time() - when)}; `--fresh` measures again")
    return Section(
        {"ops": [asdict(timing) for timing in timings], "crossovers": found},
        [ops_table(timings)],
        remarks,
        lambda: draw_ops(timings),
    )


def with_processor(devices: list[Device]) -> list[Device]:
    """What there is to compare with comes first."""
    return [processor(), *(device for device in devices if device != processor())]


def timings_from(known: dict[str, Any] | None) -> list[OpTiming]:
    stored = (known or {}).get("ops")
    timings = [rebuilt(OpTiming, timing) for timing in stored] if isinstance(stored, list) else []
    return [timing for timing in timings if timing is not None] if all(timings) else []


def crossing(device: str, op: str, size: int | None) -> str:
    if size is None:
        return f"{op}: {device} is never faster than the processor, up to the largest size"
    return f"{op}: {device} is faster than the processor from size {size} on"


def sizes_section(config: Config, *, fresh: bool) -> Work:
    """All sizes."""
    results = yield from study_sizes(
        with_processor(devices_for(config.device)), fresh=fresh, max_memory=config.device.max_memory
    )
    faster: Sequence[str] = [r.size for r in results if (speed_up(results, r) or 0) > 1]
    has_accelerator = any(speed_up(results, r) is not None for r in results)
    if not has_accelerator:
        remark = "no accelerator was timed: what was predicted of one stands alone"
    elif faster:
        remark = (
            f"an accelerator is faster than the processor for {', '.join(f'`{size}`' for size in faster)}"
        )
    else:
        remark = "no accelerator is faster than the processor at any size"
    rows = [
        asdict(r)
        | {"predicted_speed_up": predicted_speed_up(r.num_parameters), "speed_up": speed_up(results, r)}
        for r in results
    ]
    columns = "speed-up of an accelerator over the processor: predicted in the documents, and measured"
    return Section({"sizes": rows}, [sizes_table(results)], [columns, remark], lambda: draw_sizes(results))
