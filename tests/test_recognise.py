"""What people have opens without a flag: each form as the program that makes it writes it, named as a person would."""

import json
import shutil
from pathlib import Path

import pandas
import pytest
import webdataset
from conftest import picture_folder

from lapclip.config import DataConfig
from lapclip.data.catalogue import Options
from lapclip.data.opening import finished, open_source
from lapclip.data.recognise import open_catalogue
from lapclip.errors import UserError

NUM = 8
WORDS = [f"a picture of thing {number}" for number in range(NUM)]


def pictures(path: Path) -> list[str]:
    """Pictures without captions; their names."""
    folder = picture_folder(path, NUM)
    for file in folder.glob("*.txt"):
        file.unlink()
    return sorted(file.name for file in folder.glob("*.jpg"))


def txt(path):
    picture_folder(path / "photos", NUM)
    return "photos"


def heic(path):
    import pillow_heif
    from PIL import Image

    pillow_heif.register_heif_opener()
    picture_folder(path / "phone", NUM)
    for file in (path / "phone").glob("*.jpg"):
        Image.open(file).save(file.with_suffix(".HEIC"))
        file.unlink()
    return "phone"


def exif(path):
    from PIL import Image

    for name, words in zip(pictures(path / "photos"), WORDS, strict=True):
        described = Image.Exif()
        described[0x010E] = words
        with Image.open(path / "photos" / name) as picture:
            picture.save(path / "photos" / name, exif=described)
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


def table(path, write, name):
    frame = pandas.DataFrame(
        {"id": range(NUM), "file_name": [f"img/{n}" for n in pictures(path / "img")], "text": WORDS}
    )
    write(frame, path / name)
    return name


def csv(path):
    return table(path, lambda frame, file: frame.to_csv(file, index=False), "pairs.csv")


def tsv(path):
    return table(path, lambda frame, file: frame.to_csv(file, sep="\t", index=False), "pairs.tsv")


def semicolons(path):
    return table(path, lambda frame, file: frame.to_csv(file, sep=";"), "pairs.csv")


def jsonl(path):
    return table(path, lambda frame, file: frame.to_json(file, orient="records", lines=True), "pairs.jsonl")


def parquet(path):
    return table(path, lambda frame, file: frame.to_parquet(file), "pairs.parquet")


def parquet_bytes(path):
    data = [(path / "img" / name).read_bytes() for name in pictures(path / "img")]
    shutil.rmtree(path / "img")
    pandas.DataFrame({"image": data, "caption": WORDS}).to_parquet(path / "pairs.parquet")
    return "."


def image_folder(path):
    pandas.DataFrame({"file_name": pictures(path / "set"), "text": WORDS}).to_csv(
        path / "set" / "metadata.csv", index=False
    )
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


def coco_file(path):
    return coco(path) + "/annotations/captions_train2017.json"


def karpathy(path):
    images = [
        {
            "filename": name,
            "split": "val" if n % 4 == 0 else "train",
            "sentences": [{"raw": WORDS[n], "tokens": []}],
        }
        for n, name in enumerate(pictures(path / "flickr" / "images"))
    ]
    (path / "flickr" / "dataset_flickr8k.json").write_text(
        json.dumps({"images": images, "dataset": "flickr8k"})
    )
    return "flickr/dataset_flickr8k.json"


def flickr_kaggle(path):
    rows = [f"{name},{words}" for name, words in zip(pictures(path / "f8k" / "Images"), WORDS, strict=True)]
    (path / "f8k" / "captions.txt").write_text("\n".join(["image,caption", *rows]))
    return "f8k"


def flickr_token(path):
    rows = [
        f"{name}#0\t{words}"
        for name, words in zip(pictures(path / "f8k" / "Flicker8k_Dataset"), WORDS, strict=True)
    ]
    (path / "f8k" / "Flickr8k.token.txt").write_text("\n".join(rows))
    return "f8k/Flickr8k.token.txt"


def flickr30k(path):
    rows = [
        f"{n}| 0| {words}"
        for n, words in zip(pictures(path / "f30k" / "flickr30k_images"), WORDS, strict=True)
    ]
    (path / "f30k" / "results.csv").write_text("\n".join(["image_name| comment_number| comment", *rows]))
    return "f30k"


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
    txt: "txt", heic: "txt", exif: "metadata", names: "names", classes: "classes", csv: "csv", tsv: "tsv",
    semicolons: "csv", jsonl: "jsonl", parquet: "parquet", parquet_bytes: "parquet", image_folder: "csv",
    coco: "coco", coco_file: "coco", karpathy: "karpathy", flickr_kaggle: "flickr", flickr_token: "flickr",
    flickr30k: "flickr", shards: "tar", shards_folder: "tar", saved_dataset: "hf",
}  # fmt: skip


@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_what_people_have_opens_without_a_flag(tmp_path, make):
    source = make(tmp_path)
    data = finished(open_source(DataConfig(source=source, workers=0), 16))
    files = data.parts[0].files
    assert (files.catalogue.format, len(files.catalogue.names), files.catalogue.problems.counts) == (
        FORMS[make],
        NUM,
        {},
    )
    assert not files.pack.unreadable
    assert data.training.num_pairs + data.held_out.num_pairs == NUM
    captions = {caption for own in files.catalogue.captions for caption in own}
    if make in (classes, names):
        assert make is names or captions == {"house cat", "golden retriever"}
    elif make not in (txt, heic):
        assert captions == set(WORDS)


def test_emoji_open_without_a_flag():
    catalogue, identity = open_catalogue("emoji", Options())
    assert identity == "emoji" and len(catalogue.names) > 1000
    assert any("grinning face" in own for own in catalogue.captions)


def test_the_same_source_is_known_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    picture_folder(tmp_path / "photos", NUM)
    one = open_catalogue("photos", Options())[1]
    monkeypatch.chdir(tmp_path / "below")
    assert open_catalogue("../photos/", Options())[1] == one == str(tmp_path / "photos")


def test_a_format_can_be_forced(tmp_path):
    names(tmp_path)
    for file in list(Path("photos").glob("*.jpg")):
        file.with_suffix(".txt").write_text("beside")
    assert open_catalogue("photos", Options())[0].format == "txt"
    assert open_catalogue("photos", Options(format="names"))[0].format == "names"
    with pytest.raises(UserError, match="holds nothing of format `parquet`"):
        open_catalogue("photos", Options(format="parquet"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("photso", "is not there; did you mean `photos`?"),
        ("synthetc", "did you mean `synthetic`?"),
        ("nowhere/at/all", "`nowhere/at/all` is not there"),
        ("empty", "holds no files"),
        ("archive.zip", "is an archive"),
        ("notes.md", "no kind of source"),
        ("hf:", "hf:"),
        ("", "names no source"),
    ],
)
def test_what_is_no_source_is_said_in_words(tmp_path, source, says):
    picture_folder(tmp_path / "photos", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "archive.zip").write_bytes(b"PK\x03\x04")
    (tmp_path / "notes.md").write_text("# notes\n")
    with pytest.raises(UserError) as caught:
        finished(open_source(DataConfig(source=source, workers=0), 16))
    assert says in caught.value.message and caught.value.hint


def test_a_folder_with_two_tables_asks_which(tmp_path):
    csv(tmp_path)
    shutil.copy("pairs.csv", "other.csv")
    with pytest.raises(UserError, match="holds 2 tables"):
        open_catalogue(".", Options())


def test_named_columns_are_used(tmp_path, call):
    csv(tmp_path)
    done = call("data", "check", "pairs.csv", "--caption-column", "txet", "--size", "nano")
    assert done.returncode == 1 and "`txet`" in done.stderr and "did you mean `text`?" in done.stderr
    assert call("data", "check", "pairs.csv", "--caption-column", "text", "--size", "nano").returncode == 0
