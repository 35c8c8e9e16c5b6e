"""Power and battery, read without root; when to pause for a low battery; keeping a Mac awake.

psutil knows no watts, and on Linux takes the battery of a wireless mouse for the machine's, so Linux's own files are
read here. The parsers of macOS programs were tried on recorded texts, not on a Mac.
"""

import json
import os
import plistlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
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
MAX_WATTS = 1000.0  # more is no laptop
MIN_SECONDS, MAX_SECONDS = 0.1, 300.0  # between readings of an energy counter, which may wrap around twice

BATTERY, WHOLE = "whole machine, from the battery", "whole machine"
CHIP, PACKAGE = "processor, graphics and neural engine", "processor package"


def power(watts: float, of: str) -> dict[str, Any]:
    """A reading of power, if it is plausible."""
    return {"power_watts": round(watts, 2), "power_of": of} if 0 < watts < MAX_WATTS else {}


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


class PackagePower:
    """Power of the processor packages on Linux, from their energy counters (RAPL), which Intel and AMD share.

    Only zones named `package`: cores and graphics are parts of them, `psys` contains them, memory is separate, and
    `intel-rapl-mmio` shows the same package again. Since 2020 most systems let only root read them.
    """

    def __init__(self, root: Path = ROOT) -> None:
        zones = (z for z in root.glob("sys/class/powercap/intel-rapl:*") if z.name.count(":") == 1)
        self.zones = [zone for zone in zones if read_text(zone / "name").startswith("package")]
        self.when, self.microjoules = time.monotonic(), self.read_counters()

    def read_counters(self) -> dict[Path, int]:
        texts = {zone: read_text(zone / "energy_uj") for zone in self.zones}
        return {zone: int(text) for zone, text in texts.items() if text.isdecimal()}

    def read(self) -> dict[str, Any]:
        elapsed = time.monotonic() - self.when
        if elapsed < MIN_SECONDS:
            return {}
        before, self.microjoules, self.when = self.microjoules, self.read_counters(), self.when + elapsed
        if before.keys() != self.microjoules.keys() or elapsed > MAX_SECONDS:
            return {}
        wraps_at = {zone: int(read_text(zone / "max_energy_range_uj")) for zone in before}
        spent = sum((now - before[zone]) % wraps_at[zone] for zone, now in self.microjoules.items())
        return power(spent / 1e6 / elapsed, PACKAGE)


def parse_ioreg(text: str) -> dict[str, Any]:
    """`ioreg -a -n AppleSmartBattery`: what the whole machine takes.

    On battery that is current times voltage; plugged in it is `SystemLoad`, or what comes in while nothing is charged.
    """
    battery = plistlib.loads(text.encode())[0]
    # A negative current is written as if it had no sign.
    milliamperes = (battery.get("InstantAmperage", battery.get("Amperage", 0)) + 2**63) % 2**64 - 2**63
    if not battery.get("ExternalConnected") and milliamperes < 0:
        return power(-milliamperes * battery["Voltage"] / 1e6, BATTERY)
    telemetry = battery.get("PowerTelemetryData", {})
    if load := telemetry.get("SystemLoad"):
        return power(load / 1000, WHOLE)
    is_charging = battery.get("IsCharging", True)
    return {} if is_charging else power(telemetry.get("SystemPowerIn", 0) / 1000, WHOLE)


def parse_macmon(text: str) -> dict[str, Any]:
    """`macmon pipe -s 1`: power of the machine, or of the chip if that is higher, and the mean CPU temperature."""
    said = json.loads(text.splitlines()[-1])
    machine, chip = float(said.get("sys_power", 0)), float(said.get("all_power", 0))
    degrees = float(said.get("temp", {}).get("cpu_temp_avg", 0))
    readings = power(machine, WHOLE) if machine > chip else power(chip, CHIP)
    return readings | ({"temperature": round(degrees, 1)} if 0 < degrees < 150 else {})


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
