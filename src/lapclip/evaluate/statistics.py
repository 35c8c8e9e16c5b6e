"""Confidence intervals by bootstrap and Wilson, and a sign-flip test of whether two models differ.

Images are resampled, not captions: the captions of one image succeed and fail together. Images that share a caption
are summed into one by the caller.
Shapes: N images, K shares at once, R resamples.
"""

import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np

NUM_RESAMPLES = 2000
NUM_FLIPS = 10_000
NUM_HALVINGS = 30  # until the end of an interval is known
CONFIDENCE = 0.95
MAX_CELLS = 4_000_000  # numbers in memory at once
ROUNDING = 1e-9  # of sums of fractions


def intervals(found_NK: np.ndarray, asked_NK: np.ndarray, num_resamples: int = NUM_RESAMPLES) -> np.ndarray:
    """95% intervals of each share, [K, 2]: bootstrap percentiles over images drawn with replacement; Wilson's where all
    images agree, as when all or nothing was found, of which a bootstrap would be certain."""
    times = resamples(len(found_NK), num_resamples)
    draws = [(times_RN @ found_NK) / (times_RN @ asked_NK) for times_RN in times]
    tail = 100 * (1 - CONFIDENCE) / 2
    interval_K2 = np.percentile(np.concatenate(draws), (tail, 100 - tail), axis=0).T
    share_K = found_NK.sum(axis=0) / asked_NK.sum(axis=0)
    for k in np.flatnonzero(np.ptp(interval_K2, axis=1) < ROUNDING):
        interval_K2[k] = wilson_interval(share_K[k] * len(found_NK), len(found_NK))
    # The measured share lies within, even with very few images and despite rounding.
    return np.stack([np.minimum(interval_K2[:, 0], share_K), np.maximum(interval_K2[:, 1], share_K)], axis=1)


def resamples(num_images: int, num_resamples: int) -> Iterator[np.ndarray]:
    """How often each image is drawn, in blocks of resamples, [R, N]."""
    random = np.random.default_rng(0)
    some = max(1, MAX_CELLS // num_images)
    for start in range(0, num_resamples, some):
        num_draws = min(some, num_resamples - start)
        drawn = random.integers(num_images, size=(num_draws, num_images))
        drawn += np.arange(num_draws)[:, None] * num_images
        times = np.bincount(drawn.ravel(), minlength=num_draws * num_images)
        yield times.reshape(num_draws, num_images).astype(np.float64)


def sign_flips(
    difference_NK: np.ndarray, asked_NK: np.ndarray, *, num_flips: int = NUM_FLIPS
) -> tuple[np.ndarray, np.ndarray]:
    """The 95% interval of each difference of two shares, [K, 2], and the p-value of there being none, [K].

    If the true difference is d, an image's deviation from it is as likely to be positive as negative: p(d) is how often
    random signs make the sum of deviations as large as it is. The interval has every d with p(d) of at least 5%. One is
    added to numerator and denominator, so that a p-value is never zero.
    """
    random, both_N2K = np.random.default_rng(0), np.hstack([difference_NK, asked_NK])
    some, flipped = max(1, MAX_CELLS // len(both_N2K)), []
    for start in range(0, num_flips, some):
        shape = (min(some, num_flips - start), len(both_N2K))
        flipped.append((2.0 * random.integers(2, size=shape, dtype=np.int8) - 1) @ both_N2K)
    difference_RK, asked_RK = np.split(np.concatenate(flipped), 2, axis=1)
    (sum_K, total_K), rounding = np.split(both_N2K.sum(axis=0), 2), ROUNDING * np.abs(both_N2K).sum()

    def p_values(d_K: np.ndarray) -> np.ndarray:
        least_K = np.abs(sum_K - d_K * total_K) - rounding
        return (1 + (np.abs(difference_RK - d_K * asked_RK) >= least_K).sum(axis=0)) / (1 + num_flips)

    share_K, p_value_K = sum_K / total_K, p_values(np.zeros_like(sum_K))
    is_rejected = p_value_K < 1 - CONFIDENCE  # and only then zero is outside the interval
    ends = []
    for edge in (-1.0, 1.0):
        inside = edge * np.maximum(edge * share_K, np.where(is_rejected, -1.0, 0.0))
        outside = np.where(is_rejected & (edge * share_K < 0), 0.0, edge)
        for _ in range(NUM_HALVINGS):
            middle = (inside + outside) / 2
            is_inside = p_values(middle) >= 1 - CONFIDENCE
            inside, outside = np.where(is_inside, middle, inside), np.where(is_inside, outside, middle)
        ends.append(inside.round(8))
    return np.stack(ends, axis=1), p_value_K


def chance_of_none(num_bad_Q: np.ndarray, total: int, num_drawn: int) -> float:
    """The mean probability that none of `num_drawn` of `total` items, drawn without replacement, is bad."""
    kinds, counts = np.unique(num_bad_Q, return_counts=True)
    whole = math.comb(total, num_drawn) or 1  # fewer items than are drawn: one of them is bad
    return float(np.average([math.comb(total - int(n), num_drawn) / whole for n in kinds], weights=counts))


def wilson_interval(num_found: float, num_queries: int) -> list[float]:
    """An interval of a share that holds even when nothing or everything was found."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = num_found / num_queries
    centre = share + z**2 / (2 * num_queries)
    reach = z * math.sqrt(share * (1 - share) / num_queries + z**2 / (4 * num_queries**2))
    whole = 1 + z**2 / num_queries
    return [max(0.0, (centre - reach) / whole), min(1.0, (centre + reach) / whole)]
