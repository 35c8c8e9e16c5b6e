"""What is read from a file of events is checked here, so that no view breaks on a line that is torn, forged or mad.

Numbers must be finite and in their range, words printable, and nested values have the keys that views rely on.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

MOST = 2**63 - 1
BIGGEST = sys.float_info.max
LARGE = 1e30  # what can still be added up and squared
LATEST = 1e11  # seconds since 1970, or of training: what can still be written as a date
SHARE, COUNT, NUMBER = (0, 1), (0, MOST), (-BIGGEST, BIGGEST)

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("time", "seconds", "seconds_left", "epoch", "epochs", "paused_seconds"), (0, LATEST)),
    **dict.fromkeys(("batch_size", "chunk", "num_train", "total_steps"), (1, MOST)),
    **dict.fromkeys(("accuracy", "progress"), SHARE),
    **dict.fromkeys(("temperature", "minutes"), (1e-12, LATEST)),
    **dict.fromkeys(("loss", "lr", "grad_norm", "pairs_per_second"), (-LARGE, LARGE)),
}
BY_TYPE: dict[type, tuple[float, float]] = {bool: SHARE, int: COUNT, float: NUMBER}

WAY = {f"{what}@{k}": SHARE for what in ("recall", "chance") for k in (1, 5, 10)}
RECALL: dict[str, Any] = {
    "num_images": COUNT,
    "num_captions": COUNT,
    "text_to_image": WAY | {"median_rank": COUNT, "interval@10": [SHARE, SHARE]},
    "image_to_text": WAY | {"median_rank": COUNT, "interval@10": [SHARE, SHARE]},
    "in_batch": {"accuracy": SHARE, "chance": SHARE, "batch_size": COUNT},
}
NEGATIVES = {"easy": SHARE, "medium": SHARE, "hard": SHARE, "chance": SHARE, "num_choices": COUNT}
READINGS: dict[str, Any] = {
    **dict.fromkeys(("other_cores", "memory_available", "swap_used", "swapped_bytes", "power_watts"), COUNT),
    "temperature": (-300, 1000),
    "speed_limit": SHARE,
    "battery": (0, 100),
    "is_plugged": bool,
    "power_of": str,
}

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)  # would steer a terminal, or break a page


def clean(value: Any) -> Any:
    """A value without the characters that are not for showing; numbers that are none become None."""
    match value:
        case str():
            return UNPRINTABLE.sub("\ufffd", value)
        case float() | int() if not -BIGGEST <= value <= BIGGEST:
            return None
        case dict():
            return {clean(name): clean(inner) for name, inner in value.items()}
        case list():
            return [clean(inner) for inner in value]
    return value


def fits(value: Any, shape: Any) -> bool:
    """Whether a value is of a shape: a type, a range of numbers, a list of shapes, or a dict of keys it must have."""
    match shape:
        case type():
            return type(value) is shape
        case tuple():
            return type(value) in (int, float) and shape[0] <= value <= shape[1]
        case list():
            return type(value) is list and len(value) == len(shape) and all(map(fits, value, shape))
    return type(value) is dict and all(name in value and fits(value[name], shape[name]) for name in shape)


def words(value: Any) -> str:
    if type(value) is not str:
        raise ValueError
    return clean(value)


def or_none(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """For what may be missing: when it is wrong, it is."""

    def take_or_none(value: Any) -> Any:
        try:
            return None if value is None else take(value)
        except (ValueError, TypeError, AttributeError):
            return None

    return take_or_none


def snapshot(value: Any) -> str:
    """A file in the run's own folder of snapshots, and nowhere else."""
    if not re.fullmatch(r"snapshots/[\w-]+\.json", value):
        raise ValueError
    return value


def recall(value: Any) -> dict[str, Any]:
    """As `evaluate.retrieval` returns it; `negatives` came later, and may be too few pairs to say."""
    found = clean(value)
    if not fits(found, RECALL) or (found.get("negatives") and not fits(found["negatives"], NEGATIVES)):
        raise ValueError
    return found


def seconds_of(value: Any, parts: tuple[str, ...]) -> dict[str, float]:
    if not fits(value, dict.fromkeys(parts, (0, LATEST))):
        raise ValueError
    return {name: value[name] for name in parts}


def bytes_of(value: Any, kinds: tuple[str, ...]) -> dict[str, int | None]:
    if any(value[name] is not None and not fits(value[name], COUNT) for name in kinds):
        raise ValueError
    return {name: value[name] for name in kinds}


def grad_norms(value: Any) -> dict[str, float]:
    """Those that are numbers: one may have been too long for that."""
    return {layer: norm for layer, norm in clean(value).items() if fits(norm, (0, BIGGEST))}


def readings(value: Any) -> dict[str, Any]:
    """Those that are what they should be; any may be missing anyway."""
    cores = value.get("cores")
    known = {name: inner for name, inner in clean(value).items() if fits(inner, READINGS.get(name, NUMBER))}
    return ({"cores": cores} if cores and fits(cores, [SHARE] * len(cores)) else {}) | known


def bench_speed(machine: dict[str, Any]) -> float | None:
    """Of what `load_machine` read, the pairs a second that `lapclip bench` measured; None if it did not."""
    is_known = fits(machine, {"bench": {"pairs_per_second": (1e-6, 1e15)}})
    return float(machine["bench"]["pairs_per_second"]) if is_known else None
