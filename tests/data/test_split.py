"""The same image is recognised, never lies on both sides of the split, and what a model is evaluated on."""

import time
from pathlib import Path

import numpy as np
import pytest
from conftest import opened, picture_folder
from PIL import Image, ImageDraw, ImageEnhance
from test_decode import encoded as saved

from lapclip.data.decode import RECORD, decode
from lapclip.data.split import by_first_member, content_groups, duplicates, evaluation_set, is_chosen
from lapclip.data.synthetic import SceneSource


def photo(seed: int, size: int = 160) -> Image.Image:
    """Soft random colours in many sizes, which is what a photo looks like from far away."""
    noise = np.random.default_rng(seed)
    coarse = [Image.fromarray(noise.integers(0, 256, (n, n, 3), dtype=np.uint8)) for n in (4, 9, 40)]
    layers = np.stack([np.asarray(layer.resize((size, size)), dtype=float) for layer in coarse])
    return Image.fromarray(np.average(layers, axis=0, weights=(0.5, 0.35, 0.15)).astype(np.uint8))


def smiley(mouth: int) -> Image.Image:
    """One of many yellow faces on white, which differ in little."""
    picture = Image.new("RGB", (144, 144), "white")
    draw = ImageDraw.Draw(picture)
    draw.ellipse((6, 6, 138, 138), fill="#ffcc4d")
    draw.ellipse((40, 40, 56, 64), fill="#664500")
    draw.ellipse((88, 40, 104, 64), fill="#664500")
    draw.chord((40, 60, 104, 120), 20 + 8 * mouth, 160 - 8 * mouth, fill="#664500")
    return picture


def records_of(files: list[bytes]) -> np.ndarray:
    records = np.array([decode(file, 72).record for file in files], dtype=RECORD)
    records["row"] = np.arange(len(records))
    return records


def made_up(num_records: int, seed: int = 0) -> np.ndarray:
    """Records of that many images that have nothing in common."""
    noise = np.random.default_rng(seed)
    records = np.zeros(num_records, RECORD)
    records["row"] = np.arange(num_records)
    records["content"] = np.frombuffer(noise.bytes(16 * num_records), "V16")
    records["dhash"] = noise.integers(2**64, size=num_records, dtype=np.uint64)
    records["thumb"] = noise.integers(256, size=records["thumb"].shape, dtype=np.uint8)
    return records


@pytest.mark.parametrize(
    "again",
    [
        lambda p: saved(p, "JPEG", quality=50),
        lambda p: saved(p.resize((80, 80)), "JPEG", quality=85),
        lambda p: saved(ImageEnhance.Brightness(p).enhance(1.04), "JPEG", quality=85),
        lambda p: saved(p, "WEBP", quality=60),
    ],
    ids=["jpeg 50", "half", "brighter", "webp"],
)
def test_a_photo_saved_again_is_the_same_and_other_photos_are_not(again):
    photos = [photo(seed) for seed in range(30)]
    groups = content_groups(records_of([saved(p) for p in photos] + [again(p) for p in photos]))
    assert len(set(groups[:30].tolist())) == 30
    assert (groups[:30] == groups[30:]).mean() > 0.9


def test_images_that_differ_only_beside_the_center_square_are_different():
    middle, shapes = photo(0), [(480, 160), (160, 480), (240, 160)]
    for width, height in shapes:
        wide = [photo(seed, 480).resize((width, height)) for seed in range(1, 5)]
        for picture in wide:
            picture.paste(middle, ((width - 160) // 2, (height - 160) // 2))
        smaller = [saved(p.resize((width // 2 + 1, height // 2)), "JPEG", quality=85) for p in wide]
        groups = content_groups(records_of([*map(saved, wide), *smaller, saved(wide[0].resize((160, 160)))]))
        assert len(set(groups[:4].tolist())) == 4 and (groups[:4] == groups[4:8]).all()
        assert groups[8] not in groups[:8], "squashed to a square it is another image"


def test_plain_images_are_the_same_only_when_saved_again():
    colours = [(r, g, b) for r in range(0, 256, 51) for g in range(0, 256, 51) for b in range(0, 256, 51)]
    faces = [smiley(mouth) for mouth in range(8)]
    files = [*map(saved, faces), *(saved(Image.new("RGB", (32, 32), colour)) for colour in colours)]
    files += [saved(SceneSource(300).image(index, 72)) for index in range(300)]
    groups = content_groups(records_of(files + [saved(face.resize((72, 72))) for face in faces]))
    assert len(set(groups.tolist())) == len(files) and (groups[:8] == groups[-8:]).all()


def test_the_order_of_the_source_does_not_matter():
    files = [saved(photo(seed), "JPEG", quality=quality) for seed in range(40) for quality in (95, 60, 40)]
    records = records_of(files)
    groups = content_groups(records)
    shuffled = np.random.default_rng(0).permutation(len(records))
    assert (by_first_member(groups[shuffled]) == content_groups(records[shuffled])).all()


def test_a_chain_of_small_changes_is_one_group():
    records = made_up(1)[np.zeros(200, dtype=int)]
    records["content"] = made_up(200)["content"]
    records["thumb"] = records["thumb"] // 2 + np.arange(200, dtype=np.uint8)[:, None, None, None] // 2
    assert len(set(content_groups(records).tolist())) == 1


def test_unreadable_images_are_each_alone_and_never_for_validation():
    records = made_up(50)
    records["row"][10:20] = -1
    records["content"][10:20] = np.void(bytes(16))
    groups = content_groups(records)
    assert len(set(groups.tolist())) == 50
    assert not is_chosen(records, groups, 0.9)[10:20].any()


def test_duplicates_come_most_frequent_first_and_each_with_its_largest_image_first():
    records = made_up(8)
    records["width"], records["height"] = 100, [10, 10, 30, 10, 10, 10, 20, 10]
    groups = np.array([0, 1, 1, 2, 3, 3, 3, 4])
    assert duplicates(records, groups) == [[6, 4, 5], [2, 1]]


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_about_the_share_asked_for_is_for_validation(share):
    assert abs(is_chosen(made_up(20_000), np.arange(20_000), share).mean() - share) < 0.01
    assert len(is_chosen(made_up(0), content_groups(made_up(0)), share)) == 0


def test_sides_stay_as_they_are_when_images_are_added_copied_or_moved():
    records, more = made_up(2000), made_up(3000, seed=1)
    before = is_chosen(records, content_groups(records), 0.05)
    shuffled = np.random.default_rng(0).permutation(7000)
    together = np.concatenate([records, more, records])[shuffled]
    after = np.empty(7000, dtype=bool)
    after[shuffled] = is_chosen(together, content_groups(together), 0.05)
    assert (after[:2000] == before).all() and (after[5000:] == before).all() and before.any()


@pytest.mark.parametrize("num_images", [1, 3, 4, 5, 30])
def test_of_few_images_two_are_for_validation_and_never_all(num_images):
    for seed in range(20):
        records, groups = made_up(num_images, seed), np.arange(num_images)
        assert is_chosen(records, groups, 0.001).sum() == (2 if num_images >= 4 else 0)
        assert not is_chosen(records, groups, 1.0).all()


@pytest.mark.slow
def test_many_plain_images_do_not_take_forever():
    records = made_up(20_000)
    records["dhash"] = 0
    records["thumb"] = 100 + records["thumb"] % 4
    started = time.perf_counter()
    content_groups(records)
    assert time.perf_counter() - started < 60


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
    measured = evaluation_set(data, validation_only=False)
    assert measured.source.num_pairs == 24 and measured.classes == ("cat", "dog", "sea horse")
    for index, label in enumerate(measured.labels):
        assert measured.source.name(index).split("/")[0] == label.replace(" ", "_")
        assert measured.source.image(index, 16).size[0] >= 16
    first = [measured.source.name(index).split("/")[0] for index in measured.source.sample(12)]
    assert len(set(first)) == 3, "the first ones are a fair sample"


def test_of_what_was_trained_on_only_validation_images_are_measured(tmp_path):
    data = opened(classes(tmp_path / "animals", "cat", "dog"))
    measured = evaluation_set(data, validation_only=True)
    trained_on = {data.training.name(index) for index in range(data.training.num_pairs)}
    assert names_of(measured) and not names_of(measured) & trained_on
    assert len(measured.labels) == measured.source.num_pairs
    assert measured.classes == ("cat", "dog"), "also when no image of one is for validation"


def test_a_source_with_a_test_side_of_its_own_is_measured_on_that(tmp_path):
    for number, side in enumerate(("train", "val", "test")):
        classes(tmp_path / "set" / side, "cat", "dog", each=4, first=100 * number)

    def sides() -> set[str]:
        return {name.split("/")[0] for name in names_of(evaluation_set(opened("set"), validation_only=False))}

    assert sides() == {"test"}
    assert evaluation_set(opened("set"), validation_only=False).own_sides == ("test",)
    assert not evaluation_set(opened("set"), validation_only=True).own_sides
    (tmp_path / "set" / "test").rename(tmp_path / "elsewhere")
    assert sides() == {"val"}
    (tmp_path / "elsewhere").rename(tmp_path / "set" / "test")
    (tmp_path / "set" / "val").rename(tmp_path / "elsewhere")
    assert sides() == {"test"}


def test_a_mixture_knows_the_classes_of_its_parts(tmp_path):
    animals = classes(tmp_path / "animals", "cat", "dog")
    (animals / "cat" / "bad.jpg").write_bytes(b"no picture")
    photos = picture_folder(tmp_path / "photos", 10, first=50)
    measured = evaluation_set(opened(f"{photos} + {animals} + synthetic:20"), validation_only=False)
    assert measured.unreadable == ("cat/bad.jpg",)
    for index, label in enumerate(measured.labels):
        part, own = measured.source.part_of(index)
        assert label == (part.name(own).split("/")[0] if "/" in part.name(own) else None)
    assert measured.labels.count("cat") == measured.labels.count("dog") == 8
    assert measured.labels.count(None) == 10 + 512, "what lapclip draws is measured on its validation scenes"
