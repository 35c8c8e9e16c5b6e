"""The machine's facts and rates, and the real training step with every execution plan it allows: which is fastest."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypedDict

import msgspec

from lapclip.autotune.cache import folder_for, load, recall, remember, store
from lapclip.autotune.measure import measure
from lapclip.autotune.plans import Candidate, Measured, plan_of, remark_on
from lapclip.autotune.quick import plans_for
from lapclip.autotune.resolve import Draft
from lapclip.bench.ops import about_torch, bandwidth_gbs, gemm_gflops
from lapclip.config import PLAN, Config
from lapclip.data.open import Data
from lapclip.machine.device import device_named, present_devices
from lapclip.machine.hardware import read_machine
from lapclip.train.prepare import draft_of
from lapclip.units import StagedWork, size

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
    reasons: dict[str, str]  # by the parts of a plan
    predicted: float | None  # pairs a second of training, drawing included


def bench_steps(
    config: Config, data: Data | None = None, *, compile: bool, fresh: bool
) -> StagedWork[StepsResult]:
    """Takes what was measured before, unless it must be fresh, or measures, which takes about a minute."""
    yield "preparing"
    _, draft = draft_of(config, data)
    # All combinations of what was not asked for, with chunks down to a quarter of the most that fits.
    plans = plans_for(draft, num_chunks=3, thorough=True, compile=compile)
    folder = folder_for(draft.machine, draft.work.key())
    measured = None if fresh else recall(folder, plans)
    if measured is None:
        # Compiling is not timed against the clock: its first call alone may take longer than all the rest.
        seconds = RACE_SECONDS if not compile else 4 * RACE_SECONDS
        measured = yield from measure(draft.work, plans, seconds=seconds, patience=PATIENCE)
        remember(folder, measured)
    resolved, choices = draft.resolve(measured)
    plan = plan_of(resolved)
    choice = next((c for c in measured.candidates if c.plan == plan), Candidate(plan))
    reasons = {part: choices[part].reason for part in PLAN}
    predicted = predicted_rate(choice, draft, resolved.data.workers or 0)
    return StepsResult(resolved, draft.work.num_parameters, measured, choice, reasons, predicted)


def predicted_rate(choice: Candidate, draft: Draft, workers: int) -> float | None:
    """Of training: on a processor the workers that draw or decode take their time from the step's threads."""
    if choice.pairs_per_second is None:
        return None
    step, draw = 1 / choice.pairs_per_second, draft.data.fetch_seconds  # of one pair
    if workers == 0:
        return 1 / (step + draw)
    if device_named(choice.plan.device).is_accelerator:
        return 1 / max(step, draw / workers)
    return 1 / (step + draw / draft.machine.num_cores)


def as_json(result: StepsResult) -> dict[str, Any]:
    """The part of `lapclip bench --json` that is about steps."""
    model, train, measured = result.resolved.model, result.resolved.train, result.measured
    return {
        "size": model.size,
        "batch_size": train.batch_size,
        "keep_patches": train.keep_patches,
        "num_parameters": result.num_parameters,
        "candidates": [candidate_json(c) | {"rejected": remark_on(c, measured)} for c in measured.candidates],
        "choice": candidate_json(result.choice),
        "reasons": result.reasons,
        "predicted_pairs_per_second": result.predicted,
        "drift": measured.drift,
        "other_cores": measured.other_cores,
        "is_disturbed": measured.is_disturbed,
        "measured": measured.when,
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    values = asdict(candidate)
    return values.pop("plan") | values


Rate = Annotated[float, msgspec.Meta(gt=0)]


class Rates(TypedDict):
    gemm_gflops: Rate
    bandwidth_gbs: Rate


@dataclass(frozen=True)
class Overview:
    """The machine itself: how fast each device multiplies and copies, which the cache keeps, and its facts."""

    rates: dict[str, Rates]  # by device
    machine: dict[str, Any] = field(default_factory=dict)


def look_over(*, fresh: bool) -> StagedWork[Overview]:
    """Reads the facts; rates come from the cache if they were measured before."""
    machine = read_machine()
    devices = list(present_devices())
    about = [{"name": device.name, "about": device.about()} for device in devices]
    facts = asdict(machine) | {"torch": about_torch(), "devices": about}
    file = folder_for(machine, {"rates": [device.name for device in devices]}) / "rates.json"
    known = None if fresh else load(file, Overview)
    rates = known.rates if known and known.rates.keys() == {device.name for device in devices} else {}
    if not rates:
        for device in devices:
            yield f"timing matrix products and copies on {device.name}"
            rates[device.name] = {"gemm_gflops": gemm_gflops(device), "bandwidth_gbs": bandwidth_gbs(device)}
        store(file, {"rates": rates})
    return Overview(rates, facts)


def in_words(overview: Overview) -> list[str]:
    """The facts as a few lines."""
    machine, torch = overview.machine, overview.machine["torch"]
    fast, slow = machine["num_performance_cores"], machine["num_efficiency_cores"]
    kinds = f" ({fast} performance, {slow or 0} efficiency)" if fast else ""
    caches = ", ".join(f"{name} {size(held)}" for name, held in machine["caches"].items())
    built = ", ".join(part for part in (torch["capability"], torch["blas"]) if part)
    lines = [
        f"{machine['chip']}, {machine['num_cores']} cores{kinds}, {machine['memory_bytes'] / 1e9:.0f} GB of memory,"
        f" {machine['available_bytes'] / 1e9:.0f} GB free",
        machine["system"],
        f"Python {machine['python']}, torch {torch['version']} ({built})",
        *[f"caches: {caches}"] * bool(caches),
    ]
    for device in machine["devices"]:
        rate = overview.rates[device["name"]]
        speed = f"{rate['gemm_gflops']:,.0f} GFLOP/s, memory {rate['bandwidth_gbs']:.1f} GB/s"
        lines.append(f"{device['name']} ({device['about']}): matrix products {speed}")
    return lines
