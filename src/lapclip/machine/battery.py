"""The battery as Linux shows it in `/sys/class/power_supply`; batteries of mice and headphones do not count."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapclip.machine.sensor_files import as_integer, list_folder, read_text

FROM_THE_BATTERY = "whole machine, from the battery"
MOST_WATTS = 1000.0  # more is no laptop

OF_BATTERIES = [
    "scope",
    "present",
    "status",
    "capacity",
    "energy_now",
    "energy_full",
    "charge_now",
    "charge_full",
]
OF_BATTERIES += ["power_now", "current_now", "voltage_now"]

Supply = dict[str, str]  # the texts of its files, by their names


@dataclass(frozen=True)
class Battery:
    """What pausing depends on."""

    percent: float
    is_plugged: bool


def read_supplies(root: Path) -> list[Supply]:
    """The machine's own batteries and everything that may feed it."""
    supplies: list[Supply] = []
    for folder in list_folder(root / "sys/class/power_supply"):
        supply = {"type": read_text(f"{folder}/type")}
        wanted = OF_BATTERIES if supply["type"] == "Battery" else ["online"]
        supply |= {name: text for name in wanted if (text := read_text(f"{folder}/{name}"))}
        if supply.get("scope") != "Device" and supply.get("present") != "0":
            supplies.append(supply)
    return supplies


def batteries_in(supplies: list[Supply]) -> list[Supply]:
    return [supply for supply in supplies if supply["type"] == "Battery"]


def battery_of(supplies: list[Supply]) -> Battery | None:
    """All batteries of the machine as one; None if there is none."""
    percent = percent_of(batteries_in(supplies))
    return None if percent is None else Battery(percent, is_plugged(supplies))


def percent_of(batteries: list[Supply]) -> float | None:
    """Weighed by what each battery holds, where that is known of all; else the mean."""
    for unit in ("energy", "charge"):
        now = [as_integer(battery.get(f"{unit}_now")) for battery in batteries]
        full = [as_integer(battery.get(f"{unit}_full")) for battery in batteries]
        if None not in now and None not in full and (whole := sum(filter(None, full))) > 0:
            return round(min(100 * sum(filter(None, now)) / whole, 100.0), 1)
    capacities = [number for b in batteries if (number := as_integer(b.get("capacity"))) is not None]
    return round(sum(capacities) / len(capacities), 1) if capacities else None


def is_plugged(supplies: list[Supply]) -> bool:
    """Whether power comes in; plugged where nobody says otherwise, so that nothing pauses without a reason."""
    states = {battery.get("status") for battery in batteries_in(supplies)}
    mains = {supply.get("online") for supply in supplies if supply["type"] == "Mains"}
    usb = {supply.get("online") for supply in supplies if supply["type"] == "USB"}
    if "1" in mains:
        return True
    if "Discharging" in states:  # a USB supply may be online and give nothing
        return False
    return "1" in usb or not states.isdisjoint({"Charging", "Full", "Not charging"}) or "0" not in mains


def watts_of(supplies: list[Supply]) -> float | None:
    """What the whole machine takes, known only while the battery alone feeds it."""
    if is_plugged(supplies):
        return None
    feeding = [battery for battery in batteries_in(supplies) if battery.get("status") == "Discharging"]
    watts = sum(watts_from(battery) for battery in feeding)
    return round(watts, 2) if 0 < watts < MOST_WATTS else None


def watts_from(battery: Supply) -> float:
    # Some drivers write what flows out as negative.
    if (microwatts := as_integer(battery.get("power_now"))) is not None:
        return abs(microwatts) / 1e6
    microamperes, microvolts = as_integer(battery.get("current_now")), as_integer(battery.get("voltage_now"))
    return (
        abs(microamperes * microvolts) / 1e12 if microamperes is not None and microvolts is not None else 0.0
    )


def battery_readings(root: Path) -> dict[str, Any]:
    supplies = read_supplies(root)
    battery, watts = battery_of(supplies), watts_of(supplies)
    readings: dict[str, Any] = {}
    if battery:
        readings |= {"battery": battery.percent, "is_plugged": battery.is_plugged}
    if watts:
        readings |= {"power_watts": watts, "power_of": FROM_THE_BATTERY}
    return readings
