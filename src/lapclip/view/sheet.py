"""Sheets of images as PNG files, drawn with Pillow: images with their captions, or what was found for a few queries."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lapclip.errors import one_line, shortened
from lapclip.files import atomic_path

NUM_FOUND = 6  # images shown for a query
TILE = 128  # pixels of each side of a found image
THUMBNAIL = 192  # likewise, of an image with its captions
COLUMNS = 6
GAP, LINE_HEIGHT, FRAME = 8, 17, 4
MAX_CAPTIONS, MAX_LINES = 5, 3  # of an image; of a caption
MAX_CHARACTERS = 200  # of a text; more never fit
PAPER, INK, PALE, CORRECT = "#ffffff", "#222222", "#767676", "#1a7f37"
FONT = ImageFont.load_default(size=13)


def draw_found(path: Path, rows: Sequence[tuple[str, Sequence[tuple[Image.Image, bool]]]]) -> None:
    """Writes one row a query: its text, then the images found, best first; correct ones are framed and say so."""
    width = GAP + max(len(found) for _, found in rows) * (TILE + GAP)
    row_height = 2 * LINE_HEIGHT + TILE + 2 * GAP
    sheet = Image.new("RGB", (width, GAP + len(rows) * row_height), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (query, found) in enumerate(rows):
        top = GAP + number * row_height + 2 * LINE_HEIGHT + GAP // 2
        lines = wrap(query, width - 2 * GAP, 2)
        write(draw, lines, GAP, top - len(lines) * LINE_HEIGHT - GAP // 2)  # close to its own images
        for place, (image, is_correct) in enumerate(found):
            left = GAP + place * (TILE + GAP)
            sheet.paste(image.resize((TILE, TILE)), (left, top))
            if is_correct:
                draw.rectangle((left, top, left + TILE - 1, top + TILE - 1), outline=CORRECT, width=FRAME)
                draw.rectangle((left, top, left + 54, top + LINE_HEIGHT + 1), fill=CORRECT)
                write(draw, ["correct"], left + 5, top + 1, PAPER)
    save(sheet, path)


def draw_sheet(path: Path, tiles: Sequence[tuple[Image.Image, Sequence[str], str]]) -> None:
    """Writes a grid of images, each with its name and captions below."""
    texts = [text_below(captions, name) for _, captions, name in tiles]
    columns = max(1, min(COLUMNS, len(tiles)))
    num_lines = [max(map(len, texts[start : start + columns])) for start in range(0, len(tiles), columns)]
    tops = [GAP]  # each row of tiles is as high as its longest text
    for lines in num_lines:
        tops.append(tops[-1] + THUMBNAIL + 2 * GAP + LINE_HEIGHT * lines)
    sheet = Image.new("RGB", (GAP + columns * (THUMBNAIL + GAP), tops[-1]), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, ((image, *_), (name, *captions)) in enumerate(zip(tiles, texts, strict=True)):
        row, column = divmod(number, columns)
        left, top = GAP + column * (THUMBNAIL + GAP), tops[row]
        scale = THUMBNAIL / max(1, *image.size)  # a small image is enlarged
        small = image.convert("RGB").resize([max(1, round(side * scale)) for side in image.size])
        sheet.paste(small, (left + (THUMBNAIL - small.width) // 2, top + (THUMBNAIL - small.height) // 2))
        write(draw, [name], left, top + THUMBNAIL + GAP // 2, PALE)
        write(draw, captions, left, top + THUMBNAIL + GAP // 2 + LINE_HEIGHT)
    save(sheet, path)


def text_below(captions: Sequence[str], name: str) -> list[str]:
    """A name in one line and captions in a few; characters that the font lacks are boxes."""
    dash = "- " if len(captions) > 1 else ""
    lines = wrap(name, THUMBNAIL, 1)
    for caption in captions[:MAX_CAPTIONS]:
        lines += wrap(dash + caption, THUMBNAIL, MAX_LINES)
    omitted = len(captions) - MAX_CAPTIONS
    return [*lines, f"and {omitted:,} more"] if omitted > 0 else lines


def wrap(text: str, width: int, max_lines: int) -> list[str]:
    """Lines no wider than that; a wider word, or a script without spaces, is broken anywhere; omitted text is dots."""
    lines = [""]
    for word in shortened(one_line(text), MAX_CHARACTERS).split():
        longer = f"{lines[-1]} {word}".strip()
        if FONT.getlength(longer) <= width:
            lines[-1] = longer
            continue
        lines += [""] if lines[-1] else []
        for character in word:
            if FONT.getlength(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
    if len(lines) > max_lines:
        lines = lines[:max_lines]
        while FONT.getlength(f"{lines[-1]} ...") > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] += " ..."
    return lines


def write(draw: ImageDraw.ImageDraw, lines: Sequence[str], left: int, top: int, colour: str = INK) -> None:
    for number, line in enumerate(lines):
        draw.text((left, top + number * LINE_HEIGHT), line, fill=colour, font=FONT)


def save(sheet: Image.Image, path: Path) -> None:
    with atomic_path(path) as beside:
        sheet.save(beside, format="PNG")
