"""The machine: which cores and caches it has, from what real chips say of themselves."""

from pathlib import Path

import pytest

from lapclip.machine.cores import Cores, cores_from_kernel, cores_from_sysctl, parse_ranges, parse_sysctl
from lapclip.machine.hardware import Machine, num_usable_cores, read_machine

M1 = """machdep.cpu.brand_string: Apple M1
hw.ncpu: 8
hw.byteorder: 1234
hw.memsize: 17179869184
hw.perflevel0.physicalcpu: 4
hw.perflevel0.physicalcpu_max: 4
hw.perflevel0.logicalcpu: 4
hw.perflevel0.l1icachesize: 196608
hw.perflevel0.l1dcachesize: 131072
hw.perflevel0.l2cachesize: 12582912
hw.perflevel0.cpusperl2: 4
hw.perflevel1.physicalcpu: 4
hw.perflevel1.l1dcachesize: 65536
hw.perflevel1.l2cachesize: 4194304
hw.optional.arm.FEAT_BF16: 0
hw.cacheconfig: 8 1 4 0 0 0 0 0 0 0
hw.l1dcachesize: 65536
hw.l2cachesize: 4194304
"""
M1_PRO = (
    M1.replace("Apple M1", "Apple M1 Pro")
    .replace("hw.ncpu: 8", "hw.ncpu: 10")
    .replace("hw.perflevel0.physicalcpu: 4", "hw.perflevel0.physicalcpu: 8")
    .replace("hw.perflevel1.physicalcpu: 4", "hw.perflevel1.physicalcpu: 2")
)
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


@pytest.mark.parametrize(("said", "fast", "slow"), [(M1, 4, 4), (M1_PRO, 8, 2)], ids=["M1", "M1 Pro"])
def test_an_apple_chip_tells_fast_cores_from_slow_ones_and_gives_the_caches_of_the_fast(said, fast, slow):
    assert cores_from_sysctl(parse_sysctl(said)) == Cores(fast, slow, {"L1d": 131072, "L2": 12582912})


def test_every_level_below_the_fastest_counts_as_efficiency():
    three = M1_PRO + "hw.perflevel2.physicalcpu: 4\n"
    cores = cores_from_sysctl(parse_sysctl(three))
    assert (cores.num_performance, cores.num_efficiency) == (8, 6)


def test_a_mac_with_one_kind_of_core_names_none():
    assert cores_from_sysctl(parse_sysctl(INTEL_MAC)) == Cores(
        caches={"L1d": 32768, "L2": 262144, "L3": 12582912}
    )


def test_an_intel_hybrid_counts_cores_not_threads(tmp_path):
    """Eight fast cores of two threads each and four slow ones of one."""
    threads = {f"system__cpu__cpu{n}__topology__thread_siblings_list": f"{n & ~1}-{n | 1}" for n in range(16)}
    threads |= {f"system__cpu__cpu{n}__topology__thread_siblings_list": str(n) for n in range(16, 20)}
    caches = cache(
        0,
        ("1", "Data", "48K"),
        ("1", "Instruction", "32K"),
        ("2", "Unified", "1280K"),
        ("3", "Unified", "25600K"),
    )
    folder = files(tmp_path, cpu_core__cpus="0-15", cpu_atom__cpus="16-19", **threads, **caches)
    expected = {"L1d": 48 << 10, "L2": 1280 << 10, "L3": 25600 << 10}
    assert cores_from_kernel(folder) == Cores(8, 4, expected)


def test_an_arm_chip_is_told_apart_by_capacity_and_its_small_cores_come_first(tmp_path):
    capacities = {
        f"system__cpu__cpu{n}__cpu_capacity": str(c) for n, c in enumerate([446] * 4 + [871] * 3 + [1024])
    }
    caches = cache(0, ("1", "Data", "32K")) | cache(4, ("1", "Data", "64K"))
    assert cores_from_kernel(files(tmp_path, **capacities, **caches)) == Cores(4, 4, {"L1d": 65536})


def test_cores_that_are_all_alike_are_of_no_kind(tmp_path):
    folder = files(tmp_path, system__cpu__cpu0__cpu_capacity="1024", system__cpu__cpu1__cpu_capacity="1024")
    assert cores_from_kernel(folder) == Cores()


@pytest.mark.parametrize("odd", ["", "?", "0-", "-1", "7-x", "\0\xff", "0 1"])
def test_odd_or_missing_files_say_nothing_and_stop_nothing(tmp_path, odd):
    folder = files(
        tmp_path,
        cpu_core__cpus=odd,
        cpu_atom__cpus=odd,
        system__cpu__cpu0__cpu_capacity=odd,
        **cache(0, (odd, odd, odd), ("2", "Unified", odd)),
    )
    (folder / "system" / "cpu" / "cpu1" / "cpu_capacity").mkdir(parents=True)
    assert cores_from_kernel(folder) == cores_from_kernel(tmp_path / "none") == Cores()
    assert (
        cores_from_sysctl(parse_sysctl(f"{odd}\nhw.perflevel0.physicalcpu: {odd}\nhw.l2cachesize: 0"))
        == Cores()
    )


def test_a_list_of_cores_may_have_gaps():
    assert parse_ranges("0-2,5,8-9") == {0, 1, 2, 5, 8, 9}


def test_this_machine_is_read_whole():
    machine = read_machine()
    assert machine.chip and machine.memory_bytes > machine.available_bytes > 0
    assert machine.num_cores == num_usable_cores() >= 1
    assert (machine.num_performance_cores is None) == (machine.num_efficiency_cores is None)
    assert all(num_bytes >= 1024 for num_bytes in machine.caches.values())


def test_what_is_not_known_of_a_machine_may_be_left_away():
    machine = Machine("M1", "macOS", "3.11", num_cores=8, memory_bytes=8 * 10**9, available_bytes=4 * 10**9)
    assert machine.num_performance_cores is None and machine.caches == {}
