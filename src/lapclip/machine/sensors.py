"""What the machine feels, read without root and without torch: cores, memory, heat, power, battery.

Nothing here raises or waits: what cannot be read is left out. On macOS other programs are asked in the background;
their parsers were tried on recorded texts, not on a Mac.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lapclip.machine.asked import PAUSE_SECONDS, Asked, ask_now
from lapclip.machine.battery import Battery, battery_of, battery_readings, read_supplies
from lapclip.machine.busy import Busy, descendants_from_kernel, descendants_from_parents
from lapclip.machine.power import Packages, find_thermometers, hottest, is_awake, swap_from_kernel
from lapclip.machine.texts import (
    CHIP,
    parse_ioreg,
    parse_macmon,
    parse_nvidia,
    parse_pmset_batt,
    parse_pmset_therm,
    parse_ps,
    parse_vm_stat,
)

__all__ = ["Battery", "Sensors", "read_battery"]

ROOT = Path("/")
UNREADABLE = (OSError, ValueError, LookupError, RuntimeError, psutil.Error)

ON_A_MAC = [
    (["pmset", "-g", "batt"], parse_pmset_batt),
    (["pmset", "-g", "therm"], parse_pmset_therm),
    (["vm_stat"], parse_vm_stat),
    (["ioreg", "-r", "-w0", "-n", "AppleSmartBattery"], parse_ioreg),
    (["macmon", "pipe", "-s", "1"], parse_macmon),
]
NVIDIA = ["nvidia-smi", "--query-gpu=power.draw,temperature.gpu", "--format=csv,noheader,nounits"]


class Sensors:
    """Reads all there is to read; shares and power are those since the reading before, or since this was made."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.thermometers = find_thermometers(root)
        self.packages = Packages(root)
        self.asked = (
            [Asked(command, parse) for command, parse in ON_A_MAC] if sys.platform == "darwin" else []
        )
        self.asked += [Asked(NVIDIA, parse_nvidia, may_ask=lambda: is_awake(root, vendor="0x10de"))]
        has_children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
        self.processes = [] if has_children else [Asked(["ps", "-axo", "pid=,ppid="], parse_ps)]
        self.busy = Busy()
        with suppress(*UNREADABLE):
            self.busy.begin(self.descendants())
        while self.ask_one(time.monotonic()):  # so that the first reading has their answers
            pass
        self.of_battery: dict[str, Any] = {}
        self.battery_read = -PAUSE_SECONDS

    def read(self) -> dict[str, Any]:
        """The readings by name, each only if it can be read now; cheap enough for every few seconds."""
        now = time.monotonic()
        parts: Iterable[Callable[[float], dict[str, Any]]] = (
            self.read_cores,
            self.read_memory,
            self.read_heat,
            self.read_battery,
            self.packages.read,
        )
        readings: dict[str, Any] = {}
        for part in parts:
            with suppress(*UNREADABLE):
                readings |= part(now)
        for asked in self.asked:
            with suppress(*UNREADABLE):
                said = asked.latest(now)
                # What is known of the whole machine says more than what the chip alone takes.
                readings |= {**said, **readings} if said.get("power_of") == CHIP else said
        self.ask_one(now)  # starting a program takes half a millisecond, so one a reading
        return readings

    def ask_one(self, now: float) -> bool:
        """Starts the program that has waited longest, if one is due."""
        due = [asked for asked in [*self.asked, *self.processes] if asked.is_due(now)]
        with suppress(*UNREADABLE):
            if due:
                min(due, key=lambda asked: asked.ask_again).start(now)
        return bool(due)

    def close(self) -> None:
        """Ends the programs still being asked."""
        for asked in [*self.asked, *self.processes]:
            asked.close()

    def descendants(self) -> list[int]:
        """What this process started, from Linux itself or, at most a few readings old, from `ps`."""
        if not self.processes:
            return descendants_from_kernel(os.getpid())
        said = self.processes[0].latest(time.monotonic())
        return descendants_from_parents(said.get("parents", {}), os.getpid())

    def read_cores(self, now: float) -> dict[str, Any]:
        return self.busy.read(now, self.descendants())

    def read_memory(self, now: float) -> dict[str, Any]:
        memory = {"memory_available": psutil.virtual_memory().available}
        # Elsewhere psutil counts pages read from files as swapped in; there `vm_stat` is asked.
        swap = swap_from_kernel() if sys.platform == "linux" else {"swap_used": psutil.swap_memory().used}
        return memory | swap

    def read_heat(self, now: float) -> dict[str, Any]:
        temperature = hottest(self.thermometers)
        return {} if temperature is None else {"temperature": temperature}

    def read_battery(self, now: float) -> dict[str, Any]:
        # The kernel asks the battery's own controller, which may take its time.
        if now - self.battery_read >= PAUSE_SECONDS:
            self.battery_read = now
            self.of_battery = battery_readings(self.root)
        return self.of_battery


def read_battery(root: Path = ROOT) -> Battery | None:
    """How full the battery is and whether the machine is plugged in; None without a battery."""
    with suppress(*UNREADABLE):
        if sys.platform != "darwin":
            return battery_of(read_supplies(root))
    with suppress(*UNREADABLE, AttributeError):
        found = psutil.sensors_battery()
        if found is None:
            return None
        if found.power_plugged is not None:
            return Battery(percent=float(found.percent), is_plugged=bool(found.power_plugged))
    said = parse_pmset_batt(ask_now(["pmset", "-g", "batt"]))
    return Battery(said["battery"], said.get("is_plugged", True)) if "battery" in said else None
