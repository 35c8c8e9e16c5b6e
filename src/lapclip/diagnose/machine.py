"""Signs in the machine: waiting for data, and memory that runs short."""

from collections import deque
from collections.abc import Iterator

from lapclip.config import Config
from lapclip.diagnose.finding import RAN_OUT, Finding
from lapclip.runs.events import Event, Inspected, Started, Step, Warned

DATA_STEPS = 50  # at least, and
DATA_SECONDS = 10.0  # at least, looked at together: the first batches are always waited for
MUCH_WAITING = 0.25  # of the time of a step: without it, a third more would be learned
NEAR_LIMIT = 0.9  # of the memory it may use
LITTLE_LEFT = 0.05  # of the machine's memory: below, systems begin to swap
LEAST_LEFT = 200_000_000  # bytes, where the machine's own memory is not known
NUM_INSPECTIONS = 2  # in a row: memory of a moment is no sign


class DataBound:
    """A good part of the time of a step is spent waiting for its batch."""

    def __init__(self, config: Config):
        self.config = config
        self.begin_anew()

    def begin_anew(self) -> None:
        self.steps: deque[tuple[float, float]] = deque()  # seconds of waiting, and in all
        self.waited = self.seconds = 0.0  # of those

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.begin_anew()
        if not isinstance(event, Step):
            return
        step_seconds = (self.config.train.batch_size or 1) / event.pairs_per_second
        waited = min(event.data_seconds, step_seconds)
        self.steps.append((waited, step_seconds))
        self.waited, self.seconds = self.waited + waited, self.seconds + step_seconds
        while len(self.steps) > DATA_STEPS and self.seconds - self.steps[0][1] >= DATA_SECONDS:
            waited, step_seconds = self.steps.popleft()
            self.waited, self.seconds = self.waited - waited, self.seconds - step_seconds
        if len(self.steps) < DATA_STEPS or self.seconds < DATA_SECONDS:
            return
        share = self.waited / self.seconds
        if share >= MUCH_WAITING:
            message = f"{share:.0%} of the time is spent waiting for data: batches are learned from faster than made"
            yield Finding("data-bound", message, self.hint())

    def hint(self) -> str:
        data = self.config.data
        if data.pack is False:
            return "keep decoded copies: `--pack`"
        return f"let more processes prepare batches: `--workers {(data.workers or 0) + 1}`"


class MemoryNearLimit:
    """The run holds nearly all the memory it may, or the machine has hardly any left."""

    def __init__(self, config: Config):
        self.config = config
        self.chunk = config.train.chunk or config.train.batch_size or 1
        self.num_near = 0

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.num_near, self.chunk = 0, event.chunk
        if isinstance(event, Warned) and event.kind == RAN_OUT:
            self.num_near, self.chunk = 0, max(1, self.chunk // 2)
        if not isinstance(event, Inspected):
            return
        message = self.what_is_near(event)
        self.num_near = self.num_near + 1 if message else 0
        if message and self.num_near >= NUM_INSPECTIONS:
            yield Finding("memory-near-limit", message, self.hint())

    def what_is_near(self, event: Inspected) -> str | None:
        if event.memory_used > NEAR_LIMIT * event.memory_limit:
            allowed = "`--max-memory` allows" if self.config.device.max_memory else "there are"
            used, limit = event.memory_used / 1e9, event.memory_limit / 1e9
            return f"training holds {used:.2f} GB of the {limit:.2f} GB that {allowed}"
        left = event.readings.get("memory_available")
        # Where a limit was asked for, it says nothing about the machine.
        whole = 0 if self.config.device.max_memory else event.memory_limit
        if left is not None and left < max(LITTLE_LEFT * whole, LEAST_LEFT):
            return (
                f"the machine has only {left / 1e9:.2f} GB of memory left and will soon swap, which is slow"
            )
        return None

    def hint(self) -> str:
        if self.chunk > 1:
            return (
                f"go on with half as many pairs at once, for the same gradients: `--chunk {self.chunk // 2}`"
            )
        if not self.config.model.recompute:
            return "compute activations twice instead of keeping them: `--recompute`"
        return f"`{self.config.model.size}` hardly fits: choose a smaller `--size`"
