"""Readings from what other programs print: texts in, readings by name out; what is not understood is left out."""

import json
import re
from contextlib import suppress
from typing import Any

from lapclip.machine.battery import FROM_THE_BATTERY, MOST_WATTS

WHOLE = "whole machine"
CHIP = "processor, graphics and neural engine"


def parse_pmset_batt(text: str) -> dict[str, Any]:
    """`pmset -g batt`: how full the machine's own battery is, and where power comes from."""
    readings: dict[str, Any] = {}
    if source := re.search(r"drawing from '(.+?)'", text):
        readings["is_plugged"] = source[1] == "AC Power"
    if charge := re.search(r"-InternalBattery.*?\s(\d{1,3})%", text):
        readings["battery"] = float(charge[1])
    return readings


def parse_pmset_therm(text: str) -> dict[str, Any]:
    """`pmset -g therm`: the share of full speed the processor may run at, where macOS states it."""
    limits = re.findall(r"CPU_Speed_Limit\s*=\s*(\d+)", text)
    return {"speed_limit": min(int(limits[-1]), 100) / 100} if limits else {}


def parse_vm_stat(text: str) -> dict[str, Any]:
    """`vm_stat`: bytes moved to and from the swap file since the machine started, in pages of the size it names."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Swap(?:ins|outs):\s+(\d+)", text, re.MULTILINE)
    return {"swapped_bytes": sum(map(int, pages)) * int(page[1])} if page and len(pages) == 2 else {}


def parse_ioreg(text: str) -> dict[str, Any]:
    """`ioreg -n AppleSmartBattery`: what the whole machine takes.

    On battery that is current times voltage; plugged in it is `SystemLoad`, or what comes in while nothing is charged.
    """
    is_plugged = re.search(r'"ExternalConnected" = Yes', text) is not None
    amperes, volts = top_number(text, "InstantAmperage"), top_number(text, "Voltage")
    if amperes is None:
        amperes = top_number(text, "Amperage")
    if not is_plugged and amperes is not None and volts is not None and (milliamperes := signed(amperes)) < 0:
        return power(-milliamperes * volts / 1e6, FROM_THE_BATTERY)
    telemetry = re.search(r'"PowerTelemetryData" = \{(.*)\}', text)
    said = {
        name: int(number) for name, number in re.findall(r'"(\w+)"=(\d+)', telemetry[1] if telemetry else "")
    }
    if load := said.get("SystemLoad"):
        return power(load / 1000, WHOLE)
    if is_plugged and '"IsCharging" = No' in text:
        return power(said.get("SystemPowerIn", 0) / 1000, WHOLE)
    return {}


def top_number(text: str, name: str) -> int | None:
    # Numbers inside dictionaries have the same names, but no spaces around the sign.
    found = re.search(rf'"{name}" = (-?\d+)', text)
    return int(found[1]) if found else None


def signed(number: int) -> int:
    """A negative number that was printed as if it had no sign: in 64 bits, and in 16 on old systems."""
    for bits in (16, 32, 64):
        if 2 ** (bits - 1) <= number < 2**bits:
            return number - 2**bits
    return number


def parse_macmon(text: str) -> dict[str, Any]:
    """`macmon pipe -s 1`: power of the machine if it says more than the chip's, and the processor's mean heat."""
    with suppress(ValueError):
        said = json.loads(text.strip().splitlines()[-1] if text.strip() else "{}")
        if not isinstance(said, dict):
            return {}
        machine, chip = as_number(said.get("sys_power")), as_number(said.get("all_power"))
        readings = power(machine, WHOLE) if machine > chip else power(chip, CHIP)
        heat = said.get("temp")
        degrees = as_number(heat.get("cpu_temp_avg")) if isinstance(heat, dict) else 0.0
        return readings | ({"temperature": round(degrees, 1)} if degrees > 0 else {})
    return {}


def parse_nvidia(text: str) -> dict[str, Any]:
    """`nvidia-smi`: one line a card with watts and degrees; all cards together, and the hottest."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    watts = [number for row in rows if len(row) == 2 and (number := as_number(row[0])) > 0]
    degrees = [number for row in rows if len(row) == 2 and (number := as_number(row[1])) > 0]
    readings = {"gpu_power_watts": round(sum(watts), 2)} if watts else {}
    return readings | ({"gpu_temperature": max(degrees)} if degrees else {})


def parse_ps(text: str) -> dict[str, Any]:
    """`ps -axo pid=,ppid=`: the parent of each process."""
    pairs = (line.split() for line in text.splitlines())
    numbers = (pair for pair in pairs if len(pair) == 2 and all(map(str.isdigit, pair)))
    return {"parents": {int(pid): int(parent) for pid, parent in numbers}}


def as_number(value: Any) -> float:
    """The number a value says; zero if it says none."""
    with suppress(TypeError, ValueError):
        number = float(value)
        return number if abs(number) < float("inf") else 0.0
    return 0.0


def power(watts: float, of: str) -> dict[str, Any]:
    return {"power_watts": round(watts, 2), "power_of": of} if 0 < watts < MOST_WATTS else {}
