"""What the machine does now: load of the cores, memory, temperature, power, battery. Without root and without torch.

Nothing here raises or waits: what cannot be read is missing from the readings. The parsers of macOS programs were tried
on recorded texts, not on a Mac.
"""

import json
import os
import plistlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lapclip.machine.hardware import read_text, run_command, worker_processes
from lapclip.machine.power import ROOT, UNREADABLE, read_battery

PAUSE_SECONDS = 10.0  # between two readings of what answers slowly: other programs, the battery, thermometers
OLD_SECONDS = 300.0  # older answers are not used; a step may take minutes
MAX_WATTS = 1000.0  # more is no laptop
MIN_SECONDS, MAX_SECONDS = 0.1, 300.0  # between readings of an energy counter, which may wrap around twice
NVIDIA = "0x10de"  # its PCI number

BATTERY, WHOLE = "whole machine, from the battery", "whole machine"
CHIP, PACKAGE = "processor, graphics and neural engine", "processor package"

CPU_CHIPS = re.compile(
    r"coretemp|k10temp|zenpower|x86_pkg_temp|(cpu|soc|bigcore|littlecore)[-_\d]*thermal|TCPU", re.IGNORECASE
)
BOARD_CHIP = "acpitz"
COLDEST, HOTTEST = 1.0, 125.0  # anything else comes from a sensor that is not there


class Sensors:
    """Reads all there is to read; shares and power are those since the previous reading, or since this was made."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.cores = CoreUsage()
        self.package = PackagePower(root)
        self.commands = BackgroundCommands(commands_here(root))
        self.slow: dict[str, Any] = {}
        self.slow_read = float("-inf")

    def read(self) -> dict[str, Any]:
        """The readings by name, each only if it can be read now; cheap enough for every few seconds."""
        readings: dict[str, Any] = {}
        # A later reading of power replaces an earlier one; of the commands, the whole machine's comes last.
        for part in (self.cores.read, read_memory, self.read_slow, self.package.read, self.commands.read):
            with suppress(*UNREADABLE):
                readings |= part()
        return readings

    def read_slow(self) -> dict[str, Any]:
        if time.monotonic() - self.slow_read >= PAUSE_SECONDS:
            self.slow_read, self.slow = time.monotonic(), {}
            if battery := read_battery(self.root):
                self.slow |= {"battery": battery.percent, "is_plugged": battery.is_plugged}
                self.slow |= power(battery.watts, BATTERY)
            self.slow |= read_temperature()
        return self.slow


class CoreUsage:
    """The share of each core in use since the previous reading, without cores this process may not use."""

    def __init__(self) -> None:
        self.when, self.times, self.own = time.monotonic(), core_times(), own_seconds()

    def read(self) -> dict[str, Any]:
        elapsed = time.monotonic() - self.when
        if elapsed < MIN_SECONDS:
            return {}
        before, own_before = self.times, self.own
        self.when, self.times, self.own = self.when + elapsed, core_times(), own_seconds()
        if len(before) != len(self.times):  # cores came or went
            return {}
        pairs = zip(before, self.times, strict=True)
        spent = [(busy - old_busy, total - old_total) for (old_busy, old_total), (busy, total) in pairs]
        others = (sum(busy for busy, _ in spent) - (self.own - own_before)) / elapsed
        return {
            "cores": [round(min(max(busy / max(total, 1e-9), 0.0), 1.0), 3) for busy, total in spent],
            "other_cores": round(min(max(others, 0.0), len(spent)), 3),
        }


def core_times() -> list[tuple[float, float]]:
    """Busy seconds and all seconds of each core this process may use; time that a host takes counts as busy."""
    cores = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    times = []
    for core in (core for number, core in enumerate(cores) if number in usable):
        # Time of guests is in user and nice too.
        total = sum(core) - getattr(core, "guest", 0) - getattr(core, "guest_nice", 0)
        times.append((total - core.idle - getattr(core, "iowait", 0), total))
    return times


def own_seconds() -> float:
    """CPU time of this process, of what it started and has waited for, and of its workers."""
    waited_for = os.times()
    seconds = time.process_time() + waited_for.children_user + waited_for.children_system
    for worker in worker_processes():
        with suppress(psutil.Error):  # it may end meanwhile
            seconds += sum(worker.cpu_times()[:2])
    return seconds


def read_memory() -> dict[str, Any]:
    swap = psutil.swap_memory()
    readings = {"memory_available": psutil.virtual_memory().available, "swap_used": swap.used}
    # Elsewhere psutil counts pages read from files as swapped in; there `vm_stat` is asked.
    return readings | ({"swapped_bytes": swap.sin + swap.sout} if sys.platform == "linux" else {})


def read_temperature() -> dict[str, Any]:
    """The hottest sensor of the processor, or of the board where the processor has none."""
    if not hasattr(psutil, "sensors_temperatures"):
        return {}
    chips = psutil.sensors_temperatures()
    sensors = [s for name, found in chips.items() if CPU_CHIPS.fullmatch(name) for s in found]
    sensors = sensors or chips.get(BOARD_CHIP, [])
    # Tctl is what the fan follows: on some processors Tdie plus ten or more.
    ignored = {"Tctl"} if any(sensor.label == "Tdie" for sensor in sensors) else set()
    degrees = [s.current for s in sensors if s.label not in ignored and COLDEST <= s.current <= HOTTEST]
    return {"temperature": round(max(degrees), 1)} if degrees else {}


def power(watts: float, of: str) -> dict[str, Any]:
    """A reading of power, if it is plausible."""
    return {"power_watts": round(watts, 2), "power_of": of} if 0 < watts < MAX_WATTS else {}


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


class Command(NamedTuple):
    """A program that prints readings."""

    arguments: list[str]
    parse: Callable[[str], dict[str, Any]]
    may_run: Callable[[], bool] = lambda: True


class BackgroundCommands:
    """Runs programs one after another in a thread, at intervals; a reading is their last output."""

    def __init__(self, commands: list[Command]) -> None:
        found = [(shutil.which(command.arguments[0]), command) for command in commands]
        # By its path, or it would be forked: see `run_command`.
        self.commands = [c._replace(arguments=[program, *c.arguments[1:]]) for program, c in found if program]
        self.readings: dict[str, Any] = {}
        self.started = self.answered = float("-inf")
        self.thread: threading.Thread | None = None
        self.read()  # so that the first reading may have their answers

    def read(self) -> dict[str, Any]:
        now = time.monotonic()
        is_running = self.thread is not None and self.thread.is_alive()
        if self.commands and not is_running and now - self.started >= PAUSE_SECONDS:
            self.started = now
            self.thread = threading.Thread(target=self.run, daemon=True)
            self.thread.start()
        return self.readings if now - self.answered < OLD_SECONDS else {}

    def run(self) -> None:
        readings: dict[str, Any] = {}
        for command in self.commands:
            with suppress(*UNREADABLE):
                readings |= command.parse(run_command(command.arguments)) if command.may_run() else {}
        self.readings, self.answered = readings, time.monotonic()


def commands_here(root: Path) -> list[Command]:
    nvidia = ["nvidia-smi", "--query-gpu=power.draw,temperature.gpu", "--format=csv,noheader,nounits"]
    commands = [Command(nvidia, parse_nvidia, lambda: is_gpu_awake(root, NVIDIA))]
    if sys.platform == "darwin":
        commands += [
            Command(["pmset", "-g", "therm"], parse_pmset_therm),
            Command(["vm_stat"], parse_vm_stat),
            Command(["macmon", "pipe", "-s", "1"], parse_macmon),
            Command(["ioreg", "-a", "-r", "-n", "AppleSmartBattery"], parse_ioreg),
        ]
    return commands


def is_gpu_awake(root: Path, vendor: str) -> bool:
    """Whether a display adapter of this vendor is awake, or none is known: asking a sleeping one would wake it."""
    own = [d for d in root.glob("sys/bus/pci/devices/*") if read_text(d / "vendor") == vendor]
    displays = [device for device in own if read_text(device / "class").startswith("0x03")]
    states = [read_text(device / "power/runtime_status") for device in displays]
    return not states or any(state != "suspended" for state in states)


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


def parse_pmset_therm(text: str) -> dict[str, Any]:
    """`pmset -g therm`: the share of full speed the processor may run at, where macOS states it."""
    limits = re.findall(r"CPU_Speed_Limit\s*=\s*(\d+)", text)
    return {"speed_limit": min(int(limits[-1]), 100) / 100} if limits else {}


def parse_vm_stat(text: str) -> dict[str, Any]:
    """`vm_stat`: bytes moved to and from the swap file since the machine started, in pages of the size it names."""
    page = re.search(r"page\ssize\sof\s(\d+)", text)
    pages = re.findall(r"^Swap(?:ins|outs):\s+(\d+)", text, re.MULTILINE)
    return {"swapped_bytes": sum(map(int, pages)) * int(page[1])} if page and len(pages) == 2 else {}


def parse_nvidia(text: str) -> dict[str, Any]:
    """`nvidia-smi`: one line a GPU with watts and degrees; all GPUs together, and the hottest."""
    rows = re.findall(r"^\s*(\S+)\s*,\s*(\S+)\s*$", text, re.MULTILINE)
    watts, degrees = ([float(row[n]) for row in rows if re.fullmatch(r"\d+(\.\d+)?", row[n])] for n in (0, 1))
    readings = {"gpu_power_watts": round(sum(watts), 2)} if sum(watts) > 0 else {}
    return readings | ({"gpu_temperature": max(degrees)} if degrees else {})
