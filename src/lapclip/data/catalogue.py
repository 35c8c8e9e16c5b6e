"""What a source holds, before any image is opened: a name and captions for each image, and how to read its bytes.

Every format is turned into one `Catalogue`; everything after that knows no formats.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lapclip.data.files import FileReader, Kind, Problem
from lapclip.errors import UserError, shortened_path

Side = Literal["train", "validation", "test"]
SIDES: dict[str, Side] = {
    "train": "train", "training": "train", "restval": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip

MAX_CHARACTERS = 10_000  # of a caption; no text tower reads further
MAX_CLASSES = 10_000
NUM_NAMED = 10_000  # examples of each problem; all are counted
EMPTY = "has an empty caption"
INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\s\ufeff\ufffe\uffff\ud800-\udfff]+")


class Reader(Protocol):
    """Reads the bytes of images by number. It can be sent to another process."""

    def read(self, index: int) -> bytes:
        """The encoded image; OSError or ValueError, in words, when it cannot be read."""

    def stamp(self, index: int) -> str:
        """Changes whenever the image may have changed; known without reading it, empty when it is gone."""


@dataclass(frozen=True)
class Subset:
    """Some of a reader's images."""

    reader: Reader
    numbers: list[int]

    def read(self, index: int) -> bytes:
        return self.reader.read(self.numbers[index])

    def stamp(self, index: int) -> str:
        return self.reader.stamp(self.numbers[index])


@dataclass(frozen=True)
class Options:
    """How a person asked for a source to be read; None means "detect it"."""

    format: str | None = None
    images: str | None = None  # the folder that names in a table are relative to
    image_column: str | None = None
    caption_column: str | None = None


@dataclass
class Problems:
    """What was omitted or repaired while opening, counted by message, with its kind and the first names."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)

    def add(self, kind: Kind, what: str, name: str) -> None:
        self.counts[what] += 1
        self.kinds[what] = kind
        if self.counts[what] <= NUM_NAMED:
            self.names.setdefault(what, []).append(shortened_path(name))


@dataclass
class Catalogue:
    """Images by number: lists and fields of the same length."""

    name: str  # as the person wrote the source
    format: str  # as `--format` takes it
    reader: Reader
    names: list[str]  # what a person calls the image: its path within the source, mostly
    captions: list[list[str]]  # at least one each, cleaned
    sides: list[Side | None]  # as the dataset defines them, else None
    labels: list[str | None]  # the class, where there are classes
    problems: Problems
    columns: dict[str, str] = field(default_factory=dict)  # of a table: the `image` and the `caption` column
    guessed_column: str | None = None  # of a table's captions, though its name does not say so
    tables: tuple[str, ...] = ()  # of a folder with several: the one that is used, then the others


class Gathering:
    """Collects images and captions in any order; several rows of one image become one."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.captions: list[list[str]] = []
        self.paths: list[str] = []  # empty for images that are not files
        self.sides: list[Side | None] = []
        self.labels: list[str | None] = []
        self.missing: dict[str, Problem] = {}
        self.problems = Problems()
        self.columns: dict[str, str] = {}
        self.hint = "pass the folder that they are in with `--images FOLDER`"  # if none is found

    def add(
        self, name: str, captions: Iterable[str], *,
        path: str = "", side: Side | None = None, label: str | None = None,
    ) -> int:  # fmt: skip
        """Adds captions to the image of that name; returns its number."""
        number = self.index.setdefault(name, len(self.captions))
        if number == len(self.captions):
            self.captions.append([])
            self.paths.append(path)
            self.sides.append(side)
            self.labels.append(label)
        own = self.captions[number]
        for caption in captions:
            cleaned = clean_caption(caption)
            if len(cleaned) > MAX_CHARACTERS:
                what = f"has a caption of more than {MAX_CHARACTERS:,} characters; it was cut"
                self.problems.add("repaired", what, name)
            if cleaned:
                own.append(cleaned[:MAX_CHARACTERS])
            else:
                self.problems.add("incomplete", EMPTY, name)
        return number

    def add_file(
        self, name: str, found: str | Problem, captions: Iterable[str], *,
        side: Side | None = None, label: str | None = None,
    ) -> None:  # fmt: skip
        """Adds captions to an image that is a file, or notes why there is no such file."""
        if not isinstance(found, Problem):
            self.add(name, captions, path=found, side=side, label=label)
        elif name not in self.missing:
            self.missing[name] = found
            self.problems.add(*found, name)

    def catalogue(self, name: str, format: str, reader: Reader | None = None) -> Catalogue:
        """All images with a caption; the numbers of `reader` are those that `add` returned."""
        if self.missing and not self.captions:
            missing, problem = next(iter(self.missing.items()))
            what = f"none of the {len(self.missing):,} images listed in `{name}` can be used"
            raise UserError(f"{what}; `{shortened_path(missing)}` {problem.what}", hint=self.hint)
        names, reader = list(self.index), reader or FileReader(self.paths)
        kept = [number for number, captions in enumerate(self.captions) if captions]
        if len(kept) < len(names):
            told = {*self.problems.names.get(EMPTY, ())}
            for number, captions in enumerate(self.captions):
                if not captions and shortened_path(names[number]) not in told:
                    self.problems.add("incomplete", "has no caption", names[number])
            names = [names[number] for number in kept]
            self.captions = [self.captions[number] for number in kept]
            self.sides = [self.sides[number] for number in kept]
            self.labels = [self.labels[number] for number in kept]
            reader = Subset(reader, kept)
        if not names:
            hint = "`lapclip data check --help` lists the formats; `--format` selects one"
            raise UserError(f"`{name}` holds no images with captions{self.most_common_problem()}", hint=hint)
        lists = names, self.captions, self.sides, self.labels
        return Catalogue(name, format, reader, *lists, self.problems, self.columns)

    def drop_single_labels(self) -> None:
        """A column of classes has few values; one with a value for nearly each image holds no classes."""
        num_classes = len(set(self.labels) - {None})
        if num_classes > max(20, min(len(self.labels) // 5, MAX_CLASSES)):
            self.labels = [None] * len(self.labels)

    def most_common_problem(self) -> str:
        """`: each of 12 is missing, such as ...`, or nothing."""
        for what, count in self.problems.counts.most_common(1):
            return f": each of {count:,} {what}, such as `{self.problems.names[what][0]}`"
        return ""


def clean_caption(text: str) -> str:
    """One line without control characters, composed; words of every script and emoji stay as they are."""
    if text.isascii() and text.isprintable():
        return " ".join(text.split()) if "  " in text or text[:1] == " " or text[-1:] == " " else text
    return unicodedata.normalize("NFC", INVISIBLE.sub(" ", text)).strip()
