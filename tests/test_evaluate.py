"""Recall as it is defined, with chance beside it."""

from dataclasses import replace

import numpy as np
import pytest

from lapclip.evaluate import Pool, chance, recall, retrieval, wilson_interval


def names(number: int) -> list[str]:
    return [f"caption {n}" for n in range(number)]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def different(image, text, image_of_caption, captions) -> Pool:
    """A pool of pictures of which no two are equal."""
    numbers = np.arange(len(image))
    return Pool(image, text, image_of_caption, captions, indices=numbers, groups=numbers)


def pool(num_images: int, captions_each: int, seed: int = 0) -> Pool:
    random = np.random.default_rng(seed)
    image_of_caption = np.repeat(np.arange(num_images), captions_each)
    image = unit(random.normal(size=(num_images, 16)))
    text = unit(image[image_of_caption] + 0.6 * random.normal(size=(num_images * captions_each, 16)))
    return different(image, text, image_of_caption, names(len(text)))


def test_recall_is_what_counting_by_hand_gives():
    held = pool(40, 3)
    result = retrieval(held, 12)
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
    result = retrieval(different(same, same, np.arange(50), names(50)), 12)
    assert result["text_to_image"]["recall@1"] == 0 and result["text_to_image"]["recall@10"] == 0


def test_weights_that_are_no_numbers_find_nothing():
    broken = np.full((50, 8), np.nan)
    result = retrieval(different(broken, broken, np.arange(50), names(50)), 12)
    assert result["text_to_image"]["recall@10"] == 0 and result["in_batch"]["accuracy"] == 0


def test_a_caption_that_two_pictures_share_finds_either():
    """As in the documents' data: twelve captions for 24 pictures. A model that knows them all must score 100%."""
    known = np.eye(12)
    result = retrieval(
        different(np.tile(known, (2, 1)), np.tile(known, (2, 1)), np.arange(24), names(12) + names(12)), 12
    )
    assert result["text_to_image"]["recall@1"] == result["image_to_text"]["recall@1"] == 1.0
    assert result["text_to_image"]["chance@1"] == pytest.approx(2 / 24)


def test_accuracy_in_batches_is_easier_than_recall_over_the_pool():
    result = retrieval(pool(60, 2), 12)
    assert result["in_batch"]["batch_size"] == 12 and result["in_batch"]["chance"] == pytest.approx(1 / 12)
    assert result["text_to_image"]["recall@1"] < result["in_batch"]["accuracy"] < 1
    assert retrieval(pool(5, 1), 12)["in_batch"]["batch_size"] == 5, (
        "a pool smaller than a batch is one batch"
    )


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
    assert retrieval(pool(4, 1), 12)["text_to_image"]["recall@10"] == 1.0


def test_the_interval_holds_the_truth_about_19_times_in_20():
    random = np.random.default_rng(0)
    for truth in (0.02, 0.3, 0.97):
        intervals = [wilson_interval(int(random.binomial(200, truth)), 200) for _ in range(1000)]
        assert 0.90 < np.mean([low <= truth <= high for low, high in intervals]) < 0.99
    assert wilson_interval(0, 50)[0] == 0 and wilson_interval(0, 50)[1] > 0.05


def test_the_caption_of_one_picture_may_find_an_equal_one():
    known = unit(np.random.default_rng(0).normal(size=(12, 16)))
    twice = replace(
        different(np.tile(known, (2, 1)), known, np.arange(12), names(12)), groups=np.arange(24) % 12
    )
    assert retrieval(twice, 12)["text_to_image"]["recall@1"] == 1
    assert retrieval(replace(twice, groups=np.arange(24)), 12)["text_to_image"]["recall@1"] == 0
