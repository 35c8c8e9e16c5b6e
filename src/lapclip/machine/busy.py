"""How busy the cores are, and how much of that is this process with everything it started."""

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from lapclip.machine.sensor_files import read_file, read_text

SHORTEST_SECONDS = 0.1  # the kernel counts in hundredths of a second


class CoreTime(NamedTuple):
    """Seconds since the machine started."""

    busy: float
    total: float


class Busy:
    """The share of each core in use since the reading before; cores this process may not use are left out."""

    def __init__(self) -> None:
        self.when = float("-inf")
        self.cores: dict[int, CoreTime] = {}
        self.own = 0.0

    def begin(self, descendants: Iterable[int]) -> None:
        self.when, self.cores, self.own = time.monotonic(), read_core_times(), own_seconds(descendants)

    def read(self, now: float, descendants: Iterable[int]) -> dict[str, Any]:
        elapsed = now - self.when
        if elapsed < SHORTEST_SECONDS:
            return {}
        before, own_before = self.cores, self.own
        self.when, self.cores, self.own = now, read_core_times(), own_seconds(descendants)
        both = sorted(before.keys() & self.cores.keys())
        if not both:
            return {}
        busy = sum(self.cores[core].busy - before[core].busy for core in both)
        others = (busy - (self.own - own_before)) / elapsed
        return {
            "cores": [share(before[core], self.cores[core]) for core in both],
            "other_cores": round(min(max(others, 0.0), len(both)), 3),
        }


def share(before: CoreTime, after: CoreTime) -> float:
    total = after.total - before.total
    return round(min(max((after.busy - before.busy) / total, 0.0), 1.0), 3) if total > 0 else 0.0


def read_core_times() -> dict[int, CoreTime]:
    """Times of each core this process may use, by the core's number; time stolen by a host counts as busy."""
    if sys.platform != "linux":
        times = enumerate(psutil.cpu_times(percpu=True))
        return {number: CoreTime(sum(core) - core.idle, sum(core)) for number, core in times}
    return parse_proc_stat(read_file("/proc/stat"), os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK"))


def parse_proc_stat(text: str, usable: set[int], ticks_a_second: int) -> dict[int, CoreTime]:
    cores = {}
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in usable:
            # user nice system idle iowait irq softirq steal; the two for guests are in user and nice already.
            ticks = [int(field) for field in fields[:8]]
            total = sum(ticks)
            cores[int(name[3:])] = CoreTime(
                (total - ticks[3] - ticks[4]) / ticks_a_second, total / ticks_a_second
            )
    return cores


def own_seconds(descendants: Iterable[int]) -> float:
    """Processor time of this process, of what it started and has waited for, and of those still there."""
    waited_for = os.times()
    seconds = time.process_time() + waited_for.children_user + waited_for.children_system
    for pid in descendants:
        with suppress(psutil.Error, OSError, ValueError, IndexError):  # it may end while we look
            seconds += (
                seconds_from_kernel(pid)
                if sys.platform == "linux"
                else sum(psutil.Process(pid).cpu_times()[:2])
            )
    return seconds


def seconds_from_kernel(pid: int) -> float:
    fields = read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()  # a name may hold spaces and brackets
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def descendants_from_kernel(pid: int) -> list[int]:
    """Everything a process started that is still there; Linux lists children by the thread that started them."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = [
                    int(child) for child in read_text(f"/proc/{parent}/task/{thread}/children").split()
                ]
                waiting += children
                found += children
    return found


def descendants_from_parents(parents: dict[int, int], pid: int) -> list[int]:
    """The same from a table of each process's parent."""
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent and child != parent]
    return found[1:]
