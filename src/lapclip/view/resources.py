"""What a run cost: the time of a step by part, memory, cores and energy, from the closer looks at single steps."""

from collections.abc import Iterable
from statistics import fmean

from lapclip.errors import one_line
from lapclip.runs.events import Inspected
from lapclip.runs.record import Record, find
from lapclip.units import NOT_MEASURED, UNKNOWN, duration, energy, is_number, number, plural, share, size
from lapclip.view.section import Section, Table
from lapclip.view.stretches import Stretches, thinned


def time_section(record: Record) -> Section:
    parts = parts_of_a_step(record.history.inspections)
    if not parts:
        return Section("A step's time")
    rows = [(name, share(part), duration(seconds)) for name, (part, seconds) in parts.items()]
    largest = max(parts, key=lambda name: parts[name][0])
    seen = len(record.history.inspections)
    words = (
        f"Of a step, {share(parts[largest][0])} is {one_line(largest)}; means over {plural(seen, 'step')}."
    )
    return Section("A step's time", [words], tables=[Table("A step's time", ("part", "share", "time"), rows)])


def memory_section(record: Record) -> Section:
    kinds, last = memory_by_kind(record.history.inspections), record.history.inspected
    rows = [(name, NOT_MEASURED if n is None else size(n)) for name, n in kinds.items()]
    if record.peak_memory is not None:
        rows.append(("peak of the process", size(record.peak_memory)))
    if last is not None:
        rows.append(("it may use", size(last.memory_limit)))
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
    rows = [(f"core {n}", share(value)) for n, value in enumerate(shares, 1)]
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
        f"the power of the {one_line(of) if of else 'machine; of what part, is not said'}."
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


def data_share(record: Record) -> float | None:
    """The share of training that was spent waiting for batches."""
    started = record.history.started
    steps = [s for s in record.history.steps if s.pairs_per_second > 0]
    if not steps or started is None:
        return None
    whole = sum(started.batch_size / s.pairs_per_second for s in steps)
    return min(1.0, sum(s.data_seconds for s in steps) / whole) if whole > 0 else None


def parts_of_a_step(inspections: Iterable[Inspected]) -> dict[str, tuple[float, float]]:
    """By part, the mean share of a step and the mean seconds."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for inspected in inspections:
        parts = {name: seconds for name, seconds in inspected.parts.items() if is_number(seconds)}
        whole = sum(parts.values())
        for name, seconds in parts.items() if whole > 0 else ():
            seen.setdefault(name, []).append((seconds / whole, seconds))
    return {name: (fmean(s for s, _ in values), fmean(s for _, s in values)) for name, values in seen.items()}


def memory_by_kind(inspections: Iterable[Inspected]) -> dict[str, int | None]:
    """The most bytes of each kind; None for what was not measured."""
    most: dict[str, int | None] = {}
    for inspected in inspections:
        for name, num_bytes in inspected.memory.items():
            known = int(num_bytes) if is_number(num_bytes) else None
            before = most.get(name)
            most[name] = known if before is None else max(before, known or 0)
    return most


def readings(inspections: Iterable[Inspected], name: str) -> list[float]:
    return [i.readings[name] for i in inspections if is_number(i.readings.get(name))]


def core_shares(inspections: Iterable[Inspected]) -> list[float]:
    """The mean share of time that each core was busy."""
    seen = [i.readings.get("cores") for i in inspections]
    lists = [cores for cores in seen if isinstance(cores, list) and cores and all(map(is_number, cores))]
    num_cores = min(map(len, lists), default=0)
    return [fmean(cores[number] for cores in lists) for number in range(num_cores)]


def power_of(inspections: Iterable[Inspected]) -> str | None:
    """What the power is the power of."""
    said = {i.readings.get("power_of") for i in inspections if is_number(i.readings.get("power_watts"))}
    return " and ".join(sorted(str(what) for what in said if what)) or None
