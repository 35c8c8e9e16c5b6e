"""Small images in a terminal: what each kind of terminal is sent, decoded again."""

import base64
import io
import re

import numpy as np
import pytest
from glass import Glass
from PIL import Image

from lapclip.cli.thumbnails import COLUMNS, GAP, ROWS, blocks, grid, iterm, kitty, protocol_of, strip

KITTY, ITERM, COLOURS = {"KITTY_WINDOW_ID": "1"}, {"TERM_PROGRAM": "iTerm.app"}, {"COLORTERM": "truecolor"}


@pytest.mark.parametrize(
    ("variables", "asked", "way"),
    [
        ({}, None, None),
        (KITTY, None, "kitty"),
        ({"TERM": "xterm-ghostty", **COLOURS}, None, "kitty"),
        (ITERM | COLOURS, None, "iterm"),
        ({"TERM_PROGRAM": "WezTerm"}, None, "iterm"),
        (COLOURS, None, "blocks"),
        (COLOURS | {"NO_COLOR": "1"}, None, None),
        (COLOURS | {"TERM": "dumb"}, None, None),
        (KITTY | COLOURS | {"TMUX": "/tmp/x"}, None, "blocks"),
        (KITTY | {"TERM": "screen-256color"}, None, None),
        (KITTY, False, None),
        ({}, True, "blocks"),
    ],
)
def test_a_terminal_gets_the_images_it_can_show(variables, asked, way):
    assert protocol_of(variables, is_terminal=True, encoding="UTF-8", asked=asked) == way
    on_a_pipe = protocol_of(variables, is_terminal=False, encoding="utf-8", asked=asked)
    assert on_a_pipe == ("blocks" if asked else None)
    assert protocol_of(variables, is_terminal=True, encoding="ascii", asked=None) is None


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    return Image.fromarray(pixels)


def decoded(data: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def test_kitty_gets_the_image_in_pieces_it_accepts():
    for image in (noise(100, 80), noise(2, 2)):
        text = kitty(image, 30, 8)
        pieces = re.findall(r"\x1b_G([^;]*);([A-Za-z0-9+/=]*)\x1b\\", text)
        assert "".join(f"\x1b_G{keys};{data}\x1b\\" for keys, data in pieces) + "\n" == text
        keys = [dict(pair.split("=") for pair in key.split(",")) for key, _ in pieces]
        assert keys[0] | {"m": ""} == {"a": "T", "f": "100", "q": "2", "c": "30", "r": "8", "m": ""}
        assert [key["m"] for key in keys] == ["1"] * (len(pieces) - 1) + ["0"]
        assert all(len(data) <= 4096 and (len(data) % 4 == 0) for _, data in pieces)
        assert (decoded("".join(data for _, data in pieces)) == np.asarray(image)).all()
    assert len(pieces) == 1


def test_iterm_gets_the_image_whole():
    image = noise(50, 40)
    found = re.fullmatch(r"\x1b\]1337;File=([^:]*):([^\x07]*)\x07\n", iterm(image, 30, 8))
    keys = dict(pair.split("=") for pair in found[1].split(";"))
    assert keys["inline"] == "1" and (keys["width"], keys["height"]) == ("30", "8")
    assert int(keys["size"]) == len(base64.b64decode(found[2]))
    assert (decoded(found[2]) == np.asarray(image)).all()


def test_half_blocks_show_two_pixels_each_and_nothing_where_nothing_is():
    image = np.zeros((4, 3, 4), dtype=np.uint8)
    image[0, 0], image[1, 0], image[3, 1] = (255, 0, 0, 255), (0, 0, 255, 255), (0, 255, 0, 255)
    both, lower, none = "\x1b[38;2;255;0;0;48;2;0;0;255m\u2580", "\x1b[0;38;2;0;255;0m\u2584", "\x1b[0m "
    assert blocks(Image.fromarray(image), 3, 2).splitlines() == [
        (both + none + none).rstrip() + "\x1b[0m", (none + lower + none).rstrip() + "\x1b[0m",
    ]  # fmt: skip


def test_images_keep_their_shape_in_a_strip():
    red, blue = Image.new("RGB", (400, 100), "red"), Image.new("RGB", (10, 1000), "blue")
    row = np.asarray(strip([red, blue], (10, 20)))
    assert row.shape == (ROWS * 20, (2 * COLUMNS + GAP) * 10, 4)
    heights = [(row[..., channel] == 255).any(axis=1).sum() for channel in (0, 2)]
    widths = [(row[..., channel] == 255).any(axis=0).sum() for channel in (0, 2)]
    assert widths[0] == COLUMNS * 10 and heights[0] == pytest.approx(COLUMNS * 10 / 4, abs=1)
    assert heights[1] == ROWS * 20 and widths[1] <= 3


def test_the_grid_is_no_wider_than_the_window_and_labels_everything():
    labels = [f"0.{number}00 a name that is much too long" for number in range(7)]
    text = grid([noise(40, 30)] * 7, labels, "blocks", 80)
    glass = Glass(80, 40)
    glass.take(text)
    assert max(map(len, glass.shown)) <= 80 and len(glass.shown) == 2 * (ROWS + 1)
    assert re.findall(r"0\.\d00", " ".join(glass.shown)) == [f"0.{n}00" for n in range(7)]
    assert grid([noise(40, 30)], labels[:1], "blocks", 5).count("\n") == ROWS + 1
