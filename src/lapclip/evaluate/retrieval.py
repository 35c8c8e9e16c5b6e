"""Recall from embeddings in both directions, with the recall of random ranking beside it.

One blocked implementation, used while training and by `lapclip eval`.
Shapes: N images, M captions, E numbers of an embedding; Q queries and A answers, captions and images or the reverse.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapclip.evaluate.difficulty import accuracy_by_difficulty
from lapclip.evaluate.pool import Links, Pool
from lapclip.evaluate.statistics import chance_of_none, wilson_interval
from lapclip.step.loss import Loss
from lapclip.units import Progress, finished

KS = (1, 5, 10)
DIRECTIONS = ("text_to_image", "image_to_text")
MAX_CELLS = 16_000_000  # cosines in memory at once: about 200 MB with everything derived from them


@dataclass(frozen=True)
class Ranks:
    """The rank of the best correct answer to each query, and the cosines that decided it."""

    rank_Q: np.ndarray  # 1 is the best
    correct_Q: np.ndarray  # cosine of the best correct answer
    wrong_Q: np.ndarray  # cosine of the best wrong answer
    num_correct_Q: np.ndarray
    num_answers: int


def retrieval(pool: Pool, batch_size: int) -> dict[str, Any]:
    """Recall in both directions and accuracy in batches, as `Evaluated` events report them."""
    links = Links.of_captions(pool)
    ranks = finished(rank_both(pool, links))
    result: dict[str, Any] = {"num_images": len(pool.image_NE), "num_captions": len(pool.text_ME)}
    for direction in DIRECTIONS:
        is_found_Q = ranks[direction].rank_Q <= max(KS)
        interval = wilson_interval(int(is_found_Q.sum()), len(is_found_Q))
        result[direction] = recall_summary([ranks[direction]]) | {f"interval@{max(KS)}": interval}
    result["in_batch"] = batch_accuracy(pool, batch_size)
    return result | {"negatives": accuracy_by_difficulty(pool)}


def rank_both(pool: Pool, links: Links) -> Generator[Progress, None, dict[str, Ranks]]:
    """Ranks by direction; `links` lead from captions to images."""
    images = yield from rank_answers(pool.text_ME, pool.image_NE, links)
    captions = yield from rank_answers(pool.image_NE, pool.text_ME, links.reverse())
    return dict(zip(DIRECTIONS, (images, captions), strict=True))


def rank_answers(
    query_QE: np.ndarray, answer_AE: np.ndarray, links: Links, *, max_cells: int = MAX_CELLS
) -> Generator[Progress, None, Ranks]:
    """Ranks of correct answers, in blocks of queries so that memory is bounded."""
    num_rows = max(1, max_cells // len(answer_AE))
    blocks = []
    for start in range(0, len(query_QE), num_rows):
        yield Progress("comparing", start, len(query_QE))
        queries = np.arange(start, min(start + num_rows, len(query_QE)))
        cosine_QA, is_pair_QA = query_QE[queries] @ answer_AE.T, links.rows(queries)
        rank_Q, correct_Q = rank_block(cosine_QA, is_pair_QA)
        cosine_QA[is_pair_QA] = -np.inf
        blocks.append((rank_Q, correct_Q, cosine_QA.max(axis=1), np.count_nonzero(is_pair_QA, axis=1)))
    rank_Q, correct_Q, wrong_Q, num_correct_Q = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return Ranks(rank_Q, correct_Q, wrong_Q, num_correct_Q, num_answers=len(answer_AE))


def rank_block(cosine_QA: np.ndarray, is_pair_QA: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank and cosine of each query's best correct answer; among ties, and for NaN, it ranks last."""
    correct_Q = cosine_QA.max(axis=1, where=is_pair_QA, initial=-np.inf)
    is_behind_QA = (cosine_QA < correct_Q[:, None]) | is_pair_QA
    return 1 + cosine_QA.shape[1] - np.count_nonzero(is_behind_QA, axis=1), correct_Q


def recall_summary(pools: Sequence[Ranks]) -> dict[str, Any]:
    """Recall, median rank and chance in one direction, averaged over pools."""
    each = [
        {f"recall@{k}": np.mean(pool.rank_Q <= k) for k in KS}
        | {"median_rank": np.median(pool.rank_Q)}
        | {f"chance@{k}": 1 - chance_of_none(pool.num_correct_Q, pool.num_answers, k) for k in KS}
        for pool in pools
    ]
    return {name: float(np.mean([pool[name] for pool in each])) for name in each[0]}


def batch_accuracy(pool: Pool, batch_size: int) -> dict[str, Any]:
    """How often the nearest in a batch of shuffled pairs is correct, in both directions."""
    correct, chances, size = [], [], 0
    for captions, images, is_pair in batches(pool, batch_size):
        cosine = pool.text_ME[captions] @ pool.image_NE[images].T
        size = len(cosine)
        for cosine_QA, is_pair_QA in ((cosine, is_pair), (cosine.T, is_pair.T)):
            correct.append(np.mean(rank_block(cosine_QA, is_pair_QA)[0] == 1))
            chances.append(1 - chance_of_none(is_pair_QA.sum(axis=1), size, 1))
    return {"accuracy": float(np.mean(correct)), "chance": float(np.mean(chances)), "batch_size": size}


def pool_loss(pool: Pool, loss_fn: Loss, scale: Tensor, bias: Tensor | None, batch_size: int) -> float:
    """The loss over the pool, in batches as in training."""
    losses = []
    for captions, images, is_pair in batches(pool, batch_size):
        image_BE, text_BE = torch.from_numpy(pool.image_NE[images]), torch.from_numpy(pool.text_ME[captions])
        losses.append(loss_fn(image_BE, text_BE, scale, bias, torch.from_numpy(is_pair.T)))
    return float(torch.stack(losses).mean())


def batches(pool: Pool, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The pool in batches, always the same: the first caption of each image, the images, and which match."""
    links = Links.of_captions(pool)
    _, first_caption_N = np.unique(pool.image_of_caption, return_index=True)
    order = np.random.default_rng(0).permutation(len(first_caption_N))
    size = min(batch_size, len(order))
    for start in range(0, len(order) - size + 1, size):
        images = order[start : start + size]
        captions = first_caption_N[images]
        yield captions, images, links.rows(captions)[:, images]
