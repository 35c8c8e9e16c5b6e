"""The machine: which cores and caches it has, from what real chips say of themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

from lapclip.machine.hardware import (
    cores_from_kernel,
    cores_from_sysctl,
    num_usable_cores,
    parse_sysctl,
    peak_memory_bytes,
    read_cpu_list,
    read_machine,
    versions,
)

M1 = """machdep.cpu.brand_string: Apple M1
hw.perflevel0.physicalcpu: 4
hw.perflevel0.physicalcpu_max: 4
hw.perflevel0.l1dcachesize: 131072
hw.perflevel0.l2cachesize: 12582912
hw.perflevel1.physicalcpu: 4
hw.cacheconfig: 8 1 4 0 0 0 0 0 0 0
hw.l1dcachesize: 65536
hw.l2cachesize: 4194304
"""
INTEL_MAC = """machdep.cpu.brand_string: Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz
hw.physicalcpu: 6
hw.l1dcachesize: 32768
hw.l2cachesize: 262144
hw.l3cachesize: 12582912
"""


def files(folder: Path, **texts: str) -> Path:
    """A kernel's folder; two underscores stand for a slash."""
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


def cache(cpu: int, *sizes: tuple[str, str, str]) -> dict[str, str]:
    parts = [zip(("level", "type", "size"), size, strict=True) for size in sizes]
    return {
        f"system__cpu__cpu{cpu}__cache__index{number}__{name}": text
        for number, part in enumerate(parts)
        for name, text in part
    }


def test_a_mac_tells_fast_cores_from_slow_ones_and_gives_the_caches_of_the_fast():
    caches = {"L1d": 131072, "L2": 12582912}
    assert cores_from_sysctl(parse_sysctl(M1)) == (4, 4, caches)
    assert cores_from_sysctl(parse_sysctl(M1 + "hw.perflevel2.physicalcpu: 2\n")) == (4, 6, caches)
    intel = {"L1d": 32768, "L2": 262144, "L3": 12582912}
    assert cores_from_sysctl(parse_sysctl(INTEL_MAC)) == (None, None, intel)


def test_an_intel_hybrid_counts_cores_not_threads(tmp_path):
    """Eight fast cores of two threads each and four slow ones of one."""
    threads = {f"system__cpu__cpu{n}__topology__thread_siblings_list": f"{n & ~1}-{n | 1}" for n in range(16)}
    threads |= {f"system__cpu__cpu{n}__topology__thread_siblings_list": str(n) for n in range(16, 20)}
    first = (("1", "Data", "48K"), ("1", "Instruction", "32K"))
    caches = cache(0, *first, ("2", "Unified", "1280K"), ("3", "Unified", "25600K"))
    folder = files(tmp_path, cpu_core__cpus="0-15", cpu_atom__cpus="16-19", **threads, **caches)
    expected = {"L1d": 48 << 10, "L2": 1280 << 10, "L3": 25600 << 10}
    assert cores_from_kernel(folder) == (8, 4, expected)


def test_an_arm_chip_is_told_apart_by_capacity_and_its_small_cores_come_first(tmp_path):
    capacities = {
        f"system__cpu__cpu{n}__cpu_capacity": str(c) for n, c in enumerate([446] * 4 + [871] * 3 + [1024])
    }
    caches = cache(0, ("1", "Data", "32K")) | cache(4, ("1", "Data", "64K"))
    assert cores_from_kernel(files(tmp_path, **capacities, **caches)) == (4, 4, {"L1d": 65536})


def test_cores_that_are_all_alike_are_of_no_kind_and_lists_may_have_gaps(tmp_path):
    folder = files(tmp_path, system__cpu__cpu0__cpu_capacity="1024", system__cpu__cpu1__cpu_capacity="1024")
    assert cores_from_kernel(folder) == (None, None, {})
    assert read_cpu_list(files(tmp_path, cpus="0-2,5,8-9") / "cpus") == {0, 1, 2, 5, 8, 9}


@pytest.mark.parametrize("odd", ["", "7-x"])
def test_odd_or_missing_files_say_nothing_and_stop_nothing(tmp_path, odd):
    names = ("cpu_core__cpus", "cpu_atom__cpus", "system__cpu__cpu0__cpu_capacity")
    caches = cache(0, (odd, odd, odd), ("2", "Unified", odd))
    folder = files(tmp_path, **dict.fromkeys(names, odd), **caches)
    (folder / "system" / "cpu" / "cpu1" / "cpu_capacity").mkdir(parents=True)
    assert cores_from_kernel(folder) == cores_from_kernel(tmp_path / "none") == (None, None, {})
    said = parse_sysctl(f"{odd}\nhw.perflevel0.physicalcpu: {odd}\nhw.l2cachesize: 0")
    assert cores_from_sysctl(said) == (None, None, {})


def test_this_machine_is_read_whole_with_the_versions_that_can_change_a_number():
    machine = read_machine()
    assert machine.chip and machine.memory_bytes > machine.available_bytes > 0
    assert machine.num_cores == num_usable_cores() >= 1
    assert (machine.num_performance_cores is None) == (machine.num_efficiency_cores is None)
    found = versions()
    assert found["versions"]["torch"] and found["versions"].keys() >= {"numpy", "tokenizers"}
    assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) == 40


def test_peak_memory_counts_what_was_held_and_given_back():
    before = peak_memory_bytes()
    block = bytearray(b"x" * 300_000_000)
    del block
    has_grown = peak_memory_bytes() > before + 200e6
    assert has_grown or before > 1e9, "a suite that has held more already shows nothing"


def test_importing_the_package_is_cheap():
    program = (
        "import sys, lapclip; from lapclip.machine.hardware import limit_openmp_spinning as limit; limit()\n"
        "print(sorted({'torch', 'numpy', 'psutil', 'subprocess', 'multiprocessing'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
