"""Embedding for many requests at once: texts or images in, a row each out, computed in one thread.

While a batch is computed the next one gathers, so that a single request never waits for others. Texts and images are
embedded apart; a request that fails fails alone.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    known: dict[str, np.ndarray] = field(default_factory=dict)

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
        for item in list(self.known)[: -self.num_known]:
            del self.known[item]

    def recall(self, items: Sequence[Any]) -> np.ndarray | None:
        """The rows of all of them, if all are known."""
        if not self.known or not all(item in self.known for item in items):
            return None
        return np.stack([self.known[item] for item in items])


class Embedding:
    """The one thread that embeds; asked in an event loop."""

    def __init__(self, texts: Batcher, images: Batcher, *, is_batching: bool = True):
        self.texts, self.images = texts, images
        self.max_items = MAX_BATCH if is_batching else 1  # else every request by itself
        self.pool = ThreadPoolExecutor(1, "embedding")
        self.worker: asyncio.Task[None] | None = None

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
        asked = Asked(items, asyncio.get_running_loop().create_future())
        kind.waiting.append(asked)
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self.work())
        return await asked.answer

    async def work(self) -> None:
        """Batch after batch, in turns if both kinds wait, until nothing does."""
        kinds, loop = [self.texts, self.images], asyncio.get_running_loop()
        while kind := next((kind for kind in kinds if kind.waiting), None):
            taken = kind.take(self.max_items)
            kinds.sort(key=lambda other: other is kind)  # the other one is next
            for asked, answer in await loop.run_in_executor(self.pool, answer_all, kind.embed, taken):
                if asked.answer.done():  # its client went away
                    continue
                if isinstance(answer, Exception):
                    asked.answer.set_exception(answer)
                else:
                    asked.answer.set_result(answer)


def answer_all(
    embed: Callable[[list[Any]], np.ndarray], taken: list[Asked]
) -> list[tuple[Asked, np.ndarray | Exception]]:
    """The rows of each request, equal texts embedded once; when the batch fails, each request is tried alone."""
    items = [item for asked in taken for item in asked.items]
    if not items:  # all clients went away
        return []
    try:
        if isinstance(items[0], str):
            places = {text: place for place, text in enumerate(dict.fromkeys(items))}
            rows = embed(list(places))[[places[text] for text in items]]
        else:
            rows = embed(items)
    except Exception as error:  # whatever the model raises, others are still answered
        if len(taken) == 1:
            return [(taken[0], error)]
        return [answer for asked in taken for answer in answer_all(embed, [asked])]
    ends = np.cumsum([len(asked.items) for asked in taken])
    return list(zip(taken, np.split(rows, ends[:-1]), strict=True))
