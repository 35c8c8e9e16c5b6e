"""How good a model is, all numbers together: the dictionary that `lapclip eval --json` prints.

Shapes: N images, M captions, K shares asked at once, W witnesses: images, where none are equal or share captions.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.data.measured import Measured
from lapclip.embedder import TEMPLATES, Embedder
from lapclip.errors import UserError, printable
from lapclip.evaluate.difficulty import MOST_IMAGES, accuracy_by_difficulty, spread
from lapclip.evaluate.mistakes import Mistake, described, mistakes, worst_of
from lapclip.evaluate.retrieval import (
    KS,
    Links,
    Pool,
    Ranks,
    batches_of,
    belong_together,
    chance,
    embedding,
    in_batch,
    ranking,
    witnesses,
)
from lapclip.evaluate.statistics import intervals, resampled_intervals, sign_flip_p_values
from lapclip.evaluate.zero_shot import Guesses, guess, zero_shot
from lapclip.units import Progress

WAYS = ("text_to_image", "image_to_text")


def appraise(
    embedder: Embedder,
    measured: Measured,
    *,
    batch_size: int,
    num_images: int | None = None,
    pool_size: int | None = None,
    published: bool = False,
    templates: Sequence[str] = TEMPLATES,
    num_mistakes: int = 50,
    against: Embedder | None = None,
) -> Generator[Progress, None, dict[str, Any]]:
    """Recall, zero-shot accuracy, difficulty and mistakes of a model, and whether another one differs from it.

    Without `num_images` all images are measured. With `pool_size` they are parted into pools of just so many, over
    which recall is averaged: figures of different sources are then comparable.
    """
    refuse_templates(templates)
    source = measured.source
    embedders = [embedder] if against is None else [embedder, against]
    whole, *others = yield from embedding(embedders, source, num_images or source.num_different)
    for model, pool in zip(embedders, (whole, *others), strict=True):
        refuse_broken(model.name, pool)
    folds = parted(len(whole.indices), pool_size)
    found = yield from looked_for(whole, folds, published)
    used = whole.part(np.sort(np.concatenate(folds)))
    result: dict[str, Any] = {
        "model": embedder.name,
        "num_images": len(used.indices),
        "num_captions": len(used.captions),
        "pool": {"size": len(folds[0]), "num_pools": len(folds)},
        "protocol": "published" if published else "shared",
        **found.summary(),
        "in_batch": in_batches(used, batch_size),
        "negatives": by_difficulty(used),
    }
    guesses = yield from guessing(embedder, whole, measured, templates)
    if guesses:
        result["zero_shot"] = zero_shot(guesses, list(templates))
    result["mistakes"] = [described(mistake, source) for mistake in found.worst(num_mistakes)]
    result["unreadable"] = [*measured.unreadable, *(source.name(index) for index in whole.unreadable)]
    if against is not None:
        other = yield from looked_for(others[0], folds, published)
        result["against"] = {"model": against.name, **compared(found, other)}
        other_guesses = yield from guessing(against, others[0], measured, templates)
        if guesses and other_guesses:
            right_N1, other_N1 = (g.is_right().astype(float)[:, None] for g in (guesses, other_guesses))
            (top1,) = differences(right_N1, other_N1, np.ones_like(right_N1))
            result["against"]["zero_shot"] = {"top1": top1}
    return result


def refuse_templates(templates: Sequence[str]) -> None:
    wrong = [template for template in templates if "{}" not in template]
    if wrong or not templates:
        raise UserError(
            f"`{printable(wrong[0])}` has no place for a label"
            if wrong
            else "there is no template for labels",
            hint="write `{}` where the label goes, as in `a photo of a {}`",
        )


def refuse_broken(name: str, pool: Pool) -> None:
    """A model that came apart in training finds nothing; that is no measurement."""
    if not (np.isfinite(pool.image_NE).any() and np.isfinite(pool.text_ME).any()):
        raise UserError(
            f"the weights of `{printable(name)}` are broken: what it makes of images or words are no numbers",
            hint="name an earlier checkpoint of the run, or another model",
        )


def parted(num_pictures: int, pool_size: int | None) -> list[np.ndarray]:
    """Disjoint pools of just so many images, drawn by chance but always the same; what remains is left out."""
    if pool_size is None:
        return [np.arange(num_pictures)]
    if pool_size > num_pictures:
        raise UserError(
            f"a pool of {pool_size:,} images is asked for, and there are {num_pictures:,}",
            hint=f"ask for at most {num_pictures:,}",
        )
    order = np.random.default_rng(0).permutation(num_pictures)
    num_pools = num_pictures // pool_size
    return list(np.sort(order[: num_pools * pool_size].reshape(num_pools, pool_size), axis=1))


@dataclass(frozen=True)
class Found:
    """What was found in each of some pools, both ways."""

    pools: list[Pool]
    links: list[Links]
    ranks: dict[str, list[Ranks]]  # by way
    witness_N: dict[str, np.ndarray]  # by way, over all pools: equal for images that count as one

    def summary(self) -> dict[str, dict[str, Any]]:
        return {way: way_summary(self.ranks[way], intervals(*self.by_witness(way))) for way in WAYS}

    def by_witness(self, way: str) -> tuple[np.ndarray, np.ndarray]:
        """What the queries of an image, and of those that count as one with it, found among the first k, and how
        many they are, [W, K] each. Every pool counts as much as another, however many captions it has.
        """
        found, asked = [], []
        for pool, ranks in zip(self.pools, self.ranks[way], strict=True):
            image_Q = pool.image_of_caption if way == "text_to_image" else np.arange(len(pool.indices))
            num_queries = len(ranks.rank_Q)
            counts_N = np.bincount(image_Q)
            hits = [np.bincount(image_Q, weights=ranks.rank_Q <= k) for k in KS]
            found.append(np.stack(hits, axis=1) / num_queries)
            asked.append(np.stack([counts_N] * len(KS), axis=1) / num_queries)
        witness_N = np.unique(self.witness_N[way], return_inverse=True)[1]
        found_WK, asked_WK = np.zeros((2, witness_N.max() + 1, len(KS)))
        np.add.at(found_WK, witness_N, np.concatenate(found))
        np.add.at(asked_WK, witness_N, np.concatenate(asked))
        return found_WK, asked_WK

    def worst(self, most: int) -> list[Mistake]:
        """The captions that find their own image last."""
        words = self.ranks["text_to_image"]
        return worst_of(
            [mistakes(*its, most) for its in zip(self.pools, words, self.links, strict=True)], most
        )


def looked_for(whole: Pool, folds: list[np.ndarray], published: bool) -> Generator[Progress, None, Found]:
    """Ranks in each pool."""
    pools, all_links = [], []
    ranks: dict[str, list[Ranks]] = {way: [] for way in WAYS}
    for fold in folds:
        pool = whole if len(folds) == 1 and len(fold) == len(whole.indices) else whole.part(fold)
        links = Links.of_captions(pool, published)
        pools.append(pool)
        all_links.append(links)
        asked = (
            ("text_to_image", pool.text_ME, pool.image_NE, links),
            ("image_to_text", pool.image_NE, pool.text_ME, links.reverse()),
        )
        for way, queries, answers, own in asked:
            ranks[way].append((yield from ranking(queries, answers, own)))
    pictures = np.concatenate(folds)
    witness_N = {way: witnesses(whole, share_captions=way == "text_to_image")[pictures] for way in WAYS}
    return Found(pools, all_links, ranks, witness_N)


def way_summary(pools: list[Ranks], interval_K2: np.ndarray) -> dict[str, Any]:
    """Recall one way, averaged over pools."""
    return {
        **{f"recall@{k}": mean([np.mean(pool.rank_Q <= k) for pool in pools]) for k in KS},
        "median_rank": mean([np.median(pool.rank_Q) for pool in pools]),
        **{
            f"chance@{k}": mean([chance(pool.num_right_Q, pool.num_answers, k) for pool in pools]) for k in KS
        },
        **{f"interval@{k}": interval for k, interval in zip(KS, interval_K2.tolist(), strict=True)},
    }


def mean(values: Sequence[Any]) -> float:
    return float(np.mean(values))


def in_batches(pool: Pool, batch_size: int) -> dict[str, Any]:
    """Accuracy in batches as in training, without a matrix of the whole pool."""
    links = Links.of_captions(pool)
    return in_batch(
        (pool.text_ME[captions] @ pool.image_NE[images].T, links.rows(captions)[:, images])
        for captions, images in batches_of(pool.image_of_caption, batch_size)
    )


def by_difficulty(pool: Pool) -> dict[str, Any] | None:
    """Accuracy by how alike wrong answers are; some images of a large pool stand for all."""
    some = pool.part(spread(len(pool.indices), MOST_IMAGES))
    cosine_MN = some.text_ME @ some.image_NE.T
    return accuracy_by_difficulty(cosine_MN, belong_together(some), some.captions, some.image_of_caption)


def guessing(
    embedder: Embedder, pool: Pool, measured: Measured, templates: Sequence[str]
) -> Generator[Progress, None, Guesses | None]:
    """What images with a class are taken for; None where there are not two classes."""
    classes = measured.classes
    labels = [measured.labels[index] for index in pool.indices.tolist()]
    has_label = np.array([label is not None for label in labels])
    if len(classes) < 2 or not has_label.any():
        return None
    number_of = {label: number for number, label in enumerate(classes)}
    true_N = np.array([number_of[label] for label in labels if label is not None])
    some = max(1, embedder.chunk // len(templates))
    rows = []
    for start in range(0, len(classes), some):
        yield Progress("embedding labels", start, len(classes))
        rows.append(embedder.label_rows(classes[start : start + some], templates))
    return guess(pool.image_NE[has_label], np.concatenate(rows), true_N, classes)


def compared(found: Found, other: Found) -> dict[str, dict[str, Any]]:
    """By how much recall of one model is above that of another, on the same images and captions."""
    table = {}
    for way in WAYS:
        (found_WK, asked_WK), (other_WK, _) = found.by_witness(way), other.by_witness(way)
        told = differences(found_WK, other_WK, asked_WK)
        table[way] = {f"recall@{k}": difference for k, difference in zip(KS, told, strict=True)}
    return table


def differences(found_NK: np.ndarray, other_NK: np.ndarray, asked_NK: np.ndarray) -> list[dict[str, Any]]:
    """Each difference of two shares, where it truly lies, and how likely it is by chance alone."""
    difference_NK = found_NK - other_NK
    total_K = difference_NK.sum(axis=0) / asked_NK.sum(axis=0)
    return [
        {"difference": difference, "interval": interval, "p_value": p_value}
        for difference, interval, p_value in zip(
            total_K.tolist(),
            resampled_intervals(difference_NK, asked_NK).tolist(),
            sign_flip_p_values(difference_NK).tolist(),
            strict=True,
        )
    ]
