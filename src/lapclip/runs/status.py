"""The runs of a folder, without torch: which there are, how each one stands, how two differ, and removing one.

How a run stands follows from its lock, which the system keeps, and from the end of its events.
"""

import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from lapclip.config import BUDGETS, Config
from lapclip.errors import UserError
from lapclip.files import open_regular, remove_folder
from lapclip.runs.events import MAX_LINE, MAX_OVERLONG, Event, from_line, read_events
from lapclip.runs.history import History, Summary, have_same_validation, summarize, twice
from lapclip.runs.run import RUNS, Run, find_run, is_leftover, newest_run
from lapclip.units import duration, plural

TAIL = 1 << 16  # bytes of the events that are read to know how a run stands
RARE = re.compile(rb'\{"version":1,"event":"(?:Started|Evaluated)".*')
MACHINE = (
    "chip", "num_cores", "memory_bytes", "system", "python", "torch", "lapclip", "commit", "data",
)  # fmt: skip


def run_to_watch(name: str | None) -> Run:
    """The run of that name or path, also one that is being set up; without a name, the newest here."""
    if name is not None:
        return find_run(name)
    if newest := newest_run():
        return newest
    hint = "start one with `lapclip train`, or pass the path of a run"
    raise UserError(f"there is no run to watch: `{RUNS.absolute()}` holds none", hint=hint)


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
        with open_regular(path) as file:
            start = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read(TAIL).split(b"\n")[1 if start else 0 :]
            events = list(filter(None, map(from_line, lines)))
            history = History().extend(events)
            recall = history.best or (history.finished and history.finished.recall)
            if not start or history.has_had_its_budget or (recall and (history.step or history.started)):
                return history
            if not history.step and not history.started:
                return History().extend(read_events(path))
            return History().extend([*rare_events(file, start), *events])
    except OSError:
        return history


def rare_events(file: BinaryIO, end: int) -> Iterator[Event]:
    """Those of a kind that comes seldom, up to a place in the file; a run has thousands of others."""
    file.seek(0)
    rest, num_overlong = b"", 0
    while num_overlong < MAX_OVERLONG and (portion := file.read(min(MAX_LINE, end - file.tell()))):
        lines, _, rest = (rest + portion).rpartition(b"\n")
        num_overlong += not lines
        rest = rest[:MAX_LINE]
        for found in RARE.finditer(lines):
            if event := from_line(found[0]):
                yield event


def refuse_if_finished(run: Run, config: Config) -> None:
    """Refuses to go on with a run that has had its budget, or is given one that it has used up before."""
    history, train, before = read_end(run.path / "events.jsonl"), config.train, run.load_config().train
    is_same = all(getattr(train, budget) == getattr(before, budget) for budget in BUDGETS)
    had = {"minutes": history.seconds / 60, "epochs": history.num_epochs, "steps": history.num_steps}
    is_larger = any((getattr(train, budget) or 0) > had[budget] for budget in BUDGETS)
    if is_larger or (is_same and not history.has_had_its_budget):
        return
    kind = next((budget for budget in BUDGETS if getattr(train, budget)), "steps")
    used = f"{plural(history.num_steps, 'step')} in {duration(history.seconds)} of training"
    more = f"lapclip train --resume {run.reference} {twice(kind, had[kind])}"
    hint = f"pass a larger budget, counted from its start: `{more}`"
    raise UserError(f"run `{run.name}` has used up {'its' if is_same else 'this'} budget: {used}", hint=hint)


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
        what = f"run `{run.name}` is locked by process {lock.owner}, which is not visible on this machine"
        hint = "stop it where it was started: on the other machine, or in the container"
        raise UserError(what, hint=hint) from None
    except psutil.AccessDenied:
        what = f"process {lock.owner}, which trains run `{run.name}`, belongs to another user"
        raise UserError(what, hint="stop it as that user") from None
    return lock.owner


def compare(first: Run, second: Run) -> dict[str, Any]:
    """What differs in `settings` and `machine`, and all `results`, each as the two values."""
    one, two = summarize(first), summarize(second)
    return {
        "runs": [first.name, second.name],
        "settings": differing(one.settings, two.settings, one.settings | two.settings),
        "machine": differing(one.machine, two.machine, MACHINE),
        "results": {name: [value, two.results()[name]] for name, value in one.results().items()},
        "same_validation": have_same_validation([one, two]),
    }


def differing(first: dict[str, Any], second: dict[str, Any], names: Iterable[str]) -> dict[str, list[Any]]:
    pairs = {name: [first.get(name), second.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def remove(run: Run) -> None:
    """Removes a run's folder, unless it is being trained."""
    is_whole = all((run.path / name).is_file() for name in ("config.toml", "tokenizer.json", "lock"))
    if not is_whole and not is_leftover(run.path):
        what = f"`{run.path}` does not look like a lapclip run, and is not removed"
        raise UserError(what, hint="check what is in it, and remove it yourself")
    run.take_lock()
    try:
        remove_folder(run.path)
    finally:
        run.release()
