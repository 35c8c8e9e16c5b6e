"""Rows of tables that are text, each with its place in the file, so that one can be read alone later.

A file may be wrong in any way: each row that is, is named and left out, and the next one is read.
"""

import csv
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lapclip.data.catalogue import Problems
from lapclip.data.files import file_stamp, open_regular
from lapclip.data.formats.columns import image_bytes, is_image
from lapclip.data.formats.layout import CHUNK, MOST_LINE, Layout, byte_lines, to_object, to_text

Row = tuple[int, int, int, list[Any]]  # number from 1, header included; first byte; bytes; cells
Note = Callable[[str, int], None]  # what is wrong with the row of a number

MOST_ROW = 2 * MOST_LINE
MOST_LINES = 1_000  # in one cell; beyond, its quote was never meant to open anything
MOST_UNCLOSED = 100  # such cells, after which quotes mean nothing
END = "\x1e"  # a line behind the last; swallowed by a cell whose quote is still open


class Unclosed(Exception):
    """A cell runs on and on."""


class Lines:
    """The lines of a table as text for `csv`, and where the row being read begins and ends."""

    def __init__(self, file: BinaryIO, start: int, layout: Layout):
        self.source = byte_lines(file, start, layout.newline)
        self.encoding = layout.encoding
        self.end = start
        self.has_ended = False
        self.begin()

    def begin(self) -> None:
        self.start, self.count, self.first, self.first_end = self.end, 0, "", self.end
        self.was_mended = self.was_too_long = False

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        if self.count >= MOST_LINES or self.end - self.start > MOST_ROW:
            raise Unclosed
        found = next(self.source, None)
        if found is None:
            if self.has_ended:
                raise StopIteration
            self.has_ended = True
            return END
        self.count += 1
        offset, raw = found
        if raw is None:
            self.was_too_long = True
            self.end = offset
            return "\n"
        self.end = offset + len(raw)
        text, mended = to_text(raw, self.encoding)
        self.was_mended |= mended
        text = text.rstrip("\r\n")
        if "\r" in text:
            text = text.replace("\r", " ")
        if self.count == 1:
            self.start, self.first, self.first_end = offset, text, self.end
        return text + "\n"


def csv_rows(file: BinaryIO, layout: Layout, note: Note) -> Iterator[Row]:
    """All rows but the header and empty ones; a quote that is never closed costs its own row's quotes only."""
    csv.field_size_limit(MOST_LINE + CHUNK)
    lines, number, num_unclosed = Lines(file, layout.start, layout), 0, 0
    while True:
        quoted = layout.quoted and num_unclosed < MOST_UNCLOSED
        reader = csv_reader(lines, layout, quoted)
        is_closed = True
        while is_closed:
            lines.begin()
            number += 1
            try:
                cells = next(reader)
                if lines.has_ended and cells == [END]:
                    return
                is_closed = not lines.has_ended and (
                    lines.count == 1 or not has_swallowed(cells, layout.separator)
                )
            except Unclosed:
                is_closed = False
            except StopIteration:  # the end was in a cell of too many bytes
                return
            except csv.Error:
                note(f"has a cell of more than {MOST_LINE // 2**20} MB", number)
                continue
            if lines.was_too_long:
                note(f"has a line of more than {MOST_LINE // 2**20} MB", number)
            if not is_closed:
                note("has a quote that is not closed; it was read as a letter", number)
                num_unclosed += 1
                cells = [cell.strip().strip('"') for cell in lines.first.split(layout.separator)]
                lines.end = lines.first_end
            if cells and number != layout.header:
                if lines.was_mended:
                    note("is not UTF-8; read as Windows-1252", number)
                yield number, lines.start, lines.end - lines.start, with_one_caption(cells, layout)
        lines = Lines(file, lines.first_end, layout)


def csv_reader(lines: Iterator[str], layout: Layout, quoted: bool) -> Iterator[list[str]]:
    return csv.reader(
        lines,
        delimiter=layout.separator,
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
        skipinitialspace=layout.spaced,
    )


def has_swallowed(cells: list[str], separator: str) -> bool:
    """Whether a cell of several lines holds what must have been rows, since a quote was left open."""
    return any(
        is_image(part.strip(' "'))
        for cell in cells
        for line in cell.split("\n")[1:]
        if separator in line
        for part in line.split(separator)
    )


def with_one_caption(cells: list[str], layout: Layout) -> list[str]:
    """A row with too many cells, mended: its caption held separators that were not quoted."""
    extra = len(cells) - len(layout.names)
    if extra <= 0 or layout.caption is None or not any(cells[len(layout.names) :]):
        return cells
    at = layout.caption
    if at == len(layout.names) - 1 or len(layout.names) == 2:
        between = layout.separator + " " * layout.spaced
        return [*cells[:at], between.join(cells[at : at + extra + 1]), *cells[at + extra + 1 :]]
    return cells


def json_rows(file: BinaryIO, layout: Layout, note: Note) -> Iterator[Row]:
    for number, (offset, raw) in enumerate(byte_lines(file, layout.start, layout.newline), 1):
        if raw is None:
            note(f"has a line of more than {MOST_LINE // 2**20} MB", number)
            continue
        text, was_mended = to_text(raw, layout.encoding)
        if text.isspace():
            continue
        if was_mended:
            note("is not UTF-8; read as Windows-1252", number)
        found = to_object(text)
        if found is None:
            note("is not a JSON object", number)
        else:
            yield number, offset, len(raw), [found.get(name) for name in layout.names]


def text_rows(path: Path, layout: Layout, problems: Problems) -> Iterator[Row]:
    """All rows of a table that is text."""

    def note(what: str, number: int) -> None:
        problems.add(what, f"{path.name}:row {number}")

    with open_regular(path) as file:
        yield from (json_rows if layout.format == "jsonl" else csv_rows)(file, layout, note)


@dataclass(frozen=True)
class RowReader:
    """Images in base64 in the cells of tables, each read from its row when it is asked for."""

    paths: list[str]
    layouts: list[Layout]
    columns: list[int]  # of the image, in each file
    parts: "array[int]"  # for each image, the file
    places: "array[int]"  # its row's first byte
    lengths: "array[int]"

    def read(self, index: int) -> bytes:
        part = self.parts[index]
        layout = self.layouts[part]
        with open_regular(self.paths[part]) as file:
            file.seek(self.places[index])
            text = to_text(file.read(self.lengths[index]), layout.encoding)[0]
        try:
            if layout.format == "jsonl":
                return image_bytes(json.loads(text)[layout.names[self.columns[part]]])
            csv.field_size_limit(MOST_LINE + CHUNK)
            lines = text.replace("\r\n", "\n").replace("\r", " ").split("\n")
            cells = next(csv_reader((line + "\n" for line in lines), layout, layout.quoted))
            return image_bytes(with_one_caption(cells, layout)[self.columns[part]])
        except (json.JSONDecodeError, LookupError, TypeError, StopIteration, csv.Error):
            raise ValueError("has changed since the table was opened") from None

    def stamp(self, index: int) -> str:
        part = self.parts[index]
        known = file_stamp(self.paths[part])
        return known and f"{known} {self.layouts[part].names[self.columns[part]]!a} {self.places[index]}"
