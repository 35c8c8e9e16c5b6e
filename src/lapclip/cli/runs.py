"""`lapclip runs`: which runs there are and how they stand; stopping, resuming, comparing and removing them."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table as RichTable

from lapclip.cli.flags import AsJson, Switch, with_settings
from lapclip.cli.screen import complain, own_name, print_json, print_table, say, working
from lapclip.config import BUDGETS
from lapclip.errors import UserError, printable, suggest
from lapclip.units import age, duration, percent, size

if TYPE_CHECKING:
    from lapclip.runs.history import Summary
    from lapclip.view.document import Kind

runs = App(name="runs", help="List the runs in this folder; stop, resume, compare or remove them.")
Name = Annotated[str, Parameter(help="a run, by name or path")]
Other = Annotated[str, Parameter(help="the run to compare it with, by name or path")]
SECONDS_BETWEEN_LOOKS = 0.1
LABELS: "dict[str, tuple[str, Kind]]" = {  # what a key is called, and the kind of its values
    "num_validation": ("validation images", "count"),
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


@runs.default
def list_runs(*words: Annotated[str, Parameter(show=False)], json: AsJson = False) -> int:
    """List the runs in this folder with their state, newest first.

    `stop NAME` saves and stops a run, `resume NAME` continues it, `compare A B` shows the differences.
    """
    from lapclip.runs.run import RUNS, all_runs
    from lapclip.runs.status import status_of

    if words:
        known = ("stop", "resume", "compare", "remove")
        raise CycloptsError(msg=f"there is no command `runs {words[0]}`{suggest(words[0], known)}")
    found = [status_of(run) for run in all_runs()]
    if json:
        print_json({"runs": [as_record(status) for status in found]})
        return 0
    if not found:
        say(f"`{RUNS.absolute()}` holds no runs yet; start one: `{own_name()} train`")
        return 0
    columns = "run, state, done: share, steps: count, recall@1 (chance): number, left / updated"
    rows: list[tuple[Any, ...]] = []
    for status in found:
        row = (status.run.name, status.state_words, status.history.progress, status.history.num_steps)
        updated = "" if status.updated is None else age(time.time() - status.updated)
        if status.seconds_left is not None:  # it is updated all the time
            updated = f"{duration(status.seconds_left)} left"
        chance = percent((status.history.recall or {}).get("text_to_image", {}).get("chance@1"))
        recall = (num := status.num_validation) and f"{percent(status.recall_1)} of {num:,} ({chance})"
        rows.append((*row, recall, updated))
    print_table(columns, rows)
    for status in found:
        if status.failed:
            sys.stdout.write(printable(f"{status.run.name}: {status.failed.message}") + "\n")
    return 0


def as_record(status: "Summary") -> dict[str, Any]:
    return {
        "name": status.run.name,
        "state": status.state,
        "pid": status.lock.owner,
        "step": status.history.num_steps,
        "steps": status.history.total_steps,
        "recall@1": status.recall_1,
        "num_validation": status.num_validation,
        "seconds_left": status.seconds_left,
        "path": str(status.run.path),
        "progress": status.history.progress,
        "message": status.failed.message if status.failed else None,
        "hint": status.failed.hint if status.failed else None,
        "updated": status.updated,
        "started": next((event.time for event in status.run.events()), None),
    }


@runs.command
def stop(name: Name, /, *, json: AsJson = False) -> int:
    """Stop a run: it saves first, and `resume` continues from there. Waits until the run has stopped."""
    from lapclip.runs.run import find_run
    from lapclip.runs.status import ask_to_stop, status_of

    run = find_run(name)
    pid = ask_to_stop(run)
    if pid is not None:
        say(f"run `{run.name}` will stop after its current step; `kill -INT {pid}` stops it immediately")
        with working("waiting"):
            while run.owner() == pid:
                time.sleep(SECONDS_BETWEEN_LOOKS)
    status = status_of(run)
    state, num_steps = status.state, status.history.num_steps
    has_failed = pid is not None and state in ("failed", "crashed")
    if json:
        print_json(as_record(status))
    elif pid is None:
        say(f"run `{run.name}` is not being trained: it is {state}, at step {num_steps:,}")
    elif has_failed:
        why = f": {status.failed.message}" if status.failed else ""
        hint = f"`{own_name()} runs resume {run.reference}` resumes from its last checkpoint"
        complain(f"run `{run.name}` ended without saving its last steps{why}", hint)
    else:
        when = f"and saved at step {num_steps:,}" if num_steps else "before its first step"
        say(f"run `{run.name}` {state} {when}")
        if (run.path / "config.toml").exists():
            say(f"next:\n  {own_name()} runs resume {run.reference}")
    return 1 if has_failed else 0


@runs.command
@with_settings(*BUDGETS)
def resume(name: Name, *, json: AsJson = False, flags: dict[str, Any]) -> int:
    """Continue a run in the background: `lapclip train --resume NAME --background`."""
    from lapclip.cli.train import start

    return start(None, None, name, flags, as_json=json)


@runs.command
def compare(first: Name, second: Other, /, *, json: AsJson = False) -> int:
    """Show two runs side by side: the settings and machines that differ, and the results."""
    from lapclip.runs.run import find_run
    from lapclip.runs.status import compare
    from lapclip.view.document import shown

    found = compare(find_run(first), find_run(second))
    if json:
        print_json(found)
        return 0
    out = Console(highlight=False, markup=False)
    table = RichTable(box=None, padding=(0, 2, 0, 0))
    for heading in ("", *map(printable, found["runs"])):
        table.add_column(heading, overflow="fold")
    for part in ("results", "settings", "machine"):
        if part != "results":
            table.add_row("")
            table.add_row(f"{part}, differences:" if found[part] else f"{part}: the same")
        for key, pair in found[part].items():
            label, kind = LABELS.get(key, (key, "text"))
            if pair != [None, None]:
                table.add_row(label, *(shown(value, kind, most=60) for value in pair))
    out.print(table)
    if not found["same_validation"]:
        out.print("", "the validation sets differ: recall and validation loss cannot be compared", sep="\n")
    return 0


@runs.command
def remove(*names: Name, yes: Switch = False, json: AsJson = False) -> int:
    """Remove runs and all their files. Asks first; refuses a run that is being trained.

    Args:
        yes: do not ask for confirmation
    """
    from lapclip.data.pack import folder_bytes
    from lapclip.runs.run import find_run
    from lapclip.runs.status import remove, status_of

    if not names:
        raise UserError("name a run to remove", hint="`lapclip runs` lists them")
    chosen = {str(run.path): run for run in map(find_run, names)}.values()
    for run in chosen:
        if run.owner() is not None:
            raise run.is_taken()
    removed = []
    for run in chosen:
        status, held = status_of(run), folder_bytes(run.path)
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
        message = f"cannot ask for confirmation to remove {what}: stdin is not a terminal"
        raise UserError(message, hint="pass `--yes`")
    say(f"remove {what}? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
