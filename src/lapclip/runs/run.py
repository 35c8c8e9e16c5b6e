"""The run folder: settings, machine, tokenizer, events, checkpoints, and the lock of the process that owns it."""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lapclip import files
from lapclip.config import SETTINGS, Config, load_config, to_toml
from lapclip.errors import UserError, shortened, suggest, typed
from lapclip.runs.events import Event, Failed, Step, read_events, to_line

RUNS = Path("runs")
INSTALLED = os.stat(__file__).st_ctime  # cannot be set by unpacking an archive
MAX_NAME_BYTES = 100  # bytes
# The file keeps no more `Step` lines than one in that time: under 5 MB an hour, however small the model.
SECONDS_BETWEEN_STEPS = 0.5
MAX_SAID = 400  # characters of a message or a hint in the lock, whose block holds both
# What lies in a run's folder before its `config.toml`, which is written last.
WHILE_SET_UP = ("lock", "output.log", "events.jsonl", "checkpoints", "tokenizer.json", "machine.json")
DRAWN = re.compile(r"(synthetic(:\w+)?|emoji)(@[\w.-]+)?")  # a source that names no file and no address


@dataclass
class Run:
    """A run by its path. Opening it reads nothing; `owned` lets one process at a time write to it."""

    path: Path
    last_step_written: float = field(default=0.0, repr=False)
    step_left_out: Step | None = field(default=None, repr=False)
    handle: int | None = field(default=None, repr=False)  # of the lock, while this process holds it
    is_reserved: bool = field(default=False, repr=False)  # held for a training that has not begun

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def reference(self) -> str:
        """What one types to name it: its name when it lies in `runs/` here, else its path."""
        return typed(self.name if self.path == RUNS / self.name else self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    def last_change(self) -> float:
        """When something last happened to it."""
        times = [0.0]
        for name in ("events.jsonl", "config.toml", "lock"):
            with contextlib.suppress(OSError):  # never there, or removed meanwhile
                times.append((self.path / name).stat().st_mtime)
        return max(times)

    def load_config(self) -> Config:
        return load_config(self.path / "config.toml")

    def write_config(self, config: Config) -> None:
        files.write_atomically(self.path / "config.toml", to_toml(config))
        record = record_of(config)
        with contextlib.suppress(OSError, UserError):  # without a cache training goes on
            record.parent.mkdir(parents=True, exist_ok=True)
            if not record.exists():
                files.write_atomically(record, json.dumps(config.data.source))

    def may_open(self, config: Config) -> bool:
        """Whether its settings may name what is opened: drawn data, or a source that this user has trained on."""
        named = filter(None, (config.data.source, config.data.general, config.model.teacher))
        parts, record = " + ".join(named).split(" + "), record_of(config)
        if (config.data.images is None and all(map(DRAWN.fullmatch, parts))) or record.exists():
            return True
        found, is_here = (self.path / "config.toml").lstat(), self.path.resolve().parent == RUNS.resolve()
        # Runs that are older than this version and all records count if this user wrote them to `runs/` here.
        records = (other.stat().st_mtime for other in record.parent.glob("[0-9a-f]*"))
        return is_here and found.st_uid == os.getuid() and found.st_ctime < min(INSTALLED, *records, math.inf)

    def refuse_to_open(self, config: Config, command: str) -> None:
        if not self.may_open(config):
            what = f"run `{self.name}` names the source `{shortened(config.data.source)}`"
            what += ", and you have no record of training on it"
            raise UserError(what, hint=f"name a source: `{command}`")

    def load_machine(self) -> dict[str, Any]:
        """What the run was prepared on, and under `reasons` why each automatic choice was made."""
        try:
            facts = files.read_json(self.path / "machine.json")
        except (OSError, ValueError):
            return {}
        for name in facts.keys() & {"reasons", "origins"}:
            own = facts[name].items() if isinstance(facts[name], dict) else ()
            facts[name] = {key: text for key, text in own if key in SETTINGS and isinstance(text, str)}
        return facts

    def write_machine(self, facts: dict[str, Any]) -> None:
        files.write_atomically(self.path / "machine.json", json.dumps(facts, indent=2))

    def events(self) -> Iterator[Event]:
        return read_events(self.path / "events.jsonl")

    def write(self, event: Event) -> None:
        """Appends an event; of many steps a second only some are kept, and the last one before anything else."""
        events = [event]
        if isinstance(event, Step):
            now = time.monotonic()
            if now - self.last_step_written < SECONDS_BETWEEN_STEPS:
                self.step_left_out = event
                return
            self.last_step_written = now
        elif self.step_left_out is not None:
            events = [self.step_left_out, event]
        self.step_left_out, text = None, "".join(map(to_line, events))
        try:
            how = os.O_RDWR | os.O_APPEND | os.O_CREAT, "a+b"
            with files.open_regular(self.path / "events.jsonl", *how) as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a killed process left its last line half written
                        text = f"\n{text}"
                file.write(text.encode())
        except OSError as error:
            raise files.cannot_write(self.path, error) from None

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Holds the run's lock; what ends the block badly is written down as `Failed` on its way."""
        if not self.is_reserved:
            self.take_lock()
        self.is_reserved = False
        try:
            yield
        finally:
            self.let_go(sys.exception())

    @contextlib.contextmanager
    def reserved(self, handle: int) -> Iterator[None]:
        """Holds the lock that the process that started this one took for it, until `owned` goes on with it."""
        self.take_lock(handle)
        self.is_reserved = True
        try:
            yield
        finally:
            if self.is_reserved:
                self.is_reserved = False
                self.let_go(sys.exception())

    def let_go(self, problem: BaseException | None) -> None:
        if problem is not None and not isinstance(problem, (GeneratorExit, KeyboardInterrupt)):
            self.write_failure(problem)
        self.release()

    def take_lock(self, handle: int | None = None) -> None:
        """Takes the lock, or takes over one that was taken for this process, and writes down whose it is."""
        path = self.path / "lock"
        for own in (self.checkpoints, self.path / "snapshots"):
            if own.is_symlink():  # which a stranger may have set to the folder of another run
                hint = "replace it by the folder, or link the whole run instead"
                raise UserError(f"`{own}` is a link", hint=hint)
        try:
            self.handle = files.take_lock(path) if handle is None else files.adopt_lock(handle, path)
            files.write_lock_owner(self.handle, os.getpid())
        except files.Taken:
            raise self.is_taken() from None
        except OSError as error:
            self.release()
            raise files.cannot_write(path, error) from None

    def is_taken(self) -> UserError:
        what = f"run `{self.name}` is being trained by process {self.owner() or 'another one'}"
        hint = f"wait for it, or stop it: `lapclip runs stop {self.reference}` saves and stops it"
        return UserError(what, hint=hint)

    def hand_over(self, pid: int) -> None:
        """Leaves the lock to a process that was started with it open."""
        assert self.handle is not None
        files.write_lock_owner(self.handle, pid)
        os.close(self.handle)
        self.handle = None

    def release(self) -> None:
        """Lets go of the lock; a failure that could be written nowhere else stays in it."""
        if self.handle is not None:
            files.release_lock(self.handle, keep=self.read_lock().said is not None)
            self.handle = None

    def read_lock(self) -> files.Held:
        return files.read_lock(self.path / "lock")

    def owner(self) -> int | None:
        """The process that is training the run now; what a killed one left in the file does not count."""
        return self.read_lock().owner

    def write_failure(self, problem: BaseException) -> None:
        bug = "this is a bug in lapclip; please report it"
        hint = problem.hint if isinstance(problem, UserError) else bug
        event = Failed(message=str(problem) or type(problem).__name__, hint=hint)
        try:
            self.write(event)
        except UserError:  # the disk is full
            with contextlib.suppress(OSError):
                short = replace(event, message=event.message[:MAX_SAID], hint=event.hint[:MAX_SAID])
                assert self.handle is not None, "owned"
                files.write_lock(self.handle, {"said": asdict(short)})


def record_of(config: Config) -> Path:
    """The file that exists if this user has trained on the same source, read in the same way."""
    data, teacher = config.data, config.model.teacher
    place: list[Any] = [data.source, data.images, data.format, data.image_column, data.caption_column]
    place += [data.general] if data.general else []  # which earlier versions did not have
    place += [{"teacher": teacher}] if teacher else []
    return files.cache_folder() / "sources" / hashlib.sha256(json.dumps(place).encode()).hexdigest()[:16]


def read_own(path: Path, folder: Path, max_bytes: int) -> bytes:
    """A file of the run's own, however it is linked: a page that is passed on must not carry any other file."""
    try:
        real = path.resolve(strict=True)
        is_own = real.is_relative_to(folder.resolve())
    except RuntimeError as error:  # a circle of links
        raise OSError(str(error)) from None
    if not is_own:
        raise OSError(f"`{path}` is not a file of the run")
    return files.read_bounded(real, max_bytes)


def refuse_name(name: str) -> None:
    """Refuses what cannot be the name of a new run, before any work is done for it."""
    is_word = name.strip(".") and name.isprintable() and not re.search(r"[\s/\\]", name)
    if not is_word or name.startswith("-") or len(name.encode()) > MAX_NAME_BYTES:
        hint = "use a name without spaces and slashes: `--run cats`; it becomes `runs/cats`"
        why = "cannot be the name of a run: too long, or with spaces, slashes or the like"
        raise UserError(f"`{name[:MAX_NAME_BYTES]}` {why}", hint=hint)
    if (RUNS / name).exists() and not is_leftover(RUNS / name):
        raise name_taken(name)


def name_taken(name: str) -> UserError:
    hint = f"continue it with `--resume {name}`, or choose another name with `--run`"
    return UserError(f"run `{name}` already exists", hint=hint)


def is_run(path: Path) -> bool:
    """Whether a folder is a run, if only one that is being set up."""
    return any((path / name).is_file() for name in ("config.toml", "lock", "events.jsonl"))


def is_leftover(path: Path) -> bool:
    """Whether a run was never set up: there is nothing in it to resume."""
    if not (path / "lock").is_file() or (path / "config.toml").exists() or Run(path).owner() is not None:
        return False
    is_known = all(child.name in WHILE_SET_UP or child.suffix == ".writing" for child in path.iterdir())
    return is_known and not any((path / "checkpoints").glob("*"))


def all_runs() -> list[Run]:
    """Every run of this folder, those being set up too; the newest first."""
    try:
        visible = [path for path in RUNS.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
    found = [Run(path) for path in visible if is_run(path)]
    return sorted(found, key=lambda run: (run.last_change(), run.name), reverse=True)


def newest_run() -> Run | None:
    """The run that is being trained; of several, or none, the one where something happened last."""
    runs = all_runs()
    return next((run for run in runs if run.owner() is not None), runs[0] if runs else None)


def new_run(name: str | None, *, prefix: str) -> Run:
    """Makes `runs/NAME` here; without a name, the next free `runs/PREFIX-1`, `-2` and so on."""
    if name is not None:
        refuse_name(name)
        if is_leftover(RUNS / name):
            leftover = Run(RUNS / name)
            leftover.take_lock()
            shutil.rmtree(leftover.path, ignore_errors=True)
            leftover.release()
    numbers = itertools.count(1)
    while True:
        path = RUNS / (name or f"{prefix}-{next(numbers)}")
        try:
            path.mkdir(parents=True)
            Run(path).checkpoints.mkdir()
            return Run(path)
        except FileExistsError:
            if not RUNS.is_dir():
                hint = "move it, or train in another folder"
                raise UserError(f"`{RUNS.absolute()}` is a file, not a folder for runs", hint=hint) from None
            if name is not None:
                raise name_taken(name) from None
        except OSError as error:
            raise files.cannot_write(path, error) from None


def open_run(name: str) -> Run:
    """The run of that name or path, which has been set up."""
    run = find_run(name)
    if (run.path / "config.toml").is_file():
        return run
    if run.owner() is not None:
        hint = f"wait: `lapclip watch {run.reference}`"
        raise UserError(f"run `{run.name}` is still being set up", hint=hint)
    hint = f"start it again: the first line of `{run.path}/output.log` is its command"
    raise UserError(f"run `{run.name}` was never set up, and is empty", hint=hint)


def run_of(model: str) -> Run | None:
    """The run that a model is, or a checkpoint is of; None for other models."""
    with contextlib.suppress(UserError):
        return open_run(model)
    folder = Path(model).expanduser().absolute().parent
    is_checkpoint = folder.name == "checkpoints" and (folder.parent / "config.toml").is_file()
    return Run(folder.parent) if is_checkpoint else None


def bases_of(config: Config, runs: Path | None = None) -> list[tuple[Config, Run]]:
    """The run that one in the folder `runs` starts from, the one before that, and so on, as far as they can be read."""
    found: dict[Path, tuple[Config, Run]] = {}
    runs = runs or RUNS
    with contextlib.suppress(UserError):
        while base := config.model.base:
            # A relative name is of the folder in which the run was made.
            places = (run_of(str(place / base)) for place in (runs, runs.absolute().parent))
            run = next(filter(None, places), None)
            if run is None or run.path in found:
                break
            config, runs = run.load_config(), run.path.parent
            found[run.path] = config, run
    return list(found.values())


def find_run(name: str) -> Run:
    """The run of that name or path, also while it is being set up."""
    for path in (Path(name), RUNS / name):
        if (path / "config.toml").is_file():
            return Run(path if path.name else path.absolute())
    for path in (RUNS / name, Path(name)):
        if path.name == Path(name).name and path.parent != Path() and is_run(path):
            return Run(path)
    newest = newest_run()
    here = f"; the newest is `{newest.name}`" if newest else f"; `{RUNS.absolute()}` holds none"
    near = suggest(name, [run.name for run in all_runs()])
    hint = "`lapclip runs` lists the runs of this folder; for other folders, pass the path of the run"
    raise UserError(f"there is no run `{name}`{near or here}", hint=hint)
