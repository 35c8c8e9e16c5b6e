"""The report of a run, or of several side by side: what was trained on what, what it came to, and where to go on.

A sentence appears only where the run's data supports it. Problems are not searched for here: the run's own
`Warned` events say them.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from lapclip.config import model_name
from lapclip.errors import code, one_line, shortened
from lapclip.runs.history import (
    AT_THE_END,
    NUM_RECENT,
    Summary,
    have_same_validation,
    is_chance,
    loss_limit,
    num_independent,
    summarize,
)
from lapclip.runs.run import Run
from lapclip.runs.status import MACHINE
from lapclip.units import UNKNOWN, count, duration, epochs, listed, number, percent, plural, rate, times
from lapclip.view import learning, resources
from lapclip.view.charts import charts_of, name_of, overlaid, phases_in_words
from lapclip.view.document import KINDS, Document, Section, Table, columns_of, shown
from lapclip.view.html import write_html
from lapclip.view.lines import forgetting

MIN_EVALUATIONS = 4
MAX_ADVICE = 3  # hints of warnings
MAX_EPOCHS = 1000  # one by one, for programs
FOOTER = "Written by lapclip from the recorded events of the run."


def write_report(run: Run) -> Path:
    """Writes `report.html` into the run folder."""
    return write_html(document_of([summarize(run)]), run.path / "report.html")


def document_of(summaries: Sequence[Summary]) -> Document:
    """The report of a run, or of several side by side."""
    if len(summaries) > 1:
        title = " | ".join(name_of(summary) for summary in summaries)
        return Document(title, "lapclip report", "", compared(summaries), footer=FOOTER)
    (summary,) = summaries
    settings = summary.settings
    facts = [model_name(settings), settings.get("source"), summary.machine.get("chip"), summary.state]
    about = " · ".join(shortened(one_line(fact), 80) for fact in facts if fact)
    name = one_line(summary.run.name)
    return Document(name, "lapclip report", about, sections_of(summary), tiles_of(summary), FOOTER)


def sections_of(summary: Summary) -> list[Section]:
    """Everything there is to say about one run, in the order it is read."""
    history, (kind, stretches) = summary.history, learning.stretches_of(summary.history)
    return [
        Section("Summary", sentences(summary)),
        Section("Next steps", points=suggestions(summary)),
        learning.found_section(summary),
        Section("Curves", phases_in_words(summary), charts=charts_of(summary)),
        learning.interpolation_section(history),
        learning.stretches_section(history, kind, stretches),
        learning.phases_section(history, kind),
        learning.gradients_section(history),
        learning.negatives_section(history),
        resources.time_section(summary),
        resources.memory_section(summary),
        resources.cores_section(summary),
        resources.energy_section(summary),
        resources.warnings_section(summary),
        resources.settings_section(summary),
        resources.machine_section(summary),
        resources.repeat_section(summary),
    ]


def tiles_of(summary: Summary) -> list[tuple[str, str, str]]:
    """The numbers one asks for first."""
    history, started, evaluated = summary.history, summary.history.started, summary.history.evaluated
    found = (history.recall or {}).get("text_to_image", {})
    loss = f"; validation {number(evaluated.loss)}" if evaluated and evaluated.loss is not None else ""
    chance = {k: f"chance {percent(found.get(f'chance@{k}'))}" for k in (1, 10)}
    batch = f"batches of {count(started.batch_size)}" if started else ""
    tiles = [
        *((f"recall@{k}", percent(found.get(f"recall@{k}")), chance[k]) for k in (1, 10)),
        ("training loss", number(history.recently("loss")), f"last {NUM_RECENT} steps{loss}"),
        ("training time", duration(history.seconds if history.step else None), plural(history.num_steps, "step")),
        ("pairs per second", rate(history.pairs_per_second), batch),
    ]  # fmt: skip
    return [tile for tile in tiles if tile[1] != UNKNOWN]


def sentences(summary: Summary) -> list[str]:
    """The summary, what matters most first."""
    history, bench = summary.history, summary.bench_speed
    said = [what_and_how_long(summary), how_it_ended(summary), result(summary)]
    said += [f"{words[:1].upper()}{words[1:]}." for words in forgetting(summary)]
    said.append(last_quarter(summary)[1])
    losses = [(e.loss, e.step) for e in history.evaluations if e.loss is not None]
    if len(losses) >= 3:
        (lowest, step), ended = min(losses), losses[-1][0]
        then = f"lowest at step {count(step)} ({lowest:.3f}) and ended at {ended:.3f}"
        then = then if lowest < ended else f"lowest at the end ({ended:.3f})"
        said.append(f"The validation loss was {then}.")
    if history.data_share is not None:
        said.append(f"It waited for data {percent(history.data_share)} of the time.")
    if bench and (pairs := history.pairs_per_second):
        said += [f"It ran at {pairs / bench:.0%} of the {rate(bench)} pairs/s that were measured beforehand."]
    interruptions = []
    if len(history.starts) > 1:
        interruptions.append(f"it was resumed {times(len(history.starts) - 1)}")
    if history.pauses:
        waited = [pause.seconds for pause in history.pauses if pause.seconds is not None]
        seconds = f", {duration(sum(waited))} in total, not counted as training" if waited else ""
        interruptions.append(f"it paused {times(len(history.pauses))}{seconds}")
    said += [f"During the run, {listed(interruptions)}."] if interruptions else []
    if warned := history.warnings:
        last = f"{shortened(one_line(warned[-1].message))} (step {count(warned[-1].step)})"
        said.append(f"{plural(len(warned), 'warning')}, the last one: {last}.")
    return list(filter(None, said))


def what_and_how_long(summary: Summary) -> str:
    settings, history, started = summary.settings, summary.history, summary.history.started
    model = f"A {code(name)} model" if (name := model_name(settings)) else "A model"
    on = f" on {code(settings['source'])}" if settings.get("source") else ""
    if started is None:
        return f"{model}{on} was prepared, but no training was recorded."
    model += f" of {count(started.num_parameters)} parameters"
    on += f", {count(started.num_train)} pairs"
    if history.newest is None:
        return f"{model}{on}: training began, and no step was recorded."
    over = epochs(history.num_pairs_seen / started.num_train if started.num_train else 0.0)
    return (
        f"{model} was trained{on}, in batches of {count(started.batch_size)}: {plural(history.num_steps, 'step')}, "
        f"{count(history.num_pairs_seen)} pairs or {over} times over the data, in {duration(history.seconds)} of "
        f"training on {code(started.device)} ({rate(history.pairs_per_second)} pairs/s)."
    )


def how_it_ended(summary: Summary) -> str:
    history, saved = summary.history, summary.history.saved
    done = f" at {history.progress:.0%} of its budget" if history.step else ""
    kept = f"; the last checkpoint is of step {count(saved.step)}" if saved else "; nothing had been saved"
    why = summary.failed.message if summary.failed else history.paused.reason if history.paused else ""
    because = f": {shortened(one_line(why).rstrip('.'))}" if why else ""
    match summary.state:
        case "finished":
            return "It used up its budget."
        case "stopped":
            return f"It was stopped{done or ' before its first step'}." if history.started else ""
        case "crashed":
            return f"Its process ended unexpectedly{done}{kept}."
        case "failed":
            return f"It failed{done}{because}{kept}."
    return f"It is {summary.state}{done}{because}: this is its current state."


def result(summary: Summary) -> str:
    history, recall, tried = summary.history, summary.history.recall, len(summary.history.evaluations)
    if recall is None:
        return "It was never evaluated; `lapclip eval` evaluates a checkpoint." if history.num_steps else ""
    said = recall_words(recall, recall["num_images"])
    said += " This is not significantly above chance, in either direction." * is_chance(recall)
    if history.best_step not in (None, history.num_steps) and tried > 1 and not history.is_interpolated:
        why = "the highest mean recall, or within a standard error of it, later, and not worse in both recall and loss"
        said += f" That is step {count(history.best_step)}, the best checkpoint: {why}."
    return said


def recall_words(recall: Any, num_images: float) -> str:
    """The recall in both directions, with what chance would give."""
    found, back = recall["text_to_image"], recall["image_to_text"]
    return (
        f"Text → image: the correct one of {count(num_images)} images comes first in {percent(found['recall@1'])} of "
        f"cases (chance {percent(found['chance@1'])}) and within the first ten in {percent(found['recall@10'])} "
        f"(chance {percent(found['chance@10'])}). Image → text: the correct caption comes first in "
        f"{percent(back['recall@1'])}."
    )


def last_quarter(summary: Summary) -> tuple[int | None, str]:
    """Whether recall@1 rose (1), fell (-1) or stayed within two standard errors (0) over the last quarter, in words;
    None after too few evaluations."""
    known = [(e.step, e.recall["text_to_image"]["recall@1"], e.loss) for e in summary.history.evaluations]
    earlier = [point for point in known[:-1] if point[0] <= 0.75 * known[-1][0]]
    num_images = num_independent(summary.history.evaluated.recall) if summary.history.evaluated else 0
    if len(known) < MIN_EVALUATIONS or not earlier or num_images < 1:
        return None, ""
    (step, before, _), (_, after, loss) = earlier[-1], known[-1]
    lowest = min((point[2] for point in known[:-1] if point[2] is not None), default=math.inf)
    top_step, highest, _ = max(known, key=itemgetter(1))
    at_top = f"{percent(highest)} at step {count(top_step)}"
    noise, from_top = (
        2 * math.sqrt(max(mean * (1 - mean), 1 / num_images) / num_images)
        for mean in ((before + after) / 2, (highest + after) / 2)
    )
    over = "Over the last quarter, recall@1"
    said = f"from {percent(before)} at step {count(step)} to {percent(after)}"
    if highest - after > from_top:
        return -1, f"It became worse: recall@1 fell from {at_top} to {percent(after)} at the end."
    if len({percent(point[1]) for point in known[len(earlier) - 1 :]}) == 1:
        return 0, f"Recall@1 stayed at {percent(after)} from step {count(step)} on."
    if percent(after) == percent(before):
        return 0, f"Recall@1 was {percent(after)} at step {count(step)} and at the end, and varied between."
    if abs(after - before) <= noise:
        return 0, f"{over} changed {said}, by less than the noise of {100 * noise:.1f} points."
    if summary.history.over_fits or (loss or 0.0) > loss_limit(lowest, num_images):
        return 0, f"{over} rose {said}, but the validation loss ended above its lowest."
    if after == 1:
        return 0, f"{over} rose {said}, the maximum."
    if after < highest:
        return 0, f"{over} rose {said}; it was highest with {at_top}."
    return 1, f"It was still improving at the end: recall@1 rose {said}."


def suggestions(summary: Summary) -> list[str]:
    """What to try next, most useful first; commands as one would type them."""
    name, is_finished, said = one_line(summary.run.reference), summary.state == "finished", []
    hints = {w.kind or w.message: w.hint for w in summary.history.warnings if w.kind not in AT_THE_END}
    advice = [*hints.values(), *([summary.failed.hint] if summary.failed else [])]
    if summary.state in ("stopped", "crashed"):
        said.append(f"Continue from its last checkpoint: {code(f'lapclip train --resume {name}')}.")
    told = list(dict.fromkeys(shortened(one_line(hint)).rstrip(".") for hint in advice if hint))
    said += [f"{hint[:1].upper()}{hint[1:]}." for hint in (*told[-MAX_ADVICE:], summary.over_fits) if hint]
    if is_finished and (last_quarter(summary)[0] or 0) > 0:
        again = code(f"lapclip train --resume {name}{summary.doubled}")
        said.append(f"Train twice as long, since it was still improving: {again}.")
    return [*said, f"Run the full evaluation: {code(f'lapclip eval {name}')}."] if is_finished else said


def compared(summaries: Sequence[Summary]) -> list[Section]:
    """Several runs side by side, with the settings and facts that are not the same in all of them."""
    names = dict.fromkeys(name for summary in summaries for name in summary.settings if name != "shape")
    rows = [(name, *(shown(summary.settings.get(name)) for summary in summaries)) for name in names]
    rows += [(name, *(shown(summary.machine.get(name)) for summary in summaries)) for name in MACHINE]
    header = ["setting", *(f"{n} {name_of(s)}" for n, s in enumerate(summaries, 1))]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    table = Table("Differences", dict.fromkeys(header, KINDS[""]), differing)
    nothing = [] if differing else ["Nothing: settings and machine are the same."]
    return [
        Section("Summary", comparison_words(summaries), tables=[results_table(summaries)]),
        Section("Differences", nothing, tables=[table], is_wide=True),
        Section("Curves", charts=overlaid(summaries)),
        *(Section(name_of(summary), sentences(summary)) for summary in summaries),
    ]


COSTS = ("seconds", "pairs_per_second", "peak_memory_bytes", "joules")
WARNING = ("step", "kind", "message", "hint")
RESULTS = columns_of(
    "run, state, recall@1: share, chance: share, recall@10: share, training loss: number, validation loss: number, "
    "steps: count, epochs: number, time: seconds, pairs/s: rate, peak memory: bytes, energy: joules, warnings: count"
)


def results_table(summaries: Sequence[Summary]) -> Table:
    rows = []
    for summary in summaries:
        history, found = summary.history, summary.results()
        chance = (history.recall or {}).get("text_to_image", {}).get("chance@1")
        row = [code(name_of(summary)), summary.state, found["recall@1"], chance, found["recall@10"]]
        row += [found["training loss"], history.evaluated and history.evaluated.loss]
        row += [found["steps"], epochs(found["epochs"]), *(found[name] for name in COSTS)]
        rows.append([*row, len(history.warnings)])
    note = f"recall: text → image, of each run's best checkpoint; training loss: over the last {NUM_RECENT} steps"
    return Table("Results", RESULTS, rows, note)


def comparison_words(summaries: Sequence[Summary]) -> list[str]:
    """Which run is best, and whether it is fair to say so."""
    found = [(s.recall_1 or 0.0, s, s.history.recall) for s in summaries if s.history.recall]
    words = []
    if not have_same_validation(summaries):
        words.append("Their validation sets differ, so their recall cannot be compared.")
    elif len(found) > 1:
        (best, winner, recall), *rest = sorted(found, key=lambda row: -row[0])
        others = listed([f"{code(name_of(summary))} has {percent(value)}" for value, summary, _ in rest])
        has = "ties for" if best == rest[0][0] else "has"
        words.append(f"{code(name_of(winner))} {has} the best recall@1, {percent(best)}; {others}.")
        num_units = num_independent(recall)  # captions of one image succeed and fail together
        if num_units and 0 < best - rest[0][0] < 2 * (best * (1 - best) * 2 / num_units) ** 0.5:
            words.append(f"With {count(recall['num_images'])} images, this difference may be noise.")
    active = [summary for summary in summaries if summary.state not in ("finished", "stopped")]
    return words + [f"{code(name_of(s))} is {s.state}: its numbers show its state so far." for s in active]


def as_numbers(summaries: Sequence[Summary]) -> dict[str, Any]:
    """The report as one JSON object; what is not known, or not finite, is null."""
    text = json.dumps([numbers_of(summary) for summary in summaries], default=str)
    return {"runs": json.loads(text, parse_constant=lambda name: None)}


def numbers_of(summary: Summary) -> dict[str, Any]:
    history, found, recall = summary.history, summary.results(), summary.recall_1
    joules = history.joules
    kind, stretches = learning.stretches_of(history, MAX_EPOCHS)
    phases = learning.phases_of(history, kind)
    return {
        "name": one_line(summary.run.name),
        "path": str(summary.run.path),
        "state": summary.state,
        "summary": sentences(summary),
        "suggestions": suggestions(summary),
        **{name: found[name] for name in ("steps", "epochs", "num_parameters", *COSTS)},
        "num_pairs_seen": history.num_pairs_seen,
        "loss": found["training loss"],
        "validation_loss": history.evaluated.loss if history.evaluated else None,
        "recall": history.recall,
        "best_step": history.best_step,
        "general": summary.general,
        "interpolated": summary.interpolated,
        "data_share": history.data_share,
        "power_of": history.power_source,
        "recall@1_per_watt_hour": recall / (joules / 3600) if joules and recall is not None else None,
        "stretch": kind,
        "stretches": [dataclasses.asdict(row) for row in stretches],
        "phases": [dataclasses.asdict(phase) | {"slope": phase.slope} for phase in phases],
        "step_parts": {name: {"share": part, "seconds": s} for name, (part, s) in history.mean_parts.items()},
        "memory": history.memory_by_kind,
        "cores": history.core_shares,
        "warnings": [{name: getattr(w, name) for name in WARNING} for w in history.warnings],
        "settings": summary.settings,
        "reasons": summary.reasons,
        "machine": {name: value for name, value in summary.machine.items() if name != "reasons"},
    }
