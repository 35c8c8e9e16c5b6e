"""What was found, to look at: lines with a score, a path in the width there is and a size, and images."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from rich.cells import cell_len
from rich.table import Table

from lapclip.cli.screen import say
from lapclip.data.ahead import in_order
from lapclip.data.decode import Unreadable
from lapclip.data.files import read_file
from lapclip.data.whole import whole
from lapclip.errors import shortened
from lapclip.units import plural
from lapclip.view.sheet import draw_sheet

if TYPE_CHECKING:
    from lapclip.search.searcher import Match

MOST_CHARACTERS = 4096  # of a path
LOOKED_AT = 320  # pixels of an image on a sheet or in a terminal
LEAST_WIDTH = 20  # of a path, however narrow the window


def table_of(found: "Sequence[Match]", width: int) -> Table:
    """A line for each image, best first, no wider than the window."""
    copies = [f"+{plural(len(one.copies), 'copy')}".replace("copys", "copies") for one in found]
    sizes = [f"{one.entry.width} x {one.entry.height}" for one in found]
    has_copies = any(one.copies for one in found)
    scores = [f"{one.score:.3f}" for one in found]
    columns = [scores, sizes, [c if one.copies else "" for c, one in zip(copies, found, strict=True)]]
    taken = sum(max(map(len, column)) + 2 for column in columns[: 3 if has_copies else 2])
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("image", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    if has_copies:
        table.add_column("", no_wrap=True)
    for number, one in enumerate(found):
        path = shorten_path(shown_path(one.entry.path), max(LEAST_WIDTH, width - taken - 2))
        more = [columns[2][number]] if has_copies else []
        table.add_row(scores[number], path, sizes[number], *more)
    return table


def lines_of_groups(groups: "Sequence[Sequence[Match]]", width: int) -> Iterator[str]:
    """Each group with a free line after it: how near to the first one each image is, and its path."""
    for group in groups:
        for number, one in enumerate(group):
            is_copy = number > 0 and one.entry.row == group[0].entry.row
            near = "" if number == 0 else "equal" if is_copy else f"{one.score:.3f}"
            size = f"{one.entry.width} x {one.entry.height}"
            path = shorten_path(shown_path(one.entry.path), max(LEAST_WIDTH, width - 7 - len(size) - 2))
            yield f"{near:5}  {path}  {size}"
        yield ""


def shown_path(path: str) -> str:
    """A path fit to be shown, from here when it is below."""
    here = os.getcwd().rstrip(os.sep) + os.sep
    return shortened(path.removeprefix(here), MOST_CHARACTERS)


def shorten_path(path: str, width: int) -> str:
    """A path in so many characters, its middle left out: where it begins and what it is called say most."""
    if cell_len(path) <= width:
        return path
    keep = max(2, width - 3)
    head, tail = path[: keep // 3], path[-(keep - keep // 3) :]
    while cell_len(head) + 3 + cell_len(tail) > width and len(tail) > 1:  # wide letters
        head, tail = (head[:-1], tail) if len(head) > len(tail) // 2 else (head, tail[1:])
    return f"{head}...{tail}"


def shown_name(found: "Match") -> str:
    return shortened(os.path.basename(found.entry.path))


def images_of(found: "Sequence[Match]") -> list[Image.Image]:
    """What was found, to look at; grey where a file can no longer be read."""

    def image(one: "Match") -> Image.Image:
        try:
            return whole(read_file(one.entry.path), LOOKED_AT)
        except (OSError, ValueError, Unreadable):
            return Image.new("RGB", (LOOKED_AT, LOOKED_AT), "grey")

    return list(in_order(image, found))


def write_sheet(path: Path, found: "Sequence[Match]") -> None:
    if not found:
        return
    rows = [
        (image, [f"{one.score:.3f}"], shown_name(one))
        for image, one in zip(images_of(found), found, strict=True)
    ]
    draw_sheet(path, rows)
    say(f"drawn: `{path}`")
