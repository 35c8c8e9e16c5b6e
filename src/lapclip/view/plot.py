"""Images of a run, drawn with Pillow alone."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

NUM_FOUND = 6  # images shown for a query
TILE = 128  # pixels of each side of a found image
GAP, TEXT_HEIGHT, MARK = 8, 40, 4
PAPER, INK, RIGHT = "#ffffff", "#222222", "#1a7f37"


def draw_found(path: Path, rows: list[tuple[str, list[tuple[Image.Image, bool]]]]) -> None:
    """One row a query: its words, then what was found, best first; the right image is framed and says so."""
    columns = max(len(found) for _, found in rows)
    sheet = Image.new(
        "RGB", (GAP + columns * (TILE + GAP), GAP + len(rows) * (TEXT_HEIGHT + TILE + GAP)), PAPER
    )
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    for number, (query, found) in enumerate(rows):
        top = GAP + number * (TEXT_HEIGHT + TILE + GAP)
        words = wrapped(query, font, sheet.width - 2 * GAP)
        # Close to its own images, not to the row before.
        above = (GAP, top + TEXT_HEIGHT - GAP // 2)
        draw.multiline_text(above, words, fill=INK, font=font, spacing=2, anchor="ld")
        for place, (image, is_right) in enumerate(found):
            corner = (GAP + place * (TILE + GAP), top + TEXT_HEIGHT)
            sheet.paste(image.resize((TILE, TILE)), corner)
            if is_right:
                mark_right(draw, corner, font)
    sheet.save(path)


def mark_right(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], font: ImageFont.ImageFont | ImageFont.FreeTypeFont
) -> None:
    left, top = corner
    draw.rectangle((left, top, left + TILE - 1, top + TILE - 1), outline=RIGHT, width=MARK)
    draw.rectangle((left, top, left + 42, top + 18), fill=RIGHT)
    draw.text((left + 5, top + 1), "right", fill=PAPER, font=font)


def wrapped(
    text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int, most_lines: int = 2
) -> str:
    """The text in lines no wider than that; what does not fit ends in dots."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        elif len(lines) == most_lines:
            lines[-1] += " ..."
            break
        else:
            lines.append(word)
    return "\n".join(lines)
