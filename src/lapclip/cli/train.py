"""`lapclip train`: starts or resumes a run, shows it, and ends with its result."""

from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from lapclip.cli.flags import AsJson, Switch, refuse_missing_data, with_settings
from lapclip.cli.screen import (
    OPENING,
    Stopped,
    follow,
    own_name,
    people,
    print_json,
    say,
    stop_requests,
    working,
)
from lapclip.config import BUDGETS, PLAN, SETTINGS, SHAPE, load_config, model_name, value_of, with_values
from lapclip.errors import UserError, typed

if TYPE_CHECKING:
    from lapclip.config import Config
    from lapclip.data.open import Data
    from lapclip.finetune.distill import Teacher
    from lapclip.runs.events import Finished
    from lapclip.runs.run import Run
    from lapclip.train.loop import Cached

    Begun = tuple[Run, Config, Data, Cached | None]

# What a pretrained model determines, and what only if no smaller one is made of it.
FIXED = ("tokenizer", "max_vocab", "loss")
SHAPED = ("size", *SHAPE)
# What a resumed run may change: how long it goes on, and what alters neither model nor data.
RESUMABLE = {
    *BUDGETS, *PLAN, "source", "images", "general", "teacher", "max_unreadable",  # the same, wherever it is now
    "max_memory", "workers", "save_every", "eval_every", "recompute", "pause_below",
}  # fmt: skip


@with_settings(*SETTINGS)
def train(
    *,
    config: Path | None = None,
    run: str | None = None,
    resume: str | None = None,
    background: Switch = False,
    verbose: Switch = False,
    json: AsJson = False,
    lock_handle: Annotated[int | None, Parameter(show=False)] = None,  # of a run taken by `--background`
    flags: dict[str, Any],
) -> int:
    """Train a CLIP from images and captions.

    Set a budget: `lapclip train --minutes 10`. Ctrl-C saves and stops; `--resume NAME` continues from there.

    Args:
        config: a TOML file of settings, such as a run's `config.toml`; flags override it
        run: name of the new run, created as `runs/NAME`
        resume: continue this run, by name or path; a larger budget extends a finished one
        background: train in the background: returns immediately and continues when the terminal is closed
        verbose: show every automatic choice with its reason; always on when the output is not a terminal
    """
    if resume is not None and (run is not None or config is not None):
        what = "`--resume` uses the name and the settings of the run"
        raise UserError(what, hint="omit `--run` and `--config`")
    if background:
        return start(config, run, resume, flags, as_json=json)
    with stop_requests("stopping after saving") as requests, ExitStack() as held:
        reserved = None
        if lock_handle is not None:
            from lapclip.runs.run import RUNS, Run, open_run

            reserved = open_run(resume) if resume else Run(RUNS / (run or ""))
            held.enter_context(reserved.reserved(lock_handle))
        folder, settings, data, cached = (
            begin(config, run, flags, requests, reserved)
            if resume is None
            else go_on(resume, flags, requests, reserved)
        )
        if requests:
            hint = f"`lapclip train --resume {folder.reference}` starts it"
            raise Stopped("stopped before training started", hint)
        return show_training(settings, folder, data, requests, cached, as_json=json, verbose=verbose)


def start(
    config: Path | None, name: str | None, resume: str | None, flags: dict[str, Any], *, as_json: bool
) -> int:
    """Starts the training in a process of its own, once all is checked that can be checked at once."""
    from lapclip.data.open import plain_name
    from lapclip.runs.background import as_arguments, log_of, start_training
    from lapclip.runs.run import new_run, open_run
    from lapclip.runs.status import refuse_if_finished

    if resume is None:
        settings = load_config(config, flags)
        start_of(settings, flags)
        refuse_missing_data(settings)
        run = new_run(name, prefix=f"{plain_name(settings.data.source)}-{settings.model.size}")
        whence = [f"--config={config}"] if config else []
        arguments = [*whence, *as_arguments(flags), f"--run={run.name}"]
    else:
        run = open_run(resume)
        refuse_fixed(run, flags)
        refuse_if_finished(run, load_config(run.path / "config.toml", flags))
        arguments = [f"--resume={run.path}", *as_arguments(flags)]
    pid = start_training(run, arguments)
    if as_json:
        print_json({"run": str(run.path), "name": run.name, "pid": pid})
        return 0
    say(f"run: {run.path}")
    say(f"training in the background as process {pid}; its output goes to {log_of(run)}")
    say("next:")
    for what in (f"watch {run.reference}", "runs", f"runs stop {run.reference}"):
        say(f"  {own_name()} {what}")
    return 0


def begin(
    config: Path | None, name: str | None, flags: dict[str, Any], requests: list[int], reserved: "Run | None"
) -> "Begun":
    from lapclip.runs.run import refuse_name

    settings = load_config(config, flags)
    weights = start_of(settings, flags)
    if name is not None and reserved is None:
        refuse_name(name)
    refuse_missing_data(settings)
    with working("setting up"):
        from lapclip.train.prepare import open_here, preparing
    found = teacher = None
    if weights != "new":
        with working("loading the pretrained model"):
            from lapclip.finetune.prepare import find_pretrained, preparing_heads, preparing_towers

            settings, found = find_pretrained(settings, is_inherited=weights == "inherited")
    elif settings.model.teacher:
        settings, teacher = consult_teacher(settings, requests)
    data = follow(open_here(settings), requests, OPENING, is_kept=True)
    if found is None:
        run = follow(preparing(settings, name, data, reserved), requests, "setting up")
        return run, run.load_config(), data, teacher
    has_heads = settings.train.tune in (None, "heads") and weights != "inherited"
    prepare = preparing_heads if has_heads else preparing_towers
    if has_heads and settings.train.minutes:
        say("features and head settings are prepared first; `--minutes` counts the training after that")
    run, cached = follow(prepare(settings, found, name, data, reserved), requests, "setting up", is_kept=True)
    return run, run.load_config(), data, cached


def consult_teacher(settings: "Config", requests: list[int]) -> "tuple[Config, Teacher]":
    with working("loading the teacher"):
        from lapclip.finetune.distill import find_teacher
    return follow(find_teacher(settings), requests, "embedding the data with the teacher", is_kept=True)


def start_of(settings: "Config", flags: dict[str, Any]) -> Literal["new", "pretrained", "inherited"]:
    """Whose weights a new run starts from; what these determine cannot be asked for."""
    model, tune = settings.model, settings.train.tune
    if not (model.base or model.image_tower or model.text_tower):
        if tune:
            raise UserError("`--tune` needs a pretrained model", hint="name one: `--from MODEL`")
        return "new"
    if model.teacher:
        hint = "omit `--teacher`, or train a new model from scratch"
        raise UserError("a pretrained model does not need a teacher", hint=hint)
    # The `config.toml` of any run has a size; of those with a shape, only an inherited model's says nothing of tuning.
    is_inherited = bool(model.base) and ("size" in flags or (model.shape is not None and not tune))
    if is_inherited and tune:
        what = "`--size` makes a smaller model of the pretrained one, all of which is trained"
        raise UserError(what, hint="omit `--tune`")
    determined = FIXED if is_inherited else FIXED + SHAPED
    if fixed := [SETTINGS[name].flag for name in determined if name in flags]:
        raise UserError(f"the pretrained model determines `{fixed[0]}`", hint="omit it")
    return "inherited" if is_inherited else "pretrained"


def go_on(name: str, flags: dict[str, Any], requests: list[int], reserved: "Run | None") -> "Begun":
    from lapclip.runs.run import open_run
    from lapclip.runs.status import refuse_if_finished

    run = reserved or open_run(name)
    refuse_fixed(run, flags)
    if reserved is None and run.owner() is not None:
        raise run.is_taken()  # before setting up, which takes a while
    settings = load_config(run.path / "config.toml", flags)
    refuse_if_finished(run, settings)
    refuse_missing_data(settings)
    with working("setting up"):
        from lapclip.train.prepare import open_here, refuse_if_other, revising
    places = ("source", "images", "general", "max_unreadable")
    where = {name: flags[name] for name in places if name in flags}
    config = run.load_config()
    if not run.may_open(config):
        where = {"images": None, **where}
    config = replace(config, data=replace(config.data, **where))
    data = follow(open_here(config), requests, OPENING, is_kept=True)
    if "source" in flags:
        refuse_if_other(run, data)
    if config.train.tune == "heads":
        from lapclip.finetune.prepare import reopen_features

        settings = with_values(settings, data.settings)
        return run, settings, data, follow(reopen_features(config, run, data), requests, "setting up")
    teacher = None
    if taught_by := settings.model.teacher:
        teacher = consult_teacher(with_values(config, {"teacher": taught_by}), requests)[1]
    return run, follow(revising(run, flags, data), requests, "setting up"), data, teacher


def refuse_fixed(run: "Run", flags: dict[str, Any]) -> None:
    config = run.load_config()
    named = {"general": config.data.general, "teacher": config.model.teacher}
    if any(name not in flags for name in ("source", *(name for name, value in named.items() if value))):
        others = "".join(f" --{name} {name.upper()}" for name, value in named.items() if value)
        run.refuse_to_open(config, f"lapclip train --resume {run.reference} SOURCE{others}")
    fixed = [SETTINGS[name].flag for name in flags if name not in RESUMABLE]
    if fixed:
        what = f"{' and '.join(f'`{flag}`' for flag in fixed)} cannot change when a run is resumed"
        again = f"`lapclip train --config {typed(run.path)}/config.toml {fixed[0]} ...`"
        raise UserError(what, hint=f"make a run with its settings: {again}")


def show_training(
    config: "Config",
    run: "Run",
    data: "Data",
    requests: list[int],
    cached: "Cached | None" = None,
    *,
    as_json: bool,
    verbose: bool,
) -> int:
    """Trains and shows it, until the budget is used up or somebody asks to stop."""
    with working("starting"):
        from lapclip.machine.power import keep_awake
        from lapclip.runs.events import Continued, Paused
        from lapclip.runs.history import summarize
        from lapclip.runs.status import read_end
        from lapclip.train.loop import train as events_of
        from lapclip.view.lines import Screen

    with ExitStack() as awake, closing(events_of(config, run, data, cached)) as events:
        awake.enter_context(keep_awake())
        first = next(events)  # before anything is said: the run may belong to another process
        show_resolved(config, run, is_short=people.is_terminal and not verbose)
        with Screen(people) as screen:
            screen.show(first)
            for event in () if requests else events:
                screen.show(event)
                if requests:
                    break
                if isinstance(event, Paused):
                    awake.close()  # while it waits for power it must not cost any
                elif isinstance(event, Continued):
                    awake.enter_context(keep_awake())
    result = read_end(run.path / "events.jsonl").finished
    assert result is not None, "it is written last"
    stopped = result.reason == "stopped"
    show_result(run, result, write_page(run), stopped=stopped)
    if as_json:
        summary = summarize(run)
        print_json(
            {
                "run": str(run.path),
                "steps": result.step,
                **{name: value for name, value in asdict(result).items() if name not in ("step", "time")},
                "general": summary.general,
                "interpolated": summary.interpolated,
                "settled": {
                    name: {"value": value_of(run.load_config(), name), "reason": reason}
                    for name, reason in run.load_machine().get("reasons", {}).items()
                },
            }
        )
    return 130 if stopped else 0


def show_resolved(config: "Config", run: "Run", *, is_short: bool = False) -> None:
    """The automatic choices; in short those that decide how long a run takes and what it can learn."""
    from rich.table import Table

    from lapclip.autotune.plans import plan_of

    say(f"run: {run.path}")
    reasons = run.load_machine().get("reasons", {})
    rows = [(name, str(value_of(config, name)), name) for name in reasons]
    if is_short:
        budget = next(name for name in BUDGETS if value_of(config, name) is not None)
        amount = value_of(config, budget)
        name = model_name(vars(config.model) | vars(config.train))
        model = f"{name}, {amount:g} {budget[:-1] if amount == 1 else budget}"
        batch, plan = str(config.train.batch_size), plan_of(config).in_words()
        rows = [("model", model, budget), ("batch", batch, "batch_size"), ("plan", plan, "device")]
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for label, value, name in rows:
        table.add_row(label, value, reasons.get(name, "asked for"))
    people.print(table, highlight=False, markup=False)
    if is_short:
        say(f"all {len(reasons)} automatic choices: `--verbose`, or {run.path}/machine.json")


def write_page(run: "Run") -> Path | None:
    """Writes the report; without one the run is as good."""
    from lapclip.view.report import write_report

    try:
        return write_report(run)
    except (UserError, OSError) as problem:
        say(f"warning: could not write the report: {problem}")
    return None


def show_result(run: "Run", result: "Finished", page: Path | None, *, stopped: bool) -> None:
    from lapclip.runs.history import is_chance, summarize
    from lapclip.units import duration, plural, size
    from lapclip.view.lines import forgetting, recall_table
    from lapclip.view.report import last_quarter

    what = "done" if not stopped else "stopped and saved" if result.step else "stopped before the first step"
    say(
        f"{what}: {plural(result.step, 'step')}, {result.num_pairs_seen:,} pairs in {duration(result.seconds)}"
        f" of training ({result.pairs_per_second:,.0f} pairs/s), at most {size(result.peak_memory_bytes)} of memory"
    )
    summary = summarize(run)
    if result.recall is not None:
        people.print(recall_table(result.recall), highlight=False)
        if result.best_step != result.step and not summary.history.is_interpolated:
            say(f"the table is for step {result.best_step:,}, the best checkpoint, which `eval` loads")
    for words in forgetting(summary):
        say(words)
    if not stopped:
        say(f"images found for a few captions: {run.path}/learned.png")
    if page is not None:
        say(f"the report: {page}")
    if summary.over_fits:
        say(summary.over_fits)
    elif result.recall is not None and is_chance(result.recall) and not stopped:
        images = plural(result.recall["num_images"], "validation image")
        say(f"on {images}, recall is not significantly above chance")
    say("next:")
    if result.checkpoint is not None:
        say(f"  {own_name()} eval {run.reference}")
        source = run.load_config().data.source
        if Path(source).is_dir():
            say(f"  {own_name()} index {typed(source)} --model {run.reference}")
    may_improve = last_quarter(summary)[0] in (1, None)
    if stopped or (may_improve and not (summary.over_fits or summary.history.is_saturated)):
        say(f"  {own_name()} train --resume {run.reference}{'' if stopped else summary.doubled}")
