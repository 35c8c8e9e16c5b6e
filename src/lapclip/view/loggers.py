"""A run handed on to TensorBoard or Weights & Biases, by reading its events: training knows nothing of either.

Each follows the run from its start to its end, or until Ctrl-C, and can be started again: nothing comes out twice.
"""

import dataclasses
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from lapclip.errors import UserError, printable
from lapclip.files import cannot_write
from lapclip.runs.events import Evaluated, Event, Failed, Finished, Follower, Inspected, Started, Step, Warned
from lapclip.runs.run import Run

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_BEGIN = 10  # that a folder without a process and without events is given
OF_A_STEP = ("loss", "accuracy", "lr", "temperature", "grad_norm", "pairs_per_second")
SUFFIX = ".lapclip"  # of the files that are ours, in a folder where others may write too


def follow(run: Run) -> Iterator[Event | None]:
    """Every event of a run, until nobody trains it any more; None whenever there is nothing new for now."""
    follower, began, has_any = Follower(run.path / "events.jsonl"), time.monotonic(), False
    while True:
        is_alive = run.owner() is not None  # asked before reading: a process writes its end, then lets go
        for event in follower.new():
            has_any = True
            yield event
        yield None
        if not is_alive and has_any:
            return
        if not is_alive and time.monotonic() - began > SECONDS_TO_BEGIN:
            raise UserError(
                f"run `{run.name}` has no events yet, and nobody is training it",
                hint=f"train it first: `lapclip train --resume {run.reference}`",
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


def scalars_of(event: Event) -> dict[str, float]:
    """The numbers of an event, by names that both programs sort into groups."""
    match event:
        case Step():
            return {f"training/{name}": getattr(event, name) for name in OF_A_STEP}
        case Evaluated():
            return of_evaluation(event)
        case Inspected():
            return of_inspection(event)
    return {}


def of_evaluation(event: Evaluated) -> dict[str, float]:
    ways = ("text_to_image", "image_to_text")
    found = {f"recall/{way}@{k}": event.recall[way][f"recall@{k}"] for way in ways for k in (1, 5, 10)}
    negatives = event.recall.get("negatives") or {}
    found |= {f"negatives/{level}": negatives[level] for level in ("easy", "medium", "hard") if negatives}
    return found if event.loss is None else found | {"validation/loss": event.loss}


def of_inspection(event: Inspected) -> dict[str, float]:
    whole = sum(event.parts.values()) or 1.0
    kinds = event.memory | {
        "used": event.memory_used,
        "peak": event.memory_peak,
        "limit": event.memory_limit,
    }
    machine = {
        name: float(value) for name, value in event.readings.items() if isinstance(value, (int, float))
    }
    cores = {f"core_{number}": share for number, share in enumerate(event.readings.get("cores", ()), 1)}
    return {
        **{f"share_of_step/{part}": seconds / whole for part, seconds in event.parts.items()},
        **{f"memory_bytes/{kind}": size for kind, size in kinds.items() if size is not None},
        **{f"grad_norm/{layer}": norm for layer, norm in event.grad_norms.items()},
        **{f"machine/{name}": value for name, value in (cores | machine).items()},
    }


def settings_of(run: Run) -> dict[str, Any]:
    """The settled settings by name; a run may have been made by a version that had others."""
    try:
        sections = dataclasses.asdict(run.load_config())
    except UserError:
        return {}
    return {
        name: value for section in sections.values() for name, value in section.items() if value is not None
    }


def in_words(event: Warned) -> str:
    return f"{event.message}; {event.hint}"


class Logger(Protocol):
    """Takes a run's events one by one."""

    def add(self, event: Event) -> None: ...
    def flush(self) -> None: ...


def hand_on(run: Run, logger: Logger) -> bool:
    """Gives a logger all events; False when somebody left with Ctrl-C before the run's end."""
    try:
        for event in follow(run):
            if event is None:
                logger.flush()
            else:
                logger.add(event)
    except KeyboardInterrupt:
        return False
    return True


def to_tensorboard(run: Run) -> bool:
    """Writes `tensorboard/` in the run's folder, anew each time."""
    try:
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
    except ImportError as problem:
        raise missing("tensorboard", "TensorBoard", problem) from None
    folder = run.path / "tensorboard"
    try:
        folder.mkdir(exist_ok=True)
        for old in folder.glob(f"*.tfevents.*{SUFFIX}"):
            old.unlink(missing_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}{SUFFIX}"
        say(f"it is written to `{folder}`; look at it with `tensorboard --logdir {run.path.parent}`")
        with (folder / name).open("wb") as file:
            return hand_on(run, Board(RecordWriter(file), settings_of(run)))
    except OSError as error:
        raise cannot_write(folder, error) from None


class Board:
    """Events as TensorBoard's own records; needs neither its writer's thread nor TensorFlow."""

    def __init__(self, records: Any, settings: dict[str, Any]):
        self.records, self.settings, self.has_begun = records, settings, False

    def flush(self) -> None:
        self.records.flush()

    def add(self, event: Event) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.write(event, file_version="brain.Event:2")
            self.write_settings(event)
        match event:
            case Started():
                # Later steps, reported by a process that was killed before it saved them, are taken back.
                self.write(event, step=event.step + 1, session_log={"status": "START"})
            case Warned():
                self.write_text(event)
            case Finished() | Failed():
                self.write_end(event)
        if values := [{"tag": tag, "simple_value": value} for tag, value in scalars_of(event).items()]:
            self.write(event, summary={"value": values})

    def write(self, event: Event, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record  # type: ignore[import-untyped]

        where = {"step": getattr(event, "step", 0)} | content
        self.records.write(Record(wall_time=event.time, **where).SerializeToString())

    def write_text(self, event: Warned) -> None:
        from tensorboard.plugins.text import metadata  # type: ignore[import-untyped]

        shape: dict[str, list] = {"dim": []}
        value = {
            "tag": f"warnings/{event.kind or 'other'}",
            "metadata": metadata.create_summary_metadata(display_name=None, description=None),
            "tensor": {"dtype": "DT_STRING", "tensor_shape": shape, "string_val": [in_words(event).encode()]},
        }
        self.write(event, summary={"value": [value]})

    def write_settings(self, event: Event) -> None:
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2  # type: ignore[import-untyped]

        about = plugin_data_pb2.SessionStartInfo(start_time_secs=event.time)
        for name, value in self.settings.items():
            if isinstance(value, bool):
                about.hparams[name].bool_value = value
            elif isinstance(value, (int, float)):
                about.hparams[name].number_value = value
            else:
                about.hparams[name].string_value = str(value)
        self.write_session(event, metadata.SESSION_START_INFO_TAG, session_start_info=about)

    def write_end(self, event: Finished | Failed) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_FAILURE if isinstance(event, Failed) else api_pb2.STATUS_SUCCESS
        about = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=event.time)
        self.write_session(event, metadata.SESSION_END_INFO_TAG, session_end_info=about)

    def write_session(self, event: Event, tag: str, **about: Any) -> None:
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        content = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**about))
        value = {"tag": tag, "metadata": content, "tensor": metadata.NULL_TENSOR}
        self.write(event, step=0, summary={"value": [value]})


def to_wandb(run: Run) -> bool:
    """Sends the run to Weights & Biases; where nobody is logged in, keeps it in its folder for sending it later."""
    try:
        import wandb
    except ImportError as problem:
        raise missing("wandb", "Weights & Biases", problem) from None
    logger = Biases(run)
    try:
        is_whole = hand_on(run, logger)
        logger.close()
        return is_whole
    except wandb.Error as error:
        raise UserError(
            f"Weights & Biases refuses: {error}", hint="keep the run here with `WANDB_MODE=offline`"
        ) from None
    except OSError as error:
        raise cannot_write(run.path / "wandb", error) from None


class Biases:
    """Events as rows of Weights & Biases. It takes steps in rising order only: those that come again are left out."""

    def __init__(self, run: Run):
        self.run = run
        self.rows: Any = None
        self.has_failed = False
        self.warned: list[str] = []  # at the last step that had any
        self.last_warned_step = -1

    def flush(self) -> None:
        """Rows go out by themselves."""

    def add(self, event: Event) -> None:
        if self.rows is None:
            self.rows = begin(self.run, event)
        self.has_failed = isinstance(event, Failed)
        step = getattr(event, "step", 0)
        values: dict[str, Any] = dict(scalars_of(event))
        if isinstance(event, Warned):
            self.warned = [*(self.warned if step == self.last_warned_step else ()), in_words(event)]
            self.last_warned_step = step
            values["warnings"] = "\n".join(self.warned)
        if values and step >= self.rows.step:
            self.rows.log(values | {"_timestamp": event.time}, step=step)

    def close(self) -> None:
        if self.rows is not None:
            self.rows.finish(exit_code=int(self.has_failed))
            if self.rows.offline:
                say(f"`wandb sync {folder_of(self.rows)}` sends it")


def folder_of(rows: Any) -> str:
    return os.path.relpath(Path(rows.dir).parent)


def begin(run: Run, first: Event) -> Any:
    """The run over there, under a name that it has for ever: of its own name and the moment it began."""
    import wandb

    number = hashlib.sha256(f"{run.name} {first.time}".encode()).hexdigest()[:16]
    mode = mode_of(os.environ.get("WANDB_MODE"))
    if mode == "offline":
        for old in run.path.glob(f"wandb/offline-run-*-{number}"):
            if not any(old.glob("*.synced")):
                shutil.rmtree(old, ignore_errors=True)  # the new one will have all that is in it
    rows = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "lapclip"),
        dir=run.path.absolute(),
        id=number,
        name=run.name,
        config=settings_of(run),
        resume="allow",
        mode=mode,
        # It would look at this process, not at the one that trains; and nothing but the events is to leave.
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    )
    say(f"it is written to {f'`{folder_of(rows)}`' if rows.offline else rows.url}")
    return rows


def mode_of(asked: str | None) -> Any:
    """Where to write: as asked; else online where somebody is logged in. Nobody is asked a question."""
    import wandb

    if asked not in (None, "", "online"):
        return asked
    if wandb.login(prompt=False, verify=False):
        return "online"
    if asked == "online":
        raise UserError(
            "nobody is logged in to Weights & Biases here",
            hint="run `wandb login`, or keep the run here with `WANDB_MODE=offline`",
        )
    say("nobody is logged in to Weights & Biases: the run stays here")
    return "offline"


def missing(package: str, name: str, problem: ImportError) -> UserError:
    found = "is not installed" if problem.name == package else f"does not load: {problem}"
    return UserError(
        f"{name} needs the package `{package}`, which {found}", hint=f"pip install 'lapclip[{package}]'"
    )


def say(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr, flush=True)  # noqa: T201  # for people; stdout is data


LOGGERS: dict[str, Callable[[Run], bool]] = {"tensorboard": to_tensorboard, "wandb": to_wandb}
