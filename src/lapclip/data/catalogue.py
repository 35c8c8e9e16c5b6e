"""What a source holds, before any image is opened: a name and captions for each image, and how to read its bytes.

Every kind of source is turned into one `Catalogue`; everything after that knows no kinds.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lapclip.errors import UserError, shortened

Side = Literal["train", "validation", "test"]
SIDES: dict[str, Side] = {
    "train": "train", "training": "train", "restval": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip

MOST_CHARACTERS = 10_000  # of a caption; no text tower reads further
NUM_NAMED = 100  # of each kind of problem; all are counted
UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\s\ufeff\ufffe\uffff\ud800-\udfff]+")


class Reader(Protocol):
    """Reads the bytes of images by number. It can be sent to another process."""

    def read(self, index: int) -> bytes:
        """The encoded image; OSError or ValueError, in words, when it cannot be had."""

    def stamp(self, index: int) -> str:
        """Changes whenever the image may have; found without reading it, empty when it is gone."""


@dataclass(frozen=True)
class Chosen:
    """Some of a reader's images."""

    reader: Reader
    numbers: list[int]

    def read(self, index: int) -> bytes:
        return self.reader.read(self.numbers[index])

    def stamp(self, index: int) -> str:
        return self.reader.stamp(self.numbers[index])


@dataclass(frozen=True)
class Options:
    """How a person asked for a source to be read; None means "look and decide"."""

    format: str | None = None
    images: str | None = None  # the folder that names in a table are relative to
    image_column: str | None = None
    caption_column: str | None = None


@dataclass
class Problems:
    """What was left out or mended while opening, counted by kind, the first of each kind by name."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, name: str) -> None:
        self.counts[what] += 1
        if self.counts[what] <= NUM_NAMED:
            self.names.setdefault(what, []).append(shortened(name))


@dataclass
class Catalogue:
    """Images by number: lists and fields of the same length."""

    name: str  # as the person wrote the source
    format: str  # a key of `FORMATS`
    reader: Reader
    names: list[str]  # what a person calls the image: its path within the source, mostly
    captions: list[list[str]]  # at least one each, cleaned
    sides: list[Side | None]  # where the dataset itself says so
    labels: list[str | None]  # the class, where there are classes
    problems: Problems

    @property
    def num_captions(self) -> int:
        return sum(map(len, self.captions))


class Gathering:
    """Collects images and captions in any order; several rows of one image become one."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.captions: list[list[str]] = []
        self.sides: list[Side | None] = []
        self.labels: list[str | None] = []
        self.problems = Problems()

    def add(
        self, name: str, captions: Iterable[str], *, side: Side | None = None, label: str | None = None
    ) -> int:
        """Adds captions to the image of that name; returns its number."""
        number = self.index.setdefault(name, len(self.captions))
        if number == len(self.captions):
            self.captions.append([])
            self.sides.append(side)
            self.labels.append(label)
        own = self.captions[number]
        for caption in captions:
            cleaned = clean_caption(caption)
            if not cleaned:
                self.problems.add("has an empty caption", name)
            elif len(cleaned) > MOST_CHARACTERS:
                self.problems.add(
                    f"has a caption of more than {MOST_CHARACTERS:,} characters; it was cut", name
                )
                own.append(cleaned[:MOST_CHARACTERS])
            else:
                own.append(cleaned)
        return number

    def catalogue(self, name: str, format: str, reader: Reader) -> Catalogue:
        """All images with a caption; the numbers of `reader` are those that `add` returned."""
        names = list(self.index)
        kept = [number for number, captions in enumerate(self.captions) if captions]
        if len(kept) < len(names):
            for number, captions in enumerate(self.captions):
                if not captions:
                    self.problems.add("has no caption", names[number])
            names = [names[number] for number in kept]
            self.captions = [self.captions[number] for number in kept]
            self.sides = [self.sides[number] for number in kept]
            self.labels = [self.labels[number] for number in kept]
            reader = Chosen(reader, kept)
        result = Catalogue(name, format, reader, names, self.captions, self.sides, self.labels, self.problems)
        if not result.names:
            raise UserError(
                f"`{name}` holds no images with captions{self.why_not()}",
                hint="`lapclip data check --help` lists what can be read; `--format` forces one of them",
            )
        return result

    def why_not(self) -> str:
        worst = self.problems.counts.most_common(1)
        return (
            f": each of {worst[0][1]:,} {worst[0][0]}, such as `{self.problems.names[worst[0][0]][0]}`"
            if worst
            else ""
        )


def clean_caption(text: str) -> str:
    """One line without control characters, composed; words of every script and emoji stay as they are."""
    if text.isascii() and text.isprintable():
        return " ".join(text.split()) if "  " in text or text[:1] == " " or text[-1:] == " " else text
    return unicodedata.normalize("NFC", UNSEEN.sub(" ", text)).strip()
