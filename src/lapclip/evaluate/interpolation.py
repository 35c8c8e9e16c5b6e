"""Weights between a pretrained and a fine-tuned model (WiSE-FT, arXiv 2109.01903), judged on the validation set."""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from lapclip.evaluate.pool import Pool
from lapclip.model.clip import CLIP
from lapclip.runs.events import Event, Interpolated
from lapclip.runs.history import mean_recall
from lapclip.weights.reading import load_between

ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # shares of the trained model
Recall = dict[str, Any]
Measure = Callable[[], tuple[Pool, Recall, Recall | None]]


def sweep(
    model: CLIP, start: Path, trained: Path, measure: Measure, *, step: int
) -> Generator[Event, None, tuple[Interpolated, Pool]]:
    """Measures the model with each share of the trained weights, and leaves it with the best ones.

    Also returns the validation set as embedded by these. Yields an empty event after each, to be stopped at.
    """
    pools, recalls, generals = [], [], []
    for alpha in ALPHAS:
        load_between(start, trained, alpha, model)
        pool, recall, general = measure()
        pools.append(pool)
        recalls.append(recall)
        generals += [general] if general else []
        yield Event()
    place = choose(recalls)
    load_between(start, trained, ALPHAS[place], model)
    return Interpolated(step, list(ALPHAS), recalls, generals or None, ALPHAS[place]), pools[place]


def choose(recalls: Sequence[Recall]) -> int:
    """The place of the highest mean recall, and of equal ones the first, which forgets least.

    The trained model, the last one, stays unless another one finds at least one image more on average: among a few
    validation images a smaller difference is luck.
    """
    means = [mean_recall(recall) for recall in recalls]
    num_more = (max(means) - means[-1]) * recalls[-1]["num_images"]
    return means.index(max(means)) if round(num_more, 6) >= 1 else len(means) - 1
