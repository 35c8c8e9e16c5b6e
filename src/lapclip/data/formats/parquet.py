"""Rows and images of Parquet files; bytes of images are read when they are asked for, never while opening.

A cell that repeats is stored once, so a small file can unpack to gigabytes. Therefore rows are read in batches so small
that even if each cell were as large as its whole row group claims to be, the batch fits in memory.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from lapclip.data.catalogue import Problems
from lapclip.data.files import MAX_BYTES
from lapclip.data.formats.columns import MAX_SAMPLED, Columns, Row, Table
from lapclip.errors import MissingPackage
from lapclip.files import open_regular

MAX_KEPT = 256 * 2**20  # bytes of images that were read last
NUM_RUNS = 16  # places that images are asked for in turn; of each, so much of the above is kept
NUM_OPEN = 16  # files at a time
NUM_ROWS = 1_000  # in a batch of texts
NUM_IMAGES = 16  # in a batch of images
MAX_TEXTS = 256 * 2**20  # bytes that a batch of texts may unpack to
MAX_IMAGES = 128 * 2**20
MAX_CELL = 2**20  # bytes of a text; no caption and no name is so long
TOO_LARGE = object()  # instead of a cell


def open_parquet(path: str | Path) -> Any:
    """An open file; ValueError or OSError, in words, if it is none."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError:
        raise MissingPackage(f"`{path}` is a Parquet file, and `pyarrow` is not installed", "data") from None
    open_regular(path).close()
    try:
        return ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"it is no Parquet file: {str(error).splitlines()[0][:100]}") from None


def batch_rows(file: Any, group: int, columns: list[str], num_rows: int, max_bytes: int) -> int:
    """How many rows of some columns are read at once; a part of a column is `column.part`."""
    chunks = file.metadata.row_group(group)
    starts = tuple(f"{column}." for column in columns)
    every = map(chunks.column, range(chunks.num_columns))
    read = [chunk for chunk in every if f"{chunk.path_in_schema}.".startswith(starts)]
    num_bytes = sum(chunk.total_uncompressed_size for chunk in read)
    return min(max(max_bytes // max(num_bytes, 1), 1), num_rows)


def batches(file: Any, group: int, columns: list[str], num_rows: int) -> Iterator[Any]:
    # Without threads, which cost more than they bring where batches are small.
    return file.iter_batches(num_rows, row_groups=[group], columns=columns, use_threads=False)


def dense(column: Any) -> Any:
    """A column whose cells hold their values; pandas' categories come as numbers of a list of all values."""
    import pyarrow

    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def cells_of(column: Any, max_bytes: int = MAX_CELL) -> list[Any]:
    """A column's values, without those that are far too large; None for what cannot be read."""
    column = dense(column)
    if column.nbytes > max_bytes:
        cells = (column.slice(row, 1) for row in range(len(column)))
        return [TOO_LARGE if cell.nbytes > max_bytes else cells_of(cell, max_bytes)[0] for cell in cells]
    for read in (column.to_pylist, lambda: column.cast("binary").to_pylist()):  # text may not be UTF-8
        with suppress(ValueError, OverflowError, NotImplementedError):  # pyarrow's own errors are of these
            return read()
    return [None] * len(column)


def open_groups(path: str, column: str) -> tuple[Any, list[int], list[int]]:
    """A file, the first row of each of its row groups, and how many of its rows are read at once."""
    file = open_parquet(path)
    groups = range(file.num_row_groups)
    starts = accumulate((file.metadata.row_group(group).num_rows for group in groups), initial=0)
    return file, list(starts), [batch_rows(file, group, [column], NUM_IMAGES, MAX_IMAGES) for group in groups]


class ImageCells:
    """Cells of image columns by file and row; the last ones read are kept, since training asks here and there in turn.

    It can be used by several threads, and sent to another process, where it begins empty.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.clear()

    def clear(self) -> None:
        self.opened = lru_cache(maxsize=NUM_OPEN)(open_groups)
        self.kept: OrderedDict[tuple[str, int], Any] = OrderedDict()  # batches, by file and first row
        self.num_bytes = 0  # of them
        self.batches: Iterator[Any] = iter(())
        self.group, self.next_row = ("", -1), 0  # the file and row group being read, and its next row

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageCells, ()

    def cell(self, path: str, column: str, row: int) -> Any:
        """LookupError if there is no such row."""
        file, starts, sizes = self.opened(path, column)
        group = bisect_right(starts, row) - 1
        first = row - (row - starts[group]) % sizes[group]
        if (path, first) not in self.kept:
            if self.group != (path, group) or first < self.next_row:
                self.batches = batches(file, group, [column], sizes[group])
                self.group, self.next_row = (path, group), starts[group]
            self.read(path, first)
        self.kept.move_to_end((path, first))
        cell = self.kept[path, first].slice(row - first, 1)
        if cell.nbytes > MAX_BYTES:
            raise ValueError(f"is {cell.nbytes / 1e9:.1f} GB, too large for an image")
        return cell[0].as_py()

    def read(self, path: str, first: int) -> None:
        """Keeps the batch from some row on, and those after it up to the share of one run."""
        num_ahead = 0
        for found in self.batches:
            place, batch = (path, self.next_row), dense(found.column(0))
            self.next_row += len(batch)
            if place[1] >= first:
                num_ahead += batch.nbytes
                self.num_bytes += batch.nbytes if place not in self.kept else 0
                self.kept.setdefault(place, batch)
                if num_ahead >= MAX_KEPT // NUM_RUNS // 2:
                    break
        while self.num_bytes > MAX_KEPT and len(self.kept) > 1:
            self.num_bytes -= self.kept.popitem(last=False)[1].nbytes


@dataclass(frozen=True)
class ParquetTable(Table):
    """A Parquet file; images are quick to read in order, or in a few places in turn."""

    path: Path
    names: tuple[str, ...]
    images: ImageCells  # shared by all files of a source
    format: str = "parquet"

    def first_batches(self) -> Iterator[tuple[list[list[Any]], int]]:
        with open_parquet(self.path) as file:
            for group in range(file.num_row_groups):
                num_rows = batch_rows(file, group, list(self.names), NUM_IMAGES, MAX_IMAGES)
                for batch in batches(file, group, list(self.names), num_rows):
                    rows = zip(*(cells_of(column, MAX_SAMPLED) for column in batch.columns), strict=True)
                    known = [[None if cell is TOO_LARGE else cell for cell in cells] for cells in rows]
                    yield known, sum(dense(column).nbytes for column in batch.columns)

    def rows(self, columns: Columns, problems: Problems) -> Iterator[Row]:
        """All rows; of images in the cells only their paths are read."""
        import pyarrow

        number, is_data = 0, columns.kind == "data"
        used = (columns.image, columns.caption, columns.side, columns.label, columns.key)
        leaves = [name for name in self.names if name in used[is_data:]]
        with open_parquet(self.path) as file:
            kind = file.schema_arrow.field(columns.image).type
            if is_data and pyarrow.types.is_struct(kind) and kind.get_field_index("path") >= 0:
                leaves.append(f"{columns.image}.path")
            try:
                for group in range(file.num_row_groups):
                    num_rows = batch_rows(file, group, leaves, NUM_ROWS, MAX_TEXTS)
                    for batch in batches(file, group, leaves, num_rows):
                        read = dict(zip(batch.schema.names, map(cells_of, batch.columns), strict=True))
                        nothing = [None] * batch.num_rows
                        picked = [read.get(name or "", nothing) for name in used]
                        for cells in zip(*picked, strict=True):
                            number += 1
                            if TOO_LARGE in cells:
                                what = f"has a text of more than {MAX_CELL >> 20} MB; it was omitted"
                                problems.add("skipped", what, f"{self.path.name}:row {number}")
                            usable = (None if cell is TOO_LARGE else cell for cell in cells)
                            image, caption, side, label, key = usable
                            yield number, number - 1, image, is_data, caption, side, label, key
            except (pyarrow.ArrowException, OSError):
                problems.add("unreadable", "is broken from here on", f"{self.path.name}:row {number + 1}")

    def cell(self, columns: Columns, place: int) -> Any:
        import pyarrow

        with self.images.lock:
            try:
                return self.images.cell(str(self.path.absolute()), columns.image, place)
            except (pyarrow.ArrowException, LookupError, OSError) as error:
                self.images.clear()
                raise ValueError(f"cannot be read from `{self.path.name}`: {error}") from None
