"""Embedding for many requests at once: texts or images in, a row each out, computed in one thread.

While a batch is computed the next one gathers, so that a single request never waits for others. Texts and images are
embedded apart; a request that fails fails alone.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
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


Embed = Callable[[list[Any]], np.ndarray]
Answered = tuple[Asked, np.ndarray | Exception]


class Batcher:
    """Embeds one kind of things, texts or images; asked in an event loop.

    Two kinds share a pool of one thread, which takes their batches in turns.
    """

    def __init__(
        self, embed: Embed, pool: ThreadPoolExecutor, *, is_batching: bool = True, num_known: int = 0
    ):
        self.embed, self.pool, self.num_known = embed, pool, num_known
        self.max_items = MAX_BATCH if is_batching else 1  # else every request by itself
        self.waiting: deque[Asked] = deque()
        self.known: dict[str, np.ndarray] = {}  # the rows of texts that were asked for last
        self.is_working, self.lock = False, Lock()

    async def rows(self, items: Sequence[Any]) -> np.ndarray:
        """A row each; many are asked for in parts, so that others have their turn between."""
        if self.known and all(item in self.known for item in items):
            return np.stack([self.known[item] for item in items])
        starts = range(0, len(items), MAX_BATCH)
        rows = np.concatenate([await self.wait(items[start : start + MAX_BATCH]) for start in starts])
        for item, row in zip(items, rows, strict=True):
            if self.num_known and len(item) <= MAX_KNOWN_LETTERS:
                self.known[item] = row.copy()  # or it would keep its whole batch
        while len(self.known) > self.num_known:
            del self.known[next(iter(self.known))]
        return rows

    async def wait(self, items: Sequence[Any]) -> np.ndarray:
        loop = asyncio.get_running_loop()
        asked = Asked(items, loop.create_future())
        with self.lock:
            self.waiting.append(asked)
            if not self.is_working:
                self.is_working = True
                self.pool.submit(self.work, loop)
        return await asked.answer

    def work(self, loop: asyncio.AbstractEventLoop) -> None:
        """One batch in the pool's thread, then the next, without waiting until the loop has delivered this one."""
        with self.lock:
            taken = self.take()
            self.is_working = bool(taken)
        if taken:
            answers = answer_all(self.embed, taken)
            self.pool.submit(self.work, loop)
            loop.call_soon_threadsafe(deliver, answers)

    def take(self) -> list[Asked]:
        """The first requests of the queue that fit into a batch; at least one request."""
        taken: list[Asked] = []
        num_items = 0
        while self.waiting and (not taken or num_items + len(self.waiting[0].items) <= self.max_items):
            asked = self.waiting.popleft()
            if not asked.answer.cancelled():  # else its client went away
                taken.append(asked)
                num_items += len(asked.items)
        return taken


def answer_all(embed: Embed, taken: list[Asked]) -> list[Answered]:
    """The rows of each request, equal texts embedded once; when the batch fails, each request is tried alone."""
    items = [item for asked in taken for item in asked.items]
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


def deliver(answers: list[Answered]) -> None:
    for asked, answer in answers:
        if asked.answer.done():  # its client went away
            continue
        if isinstance(answer, Exception):
            asked.answer.set_exception(answer)
        else:
            asked.answer.set_result(answer)
