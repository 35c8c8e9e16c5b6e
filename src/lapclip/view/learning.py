"""How a run learned: what it finds, its table by epoch, the phases of its loss, temperature, gradients, difficulty."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from lapclip.runs.events import Evaluated, Inspected
from lapclip.runs.history import Summary, find
from lapclip.units import count, duration, energy, is_number, listed, number, rate, share
from lapclip.view.found import read_queries
from lapclip.view.section import Gradients, Section, Table
from lapclip.view.stretches import FLAT, STEEP, Stretches, phases_of, thinned

VANISHED = 1e-3  # of the tower's median layer
EXPLODED = 10.0  # times its usual length
NUM_COLUMNS = 48  # of the heat map


def found_section(record: Summary) -> Section:
    step, queries = read_queries(record.run.path, record.history)
    if not queries:
        return Section("What it finds")
    first = sum(query.rank == 1 for query in queries)
    words = (
        f"Captions kept out of training, and the images it finds for them, best first, at step "
        f"{count(step)}. For {first} of these {len(queries)} the right one comes first."
    )
    return Section("What it finds", [words], queries=queries)


def stretches_section(record: Summary, stretches: Stretches) -> Section:
    if not stretches.rows:
        return Section("By epoch")
    words = []
    if stretches.kind == "tenth":
        words.append(
            "The run has fewer than two epochs, so these are tenths of what was trained. Loss and accuracy are means, "
            "the rest is at the end of each."
        )
    shown = thinned(stretches.rows)
    if len(shown) < len(stretches.rows):
        words.append(f"{len(shown)} of {math.ceil(record.history.num_epochs):,} epochs, evenly spread.")
    rows = [
        (
            row.label,
            number(row.loss),
            share(row.accuracy),
            number(row.temperature, 4),
            share(row.recall),
            duration(row.seconds),
            rate(row.pairs_per_second),
            energy(row.joules),
        )
        for row in shown
    ]
    header = (stretches.kind, "loss", "accuracy", "tau", "recall@1", "time", "pairs/s", "energy")
    title = "By epoch" if stretches.kind == "epoch" else "By tenth of the run"
    chance = f"chance of accuracy {share(record.history.chance)}" if record.history.chance else ""
    recall_chance = find(record.history.recall, "text_to_image", "chance@1")
    note = f"{chance}, of recall@1 {share(recall_chance)}" if chance and recall_chance is not None else chance
    return Section(title, words, tables=[Table(title, header, rows, note)])


def phases_section(record: Summary, stretches: Stretches) -> Section:
    phases = phases_of(record, stretches.kind)
    if not phases:
        return Section("Phases of the loss")
    unit = stretches.kind
    words = "; then ".join(
        f"{phase.name} from {unit} {phase.start:.1f} to {phase.end:.1f} ({phase.slope:+.3f} per {unit})"
        for phase in phases
    )
    rows = [
        (
            p.name,
            f"{p.start:.1f} to {p.end:.1f}",
            number(p.loss_before),
            number(p.loss_after),
            f"{p.slope:+.3f}",
        )
        for p in phases
    ]
    note = (
        "measured: up to three straight lines that follow the loss best; steep falls at least "
        f"{STEEP} times as fast as the run's mean, a plateau less than {FLAT} times"
    )
    header = ("phase", f"{unit}s", "loss before", "after", f"per {unit}")
    return Section(
        "Phases of the loss",
        [f"The loss, in phases: {words}."],
        tables=[Table("Phases of the loss", header, rows, note)],
    )


def temperature_section(stretches: Stretches) -> Section:
    rows = stretches.rows
    if len(rows) < 2:
        return Section("Temperature")
    chosen = sorted({round(place * (len(rows) - 1) / 5) for place in range(6)})
    first, last = rows[0].temperature, rows[-1].temperature
    if abs(last - first) < 0.02 * first:
        words = f"The temperature tau hardly moved: {number(first, 4)} to {number(last, 4)}."
    else:
        fell = last < first
        words = (
            f"The temperature tau {'fell' if fell else 'rose'} from {number(first, 4)} to {number(last, 4)}: "
            f"it learned to tell pairs apart {'more' if fell else 'less'} sharply."
        )
    header = (stretches.kind, *(rows[n].label for n in chosen))
    values = ("tau", *(number(rows[n].temperature, 4) for n in chosen))
    return Section(
        "Temperature", [words], tables=[Table(f"tau at the end of each {stretches.kind}", header, [values])]
    )


def gradients_section(record: Summary) -> Section:
    gradients = gradients_of(list(record.history.inspections))
    if gradients is None:
        return Section("Gradients by layer")
    rows = []
    for tower in ("image", "text"):
        for what, layer in first_middle_last(gradients.layers, tower):
            norms = (number(gradients.at(layer, place)) for place in (0, 0.5, 1))
            rows.append((f"{tower}, {what}", layer, *norms))
    gone, burst = vanishing(gradients), exploding(record)
    words = []
    if gone:
        words.append(
            f"Gradients vanish in {listed(gone[:5])}: at the end below a thousandth of their tower's median layer."
        )
    if burst:
        words.append(
            f"The gradient burst at step {count(burst[0])}: {number(burst[1])}, where {number(burst[2])} is usual; "
            "it was clipped."
        )
    if not words:
        words.append(
            "No layer's gradient vanishes (none is below a thousandth of its tower's median), and none explodes "
            f"(none is over {EXPLODED:.0f} times the usual after the warm-up)."
        )
    tables = (
        [Table("Gradient norm by layer", ("layer", "name", "start", "middle", "end"), rows)] if rows else []
    )
    return Section("Gradients by layer", words, tables=tables, gradients=gradients)


def negatives_section(record: Summary) -> Section:
    measured = [e for e in record.history.evaluations if isinstance(e.recall.get("negatives"), dict)]
    if not measured:
        return Section("By difficulty")
    first, last = measured[0], measured[-1]
    choices, chance = find(last.recall, "negatives", "num_choices"), find(last.recall, "negatives", "chance")
    words = (
        f"How often words find their own image among {count(choices)}, when the wrong ones are easy, medium or hard. "
        "Hard are the third of the held-out images whose words are most alike (rare words count more), easy the "
        "third least alike; the words decide, not the model."
    )
    levels = [
        level for level in ("easy", "medium", "hard") if find(last.recall, "negatives", level) is not None
    ]

    def row(label: str, evaluated: Evaluated) -> tuple[str, ...]:
        return (
            label,
            *(share(find(evaluated.recall, "negatives", level)) for level in levels),
            share(chance),
        )

    rows = [row(f"first, step {count(first.step)}", first)] * (first is not last)
    rows.append(row(f"last, step {count(last.step)}", last))
    header = ("evaluation", *levels, "chance")
    return Section("By difficulty", [words], tables=[Table("Accuracy by difficulty", header, rows)])


def gradients_of(inspections: Sequence[Inspected]) -> Gradients | None:
    seen = [i for i in inspections if i.grad_norms]
    if not seen:
        return None
    layers = list(dict.fromkeys(name for i in seen for name in i.grad_norms))
    columns = min(NUM_COLUMNS, len(seen))
    parts = [seen[c * len(seen) // columns : (c + 1) * len(seen) // columns] for c in range(columns)]
    norms = [[middle(i.grad_norms.get(layer) for i in part) for part in parts] for layer in layers]
    return Gradients(layers, [part[-1].step for part in parts], norms)


def middle(values: Iterable[object]) -> float | None:
    known = [float(v) for v in values if is_number(v)]
    return found if known and math.isfinite(found := median(known)) else None


def tower_layers(layers: Sequence[str], tower: str) -> list[str]:
    """The blocks of a tower, without what comes before and after."""
    return [name for name in layers if name.startswith(f"{tower}.") and name.split(".")[1].isdecimal()]


def first_middle_last(layers: Sequence[str], tower: str) -> list[tuple[str, str]]:
    """What to call some layers of a tower, and which they are."""
    blocks = tower_layers(layers, tower)
    if not blocks:
        return []
    chosen = [("first", blocks[0]), ("middle", blocks[len(blocks) // 2]), ("last", blocks[-1])]
    return [(name, layer) for layer, name in {layer: f"{name} layer" for name, layer in chosen}.items()]


def vanishing(gradients: Gradients) -> list[str]:
    """Layers whose gradient is nothing beside those of their tower, at the end."""
    found = []
    for tower in ("image", "text"):
        ends = {
            layer: norm
            for layer in tower_layers(gradients.layers, tower)
            if (norm := gradients.at(layer, 1)) is not None
        }
        usual = median(ends.values()) if ends else 0.0
        found += [layer for layer, norm in ends.items() if usual > 0 and norm < VANISHED * usual]
    return found


def exploding(record: Summary) -> tuple[int, float, float] | None:
    """The step with the longest gradient beyond the usual, its length and the usual one; the warm-up apart."""
    warmup = find(record.settings, "warmup") or 0.0
    steps = [s for s in record.history.steps if s.progress > warmup]
    if len(steps) < 10:
        return None
    usual = median(s.grad_norm for s in steps)
    longest = max(steps, key=lambda s: s.grad_norm)
    return (
        (longest.step, longest.grad_norm, usual)
        if usual > 0 and longest.grad_norm > EXPLODED * usual
        else None
    )
