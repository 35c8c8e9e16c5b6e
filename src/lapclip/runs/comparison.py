"""Two runs side by side: which settings differ, which machine, and what each came to. Without torch."""

from typing import Any

from lapclip.config import SETTINGS
from lapclip.errors import UserError
from lapclip.runs.history import History
from lapclip.runs.run import Run
from lapclip.runs.status import status_of

Pair = list[Any]  # of the first run and of the second
MACHINE = (
    "chip", "num_cores", "memory_bytes", "system", "python", "torch", "lapclip", "commit", "data",
)  # fmt: skip


def compare(first: Run, second: Run) -> dict[str, Any]:
    """What differs in `settings` and `machine`, and all `results`, each as the two values."""
    runs = (first, second)
    machines = [run.load_machine() for run in runs]
    return {
        "runs": [run.name for run in runs],
        "settings": differing(settings_of(first), settings_of(second)),
        "machine": differing(*({name: machine.get(name) for name in MACHINE} for machine in machines)),
        "results": side_by_side(results_of(first), results_of(second)),
    }


def settings_of(run: Run) -> dict[str, Any]:
    try:
        config = run.load_config()
    except UserError:  # never set up, or of another version
        return dict.fromkeys(SETTINGS)
    return {name: getattr(getattr(config, setting.section), name) for name, setting in SETTINGS.items()}


def side_by_side(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Pair]:
    return {name: [first[name], second[name]] for name in first}


def differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Pair]:
    return {name: pair for name, pair in side_by_side(first, second).items() if pair[0] != pair[1]}


def results_of(run: Run) -> dict[str, Any]:
    """What a run came to so far; None for what is not known."""
    history = History().extend(run.events())
    status, done, step = status_of(run), history.finished, history.step
    recall = done.recall if done else history.best.recall if history.best else None
    words = recall["text_to_image"] if recall else {}
    images = recall["image_to_text"] if recall else {}
    seconds = done.seconds if done else step.seconds if step else 0.0
    num_pairs_seen = done.num_pairs_seen if done else step.num_pairs_seen if step else 0
    return {
        "state": status.state,
        "recall@1": words.get("recall@1"),
        "recall@5": words.get("recall@5"),
        "recall@10": words.get("recall@10"),
        "recall@1, picture -> words": images.get("recall@1"),
        "held-out loss": history.best.loss if history.best else None,
        "training loss": history.recently("loss"),
        "steps": status.step,
        "epochs": done.epochs if done else step.epoch if step else 0.0,
        "seconds": seconds,
        "pairs_per_second": num_pairs_seen / seconds if seconds else None,
        "peak_memory_bytes": done.peak_memory_bytes
        if done
        else max((event.memory_peak for event in history.inspections), default=None),
        "num_parameters": history.started.num_parameters if history.started else None,
        "joules": history.joules,
    }
