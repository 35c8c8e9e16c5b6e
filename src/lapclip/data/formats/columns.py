"""Which column of a table holds what, by name first and then by content, and what a cell means."""

import ast
import base64
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lapclip.data.catalogue import SIDES, Options, Problems, Side
from lapclip.data.files import file_stamp, is_image_name
from lapclip.errors import UserError, shortened, suggest

# As `plain` writes them, the likeliest first.
IMAGES = (
    "image", "img", "picture", "photo", "imagepath", "imgpath", "picturepath", "photopath", "filepath", "filename",
    "file", "path", "imagename", "imgname", "imagefile", "imagefilename", "jpg", "jpeg", "png", "webp", "imagebytes",
    "bytes", "imagebase64", "imageb64", "base64", "imageid", "imgid", "id",
)  # fmt: skip
CAPTIONS = (
    "caption", "captions", "text", "texts", "sentence", "sentences", "raw", "description", "descriptions", "comment",
    "comments", "alttext",
)  # fmt: skip
SHORT_CAPTIONS = ("title", "alt", "prompt", "label", "labels", "class", "classname", "category", "name")
# Say who made an image, where and how, but not what it shows; also in German.
NO_CAPTIONS = (
    "author", "artist", "photographer", "creator", "credit", "user", "owner", "license", "licence", "copyright",
    "source", "location", "place", "city", "country", "camera", "date", "time", "url", "tags", "keywords",
    "fotograf", "autor", "lizenz", "quelle", "ort", "datum",
)  # fmt: skip
SPLITS = ("split", "subset", "partition", "set", "fold")
LABELS = ("label", "labels", "class", "classname", "category")
# Rows of one file with the same value here show the same image.
KEYS = (
    "imageid", "imgid", "imagepath", "imgpath", "filepath", "filename", "imagefilename", "imagename", "imgname", "path",
    "file", "key", "id", "uid", "uuid", "url",
)  # fmt: skip

WEB = ("http://", "https://")
NUMBERED = re.compile(r"#\d+$")  # Flickr8k.token.txt writes `name.jpg#0`
DATA_URL = re.compile(r"data:image/[\w.+-]*(?:;[\w=.-]+)*,", re.IGNORECASE)
# The first bytes of JPEG, PNG, GIF, WebP, BMP, TIFF and, after four bytes of length, HEIC and AVIF.
STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
BETWEEN_STRINGS = re.compile(r"""(['"])\s+(['"])""")
MAX_LIST = 100_000  # characters of a list written as Python: enough for captions, and quick to parse
MAX_DEPTH = 4  # of lists within lists of captions
MAX_LISTED = 30  # columns named in an error
NUM_SAMPLED = 100  # rows that a table is judged by
MAX_SAMPLED = 32 * 2**20  # bytes of them


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read."""

    image: str
    caption: str
    kind: Literal["path", "data"]  # the image is named, or is in the cell itself
    side: str | None
    label: str | None
    key: str | None  # of images that are data


# The used cells of a row: its number from 1, header included; its place in the file; the image, of which only what is
# known without reading it if the cell itself holds it; whether it does; the caption, the side, the label and the key.
Row = tuple[int, int, Any, bool, Any, Any, Any, Any]


class Table:
    """A tabular file, or a split of a dataset, in any format. It can be sent to another process."""

    path: Path
    format: str
    names: tuple[str, ...]  # of its columns
    side: Side | None = None  # of all its rows, unless a row says otherwise

    @property
    def label(self) -> str:
        """What people call it."""
        return str(self.path)

    def first_batches(self) -> Iterator[tuple[list[list[Any]], int]]:
        """The cells of the first rows, with their images, in batches; and the size of each batch in bytes."""
        raise NotImplementedError

    def sample(self) -> list[list[Any]]:
        """The cells of the first rows, as far as these are not too large."""
        rows, size = list[list[Any]](), 0
        for batch, num_bytes in self.first_batches():
            rows, size = rows + batch, size + num_bytes
            if len(rows) >= NUM_SAMPLED or size > MAX_SAMPLED:
                break
        return rows[:NUM_SAMPLED]

    def rows(self, columns: Columns, problems: Problems) -> Iterator[Row]:
        """All rows that have an image and a caption cell."""
        raise NotImplementedError

    def cell(self, columns: Columns, place: int) -> Any:
        """The image cell of the row at that place; OSError or ValueError when it cannot be read."""
        raise NotImplementedError

    def row_name(self, label: str, number: int) -> str:
        """What an image in that row is called when nothing else names it."""
        return f"{label}#{number}"

    def state(self) -> str:
        """Changes whenever the file may have changed; empty when it is gone."""
        return file_stamp(str(self.path.resolve()))


def plain(name: str) -> str:
    """A column's name as it is compared: `Image_Path` is `imagepath`."""
    return re.sub(r"[\W_]+", "", name).lower()


def find_columns(names: Sequence[str], rows: list[list[Any]], source: str, options: Options) -> Columns:
    """What is where, as options name it or as names and the first rows suggest."""
    cells = {name: [row[i] for row in rows if i < len(row)] for i, name in reversed(list(enumerate(names)))}
    image = named(options.image_column, names, source, "--image-column")
    caption = named(options.caption_column, names, source, "--caption-column")
    image = image or guess_image({name: cells[name] for name in names if name != caption})
    caption = caption or guess_caption({name: cells[name] for name in names if name != image})
    if image is None or caption is None:
        missing = " or ".join(["images"] * (image is None) + ["captions"] * (caption is None))
        hint = "name the columns with `--image-column` and `--caption-column`"
        raise UserError(f"no column of `{source}` seems to hold {missing}; it has {listed(names)}", hint=hint)
    if most(cells[image], is_web):
        address = next(cell for cell in cells[image] if is_web(cell))
        what = f"`{source}` lists its images as URLs, such as `{shortened(address)}`"
        hint = "download them first with `img2dataset`, and pass the shards that it writes"
        raise UserError(f"{what}, and lapclip does not download images", hint=hint)
    rest = {name: cells[name] for name in names if name not in (image, caption)}
    holds_data = most(cells[image], lambda cell: is_data(cell) or isinstance(cell, bytes))
    side = first(SPLITS, rest, lambda name: most(rest[name], side_in))
    key = first(KEYS, rest, lambda name: is_key(rest[name], cells[image]))
    return Columns(image, caption, "data" if holds_data else "path", side, first(LABELS, rest), key)


def is_key(cells: list[Any], images: list[Any]) -> bool:
    """Whether rows with the same cell hold the same image; a class, say, has many."""
    seen: dict[Any, Any] = {}
    pairs = zip(cells, images, strict=False)
    return most(cells, is_scalar) and all(seen.setdefault(k, i) == i for k, i in pairs if is_scalar(k))


def named(wanted: str | None, names: Sequence[str], source: str, flag: str) -> str | None:
    """The column that a person named, whatever its case."""
    if wanted is None or wanted in names:
        return wanted
    if same := first([plain(wanted)], names):
        return same
    what = f"`{source}` has no column `{wanted}`; it has {listed(names)}{suggest(wanted, names)}"
    raise UserError(what, hint=f"pass one of them with `{flag}`")


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{shortened(name, 60)}`" for name in names[:MAX_LISTED])
    return shown + (f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else "") or "none"


def guess_image(cells: dict[str, list[Any]]) -> str | None:
    """By name where the content fits, then by content, then web addresses, then names of files without a suffix."""
    fitting = [name for name, own in cells.items() if most(own, is_image)]
    addresses = [name for name, own in cells.items() if most(own, is_web)]
    others = [n for n, own in cells.items() if most(own, lambda c: isinstance(c, bytes) or is_scalar(c))]
    return first(IMAGES, fitting) or next(iter(fitting + addresses), None) or first(IMAGES, others)


def guess_caption(cells: dict[str, list[Any]]) -> str | None:
    """By name, then the column with the most words, unless they repeat, are often missing or tell of something else."""
    fitting = [name for name, own in cells.items() if most(own, lambda c: captions_in(c) and not is_image(c))]
    words = {name: sum(map(num_words, own)) / max(len(own), 1) for name, own in cells.items()}
    wordiest = [name for name in sorted(words, key=lambda name: -words[name]) if words[name] > 0]
    wordiest.sort(key=lambda name: plain(name) in NO_CAPTIONS)
    own = [name for name in wordiest if plain(name) not in NO_CAPTIONS]
    tells = [name for name in own if words[name] >= 2 and is_varied(cells[name])]
    short = first(SHORT_CAPTIONS, fitting)
    if short and tells and plain(short) not in LABELS and words[tells[0]] < 2 * words[short]:
        tells = []  # `title` beside a column that says little more
    return first(CAPTIONS, fitting) or next(iter(tells), None) or short or next(iter(wordiest), None)


def is_varied(cells: list[Any]) -> bool:
    """Whether nearly every row has a text, and most of the texts differ."""
    filled = [str(cell) for cell in cells if captions_in(cell)]
    return len(filled) >= 0.9 * len(cells) and 2 * len({*filled}) >= len(filled)


def first(wanted: Sequence[str], names: Iterable[str], fits: Callable[[str], bool] = bool) -> str | None:
    """The column with the earliest of some names."""
    by_name = {plain(name): name for name in reversed(list(names))}
    return next((by_name[word] for word in wanted if word in by_name and fits(by_name[word])), None)


def most(cells: list[Any], test: Callable[[Any], object]) -> bool:
    """Whether most of the cells that are not empty pass a test."""
    filled = [cell for cell in cells if cell is not None and cell != ""]
    return 2 * sum(bool(test(cell)) for cell in filled) > len(filled)


def is_scalar(cell: Any) -> bool:
    return isinstance(cell, (str, int)) and not isinstance(cell, bool)


def is_web(cell: Any) -> bool:
    return isinstance(cell, str) and cell[:10].strip().lower().startswith(WEB)


def is_image(cell: Any) -> bool:
    """Whether a cell names an image file or is an image."""
    return is_data(cell) or (is_image_name(image_name(cell)) and not is_web(cell))


def is_data(cell: Any) -> bool:
    """Whether a cell is itself an image: bytes, base64, or a Hugging Face struct with bytes."""
    if isinstance(cell, dict):
        return bool(cell.get("bytes"))
    if isinstance(cell, str) and len(cell) >= 32:
        if DATA_URL.match(cell[:100].lstrip()):
            return True
        try:
            cell = base64.b64decode(one_alphabet(cell[:48])[:32], validate=True)
        except ValueError:
            return False
    return isinstance(cell, bytes) and (cell.startswith(STARTS) or cell[4:8] == b"ftyp")


def image_name(cell: Any) -> str:
    """The file that a cell names, empty if none: `name.jpg#0` is `name.jpg`."""
    if isinstance(cell, dict):
        cell = cell.get("path") or cell.get("file_name") or cell.get("filename")
    if not isinstance(cell, str):
        return str(cell) if is_scalar(cell) else ""
    name = cell.strip()
    if not name.isascii():  # JSON can hold half characters, which no file name has
        name = name.encode("utf-8", "replace").decode()
    if "#" in name and is_image_name(bare := NUMBERED.sub("", name)):
        return bare
    return name


def image_bytes(cell: Any) -> bytes:
    """The encoded image in a cell; ValueError, in words, if there is none."""
    if isinstance(cell, dict):
        cell = cell.get("bytes")
    if isinstance(cell, str):
        text = cell.lstrip()
        if found := DATA_URL.match(text[:200]):
            text = text[found.end() :]
        text = one_alphabet(text).rstrip("=")
        try:
            cell = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except ValueError:
            raise ValueError("is not an image in base64") from None
    if not isinstance(cell, bytes) or not cell:
        raise ValueError("is empty")
    return cell


def one_alphabet(text: str) -> str:
    """Base64 without line breaks, and never in the alphabet for addresses."""
    return "".join(text.split()).replace("-", "+").replace("_", "/")


def captions_in(cell: Any, depth: int = 0) -> list[str]:
    """The captions of a cell: a text, or a list of them in JSON, Python or Parquet; none if it is empty."""
    if isinstance(cell, str):
        text = cell.strip()
        if text[:1] == "[" and text[-1:] == "]" and depth == 0 and (texts := written_list(text)) is not None:
            return captions_in(texts, 1)
        return [text] if text else []
    if isinstance(cell, bytes):
        return captions_in(cell.decode("utf-8", "replace"), depth)
    if isinstance(cell, (list, tuple)):
        return [text for item in cell for text in captions_in(item, depth + 1)] if depth < MAX_DEPTH else []
    if isinstance(cell, dict):
        found = first(CAPTIONS, [key for key in cell if isinstance(key, str)])
        return captions_in(cell[found], depth + 1) if found and depth < MAX_DEPTH else []
    if cell is None or cell != cell:  # NaN, as pandas writes what is missing
        return []
    return [str(cell)]


def written_list(text: str) -> list[Any] | None:
    """A list written out in a cell, such as `["a cat", "a dog"]`; None if it is a caption in brackets."""
    if len(text) > MAX_LIST or text[1:2] not in "'\"{] \n":
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about backslashes in captions
                # NumPy writes no commas between strings, and Python would glue them together.
                found = ast.literal_eval(BETWEEN_STRINGS.sub(r"\1, \2", text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return None
    return found if isinstance(found, list) and all(isinstance(item, (str, dict)) for item in found) else None


def num_words(cell: Any) -> float:
    """How much of a text a cell is; scripts that write no spaces count by characters."""
    texts = captions_in(cell)
    if not texts or not isinstance(cell, (str, list, dict, bytes)):
        return 0
    text = texts[0][:1000]
    if is_image(text) or is_web(text) or not any(c.isalpha() or c >= "\u2000" for c in text):
        return 0
    return len(text.split()) + sum(not c.isascii() for c in text) / 3


def side_in(cell: Any) -> Side | None:
    return SIDES.get(cell.strip().lower()) if isinstance(cell, str) else None
