"""A run being watched: reads what is new in its folder, knows its state, and says it as one JSON object."""

import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lapclip.errors import UserError
from lapclip.events import KINDS_OF_MEMORY, PARTS, Event, Follower, Inspected, Started, Step
from lapclip.history import History
from lapclip.monitor.line import Average
from lapclip.monitor.view import Standing, standing_of
from lapclip.run import RUNS, Run, is_run, open_run
from lapclip.runs import last_change, newest_run

NUM_INSPECTIONS = 5  # whose mean is shown, of where a step's time goes
MOST_NEW = 1000  # events that are handed on at once; the history has seen them all
SECONDS_TO_SET_UP = 10  # that a folder without a lock and without events is given
OVER = ("finished", "stopped", "failed", "crashed")


class Watched:
    """What a run's folder says so far; `read` brings it up to date, and costs little when nothing is new."""

    def __init__(self, run: Run):
        self.run = run
        self.follower = Follower(run.path / "events.jsonl")
        self.machine: dict[str, Any] = {}
        self.forget()

    def forget(self) -> None:
        self.history = History()
        self.recent: deque[Inspected] = deque(maxlen=NUM_INSPECTIONS)
        self.standing = Standing("running", is_preparing=True)
        self.average_anew()

    def average_anew(self) -> None:
        self.loss, self.accuracy, self.speed, self.grad_norm = Average(), Average(), Average(), Average()
        self.recent.clear()

    def read(self) -> list[Event]:
        """Takes in what is new, and returns the last of it."""
        if not self.machine:
            self.machine = self.run.load_machine()
        lock = self.run.read_lock()  # before the events: a process writes its end, then lets go of the run
        num_restarts = self.follower.num_restarts
        new: deque[Event] = deque(maxlen=MOST_NEW)
        for event in self.follower.new():
            if self.follower.num_restarts != num_restarts:  # it is another file now
                num_restarts = self.follower.num_restarts
                self.forget()
            self.add(event)
            new.append(event)
        self.standing = standing_of(self.history, lock)
        if self.history.last is None and self.state == "stopped" and self.is_new():
            self.standing = Standing("running", is_preparing=True)
        return list(new)

    def is_new(self) -> bool:
        """Whether the folder has only just been made, and may not have got its lock yet."""
        changed = (
            last_change(self.run.path),
            self.run.path.stat().st_mtime if self.run.path.exists() else 0.0,
        )
        return time.time() - max(changed) < SECONDS_TO_SET_UP

    def add(self, event: Event) -> None:
        self.history.add(event)
        match event:
            case Started():
                self.average_anew()
            case Step():
                self.loss.add(event.loss)
                self.accuracy.add(event.accuracy)
                self.speed.add(event.pairs_per_second)
                self.grad_norm.add(event.grad_norm)
            case Inspected():
                self.recent.append(event)

    def some_steps(self, most: int) -> list[Step]:
        """At most about so many of the steps that are kept, evenly spread, the last one with them."""
        kept = self.history.steps.kept
        some = kept[:: max(1, len(kept) // most)]
        last = self.history.step
        return [*some, last] if last is not None and (not some or some[-1] is not last) else some

    @property
    def state(self) -> str:
        return self.standing.state

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def chance(self) -> float | None:
        """Of the in-batch accuracy."""
        started = self.history.started
        return 1 / started.batch_size if started else None

    @property
    def bench_share(self) -> float | None:
        """The speed as a share of what `lapclip bench` measured for this model here."""
        best = (self.machine.get("bench") or {}).get("pairs_per_second")
        return self.speed.value / best if best and self.speed.count else None

    @property
    def progress(self) -> float:
        if self.state == "finished":
            return 1.0
        step = self.history.step
        return min(1.0, step.progress) if step else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Of training; None when nobody knows, or when it is not being trained."""
        step = self.history.step
        if self.state == "finished":
            return 0.0
        return step.seconds_left if step and not self.is_over else None

    @property
    def parts(self) -> dict[str, float] | None:
        """Seconds of a step by part, the mean of the last few that were looked at."""
        if not self.recent:
            return None
        return {part: sum(i.parts.get(part, 0.0) for i in self.recent) / len(self.recent) for part in PARTS}

    def document(self) -> dict[str, Any]:
        """Everything the view shows, for programs."""
        history, step, seen = self.history, self.history.step, self.history.inspected
        readings = seen.readings if seen else {}
        return {
            "run": str(self.run.path),
            "state": self.state,
            "step": step.step if step else history.started.step if history.started else 0,
            "steps": history.started.total_steps if history.started else None,
            "progress": self.progress,
            "seconds": step.seconds if step else 0.0,
            "seconds_left": self.seconds_left,
            "loss": self.loss.value if self.loss.count else None,
            "accuracy": self.accuracy.value if self.accuracy.count else None,
            "chance": self.chance,
            "temperature": step.temperature if step else None,
            "lr": step.lr if step else None,
            "grad_norm": self.grad_norm.value if self.grad_norm.count else None,
            "pairs_per_second": self.speed.value if self.speed.count else None,
            "bench_share": self.bench_share,
            "parts": self.parts,
            "memory": memory_of(seen) if seen else None,
            "cores": readings.get("cores"),
            "readings": readings,
            "recall": history.evaluated.recall if history.evaluated else None,
            "recall_step": history.evaluated.step if history.evaluated else None,
            "warnings": [asdict(warning) for warning in history.warnings],
        }


def memory_of(seen: Inspected) -> dict[str, int | None]:
    kinds = {kind: seen.memory.get(kind) for kind in KINDS_OF_MEMORY}
    return kinds | {"used": seen.memory_used, "peak": seen.memory_peak, "limit": seen.memory_limit}


def find_run(name: str | None) -> Run:
    """The run of that name or path, one that is being set up too; without a name, the newest here."""
    if name is None:
        newest = newest_run()
        if newest is None:
            raise UserError(
                f"there is no run to watch: `{RUNS.absolute()}` holds none",
                hint="begin one with `lapclip train`, or name the path of a run's folder",
            )
        return newest
    return next((Run(path) for path in (Path(name), RUNS / name) if is_run(path)), None) or open_run(name)
