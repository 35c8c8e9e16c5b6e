"""Requests that wait are embedded together, and none of them notices the others."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from lapclip.serve.batching import MAX_BATCH, Batcher


class Model:
    """Embeds numbers and texts as rows of their own, one batch at a time, when it is let; notes what it was given."""

    def __init__(self):
        self.batches = []
        self.gate = threading.Semaphore(0)
        self.is_working = threading.Lock()

    def embed(self, items):
        assert self.is_working.acquire(blocking=False), "one thread embeds"
        assert self.gate.acquire(timeout=10)
        self.is_working.release()
        self.batches.append(items)
        if "bad" in items:
            raise RuntimeError("a bad one")
        return np.array([row(item) for item in items], dtype=np.float32)


def row(item) -> list[float]:
    return [float(len(item)), float(sum(map(ord, item)))] if isinstance(item, str) else [float(item), 0.0]


def run(work, *, is_batching=True, num_known=0, open_gate=True):
    """Runs `work(embedding, model)` in an event loop; the model, for what it was given."""
    model, pool = Model(), ThreadPoolExecutor(1)

    async def main():
        texts = Batcher(model.embed, pool, is_batching=is_batching, num_known=num_known)
        embedding = SimpleNamespace(texts=texts, images=Batcher(model.embed, pool, is_batching=is_batching))
        if open_gate:
            model.gate.release(10_000)
        try:
            await asyncio.wait_for(work(embedding, model), 20)
        finally:
            model.gate.release(10_000)
            pool.shutdown()

    asyncio.run(main())
    return model


async def ask_all(embedding, requests):
    return await asyncio.gather(*(embedding.texts.rows(request) for request in requests))


async def until_begun(model):
    while not model.is_working.locked():
        await asyncio.sleep(0.001)


async def behind_one(embedding, model, *asked):
    """The answers to what is asked while a batch of one text is computed."""
    first = asyncio.create_task(embedding.texts.rows(["alone"]))
    await until_begun(model)
    rest = asyncio.gather(*(kind.rows(items) for kind, items in asked))
    await asyncio.sleep(0.01)
    model.gate.release(100)
    await first
    return await rest


def test_what_gathers_while_a_batch_is_computed_is_the_next_batch():
    async def work(embedding, model):
        asked = [(embedding.texts, [f"text {n}"]) for n in range(10)]
        for n, rows in enumerate(await behind_one(embedding, model, *asked)):
            np.testing.assert_array_equal(rows, [row(f"text {n}")])

    model = run(work, open_gate=False)
    assert [len(batch) for batch in model.batches] == [1, 10]


@pytest.mark.parametrize("is_batching", [True, False])
def test_rows_are_those_of_the_request_whatever_came_with_it(is_batching):
    sizes = [1] * 100 + [256, 1, 63, 2, 64, 65, 200, 200]
    requests = [[f"{n} {m} {'x' * (m % 7)}" for m in range(size)] for n, size in enumerate(sizes)]

    async def work(embedding, model):
        for request, rows in zip(requests, await ask_all(embedding, requests), strict=True):
            np.testing.assert_array_equal(rows, [row(text) for text in request])

    batches = run(work, is_batching=is_batching).batches
    assert max(map(len, batches)) <= MAX_BATCH and sum(map(len, batches)) == sum(sizes)
    assert is_batching == (len(batches) < 100), "else each request is a batch"


def test_equal_texts_are_embedded_once():
    async def work(embedding, model):
        asked = [(embedding.texts, texts) for texts in (["cat"], ["dog", "cat"], ["cat"])]
        _, both, last = await behind_one(embedding, model, *asked)
        np.testing.assert_array_equal(both, [row("dog"), row("cat")])
        np.testing.assert_array_equal(last, [row("cat")])

    assert run(work, open_gate=False).batches[1] == ["cat", "dog"]


def test_texts_and_images_take_turns():
    async def work(embedding, model):
        asked = [(embedding.texts, [f"t{n}"] * MAX_BATCH) for n in range(3)]
        *_, image = await behind_one(embedding, model, *asked, (embedding.images, [5]))
        np.testing.assert_array_equal(image, [[5.0, 0.0]])

    batches = run(work, open_gate=False).batches
    assert batches[1] == [5], "an image does not wait for all texts"


def test_one_that_fails_fails_alone():
    async def work(embedding, model):
        asked = [embedding.texts.rows(texts) for texts in (["good"], ["bad"], ["fine", "too"])]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        np.testing.assert_array_equal(answers[0], [row("good")])
        assert isinstance(answers[1], RuntimeError)
        np.testing.assert_array_equal(answers[2], [row("fine"), row("too")])

    run(work)


def test_a_client_that_goes_away_stops_nobody():
    async def work(embedding, model):
        first = asyncio.create_task(ask_all(embedding, [["alone"]]))
        await until_begun(model)
        leaving = asyncio.create_task(embedding.texts.rows(["leaving"]))
        staying = asyncio.create_task(embedding.texts.rows(["staying"]))
        await asyncio.sleep(0.01)
        leaving.cancel()
        first.cancel()  # and one whose batch is being computed
        await asyncio.sleep(0.01)
        model.gate.release(2)
        np.testing.assert_array_equal(await staying, [row("staying")])

    assert run(work, open_gate=False).batches == [["alone"], ["staying"]]


def test_what_was_asked_before_is_known_and_not_too_much_of_it():
    async def work(embedding, model):
        for text in ("cat", "cat", "dog", "cat", "x" * 1000, "x" * 1000):
            np.testing.assert_array_equal(await embedding.texts.rows([text]), [row(text)])
        for n in range(5):
            await embedding.texts.rows([f"{n}"])
        await embedding.texts.rows(["cat"])
        assert len(embedding.texts.known) == 3

    batches = run(work, num_known=3).batches
    assert [batch[0][:3] for batch in batches] == ["cat", "dog", "xxx", "xxx", *"01234", "cat"]
