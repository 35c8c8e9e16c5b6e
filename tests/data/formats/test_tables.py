"""Tables of images and captions, as other programs write them and as people break them."""

import base64
import io
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lapclip.data.catalogue import Options
from lapclip.data.decode import decode
from lapclip.data.files import FileReader
from lapclip.data.formats.tables import looks_like_table, open_table
from lapclip.errors import UserError

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="measures as Linux does")
COLOURS = ["red", "green", "blue", "white", "black", "orange"]
PAIRS = [(f"{colour}.png", f"a {colour} square, plain") for colour in COLOURS]


def picture(colour: str, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), colour).save(buffer, format)
    return buffer.getvalue()


def save_images(folder: str = "images") -> None:
    Path(folder).mkdir(exist_ok=True)
    for colour in COLOURS:
        Path(folder, f"{colour}.png").write_bytes(picture(colour))


def frame() -> pd.DataFrame:
    return pd.DataFrame(PAIRS, columns=["image", "caption"])


def write(text: str, name: str = "pairs.csv", encoding: str = "utf-8") -> str:
    Path(name).write_bytes(text.encode(encoding))
    return name


def opened(*names: str, **options):
    return open_table([Path(name) for name in names], names[0], Options(**options))


def found(*names: str, **options) -> dict[str, list[str]]:
    catalogue = opened(*names, **options)
    return dict(zip(catalogue.names, catalogue.captions, strict=True))


def as_pairs() -> dict[str, list[str]]:
    return {name: [caption] for name, caption in PAIRS}


def mistakes(*names: str, **options) -> dict[str, list[str]]:
    return opened(*names, **options).problems.names


def colour_of(data: bytes) -> tuple[int, ...]:
    return tuple(decode(data, 16).pixels[:, 0, 0].tolist())


def assert_images_are_right(catalogue) -> None:
    """Each caption begins `a COLOUR square`, and the image is of that colour, in another process too."""
    for reader in (catalogue.reader, pickle.loads(pickle.dumps(catalogue.reader))):
        for index in [*range(len(catalogue.names)), 0]:
            expected = Image.new("RGB", (1, 1), catalogue.captions[index][0].split()[1]).getpixel((0, 0))
            assert colour_of(reader.read(index)) == expected
            assert catalogue.reader.stamp(index)


WRITERS = {
    "pairs.csv": (lambda table: table.to_csv("pairs.csv", index=False), "csv"),
    "indexed.csv": (lambda table: table.to_csv("indexed.csv"), "csv"),
    "pipes.csv": (lambda table: table.to_csv("pipes.csv", index=False, sep="|"), "csv"),
    "bare.csv": (lambda table: table.to_csv("bare.csv", index=False, header=False), "csv"),
    "excel.csv": (lambda table: table.to_csv("excel.csv", index=False, encoding="utf-8-sig"), "csv"),
    "wide.csv": (lambda table: table.to_csv("wide.csv", index=False, encoding="utf-16"), "csv"),
    "mac.csv": (lambda table: table.to_csv("mac.csv", index=False, lineterminator="\r"), "csv"),
    "windows.csv": (lambda table: table.to_csv("windows.csv", sep=";", lineterminator="\r\n"), "csv"),
    "named.csv": (lambda table: table.to_csv("named.csv", index=False, sep="\t"), "tsv"),
    "pairs.jsonl": (lambda table: table.to_json("pairs.jsonl", orient="records", lines=True), "jsonl"),
    "pairs.json": (lambda table: table.to_json("pairs.json", orient="records"), "jsonl"),
    "tall.json": (lambda table: table.to_json("tall.json", orient="records", indent=4), "jsonl"),
    "lines.txt": (lambda table: table.to_json("lines.txt", orient="records", lines=True), "jsonl"),
    "pairs.parquet": (lambda table: table.to_parquet("pairs.parquet"), "parquet"),
    "misnamed.csv": (lambda table: table.to_parquet("misnamed.csv"), "parquet"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_pandas_writes_is_read(name):
    save_images()
    writer, format = WRITERS[name]
    writer(frame())
    catalogue = opened(name)
    assert dict(zip(catalogue.names, catalogue.captions, strict=True)) == as_pairs()
    assert catalogue.format == format and not catalogue.problems.counts
    assert_images_are_right(catalogue)


def save(table: pd.DataFrame, name: str, **options) -> str:
    """As the suffix says."""
    if name.endswith(".parquet"):
        table.to_parquet(name)
    elif name.endswith(".jsonl"):
        table.to_json(name, orient="records", lines=True)
    elif name.endswith(".json"):
        table.to_json(name, orient="records", indent=2, force_ascii=False)
    else:
        table.to_csv(name, index=False, sep="\t" if name.endswith(".tsv") else ",", **options)
    return name


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json"])
def test_a_caption_may_hold_anything_when_it_was_written_well(suffix):
    save_images()
    captions = ["naïve café 東京 🦄", 'she said "hi", twice', "two\nlines"]
    captions += ["tab\there", "a; b | c, d", "[2] dogs [sic]"]
    rows = [(name, caption) for (name, _), caption in zip(PAIRS, captions, strict=True)]
    name = save(pd.DataFrame([*rows, ("red.png", "again")], columns=["image", "caption"]), f"pairs.{suffix}")
    catalogue = opened(name)
    assert catalogue.captions[0] == [captions[0], "again"], "several rows of one image are its captions"
    assert catalogue.captions[1:] == [[" ".join(caption.split())] for caption in captions[1:]]
    assert not catalogue.problems.counts


def test_a_cell_with_a_list_holds_several_captions():
    save_images()
    rows = [
        ("red.png", json.dumps(["a red one", "red, it is"])),
        ("blue.png", str(["a blue one", "it's blue"])),
        ("green.png", "['a green one'\n 'green it is']"),  # as NumPy writes it
        ("white.png", "[a caption in brackets]"),
        ("black.png", "[1, 2]"),
    ]
    pd.DataFrame(rows, columns=["image", "caption"]).to_csv("pairs.csv", index=False)
    assert list(found("pairs.csv").values()) == [
        ["a red one", "red, it is"], ["a blue one", "it's blue"], ["a green one", "green it is"],
        ["[a caption in brackets]"], ["[1, 2]"],
    ]  # fmt: skip


def test_flickr30k_results_csv_is_read_and_its_broken_row_named():
    save_images("flickr30k_images")
    lines = [
        "image_name| comment_number| comment",
        "red.png| 0| A red square , plain .",
        'red.png| 1| " Red " it says .',
        "red.png| 2   A red square .",  # as row 19,999 of the real one
        "blue.png| 0| Blue .",
    ]
    name = write("\n".join(lines), "results.csv")
    assert found(name) == {"red.png": ["A red square , plain .", '" Red " it says .'], "blue.png": ["Blue ."]}
    assert opened(name).format == "flickr"
    assert mistakes(name) == {"has 2 of 3 columns": ["results.csv:row 4"]}


def test_flickr_token_files_are_read():
    save_images("Flicker8k_Dataset")
    lines = ["red.png#0\tA red square , plain .", 'red.png#1\t" Red', "blue.png#0\tBlue ."]
    name = write("\n".join([*lines, "gone.png.1#0\tGone ."]), "Flickr8k.token.txt")
    assert found(name) == {"red.png": ["A red square , plain .", '" Red'], "blue.png": ["Blue ."]}
    assert opened(name).format == "flickr" and mistakes(name) == {"is missing": ["gone.png.1#0"]}


@pytest.mark.parametrize("form", ["plain", "data", "lines", "address"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json"])
def test_images_in_base64_are_read_from_their_rows(form, suffix):
    def encoded(colour: str) -> str:
        data = picture(colour, "JPEG" if form == "plain" else "PNG")
        text, safe = (encode(data).decode() for encode in (base64.b64encode, base64.urlsafe_b64encode))
        return {
            "plain": text, "data": f"data:image/png;base64,{text}", "lines": base64.encodebytes(data).decode(),
            "address": f"data:image/png;charset=utf-8;base64,{safe.rstrip('=')}",
        }[form]  # fmt: skip

    rows = [(encoded(colour), f"a {colour} square, 東京") for colour in ("red", "blue", "white", "black")]
    table = pd.DataFrame(rows, columns=["image", "caption"])
    name = save(table, f"pairs.{suffix}", encoding="utf-16")
    catalogue = opened(name)
    assert catalogue.names[0] == f"{name}#{2 if suffix == 'csv' else 1}" and not catalogue.problems.counts
    for index in range(len(rows)):
        rgb = Image.new("RGB", (1, 1), catalogue.captions[index][0].split()[1]).getpixel((0, 0))
        assert colour_of(catalogue.reader.read(index)) == pytest.approx(rgb, abs=5)  # JPEG is not exact


def test_images_in_cells_are_called_by_their_id_and_equal_ids_are_one_image():
    text = base64.b64encode(picture("red")).decode()
    other = base64.b64encode(picture("blue")).decode()
    write(f"id,image,caption\n7,{text},a red one\n8,{other},a blue one\n7,{text},red\n9,,nothing\n")
    catalogue = opened("pairs.csv")
    assert catalogue.names == ["7", "8"] and catalogue.captions == [["a red one", "red"], ["a blue one"]]
    assert mistakes("pairs.csv") == {"has no image": ["pairs.csv#5"]}
    assert colour_of(catalogue.reader.read(1)) == (0, 0, 255)


def test_ids_that_begin_again_in_each_file_are_different_images_and_a_class_is_no_id():
    for part, colours in (("a.parquet", COLOURS[:3]), ("b.parquet", COLOURS[3:])):
        pairs = [(number, colour) for number, colour in enumerate(colours) for _ in (0, 1)]
        rows = [{"image": picture(c), "id": n, "key": 0, "text": f"a {c} square"} for n, c in pairs]
        pq.write_table(pa.Table.from_pylist(rows), part)
    catalogue = opened("a.parquet", "b.parquet")
    assert catalogue.names == ["0", "1", "2", "b.parquet#0", "b.parquet#1", "b.parquet#2"]
    assert_images_are_right(catalogue)


@pytest.mark.parametrize("kept", [0, 2**28], ids=["large row groups", "small row groups"])
def test_parquet_with_hugging_face_images_and_lists_of_captions(monkeypatch, kept):
    monkeypatch.setattr("lapclip.data.formats.parquet.MAX_KEPT", kept)
    monkeypatch.setattr("lapclip.data.formats.parquet.NUM_IMAGES", 2)
    rows = [
        {
            "image": {"bytes": picture(colour), "path": "same.png" if i > 3 else f"{colour}.png"},
            "sentences": [{"raw": f"a {colour} square", "id": 1}, {"raw": "a square", "id": 2}],
            "split": ["train", "train", "val", "restval", "test", "nonsense"][i],
            "label": "warm" if colour in ("red", "orange") else "cold",
        }
        for i, colour in enumerate(COLOURS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet", row_group_size=4)
    catalogue = opened("pairs.parquet")
    assert catalogue.names == ["red.png", "green.png", "blue.png", "white.png", "same.png", "pairs.parquet#6"]
    assert catalogue.captions[2] == ["a blue square", "a square"]
    assert catalogue.sides == ["train", "train", "validation", "train", "test", None]
    assert catalogue.labels == ["warm", "cold", "cold", "cold", "cold", "warm"]
    assert_images_are_right(catalogue)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.list_(pa.string()), pa.binary()], ids=str)
def test_opening_a_parquet_file_reads_only_the_first_images(kind):
    texts = [f"a red square {i}" for i in range(400)]
    captions = pa.array([[text] for text in texts] if pa.types.is_list(kind) else texts, kind)
    table = pa.table({"text": captions, "jpg": [picture("red")] * 400})
    pq.write_table(table, "pairs.parquet", row_group_size=200, use_dictionary=False, compression="none")
    column = pq.read_metadata("pairs.parquet").row_group(1).column(1)
    with open("pairs.parquet", "r+b") as file:
        file.seek(column.data_page_offset)
        file.write(bytes(column.total_compressed_size))
    catalogue = opened("pairs.parquet")
    assert catalogue.captions == [[text] for text in texts]
    assert colour_of(catalogue.reader.read(199)) == (255, 0, 0)
    with pytest.raises(ValueError, match=r"cannot be read from `pairs\.parquet`"):
        catalogue.reader.read(200)
    assert colour_of(catalogue.reader.read(3)) == (255, 0, 0), "the others are still read"


def test_equal_names_in_another_folder_have_another_stamp():
    frame().to_csv("pairs.csv", index=False)
    readers = []
    for folder in ("one", "other"):
        save_images(folder)
        for file in Path(folder).iterdir():
            os.utime(file, (1, 1))
        readers.append(opened("pairs.csv", images=folder).reader)
    assert readers[0].stamp(0) != readers[1].stamp(0)
    name = os.fsdecode(b"r\xe9d.png")  # its stamp can be written
    Path(name).write_bytes(picture("red"))
    FileReader([name]).stamp(0).encode()


@ON_LINUX
def test_images_asked_for_here_and_there_in_turn_are_read_once():
    rows = [{"image": picture("red") + os.urandom(3000), "caption": f"a red square {n}"} for n in range(800)]
    for part in range(2):
        own = pa.Table.from_pylist(rows[400 * part : 400 * part + 400])
        pq.write_table(own, f"{part}.parquet", row_group_size=50, compression="none")
    reader = opened("0.parquet", "1.parquet").reader
    size = sum(os.path.getsize(f"{part}.parquet") for part in range(2))
    order = [start + step for step in range(50) for start in range(0, 800, 50)]
    before = bytes_read()
    assert [reader.read(index) for index in order] == [rows[index]["image"] for index in order]
    assert bytes_read() - before < 3 * size


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_what_is_kept_of_large_row_groups_is_bounded_and_right(monkeypatch):
    monkeypatch.setattr("lapclip.data.formats.parquet.MAX_KEPT", 200_000)
    rows = [{"image": picture("red") + os.urandom(3000), "caption": f"a red square {n}"} for n in range(400)]
    pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet")
    reader = opened("pairs.parquet").reader
    order = [*range(399, -1, -7), *range(0, 400, 3), 399, 0]
    assert [reader.read(index) for index in order] == [rows[index]["image"] for index in order]
    assert reader.tables[0].images.num_bytes <= 200_000


BOMB = """
import resource
from pathlib import Path
from lapclip.data.catalogue import Options
from lapclip.data.formats.tables import open_table
from lapclip.machine.hardware import own_peak_bytes
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))  # so that a fault here hurts nobody else
found = open_table([Path("bomb.parquet")], "bomb.parquet", Options())
print(len(found.names), sum(len(found.reader.read(index)) for index in (0, 7, len(found.names) - 1)))
print(found.problems.counts.total(), own_peak_bytes())
"""


@pytest.mark.slow
@ON_LINUX
@pytest.mark.parametrize("column", ["image", "caption", "captions", "category"])
def test_a_small_file_that_unpacks_to_gigabytes_is_read_in_little_memory(column):
    num_rows, num_good, large = 300, 150, 20_000_000
    image = picture("red").ljust(large if column == "image" else 0, b"\0")
    said = ["a red square", "a red square" if column == "image" else "so " * (large // 3)]
    places = pa.array([0] * num_good + [1] * (num_rows - num_good), pa.int32())
    captions = pa.DictionaryArray.from_arrays(places, pa.array(said))
    if column == "captions":
        captions = pa.ListArray.from_arrays(pa.array(range(num_rows + 1), pa.int32()), captions)
    images = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([image]))
    table = {"id": [f"{n}.png" for n in range(num_rows)], "image": images, "caption": captions}
    pq.write_table(pa.table(table), "bomb.parquet", compression="zstd", store_schema=column == "category")
    assert os.path.getsize("bomb.parquet") < 30_000
    done = subprocess.run([sys.executable, "-c", BOMB], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    num_found, num_bytes, num_problems, peak = map(int, done.stdout.split())
    assert peak < 1.2e9, f"{peak / 1e9:.1f} GB"
    assert num_bytes == 3 * len(image)
    num_bad = 0 if column == "image" else num_rows - num_good
    assert num_found == num_rows - num_bad and num_problems >= num_bad


@pytest.mark.parametrize("form", ["text", "objects"])
def test_many_rows_in_one_row_group_are_read_soon(form):
    texts = [f"a red square, number {n}" for n in range(30_000)]
    cells = texts if form == "text" else [[{"raw": text, "id": 1}] for text in texts]
    pq.write_table(pa.table({"image": ["red.png"] * 30_000, "caption": cells}), "pairs.parquet")
    save_images(".")
    started = time.process_time()
    assert found("pairs.parquet") == {"red.png": texts}
    assert time.process_time() - started < 5


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_broken_parquet_file_is_named(damage):
    frame().to_parquet("pairs.parquet")
    whole = Path("pairs.parquet").read_bytes()
    Path("pairs.parquet").write_bytes({"cut": whole[:-20], "empty": b"", "text": b"hello, world"}[damage])
    with pytest.raises(UserError, match=r"cannot be read: it is no Parquet file.*`pairs.parquet`"):
        opened("pairs.parquet")
    save_images()
    Path("b.parquet").write_bytes(whole)
    assert found("pairs.parquet", "b.parquet", "gone.parquet") == as_pairs(), "it does not stop the others"
    assert opened("pairs.parquet", "b.parquet", "gone.parquet").problems.counts.total() == 2


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("words", ["a plain square", "東京の夜景と赤い四角"])
def test_columns_are_found_by_content_alone(header, words):
    save_images()
    rows = [(i, "x", words, 0.5, name) for i, (name, _) in enumerate(PAIRS)]
    pd.DataFrame(rows, columns=list("abcde")).to_csv("pairs.csv", index=False, header=header)
    assert found("pairs.csv") == {name: [words] for name, _ in PAIRS}


@pytest.mark.parametrize(
    ("column", "other", "text"),
    [
        ("title", "photographer", "anna maria schmidt of berlin"),
        ("alt", "license", "Creative Commons Attribution Share Alike 4.0"),
        ("name", "location", "the old harbour in Hamburg, {}"),
        ("titel", "bemerkung", ""),
        ("Beschreibung", "title", "no. {}"),
    ],
)
def test_captions_tell_images_apart_and_which_column_has_them_is_said(column, other, text):
    save_images()
    table = frame().rename(columns={"caption": column})
    table[other] = [text.format(number) for number in range(len(table))]
    if not text:
        table.loc[::2, other] = "a long remark that only every second image has, and no caption"
    table.to_csv("pairs.csv", index=False)
    assert found("pairs.csv") == as_pairs() and opened("pairs.csv").guessed_column == column
    assert opened("pairs.csv", caption_column=column).guessed_column is None
    assert opened("pairs.csv").columns == {"image": "image", "caption": column}


def test_columns_are_found_by_name_and_those_that_a_person_names_are_used_or_missed():
    save_images()
    table = (
        frame().rename(columns={"image": "File Name", "caption": "ALT_TEXT"}).assign(thumbnail="thumb.png")
    )
    table.insert(0, "story", "once upon a time there was a long text that is no caption of anything")
    table.to_csv("pairs.csv", index=False)
    assert found("pairs.csv") == as_pairs()
    table = frame().assign(other="another text of some length", thumbnail="red.png")
    table.to_csv("pairs.csv", index=False)
    captions = found("pairs.csv", caption_column="Other", image_column="thumbnail")
    assert list(captions) == ["red.png"] and set(captions["red.png"]) == {"another text of some length"}
    with pytest.raises(UserError, match=r"no column `captoin`; it has `image`, .*; did you mean `caption`\?"):
        opened("pairs.csv", caption_column="captoin")
    with pytest.raises(UserError, match="no column `foto`") as error:
        opened("pairs.csv", image_column="foto")
    assert "--image-column" in error.value.hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a,b\n1,2\n3,4\n", "images or captions"),
        ("a,b\n1.jpg,2\n3.jpg,4\n", "captions"),
        ("a,b\nsome text,2\nmore text,4\n", "images"),
    ],
)
def test_a_table_without_images_or_captions_says_what_it_has(text, what):
    with pytest.raises(UserError, match=f"seems to hold {what}; it has `a`, `b`"):
        opened(write(text))


@pytest.mark.parametrize("text", ["", "\n\n", "image,caption\n", "\ufeff"])
def test_an_empty_table_is_an_error(text):
    with pytest.raises(UserError, match="has no rows"):
        opened(write(text))


def test_short_rows_and_lines_in_another_encoding_are_counted_and_named():
    save_images()
    lines = [
        "image,caption",
        "red.png,café",
        "blue.png,café noir",
        "green.png,東京",
        "",
        "white.png",
        ",lost",
    ]
    data = [line.encode("cp1252" if i == 2 else "utf-8") for i, line in enumerate(lines)]
    Path("pairs.csv").write_bytes(b"\n".join(data))
    assert found("pairs.csv") == {"red.png": ["café"], "blue.png": ["café noir"], "green.png": ["東京"]}
    assert mistakes("pairs.csv") == {
        "is not UTF-8; read as Windows-1252": ["pairs.csv:row 3"],
        "has 1 of 2 columns": ["pairs.csv:row 6"],
        "has no image": ["pairs.csv#7"],
    }


@pytest.mark.parametrize("quote", ['"', ""])
@pytest.mark.parametrize("num_rows", [3, 2_500])
@pytest.mark.parametrize("at", [1, 2])
def test_a_quote_that_is_not_closed_costs_no_other_row(num_rows, at, quote):
    save_images()
    lines = ["image,caption", *(f"red.png,{quote}number {i}, quoted{quote}" for i in range(num_rows))]
    lines[at] = 'blue.png,"a blue one'
    name = write("\n".join(lines) + "\n")
    captions = found(name)
    assert captions["blue.png"] == ["a blue one"] and len(captions["red.png"]) == num_rows - 1
    assert list(opened(name).problems.names.values()) == [[f"pairs.csv:row {at + 1}"]]


def test_a_table_made_to_be_read_again_and_again_is_read_soon():
    save_images()
    hostile = '"a,z"w,"v'  # leaves a quote open, however the line before ended
    good = [f"red.png,number {i}" for i in range(5)]
    captions = found(write("\n".join(["image,caption", *good, *[hostile] * 20_000, "blue.png,a blue one"])))
    assert len(captions["red.png"]) == 5 and captions["blue.png"] == ["a blue one"]


def test_huge_cells_and_lines_are_no_end(monkeypatch):
    save_images()
    monkeypatch.setattr("lapclip.data.formats.text_rows.MAX_LINE", 3 * 2**20)
    rows = [f"red.png,{'word ' * 200_000}", f"blue.png,{'x' * 4 * 2**20}", "green.png,a green one"]
    name = write("\n".join(["image,caption", *rows]))
    captions = found(name)
    assert list(captions) == ["red.png", "green.png"] and len(captions["red.png"][0]) == 10_000
    assert "pairs.csv:row 3" in mistakes(name)["has a line of more than 64 MB"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_nul_bytes_and_stray_returns_are_blanks(encoding):
    save_images()
    text = "image,caption\nred.png,a\0red\rone\nblue.png,\u0a0a\u010a blue\nx\0y.png,none\n"
    write(text, encoding=encoding)
    assert found("pairs.csv") == {"red.png": ["a red one"], "blue.png": ["\u0a0a\u010a blue"]}
    assert len(mistakes("pairs.csv")["has no file name"]) == 1


def test_nothing_outside_the_folder_is_read():
    Path("secret.png").write_bytes(picture("red"))
    Path("inside").mkdir()
    (Path("inside") / "own.png").write_bytes(picture("blue"))
    (Path("inside") / "link.png").symlink_to(Path("secret.png").absolute())
    outside = ["../secret.png", str(Path("secret.png").absolute()), "link.png", "..\\secret.png"]
    inside = ["own.png", str(Path("inside/own.png").absolute())]
    write("".join(f"{name},an image of something\n" for name in inside + outside), "inside/pairs.csv")
    catalogue = opened("inside/pairs.csv")
    assert catalogue.names == inside
    assert catalogue.problems.names["lies outside the source's folder"] == outside[:3]
    assert catalogue.problems.names["is missing"] == outside[3:]


def test_a_folder_that_is_a_link_is_followed_only_when_it_is_named():
    save_images("elsewhere")
    Path("inside").mkdir()
    (Path("inside") / "images").symlink_to(Path("elsewhere").absolute())
    frame().to_csv("inside/pairs.csv", index=False)
    with pytest.raises(UserError) as error:
        opened("inside/pairs.csv")
    assert "--images" in error.value.hint
    assert found("inside/pairs.csv", images="elsewhere") == as_pairs()
    assert found("inside/pairs.csv", images="images") == as_pairs()


@pytest.mark.parametrize("folder", [".", "images", "img", "my own images"])
def test_images_are_found_in_a_folder_beside_the_table(folder):
    save_images(folder)
    save_images("thumbnails")
    frame().to_csv("pairs.csv", index=False)
    assert found("pairs.csv") == as_pairs()


def test_names_without_suffix_or_with_backslashes_are_found_and_missing_images_counted_once_each():
    save_images()
    write("ID,Caption\nred,a red one\nimages\\blue.png,a blue one\n", "pairs.csv")
    assert found("pairs.csv") == {"red": ["a red one"], "images\\blue.png": ["a blue one"]}
    name = write("image,caption\nred.png,one\ngone.png,two\ngone.png,three\nhttps://x.org/a.png,four\n")
    assert mistakes(name) == {
        "is missing": ["gone.png"],
        "is a web address, and nothing is downloaded": ["https://x.org/a.png"],
    }


def test_when_all_images_are_missing_the_folder_is_asked_for():
    Path("far/away").mkdir(parents=True)
    save_images("far/away/deep")
    frame().to_csv("pairs.csv", index=False)
    with pytest.raises(UserError, match=r"none of the 6 images listed in `pairs.csv`.*`red.png` is") as error:
        opened("pairs.csv")
    assert "--images FOLDER" in error.value.hint
    assert found("pairs.csv", images="far/away/deep") == as_pairs()
    with pytest.raises(UserError, match="`nowhere` is not a folder"):
        opened("pairs.csv", images="nowhere")


@pytest.mark.parametrize("column", ["image", "IMAGE_URL"])
def test_web_addresses_are_not_downloaded(column):
    write(f"{column},caption\nhttps://x.org/1.jpg,one thing\nhttp://x.org/2,two things\n")
    with pytest.raises(UserError, match=r"URLs, such as `https://x\.org/1\.jpg`") as error:
        opened("pairs.csv")
    assert "img2dataset" in error.value.hint


def test_split_and_class_columns_are_kept_and_files_used_rather_than_addresses():
    save_images()
    sides = ["Train", "val", "test", "dev", "restval", ""]
    table = frame().assign(split=sides, label=["a", "b"] * 3, url="https://x.org/1.jpg")
    table.to_csv("pairs.csv", index=False)
    catalogue = opened("pairs.csv")
    assert catalogue.sides == ["train", "validation", "test", "validation", "train", None]
    assert catalogue.labels == ["a", "b"] * 3


def test_a_class_that_each_image_has_alone_is_none_and_is_the_caption_when_there_is_no_other():
    save_images()
    rows = [(f"{i}.png", f"a number {i}", f"label {i}") for i in range(50)]
    for name, _, _ in rows:
        Path("images", name).write_bytes(b"x")
    pd.DataFrame(rows, columns=["image", "caption", "label"]).to_csv("pairs.csv", index=False)
    assert set(opened("pairs.csv").labels) == {None}
    write("image,label,score\nred.png,cat,1\nblue.png,dog,2\n")
    assert found("pairs.csv") == {"red.png": ["cat"], "blue.png": ["dog"]}


def test_an_image_whose_table_has_changed_is_an_error_in_words():
    text = base64.b64encode(picture("red")).decode()
    write("\n".join(json.dumps({"image": text, "caption": f"number {i}"}) for i in range(3)), "pairs.jsonl")
    catalogue = opened("pairs.jsonl")
    stamp = catalogue.reader.stamp(2)
    write("{}\n" * 3, "pairs.jsonl")
    with pytest.raises(ValueError, match="has changed"):
        catalogue.reader.read(0)
    assert catalogue.reader.stamp(2) != stamp
    Path("pairs.jsonl").unlink()
    assert catalogue.reader.stamp(2) == ""


def test_json_captions_may_be_lists_objects_and_numbers_and_broken_lines_are_counted():
    save_images()
    rows = [
        {"image": "red.png", "captions": ["one", "two"]},
        {"image": "blue.png", "captions": [{"raw": "three", "tokens": ["three"]}, {"raw": "four"}]},
        {"image": {"path": "green.png", "bytes": None}, "captions": 7},
        {"other": 1, "image": "white.png", "captions": "five"},
        {"image": "black.png", "captions": None},
        {"image": "\ud800.png", "captions": "x"},
    ]
    lines = list(map(json.dumps, rows))
    lines[2:2] = ["{broken", "[1]", f'{{"image": "x.png", "captions": {"[" * 100_000}', "", '"text"']
    name = write("\n".join(lines), "pairs.jsonl")
    assert found(name) == {
        "red.png": ["one", "two"], "blue.png": ["three", "four"], "green.png": ["7"], "white.png": ["five"],
    }  # fmt: skip
    assert mistakes(name) == {
        "is not a JSON object": [f"pairs.jsonl:row {row}" for row in (3, 4, 5, 7)],
        "has an empty caption": ["black.png"],
        "is missing": ["?.png"],
    }, "each is told once"


@pytest.mark.parametrize("end", ["", ", ", ', {"image": "blue', f", {'[' * 100_000}", "] and more"])
def test_a_json_array_is_read_in_bounded_memory_up_to_where_it_is_damaged(end, monkeypatch):
    monkeypatch.setattr("lapclip.data.formats.text_rows.MAX_LINE", 2**17)
    save_images()
    rows = [
        json.dumps({"image": name, "caption": caption, "more": "ä" * 50_000}, ensure_ascii=False)
        for name, caption in PAIRS
    ]
    rows[1] = rows[1].encode().replace(b"green square", b"gr\xfcn").decode(errors="surrogateescape")
    Path("pairs.json").write_bytes(f"[{', 7, '.join(rows)}{end}".encode(errors="surrogateescape"))
    assert found("pairs.json", format="jsonl") == as_pairs() | {"green.png": ["a grün, plain"]}
    damaged = [*range(2, 11, 2)] + [12] * (not end.startswith("]"))
    assert mistakes("pairs.json")["is not a complete JSON object"] == [
        f"pairs.json:row {row}" for row in damaged
    ]


def test_commas_and_blanks_that_were_not_quoted_stay_in_the_caption():
    save_images()
    for head, row in [
        ("image,caption", "{0},{1}"),
        ("caption,image", "{1},{0}"),
        ("n,image,caption", "1,{0},{1}"),
        ("red.png,a first one", "{0},{1}"),  # without a header
    ]:
        write("\n".join([head, *(row.format(*pair) for pair in PAIRS)]))
        assert {name: captions[-1:] for name, captions in found("pairs.csv").items()} == as_pairs()
    name = write('image, caption\nred.png, "a red, red square"\nblue.png, "a blue ""square"""\n')
    assert found(name) == {"red.png": ["a red, red square"], "blue.png": ['a blue "square"']}
    assert found(write("image,caption\nred.png,a red square,,\n")) == {"red.png": ["a red square"]}


def test_a_table_in_parts_is_one_table_with_the_sides_of_the_lists_beside_it():
    save_images()
    for part in (0, 1, 2):
        frame()[2 * part : 2 * part + 2].to_csv(f"part-{part}.csv", index=False)
    write("something,else\nred.png,other\n", "part-3.csv")
    write("images/red.png\r\ngreen.png\n", "Flickr_8k.testImages.txt")
    write("red.png\nblue.png\n", "dev.txt")
    write("".join(f"other{i}.png\n" for i in range(9)) + "white.png\n", "train.txt")  # of another dataset
    os.mkfifo("test.txt")
    catalogue = opened(*(f"part-{part}.csv" for part in range(4)))
    assert dict(zip(catalogue.names, catalogue.captions, strict=True)) == as_pairs()
    assert catalogue.problems.names == {"has other columns than the part before it": ["part-3.csv"]}
    assert catalogue.sides == ["test", "test", "validation", None, None, None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("image,caption\nred.png,a red square\n", True),
        ("image_name| comment_number| comment\nred.png| 0| a red square\n", True),
        ("red.png#0\tA red square .\nred.png#1\tRed .\n", True),
        ('{"image": "red.png", "text": "a red one"}\n{"image": "blue.png", "text": "a blue one"}', True),
        ("red.png,a red, red square\nblue.png,a blue square\n", True),
        ("", False),
        ("A red square, plain.\nAnother, of red.\nA third; red | plain, too.\n", False),
        ("images/red.png\nimages/blue.png", False),
        ("red.png,0\nblue.png,1\n", False),
        ("From photo.jpg, a red square", False),
        ("\0\0\0\1", False),
    ],
)
def test_text_is_a_table_if_it_names_images_and_says_something_of_each(text, expected):
    assert looks_like_table(Path(write(text, "captions.txt"))) is expected


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_that_maps_images_to_captions_is_read_as_its_file_and_as_its_folder(indent):
    from lapclip.data.formats.detect import open_catalogue

    save_images("set")
    images = sorted(os.listdir("set"))
    mapping = {name: f"image {name}" for name in images} | {images[0]: ["one", "two, \u00fc"]}
    Path("set/captions.json").write_text(json.dumps(mapping, indent=indent))
    for source in ("set", "set/captions.json"):
        catalogue = open_catalogue(source, Options())[0]
        expected = {
            name: [caption] if isinstance(caption, str) else caption for name, caption in mapping.items()
        }
        assert dict(zip(catalogue.names, catalogue.captions, strict=True)) == expected
    Path("set/captions.json").write_text(json.dumps(mapping, indent=indent)[:-5])
    assert "complete JSON object" in str(mistakes("set/captions.json")), "what is cut off is named"
    Path("set/captions.json").write_text('{"red.png": "a", "blue.png": "b"}\n{"green.png": "c"}')
    assert "complete JSON object" in str(mistakes("set/captions.json")), "and what follows"


def test_a_json_that_is_not_understood_is_named_with_the_form_that_is_expected():
    from lapclip.data.formats.detect import open_catalogue

    save_images("set")
    Path("set/data.json").write_text('{"images": [{"name": "red.png", "meta": {"text": "a red image"}}]}')
    with pytest.raises(UserError, match=r'`data.json` was expected to be `\{"cat.jpg": "a cat"'):
        open_catalogue("set", Options())


def test_names_from_another_computer_are_found_below_the_folder_of_images_and_nowhere_else():
    os.makedirs("other/deep")
    for name in ("here.png", "deep/there.PNG", "Twice.png", "twice.PNG"):
        Path("other", name).write_bytes(picture("red"))
    Path("secret.png").write_bytes(picture("blue"))
    rows = [r"C:\Users\me\here.png,a", "/home/me/deep/There.png,b", f"{Path('secret.png').absolute()},c",
            "../secret.png,d", "TWICE.PNG,e"]  # fmt: skip
    os.mkdir("tables")
    table = write("\n".join(["image,caption", *rows]), "tables/pairs.csv")
    catalogue = opened(table, images="other")
    paths = [os.path.relpath(path, "other") for path in catalogue.reader.paths]
    assert paths == ["here.png", "deep/there.PNG"] and catalogue.captions == [["a"], ["b"]]
    with pytest.raises(UserError) as refused:
        opened(table, images="tables")
    assert "--images FOLDER" not in refused.value.hint, "which was done"
