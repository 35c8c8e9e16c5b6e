"""What this machine is: cores, caches, memory, operating system, and the versions of the packages that compute.

Importing this file is cheap (no torch, no psutil): every command does, before it knows what it will need.
"""

import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

KERNEL_FOLDER = Path("/sys/devices")
STATUS = Path("/proc/self/status")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
FAST_SHARE = 0.5  # of the largest capacity: medium cores are fast, and equal cores may be rated unequally
COMMAND_SECONDS = 5.0  # then a program is killed
PACKAGES = ("torch", "numpy", "pillow", "safetensors", "tokenizers")  # whose versions can change a number


@dataclass(frozen=True)
class Machine:
    """The facts that choices depend on."""

    chip: str
    system: str
    python: str
    num_cores: int
    memory_bytes: int
    available_bytes: int
    num_performance_cores: int | None = None  # physical ones; None where there is one kind only
    num_efficiency_cores: int | None = None
    caches: dict[str, int] = field(default_factory=dict)  # in bytes, as one fast core sees them


Cores = tuple[int | None, int | None, dict[str, int]]  # the last three of `Machine`


def read_machine() -> Machine:
    import psutil

    memory = psutil.virtual_memory()
    system, python = platform.platform(terse=True), platform.python_version()
    if sys.platform == "darwin":
        sysctl = parse_sysctl(run_command(["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw"]))
        chip, cores = sysctl.get("machdep.cpu.brand_string", ""), cores_from_sysctl(sysctl)
    else:
        model = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
        chip, cores = model[1].strip() if model else "", cores_from_kernel()
    chip = chip or platform.processor() or platform.machine()
    return Machine(chip, system, python, num_usable_cores(), memory.total, memory.available, *cores)


def num_usable_cores() -> int:
    """Cores this process may use; in a container these can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_sysctl(text: str) -> dict[str, str]:
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def run_command(command: list[str]) -> str:
    """What a program prints; empty if it cannot be started or takes too long."""
    import subprocess

    with suppress(OSError, subprocess.TimeoutExpired):
        # By its path and without `close_fds` it is spawned, not forked: forking takes long with much memory.
        done = subprocess.run(  # noqa: S603 found in the user's own PATH
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=COMMAND_SECONDS,
            close_fds=False,
        )
        return done.stdout.decode(errors="replace")
    return ""


def cores_from_sysctl(sysctl: dict[str, str]) -> Cores:
    """On macOS level 0 is the fastest kind; every other level counts as efficiency."""
    numbers = {name: int(value) for name, value in sysctl.items() if value.isdecimal()}
    levels = [numbers.get(f"hw.perflevel{level}.physicalcpu", 0) for level in range(8)]
    caches = {}
    for level in ("L1d", "L2", "L3"):
        for name in ("hw.", "hw.perflevel0."):  # the name without a level describes the slowest kind of core
            if num_bytes := numbers.get(f"{name}{level.lower()}cachesize"):
                caches[level] = num_bytes
    has_kinds = levels[0] and any(levels[1:])
    return (levels[0], sum(levels[1:]), caches) if has_kinds else (None, None, caches)


def cores_from_kernel(folder: Path = KERNEL_FOLDER) -> Cores:
    """On Linux: the two lists of an Intel hybrid, or the capacity of each Arm core."""
    cpus = folder / "system" / "cpu"
    fast, slow = read_cpu_list(folder / "cpu_core/cpus"), read_cpu_list(folder / "cpu_atom/cpus")
    if not (fast and slow):
        texts = {file.parent.name[3:]: read_text(file) for file in cpus.glob("cpu[0-9]*/cpu_capacity")}
        capacities = {int(number): int(text) for number, text in texts.items() if text.isdecimal()}
        enough = max(capacities.values(), default=0) * FAST_SHARE
        fast = {number for number, capacity in capacities.items() if capacity >= enough}
        slow = capacities.keys() - fast
    # The first core may be a slow one.
    caches = read_caches(cpus / f"cpu{min(fast, default=0)}" / "cache")
    if not (fast and slow):
        return None, None, caches
    return count_physical(fast, cpus), count_physical(slow, cpus), caches


def read_cpu_list(path: Path) -> set[int]:
    """The numbers of a list such as `0-7,16`; empty for anything else."""
    text = read_text(path)
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return set()
    bounds = (part.split("-") for part in text.split(","))
    return {number for ends in bounds for number in range(int(ends[0]), int(ends[-1]) + 1)}


def count_physical(numbers: set[int], cpus: Path) -> int:
    """Physical cores behind these numbers: two hardware threads of one core count once."""
    siblings = (read_cpu_list(cpus / f"cpu{n}/topology/thread_siblings_list") | {n} for n in numbers)
    return len({min(threads) for threads in siblings})


def read_caches(folder: Path) -> dict[str, int]:
    caches = {}
    for index in sorted(folder.glob("index*")):
        level, kind = read_text(index / "level"), read_text(index / "type")
        size = re.fullmatch(r"(\d+)([KMG]?)", read_text(index / "size"))
        if level.isdecimal() and kind in ("Data", "Unified") and size:
            caches[f"L{level}d" if kind == "Data" else f"L{level}"] = int(size[1]) * UNITS[size[2]]
    return caches


def read_text(path: Path) -> str:
    """The text of a small file of the kernel, stripped; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def memory_limit_bytes() -> int:
    """The most a process may hold: the machine's memory, or the limit of its container."""
    import psutil

    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # not Linux, or "max"
        return min(total, int(CONTAINER_LIMIT.read_text()))
    return total


def memory_now() -> tuple[int, int]:
    """Bytes that this process and its workers hold, and the peak of this process plus what the workers hold now.

    The first does not count mapped files, such as a pack: the system reclaims their pages whenever it needs them.
    """
    import psutil

    held, workers = psutil.Process().memory_info(), 0
    for process in worker_processes():
        with suppress(psutil.Error):  # it may have ended
            workers += process.memory_info().rss
    return held.rss - getattr(held, "shared", 0) + workers, own_peak_bytes() + workers


def peak_memory_bytes() -> int:
    """The peak of this process, plus what its workers hold now."""
    return memory_now()[1]


def reset_peak_memory() -> None:
    """Measures the peak of this process from here on, where the system can do that (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def worker_processes() -> list["psutil.Process"]:
    """The processes `multiprocessing` started; unlike psutil's `children`, found without a scan of all processes."""
    import multiprocessing

    import psutil

    pids = [child.pid for child in multiprocessing.active_children()]
    return [psutil.Process(pid) for pid in pids if pid is not None and psutil.pid_exists(pid)]


def own_peak_bytes() -> int:
    # Linux first: there getrusage includes the peak of the process that started this one.
    if peak := re.search(r"^VmHWM:\s*(\d+)", read_text(STATUS), re.MULTILINE):
        return int(peak[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def limit_openmp_spinning() -> None:
    """Lets waiting OpenMP threads sleep soon. Call it before torch is imported; a value that is already set stays.

    By default they spin, and beside another busy program that made training several times slower. Measured on Linux
    only, where an idle machine loses nothing.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def versions() -> dict[str, Any]:
    """Versions of lapclip, of its checkout if it runs from one, and of the packages that compute."""
    computing = {package: version_of(package) for package in PACKAGES}
    return {"lapclip": version_of("lapclip"), "commit": commit(), "versions": computing}


def version_of(package: str) -> str | None:
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def commit() -> str | None:
    """The commit of the checkout that lapclip runs from, marked `-dirty` when files differ from it."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return run_command(command).strip() or None
