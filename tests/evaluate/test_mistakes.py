"""The captions that find their own image last."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from lapclip.evaluate.mistakes import mistakes, worst_of
from lapclip.evaluate.retrieval import Links, Pool, ranking
from lapclip.units import finished


def a_pool(num_images: int = 30, captions_each: int = 3, noise: float = 1.0, seed: int = 0) -> Pool:
    random = np.random.default_rng(seed)
    image = random.normal(size=(num_images, 8))
    image_of_caption = np.repeat(np.arange(num_images), captions_each)
    text = image[image_of_caption] + noise * random.normal(size=(len(image_of_caption), 8))
    image, text = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (image, text))
    captions = [f"caption {m}" for m in range(len(text))]
    numbers = 100 + np.arange(num_images)
    return Pool(image, text, image_of_caption, captions, indices=numbers, groups=numbers)


def worst(pool: Pool, most: int = 1000):
    links = Links.of_captions(pool)
    return mistakes(pool, finished(ranking(pool.text_ME, pool.image_NE, links)), links, most)


def test_the_worst_come_first_and_each_image_once():
    pool = a_pool()
    listed = worst(pool)
    cosine = pool.text_ME @ pool.image_NE.T
    own = cosine[np.arange(90), pool.image_of_caption]
    ranks = (cosine >= own[:, None]).sum(axis=1)
    highest = [ranks[pool.image_of_caption == n].max() for n in range(30)]
    assert [m.rank for m in listed] == sorted((rank for rank in highest if rank > 1), reverse=True)
    assert len({m.index for m in listed}) == len(listed) > 10
    for mistake in listed:
        caption = pool.captions.index(mistake.caption)
        assert mistake.index == pool.indices[pool.image_of_caption[caption]]
        assert mistake.rank == ranks[caption]
    assert worst(pool, 4) == listed[:4]


def test_what_was_found_instead_is_nearer_and_wrong():
    pool = a_pool()
    for mistake in worst(pool):
        scores = [score for _, score in mistake.found]
        assert len(scores) == min(5, mistake.rank - 1), "no more than came before it"
        assert scores == sorted(scores, reverse=True) and min(scores) >= mistake.score
        assert mistake.index not in [index for index, _ in mistake.found]
        assert abs(mistake.gap - (scores[0] - mistake.score)) < 1e-6


def test_of_equal_ranks_the_one_that_is_further_off_comes_first():
    listed = worst(a_pool(noise=0.7))
    pairs = list(pairwise(listed))
    assert any(one.rank == two.rank for one, two in pairs)
    assert all((one.rank, one.gap) >= (two.rank, two.gap) for one, two in pairs)


def test_a_model_that_finds_all_makes_no_mistake():
    assert worst(a_pool(noise=0)) == []


def test_equal_images_are_not_found_instead_of_each_other():
    pool = a_pool(10, 1, noise=0)
    twice = Pool(
        np.tile(pool.image_NE, (2, 1)),
        np.tile(pool.text_ME, (2, 1)),
        np.arange(20),
        pool.captions * 2,
        indices=np.arange(20),
        groups=np.arange(20) % 10,
    )
    assert worst(twice) == []


def test_images_that_share_a_caption_make_one_mistake_of_it():
    pool = a_pool(12, 1, noise=2)
    named = replace(
        pool, captions=["cat"] * 6 + ["dog"] * 6, text_ME=np.repeat(pool.text_ME[[0, 6]], 6, axis=0)
    )
    listed = worst(named)
    assert len(listed) == len({mistake.caption for mistake in listed}) > 0
    for mistake in listed:
        own = range(6) if mistake.caption == "cat" else range(6, 12)
        cosine = named.image_NE @ named.text_ME[own[0]]
        assert mistake.index - 100 == max(own, key=lambda n: cosine[n]), "the nearest of its images"
        assert not {index - 100 for index, _ in mistake.found} & set(own)


def test_the_worst_of_several_pools_are_the_worst_of_all():
    several = [worst(a_pool(seed=seed)) for seed in (1, 2)]
    together = worst_of(several, 12)
    ranks = sorted((m.rank for some in several for m in some), reverse=True)
    assert [m.rank for m in together] == ranks[:12]
