"""Everything a report needs of a run folder, read once; what is missing or broken there is left out, never an error."""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapclip.errors import one_line
from lapclip.runs.events import (
    Continued,
    Finished,
    Inspected,
    Paused,
    Started,
)
from lapclip.runs.history import History, Thinned
from lapclip.runs.intake import bench_speed
from lapclip.runs.run import Run
from lapclip.runs.status import status_of
from lapclip.units import is_number

MOST_MARKS = 200  # starts, and pauses, that are shown
MOST_ENERGY = 2000
MOST_SETTINGS_BYTES = 1 << 20
MOST_SNAPSHOT_BYTES = 8 << 20
MOST_IMAGE_BYTES = 1 << 16  # a 96 px JPEG has a tenth of that
MOST_QUERIES = 12
PICTURES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PN": "image/png"}  # by their first bytes


@dataclass
class Pause:
    """A stretch of waiting; `seconds` is None when nobody saw its end."""

    step: int
    reason: str
    seconds: float | None = None


@dataclass(frozen=True)
class Found:
    """An image that was found for a query."""

    kind: str  # such as image/jpeg
    content: bytes
    score: float | None
    is_right: bool


@dataclass(frozen=True)
class Query:
    """Words, and what the model found for them, best first."""

    text: str
    rank: int | None  # of the right image, from 1
    found: list[Found]


@dataclass(frozen=True)
class Record:
    """A run as it stands on the disk."""

    run: Run
    state: str  # running, paused, finished, stopped, failed or crashed
    settings: dict[str, Any]  # settled, by name
    toml: str
    machine: dict[str, Any]
    history: History
    starts: list[Started] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    energy: list[tuple[int, float]] = field(default_factory=list)  # step, and joules until then
    power_seconds: float = 0.0  # over which the power is known
    failure: str = ""
    failure_hint: str = ""
    snapshot_step: int | None = None
    queries: list[Query] = field(default_factory=list)

    @property
    def name(self) -> str:
        return one_line(self.run.name)

    @property
    def reasons(self) -> dict[str, str]:
        reasons = self.machine.get("reasons")
        return reasons if isinstance(reasons, dict) else {}

    @property
    def seconds(self) -> float:
        """Of training."""
        last = self.history.finished or self.history.step
        return last.seconds if last else 0.0

    @property
    def steps(self) -> int:
        last = self.history.finished or self.history.step
        return last.step if last else 0

    @property
    def epochs(self) -> float:
        """Times over the data; not every step is written down, but the end is."""
        step = self.history.step
        return self.history.finished.epochs if self.history.finished else step.epoch if step else 0.0

    @property
    def pairs_per_second(self) -> float | None:
        last = self.history.finished or self.history.step
        return last.num_pairs_seen / last.seconds if last and last.seconds > 0 else None

    @property
    def bench(self) -> float | None:
        """Pairs a second that `lapclip bench` had measured."""
        return bench_speed(self.machine)

    @property
    def peak_memory(self) -> int | None:
        """In bytes, of the process; of a run that has not finished, the most that was seen."""
        if self.history.finished and self.history.finished.peak_memory_bytes:
            return self.history.finished.peak_memory_bytes
        return max((i.memory_peak for i in self.history.inspections), default=None)

    @property
    def recall(self) -> dict[str, Any] | None:
        """Of the best checkpoint."""
        if self.history.finished and isinstance(self.history.finished.recall, dict):
            return self.history.finished.recall
        best = self.history.best or self.history.evaluated
        return best.recall if best else None

    @property
    def best_step(self) -> int | None:
        if self.history.finished and self.history.finished.recall:
            return self.history.finished.best_step
        best = self.history.best or self.history.evaluated
        return best.step if best else None


def find(tree: Any, *names: str) -> float | None:
    """A number in dictionaries of dictionaries, or None."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if is_number(tree) else None


def read_record(run: Run) -> Record:
    history = History()
    starts: list[Started] = []
    pauses: list[Pause] = []
    energy: Thinned[tuple[int, float]] = Thinned(MOST_ENERGY)
    power_seconds = 0.0
    for event in run.events():
        joules, before = history.joules, history.inspected
        history.add(event)
        match event:
            case Started():
                starts = [*starts[-MOST_MARKS:], event]
                energy.keep(mark for mark in energy if mark[0] <= event.step)
            case Paused():
                pauses = [*pauses[-MOST_MARKS:], Pause(event.step, str(event.reason))]
            case Continued() if pauses:
                pauses[-1].seconds = event.paused_seconds
            case Inspected() if history.joules is not None:
                energy.add((event.step, history.joules))
                if history.joules != joules and before:
                    power_seconds += event.time - before.time
    toml, settings = read_settings(run.path)
    snapshot_step, queries = read_queries(run.path, history)
    state, failure, failure_hint = state_of(run, history)
    return Record(
        run,
        state,
        settings,
        toml,
        run.load_machine(),
        history,
        starts,
        pauses,
        list(energy),
        power_seconds,
        failure,
        failure_hint,
        snapshot_step,
        queries,
    )


def state_of(run: Run, history: History) -> tuple[str, str, str]:
    """What became of it, and of a failure its message and hint.

    The end counts first: whoever writes a report when training ends may still own the run at that moment.
    """
    if isinstance(history.last, Finished):
        return ("stopped" if history.last.reason == "stopped" else "finished"), "", ""
    status = status_of(run)
    return status.state, status.message, status.hint


def read_settings(folder: Path) -> tuple[str, dict[str, Any]]:
    """The file and its settings by name; also of a version that knew other settings."""
    try:
        text = read_own(folder / "config.toml", folder, MOST_SETTINGS_BYTES).decode("utf-8")
        tables = tomllib.loads(text)
    except (OSError, ValueError, RecursionError):
        return "", {}
    sections = [table for table in tables.values() if isinstance(table, dict)]
    return text, {name: value for section in sections for name, value in section.items()}


def read_queries(folder: Path, history: History) -> tuple[int | None, list[Query]]:
    """What the last snapshot that is still there shows; older ones are thinned away."""
    for evaluated in reversed(list(history.evaluations)):
        if not isinstance(evaluated.snapshot, str):
            continue
        path = folder / evaluated.snapshot
        try:
            queries = json.loads(read_own(path, folder, MOST_SNAPSHOT_BYTES))["queries"]
            return evaluated.step, [read_query(query, path.parent) for query in queries[:MOST_QUERIES]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return None, []


def read_query(query: dict[str, Any], folder: Path) -> Query:
    found = []
    for one in query["found"][:6]:
        content = read_image(folder, str(one["picture"]))
        if content is not None:
            kind = PICTURES[content[:3]]
            score = one.get("score")
            found.append(Found(kind, content, score if is_number(score) else None, bool(one.get("is_right"))))
    rank = find(query, "rank")
    return Query(one_line(query["text"]), None if rank is None else int(rank), found)


def read_image(folder: Path, name: str) -> bytes | None:
    try:
        content = read_own(folder / name, folder, MOST_IMAGE_BYTES)
    except (OSError, ValueError):
        return None
    return content if content[:3] in PICTURES else None


def read_own(path: Path, folder: Path, most_bytes: int) -> bytes:
    """A file of the run's own, however it is linked: a page that is passed on must not carry any other file."""
    try:
        real = path.resolve(strict=True)
        is_own = real.is_relative_to(folder.resolve())
    except RuntimeError as error:  # a circle of links
        raise OSError(str(error)) from None
    if not is_own or not real.is_file() or real.stat().st_size > most_bytes:
        raise OSError(f"`{path}` is no file of the run, or too large")
    return real.read_bytes()
