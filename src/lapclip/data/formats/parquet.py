"""Rows and images of Parquet files; bytes of images are read when they are asked for, never while opening."""

import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from lapclip.data.catalogue import Problems
from lapclip.data.files import MOST_BYTES, file_stamp, open_regular
from lapclip.data.formats.columns import image_bytes
from lapclip.data.formats.layout import MOST_SAMPLED, NUM_SAMPLED, Layout
from lapclip.data.formats.text_rows import Row
from lapclip.errors import UserError

MOST_KEPT = 256 * 2**20  # bytes of images that were read last
NUM_RUNS = 16  # places that images are asked for in turn; of each, so much of the above is kept
NUM_OPEN = 16  # files at a time
NUM_AT_ONCE = 1_000  # rows without images
NUM_IMAGES_AT_ONCE = 16  # rows with them
MOST_AT_ONCE = 128 * 2**20  # bytes that a batch of rows may come to
MOST_MEASURED = 512 * 2**20  # bytes of texts that are looked at for the longest
MOST_CELL = 2**20  # bytes of a text; no caption and no name is so long
TOO_LARGE = object()  # instead of a cell


def open_parquet(path: str | Path, by_number: list[str] | None = None) -> Any:
    """An open file, with some columns as numbers of different cells; ValueError or OSError, in words, if it is none."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(
            f"`{path}` is a Parquet file, and `pyarrow` is not installed",
            hint="pip install 'lapclip[data]'",
        ) from None
    open_regular(path).close()
    try:
        return ParquetFile(path, buffer_size=2**20, pre_buffer=False, read_dictionary=by_number)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"it is no Parquet file: {str(error).splitlines()[0][:100]}") from None


def look_at_parquet(path: Path) -> Layout:
    with open_parquet(path) as file:
        return Layout("parquet", tuple(file.schema_arrow.names))


def column_bytes(file: Any, group: int, columns: list[str]) -> int:
    """What a row group says that some columns take, unpacked; a part of one is `column.part`."""
    chunks = file.metadata.row_group(group)
    return sum(
        chunks.column(i).total_uncompressed_size
        for i in range(chunks.num_columns)
        if any(f"{chunks.column(i).path_in_schema}.".startswith(f"{column}.") for column in columns)
    )


def rows_at_once(file: Any, group: int, columns: list[str], most: int) -> int:
    """How many rows fit in memory for sure: a cell that comes again is written once, so each may be as all of them."""
    return min(max(MOST_AT_ONCE // max(column_bytes(file, group, columns), 1), 1), most)


def text_rows_at_once(path: Path, file: Any, group: int, columns: list[str]) -> int:
    """The same for texts, of which a row group may have a million: then their true lengths are worth a look."""
    import pyarrow

    num_rows = rows_at_once(file, group, columns, NUM_AT_ONCE)
    if num_rows == NUM_AT_ONCE or column_bytes(file, group, columns) > MOST_MEASURED:
        return num_rows
    leaves = [file.schema.column(i) for i in range(file.metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    try:
        with open_parquet(path, texts) as measured:
            whole = batches(measured, group, columns, file.metadata.row_group(group).num_rows)
            largest = max(sum(longest(column) for column in batch.columns) for batch in whole)
    except (pyarrow.ArrowException, OSError, ValueError):
        return num_rows
    return min(max(MOST_AT_ONCE // max(largest, 1), 1), NUM_AT_ONCE)


def longest(column: Any) -> int:
    """Bytes of the largest cell there can be in a column that has its texts by number."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_dictionary(column.type):
        return compute.max(compute.binary_length(column.dictionary)).as_py() or 0
    if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        return longest(column.values) * (compute.max(compute.list_value_length(column)).as_py() or 0)
    if pyarrow.types.is_struct(column.type):
        return sum(longest(column.field(i)) for i in range(column.type.num_fields))
    return 16 if pyarrow.types.is_primitive(column.type) else column.nbytes


def batches(file: Any, group: int, columns: list[str], num_rows: int) -> Iterator[Any]:
    # Without threads, which cost more than they bring where batches are small.
    return file.iter_batches(num_rows, row_groups=[group], columns=columns, use_threads=False)


def dense(column: Any) -> Any:
    """A column whose cells hold their values; pandas' categories come as numbers of a list, of which each has all."""
    import pyarrow

    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def sample_parquet(path: Path) -> list[list[Any]]:
    """The first rows, with their images, as far as these are not too large."""
    rows: list[list[Any]] = []
    size = 0
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        for group in range(file.num_row_groups):
            num_rows = rows_at_once(file, group, names, NUM_IMAGES_AT_ONCE)
            for batch in batches(file, group, names, num_rows):
                columns = [dense(column) for column in batch.columns]
                for row in range(batch.num_rows):
                    cells = [column.slice(row, 1) for column in columns]
                    rows.append([None if c.nbytes > MOST_SAMPLED else cells_of(c)[0] for c in cells])
                    size += sum(min(c.nbytes, MOST_SAMPLED) for c in cells)
                    if len(rows) >= NUM_SAMPLED or size > MOST_SAMPLED:
                        return rows
    return rows


def cells_of(column: Any) -> list[Any]:
    """A column's values; None for all when some cannot be had, as text that is not UTF-8 cannot."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        try:
            return column.cast("binary").to_pylist()
        except (ValueError, NotImplementedError):  # pyarrow's own are of these two
            return [None] * len(column)


def small_cells_of(column: Any) -> list[Any]:
    """A column's values, without those that are far too large."""
    column = dense(column)
    if column.nbytes <= MOST_CELL:
        return cells_of(column)
    cells = (column.slice(row, 1) for row in range(len(column)))
    return [TOO_LARGE if cell.nbytes > MOST_CELL else cells_of(cell)[0] for cell in cells]


def parquet_rows(
    path: Path, layout: Layout, problems: Problems, *, wanted: set[str], unread: str | None
) -> Iterator[Row]:
    """All rows, with the cells of some columns; of the `unread` one, which holds images, only their paths."""
    import pyarrow

    number = 0
    with open_parquet(path) as file:
        leaves = list(wanted - {unread})
        kind = file.schema_arrow.field(unread).type if unread else None
        if kind is not None and pyarrow.types.is_struct(kind) and kind.get_field_index("path") >= 0:
            leaves.append(f"{unread}.path")
        try:
            for group in range(file.num_row_groups):
                num_rows = text_rows_at_once(path, file, group, leaves)
                for batch in batches(file, group, leaves, num_rows):
                    read = dict(zip(batch.schema.names, map(small_cells_of, batch.columns), strict=True))
                    nothing = [None] * batch.num_rows
                    for cells in zip(*(read.get(name, nothing) for name in layout.names), strict=True):
                        number += 1
                        if TOO_LARGE in cells:
                            problems.add(
                                f"has a text of more than {MOST_CELL >> 20} MB; it was left out",
                                f"{path.name}:row {number}",
                            )
                        yield number, number - 1, 0, [None if cell is TOO_LARGE else cell for cell in cells]
        except (pyarrow.ArrowException, OSError):
            problems.add("is broken from here on", f"{path.name}:row {number + 1}")


class OpenFile:
    """A file, and where its row groups begin."""

    def __init__(self, path: str, column: str):
        self.file = open_parquet(path)
        groups = range(self.file.num_row_groups)
        self.starts = list(
            accumulate((self.file.metadata.row_group(group).num_rows for group in groups), initial=0)
        )
        self.sizes = [column_bytes(self.file, group, [column]) for group in groups]
        self.at_once = [rows_at_once(self.file, group, [column], NUM_IMAGES_AT_ONCE) for group in groups]


class Cursor:
    """The images of some files by row; the last ones read are kept, since training asks here and there in turn."""

    def __init__(self, paths: list[str], columns: list[str]):
        self.paths, self.columns = paths, columns
        self.files: OrderedDict[int, OpenFile] = OrderedDict()
        self.kept: OrderedDict[tuple[int, int], Any] = OrderedDict()  # batches, by file and first row
        self.num_bytes = 0  # of them
        self.batches: Iterator[Any] = iter(())
        self.group, self.next = (-1, -1), 0  # the file and row group being read, and its next row

    def cell(self, part: int, row: int) -> Any:
        file = self.opened(part)
        group = bisect_right(file.starts, row) - 1
        if group >= len(file.sizes):
            raise ValueError("has changed since the table was opened")
        first = row - (row - file.starts[group]) % file.at_once[group]
        batch = self.kept.get((part, first))
        if batch is None:
            batch = self.read_on(part, group, first)
        else:
            self.kept.move_to_end((part, first))
        cell = batch.slice(row - first, 1)
        if cell.nbytes > MOST_BYTES:
            raise ValueError(f"is {cell.nbytes / 1e9:.1f} GB, too large for an image")
        return cell[0].as_py()

    def opened(self, part: int) -> OpenFile:
        if part not in self.files:
            self.files[part] = OpenFile(self.paths[part], self.columns[part])
            if len(self.files) > NUM_OPEN:
                self.files.popitem(last=False)
        self.files.move_to_end(part)
        return self.files[part]

    def read_on(self, part: int, group: int, first: int) -> Any:
        """The batch from some row on; those behind it are kept too, and of a small row group those before it."""
        file, most = self.files[part], MOST_KEPT // NUM_RUNS
        if self.group != (part, group) or first < self.next:
            self.batches = batches(file.file, group, [self.columns[part]], file.at_once[group])
            self.group, self.next = (part, group), file.starts[group]
        wanted, num_ahead = None, 0
        while wanted is None or num_ahead < most // 2:
            found = next(self.batches, None)
            if found is None:
                break
            start, batch = self.next, dense(found.column(0))
            self.next += len(batch)
            if start >= first or file.sizes[group] <= most:
                self.keep((part, start), batch)
            if start == first:
                wanted = batch
            if start >= first:
                num_ahead += batch.nbytes
        if wanted is None:
            raise ValueError("has changed since the table was opened")
        return wanted

    def keep(self, place: tuple[int, int], batch: Any) -> None:
        if place not in self.kept:
            self.kept[place] = batch
            self.num_bytes += batch.nbytes
        self.kept.move_to_end(place)
        while self.num_bytes > MOST_KEPT and len(self.kept) > 1:
            self.num_bytes -= self.kept.popitem(last=False)[1].nbytes


@dataclass(frozen=True)
class ParquetReader:
    """Images in cells of Parquet files; quick when they are asked for in order, or in a few places in turn."""

    paths: list[str]
    columns: list[str]  # of the image, in each file
    parts: "array[int]"  # for each image, the file
    places: "array[int]"  # and the row
    cursors: list[Cursor] = field(default_factory=list)  # one, once something is read
    lock: Any = field(default_factory=Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetReader, (self.paths, self.columns, self.parts, self.places)

    def read(self, index: int) -> bytes:
        import pyarrow

        part = self.parts[index]
        with self.lock:
            if not self.cursors:
                self.cursors.append(Cursor(self.paths, self.columns))
            try:
                cell = self.cursors[0].cell(part, self.places[index])
            except (pyarrow.ArrowException, KeyError, OSError) as error:
                self.cursors.clear()
                raise ValueError(
                    f"cannot be read from `{os.path.basename(self.paths[part])}`: {error}"
                ) from None
        return image_bytes(cell)

    def stamp(self, index: int) -> str:
        part = self.parts[index]
        known = file_stamp(self.paths[part])
        return known and f"{known} {self.columns[part]!a} {self.places[index]}"
