"""From the events of a run to warnings: what is wrong, why, and what to do.

Each sign looks at events and yields a finding whenever it holds; `Diagnosis` decides whether to warn again.
"""

from collections import Counter

from lapclip.config import Config
from lapclip.diagnose.finding import RAN_OUT, Finding, Sign
from lapclip.diagnose.learning import (
    Collapsed,
    Duplicates,
    Evaluations,
    Exploding,
    Pinned,
    Vanishing,
    rate_still_high,
)
from lapclip.diagnose.machine import DataBound, MemoryNearLimit, Slower
from lapclip.runs.events import Event, Started, Step, Warned

MAX_TIMES = 3  # that one kind of warning is given in a run
SECONDS_AWAY = 600.0  # of training without it, before it is news again
COME_BACK = {"slower", "data-bound", "memory-near-limit"}  # of the machine; of learning, once is enough
SIGNS = (
    Collapsed, Pinned, Duplicates, Exploding, Vanishing, Evaluations, DataBound, MemoryNearLimit, Slower,
)  # fmt: skip


class Diagnosis:
    """Looks at every event of a run, in order; also at those of an earlier process, before it goes on."""

    def __init__(self, config: Config, name: str = "NAME"):
        self.config, self.name = config, name
        self.signs: list[Sign] = [sign(config) for sign in SIGNS]
        self.num_given: Counter[str] = Counter()
        self.num_heard: Counter[str] = Counter()  # in the events of an earlier process
        self.held_at: dict[str, float] = {}  # seconds of training when a kind last held
        self.seconds = 0.0
        self.last: Step | None = None

    def look(self, event: Event) -> list[Warned]:
        """What an event shows to be wrong, unless it was said before."""
        match event:
            case Started():
                self.seconds, self.last = event.seconds, None
            case Step():
                self.seconds, self.last = event.seconds, event
            case Warned() if event.kind != RAN_OUT:
                self.num_heard[event.kind] += 1
                self.held_at[event.kind] = self.seconds
        step = getattr(event, "step", 0)
        return [
            self.warn(step, finding)
            for sign in self.signs
            for finding in sign.look(event)
            if self.is_news(finding.kind)
        ]

    def at_end(self, step: int) -> list[Warned]:
        """What is wrong with ending here; repeated at most MAX_TIMES."""
        finding = rate_still_high(self.config, self.last, self.name) if self.last else None
        return [self.warn(step, finding)] if finding and self.times(finding.kind) < MAX_TIMES else []

    def is_news(self, kind: str) -> bool:
        away = self.seconds - self.held_at.get(kind, self.seconds)
        self.held_at[kind] = self.seconds
        times = self.times(kind)
        return times == 0 or (kind in COME_BACK and times < MAX_TIMES and away >= SECONDS_AWAY)

    def times(self, kind: str) -> int:
        return max(self.num_given[kind], self.num_heard[kind])

    def warn(self, step: int, finding: Finding) -> Warned:
        self.num_given[finding.kind] += 1
        return Warned(step, finding.message, finding.hint, finding.kind)
