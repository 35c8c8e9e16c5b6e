"""Recall from embeddings in both directions, with the recall of random ranking beside it.

One blocked implementation, used while training and by `lapclip eval`.
Shapes: N images, M captions, E numbers of an embedding; Q queries and A answers, captions and images or the reverse.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapclip.evaluate.difficulty import accuracy_by_difficulty
from lapclip.evaluate.pool import Links, Pool, caption_numbers
from lapclip.evaluate.statistics import chance_of_none, intervals
from lapclip.runs.history import DIRECTIONS, KS
from lapclip.step.loss import Loss
from lapclip.units import LongWork, Progress, finished

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
    whole = [np.arange(len(pool.indices))]
    return finished(retrieve(pool, whole, published=False)).summary(pool, batch_size)


@dataclass(frozen=True)
class Retrieved:
    """The ranks in each of some pools, in both directions."""

    pools: list[Pool]
    links: list[Links]
    ranks: list[dict[str, Ranks]]  # by direction
    unit_N: dict[str, np.ndarray]  # by direction, over all pools: equal for images that count as one

    def summary(self, used: Pool, batch_size: int) -> dict[str, Any]:
        """Recall over the pools, and accuracy in batches and by difficulty over all the images in them."""
        table: dict[str, Any] = {"num_images": len(used.indices), "num_captions": len(used.captions)}
        table["in_batch"] = batch_accuracy(used, batch_size)
        table["negatives"] = accuracy_by_difficulty(used)
        for direction in DIRECTIONS:
            found_UK, asked_UK = self.by_unit(direction)
            low_K, high_K = intervals(found_UK, asked_UK).T
            # What is among the first is also among the first five.
            low_K, high_K = np.maximum.accumulate(low_K), np.minimum.accumulate(high_K[::-1])[::-1]
            interval_K2 = np.stack([low_K, high_K], axis=1).tolist()
            table[direction] = recall_summary([ranks[direction] for ranks in self.ranks])
            table[direction] |= {f"interval@{k}": own for k, own in zip(KS, interval_K2, strict=True)}
            table[direction]["num_units"] = len(found_UK)
        return table

    def by_unit(self, direction: str) -> tuple[np.ndarray, np.ndarray]:
        """For each unit the share of queries that succeed at k, and the share of queries, [U, K] each.

        Every pool has the same weight, however many captions it has.
        """
        found, asked = [], []
        for pool, ranks in zip(self.pools, self.ranks, strict=True):
            rank_Q = ranks[direction].rank_Q
            image_Q = pool.image_of_caption if direction == "text_to_image" else np.arange(len(pool.indices))
            hits = [np.bincount(image_Q, weights=rank_Q <= k) for k in KS]
            found.append(np.stack(hits, axis=1) / len(rank_Q))
            asked.append(np.stack([np.bincount(image_Q)] * len(KS), axis=1) / len(rank_Q))
        unit_N = np.unique(self.unit_N[direction], return_inverse=True)[1]
        found_UK, asked_UK = np.zeros((2, unit_N.max() + 1, len(KS)))
        np.add.at(found_UK, unit_N, np.concatenate(found))
        np.add.at(asked_UK, unit_N, np.concatenate(asked))
        return found_UK, asked_UK


def retrieve(whole: Pool, folds: list[np.ndarray], published: bool) -> LongWork[Retrieved]:
    """Ranks in each pool."""
    is_whole = len(folds) == 1 and len(folds[0]) == len(whole.indices)
    pools = [whole] if is_whole else [whole.part(fold) for fold in folds]
    links = [Links.of_captions(pool, published) for pool in pools]
    ranks = []
    for pool, its_links in zip(pools, links, strict=True):
        ranks.append((yield from rank_both(pool, its_links, published)))
    used = np.concatenate(folds)
    units = {way: independent_units(whole, share_captions=way == "text_to_image")[used] for way in DIRECTIONS}
    return Retrieved(pools, links, ranks, units)


def independent_units(pool: Pool, *, share_captions: bool) -> np.ndarray:
    """A number for each image, [N], equal for images that succeed and fail together: equal images and, for text
    queries, images with an equal caption, directly or through others."""
    image_N = np.arange(len(pool.indices))
    ties = [(np.unique(pool.groups, return_inverse=True)[1], image_N)]
    if share_captions:
        ties.append((caption_numbers(pool.captions), pool.image_of_caption))
    unit_N = image_N.copy()
    while True:
        before = unit_N.copy()
        for key, image in ties:
            lowest = np.full(key.max() + 1, len(unit_N))
            np.minimum.at(lowest, key, unit_N[image])
            np.minimum.at(unit_N, image, lowest[key])
        if np.array_equal(before, unit_N):
            return np.unique(unit_N, return_inverse=True)[1]


def rank_both(pool: Pool, links: Links, published: bool) -> LongWork[dict[str, Ranks]]:
    """Ranks by direction; `links` lead from captions to images. Equal captions are one answer, unless published
    protocols are followed."""
    images = yield from rank_answers(pool.text_ME, pool.image_NE, links)
    back, answer_ME = links.reverse(), pool.text_ME
    if not published:
        different = [*{caption: number for number, caption in enumerate(pool.captions)}.values()]
        back, answer_ME = replace(back, key_A=back.key_A[different]), answer_ME[different]
    captions = yield from rank_answers(pool.image_NE, answer_ME, back)
    return dict(zip(DIRECTIONS, (images, captions), strict=True))


def rank_answers(
    query_QE: np.ndarray, answer_AE: np.ndarray, links: Links, *, max_cells: int = MAX_CELLS
) -> LongWork[Ranks]:
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
