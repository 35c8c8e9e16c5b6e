"""Recall from embeddings, both ways, always beside what chance would give."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from lapclip.data.source import Source
from lapclip.embedder import Embedder

KS = (1, 5, 10)


@dataclass(frozen=True)
class Pool:
    """Held-out pairs as embeddings: N pictures, M captions."""

    image_NE: np.ndarray
    text_ME: np.ndarray
    image_of_caption: np.ndarray  # [M], which picture a caption belongs to
    captions: list[str]


def embed_pool(embedder: Embedder, source: Source, num_images: int) -> Pool:
    """The first pictures of a source with all their captions; the pictures are never all in memory."""
    num_images = min(num_images, source.num_pairs)
    size, chunk = embedder.model.size.image_size, embedder.chunk
    rows = [
        embedder.images(
            [source.picture(index, size) for index in range(start, min(start + chunk, num_images))]
        )
        for start in range(0, num_images, chunk)
    ]
    wordings = [source.captions(index) for index in range(num_images)]
    captions = [caption for words in wordings for caption in words]
    image_of_caption = np.repeat(np.arange(num_images), [len(words) for words in wordings])
    return Pool(np.concatenate(rows), embedder.texts(captions), image_of_caption, captions)


def retrieval(pool: Pool) -> dict[str, Any]:
    """Recall both ways, as `lapclip eval --json` prints it; a picture with several captions is found by any of them."""
    cosine_MN = pool.text_ME @ pool.image_NE.T
    is_pair_MN = pool.image_of_caption[:, None] == np.arange(len(pool.image_NE))
    return {
        "num_images": len(pool.image_NE),
        "num_captions": len(pool.text_ME),
        "text_to_image": recall(cosine_MN, is_pair_MN),
        "image_to_text": recall(cosine_MN.T, is_pair_MN.T),
    }


def recall(cosine_QA: np.ndarray, is_pair_QA: np.ndarray) -> dict[str, Any]:
    """How often a right answer is among the first k, over all queries; among equals a right answer comes last."""
    best_right_Q = np.where(is_pair_QA, cosine_QA, -np.inf).max(axis=1, keepdims=True)
    ranks_Q = 1 + ((cosine_QA >= best_right_Q) & ~is_pair_QA).sum(axis=1)
    num_queries, num_answers = cosine_QA.shape
    found = {k: int((ranks_Q <= k).sum()) for k in KS}
    right_Q = is_pair_QA.sum(axis=1)
    return {
        **{f"recall@{k}": found[k] / num_queries for k in KS},
        "median_rank": float(np.median(ranks_Q)),
        **{f"chance@{k}": chance(right_Q, num_answers, k) for k in KS},
        "interval@10": wilson_interval(found[10], num_queries),
    }


def chance(right_Q: np.ndarray, num_answers: int, k: int) -> float:
    """The recall of answers in random order: one minus the chance that all of the first k are wrong."""
    kinds, counts = np.unique(right_Q, return_counts=True)
    missed = [
        math.comb(num_answers - int(n), k) / math.comb(num_answers, k) if k <= num_answers else 0.0
        for n in kinds
    ]
    return float(1 - np.average(missed, weights=counts))


def wilson_interval(num_found: int, num_queries: int, confidence: float = 0.95) -> list[float]:
    """Where the true recall lies with that confidence, also when nothing or everything was found."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_found / num_queries
    centre = share + z**2 / (2 * num_queries)
    reach = z * math.sqrt(share * (1 - share) / num_queries + z**2 / (4 * num_queries**2))
    return [
        max(0.0, (centre - reach) / (1 + z**2 / num_queries)),
        min(1.0, (centre + reach) / (1 + z**2 / num_queries)),
    ]
