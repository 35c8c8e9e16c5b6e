"""Embedding for many requests at once: texts or images in, a row each out, computed in one thread.

While a batch is computed the next one gathers, so that a single request never waits for others. Texts and images are
embedded apart; a request that fails fails alone.
"""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_BATCH = 32  # more gain little, and while one batch is computed the responses of another are written
NUM_KNOWN = 2048  # texts whose rows are kept
MAX_KNOWN_LETTERS = 200  # of a text that is kept


@dataclass(eq=False)
class Asked:
    """What one request waits for."""

    items: Sequence[Any]
    answer: "asyncio.Future[np.ndarray]"


@dataclass(eq=False)
class Batcher:
    """The queue of one kind of things to embed, and the rows of texts that were asked for last."""

    embed: Callable[[list[Any]], np.ndarray]
    num_known: int = field(default=0, kw_only=True)
    waiting: deque[Asked] = field(default_factory=deque)
    known: OrderedDict[str, np.ndarray] = field(default_factory=OrderedDict)

    def take(self, max_items: int) -> list[Asked]:
        """The first requests of the queue with at most so many things together; at least one request."""
        taken: list[Asked] = []
        num_items = 0
        while self.waiting and (not taken or num_items + len(self.waiting[0].items) <= max_items):
            asked = self.waiting.popleft()
            if not asked.answer.cancelled():  # else its client went away
                taken.append(asked)
                num_items += len(asked.items)
        return taken

    def remember(self, items: Sequence[Any], rows: np.ndarray) -> None:
        for item, row in zip(items, rows, strict=True):
            if self.num_known and len(item) <= MAX_KNOWN_LETTERS:
                self.known[item] = row.copy()  # or it would keep its whole batch
                self.known.move_to_end(item)
        while len(self.known) > self.num_known:
            self.known.popitem(last=False)

    def recall(self, items: Sequence[Any]) -> np.ndarray | None:
        """The rows of all of them, if all are known."""
        if not self.known or not all(item in self.known for item in items):
            return None
        for item in items:
            self.known.move_to_end(item)
        return np.stack([self.known[item] for item in items])


@dataclass
class Embedding:
    """The one thread that embeds; asked in an event loop."""

    texts: Batcher
    images: Batcher
    is_batching: bool = True  # else every request by itself
    is_closed: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    news: threading.Condition = field(default_factory=threading.Condition)

    def close(self) -> None:
        with self.news:
            self.is_closed = True
            self.news.notify()

    async def rows(self, kind: Batcher, items: Sequence[Any]) -> np.ndarray:
        """A row each; many are asked for in parts, so that others have their turn between."""
        known = kind.recall(items)
        if known is not None:
            return known
        starts = range(0, len(items), MAX_BATCH)
        rows = np.concatenate([await self.wait(kind, items[start : start + MAX_BATCH]) for start in starts])
        kind.remember(items, rows)
        return rows

    async def wait(self, kind: Batcher, items: Sequence[Any]) -> np.ndarray:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            # A daemon, so that Ctrl-C does not wait for a batch.
            threading.Thread(target=self.work, args=(self.loop,), name="embedding", daemon=True).start()
        asked = Asked(items, self.loop.create_future())
        with self.news:
            kind.waiting.append(asked)
            self.news.notify()
        return await asked.answer

    def work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Batch after batch, in turns if both kinds wait, until it is closed."""
        kinds = [self.texts, self.images]
        while True:
            with self.news:
                self.news.wait_for(lambda: self.is_closed or any(kind.waiting for kind in kinds))
                if self.is_closed:
                    return
                kind = next(kind for kind in kinds if kind.waiting)
                taken = kind.take(MAX_BATCH if self.is_batching else 1)
            kinds.sort(key=lambda other: other is kind)  # the other one is next
            answers = answer_all(kind.embed, taken)
            try:
                loop.call_soon_threadsafe(deliver, answers)
            except RuntimeError:  # the loop has ended meanwhile
                return


Answer = tuple[Asked, np.ndarray | Exception]


def answer_all(embed: Callable[[list[Any]], np.ndarray], taken: list[Asked]) -> list[Answer]:
    """The rows of each request, equal texts embedded once; when the batch fails, each request is tried alone."""
    items = [item for asked in taken for item in asked.items]
    try:
        if items and isinstance(items[0], str):
            places = {text: place for place, text in enumerate(dict.fromkeys(items))}
            rows = embed(list(places))[[places[text] for text in items]]
        else:
            rows = embed(items) if items else np.empty(0)
    except Exception as error:  # whatever the model raises, it must not end the thread
        if len(taken) == 1:
            return [(taken[0], error)]
        return [answer for asked in taken for answer in answer_all(embed, [asked])]
    ends = np.cumsum([len(asked.items) for asked in taken])
    return list(zip(taken, np.split(rows, ends[:-1]), strict=False))


def deliver(answers: list[Answer]) -> None:
    for asked, answer in answers:
        if asked.answer.done():  # its client went away
            continue
        if isinstance(answer, Exception):
            asked.answer.set_exception(answer)
        else:
            asked.answer.set_result(answer)
