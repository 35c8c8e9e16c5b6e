"""Few-shot accuracy: better than zero-shot when names mislead, never worse when they are right, and nothing tested twice."""

import json

import numpy as np
from conftest import unit

from lapclip.evaluate.few_shot import few_shot
from lapclip.evaluate.zero_shot import predict
from lapclip.units import finished

SCALE = 20.0


def measured(
    per_class: int | list[int], *, num_classes: int = 5, misled: float, copies: int = 1, width: int = 64
):
    """Few-shot accuracy on clusters of images, with labels that lie some way off their cluster."""
    random = np.random.default_rng(3)
    centre = random.normal(size=(num_classes, width))
    true = np.repeat(np.arange(num_classes), per_class)
    image = unit(np.repeat(centre[true] + 1.2 * random.normal(size=(len(true), width)), copies, axis=0))
    label = unit(centre + misled * random.normal(size=centre.shape)).astype(np.float32)
    names = tuple(f"class {n}" for n in range(num_classes))
    made = predict(image.astype(np.float32), label, np.repeat(true, copies), names)
    return finished(few_shot(made, np.repeat(np.arange(len(true)), copies), SCALE))


def test_examples_correct_names_that_mislead():
    result = measured(40, misled=4.0)
    assert [one["examples_per_class"] for one in result["results"]] == [1, 4, 16]
    one, four, sixteen = (one["top1"] for one in result["results"])
    assert result["results"][0]["zero_shot"] + 0.05 < one < four < sixteen
    for one in result["results"]:
        low, high = one["range"]
        assert low <= one["top1"] <= high and low < high, "the draws differ"
        assert one["num_images"] == 5 * (40 - one["examples_per_class"])
    assert json.dumps(result) == json.dumps(measured(40, misled=4.0)), "the same draws each time"


def test_names_that_are_right_are_not_unlearned_from_one_example():
    first = measured(40, misled=0.5)["results"][0]
    assert first["zero_shot"] > 0.9 and first["top1"] >= first["zero_shot"] - 0.01


def test_every_class_keeps_an_image_to_test_and_equal_images_count_once():
    assert [one["num_images"] for one in measured(5, misled=1.0)["results"]] == [20, 5]
    assert [one["num_images"] for one in measured(4, misled=1.0)["results"]] == [15]
    assert measured(1, misled=1.0) is None


def test_a_class_with_one_image_does_not_prevent_the_measurement():
    """It has no example, and its image is tested."""
    (one,) = measured([4, 4, 1, 4, 4], misled=1.0)["results"]
    assert one["num_images"] == 4 * 3 + 1 and one["num_smaller_classes"] == 1
    assert measured([4, 1, 1, 1, 4], misled=1.0) is None, "most classes have too few"


def test_equal_images_count_once():
    assert measured(5, misled=1.0, copies=3) == measured(5, misled=1.0), (
        "copies would be known from the examples"
    )


def test_more_classes_than_can_be_learned_in_seconds_are_not_measured(monkeypatch):
    monkeypatch.setattr("lapclip.evaluate.few_shot.MAX_WORK", 4 * 5 * 5 * 64)
    assert len(measured(40, misled=1.0)["results"]) == 2
