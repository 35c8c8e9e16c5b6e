"""The run folder: settings, machine, tokenizer, events, checkpoints, and the lock of the process that owns it."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lapclip.config import Config, load_config, to_toml
from lapclip.errors import UserError, suggest
from lapclip.events import Event, Failed, Step, read_events, to_line

RUNS = Path("runs")
SECONDS_BETWEEN_STEPS = (
    0.5  # the file keeps no more `Step` lines than that: under 5 MB an hour, however small the model
)


@dataclass
class Run:
    """A run by its path. Opening it reads nothing; `owned` lets one process at a time write to it."""

    path: Path
    last_step_written: float = field(default=0.0, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    def load_config(self) -> Config:
        return load_config(self.path / "config.toml")

    def write_config(self, config: Config) -> None:
        write_atomically(self.path / "config.toml", to_toml(config))

    def load_reasons(self) -> dict[str, str]:
        """Why each automatic choice was made, by setting."""
        try:
            return json.loads((self.path / "machine.json").read_text("utf-8"))["reasons"]
        except (OSError, ValueError, KeyError):
            return {}

    def events(self) -> Iterator[Event]:
        return read_events(self.path / "events.jsonl")

    def write(self, event: Event) -> None:
        """Appends an event; of many steps a second only some are kept."""
        if isinstance(event, Step):
            now = time.monotonic()
            if now - self.last_step_written < SECONDS_BETWEEN_STEPS:
                return
            self.last_step_written = now
        try:
            with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
                file.write(to_line(event))
        except OSError as error:
            raise cannot_write(self.path, error) from None

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Holds the run's lock; what ends the block badly is written down as `Failed` on its way."""
        self.take_lock()
        try:
            yield
        finally:
            problem = sys.exception()
            if problem is not None and not isinstance(problem, (GeneratorExit, KeyboardInterrupt)):
                self.write_failure(problem)
            (self.path / "lock").unlink(missing_ok=True)

    def write_failure(self, problem: BaseException) -> None:
        hint = (
            problem.hint if isinstance(problem, UserError) else "this is a fault of lapclip; please report it"
        )
        with contextlib.suppress(UserError):  # on a full disk the problem itself matters more than its record
            self.write(Failed(message=str(problem) or type(problem).__name__, hint=hint))

    def take_lock(self) -> None:
        owner = self.owner()
        if owner is not None:
            raise UserError(
                f"run `{self.name}` is being trained by process {owner}",
                hint=f"wait for it, or stop it with `kill {owner}`: it saves and ends",
            )
        lock = self.path / "lock"
        lock.unlink(missing_ok=True)  # of a process that was killed
        process = psutil.Process()
        content = json.dumps({"pid": process.pid, "started": process.create_time()})
        try:
            with lock.open("x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            raise UserError(
                f"run `{self.name}` was taken by another process just now", hint="try again"
            ) from None
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def owner(self) -> int | None:
        """The process that is training the run now; a lock left behind by a killed one does not count."""
        try:
            lock = json.loads((self.path / "lock").read_text("utf-8"))
            alive = psutil.Process(lock["pid"]).create_time() == lock["started"]
        except (OSError, ValueError, KeyError, TypeError, psutil.Error):
            return None
        return lock["pid"] if alive else None


def new_run(name: str | None, *, prefix: str) -> Run:
    """Makes `runs/NAME` here; without a name, the next free `runs/PREFIX-1`, `-2` and so on."""
    if name is not None and (not name.strip(".") or any(c in name for c in "/\\\0") or name.startswith("-")):
        raise UserError(
            f"`{name}` cannot be the name of a run",
            hint="use a plain word: `--run cats`; it becomes `runs/cats`",
        )
    try:
        if name is not None:
            path = RUNS / name
            path.mkdir(parents=True)
            return Run(path)
        RUNS.mkdir(exist_ok=True)
        number = 1
        while True:
            path = RUNS / f"{prefix}-{number}"
            try:
                path.mkdir()
                return Run(path)
            except FileExistsError:
                number += 1
    except FileExistsError:
        if not RUNS.is_dir():
            raise UserError(
                f"`{RUNS.absolute()}` is a file, not a folder for runs",
                hint="move it, or train in another folder",
            ) from None
        raise UserError(
            f"there is a run called `{name}` already",
            hint=f"continue it with `--resume {name}`, or choose another name with `--run`",
        ) from None
    except OSError as error:
        raise cannot_write(path if name else RUNS, error) from None


def open_run(name: str) -> Run:
    """The run of that name or path."""
    for path in (Path(name), RUNS / name):
        if (path / "config.toml").is_file():
            return Run(path)
    known = sorted(p.parent.name for p in RUNS.glob("*/config.toml"))
    listed = (
        f"; here are {', '.join(f'`{k}`' for k in known[-5:])}"
        if known
        else f"; `{RUNS.absolute()}` holds no run"
    )
    raise UserError(
        f"there is no run `{name}`{suggest(name, known) or listed}",
        hint="name a run, or the path of its folder, as `train` printed it",
    )


def write_atomically(path: Path, content: str) -> None:
    """A reader sees the old content or the new one, also after a crash."""
    beside = path.with_name(f".{path.name}.writing")  # one name, so that a killed writer leaves no heap behind
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write `{path}`: {(error.strerror or str(error)).lower()}",
        hint="make room, or train in a folder you may write to; a run that had begun goes on with `--resume`",
    )
