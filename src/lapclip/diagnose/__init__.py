"""Said in words: the events of a run in, what is wrong with it out, with the reason and what to do.

Each sign looks at events and yields a finding whenever it holds; here is decided whether it is still news.
"""

from collections import Counter
from collections.abc import Iterator

from lapclip.config import Config
from lapclip.diagnose.evaluations import Evaluations
from lapclip.diagnose.finding import RAN_OUT, Finding, Sign
from lapclip.diagnose.gradients import Exploding, Vanishing
from lapclip.diagnose.learning import Collapsed, Duplicates, Pinned, rate_still_high
from lapclip.diagnose.machine import DataBound, MemoryNearLimit
from lapclip.diagnose.speed import Slower
from lapclip.runs.events import Event, Started, Step, Warned

MOST_TIMES = 3  # that one kind is said in a run: who did nothing the third time knows
SECONDS_AWAY = 600.0  # of training without it, before it is news again
COME_BACK = {"slower", "data-bound", "memory-near-limit"}  # of the machine; of learning, once is enough


class Diagnosis:
    """Looks at every event of a run, in order; also at those of an earlier process, before it goes on."""

    def __init__(self, config: Config, name: str = "NAME"):
        self.config, self.name = config, name
        self.signs: list[Sign] = [
            Collapsed(config),
            Pinned(config),
            Duplicates(config),
            Exploding(config),
            Vanishing(config),
            Evaluations(config),
            DataBound(config),
            MemoryNearLimit(config),
            Slower(config),
        ]
        self.num_said: Counter[str] = Counter()
        self.num_heard: Counter[str] = Counter()  # in the events of an earlier process
        self.held_at: dict[str, float] = {}  # seconds of training when a kind last held
        self.seconds = 0.0
        self.last: Step | None = None

    def look(self, event: Event) -> list[Warned]:
        """What an event shows to be wrong, if it has not been said."""
        match event:
            case Started():
                self.seconds, self.last = event.seconds, None
            case Step():
                self.seconds, self.last = event.seconds, event
            case Warned() if event.kind == RAN_OUT:
                for sign in self.signs:
                    if isinstance(sign, Slower):
                        sign.begin_anew()
            case Warned():
                self.num_heard[event.kind] += 1
                self.held_at[event.kind] = self.seconds
        step = getattr(event, "step", 0)
        return [
            self.said(step, finding)
            for sign in self.signs
            for finding in sign.look(event)
            if self.is_news(finding.kind)
        ]

    def at_end(self, step: int) -> list[Warned]:
        """What is wrong with ending here; it is no news only when it was said often."""
        return list(self.ended(step))

    def ended(self, step: int) -> Iterator[Warned]:
        finding = rate_still_high(self.config, self.last, self.name) if self.last else None
        if finding and self.times(finding.kind) < MOST_TIMES:
            yield self.said(step, finding)

    def is_news(self, kind: str) -> bool:
        away = self.seconds - self.held_at.get(kind, self.seconds)
        self.held_at[kind] = self.seconds
        times = self.times(kind)
        return times == 0 or (kind in COME_BACK and times < MOST_TIMES and away >= SECONDS_AWAY)

    def times(self, kind: str) -> int:
        return max(self.num_said[kind], self.num_heard[kind])

    def said(self, step: int, finding: Finding) -> Warned:
        self.num_said[finding.kind] += 1
        return Warned(step, finding.message, finding.hint, finding.kind)
