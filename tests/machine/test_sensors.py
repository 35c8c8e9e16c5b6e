"""Readings of this machine as it is, of sensors in psutil's words, and of other programs from recorded texts."""

import multiprocessing
import os
import plistlib
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from conftest import wait_for

from lapclip.machine import hardware
from lapclip.machine.hardware import num_usable_cores
from lapclip.machine.power import Battery
from lapclip.machine.sensors import (
    BackgroundCommands,
    Command,
    Sensors,
    core_times,
    is_gpu_awake,
    own_seconds,
    parse_nvidia,
    parse_pmset_therm,
    parse_vm_stat,
    read_temperature,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems count differently")
BURN = "import time; began = time.process_time()\nwhile time.process_time() - began < {seconds}: pass"


Chip = namedtuple("Chip", ["label", "current"])


@pytest.mark.parametrize(
    ("chips", "expected"),
    [
        ({"nvme": [("", 91.0)], "coretemp": [("Core 0", 61.0), ("", 64.25)], "acpitz": [("", 88.0)]}, 64.2),
        ({"k10temp": [("Tctl", 90.0), ("Tdie", 70.0)]}, 70.0),  # Tctl is what the fan follows
        ({"nvme": [("", 91.0)], "acpitz": [("", 27.8)]}, 27.8),
        ({"coretemp": [("", -274.0), ("", 0.0), ("", 255.0)]}, None),  # nonsense
    ],
)
def test_the_hottest_sensor_of_the_processor_counts_and_no_other(monkeypatch, chips, expected):
    said = {name: [Chip(*sensor) for sensor in sensors] for name, sensors in chips.items()}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: said, raising=False)
    assert read_temperature() == ({} if expected is None else {"temperature": expected})


def test_what_answers_slowly_is_asked_now_and_then_only(monkeypatch):
    battery = Battery(57.0, False, watts=11.84)
    monkeypatch.setattr("lapclip.machine.sensors.read_battery", lambda root: battery)
    sensors = Sensors()
    expected = {"battery": 57.0, "is_plugged": False, "power_watts": 11.84}
    assert sensors.read().items() >= expected.items()
    battery = Battery(56.0, True)
    assert sensors.read()["battery"] == 57.0
    sensors.slow_read -= 10.0
    assert sensors.read().items() >= {"battery": 56.0, "is_plugged": True}.items()


def test_what_other_programs_print_is_understood():
    quiet = "Note: No thermal warning level has been recorded\nNote: No CPU power status has been recorded\n"
    hot = f"{quiet}2021-07-07 12:32:50 -0400 CPU Power notify\n\tCPU_Speed_Limit \t= 62\n"
    assert parse_pmset_therm(quiet) == {} and parse_pmset_therm(hot) == {"speed_limit": 0.62}
    assert parse_pmset_therm(hot + hot.replace("62", "100")) == {"speed_limit": 1.0}  # the last one is now
    paged = "Pageins:    249608879.\nPageouts:     3164157.\nSwapins:    100.\nSwapouts:    28.\n"
    assert parse_vm_stat(f"(page size of 16384 bytes)\n{paged}") == {"swapped_bytes": 128 * 16384}
    assert parse_vm_stat("") == {}
    assert parse_nvidia("42.13, 61\n7.50, 70\n") == {"gpu_power_watts": 49.63, "gpu_temperature": 70.0}
    assert parse_nvidia("[N/A], 61\n") == {"gpu_temperature": 61.0}
    assert parse_nvidia("NVIDIA-SMI has failed because it couldn't communicate with the driver.\n") == {}


def test_a_sleeping_gpu_is_not_woken_to_be_asked(tmp_path):
    assert is_gpu_awake(tmp_path, "0x10de")
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    (device / "power").mkdir(parents=True)
    for name, text in {"vendor": "0x10de", "class": "0x030200", "power/runtime_status": "suspended"}.items():
        (device / name).write_text(f"{text}\n")
    assert not is_gpu_awake(tmp_path, "0x10de")
    (device / "power/runtime_status").write_text("active\n")
    assert is_gpu_awake(tmp_path, "0x10de")


def write_program(name: str, text: str, shell: str = "/bin/sh") -> None:
    path = Path("bin") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{shell}\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def test_a_program_is_asked_in_the_background_and_its_answer_taken_later():
    write_program("thing", 'echo "$@" >> calls; sleep 0.5; head -c 300000 /dev/zero')
    commands = BackgroundCommands([Command(["thing", "-x"], lambda text: {"length": len(text)})])
    assert commands.read() == {}, "it was waited for"
    commands.thread.join()
    assert commands.read() == {"length": 300000}
    commands.started -= 10.0
    assert commands.read() == {"length": 300000}
    commands.thread.join()
    assert Path("calls").read_text().split() == ["-x", "-x"]
    commands.answered -= 300.0
    assert commands.read() == {}, "an old answer was given for a new one"


def test_a_program_that_hangs_is_killed_and_others_still_answer(monkeypatch):
    monkeypatch.setattr(hardware, "COMMAND_SECONDS", 0.3)
    write_program("hangs", "echo $$ > pid; exec sleep 60")
    write_program("works", "echo 7")
    write_program("broken", "", shell="/nowhere/at/all")
    names = ["hangs", "broken", "missing", "works"]
    commands = BackgroundCommands([Command([name], lambda text: {"number": int(text)}) for name in names])
    commands.thread.join(timeout=10)
    assert commands.read() == {"number": 7}
    assert not psutil.pid_exists(int(Path("pid").read_text()))


def test_a_mac_is_read_from_its_programs(monkeypatch):
    battery = {"ExternalConnected": False, "Voltage": 11441, "InstantAmperage": -1582, "IsCharging": False}
    texts = {
        "ioreg": plistlib.dumps([battery]).decode(),
        "macmon": '{"all_power": 3.5, "sys_power": 0.0}',
        "pmset": "CPU_Speed_Limit = 80",
        "vm_stat": "(page size of 16384 bytes)\nSwapins:  1.\nSwapouts:  1.",
    }
    for name, text in texts.items():
        write_program(name, f"cat <<'END'\n{text}\nEND")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("lapclip.machine.sensors.read_battery", lambda root: Battery(31.0, False))
    sensors = Sensors()
    sensors.commands.thread.join()
    readings = sensors.read()
    assert readings["power_watts"] == 18.1, "the chip alone was told though the whole machine is known"
    expected = {"speed_limit": 0.8, "battery": 31.0, "is_plugged": False, "swapped_bytes": 32768}
    assert readings.items() >= expected.items()


def test_this_machine_has_a_share_for_each_core_it_may_use():
    sensors = Sensors()
    assert "cores" not in sensors.read(), "too soon for a share"
    time.sleep(0.25)
    readings = sensors.read()
    assert len(readings["cores"]) == num_usable_cores()
    assert all(0 <= core <= 1 for core in readings["cores"])
    assert 0 <= readings["other_cores"] <= num_usable_cores()
    assert 0 < readings["memory_available"] < psutil.virtual_memory().total
    assert readings["swap_used"] >= 0


def test_a_guest_is_not_counted_twice_and_unusable_cores_not_at_all(monkeypatch):
    names = "user nice system idle iowait irq softirq steal guest guest_nice"
    core = namedtuple("core", names)(30, 0, 0, 60, 10, 0, 0, 0, 30, 0)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [core] * 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    assert core_times() == [(30, 100), (30, 100)]


@LINUX
def test_what_this_process_starts_is_its_own_while_it_runs_and_after():
    worker = multiprocessing.get_context("fork").Process(target=exec, args=(BURN.format(seconds=60),))
    worker.start()
    before = own_seconds()
    wait_for(lambda: own_seconds() - before > 0.3)
    worker.kill()
    worker.join()
    assert own_seconds() - before > 0.28


@LINUX
def test_a_busy_stranger_is_among_the_others():
    # Started by a process that ends at once, so that it is nobody's child here.
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {BURN.format(seconds=10)!r}], stdout=-3, stderr=-3).pid)"
    said = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    stranger = psutil.Process(int(said.stdout))
    try:
        sensors = Sensors()
        began, before = sensors.cores.when, sum(stranger.cpu_times()[:2])
        wait_for(lambda: sum(stranger.cpu_times()[:2]) - before > 0.5)
        others = sensors.read()["other_cores"]
    finally:
        stranger.kill()
    assert others * (sensors.cores.when - began) > 0.3
