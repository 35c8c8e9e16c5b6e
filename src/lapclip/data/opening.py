"""From the name of a source to pairs that can be trained on: opened, packed, split."""

import re
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from lapclip.config import DataConfig
from lapclip.data.catalogue import Catalogue, Options
from lapclip.data.decode import RECORD, digest
from lapclip.data.groups import content_groups, side_of_groups
from lapclip.data.journal import content_keys, locked
from lapclip.data.pack import (
    Pack,
    Progress,
    folder_bytes,
    folder_for,
    needed_bytes,
    pack,
    room_bytes,
    size_for,
)
from lapclip.data.recognise import open_catalogue
from lapclip.data.source import Mixed, Packed, Source, Streamed
from lapclip.data.synthetic import DocumentsSource, HeldOutScenes, SceneSource
from lapclip.data.view import TRAIN, UNUSED, VALIDATION, View, write_view
from lapclip.errors import UserError, suggest

MOST_SCENES = 100_000_000  # their order is held in memory
LEAST_PICTURES = 4
T = TypeVar("T")


@dataclass
class Part:
    """One of the sources named, opened."""

    name: str  # that finds it again from any folder
    weight: float
    training: Source
    held_out: Source
    files: "Files | None" = None  # None for what lapclip draws itself, and once it is released


@dataclass(frozen=True)
class Files:
    """What is known of a part that somebody else made."""

    catalogue: Catalogue
    pack: Pack
    view: View
    groups: np.ndarray  # of each picture of the catalogue
    sides: np.ndarray
    is_streamed: bool


@dataclass(frozen=True)
class Data:
    """Pairs to train on, and pairs held out."""

    parts: tuple[Part, ...]
    fingerprint: str  # changes when pictures or captions do
    training: Source = field(repr=False)
    held_out: Source = field(repr=False)

    @property
    def source(self) -> str:
        """The name that opens the same from any folder."""
        return " + ".join(
            part.name + (f"@{part.weight:g}" if part.weight != 1 else "") for part in self.parts
        )

    def release(self) -> None:
        """Lets go of what only opening and the doctor need: the words of a million pairs."""
        for part in self.parts:
            part.files = None


def open_source(config: DataConfig, image_size: int) -> Generator[Progress, None, Data]:
    """Opens what `source` names, packs what is not packed, and says how far it is."""
    parts = []
    for name, weight in parse_source(config.source):
        if name.partition(":")[0] == "synthetic":
            training, held_out = open_synthetic(name)
            parts.append(Part(name, weight, training, held_out))
        else:
            parts.append((yield from open_files(config, name, weight, size_for(image_size))))
    fingerprint = fingerprint_of(parts)
    if len(parts) == 1:
        return Data(tuple(parts), fingerprint, parts[0].training, parts[0].held_out)
    weights = tuple(part.weight for part in parts)
    return Data(
        tuple(parts),
        fingerprint,
        Mixed(tuple(part.training for part in parts), weights),
        Mixed(tuple(part.held_out for part in parts), (1.0,) * len(parts)),
    )


def fingerprint_of(parts: list[Part]) -> str:
    own = [f"{p.files.view.fingerprint if p.files else p.name}@{p.weight}" for p in parts]
    return digest(*(o.encode() for o in own)).hex()


def finished(work: Generator[object, None, T]) -> T:
    """The result of work whose progress nobody wants to see."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def parse_source(text: str) -> list[tuple[str, float]]:
    """Names and weights: `flickr8k + emoji@2` is two sources, the second one twice as often."""
    parts = []
    for part in text.split(" + "):
        name, at, weight = part.strip().rpartition("@")
        if not at or not re.fullmatch(r"\d+(\.\d+)?|\.\d+", weight):
            name, weight = part.strip(), "1"
        if not name:
            raise UserError(
                f"`{text}` names no source beside a `+`",
                hint="write `photos + captions.csv@2`; the number is a weight",
            )
        if not 0 < float(weight) <= 1000:
            raise UserError(
                f"`{part.strip()}` has a weight of {weight}",
                hint="a weight lies above 0, and is at most 1000",
            )
        parts.append((name, float(weight)))
    return parts


def open_synthetic(name: str) -> tuple[Source, Source]:
    """What lapclip draws itself; nothing is packed."""
    _, _, rest = name.partition(":")
    if rest == "documents":
        return DocumentsSource(first=0, num_pairs=216), DocumentsSource(first=216, num_pairs=24)
    if rest and not (rest.isascii() and rest.isdigit() and int(rest) >= 2):
        raise UserError(
            f"`{name}` should end in a number of pairs, at least 2, or in `documents`{suggest(rest, ['documents'])}",
            hint="write `synthetic:50000` or `synthetic:documents`",
        )
    if int(rest or 0) > MOST_SCENES:
        raise UserError(
            f"`{name}` asks for more than {MOST_SCENES:,} pairs",
            hint="nobody has that many minutes; ask for fewer",
        )
    return (SceneSource(num_pairs=int(rest)) if rest else SceneSource()), HeldOutScenes()


def open_files(config: DataConfig, name: str, weight: float, size: int) -> Generator[Progress, None, Part]:
    """Pictures and captions that somebody else made: from a pack, or decoded anew each time where none fits."""
    options = Options(config.format, config.images, config.image_column, config.caption_column)
    catalogue, identity = open_catalogue(name, options)
    folder = folder_for(identity, size)
    is_streamed = config.pack is False or (
        config.pack is None and needed_bytes(catalogue, size) > room_bytes() + folder_bytes(folder)
    )
    if is_streamed:
        packed = Pack(folder, size, named_records(catalogue), {}, 0)
        groups = np.arange(len(catalogue.names))
    else:
        packed = yield from pack(catalogue, identity, size, config.workers)
        groups = content_groups(packed.records)
    sides = sides_of(catalogue, packed.records, groups, config.validation_share)
    usable = np.flatnonzero(packed.records["row"] >= 0)
    if len(usable) < LEAST_PICTURES:
        raise UserError(
            f"`{name}` has {len(usable)} pictures that can be used, and at least {LEAST_PICTURES} are needed"
            + (f"; {first_unreadable(catalogue, packed)}" if packed.unreadable else ""),
            hint=f"`lapclip data check {name}` says what is wrong with the others",
        )
    with locked(folder):
        view = write_view(
            folder,
            catalogue,
            usable,
            rows=packed.records["row"][usable],
            keys=content_keys(packed.records)[usable],
            groups=groups[usable],
            sides=sides[usable],
        )
    files = Files(catalogue, packed, view, groups, sides, is_streamed)
    training, held_out = (make_source(files, side, config) for side in (TRAIN, VALIDATION))
    return Part(identity, weight, training, held_out, files)


def make_source(files: Files, side: int, config: DataConfig) -> Source:
    each_caption = config.captions == "all" and side == TRAIN
    pack, view = files.pack, files.view
    if not files.is_streamed:
        return Packed(view, pack.size, side, each_caption, pixels_file=pack.path / "pixels")
    return Streamed(
        view,
        pack.size,
        side,
        each_caption,
        reader=files.catalogue.reader,
        mean_bytes=mean_bytes(files.catalogue),
    )


def sides_of(catalogue: Catalogue, records: np.ndarray, groups: np.ndarray, share: float) -> np.ndarray:
    """The dataset's own split where it has one; otherwise by the content of each group of equal pictures."""
    own = np.array([OWN[side] for side in catalogue.sides], dtype=np.int8)
    is_usable = records["row"] >= 0
    if (own == UNUSED).any() and not (own == VALIDATION).any():
        own[own == UNUSED] = VALIDATION  # a test set, and nothing else to measure on
    if (own[is_usable] == TRAIN).any() and (own[is_usable] == VALIDATION).any():
        return own
    by_content = side_of_groups(records, groups, share)
    return np.where(own == UNUSED, UNUSED, np.where(by_content, VALIDATION, TRAIN)).astype(np.int8)


OWN = {None: TRAIN, "train": TRAIN, "validation": VALIDATION, "test": UNUSED}


def named_records(catalogue: Catalogue) -> np.ndarray:
    """Records of pictures that nobody has looked at: each is told from the others by its name."""
    records = np.zeros(len(catalogue.names), RECORD)  # row 0, not -1: nothing is known to be wrong with them
    for record, name in zip(records, catalogue.names, strict=True):
        record["content"] = np.void(digest(name.encode(errors="surrogateescape")))
    return records


def mean_bytes(catalogue: Catalogue) -> float:
    """Of an encoded picture, by a few of them."""
    sizes = []
    for index in np.linspace(0, len(catalogue.names) - 1, 16).astype(int):
        try:
            sizes.append(len(catalogue.reader.read(int(index))))
        except (OSError, ValueError):
            continue
    return float(np.mean(sizes)) if sizes else 100_000.0


def first_unreadable(catalogue: Catalogue, packed: Pack) -> str:
    number, why = next(iter(packed.unreadable.items()))
    return f"`{catalogue.names[number]}` {why}"
