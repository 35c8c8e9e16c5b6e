"""Zero-shot accuracy: counted by hand, with classes that are alike, missing or many."""

import json

import numpy as np
import pytest
from conftest import unit

from lapclip.evaluate.zero_shot import predict, zero_shot


def predictions(num_classes: int, num_images: int, seed: int = 0, noise: float = 0.5):
    random = np.random.default_rng(seed)
    label = unit(random.normal(size=(num_classes, 12)))
    true = random.integers(num_classes, size=num_images)
    image = unit(label[true] + noise * random.normal(size=(num_images, 12)))
    names = tuple(f"class {n}" for n in range(num_classes))
    return predict(image, label, true, names), image @ label.T


def test_accuracy_is_what_counting_by_hand_gives():
    made, cosine = predictions(12, 300)
    result = zero_shot(made, ["{}"])
    order = np.argsort(-cosine, axis=1)
    first, five = (np.mean([t in row[:k] for t, row in zip(made.true_N, order, strict=True)]) for k in (1, 5))
    assert result["top1"] == pytest.approx(first) and result["top5"] == pytest.approx(five)
    assert 0.2 < first < five < 1, "classes that can be mistaken"
    assert result["chance"] == pytest.approx(1 / 12) and result["chance@5"] == pytest.approx(5 / 12)
    assert result["interval@1"][0] < result["top1"] < result["interval@1"][1]
    assert (result["num_classes"], result["num_images"]) == (12, 300)


def test_the_tables_agree_with_each_other():
    made, _ = predictions(9, 200)
    result = zero_shot(made, ["{}"])
    counts = np.array(result["confusion"]["counts"])
    assert counts.sum() == 200 and np.trace(counts) / 200 == pytest.approx(result["top1"])
    for row, (label, own) in enumerate(zip(result["confusion"]["labels"], result["classes"], strict=True)):
        assert own["label"] == label and own["num_images"] == counts[row].sum()
        assert own["top1"] == pytest.approx(counts[row, row] / counts[row].sum())
        others = np.where(np.arange(9) == row, 0, counts[row])
        assert own["num_taken_for"] == others.max()
        if own["taken_for"]:
            assert others[result["confusion"]["labels"].index(own["taken_for"])] == others.max()
    worst = result["most_confused"]
    assert [pair["num_images"] for pair in worst] == sorted((p["num_images"] for p in worst), reverse=True)
    assert sum(pair["num_images"] for pair in worst) == counts.sum() - np.trace(counts)


@pytest.mark.parametrize("value", [1.0, np.nan])
def test_a_model_that_sees_no_difference_is_right_never(value):
    label = np.full((7, 3), value)
    made = predict(np.ones((20, 3)), label, np.arange(20) % 7, tuple("abcdefg"))
    result = zero_shot(made, ["{}"])
    assert result["top1"] == result["top5"] == 0 and np.trace(result["confusion"]["counts"]) == 0
    json.dumps(result, allow_nan=False)


def test_a_class_without_images_can_still_be_taken_for_another():
    label = np.eye(3)
    made = predict(label[[2, 2, 1]], label, np.array([0, 0, 1]), ("cat", "dog", "fox"))
    result = zero_shot(made, ["{}"])
    assert [own["label"] for own in result["classes"]] == ["cat", "dog"]
    assert result["classes"][0]["taken_for"] == "fox" and result["chance"] == pytest.approx(1 / 3)


def test_few_and_many_classes(monkeypatch):
    sure = zero_shot(predictions(6, 60, noise=0)[0], ["{}"])
    assert sure["top1"] == 1 and sure["most_confused"] == []
    assert {own["taken_for"] for own in sure["classes"]} == {None}
    assert sure["interval@1"][0] < 1, "sixty images do not prove that it is never wrong"
    few, many = (zero_shot(predictions(*counts)[0], ["{}"]) for counts in ((3, 50), (150, 900)))
    assert few["top5"] == few["chance@5"] == 1 and few["top1"] < 1
    assert many["confusion"] is None and len(many["most_confused"]) == 50
    whole = predictions(20, 100)[0]
    monkeypatch.setattr("lapclip.evaluate.zero_shot.MAX_CELLS", 70)
    pieces = predictions(20, 100)[0]
    assert np.array_equal(whole.rank_N, pieces.rank_N), "some images at a time"
    assert np.array_equal(whole.predicted_N, pieces.predicted_N)
