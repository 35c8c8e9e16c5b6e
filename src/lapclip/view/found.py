"""Images that a model finds for a caption, read from the snapshots of a run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapclip.errors import one_line
from lapclip.runs.history import History, find
from lapclip.runs.run import read_own
from lapclip.units import is_number

MAX_SNAPSHOT_BYTES = 8 << 20
MAX_IMAGE_BYTES = 1 << 16  # a 96 px JPEG has a tenth of that
MAX_QUERIES = 12
PICTURES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PN": "image/png"}  # by their first bytes


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


def read_queries(folder: Path, history: History) -> tuple[int | None, list[Query]]:
    """What the last snapshot that is still there shows; older ones are thinned away."""
    for evaluated in reversed(list(history.evaluations)):
        if not isinstance(evaluated.snapshot, str):
            continue
        path = folder / evaluated.snapshot
        try:
            queries = json.loads(read_own(path, folder, MAX_SNAPSHOT_BYTES))["queries"]
            return evaluated.step, [read_query(query, path.parent) for query in queries[:MAX_QUERIES]]
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
        content = read_own(folder / name, folder, MAX_IMAGE_BYTES)
    except (OSError, ValueError):
        return None
    return content if content[:3] in PICTURES else None
