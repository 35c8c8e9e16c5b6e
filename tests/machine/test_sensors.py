"""Linux files in a folder that stands for the root, recorded texts of other programs, and this machine as it is."""

import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lapclip.machine.asked import Asked
from lapclip.machine.busy import (
    CoreTime,
    descendants_from_kernel,
    descendants_from_parents,
    parse_proc_stat,
    share,
)
from lapclip.machine.hardware import num_usable_cores
from lapclip.machine.power import find_thermometers, hottest, is_awake, used
from lapclip.machine.sensors import Battery, Sensors, read_battery
from lapclip.machine.texts import (
    parse_ioreg,
    parse_macmon,
    parse_nvidia,
    parse_pmset_batt,
    parse_pmset_therm,
    parse_ps,
    parse_vm_stat,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux shows as files")
BURN = "import time; began = time.process_time()\nwhile time.process_time() - began < {seconds}: pass"


ON_LINUX = pytest.mark.usefixtures("on_linux")


@pytest.fixture
def on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")


def write(folder: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


# Temperature


@ON_LINUX
def test_the_hottest_sensor_of_the_processor_counts_and_no_other(tmp_path):
    write(tmp_path / "sys/class/hwmon/hwmon0", {"name": "nvme", "temp1_input": 91000})
    write(
        tmp_path / "sys/class/hwmon/hwmon1",
        {"name": "coretemp", "temp1_input": 61000, "temp2_input": 64250, "temp3_input": 59000},
    )
    write(tmp_path / "sys/class/hwmon/hwmon2", {"name": "acpitz", "temp1_input": 88000})
    assert hottest(find_thermometers(tmp_path)) == 64.2
    assert Sensors(tmp_path).read()["temperature"] == 64.2


@ON_LINUX
def test_the_sensor_of_the_package_stands_for_its_cores(tmp_path):
    files = {
        "temp1_input": 71000,
        "temp1_label": "Package id 0",
        "temp2_input": 70000,
        "temp2_label": "Core 0",
    }
    write(tmp_path / "sys/class/hwmon/hwmon3", {"name": "coretemp", **files})
    assert [file.name for file in find_thermometers(tmp_path)] == ["temp1_input"]
    assert hottest(find_thermometers(tmp_path)) == 71.0


@ON_LINUX
def test_what_the_fan_follows_is_not_taken_for_the_heat_of_the_die(tmp_path):
    chip = write(
        tmp_path / "sys/class/hwmon/hwmon0", {"name": "k10temp", "temp1_input": 90000, "temp1_label": "Tctl"}
    )
    assert hottest(find_thermometers(tmp_path)) == 90.0
    write(chip, {"temp2_input": 70000, "temp2_label": "Tdie"})
    assert hottest(find_thermometers(tmp_path)) == 70.0


@ON_LINUX
def test_a_zone_of_the_processor_goes_before_the_board(tmp_path):
    zones = tmp_path / "sys/class/thermal"
    write(zones / "thermal_zone0", {"type": "acpitz", "temp": 27800})
    assert hottest(find_thermometers(tmp_path)) == 27.8
    write(zones / "thermal_zone1", {"type": "x86_pkg_temp", "temp": 55000})
    assert hottest(find_thermometers(tmp_path)) == 55.0


@pytest.mark.parametrize("nonsense", ["-274000", "0", "255000", "", "warm"])
@ON_LINUX
def test_a_sensor_that_says_nonsense_says_nothing(tmp_path, nonsense):
    write(tmp_path / "sys/class/hwmon/hwmon0", {"name": "coretemp", "temp1_input": nonsense})
    assert "temperature" not in Sensors(tmp_path).read()


# Power of the processor package


def package(
    root: Path, microjoules: int, *, number: int = 0, name: str = "package-0", most: int = 262143328850
) -> Path:
    zone = root / f"sys/class/powercap/intel-rapl:{number}"
    return write(zone, {"name": name, "energy_uj": microjoules, "max_energy_range_uj": most})


def watts_between(root: Path, change) -> dict:
    """Readings after the counters changed within a known time."""
    sensors = Sensors(root)
    sensors.packages.when -= 10.0
    change()
    return sensors.read()


@ON_LINUX
def test_package_power_is_energy_over_time_and_nothing_is_counted_twice(tmp_path):
    package(tmp_path, 5_000_000)
    package(tmp_path, 0, number=1, name="psys")
    part = tmp_path / "sys/class/powercap/intel-rapl:0:0"
    write(part, {"name": "core", "energy_uj": 0, "max_energy_range_uj": 262143328850})
    again = tmp_path / "sys/class/powercap/intel-rapl-mmio:0"
    write(again, {"name": "package-0", "energy_uj": 0, "max_energy_range_uj": 262143328850})

    def spend():
        package(tmp_path, 5_000_000 + 150_000_000)
        package(tmp_path, 400_000_000, number=1, name="psys")
        write(part, {"energy_uj": 100_000_000})
        write(again, {"energy_uj": 150_000_000})

    readings = watts_between(tmp_path, spend)
    assert readings["power_watts"] == pytest.approx(15.0, rel=0.02)
    assert readings["power_of"] == "processor package"


@ON_LINUX
def test_a_counter_that_starts_again_at_zero_goes_on(tmp_path):
    package(tmp_path, 262_000_000_000)
    readings = watts_between(
        tmp_path, lambda: package(tmp_path, 56_671_150)
    )  # 143.3 J to the end and 56.7 J after
    assert readings["power_watts"] == pytest.approx(20.0, rel=0.02)
    assert used(90, 20, 100) == 30


@ON_LINUX
def test_a_counter_that_was_reset_is_not_read_as_kilowatts(tmp_path):
    package(tmp_path, 100_000_000_000)
    assert "power_watts" not in watts_between(tmp_path, lambda: package(tmp_path, 1_000_000))


@ON_LINUX
def test_two_packages_are_added(tmp_path):
    package(tmp_path, 0), package(tmp_path, 0, number=1, name="package-1")

    def spend():
        package(tmp_path, 100_000_000), package(tmp_path, 50_000_000, number=1, name="package-1")

    assert watts_between(tmp_path, spend)["power_watts"] == pytest.approx(15.0, rel=0.02)


@ON_LINUX
def test_energy_that_may_not_be_read_is_no_reading_and_no_error(tmp_path):
    zone = package(tmp_path, 0)
    (zone / "energy_uj").unlink()
    (zone / "energy_uj").mkdir()  # reading it fails for root too
    assert not watts_between(tmp_path, lambda: None).keys() & {"power_watts", "power_of"}


# Battery


def battery(root: Path, name: str = "BAT0", **files: object) -> Path:
    return write(root / "sys/class/power_supply" / name, {"type": "Battery", **files})


def mains(root: Path, online: int, *, kind: str = "Mains", name: str = "ADP1") -> None:
    write(root / "sys/class/power_supply" / name, {"type": kind, "online": online})


@ON_LINUX
def test_a_battery_that_feeds_the_machine_says_its_power(tmp_path):
    battery(tmp_path, status="Discharging", capacity=57, power_now=11_840_000)
    mains(tmp_path, 0)
    readings = Sensors(tmp_path).read()
    assert (readings["battery"], readings["is_plugged"]) == (57.0, False)
    assert (readings["power_watts"], readings["power_of"]) == (11.84, "whole machine, from the battery")
    assert read_battery(tmp_path) == Battery(percent=57.0, is_plugged=False)


@ON_LINUX
def test_current_times_voltage_is_power_also_where_what_flows_out_is_negative(tmp_path):
    battery(tmp_path, status="Discharging", capacity=57, current_now=-1_500_000, voltage_now=12_000_000)
    assert Sensors(tmp_path).read()["power_watts"] == 18.0


@ON_LINUX
@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging", "Unknown"])
def test_what_flows_into_a_battery_is_not_taken_for_what_the_machine_takes(tmp_path, status):
    battery(tmp_path, status=status, energy_now=20_000_000, energy_full=50_000_000, power_now=30_000_000)
    mains(tmp_path, 1)
    readings = Sensors(tmp_path).read()
    assert (readings["battery"], readings["is_plugged"]) == (40.0, True)
    assert "power_watts" not in readings


@ON_LINUX
def test_the_package_is_told_rather_than_the_battery(tmp_path):
    battery(tmp_path, status="Discharging", capacity=57, power_now=11_840_000)
    package(tmp_path, 0)
    readings = watts_between(tmp_path, lambda: package(tmp_path, 70_000_000))
    assert readings["power_of"] == "processor package"


@ON_LINUX
def test_two_batteries_are_one_weighed_by_what_they_hold(tmp_path):
    battery(tmp_path, "BAT0", status="Full", energy_now=20_000_000, energy_full=20_000_000)
    battery(tmp_path, "BAT1", status="Discharging", energy_now=10_000_000, energy_full=40_000_000)
    assert read_battery(tmp_path) == Battery(percent=50.0, is_plugged=False)


@ON_LINUX
def test_a_mouse_has_no_say(tmp_path):
    battery(tmp_path, "hidpp_battery_0", scope="Device", status="Discharging", capacity=5)
    assert read_battery(tmp_path) is None
    assert not Sensors(tmp_path).read().keys() & {"battery", "is_plugged"}


@ON_LINUX
def test_a_usb_supply_counts_unless_the_battery_still_empties(tmp_path):
    here = battery(tmp_path, status="Charging", capacity=30)
    mains(tmp_path, 1, kind="USB", name="ucsi-source-psy-USBC000:001")
    assert read_battery(tmp_path) == Battery(30.0, True)
    write(here, {"status": "Discharging"})
    assert read_battery(tmp_path) == Battery(30.0, False)


@ON_LINUX
def test_the_battery_is_asked_now_and_then_only(tmp_path):
    here = battery(tmp_path, status="Discharging", capacity=57)
    sensors = Sensors(tmp_path)
    assert sensors.read()["battery"] == 57.0
    write(here, {"capacity": 56})
    assert sensors.read()["battery"] == 57.0
    sensors.battery_read -= 10.0
    assert sensors.read()["battery"] == 56.0


# Recorded texts of macOS


def test_pmset_tells_charge_and_source():
    plugged = "Now drawing from 'AC Power'\n -InternalBattery-0 (id=24903779)\t85%; charging; 0:42 remaining present: true\n"
    empty = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=21758051)\t8%; discharging; (no estimate) present: true\n"
    assert parse_pmset_batt(plugged) == {"is_plugged": True, "battery": 85.0}
    assert parse_pmset_batt(empty) == {"is_plugged": False, "battery": 8.0}
    assert parse_pmset_batt("Now drawing from 'AC Power'\n") == {"is_plugged": True}  # a Mac mini
    assert parse_pmset_batt("No batteries available.\n") == {}


def test_pmset_tells_the_speed_limit_only_where_it_states_one():
    quiet = "Note: No thermal warning level has been recorded\nNote: No performance warning level has been recorded\n"
    hot = f"{quiet}2021-07-07 12:32:50 -0400 CPU Power notify\n\tCPU_Scheduler_Limit \t= 100\n\tCPU_Available_CPUs \t= 8\n\tCPU_Speed_Limit \t= 62\n"
    assert parse_pmset_therm(quiet + "Note: No CPU power status has been recorded\n") == {}
    assert parse_pmset_therm(hot) == {"speed_limit": 0.62}
    assert parse_pmset_therm(hot + hot.replace("62", "100")) == {"speed_limit": 1.0}  # the last one is now


def test_vm_stat_counts_what_was_swapped_and_not_what_was_read_from_files():
    said = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        'Pages free:                                     3588.\n"Translation faults":                     7248601833.\n'
        "Pageins:                                   249608879.\nPageouts:                                    3164157.\n"
        "Swapins:                                         100.\nSwapouts:                                         28.\n"
    )
    assert parse_vm_stat(said) == {"swapped_bytes": 128 * 16384}
    assert parse_vm_stat("") == {}


ON_BATTERY = """+-o AppleSmartBattery  <class AppleSmartBattery, id 0x100000aa9, registered, matched, active>
    {
      "ExternalConnected" = No
      "BatteryData" = {"Voltage"=1,"CycleCount"=187}
      "Temperature" = 3071
      "Voltage" = 11441
      "InstantAmperage" = 18446744073709550034
      "IsCharging" = No
    }
"""
PLUGGED = """      "ExternalConnected" = Yes
      "PowerTelemetryData" = {"SystemEnergyConsumed"=4155,"AdapterEfficiencyLoss"=18446744073709551339,"SystemLoad"=14960,"AccumulatedSystemLoad"=2545485601,"SystemPowerIn"=24960,"BatteryPower"=10000}
      "InstantAmperage" = 812
      "IsCharging" = Yes
      "Voltage" = 12555
"""


def test_ioreg_tells_what_the_machine_takes_from_the_battery_though_the_current_has_lost_its_sign():
    assert parse_ioreg(ON_BATTERY) == {"power_watts": 18.1, "power_of": "whole machine, from the battery"}
    old = ON_BATTERY.replace("18446744073709550034", str(2**16 - 1582))  # as OS X 10.9 wrote it
    assert parse_ioreg(old) == parse_ioreg(ON_BATTERY)
    assert parse_ioreg(ON_BATTERY.replace("18446744073709550034", "-1582")) == parse_ioreg(ON_BATTERY)


def test_ioreg_tells_the_load_of_a_machine_that_is_plugged_in_and_not_what_charges():
    assert parse_ioreg(PLUGGED) == {"power_watts": 14.96, "power_of": "whole machine"}
    without_load = PLUGGED.replace('"SystemLoad"=14960,', "")
    assert parse_ioreg(without_load) == {}
    idle = without_load.replace('"IsCharging" = Yes', '"IsCharging" = No')
    assert parse_ioreg(idle) == {"power_watts": 24.96, "power_of": "whole machine"}
    assert parse_ioreg("") == parse_ioreg("no telemetry here") == {}


def test_macmon_tells_the_whole_machine_or_else_the_chip():
    said = '{"all_power":0.256,"ane_power":0.0,"cpu_power":0.252,"sys_power":9.391488075256348,"temp":{"cpu_temp_avg":44.509185791015625,"gpu_temp_avg":0.0}}\n'
    assert parse_macmon(said) == {"power_watts": 9.39, "power_of": "whole machine", "temperature": 44.5}
    chip = parse_macmon(said.replace("9.391488075256348", "0.0"))
    assert chip["power_watts"] == 0.26
    assert "machine" not in chip["power_of"]
    for nonsense in ("", "[]", "{", "null", '{"temp": 3, "sys_power": "much"}', '{"sys_power": NaN}'):
        assert parse_macmon(nonsense) == {}


def test_nvidia_cards_are_added_and_the_hottest_counts():
    assert parse_nvidia("42.13, 61\n7.50, 70\n") == {"gpu_power_watts": 49.63, "gpu_temperature": 70.0}
    assert parse_nvidia("[N/A], 61\n") == {"gpu_temperature": 61.0}
    assert parse_nvidia("NVIDIA-SMI has failed because it couldn't communicate with the driver.\n") == {}


def test_a_sleeping_card_is_not_woken_to_be_asked(tmp_path):
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    assert is_awake(tmp_path, vendor="0x10de")
    write(device, {"vendor": "0x10de", "class": "0x030200", "power/runtime_status": "suspended"})
    assert not is_awake(tmp_path, vendor="0x10de")
    write(device, {"power/runtime_status": "active"})
    assert is_awake(tmp_path, vendor="0x10de")


def test_ps_tells_who_started_whom():
    parents = parse_ps("    1     0\n  300     1\n  301   300\n  302   301\n  400     1\n")["parents"]
    assert sorted(descendants_from_parents(parents, 300)) == [301, 302]
    assert descendants_from_parents({0: 0, 5: 0}, 0) == [5]


# Programs in the background


def test_a_program_is_asked_in_the_background_and_its_answer_taken_later(tmp_path, monkeypatch):
    write_program(tmp_path / "bin/thing", 'echo "$@" >> calls; sleep 0.3; echo 7')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    asked = Asked(["thing", "-x"], lambda text: {"number": int(text)})
    asked.start(0.0)
    assert asked.latest(0.1) == {}
    assert asked.process.poll() is None, "it was waited for"
    asked.process.wait()
    assert asked.latest(5.0) == {"number": 7}
    assert not asked.is_due(9.0)
    assert asked.is_due(11.0)
    asked.start(11.0)
    assert asked.latest(11.1) == {"number": 7}
    asked.process.wait()
    assert Path("calls").read_text().split() == ["-x", "-x"]
    assert asked.latest(600.0) == {}, "an old answer was given for a new one"


def test_a_program_that_hangs_is_killed_and_one_that_fails_is_left_alone_for_longer(tmp_path, monkeypatch):
    write_program(tmp_path / "bin/thing", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    asked = Asked(["thing"], lambda text: {"text": text})
    asked.start(0.0)
    pid = asked.process.pid
    asked.latest(4.0)
    assert psutil.pid_exists(pid)
    asked.latest(6.0)
    asked.process.wait(timeout=10)
    assert asked.latest(11.0) == {}
    assert not asked.is_due(59.0)
    assert asked.is_due(61.0)
    asked.start(61.0)
    again = asked.process.pid
    del asked
    gc.collect()
    assert not psutil.pid_exists(again)


def test_long_answers_are_taken_whole(tmp_path, monkeypatch):
    write_program(tmp_path / "bin/thing", "head -c 300000 /dev/zero")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    asked = Asked(["thing"], lambda text: {"length": len(text)})
    asked.start(0.0)
    asked.process.wait(timeout=10)
    assert asked.latest(1.0) == {"length": 300000}


def test_one_reading_starts_one_program_at_most(tmp_path, monkeypatch):
    for name in ("pmset", "ioreg", "vm_stat"):
        write_program(tmp_path / "bin" / name, f"echo {name} >> calls")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(sys, "platform", "darwin")
    sensors = Sensors(tmp_path)
    for turn in range(5):
        started = [asked for asked in sensors.asked if asked.process]
        assert len(started) == 4 if turn == 0 else len(started) == 1
        for asked in started:
            asked.process.wait()
            asked.latest(time.monotonic())
            asked.ask_again = 0.0 if turn == 0 else float("inf")
        sensors.read()
    assert Path("calls").read_text().split().count("pmset") == 4
    sensors.close()


def test_a_mac_is_read_from_its_programs(tmp_path, monkeypatch):
    for name, text in {"ioreg": ON_BATTERY, "macmon": '{"all_power": 3.5, "sys_power": 0.0}'}.items():
        write_program(tmp_path / "bin" / name, f"cat <<'END'\n{text}\nEND")
    write_program(
        tmp_path / "bin/pmset",
        "if [ $2 = therm ]; then echo 'CPU_Speed_Limit = 80'; else"
        " printf \"Now drawing from 'Battery Power'\\n -InternalBattery-0 (id=1)\\t31%%; discharging\\n\"; fi",
    )
    write_program(
        tmp_path / "bin/vm_stat",
        "printf '(page size of 16384 bytes)\\nSwapins:  1.\\nSwapouts:  1.\\n'",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    sensors = Sensors(tmp_path)
    for asked in sensors.asked:
        if asked.process:
            asked.process.wait()
    readings = sensors.read()
    assert readings["power_watts"] == 18.1, "the chip alone was told though the whole machine is known"
    assert {name: readings[name] for name in ("speed_limit", "battery", "is_plugged", "swapped_bytes")} == {
        "speed_limit": 0.8,
        "battery": 31.0,
        "is_plugged": False,
        "swapped_bytes": 32768,
    }
    monkeypatch.setattr(psutil, "sensors_battery", lambda: {}["no such key"])
    assert read_battery() == Battery(percent=31.0, is_plugged=False)
    sensors.close()


def test_programs_that_cannot_be_started_are_no_error(tmp_path, monkeypatch):
    for name in ("pmset", "ioreg", "macmon", "vm_stat", "nvidia-smi", "ps"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/nowhere/at/all\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "sensors_battery", lambda: {}["no such key"])
    assert Sensors(tmp_path).read()["memory_available"] > 0
    assert read_battery() is None


# This machine


def test_cores_the_process_may_not_use_are_left_out():
    text = "cpu  40 0 0 160 0 0 0 0 0 0\ncpu0 30 0 0 70 0 0 0 0 30 0\ncpu3 10 0 0 80 10 0 0 0 0 0\nintr 1 2\n"
    assert parse_proc_stat(text, {0, 3}, 100) == {0: CoreTime(0.3, 1.0), 3: CoreTime(0.1, 1.0)}
    assert parse_proc_stat(text, {3}, 100).keys() == {3}
    assert share(CoreTime(0, 0), CoreTime(0.3, 1.0)) == 0.3
    assert share(CoreTime(1, 1), CoreTime(1, 1)) == 0.0


def test_this_machine_has_a_share_for_each_core_it_may_use():
    sensors = Sensors()
    time.sleep(0.25)
    readings = sensors.read()
    assert len(readings["cores"]) == num_usable_cores()
    assert all(0 <= core <= 1 for core in readings["cores"])
    assert 0 <= readings["other_cores"] <= num_usable_cores()
    assert 0 < readings["memory_available"] < psutil.virtual_memory().total
    assert readings["swap_used"] >= 0


def seconds_of(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def wait_until_spent(pids: list[int], seconds: float) -> float:
    """Other programs may leave little for these."""
    deadline = time.monotonic() + 60
    while (spent := seconds_of(pids)) < seconds:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return spent


@LINUX
def test_what_this_process_starts_is_not_the_work_of_others():
    sensors = Sensors()
    began = sensors.busy.when
    busy = [
        subprocess.Popen([sys.executable, "-c", BURN.format(seconds=10)]) for _ in range(num_usable_cores())
    ]
    try:
        ours = wait_until_spent([process.pid for process in busy], 0.5 * len(busy))
        others = sensors.read()["other_cores"]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    # However busy the machine is, others had at most what was left of its cores.
    elapsed = sensors.busy.when - began
    assert others * elapsed < len(busy) * elapsed - ours + 0.1 * len(busy)


@LINUX
def test_what_was_started_and_has_ended_is_still_ours():
    sensors = Sensors()
    own = sensors.busy.own
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.3)], check=True)
    sensors.read()
    assert sensors.busy.own - own > 0.3


@LINUX
def test_children_of_children_are_ours():
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN.format(seconds=10)!r}]); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, process_group=0)
    try:
        deadline = time.monotonic() + 10
        while len(found := descendants_from_kernel(process.pid)) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert {process.pid, *found} <= set(descendants_from_kernel(os.getpid()))
        assert found == [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


@LINUX
def test_a_busy_stranger_is_among_the_others():
    # Started by a process that ends at once, so that it is nobody's child here.
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {BURN.format(seconds=10)!r}], stdout=-3, stderr=-3).pid)"
    said = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    stranger = psutil.Process(int(said.stdout))
    try:
        assert stranger.pid not in descendants_from_kernel(os.getpid())
        sensors = Sensors()
        began, before = sensors.busy.when, seconds_of([stranger.pid])
        spent = wait_until_spent([stranger.pid], before + 0.5) - before
        others = sensors.read()["other_cores"]
    finally:
        stranger.kill()
    assert others * (sensors.busy.when - began) > spent - 0.2


@pytest.mark.skipif(not shutil.which("ps"), reason="there is no `ps`")
def test_where_the_kernel_does_not_list_children_ps_does():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sensors = Sensors()
    sensors.processes = [Asked(["ps", "-axo", "pid=,ppid="], parse_ps)]
    sensors.processes[0].start(time.monotonic())
    sensors.processes[0].process.wait()
    assert child.pid in sensors.descendants()
    child.communicate()
    sensors.close()
