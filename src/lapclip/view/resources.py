"""What a run cost and what it ran on: the time of a step, memory, cores and energy; settings, machine and versions."""

from typing import Any

from lapclip.config import SETTINGS, SHAPE
from lapclip.errors import one_line, typed
from lapclip.runs.history import Summary
from lapclip.units import NOT_MEASURED, UNKNOWN, count, duration, energy, number, percent, plural, rate, size
from lapclip.view.document import Section, Table, columns_of, find, shown

MAX_TEXT = 20_000  # characters of the settings file
# No reason is recorded for their defaults.
RESOLVED = ("pack", "crop", "flip", "colour", "word_dropout", "dropout", "keep_patches", *SHAPE)


def time_section(summary: Summary) -> Section:
    parts = summary.history.mean_parts
    if not parts:
        return Section("Time of a step")
    largest = max(parts, key=lambda name: parts[name][0])
    seen = plural(len(summary.history.inspections), "step")
    rows = [(name, part, seconds) for name, (part, seconds) in parts.items()]
    table = Table("Time of a step", columns_of("part, share: share, time: seconds"), rows)
    words = f"The largest part of a step is {largest}, {percent(parts[largest][0])}; means over {seen}."
    return Section("Time of a step", [words], tables=[table])


def memory_section(summary: Summary) -> Section:
    kinds, last = summary.history.memory_by_kind, summary.history.inspected
    rows: list[tuple[str, Any]] = [(k, NOT_MEASURED if v is None else v) for k, v in kinds.items()]
    totals = {"peak of the process": summary.history.peak_memory, "limit": last and last.memory_limit}
    rows += [(name, held) for name, held in totals.items() if held is not None]
    words = ["Maximum of each kind; the process also includes the program and its libraries."] * bool(kinds)
    return Section("Memory", words, tables=[Table("Memory", columns_of("kind, maximum: bytes"), rows)])


def cores_section(summary: Summary) -> Section:
    readings, shares, words = summary.history.readings, summary.history.core_shares, []
    if shares:
        words.append(f"On average {sum(shares):.1f} of {len(shares)} cores were busy, by any program.")
    if others := readings("other_cores"):
        words.append(f"Other programs used {sum(others) / len(others):.1f} cores.")
    if heat := readings("temperature"):
        words.append(f"The CPU reached {max(heat):.0f} °C.")
    if (limit := readings("speed_limit")) and min(limit) < 1:
        words.append(f"The system limited the CPU to {min(limit):.0%} of its speed to cool it.")
    if len(swapped := readings("swapped_bytes")) > 1 and swapped[-1] - swapped[0] > 1e6:
        words.append(f"The machine swapped {size(swapped[-1] - swapped[0])}.")
    rows = [(f"core {n}", value) for n, value in enumerate(shares, 1)]
    return Section("Cores", words, tables=[Table("Cores", columns_of("core, busy: share"), rows)])


def energy_section(summary: Summary) -> Section:
    """What was used in all; the table by epoch has its parts."""
    history = summary.history
    joules, seconds, recall = history.joules, history.power_seconds, summary.recall_1
    if joules is None:
        unknown = f"Energy: {NOT_MEASURED}. No power could be read on this machine."
        return Section("Energy", [unknown] if history.num_steps else [])
    source = one_line(history.power_source or "machine; which part is unknown")
    words = [
        f"{energy(joules)} ({number(joules / 3600)} Wh) in {duration(seconds)} with known power, "
        f"{number(joules / seconds, 1) if seconds else UNKNOWN} W on average: the power of the {source}."
    ]
    if recall is not None and joules > 0:
        words.append(f"That is {number(100 * recall / (joules / 3600), 2)} points of recall@1 per watt-hour.")
    return Section("Energy", words)


def settings_section(summary: Summary) -> Section:
    rows = [(name, shown(value), reason_of(summary, name, value)) for name, value in summary.settings.items()]
    return Section("Settings", tables=[Table("Settings", columns_of("setting, value, why"), rows)])


def reason_of(summary: Summary, name: str, value: Any) -> str:
    if name in summary.reasons:
        return shown(summary.reasons[name], most=200)
    if name not in SETTINGS:
        return "a setting of another version"
    return "default" if SETTINGS[name].field.default == value or name in RESOLVED else "set"


def machine_section(summary: Summary) -> Section:
    facts, started, versions = summary.machine, summary.history.started, summary.machine.get("versions")
    fast, slow = find(facts, "num_performance_cores"), find(facts, "num_efficiency_cores")
    kinds = f", {fast:.0f} performance and {slow:.0f} efficiency" if fast and slow else ""
    cores, memory, caches = find(facts, "num_cores"), find(facts, "memory_bytes"), facts.get("caches")
    sizes = [f"{one_line(k)} {size(v)}" for k, v in caches.items()] if isinstance(caches, dict) else []
    rows = [
        ("chip", facts.get("chip")),
        ("cores used", count(cores) + kinds if cores else None),
        ("memory", size(memory) if memory else None),
        ("caches", ", ".join(sizes)),
        ("trained on", f"{started.device}, {plural(started.threads, 'thread')}" if started else None),
        ("measured by bench", f"{rate(summary.bench_speed)} pairs/s" if summary.bench_speed else None),
        *((name, facts.get(name)) for name in ("system", "python", "lapclip", "commit", "data")),
        *(sorted(versions.items()) if isinstance(versions, dict) else [("torch", facts.get("torch"))]),
    ]
    known = [row for row in rows if row[1] not in (None, "")]
    table = Table("Machine and versions", columns_of("property, value"), known)
    return Section("Machine and versions", tables=[table])


def repeat_section(summary: Summary) -> Section:
    if not summary.config[0]:
        words = ["The settings of this run could not be read, so it cannot be reproduced from this page."]
        return Section("Reproducing this run", words)
    words = [f"`lapclip train --config {one_line(typed(summary.run.path))}/config.toml` reproduces it."]
    if find(summary.settings, "minutes") is not None and summary.history.num_steps:
        steps = f"`--steps {summary.history.num_steps}` trains for the same number of steps."
        words.append(f"Its budget is time, so the number of steps varies; {steps}")
    elif summary.settings.get("device") == "cpu":
        words.append("On a CPU, the same versions, threads and seed give the same numbers.")
    return Section("Reproducing this run", words, text=summary.config[0][:MAX_TEXT])


def warnings_section(summary: Summary) -> Section:
    seen: dict[tuple[str, str], list[int]] = {}
    for warned in summary.history.warnings:
        seen.setdefault((one_line(warned.message), one_line(warned.hint)), []).append(warned.step)
    rows = [(steps[0], len(steps), *said) for said, steps in list(seen.items())[:50]]
    words = ["None."] if summary.history.num_steps and not rows else []
    columns = columns_of("step: count, times: count, warning, what to do")
    return Section("Warnings", words, tables=[Table("Warnings", columns, rows)])
