"""Lines of styled pieces: cut, put side by side and painted far more cheaply than a layout engine would.

A view is drawn every two seconds beside a training that needs the processor, so a line is a plain list.
"""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

from lapclip.errors import printable

Line = list[tuple[str, str]]  # pieces of text, each with a name of STYLES

STYLES = {"bold": "1", "dim": "2", "accent": "36", "good": "32", "warn": "33", "bad": "31"}


def plain(text: str) -> str:
    """Text from a file in one line, without what would move the cursor or ring the bell."""
    return " ".join(printable(text).split())


def width_of(line: Line) -> int:
    return sum(len(text) if text.isascii() else cell_len(text) for text, _ in line)


def cut(line: Line, width: int) -> Line:
    """The line, no wider than that; what was cut off is marked."""
    if width_of(line) <= width:
        return line
    kept: Line = []
    room = width - 1
    for text, style in line:
        needed = cell_len(text)
        if needed > room:
            return [*kept, (set_cell_size(text, max(0, room)), style), ("…" if width > 0 else "", "dim")]
        kept.append((text, style))
        room -= needed
    return kept


def padded(line: Line, width: int) -> Line:
    """The line, exactly that wide."""
    line = cut(line, width)
    return [*line, (" " * (width - width_of(line)), "")]


def spread(left: Line, right: Line, width: int) -> Line:
    """One line with something at both ends; the right one goes if there is no room for it."""
    room = width - width_of(left) - width_of(right)
    return [*left, (" " * room, ""), *right] if room >= 2 else cut(left, width)


def beside(blocks: Sequence[Sequence[Line]], widths: Sequence[int], gap: int = 2) -> list[Line]:
    """Blocks of lines next to one another, filled up to the longest."""
    height = max(map(len, blocks))
    rows = []
    for number in range(height):
        row: Line = []
        for block, width in zip(blocks, widths, strict=True):
            row += [*padded(block[number] if number < len(block) else [], width), (" " * gap, "")]
        rows.append(row[:-1])
    return rows


def wrapped(text: str, width: int, most: int, style: str = "", first: str = "") -> list[Line]:
    """A sentence in at most so many lines, the later ones set in a little; what is left over is marked."""
    if most < 1 or width < 8:
        return []
    some = plain(text)[: width * (most + 1)]  # no more can be shown
    rows = rows_of(some.split(" "), width, first, indent=" " * min(2, len(first)))
    if len(rows) > most:
        rows = [*rows[: most - 1], f"{rows[most - 1]} {rows[most].strip()}"]
    return [cut([(row, style)], width) for row in rows]


def rows_of(words: Sequence[str], width: int, first: str, indent: str) -> list[str]:
    """Words in rows, by what they take on the screen; one that is wider than a row is broken where the row ends."""
    rows = [first]
    for word in words:
        gap = "" if rows[-1].endswith(" ") or not rows[-1] else " "
        if cell_len(rows[-1] + gap + word) <= width:
            rows[-1] += gap + word
        elif cell_len(indent + word) <= width:
            rows.append(indent + word)
        else:
            rows[-1] += gap
            for letter in word:
                if cell_len(rows[-1] + letter) > width:
                    rows.append(indent)
                rows[-1] += letter
    return [row.rstrip() for row in rows]


def paint(line: Line, *, colour: bool) -> str:
    """The line for a terminal, without trailing spaces."""
    while line and not line[-1][0].strip():
        line = line[:-1]
    if line:
        line = [*line[:-1], (line[-1][0].rstrip(), line[-1][1])]
    if not colour:
        return "".join(text for text, _ in line)
    return "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line)


def text_of(lines: Iterable[Line]) -> str:
    return "\n".join(paint(line, colour=False) for line in lines)
