"""A run for the page: its History as columns of points, and in words everything the panels say now. Pure."""

import math
from collections.abc import Iterable
from typing import Any

from lapclip.runs.events import Evaluated, Event, Finished, Inspected, Started, Step
from lapclip.runs.history import History, Summary
from lapclip.units import duration, milliseconds, percent, plural, size

Columns = dict[str, list[Any]]

MOST_WARNINGS = 12  # shown, the newest first
NOT_MEASURED = "not measured"


def points_of(history: History) -> dict[str, Columns]:
    """Every point that is kept."""
    return columns_of([*history.steps, *history.inspections, *history.evaluations])


def columns_of(events: Iterable[Event]) -> dict[str, Columns]:
    """The points of these events, in columns of equal length."""
    found: dict[str, Columns] = {"steps": {}, "inspections": {}, "evaluations": {}}
    for event in events:
        match event:
            case Step():
                add_row(found["steps"], row_of_step(event))
            case Inspected():
                norms = {name: short(norm) for name, norm in event.grad_norms.items()}
                add_row(found["inspections"], {"step": event.step, "norms": norms})
            case Evaluated():
                add_row(found["evaluations"], row_of_evaluation(event))
    return found


def add_row(columns: Columns, row: dict[str, Any]) -> None:
    for name, value in row.items():
        columns.setdefault(name, []).append(value)


def row_of_step(event: Step) -> dict[str, Any]:
    names = ("loss", "accuracy", "temperature", "lr", "grad_norm", "pairs_per_second")
    return {"step": event.step} | {name: short(getattr(event, name)) for name in names}


def row_of_evaluation(event: Evaluated) -> dict[str, Any]:
    there, back = event.recall.get("text_to_image", {}), event.recall.get("image_to_text", {})
    negatives = event.recall.get("negatives") or {}
    return {
        "step": event.step,
        "loss": short(event.loss),
        "there_1": short(there.get("recall@1")),
        "there_10": short(there.get("recall@10")),
        "back_1": short(back.get("recall@1")),
        "back_10": short(back.get("recall@10")),
        **{name: short(negatives.get(name)) for name in ("easy", "medium", "hard")},
        "snapshot": event.snapshot,
    }


def short(value: Any) -> float | None:
    """Five digits are more than a screen shows; what is no finite number is no point, and JSON has no word for it."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(f"{value:.5g}") if is_number else None


def now_of(summary: Summary) -> dict[str, Any]:
    """All the words and numbers beside the curves."""
    history = summary.history
    return {
        "name": summary.run.name,
        "state": summary.state,
        "state_words": summary.state_words,
        "sentence": sentence_of(summary),
        "progress": short(summary.progress),
        "progress_words": f"{int(summary.progress * 100)}%",
        "is_over": summary.is_over,
        "facts": facts_of(history.started, summary.machine) if history.started else "",
        "figures": figures_of(summary),
        "lines": lines_of(summary),
        "warnings": warnings_of(history),
        "parts": parts_of(history.inspected),
        "memory": memory_of(history.inspected),
        "cores": cores_of(history.inspected),
        "readings": readings_of(history),
        "inspected": f"at step {history.inspected.step:,}" if history.inspected else "",
    }


def sentence_of(summary: Summary) -> str:
    if summary.is_preparing:
        return "the data is being read, or the model measured; training begins soon"
    history = summary.history
    step, done = history.step, how_far(history.step, history.started)
    goes_on = f"`lapclip train --resume {summary.run.reference}` goes on from its last checkpoint"
    match summary.state:
        case "running":
            return f"{done}, {duration(step.seconds_left)} left" if step else "the first step is on its way"
        case "paused":
            return f"{done}: {history.paused.reason}" if history.paused else done
        case "finished":
            return all_done(history.finished) if history.finished else done
        case "failed" if summary.failed:
            return f"{summary.failed.message}; {summary.failed.hint}"
        case "crashed":
            return f"{done}; its process is gone without a word; {goes_on}"
    return f"{done}; {goes_on}"


def all_done(finished: Finished) -> str:
    return f"{finished.step:,} steps, {finished.epochs:.2f} epochs, in {duration(finished.seconds)}"


def how_far(step: Step | None, started: Started | None) -> str:
    if step is None:
        return "no step was made"
    of = f" of {started.total_steps:,}" if started and started.total_steps else ""
    return f"step {step.step:,}{of}, epoch {step.epoch:.2f}"


def facts_of(started: Started, machine: dict[str, Any]) -> str:
    """What is trained, and on what."""
    batch = f"batches of {started.batch_size:,}"
    if started.chunk < started.batch_size:
        batch += f" in chunks of {started.chunk:,}"
    words = [
        f"{started.num_parameters / 1e6:.1f} million parameters",
        f"{started.num_train:,} pairs",
        batch,
        f"{started.device}, {plural(started.threads, 'thread')}",
        str(machine.get("chip", "")),
    ]
    return " · ".join(filter(None, words))


def figures_of(summary: Summary) -> list[dict[str, str]]:
    """The few numbers to read first, each with what to hold it against."""
    history, lines = summary.history, lines_of(summary)
    evaluated, best = history.evaluated, history.best
    if history.step is None:
        return []
    bench, accuracy = lines["pairs_per_second"], history.recently("accuracy") or 0.0
    found = [
        figure("loss", f"{history.recently('loss'):.3f}", validation_of(evaluated)),
        figure("right in the batch", percent(accuracy), against(lines["accuracy"])),
    ]
    if evaluated:
        row = row_of_evaluation(evaluated)
        best_one = row_of_evaluation(best)["there_1"] if best else None
        note = f"best checkpoint {best_one:.1%}" if best_one is not None and best is not evaluated else ""
        for k, more in ((1, note), (10, "")):
            if (value := row[f"there_{k}"]) is not None:
                notes = ", ".join(filter(None, [against(lines[f"recall_{k}"]), more]))
                found.append(figure(f"recall@{k}", f"{value:.1%}", notes))
    speed = f"{history.recently('pairs_per_second'):,.0f}"
    found.append(figure("pairs a second", speed, f"bench {bench:,.0f}" if bench else ""))
    found.append(figure("temperature", f"{history.step.temperature:.4f}", "tau, learned"))
    return found


def figure(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def validation_of(evaluated: Evaluated | None) -> str:
    return f"held-out {evaluated.loss:.3f}" if evaluated and evaluated.loss is not None else ""


def against(chance: float | None) -> str:
    return f"chance {percent(chance)}" if chance is not None else ""


def lines_of(summary: Summary) -> dict[str, float | None]:
    """What to hold each curve against: chance, and what the machine was measured to do."""
    history = summary.history
    recall = history.evaluated.recall if history.evaluated else {}
    there, negatives = recall.get("text_to_image", {}), recall.get("negatives") or {}
    return {
        "accuracy": short(history.chance) if history.chance else None,
        "recall_1": short(there.get("chance@1")),
        "recall_10": short(there.get("chance@10")),
        "negatives": short(negatives.get("chance")),
        "pairs_per_second": short(summary.bench_speed),
    }


def warnings_of(history: History) -> list[dict[str, str]]:
    """The newest first; what was said several times stands once, at its last step."""
    newest: dict[str, dict[str, str]] = {}
    for warning in reversed(history.warnings):
        words = {"message": warning.message, "hint": warning.hint, "when": f"step {warning.step:,}"}
        newest.setdefault(warning.kind or warning.message, words)
    return list(newest.values())[:MOST_WARNINGS]


def parts_of(inspected: Inspected | None) -> list[dict[str, Any]]:
    """A step's seconds by part."""
    if inspected is None:
        return []
    total = sum(inspected.parts.values())
    rows = []
    for name, seconds in inspected.parts.items():
        share = seconds / total if total else 0.0
        rows.append(bar(name, share, f"{milliseconds(seconds)}, {share:.0%}"))
    return [*rows, bar("together", None, milliseconds(total))]


def memory_of(inspected: Inspected | None) -> list[dict[str, Any]]:
    """Bytes by kind as shares of what is allowed, then all that is held and the most there was."""
    if inspected is None:
        return []
    limit = inspected.memory_limit
    rows = []
    for name, held in inspected.memory.items():
        share = held / limit if held is not None and limit else None
        rows.append(bar(name, share, NOT_MEASURED if held is None else size(held)))
    for name, held in (("in all, now", inspected.memory_used), ("peak", inspected.memory_peak)):
        share = held / limit if limit else None
        of = f" of {size(limit)}, {share:.0%}" if share is not None else ""
        rows.append(bar(name, share, f"{size(held)}{of}"))
    return rows


def cores_of(inspected: Inspected | None) -> list[dict[str, Any]]:
    shares = (inspected.readings.get("cores") if inspected else None) or []
    return [bar(f"core {number}", share, f"{share:.0%}") for number, share in enumerate(shares, 1)]


def readings_of(history: History) -> list[list[str]]:
    """What the sensors say, and plainly where none can be read."""
    if history.inspected is None:
        return []
    read = history.inspected.readings
    rows = [
        ["temperature", f"{read['temperature']:.0f} °C" if "temperature" in read else NOT_MEASURED],
        ["power", power_of(read)],
        ["energy so far", f"{history.joules / 3600:.2f} Wh" if history.joules else NOT_MEASURED],
        ["battery", battery_of(read)],
    ]
    if "speed_limit" in read:
        rows.append(["speed the system allows", f"{read['speed_limit']:.0%}"])
    if "other_cores" in read:
        rows.append(["other programs", f"{read['other_cores']:.1f} cores' worth"])
    if "memory_available" in read:
        rows.append(["memory free", size(read["memory_available"])])
    if "swap_used" in read:
        rows.append(["swap used", size(read["swap_used"])])
    return rows


def power_of(read: dict[str, Any]) -> str:
    if "power_watts" not in read:
        return NOT_MEASURED
    of = f" ({read['power_of']})" if read.get("power_of") else ""
    return f"{read['power_watts']:.1f} W{of}"


def battery_of(read: dict[str, Any]) -> str:
    if "battery" not in read:
        return NOT_MEASURED
    is_plugged = read.get("is_plugged")
    plug = "" if is_plugged is None else ", plugged in" if is_plugged else ", not plugged in"
    return f"{read['battery']:.0f}%{plug}"


def bar(name: str, share: float | None, words: str) -> dict[str, Any]:
    return {"name": name, "share": short(share), "words": words}
