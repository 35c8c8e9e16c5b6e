"""Settings, machine and versions as tables; and of several runs, what differs and what they came to."""

from collections.abc import Sequence
from typing import Any

from lapclip.config import SETTINGS
from lapclip.errors import code, one_line, shortened
from lapclip.runs.history import Summary, find
from lapclip.units import UNKNOWN, count, duration, energy, epochs, listed, number, plural, rate, share, size
from lapclip.view.charts import name_of
from lapclip.view.section import Table

MOST_TEXT = 20_000  # characters of the settings file


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        UNKNOWN
        if value is None
        else f"{value:g}"
        if isinstance(value, float)
        else shortened(one_line(value), 200)
    )


def settings_table(record: Summary) -> list[Table]:
    rows = [(name, shown(value), reason_of(record, name, value)) for name, value in record.settings.items()]
    if not rows:
        return []
    return [Table("Settings", ("setting", "value", "why"), [tuple(map(one_line, row)) for row in rows])]


def reason_of(record: Summary, name: str, value: Any) -> str:
    if name in record.reasons:
        return shortened(one_line(record.reasons[name]), 200)
    if name not in SETTINGS:
        return "a setting of another version"
    return "default" if SETTINGS[name].field.default == value else "set"


def machine_table(record: Summary) -> list[Table]:
    facts = record.machine
    fast, slow = find(facts, "num_performance_cores"), find(facts, "num_efficiency_cores")
    cores = count(find(facts, "num_cores"))
    kinds = f", {fast:.0f} performance and {slow:.0f} efficiency" if fast and slow else ""
    caches = facts.get("caches")
    started = record.history.started
    rows = [
        ("chip", shown(facts.get("chip"))),
        ("cores used", cores + kinds),
        ("memory", size(find(facts, "memory_bytes"))),
        (
            "caches",
            ", ".join(f"{one_line(k)} {size(v)}" for k, v in caches.items())
            if isinstance(caches, dict)
            else UNKNOWN,
        ),
        ("system", shown(facts.get("system"))),
        ("Python", shown(facts.get("python"))),
        (
            "trained on",
            f"{one_line(started.device)}, {plural(started.threads, 'thread')}" if started else UNKNOWN,
        ),
        ("measured by bench", f"{rate(record.bench_speed)} pairs/s"),
    ]
    rows = [row for row in rows if row[1] not in (UNKNOWN, "", f"{UNKNOWN} pairs/s")]
    return [Table("Machine", ("fact", "value"), [tuple(row) for row in rows])] if rows else []


def provenance_table(record: Summary) -> list[Table]:
    facts = record.machine
    versions = facts.get("versions")
    rows = [
        ("lapclip", shown(facts.get("lapclip"))),
        ("commit", shown(facts.get("commit"))),
        ("data", shown(facts.get("data"))),
        ("source", shown(record.settings.get("source"))),
        ("seed", shown(record.settings.get("seed"))),
        ("Python", shown(facts.get("python"))),
        *sorted((one_line(k), shown(v)) for k, v in (versions if isinstance(versions, dict) else {}).items()),
    ]
    if not isinstance(versions, dict):
        rows.append(("torch", shown(facts.get("torch"))))
    rows = [row for row in rows if row[1] != UNKNOWN]
    return [Table("What it depends on", ("what", "which"), rows)] if rows else []


def config_text(record: Summary) -> str:
    return record.config[0][:MOST_TEXT]


def differing_table(records: Sequence[Summary]) -> list[Table]:
    """Settings and facts that are not the same in all runs."""
    names = list(dict.fromkeys(name for record in records for name in record.settings))
    rows = [(name, *(shown(record.settings.get(name)) for record in records)) for name in names]
    facts = [
        (name, *(shown(record.machine.get(name)) for record in records))
        for name in ("chip", "system", "python", "torch", "lapclip", "commit", "data")
    ]
    rows = [row for row in (*rows, *facts) if len(set(row[1:])) > 1]
    header = ("setting", *(name_of(record) for record in records))
    return [Table("What differs", header, rows)] if rows else []


def results_table(records: Sequence[Summary]) -> Table:
    rows = []
    for record in records:
        recall, step, evaluated = record.history.recall, record.history.step, record.history.evaluated
        rows.append(
            (
                code(name_of(record)),
                record.state,
                share(find(recall, "text_to_image", "recall@1")),
                share(find(recall, "text_to_image", "chance@1")),
                share(find(recall, "text_to_image", "recall@10")),
                number(step.loss if step else None),
                number(evaluated.loss if evaluated else None),
                count(record.history.num_steps),
                epochs(record.history.num_epochs) if step else UNKNOWN,
                duration(record.history.seconds),
                rate(record.history.pairs_per_second),
                size(record.history.peak_memory),
                energy(record.history.joules),
                str(len(record.history.warnings)),
            )
        )
    header = (
        "run", "state", "recall@1", "chance", "recall@10", "last loss", "held-out loss", "steps", "epochs", "time",
        "pairs/s", "peak memory", "energy", "warnings",
    )  # fmt: skip
    return Table("Results", header, rows, "recall: words to image, of each run's best checkpoint")


def comparison_words(records: Sequence[Summary]) -> list[str]:
    """Who came out best, and whether it is fair to say so."""
    found = [
        (recall, record)
        for record in records
        if (recall := find(record.history.recall, "text_to_image", "recall@1")) is not None
    ]
    words = []
    pools = {find(record.history.recall, "num_images") for _, record in found}
    sources = {one_line(record.machine["data"]) for _, record in found if record.machine.get("data")}
    if len(pools) > 1:
        words.append("They searched among different numbers of images, so their recall cannot be compared.")
    elif len(sources) > 1:
        words.append(
            "They learned from different data and searched different images, so recall cannot be compared."
        )
    elif len(found) > 1:
        (best, winner), *rest = sorted(found, key=lambda pair: -pair[0])
        second, follower = rest[0]
        others = listed([f"with {code(name_of(record))} in {share(recall)}" for recall, record in rest])
        words.append(
            f"{code(name_of(winner))} finds best: words find their image first in {share(best)} of cases, {others}."
            if best > second
            else f"{code(name_of(winner))} and {code(name_of(follower))} find equally well: {share(best)}."
        )
        captions = find(winner.history.recall, "num_captions")
        if captions and 0 < best - second < 2 * (best * (1 - best) * 2 / captions) ** 0.5:
            words.append(f"Over {count(captions)} captions that difference may be chance.")
    for record in records:
        if record.state not in ("finished", "stopped"):
            words.append(f"{code(name_of(record))} is {record.state}: its numbers are of what it had done.")
    return words
