"""How sure a share is: intervals by drawing images again, and whether two models differ by flipping signs.

Images are what is drawn, since the captions of one image succeed and fail together; so do images that share a
caption, which whoever calls adds up first.
Shapes: N images, K shares asked at once, R draws.
"""

import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np

NUM_RESAMPLES = 2000
NUM_FLIPS = 10_000
CONFIDENCE = 0.95
MOST_CELLS = 4_000_000  # numbers in memory at once


def shares(found_NK: np.ndarray, asked_NK: np.ndarray) -> np.ndarray:
    """What was found of what was asked, over all images."""
    return found_NK.sum(axis=0) / asked_NK.sum(axis=0)


def intervals(
    found_NK: np.ndarray, asked_NK: np.ndarray, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Where each true share lies, [K, 2]: percentiles over drawn images; Wilson's where all or nothing was found.

    Drawing again from images that all failed would be sure of nought.
    """
    interval_K2 = resampled_intervals(found_NK, asked_NK, num_resamples=num_resamples, seed=seed)
    num_pictures = len(found_NK)
    for k in range(found_NK.shape[1]):
        if not (found_NK[:, k] > 0).any():
            interval_K2[k] = wilson_interval(0, num_pictures)
        elif np.array_equal(found_NK[:, k], asked_NK[:, k]):
            interval_K2[k] = wilson_interval(num_pictures, num_pictures)
    # What was measured lies within, also of very few images, and when rounding would leave it out.
    share_K = shares(found_NK, asked_NK)
    return np.stack([np.minimum(interval_K2[:, 0], share_K), np.maximum(interval_K2[:, 1], share_K)], axis=1)


def resampled_intervals(
    sums_NK: np.ndarray, counts_NK: np.ndarray, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Percentiles of `sum / count` over images drawn with putting back, [K, 2]."""
    draws = [
        (times_RN @ sums_NK) / (times_RN @ counts_NK)
        for times_RN in resamples(len(sums_NK), num_resamples, seed)
    ]
    tail = 100 * (1 - CONFIDENCE) / 2
    return np.percentile(np.concatenate(draws), (tail, 100 - tail), axis=0).T


def resamples(num_pictures: int, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """How often each image is drawn, some draws at a time, [R, N]."""
    random = np.random.default_rng(seed)
    some = max(1, MOST_CELLS // num_pictures)
    for start in range(0, num_resamples, some):
        num_draws = min(some, num_resamples - start)
        drawn = random.integers(num_pictures, size=(num_draws, num_pictures))
        drawn += np.arange(num_draws)[:, None] * num_pictures
        times = np.bincount(drawn.ravel(), minlength=num_draws * num_pictures)
        yield times.reshape(num_draws, num_pictures).astype(np.float64)


def sign_flip_p_values(difference_NK: np.ndarray, *, num_flips: int = NUM_FLIPS, seed: int = 0) -> np.ndarray:
    """How likely as large a sum of differences is when it is by chance whose image is whose, [K]; both sides count.

    One is added above and below, so that it is never nought and never claims more than was tried.
    """
    differs = difference_NK[(difference_NK != 0).any(axis=1)]  # signs of noughts change nothing
    if not len(differs):
        return np.ones(difference_NK.shape[1])
    random = np.random.default_rng(seed)
    # Sums of fractions are equal up to rounding only.
    least_K = np.abs(differs.sum(axis=0)) - 1e-9 * np.abs(differs).sum(axis=0)
    reached_K = np.zeros(difference_NK.shape[1])
    some = max(1, MOST_CELLS // len(differs))
    for start in range(0, num_flips, some):
        shape = (min(some, num_flips - start), len(differs))
        sign_RN = 2.0 * random.integers(2, size=shape, dtype=np.int8) - 1
        reached_K += (np.abs(sign_RN @ differs) >= least_K).sum(axis=0)
    return (1 + reached_K) / (1 + num_flips)


def wilson_interval(num_found: int, num_queries: int, confidence: float = CONFIDENCE) -> list[float]:
    """Where the true recall lies with that confidence, also when nothing or everything was found."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_found / num_queries
    centre = share + z**2 / (2 * num_queries)
    reach = z * math.sqrt(share * (1 - share) / num_queries + z**2 / (4 * num_queries**2))
    return [
        max(0.0, (centre - reach) / (1 + z**2 / num_queries)),
        min(1.0, (centre + reach) / (1 + z**2 / num_queries)),
    ]
