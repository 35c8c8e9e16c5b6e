"""What a run cost: the time of a step by part, memory, cores and energy, from the closer looks at single steps."""

from lapclip.errors import one_line
from lapclip.runs.history import Summary, find
from lapclip.units import NOT_MEASURED, UNKNOWN, duration, energy, number, plural, share, size
from lapclip.view.section import Section, Table
from lapclip.view.stretches import Stretches, thinned


def time_section(record: Summary) -> Section:
    parts = record.history.mean_parts
    if not parts:
        return Section("A step's time")
    rows = [(name, share(part), duration(seconds)) for name, (part, seconds) in parts.items()]
    largest = max(parts, key=lambda name: parts[name][0])
    seen = len(record.history.inspections)
    words = (
        f"Of a step, {share(parts[largest][0])} is {one_line(largest)}; means over {plural(seen, 'step')}."
    )
    return Section("A step's time", [words], tables=[Table("A step's time", ("part", "share", "time"), rows)])


def memory_section(record: Summary) -> Section:
    kinds, last = record.history.memory_by_kind, record.history.inspected
    rows = [(name, NOT_MEASURED if n is None else size(n)) for name, n in kinds.items()]
    if record.history.peak_memory is not None:
        rows.append(("peak of the process", size(record.history.peak_memory)))
    if last is not None:
        rows.append(("it may use", size(last.memory_limit)))
    words = [
        "The most of each kind at one moment; the process holds the program and its libraries besides."
    ] * bool(kinds)
    return Section("Memory", words, tables=[Table("Memory", ("kind", "most"), rows)] if rows else [])


def cores_section(record: Summary) -> Section:
    readings = record.history.readings
    shares = record.history.core_shares
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
    if others := readings("other_cores"):
        words.append(f"Other programs used {sum(others) / len(others):.1f} cores' worth of time.")
    if heat := readings("temperature"):
        words.append(f"The processor was at most {max(heat):.0f} °C warm.")
    if (limit := readings("speed_limit")) and min(limit) < 1:
        words.append(f"The system slowed the processor to {min(limit):.0%} of its speed to cool it.")
    if len(swapped := readings("swapped_bytes")) > 1 and swapped[-1] - swapped[0] > 1e6:
        words.append(f"The machine swapped {size(swapped[-1] - swapped[0])}: memory was short.")
    rows = [(f"core {n}", share(value)) for n, value in enumerate(shares, 1)]
    return Section("Cores", words, tables=[Table("Cores", ("core", "busy"), rows)] if rows else [])


def energy_section(record: Summary, stretches: Stretches) -> Section:
    joules = record.history.joules
    if not record.history.num_steps:
        return Section("Energy")
    if joules is None:
        return Section(
            "Energy",
            [f"Energy: {NOT_MEASURED}. No power could be read on this machine, and none is guessed."],
        )
    of = record.history.power_source
    watt_hours, seconds = joules / 3600, record.history.power_seconds
    words = [
        f"{energy(joules)} ({number(watt_hours)} Wh) in {duration(seconds)} over which the power is "
        f"known, {number(joules / seconds, 1) if seconds else UNKNOWN} W on average: "
        f"the power of the {one_line(of) if of else 'machine; of what part, is not said'}."
    ]
    recall, chance = (
        find(record.history.recall, "text_to_image", "recall@1"),
        find(record.history.recall, "text_to_image", "chance@1"),
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
