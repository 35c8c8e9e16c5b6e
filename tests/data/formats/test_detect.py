"""What people have opens without a flag: each form as the program that makes it writes it, named as a person would."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pandas
import pytest
import webdataset
from conftest import picture_folder

from lapclip.config import DataConfig
from lapclip.data.catalogue import Options
from lapclip.data.formats.detect import open_catalogue
from lapclip.data.open import open_source
from lapclip.errors import UserError
from lapclip.units import finished

NUM = 8
WORDS = [f"an image of thing {number}" for number in range(NUM)]


def pictures(path: Path) -> list[str]:
    """Images without captions; their names."""
    folder = picture_folder(path, NUM)
    for file in folder.glob("*.txt"):
        file.unlink()
    return sorted(file.name for file in folder.glob("*.jpg"))


def txt(path):
    picture_folder(path / "photos", NUM)
    return "photos"


def names(path):
    for name, words in zip(pictures(path / "photos"), WORDS, strict=True):
        (path / "photos" / name).rename(path / "photos" / f"{words} {'abcdefgh'[int(words[-1])] * 3}.jpg")
    return "photos/"


def classes(path):
    for number, name in enumerate(pictures(path / "zoo")):
        folder = path / "zoo" / ("house_cat" if number % 2 else "n02099601-golden_retriever")
        folder.mkdir(exist_ok=True)
        (path / "zoo" / name).rename(folder / f"IMG_{number:04}.jpg")
    return "zoo"


def csv(path):
    names = [f"img/{name}" for name in pictures(path / "img")]
    table = pandas.DataFrame({"id": range(NUM), "file_name": names, "text": WORDS})
    table.to_csv(path / "pairs.csv", index=False)
    return "pairs.csv"


def json_array(path):
    rows = [{"file": name, "text": words} for name, words in zip(pictures(path / "set"), WORDS, strict=True)]
    (path / "set" / "pairs.json").write_text(json.dumps(rows))
    return "set"


def parquet_bytes(path):
    data = [(path / "img" / name).read_bytes() for name in pictures(path / "img")]
    shutil.rmtree(path / "img")
    pandas.DataFrame({"image": data, "caption": WORDS}).to_parquet(path / "pairs.parquet")
    return "."


def image_folder(path):
    table = pandas.DataFrame({"file_name": pictures(path / "set"), "text": WORDS})
    table.to_csv(path / "set" / "metadata.csv", index=False)
    return "set"


def coco(path):
    listed = pictures(path / "coco" / "train2017")
    annotations = {
        "info": {"year": 2017},
        "images": [{"id": n, "file_name": name, "height": 40, "width": 53} for n, name in enumerate(listed)],
        "annotations": [{"id": n, "image_id": n, "caption": words} for n, words in enumerate(WORDS)],
    }
    (path / "coco" / "annotations").mkdir()
    (path / "coco" / "annotations" / "captions_train2017.json").write_text(json.dumps(annotations))
    return "coco"


def flickr_kaggle(path):
    rows = [f"{name},{words}" for name, words in zip(pictures(path / "f8k" / "Images"), WORDS, strict=True)]
    (path / "f8k" / "captions.txt").write_text("\n".join(["image,caption", *rows]))
    return "f8k"


def shards(path):
    listed = pictures(path / "img")
    (path / "shards").mkdir()
    for shard in range(2):
        with webdataset.TarWriter(str(path / "shards" / f"set-{shard:05}.tar")) as writer:
            for number in range(shard, NUM, 2):
                data = (path / "img" / listed[number]).read_bytes()
                writer.write({"__key__": f"{number:04}", "jpg": data, "txt": WORDS[number]})
    return "shards/set-{00000..00001}.tar"


def shards_folder(path):
    shards(path)
    return "shards"


def saved_dataset(path):
    import datasets

    columns = {"image": [str(path / "img" / name) for name in pictures(path / "img")], "caption": WORDS}
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    dataset = dataset.map(lambda row: row, desc=None)
    datasets.disable_progress_bars()
    dataset.save_to_disk(str(path / "saved"))
    return "hf:saved"


FORMS = {
    txt: "txt", names: "names", classes: "classes", csv: "csv", json_array: "jsonl", parquet_bytes: "parquet", image_folder: "csv",
    coco: "coco", flickr_kaggle: "flickr", shards: "tar", shards_folder: "tar", saved_dataset: "hf",
}  # fmt: skip


@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_what_people_have_opens_without_a_flag(tmp_path, make):
    source = make(tmp_path)
    data = finished(open_source(DataConfig(source=source, workers=0), 16))
    files = data.parts[0].files
    assert (files.catalogue.format, len(files.catalogue.names)) == (FORMS[make], NUM)
    assert not files.catalogue.problems.counts and not files.pack.unreadable
    assert data.training.num_pairs + data.validation.num_pairs == NUM
    captions = {caption for own in files.catalogue.captions for caption in own}
    if make in (classes, names):
        assert make is names or captions == {"house cat", "golden retriever"}
    elif make is not txt:
        assert captions == set(WORDS)


def test_the_same_source_is_known_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    picture_folder(tmp_path / "photos", NUM)
    one = open_catalogue("photos", Options())[1]
    monkeypatch.chdir(tmp_path / "below")
    assert open_catalogue("../photos/", Options())[1] == one == str(tmp_path / "photos")
    assert open_catalogue("emoji", Options())[1] == "emoji"


def test_a_format_can_be_forced(tmp_path):
    names(tmp_path)
    for file in list(Path("photos").glob("*.jpg")):
        file.with_suffix(".txt").write_text("beside")
    assert open_catalogue("photos", Options())[0].format == "txt"
    assert open_catalogue("photos", Options(format="names"))[0].format == "names"
    with pytest.raises(UserError, match="has no data in format `parquet`"):
        open_catalogue("photos", Options(format="parquet"))
    Path(csv(tmp_path)).rename("pairs.dat")
    for format in ("csv", "flickr"):
        assert open_catalogue("pairs.dat", Options(format=format))[0].format == format


@pytest.mark.parametrize(
    ("source", "says", "hint"),
    [
        ("photso", "does not exist; did you mean `photos`?", ""),
        ("synthetc", "did you mean `synthetic`?", ""),
        ("nowhere/at/all", "`nowhere/at/all` does not exist", ""),
        (f"{os.path.dirname(__file__)}/holidays", "holidays` does not exist", "a source is"),
        ("empty", "holds no files", ""),
        ("archive.zip", "is an archive", "unpack it"),
        ("notes.md", "no format that", "a source is"),
        ("photos/00.jpg", "`photos/00.jpg` is one image", "`photos`"),
        ("cut.json", "ends early", "download it again"),
        ("one.json", "no array of several images", '`[{"image": "cat.jpg", "caption":'),
        ("hf:", "hf:", ""),
        ("", "is not a source", ""),
        ("photos@x", "`photos@x` does not exist", "`photos@2`"),
        ("photos+emoji", "`photos+emoji` does not exist", "'photos + emoji@2'"),
    ],
)
def test_what_is_no_source_is_said_in_words(tmp_path, source, says, hint):
    picture_folder(tmp_path / "photos", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "archive.zip").write_bytes(b"PK\x03\x04")
    (tmp_path / "notes.md").write_text("# notes\n")
    (tmp_path / "one.json").write_text('[\n {"image": "a.jpg", "caption": "a cat"}]')
    (tmp_path / "cut.json").write_text('[\n {\n "image": "a.jpg",\n "capt')
    with pytest.raises(UserError) as caught:
        finished(open_source(DataConfig(source=source, workers=0), 16))
    assert says in caught.value.message and caught.value.hint and hint in caught.value.hint
    assert ("did you mean" in caught.value.message) == ("did you mean" in says)


def test_a_folder_with_two_tables_asks_which_and_named_columns_are_used(tmp_path, call):
    csv(tmp_path)
    shutil.copy("pairs.csv", "other.csv")
    with pytest.raises(UserError, match="holds 2 tables"):
        open_catalogue(".", Options())
    for number in range(4):
        shutil.copy("pairs.csv", f"{number}.csv")
    with pytest.raises(UserError, match=r"holds 6 tables: `0.csv`, .*`other.csv` and 1 more"):
        open_catalogue(".", Options())
    done = call("data", "check", "pairs.csv", "--caption-column", "txet", "--size", "nano")
    assert done.returncode == 1 and "`txet`" in done.stderr and "did you mean `text`?" in done.stderr
    assert call("data", "check", "pairs.csv", "--caption-column", "text", "--size", "nano").returncode == 0


def test_which_of_several_tables_was_used_is_said(tmp_path, call):
    csv(tmp_path)
    shutil.copy("pairs.csv", "captions.csv")
    Path("prices.csv").write_text("what,price\nmilk,1\nbread,2\n")
    report = json.loads(call("data", "check", ".", "--size", "nano", "--json").stdout)
    said = dict(zip(report["advice_kinds"], report["advice"], strict=True))["table"]
    assert "in the table `captions.csv`, not in `pairs.csv`;" in said
    Path("pairs.csv").unlink()
    assert not open_catalogue(".", Options())[0].tables


def write_tar(path: Path, count: int) -> None:
    with tarfile.open(path, "w") as archive:
        for file in sorted(Path("photos").glob("*"))[: 2 * count]:
            archive.add(file, file.name)


STRAYS = {
    "copy.csv": lambda file: file.write_text("image,caption\n0.jpg,another one\n1.jpg,and one more\n"),
    "notes.parquet": lambda file: pandas.DataFrame({"a": [1, 2]}).to_parquet(file),
    "backup.tar": lambda file: write_tar(file, 0),
    "old.tar": lambda file: write_tar(file, 6),
    "state.json": lambda file: file.write_text('{"window": [0, 0]}'),
    "dataset_dict.json": lambda file: file.write_text('{"splits": []}'),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_one_stray_file_does_not_change_what_a_folder_of_captioned_images_is(tmp_path, stray, monkeypatch):
    picture_folder(tmp_path / "photos", 60)
    STRAYS[stray](tmp_path / "photos" / stray)
    scanned = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: scanned.append(folder) or scan(folder))
    catalogue, _ = open_catalogue("photos", Options())
    assert (catalogue.format, len(catalogue.names)) == ("txt", 60)
    assert scanned == [str(tmp_path / "photos")], "a large folder is scanned once"


@pytest.mark.parametrize("name", ["metadata.csv", "captions.txt"])
def test_a_table_with_a_known_name_counts_more_than_captions_beside_images(tmp_path, name):
    listed = sorted(file.name for file in picture_folder(tmp_path / "photos", NUM).glob("*.jpg"))
    rows = [f"{file},{words}" for file, words in zip(listed, WORDS, strict=True)]
    (tmp_path / "photos" / name).write_text("\n".join(["image,caption", *rows]))
    assert open_catalogue("photos", Options())[0].captions == [[words] for words in WORDS]


def test_a_table_counts_more_than_names_of_files_if_it_names_images(tmp_path):
    names(tmp_path)
    (tmp_path / "photos" / "notes.csv").write_text("what,when\nbuy milk,tomorrow\nbuy bread,today\n")
    assert open_catalogue("photos", Options())[0].format == "names"
    rows = [f"{file.name},said in a table {n}" for n, file in enumerate(Path("photos").glob("*.jpg"))]
    (tmp_path / "photos" / "notes.csv").write_text("\n".join(["image,caption", *rows]))
    assert open_catalogue("photos", Options())[0].format == "csv"


def test_an_image_or_two_beside_shards_are_not_what_is_meant(tmp_path):
    shards(tmp_path)
    for name in ("what is in this dataset", "a few of its images"):
        shutil.copy(next(Path("img").glob("*.jpg")), f"shards/{name}.jpg")
    assert open_catalogue("shards", Options())[0].format == "tar"
    assert len(open_catalogue("shards", Options(format="tar"))[0].names) == NUM


def test_a_saved_dataset_is_known_as_a_folder(tmp_path):
    import datasets

    saved_dataset(tmp_path)
    datasets.DatasetDict({"train": datasets.load_from_disk("saved")}).save_to_disk("splits")
    for folder in ("saved", "splits"):
        assert open_catalogue(folder, Options(images="img"))[0].format == "hf"


@pytest.mark.parametrize(
    ("make", "folder", "name"),
    [
        (image_folder, "set", "metadata.csv"), (csv, ".", "pairs.csv"), (parquet_bytes, ".", "pairs.parquet"),
        (flickr_kaggle, "f8k", "captions.txt"), (coco, "coco", "annotations/captions_train2017.json"),
        (shards_folder, "shards", "set-00000.tar"),
    ],
)  # fmt: skip
def test_a_link_out_of_a_folder_is_taken_only_if_it_is_named(tmp_path, monkeypatch, make, folder, name):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    make(inside)
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.move(inside / folder / name, outside)
    (inside / folder / name).symlink_to(outside / Path(name).name)
    if make is shards_folder:
        assert len(open_catalogue(folder, Options())[0].names) == NUM // 2
        assert len(open_catalogue(folder, Options(format="tar"))[0].names) == NUM // 2
    else:
        with pytest.raises(UserError):
            open_catalogue(folder, Options())
    images = {image_folder: "set", csv: ".", flickr_kaggle: "f8k/Images", coco: "coco"}.get(make)
    assert open_catalogue(os.path.join(folder, name), Options(images=images))[0].names


def test_what_lies_in_the_cache_of_the_hub_is_read_through_its_links(tmp_path):
    parquet_bytes(tmp_path)
    snapshot = tmp_path / "datasets--some--pairs" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets--some--pairs" / "blobs").mkdir()
    shutil.move("pairs.parquet", "datasets--some--pairs/blobs/abcd")
    (snapshot / "pairs.parquet").symlink_to("../../blobs/abcd")
    assert len(open_catalogue(str(snapshot), Options())[0].names) == NUM


@pytest.mark.parametrize(
    "name", ["a.parquet", "metadata.csv", "captions.txt", "a.json", "a.tar", "state.json", "0.jpg"]
)
def test_a_named_pipe_stops_nothing(tmp_path, name):
    picture_folder(tmp_path / "photos", NUM, first=1)
    os.mkfifo(tmp_path / "photos" / name)
    assert len(open_catalogue("photos", Options())[0].names) == NUM
    for format in (None, "csv", "parquet", "coco", "tar"):
        if format or not name.endswith(".tar"):
            with pytest.raises(UserError, match="is not a regular file"):
                open_catalogue(f"photos/{name}", Options(format=format))


def test_a_tilde_is_the_home_folder_wherever_it_stands(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    home.mkdir()
    shards(home)
    csv(home)
    (home / "emoji").mkdir()
    shutil.copy(next((home / "img").glob("*.jpg")), home / "emoji" / "1f600.png")
    saved_dataset(home)
    assert open_catalogue("~/pairs.csv", Options())[1] == str(home / "pairs.csv")
    both = "~/shards/set-00000.tar::~/shards/set-00001.tar"
    catalogue, identity = open_catalogue(both, Options())
    assert len(catalogue.names) == NUM and identity == both.replace("~", str(home))
    assert open_catalogue("emoji:~/emoji", Options())[1] == f"emoji:{home}/emoji"
    assert open_catalogue("hf:~/saved", Options(images=str(home / "img")))[1] == f"hf:{home}/saved"


def test_lapclips_own_images_are_no_part_of_a_source(tmp_path, call):
    classes(tmp_path)
    (tmp_path / "zoo" / "runs" / "a" / "checkpoints").mkdir(parents=True)
    for name in ("config.toml", "machine.json"):
        (tmp_path / "zoo" / "runs" / "a" / name).touch()
    shutil.copy(next((tmp_path / "zoo").rglob("*.jpg")), tmp_path / "zoo" / "runs" / "a" / "learned.png")
    assert call("data", "show", "zoo", "--size", "nano", "--out", "zoo/lapclip-sheet.png").returncode == 0
    catalogue, _ = open_catalogue("zoo", Options())
    assert (catalogue.format, len(catalogue.names)) == ("classes", NUM)
