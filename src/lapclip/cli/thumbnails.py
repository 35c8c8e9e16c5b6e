"""Small images in a terminal, by the protocols of kitty and iTerm2 or as coloured half blocks: images in, text out."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from PIL import Image
from rich.cells import set_cell_size

Protocol = Literal["kitty", "iterm", "blocks"]
COLUMNS, ROWS = 18, 8  # characters per image; a character is about twice as high as wide
GAP = 2  # characters between images
CELL = {"kitty": (10, 20), "iterm": (10, 20), "blocks": (1, 2)}  # pixels of a character
PIECE = 4096  # characters of base64 that kitty accepts at a time
ESCAPE, BELL, END = "\x1b", "\x07", "\x1b\\"
UPPER, LOWER = "\N{UPPER HALF BLOCK}", "\N{LOWER HALF BLOCK}"


def protocol_of(
    environment: Mapping[str, str], *, is_terminal: bool, encoding: str, asked: bool | None
) -> Protocol | None:
    """How this terminal can show images, by its environment; half blocks if asked for explicitly."""
    if asked is False or not encoding.lower().replace("-", "").startswith("utf"):
        return None
    if is_terminal:
        term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
        # tmux and screen pass no images through.
        if "TMUX" not in environment and not term.startswith(("screen", "tmux")):
            is_kitty = program == "ghostty" or "KITTY_WINDOW_ID" in environment
            if is_kitty or term in ("xterm-kitty", "xterm-ghostty"):
                return "kitty"
            if program in ("iTerm.app", "WezTerm"):
                return "iterm"
        has_colours = environment.get("COLORTERM", "") in ("truecolor", "24bit") and term != "dumb"
        if has_colours and not environment.get("NO_COLOR"):
            return "blocks"
    return "blocks" if asked else None


def grid(images: Sequence[Image.Image], labels: Sequence[str], protocol: Protocol, width: int) -> str:
    """Rows of images that fit the width, each image with its label below."""
    each = max(1, (width + GAP) // (COLUMNS + GAP))
    lines = []
    for start in range(0, len(images), each):
        some = images[start : start + each]
        columns = len(some) * (COLUMNS + GAP) - GAP
        lines.append(DRAW[protocol](strip(some, CELL[protocol]), columns, ROWS))
        below = (" " * GAP).join(set_cell_size(label, COLUMNS) for label in labels[start : start + each])
        lines.append(below.rstrip() + "\n")
    return "".join(lines)


def strip(images: Sequence[Image.Image], cell: tuple[int, int]) -> Image.Image:
    """Images side by side, each scaled to fit its place."""
    across, down = cell
    place, height = COLUMNS * across, ROWS * down
    together = Image.new("RGBA", (len(images) * (place + GAP * across) - GAP * across, height))
    for number, image in enumerate(images):
        scale = min(place / image.width, height / image.height)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        small = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
        left = number * (place + GAP * across) + (place - size[0]) // 2
        together.paste(small, (left, (height - size[1]) // 2))
    return together


def kitty(image: Image.Image, columns: int, rows: int) -> str:
    """kitty's graphics protocol: a PNG in pieces, drawn over `columns` by `rows` characters, without a reply."""
    data = base64.b64encode(png(image)).decode("ascii")
    keys, text = f"a=T,f=100,q=2,c={columns},r={rows},", ""
    for start in range(0, len(data), PIECE):
        is_last = start + PIECE >= len(data)
        text += f"{ESCAPE}_G{keys}m={0 if is_last else 1};{data[start : start + PIECE]}{END}"
        keys = ""  # of the first piece only
    return text + "\n"


def iterm(image: Image.Image, columns: int, rows: int) -> str:
    """iTerm2's inline images, which WezTerm supports too."""
    data = png(image)
    keys = f"inline=1;size={len(data)};width={columns};height={rows};preserveAspectRatio=0"
    return f"{ESCAPE}]1337;File={keys}:{base64.b64encode(data).decode('ascii')}{BELL}\n"


def blocks(image: Image.Image, columns: int, rows: int) -> str:
    """Two pixels per character: the upper one as foreground colour, the lower one as background."""
    pixels = np.asarray(image.convert("RGBA").resize((columns, 2 * rows), Image.Resampling.BOX)).tolist()
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        cells = [half_block(one, other) for one, other in zip(upper, lower, strict=True)]
        lines.append("".join(cells).rstrip(" ") + f"{ESCAPE}[0m\n")
    return "".join(lines)


def half_block(upper: list[int], lower: list[int]) -> str:
    """One character of two pixels; transparent ones show the terminal's background."""
    if upper[3] and lower[3]:
        return f"{ESCAPE}[38;2;{colour(upper)};48;2;{colour(lower)}m{UPPER}"
    if upper[3] or lower[3]:
        shown, block = (upper, UPPER) if upper[3] else (lower, LOWER)
        return f"{ESCAPE}[0;38;2;{colour(shown)}m{block}"
    return f"{ESCAPE}[0m "


def colour(pixel: list[int]) -> str:
    return ";".join(str(value) for value in pixel[:3])


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


DRAW = {"kitty": kitty, "iterm": iterm, "blocks": blocks}
