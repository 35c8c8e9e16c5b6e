"""Sheets of images: every image with its captions, whatever they are, and what was found for a query."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont, features

from lapclip.errors import UserError
from lapclip.view import sheet
from lapclip.view.sheet import THUMBNAIL, TILE, draw_found, draw_sheet, font_for, length, wrap, write

RED, BLUE = Image.new("RGB", (32, 24), "red"), Image.new("RGB", (24, 32), "blue")


def opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.convert("RGB")


def colours(path: str) -> set[tuple[int, int, int]]:
    image = opened(path)
    return {colour for _, colour in image.getcolors(image.width * image.height)}


def test_every_image_and_caption_is_on_the_sheet_and_grows_it():
    draw_sheet(Path("one.png"), [(RED, ["a red image"], "red.png")])
    draw_sheet(Path("plain.png"), [(RED, [], "red.png")])
    odd = [
        (Image.new(mode, size), [], "")
        for mode, size in (("L", (1, 500)), ("RGBA", (500, 1)), ("CMYK", (4, 4)))
    ]
    draw_sheet(Path("many.png"), [*odd, *[(RED, ["red"], "red.png"), (BLUE, ["blue"], "blue.png")] * 10])
    assert {(255, 0, 0), (0, 0, 255)} <= colours("many.png") and (0, 0, 255) not in colours("one.png")
    one, many = opened("one.png"), opened("many.png")
    assert many.width > 5 * THUMBNAIL > one.width and many.height > 3 * THUMBNAIL > one.height
    assert one.height > opened("plain.png").height, "the caption stands below the image"


@pytest.mark.parametrize(
    "text",
    ["🦩🦊" * 50, "القطة على السجادة", "東京の夜景" * 400, "x" * 9000, "", "a\x00b\x1b[2J\n\n\nc", "\ud800 lone",
     "word " * 2000],
    ids=["emoji", "right to left", "no spaces", "one long word", "empty", "control", "surrogate", "many words"],
)  # fmt: skip
def test_no_caption_and_no_name_breaks_the_sheet(text):
    draw_sheet(Path("sheet.png"), [(RED, [text] * 7, text), (BLUE, ["fine"], "blue.png")])
    draw_found(Path("found.png"), [(text, [(RED, True)])])
    assert opened("sheet.png").height < 2000 and opened("found.png").height < 2 * TILE


def drawn(text: str) -> Image.Image:
    image = Image.new("L", (200, 24))
    write(ImageDraw.Draw(image), [text], 0, 0, "white")
    left, _, right, _ = image.getbbox()
    return image.crop((left, 0, right, image.height))


def test_captions_in_other_scripts_are_letters_and_not_boxes():
    for text in ("éñßøłğőăЖщ", "Ελληνικά", "עברית", "العربية", "हिन्दी", "ไทย", "ქართული"):
        letters = {letter for letter in text if letter.isalpha()}
        assert len({drawn(letter).tobytes() for letter in (*letters, "\u0378")}) == len(letters) + 1
        assert {font_for(letter) for letter in letters} == {font_for("a")}, "nor in several fonts"


@pytest.mark.parametrize("has_raqm", [True, False])
def test_right_to_left_captions_are_in_order_with_and_without_a_library_for_it(has_raqm, monkeypatch):
    if has_raqm and not features.check("raqm"):
        pytest.skip("Pillow found no FriBiDi here")
    engine = ImageFont.Layout.RAQM if has_raqm else ImageFont.Layout.BASIC
    one = sheet.fonts()[0].font_variant(layout_engine=engine)
    monkeypatch.setattr(sheet, "font_for", lambda character: one)
    for text, first, last in (("שלום", "ם", "ש"), ("חתול 12 על", "ל", "ח"), ("ab שלום", "a", "ש")):
        whole, left, right = map(drawn, (text, first, last))
        assert whole.crop((0, 0, left.width, left.height)) == left
        rest = whole.crop((whole.width - right.width, 0, whole.width, right.height))
        assert abs(np.asarray(rest, float) - np.asarray(right, float)).mean() < 12, (
            "but for fractions of pixels"
        )


def test_text_is_never_wider_than_its_tile_and_what_is_omitted_is_marked():
    for text in ("x" * 500, "東京" * 100, "a b " * 200, "f" * 30 + " " + "W" * 30):
        lines = wrap(text, THUMBNAIL, 3)
        assert all(length(line) <= THUMBNAIL for line in lines) and len(lines) <= 3
        assert lines[-1].endswith("...") == (len(text) > 61)
    assert wrap("", 400, 2) == [""] and wrap("two words", 400, 2) == ["two words"]


def test_a_sheet_is_written_completely_or_not_at_all():
    Path("sheet.png").write_bytes(b"old")
    Path("folder").mkdir()
    for place in ("missing/sheet.png", "folder"):
        with pytest.raises(UserError, match=f"cannot write `{place}`"):
            draw_sheet(Path(place), [(RED, ["red"], "red.png")])
    draw_sheet(Path("sheet.png"), [(RED, ["red"], "red.png")])
    assert opened("sheet.png") and sorted(os.listdir()) == ["folder", "sheet.png"]


def test_every_query_is_a_row_and_the_correct_image_is_marked():
    rows = [("one", [(BLUE, False), (RED, True)]), ("two", [(RED, False)])]
    draw_found(Path("marked.png"), rows)
    draw_found(Path("plain.png"), [(query, [(image, False) for image, _ in found]) for query, found in rows])
    marked, plain = opened("marked.png"), opened("plain.png")
    assert marked.size == plain.size and marked.height > 2 * TILE and marked.width > 2 * TILE
    pixels = ((x, y) for x in range(marked.width) for y in range(marked.height))
    changed = [x for x, y in pixels if marked.getpixel((x, y)) != plain.getpixel((x, y))]
    assert min(changed) > TILE, "only the second image"
