"""The run folder: settings, machine, tokenizer, events, checkpoints, and the lock of the process that owns it."""

import contextlib
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lapclip.config import Config, load_config, to_toml
from lapclip.errors import UserError, suggest
from lapclip.events import Event, Failed, Finished, Step, read_events, to_line

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
    def reference(self) -> str:
        """What a command calls it: its name when it lies in `runs/` here, else its path."""
        return self.name if self.path == RUNS / self.name else str(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    def make_folders(self) -> None:
        try:
            self.checkpoints.mkdir()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def load_config(self) -> Config:
        return load_config(self.path / "config.toml")

    def write_config(self, config: Config) -> None:
        write_atomically(self.path / "config.toml", to_toml(config))

    def load_machine(self) -> dict[str, Any]:
        """What the run was prepared on, and under `reasons` why each automatic choice was made."""
        try:
            return json.loads((self.path / "machine.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}

    def write_machine(self, facts: dict[str, Any]) -> None:
        write_atomically(self.path / "machine.json", json.dumps(facts, indent=2))

    def is_finished(self) -> bool:
        """Whether the last thing that happened is that its budget was used up."""
        last = None
        for last in self.events():  # noqa: B007  # the loop is for its end
            pass
        return isinstance(last, Finished) and last.reason == "budget"

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
        with self.lock():
            self.end_torn_line()
            try:
                yield
            finally:
                problem = sys.exception()
                if problem is not None and not isinstance(problem, (GeneratorExit, KeyboardInterrupt)):
                    self.write_failure(problem)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """The system holds the lock, so that it ends with the process; the file tells people whose it is."""
        try:
            file = (self.path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.path, error) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = self.owner() or "another one"
                raise UserError(
                    f"run `{self.name}` is being trained by process {owner}",
                    hint=f"wait for it, or stop it with `kill {owner}`: it saves and ends",
                ) from None
            file.truncate(0)
            json.dump({"pid": os.getpid(), "started": psutil.Process().create_time()}, file)
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def owner(self) -> int | None:
        """The process that is training the run now; what a killed one left in the file does not count."""
        try:
            with (self.path / "lock").open(encoding="utf-8") as file:
                content = file.read()
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return json.loads(content)["pid"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def end_torn_line(self) -> None:
        """Ends the line a killed process left half written, so that the next event does not stand behind it."""
        events = self.path / "events.jsonl"
        if events.exists() and events.stat().st_size and not read_end(events).endswith(b"\n"):
            with events.open("a", encoding="utf-8") as file:
                file.write("\n")

    def write_failure(self, problem: BaseException) -> None:
        hint = (
            problem.hint if isinstance(problem, UserError) else "this is a fault of lapclip; please report it"
        )
        with contextlib.suppress(UserError):  # on a full disk the problem itself matters more than its record
            self.write(Failed(message=str(problem) or type(problem).__name__, hint=hint))


def read_end(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def refuse_name(name: str) -> None:
    """Refuses what cannot be the name of a new run, before any work is done for it."""
    if not name.strip(".") or name.startswith("-") or re.search(r"[\s/\\\0]", name):
        raise UserError(
            f"`{name}` cannot be the name of a run: it has a space or a slash, or is no word",
            hint="use a plain word: `--run cats`; it becomes `runs/cats`",
        )
    if (RUNS / name).exists():
        raise UserError(
            f"there is a run called `{name}` already",
            hint=f"continue it with `--resume {name}`, or choose another name with `--run`",
        )


def new_run(name: str | None, *, prefix: str) -> Run:
    """Makes `runs/NAME` here; without a name, the next free `runs/PREFIX-1`, `-2` and so on."""
    if name is not None:
        refuse_name(name)
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
    newest = sorted(RUNS.glob("*/config.toml"), key=lambda path: path.stat().st_mtime, reverse=True)
    known = [path.parent.name for path in newest]
    more = f" and {len(known) - 5} more" if len(known) > 5 else ""
    here = (
        f"; there are {', '.join(f'`{k}`' for k in known[:5])}{more}"
        if known
        else f"; `{RUNS.absolute()}` holds none"
    )
    raise UserError(
        f"there is no run `{name}`{suggest(name, known) or here}",
        hint="name a run, or the path of its folder, as `train` printed it",
    )


def write_atomically(path: Path, content: str) -> None:
    """A reader sees the old content or the new one, also after a crash."""
    beside = path.with_name(
        f".{path.name}.writing"
    )  # one name, so that a killed writer leaves no heap behind
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
