"""How a table that is text is written, judged by its first lines: encoding, separator, header, names of its columns."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from lapclip.data.files import is_image_name, open_regular
from lapclip.data.formats.columns import image_name, is_image, plain

SEPARATORS = ("\t", "|", ";", ",")
MOST_LINE = 64 * 2**20  # bytes, as an image in base64 may have
CHUNK = 2**20
NUM_SAMPLED = 100  # rows that a table is judged by
MOST_SAMPLED = 32 * 2**20  # bytes of them


@dataclass(frozen=True)
class Layout:
    """How a table is written."""

    format: str
    names: tuple[str, ...]  # of the columns; numbers from 1 where there is no header
    encoding: str = "utf-8"
    newline: bytes = b"\n"
    start: int = 0  # behind the byte order mark
    separator: str = ""
    quoted: bool = True
    spaced: bool = False  # with a blank between separator and quote
    header: int = 0  # the row it is in; 0 for none
    caption: int | None = None  # the column that unquoted separators belong to, once it is known


def look_at_text(path: Path, format: str | None, most_bytes: int = 4 * 2**20) -> Layout:
    """The layout of a table that is text."""
    lines: list[str] = []
    num_blank = size = 0
    with open_regular(path) as file:
        encoding, newline, start = look_at_encoding(file.read(CHUNK))
        for _, raw in islice(byte_lines(file, start, newline), NUM_SAMPLED):
            text = to_text(raw or b"", encoding)[0].strip("\r\n").replace("\r", " ")
            if text.strip():
                lines.append(text)
                size += len(text)
            elif not lines:
                num_blank += 1
            if size > most_bytes and len(lines) > 1:
                break
    layout = Layout(format or "csv", (), encoding, newline, start)
    if format == "jsonl" or (format is None and lines and to_object(lines[0]) is not None):
        return replace(layout, format="jsonl", names=json_names(path, layout))
    allowed = {"tsv": SEPARATORS[:1], "csv": SEPARATORS[1:]}.get(format or "", SEPARATORS)
    separator = max(allowed, key=lambda separator: separator_score(lines, separator))
    spaced = any(f'{separator} "' in line for line in lines) and separator in ",;"
    rows = split_lines(lines, separator, spaced)
    if not rows:
        return replace(layout, separator=separator)
    head = [cell.strip() for cell in rows[0]]
    has_header = not any(map(is_image, head))
    is_token = sum("#" in row[0] and is_image_name(image_name(row[0])) for row in rows) > len(rows) / 2
    is_results = [plain(name) for name in head] == ["imagename", "commentnumber", "comment"]
    is_captions = [plain(name) for name in head] == [
        "image",
        "caption",
    ] and path.name.lower() == "captions.txt"
    if format is None:
        format = "flickr" if is_token or is_results or is_captions else "tsv" if separator == "\t" else "csv"
    return replace(
        layout,
        format=format,
        names=tuple((has_header and head[i]) or str(i + 1) for i in range(width(rows))),
        separator=separator,
        spaced=spaced,
        quoted=not (is_token or is_results),  # these two never quote, and captions in them begin with quotes
        header=num_blank + 1 if has_header else 0,
    )


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
                yield offset + at, buffer[at:end] if end - at <= MOST_LINE else None
            at, skipping = end, False
        if len(buffer) - at > MOST_LINE:
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


def separator_score(lines: list[str], separator: str) -> float:
    """How regular the table is with that separator: 1 for even rows and 1 for an image in each."""
    rows = split_lines(lines, separator, separator in ",;")
    if not rows or (columns := width(rows)) < 2:
        return 0
    even = sum(1.0 if len(row) == columns else 0.5 if len(row) > columns else 0 for row in rows)
    return (even + sum(any(map(is_image, row)) for row in rows)) / len(rows)


def split_lines(lines: list[str], separator: str, spaced: bool) -> list[list[str]]:
    csv.field_size_limit(MOST_LINE + CHUNK)
    try:
        return [row for row in csv.reader(lines, delimiter=separator, skipinitialspace=spaced) if row]
    except csv.Error:
        return []


def width(rows: list[list[str]]) -> int:
    """The number of columns: the header's, or without one the least there are, since captions may hold separators."""
    if not any(map(is_image, rows[0])):
        return len(rows[0])
    return min((len(row) for row in rows if len(row) > 1), default=1)


def json_names(path: Path, layout: Layout) -> tuple[str, ...]:
    """The keys of the first objects."""
    names: dict[str, None] = {}
    size = 0
    with open_regular(path) as file:
        for _, raw in islice(byte_lines(file, layout.start, layout.newline), 10 * NUM_SAMPLED):
            names.update(dict.fromkeys(to_object(to_text(raw or b"", layout.encoding)[0]) or ()))
            size += len(raw or b"")
            if size > MOST_SAMPLED:
                break
    return tuple(names)


def to_object(line: str) -> dict[str, Any] | None:
    """A line's JSON object; None if it is anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
