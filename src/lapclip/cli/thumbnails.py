"""Small images in a terminal: rows of them as one image, written as kitty, iTerm2 or coloured half blocks show it.

Images in, text out; nothing here prints.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from PIL import Image
from rich.cells import set_cell_size

Way = Literal["kitty", "iterm", "blocks"]
COLUMNS, ROWS = 18, 8  # characters that one image has; a character is about twice as high as wide
GAP = 2  # characters between images
CELL = {"kitty": (10, 20), "iterm": (10, 20), "blocks": (1, 2)}  # pixels of a character
PIECE = 4096  # of base64 that kitty takes at a time
ESCAPE, BELL, END = "\x1b", "\x07", "\x1b\\"
UPPER, LOWER = "\N{UPPER HALF BLOCK}", "\N{LOWER HALF BLOCK}"


def way_to_show(
    environment: Mapping[str, str], *, is_terminal: bool, encoding: str, asked: bool | None
) -> Way | None:
    """How this terminal shows images, from what it says about itself; half blocks when they are asked for anyway."""
    if asked is False or not encoding.lower().replace("-", "").startswith("utf"):
        return None
    if is_terminal:
        term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
        is_within = "TMUX" in environment or term.startswith(
            ("screen", "tmux")
        )  # which lets no image through
        says_so = program == "ghostty" or "KITTY_WINDOW_ID" in environment
        is_kitty = term in ("xterm-kitty", "xterm-ghostty") or says_so
        if is_kitty and not is_within:
            return "kitty"
        if program in ("iTerm.app", "WezTerm") and not is_within:
            return "iterm"
        has_colours = environment.get("COLORTERM", "") in ("truecolor", "24bit") and term != "dumb"
        if has_colours and not environment.get("NO_COLOR"):
            return "blocks"
    return "blocks" if asked else None


def grid(images: Sequence[Image.Image], labels: Sequence[str], way: Way, width: int) -> str:
    """Images side by side in as many rows as a width of characters needs, each with its label below."""
    each = max(1, (width + GAP) // (COLUMNS + GAP))
    lines = []
    for start in range(0, len(images), each):
        some = images[start : start + each]
        columns = len(some) * (COLUMNS + GAP) - GAP
        lines.append(WAYS[way](strip(some, CELL[way]), columns, ROWS))
        below = (" " * GAP).join(set_cell_size(label, COLUMNS) for label in labels[start : start + each])
        lines.append(below.rstrip() + "\n")
    return "".join(lines)


def strip(images: Sequence[Image.Image], cell: tuple[int, int]) -> Image.Image:
    """Images side by side, each fitted into its place, with nothing between them."""
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
    """kitty's graphics protocol: a PNG in pieces, drawn at once over so many characters, no answer wanted."""
    data = base64.b64encode(png(image)).decode("ascii")
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    text = ""
    for number, piece in enumerate(pieces):
        keys = f"a=T,f=100,q=2,c={columns},r={rows}," if number == 0 else ""
        is_last = number == len(pieces) - 1
        text += f"{ESCAPE}_G{keys}m={0 if is_last else 1};{piece}{END}"
    return text + "\n"


def iterm(image: Image.Image, columns: int, rows: int) -> str:
    """iTerm2's inline images, which WezTerm shows too."""
    data = png(image)
    keys = f"inline=1;size={len(data)};width={columns};height={rows};preserveAspectRatio=0"
    return f"{ESCAPE}]1337;File={keys}:{base64.b64encode(data).decode('ascii')}{BELL}\n"


def blocks(image: Image.Image, columns: int, rows: int) -> str:
    """Two pixels a character: the upper one its colour, the lower one the colour behind it."""
    pixels = np.asarray(image.convert("RGBA").resize((columns, 2 * rows), Image.Resampling.BOX)).tolist()
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        cells = [half_block(one, other) for one, other in zip(upper, lower, strict=True)]
        lines.append("".join(cells).rstrip(" ") + f"{ESCAPE}[0m\n")
    return "".join(lines)


def half_block(upper: list[int], lower: list[int]) -> str:
    """One character of two pixels; what is transparent shows the terminal."""
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


WAYS = {"kitty": kitty, "iterm": iterm, "blocks": blocks}
