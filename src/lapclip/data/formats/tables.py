"""Tables of images and captions: CSV of any kind, JSONL, Parquet, Flickr's own and Arrow, through one interface.

A `Table` yields rows, and reads the image cell of one row; `gather` turns the rows of all tables into a catalogue.
"""

import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from lapclip.data.catalogue import Catalogue, Gathering, Options, Problems, Side
from lapclip.data.files import Folders, Problem, file_stamp, read_file
from lapclip.data.formats.columns import (
    CAPTIONS,
    NUM_SAMPLED,
    Columns,
    Table,
    captions_in,
    find_columns,
    guess_caption,
    guess_image,
    image_bytes,
    image_name,
    is_image,
    most,
    plain,
    side_in,
)
from lapclip.data.formats.folder import find_image, folders_with
from lapclip.data.formats.names import short_names
from lapclip.data.formats.parquet import ImageCells, ParquetTable, open_parquet
from lapclip.data.formats.text_rows import TextTable, look_at_text
from lapclip.errors import UserError, reason_for
from lapclip.files import open_regular

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".token.txt", ".token")
MAX_KEY = 300  # characters of what an image is called
# Lists of images beside a table, one name a line. Test sets come first, so that no image of one is trained on.
LISTS: dict[str, Side] = {
    "test.txt": "test", "flickr_8k.testimages.txt": "test",
    "dev.txt": "validation", "val.txt": "validation", "validation.txt": "validation",
    "flickr_8k.devimages.txt": "validation",
    "train.txt": "train", "flickr_8k.trainimages.txt": "train",
}  # fmt: skip
MAX_LIST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class CellReader:
    """Images in cells of tables, each read from its row when it is asked for, or in files that the rows name."""

    tables: list[Table]
    columns: Columns
    paths: list[str]  # empty for images in cells
    parts: "array[int]"  # for each image, the table; in quotes: before Python 3.12 an array has no such type
    places: "array[int]"  # and where its row is

    def read(self, index: int) -> bytes:
        if path := self.paths[index]:
            return read_file(path)
        return image_bytes(self.tables[self.parts[index]].cell(self.columns, self.places[index]))

    def stamp(self, index: int) -> str:
        if path := self.paths[index]:
            return file_stamp(path)
        known = self.tables[self.parts[index]].state()
        return known and f"{known} {self.columns.image!a} {self.places[index]}"


def looks_like_table(path: Path) -> bool:
    """Whether a text file of unknown format names images and says something about each, in several rows."""
    try:
        table = look_at_text(path, None, max_bytes=2**16)
        rows = table.sample()
    except (OSError, ValueError):
        return False
    if len(table.names) < 2 or len(rows) + table.has_header < 2:
        return False
    cells = {name: [row[i] for row in rows if i < len(row)] for i, name in enumerate(table.names)}
    image = guess_image(cells)
    return image is not None and most(cells.pop(image), is_image) and guess_caption(cells) is not None


def open_table(files: list[Path], name: str, options: Options) -> Catalogue:
    """The images and captions of a table in one file, or in parts that lie in one folder."""
    gathering, images = Gathering(), ImageCells()
    opened: list[TextTable | ParquetTable] = []
    for path in files:
        try:
            opened.append(look_at(path, options.format, images))
        except (OSError, ValueError) as error:
            gathering.problems.add("unreadable", f"cannot be read: {reason_for(error)}", str(path))
    tables, columns = same_columns(opened, name, options, gathering.problems)
    if columns is None:
        return gathering.catalogue(name, "csv")  # says what is wrong
    folder = os.path.dirname(os.path.abspath(files[0]))
    folders, is_asked = image_folders(tables[0], columns, folder, options), options.images is not None
    if is_asked:
        gathering.hint = f"pass another folder: no image of any of these names is in `{options.images}`"
    reader = gather(tables, columns, gathering, partial(find_image, folders, is_asked=is_asked))
    if columns.side is None:
        set_sides(gathering, folder)
    catalogue = gathering.catalogue(name, tables[0].format, reader)
    if options.caption_column is None and plain(columns.caption) not in CAPTIONS:
        catalogue.guessed_column = columns.caption
    return catalogue


def look_at(path: Path, format: str | None, images: ImageCells) -> TextTable | ParquetTable:
    """How a file is written; `format` forces it."""
    with open_regular(path) as file:
        is_parquet = file.read(4) == b"PAR1"
    if format == "parquet" or (format is None and (is_parquet or path.suffix.lower() == ".parquet")):
        with open_parquet(path) as parquet:
            return ParquetTable(path, tuple(parquet.schema_arrow.names), images)
    if format is None and path.suffix.lower() in (".jsonl", ".ndjson"):
        format = "jsonl"
    return look_at_text(path, format)


def same_columns(
    tables: Sequence[Table], source: str, options: Options, problems: Problems
) -> tuple[list[Table], Columns | None]:
    """The tables that are parts of one, and the columns that are read, found in the first with rows."""
    parts: list[Table] = []
    columns = None
    for table in tables:
        if columns is None:
            try:
                rows = table.sample()
            except (OSError, ValueError) as error:
                problems.add("unreadable", f"cannot be read: {error}", table.label)
                continue
            if not rows:
                problems.add("unreadable", "has no rows", table.label)
                continue
            columns = find_columns(table.names, rows, source, options)
        elif (table.format == "parquet") != (parts[0].format == "parquet"):
            problems.add("skipped", "is not in the format of the part before it", table.label)
            continue
        elif not {columns.image, columns.caption} <= set(table.names):
            problems.add("skipped", "has other columns than the part before it", table.label)
            continue
        parts.append(table)
    return parts, columns


def gather(
    tables: Sequence[Table], columns: Columns, gathering: Gathering, find: Callable[[str], str | Problem]
) -> CellReader | None:
    """Adds the rows of all tables; returns a reader unless all images are files."""
    find = lru_cache(maxsize=None)(find)
    parts, places = array("i"), array("q")
    labels = short_names([table.label for table in tables])
    for part, (table, label) in enumerate(zip(tables, labels, strict=True)):
        rows = table.rows(columns, gathering.problems)
        for number, place, image, has_data, caption, split, group, key in rows:
            captions = captions_in(caption) or [""]
            side = side_in(split) or table.side
            class_name = " ".join(captions_in(group))[:200] or None
            if has_data:
                row_name = table.row_name(label, number)
                name = data_name(image, image_name(key), label, row_name, part, gathering.index, parts)
                gathering.add(name, captions, side=side, label=class_name)
            elif name := image_name(image):
                gathering.add_file(name, find(name), captions, side=side, label=class_name)
            else:
                gathering.problems.add("incomplete", "has no image", table.row_name(label, number))
            if len(parts) < len(gathering.paths):
                parts.append(part)
                places.append(place)
    gathering.columns = {"image": columns.image, "caption": columns.caption}
    gathering.drop_single_labels()
    return None if all(gathering.paths) else CellReader(list(tables), columns, gathering.paths, parts, places)


def data_name(
    image: Any, key: str, label: str, row_name: str, part: int, numbers: dict[str, int], parts: Sequence[int]
) -> str:
    """What an image in a row is called: by its key, which counts in its own file only, by its path or by its row."""
    for name in (key, f"{label}#{key}") if 0 < len(key) <= MAX_KEY else ():
        if name not in numbers or parts[numbers[name]] == part:
            return name
    name = image_name(image) if isinstance(image, dict) else ""
    if not name or name in numbers:
        name = row_name
    while name in numbers:
        name += "+"
    return name


def image_folders(table: Table, columns: Columns, folder: str, options: Options) -> Folders:
    """The folders that names are looked for in."""
    if options.images is not None:
        for named in (options.images, os.path.join(folder, options.images)):
            if os.path.isdir(named):
                return Folders(named, folder)
        raise UserError(f"`{options.images}` is not a folder", hint="pass the folder of images as `--images`")
    rows = islice(table.rows(columns, Problems()), NUM_SAMPLED if columns.kind == "path" else 0)
    names = dict.fromkeys(filter(None, (image_name(row[2]) for row in rows)))
    return Folders(*folders_with([folder], list(names)))


def set_sides(gathering: Gathering, folder: str) -> None:
    """Sides by the lists beside a table that says nothing itself; a list of mostly unknown names is none."""
    images = [os.path.basename(name) for name in gathering.index]
    known, sides = set(images), dict[str, Side]()
    own, beside = Folders(folder), {file.lower(): file for file in os.listdir(folder)}
    for list_name, side in LISTS.items():
        found = own.find(beside.get(list_name, list_name))
        if isinstance(found, str):
            with suppress(OSError), open_regular(found) as file:
                text = file.read(MAX_LIST_BYTES).decode("utf-8-sig", "replace").replace("\\", "/")
                names = [os.path.basename(line) for line in map(str.strip, text.splitlines()) if line]
                if sum(name in known for name in names) > len(names) / 2:
                    sides = dict.fromkeys(names, side) | sides
    for number, name in enumerate(images):
        gathering.sides[number] = gathering.sides[number] or sides.get(name)
