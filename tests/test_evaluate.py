"""Recall as it is defined, with chance beside it."""

import numpy as np
import pytest

from lapclip.evaluate import Pool, chance, recall, retrieval, wilson_interval


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def pool(num_images: int, captions_each: int, seed: int = 0) -> Pool:
    random = np.random.default_rng(seed)
    image_of_caption = np.repeat(np.arange(num_images), captions_each)
    image = unit(random.normal(size=(num_images, 16)))
    text = unit(image[image_of_caption] + 0.6 * random.normal(size=(num_images * captions_each, 16)))
    return Pool(image, text, image_of_caption, [""] * len(text))


def test_recall_is_what_counting_by_hand_gives():
    held = pool(40, 3)
    result = retrieval(held)
    cosine = held.text_ME @ held.image_NE.T
    for k in (1, 5, 10):
        by_hand = [held.image_of_caption[m] in np.argsort(-cosine[m])[:k] for m in range(120)]
        assert result["text_to_image"][f"recall@{k}"] == pytest.approx(np.mean(by_hand))
        back = [n in held.image_of_caption[np.argsort(-cosine[:, n])[:k]] for n in range(40)]
        assert result["image_to_text"][f"recall@{k}"] == pytest.approx(np.mean(back))
    assert 0.05 < result["text_to_image"]["recall@1"] < 1, "a pool that can tell right from wrong"


def test_a_collapsed_model_finds_nothing():
    """When everything looks the same, the right answer must not count as first."""
    same = np.ones((50, 8)) / np.sqrt(8)
    result = retrieval(Pool(same, same, np.arange(50), [""] * 50))
    assert result["text_to_image"]["recall@1"] == 0 and result["text_to_image"]["recall@10"] == 0


@pytest.mark.parametrize("captions_each", [1, 5])
def test_chance_is_the_recall_of_random_answers(captions_each):
    random, found = np.random.default_rng(0), []
    for _ in range(400):
        is_pair = np.repeat(np.eye(20, dtype=bool), captions_each, axis=1)  # a picture asks for its captions
        found.append(recall(random.normal(size=is_pair.shape), is_pair))
    for k in (1, 5, 10):
        assert found[0][f"chance@{k}"] == pytest.approx(np.mean([f[f"recall@{k}"] for f in found]), abs=0.015)


def test_a_pool_smaller_than_k_is_always_found():
    assert chance(np.ones(4), 4, 10) == 1.0
    assert retrieval(pool(4, 1))["text_to_image"]["recall@10"] == 1.0


def test_the_interval_holds_the_truth_about_19_times_in_20():
    random = np.random.default_rng(0)
    for truth in (0.02, 0.3, 0.97):
        intervals = [wilson_interval(int(random.binomial(200, truth)), 200) for _ in range(1000)]
        assert 0.90 < np.mean([low <= truth <= high for low, high in intervals]) < 0.99
    assert wilson_interval(0, 50)[0] == 0 and wilson_interval(0, 50)[1] > 0.05
