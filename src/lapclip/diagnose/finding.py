"""What a sign finds, and what a sign is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from lapclip.runs.events import Event

RAN_OUT = "memory-ran-out"  # kind of the warning after which smaller chunks make steps slower by design


@dataclass(frozen=True)
class Finding:
    """Something that holds now."""

    kind: str
    message: str
    hint: str


class Sign(Protocol):
    """Looks at one thing. A `Started` resets what belongs to a process, and drops lost steps."""

    def look(self, event: Event) -> Iterable[Finding]: ...
