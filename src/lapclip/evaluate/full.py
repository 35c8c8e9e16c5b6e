"""The full evaluation of a model: the dictionary that `lapclip eval --json` prints.

Shapes: N images, M captions, K values of k, U independent units: images, where equal ones or those that share captions
count as one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.data.source import Source
from lapclip.data.split import EvaluationSet
from lapclip.embedder import Embedder
from lapclip.errors import UserError, printable
from lapclip.evaluate.few_shot import few_shot
from lapclip.evaluate.pool import Links, Pool, embed_pools
from lapclip.evaluate.retrieval import Ranks, Retrieved, retrieve
from lapclip.evaluate.statistics import sign_flips
from lapclip.evaluate.zero_shot import Predictions, predict, zero_shot
from lapclip.runs.history import DIRECTIONS, KS
from lapclip.units import LongWork, Progress

NUM_FOUND = 5  # wrong images listed with a mistake


def evaluate(
    embedder: Embedder,
    measured: EvaluationSet,
    *,
    batch_size: int,
    num_images: int | None = None,
    pool_size: int | None = None,
    published: bool = False,
    templates: Sequence[str] | None = None,
    num_mistakes: int = 50,
    against: Embedder | None = None,
) -> LongWork[dict[str, Any]]:
    """Recall, classification, difficulty and mistakes of a model, and how another model differs from it.

    Without `num_images` all images are used. With `pool_size` they are divided into pools of exactly that size, and
    recall is averaged over them, so that results on different sources are comparable.
    """
    source = measured.source
    shown = [(embedder, source)] + ([(against, measured.for_other or source)] if against else [])
    pools = yield from embed_pools(shown, num_images or source.num_different)
    for (model, _), pool in zip(shown, pools, strict=True):
        if not (np.isfinite(pool.image_NE).any() and np.isfinite(pool.text_ME).any()):
            # Its recall would be no measurement.
            what = f"the weights of `{printable(model.name)}` are damaged: its embeddings are not finite"
            raise UserError(what, hint="name an earlier checkpoint of the run, or another model")
    whole, folds = pools[0], divide(len(pools[0].indices), pool_size)
    retrieved = yield from retrieve(whole, folds, published)
    used = whole.part(np.sort(np.concatenate(folds)))
    result: dict[str, Any] = {
        "model": embedder.name,
        **retrieved.summary(used, batch_size),
        "pool": {"size": len(folds[0]), "num_pools": len(folds)},
        "protocol": "published" if published else "shared",
        "share_unknown_words": embedder.tokenizer.share_unknown(used.captions),
    }
    prompts = templates or embedder.templates
    predictions = yield from classify(embedder, whole, measured, prompts)
    if predictions:
        result["zero_shot"] = zero_shot(predictions, list(prompts))
        group_N = whole.groups[has_label(whole, measured)]
        if learned := (yield from few_shot(predictions, group_N, embedder.scale)):
            result["few_shot"] = learned
    result["mistakes"] = [mistake.record(source) for mistake in mistakes_of(retrieved, num_mistakes)]
    result["unreadable"] = [*measured.unreadable, *map(source.name, whole.unreadable)]
    if against is not None:
        other = yield from retrieve(pools[1], folds, published)
        result["against"] = {"model": against.name, **compare(retrieved, other)}
        others = yield from classify(against, pools[1], measured, templates or against.templates)
        if predictions and others:
            own_N1, other_N1 = (p.is_correct().astype(float)[:, None] for p in (predictions, others))
            (top1,) = differences(own_N1, other_N1, np.ones_like(own_N1))
            result["against"]["zero_shot"] = {"top1": top1}
    return result


def divide(num_images: int, pool_size: int | None) -> list[np.ndarray]:
    """Disjoint random pools of exactly `pool_size` images, always the same; the rest is omitted."""
    if pool_size is None:
        return [np.arange(num_images)]
    if pool_size > num_images:
        hint = f"use at most {num_images:,}"
        raise UserError(f"the pool size is {pool_size:,}, but there are {num_images:,} images", hint=hint)
    order = np.random.default_rng(0).permutation(num_images)
    num_pools = num_images // pool_size
    return list(np.sort(order[: num_pools * pool_size].reshape(num_pools, pool_size), axis=1))


@dataclass(frozen=True)
class Mistake:
    """A caption, the nearest of its own images, and wrong images that rank before it, by number in their source."""

    caption: str
    index: int
    rank: int
    score: float
    gap: float  # cosine of the best wrong image minus that of the correct one
    found: tuple[tuple[int, float], ...]  # wrong images and their scores, best first

    def record(self, source: Source) -> dict[str, Any]:
        """As in `lapclip eval --json`."""
        places = [(self.index, self.score), *self.found]
        own, *found = [  # JSON has no NaN
            {"picture": source.name(n), "index": n, "score": round(s, 4) if math.isfinite(s) else None}
            for n, s in places
        ]
        return {"caption": self.caption, **own, "rank": self.rank, "found": found}


def mistakes_of(retrieved: Retrieved, limit: int) -> list[Mistake]:
    """The captions that find their own image last, over all pools."""
    every: list[Mistake] = []
    for pool, ranks, links in zip(retrieved.pools, retrieved.ranks, retrieved.links, strict=True):
        every += worst_mistakes(pool, ranks["text_to_image"], links, limit)
    return sorted(every, key=lambda mistake: (-mistake.rank, -mistake.gap))[:limit]


def worst_mistakes(pool: Pool, ranks: Ranks, links: Links, limit: int) -> list[Mistake]:
    """By rank, then by gap, the largest first; at most one for each image and for equal captions."""
    gap_M = np.nan_to_num(ranks.wrong_Q - ranks.correct_Q, nan=-np.inf)
    captions: set[int] = set()
    images: set[int] = set()
    worst: list[Mistake] = []
    for query in np.lexsort((-gap_M, -ranks.rank_Q)).tolist():
        rank, caption = int(ranks.rank_Q[query]), int(links.key_Q[query])
        if len(worst) >= limit or rank == 1:
            break
        if caption in captions:
            continue
        cosine_N, is_correct_N = pool.image_NE @ pool.text_ME[query], links.rows(np.array([query]))[0]
        own, wrong = np.flatnonzero(is_correct_N), np.flatnonzero(~is_correct_N)
        index = int(pool.indices[own[cosine_N[own].argmax()]])
        if index not in images:
            captions.add(caption)
            images.add(index)
            first = wrong[np.argsort(-cosine_N[wrong], kind="stable")[: min(NUM_FOUND, rank - 1)]]
            found = tuple((int(pool.indices[n]), float(cosine_N[n])) for n in first)
            score, gap = float(ranks.correct_Q[query]), float(gap_M[query])
            worst.append(Mistake(pool.captions[query], index, rank, score, gap, found))
    return worst


def classify(
    embedder: Embedder, pool: Pool, measured: EvaluationSet, templates: Sequence[str]
) -> LongWork[Predictions | None]:
    """Predicted classes of the images that have one; None where there are fewer than two classes."""
    classes, is_labelled = measured.classes, has_label(pool, measured)
    if len(classes) < 2 or not is_labelled.any():
        return None
    number_of: dict[str | None, int] = {label: number for number, label in enumerate(classes)}
    true_N = np.array([number_of[measured.labels[index]] for index in pool.indices[is_labelled].tolist()])
    chunk = max(1, embedder.chunk // len(templates))
    rows = []
    for start in range(0, len(classes), chunk):
        yield Progress("embedding labels", start, len(classes))
        rows.append(embedder.label_rows(classes[start : start + chunk], templates))
    return predict(pool.image_NE[is_labelled], np.concatenate(rows), true_N, classes)


def has_label(pool: Pool, measured: EvaluationSet) -> np.ndarray:
    return np.array([measured.labels[index] is not None for index in pool.indices.tolist()])


def compare(own: Retrieved, other: Retrieved) -> dict[str, dict[str, Any]]:
    """By how much recall of one model is above that of another, on the same images and captions."""
    table = {}
    for direction in DIRECTIONS:
        (own_UK, asked_UK), (other_UK, _) = own.by_unit(direction), other.by_unit(direction)
        tests = differences(own_UK, other_UK, asked_UK)
        table[direction] = {f"recall@{k}": test for k, test in zip(KS, tests, strict=True)}
    return table


def differences(own_UK: np.ndarray, other_UK: np.ndarray, asked_UK: np.ndarray) -> list[dict[str, Any]]:
    """Each difference of two recalls with its 95% interval and p-value."""
    difference_UK, asked_K = own_UK - other_UK, asked_UK.sum(axis=0)
    interval_K2, p_value_K = sign_flips(difference_UK, asked_UK)
    columns = ((difference_UK.sum(axis=0) / asked_K).tolist(), interval_K2.tolist(), p_value_K.tolist())
    names = ("difference", "interval", "p_value")
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
