"""The machine's facts and rates, and the real training step with every execution plan it allows: which is fastest."""

from collections.abc import Generator
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from lapclip.autotune.cache import folder_for, is_of, load, recall, remember, store
from lapclip.autotune.measure import measure
from lapclip.autotune.plans import all_plans
from lapclip.autotune.quick import plans_for
from lapclip.autotune.resolve import Reasons, plan_of
from lapclip.autotune.results import Candidate, Measured, remark_on
from lapclip.bench.ops import about_torch, bandwidth_gbs, gemm_gflops
from lapclip.config import Config
from lapclip.data.open import Data
from lapclip.machine.device import device_named, present_devices
from lapclip.machine.hardware import read_machine
from lapclip.step.step import Plan
from lapclip.train.prepare import Draft, draft, open_here, tokenizer_for
from lapclip.units import finished

RACE_SECONDS = 45.0
PATIENCE = 2.0  # seconds for a step in low precision
MAX_DRIFT = 0.1


@dataclass(frozen=True)
class StepsResult:
    """What was measured of one model, and what follows from it."""

    resolved: Config
    num_parameters: int
    measured: Measured
    choice: Candidate
    reasons: Reasons  # by the parts of a plan
    predicted: float | None  # pairs a second of training, drawing included


def draft_of(config: Config, data: Data | None = None) -> Draft:
    """The run that would be trained with these settings."""
    data = data or finished(open_here(config))
    return draft(config, tokenizer_for(config, data), data)


def bench_steps(
    config: Config, data: Data | None = None, *, compile: bool, fresh: bool
) -> Generator[str, None, StepsResult]:
    """Takes what was measured before, unless it must be fresh, or measures, which takes about a minute."""
    yield "getting ready"
    first = draft_of(config, data)
    # All combinations of what was not asked for, with chunks down to a quarter of the most that fits.
    combine = partial(all_plans, compile=compile)
    plans = plans_for(first.asked, first.work, first.machine, combine=combine, num_chunks=3)
    folder = folder_for(first.machine, first.work.key())
    measured = None if fresh else recall(folder, plans)
    if measured is None:
        # Compiling is not timed against the clock: its first call alone may take longer than all the rest.
        seconds = RACE_SECONDS if not compile else 4 * RACE_SECONDS
        measured = yield from measure(first.work, plans, seconds=seconds, patience=PATIENCE)
        remember(folder, measured)
    resolved, reasons = first.resolve(measured)
    plan = plan_of(resolved)
    choice = next((c for c in measured.candidates if c.plan == plan), Candidate(plan))
    parts = [field.name for field in fields(Plan)]
    return StepsResult(
        resolved,
        first.num_parameters,
        measured,
        choice,
        {part: reasons[part] for part in parts},
        predicted_rate(choice, first, resolved.data.workers or 0),
    )


def predicted_rate(choice: Candidate, first: Draft, workers: int) -> float | None:
    """Of training: on a processor the workers that draw or decode take their time from the step's threads."""
    if choice.pairs_per_second is None:
        return None
    step, draw = 1 / choice.pairs_per_second, first.summary.fetch_seconds  # of one pair
    if workers == 0:
        return 1 / (step + draw)
    if device_named(choice.plan.device).is_accelerator:
        return 1 / max(step, draw / workers)
    return 1 / (step + draw / first.machine.num_cores)


def as_json(result: StepsResult) -> dict[str, Any]:
    """The part of `lapclip bench --json` that is about steps."""
    return {
        "size": result.resolved.model.size,
        "batch_size": result.resolved.train.batch_size,
        "keep_patches": result.resolved.train.keep_patches,
        "num_parameters": result.num_parameters,
        "candidates": [
            candidate_json(candidate) | {"rejected": remark_on(candidate, result.measured)}
            for candidate in result.measured.candidates
        ],
        "choice": candidate_json(result.choice),
        "reasons": result.reasons,
        "predicted_pairs_per_second": result.predicted,
        "drift": result.measured.drift,
        "measured": result.measured.when,
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    values = asdict(candidate)
    return values.pop("plan") | values


@dataclass(frozen=True)
class Overview:
    """The machine itself: its facts, and how fast each device multiplies and copies."""

    machine: dict[str, Any]
    rates: dict[str, dict[str, float]]  # by device: gemm_gflops and bandwidth_gbs


def look_over(*, fresh: bool) -> Generator[str, None, Overview]:
    """Reads the facts; rates come from the cache if they were measured before."""
    machine = read_machine()
    devices = list(present_devices())
    facts = asdict(machine) | {
        "torch": about_torch(),
        "devices": [{"name": device.name, "about": device.about()} for device in devices],
    }
    file = folder_for(machine, {"rates": [device.name for device in devices]}) / "rates.json"
    known = None if fresh else load(file)
    rates = rates_from(known, [device.name for device in devices])
    if not rates:
        for device in devices:
            yield f"multiplying and copying on {device.name}"
            rates[device.name] = {
                "gemm_gflops": gemm_gflops(device),
                "bandwidth_gbs": bandwidth_gbs(device),
            }
        store(file, {"rates": rates})
    return Overview(facts, rates)


def rates_from(stored: dict[str, Any] | None, names: list[str]) -> dict[str, dict[str, float]]:
    """The rates of all these devices, or nothing."""
    rates = (stored or {}).get("rates")
    if not isinstance(rates, dict) or set(rates) != set(names):
        return {}
    kinds = ("gemm_gflops", "bandwidth_gbs")
    is_whole = all(
        isinstance(rate, dict) and all(is_of(float, rate.get(kind)) and rate[kind] > 0 for kind in kinds)
        for rate in rates.values()
    )
    return rates if is_whole else {}


def in_words(overview: Overview) -> list[str]:
    """The facts as a few lines."""
    machine, torch = overview.machine, overview.machine["torch"]
    fast, slow = machine["num_performance_cores"], machine["num_efficiency_cores"]
    kinds = f" ({fast} performance, {slow or 0} efficiency)" if fast else ""
    caches = ", ".join(f"{name} {kilobytes(size)}" for name, size in machine["caches"].items())
    built = ", ".join(part for part in (torch["capability"], torch["blas"]) if part)
    lines = [
        f"{machine['chip']}, {machine['num_cores']} cores{kinds}, {machine['memory_bytes'] / 1e9:.0f} GB of memory,"
        f" {machine['available_bytes'] / 1e9:.0f} GB free",
        machine["system"],
        f"Python {machine['python']}, torch {torch['version']} ({built})",
    ]
    if caches:
        lines.append(f"caches: {caches}")
    for device in machine["devices"]:
        rate = overview.rates[device["name"]]
        lines.append(
            f"{device['name']} ({device['about']}): products {rate['gemm_gflops']:,.0f} GFLOP/s,"
            f" memory {rate['bandwidth_gbs']:.1f} GB/s"
        )
    return lines


def kilobytes(size: int) -> str:
    return f"{size / 2**20:.0f} MB" if size >= 2**20 else f"{size / 2**10:.0f} kB"
