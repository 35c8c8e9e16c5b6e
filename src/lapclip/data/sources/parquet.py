"""Rows and pictures of Parquet files; bytes of pictures are read when they are asked for, never while opening."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from lapclip.data.catalogue import Problems
from lapclip.data.sources.columns import picture_bytes
from lapclip.data.sources.layout import MOST_SAMPLED, NUM_SAMPLED, Layout
from lapclip.data.sources.rows import Row
from lapclip.errors import UserError

MOST_KEPT = 256 * 2**20  # bytes of a row group that is kept whole
NUM_AT_ONCE = 1_000  # rows without pictures
NUM_PICTURES_AT_ONCE = 16  # rows with them


def open_parquet(path: str | Path) -> Any:
    """An open file; ValueError or OSError, in words, if it is none."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(
            f"`{path}` is a Parquet file, and `pyarrow` is not installed",
            hint="pip install 'lapclip[data]'",
        ) from None
    try:
        return ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"it is no Parquet file: {str(error).splitlines()[0][:100]}") from None


def look_at_parquet(path: Path) -> Layout:
    with open_parquet(path) as file:
        return Layout("parquet", tuple(file.schema_arrow.names))


def sample_parquet(path: Path) -> list[list[Any]]:
    """The first rows, with their pictures, as far as these are not too large."""
    rows: list[list[Any]] = []
    size = 0
    with open_parquet(path) as file:
        for batch in file.iter_batches(batch_size=NUM_PICTURES_AT_ONCE):
            rows += map(list, zip(*map(cells_of, batch.columns), strict=True))
            size += batch.nbytes
            if len(rows) >= NUM_SAMPLED or size > MOST_SAMPLED:
                break
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


def parquet_rows(
    path: Path, layout: Layout, problems: Problems, *, wanted: set[str], unread: str | None
) -> Iterator[Row]:
    """All rows, with the cells of some columns; of the `unread` one, which holds pictures, only their paths."""
    import pyarrow

    number = 0
    with open_parquet(path) as file:
        leaves = list(wanted - {unread})
        kind = file.schema_arrow.field(unread).type if unread else None
        if kind is not None and pyarrow.types.is_struct(kind) and kind.get_field_index("path") >= 0:
            leaves.append(f"{unread}.path")
        try:
            for batch in file.iter_batches(batch_size=NUM_AT_ONCE, columns=leaves):
                read = dict(zip(batch.schema.names, map(cells_of, batch.columns), strict=True))
                nothing = [None] * batch.num_rows
                for cells in zip(*(read.get(name, nothing) for name in layout.names), strict=True):
                    number += 1
                    yield number, number - 1, 0, list(cells)
        except (pyarrow.ArrowException, OSError):
            problems.add("is broken from here on", f"{path.name}:row {number + 1}")


class Cursor:
    """The pictures of one file from some row on, a row group or a few rows at a time."""

    def __init__(self, path: str, column: str):
        self.file = open_parquet(path)
        metadata = self.file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self.sizes = [group.total_byte_size for group in groups]
        self.num_rows = [group.num_rows for group in groups]
        self.starts = list(accumulate(self.num_rows, initial=0))
        self.column = column
        self.first, self.cells = 0, None
        self.batches: Iterator[Any] = iter(())
        self.group = -1

    def cell(self, row: int) -> Any:
        group = bisect_right(self.starts, row) - 1
        if group >= len(self.sizes):
            raise ValueError("has changed since the table was opened")
        if group != self.group or row < self.first:
            is_small = self.sizes[group] <= MOST_KEPT
            self.batches = self.file.iter_batches(
                batch_size=max(self.num_rows[group], 1) if is_small else NUM_PICTURES_AT_ONCE,
                row_groups=[group],
                columns=[self.column],
            )
            self.group, self.first, self.cells = group, self.starts[group], None
        while self.cells is None or row >= self.first + len(self.cells):
            self.first += len(self.cells or ())
            self.cells = next(self.batches).column(0)
        return self.cells[row - self.first].as_py()


@dataclass(frozen=True)
class ParquetReader:
    """Pictures in cells of Parquet files; quick when they are asked for in order."""

    paths: list[str]
    columns: list[str]  # of the picture, in each file
    parts: "array[int]"  # for each picture, the file
    places: "array[int]"  # and the row
    cursors: dict[int, Cursor] = field(default_factory=dict)  # the one used last
    lock: Any = field(default_factory=Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetReader, (self.paths, self.columns, self.parts, self.places)

    def read(self, index: int) -> bytes:
        import pyarrow

        part = self.parts[index]
        with self.lock:
            if part not in self.cursors:
                self.cursors.clear()
                self.cursors[part] = Cursor(self.paths[part], self.columns[part])
            try:
                cell = self.cursors[part].cell(self.places[index])
            except (pyarrow.ArrowException, KeyError, StopIteration, OSError) as error:
                self.cursors.clear()
                raise ValueError(
                    f"cannot be read from `{os.path.basename(self.paths[part])}`: {error}"
                ) from None
        return picture_bytes(cell)

    def stamp(self, index: int) -> str:
        try:
            found = os.stat(self.paths[self.parts[index]])
        except OSError:
            return ""
        return f"{found.st_size} {found.st_mtime_ns} {self.places[index]}"
