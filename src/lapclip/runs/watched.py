"""A run being watched, by whichever view: reads what is new in its folder, knows how it stands, and says it as JSON."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from lapclip.errors import UserError
from lapclip.files import Held
from lapclip.runs.events import KINDS_OF_MEMORY, PARTS, Event, Failed, Follower, Inspected, Started, Step
from lapclip.runs.history import History
from lapclip.runs.intake import bench_speed
from lapclip.runs.run import RUNS, Run, find_run
from lapclip.runs.status import End, last_change, newest_run, said_in, state_of

MOST_NEW = 2000  # events that are handed on at once; the history has seen them all
SECONDS_TO_SET_UP = 10  # that a folder without a lock and without events is given
OVER = ("finished", "stopped", "failed", "crashed")


@dataclass(frozen=True)
class Standing:
    """How a run stands, by its lock and its last events."""

    state: str  # as `lapclip runs` says it
    is_preparing: bool = False
    failed: Failed | None = None

    @property
    def words(self) -> str:
        if self.is_preparing:
            return "being set up"
        return self.state


def standing_of(history: History, lock: Held) -> Standing:
    state = state_of(lock, End(last=history.last, waiting=history.paused))
    started = history.started
    is_new = started is None or (lock.taken is not None and started.time < lock.taken)
    failed = (said_in(lock) or history.failed) if state == "failed" else None
    return Standing(state, is_preparing=is_new and state == "running", failed=failed)


class Watched:
    """What a run's folder says so far; `read` brings it up to date, and costs little when nothing is new."""

    def __init__(self, run: Run):
        self.run = run
        self.follower = Follower(run.path / "events.jsonl")
        self.history = History()
        self.standing = Standing("running", is_preparing=True)
        self.machine: dict[str, Any] = {}

    def read(self) -> tuple[list[Event], bool]:
        """Takes in what is new. Returns the last of it, and whether that does not just follow what was known before:
        the run went on from an earlier step, the file is another one, or more came than is handed on.
        """
        lock = self.run.read_lock()  # before the events: a process writes its end, then lets go of the run
        new: deque[Event] = deque(maxlen=MOST_NEW)
        num_restarts, is_anew = self.follower.num_restarts, False
        for count, event in enumerate(self.follower.new(), 1):
            if self.follower.num_restarts != num_restarts:
                num_restarts, is_anew, self.history = self.follower.num_restarts, True, History()
            self.history.add(event)
            new.append(event)
            is_anew = is_anew or isinstance(event, Started) or count > MOST_NEW
        if self.follower.num_restarts != num_restarts:  # it was emptied
            is_anew, self.history = True, History()
        if is_anew or not self.machine:
            self.machine = self.run.load_machine()
        self.standing = standing_of(self.history, lock)
        if self.history.last is None and self.state == "stopped" and self.is_new():
            self.standing = Standing("running", is_preparing=True)
        return list(new), is_anew

    def is_new(self) -> bool:
        """Whether the folder has only just been made, and may not have got its lock yet."""
        path = self.run.path
        changed = (last_change(path), path.stat().st_mtime if path.exists() else 0.0)
        return time.time() - max(changed) < SECONDS_TO_SET_UP

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
        return self.history.chance

    @property
    def bench_share(self) -> float | None:
        """The speed as a share of what `lapclip bench` measured for this model here."""
        best, speed = bench_speed(self.machine), self.history.recently("pairs_per_second")
        return speed / best if best is not None and speed is not None else None

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
        seen = self.history.recent_inspections
        return {part: fmean(look.parts[part] for look in seen) for part in PARTS} if seen else None

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
            "loss": history.recently("loss"),
            "accuracy": history.recently("accuracy"),
            "chance": self.chance,
            "temperature": step.temperature if step else None,
            "lr": step.lr if step else None,
            "grad_norm": history.recently("grad_norm"),
            "pairs_per_second": history.recently("pairs_per_second"),
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


def run_to_watch(name: str | None) -> Run:
    """The run of that name or path, one that is being set up too; without a name, the newest here."""
    if name is not None:
        return find_run(name)
    newest = newest_run()
    if newest is None:
        raise UserError(
            f"there is no run to watch: `{RUNS.absolute()}` holds none",
            hint="begin one with `lapclip train`, or name the path of a run's folder",
        )
    return newest
