"""Results of `lapclip bench` as rows that people read, on a terminal and on a page."""

from collections.abc import Sequence

from lapclip.autotune.results import remark_on
from lapclip.bench.ops import OpTiming, overtakes
from lapclip.bench.page import Table
from lapclip.bench.paper import count, duration
from lapclip.bench.sizes import EPOCH_PAIRS, SizeResult, predicted_speed_up, speed_up
from lapclip.bench.steps import MOST_DRIFT, StepsResult


def steps_table(result: StepsResult) -> Table:
    rows: list[tuple[str, ...]] = []
    for candidate in sorted(result.measured.candidates, key=lambda c: -(c.pairs_per_second or 0)):
        plan = candidate.plan
        rate = f"{candidate.pairs_per_second:,.0f}" if candidate.pairs_per_second else "-"
        spread = f"±{candidate.spread:.0%}" if candidate.spread is not None else ""
        remarks = ["chosen"] * (plan == result.choice.plan) + ["compiled"] * plan.compile
        remarks += ["memory given back"] * (not plan.keep_memory) + [
            remark_on(candidate, result.measured) or ""
        ]
        remark = "; ".join(remark for remark in remarks if remark)
        rows.append((plan.device, plan.precision, str(plan.threads), str(plan.chunk), rate, spread, remark))
    train = result.resolved.train
    caption = (
        f"`{result.resolved.model.size}`, {result.num_parameters:,} parameters, batches of {train.batch_size}"
    )
    return Table(caption, ("device", "precision", "threads", "chunk", "pairs/s", "spread", "remark"), rows)


def reasons_table(result: StepsResult) -> Table:
    values = {part: getattr(result.choice.plan, part) for part in result.reasons}
    rows: list[tuple[str, ...]] = [
        (part, ("no", "yes")[value] if isinstance(value, bool) else str(value), result.reasons[part])
        for part, value in values.items()
    ]
    return Table("what training will use", ("setting", "value", "why"), rows)


def drift_in_words(drift: float) -> str | None:
    if abs(drift) < MOST_DRIFT:
        return None
    if drift < 0:
        return f"the machine became {-drift:.0%} faster while measuring: it was busy before; `--fresh` measures again"
    return f"the machine became {drift:.0%} slower while measuring: busy or hot; `--fresh` measures again"


def ops_table(timings: Sequence[OpTiming]) -> Table:
    rows = [(t.op, str(t.size), t.device, *map(duration, parts_of(t))) for t in timings]
    header = ("op", "size", "device", "a call", "allocate", "first call", "launch", "compute", "sync")
    return Table("operations, timed in blocks", header, rows)


def parts_of(t: OpTiming) -> tuple[float, ...]:
    return (
        t.seconds,
        t.allocate_seconds,
        t.first_call_seconds,
        t.launch_seconds,
        t.compute_seconds,
        t.synchronise_seconds,
    )


def crossovers(timings: Sequence[OpTiming]) -> dict[str, dict[str, int | None]]:
    """By device and op, the size from which it is faster than the processor."""
    ops = dict.fromkeys(timing.op for timing in timings)
    devices = dict.fromkeys(timing.device for timing in timings if timing.device != "cpu")
    return {device: {op: overtakes(timings, op, device) for op in ops} for device in devices}


def sizes_table(results: Sequence[SizeResult]) -> Table:
    rows: list[tuple[str, ...]] = []
    for r in results:
        about = "~" if r.is_estimate else ""
        measured = speed_up(results, r)
        rows.append(
            (
                r.size,
                count(r.num_parameters),
                r.device,
                str(r.batch_size),
                f"{about}{r.pairs_per_second:,.{0 if r.pairs_per_second >= 100 else 2}f}",
                f"{about}{r.memory_bytes / 1e9:.1f} GB",
                about + duration(r.epoch_seconds),
                f"{predicted_speed_up(r.num_parameters):g}x",
                f"{measured:.2f}x" if measured else "-",
            )
        )
    header = (
        "size",
        "params",
        "device",
        "batch",
        "pairs/s",
        "memory",
        "epoch",
        "predicted",
        "measured",
    )
    caption = f"sizes, looking at whole images; an epoch is {EPOCH_PAIRS:,} pairs; ~ is an estimate"
    return Table(caption, header, rows)
