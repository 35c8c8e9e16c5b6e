"""Measures the CPU time of monitoring (writing, profiling and reading), relative to that of training.

    python benchmarks/monitoring.py                         # `nano` and `tiny`, a minute each, about four minutes
    python benchmarks/monitoring.py --sizes nano --seconds 30 --json

An actual `lapclip train` runs in a separate process, with a timer around every function that exists only for
monitoring. (The difference between runs with and without monitoring is smaller than the variation between runs.)
Meanwhile `lapclip watch` reads the run on its own terminal, and `lapclip watch --web` with one page connected; the
operating system counts the CPU time of both processes. The time of a function is the CPU time of its thread, excluding
timed functions that it calls. Not counted: counting the distinct captions of a batch, some microseconds per step.
"""

import argparse
import contextlib
import functools
import http.client
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import psutil

from lapclip.runs.events import Started, Step, read_events

SECONDS_TO_SETTLE = 8.0  # before the steady part of a reader is measured: it loads, and reads what there is
WIDTH, HEIGHT = 140, 45
WRITERS = {
    "write": "events to the file",
    "inspect": "one step looked at closely",
    "sensors": "sensors of the machine",
    "diagnose": "diagnosis",
    "snapshot": "snapshots",
    "evaluate": "negatives and loss of the pool",
    "line": "the line `train` shows",
}
READERS = {"terminal": "`lapclip watch`", "web": "`lapclip watch --web`, one page"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["nano", "tiny"])
    parser.add_argument("--seconds", type=float, default=60, help="seconds of training per size")
    parser.add_argument("--source", default="synthetic")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", metavar="FILE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        train_with_clocks(Path(asked.inside), asked.sizes[0], asked.source, asked.seconds)
        return
    results = {}
    for size in asked.sizes:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            results[size] = measure(size, asked.source, asked.seconds)
    if asked.json:
        print(json.dumps(results))
        return
    for size, result in results.items():
        show(size, result)


def show(size: str, result: dict[str, Any]) -> None:
    training = result["training"]
    print(
        f"{size}: {training['seconds']:.0f} s of training, {training['steps']:,} steps,"
        f" {training['cpu_seconds']:.1f} processor seconds; events come to {result['mb_per_hour']:.1f} MB an hour"
    )
    for name, words in WRITERS.items():
        row = result["writer"][name]
        print(f"  {words:34}{row['cpu_seconds']:8.3f} s {row['share']:9.3%}   {row['calls']:,} calls")
    print(f"  {'writer, total':34}{result['writer_cpu_seconds']:8.3f} s {result['writer_share']:9.3%}")
    for name, words in READERS.items():
        row = result["readers"][name]
        print(
            f"  {words:34}{row['cpu_seconds']:8.3f} s {row['share']:9.3%}"
            f"   in {row['seconds']:.0f} steady seconds; {row['start_cpu_seconds']:.2f} s to start"
        )


# in the process that trains


class Clocks:
    """Processor seconds by name; what a timed function calls is counted for the inner one only."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.inner = threading.local()  # seconds of timed functions inside the one that runs

    def around(self, owner: Any, attribute: str, name: str) -> None:
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            outer, self.inner.seconds = getattr(self.inner, "seconds", 0.0), 0.0
            started = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                took = time.thread_time() - started
                self.seconds[name] += took - self.inner.seconds
                self.calls[name] += 1
                self.inner.seconds = outer + took

        setattr(owner, attribute, timed)


def train_with_clocks(file: Path, size: str, source: str, seconds: float) -> None:
    """Trains as the command does, and writes down what watching cost between `Started` and `Finished`."""
    from lapclip.cli import run_command
    from lapclip.diagnose.diagnosis import Diagnosis
    from lapclip.evaluate import retrieval as evaluate
    from lapclip.machine.sensors import Sensors
    from lapclip.runs.events import Event, Finished
    from lapclip.runs.run import Run
    from lapclip.step import profile
    from lapclip.step.profile import Inspector
    from lapclip.train import loop as train
    from lapclip.view.lines import Screen

    clocks = Clocks()
    about: dict[str, Any] = {}
    write = Run.write

    def write_and_note(run: Run, event: Event) -> None:
        write(run, event)
        if isinstance(event, Started):
            clocks.seconds.clear()
            clocks.calls.clear()
            about["started"] = cpu_seconds(os.getpid())
        elif isinstance(event, Finished):
            about["training"] = {
                "cpu_seconds": cpu_seconds(os.getpid()) - about.pop("started"),
                "seconds": event.seconds,
                "steps": event.step,
                "pairs_per_second": event.pairs_per_second,
            }

    for owner, attribute, name in (
        (Run, "write", "write"),
        (Inspector, "profiler", "inspect"),
        (Inspector, "inspected", "inspect"),
        (profile.StepProfiler, "lap", "inspect"),
        (profile.StepProfiler, "record_gradients", "inspect"),
        (profile.SavedTensor, "__init__", "inspect"),
        (profile.SavedTensor, "__del__", "inspect"),
        (Sensors, "read", "sensors"),
        (Diagnosis, "look", "diagnose"),
        (Diagnosis, "at_end", "diagnose"),
        (train, "take_snapshot", "snapshot"),
        (train, "pool_loss", "evaluate"),
        (evaluate, "accuracy_by_difficulty", "evaluate"),
        (Screen, "show", "line"),
    ):
        clocks.around(owner, attribute, name)
    write, Run.write = Run.write, write_and_note  # type: ignore[method-assign]
    code = run_command(["train", source, "--size", size, "--minutes", str(seconds / 60), "--run", "watched"])
    assert code == 0
    about["clocks"] = {
        name: {"cpu_seconds": clocks.seconds[name], "calls": clocks.calls[name]} for name in WRITERS
    }
    file.write_text(json.dumps(about))


# in the process that looks on


def measure(size: str, source: str, seconds: float) -> dict[str, Any]:
    """One run of a size, with both readers beside it."""
    events, result = Path("runs/watched/events.jsonl"), Path("result.json")
    this = [sys.executable, str(Path(__file__).resolve()), "--inside", str(result)]
    asked = ["--sizes", size, "--source", source, "--seconds", str(seconds)]
    readers: dict[str, dict[str, float]] = {}
    with ended([*this, *asked], "train.txt") as training:
        wait_for(training, lambda: any(isinstance(event, Step) for event in read_events(events)))
        started, first_bytes = time.monotonic(), events.stat().st_size
        with on_a_terminal("watch", "watched") as terminal, as_a_page("watched") as web:
            processes = {"terminal": terminal, "web": web}
            time.sleep(min(SECONDS_TO_SETTLE, seconds / 4))
            before = {name: cpu_seconds(pid) for name, pid in processes.items()}
            settled = time.monotonic()
            while training.poll() is None and time.monotonic() - started < seconds * 0.9:
                time.sleep(0.2)
            steady = time.monotonic() - settled
            grown = (events.stat().st_size - first_bytes) / (time.monotonic() - started)
            for name, pid in processes.items():
                spent = cpu_seconds(pid) - before[name]
                readers[name] = {"cpu_seconds": spent, "seconds": steady, "start_cpu_seconds": before[name]}
        assert training.wait(timeout=600) == 0, Path("train.txt").read_text()[-2000:]
    about = json.loads(result.read_text())
    training_cpu = about["training"]["cpu_seconds"]
    per_second = training_cpu / about["training"]["seconds"]
    writer = {
        name: row | {"share": row["cpu_seconds"] / training_cpu} for name, row in about["clocks"].items()
    }
    return {
        "training": about["training"],
        "writer": writer,
        "writer_cpu_seconds": sum(row["cpu_seconds"] for row in writer.values()),
        "writer_share": sum(row["share"] for row in writer.values()),
        "readers": {
            name: row | {"share": row["cpu_seconds"] / row["seconds"] / per_second}
            for name, row in readers.items()
        },
        "mb_per_hour": grown * 3600 / 1e6,
    }


def cpu_seconds(pid: int) -> float:
    """Of a process and the processes it has started, so far."""
    process, total = psutil.Process(pid), 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def wait_for(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, Path("train.txt").read_text()[-2000:]
        time.sleep(0.2)


@contextlib.contextmanager
def ended(command: list[str], said: str, **options: Any) -> Iterator[subprocess.Popen]:
    """A process that does not outlive the block; what it says goes into a file."""
    with Path(said).open("wb") as file:
        settings = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file} | options
        process = subprocess.Popen(command, **settings)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def on_a_terminal(*arguments: str) -> Iterator[int]:
    """The command on a terminal of its own, which is read as fast as it is written; its process."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    command = [sys.executable, "-m", "lapclip", *arguments]
    environment = {**os.environ, "TERM": "xterm-256color"}
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with ended(command, "terminal.txt", env=environment, start_new_session=True, **ends) as process:
        os.close(theirs)
        num_bytes = [0]
        threading.Thread(target=drain, args=(ours, num_bytes), daemon=True).start()
        yield process.pid
        assert process.poll() is None and num_bytes[0] > 10_000, "it did not show the run"
    os.close(ours)


def drain(handle: int, num_bytes: list[int]) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while portion := os.read(handle, 1 << 16):
            num_bytes[0] += len(portion)


@contextlib.contextmanager
def as_a_page(run: str) -> Iterator[int]:
    """The page's server with one stream connected; its process."""
    command = [sys.executable, "-m", "lapclip", "watch", run, "--web", "--no-open"]
    with ended(command, "web.txt") as process:
        address = None
        while address is None:
            assert process.poll() is None, Path("web.txt").read_text()
            time.sleep(0.1)
            address = re.search(r"http://([\w.]+:\d+)", Path("web.txt").read_text())
        page = http.client.HTTPConnection(address[1], timeout=60)
        page.request("GET", f"/stream?run={run}")
        answer = page.getresponse()
        assert answer.status == 200, answer.read()
        num_bytes = [0]
        threading.Thread(target=listen, args=(answer, num_bytes), daemon=True).start()
        yield process.pid
        assert num_bytes[0] > 1000, "nothing was streamed"


def listen(answer: http.client.HTTPResponse, num_bytes: list[int]) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):  # it ends with its server
        while portion := answer.read1(1 << 16):
            num_bytes[0] += len(portion)


if __name__ == "__main__":
    main()
