"""What the names of folders and files say: a side, a class, a caption, or nothing."""

import calendar
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import dropwhile
from urllib.parse import unquote

from lapclip.data.catalogue import SIDES, Side, clean_caption
from lapclip.data.formats.metadata import plain_text

# Words that may stand beside `train` in a folder's name: `train_images`, `training_set`.
FILLER = re.compile(r"images?|imgs?|pictures?|photos|set|data|dataset|split|seg")

WORDNET_ID = re.compile(r"^n\d{8}[-_ ]+(?=\S)")
DATE = r"(?:(?:19|20)\d\d(?:[._ -]?\d\d){0,2}|\d\d[._-]\d\d[._-](?:19|20)\d\d)"
CLASS_NUMBER = re.compile(rf"^(?:\d{{1,4}}\s*[._-]+\s*|{DATE}[\s._-]+)(?=[^\W\d])")
# Folders named by a date, an id of WordNet, a camera (`100APPLE`), or words that say nothing about an image.
NO_CLASS = re.compile(
    rf"""{DATE} | n\d{{8}} | [1-9]\d\d(?=.*[A-Z])[A-Z0-9_]{{5}} | (?i:(?=.*[a-z])((camera\ roll | v\d+
      | (imgs?|images|photos|pictures|pics|fotos|bilder|dcim|sheets?|icons|thumb(nail)?s|screenshots?|whatsapp|new|neuer
        |folder|ordner|untitled|unnamed|misc|backups?|downloads?|exports?|saved|edited|unsorted|originals?|copy|kopie
        |from|of|my)\d* | {"|".join([*calendar.month_name[1:], *calendar.month_abbr[1:]])}
      | [(\[]?\d+(x\d+)?(px|p|k)?[)\]]?)([\s_\-.+~]+|$))+)""",
    re.VERBOSE,
)
CAMEL_CASE = re.compile(r"(?:[A-Z]?[a-z]+)(?:[A-Z][a-z]+)+\d*")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
SEPARATORS = re.compile(r"[\s_\-.+~]+")
SMALL_NUMBER = re.compile(r"[1-9]\d? +[^\W\d]")  # "2 dogs", not "02 dogs" or "2_dogs", which count images
# Counters, dates, sizes and digests, when they stand at the ends of a name.
NO_WORD = re.compile(
    r"""[(\[]?(\d+ | \d+x\d+(px)? | \d+(px|p|k) | v\d+ | \d{8}t\d{6}z? | copy | kopie | [\W_]
      | (?=[a-f]*\d)[0-9a-f]{6,} | (?=[a-f]*\d+[a-f])[0-9a-f]{4,5}
      | (?-i:(?=.*\d[A-Za-z])(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9]{8,}))[)\]]?""",
    re.IGNORECASE | re.VERBOSE,
)
LAST_COUNTER = re.compile(r"([^\W\d_]{3,})\d+")
PHOTOGRAPHER = re.compile(r".*-unsplash|pexels-.*", re.IGNORECASE | re.DOTALL)  # a name, not a caption
# A name made of these says nothing about the image.
OF_CAMERAS = re.compile(
    r"""(img|dsc[nfx]?|pxl|mvimg|vid|pict|gopr|dji|imag|wp|cimg|sam|kic|mg|mp|fb|burst|pano|hdr|portrait|night|cover
      | edit(ed)?|original|final|crop(ped)?|screenshot|screen|shot|bildschirmfoto|capture|scan|untitled|download
      | whatsapp|signal|telegram|snapchat|inshot|received|photos?|pictures?|images?|pic|bild|foto|file|frame
      | thumb(nail)?|at|um|am|pm|of|coco|train|val|test)\d*""",
    re.IGNORECASE | re.VERBOSE,
)


def side_of(folder: str) -> Side | None:
    """The side that a folder's name means: `train`, `val2017`, `test_images`, but not `train_station`."""
    words = re.findall(r"[^\W\d_]+", folder.lower())
    meant = [word for word in words if word in SIDES]
    others = [word for word in words if word not in SIDES]
    return SIDES[meant[0]] if len(meant) == 1 and all(map(FILLER.fullmatch, others)) else None


def side_in(name: str) -> Side | None:
    """The one side that is a word of a name: `captions_train2017`, `set-val/0001.tar`."""
    sides = {SIDES[word] for word in re.findall(r"[a-z]+", name.lower()) if word in SIDES}
    return sides.pop() if len(sides) == 1 else None


def sides_in(names: Iterable[str]) -> list[Side | None]:
    """The side in each name, provided that they name at least two; a single `train` says nothing."""
    sides = [side_in(name) for name in names]
    return sides if len({*sides} - {None}) > 1 else [None] * len(sides)


def short_names(paths: Iterable[str]) -> list[str]:
    """Paths from the folder that all share."""
    parts = [path.split("/") for path in paths]
    shared = len(os.path.commonprefix([path[:-1] for path in parts]))  # noqa: RUF071 - lists, not characters
    return ["/".join(path[shared:]) for path in parts]


@lru_cache(maxsize=100_000)  # images share one string
def class_name(folder: str) -> str:
    """What a class is called in words: `n02099601-golden_retriever` is a golden retriever, and `2019` is none."""
    if NO_CLASS.fullmatch(folder):
        return ""
    name = CLASS_NUMBER.sub("", WORDNET_ID.sub("", readable(folder)))
    if not any(c.isalpha() for c in name):
        return clean_caption(readable(folder))
    separators = r"[_+\s]+" if re.search(r"[_+\s]", name.strip()) else r"[-.]+"  # flat-coated_retriever
    return clean_caption(split_camel_case(re.sub(separators, " ", name).strip()))


def tells(folder: str) -> bool:
    """Whether a folder's name says something about its images; a number does not."""
    return any(map(str.isalpha, class_name(folder)))


def split_camel_case(word: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", word) if CAMEL_CASE.fullmatch(word) else word


def are_captions(names: list[str], min_words: int = 2) -> bool:
    """Whether most file names say something, and not mostly the same."""
    captions = [caption_in_name(name).lower() for name in names]
    num_told = sum(num_words(caption) >= min_words for caption in captions)
    return num_told >= 0.6 * len(names) and len(set(captions)) > 0.5 * len(names)


def num_words(caption: str) -> int:
    """Words of at least two letters; scripts without spaces, from Thai to Chinese, count by length."""
    return sum(
        2 if len(word) >= 4 and min(word) >= "\u0e00" else sum(map(str.isalpha, word)) >= 2
        for word in caption.split()
    )


def caption_in_name(name: str, is_asked: bool = False) -> str:
    """The caption that a file name holds: words, without what counts, dates or measures at its ends; or nothing.

    Where names are asked for as captions, `photo` and `IMG_0001` are some too, but a number, date or digest is not.
    """
    stem = readable(os.path.splitext(os.path.basename(name))[0])
    if "%" in stem:
        stem = unquote(stem, errors="replace")
    if PHOTOGRAPHER.fullmatch(stem) and not is_asked:
        return ""
    words = SEPARATORS.split(split_camel_case(UUID.sub(" ", stem).strip()))
    while words and (not words[-1] or NO_WORD.fullmatch(words[-1])):
        words.pop()
    if words and (counted := LAST_COUNTER.fullmatch(words[-1])):
        words[-1] = counted[1]
    if not SMALL_NUMBER.match(stem):
        words = list(dropwhile(lambda word: not word or NO_WORD.fullmatch(word), words))
    if all(len(word) < 2 or OF_CAMERAS.fullmatch(word) or NO_WORD.fullmatch(word) for word in words):
        says = any(map(str.isalpha, "".join(words))) or not any(map(str.isdigit, stem))
        if (is_asked and says) or stem.lower() == "train":  # which is not only a split
            return " ".join(SEPARATORS.split(stem)).strip()
        return " ".join(words) if len(words) == 1 and words[0] > "\u0e00" else ""
    return " ".join(words)


def readable(name: str) -> str:
    """A file name that may be older than Unicode, as words."""
    return name if name.isascii() else plain_text(os.fsencode(name))
