"""Accuracy by how hard the wrong answers are: easy, medium and hard, by how alike their captions' words are.

The words decide, not the model: the same image stays a hard negative of a caption all through training.
Shapes: M captions, N images, Q captions that are asked, D buckets for words.
"""

import re
import zlib
from functools import lru_cache
from typing import Any

import numpy as np

LEVELS = ("easy", "medium", "hard")
NUM_CHOICES = 10  # the right image and nine others
MOST_ASKED = 500  # captions, spread evenly
MOST_IMAGES = 1000
NUM_BUCKETS = 1024


def accuracy_by_difficulty(
    cosine_MN: np.ndarray, is_pair_MN: np.ndarray, captions: list[str], image_of_caption: np.ndarray
) -> dict[str, Any] | None:
    """How often a caption's own image is the nearest of ten, for each level; None for too small a pool.

    Nine wrong ones are drawn from a third of the pool, and the share is the expected one over all draws.
    """
    asked_Q = spread(len(captions), MOST_ASKED)
    images_N = spread(cosine_MN.shape[1], MOST_IMAGES)
    cosine_QN, is_pair_QN = cosine_MN[np.ix_(asked_Q, images_N)], is_pair_MN[np.ix_(asked_Q, images_N)]
    if (~is_pair_QN).sum(axis=1).min() // len(LEVELS) < NUM_CHOICES - 1:
        return None
    belongs = np.isin(image_of_caption, images_N)  # captions of these images
    order_QN = from_easy_to_hard(
        tuple(captions[m] for m in asked_Q),
        tuple(caption for caption, is_here in zip(captions, belongs, strict=True) if is_here),
        image_of_caption[belongs].tobytes(),
        is_pair_QN.tobytes(),
    )
    right_Q = np.where(is_pair_MN, cosine_MN, -np.inf).max(axis=1)[asked_Q]
    is_missed_QN = ~(np.take_along_axis(cosine_QN, order_QN, axis=1) < right_Q[:, None])
    found = {
        level: float(np.mean(chance_of_none(third.sum(axis=1), third.shape[1], NUM_CHOICES - 1)))
        for level, third in zip(LEVELS, np.array_split(is_missed_QN, len(LEVELS), axis=1), strict=True)
    }
    return found | {"chance": 1 / NUM_CHOICES, "num_choices": NUM_CHOICES}


def spread(count: int, most: int) -> np.ndarray:
    """At most so many numbers below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def chance_of_none(num_bad: np.ndarray, total: int, drawn: int) -> np.ndarray:
    """The chance that none of so many drawn, without putting back, is a bad one."""
    chance = np.ones(len(num_bad))
    for k in range(drawn):
        chance *= np.clip(total - num_bad - k, 0, None) / (total - k)
    return chance


@lru_cache(maxsize=1)  # a run asks again and again about the same pool
def from_easy_to_hard(
    asked: tuple[str, ...], captions: tuple[str, ...], image_of_caption: bytes, is_pair: bytes
) -> np.ndarray:
    """For each asked caption the places of wrong images by rising likeness, for all the same number, [Q, N]."""
    likeness_QN = likeness(asked, captions, np.frombuffer(image_of_caption, dtype=int))
    is_pair_QN = np.frombuffer(is_pair, dtype=bool).reshape(likeness_QN.shape)
    # Equal ones keep their order, so that the levels are the same every time.
    order_QN = np.argsort(np.where(is_pair_QN, np.inf, likeness_QN), axis=1, kind="stable")
    # A caption with more wrong images than another leaves some away, evenly from the easiest to the hardest.
    num_wrong_Q = (~is_pair_QN).sum(axis=1)
    places = (np.arange(num_wrong_Q.min()) + 0.5) / num_wrong_Q.min()
    return np.take_along_axis(order_QN, (places * num_wrong_Q[:, None]).astype(int), axis=1)


def likeness(asked: tuple[str, ...], captions: tuple[str, ...], image_of_caption: np.ndarray) -> np.ndarray:
    """How alike the words of a caption and of the most similar caption of an image are; rare words count more."""
    counts_MD, asked_QD = count_words(captions), count_words(asked)
    rarity_D = np.log(len(captions) / np.maximum((counts_MD > 0).sum(axis=0), 1)).astype(np.float32)
    likeness_QM = of_unit_length(asked_QD * rarity_D) @ of_unit_length(counts_MD * rarity_D).T
    starts = np.unique(image_of_caption, return_index=True)[1]  # the captions of an image stand together
    return np.maximum.reduceat(likeness_QM, starts, axis=1)


def count_words(captions: tuple[str, ...]) -> np.ndarray:
    counts_MD = np.zeros((len(captions), NUM_BUCKETS), dtype=np.float32)
    for row, caption in enumerate(captions):
        for word in words_of(caption):
            counts_MD[row, zlib.crc32(word.encode()) % NUM_BUCKETS] += 1
    return counts_MD


def of_unit_length(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def words_of(caption: str) -> list[str]:
    """Words; of scripts that do not part them, pairs of characters."""
    words = re.findall(r"\w+", caption.casefold())
    if len(words) > 1 or len(caption) < 4:
        return words
    return [caption[i : i + 2] for i in range(len(caption) - 1)]
