"""The runs of a folder, without torch: which there are, how each one stands, how two differ, and removing one.

How a run stands follows from its lock, which the system keeps, and from the end of its events.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from lapclip.errors import UserError
from lapclip.files import Held
from lapclip.runs.events import (
    LONGEST_LINE,
    VERSION,
    Continued,
    Evaluated,
    Event,
    Failed,
    Finished,
    Paused,
    Started,
    Step,
    from_line,
)
from lapclip.runs.run import RUNS, Run, is_leftover, is_run

State = Literal["running", "paused", "finished", "stopped", "failed", "crashed"]
PORTION = 1 << 16  # bytes read from the end of the events; more only while something is missing
HEAD = 1 << 13
MOST_CLOCK_SHIFT = 10  # seconds that a clock may be set, and a process still is the same


@dataclass(frozen=True)
class Status:
    """How a run stands."""

    name: str
    path: Path
    state: State
    pid: int | None  # of the process that owns it now
    step: int
    steps: int | None  # in all; under a budget of minutes an estimate
    progress: float  # 0 to 1
    recall_1: float | None  # words -> image, of the best checkpoint so far
    seconds_left: float | None  # while it runs
    message: str  # of a failure
    hint: str
    updated: float | None  # time of its last event
    started: float | None  # time of its first event
    seconds: float  # of training
    is_preparing: bool  # running, and not yet training

    @property
    def is_alive(self) -> bool:
        return self.state in ("running", "paused")


def all_runs(folder: Path = RUNS) -> list[Run]:
    """Every run of a folder, those being set up too; the newest first."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = folder / entry.name
                if entry.is_dir() and not entry.name.startswith(".") and is_run(path):
                    found.append((last_change(path), entry.name, Run(path)))
    except OSError:
        return []
    return [run for _, _, run in sorted(found, key=lambda row: row[:2], reverse=True)]


def last_change(path: Path) -> float:
    """When something last happened to a run."""
    times = [0.0]
    for name in ("events.jsonl", "config.toml", "lock"):
        try:
            times.append(os.stat(path / name).st_mtime)
        except OSError:
            continue
    return max(times)


def newest_run(folder: Path = RUNS) -> Run | None:
    """The run that is being trained; of several, or none, the one where something happened last."""
    runs = all_runs(folder)
    return next((run for run in runs if run.owner() is not None), runs[0] if runs else None)


def status_of(run: Run) -> Status:
    """How a run stands now."""
    lock = run.read_lock()  # first: what is written while we read makes it newer, never older
    end = read_end(run.path / "events.jsonl")
    state = state_of(lock, end)
    failed = None
    if state == "failed":
        failed = said_in(lock) or end.failed
    step, steps, progress = how_far(end, state)
    return Status(
        name=run.name,
        path=run.path,
        state=state,
        pid=lock.owner,
        step=step,
        steps=steps,
        progress=progress,
        recall_1=best_recall(end),
        seconds_left=seconds_left(lock, end, state),
        message=failed.message if failed else "",
        hint=failed.hint if failed else "",
        updated=max((e.time for e in (end.last, said_in(lock)) if e is not None), default=None),
        started=first_time(run.path / "events.jsonl"),
        seconds=end.seconds,
        is_preparing=state == "running" and not has_begun(lock, end),
    )


def has_begun(lock: Held, end: "End") -> bool:
    """Whether the process that holds a run has said a word yet."""
    return end.last is not None and (lock.taken is None or end.last.time >= lock.taken)


@dataclass
class End:
    """The last event of each kind that counts, as far as the end of the file shows them."""

    last: Event | None = None
    last_with_step: int | None = None
    started: Started | None = None
    step: Step | None = None  # since the last start
    best: Evaluated | None = None
    waiting: Event | None = None  # `Paused`, unless something came after it
    finished: Finished | None = None  # if that was last
    failed: Failed | None = None  # if that was last

    @property
    def seconds(self) -> float:
        newest = self.finished or self.step or self.started
        return newest.seconds if newest else 0.0

    @property
    def is_enough(self) -> bool:
        """Whether what lies further back would change nothing."""
        if self.finished is not None and self.finished.reason == "budget":
            return True
        has_recall = self.best is not None or (self.finished is not None and self.finished.recall is not None)
        return has_recall and (self.step is not None or self.started is not None)


def read_end(path: Path) -> End:
    """Reads backwards until nothing is missing; a torn last line is passed over."""
    end = End()
    for event in backwards(path):
        end.last = end.last or event
        if isinstance(event, (Paused, Continued, Step, Started)):
            end.waiting = end.waiting or event
        if end.last_with_step is None and hasattr(event, "step"):
            end.last_with_step = event.step
        match event:
            case Finished() if event is end.last:
                end.finished = event
            case Failed() if event is end.last:
                end.failed = event
            case Started():
                end.started = end.started or event
            case Step() if end.started is None:
                end.step = end.step or event
            case Evaluated() if event.is_best:
                end.best = end.best or event
            case _:
                pass
        if end.is_enough:
            break
    return end


NEEDED = tuple(f'"event":"{kind}"'.encode() for kind in ("Started", "Evaluated"))


def backwards(path: Path) -> Iterator[Event]:
    """The events of a file, the last one first; further back than a portion only the kinds that are rare."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        place = file.seek(0, os.SEEK_END)
        rest, is_near, portion = b"", True, PORTION
        while place > 0:
            size = min(portion, place)
            place -= size
            file.seek(place)
            first, *lines = (file.read(size) + rest).split(b"\n")
            if place == 0:
                lines = [first, *lines]
            rest, has_step = first if len(first) <= LONGEST_LINE else b"", False
            for line in reversed(lines):
                if is_near or any(kind in line[:100] for kind in NEEDED):
                    event = from_line(line) if line else None
                    if event is not None:
                        has_step = has_step or isinstance(event, (Step, Started, Finished))
                        yield event
            is_near = is_near and not has_step
            portion = min(2 * portion, 1 << 22)


def said_in(lock: Held) -> Failed | None:
    """The failure that could only be written into the lock: the disk was full."""
    event = from_line(json.dumps({"version": VERSION, "event": "Failed"} | lock.said)) if lock.said else None
    return event if isinstance(event, Failed) else None


def state_of(lock: Held, end: End) -> State:
    """The state that a lock and the last events amount to."""
    # What was written before the lock was taken is about an earlier process.
    last = end.last if end.last and (lock.taken is None or end.last.time >= lock.taken) else None
    if lock.owner is not None:
        return "paused" if last and isinstance(end.waiting, Paused) else "running"
    if said_in(lock) is not None:
        return "failed"
    if lock.pid is not None and last is None:
        return "crashed"  # it took the run, and was gone before it could say a word
    match last:
        case None:
            return "stopped"  # set up, or not even that, and let go
        case Finished(reason="budget"):
            return "finished"
        case Finished():
            return "stopped"
        case Failed():
            return "failed"
    return "crashed"


def how_far(end: End, state: State) -> tuple[int, int | None, float]:
    """Step, steps in all, and share done."""
    step = end.last_with_step or 0
    if state == "finished":
        return step, step, 1.0
    steps, progress = None, 0.0
    if end.step is not None and end.step.progress > 0:
        steps, progress = round(end.step.step / end.step.progress), end.step.progress
    elif end.started is not None:
        steps = end.started.total_steps
        if steps:
            progress = min(1.0, step / steps)
        elif end.started.minutes:
            progress = min(1.0, end.started.seconds / (60 * end.started.minutes))
    return step, steps, progress


def best_recall(end: End) -> float | None:
    recall = end.finished.recall if end.finished else end.best.recall if end.best else None
    try:
        return float(recall["text_to_image"]["recall@1"]) if recall else None
    except (KeyError, TypeError, ValueError):
        return None


def seconds_left(lock: Held, end: End, state: State) -> float | None:
    if state not in ("running", "paused") or end.step is None:
        return None
    return end.step.seconds_left if lock.taken is None or end.step.time >= lock.taken else None


def first_time(path: Path) -> float | None:
    """When a run's first event was."""
    try:
        with path.open("rb") as file:
            lines = file.read(HEAD).split(b"\n")[:-1]
    except OSError:
        return None
    return next((event.time for line in lines if (event := from_line(line))), None)


def ask_to_stop(run: Run) -> int | None:
    """Asks the process that owns a run to save and end; None if there is none. It is not waited for."""
    lock = run.read_lock()
    if lock.owner is None:
        return None
    try:
        process = psutil.Process(lock.owner)
        if not is_same_process(process, lock.started) and not has_open(process, run.path / "lock"):
            raise psutil.NoSuchProcess(lock.owner)
        process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        if run.owner() is None:  # it ended meanwhile
            return None
        raise UserError(
            f"run `{run.name}` is held by process {lock.owner}, which is not to be seen from here",
            hint="stop it where it was started: on the other machine, or in the container",
        ) from None
    except psutil.AccessDenied:
        raise UserError(
            f"process {lock.owner}, which trains run `{run.name}`, belongs to somebody else",
            hint="ask them, or stop it as that user",
        ) from None
    return lock.owner


def is_same_process(process: psutil.Process, started: float | None) -> bool:
    return abs(process.create_time() - (started or 0)) <= MOST_CLOCK_SHIFT


def has_open(process: psutil.Process, path: Path) -> bool:
    """Whether a process has a file open; it may have begun before the clock was set."""
    return any(Path(file.path) == path.resolve() for file in process.open_files())


def remove(run: Run) -> None:
    """Removes a run's folder, unless it is being trained."""
    if not is_leftover(run.path) and not all(
        (run.path / name).is_file() for name in ("config.toml", "tokenizer.json", "lock")
    ):
        raise UserError(
            f"`{run.path}` does not look like a run of lapclip, so that it is not removed",
            hint="look what is in it, and remove it yourself",
        )
    run.take_lock()
    doomed = run.path.with_name(f".removed-{run.name}")  # out of sight first: a run with its name is whole
    try:
        shutil.rmtree(doomed, ignore_errors=True)
        run.path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise UserError(
            f"cannot remove `{run.path}`: {(error.strerror or str(error)).lower()}",
            hint="remove it as a user who may write there",
        ) from None
    finally:
        run.release()


def num_bytes(run: Run) -> int:
    """What its folder holds on the disk."""
    return sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
