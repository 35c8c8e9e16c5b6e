"""The kinds of cores of a chip and their caches: the text of `sysctl`, or the kernel's folder, in; counts out. And how
threads on them wait.

What nobody says, or says oddly, is left out and is never an error.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

KERNEL_FOLDER = Path("/sys/devices")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
FAST_SHARE = (
    0.5  # of the fastest: a middle kind is fast too, and some chips rate every core a little differently
)


@dataclass(frozen=True)
class Cores:
    """Physical cores by kind, None where there is one kind only; `caches` in bytes, as one fast core sees them."""

    num_performance: int | None = None
    num_efficiency: int | None = None
    caches: dict[str, int] = field(default_factory=dict)


def parse_sysctl(text: str) -> dict[str, str]:
    """Names and values of what `sysctl` printed."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def cores_from_sysctl(said: dict[str, str]) -> Cores:
    """What macOS says; level 0 is the fastest kind, and every other level counts as efficiency."""
    numbers = {name: int(value) for name, value in said.items() if value.isdecimal()}
    levels = {
        int(found[1]): count
        for name, count in numbers.items()
        if (found := re.fullmatch(r"hw\.perflevel(\d+)\.physicalcpu", name)) and count
    }
    caches = {}
    for level, name in (("L1d", "l1dcachesize"), ("L2", "l2cachesize"), ("L3", "l3cachesize")):
        # The plain name speaks of the slowest kind of core.
        num_bytes = numbers.get(f"hw.perflevel0.{name}") or numbers.get(f"hw.{name}")
        if num_bytes:
            caches[level] = num_bytes
    if 0 not in levels or len(levels) < 2:
        return Cores(caches=caches)
    return Cores(levels[0], sum(levels.values()) - levels[0], caches)


def cores_from_kernel(folder: Path = KERNEL_FOLDER) -> Cores:
    """What Linux says: the two lists of an Intel hybrid, or the capacity of each core."""
    cpus = folder / "system" / "cpu"
    fast = parse_ranges(read_text(folder / "cpu_core" / "cpus"))
    slow = parse_ranges(read_text(folder / "cpu_atom" / "cpus"))
    if not (fast and slow):
        fast, slow = split_by_capacity(read_capacities(cpus))
    # Small cores often come first in the numbering; where there is one kind, the first core is as good as any.
    caches = read_caches(cpus / f"cpu{min(fast, default=0)}" / "cache")
    if not (fast and slow):
        return Cores(caches=caches)
    return Cores(count_physical(fast, cpus), count_physical(slow, cpus), caches)


def parse_ranges(text: str) -> set[int]:
    """The numbers in a list such as `0-7,16`; none when it is anything else."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return set()
    bounds = (part.split("-") for part in text.split(","))
    return {number for ends in bounds for number in range(int(ends[0]), int(ends[-1]) + 1)}


def read_capacities(cpus: Path) -> dict[int, int]:
    """How much each core can do, the most capable 1024, by its number."""
    capacities = {}
    for path in cpus.glob("cpu[0-9]*/cpu_capacity"):
        number, capacity = path.parent.name.removeprefix("cpu"), read_text(path)
        if number.isdecimal() and capacity.isdecimal():
            capacities[int(number)] = int(capacity)
    return capacities


def split_by_capacity(capacities: dict[int, int]) -> tuple[set[int], set[int]]:
    """Fast cores and slow ones, which can do less than half of what the fastest can."""
    enough = max(capacities.values(), default=0) * FAST_SHARE
    fast = {number for number, capacity in capacities.items() if capacity >= enough}
    return fast, capacities.keys() - fast


def count_physical(numbers: set[int], cpus: Path) -> int:
    """Cores behind these numbers: two threads of one core are one core."""
    siblings = (
        parse_ranges(read_text(cpus / f"cpu{number}" / "topology" / "thread_siblings_list")) | {number}
        for number in numbers
    )
    return len({min(threads) for threads in siblings})


def read_caches(folder: Path) -> dict[str, int]:
    """Bytes of the caches that hold data, by name such as `L1d` and `L2`."""
    caches = {}
    for index in sorted(folder.glob("index*")):
        level, kind = read_text(index / "level"), read_text(index / "type")
        size = re.fullmatch(r"(\d+)([KMG]?)", read_text(index / "size"))
        if level.isdecimal() and kind in ("Data", "Unified") and size:
            caches[f"L{level}d" if kind == "Data" else f"L{level}"] = int(size[1]) * UNITS[size[2]]
    return caches


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # not there, or not for us to read
        return ""


def wait_calmly() -> None:
    """Threads that wait for each other soon sleep; to be called before torch is imported. What is set already stays.

    By default OpenMP spins, and beside another busy program that made training several times slower. Measured on Linux
    only, where an idle machine loses nothing.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
