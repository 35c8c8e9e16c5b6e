"""COCO's captions and Karpathy's splits, in the layouts in which they are published."""

import json
from pathlib import Path

import pytest
from PIL import Image

from lapclip.data.catalogue import Options
from lapclip.data.formats.annotations import looks_like_annotations, open_annotations
from lapclip.errors import UserError


def draw(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (len(name) * 7 % 256, 90, 30)).save(name)


def write_json(name: str, content: object) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def coco(images: dict[int, str], *captions: tuple[int, str]) -> dict:
    """As in captions_val2017.json."""
    address = "http://images.cocodataset.org/val2017/"
    return {
        "info": {"description": "COCO 2017 Dataset", "version": "1.0", "year": 2017},
        "images": [
            {"license": 4, "file_name": name, "coco_url": address + name, "height": 427, "id": number}
            for number, name in images.items()
        ],
        "annotations": [
            {"image_id": image, "id": 100 + number, "caption": caption}
            for number, (image, caption) in enumerate(captions)
        ],
    }


def karpathy(*images: tuple[str, str, list[str]], **more: str) -> dict:
    """As in dataset_flickr8k.json, or with `filepath` as in dataset_coco.json."""

    def entry(name: str, split: str, sentences: list[str]) -> dict:
        said = [{"tokens": raw.lower().split(), "raw": raw, "sentid": 0} for raw in sentences]
        return {**more, "sentids": [0], "sentences": said, "split": split, "filename": name}

    return {"images": [entry(*image) for image in images], "dataset": "flickr8k"}


def opened(*files: Path, **options):
    return open_annotations(list(files), "coco", Options(**options))


def captions(catalogue) -> dict[str, list[str]]:
    return dict(zip(catalogue.names, catalogue.captions, strict=True))


def test_coco_as_it_is_unpacked():
    draw("coco/train2017/01.jpg", "coco/train2017/02.jpg", "coco/val2017/03.jpg")
    content = coco({1: "01.jpg", 2: "02.jpg"}, (2, "a dog"), (1, "a cat"), (1, "a cat asleep.\n"))
    train = write_json("coco/annotations/captions_train2017.json", content)
    val = write_json("coco/annotations/captions_val2017.json", coco({3: "03.jpg"}, (3, "a bird")))
    catalogue = opened(train, val)
    assert catalogue.format == "coco"
    assert captions(catalogue) == {
        "train2017/01.jpg": ["a cat", "a cat asleep."],
        "train2017/02.jpg": ["a dog"],
        "val2017/03.jpg": ["a bird"],
    }
    assert catalogue.sides == ["train", "train", "validation"] and not catalogue.problems.counts
    assert catalogue.reader.read(2) == Path("coco/val2017/03.jpg").read_bytes()


def test_karpathys_flickr_with_its_splits():
    draw(*(f"Flicker8k_Dataset/{name}.jpg" for name in "abcd"))
    content = karpathy(
        ("a.jpg", "train", ["A black dog .", "Two dogs ."]), ("b.jpg", "restval", ["A cat ."]),
        ("c.jpg", "val", ["A bird ."]), ("d.jpg", "test", ["A fox ."]),
    )  # fmt: skip
    catalogue = opened(write_json("dataset_flickr8k.json", content))
    assert catalogue.format == "karpathy"
    assert captions(catalogue)["Flicker8k_Dataset/a.jpg"] == ["A black dog .", "Two dogs ."]
    assert catalogue.sides == ["train", "train", "validation", "test"]


@pytest.mark.parametrize("images", [None, ".", "val2014"])
def test_karpathys_coco_names_a_folder_for_each_image(images):
    draw("val2014/COCO_val2014_000000391895.jpg")
    content = karpathy(("COCO_val2014_000000391895.jpg", "test", ["A man ."]), filepath="val2014")
    catalogue = opened(write_json("dataset_coco.json", content), images=images)
    assert [name.rpartition("/")[2] for name in catalogue.names] == ["COCO_val2014_000000391895.jpg"]


@pytest.mark.parametrize(
    ("json_name", "image"),
    [
        ("d/captions.json", "d/a.jpg"),
        ("d/captions.json", "d/images/train2017/a.jpg"),
        ("d/captions.json", "d/my photos/a.jpg"),
        ("d/annotations/captions.json", "d/images/a.jpg"),
        ("d/annotations/captions_val2017.json", "d/train2017/a.jpg"),
    ],
)
def test_images_are_found_where_people_put_them(json_name, image):
    draw(image)
    catalogue = opened(write_json(json_name, coco({1: "a.jpg"}, (1, "a cat"))))
    assert catalogue.reader.read(0) == Path(image).read_bytes()


def test_two_folders_with_the_same_names_are_told_apart_by_their_side():
    draw("train/1.jpg", "valid/1.jpg", "valid/2.jpg")
    train = write_json("train_captions.json", coco({1: "1.jpg", 2: "2.jpg"}, (1, "a cat"), (2, "a fox")))
    valid = write_json("valid_captions.json", coco({1: "1.jpg"}, (1, "a dog")))
    catalogue = opened(train, valid)
    assert captions(catalogue) == {"train/1.jpg": ["a cat"], "valid/1.jpg": ["a dog"]}
    assert catalogue.problems.names == {"is missing": ["2.jpg"]}, "that of the other side is another image"


def test_a_few_downloaded_images_of_many_are_found():
    names = {number: f"{number:012}.jpg" for number in range(5000)}
    draw(f"some/{names[4321]}", "other/unrelated.jpg")
    file = write_json("captions.json", coco(names, *((number, "a thing") for number in names)))
    assert opened(file).names == ["some/000000004321.jpg"]


def test_no_images_at_all_is_an_error_that_says_what_to_do():
    file = write_json("captions.json", coco({1: "a.jpg"}, (1, "a cat")))
    with pytest.raises(UserError, match=r"none of the 1 images .*`a.jpg` is missing") as caught:
        opened(file)
    assert "--images FOLDER" in caught.value.hint
    draw("far/away/a.jpg")
    assert opened(file, images="far/away").names == ["a.jpg"]


def test_nothing_outside_the_folders_is_read():
    draw("secret/a.jpg", "d/images/b.jpg")
    Path("d/images/link.jpg").symlink_to(Path("secret/a.jpg").resolve())
    Path("d/val2017").symlink_to(Path("secret").resolve())
    names = ["../secret/a.jpg", str(Path("secret/a.jpg").resolve()), "link.jpg"]
    names += ["a.jpg", "a\0.jpg", "\ud800.jpg", "b.jpg", "images"]
    content = coco(dict(enumerate(names)), *((i, "a thing") for i in range(len(names))))
    file = write_json("d/captions.json", content)
    catalogue = opened(file)
    assert catalogue.names == ["images/b.jpg"]
    assert catalogue.problems.counts["lies outside the source's folder"] == 3


def test_wrong_types_are_counted_and_the_rest_is_read():
    draw("a.jpg", "b.jpg", "c.jpg")
    content = coco({1: "a.jpg", 3: "c.jpg"}, (1, "a cat"))
    content["images"] += [{"id": "2", "file_name": "b.jpg"}, {"id": 1, "file_name": "twice.jpg"}]
    content["images"] += [
        {"id": 9},
        {"id": [], "file_name": "x.jpg"},
        {"id": 8, "file_name": 5},
        "b.jpg",
        None,
    ]
    content["annotations"] += [{"image_id": 2, "caption": "a dog"}, {"image_id": 3.0, "caption": "a fox"}]
    content["annotations"] += [
        {"image_id": 1, "caption": None},
        {"image_id": 77, "caption": "lost"},
        {},
        3,
        None,
    ]
    catalogue = opened(write_json("captions.json", content))
    assert captions(catalogue) == {"a.jpg": ["a cat"], "b.jpg": ["a dog"], "c.jpg": ["a fox"]}
    assert catalogue.problems.counts == {
        "has no `id` or no `file_name`": 5,
        "has the `id` of another image": 1,
        "has a caption that is not text": 1,
        "belongs to no image": 4,
    }

    content = karpathy(("a.jpg", "train", ["a cat"]))
    odd = {"filename": "b.jpg", "sentences": ["a dog", {"raw": 5}, {"raw": "two dogs"}], "split": 3}
    content["images"] += [odd, {"filename": None}, [], {"filename": "c.jpg", "sentences": {"raw": "no"}}]
    catalogue = opened(write_json("dataset.json", content))
    assert captions(catalogue) == {"a.jpg": ["a cat"], "b.jpg": ["two dogs"]}
    assert catalogue.sides == ["train", None]
    assert catalogue.problems.counts == {
        "has a caption that is not text": 2,
        "has no `filename`": 2,
        "has no caption": 1,
    }


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "3", '{"images": 3}', '{"images": {}}', '{"images": []}', '{"images": [], "annotations": 5}',
        '{"images": [], "annotations": []}', '{"images": [{"file_name": "a.jpg"}]}', "[" * 200_000, '{"a": ' + "1" * 9000 + "}",
        b"\xff\xfe\xfa\xfb".decode("latin-1"),
    ],
)  # fmt: skip
def test_a_broken_file_is_an_error_in_words(content):
    Path("captions.json").write_text(content, "latin-1")
    with pytest.raises(UserError):
        opened(Path("captions.json"))


def test_both_forms_in_one_folder_are_asked_about():
    draw("a.jpg")
    files = [
        write_json("captions_val.json", coco({1: "a.jpg"}, (1, "a cat"))),
        write_json("dataset.json", karpathy(("a.jpg", "train", ["A cat ."]))),
    ]
    with pytest.raises(UserError, match="in two formats"):
        opened(*files)
    assert opened(*files, format="karpathy").captions == [["A cat ."]]
    with pytest.raises(UserError, match="not `coco`"):
        opened(files[1], format="coco")


def test_annotations_are_known_by_what_they_hold():
    images = {number: f"{number:012}.jpg" for number in range(3000)}
    whole = coco(images, *((number, "a thing") for number in images))
    instances = {
        **whole,
        "annotations": [{"image_id": 1, "bbox": [0, 0, 1, 1], "category_id": 3, "id": 5, "segmentation": []}],
        "categories": [{"supercategory": "animal", "id": 3, "name": "cat"}],
    }
    for name, content, expected in [
        ("coco.json", whole, True),
        ("turned.json", dict(reversed(whole.items())), True),
        ("karpathy.json", karpathy(*[("a.jpg", "train", ["A cat ."])] * 2000), True),
        ("small.json", karpathy(("a.jpg", "train", ["A cat ."])), True),
        ("instances_val2017.json", instances, False),
        ("package.json", {"name": "a", "version": "1.0.0", "images": ["a.jpg"]}, False),
        ("list.json", [{"image_id": 1, "caption": "a cat", "images": [1]}], False),
        ("empty.json", {}, False),
    ]:
        assert looks_like_annotations(write_json(name, content)) is expected, name
    Path("lines.jsonl").write_text('{"file_name": "a.jpg", "image_id": 1, "caption": "a cat"}\n' * 3)
    assert not looks_like_annotations(Path("lines.jsonl"))
    assert not looks_like_annotations(Path("nowhere.json")) and not looks_like_annotations(Path())
