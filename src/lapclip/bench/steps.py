"""The real training step of one size and batch with every plan this machine allows: which is fastest, and why."""

from collections.abc import Generator
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from lapclip.autotune.cache import folder_for, recall, remember
from lapclip.autotune.measure import measure
from lapclip.autotune.plans import all_plans
from lapclip.autotune.quick import plans_for
from lapclip.autotune.resolve import Reasons, plan_of
from lapclip.autotune.results import Candidate, Measured, remark_on
from lapclip.config import Config
from lapclip.data.open import Data
from lapclip.machine.device import device_named
from lapclip.step.step import Plan
from lapclip.train.prepare import Draft, draft, open_here, tokenizer_for
from lapclip.units import finished

RACE_SECONDS = 45.0
PATIENCE = 2.0  # seconds for a step in low precision
MOST_DRIFT = 0.1


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
