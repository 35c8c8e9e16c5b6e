"""Few-shot accuracy: images of known classes are classified after learning from a few labelled images of each class.

Shapes: N images, L labels, E numbers of an embedding.
"""

from typing import Any

import numpy as np

from lapclip.embedder import fit_label_rows
from lapclip.evaluate.zero_shot import Predictions, predict
from lapclip.units import LongWork, Progress

EXAMPLES = (1, 4, 16)  # labelled images per class
NUM_DRAWS = 5  # of the examples
MAX_WORK = 100_000_000  # multiplications of all examples by all labels: five fits of a second each


def few_shot(zero_shot: Predictions, group_N: np.ndarray, scale: float) -> LongWork[dict[str, Any] | None]:
    """As in `lapclip eval --json`; None if most classes have too few images, or there are too many classes.

    A class with no more images than examples keeps one to test, and has fewer examples.
    """
    image_NE, label_LE, true_N = zero_shot.image_NE, zero_shot.label_LE, zero_shot.true_N
    # One of equal images, so that no example is tested; by class.
    kept = np.unique(group_N, return_index=True)[1]
    count_L = np.bincount(true_N[kept], minlength=len(label_LE))
    place_N = np.concatenate([np.arange(count) for count in count_L])  # of an image within its class
    most_N = np.repeat(count_L - 1, count_L)  # examples
    results: list[dict[str, Any]] = []
    for num_examples in EXAMPLES:
        if num_examples >= np.median(count_L) or num_examples * len(label_LE) * label_LE.size > MAX_WORK:
            break
        top1, same = [], []
        for draw in range(NUM_DRAWS):
            done = len(results) * NUM_DRAWS + draw
            yield Progress("learning from examples", done, len(EXAMPLES) * NUM_DRAWS)
            order = np.random.default_rng(draw).permutation(kept)
            order = order[np.argsort(true_N[order], kind="stable")]
            is_example = place_N < np.minimum(num_examples, most_N)
            examples, tested = order[is_example], order[~is_example]
            row_LE = fit_label_rows(image_NE[examples], true_N[examples], label_LE, scale)
            found = predict(image_NE[tested], row_LE, true_N[tested], zero_shot.classes)
            top1.append(float(found.is_correct().mean()))
            same.append(float(zero_shot.is_correct()[tested].mean()))
        result = {"examples_per_class": num_examples, "num_images": len(tested), "top1": float(np.mean(top1))}
        result["num_smaller_classes"] = int((count_L <= num_examples).sum())  # with fewer examples
        results.append(result | {"range": [min(top1), max(top1)], "zero_shot": float(np.mean(same))})
    return {"num_draws": NUM_DRAWS, "results": results} if results else None
