"""What a run cost: the time of a step by part, memory, cores and energy."""

from lapclip.report.machinery import (
    core_shares,
    memory_by_kind,
    parts_of_a_step,
    power_of,
    readings,
)
from lapclip.report.record import Record, find
from lapclip.report.section import Section
from lapclip.report.stretches import Stretches, thinned
from lapclip.report.table import Table
from lapclip.report.words import (
    NOT_MEASURED,
    UNKNOWN,
    clean,
    duration,
    energy,
    number,
    share,
    size,
)


def time_section(record: Record) -> Section:
    parts = parts_of_a_step(record.history.inspections)
    if not parts:
        return Section("A step's time")
    rows = [(name, share(part), duration(seconds)) for name, (part, seconds) in parts.items()]
    largest = max(parts, key=lambda name: parts[name][0])
    seen = len(record.history.inspections)
    words = f"Of a step, {share(parts[largest][0])} is {clean(largest)}; medians over {seen} steps."
    return Section("A step's time", [words], tables=[Table("A step's time", ("part", "share", "time"), rows)])


def memory_section(record: Record) -> Section:
    kinds, last = memory_by_kind(record.history.inspections), record.history.inspected
    finished = record.history.finished
    rows = [(name, NOT_MEASURED if n is None else size(n)) for name, n in kinds.items()]
    if last is not None:
        rows += [("peak of the process", size(last.memory_peak)), ("it may use", size(last.memory_limit))]
    elif finished is not None and find(vars(finished), "peak_memory_bytes"):
        rows.append(("peak of the process", size(finished.peak_memory_bytes)))
    words = [
        "The most of each kind at one moment; the process holds the program and its libraries besides."
    ] * bool(kinds)
    return Section("Memory", words, tables=[Table("Memory", ("kind", "most"), rows)] if rows else [])


def cores_section(record: Record) -> Section:
    inspections = list(record.history.inspections)
    shares = core_shares(inspections)
    words = []
    if shares:
        words.append(
            f"On average {sum(shares):.1f} of {len(shares)} cores were busy, with whatever ran besides."
        )
    fast, slow = (find(record.machine, f"num_{kind}_cores") for kind in ("performance", "efficiency"))
    if shares and fast and slow:
        words.append(
            f"The chip has {fast:.0f} performance and {slow:.0f} efficiency cores; "
            "which number is which, the system does not say."
        )
    if others := readings(inspections, "other_cores"):
        words.append(f"Other programs used {sum(others) / len(others):.1f} cores' worth of time.")
    if heat := readings(inspections, "temperature"):
        words.append(f"The processor was at most {max(heat):.0f} °C warm.")
    if (limit := readings(inspections, "speed_limit")) and min(limit) < 1:
        words.append(f"The system slowed the processor to {min(limit):.0%} of its speed to cool it.")
    if len(swapped := readings(inspections, "swapped_bytes")) > 1 and swapped[-1] - swapped[0] > 1e6:
        words.append(f"The machine swapped {size(swapped[-1] - swapped[0])}: memory was short.")
    rows = [(f"core {n}", share(value)) for n, value in enumerate(shares)]
    return Section("Cores", words, tables=[Table("Cores", ("core", "busy"), rows)] if rows else [])


def energy_section(record: Record, stretches: Stretches) -> Section:
    joules = record.history.joules
    if not record.steps:
        return Section("Energy")
    if joules is None:
        return Section(
            "Energy",
            [f"Energy: {NOT_MEASURED}. No power could be read on this machine, and none is guessed."],
        )
    of = power_of(record.history.inspections)
    watt_hours = joules / 3600
    words = [
        f"{energy(joules)} ({number(watt_hours)} Wh) in {duration(record.power_seconds)} over which the power is "
        f"known, {number(joules / record.power_seconds, 1) if record.power_seconds else UNKNOWN} W on average: "
        f"the power of the {clean(of) if of else 'machine; of what part, is not said'}."
    ]
    recall, chance = (
        find(record.recall, "text_to_image", "recall@1"),
        find(record.recall, "text_to_image", "chance@1"),
    )
    if recall is not None and watt_hours > 0:
        words.append(
            f"That is {number(100 * recall / watt_hours, 2)} points of recall@1 per watt-hour "
            f"(recall@1 {share(recall)}, chance {share(chance)})."
        )
    rows = [
        (
            row.label,
            energy(row.joules),
            number(row.joules / row.seconds, 1) if row.joules is not None and row.seconds > 0 else UNKNOWN,
            share(row.recall),
        )
        for row in thinned(stretches.rows)
    ]
    header = (stretches.kind, "energy", "mean W", "recall@1")
    return Section(
        "Energy", words, tables=[Table(f"Energy per {stretches.kind}", header, rows)] if rows else []
    )
