"""Embedding for many requests at once: what they ask for goes in, a row each comes out, computed in one thread.

While a batch is computed the next one gathers, so that a lone request never waits for company. Texts and images are
embedded apart; a request that fails fails alone.
"""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_AT_ONCE = 32  # more gain little, and while one batch is computed the answers of another are written
NUM_KNOWN = 2048  # texts whose rows are kept
LONGEST_KNOWN = 200  # characters of a text that is kept


@dataclass(eq=False)
class Asked:
    """What one request waits for."""

    items: Sequence[Any]
    answer: "asyncio.Future[np.ndarray]"


class Batcher:
    """One kind of thing to embed: those who ask wait in a row, and the thread takes as many as fit into a batch."""

    def __init__(self, embed: Callable[[list[Any]], np.ndarray], *, num_known: int = 0):
        self.embed = embed
        self.waiting: deque[Asked] = deque()
        self.known: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self.num_known = num_known  # rows kept of what was asked before; 0 keeps none

    def take(self, most: int) -> list[Asked]:
        """Those who waited longest, with at most so many things together; at least one of them."""
        taken: list[Asked] = []
        num_items = 0
        while self.waiting and (not taken or num_items + len(self.waiting[0].items) <= most):
            asked = self.waiting.popleft()
            if asked.answer.cancelled():  # its client went away
                continue
            taken.append(asked)
            num_items += len(asked.items)
        return taken

    def remember(self, items: Sequence[Any], rows: np.ndarray) -> None:
        for item, row in zip(items, rows, strict=True):
            if self.num_known and isinstance(item, str) and len(item) <= LONGEST_KNOWN:
                self.known[item] = row.copy()  # or it would keep its whole batch
                self.known.move_to_end(item)
        while len(self.known) > self.num_known:
            self.known.popitem(last=False)

    def recall(self, items: Sequence[Any]) -> np.ndarray | None:
        """The rows of all of them, if all are known."""
        if not self.known or not all(isinstance(item, str) and item in self.known for item in items):
            return None
        for item in items:
            self.known.move_to_end(item)
        return np.stack([self.known[item] for item in items])


@dataclass
class Embedding:
    """The one thread that embeds; made and asked in an event loop."""

    texts: Batcher
    pictures: Batcher
    is_batching: bool = True  # else every request by itself
    num_batches: int = 0
    num_embedded: int = 0
    is_closed: bool = False
    news: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        # A daemon, so that Ctrl-C does not wait for a batch.
        threading.Thread(target=self.work, name="embedding", daemon=True).start()

    def close(self) -> None:
        with self.news:
            self.is_closed = True
            self.news.notify()

    async def rows(self, kind: Batcher, items: Sequence[Any]) -> np.ndarray:
        """A row each; many are asked for in parts, so that others have their turn between."""
        known = kind.recall(items)
        if known is not None:
            return known
        starts = range(0, len(items), MOST_AT_ONCE)
        parts = [await self.wait(kind, items[start : start + MOST_AT_ONCE]) for start in starts]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        kind.remember(items, rows)
        return rows

    async def wait(self, kind: Batcher, items: Sequence[Any]) -> np.ndarray:
        asked = Asked(items, self.loop.create_future())
        with self.news:
            kind.waiting.append(asked)
            self.news.notify()
        return await asked.answer

    def work(self) -> None:
        """Batch after batch, whichever kind had its turn longer ago first, until it is closed."""
        kinds = [self.texts, self.pictures]
        while True:
            with self.news:
                while not self.is_closed and not any(kind.waiting for kind in kinds):
                    self.news.wait()
                if self.is_closed:
                    return
                kind = next(kind for kind in kinds if kind.waiting)
                taken = kind.take(MOST_AT_ONCE if self.is_batching else 1)
            kinds.sort(key=lambda other: other is kind)  # the other one is next
            answers = answer_all(kind.embed, taken)
            self.num_batches += 1
            self.num_embedded += sum(len(asked.items) for asked in taken)
            try:
                self.loop.call_soon_threadsafe(deliver, answers)
            except RuntimeError:  # the loop has ended meanwhile
                return


Answer = tuple[Asked, np.ndarray | Exception]


def answer_all(embed: Callable[[list[Any]], np.ndarray], taken: list[Asked]) -> list[Answer]:
    """Each request's rows; when the batch fails, each is tried by itself, so that one cannot spoil the others'."""
    try:
        return list(zip(taken, embed_together(embed, taken), strict=True))
    except Exception as error:
        if len(taken) == 1:
            return [(taken[0], error)]
        return [answer for asked in taken for answer in answer_all(embed, [asked])]


def embed_together(embed: Callable[[list[Any]], np.ndarray], taken: list[Asked]) -> list[np.ndarray]:
    """The rows of each request, with equal texts embedded once."""
    if not taken:
        return []
    items = [item for asked in taken for item in asked.items]
    if isinstance(items[0], str):
        places = {text: place for place, text in enumerate(dict.fromkeys(items))}
        rows = embed(list(places))[[places[text] for text in items]]
    else:
        rows = embed(items)
    ends = np.cumsum([len(asked.items) for asked in taken])
    return np.split(rows, ends[:-1])


def deliver(answers: list[Answer]) -> None:
    for asked, answer in answers:
        if asked.answer.done():  # its client went away
            continue
        if isinstance(answer, Exception):
            asked.answer.set_exception(answer)
        else:
            asked.answer.set_result(answer)
