"""Tables that are text, CSV of any dialect and JSONL: how a file is written, its rows, and one row read alone later.

A file may be wrong in any way: each row that is, is named and skipped, and the next one is read.
"""

import csv
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lapclip.data.catalogue import Problems
from lapclip.data.files import Kind, is_image_name, open_regular
from lapclip.data.formats.columns import (
    MAX_SAMPLED,
    NUM_SAMPLED,
    Columns,
    FileTable,
    Row,
    image_name,
    is_image,
    plain,
)

SEPARATORS = ("\t", "|", ";", ",")
MAX_LINE = 64 * 2**20  # bytes, as an image in base64 may have
MAX_ROW = 2 * MAX_LINE
CHUNK = 2**20
MAX_LINES = 1_000  # in one cell; beyond, its quote was never meant to open anything
MAX_UNCLOSED = 100  # such cells, after which quotes mean nothing
END = "\x1e"  # a line after the last; a cell whose quote is still open swallows it
NOT_UTF_8 = "is not UTF-8; read as Windows-1252"
TOO_LONG = f"has a line of more than {MAX_LINE // 2**20} MB"

Note = Callable[[Kind, str, int], None]  # what is wrong with the row of a number


class Line(NamedTuple):
    """One line of a file without its end; the text is None if it is too long."""

    start: int
    end: int
    text: str | None
    was_repaired: bool  # it is not in the encoding of the file


@dataclass(frozen=True)
class TextTable(FileTable):
    """A table that is text, and how it is written, judged by its first lines."""

    path: Path
    format: str
    names: tuple[str, ...] = ()  # of the columns; numbers from 1 where there is no header
    encoding: str = "utf-8"
    newline: bytes = b"\n"
    start: int = 0  # after the byte order mark
    separator: str = ""
    quoted: bool = True
    spaced: bool = False  # with a space between separator and quote
    header: int = 0  # the row it is in; 0 for none

    def sample(self) -> list[list[Any]]:
        rows, size = [], 0
        for _, _, length, cells in islice(self.cells(None, lambda *_: None), NUM_SAMPLED):
            rows.append(cells)
            size += length
            if size > MAX_SAMPLED:
                break
        return rows

    def rows(self, columns: Columns, problems: Problems) -> Iterator[Row]:
        def note(kind: Kind, what: str, number: int) -> None:
            problems.add(kind, what, f"{self.path.name}:row {number}")

        used = (columns.image, columns.caption, columns.side, columns.label, columns.key)
        image, caption, *others = (self.names.index(name) if name in self.names else -1 for name in used)
        num_columns, is_data = len(self.names), columns.kind == "data"
        for number, place, length, cells in self.cells(caption, note):
            if len(cells) <= max(image, caption):
                note("incomplete", f"has {len(cells)} of {num_columns} columns", number)
                continue
            rest = (cells[i] if 0 <= i < len(cells) else None for i in others)
            cell = cells[image]
            yield Row(number, place, length, cell, is_data and bool(cell), cells[caption], *rest)

    def cells(self, caption: int | None, note: Note) -> Iterator[tuple[int, int, int, list[Any]]]:
        """Number, first byte, bytes and cells of each row but the header and empty ones."""
        with open_regular(self.path) as file:
            yield from (json_rows if self.format == "jsonl" else csv_rows)(file, self, caption, note)

    def cell(self, columns: Columns, place: int, length: int) -> Any:
        with open_regular(self.path) as file:
            file.seek(place)
            data = file.read(length)
        try:
            if self.format == "jsonl":
                return json.loads(to_text(data, self.encoding)[0])[columns.image]
            texts = to_text(data, self.encoding)[0].rstrip("\r\n").replace("\r\n", "\n").split("\n")
            lines = [Line(0, 0, text.replace("\r", " "), False) for text in texts]
            cells, _, _ = read_record(lines[0], iter(lines[1:]).__next__, self, self.quoted)
            cells = with_one_caption(cells, self, self.names.index(columns.caption))
            return cells[self.names.index(columns.image)]
        except (json.JSONDecodeError, LookupError, TypeError, csv.Error):
            raise ValueError("has changed since the table was opened") from None


def text_lines(file: BinaryIO, table: TextTable) -> Iterator[Line]:
    for offset, raw in byte_lines(file, table.start, table.newline):
        if raw is None:
            yield Line(offset, offset, None, False)
        else:
            text, was_repaired = to_text(raw, table.encoding)
            yield Line(offset, offset + len(raw), text.rstrip("\r\n").replace("\r", " "), was_repaired)


def csv_rows(
    file: BinaryIO, table: TextTable, caption: int | None, note: Note
) -> Iterator[tuple[int, int, int, list[str]]]:
    """All rows but the header and empty ones; a quote that is never closed costs its own row's quotes only."""
    source, pending, num_unclosed, number = text_lines(file, table), deque[Line](), 0, 0

    def pull() -> Line:
        return pending.popleft() if pending else next(source)

    while first := pending.popleft() if pending else next(source, None):
        number += 1
        if first.text is None:
            note("unreadable", TOO_LONG, number)
            continue
        try:
            quoted = table.quoted and num_unclosed < MAX_UNCLOSED
            cells, taken, is_closed = read_record(first, pull, table, quoted)
        except csv.Error:
            note("unreadable", f"has a cell of more than {MAX_LINE // 2**20} MB", number)
            continue
        if not is_closed:
            note("repaired", "has a quote that is not closed; it was read as a letter", number)
            num_unclosed += 1
            pending.extendleft(reversed(taken[1:]))
            taken = taken[:1]
        if cells and number != table.header:
            if any(line.was_repaired for line in taken):
                note("repaired", NOT_UTF_8, number)
            yield number, first.start, taken[-1].end - first.start, with_one_caption(cells, table, caption)


def read_record(
    first: Line, pull: Callable[[], Line], table: TextTable, quoted: bool
) -> tuple[list[str], list[Line], bool]:
    """The cells of a row, the lines it takes, and whether its quotes are closed; if not, they mean nothing."""
    text, separator, taken = first.text or "", table.separator, [first]
    if not quoted or '"' not in text:
        cells = text.split(separator) if text else []
        return [cell.lstrip(" ") for cell in cells] if table.spaced else cells, taken, True

    def lines() -> Iterator[str]:
        yield text + "\n"
        while len(taken) < MAX_LINES and taken[-1].end - first.start <= MAX_ROW:
            try:
                taken.append(pull())
            except StopIteration:
                break
            yield (taken[-1].text or "") + "\n"
        yield END

    csv.field_size_limit(MAX_ROW + CHUNK)
    cells = next(csv.reader(lines(), delimiter=separator, skipinitialspace=table.spaced))
    if cells[-1].endswith(END) or (len(taken) > 1 and has_swallowed(cells, separator)):
        return [cell.strip().strip('"') for cell in text.split(separator)], taken, False
    return cells, taken, True


def has_swallowed(cells: list[str], separator: str) -> bool:
    """Whether a cell of several lines holds what must have been rows, since a quote was left open."""
    return any(
        is_image(part.strip(' "'))
        for cell in cells
        for line in cell.split("\n")[1:]
        if separator in line
        for part in line.split(separator)
    )


def with_one_caption(cells: list[str], table: TextTable, caption: int | None) -> list[str]:
    """A row with too many cells, repaired: its caption held separators that were not quoted."""
    width = len(table.names)
    extra = len(cells) - width
    if extra <= 0 or caption is None or not any(cells[width:]) or (caption != width - 1 and width != 2):
        return cells
    between = table.separator + " " * table.spaced
    end = caption + extra + 1
    return [*cells[:caption], between.join(cells[caption:end]), *cells[end:]]


def json_rows(
    file: BinaryIO, table: TextTable, caption: int | None, note: Note
) -> Iterator[tuple[int, int, int, list[Any]]]:
    for number, line in enumerate(text_lines(file, table), 1):
        if line.text is None:
            note("unreadable", TOO_LONG, number)
        elif line.text and not line.text.isspace():
            if line.was_repaired:
                note("repaired", NOT_UTF_8, number)
            if (found := to_object(line.text)) is None:
                note("unreadable", "is not a JSON object", number)
            else:
                yield number, line.start, line.end - line.start, [found.get(name) for name in table.names]


def look_at_text(path: Path, format: str | None, max_bytes: int = 4 * 2**20) -> TextTable:
    """How a table that is text is written."""
    with open_regular(path) as file:
        encoding, newline, start = look_at_encoding(file.read(CHUNK))
        table = TextTable(path, format or "csv", (), encoding, newline, start)
        lines, num_blank = first_lines(file, table, NUM_SAMPLED, max_bytes)
        if format == "jsonl" or (format is None and lines and to_object(lines[0]) is not None):
            some, _ = first_lines(file, table, 10 * NUM_SAMPLED, MAX_SAMPLED)
            names = tuple(dict.fromkeys(name for line in some for name in to_object(line) or ()))
            return TextTable(path, "jsonl", names, encoding, newline, start)
    allowed = {"tsv": SEPARATORS[:1], "csv": SEPARATORS[1:]}.get(format or "", SEPARATORS)
    separator = max(allowed, key=lambda separator: separator_score(lines, separator))
    spaced = any(f'{separator} "' in line for line in lines) and separator in ",;"
    rows = split_lines(lines, separator, spaced)
    head = [cell.strip() for cell in rows[0]] if rows else []
    has_header = not any(map(is_image, head))
    is_token = sum("#" in row[0] and is_image_name(image_name(row[0])) for row in rows) > len(rows) / 2
    plain_head = [plain(name) for name in head]
    is_results = plain_head == ["imagename", "commentnumber", "comment"]
    is_captions = plain_head == ["image", "caption"] and path.name.lower() == "captions.txt"
    if format is None:
        format = "flickr" if is_token or is_results or is_captions else "tsv" if separator == "\t" else "csv"
    return TextTable(
        path,
        format,
        tuple((has_header and head[i]) or str(i + 1) for i in range(width(rows))),
        encoding,
        newline,
        start,
        separator,
        quoted=not (is_token or is_results),  # these two never quote, and captions in them begin with quotes
        spaced=spaced,
        header=num_blank + 1 if has_header else 0,
    )


def first_lines(file: BinaryIO, table: TextTable, num_lines: int, max_bytes: int) -> tuple[list[str], int]:
    """The first lines that are not blank, and how many blank ones come before them."""
    lines: list[str] = []
    num_blank = size = 0
    for line in islice(text_lines(file, table), num_lines):
        if line.text and line.text.strip():
            lines.append(line.text)
            size += len(line.text)
        elif not lines:
            num_blank += 1
        if size > max_bytes and len(lines) > 1:
            break
    return lines, num_blank


def look_at_encoding(head: bytes) -> tuple[str, bytes, int]:
    """The encoding, the line end and where the text begins."""
    encoding, start = "utf-8", 0
    for mark, marked in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if head.startswith(mark):
            encoding, start = marked, len(mark)
    newline = "\n".encode(encoding)
    if newline not in head and "\r".encode(encoding) in head:
        newline = "\r".encode(encoding)
    return encoding, newline, start


def byte_lines(file: BinaryIO, start: int, newline: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Lines with the place of their first byte, from a place on; None for one that is far too long."""
    file.seek(start)
    buffer, offset, seen, skipping = b"", start, 0, False
    while chunk := file.read(max(CHUNK, len(buffer))):
        buffer += chunk
        at = 0
        while (end := find_aligned(buffer, newline, max(at, seen))) >= 0:
            end += len(newline)
            if not skipping:
                yield offset + at, buffer[at:end] if end - at <= MAX_LINE else None
            at, skipping = end, False
        if len(buffer) - at > MAX_LINE:
            if not skipping:
                yield offset + at, None
            at, skipping = len(buffer) // 2 * 2, True
        buffer, offset = buffer[at:], offset + at
        seen = max(len(buffer) - 1, 0) // 2 * 2
    if buffer and not skipping:
        yield offset, buffer


def find_aligned(buffer: bytes, newline: bytes, start: int) -> int:
    """The next line end; of two bytes, one that does not begin in the middle of a character."""
    found = buffer.find(newline, start)
    while found % len(newline) and found >= 0:
        found = buffer.find(newline, found + 1)
    return found


def to_text(raw: bytes, encoding: str) -> tuple[str, bool]:
    """A line's text, and whether it had to be read as Windows-1252."""
    try:
        return raw.decode(encoding), False
    except UnicodeDecodeError:
        return raw.decode("cp1252" if encoding == "utf-8" else encoding, "replace"), encoding == "utf-8"


def to_object(line: str) -> dict[str, Any] | None:
    """A line's JSON object; None if it is anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def separator_score(lines: list[str], separator: str) -> float:
    """How regular the table is with that separator: 1 for even rows and 1 for an image in each."""
    rows = split_lines(lines, separator, separator in ",;")
    if not rows or (columns := width(rows)) < 2:
        return 0
    even = sum(1.0 if len(row) == columns else 0.5 if len(row) > columns else 0 for row in rows)
    return (even + sum(any(map(is_image, row)) for row in rows)) / len(rows)


def split_lines(lines: list[str], separator: str, spaced: bool) -> list[list[str]]:
    csv.field_size_limit(MAX_ROW + CHUNK)
    try:
        return [row for row in csv.reader(lines, delimiter=separator, skipinitialspace=spaced) if row]
    except csv.Error:
        return []


def width(rows: list[list[str]]) -> int:
    """The number of columns: the header's, or without one the minimum, since captions may hold separators."""
    if not rows or not any(map(is_image, rows[0])):
        return len(rows[0]) if rows else 0
    return min((len(row) for row in rows if len(row) > 1), default=1)
