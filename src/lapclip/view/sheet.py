"""Sheets of images as PNG files, drawn with Pillow: images with their captions, or what was found for a few queries."""

import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from pymupdf_fonts import myfont

from lapclip.data.formats.emoji import UNASSIGNED, find_fonts
from lapclip.errors import one_line, shortened
from lapclip.files import PNG_SIGN, atomic_path

NUM_FOUND = 6  # images shown for a query
TILE = 128  # pixels of each side of a found image
THUMBNAIL = 192  # likewise, of an image with its captions
COLUMNS = 6
GAP, LINE_HEIGHT, FRAME = 8, 17, 4
MAX_CAPTIONS, MAX_LINES = 5, 3  # of an image; of a caption
MAX_CHARACTERS = 200  # of a text; more never fit
PAPER, INK, PALE, CORRECT = "#ffffff", "#222222", "#767676", "#1a7f37"
FONT_SIZE = 13
PLAIN_FONT = re.compile(r"(?i)(?!.*(bold|italic|obliq|serif|mono|light|thin|black|cond)).*\.(ttf|ttc|otf)")
# Hebrew, Arabic and their neighbours, with what is between their words.
RIGHT_TO_LEFT = re.compile(r"[\u0590-\u08ff\ufb1d-\ufefc]([\W\d]*[\u0590-\u08ff\ufb1d-\ufefc])*")
Font = ImageFont.FreeTypeFont


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


def draw_sheet(path: Path, tiles: Sequence[tuple[Image.Image, Sequence[str], str]], title: str = "") -> None:
    """Writes a grid of images, each with its name and captions below."""
    texts = [text_below(captions, name) for _, captions, name in tiles]
    columns = max(1, min(COLUMNS, len(tiles)))
    num_lines = [max(map(len, texts[start : start + columns])) for start in range(0, len(tiles), columns)]
    width = GAP + columns * (THUMBNAIL + GAP)
    heading = wrap(title, width - 2 * GAP, MAX_LINES) if title else []
    tops = [GAP + LINE_HEIGHT * len(heading) + GAP * bool(heading)]  # each row is as high as its longest text
    for lines in num_lines:
        tops.append(tops[-1] + THUMBNAIL + 2 * GAP + LINE_HEIGHT * lines)
    sheet = Image.new("RGB", (width, tops[-1]), PAPER)
    draw = ImageDraw.Draw(sheet)
    write(draw, heading, GAP, GAP)
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
    """A name in one line and captions in a few."""
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
        if length(longer) <= width:
            lines[-1] = longer
            continue
        lines += [""] if lines[-1] else []
        for character in word:
            if length(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
    if len(lines) > max_lines:
        lines = lines[:max_lines]
        while length(f"{lines[-1]} ...") > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] += " ..."
    return lines


def write(draw: ImageDraw.ImageDraw, lines: Sequence[str], left: int, top: int, colour: str = INK) -> None:
    for number, line in enumerate(lines):
        x, baseline = float(left), top + number * LINE_HEIGHT + FONT_SIZE
        strong = (way for way in map(unicodedata.bidirectional, line) if way in ("L", "R", "AL"))
        way = "ltr" if next(strong, "L") == "L" else "rtl"
        for font, text in in_fonts(line)[:: 1 if way == "ltr" else -1]:
            can_order = font.layout_engine == ImageFont.Layout.RAQM  # and join letters
            shown = text if can_order else RIGHT_TO_LEFT.sub(reverse, text)
            draw.text((x, baseline), shown, colour, font, "ls", direction=way if can_order else None)
            x += font.getlength(text)


def reverse(found: re.Match[str]) -> str:
    """Right-to-left text in the order it is seen; numbers keep theirs."""
    return re.sub(r"\d+", lambda number: number[0][::-1], found[0][::-1])


def length(line: str) -> float:
    return sum(font.getlength(text) for font, text in in_fonts(line))


def in_fonts(line: str) -> list[tuple[Font, str]]:
    """A line in pieces, each with a font that has its characters; marks and spaces go with what they follow."""
    used: list[Font] = []
    for character in line:
        is_mark = unicodedata.category(character)[0] in "MZC"
        used.append(used[-1] if used and is_mark else font_for(character))
    pieces = groupby(zip(used, line, strict=True), key=itemgetter(0))
    return [(font, "".join(character for _, character in piece)) for font, piece in pieces]


@cache
def font_for(character: str) -> Font:
    """The first font that has a character; the usual one, which draws a box, if none has."""
    for font in fonts():
        if has(font, character):
            return font
    for path in sorted(find_fonts(PLAIN_FONT), key=lambda path: "sans" not in path.lower()):
        with suppress(OSError):  # damaged, or of bitmaps in other sizes, such as emoji in colour
            if has(font := ImageFont.truetype(path, FONT_SIZE), character):
                fonts().append(font)
                return font
    return fonts()[0]


def has(font: Font, character: str) -> bool:
    return bytes(font.getmask(character)) != bytes(font.getmask(UNASSIGNED))


@cache
def fonts() -> list[Font]:
    """Those in use, FiraGO first: Latin, Greek, Cyrillic, Arabic, Hebrew, Devanagari, Thai and Georgian."""
    return [ImageFont.truetype(BytesIO(myfont("figo")), FONT_SIZE)]


def save(sheet: Image.Image, path: Path) -> None:
    sign = PngInfo()
    sign.add_text(*PNG_SIGN)
    with atomic_path(path) as beside:
        sheet.save(beside, format="PNG", pnginfo=sign)
