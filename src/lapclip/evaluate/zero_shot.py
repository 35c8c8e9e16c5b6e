"""Zero-shot accuracy: images of known classes are told apart by the names of the classes alone.

Shapes: N images, L labels, E numbers of an embedding.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.evaluate.statistics import intervals

MOST_CELLS = 16_000_000  # cosines in memory at once
MOST_IN_CONFUSION = 100  # classes; a larger table cannot be looked at
MOST_CONFUSED = 50  # pairs of classes that are named


@dataclass(frozen=True)
class Guesses:
    """What a model takes images for."""

    classes: tuple[str, ...]
    true_N: np.ndarray  # number of the class
    rank_N: np.ndarray  # the place of the true class, 1 the best
    taken_for_N: np.ndarray  # the class that came first; among equals a wrong one

    def is_right(self, k: int = 1) -> np.ndarray:
        return self.rank_N <= k


def guess(
    image_NE: np.ndarray,
    label_LE: np.ndarray,
    true_N: np.ndarray,
    classes: tuple[str, ...],
    *,
    most_cells: int = MOST_CELLS,
) -> Guesses:
    """Compares images with the labels' embeddings, some images at a time."""
    some = max(1, most_cells // len(classes))
    rank_N, taken_for_N = np.empty(len(true_N), dtype=int), np.empty(len(true_N), dtype=int)
    for start in range(0, len(true_N), some):
        block, true = slice(start, start + some), true_N[start : start + some]
        cosine_NL = image_NE[block] @ label_LE.T
        true_cosine_N = cosine_NL[np.arange(len(true)), true]
        # Among equals, and for NaN, the true class comes last, as in retrieval.
        rank_N[block] = len(classes) - np.count_nonzero(cosine_NL < true_cosine_N[:, None], axis=1)
        cosine_NL[np.arange(len(true)), true] = -np.inf
        taken_for_N[block] = np.where(rank_N[block] == 1, true, cosine_NL.argmax(axis=1))
    return Guesses(classes, true_N, rank_N, taken_for_N)


def zero_shot(guesses: Guesses, templates: list[str]) -> dict[str, Any]:
    """What `lapclip eval --json` says of it; of fewer than five classes, one is always among the first five."""
    classes, num_images = guesses.classes, len(guesses.true_N)
    five = min(5, len(classes))
    right_NK = np.stack([guesses.is_right(1), guesses.is_right(five)], axis=1).astype(float)
    interval_K2 = intervals(right_NK, np.ones_like(right_NK))
    confused = most_confused(guesses)
    return {
        "top1": float(right_NK[:, 0].mean()),
        "top5": float(right_NK[:, 1].mean()),
        "chance": 1 / len(classes),
        "chance@5": five / len(classes),
        "num_classes": len(classes),
        "num_images": num_images,
        "interval@1": interval_K2[0].tolist(),
        "interval@5": interval_K2[1].tolist(),
        "classes": by_class(guesses, confused),
        "confusion": confusion(guesses) if len(classes) <= MOST_IN_CONFUSION else None,
        "most_confused": confused[:MOST_CONFUSED],
        "templates": templates,
    }


def most_confused(guesses: Guesses) -> list[dict[str, Any]]:
    """Pairs of a class and one that it was taken for, the most frequent first."""
    wrong = ~guesses.is_right()
    pairs = guesses.true_N[wrong] * len(guesses.classes) + guesses.taken_for_N[wrong]
    numbers, counts = np.unique(pairs, return_counts=True)
    confused = []
    for place in np.argsort(-counts, kind="stable").tolist():
        true, taken_for = divmod(int(numbers[place]), len(guesses.classes))
        label, other = guesses.classes[true], guesses.classes[taken_for]
        confused.append({"label": label, "taken_for": other, "num_images": int(counts[place])})
    return confused


def by_class(guesses: Guesses, confused: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each class that has images: how many of them are known, and what the others are mostly taken for."""
    worst: dict[str, dict[str, Any]] = {}
    for pair in confused:
        worst.setdefault(pair["label"], pair)
    table = []
    for number, label in enumerate(guesses.classes):
        own = guesses.is_right()[guesses.true_N == number]
        if len(own):
            pair = worst.get(label, {"taken_for": None, "num_images": 0})
            table.append(
                {
                    "label": label,
                    "num_images": len(own),
                    "top1": float(own.mean()),
                    "taken_for": pair["taken_for"],
                    "num_taken_for": pair["num_images"],
                }
            )
    return table


def confusion(guesses: Guesses) -> dict[str, Any]:
    """Counts of images, true classes down, what they are taken for across."""
    counts_LL = np.zeros((len(guesses.classes),) * 2, dtype=int)
    np.add.at(counts_LL, (guesses.true_N, guesses.taken_for_N), 1)
    return {"labels": list(guesses.classes), "counts": counts_LL.tolist()}
