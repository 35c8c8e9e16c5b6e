"""What is served: a model, its index as it is now, and the threads that decode, embed and search."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from lapclip.data.decode import Unreadable
from lapclip.embedder import Embedder, label_prompts, mean_of_prompts
from lapclip.errors import UserError, typed
from lapclip.search.index import Index, list_indexes
from lapclip.search.searcher import NotIndexed, Searcher, Term, parse_query
from lapclip.serve.batching import MAX_BATCH, NUM_KNOWN, Batcher
from lapclip.serve.images import Missing, image_of, thumbnail_of
from lapclip.serve.limits import Refused, busy

SECONDS_BETWEEN_LOOKS = 1.0  # at whether the index was updated
NUM_DECODERS = 2  # each may hold as much memory as `decode` allows one image
NUM_SEARCHERS = 2
MAX_TEXTS = 256  # of one request
MAX_PROMPTS = NUM_KNOWN  # labels x templates: for the next image with the same labels, nothing is embedded
MAX_LETTERS = 500_000  # of all prompts of one request: a template may repeat its label
MAX_ROWS = 16_384  # being embedded or held for all requests
T = TypeVar("T")


class Service:
    """A model and its index. Created before the event loop, used inside it."""

    needs_token = False
    num_rows = 0  # being embedded or held

    def __init__(self, embedder: Embedder, index: Index | None, *, is_batching: bool = True):
        self.embedder = embedder
        self.searcher = Searcher(index, embedder) if index is not None else None
        self.looked = time.monotonic()
        self.looking = asyncio.Lock()
        self.decoders = ThreadPoolExecutor(NUM_DECODERS, "decoding")
        self.searchers = ThreadPoolExecutor(NUM_SEARCHERS, "searching")
        self.embedding = ThreadPoolExecutor(1, "embedding")
        make = partial(Batcher, pool=self.embedding, is_batching=is_batching)
        self.texts = make(lambda texts: embedder.texts(texts, progress=False), num_known=NUM_KNOWN)
        self.images = make(lambda pixels: embedder.pixels(np.stack(pixels)))

    async def in_thread(self, pool: ThreadPoolExecutor, function: Callable[..., T], *values: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *values)

    async def current(self) -> Searcher:
        """The index as it is now; Refused when there is none. One that was replaced closes when nobody uses it."""
        async with self.looking:
            if self.searcher is None or time.monotonic() - self.looked > SECONDS_BETWEEN_LOOKS:
                self.searcher = await self.in_thread(self.searchers, self.look_again)
                self.looked = time.monotonic()
        if self.searcher is None:
            hint = f"index a folder: `lapclip index ~/Pictures --model {typed(self.embedder.name)}`"
            raise Refused(404, "nothing is indexed with this model yet", hint)
        return self.searcher

    def look_again(self) -> Searcher | None:
        """The same searcher for an index that has not changed, a new one for one that was updated."""
        if self.searcher is not None and not self.searcher.index.has_changed():
            return self.searcher
        own = [info for info in list_indexes() if info.fingerprint == self.embedder.fingerprint]
        own.sort(key=lambda info: self.searcher is None or info.path != self.searcher.index.path)
        return Searcher(Index(own[0]), self.embedder) if own else None

    async def rows(self, kind: Batcher, items: Sequence[Any]) -> np.ndarray:
        """Unit rows; Refused when the model fails: memory ran out, or its weights are not finite."""
        self.num_rows += len(items)
        try:
            if self.num_rows > MAX_ROWS and len(items) > MAX_BATCH:  # small requests have their turn between
                raise busy()
            rows = await kind.rows(items)
        except UserError as problem:
            raise Refused(503, problem.message, problem.hint, retry_seconds=1) from None
        finally:
            self.num_rows -= len(items)
        if not np.isfinite(rows).all():
            hint = "serve a trained run: `lapclip serve --model RUN`"
            raise Refused(503, "the model returns embeddings that are not finite", hint, retry_seconds=60)
        return rows

    async def text_rows(self, texts: Sequence[str]) -> np.ndarray:
        return await self.rows(self.texts, texts)

    async def image_row(self, data: bytes) -> np.ndarray:
        """The row of an uploaded image; Refused when it is not one."""
        try:
            decoded = await self.in_thread(self.decoders, self.embedder.decode, data)
        except Unreadable as error:
            raise Refused(415, f"the body {error}", "send a JPEG or PNG") from None
        return (await self.rows(self.images, [decoded.pixels]))[0]

    async def vector(
        self, searcher: Searcher, words: str, likes: Sequence[tuple[int, int]], image: bytes
    ) -> np.ndarray:
        """The unit row of a query: words, signed ids of indexed images, and an uploaded image."""
        terms = parse_query(words)
        if len(terms) > MAX_TEXTS:
            raise Refused(400, f"{len(terms):,} terms; the maximum is {MAX_TEXTS}", "use fewer terms")
        text_rows = await self.text_rows([term.words for term in terms]) if terms else ()
        terms += [Term(sign, entry=id) for sign, id in likes] + [Term(1, image=image)] * bool(image)
        image_rows = [await self.image_row(image)] if image else ()
        if not terms:
            raise Refused(400, "the query is empty", "pass text as `q`, or the id of an image as `like`")
        try:
            return searcher.combine(terms, text_rows, image_rows)
        except NotIndexed:
            raise
        except UserError as problem:
            raise Refused(400, problem.message, problem.hint) from None

    async def show(self, id: int, is_large: bool) -> bytes:
        """A JPEG of an image of the index."""
        searcher = await self.current()
        path, folders = searcher.entry(id).path, searcher.index.folders
        draw = image_of if is_large else thumbnail_of
        try:
            return await self.in_thread(self.decoders, draw, path, folders)
        except Missing:
            raise Refused(404, "this image no longer exists", "run `lapclip index` again") from None

    async def row_of(self, id: int) -> np.ndarray:
        searcher = await self.current()
        return searcher.index.vectors[searcher.entry(id).row]

    async def classify(
        self, row_E: np.ndarray, labels: Sequence[str], templates: Sequence[str]
    ) -> list[tuple[str, float]]:
        """The probability of each different label, best first."""
        labels, templates = list(dict.fromkeys(labels)), templates or self.embedder.templates
        num_prompts, num_letters = len(labels) * len(templates), sum(map(len, labels))
        if num_prompts > MAX_PROMPTS:
            message = f"{len(labels):,} labels x {len(templates)} templates; the maximum is {MAX_PROMPTS:,}"
            raise Refused(400, message, "use fewer labels or templates")
        if sum(len(labels) * len(one) + one.count("{}") * num_letters for one in templates) > MAX_LETTERS:
            raise Refused(400, "the labels and templates are too much text", "use fewer labels or templates")
        label_LE = mean_of_prompts(await self.text_rows(label_prompts(labels, templates)), len(labels))
        (probability_L,) = self.embedder.probabilities(row_E[None] @ label_LE.T)
        return sorted(zip(labels, probability_L.tolist(), strict=True), key=lambda one: -one[1])

    def close(self, seconds: float) -> bool:
        """Ends the threads; whether they all ended in that time."""
        for pool in (self.embedding, self.decoders, self.searchers):
            pool.shutdown(wait=False, cancel_futures=True)
        own = ("embedding", "decoding", "searching")
        running = [thread for thread in threading.enumerate() if thread.name.startswith(own)]
        deadline = time.monotonic() + seconds
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in running)
