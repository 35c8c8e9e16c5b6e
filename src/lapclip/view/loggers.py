"""A run's numbers in TensorBoard or Weights & Biases, by reading its events: training knows nothing of either.

Each follows the run to its end, or until Ctrl-C, and can be started again: no number is written twice.
"""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from lapclip.errors import MissingPackage, UserError, printable
from lapclip.files import cannot_write
from lapclip.runs.events import Evaluated, Event, Failed, Follower, Inspected, Started, Step, Warned
from lapclip.runs.history import DIRECTIONS, KS, Summary
from lapclip.runs.run import Run
from lapclip.view.live import STEP_COLUMNS

SECONDS_BETWEEN_READS = 1.0
SECONDS_TO_BEGIN = 10  # that a folder without a process and without events is given
SUFFIX = ".lapclip"  # of our files, in a folder where others may write too


def follow(run: Run) -> Iterator[Event | None]:
    """Every event of a run until no process trains it; None whenever there is nothing new for now."""
    follower, ends, has_any = Follower(run.path / "events.jsonl"), time.monotonic() + SECONDS_TO_BEGIN, False
    while True:
        is_alive = run.owner() is not None  # before reading: a process writes its end, then releases the run
        for event in follower.new():
            has_any = True
            yield event
        yield None
        if not is_alive and (has_any or time.monotonic() > ends):
            break
        time.sleep(SECONDS_BETWEEN_READS)
    if not has_any:
        hint = f"train it first: `lapclip train --resume {run.reference}`"
        raise UserError(f"run `{run.name}` has no events yet, and no process is training it", hint=hint)


def scalars_of(event: Event) -> dict[str, float]:
    """The numbers of an event, by names that both programs sort into groups."""
    groups: dict[str, dict[str, Any]] = {}
    match event:
        case Step():
            groups = {"training": {name: getattr(event, name) for name in STEP_COLUMNS}}
        case Evaluated(recall=recall):
            negatives = recall.get("negatives") or {}
            levels = {level: negatives.get(level) for level in ("easy", "medium", "hard")}
            groups = {"negatives": levels, "validation": {"loss": event.loss}}
            for name, own in (("recall", recall), ("general", event.general)):
                if own:
                    keys = product(DIRECTIONS, KS)
                    groups[name] = {f"{way}@{k}": own[way][f"recall@{k}"] for way, k in keys}
        case Inspected(readings=readings):
            total = sum(event.parts.values()) or 1.0
            totals = {"used": event.memory_used, "peak": event.memory_peak, "limit": event.memory_limit}
            cores = {f"core_{number}": share for number, share in enumerate(readings.get("cores", ()), 1)}
            groups = {
                "share_of_step": {part: seconds / total for part, seconds in event.parts.items()},
                "memory_bytes": event.memory | totals,
                "grad_norm": event.grad_norms,
                "machine": cores | readings,
            }
    named = [(f"{group}/{name}", value) for group, own in groups.items() for name, value in own.items()]
    return {name: float(value) for name, value in named if isinstance(value, (int, float))}


def texts_of(event: Event) -> dict[str, str]:
    if isinstance(event, Warned):
        return {f"warnings/{event.kind or 'other'}": f"{event.message}; {event.hint}"}
    return {}


def to_tensorboard(run: Run) -> bool:
    """Writes `tensorboard/` in the run folder, from the start each time; False after Ctrl-C."""
    try:
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
    except ImportError as problem:
        raise MissingPackage(f"`tensorboard` cannot be imported: {problem}", "tensorboard") from None
    folder = run.path / "tensorboard"
    try:
        folder.mkdir(exist_ok=True)
        for old in folder.glob(f"*.tfevents.*{SUFFIX}"):
            old.unlink(missing_ok=True)
        say(f"writing to `{folder}`; open it with `tensorboard --logdir {run.path.parent}`")
        with (folder / f"events.out.tfevents.{int(time.time())}.{os.getpid()}{SUFFIX}").open("wb") as file:
            records = RecordWriter(file)
            records.write(record(0, time.time(), file_version="brain.Event:2"))
            settings = "\n\n".join(f"{name} = {value}" for name, value in Summary(run).settings.items())
            records.write(record(0, time.time(), summary={"value": [text_value("settings", settings)]}))
            for event in follow(run):
                if event is None:
                    records.flush()
                    continue
                step = getattr(event, "step", 0)
                if isinstance(event, Started):  # drops later steps, which a killed process did not save
                    records.write(record(step + 1, event.time, session_log={"status": "START"}))
                values = [{"tag": tag, "simple_value": value} for tag, value in scalars_of(event).items()]
                values += [text_value(tag, text) for tag, text in texts_of(event).items()]
                if values:
                    records.write(record(step, event.time, summary={"value": values}))
    except KeyboardInterrupt:
        return False
    except OSError as error:
        raise cannot_write(folder, error) from None
    return True


def record(step: int, when: float, **content: Any) -> bytes:
    """TensorBoard's own record: `tensorboard.summary.Writer` can neither drop steps nor write text."""
    from tensorboard.compat.proto.event_pb2 import Event as Record  # type: ignore[import-untyped]

    return Record(step=step, wall_time=when, **content).SerializeToString()


def text_value(tag: str, text: str) -> dict[str, Any]:
    from tensorboard.plugins.text import metadata  # type: ignore[import-untyped]

    return {
        "tag": tag,
        "metadata": metadata.create_summary_metadata(display_name=None, description=None),
        "tensor": {"dtype": "DT_STRING", "tensor_shape": {"dim": []}, "string_val": [text.encode()]},
    }


def to_wandb(run: Run) -> bool:
    """Sends the run to Weights & Biases, or keeps it in its folder where nobody is logged in; False after Ctrl-C."""
    try:
        import wandb
    except ImportError as problem:
        raise MissingPackage(f"`wandb` cannot be imported: {problem}", "wandb") from None
    logged, exit_code, is_complete = None, 0, True
    try:
        try:
            for event in filter(None, follow(run)):
                logged = logged or begin_wandb(run, event)
                exit_code = int(isinstance(event, Failed))
                values, step = scalars_of(event) | texts_of(event), getattr(event, "step", 0)
                if values and step >= logged.step:  # it accepts rising steps only: repeated ones are omitted
                    logged.log(values | {"_timestamp": event.time}, step=step)
        except KeyboardInterrupt:
            is_complete = False
        if logged is not None:
            logged.finish(exit_code=exit_code)
    except wandb.Error as error:
        hint = "run `wandb login`, or keep the run here with `WANDB_MODE=offline`"
        raise UserError(f"Weights & Biases: {error}", hint=hint) from None
    except OSError as error:
        raise cannot_write(run.path / "wandb", error) from None
    return is_complete


def begin_wandb(run: Run, first: Event) -> Any:
    """Its run, under an id made of the name and the start, so that following again continues it."""
    import wandb

    identity = hashlib.sha256(f"{run.name} {first.time}".encode()).hexdigest()[:16]
    is_logged_in = wandb.login(prompt=False, verify=False)
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if is_logged_in else "offline")
    if mode == "offline":
        for old in run.path.glob(f"wandb/offline-run-*-{identity}"):
            if not any(old.glob("*.synced")):
                shutil.rmtree(old, ignore_errors=True)  # the new one will have everything in it
    # It would measure this process, not the one that trains; and only the events may leave this machine.
    private: dict[str, Any] = {"disable_code": True, "x_disable_stats": True, "x_disable_machine_info": True}
    logged = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "lapclip"),
        dir=run.path.absolute(),
        id=identity,
        name=run.name,
        config=Summary(run).settings,
        resume="allow",
        mode=mode,
        settings=wandb.Settings(silent=True, console="off", x_save_requirements=False, **private),
    )
    folder = os.path.relpath(Path(logged.dir).parent)
    local = f"writing to `{folder}`; upload it with `wandb sync {folder}`"
    say(local if logged.offline else f"writing to {logged.url}")
    return logged


def say(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr, flush=True)  # noqa: T201  # for people; stdout is data


LOGGERS: dict[str, Callable[[Run], bool]] = {"tensorboard": to_tensorboard, "wandb": to_wandb}
