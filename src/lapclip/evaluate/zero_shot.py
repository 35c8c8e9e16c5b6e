"""Zero-shot accuracy: images of known classes are classified by the names of the classes alone.

Shapes: N images, L labels, E numbers of an embedding.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.evaluate.statistics import intervals

MAX_CELLS = 16_000_000  # cosines in memory at once
MAX_CONFUSION_CLASSES = 100  # a larger matrix is unreadable
MAX_CONFUSED_PAIRS = 50


@dataclass(frozen=True)
class Predictions:
    """The classes that a model predicts."""

    classes: tuple[str, ...]
    image_NE: np.ndarray
    label_LE: np.ndarray
    true_N: np.ndarray  # number of the class
    rank_N: np.ndarray  # rank of the true class, 1 is the best
    predicted_N: np.ndarray  # the class that ranks first; among ties a wrong one

    def is_correct(self, k: int = 1) -> np.ndarray:
        return self.rank_N <= k


def predict(
    image_NE: np.ndarray, label_LE: np.ndarray, true_N: np.ndarray, classes: tuple[str, ...]
) -> Predictions:
    """Compares images with the labels' embeddings, in blocks of images."""
    some = max(1, MAX_CELLS // len(classes))
    rank_N, predicted_N = np.empty(len(true_N), dtype=int), np.empty(len(true_N), dtype=int)
    for start in range(0, len(true_N), some):
        block, true = slice(start, start + some), true_N[start : start + some]
        cosine_NL = image_NE[block] @ label_LE.T
        true_cosine_N = cosine_NL[np.arange(len(true)), true]
        # Among ties, and for NaN, the true class ranks last, as in retrieval.
        rank_N[block] = len(classes) - np.count_nonzero(cosine_NL < true_cosine_N[:, None], axis=1)
        cosine_NL[np.arange(len(true)), true] = -np.inf
        predicted_N[block] = np.where(rank_N[block] == 1, true, cosine_NL.argmax(axis=1))
    return Predictions(classes, image_NE, label_LE, true_N, rank_N, predicted_N)


def zero_shot(predictions: Predictions, templates: list[str]) -> dict[str, Any]:
    """As in `lapclip eval --json`; with fewer than five classes, top-5 accuracy is 1."""
    classes, num_images = predictions.classes, len(predictions.true_N)
    five = min(5, len(classes))
    correct_NK = np.stack([predictions.is_correct(1), predictions.is_correct(five)], axis=1).astype(float)
    interval_K2 = intervals(correct_NK, np.ones_like(correct_NK))
    confused = most_confused(predictions)
    return {
        "top1": float(correct_NK[:, 0].mean()),
        "top5": float(correct_NK[:, 1].mean()),
        "chance": 1 / len(classes),
        "chance@5": five / len(classes),
        "num_classes": len(classes),
        "num_images": num_images,
        "interval@1": interval_K2[0].tolist(),
        "interval@5": interval_K2[1].tolist(),
        "classes": by_class(predictions, confused),
        "confusion": confusion(predictions) if len(classes) <= MAX_CONFUSION_CLASSES else None,
        "most_confused": confused[:MAX_CONFUSED_PAIRS],
        "templates": templates,
    }


def most_confused(predictions: Predictions) -> list[dict[str, Any]]:
    """Pairs of a class and a wrong prediction, the most frequent first."""
    wrong = ~predictions.is_correct()
    pairs = predictions.true_N[wrong] * len(predictions.classes) + predictions.predicted_N[wrong]
    numbers, counts = np.unique(pairs, return_counts=True)
    confused = []
    for place in np.argsort(-counts, kind="stable").tolist():
        true, taken_for = divmod(int(numbers[place]), len(predictions.classes))
        label, other = predictions.classes[true], predictions.classes[taken_for]
        confused.append({"label": label, "taken_for": other, "num_images": int(counts[place])})
    return confused


def by_class(predictions: Predictions, confused: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each class that has images: its accuracy, and its most frequent wrong prediction."""
    worst = {pair["label"]: pair for pair in reversed(confused)}  # of each class the first, most frequent one
    table = []
    for number, label in enumerate(predictions.classes):
        own = predictions.is_correct()[predictions.true_N == number]
        if len(own):
            pair = worst.get(label, {"taken_for": None, "num_images": 0})
            row = {"label": label, "num_images": len(own), "top1": float(own.mean())}
            table.append(row | {"taken_for": pair["taken_for"], "num_taken_for": pair["num_images"]})
    return table


def confusion(predictions: Predictions) -> dict[str, Any]:
    """Counts of images: true classes as rows, predicted classes as columns."""
    counts_LL = np.zeros((len(predictions.classes),) * 2, dtype=int)
    np.add.at(counts_LL, (predictions.true_N, predictions.predicted_N), 1)
    return {"labels": list(predictions.classes), "counts": counts_LL.tolist()}
