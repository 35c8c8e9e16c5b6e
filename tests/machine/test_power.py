"""Power and battery from files in a folder that stands for the root and from recorded texts of macOS; `caffeinate` is a
stub that writes down how it was called and stays until it is ended."""

import os
import plistlib
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import wait_for

from lapclip.machine.power import UNREADABLE, Battery, keep_awake, read_battery, reason_to_pause
from lapclip.machine.sensors import PackagePower, parse_ioreg, parse_macmon

STUB = """#!/bin/sh
echo "$$ $@" > {said}.new && mv {said}.new {said}
while true; do sleep 0.02; done
"""


def write(folder: Path, files: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def package(root: Path, microjoules: int, *, zone: str = "intel-rapl:0", name: str = "package-0") -> Path:
    files = {"name": name, "energy_uj": microjoules, "max_energy_range_uj": 262143328850}
    return write(root / "sys/class/powercap" / zone, files)


def watts_after_ten_seconds(root: Path, change) -> dict:
    counters = PackagePower(root)
    counters.when -= 10.0
    change()
    return counters.read()


def test_package_power_is_energy_over_time_and_nothing_is_counted_twice(tmp_path):
    def spend(joules: int, more: int) -> None:
        package(tmp_path, joules * 1_000_000)
        package(tmp_path, joules * 500_000, zone="intel-rapl:1", name="package-1")
        package(tmp_path, more, zone="intel-rapl:2", name="psys")
        package(tmp_path, more, zone="intel-rapl:0:0", name="core")
        package(tmp_path, more, zone="intel-rapl-mmio:0")

    spend(5, 0)
    readings = watts_after_ten_seconds(tmp_path, lambda: spend(105, 400_000_000))
    assert readings == {"power_watts": pytest.approx(15.0, rel=0.02), "power_of": "processor package"}


def test_a_counter_that_wraps_around_goes_on_and_one_that_was_reset_or_is_unreadable_says_nothing(tmp_path):
    package(tmp_path, 262_000_000_000)  # 143.3 J to the end and 56.7 J after
    readings = watts_after_ten_seconds(tmp_path, lambda: package(tmp_path, 56_671_150))
    assert readings["power_watts"] == pytest.approx(20.0, rel=0.02)
    package(tmp_path, 100_000_000_000)
    assert watts_after_ten_seconds(tmp_path, lambda: package(tmp_path, 1_000_000)) == {}, "kilowatts"
    zone = package(tmp_path, 0)
    (zone / "energy_uj").unlink()
    (zone / "energy_uj").mkdir()  # reading it fails for root too
    assert watts_after_ten_seconds(tmp_path, lambda: None) == {}


@pytest.fixture
def on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")


def supply(root: Path, name: str, kind: str, **properties: object) -> None:
    lines = [f"POWER_SUPPLY_{key.upper()}={value}" for key, value in {"name": name, **properties}.items()]
    write(root / "sys/class/power_supply" / name, {"type": kind, "uevent": "\n".join(lines)})


def test_a_battery_that_feeds_the_machine_says_its_power(tmp_path, on_linux):
    supply(tmp_path, "BAT0", "Battery", status="Discharging", capacity=57, power_now=11_840_000)
    supply(tmp_path, "ADP1", "Mains", online=0)
    assert read_battery(tmp_path) == Battery(percent=57.0, is_plugged=False, watts=11.84)
    # Some drivers give current and voltage instead, and write what flows out as negative.
    flow = {"current_now": -1_500_000, "voltage_now": 12_000_000}
    supply(tmp_path, "BAT0", "Battery", status="Discharging", capacity=57, **flow)
    assert read_battery(tmp_path) == Battery(percent=57.0, is_plugged=False, watts=18.0)


@pytest.mark.parametrize(
    ("status", "online", "is_plugged"),
    [("Not charging", 1, True), ("Unknown", None, True), ("Unknown", 0, False), ("Charging", 0, True)],  # the last by USB
)  # fmt: skip
def test_a_machine_is_plugged_in_by_default(tmp_path, status, online, is_plugged, on_linux):
    """What flows into its battery is not taken for what the machine takes."""
    supply(tmp_path, "BAT0", "Battery", status=status, capacity=40, power_now=30_000_000)
    if online is not None:
        supply(tmp_path, "ADP1", "Mains", online=online)
    assert read_battery(tmp_path) == Battery(40.0, is_plugged)


def test_two_batteries_are_one_and_a_mouse_and_nonsense_are_none(tmp_path, on_linux):
    assert read_battery(tmp_path / "none") is None
    supply(tmp_path, "hidpp_battery_0", "Battery", scope="Device", status="Discharging", capacity=5)
    assert read_battery(tmp_path) is None
    supply(tmp_path, "BAT0", "Battery", status="Full", capacity=100)
    supply(tmp_path, "BAT1", "Battery", status="Discharging", capacity=20)
    assert read_battery(tmp_path) == Battery(percent=60.0, is_plugged=False)
    supply(tmp_path, "BAT0", "Battery", status="?", capacity="much")
    assert read_battery(tmp_path) is None


def test_training_pauses_below_the_limit_and_on_battery_only(monkeypatch):
    now = {"battery": Battery(18.0, False)}
    monkeypatch.setattr("lapclip.machine.power.read_battery", lambda: now["battery"])
    assert reason_to_pause("20%") == "the battery is at 18%, below 20%, and not plugged in"
    assert reason_to_pause("18%") is None and reason_to_pause(None) is None
    for now["battery"] in (Battery(18.0, True), None):
        assert reason_to_pause("20%") is None


def test_a_mac_s_battery_is_read_by_psutil(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    battery = SimpleNamespace(percent=31, power_plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    assert read_battery() == Battery(31.0, False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    assert read_battery() is None
    monkeypatch.setattr(psutil, "sensors_battery", lambda: {}["no such key"])
    assert read_battery() is None


def as_ioreg(**battery: object) -> str:
    return plistlib.dumps([{"IsCharging": False, "Voltage": 11441, **battery}]).decode()


def test_ioreg_tells_what_the_machine_takes_and_not_what_charges():
    for milliamperes in (2**64 - 1582, -1582):  # the first has lost its sign
        readings = parse_ioreg(as_ioreg(ExternalConnected=False, InstantAmperage=milliamperes))
        assert readings == {"power_watts": 18.1, "power_of": "whole machine, from the battery"}
    plugged = {"ExternalConnected": True, "InstantAmperage": 812}
    load = as_ioreg(**plugged, PowerTelemetryData={"SystemLoad": 14960, "SystemPowerIn": 24960})
    assert parse_ioreg(load) == {"power_watts": 14.96, "power_of": "whole machine"}
    incoming = plugged | {"PowerTelemetryData": {"SystemPowerIn": 24960}}
    assert parse_ioreg(as_ioreg(**incoming | {"IsCharging": True})) == {}
    assert parse_ioreg(as_ioreg(**incoming)) == {"power_watts": 24.96, "power_of": "whole machine"}


def test_macmon_tells_the_whole_machine_or_else_the_chip():
    said = '{"all_power":0.256,"ane_power":0.0,"cpu_power":0.252,"sys_power":9.391488075256348,"temp":{"cpu_temp_avg":44.509185791015625,"gpu_temp_avg":0.0}}\n'
    assert parse_macmon(said) == {"power_watts": 9.39, "power_of": "whole machine", "temperature": 44.5}
    chip = parse_macmon(said.replace("9.391488075256348", "0.0"))
    assert chip["power_watts"] == 0.26 and "machine" not in chip["power_of"]
    assert parse_macmon('{"sys_power": NaN}') == {}


@pytest.mark.parametrize("parse", [parse_ioreg, parse_macmon])
@pytest.mark.parametrize("text", ["", "[]", "null", '{"temp": 3, "sys_power": "much"}'])
def test_unexpected_text_raises_what_sensors_ignore(parse, text):
    with pytest.raises(UNREADABLE):
        parse(text)


@pytest.fixture
def caffeinate(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    program, said = tmp_path / "bin" / "caffeinate", tmp_path / "said"
    program.parent.mkdir()
    program.write_text(STUB.format(said=said))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return said


def test_a_mac_is_kept_awake_for_as_long_as_this_process_lives_and_no_longer_than_asked(caffeinate):
    with pytest.raises(ZeroDivisionError), keep_awake():
        wait_for(caffeinate.exists)
        pid, *arguments = caffeinate.read_text().split()
        assert arguments == ["-i", "-w", str(os.getpid())]
        assert psutil.pid_exists(int(pid))
        raise ZeroDivisionError
    assert not psutil.pid_exists(int(pid))


def test_a_missing_program_is_no_error_and_elsewhere_nothing_is_started(caffeinate, tmp_path, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "platform", "linux")
        before = psutil.Process().children()
        with keep_awake():
            assert psutil.Process().children() == before
    monkeypatch.setenv("PATH", str(tmp_path))
    with keep_awake():
        pass
    assert not caffeinate.exists()
