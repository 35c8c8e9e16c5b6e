"""Accuracy by how hard the wrong answers are."""

import numpy as np
import pytest

from lapclip.evaluate.difficulty import accuracy_by_difficulty, similarity, words_of
from lapclip.evaluate.pool import Pool

COLOURS, THINGS = (
    ["red", "green", "blue", "grey", "pink", "black"],
    ["cat", "dog", "house", "tree", "car", "boat"],
)
PLACES = ("garden", "street")
CAPTIONS = [
    f"a {colour} {thing} in the {place}" for colour in COLOURS for thing in THINGS for place in PLACES
]
IMAGES = np.arange(len(CAPTIONS))


def accuracy(cosine, captions=CAPTIONS, images=IMAGES):
    """Of a model with these cosines [captions, images]."""
    image = np.eye(cosine.shape[1], dtype=cosine.dtype)
    numbers = np.arange(len(image))
    return accuracy_by_difficulty(Pool(image, cosine, images, list(captions), numbers, numbers))


def test_a_model_that_knows_everything_is_correct_at_every_level_and_a_tie_is_no_answer():
    for cosine, expected in ((np.eye(len(CAPTIONS)), 1), (np.zeros((len(CAPTIONS),) * 2), 0)):
        found = accuracy(cosine)
        assert found["easy"] == found["medium"] == found["hard"] == expected
    assert accuracy(np.eye(20), CAPTIONS[:20], IMAGES[:20]) is None, "too few images"
    captions, images = [f"image {n} of {n % 2}" for n in range(2400)], np.repeat(np.arange(1200), 2)
    large = accuracy(np.eye(1200, dtype=np.float32)[images], captions, images)
    assert large["hard"] == 1, "of a large pool some images are used"


SHARED = [("red cat", "red dog", "blue dog")[n % 3] for n in range(len(CAPTIONS))]


def test_captions_without_common_words_have_no_levels():
    names = [("star", "fleet", "buoy")[n % 3] for n in range(len(CAPTIONS))]
    assert accuracy(np.eye(len(CAPTIONS)), names) is None


def test_an_attribute_and_a_noun_are_words_enough():
    adjectives, nouns = [f"adjective{n}" for n in range(10)], [f"noun{n}" for n in range(12)]
    captions = [f"{one} {other}" for one in adjectives for other in nouns]
    assert accuracy(np.eye(120), captions, np.arange(120))["hard"] == 1


@pytest.mark.parametrize("captions", [CAPTIONS, SHARED])
def test_guessing_is_right_one_time_in_ten_also_where_images_share_a_caption(captions):
    random = np.random.default_rng(0)
    found = [accuracy(random.normal(size=(len(CAPTIONS),) * 2), captions) for _ in range(60)]
    for level in ("easy", "medium", "hard"):
        assert np.mean([f[level] for f in found]) == pytest.approx(found[0]["chance"], abs=0.02)


def common_words() -> np.ndarray:
    words = [set(caption.split()) for caption in CAPTIONS]
    return np.array([[len(one & other) for other in words] for one in words], dtype=float)


def test_a_model_that_only_counts_common_words_fails_at_the_hard_ones():
    likes = common_words()
    noise = np.random.default_rng(0).normal(scale=0.5, size=likes.shape)
    found = accuracy(likes + noise)
    assert found["hard"] < found["medium"] < found["easy"]
    assert found["easy"] > 0.95


def test_several_captions_of_an_image_count_by_the_most_similar():
    captions, images = ("a red cat", "two boats", "a red dog", "one house"), np.array([0, 0, 1, 1])
    found = similarity(captions, captions, images)
    assert found.shape == (4, 2)
    assert found[0, 0] == pytest.approx(1) and 0 < found[0, 1] < 1, "red is common to both"
    assert found[3, 0] == 0


def test_scripts_without_spaces_are_compared_too():
    assert words_of("赤い猫が庭にいる") != [] and len(words_of("赤い猫が庭にいる")) > 3
    assert words_of("A red, red cat") == ["a", "red", "red", "cat"]
