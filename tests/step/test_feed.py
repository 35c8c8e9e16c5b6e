"""Feeding: the same batches with a thread and without; the next is ready in time; nothing is left running."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch
from conftest import picture_folder

from lapclip.config import DataConfig, load_config
from lapclip.data.batches import Batch
from lapclip.data.open import Data
from lapclip.errors import UserError
from lapclip.model.clip import shape_of
from lapclip.step import feed as step_feed
from lapclip.step.feed import ahead, augment_batch, drop_words, feed
from lapclip.train.prepare import draft_of, open_here
from lapclip.units import finished

PATIENCE_SECONDS = 20  # for a thread that should be quick; nothing here takes as long unless it is broken
ARRAYS = ("images", "tokens", "ends", "image_ids", "caption_ids")


@pytest.fixture
def config(tmp_path):
    flags = {"source": str(picture_folder(tmp_path / "photos", 24)), "size": "nano", "image_size": 16,
             "num_validation": 4, "crop": 0.5, "flip": True, "colour": 0.3, "word_dropout": 0.3}  # fmt: skip
    return load_config(flags=flags)


def fed(config, data: Data, *, first_step: int = 0, workers: int = 0):
    size = shape_of(config.model)
    tokenizer = draft_of(config, data)[0]
    return feed(data.training, tokenizer, size, config.data, batch_size=8, seed=3, first_step=first_step, workers=workers)  # fmt: skip


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    for one, other in zip(found, expected, strict=True):
        for name in ARRAYS:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("shape", [(200, 12), (50, 4, 12)])
def test_dropped_words_leave_the_others_in_order_between_start_and_end(shape):
    rng = np.random.default_rng(0)
    ends = rng.integers(1, 12, shape[:-1])
    tokens = np.where(np.arange(12) <= ends[..., None], 10 + np.arange(12), 0)  # ascending, then padding
    batch = Batch(np.zeros(0), tokens, ends, np.zeros(0), np.zeros(0))
    found = drop_words(batch, 0.3, rng)
    rows, stops = found.tokens.reshape(-1, 12), found.ends.ravel()
    for row, stop, end in zip(rows, stops, ends.ravel(), strict=True):
        kept = row[: stop + 1]
        assert (
            kept[0] == 10 and kept[-1] == 10 + end and (np.diff(kept) > 0).all() and not row[stop + 1 :].any()
        )
    num_words = (ends - 1).sum()
    assert 0.6 < (stops - 1).sum() / num_words < 0.8
    assert drop_words(batch, 0.0, rng) is batch


def test_batches_are_the_same_with_the_thread_and_without_and_after_a_resume(config, monkeypatch):
    data, before = finished(open_here(config)), set(threading.enumerate())
    assert data.training.only_copies, "then a thread prepares them"
    with monkeypatch.context() as patch:
        patch.setattr(step_feed, "ahead", lambda batches: batches)
        expected = list(islice(fed(config, data), 6))
    for first in (0, 4):
        with closing(fed(config, data, first_step=first)) as coming:
            assert_same(list(islice(coming, 6 - first)), expected[first:])
    assert len({batch.images.tobytes() for batch in expected}) == 6, "each step augments differently"
    assert expected[0].images.shape == (8, 3, 16, 16) and expected[0].images.dtype == np.uint8
    assert set(threading.enumerate()) == before, "closing ends the thread"


def test_one_batch_is_made_while_the_one_before_is_used_and_closing_waits_for_it():
    """Memory holds this batch and the next, no more."""
    is_asked, may_go_on, made = threading.Event(), threading.Event(), []

    def batches() -> Iterator[int]:
        yield 0
        is_asked.set()
        may_go_on.wait(PATIENCE_SECONDS)
        made.append(1)
        yield 1
        made.append(2)
        yield 2

    coming = ahead(batches())
    assert next(coming) == 0
    assert is_asked.wait(PATIENCE_SECONDS), "before anybody has asked for the second one"
    threading.Timer(0.05, may_go_on.set).start()
    coming.close()
    assert made == [1]


def test_an_error_in_the_thread_reaches_whoever_asks_for_that_batch():
    def batches() -> Iterator[str]:
        yield "good"
        raise UserError("the disk is gone", hint="plug it in")

    coming = ahead(batches())
    assert next(coming) == "good", "what was made before is still used"
    with pytest.raises(UserError, match="the disk is gone"):
        next(coming)
    assert not any("ThreadPool" in thread.name for thread in threading.enumerate())


@pytest.mark.slow
def test_workers_give_the_same_batches_and_end_with_the_feed():
    flags = {"source": "synthetic:40", "size": "nano", "image_size": 16, "num_validation": 4}
    config = load_config(flags=flags)
    data = finished(open_here(config))
    assert not data.training.only_copies
    threads = set(threading.enumerate())
    coming = fed(config, data, workers=2)
    found = list(islice(coming, 3))
    assert multiprocessing.active_children()
    coming.close()
    assert not multiprocessing.active_children() and set(threading.enumerate()) == threads
    assert_same(found, list(islice(fed(config, data), 3)))


# Augmentation: the same after a resume, never outside the image, and nothing when nothing is asked for.


def augmented(images: torch.Tensor, size: int, **settings) -> torch.Tensor:
    batch = Batch(images.numpy(), *[np.zeros(0)] * 4)
    given = augment_batch(batch, DataConfig(**settings), image_size=size, seed=0, step=0).images
    assert given.dtype == np.uint8
    return images if given is batch.images else torch.from_numpy(given)


def test_a_flip_mirrors_about_every_second_image():
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 255, (400, 3, 8, 8), dtype=np.uint8))
    assert augmented(images, 8, crop=1.0, flip=False, colour=0.0) is images
    flipped = augmented(images, 8, crop=1.0, flip=True, colour=0.0)
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert bool((same ^ mirrored).all()) and 150 < int(mirrored.sum()) < 250


def test_a_crop_shows_a_part_of_the_image_and_nothing_beside_it():
    ramp = torch.arange(64, dtype=torch.uint8).mul(4)[None, None, None].expand(200, 3, 64, 64).contiguous()
    shown = augmented(ramp, 32, crop=0.3, flip=False, colour=0.0).float()
    width = (shown[:, 0, 0, -1] - shown[:, 0, 0, 0]) / 252 * 63 / 64 * 32 / 31  # of the image, about
    assert bool((shown[:, 0, 0].diff() >= 0).all()), "no fold at the border"
    assert 0.4 < float(width.min()) < 0.65 and float(width.max()) <= 1.02
    left = shown[:, 0, 0, 0]
    assert float(left.min()) < 10 and float(left.max()) > 60, "from everywhere"


def test_colour_changes_grey_images_in_brightness_only():
    grey = torch.full((50, 3, 8, 8), 100, dtype=torch.uint8)
    shown = augmented(grey, 8, crop=1.0, flip=False, colour=0.4).float()
    assert float(shown.std(dim=1).max()) <= 1
    means = shown.mean(dim=(1, 2, 3))
    assert float(means.min()) >= 59 and float(means.max()) <= 141 and float(means.std()) > 10
