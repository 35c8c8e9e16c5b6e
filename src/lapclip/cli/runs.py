"""`lapclip runs`: which runs there are and how they stand; stopping, resuming, comparing and removing them."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table

from lapclip.cli.flags import AsJson, with_settings
from lapclip.cli.screen import complain, own_name, print_json, say, working
from lapclip.config import BUDGETS
from lapclip.errors import UserError, printable, suggest
from lapclip.units import age, duration, size

if TYPE_CHECKING:
    from lapclip.runs.history import Summary
    from lapclip.runs.run import Run
    from lapclip.view.document import Kind

runs = App(name="runs", help="List the runs in this folder; stop, resume, compare or remove them.")
Name = Annotated[str, Parameter(help="a run, by name or path")]
SECONDS_BETWEEN_LOOKS = 0.1
PATIENCE_SECONDS = 10.0  # before it is said what is waited for


@runs.default
def list_runs(*words: Annotated[str, Parameter(show=False)], json: AsJson = False) -> int:
    """List the runs in this folder and how they stand, the newest first.

    `stop NAME` saves and ends one, `resume NAME` goes on with it, `compare A B` shows what differs.
    """
    from lapclip.runs.run import RUNS
    from lapclip.runs.status import all_runs, status_of

    if words:
        known = ("stop", "resume", "compare", "remove")
        raise CycloptsError(msg=f"there is no command `runs {words[0]}`{suggest(words[0], known)}")
    found = [status_of(run) for run in all_runs()]
    if json:
        print_json({"runs": [as_record(status) for status in found]})
        return 0
    if not found:
        say(f"`{RUNS.absolute()}` holds no runs yet; `{own_name()} train` makes one")
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("done", "steps", "recall@1", "left"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("last update", no_wrap=True)
    for status in found:
        table.add_row(
            printable(status.run.name),
            status.state_words,
            f"{status.progress:.0%}",
            f"{status.history.num_steps:,}",
            "" if status.recall_1 is None else f"{status.recall_1:.1%}",
            "" if status.seconds_left is None else duration(status.seconds_left),
            "" if status.updated is None else age(time.time() - status.updated),
        )
    out = Console(highlight=False, markup=False)
    out.print(table)
    for status in found:
        if status.failed:
            out.print(printable(f"{status.run.name}: {status.failed.message}"), soft_wrap=True)
    return 0


def as_record(status: "Summary") -> dict[str, Any]:
    return {
        "name": status.run.name,
        "state": status.state,
        "pid": status.pid,
        "step": status.history.num_steps,
        "steps": status.history.total_steps,
        "recall@1": status.recall_1,
        "seconds_left": status.seconds_left,
        "path": str(status.run.path),
        "progress": status.progress,
        "message": status.failed.message if status.failed else None,
        "hint": status.failed.hint if status.failed else None,
        "updated": status.updated,
        "started": next((event.time for event in status.run.events()), None),
    }


@runs.command
def stop(name: Name, /, *, json: AsJson = False) -> int:
    """Have a run save and end, and wait until it has. `resume` goes on from there."""
    from lapclip.runs.run import find_run
    from lapclip.runs.status import ask_to_stop, status_of

    run = find_run(name)
    before = status_of(run)
    pid = ask_to_stop(run)
    if pid is None:
        if not json:
            say(
                f"run `{run.name}` is not being trained: it is {before.state}, at step {before.history.num_steps:,}"
            )
    else:
        try:
            wait_until_free(run, pid)
        except KeyboardInterrupt:
            complain(
                f"run `{run.name}` has been asked to stop, and is still at it",
                "`lapclip runs` says when it is",
            )
            return 130
    after = status_of(run)
    if json:
        print_json(as_record(after))
    elif pid is not None:
        say_how_it_ended(run, after)
    return 1 if pid is not None and after.state in ("failed", "crashed") else 0


def wait_until_free(run: "Run", pid: int) -> None:
    began, has_said = time.monotonic(), False
    with working(f"run `{run.name}` saves and ends"):
        while run.owner() == pid:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            if not has_said and time.monotonic() - began > PATIENCE_SECONDS:
                has_said = True
                say(
                    f"run `{run.name}` has been asked to stop and ends after the step it is in, which takes long; "
                    f"Ctrl-C leaves it to it, and `kill -INT {pid}` ends it at once, from its last checkpoint"
                )


def say_how_it_ended(run: "Run", status: "Summary") -> None:
    is_set_up, num_steps = (run.path / "config.toml").exists(), status.history.num_steps
    if status.state in ("failed", "crashed"):
        why = f": {status.failed.message}" if status.failed else ""
        complain(
            f"run `{run.name}` ended without saving its last steps{why}",
            f"`{own_name()} runs resume {run.reference}` resumes from its last checkpoint",
        )
    elif not is_set_up:
        say(f"run `{run.name}` stopped while it was being set up; nothing was trained yet")
    elif status.state == "finished":
        say(f"run `{run.name}` had just finished: {num_steps:,} steps")
    else:
        what = f"and saved at step {num_steps:,}" if num_steps else "before its first step"
        say(f"run `{run.name}` stopped {what}\nnext:\n  {own_name()} runs resume {run.reference}")


@runs.command
@with_settings(*BUDGETS)
def resume(name: Name, *, json: AsJson = False, flags: dict[str, Any]) -> int:
    """Go on with a run in the background: `lapclip train --resume NAME --background`."""
    from lapclip.cli.train import start

    return start(None, None, name, flags, as_json=json)


@runs.command
def compare(first: Name, second: Name, /, *, json: AsJson = False) -> int:
    """Show two runs side by side: the settings and machines that differ, and the results."""
    from lapclip.runs.run import find_run
    from lapclip.runs.status import compare
    from lapclip.view.document import shown

    found = compare(find_run(first), find_run(second))
    if json:
        print_json(found)
        return 0
    out = Console(highlight=False, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", *map(printable, found["runs"])):
        table.add_column(heading, overflow="fold")
    for part in ("results", "settings", "machine"):
        if part != "results":
            table.add_row("")
            table.add_row(f"{part}, what differs:" if found[part] else f"{part}: the same")
        for key, pair in found[part].items():
            label, kind = LABELS.get(key, (key, "text"))
            if pair != [None, None]:
                table.add_row(label, *(shown(value, kind, most=60) for value in pair))
    out.print(table)
    return 0


LABELS: "dict[str, tuple[str, Kind]]" = {  # what a key is called, and the kind of its values
    "recall@1": ("recall@1, text → image", "share"),
    "recall@5": ("recall@5, text → image", "share"),
    "recall@10": ("recall@10, text → image", "share"),
    "recall@1, picture -> words": ("recall@1, image → text", "share"),
    "held-out loss": ("validation loss", "number"),
    "training loss": ("training loss", "number"),
    "steps": ("steps", "count"),
    "seconds": ("training time", "seconds"),
    "pairs_per_second": ("pairs/s", "rate"),
    "peak_memory_bytes": ("peak memory", "bytes"),
    "num_parameters": ("parameters", "count"),
    "joules": ("energy", "joules"),
    "num_cores": ("cores", "text"),
    "memory_bytes": ("memory", "bytes"),
    "data": ("data (fingerprint)", "text"),
}


@runs.command
def remove(
    *names: Name,
    yes: Annotated[bool, Parameter(help="do not ask", negative="")] = False,
    json: AsJson = False,
) -> int:
    """Remove runs with all they hold. Asks first; a run that is being trained is refused."""
    from lapclip.runs.run import find_run
    from lapclip.runs.status import num_bytes, remove, status_of

    if not names:
        raise UserError("name a run to remove", hint="`lapclip runs` lists them")
    chosen = {str(run.path): run for run in map(find_run, names)}.values()
    for run in chosen:
        if (pid := run.owner()) is not None:
            raise UserError(
                f"run `{run.name}` is being trained by process {pid}",
                hint=f"stop it first: `lapclip runs stop {run.reference}`",
            )
    removed = []
    for run in chosen:
        status, held = status_of(run), num_bytes(run)
        recall = "" if status.recall_1 is None else f", recall@1 {status.recall_1:.1%}"
        what = f"{run.path}: {status.state}, step {status.history.num_steps:,}{recall}, {size(held)}"
        if not yes and not agrees(what):
            say(f"kept {run.path}")
            continue
        remove(run)
        removed.append({"name": run.name, "path": str(run.path), "bytes": held})
        say(f"removed {what}")
    if json:
        print_json({"removed": removed})
    return 0


def agrees(what: str) -> bool:
    """Asks whether something is to be removed; an answer needs a person."""
    if not sys.stdin.isatty():
        raise UserError(f"nobody is there to agree to the removal of {what}", hint="pass `--yes`")
    say(f"remove {what}? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
