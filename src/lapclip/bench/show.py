"""What `lapclip bench` measured, ready to be shown: for programs, as tables, and as a page."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lapclip.autotune.cache import folder_for, load, store
from lapclip.autotune.plans import Measured, remark_on
from lapclip.autotune.resolve import devices_for
from lapclip.bench.ops import OpTiming, crossovers, time_ops
from lapclip.bench.sizes import EPOCH_PAIRS, SizeResult, predicted_speed_up, speed_up, study_sizes
from lapclip.bench.steps import MAX_DRIFT, StepsResult, as_json, bench_steps
from lapclip.config import Config, Plan
from lapclip.data.open import Data
from lapclip.machine.device import DEFAULT_THREADS, Device, processor, set_up_process
from lapclip.machine.hardware import read_machine
from lapclip.units import StagedWork, age, duration, listed, rate, short_count, size
from lapclip.view.document import Chart, Document, Line, Points, Range, Ranges, Section, Table, columns_of
from lapclip.view.html import write_html


@dataclass(frozen=True)
class Result:
    """One measurement: for programs, and for people."""

    json: dict[str, Any]
    section: Section


Work = StagedWork[Result]


def steps_section(config: Config, data: Data, command: str, *, compile: bool, fresh: bool) -> Work:
    """Execution plans of the run that `command` would train."""
    result = yield from bench_steps(config, data, compile=compile, fresh=fresh)
    measured, chosen = result.measured, result.choice.plan
    used = f"`{command}` uses this plan"
    if measured.is_disturbed:
        used = f"{measured.others_in_words}, so the result is not cached and `{command}` will measure again"
    elif result.predicted:
        used += f", at about {rate(result.predicted)} pairs/s including image preparation"
    remarks = [used, measured_ago(measured.when), *compile_remarks(measured)]
    if abs(drift := measured.drift) >= MAX_DRIFT:
        became = "faster: it may have been busy before" if drift < 0 else "slower: it may be busy or hot"
        became = f"during measurement, the machine became {abs(drift):.0%} {became}"
        remarks.append(f"{became}; `--fresh` measures again")
    rows = [(part, getattr(chosen, part), reason) for part, reason in result.reasons.items()]
    reasons = Table("what training will use", columns_of("setting, value, why"), rows)
    drawn, tables = steps_ranges(measured, chosen), [steps_table(result), reasons]
    section = Section("Execution plans", points=remarks, tables=tables, ranges=[drawn] * bool(drawn.ranges))
    return Result(as_json(result), section)


def steps_ranges(measured: Measured, chosen: Plan) -> Ranges:
    """Pairs a second of each candidate that was timed and not rejected, fastest first, beside the chosen one."""
    rows = [(c.pairs_per_second, c) for c in measured.candidates if c.pairs_per_second and not c.rejected]
    best = next((speed for speed, c in rows if c.plan == chosen), 0.0)
    ranges = []
    for speed, c in sorted(rows, key=lambda row: -row[0]):
        ends = None if c.spread is None else (speed * (1 - c.spread), speed * (1 + c.spread))
        ranges.append(Range(c.plan.in_words() + ", chosen" * (c.plan == chosen), speed, ends, best))
    title = "Pairs per second with the interquartile range of the steps; | is the chosen plan"
    return Ranges(title, ranges, kind="rate", num_alike=len(ranges))


def log_charts(axis: str, base: int, values: Iterable[tuple[str, str, float, float]]) -> list[Chart]:
    """From title, device, x and y: a chart a title, a line a device, on logarithmic axes."""
    charts: dict[str, dict[str, Points]] = {}
    for title, device, x, y in values:
        charts.setdefault(title, {}).setdefault(device, []).append((x, y))
    return [
        Chart(title, "", [Line(name, sorted(points), n, "dots") for n, (name, points) in enumerate(lines.items())],
              axis=axis, is_log_y=True, log_x=base)
        for title, lines in charts.items()
    ]  # fmt: skip


def measured_ago(when: float) -> str:
    return f"measured {age(time.time() - when)}; `--fresh` measures again"


def compile_remarks(measured: Measured) -> Iterator[str]:
    """What compiling costs and gains, for each plan that was tried compiled."""
    rates = {candidate.plan: candidate.pairs_per_second for candidate in measured.candidates}
    for candidate in measured.candidates:
        plain, first = rates.get(replace(candidate.plan, compile=False)), candidate.first_call_seconds
        if candidate.plan.compile and plain and first and (speed := candidate.pairs_per_second):
            gain = f"{speed / plain - 1:+.0%} pairs/s on {candidate.plan.device}"
            yield f"compiling takes {first:.0f} s and changes the speed by {gain}"


def steps_table(result: StepsResult) -> Table:
    rows = []
    for candidate in sorted(result.measured.candidates, key=lambda c: -(c.pairs_per_second or 0)):
        plan = candidate.plan
        spread = f"±{candidate.spread:.0%}" if candidate.spread is not None else ""
        remarks = ["chosen"] * (plan == result.choice.plan) + ["compiled"] * plan.compile
        remarks += ["memory released"] * (not plan.keep_memory)
        remarks += [remark] if (remark := remark_on(candidate, result.measured)) else []
        settings = (plan.device, plan.precision, plan.threads, plan.chunk)
        rows.append((*settings, candidate.pairs_per_second, spread, "; ".join(remarks)))
    model, batch = f"`{result.resolved.model.size}`", result.resolved.train.batch_size
    caption = f"{model}, {result.num_parameters:,} parameters, batches of {batch}"
    columns = "device, precision, threads: count, chunk: count, pairs/s: rate, spread: share, remark"
    return Table(caption, columns_of(columns), rows)


@dataclass(frozen=True)
class KnownOps:
    """What the cache keeps of single operations."""

    when: float
    ops: list[OpTiming]


def ops_section(config: Config, *, fresh: bool) -> Work:
    """Single operations."""
    devices = with_processor(devices_for(config))
    file = folder_for(read_machine(), {"ops": [device.name for device in devices]}) / "ops.json"
    known = None if fresh else load(file, KnownOps)
    timings, when = (known.ops, known.when) if known else ([], time.time())
    if not timings:
        set_up_process(DEFAULT_THREADS)  # as in training: one that frees memory triples large copies
        for timing in time_ops(devices):
            yield f"{timing.op} of {timing.size} on {timing.device}"
            timings.append(timing)
        store(file, {"ops": [asdict(timing) for timing in timings]})
    found, remarks = crossovers(timings), []
    for device, sizes in found.items():
        for op, n in sizes.items():
            where = "never faster than the CPU" if n is None else f"faster than the CPU from size {n} on"
            remarks.append(f"{op}: {device} is {where}")
    remarks = remarks or ["no accelerator was timed"]
    remarks += [
        "size n means n x n values, or n tokens; first call: its extra time compared with later calls; launch: the"
        " time to start a kernel, on the CPU the time of the smallest call",
        measured_ago(when),
    ]
    values = [(f"{t.op}, µs per call", t.device, t.size, t.seconds * 1e6) for t in timings]
    charts = log_charts("size", 2, values)
    section = Section("Operations", points=remarks, tables=[ops_table(timings)], charts=charts)
    return Result({"ops": [asdict(timing) for timing in timings], "crossovers": found}, section)


def with_processor(devices: list[Device]) -> list[Device]:
    """What there is to compare with comes first."""
    return [processor(), *(device for device in devices if device != processor())]


def ops_table(timings: Sequence[OpTiming]) -> Table:
    parts = {"per call": "seconds", "allocate": "allocate_seconds", "first call": "first_call_seconds",
             "launch": "launch_seconds", "compute": "compute_seconds", "sync": "synchronise_seconds"}  # fmt: skip
    columns = columns_of("op, size: count, device, " + ", ".join(f"{name}: seconds" for name in parts))
    rows = [(t.op, t.size, t.device, *(getattr(t, name) for name in parts.values())) for t in timings]
    return Table("operations, timed in blocks", columns, rows)


def sizes_section(config: Config, *, fresh: bool) -> Work:
    """All sizes."""
    devices = with_processor(devices_for(config))
    results = yield from study_sizes(devices, fresh=fresh, max_memory=config.device.max_memory)
    rows = []
    for r in results:
        predicted, measured = predicted_speed_up(r.num_parameters), speed_up(results, r)
        rows.append(asdict(r) | {"predicted_speed_up": predicted, "speed_up": measured})
    faster = [f"`{row['size']}`" for row in rows if (row["speed_up"] or 0) > 1]
    which = f"for {listed(faster)}" if faster else "at no size"
    remark = f"an accelerator is faster than the CPU {which}"
    if all(row["speed_up"] is None for row in rows):
        remark = "no accelerator was timed"
    columns = "speed-up of an accelerator over the CPU: predicted by lapclip's source documents, and measured"
    drawn = (("Pairs per second", "pairs_per_second", 1.0), ("Memory, GB", "memory_bytes", 1e9))
    values = [
        (title, r.device + ", estimated" * r.is_estimate, r.num_parameters, getattr(r, field) / unit)
        for title, field, unit in drawn
        for r in results
    ]
    charts, tables = log_charts("parameters", 10, values), [sizes_table(results)]
    section = Section("Sizes", points=[columns, remark], tables=tables, charts=charts)
    return Result({"sizes": rows}, section)


def sizes_table(results: Sequence[SizeResult]) -> Table:
    rows = []
    for r in results:
        about = "~" if r.is_estimate else ""
        measured = speed_up(results, r)
        speed = f"{r.pairs_per_second:,.{0 if r.pairs_per_second >= 100 else 2}f}"
        estimates = (about + text for text in (speed, size(r.memory_bytes), duration(r.epoch_seconds)))
        ratios = f"{predicted_speed_up(r.num_parameters):g}x", f"{measured:.2f}x" if measured else None
        rows.append((r.size, short_count(r.num_parameters), r.device, r.batch_size, *estimates, *ratios))
    caption = f"sizes, with all patches; an epoch is {EPOCH_PAIRS:,} pairs; ~ is an estimate"
    columns = (
        "size, params: count, device, batch: count, pairs/s: rate, memory: bytes, epoch: seconds, predicted: number,"
        " measured: number"
    )
    return Table(caption, columns_of(columns), rows)


def write_page(path: Path, results: Sequence[Result], facts: list[str]) -> None:
    """Everything as one page: facts of the machine, tables and charts."""
    about = "This machine's hardware and training speed."
    sections = [Section("Summary", points=facts), *(result.section for result in results)]
    write_html(Document("This machine", "lapclip bench", about, sections), path)
