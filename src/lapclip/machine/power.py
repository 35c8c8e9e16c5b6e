"""What Linux shows as files without root: temperatures, energy of the processor package, swap.

Files that are missing or may not be read are as good as absent: since 2020 most systems let only root read energy.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lapclip.machine.battery import MOST_WATTS
from lapclip.machine.sensor_files import list_folder, read_file, read_number, read_text

LONGEST_SECONDS = 300.0  # after a longer pause a counter may have gone round more than once
SHORTEST_SECONDS = 0.1
COLDEST, HOTTEST = 1.0, 125.0  # what is outside comes from a sensor that is not there

OF_PROCESSORS = {
    "coretemp",
    "k10temp",
    "zenpower",
    "cpu_thermal",
    "cpu-thermal",
    "soc_thermal",
    "soc-thermal",
}
ZONES_OF_PROCESSORS = re.compile(
    r"x86_pkg_temp|(cpu|soc|bigcore|littlecore)[-_\d]*thermal|TCPU", re.IGNORECASE
)
OF_THE_BOARD = "acpitz"


def find_thermometers(root: Path) -> list[Path]:
    """The files with temperatures of the processor; those of the board only where there are no others."""
    chips: dict[str, list[Path]] = {"processor": [], "board": []}
    for chip in sorted(root.glob("sys/class/hwmon/hwmon*")):
        name = read_text(chip / "name")
        if name in OF_PROCESSORS:
            chips["processor"] += inputs_of(chip)
        elif name == OF_THE_BOARD:
            chips["board"] += inputs_of(chip)
    zones: dict[str, list[Path]] = {"processor": [], "board": []}
    for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        name = read_text(zone / "type")
        if ZONES_OF_PROCESSORS.fullmatch(name):
            zones["processor"].append(zone / "temp")
        elif name == OF_THE_BOARD:
            zones["board"].append(zone / "temp")
    return chips["processor"] or zones["processor"] or chips["board"] or zones["board"]


def inputs_of(chip: Path) -> list[Path]:
    inputs = sorted(chip.glob("temp*_input"))
    labels = {file: read_text(file.with_name(file.name.replace("_input", "_label"))) for file in inputs}
    # The sensor of a whole package is the hottest of its cores, and asking each core would wake it.
    if packages := [file for file in inputs if labels[file].startswith("Package id")]:
        return packages
    # Tctl is what the fan follows: on some processors Tdie plus ten or more.
    return [file for file in inputs if labels[file] != "Tctl" or "Tdie" not in labels.values()]


def hottest(thermometers: list[Path]) -> float | None:
    """Degrees Celsius of the hottest sensor that says something possible."""
    degrees = [number / 1000 for file in thermometers if (number := read_number(file)) is not None]
    return max((round(d, 1) for d in degrees if COLDEST <= d <= HOTTEST), default=None)


class Packages:
    """Power of the processor packages from their energy counters (RAPL), which Intel and AMD share.

    Only zones named `package`: the cores and graphics are parts of them, `psys` contains them, memory is beside them,
    and `intel-rapl-mmio` shows the same package again.
    """

    def __init__(self, root: Path) -> None:
        zones = sorted(root.glob("sys/class/powercap/intel-rapl:*"))
        self.zones = [
            zone
            for zone in zones
            if zone.name.count(":") == 1 and read_text(zone / "name").startswith("package")
        ]
        self.ranges = {zone: read_number(zone / "max_energy_range_uj") for zone in self.zones}
        self.when = time.monotonic()
        self.energies = self.read_energies()

    def read_energies(self) -> dict[Path, int]:
        energies = {zone: read_number(zone / "energy_uj") for zone in self.zones}
        return {zone: energy for zone, energy in energies.items() if energy is not None}

    def read(self, now: float) -> dict[str, Any]:
        elapsed = now - self.when
        if not self.zones or elapsed < SHORTEST_SECONDS:
            return {}
        before, self.energies, self.when = self.energies, self.read_energies(), now
        if not before or before.keys() != self.energies.keys() or elapsed > LONGEST_SECONDS:
            return {}
        spent = [used(before[zone], self.energies[zone], self.ranges[zone]) for zone in before]
        watts = sum(spent) / 1e6 / elapsed
        return (
            {"power_watts": round(watts, 2), "power_of": "processor package"}
            if 0 < watts < MOST_WATTS
            else {}
        )


def used(before: int, after: int, whole_range: int | None) -> float:
    """Microjoules between two readings of a counter that starts again at zero after its range."""
    if after >= before:
        return after - before
    return after - before + whole_range if whole_range else float("nan")


def swap_from_kernel() -> dict[str, Any]:
    """Bytes swapped out now, and bytes moved in and out since the machine started."""
    memory, counts = read_file("/proc/meminfo"), read_text("/proc/vmstat")
    swap = {"swap_used": (number_after("SwapTotal:", memory) - number_after("SwapFree:", memory)) * 1024}
    with suppress(ValueError, IndexError):
        pages = number_after("pswpin ", counts) + number_after("pswpout ", counts)
        swap["swapped_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    return swap


def number_after(name: str, text: str) -> int:
    begin = text.index(name) + len(name)
    return int(text[begin : begin + 40].split()[0])


def is_awake(root: Path, *, vendor: str) -> bool:
    """Whether a display adapter of this maker is awake, or none is known: asking a sleeping one would wake it."""
    states = [
        read_text(f"{device}/power/runtime_status")
        for device in list_folder(root / "sys/bus/pci/devices")
        if read_text(f"{device}/vendor") == vendor and read_text(f"{device}/class").startswith("0x03")
    ]
    return not states or any(state != "suspended" for state in states)
