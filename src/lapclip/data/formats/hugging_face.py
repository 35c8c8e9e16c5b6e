"""Datasets of Hugging Face, from the hub or a local copy; rows stay in Arrow files and nothing in them is ever run.

Columns are read as Arrow keeps them, so that no image is decoded here.
"""

import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lapclip.data.catalogue import SIDES, Catalogue, Gathering, Options, Side
from lapclip.data.files import Folders, file_stamp, read_file
from lapclip.data.formats.columns import (
    Columns,
    captions_in,
    find_columns,
    image_bytes,
    image_name,
    named,
    side_name,
)
from lapclip.data.formats.hub import load_splits
from lapclip.data.formats.layout import MOST_SAMPLED, NUM_SAMPLED
from lapclip.data.formats.tables import find_image, forget_single_labels
from lapclip.errors import UserError, shortened

NUM_AT_ONCE = 1_000  # rows without images
NUM_IMAGES_AT_ONCE = 16


@dataclass(frozen=True)
class RowsReader:
    """Images in the rows of datasets, or in files that the rows name."""

    parts: list[Any]  # datasets with the one column, as Arrow
    fingerprints: list[str]  # with the column
    part_of: "array[int]"
    rows: "array[int]"
    files: dict[int, str]  # by number, for the images that are files

    def read(self, index: int) -> bytes:
        if index in self.files:
            return read_file(self.files[index])
        try:
            cell = self.parts[self.part_of[index]][self.rows[index]].column(0)[0].as_py()
        except IndexError:
            raise ValueError("has changed since the dataset was opened") from None
        return image_bytes(cell)

    def stamp(self, index: int) -> str:
        if index not in self.files:
            return f"{self.fingerprints[self.part_of[index]]} {self.rows[index]}"
        return file_stamp(self.files[index])


@dataclass(frozen=True)
class Row:
    """What one row says; the image's bytes stay where they are."""

    number: int
    path: str  # of the image, where it has one
    has_data: bool
    captions: list[str]
    side: Side | None
    label: str | None


def open_hugging_face(name: str, options: Options) -> Catalogue:
    """The catalogue of `hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER`."""
    splits, roots = load_splits(name)
    columns = choose_columns(next(iter(splits.values())), name, options)
    gathering = Gathering()
    folders = Folders(*([options.images] if options.images else []), *roots)
    reader = RowsReader([], [], array("i"), array("q"), {})
    sides = sides_of(splits)
    names = image_names(splits, columns)
    missing: dict[str, str] = {}
    for split, dataset in splits.items():
        if not {columns.picture, columns.caption} <= set(dataset.column_names):
            gathering.problems.add("has other columns than the first split", split)
            continue
        part = len(reader.parts)
        reader.parts.append(dataset.select_columns([columns.picture]).with_format("arrow"))
        reader.fingerprints.append(f"{dataset._fingerprint} {columns.picture!a}")
        for row in rows_of(dataset, columns):
            title = f"{split or 'rows'}/{row.number}"
            file = None
            if not row.has_data:
                if not row.path:
                    gathering.problems.add("has no image", title)
                    continue
                title = relative(row.path, roots)
                if title in missing:
                    continue
                if title not in gathering.index:
                    file, why = find_image(folders, row.path)
                    if file is None:
                        missing[title] = why
                        gathering.problems.add(why, title)
                        continue
            elif names.get(os.path.basename(row.path)) == 1:
                title = os.path.basename(row.path)
            number = gathering.add(title, row.captions, side=row.side or sides[split], label=row.label)
            if number == len(reader.rows):
                reader.part_of.append(part)
                reader.rows.append(row.number)
                if file:
                    reader.files[number] = file
    if missing and not reader.rows:
        title, why = next(iter(missing.items()))
        raise UserError(
            f"none of the {len(missing):,} images that `{name}` names can be used; `{shortened(title)}` {why}",
            hint="pass the folder that they are in with `--images FOLDER`",
        )
    forget_single_labels(gathering)
    return gathering.catalogue(name, "hf", reader)


def choose_columns(dataset: Any, name: str, options: Options) -> Columns:
    """Which column holds what: images by their type first, then as in any table."""
    features = dataset.features
    picture = named(options.image_column, dataset.column_names, name, "--image-column")
    caption = named(options.caption_column, dataset.column_names, name, "--caption-column")
    if picture is None:
        picture = next((key for key, feature in features.items() if type_of(feature) == "Image"), None)
    # Numbers are neither images nor captions; those of classes have names.
    names = [
        key
        for key, feature in features.items()
        if key in (picture, caption)
        or not str(getattr(feature, "dtype", "")).startswith(("int", "uint", "float", "bool"))
        or type_of(feature) == "ClassLabel"
    ]
    rows = []
    size = 0
    table = dataset.select_columns(names).with_format("arrow")
    for start in range(0, min(len(dataset), NUM_SAMPLED), NUM_IMAGES_AT_ONCE):
        batch = table[start : start + NUM_IMAGES_AT_ONCE]
        cells = [[spoken(features[key], cell) for cell in batch.column(key).to_pylist()] for key in names]
        rows += list(zip(*cells, strict=True))
        size += batch.nbytes
        if size > MOST_SAMPLED:
            break
    if not rows:
        raise UserError(f"`{name}` has no rows", hint="choose another dataset")
    return find_columns(
        names,
        rows,
        name,
        Options(options.format, options.images, image_column=picture, caption_column=caption),
    )


def rows_of(dataset: Any, columns: Columns) -> Iterator[Row]:
    """All rows, a batch at a time; of images only their paths, and whether there are bytes."""
    features = dataset.features
    wanted = [columns.picture, columns.caption, columns.side, columns.label]
    present = [key for key in dict.fromkeys(wanted) if key in dataset.column_names]
    table = dataset.select_columns(present).with_format("arrow")
    is_class = type_of(features[columns.caption]) == "ClassLabel"
    start = 0
    for batch in table.iter(batch_size=NUM_AT_ONCE):
        nothing = [None] * batch.num_rows
        others = {
            key: [spoken(features[key], cell) for cell in batch.column(key).to_pylist()]
            for key in present
            if key != columns.picture
        }
        paths, has_data = images_in(batch.column(columns.picture), columns.kind)
        labels = others.get(columns.caption if is_class else columns.label or "", nothing)
        rows = zip(
            paths,
            has_data,
            others[columns.caption],
            others.get(columns.side or "", nothing),
            labels,
            strict=True,
        )
        for number, (path, data, said, side, label) in enumerate(rows, start):
            captions = captions_in(said.replace("_", " ") if is_class and said else said)
            text = " ".join(captions_in(label))[:200] or None
            yield Row(number, path, data, captions, SIDES.get(side_name(side)), text)
        start += batch.num_rows


def images_in(column: Any, kind: str) -> tuple[list[str], list[bool]]:
    """The paths in a column of images, and which rows hold bytes; these are not touched."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.compute as compute  # type: ignore[import-untyped]

    if pyarrow.types.is_struct(column.type):
        fields = [field.name for field in column.type]
        paths = compute.struct_field(column, "path").to_pylist() if "path" in fields else [None] * len(column)
        has_data = compute.struct_field(column, "bytes").is_valid().to_pylist() if "bytes" in fields else None
        return [path or "" for path in paths], has_data or [False] * len(column)
    if kind == "data":
        return [""] * len(column), column.is_valid().to_pylist()
    return [image_name(cell) for cell in column.to_pylist()], [False] * len(column)


def image_names(splits: dict[str, Any], columns: Columns) -> Counter[str]:
    """How many rows each file name stands in; only one that is alone can be what an image is called."""
    counts: Counter[str] = Counter()
    for dataset in splits.values():
        if columns.picture in dataset.column_names:
            table = dataset.select_columns([columns.picture]).with_format("arrow")
            for batch in table.iter(batch_size=NUM_AT_ONCE):
                paths, _ = images_in(batch.column(0), columns.kind)
                counts.update(os.path.basename(path) for path in paths if path)
    return counts


def spoken(feature: Any, cell: Any) -> Any:
    """A class's name instead of its number; anything else as it is."""
    if type_of(feature) != "ClassLabel" or not isinstance(cell, int):
        return cell
    return feature.names[cell] if feature.names and 0 <= cell < len(feature.names) else None


def type_of(feature: Any) -> str:
    return type(feature).__name__


def sides_of(splits: dict[str, Any]) -> dict[str, Side | None]:
    """The side of each split, provided that there are two; a single `train` says nothing."""
    words = {split: re.split(r"[^a-z]", split.lower())[0] for split in splits}
    sides = {split: SIDES.get(word) for split, word in words.items()}
    return sides if len(set(sides.values()) - {None}) > 1 else dict.fromkeys(splits)


def relative(path: str, roots: list[str]) -> str:
    """A path as a person would write it, within the dataset's own folder."""
    for root in roots:
        inside = os.path.relpath(path, root) if os.path.isabs(path) else path
        if not inside.startswith(".."):
            return inside
    return path
