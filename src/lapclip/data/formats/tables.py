"""Tables of images and captions: CSV of any kind, JSONL, Parquet, and Flickr's own; in one file or in parts."""

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lapclip.data.catalogue import SIDES, Catalogue, Gathering, Options, Problems, Side
from lapclip.data.files import FileReader, Folders, is_image_name, open_regular
from lapclip.data.formats.columns import (
    WEB,
    Columns,
    captions_in,
    find_columns,
    guess_caption,
    guess_image,
    image_name,
    is_image,
    share,
    side_name,
)
from lapclip.data.formats.folder import folders_in
from lapclip.data.formats.layout import MOST_SAMPLED, NUM_SAMPLED, Layout, look_at_text
from lapclip.data.formats.parquet import ParquetReader, look_at_parquet, parquet_rows, sample_parquet
from lapclip.data.formats.splits import split_lists
from lapclip.data.formats.text_rows import Row, RowReader, text_rows
from lapclip.errors import UserError, shortened

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".token.txt", ".token")
FOLDERS = ("images", "Images", "img", "flickr30k_images", "Flicker8k_Dataset")
MOST_CLASSES = 10_000
MOST_KEY = 300  # characters of what an image is called
ENDINGS = (".jpg", ".png", ".jpeg", ".webp")  # tried for a name without one


@dataclass(frozen=True)
class Part:
    """One file of a table."""

    path: Path
    layout: Layout
    columns: Columns

    def index(self, name: str | None) -> int | None:
        return self.layout.names.index(name) if name in self.layout.names else None


class Cells(NamedTuple):
    """What one row says."""

    part: int
    number: int
    place: int
    length: int
    picture: Any
    caption: Any
    side: Side | None
    label: str | None
    key: str


def is_table_name(name: str) -> bool:
    """Whether a file is a table by its name alone."""
    return name.lower().endswith(SUFFIXES)


def looks_like_table(path: Path) -> bool:
    """Whether a text file of unknown kind names images and says something about each, in several rows."""
    try:
        layout = look_at_text(path, None, most_bytes=2**16)
        rows = sample(path, layout)
    except (OSError, ValueError):
        return False
    if len(layout.names) < 2 or len(rows) + (layout.header > 0) < 2:
        return False
    cells = {name: [row[i] for row in rows if i < len(row)] for i, name in enumerate(layout.names)}
    picture = guess_image(cells)
    if picture is None or share(cells.pop(picture), is_image) <= 0.5:
        return False
    return guess_caption(cells) is not None


def open_table(files: list[Path], name: str, options: Options) -> Catalogue:
    """The images and captions of a table."""
    gathering = Gathering()
    parts = open_parts(files, name, options, gathering.problems)
    if not parts:
        return gathering.catalogue(name, "csv", FileReader([]))  # says what is wrong
    rows = all_cells(parts, gathering.problems)
    reader: FileReader | RowReader | ParquetReader
    if parts[0].columns.kind == "data":
        reader = gather_data(rows, parts, gathering)
    else:
        reader = gather_files(rows, picture_folders(parts, options), gathering, name)
    if parts[0].columns.side is None:
        set_sides(gathering, {part.path.parent for part in parts})
    forget_single_labels(gathering)
    return gathering.catalogue(name, parts[0].layout.format, reader)


def open_parts(files: list[Path], source: str, options: Options, problems: Problems) -> list[Part]:
    """The files that are parts of one table; the first of them says which columns are read."""
    parts: list[Part] = []
    for path in files:
        try:
            layout = look_at(path, options.format)
            rows = [] if parts else sample(path, layout)
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            problems.add(f"cannot be read: {what}", str(path))
            continue
        if not parts and not rows:
            problems.add("has no rows", str(path))
            continue
        columns = parts[0].columns if parts else find_columns(layout.names, rows, source, options)
        if parts and (layout.format == "parquet") != (parts[0].layout.format == "parquet"):
            problems.add("is not of the same kind as the part before it", str(path))
        elif not {columns.picture, columns.caption} <= set(layout.names):
            problems.add("has other columns than the part before it", str(path))
        else:
            layout = replace(layout, caption=layout.names.index(columns.caption))
            parts.append(Part(path, layout, columns))
    return parts


def look_at(path: Path, format: str | None) -> Layout:
    """How a file is written; `format` forces it."""
    with open_regular(path) as file:
        is_parquet = file.read(4) == b"PAR1"
    if format == "parquet" or (format is None and (is_parquet or path.suffix.lower() == ".parquet")):
        return look_at_parquet(path)
    if format is None and path.suffix.lower() in (".jsonl", ".ndjson"):
        format = "jsonl"
    return look_at_text(path, format)


def sample(path: Path, layout: Layout) -> list[list[Any]]:
    """The first rows of a file."""
    if layout.format == "parquet":
        return sample_parquet(path)
    rows, size = [], 0
    for _, _, length, cells in islice(text_rows(path, layout, Problems()), NUM_SAMPLED):
        rows.append(cells)
        size += length
        if size > MOST_SAMPLED:
            break
    return rows


def part_rows(part: Part, problems: Problems) -> Iterator[Row]:
    if part.layout.format != "parquet":
        return text_rows(part.path, part.layout, problems)
    columns = part.columns
    used = (columns.picture, columns.caption, columns.side, columns.label, columns.key)
    wanted = {name for name in part.layout.names if name in used}
    unread = columns.picture if columns.kind == "data" else None
    return parquet_rows(part.path, part.layout, problems, wanted=wanted, unread=unread)


def all_cells(parts: list[Part], problems: Problems) -> Iterator[Cells]:
    """The rows of all parts that have an image and a caption column."""
    for which, part in enumerate(parts):
        columns, num_columns = part.columns, len(part.layout.names)
        picture, caption = part.layout.names.index(columns.picture), part.layout.names.index(columns.caption)
        side, label, key = part.index(columns.side), part.index(columns.label), part.index(columns.key)
        for number, place, length, cells in part_rows(part, problems):
            if len(cells) <= max(picture, caption):
                problems.add(f"has {len(cells)} of {num_columns} columns", f"{part.path.name}:row {number}")
                continue
            cells.extend([None] * (num_columns - len(cells)))
            yield Cells(
                which,
                number,
                place,
                length,
                cells[picture],
                cells[caption],
                None if side is None else SIDES.get(side_name(cells[side])),
                None if label is None else " ".join(captions_in(cells[label]))[:200] or None,
                "" if key is None else image_name(cells[key]),
            )


def gather_files(rows: Iterator[Cells], folders: Folders, gathering: Gathering, source: str) -> FileReader:
    """Images by the files that the rows name, each looked for once."""
    paths: list[str] = []
    missing: dict[str, str] = {}
    for row in rows:
        name = image_name(row.picture)
        if name in missing:
            continue
        if name not in gathering.index:
            path, why = find_image(folders, name)
            if path is None:
                missing[name] = why
                gathering.problems.add(why, name)
                continue
            paths.append(path)
        gathering.add(name, captions_in(row.caption) or [""], side=row.side, label=row.label)
    if missing and not paths:
        name, why = next(iter(missing.items()))
        raise UserError(
            f"none of the {len(missing):,} images that `{source}` names can be used; `{shortened(name)}` {why}",
            hint="pass the folder that they are in with `--images FOLDER`",
        )
    return FileReader(paths)


def find_image(folders: Folders, name: str) -> tuple[str | None, str]:
    """An image's file, also if its name was written on Windows or without a suffix."""
    if not name:
        return None, "names no image"
    if name[:10].lower().startswith(WEB):
        return None, "is a web address, and nothing is downloaded"
    path, why = folders.find(name)
    others = [name.replace("\\", "/")] if "\\" in name else []
    if not is_image_name(name):
        others += [other + ending for other in [name, *others] for ending in ENDINGS]
    for other in others:
        if path is None:
            path, _ = folders.find(other)
    return path, why


def picture_folders(parts: list[Part], options: Options) -> Folders:
    """The folders that names are looked for in, the one with most of the first names first."""
    beside = list(dict.fromkeys(part.path.parent for part in parts))
    if options.images is not None:
        given = next(
            (folder for folder in (Path(options.images), beside[0] / options.images) if folder.is_dir()), None
        )
        if given is None:
            raise UserError(
                f"`{options.images}` is not a folder", hint="pass the folder of images as `--images`"
            )
        return Folders(given, *beside)
    cells = islice(all_cells(parts[:1], Problems()), NUM_SAMPLED)
    names = list(dict.fromkeys(filter(None, (image_name(row.picture) for row in cells))))[:20]
    counts = {str(folder): num_found(Folders(folder), names) for folder in beside}
    for folder in beside:
        own = Folders(folder)
        for inner in likely_folders(folder):
            # A link may lead out of the source, which only a person may allow, by `--images`.
            if own.contains(os.path.realpath(inner)) and (count := num_found(Folders(inner), names)):
                counts[inner] = count
    return Folders(*sorted(counts, key=lambda folder: -counts[folder]))


def num_found(folders: Folders, names: list[str]) -> int:
    return sum(find_image(folders, name)[0] is not None for name in names)


def likely_folders(folder: Path) -> list[str]:
    """The folders beside a table, those that images are usually in first."""
    usual = [str(folder / name) for name in FOLDERS if (folder / name).is_dir()]
    return list(dict.fromkeys([*usual, *folders_in(str(folder))]))


def gather_data(rows: Iterator[Cells], parts: list[Part], gathering: Gathering) -> RowReader | ParquetReader:
    """Images that are in the rows themselves: only their places are kept."""
    files, places, lengths = array("i"), array("q"), array("q")
    labels = part_labels([part.path for part in parts])
    is_parquet = parts[0].layout.format == "parquet"
    for row in rows:
        if not is_parquet and not row.picture:
            gathering.problems.add("has no image", f"{labels[row.part]}:row {row.number}")
            continue
        name = data_name(row, labels[row.part], gathering.index, files)
        number = gathering.add(name, captions_in(row.caption) or [""], side=row.side, label=row.label)
        if number == len(files):
            files.append(row.part)
            places.append(row.place)
            lengths.append(row.length)
    paths = [str(part.path.absolute()) for part in parts]
    if is_parquet:
        return ParquetReader(paths, [part.columns.picture for part in parts], files, places)
    columns = [part.layout.names.index(part.columns.picture) for part in parts]
    return RowReader(paths, [part.layout for part in parts], columns, files, places, lengths)


def data_name(row: Cells, label: str, numbers: dict[str, int], files: Sequence[int]) -> str:
    """What an image in a row is called: by its key, which counts in its own file only, or by its row."""
    for name in (row.key, f"{label}#{row.key}") if 0 < len(row.key) <= MOST_KEY else ():
        if name not in numbers or files[numbers[name]] == row.part:
            return name
    name = image_name(row.picture) if isinstance(row.picture, dict) else ""
    if not name or name in numbers:
        name = f"{label}#{row.number}"
    while name in numbers:
        name += "+"
    return name


def part_labels(paths: list[Path]) -> list[str]:
    """Short names of files, all different."""
    if len({path.name for path in paths}) == len(paths):
        return [path.name for path in paths]
    common = os.path.commonpath([path.absolute().parent for path in paths])
    return [os.path.relpath(path.absolute(), common) for path in paths]


def set_sides(gathering: Gathering, folders: Iterable[Path]) -> None:
    """Sides by the lists beside a table that says nothing itself."""
    names = [os.path.basename(name) for name in gathering.index]
    known = set(names)
    for folder in folders:
        if sides := split_lists(folder, known):
            for number, name in enumerate(names):
                gathering.sides[number] = gathering.sides[number] or sides.get(name)


def forget_single_labels(gathering: Gathering) -> None:
    """A column of classes has few; one that says something else of each image holds none."""
    num_classes = len(set(gathering.labels) - {None})
    if num_classes > max(20, min(len(gathering.labels) // 5, MOST_CLASSES)):
        gathering.labels = [None] * len(gathering.labels)
