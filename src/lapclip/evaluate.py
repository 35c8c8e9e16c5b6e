"""Recall from embeddings, both ways, always beside what chance would give."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapclip.data.catalogue import shortened
from lapclip.data.decode import Unreadable
from lapclip.data.source import Source
from lapclip.embedder import Embedder
from lapclip.errors import UserError
from lapclip.loss import Loss
from lapclip.negatives import accuracy_by_difficulty

KS = (1, 5, 10)


@dataclass(frozen=True)
class Pool:
    """Held-out pairs as embeddings: N pictures, M captions."""

    image_NE: np.ndarray
    text_ME: np.ndarray
    image_of_caption: np.ndarray  # [M], which picture a caption belongs to
    captions: list[str]
    indices: np.ndarray  # [N], the pictures' numbers in their source
    groups: np.ndarray  # [N], equal for equal pictures
    faults: tuple[str, ...] = ()  # pictures that could not be had, and are not in it


def embed_pool(embedder: Embedder, source: Source, num_images: int) -> Pool:
    """A sample of a source's pictures with all their captions; the pictures are never all in memory."""
    asked, size, chunk = source.sample(num_images), embedder.model.size.image_size, embedder.chunk
    rows, kept, faults = [], [], []
    for start in range(0, len(asked), chunk):
        pictures = []
        for index in asked[start : start + chunk].tolist():
            try:
                pictures.append(source.picture(index, size))
                kept.append(index)
            except Unreadable as problem:  # a streamed one; then nothing is searched for it
                faults.append(f"`{shortened(source.name(index))}` {shortened(str(problem))}")
        rows.append(embedder.images(pictures))
    if not kept:
        raise UserError(
            f"none of {len(faults)} held-out pictures can be read, the first one {faults[0]}",
            hint="look whether the source is still there",
        )
    indices = np.array(kept)
    wordings = [source.captions(int(index)) for index in indices]
    captions = [caption for words in wordings for caption in words]
    image_of_caption = np.repeat(np.arange(len(indices)), [len(words) for words in wordings])
    groups = source.groups(indices)
    texts = embedder.texts(captions)
    return Pool(np.concatenate(rows), texts, image_of_caption, captions, indices, groups, tuple(faults))


def retrieval(pool: Pool, batch_size: int) -> dict[str, Any]:
    """Recall both ways and accuracy in batches, as `lapclip eval --json` prints it.

    A picture is found by any of its captions, and a caption that several pictures share finds any of them.
    """
    cosine_MN = pool.text_ME @ pool.image_NE.T
    is_pair_MN = belong_together(pool)
    return {
        "num_images": len(pool.image_NE),
        "num_captions": len(pool.text_ME),
        "text_to_image": recall(cosine_MN, is_pair_MN),
        "image_to_text": recall(cosine_MN.T, is_pair_MN.T),
        "in_batch": in_batch(cosine_MN, is_pair_MN, pool.image_of_caption, batch_size),
        "negatives": accuracy_by_difficulty(cosine_MN, is_pair_MN, pool.captions, pool.image_of_caption),
    }


def pool_loss(pool: Pool, loss_fn: Loss, scale: Tensor, bias: Tensor | None, batch_size: int) -> float:
    """The loss over the pool, in batches as in training."""
    is_pair_MN = belong_together(pool)
    losses = [
        loss_fn(
            torch.from_numpy(pool.image_NE[images]),
            torch.from_numpy(pool.text_ME[captions]),
            scale,
            bias,
            torch.from_numpy(is_pair_MN[np.ix_(captions, images)].T),
        )
        for captions, images in batches_of(pool.image_of_caption, batch_size)
    ]
    return float(torch.stack(losses).mean())


def belong_together(pool: Pool) -> np.ndarray:
    """True where a caption is said of a picture, be it by another pair with the same words or an equal picture."""
    words, number_M = np.unique([caption.casefold() for caption in pool.captions], return_inverse=True)
    groups, group_N = np.unique(pool.groups, return_inverse=True)
    said_WG = np.zeros((len(words), len(groups)), dtype=bool)
    said_WG[number_M, group_N[pool.image_of_caption]] = True
    return said_WG[number_M][:, group_N]


def in_batch(
    cosine_MN: np.ndarray, is_pair_MN: np.ndarray, image_of_caption: np.ndarray, batch_size: int
) -> dict[str, Any]:
    """The documents' accuracy, on held-out pairs: the nearest in a batch of shuffled pairs is right, both ways."""
    right, chances, size = [], [], 0
    for captions, images in batches_of(image_of_caption, batch_size):
        size = len(images)
        cosine, is_pair = cosine_MN[np.ix_(captions, images)], is_pair_MN[np.ix_(captions, images)]
        for way in (recall(cosine, is_pair, ks=(1,)), recall(cosine.T, is_pair.T, ks=(1,))):
            right.append(way["recall@1"])
            chances.append(way["chance@1"])
    return {"accuracy": float(np.mean(right)), "chance": float(np.mean(chances)), "batch_size": size}


def batches_of(image_of_caption: np.ndarray, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pool in batches, always the same: pictures, and before them the first caption of each."""
    _, first_caption_N = np.unique(image_of_caption, return_index=True)
    order = np.random.default_rng(0).permutation(len(first_caption_N))
    size = min(batch_size, len(order))
    for start in range(0, len(order) - size + 1, size):
        images = order[start : start + size]
        yield first_caption_N[images], images


def recall(cosine_QA: np.ndarray, is_pair_QA: np.ndarray, ks: tuple[int, ...] = KS) -> dict[str, Any]:
    """How often a right answer is among the first k, over all queries; among equals, and for NaN, it comes last."""
    best_right_Q = np.where(is_pair_QA, cosine_QA, -np.inf).max(axis=1, keepdims=True)
    ranks_Q = 1 + (~(cosine_QA < best_right_Q) & ~is_pair_QA).sum(axis=1)
    num_queries, num_answers = cosine_QA.shape
    found = {k: int((ranks_Q <= k).sum()) for k in ks}
    right_Q = is_pair_QA.sum(axis=1)
    return {
        **{f"recall@{k}": found[k] / num_queries for k in ks},
        "median_rank": float(np.median(ranks_Q)),
        **{f"chance@{k}": chance(right_Q, num_answers, k) for k in ks},
        f"interval@{max(ks)}": wilson_interval(found[max(ks)], num_queries),
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
