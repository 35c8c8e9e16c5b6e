"""The battery, read without root; when to pause because it is low; keeping a Mac awake.

psutil knows no watts, and on Linux takes the battery of a wireless mouse for the machine's, so Linux's own files are
read here.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from xml.parsers.expat import ExpatError

import psutil

from lapclip.machine.hardware import read_text
from lapclip.units import parse_percent

ROOT = Path("/")
# What reading a sensor may raise: missing or odd files, programs that print something unexpected.
UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, psutil.Error, ExpatError,
)  # fmt: skip
BATTERY_CHECK_SECONDS = 20.0  # between two looks at the battery, while training


@dataclass(frozen=True)
class Battery:
    percent: float
    is_plugged: bool
    watts: float = 0.0  # what the whole machine takes, while on battery, if the battery reports it


def read_battery(root: Path = ROOT) -> Battery | None:
    """All batteries of the machine as one; None without a battery."""
    with suppress(*UNREADABLE):
        if sys.platform != "darwin":
            return battery_from_kernel(root)
        found = psutil.sensors_battery()
        return found and Battery(float(found.percent), found.power_plugged is not False)
    return None


def battery_from_kernel(root: Path) -> Battery | None:
    supplies = [read_supply(folder) for folder in sorted((root / "sys/class/power_supply").glob("*"))]
    own = [supply for supply in supplies if supply["TYPE"] == "Battery" and supply.get("SCOPE") != "Device"]
    batteries = [battery for battery in own if "CAPACITY" in battery]
    if not batteries:
        return None
    states = {battery.get("STATUS") for battery in batteries}
    mains = {supply.get("ONLINE") for supply in supplies if supply["TYPE"] == "Mains"}
    # Plugged in by default, so that nothing pauses without a reason.
    is_plugged = "1" in mains or ("Discharging" not in states and (states != {"Unknown"} or "0" not in mains))
    percent = sum(int(battery["CAPACITY"]) for battery in batteries) / len(batteries)
    feeding = [] if is_plugged else [b for b in batteries if b.get("STATUS") == "Discharging"]
    return Battery(round(percent, 1), is_plugged, sum(watts_from(battery) for battery in feeding))


def read_supply(folder: Path) -> dict[str, str]:
    """The properties of a power supply by name: `STATUS`, `CAPACITY`, ..."""
    lines = (line.partition("=") for line in read_text(folder / "uevent").splitlines())
    properties = {name.removeprefix("POWER_SUPPLY_"): value for name, _, value in lines}
    return properties | {"TYPE": read_text(folder / "type")}


def watts_from(battery: dict[str, str]) -> float:
    # Some drivers write what flows out as negative.
    if "POWER_NOW" in battery:
        return abs(int(battery["POWER_NOW"])) / 1e6
    return abs(int(battery.get("CURRENT_NOW", 0)) * int(battery.get("VOLTAGE_NOW", 0))) / 1e12


def reason_to_pause(pause_below: str | None) -> str | None:
    """Why training should wait; None when it should not, or when there is no battery to read."""
    battery, limit = read_battery() if pause_below else None, parse_percent(pause_below or "0%")
    if battery is None or battery.is_plugged or battery.percent >= limit:
        return None
    return f"the battery is at {battery.percent:.0f}%, below {limit:g}%, and not plugged in"


@contextmanager
def keep_awake() -> Iterator[None]:
    """Keeps a Mac from sleeping while idle; does nothing on other systems."""
    process = None
    if sys.platform == "darwin":
        # It watches this process, so it ends even if this is killed; in a session of its own, Ctrl-C does not reach it.
        command = ["caffeinate", "-i", "-w", str(os.getpid())]
        with suppress(OSError):
            process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)  # noqa: S603
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()
