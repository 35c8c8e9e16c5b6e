"""How sure a share is: intervals and paired tests over images."""

from itertools import product

import numpy as np
import pytest

from lapclip.evaluate.full import differences
from lapclip.evaluate.statistics import intervals, sign_flips, wilson_interval

TRUTH, NUM_SETS = 0.4, 400


def clustered(seed: int, num_images: int = 120, captions_each: int = 5) -> np.ndarray:
    """Successes of captions in many independent sets, [images, captions, sets]; some images are hard for all."""
    random = np.random.default_rng(seed)
    ease = random.beta(TRUTH, 1 - TRUTH, (num_images, 1, NUM_SETS))
    return (random.random((num_images, captions_each, NUM_SETS)) < ease).astype(float)


def share_held(interval_K2: np.ndarray, truth: float) -> float:
    return float(np.mean((interval_K2[:, 0] <= truth) & (truth <= interval_K2[:, 1])))


def test_an_interval_over_images_holds_the_truth_about_19_times_in_20_and_one_over_captions_does_not():
    found = clustered(0)
    over_images, over_captions = found.sum(axis=1), found.reshape(-1, NUM_SETS)
    asked = np.full_like(over_images, 5)
    assert 0.92 < share_held(intervals(over_images, asked, num_resamples=1000), TRUTH) < 0.98
    assert share_held(intervals(over_captions, np.ones_like(over_captions), num_resamples=1000), TRUTH) < 0.85


def test_images_with_more_captions_count_more():
    random = np.random.default_rng(1)
    asked = random.integers(1, 8, (150, NUM_SETS)).astype(float)
    found = random.binomial(asked.astype(int), np.where(asked > 4, 0.8, 0.3)).astype(float)
    truth = (0.3 * 10 + 0.8 * 18) / 28
    assert 0.92 < share_held(intervals(found, asked, num_resamples=1000), truth) < 0.98


def test_where_all_or_nothing_was_found_the_interval_is_wilsons_over_images():
    asked = np.full((40, 3), 5.0)
    found = asked * [0, 1, 1]
    found[0, 2] = 4
    nothing, everything, nearly = intervals(found, asked).tolist()
    assert nothing == pytest.approx(wilson_interval(0, 40)) and nothing[0] == 0
    assert everything == pytest.approx(wilson_interval(40, 40)) and everything[1] == 1
    assert (nothing[1], everything[0]) == pytest.approx((0.0876, 0.9124), abs=1e-4)
    assert np.array_equal(intervals(found, asked), intervals(found, asked)), "the same every time"
    [alike] = intervals(np.full((1, 1), 3.0), np.full((1, 1), 5.0))
    assert alike == pytest.approx(wilson_interval(0.6, 1)), "one group of images is never certain"
    assert nearly[0] <= 199 / 200 <= nearly[1] and nearly[1] - nearly[0] < 0.03


def test_models_that_do_not_differ_are_told_apart_as_rarely_as_promised():
    difference = (clustered(3) - clustered(4)).sum(axis=1)
    interval, p_values = sign_flips(difference, np.full_like(difference, 5.0), num_flips=2000)
    for level, most_off in ((0.05, 0.03), (0.25, 0.06), (0.5, 0.07), (0.75, 0.06)):
        assert np.mean(p_values <= level) == pytest.approx(level, abs=most_off)
    assert 0.92 < share_held(interval, 0.0) < 0.98
    # The interval excludes zero where the p-value is below 0.05, and only there.
    assert np.array_equal((interval[:, 0] > 0) | (interval[:, 1] < 0), p_values < 0.05)


def test_the_interval_of_a_large_difference_is_about_that_of_a_bootstrap():
    """59 images: one model finds 51 of them, the other five of these."""
    difference, asked = np.repeat([1.0, 0.0], [46, 13])[:, None], np.ones((59, 1))
    [(low, high)], _ = sign_flips(difference, asked)
    [(expected_low, expected_high)] = intervals(difference, asked)
    assert low == pytest.approx(expected_low, abs=0.03) and high == pytest.approx(expected_high, abs=0.03)
    interval, _ = sign_flips(
        (clustered(3) - clustered(4)).sum(axis=1) + 2, np.full(clustered(3).shape[::2], 5.0)
    )
    assert 0.92 < share_held(interval, 2 / 5) < 0.98


def test_the_chance_is_that_over_all_signs(monkeypatch):
    monkeypatch.setattr("lapclip.evaluate.statistics.MAX_CELLS", 1000)
    difference = np.array([3, 1, 1, -1, 2, 0, 1]) / 7
    sums = [abs(np.dot(signs, difference)) for signs in product((-1, 1), repeat=7)]
    exact = np.mean(np.array(sums) >= abs(difference.sum()) - 1e-9)
    assert sign_flips(difference[:, None], np.ones((7, 1)))[1][0] == pytest.approx(exact, abs=0.015)


def test_an_interval_of_a_difference_ends_at_100_points():
    own, other, asked = (np.full((4, 1), share) for share in (1.0, 0.3, 1.0))
    (found,) = differences(own, other, asked)
    assert found["difference"] == pytest.approx(0.7) and found["interval"] == pytest.approx([-1, 1]), (
        "four images"
    )
