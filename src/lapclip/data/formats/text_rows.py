"""Tables that are text, CSV of any dialect and JSON: how a file is written, its rows, and one row read alone later.

A file may be wrong in any way: each row that is, is named and skipped, and the next one is read.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from lapclip.data.catalogue import Problems
from lapclip.data.files import SUFFIXES, Kind
from lapclip.data.formats.columns import MAX_SAMPLED, NUM_SAMPLED, Columns, Row, Table, is_image, plain
from lapclip.files import open_regular

SEPARATORS = ("\t", "|", ";", ",")
MAX_LINE = 64 * 2**20  # characters, as an image in base64 may have
MAX_LINES = 1_000  # in one cell; beyond, its quote was never meant to open anything
MAX_UNCLOSED = 100  # such cells, after which quotes mean nothing
END = "\x1e"  # a line after the last; a cell whose quote is still open swallows it
NO_UTF_8 = re.compile("[\udc80-\udcff]")  # bytes of another encoding, as Python keeps them
NOT_UTF_8 = "is not UTF-8; read as Windows-1252"
TOO_LONG = f"has a line of more than {MAX_LINE // 2**20} MB"
ARRAY = re.compile(rb"\s*\[\s*(?=\{)")  # the start of an array of JSON objects
IMAGE_KEY = rb'"[^"]{1,1000}(%s)"\s*:' % "|".join(map(re.escape, SUFFIXES)).encode()
MAPPING = re.compile(rb"\s*\{\s*(?=%s)" % IMAGE_KEY, re.IGNORECASE)  # of `{"cat.jpg": "a cat", ...}`
BETWEEN = re.compile(r"[\s,:]*", re.ASCII)  # their values
DECODER = json.JSONDecoder(strict=False)
MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))

Note = Callable[[Kind, str, int], None]  # what is wrong with the row of a number
# The first byte of a line, its text (None if too long), and whether it was repaired.
Line = tuple[int, str | None, bool]
Cells = tuple[int, int, list[Any]]  # the number of a row, from 1, its first byte, and its cells


@dataclass(frozen=True)
class TextTable(Table):
    """A table that is text, and how it is written, judged by its first lines."""

    path: Path
    format: str
    names: tuple[str, ...] = ()  # of the columns; numbers from 1 where there is no header
    encoding: str = "utf-8"
    newline: str = "\n"
    start: int = 0  # after the byte order mark
    separator: str = ""
    is_quoted: bool = True
    is_spaced: bool = False  # with a space between separator and quote
    has_header: bool = False
    end: str = ""  # of an array of JSON objects, or of a mapping from images to captions; not of lines

    def first_batches(self) -> Iterator[tuple[list[list[Any]], int]]:
        before = self.start
        for _, place, cells in self.cells(None, lambda *_: None):
            yield [cells], place - before
            before = place

    def rows(self, columns: Columns, problems: Problems) -> Iterator[Row]:
        def note(kind: Kind, what: str, number: int) -> None:
            problems.add(kind, what, f"{self.path.name}:row {number}")

        used = (columns.image, columns.caption, columns.side, columns.label, columns.key)
        image, caption, side, label, key = (self.names.index(n) if n in self.names else -1 for n in used)
        num_columns, is_data = len(self.names), columns.kind == "data"
        for number, place, cells in self.cells(caption, note):
            if len(cells) <= image or len(cells) <= caption:
                note("incomplete", f"has {len(cells)} of {num_columns} columns", number)
                continue
            # What is missing, and number -1, is None.
            cells.extend([None] * max(num_columns + 1 - len(cells), 1))
            cell = cells[image]
            has_data = is_data and bool(cell)
            yield number, place, cell, has_data, cells[caption], cells[side], cells[label], cells[key]

    def cell(self, columns: Columns, place: int) -> Any:
        image, caption = (self.names.index(name) for name in (columns.image, columns.caption))
        rows = replace(self, start=place, has_header=False).cells(caption, lambda *_: None)
        number, _, cells = next(rows, (0, 0, []))
        if number != 1 or len(cells) <= image or cells[image] is None:
            raise ValueError("has changed since the table was opened")
        return cells[image]

    def cells(self, caption: int | None, note: Note) -> Iterator[Cells]:
        """All rows but the header and empty ones."""
        return (json_rows if self.format == "jsonl" else csv_rows)(self, caption, note)

    def objects(self) -> Iterator[Line]:
        """The values of a JSON array or mapping as if each was a line; one that is damaged or too long is the last."""
        text, at, place, begin = "", 0, self.start, 0
        with open_regular(self.path) as file:
            file.seek(place)
            texts = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
            while True:
                begin = next(BETWEEN.finditer(text, at)).end()
                try:
                    end = DECODER.raw_decode(text, begin)[1]
                    place += begin - at
                    yield place, *repaired(text[begin:end])
                    place, at = place + len(text[begin:end].encode(errors="surrogateescape")), end
                except (ValueError, RecursionError):  # or only the end of what was read
                    if len(text) - at >= MAX_LINE or not (more := texts.read(len(text) - at + 2**16)):
                        break
                    text, at = text[at:] + more, 0
        if not text.startswith(self.end, begin) or (self.end == "}" and text[begin + 1 :].strip()):
            yield place, text[begin : begin + 100] or "?", False

    def lines(self) -> Iterator[Line]:
        if self.end == "}":
            values = self.objects()
            for (place, image, *one), (_, caption, *other) in zip_longest(values, values, fillvalue=(0, "?")):
                yield place, f'{{"image": {image}, "caption": {caption}}}', any(one + other)
            return
        if self.end:
            yield from self.objects()
            return
        # Bytes that are not UTF-8 are kept as they are, so that the places of lines are right.
        errors, width = ("surrogateescape", 1) if self.encoding == "utf-8" else ("replace", 2)
        place, was_whole = self.start, True
        csv.field_size_limit(4 * MAX_LINE)  # more than a row that is read can have
        with open_regular(self.path) as file:
            file.seek(place)
            texts = io.TextIOWrapper(file, self.encoding, errors, newline=self.newline)
            while text := texts.readline(MAX_LINE):
                is_ascii = text.isascii()
                size = len(text) * width if is_ascii else len(text.encode(self.encoding, errors))
                is_whole = len(text) < MAX_LINE or text.endswith(self.newline)
                if was_whole:  # what follows the start of a line that is too long is no line
                    text, is_repaired = repaired(text)
                    text = text.rstrip("\r\n").replace("\r", " ")
                    yield place, text if is_whole else None, is_repaired
                place, was_whole = place + size, is_whole


def repaired(text: str) -> tuple[str, bool]:
    """Text in UTF-8, or if it was not, as Windows would read it; and whether it was not."""
    if text.isascii() or not NO_UTF_8.search(text):
        return text, False
    return text.encode(errors="surrogateescape").decode("cp1252", "replace"), True


def csv_rows(table: TextTable, caption: int | None, note: Note) -> Iterator[Cells]:
    """A quote that is never closed costs its own row's quotes only."""
    lines, num_columns, num_unclosed, number = table.lines(), len(table.names), 0, 0
    is_header = table.has_header
    while line := next(lines, None):
        place, text, was_repaired = line
        number += 1
        if text is None:
            note("unreadable", TOO_LONG, number)
            continue
        if not text or text.isspace():
            continue
        if '"' in text and table.is_quoted and num_unclosed < MAX_UNCLOSED:
            cells, taken = quoted_cells(text, lines, table)
            if not cells:
                note("repaired", "has a quote that is not closed; it was read as a letter", number)
                num_unclosed += 1
                lines = chain(taken, lines)
                cells = [cell.strip().strip('"') for cell in text.split(table.separator)]
            elif taken:
                was_repaired |= any(repaired for _, _, repaired in taken)
        else:
            cells = text.split(table.separator)
            if table.is_spaced:
                cells = [cell.lstrip(" ") for cell in cells]
        if is_header:
            is_header = False
            continue
        if was_repaired:
            note("repaired", NOT_UTF_8, number)
        if len(cells) > num_columns:
            cells = with_one_caption(cells, table, caption)
        yield number, place, cells


def quoted_cells(text: str, lines: Iterator[Line], table: TextTable) -> tuple[list[str], list[Line]]:
    """The cells of a row with quotes, none if they are not closed, and the further lines that it takes."""
    taken: list[Line] = []

    def texts() -> Iterator[str]:
        yield f"{text}\n"
        for line in islice(lines, MAX_LINES):
            taken.append(line)
            yield f"{line[1] or ''}\n"
            if line[0] - taken[0][0] > MAX_LINE:
                break
        yield END

    cells = next(csv.reader(texts(), delimiter=table.separator, skipinitialspace=table.is_spaced))
    if cells[-1].endswith(END) or (taken and has_swallowed(cells, table.separator)):
        cells = []
    return cells, taken


def has_swallowed(cells: list[str], separator: str) -> bool:
    """Whether a cell of several lines holds what must have been rows, since a quote was left open."""
    lines = (line for cell in cells for line in cell.split("\n")[1:] if separator in line)
    return any(is_image(part.strip(' "')) for line in lines for part in line.split(separator))


def with_one_caption(cells: list[str], table: TextTable, caption: int | None) -> list[str]:
    """A row with too many cells, repaired: its caption held separators that were not quoted."""
    width = len(table.names)
    if caption is None or not any(cells[width:]) or (caption != width - 1 and width != 2):
        return cells
    between = table.separator + " " * table.is_spaced
    end = caption + len(cells) - width + 1
    return [*cells[:caption], between.join(cells[caption:end]), *cells[end:]]


def json_rows(table: TextTable, caption: int | None, note: Note) -> Iterator[Cells]:
    for number, (place, text, was_repaired) in enumerate(table.lines(), 1):
        if text is None:
            note("unreadable", TOO_LONG, number)
        elif text and not text.isspace():
            if was_repaired:
                note("repaired", NOT_UTF_8, number)
            if (found := to_object(text)) is None:
                note("unreadable", f"is not a {'complete ' if table.end else ''}JSON object", number)
            else:
                yield number, place, [found.get(name) for name in table.names]


def to_object(line: str) -> dict[str, Any] | None:
    """A line's JSON object; None if it is anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def look_at_text(path: Path, format: str | None, max_bytes: int = 4 * 2**20) -> TextTable:
    """How a table that is text is written."""
    with open_regular(path) as file:
        head = file.read(2**20)
    encoding, start = next(((name, len(mark)) for mark, name in MARKS if head.startswith(mark)), ("utf-8", 0))
    is_old_mac = "\n".encode(encoding) not in head and "\r".encode(encoding) in head
    forms = ((ARRAY, "]"), (MAPPING, "}")) if format in (None, "jsonl") and encoding == "utf-8" else ()
    found = ((match.end(), end) for form, end in forms if (match := form.match(head, start)))
    start, end = next(found, (start, ""))
    table = TextTable(path, "jsonl", (), encoding, "\r" if is_old_mac else "\n", start, end=end)
    lines = first_lines(table, NUM_SAMPLED, max_bytes)
    if format == "jsonl" or (format is None and lines and to_object(lines[0]) is not None):
        some = first_lines(table, 10 * NUM_SAMPLED, MAX_SAMPLED)
        names = dict.fromkeys(name for line in some for name in to_object(line) or ())
        return replace(table, names=tuple(names))
    if end:
        raise ValueError("is JSON that is damaged or ends early, in its first object")
    allowed = {"tsv": SEPARATORS[:1], "csv": SEPARATORS[1:]}.get(format or "", SEPARATORS)
    separator = max(allowed, key=lambda separator: separator_score(lines, separator))
    is_spaced = any(f'{separator} "' in line for line in lines) and separator in ",;"
    rows = split_lines(lines, separator, is_spaced)
    head_cells = [cell.strip() for cell in rows[0]] if rows else []
    has_header = not any(map(is_image, head_cells))
    plain_head = [plain(name) for name in head_cells]
    is_token = sum("#" in row[0] and is_image(row[0]) for row in rows) > len(rows) / 2
    is_results = plain_head == ["imagename", "commentnumber", "comment"]
    is_captions = plain_head == ["image", "caption"] and path.name.lower() == "captions.txt"
    if format is None:
        format = "flickr" if is_token or is_results or is_captions else "tsv" if separator == "\t" else "csv"
    return replace(
        table,
        format=format,
        names=tuple((has_header and head_cells[i]) or str(i + 1) for i in range(width(rows))),
        separator=separator,
        # These two never quote, and captions in them begin with quotes.
        is_quoted=not (is_token or is_results),
        is_spaced=is_spaced,
        has_header=has_header,
    )


def first_lines(table: TextTable, num_lines: int, max_bytes: int) -> list[str]:
    """The first lines that are not blank."""
    lines: list[str] = []
    for place, text, _ in islice(table.lines(), num_lines):
        if text and text.strip():
            lines.append(text)
        if len(lines) > 1 and place > max_bytes:
            break
    return lines


def separator_score(lines: list[str], separator: str) -> float:
    """How regular the table is with that separator: 1 for even rows and 1 for an image in each."""
    rows = split_lines(lines, separator, separator in ",;")
    if not rows or (columns := width(rows)) < 2:
        return 0
    even = sum(1.0 if len(row) == columns else 0.5 if len(row) > columns else 0 for row in rows)
    return (even + sum(any(map(is_image, row)) for row in rows)) / len(rows)


def split_lines(lines: list[str], separator: str, is_spaced: bool) -> list[list[str]]:
    return [row for row in csv.reader(lines, delimiter=separator, skipinitialspace=is_spaced) if row]


def width(rows: list[list[str]]) -> int:
    """The number of columns: the header's, or without one the minimum, since captions may hold separators."""
    if not rows or not any(map(is_image, rows[0])):
        return len(rows[0]) if rows else 0
    return min((len(row) for row in rows if len(row) > 1), default=1)
