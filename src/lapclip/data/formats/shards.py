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
from operator import itemgetter
from typing import Any

from lapclip.data.catalogue import Catalogue, Gathering, Options, Problems, Side, clean_caption
from lapclip.data.files import MAX_BYTES, MISSING, file_stamp, is_image_name
from lapclip.data.formats.columns import captions_in, side_in
from lapclip.data.formats.names import short_names, sides_in
from lapclip.data.formats.remote import COPY_SHARDS, NoRanges, RemoteFiles, is_url, without_query
from lapclip.data.formats.tar import ReadAt, walk
from lapclip.errors import UserError, reason_for
from lapclip.files import open_regular

MAX_TEXT_BYTES = 2**20  # of one caption file
TEXTS = ("txt", "text", "caption", "cap", "json", "cls")
CAPTION_KEYS = ("caption", "captions", "text", "texts", "sentence", "sentences", "raw")
LESSER_KEYS = ("description", "title", "alt", "alt_text", "TEXT", "CAPTION", "prompt")  # the first non-empty
CLASS_KEYS = ("class_name", "label_name", "label", "class")
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
        with opened(shard, self.remote) as (read, _):
            data = read(self.offsets[index], self.sizes[index])
        if len(data) < self.sizes[index]:
            raise OSError("is truncated: its shard became shorter")
        return data

    def stamp(self, index: int) -> str:
        shard = self.shards[self.shard_of[index]]
        # Without the path: a shard that was moved is the same shard.
        known = self.remote.stamp(shard) if is_url(shard) else " ".join(file_stamp(shard).split(" ")[:2])
        return known and f"{known} {self.offsets[index]} {self.sizes[index]}"


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

    key: str
    images: list[tuple[int, str, int, int]] = field(default_factory=list)  # rank, name, offset and size
    captions: list[str] = field(default_factory=list)
    label: str | None = None
    side: Side | None = None
    has_class_number: bool = False


def read_shards(shards: list[str], name: str, options: Options) -> Catalogue:
    """The catalogue of some shards, by paths or URLs."""
    titles = short_names(map(without_query, shards))
    gathering = Gathering()
    reader = ShardReader(shards, array("i"), array("q"), array("q"))
    for number, (shard, title, side) in enumerate(zip(shards, titles, sides_in(titles), strict=True)):
        try:
            with opened(shard, reader.remote) as (read, length):
                pairs = find_pairs(read, length, title, gathering.problems, options)
        except FileNotFoundError:
            gathering.problems.add(*MISSING, title)
            continue
        except NoRanges as error:
            what = f"the server of `{shard}` does not support range requests"
            raise UserError(what, hint=COPY_SHARDS) from error
        except (OSError, ValueError) as error:
            if is_url(shard):  # the line or the permission, and with it most likely all other shards
                raise UserError(str(error), hint="check the URL and the connection") from error
            gathering.problems.add("unreadable", f"cannot be opened: {reason_for(error)}", title)
            continue
        for pair in pairs:
            add_pair(pair, number, title, side, gathering, reader)
    return gathering.catalogue(name, "tar", reader)


def add_pair(
    pair: Pair, shard: int, title: str, side: Side | None, gathering: Gathering, reader: ShardReader
) -> None:
    """Adds the likeliest of the images with one key, with what is said about it; what is missing is noted."""
    (_, image, offset, size), *others = sorted(pair.images, key=itemgetter(0)) or [(0, pair.key, 0, 0)]
    for _, name, _, _ in others:
        gathering.problems.add("skipped", "is a further image of its pair", f"{title}/{name}")
    path = f"{title}/{image}"
    captions = list(dict.fromkeys(filter(None, map(clean_caption, pair.captions))))
    if not captions and pair.label:
        captions = [pair.label.replace("_", " ")]
    if not pair.images:
        gathering.problems.add("incomplete", "has no image", path)
    elif not captions:
        number = "has a class number, but nothing names the class"
        gathering.problems.add("incomplete", number if pair.has_class_number else "has no caption", path)
    elif path in gathering.index:
        gathering.problems.add("skipped", "comes twice", path)
    else:
        gathering.add(path, captions, side=pair.side or side, label=pair.label)
        reader.shard_of.append(shard)
        reader.offsets.append(offset)
        reader.sizes.append(size)


def find_pairs(read: ReadAt, length: int, title: str, problems: Problems, options: Options) -> Iterable[Pair]:
    """All pairs of one archive, in the order of their first members."""
    pairs: dict[str, Pair] = {}
    wanted = options.image_column and options.image_column.lower().lstrip(".")
    for full_name, offset, size, problem in walk(read, length):
        name = full_name.removeprefix("./")  # as GNU tar writes for `.`
        if problem:
            problems.add(*problem, f"{title}/{name}" if name else title)
            continue
        folder, slash, file = name.rpartition("/")
        stem, _, kind = file.partition(".")
        kind = kind.lower()
        is_image, is_text = is_image_name(f".{kind}"), kind.rpartition(".")[2] in TEXTS
        # No key, as webdataset sees it: `.DS_Store`, `._photo.jpg` of macOS, `README`, or its own notes.
        if not stem or not (is_image or is_text) or ("__" in name and META.search(name)):
            continue
        key = folder + slash + stem
        pair = pairs.setdefault(key, Pair(key))
        max_bytes = MAX_BYTES if is_image else MAX_TEXT_BYTES
        if size > max_bytes:
            problems.add("skipped", f"has more than {max_bytes >> 20} MB", f"{title}/{name}")
        elif is_image:
            first, dot, _ = kind.partition(".")
            rank = 0 if not dot else 1 if first in ("image", "img", "0") else 2
            if wanted in (None, kind):
                pair.images.append((rank, name, offset, size))
        else:
            try:
                add_text(pair, kind, read(offset, size), options)
            except (ValueError, RecursionError):
                what = "is not JSON" if kind.endswith("json") else "is not UTF-8 text"
                problems.add("unreadable", what, f"{title}/{name}")
    return pairs.values()


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
        notes = {"caption": notes} if column is None else {}
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
