"""Recall as it is defined, with chance beside it."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from conftest import unit

from lapclip.evaluate.pool import Links, Pool
from lapclip.evaluate.retrieval import DIRECTIONS, independent_units, rank_answers, rank_block, retrieval
from lapclip.evaluate.statistics import chance_of_none, wilson_interval
from lapclip.units import finished


def different(image, text, image_of_caption) -> Pool:
    """A pool of images and captions of which no two are equal."""
    numbers, captions = np.arange(len(image)), [f"caption {n}" for n in range(len(text))]
    return Pool(image, text, image_of_caption, captions, indices=numbers, groups=numbers)


def pool(num_images: int, captions_each: int, seed: int = 0) -> Pool:
    random = np.random.default_rng(seed)
    image_of_caption = np.repeat(np.arange(num_images), captions_each)
    image = unit(random.normal(size=(num_images, 16)))
    text = unit(image[image_of_caption] + 0.6 * random.normal(size=(num_images * captions_each, 16)))
    return different(image, text, image_of_caption)


@pytest.mark.parametrize("value", [1 / np.sqrt(8), np.nan], ids=["collapsed", "not finite"])
def test_a_model_that_sees_no_difference_finds_nothing(value):
    same = np.full((50, 8), value)
    result = retrieval(different(same, same, np.arange(50)), 12)
    assert result["text_to_image"]["recall@10"] == 0 and result["in_batch"]["accuracy"] == 0


def test_accuracy_in_batches_is_easier_than_recall_over_the_pool():
    result = retrieval(pool(60, 2), 12)
    assert result["in_batch"]["batch_size"] == 12 and result["in_batch"]["chance"] == pytest.approx(1 / 12)
    assert result["text_to_image"]["recall@1"] < result["in_batch"]["accuracy"] < 1
    assert retrieval(pool(5, 1), 12)["in_batch"]["batch_size"] == 5, "one batch"


@pytest.mark.parametrize("captions_each", [1, 5])
def test_chance_is_the_recall_of_random_answers(captions_each):
    random = np.random.default_rng(0)
    is_pair = np.repeat(np.eye(20, dtype=bool), captions_each, axis=1)  # an image asks for its captions
    ranks = np.concatenate([rank_block(random.normal(size=is_pair.shape), is_pair)[0] for _ in range(400)])
    for k in (1, 5, 10):
        expected = 1 - chance_of_none(is_pair.sum(axis=1), is_pair.shape[1], k)
        assert expected == pytest.approx(np.mean(ranks <= k), abs=0.015)
    assert chance_of_none(np.ones(4), 4, 10) == 0, "a pool smaller than k"


def test_chance_holds_where_captions_are_class_names():
    """Equal captions have equal embeddings: they are one answer, not many that are drawn one by one."""
    random, found = np.random.default_rng(0), []
    for _ in range(200):
        label_N = random.integers(12, size=50)
        text = unit(random.normal(size=(12, 16)))[label_N]
        captions = [f"class {label}" for label in label_N]
        held = Pool(
            unit(random.normal(size=(50, 16))), text, np.arange(50), captions, np.arange(50), np.arange(50)
        )
        found.append(retrieval(held, 12))
    for way in DIRECTIONS:
        for k in (1, 5, 10):
            recall, chance = (
                np.mean([one[way][f"{what}@{k}"] for one in found]) for what in ("recall", "chance")
            )
            assert recall == pytest.approx(chance, abs=0.04), (way, k)


def tied_pool(seed: int) -> Pool:
    """Images with one to seven captions; few different cosines, all exact, so that many are equal."""
    random = np.random.default_rng(seed)
    num_images = int(random.integers(2, 14))
    image_of_caption = np.repeat(np.arange(num_images), random.integers(1, 8, num_images))
    image = random.integers(-1, 2, (num_images, 4)).astype(np.float32)
    text = image[image_of_caption] + random.integers(-1, 2, (len(image_of_caption), 4)).astype(np.float32)
    captions = [f"{random.choice(['A', 'a', 'b'])} {random.integers(num_images)}" for _ in text]
    groups = random.integers(num_images, size=num_images)
    return Pool(image, text, image_of_caption, captions, np.arange(num_images), groups)


def ranks_by_hand(pool: Pool, published: bool) -> tuple[list[int], list[int]]:
    """Naively: sorts the answers of each query, wrong ones before right ones where they are equally near."""
    num_captions, num_images = len(pool.captions), len(pool.indices)

    def belong(m: int, n: int) -> bool:
        if published:
            return bool(pool.image_of_caption[m] == n)
        return any(
            pool.captions[other].casefold() == pool.captions[m].casefold()
            and pool.groups[pool.image_of_caption[other]] == pool.groups[n]
            for other in range(num_captions)
        )

    def near(m: int, n: int) -> float:
        return sum(float(a) * float(b) for a, b in zip(pool.text_ME[m], pool.image_NE[n], strict=True))

    def first_right(answers: list[tuple[float, bool]]) -> int:
        ordered = sorted(answers, key=lambda answer: (-answer[0], answer[1]))
        return next(place for place, (_, is_right) in enumerate(ordered, 1) if is_right)

    table = [[(near(m, n), belong(m, n)) for n in range(num_images)] for m in range(num_captions)]
    by_words = [first_right(row) for row in table]
    return by_words, [first_right([row[n] for row in table]) for n in range(num_images)]


@pytest.mark.parametrize("published", [False, True], ids=["shared", "published"])
def test_ranks_are_those_counted_by_hand_however_few_queries_are_compared_at_once(published):
    num_ties = 0
    for seed in range(30):
        held = tied_pool(seed)
        links = Links.of_captions(held, published)
        by_hand = ranks_by_hand(held, published)
        for max_cells in (1, 40, 10**6):
            there = finished(rank_answers(held.text_ME, held.image_NE, links, max_cells=max_cells))
            back = finished(rank_answers(held.image_NE, held.text_ME, links.reverse(), max_cells=max_cells))
            assert (there.rank_Q.tolist(), back.rank_Q.tolist()) == by_hand
            assert there.num_answers == len(held.indices) and back.num_answers == len(held.captions)
        num_ties += int((there.correct_Q == there.wrong_Q).sum())
        held = replace(held, captions=[f"{number}" for number in range(len(held.captions))])  # all different
        by_hand, links = ranks_by_hand(held, published), Links.of_captions(held, published)
        for way, ranks in zip(DIRECTIONS, by_hand, strict=True) if not published else ():
            recall = retrieval(held, 4)[way]
            assert recall["median_rank"] == np.median(ranks)
            assert recall["recall@5"] == pytest.approx(np.mean([rank <= 5 for rank in ranks]))
        assert np.array_equal(links.rows(np.arange(len(held.captions))).T, links.reverse().rows(held.indices))
    assert num_ties > 50, "pools in which equals are frequent"


def test_images_are_one_witness_when_they_are_equal_or_share_words_also_through_others():
    captions = ["A dog", "a cat", "a DOG", "a bird", "a bird", "a fish", "a tree"]
    held = Pool(
        np.zeros((6, 2)), np.zeros((7, 2)), np.array([0, 0, 1, 1, 2, 3, 4]), captions,
        np.arange(6), groups=np.array([0, 1, 2, 3, 4, 4]),
    )  # fmt: skip
    assert independent_units(held, share_captions=True).tolist() == [0, 0, 0, 1, 2, 2]
    assert independent_units(held, share_captions=False).tolist() == [0, 1, 2, 3, 4, 4]


def test_five_captions_that_succeed_together_are_no_five_times_surer_while_training():
    one = pool(31, 1)
    five = different(one.image_NE, np.repeat(one.text_ME, 5, axis=0), np.repeat(np.arange(31), 5))
    single, several = (retrieval(own, 8)["text_to_image"] for own in (one, five))
    for k in (1, 5, 10):
        assert several[f"interval@{k}"] == pytest.approx(single[f"interval@{k}"])
    low, high = several["interval@1"]
    of_captions = wilson_interval(round(155 * several["recall@1"]), 155)
    assert low < several["recall@1"] < high and high - low > 1.8 * (of_captions[1] - of_captions[0])


def test_recall_at_more_is_never_less_certain_to_be_high():
    """Of nine classes all but one image are found at 1: Wilson's interval at 5 would start lower than that at 1."""
    label_N = np.repeat(np.arange(9), 3)
    image = unit(np.eye(9))[label_N].copy()
    image[:1] = unit(np.eye(9)[:1] + 1.1 * np.eye(9)[1])
    captions = [f"class {label}" for label in label_N]
    held = Pool(image, np.eye(9)[label_N], np.arange(27), captions, np.arange(27), np.arange(27))
    found = retrieval(held, 9)["image_to_text"]
    assert found["recall@1"] < 1 == found["recall@5"]
    for first, more in ((1, 5), (5, 10)):
        assert all(a <= b for a, b in zip(found[f"interval@{first}"], found[f"interval@{more}"], strict=True))


def test_one_long_caption_does_not_make_all_others_as_wide():
    held = pool(2000, 1)
    held = replace(held, captions=["x" * 10_000, *held.captions[1:]])
    tracemalloc.start()
    Links.of_captions(held)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000  # as an array of texts 80 MB
