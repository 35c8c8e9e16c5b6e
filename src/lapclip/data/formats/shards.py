"""WebDataset shards: tar archives, local or by URL, in which members that share a key are one image and its captions.

Each archive's headers are walked once; only texts are read, and images are known by shard, offset and size.
"""

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lapclip.data.catalogue import Catalogue, Gathering, Options, Problems, Side, clean_caption
from lapclip.data.files import MAX_BYTES, MISSING, is_image_name, open_regular
from lapclip.data.formats.columns import captions_in, side_in
from lapclip.data.formats.names import sides_in
from lapclip.data.formats.remote import COPY_SHARDS, NoRanges, RemoteFiles, expand, is_url, without_query
from lapclip.data.formats.tar import ReadAt, walk
from lapclip.errors import UserError

MAX_TEXT_BYTES = 2**20  # of one caption file
TEXTS = ("txt", "text", "caption", "cap", "json", "cls")
CAPTION_KEYS = ("caption", "captions", "text", "texts", "sentence", "sentences", "raw")
LESSER_KEYS = ("description", "title", "alt", "alt_text", "TEXT", "CAPTION", "prompt")  # the first non-empty
CLASS_KEYS = ("class_name", "label_name", "label", "class")
NO_IMAGE = 9  # a rank below all others
META = re.compile(r"(^|/)__[^/]*__($|/)")  # webdataset's own notes


@dataclass(frozen=True)
class ShardReader:
    """Images by shard, offset and size."""

    shards: list[str]
    shard_of: "array[int]"  # in quotes: before Python 3.12 an array has no such type when running
    offsets: "array[int]"
    sizes: "array[int]"
    remote: RemoteFiles = field(default_factory=RemoteFiles)

    def read(self, index: int) -> bytes:
        shard = self.shards[self.shard_of[index]]
        read = self.remote.read if is_url(shard) else local_read
        data = read(shard, self.offsets[index], self.sizes[index])
        if len(data) < self.sizes[index]:
            raise OSError("is cut off: its shard has become shorter")
        return data

    def stamp(self, index: int) -> str:
        shard = self.shards[self.shard_of[index]]
        known = self.remote.stamp(shard) if is_url(shard) else local_stamp(shard)
        return known and f"{known} {self.offsets[index]} {self.sizes[index]}"


def local_read(path: str, offset: int, size: int) -> bytes:
    with open_regular(path) as file:
        return os.pread(file.fileno(), size, offset)


def local_stamp(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


@contextmanager
def opened(shard: str, remote: RemoteFiles) -> Iterator[tuple[ReadAt, int]]:
    """What reads parts of a shard, and its length."""
    if is_url(shard):
        yield partial(remote.read, shard), remote.length(shard)
        return
    with open_regular(shard) as file:
        number = file.fileno()
        yield (lambda offset, size: os.pread(number, size, offset)), os.fstat(number).st_size


@dataclass(slots=True)
class Pair:
    """What the members of one key amount to."""

    image: str = ""
    rank: int = NO_IMAGE  # of the image: lower is likelier to be the one meant
    offset: int = 0
    size: int = 0
    captions: list[str] = field(default_factory=list)
    label: str | None = None
    side: Side | None = None
    has_class_number: bool = False


def open_shards(pattern: str, name: str, options: Options) -> Catalogue:
    """The catalogue of all shards that a pattern means."""
    return read_shards(expand(pattern), name, options)


def read_shards(shards: list[str], name: str, options: Options) -> Catalogue:
    """The catalogue of some shards, by paths or URLs."""
    titles = short_names(shards)
    sides = sides_in(titles)
    gathering = Gathering()
    reader = ShardReader(shards, array("i"), array("q"), array("q"))
    for number, (shard, title, side) in enumerate(zip(shards, titles, sides, strict=True)):
        try:
            with opened(shard, reader.remote) as (read, length):
                pairs = find_pairs(read, length, title, gathering.problems, options)
        except FileNotFoundError:
            gathering.problems.add(*MISSING, title)
            continue
        except NoRanges as error:
            raise UserError(
                f"the server of `{shard}` does not send parts of files", hint=COPY_SHARDS
            ) from error
        except (OSError, ValueError) as error:
            if is_url(shard):  # the line or the permission, and with it most likely all other shards
                raise UserError(str(error), hint="check the address and the connection") from error
            reason = getattr(error, "strerror", None) or error
            gathering.problems.add("unreadable", f"cannot be opened: {reason}", title)
            continue
        for pair in pairs:
            path = f"{title}/{pair.image}"
            if is_complete(pair, path, gathering):
                gathering.add(path, pair.captions, side=pair.side or side, label=pair.label)
                reader.shard_of.append(number)
                reader.offsets.append(pair.offset)
                reader.sizes.append(pair.size)
    return gathering.catalogue(name, "tar", reader)


def is_complete(pair: Pair, path: str, gathering: Gathering) -> bool:
    """Whether there is an image and something said about it; what is missing is noted."""
    pair.captions = list(dict.fromkeys(map(clean_caption, pair.captions)))
    if not any(pair.captions):
        pair.captions = [pair.label.replace("_", " ")] if pair.label else []
    if pair.rank == NO_IMAGE:
        gathering.problems.add("incomplete", "has no image", path)
    elif not any(pair.captions):
        number = "has a class number, but nothing names the class"
        gathering.problems.add("incomplete", number if pair.has_class_number else "has no caption", path)
    elif path in gathering.index:
        gathering.problems.add("skipped", "comes twice", path)
    else:
        return True
    return False


def find_pairs(read: ReadAt, length: int, title: str, problems: Problems, options: Options) -> Iterable[Pair]:
    """All pairs of one archive, in the order of their first members."""
    pairs: dict[str, Pair] = {}
    for full_name, offset, size, problem in walk(read, length):
        name = full_name.removeprefix("./")  # as GNU tar writes for `.`
        if problem:
            problems.add(*problem, f"{title}/{name}" if name else title)
            continue
        folder, slash, file = name.rpartition("/")
        stem, _, kind = file.partition(".")
        if not stem or not kind or ("__" in name and META.search(name)):
            continue  # no key, as webdataset sees it: `.DS_Store`, `._photo.jpg` of macOS, `README`
        kind = kind.lower()
        key = folder + slash + stem
        if is_image_name(f".{kind}"):
            pair = pairs.setdefault(key, Pair(key))
            if size > MAX_BYTES:
                problems.add("skipped", f"has more than {MAX_BYTES >> 20} MB", f"{title}/{name}")
                continue
            add_image(pair, name, kind, (offset, size), title=title, problems=problems, options=options)
        elif kind.rpartition(".")[2] in TEXTS:
            pair = pairs.setdefault(key, Pair(key))
            if size > MAX_TEXT_BYTES:
                what = f"is a text of more than {MAX_TEXT_BYTES >> 20} MB"
                problems.add("skipped", what, f"{title}/{name}")
                continue
            try:
                add_text(pair, kind, read(offset, size), options)
            except (ValueError, RecursionError):
                what = "is not JSON" if kind.endswith("json") else "is not UTF-8 text"
                problems.add("unreadable", what, f"{title}/{name}")
    return pairs.values()


def add_image(
    pair: Pair,
    name: str,
    kind: str,
    place: tuple[int, int],
    *,
    title: str,
    problems: Problems,
    options: Options,
) -> None:
    """Takes the likeliest of several images with one key; the others are noted."""
    if options.image_column:
        if kind != options.image_column.lower().lstrip("."):
            return
        rank = 0
    else:
        first, dot, _ = kind.partition(".")
        rank = 0 if not dot else 1 if first in ("image", "img", "0") else 2
    if pair.rank < NO_IMAGE:
        other = name if rank >= pair.rank else pair.image
        problems.add("skipped", "is a further image of its pair", f"{title}/{other}")
    if rank < pair.rank:
        pair.image, pair.rank, (pair.offset, pair.size) = name, rank, place


def add_text(pair: Pair, kind: str, data: bytes, options: Options) -> None:
    """Adds what a text member says; ValueError or RecursionError when it cannot be read."""
    text = data.decode("utf-8-sig")
    column = options.caption_column
    if kind.endswith("json"):
        add_notes(pair, json.loads(text), column)
    elif "cls" in kind.split("."):
        if text.strip().lstrip("-").isdecimal():
            pair.has_class_number = True
        elif text.strip():
            pair.label = clean_caption(text)
    elif column is None or kind == column.lower().lstrip("."):
        pair.captions += [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def add_notes(pair: Pair, notes: Any, column: str | None) -> None:
    """Adds what a JSON member says: captions, the class and the side."""
    if not isinstance(notes, dict):
        if column is None:
            pair.captions += captions_in(notes)
        return
    if column is not None:
        pair.captions += captions_in(notes.get(column))
    else:
        said = [text for key in CAPTION_KEYS for text in captions_in(notes.get(key))]
        lesser = (captions_in(notes.get(key)) for key in LESSER_KEYS)
        pair.captions += said or next(filter(None, lesser), [])
    for key in CLASS_KEYS:
        value = notes.get(key)
        if isinstance(value, str) and value.strip():
            pair.label = clean_caption(value)
            break
        pair.has_class_number |= isinstance(value, int)
    pair.side = side_in(notes.get("split")) or pair.side


def short_names(shards: list[str]) -> list[str]:
    """Paths from the folder that all shards share."""
    parts = [without_query(shard).split("/") for shard in shards]
    shared = len(os.path.commonprefix([path[:-1] for path in parts]))  # noqa: RUF071 - lists, not characters
    return ["/".join(path[shared:]) for path in parts]
