"""The captions that find their own image last, and what they find instead."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.data.source import Source
from lapclip.evaluate.retrieval import Links, Pool, Ranks

NUM_FOUND = 5


@dataclass(frozen=True)
class Mistake:
    """A caption, the nearest of its own images, and wrong ones that came before it, by number in their source."""

    caption: str
    index: int
    rank: int
    score: float
    gap: float  # by how much the best wrong one is nearer
    found: tuple[tuple[int, float], ...]  # wrong images and their scores, best first


def mistakes(pool: Pool, ranks: Ranks, links: Links, most: int) -> list[Mistake]:
    """The worst first: the larger rank, then the larger gap; at most one for each image and for equal captions."""
    gap_M = np.nan_to_num(ranks.wrong_Q - ranks.right_Q, nan=-np.inf)
    asked: set[int] = set()
    images: set[int] = set()
    worst: list[Mistake] = []
    for query in np.lexsort((-gap_M, -ranks.rank_Q)).tolist():
        if len(worst) >= most or ranks.rank_Q[query] == 1:
            break
        if int(links.key_Q[query]) not in asked:
            mistake = look_closer(pool, ranks, links, query, gap=float(gap_M[query]))
            if mistake.index not in images:
                asked.add(int(links.key_Q[query]))
                images.add(mistake.index)
                worst.append(mistake)
    return worst


def look_closer(pool: Pool, ranks: Ranks, links: Links, query: int, *, gap: float) -> Mistake:
    cosine_N, is_right_N = pool.image_NE @ pool.text_ME[query], links.rows(np.array([query]))[0]
    own, rank = np.flatnonzero(is_right_N), int(ranks.rank_Q[query])
    wrong = np.flatnonzero(~is_right_N)
    first = wrong[np.argsort(-cosine_N[wrong], kind="stable")[: min(NUM_FOUND, rank - 1)]]
    return Mistake(
        caption=pool.captions[query],
        index=int(pool.indices[own[cosine_N[own].argmax()]]),
        rank=rank,
        score=float(ranks.right_Q[query]),
        gap=gap,
        found=tuple((int(pool.indices[n]), float(cosine_N[n])) for n in first),
    )


def worst_of(several: list[list[Mistake]], most: int) -> list[Mistake]:
    """The worst of several pools."""
    together = [mistake for some in several for mistake in some]
    return sorted(together, key=lambda mistake: (-mistake.rank, -mistake.gap))[:most]


def described(mistake: Mistake, source: Source) -> dict[str, Any]:
    """As `lapclip eval --json` says it."""
    return {
        "caption": mistake.caption,
        "picture": source.name(mistake.index),
        "index": mistake.index,
        "rank": mistake.rank,
        "score": number(mistake.score),
        "found": [
            {"picture": source.name(index), "index": index, "score": number(score)}
            for index, score in mistake.found
        ],
    }


def number(value: float) -> float | None:
    """JSON knows no NaN, which broken weights give."""
    return round(value, 4) if math.isfinite(value) else None
