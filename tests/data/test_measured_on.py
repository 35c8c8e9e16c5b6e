"""Which images a model is measured on."""

from pathlib import Path

import pytest
from conftest import picture_folder

from lapclip.config import DataConfig
from lapclip.data.measured import to_measure
from lapclip.data.open import Data, open_source
from lapclip.units import finished


def opened(source: object, **settings) -> Data:
    return finished(open_source(DataConfig(source=str(source), workers=0, **settings), 16))


def classes(path: Path, *names: str, each: int = 8, first: int = 0) -> Path:
    for number, name in enumerate(names):
        picture_folder(path / name, each, first=first + number * each)
        for text in (path / name).glob("*.txt"):
            text.unlink()
    return path


def names_of(measured) -> set[str]:
    return {measured.source.name(index) for index in range(measured.source.num_pairs)}


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "streamed"])
def test_of_another_source_all_images_are_measured_each_with_its_class(tmp_path, is_packed):
    data = opened(classes(tmp_path / "animals", "cat", "dog", "sea_horse"), pack=is_packed)
    measured = to_measure(data, validation_only=False)
    assert measured.source.num_pairs == 24 and measured.classes == ("cat", "dog", "sea horse")
    for index, label in enumerate(measured.labels):
        assert measured.source.name(index).split("/")[0] == label.replace(" ", "_")
        assert measured.source.image(index, 16).size[0] >= 16
    first = [measured.source.name(index).split("/")[0] for index in measured.source.sample(12)]
    assert len(set(first)) == 3, "the first ones are a fair sample"


def test_of_what_was_trained_on_only_held_out_images_are_measured(tmp_path):
    data = opened(classes(tmp_path / "animals", "cat", "dog"))
    measured = to_measure(data, validation_only=True)
    trained_on = {data.training.name(index) for index in range(data.training.num_pairs)}
    assert names_of(measured) and not names_of(measured) & trained_on
    assert len(measured.labels) == measured.source.num_pairs
    assert measured.classes == ("cat", "dog"), "also when no image of one is held out"


def test_a_source_with_a_test_side_of_its_own_is_measured_on_that(tmp_path):
    for number, side in enumerate(("train", "val", "test")):
        classes(tmp_path / "set" / side, "cat", "dog", each=4, first=100 * number)
    assert {name.split("/")[0] for name in names_of(to_measure(opened("set"), validation_only=False))} == {
        "test"
    }
    assert to_measure(opened("set"), validation_only=False).own_sides == ("test",)
    assert not to_measure(opened("set"), validation_only=True).own_sides
    (tmp_path / "set" / "test").rename(tmp_path / "elsewhere")
    assert {name.split("/")[0] for name in names_of(to_measure(opened("set"), validation_only=False))} == {
        "val"
    }
    (tmp_path / "elsewhere").rename(tmp_path / "set" / "test")
    (tmp_path / "set" / "val").rename(tmp_path / "elsewhere")
    assert {name.split("/")[0] for name in names_of(to_measure(opened("set"), validation_only=False))} == {
        "test"
    }


def test_a_mixture_knows_the_classes_of_its_parts(tmp_path):
    (tmp_path / "broken").mkdir()
    animals = classes(tmp_path / "animals", "cat", "dog")
    (animals / "cat" / "bad.jpg").write_bytes(b"no picture")
    photos = picture_folder(tmp_path / "photos", 10, first=50)
    measured = to_measure(opened(f"{photos} + {animals} + synthetic:20"), validation_only=False)
    assert measured.unreadable == ("cat/bad.jpg",)
    for index, label in enumerate(measured.labels):
        part, own = measured.source.part_of(index)
        assert label == (part.name(own).split("/")[0] if "/" in part.name(own) else None)
    assert measured.labels.count("cat") == measured.labels.count("dog") == 8
    assert measured.labels.count(None) == 10 + 512, "what lapclip draws is measured on what it holds out"
