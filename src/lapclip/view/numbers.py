"""A report as plain numbers, for programs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lapclip.errors import one_line
from lapclip.runs.history import Summary, find
from lapclip.view import summary
from lapclip.view.stretches import phases_of, stretches_of
from lapclip.view.suggestions import suggestions


def as_numbers(records: Sequence[Summary]) -> dict[str, Any]:
    """One object; what is not known is null."""
    return {"runs": [finite(numbers_of(record)) for record in records]}


def numbers_of(record: Summary) -> dict[str, Any]:
    history, stretches = record.history, stretches_of(record)
    evaluated = history.evaluated
    joules, recall = history.joules, find(record.history.recall, "text_to_image", "recall@1")
    return {
        "name": one_line(record.run.name),
        "path": str(record.run.path),
        "state": record.state,
        "summary": summary.sentences(record),
        "suggestions": suggestions(record),
        "steps": record.history.num_steps,
        "epochs": record.history.num_epochs,
        "seconds": record.history.seconds,
        "num_pairs_seen": history.num_pairs_seen,
        "pairs_per_second": record.history.pairs_per_second,
        "peak_memory_bytes": record.history.peak_memory,
        "num_parameters": history.started.num_parameters if history.started else None,
        "loss": history.recently("loss"),
        "validation_loss": evaluated.loss if evaluated else None,
        "recall": record.history.recall,
        "best_step": record.history.best_step,
        "data_share": history.data_share,
        "joules": joules,
        "power_of": history.power_source,
        "recall@1_per_watt_hour": recall / (joules / 3600) if joules and recall is not None else None,
        "stretch": stretches.kind,
        "stretches": [dataclasses.asdict(row) for row in stretches.rows],
        "phases": [dataclasses.asdict(p) | {"slope": p.slope} for p in phases_of(record, stretches.kind)],
        "step_parts": {
            name: {"share": part, "seconds": seconds} for name, (part, seconds) in history.mean_parts.items()
        },
        "memory": history.memory_by_kind,
        "cores": history.core_shares,
        "warnings": [
            {"step": w.step, "kind": w.kind, "message": w.message, "hint": w.hint} for w in history.warnings
        ],
        "settings": record.settings,
        "reasons": record.reasons,
        "machine": {name: value for name, value in record.machine.items() if name != "reasons"},
    }


def finite(value: Any) -> Any:
    """The same without what JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
