"""Datasets as the `datasets` package writes them, and folders that only claim to be some."""

import gc
import io
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from lapclip.data.catalogue import Catalogue, Options
from lapclip.data.formats.hugging_face import open_hugging_face
from lapclip.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path_factory, monkeypatch):
    """What `datasets` converts goes to a folder that is thrown away."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", cache / "downloads")


def image(number: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (number % 256, 80, 160)).save(file, "PNG")
    return file.getvalue()


def rows(count: int, start: int = 0, **more: list) -> dict[str, list]:
    numbers = range(start, start + count)
    return {
        "image": [{"bytes": image(n), "path": f"{n}.png"} for n in numbers],
        "caption": [f"caption {n}" for n in numbers],
        **more,
    }


def dataset(columns: dict[str, list], **features):
    made = datasets.Dataset.from_dict(columns)
    for name, feature in {"image": datasets.Image(), **features}.items():
        if name in columns:
            made = made.cast_column(name, feature)
    return made


def opened(name: str, **options: str) -> Catalogue:
    return open_hugging_face(name, Options(**options))


def test_a_saved_dataset_is_read_without_decoding_an_image():
    columns = rows(5)
    columns["image"][3] = {"bytes": b"no image at all", "path": "3.png"}
    dataset(columns).save_to_disk("saved")
    was_off = datasets.are_progress_bars_disabled()
    catalogue = opened("hf:saved")
    assert datasets.are_progress_bars_disabled() == was_off
    assert catalogue.names == [f"{n}.png" for n in range(5)] and catalogue.format == "hf"
    assert catalogue.captions == [[f"caption {n}"] for n in range(5)]
    assert catalogue.reader.read(2) == image(2) and catalogue.reader.read(3) == b"no image at all"
    assert catalogue.sides == [None] * 5 and catalogue.labels == [None] * 5


def test_splits_become_sides_and_rows_are_called_by_number_where_file_names_repeat():
    first, second = rows(3), rows(2, 2)  # 2.png stands in both
    first["image"][0]["path"] = None
    datasets.DatasetDict(train=dataset(first), validation=dataset(second)).save_to_disk("saved")
    catalogue = opened("hf:saved")
    assert catalogue.names == ["train/0", "1.png", "2.png", "validation/0", "3.png"]
    assert catalogue.sides == ["train"] * 3 + ["validation"] * 2 and catalogue.reader.read(4) == image(3)
    datasets.DatasetDict(train=dataset(first)).save_to_disk("one")
    assert opened("hf:one").sides == [None] * 3, "a single split says nothing"


@pytest.mark.parametrize(
    ("column", "cells", "expected"),
    [
        ("captions", [["a", "b"], ["c"]], [["a", "b"], ["c"]]),
        (
            "sentences",
            [[{"raw": "a", "id": 1}, {"raw": "b", "id": 2}], [{"raw": "c", "id": 3}]],
            [["a", "b"], ["c"]],
        ),
        ("odd", ["some words here", "and some there"], [["some words here"], ["and some there"]]),
    ],
)
def test_captions_are_texts_lists_or_lists_of_structs(column, cells, expected):
    columns = {"image": rows(2)["image"], "height": [3, 4], column: cells}
    dataset(columns).save_to_disk("saved")
    assert opened("hf:saved").captions == expected


def test_classes_are_called_by_their_names_and_bare_numbers_are_no_captions():
    columns = {"image": rows(3)["image"], "label": [0, 1, 0]}
    dataset(columns, label=datasets.ClassLabel(names=["fire_truck", "cat"])).save_to_disk("saved")
    catalogue = opened("hf:saved")
    assert catalogue.captions == [["fire truck"], ["cat"], ["fire truck"]]
    assert catalogue.labels == ["fire_truck", "cat", "fire_truck"]
    dataset(columns).save_to_disk("bare")
    with pytest.raises(UserError, match="no column of `hf:bare` seems to hold captions"):
        opened("hf:bare")


def test_columns_can_be_named_and_a_wrong_name_lists_them():
    columns = rows(2, other=["x", "y"])
    columns["scan"] = [{"bytes": image(n + 7), "path": None} for n in range(2)]
    dataset(columns, scan=datasets.Image()).save_to_disk("saved")
    catalogue = opened("hf:saved", image_column="scan", caption_column="other")
    assert catalogue.captions == [["x"], ["y"]] and catalogue.reader.read(1) == image(8)
    assert catalogue.names == ["rows/0", "rows/1"]
    with pytest.raises(UserError, match=r"no column `words`; it has `image`, `caption`, `other`, `scan`"):
        opened("hf:saved", caption_column="words")


def test_plain_bytes_are_images_too_and_a_split_column_is_heard():
    columns = {"png": [image(1), image(2), None], "text": ["a", "b", "c"], "split": ["train", "dev", "test"]}
    datasets.Dataset.from_dict(columns).save_to_disk("saved")
    catalogue = opened("hf:saved")
    assert catalogue.sides == ["train", "validation"] and catalogue.reader.read(1) == image(2)
    assert catalogue.problems.names == {"has no image": ["rows/2"]}


def test_parquet_files_and_a_selection_of_rows_are_read_in_their_own_order():
    Path("set/data").mkdir(parents=True)
    dataset(rows(4)).to_parquet("set/data/train-00000-of-00001.parquet")
    dataset(rows(2, 10)).to_parquet("set/data/test-00000-of-00001.parquet")
    catalogue = opened("hf:set")
    assert catalogue.sides == ["train"] * 4 + ["test"] * 2 and catalogue.reader.read(5) == image(11)
    dataset(rows(6)).select([4, 0, 2]).save_to_disk("saved")
    catalogue = opened("hf:saved")
    assert catalogue.names == ["4.png", "0.png", "2.png"] and catalogue.reader.read(0) == image(4)


def image_folder(folder: str, names: list[str]) -> None:
    Path(folder).mkdir(exist_ok=True)
    lines = ["file_name,text"]
    for number, name in enumerate(names):
        (Path(folder) / name).write_bytes(image(number))
        lines.append(f"{name},caption {number}")
    (Path(folder) / "metadata.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_folder_of_images_with_metadata_is_read_from_its_files():
    image_folder("set", ["a.png", "b.png", "c.png"])
    catalogue = opened("hf:set")
    gc.collect()  # `datasets` leaves metadata.csv open; it is closed here, not in some other test
    assert sorted(catalogue.names) == ["a.png", "b.png", "c.png"]
    number = catalogue.names.index("b.png")
    assert catalogue.captions[number] == ["caption 1"] and catalogue.reader.read(number) == image(1)
    before = catalogue.reader.stamp(number)
    os.utime("set/b.png", (1, 1))
    assert catalogue.reader.stamp(number) != before
    os.remove("set/b.png")
    assert catalogue.reader.stamp(number) == ""


def test_a_configuration_is_chosen_behind_a_colon_and_missing_it_is_said():
    Path("set").mkdir()
    notes = [{"config_name": name, "data_files": f"{name}.parquet"} for name in ("small", "large")]
    Path("set/README.md").write_text("---\nconfigs: " + json.dumps(notes) + "\n---\n")
    dataset(rows(1)).to_parquet("set/small.parquet")
    dataset(rows(3)).to_parquet("set/large.parquet")
    assert len(opened("hf:set:large").names) == 3
    for name in ("hf:set", "hf:set:medium"):
        with pytest.raises(UserError, match="has the configurations `small`, `large`") as caught:
            opened(name)
        assert caught.value.hint == "name one: `hf:set:small`"


# Hostile datasets


class Evil:
    def __reduce__(self):
        return open, ("owned", "w")


@pytest.mark.parametrize("where", ["../secret.png", "absolute", "link.png"])
def test_images_outside_the_datasets_folder_are_never_read(where, tmp_path):
    Path("secret.png").write_bytes(image(9))
    image_folder("set", ["fine.png"])
    path = str(tmp_path / "secret.png") if where == "absolute" else where
    fine = str(tmp_path / "set" / "fine.png")
    # `save_to_disk` itself would take the bytes of an Image column along.
    text = datasets.Value("string")
    kinds = {"image": {"bytes": datasets.Value("binary"), "path": text}, "caption": text}
    columns = {"image": [{"bytes": None, "path": p} for p in (path, fine)], "caption": ["mine", "yours"]}
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk("set/saved")
    notes = json.loads(Path("set/saved/dataset_info.json").read_text())
    notes["features"]["image"] = {"_type": "Image"}
    Path("set/saved/dataset_info.json").write_text(json.dumps(notes))
    os.symlink(tmp_path / "secret.png", "set/saved/link.png")
    with pytest.raises(UserError, match="can be used") as caught:
        opened("hf:set/saved")
    assert "--images" in caught.value.hint
    allowed = opened("hf:set/saved", images="set")
    assert allowed.captions == [["yours"]] and allowed.reader.read(0) == image(0)
    assert allowed.problems.counts["lies outside the source's folder"] == 1


def test_notes_that_lead_to_other_files_are_refused(tmp_path):
    dataset(rows(2)).to_parquet("private.parquet")
    for number, path in enumerate([str(tmp_path / "private.parquet"), "../private.parquet", "link.parquet"]):
        folder = Path(f"set{number}")
        folder.mkdir()
        (folder / "x.csv").write_text("a,b\n")
        os.symlink(tmp_path / "private.parquet", folder / "link.parquet")
        notes = f"---\nconfigs: [{{config_name: a, data_files: {json.dumps(path)}}}]\n---\n"
        (folder / "README.md").write_text(notes)
        with pytest.raises(UserError):
            opened(f"hf:set{number}")
    dataset(rows(2)).save_to_disk("saved")
    state = json.loads(Path("saved/state.json").read_text())
    Path("saved", state["_data_files"][0]["filename"]).rename("elsewhere.arrow")
    state["_data_files"] = [{"filename": "../elsewhere.arrow"}]
    Path("saved/state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="lies outside"):
        opened("hf:saved")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"state.json": "{}"},
        {"state.json": "[" * 100_000},
        {"dataset_dict.json": '{"splits": [7]}'},
        {"dataset_dict.json": '{"splits": ["../../x"]}'},
        {"train.parquet": "rubbish"},
        {"state.json": '{"_data_files": [{"filename": "a.arrow"}]}', "a.arrow": "rubbish"},
        {"notes.txt": "hello"},
        {"train.csv": "a,b\n1,2\n", "test.jsonl": '{"a": 1}'},
    ],
)
def test_broken_folders_are_said_in_words(files):
    Path("set").mkdir()
    for name, content in files.items():
        Path("set", name).write_text(content)
    for name in ("hf:set", "hf:", "hf:./absent", "hf:/absent", "hf:https://example.org/x"):
        with pytest.raises(UserError) as caught:
            opened(name)
        assert "configuration" not in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf:csv", "hf:a b/c", "hf:x/y:z"])
def test_an_unknown_name_offline_is_said_quickly_and_in_words(name, tmp_path):
    code = (
        "import sys\nfrom lapclip.errors import UserError\nfrom lapclip.data.catalogue import Options\n"
        "from lapclip.data.formats.hugging_face import open_hugging_face\n"
        "try: open_hugging_face(sys.argv[1], Options())\n"
        "except UserError as error: print(error.message, '|', error.hint)"
    )
    started = time.monotonic()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, env=env, timeout=60
    )
    assert f"`{name}`" in done.stdout and "local copy" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr and time.monotonic() - started < 50


def test_programs_and_pickles_are_refused_and_not_run():
    Path("set").mkdir()
    Path("set/set.py").write_text("open('owned', 'w')\n")
    for name in ("data.pkl", "train.pickle", "train.pt"):
        Path("set", name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"scripts .* set\.py") as caught:
        opened("hf:set")
    assert "Parquet" in caught.value.hint
    Path("set/set.py").rename("set/load.py")
    with pytest.raises(UserError, match="cannot be read"):
        opened("hf:set")
    dataset(rows(2)).to_parquet("set/train.parquet")
    assert len(opened("hf:set").names) == 2
    assert not Path("owned").exists()


# Reading


def test_a_reader_can_be_sent_to_another_process():
    dataset(rows(4)).save_to_disk("saved")
    reader = opened("hf:saved").reader
    sent = pickle.dumps(reader)
    assert len(sent) < 20_000, "the rows stay in their files"
    received = pickle.loads(sent)
    assert [received.read(number) for number in range(4)] == [image(number) for number in range(4)]
    assert received.stamp(1) == reader.stamp(1)


def test_images_of_another_column_have_another_stamp():
    first, second = ([{"bytes": image(number), "path": "0.png"}] for number in (1, 9))
    columns = {"before": first, "after": second, "caption": ["a thing"]}
    dataset(columns, before=datasets.Image(), after=datasets.Image()).save_to_disk("saved")
    before, after = (opened("hf:saved", image_column=column) for column in ("before", "after"))
    assert before.names == after.names and before.reader.read(0) != after.reader.read(0)
    assert before.reader.stamp(0) != after.reader.stamp(0)
