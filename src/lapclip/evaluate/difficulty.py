"""Accuracy by how hard the wrong answers are: easy, medium and hard, by the similarity of their captions' words.

The words decide, not the model: an image stays a hard negative of a caption all through training.
Shapes: M captions, N images, Q captions used as queries, D hash buckets for words.
"""

import re
import zlib
from functools import lru_cache
from typing import Any

import numpy as np

from lapclip.evaluate.pool import Links, Pool
from lapclip.evaluate.statistics import chance_of_none

LEVELS = ("easy", "medium", "hard")
NUM_CHOICES = 10  # the correct image and nine others
MAX_QUERIES = 500  # captions, evenly spaced
MAX_IMAGES = 1000
NUM_BUCKETS = 1024


def accuracy_by_difficulty(pool: Pool) -> dict[str, Any] | None:
    """How often a caption's own image is the nearest of ten, for each level; None if the pool is too small, or if most
    captions have no word in common, as names of classes.

    Own: of the images that share a caption, as in a folder of classes, the best one would be found too often.

    The nine wrong images are drawn from a third of the pool; the result is the expectation over all draws. Of a large
    pool only some images are used.
    """
    pool = pool.part(spread(len(pool.indices), MAX_IMAGES))
    query_Q = spread(len(pool.captions), MAX_QUERIES)
    cosine_QN, is_pair_QN = pool.text_ME[query_Q] @ pool.image_NE.T, Links.of_captions(pool).rows(query_Q)
    if (~is_pair_QN).sum(axis=1).min() // len(LEVELS) < NUM_CHOICES - 1:
        return None
    queries, images = tuple(pool.captions[m] for m in query_Q), pool.image_of_caption.tobytes()
    order_QN, are_levels = easy_to_hard(queries, tuple(pool.captions), images, is_pair_QN.tobytes())
    if not are_levels:
        return None
    own_Q1 = np.take_along_axis(cosine_QN, pool.image_of_caption[query_Q, None], axis=1)
    is_missed_QN = ~(np.take_along_axis(cosine_QN, order_QN, axis=1) < own_Q1)
    found = {
        level: chance_of_none(third.sum(axis=1), third.shape[1], NUM_CHOICES - 1)
        for level, third in zip(LEVELS, np.array_split(is_missed_QN, len(LEVELS), axis=1), strict=True)
    }
    return found | {"chance": 1 / NUM_CHOICES, "num_choices": NUM_CHOICES}


def spread(count: int, limit: int) -> np.ndarray:
    """At most `limit` numbers below `count`, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int))


@lru_cache(maxsize=1)  # a run evaluates the same pool again and again
def easy_to_hard(
    queries: tuple[str, ...], captions: tuple[str, ...], image_of_caption: bytes, is_pair: bytes
) -> tuple[np.ndarray, bool]:
    """For each query the positions of wrong images by increasing similarity, the same number for all, [Q, N]; and
    whether the most similar one is similar at all, for most queries."""
    similarity_QN = similarity(queries, captions, np.frombuffer(image_of_caption, dtype=int))
    is_pair_QN = np.frombuffer(is_pair, dtype=bool).reshape(similarity_QN.shape)
    # Stable, so that the levels are the same every time.
    order_QN = np.argsort(np.where(is_pair_QN, np.inf, similarity_QN), axis=1, kind="stable")
    # A caption with more wrong images than another omits some, evenly from the easiest to the hardest.
    num_wrong_Q = (~is_pair_QN).sum(axis=1)
    places = (np.arange(num_wrong_Q.min()) + 0.5) / num_wrong_Q.min()
    order_QN = np.take_along_axis(order_QN, (places * num_wrong_Q[:, None]).astype(int), axis=1)
    most_similar_Q = np.take_along_axis(similarity_QN, order_QN[:, -1:], axis=1)
    return order_QN, bool(np.median(most_similar_Q) > 0)


def similarity(queries: tuple[str, ...], captions: tuple[str, ...], image_M: np.ndarray) -> np.ndarray:
    """TF-IDF cosine of each query with the most similar caption of each image."""
    count_MD, count_QD = count_words(captions), count_words(queries)
    idf_D = np.log(len(captions) / np.maximum((count_MD > 0).sum(axis=0), 1)).astype(np.float32)
    similarity_QM = unit_rows(count_QD * idf_D) @ unit_rows(count_MD * idf_D).T
    starts = np.unique(image_M, return_index=True)[1]  # the captions of an image are consecutive
    return np.maximum.reduceat(similarity_QM, starts, axis=1)


def count_words(captions: tuple[str, ...]) -> np.ndarray:
    counts_MD = np.zeros((len(captions), NUM_BUCKETS), dtype=np.float32)
    for row, caption in enumerate(captions):
        for word in words_of(caption):
            counts_MD[row, zlib.crc32(word.encode()) % NUM_BUCKETS] += 1
    return counts_MD


def unit_rows(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def words_of(caption: str) -> list[str]:
    """Words; pairs of characters in scripts without spaces."""
    words = re.findall(r"\w+", caption.casefold())
    if len(words) > 1 or len(caption) < 4:
        return words
    return [caption[i : i + 2] for i in range(len(caption) - 1)]
