"""What this machine is, read without torch: cores, caches, memory, operating system."""

import contextlib
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lapclip.machine.cores import cores_from_kernel, cores_from_sysctl, parse_sysctl

STATUS = Path("/proc/self/status")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Machine:
    """The facts that choices depend on."""

    chip: str
    system: str
    python: str
    num_cores: int
    memory_bytes: int
    available_bytes: int
    num_performance_cores: int | None = None  # physical ones; None where the chip has one kind only
    num_efficiency_cores: int | None = None
    caches: dict[str, int] = field(default_factory=dict)  # bytes by name, as one fast core sees them


def read_machine() -> Machine:
    memory = psutil.virtual_memory()
    said = ask_sysctl()
    cores = cores_from_sysctl(said) if said else cores_from_kernel()
    return Machine(
        chip=said.get("machdep.cpu.brand_string") or read_chip(),
        system=platform.platform(terse=True),
        python=platform.python_version(),
        num_cores=num_usable_cores(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        num_performance_cores=cores.num_performance,
        num_efficiency_cores=cores.num_efficiency,
        caches=cores.caches,
    )


def ask_sysctl() -> dict[str, str]:
    """What macOS says about its hardware, all of it in one call; nothing elsewhere."""
    if sys.platform != "darwin":
        return {}
    asked = subprocess.run(
        ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return parse_sysctl(asked.stdout)


def num_usable_cores() -> int:
    """Cores this process may use, which in a container is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_chip() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_limit_bytes() -> int:
    """What a process may hold at most: the machine's memory, or less in a container that says so."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # not Linux, or "max"
        return min(total, int(CONTAINER_LIMIT.read_text()))
    return total


def memory_now() -> tuple[int, int]:
    """What this process and its children hold, and the most that it has held with what they hold now.

    Now without mapped files, such as a pack, whose pages the system takes back whenever it needs them.
    """
    held = psutil.Process().memory_info()
    workers = (
        child.pid for child in multiprocessing.active_children()
    )  # without a look at every process there is
    children = held_by(psutil.Process(pid) for pid in workers if pid is not None and psutil.pid_exists(pid))
    return held.rss - getattr(held, "shared", 0) + children, own_peak_bytes() + children


def peak_memory_bytes() -> int:
    """Most memory this process has held, and what its children hold now."""
    return own_peak_bytes() + held_by(psutil.Process().children(recursive=True))


def held_by(processes: Iterable[psutil.Process]) -> int:
    held = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it may end while we look
            held += process.memory_info().rss
    return held


def own_peak_bytes() -> int:
    # Linux first: what getrusage says there includes the peak of whoever started this process.
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
