"""The runs of a folder, without torch: which there are, how each one stands, how two differ, and removing one.

How a run stands follows from its lock, which the system keeps, and from the end of its events.
"""

import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from lapclip.config import SETTINGS
from lapclip.errors import UserError
from lapclip.runs.events import MAX_LINE, Evaluated, Event, Finished, Started, Step, from_line
from lapclip.runs.history import History, Summary, summarize
from lapclip.runs.run import RUNS, Run, find_run, is_leftover, is_run

PORTION = 1 << 16  # bytes read from the end of the events; more only while something is missing
HEAD = 1 << 13
MAX_CLOCK_SHIFT = 10  # seconds that a clock may be set while a process is still taken for the same
Pair = list[Any]  # of the first run and of the second
MACHINE = (
    "chip", "num_cores", "memory_bytes", "system", "python", "torch", "lapclip", "commit", "data",
)  # fmt: skip


def all_runs(folder: Path = RUNS) -> list[Run]:
    """Every run of a folder, those being set up too; the newest first."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = folder / entry.name
                if entry.is_dir() and not entry.name.startswith(".") and is_run(path):
                    found.append((Run(path).last_change(), entry.name, Run(path)))
    except OSError:
        return []
    return [run for _, _, run in sorted(found, key=lambda row: row[:2], reverse=True)]


def newest_run(folder: Path = RUNS) -> Run | None:
    """The run that is being trained; of several, or none, the one where something happened last."""
    runs = all_runs(folder)
    return next((run for run in runs if run.owner() is not None), runs[0] if runs else None)


def run_to_watch(name: str | None) -> Run:
    """The run of that name or path, also one that is being set up; without a name, the newest here."""
    if name is not None:
        return find_run(name)
    newest = newest_run()
    if newest is None:
        raise UserError(
            f"there is no run to watch: `{RUNS.absolute()}` holds none",
            hint="begin one with `lapclip train`, or name the path of a run's folder",
        )
    return newest


def status_of(run: Run) -> Summary:
    """How a run stands now, by the end of its events: no curves, but quick for a long run."""
    summary = Summary(run)
    lock = run.read_lock()  # first: what is written while we read makes it newer, never older
    summary.update(lock, read_end(run.path / "events.jsonl"))
    return summary


def read_end(path: Path) -> History:
    """Reads backwards until the state, the step and the best recall are known; a torn last line is skipped."""
    events: list[Event] = []
    has_step, has_recall, resumed_from = False, False, math.inf
    for event in backwards(path):
        events.append(event)
        match event:
            case Finished() if len(events) == 1:
                has_step, has_recall = event.reason == "budget", event.recall is not None
                if event.reason == "budget":
                    break
            case Started():
                has_step, resumed_from = True, min(event.step, resumed_from)
            case Step():
                has_step = True
            case Evaluated():
                has_recall = has_recall or (event.is_best and event.step <= resumed_from)
        if has_step and has_recall:
            break
    return History().extend(reversed(events))


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
            rest, has_step = first if len(first) <= MAX_LINE else b"", False
            for line in reversed(lines):
                if is_near or any(kind in line[:100] for kind in NEEDED):
                    event = from_line(line) if line else None
                    if event is not None:
                        has_step = has_step or isinstance(event, (Step, Started, Finished))
                        yield event
            is_near = is_near and not has_step
            portion = min(2 * portion, 1 << 22)


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
    return abs(process.create_time() - (started or 0)) <= MAX_CLOCK_SHIFT


def has_open(process: psutil.Process, path: Path) -> bool:
    """Whether a process has a file open; it may have begun before the clock was set."""
    return any(Path(file.path) == path.resolve() for file in process.open_files())


def compare(first: Run, second: Run) -> dict[str, Any]:
    """What differs in `settings` and `machine`, and all `results`, each as the two values."""
    summaries = [summarize(run) for run in (first, second)]
    return {
        "runs": [summary.run.name for summary in summaries],
        "settings": differing(settings_of(first), settings_of(second)),
        "machine": differing(*({name: s.machine.get(name) for name in MACHINE} for s in summaries)),
        "results": side_by_side(*(summary.results() for summary in summaries)),
    }


def settings_of(run: Run) -> dict[str, Any]:
    try:
        config = run.load_config()
    except UserError:  # never set up, or of another version
        return dict.fromkeys(SETTINGS)
    return {name: getattr(getattr(config, setting.section), name) for name, setting in SETTINGS.items()}


def side_by_side(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Pair]:
    return {name: [first[name], second[name]] for name in first}


def differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Pair]:
    return {name: pair for name, pair in side_by_side(first, second).items() if pair[0] != pair[1]}


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
