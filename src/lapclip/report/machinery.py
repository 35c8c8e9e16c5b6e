"""What the closer looks at single steps come to: time by part, memory by kind, cores, power and gradients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lapclip.events import KINDS_OF_MEMORY, PARTS, Inspected
from lapclip.report.record import Record, find
from lapclip.report.words import is_number

VANISHED = 1e-3  # of the tower's median layer
EXPLODED = 10.0  # times its usual length
NUM_COLUMNS = 48  # of the heat map


def data_share(record: Record) -> float | None:
    """The share of training that was spent waiting for batches."""
    started = record.history.started
    steps = [s for s in record.history.steps if s.pairs_per_second > 0]
    if not steps or started is None:
        return None
    whole = sum(started.batch_size / s.pairs_per_second for s in steps)
    return min(1.0, sum(s.data_seconds for s in steps) / whole) if whole > 0 else None


def parts_of_a_step(inspections: Iterable[Inspected]) -> dict[str, tuple[float, float]]:
    """By part, the median share of a step and the median seconds."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for inspected in inspections:
        parts = {name: seconds for name, seconds in inspected.parts.items() if is_number(seconds)}
        whole = sum(parts.values())
        for name, seconds in parts.items() if whole > 0 else ():
            seen.setdefault(name, []).append((seconds / whole, seconds))
    return {
        name: (median(s for s, _ in values), median(s for _, s in values))
        for name, values in in_order(seen, PARTS).items()
    }


def memory_by_kind(inspections: Iterable[Inspected]) -> dict[str, int | None]:
    """The most bytes of each kind; None for what was not measured."""
    most: dict[str, int | None] = {}
    for inspected in inspections:
        for name, num_bytes in inspected.memory.items():
            known = num_bytes if is_number(num_bytes) else None
            before = most.get(name)
            most[name] = known if before is None else max(before, known or 0)
    return in_order(most, KINDS_OF_MEMORY)


def in_order(values: dict, names: Sequence[str]) -> dict:
    """The known names first, in their order."""
    return {
        name: values[name] for name in [*(n for n in names if n in values), *(values.keys() - set(names))]
    }


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


@dataclass(frozen=True)
class Gradients:
    """The length of each layer's gradient over the run: rows are layers, columns stretches of time."""

    layers: list[str]
    steps: list[int]  # the last one of each column
    norms: list[list[float | None]]  # by layer, then column; medians

    def at(self, layer: str, place: float) -> float | None:
        """About the start (0), the middle (0.5) or the end (1)."""
        row = self.norms[self.layers.index(layer)]
        return row[round(place * (len(row) - 1))]


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
    known = [float(v) for v in values if is_number(v)]  # type: ignore[arg-type]
    return median(known) if known else None


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


def exploding(record: Record) -> tuple[int, float, float] | None:
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
