"""`learned.png`: words, images, and a mark that does not depend on colour alone."""

from pathlib import Path

from PIL import Image, ImageFont

from lapclip.view.plot import NUM_FOUND, TILE, draw_found, wrapped

BLUE, RED = Image.new("RGB", (TILE, TILE), "blue"), Image.new("RGB", (TILE, TILE), "red")


def test_every_query_is_a_row_and_the_right_image_is_marked():
    draw_found(Path("a.png"), [("one", [(BLUE, False), (RED, True)]), ("two", [(RED, False)])])
    draw_found(Path("b.png"), [("one", [(BLUE, False), (RED, False)]), ("two", [(RED, False)])])
    marked, plain = (Image.open(name).convert("RGB") for name in ("a.png", "b.png"))
    assert marked.size == plain.size and marked.height > 2 * TILE and marked.width > 2 * TILE
    changed = [
        x
        for x in range(marked.width)
        for y in range(marked.height)
        if marked.getpixel((x, y)) != plain.getpixel((x, y))
    ]
    assert min(changed) > TILE, "only the second image"
    assert NUM_FOUND >= 5


def test_long_words_wrap_and_then_end_in_dots():
    font = ImageFont.load_default(size=14)
    lines = wrapped("many words " * 60, font, 400).split("\n")
    assert len(lines) == 2 and lines[1].endswith("...")
    assert wrapped("", font, 400) == "" and wrapped("two words", font, 400) == "two words"
