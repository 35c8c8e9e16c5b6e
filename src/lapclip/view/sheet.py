"""A contact sheet: images with their captions and names, to see at a glance what a source holds."""

import os
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lapclip.data.catalogue import shortened
from lapclip.view.plot import GAP, INK, PAPER, wrapped

COLUMNS = 6
PICTURE = 192  # pixels of each side of a tile's image
FONT_SIZE, LINE_HEIGHT = 13, 17
NUM_CAPTIONS = 5  # of an image; the others are counted
MOST_LINES = 3  # of a caption
MOST_CHARACTERS = 200  # of a caption; more never fit into its lines
PALE = "#767676"

Row = tuple[Image.Image, list[str], str]
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def draw_sheet(path: Path, rows: list[Row]) -> None:
    """Writes a PNG of images, captions and names; whole or, after an OSError, not at all."""
    font = ImageFont.load_default(size=FONT_SIZE)
    texts = [text_of(captions, name, font) for _, captions, name in rows]
    columns = max(1, min(COLUMNS, len(rows)))
    # Each row of tiles is as high as its longest text.
    heights = [
        PICTURE
        + GAP
        + LINE_HEIGHT * max(len(said.splitlines()) + 1 for _, said in texts[start : start + columns])
        for start in range(0, len(rows), columns)
    ]
    size = (GAP + columns * (PICTURE + GAP), GAP + sum(height + GAP for height in heights))
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, ((image, _, _), (name, said)) in enumerate(zip(rows, texts, strict=True)):
        row, column = divmod(number, columns)
        left, top = GAP + column * (PICTURE + GAP), GAP + sum(height + GAP for height in heights[:row])
        small = fitted(image)
        sheet.paste(small, (left + (PICTURE - small.width) // 2, top + (PICTURE - small.height) // 2))
        below = top + PICTURE + GAP // 2
        draw.text((left, below), name, fill=PALE, font=font)
        for place, line in enumerate(said.splitlines(), start=1):
            draw.text((left, below + place * LINE_HEIGHT), line, fill=INK, font=font)
    beside = path.with_name(f".{path.name}.writing")
    try:
        sheet.save(beside, format="PNG")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def fitted(image: Image.Image) -> Image.Image:
    """All of an image in its tile, and a small one enlarged."""
    scale = PICTURE / max(1, *image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.convert("RGB").resize(size)


def text_of(captions: list[str], name: str, font: Font) -> tuple[str, str]:
    """A name in one line, and captions in a few; what does not fit ends in dots, and what the font lacks is a box."""
    dash = "- " if len(captions) > 1 else ""
    said = [
        lines_of(dash + shortened(caption, MOST_CHARACTERS), font, MOST_LINES)
        for caption in captions[:NUM_CAPTIONS]
    ]
    if len(captions) > NUM_CAPTIONS:
        said.append(f"and {len(captions) - NUM_CAPTIONS:,} more")
    return lines_of(shortened(name), font, 1), "\n".join(said)


def lines_of(text: str, font: Font, most: int) -> str:
    """Lines as wide as a tile; words that are wider, and scripts without spaces, are broken anywhere."""
    if font.getlength(text) <= PICTURE:
        return text
    width = PICTURE - font.getlength(" ...")
    pieces = [""]
    for word in text.split():
        for character in word:
            if font.getlength(pieces[-1] + character) > width:
                pieces.append("")
            pieces[-1] += character
        pieces.append("")
    return wrapped(" ".join(pieces), font, int(width), most)
