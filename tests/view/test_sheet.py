"""The contact sheet: every image with what is said of it, whatever that is."""

import os
from pathlib import Path

import pytest
from PIL import Image, ImageFont

from lapclip.view.sheet import PICTURE, draw_sheet, lines_of

RED, BLUE = Image.new("RGB", (32, 24), "red"), Image.new("RGB", (24, 32), "blue")


def opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.convert("RGB")


def colours(path: str) -> set[tuple[int, int, int]]:
    image = opened(path)
    return {colour for _, colour in image.getcolors(image.width * image.height)}


def test_every_image_is_on_the_sheet_and_grows_it():
    draw_sheet(Path("one.png"), [(RED, ["a red image"], "red.png")])
    draw_sheet(Path("many.png"), [(RED, ["red"], "red.png"), (BLUE, ["blue"], "blue.png")] * 10)
    assert {(255, 0, 0), (0, 0, 255)} <= colours("many.png") and (0, 0, 255) not in colours("one.png")
    one, many = opened("one.png"), opened("many.png")
    assert many.width > 5 * PICTURE > one.width and many.height > 3 * PICTURE > one.height


@pytest.mark.parametrize("captions", [["short"], ["many words " * 30, "another"]])
def test_words_are_written_below_the_image(captions):
    draw_sheet(Path("with.png"), [(RED, captions, "x")])
    draw_sheet(Path("without.png"), [(RED, [], "x")])
    assert opened("with.png").height > opened("without.png").height


@pytest.mark.parametrize(
    "words",
    [
        "🦄🐶👩‍👩‍👧",
        "قطة صغيرة على السجادة",
        "東京の夜景" * 400,
        "x" * 9000,
        "",
        "a\x00b\x1b[2J\n\n\nc",
        "\ud800 lone",
        "word " * 2000,
    ],
    ids=[
        "emoji",
        "right to left",
        "no spaces",
        "one long word",
        "empty",
        "control",
        "surrogate",
        "many words",
    ],
)
def test_no_caption_and_no_name_breaks_the_sheet(words):
    draw_sheet(Path("sheet.png"), [(RED, [words] * 7, words), (BLUE, ["fine"], "blue.png")])
    assert opened("sheet.png").height < 2000


def test_images_of_every_mode_and_shape_fit():
    shapes = [
        Image.new("L", (1, 500)),
        Image.new("RGBA", (500, 1)),
        Image.new("P", (3, 3)),
        Image.new("CMYK", (40, 40)),
    ]
    draw_sheet(Path("sheet.png"), [(image, ["odd"], "odd") for image in shapes])
    assert opened("sheet.png").width > 4 * PICTURE


def test_text_is_never_wider_than_its_tile():
    font = ImageFont.load_default(size=13)
    for text in ("x" * 500, "東京" * 100, "a b " * 200, "f" * 30 + " " + "W" * 30):
        for line in lines_of(text, font, 3).splitlines():
            assert font.getlength(line) <= PICTURE


def test_a_sheet_is_written_whole_or_not_at_all():
    Path("sheet.png").write_bytes(b"old")
    Path("folder").mkdir()
    with pytest.raises(OSError):
        draw_sheet(Path("missing/sheet.png"), [(RED, ["red"], "red.png")])
    with pytest.raises(OSError):
        draw_sheet(Path("folder"), [(RED, ["red"], "red.png")])
    draw_sheet(Path("sheet.png"), [(RED, ["red"], "red.png")])
    assert opened("sheet.png") and sorted(os.listdir()) == ["folder", "sheet.png"]
