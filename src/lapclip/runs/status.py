"""The runs of a folder, without torch: which there are, how each one stands, how two differ, and removing one.

How a run stands follows from its lock, which the system keeps, and from the end of its events.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil

from lapclip.config import SETTINGS
from lapclip.errors import UserError
from lapclip.runs.events import MAX_LINE, Finished, from_line
from lapclip.runs.history import History, Summary, summarize
from lapclip.runs.run import RUNS, Run, find_run, is_leftover, is_run

PORTIONS = (
    1 << 16,
    1 << 22,
)  # bytes read from the end of the events; the second only if no step is in the first
RARE = tuple(f'"event":"{kind}"'.encode() for kind in ("Started", "Evaluated"))
Pair = list[Any]  # of the first run and of the second
MACHINE = (
    "chip", "num_cores", "memory_bytes", "system", "python", "torch", "lapclip", "commit", "data",
)  # fmt: skip


def all_runs(folder: Path = RUNS) -> list[Run]:
    """Every run of a folder, those being set up too; the newest first."""
    try:
        visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
    found = [Run(path) for path in visible if is_run(path)]
    return sorted(found, key=lambda run: (run.last_change(), run.name), reverse=True)


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
    """The state, the step and the best recall; of what lies before the end only the rare kinds of events are read."""
    history = History()
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            for portion in PORTIONS:
                before = file.seek(max(0, num_bytes - portion))
                lines = file.read(portion).split(b"\n")[1 if before else 0 :]
                events = [event for line in lines if (event := from_line(line))]
                history = History().extend(events)
                if before == 0 or is_enough(history):
                    return history
                if history.step or history.started:
                    break
            file.seek(0)
            rare = []
            while file.tell() < before and (line := file.readline(MAX_LINE)):
                if any(kind in line[:100] for kind in RARE) and (event := from_line(line)):
                    rare.append(event)
            return History().extend([*rare, *events])
    except OSError:
        return history


def is_enough(history: History) -> bool:
    if isinstance(history.last, Finished) and history.last.reason == "budget":
        return True
    has_recall = history.best or (history.finished and history.finished.recall)
    return bool(has_recall and (history.step or history.started))


def ask_to_stop(run: Run) -> int | None:
    """Asks the process that owns a run to save and end; None if there is none. It is not waited for."""
    lock = run.read_lock()
    if lock.owner is None:
        return None
    try:
        process = psutil.Process(lock.owner)
        held = (run.path / "lock").resolve()
        if not any(Path(file.path) == held for file in process.open_files()):
            raise psutil.NoSuchProcess(lock.owner)
        process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        if run.owner() is None:  # it ended meanwhile
            return None
        raise UserError(
            f"run `{run.name}` is held by process {lock.owner}, which is not visible from here",
            hint="stop it where it was started: on the other machine, or in the container",
        ) from None
    except psutil.AccessDenied:
        raise UserError(
            f"process {lock.owner}, which trains run `{run.name}`, belongs to somebody else",
            hint="ask them, or stop it as that user",
        ) from None
    return lock.owner


def compare(first: Run, second: Run) -> dict[str, Any]:
    """What differs in `settings` and `machine`, and all `results`, each as the two values."""
    one, two = summarize(first), summarize(second)
    return {
        "runs": [first.name, second.name],
        "settings": differing(settings_of(first), settings_of(second)),
        "machine": differing(*({name: s.machine.get(name) for name in MACHINE} for s in (one, two))),
        "results": pairs(one.results(), two.results()),
    }


def settings_of(run: Run) -> dict[str, Any]:
    try:
        config = run.load_config()
    except UserError:  # never set up, or of another version
        return dict.fromkeys(SETTINGS)
    return {name: getattr(getattr(config, setting.section), name) for name, setting in SETTINGS.items()}


def pairs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Pair]:
    return {name: [first[name], second[name]] for name in first}


def differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Pair]:
    return {name: pair for name, pair in pairs(first, second).items() if pair[0] != pair[1]}


def remove(run: Run) -> None:
    """Removes a run's folder, unless it is being trained."""
    is_whole = all((run.path / name).is_file() for name in ("config.toml", "tokenizer.json", "lock"))
    if not is_whole and not is_leftover(run.path):
        raise UserError(
            f"`{run.path}` does not look like a run of lapclip, and is not removed",
            hint="check what is in it, and remove it yourself",
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
