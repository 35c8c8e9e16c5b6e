"""The command line: parses, calls, prints. The only exit codes: 0, 1 what the person can fix, 2 usage, 130 stopped.

stdout is data, stderr is for people. torch is imported by the commands that need it, never by `--help`.
"""

import inspect
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from lapclip import __version__
from lapclip.config import BUDGETS, SETTINGS, Setting, load_config
from lapclip.errors import UserError
from lapclip.machine import wait_calmly

if TYPE_CHECKING:
    from lapclip.config import Config
    from lapclip.events import Finished
    from lapclip.run import Run

app = App(
    name="lapclip",
    help="Train your own CLIP on the laptop you have, and search your pictures with it.",
    version=__version__,
    help_format="plaintext",
)
people = Console(stderr=True)
AsJson = Annotated[bool, Parameter(help="print the result as one JSON object on stdout", negative="")]


def main() -> None:
    """Runs one command and exits with its code."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    wait_calmly()
    try:
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except UserError as problem:
        complain(problem.message, problem.hint)
        return 1
    except CycloptsError as problem:
        command = next((f"{a} " for a in arguments[:1] if a in app), "")
        complain(in_our_style(str(problem)), f"`lapclip {command}--help` lists what there is")
        return 2
    except KeyboardInterrupt:
        complain(
            "stopped at once",
            "`lapclip train --resume NAME` goes on from the last checkpoint, if there is one",
        )
        return 130
    except Exception as problem:
        traceback.print_exc()
        complain(
            f"this is a fault of lapclip: {type(problem).__name__}: {problem}",
            "please report it with the lines above",
        )
        return 1


def complain(message: str, hint: str) -> None:
    for kind, colour, text in (("error", "red", message), ("hint", "cyan", hint)):
        people.print(f"[bold {colour}]{kind}[/]: ", end="")
        people.print(text, markup=False, highlight=False, soft_wrap=True)


def in_our_style(message: str) -> str:
    """cyclopts' sentence with our quotes: `Unknown option: --minuts.` becomes unknown option: `--minuts`."""
    return (message[:1].lower() + message[1:]).replace('"', "`").rstrip(".")


def with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """Gives a command one flag for every setting of `config.py`; those that were passed arrive as `flags`."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
    signature = inspect.Signature(sorted([*map(flag_of, SETTINGS.values()), *own], key=lambda p: p.kind))

    def parse(*arguments: Any, **keywords: Any) -> int:
        passed = signature.bind(*arguments, **keywords).arguments
        flags = {name: passed.pop(name) for name in SETTINGS if name in passed}
        return command(**passed, flags={name: value for name, value in flags.items() if value is not None})

    parse.__signature__ = signature  # type: ignore[attr-defined]  # what cyclopts reads
    parse.__name__, parse.__doc__ = command.__name__, command.__doc__
    return parse


def whole_number(kind: Any, tokens: Sequence[Any]) -> int:
    """Refuses 1.5, which cyclopts would round."""
    return int(tokens[0].value)


def flag_of(setting: Setting) -> inspect.Parameter:
    default = setting.field.default
    is_budget = setting.name in BUDGETS
    converter = whole_number if setting.type is int else None
    shown = "decided" if default is None else str(default)
    help = Parameter(
        help=setting.help,
        converter=converter,
        show_default=False if is_budget else shown,
        group=setting.section.capitalize(),
    )
    kind = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD
        if setting.name == "source"
        else inspect.Parameter.KEYWORD_ONLY
    )
    return inspect.Parameter(
        setting.name, kind, default=None, annotation=Annotated[setting.type | None, help]
    )


@app.command
@with_settings
def train(
    *,
    config: Annotated[
        Path | None, Parameter(help="a TOML file of settings, such as a run's `config.toml`; flags win")
    ] = None,
    run: Annotated[str | None, Parameter(help="name of the new run; makes `runs/NAME` here")] = None,
    resume: Annotated[
        str | None,
        Parameter(help="go on with this run, by name or path; a larger budget extends a finished one"),
    ] = None,
    json: AsJson = False,
    flags: dict[str, Any],
) -> int:
    """Train a CLIP from pictures and captions.

    Say how long: `lapclip train --minutes 10`. Ctrl-C saves and stops; `--resume NAME` goes on from there.
    """
    if resume is not None and (run is not None or config is not None):
        raise UserError(
            "`--resume` takes name and settings from the run itself", hint="leave `--run` and `--config` away"
        )
    with stop_requests() as requests:
        folder, settings = begin(config, run, flags) if resume is None else go_on(resume, flags)
        if requests:
            complain(
                "stopped before training began", f"`lapclip train --resume {folder.reference}` begins it"
            )
            return 130
        return follow(settings, folder, requests, as_json=json)


def begin(config: Path | None, name: str | None, flags: dict[str, Any]) -> "tuple[Run, Config]":
    settings = load_config(config, flags)
    with working("setting up"):
        from lapclip.prepare import prepare

        run = prepare(settings, name)
    return run, run.load_config()


def go_on(name: str, flags: dict[str, Any]) -> "tuple[Run, Config]":
    from lapclip.run import open_run

    run = open_run(name)
    refuse_fixed(run, flags)
    with working("setting up"):
        from lapclip.prepare import refuse_if_finished, revise

        settings = revise(run, flags)
    refuse_if_finished(run, settings)
    return run, settings


# What a resumed run may change: how long it goes on, and what alters neither model nor data.
RESUMABLE = {*BUDGETS, "chunk", "device", "threads", "workers", "save_every", "eval_every", "recompute"}


def refuse_fixed(run: "Run", flags: dict[str, Any]) -> None:
    fixed = [SETTINGS[name].flag for name in flags if name not in RESUMABLE]
    if fixed:
        raise UserError(
            f"{' and '.join(f'`{flag}`' for flag in fixed)} cannot change when a run is resumed",
            hint=f"start a new run from its settings: `lapclip train --config {run.path}/config.toml {fixed[0]} ...`",
        )


def follow(config: "Config", run: "Run", requests: list[int], *, as_json: bool) -> int:
    """Trains and shows it, until the budget is used up or somebody asks to stop."""
    with working("starting"):
        from lapclip.events import Finished
        from lapclip.monitor.line import Screen
        from lapclip.train import train as events_of

    with closing(events_of(config, run)) as events:
        first = next(events)  # before anything is said: the run may belong to another process
        show_settled(config, run)
        with Screen(people) as screen:
            screen.show(first)
            for event in () if requests else events:
                screen.show(event)
                if requests:
                    break
    result = next(event for event in reversed(list(run.events())) if isinstance(event, Finished))
    stopped = result.reason == "stopped"
    show_result(run, result, stopped=stopped)
    if as_json:
        print_json(
            {
                "run": str(run.path),
                "steps": result.step,
                **{name: value for name, value in asdict(result).items() if name not in ("step", "time")},
                "settled": {
                    name: {"value": value_of(config, name), "reason": reason}
                    for name, reason in run.load_machine().get("reasons", {}).items()
                },
            }
        )
    return 130 if stopped else 0


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM instead of dying of them; the second one is not waited for."""
    requests: list[int] = []

    def request(number: int, frame: object) -> None:
        if requests:
            raise KeyboardInterrupt
        requests.append(number)
        # Straight to the terminal: a handler may interrupt rich while it holds its locks.
        os.write(sys.stderr.fileno(), b"\nstopping after this step and saving; once more stops at once\n")

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_settled(config: "Config", run: "Run") -> None:
    from rich.table import Table

    people.print(f"run: {run.path}", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, reason in run.load_machine().get("reasons", {}).items():
        table.add_row(name, str(value_of(config, name)), reason)
    people.print(table, highlight=False, markup=False)


def value_of(config: "Config", name: str) -> Any:
    return getattr(getattr(config, SETTINGS[name].section), name)


def show_result(run: "Run", result: "Finished", *, stopped: bool) -> None:
    from lapclip.monitor.line import duration, recall_table

    what = "done" if not stopped else "stopped and saved" if result.step else "stopped before the first step"
    people.print(
        f"{what}: {result.step:,} steps, {result.num_pairs_seen:,} pairs in {duration(result.seconds)} of training"
        f" ({result.pairs_per_second:,.0f} pairs/s), at most {result.peak_memory_bytes / 1e9:.2f} GB of memory",
        highlight=False,
        soft_wrap=not people.is_terminal,
    )
    if result.recall is not None:
        people.print(recall_table(result.recall), highlight=False)
        if result.best_step != result.step:
            people.print(
                f"the table is for step {result.best_step:,}, the best one; it is what `eval` loads",
                highlight=False,
            )
    if not stopped:
        people.print(
            f"what it finds for a few captions: {run.path}/learned.png", highlight=False, soft_wrap=True
        )
    people.print("next:", highlight=False)
    if result.checkpoint is not None:
        people.print(f"  {own_name()} eval {run.reference}", highlight=False)
    people.print(
        f"  {own_name()} train --resume {run.reference}{more_of(run, result) if not stopped else ''}",
        highlight=False,
    )


def own_name() -> str:
    """What to type to get this command again, also where it is not on the path."""
    if shutil.which("lapclip") or not sys.argv[0].endswith("lapclip"):
        return "lapclip"
    return os.path.relpath(sys.argv[0])


def more_of(run: "Run", result: "Finished") -> str:
    """The flag that gives a finished run as much again, in the kind of budget it had."""
    budget = run.load_config().train
    if budget.minutes is not None:
        return f" --minutes {2 * budget.minutes:g}"
    return f" --epochs {2 * budget.epochs:g}" if budget.epochs is not None else f" --steps {2 * result.step}"


@app.command(name="eval")
def evaluate(
    run: Annotated[str, Parameter(help="a run, by name or path; its best checkpoint is used")],
    source: Annotated[
        str | None, Parameter(help="where held-out pairs come from, if not from the run's own source")
    ] = None,
    *,
    num_validation: Annotated[
        int | None, Parameter(help="pictures to search among, if not as many as in training")
    ] = None,
    json: AsJson = False,
) -> int:
    """Measure recall: how often the right picture is found for its words, and the right words for a picture."""
    if num_validation is not None and (problem := SETTINGS["num_validation"].problem(num_validation)):
        raise UserError(f"`--num-validation` {problem}", hint="512 is what training uses")
    from lapclip.run import open_run

    config = open_run(run).load_config()
    with working("evaluating"):
        from lapclip.data.source import open_source
        from lapclip.embedder import load
        from lapclip.evaluate import embed_pool, retrieval

        _, held_out = open_source(source or config.data.source)
        pool = embed_pool(load(run), held_out, num_validation or config.data.num_validation)
        recall = retrieval(pool, config.train.batch_size or 12)
    if json:
        print_json(recall)
    else:
        from lapclip.monitor.line import recall_table

        Console().print(recall_table(recall), highlight=False)
    return 0


def working(what: str) -> Any:
    """A spinner on a terminal, nothing on a pipe."""
    return people.status(what) if people.is_terminal else nullcontext()


def print_json(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
