"""From the events of a run to warnings: what is wrong, why, and what to do.

Each sign looks at events and yields a warning whenever it holds; `Diagnosis` decides whether to give it again.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from lapclip.config import Config
from lapclip.diagnose import learning, machine
from lapclip.runs.events import Event, Started, Step, Warned

MAX_TIMES = 3  # that one kind of warning is given in a run
SECONDS_AWAY = 600.0  # of training without it, before it is news again
Look = Callable[[Event], Iterable[Warned]]  # at one thing
RECURRING = {"slower", "data-bound", "memory-near-limit"}  # of the machine; of learning, once is enough
OF_ONE_PROCESS = (
    learning.Collapsed, learning.Pinned, learning.Duplicates, learning.Exploding, learning.Vanishing,
    machine.DataBound, machine.MemoryNearLimit, machine.Slower,
)  # fmt: skip


class Diagnosis:
    """Looks at every event of a run, in order; also at those of an earlier process, before it resumes."""

    def __init__(self, config: Config, name: str = "NAME"):
        self.config, self.name = config, name
        self.evaluations = learning.Evaluations(config)
        self.signs = self.new_signs()
        self.num_given: Counter[str] = Counter()
        self.num_heard: Counter[str] = Counter()  # in the events of an earlier process
        self.held_at: dict[str, float] = {}  # seconds of training when a kind last held
        self.seconds = 0.0
        self.last: Step | None = None

    def new_signs(self) -> list[Look]:
        return [self.evaluations.look, *(sign(self.config).look for sign in OF_ONE_PROCESS)]

    def look(self, event: Event) -> list[Warned]:
        """What an event shows to be wrong, unless it was said before."""
        match event:
            case Started():
                self.seconds, self.last, self.signs = event.seconds, None, self.new_signs()
            case Step():
                self.seconds, self.last = event.seconds, event
            case Warned() if event.kind != machine.RAN_OUT:
                self.num_heard[event.kind] += 1
                self.held_at[event.kind] = self.seconds
        found = (warned for look in self.signs for warned in look(event))
        return [self.given(warned) for warned in found if self.is_news(warned.kind)]

    def at_end(self, step: int) -> list[Warned]:
        """What is wrong with ending here; repeated at most MAX_TIMES."""
        warned = learning.rate_still_high(self.config, self.last, step, self.name) if self.last else None
        return [self.given(warned)] if warned and self.times(warned.kind) < MAX_TIMES else []

    def is_news(self, kind: str) -> bool:
        away = self.seconds - self.held_at.get(kind, self.seconds)
        self.held_at[kind] = self.seconds
        times = self.times(kind)
        return times == 0 or (kind in RECURRING and times < MAX_TIMES and away >= SECONDS_AWAY)

    def times(self, kind: str) -> int:
        return max(self.num_given[kind], self.num_heard[kind])

    def given(self, warned: Warned) -> Warned:
        self.num_given[warned.kind] += 1
        return warned
