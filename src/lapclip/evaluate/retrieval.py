"""Recall from embeddings, both ways, always beside what chance would give.

Shapes: N images, M captions, E numbers of an embedding; Q queries and A answers are captions and images or the
other way round.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapclip.data.decode import Unreadable
from lapclip.data.source import Source
from lapclip.embedder import Embedder
from lapclip.errors import UserError, shortened
from lapclip.evaluate.difficulty import accuracy_by_difficulty
from lapclip.evaluate.statistics import wilson_interval
from lapclip.step.loss import Loss
from lapclip.units import Progress, finished

KS = (1, 5, 10)
MOST_CELLS = 16_000_000  # cosines in memory at once; with all that is made of them about 200 MB


@dataclass(frozen=True)
class Pool:
    """Held-out pairs as embeddings: N images, M captions; the captions of an image stand together."""

    image_NE: np.ndarray
    text_ME: np.ndarray
    image_of_caption: np.ndarray  # [M], which image a caption belongs to
    captions: list[str]
    indices: np.ndarray  # [N], the images' numbers in their source
    groups: np.ndarray  # [N], equal for equal images
    faults: tuple[str, ...] = ()  # images that could not be had, and are not in it, and why
    unreadable: tuple[int, ...] = ()  # their numbers in their source

    def part(self, pictures: np.ndarray) -> "Pool":
        """Some of the images, in rising order, with their captions."""
        place_N = np.full(len(self.indices), -1)
        place_N[pictures] = np.arange(len(pictures))
        kept = np.flatnonzero(place_N[self.image_of_caption] >= 0)
        return replace(
            self,
            image_NE=self.image_NE[pictures],
            text_ME=self.text_ME[kept],
            image_of_caption=place_N[self.image_of_caption[kept]],
            captions=[self.captions[m] for m in kept],
            indices=self.indices[pictures],
            groups=self.groups[pictures],
        )


def embed_pool(embedder: Embedder, source: Source, num_images: int) -> Pool:
    """A sample of a source's images with all their captions; the images are never all in memory."""
    return finished(embedding([embedder], source, num_images))[0]


def embedding(
    embedders: Sequence[Embedder], source: Source, num_images: int
) -> Generator[Progress, None, list[Pool]]:
    """The same pool by each of several models; says how far it is."""
    asked, chunk = source.sample(num_images), min(embedder.chunk for embedder in embedders)
    sizes = {embedder.image_size for embedder in embedders}
    rows: list[list[np.ndarray]] = [[] for _ in embedders]
    kept, lost, faults = [], [], []
    for start in range(0, len(asked), chunk):
        yield Progress("embedding images", start, len(asked))
        seen = []
        for index in asked[start : start + chunk].tolist():
            try:
                seen.append({size: source.image(index, size) for size in sizes})
                kept.append(index)
            except Unreadable as problem:  # a streamed one; then nothing is searched for it
                lost.append(index)
                faults.append(f"`{shortened(source.name(index))}` {shortened(str(problem))}")
        for own, embedder in zip(rows, embedders, strict=True):
            own.append(embedder.images([pictures[embedder.image_size] for pictures in seen]))
    if not kept:
        first = f", the first one {faults[0]}" if faults else ""
        raise UserError(
            f"none of {len(faults)} held-out images can be read{first}",
            hint="look whether the source is still there",
        )
    indices = np.array(kept)
    wordings = [source.captions(int(index)) for index in indices]
    captions = [caption for words in wordings for caption in words]
    image_of_caption = np.repeat(np.arange(len(indices)), [len(words) for words in wordings])
    groups = source.groups(indices)
    pools = []
    for own, embedder in zip(rows, embedders, strict=True):
        text_ME = yield from embedding_texts(embedder, captions)
        image_NE = np.concatenate(own)
        pools.append(
            Pool(image_NE, text_ME, image_of_caption, captions, indices, groups, tuple(faults), tuple(lost))
        )
    return pools


def embedding_texts(embedder: Embedder, captions: list[str]) -> Generator[Progress, None, np.ndarray]:
    """Rows of captions; what many images share, such as the name of a class, is embedded once."""
    number_of = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    different, rows, chunk = list(number_of), [], embedder.chunk
    for start in range(0, len(different), chunk):
        yield Progress("embedding captions", start, len(different))
        rows.append(embedder.texts(different[start : start + chunk]))
    return np.concatenate(rows)[[number_of[caption] for caption in captions]]


def retrieval(pool: Pool, batch_size: int) -> dict[str, Any]:
    """Recall both ways and accuracy in batches, as events report it.

    An image is found by any of its captions, and a caption that several images share finds any of them.
    """
    cosine_MN = pool.text_ME @ pool.image_NE.T
    is_pair_MN = belong_together(pool)
    batches = (
        (cosine_MN[np.ix_(captions, images)], is_pair_MN[np.ix_(captions, images)])
        for captions, images in batches_of(pool.image_of_caption, batch_size)
    )
    return {
        "num_images": len(pool.image_NE),
        "num_captions": len(pool.text_ME),
        "text_to_image": recall(cosine_MN, is_pair_MN),
        "image_to_text": recall(cosine_MN.T, is_pair_MN.T),
        "in_batch": in_batch(batches),
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
    """True where a caption is said of an image, be it by another pair with the same words or an equal image."""
    return Links.of_captions(pool).rows(np.arange(len(pool.captions)))


def numbered_words(captions: Sequence[str]) -> np.ndarray:
    """A number for each caption, equal for equal words; an array of texts would be as wide as the longest one."""
    number_of: dict[str, int] = {}
    return np.array([number_of.setdefault(caption.casefold(), len(number_of)) for caption in captions])


def witnesses(pool: Pool, *, share_captions: bool) -> np.ndarray:
    """A number for each image, [N], equal for those that succeed and fail together: equal images, and when
    asked for by words also images with an equal caption, directly or through others."""
    place_N = np.arange(len(pool.indices))
    tied = [(np.unique(pool.groups, return_inverse=True)[1], place_N)]
    if share_captions:
        tied.append((numbered_words(pool.captions), pool.image_of_caption))
    unit_N = place_N.copy()
    while True:
        before = unit_N.copy()
        for key, picture in tied:
            least = np.full(key.max() + 1, len(unit_N))
            np.minimum.at(least, key, unit_N[picture])
            np.minimum.at(unit_N, picture, least[key])
        if np.array_equal(before, unit_N):
            return np.unique(unit_N, return_inverse=True)[1]


@dataclass(frozen=True)
class Links:
    """Which answers are right for which queries, without a matrix of all: by words of captions, groups of images."""

    key_Q: np.ndarray
    key_A: np.ndarray
    starts: np.ndarray  # where the answer keys of each query key start; one more at the end
    answer_keys: np.ndarray

    @classmethod
    def of_captions(cls, pool: Pool, published: bool = False) -> "Links":
        """From captions to images; as published, equal words and equal images of other pairs are wrong."""
        if published:
            key_M, key_N = pool.image_of_caption, np.arange(len(pool.indices))
        else:
            key_M, key_N = numbered_words(pool.captions), np.unique(pool.groups, return_inverse=True)[1]
        return cls.of_pairs(key_M, key_N, key_M, key_N[pool.image_of_caption])

    @classmethod
    def of_pairs(cls, key_Q: np.ndarray, key_A: np.ndarray, left: np.ndarray, right: np.ndarray) -> "Links":
        left, right = np.unique(np.stack([left, right]), axis=1)
        return cls(key_Q, key_A, np.searchsorted(left, np.arange(key_Q.max() + 2)), right)

    def reverse(self) -> "Links":
        """From images to captions."""
        left = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        return Links.of_pairs(self.key_A, self.key_Q, self.answer_keys, left)

    def rows(self, queries: np.ndarray) -> np.ndarray:
        """True where an answer is right, [len(queries), A]."""
        said = np.zeros((len(queries), int(self.key_A.max()) + 1), dtype=bool)
        for row, key in enumerate(self.key_Q[queries].tolist()):
            said[row, self.answer_keys[self.starts[key] : self.starts[key + 1]]] = True
        return said.take(self.key_A, axis=1)


@dataclass(frozen=True)
class Ranks:
    """The place of the first right answer for each query, and what decided it."""

    rank_Q: np.ndarray  # 1 is the best
    right_Q: np.ndarray  # cosine of the best right answer
    wrong_Q: np.ndarray  # and of the best wrong one
    num_right_Q: np.ndarray
    num_answers: int


def ranking(
    query_QE: np.ndarray, answer_AE: np.ndarray, links: Links, *, most_cells: int = MOST_CELLS
) -> Generator[Progress, None, Ranks]:
    """Ranks of right answers, so many queries at a time that memory stays bounded."""
    some = max(1, most_cells // len(answer_AE))
    blocks = []
    for start in range(0, len(query_QE), some):
        yield Progress("comparing", start, len(query_QE))
        queries = np.arange(start, min(start + some, len(query_QE)))
        cosine_QA, is_pair_QA = query_QE[queries] @ answer_AE.T, links.rows(queries)
        rank_Q, right_Q = ranks(cosine_QA, is_pair_QA)
        cosine_QA[is_pair_QA] = -np.inf
        blocks.append((rank_Q, right_Q, cosine_QA.max(axis=1), np.count_nonzero(is_pair_QA, axis=1)))
    rank_Q, right_Q, wrong_Q, num_right_Q = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return Ranks(rank_Q, right_Q, wrong_Q, num_right_Q, num_answers=len(answer_AE))


def ranks(cosine_QA: np.ndarray, is_pair_QA: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The place and the cosine of each query's best right answer; among equals, and for NaN, it comes last."""
    right_Q = cosine_QA.max(axis=1, where=is_pair_QA, initial=-np.inf)
    is_behind_QA = (cosine_QA < right_Q[:, None]) | is_pair_QA
    return 1 + cosine_QA.shape[1] - np.count_nonzero(is_behind_QA, axis=1), right_Q


def in_batch(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """The documents' accuracy, on held-out pairs: the nearest in a batch of shuffled pairs is right, both ways.

    Batches come as their cosines, and where captions and images belong together.
    """
    right, chances, size = [], [], 0
    for cosine, is_pair in batches:
        size = len(cosine)
        for way in (recall(cosine, is_pair, ks=(1,)), recall(cosine.T, is_pair.T, ks=(1,))):
            right.append(way["recall@1"])
            chances.append(way["chance@1"])
    return {"accuracy": float(np.mean(right)), "chance": float(np.mean(chances)), "batch_size": size}


def batches_of(image_of_caption: np.ndarray, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pool in batches, always the same: images, and before them the first caption of each."""
    _, first_caption_N = np.unique(image_of_caption, return_index=True)
    order = np.random.default_rng(0).permutation(len(first_caption_N))
    size = min(batch_size, len(order))
    for start in range(0, len(order) - size + 1, size):
        images = order[start : start + size]
        yield first_caption_N[images], images


def recall(cosine_QA: np.ndarray, is_pair_QA: np.ndarray, ks: tuple[int, ...] = KS) -> dict[str, Any]:
    """How often a right answer is among the first k, over all queries."""
    ranks_Q, _ = ranks(cosine_QA, is_pair_QA)
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
