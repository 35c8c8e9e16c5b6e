"""A run for the live views: curves as columns of points, and every number and sentence that is shown beside them."""

from collections.abc import Callable, Iterable
from typing import Any

from lapclip.errors import one_line
from lapclip.runs.events import Evaluated, Event, Inspected, Step
from lapclip.runs.history import History, Summary, mean_recall
from lapclip.units import NOT_MEASURED, duration, is_number, percent, plural, size
from lapclip.view.lines import how_far, what_now

Columns = dict[str, list[Any]]
Bar = dict[str, Any]  # `name`, `share` of 0..1 or None, `words`

MAX_WARNINGS = 12  # shown, the newest first
STEP_COLUMNS = ("loss", "accuracy", "temperature", "lr", "grad_norm", "pairs_per_second")


def columns_of(events: Iterable[Event]) -> dict[str, Columns]:
    """The points of these events, in columns of equal length."""
    row: dict[str, Any]
    found: dict[str, Columns] = {"steps": {}, "inspections": {}, "evaluations": {}}
    for event in events:
        match event:
            case Step():
                kind, row = "steps", {name: short(getattr(event, name)) for name in STEP_COLUMNS}
            case Inspected():
                kind, row = "inspections", {"norms": {n: short(v) for n, v in event.grad_norms.items()}}
            case Evaluated():
                kind, row = "evaluations", row_of_evaluation(event)
            case _:
                continue
        for name, value in ({"step": event.step} | row).items():
            found[kind].setdefault(name, []).append(value)
    return found


def row_of_evaluation(event: Evaluated) -> dict[str, Any]:
    row: dict[str, Any] = {"loss": short(event.loss), "snapshot": event.snapshot}
    for name, direction in (("there", "text_to_image"), ("back", "image_to_text")):
        row |= {f"{name}_{k}": short(event.recall[direction].get(f"recall@{k}")) for k in (1, 10)}
    found = event.general["text_to_image"] if event.general else {}
    row |= {f"general_{k}": short(found.get(f"recall@{k}")) for k in (1, 10)}
    negatives = event.recall.get("negatives") or {}
    return row | {name: short(negatives.get(name)) for name in ("easy", "medium", "hard")}


def short(value: Any) -> float | None:
    """Five digits, more than a screen shows; None for what is no finite number, since JSON has no other word for it."""
    return float(f"{value:.5g}") if is_number(value) else None


def now_of(summary: Summary) -> dict[str, Any]:
    """All that the page shows beside the curves."""
    history, note = summary.history, what_now(summary)
    far = "" if summary.is_preparing or summary.state == "finished" else how_far(summary) + time_left(summary)
    return {
        "name": summary.run.name,
        "state": summary.state,
        "state_words": summary.state_words,
        "sentence": "; ".join(filter(None, (far, note))),
        "progress": short(summary.history.progress),
        "progress_words": f"{int(summary.history.progress * 100)}%",
        "is_over": summary.is_over,
        "facts": facts_of(summary),
        "figures": figures_of(summary),
        "lines": references_of(summary),
        "warnings": warnings_of(history),
        "parts": parts_of(history),
        "memory": memory_of(history),
        "cores": cores_of(history),
        "readings": [[name, value or NOT_MEASURED] for name, value in readings_of(history).items()],
        "inspected": f"at step {history.inspected.step:,}" if history.inspected else "",
    }


def time_left(summary: Summary) -> str:
    return f", {duration(summary.seconds_left)} left" if summary.seconds_left is not None else ""


def facts_of(summary: Summary) -> str:
    """What is trained, and on what."""
    started = summary.history.started
    if started is None:
        return ""
    millions = started.num_parameters / 1e6
    chunks = f" in chunks of {started.chunk:,}" if started.chunk < started.batch_size else ""
    facts = [
        f"{millions:,.{1 if millions < 100 else 0}f} million parameters",
        f"{started.num_train:,} pairs",
        f"batches of {started.batch_size:,}{chunks}",
        f"{one_line(started.device)}, {plural(started.threads, 'thread')}",
        one_line(summary.machine.get("chip", "")),
    ]
    return " · ".join(filter(None, facts))


def figures_of(summary: Summary) -> list[dict[str, str]]:
    """The few numbers to read first, each with a reference to compare it with."""
    history, references = summary.history, references_of(summary)
    if history.step is None:
        return []
    validation, best = history.evaluated, history.best
    loss = f"validation {validation.loss:.3f}" if validation and validation.loss is not None else ""
    chance, speed = references["accuracy"], history.recently("pairs_per_second") or 0.0
    share = f"{summary.bench_share:.0%} of bench" if summary.bench_share is not None else ""
    accuracy = percent(history.recently("accuracy") or 0.0)
    found = [("loss", f"{history.recently('loss'):.3f}", loss)]
    found.append(("in-batch accuracy", accuracy, of_chance(chance)))
    for k in (1, 10):
        now, highest = (row_of_evaluation(e)[f"there_{k}"] if e else None for e in (validation, best))
        if now is not None:
            notes = [of_chance(references[f"recall_{k}"])]
            notes += [f"best {highest:.1%}"] if highest is not None and best is not validation else []
            found.append((f"recall@{k}", f"{now:.1%}", ", ".join(filter(None, notes))))
    if history.general:
        before, after = (recall["text_to_image"]["recall@10"] for recall in history.general)
        found.append(("general recall@10", percent(after), f"{percent(before)} before"))
    if event := history.interpolated:
        means = [percent(mean_recall(event.recall[place])) for place in (event.place, -1)]
        found.append(("share kept", f"{event.chosen:g}", f"mean recall {means[0]}, all {means[1]}"))
    found.append(("pairs/s", f"{speed:,.0f}", share))
    found.append(("temperature", f"{history.step.temperature:.4f}", "learned"))
    return [{"name": name, "value": value, "note": note} for name, value, note in found]


def of_chance(chance: float | None) -> str:
    return f"chance {percent(chance)}" if chance is not None else ""


def references_of(summary: Summary) -> dict[str, float | None]:
    """What to compare each curve with: chance, and the speed that was measured on this machine."""
    recall = summary.history.evaluated.recall if summary.history.evaluated else {}
    found, negatives = recall.get("text_to_image", {}), recall.get("negatives") or {}
    return {
        "accuracy": short(summary.history.chance),
        "recall_1": short(found.get("chance@1")),
        "recall_10": short(found.get("chance@10")),
        "negatives": short(negatives.get("chance")),
        "pairs_per_second": short(summary.bench_speed),
    }


def warnings_of(history: History) -> list[dict[str, str]]:
    """The newest first; of each kind only the last."""
    newest: dict[str, dict[str, str]] = {}
    for warning in reversed(history.warnings):
        shown = {"message": warning.message, "hint": warning.hint, "when": f"step {warning.step:,}"}
        newest.setdefault(warning.kind or warning.message, shown)
    return list(newest.values())[:MAX_WARNINGS]


def parts_of(history: History) -> list[Bar]:
    """A step's seconds by part, and in total."""
    parts = history.parts or {}
    total = sum(parts.values())
    shares = {name: seconds / total if total else 0.0 for name, seconds in parts.items()}
    rows = [bar(name, shares[name], f"{duration(parts[name])}, {shares[name]:.0%}") for name in parts]
    return [*rows, bar("total", None, duration(total))] if rows else []


def memory_of(history: History) -> list[Bar]:
    """Bytes by kind as shares of the limit, then the total and its peak."""
    if (seen := history.inspected) is None:
        return []
    limit, rows = seen.memory_limit, []
    for name, held in (seen.memory | {"total": seen.memory_used, "peak": seen.memory_peak}).items():
        share = held / limit if held is not None and limit else None
        words = NOT_MEASURED if held is None else size(held)
        of = f" of {size(limit)}, {share:.0%}" if name in ("total", "peak") and share is not None else ""
        rows.append(bar(name, share, words + of))
    return rows


def cores_of(history: History) -> list[Bar]:
    shares = (history.inspected.readings.get("cores") if history.inspected else None) or []
    return [bar(f"core {number}", share, f"{share:.0%}") for number, share in enumerate(shares, 1)]


def readings_of(history: History) -> dict[str, str | None]:
    """What the sensors say by name; None where there is none that can be read."""
    if history.inspected is None:
        return {}
    read = history.inspected.readings
    found = {name: form(read[key]) for key, (name, form) in READINGS.items() if key in read}
    if "power" in found and read.get("power_of"):
        found["power"] += f" ({read['power_of']})"
    if "battery" in found and "is_plugged" in read:
        found["battery"] += ", plugged in" if read["is_plugged"] else ", not plugged in"
    if history.joules:
        found["energy"] = f"{history.joules / 3600:.2f} Wh"
    return dict.fromkeys(("temperature", "power", "battery", "energy")) | found


READINGS: dict[str, tuple[str, Callable[[float], str]]] = {
    "temperature": ("temperature", "{:.0f} °C".format),
    "power_watts": ("power", "{:.1f} W".format),
    "battery": ("battery", "{:.0f}%".format),
    "speed_limit": ("speed limit", "{:.0%}".format),
    "other_cores": ("other programs", "{:.1f} cores".format),
    "memory_available": ("free memory", size),
    "swap_used": ("swap", size),
}


def bar(name: str, share: float | None, words: str) -> Bar:
    return {"name": name, "share": short(share), "words": words}
