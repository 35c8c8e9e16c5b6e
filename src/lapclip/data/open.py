"""From the name of a source to pairs that can be trained on: opened, packed, split."""

import os
import re
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lapclip.config import DataConfig
from lapclip.data.captions import TRAIN, UNUSED, VALIDATION, View, write_view
from lapclip.data.catalogue import Catalogue, Options
from lapclip.data.decode import RECORD, digest
from lapclip.data.formats.detect import open_catalogue
from lapclip.data.journal import cannot_pack, content_keys, locked
from lapclip.data.pack import (
    Pack,
    describe_folder,
    folder_bytes,
    folder_for,
    needed_bytes,
    pack,
    room_bytes,
    size_for,
)
from lapclip.data.source import Mixed, Packed, Source, Streamed
from lapclip.data.split import content_groups, side_of_groups
from lapclip.data.synthetic import DocumentsSource, SceneSource, ValidationScenes
from lapclip.errors import UserError, shortened, suggest
from lapclip.units import Progress

MOST_SCENES = 100_000_000  # their order is held in memory
LEAST_IMAGES = 4
LEAST_ON_A_SIDE = 2
MOST_WEIGHT = 1000
WEIGHT = re.compile(r"(\d+(\.\d*)?|\.\d+)(e-?\d+)?")
PLAIN_STEMS = ("", "captions", "results", "metadata", "train", "data", "images")  # that name no dataset


@dataclass
class Part:
    """One of the sources named, opened."""

    name: str  # that finds it again from any folder
    weight: float
    training: Source
    validation: Source
    files: "Files | None" = None  # None for what lapclip draws itself, and once it is released


@dataclass(frozen=True)
class Files:
    """What is known of a part that somebody else made."""

    catalogue: Catalogue
    pack: Pack
    view: View
    groups: np.ndarray  # of each image of the catalogue
    sides: np.ndarray
    is_streamed: bool


@dataclass(frozen=True)
class Data:
    """Pairs to train on, and pairs held out."""

    parts: tuple[Part, ...]
    fingerprint: str  # changes when images or captions do
    training: Source = field(repr=False)
    validation: Source = field(repr=False)
    images: str | None = None  # the folder that `--images` means

    @property
    def source(self) -> str:
        """The name that opens the same from any folder."""
        return " + ".join(
            part.name + (f"@{part.weight!r}" if part.weight != 1 else "") for part in self.parts
        )

    def release(self) -> None:
        """Lets go of what only opening and the doctor need: the words of a million pairs."""
        for part in self.parts:
            part.files = None


def open_source(config: DataConfig, image_size: int) -> Generator[Progress, None, Data]:
    """Opens what `source` names, packs what is not packed, and says how far it is."""
    named = parse_source(config.source)
    size = size_for(image_size)
    found = [None if is_synthetic(name) else open_part(config, name) for name, _ in named]
    is_streamed = must_stream(config, [part for part in found if part], size)
    packs = []
    for part in found:
        if part and is_streamed:
            packs.append(Pack(folder_for(part.identity, size), size, named_records(part.catalogue), {}, 0))
        elif part:
            packs.append((yield from pack(part.catalogue, part.identity, size, config.workers)))
    files = split([part for part in found if part], packs, config.validation_share, is_streamed)
    waiting = iter(files)
    parts = []
    for (name, weight), part in zip(named, found, strict=True):
        if part is None:
            parts.append(Part(name, weight, *open_synthetic(name)))
        else:
            own = next(waiting)
            training, validation = (make_source(own, side, config) for side in (TRAIN, VALIDATION))
            parts.append(Part(part.identity, weight, training, validation, own))
    images = next((part.images for part in found if part), config.images)
    return Data(tuple(parts), fingerprint_of(parts), *mixed(parts), images)


def mixed(parts: list[Part]) -> tuple[Source, Source]:
    """The training pairs and the held-out pairs of all parts; a part that has none of one kind is not in it."""
    if len(parts) == 1:
        return parts[0].training, parts[0].validation
    training = [part for part in parts if part.training.num_pairs]
    validation = tuple(part.validation for part in parts if part.validation.num_pairs)
    weights = tuple(part.weight for part in training)
    return Mixed(tuple(part.training for part in training), weights), Mixed(
        validation, (1.0,) * len(validation)
    )


@dataclass(frozen=True)
class Found:
    """A source that somebody else made, as it was found."""

    catalogue: Catalogue
    identity: str
    images: str | None  # the folder that `--images` means


def open_part(config: DataConfig, name: str) -> Found:
    images = resolve_images(config.images, name)
    options = Options(config.format, images, config.image_column, config.caption_column)
    catalogue, identity = open_catalogue(name, options)
    return Found(catalogue, identity, images)


def resolve_images(images: str | None, name: str) -> str | None:
    """The folder meant: here, or beside the table; from now on by its whole path."""
    if images is None:
        return None
    images = os.path.expanduser(images)
    beside = os.path.join(os.path.dirname(os.path.abspath(name)), images)
    return beside if not os.path.exists(images) and os.path.exists(beside) else os.path.abspath(images)


def must_stream(config: DataConfig, found: list[Found], size: int) -> bool:
    """Whether images are decoded anew in each epoch: as asked, or because not all packs fit on the disk."""
    if config.pack is not None:
        return not config.pack
    needed = sum(needed_bytes(part.catalogue, size) for part in found)
    there = sum(folder_bytes(folder_for(part.identity, size)) for part in found)
    return needed > room_bytes() + there


def split(found: list[Found], packs: list[Pack], share: float, is_streamed: bool) -> list[Files]:
    """Decides the sides of all parts together, so that an image that two of them hold is on one side."""
    if not found:
        return []
    records = np.concatenate([packed.records for packed in packs])
    groups = np.arange(len(records)) if is_streamed else content_groups(records)
    by_content = side_of_groups(records, groups, share)
    ends = np.cumsum([len(packed.records) for packed in packs])
    places = [slice(end - len(packed.records), end) for packed, end in zip(packs, ends, strict=True)]
    sides = np.concatenate(
        [
            sides_of(f.catalogue, records[place], by_content[place])
            for f, place in zip(found, places, strict=True)
        ]
    )
    if len(found) > 1:  # within one source its own split wins
        leaked = (sides == TRAIN) & np.isin(groups, groups[sides == VALIDATION])
        sides[leaked] = UNUSED
    return [
        write_files(part, packed, groups[place], sides[place], is_streamed)
        for part, packed, place in zip(found, packs, places, strict=True)
    ]


def write_files(part: Found, packed: Pack, groups: np.ndarray, sides: np.ndarray, is_streamed: bool) -> Files:
    usable = np.flatnonzero(packed.records["row"] >= 0)
    if len(usable) < LEAST_IMAGES:
        name = part.catalogue.name
        raise UserError(
            f"`{name}` has {len(usable)} images that can be used, and at least {LEAST_IMAGES} are needed"
            + (f"; {first_unreadable(part.catalogue, packed)}" if packed.unreadable else ""),
            hint="add images with captions to it, or mend those that are broken",
        )
    with locked(packed.path):
        describe_folder(packed.path, part.identity, packed.size)
        try:
            view = write_view(
                packed.path,
                part.catalogue,
                usable,
                rows=packed.records["row"][usable],
                keys=content_keys(packed.records)[usable],
                groups=groups[usable],
                sides=sides[usable],
            )
        except OSError as error:
            raise cannot_pack(packed.path, error) from None
    return Files(part.catalogue, packed, view, groups, sides, is_streamed)


def fingerprint_of(parts: list[Part]) -> str:
    own = [f"{p.files.view.fingerprint if p.files else p.name}@{p.weight}" for p in parts]
    return digest(*(o.encode() for o in own)).hex()


def parse_source(text: str) -> list[tuple[str, float]]:
    """Names and weights: `flickr8k + emoji@2` is two sources, the second one twice as often."""
    parts = []
    for part in [text] if os.path.exists(text) else text.split(" + "):
        name, at, weight = part.strip().rpartition("@")
        if not at or os.path.exists(part.strip()) or not WEIGHT.fullmatch(weight):
            name, weight = part.strip(), "1"
        if not name:
            raise UserError(
                f"`{text}` names no source beside a `+`",
                hint="write `photos + captions.csv@2`; the number is a weight",
            )
        if not 0 < float(weight) <= MOST_WEIGHT:
            raise UserError(
                f"`{part.strip()}` has a weight of {weight}",
                hint=f"a weight lies above 0, and is at most {MOST_WEIGHT}",
            )
        parts.append((name, float(weight)))
    return parts


def plain_name(source: str) -> str:
    """What a run over a source is called: `flickr8k` for `flickr8k/captions.txt`, `photos-emoji` for two."""
    return "-".join(plain_part(name) for name, _ in parse_source(source)[:2])


def plain_part(name: str) -> str:
    if name.partition(":")[0] in ("synthetic", "emoji", "hf"):
        name = name.replace("/", "-")
    path = Path(name).absolute()
    stem = re.sub(r"[{*\[].*", "", path.stem)  # of shards
    named = path.parent.name if stem in PLAIN_STEMS else stem
    return re.sub(r"[^\w.]+", "-", named).strip("-._") or "run"


def is_synthetic(name: str) -> bool:
    return name.partition(":")[0] == "synthetic"


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
    return (SceneSource(num_pairs=int(rest)) if rest else SceneSource()), ValidationScenes()


def make_source(files: Files, side: int, config: DataConfig) -> Source:
    each_caption = config.captions == "all" and side == TRAIN
    pack, view = files.pack, files.view
    if not files.is_streamed:
        packed = Packed(view, pack.size, side, each_caption, pixels_file=pack.path / "pixels")
        packed.hold()
        return packed
    return Streamed(
        view,
        pack.size,
        side,
        each_caption,
        reader=files.catalogue.reader,
        mean_bytes=mean_bytes(files.catalogue),
    )


def sides_of(catalogue: Catalogue, records: np.ndarray, by_content: np.ndarray) -> np.ndarray:
    """The dataset's own split where it has one; otherwise by the content of each group of equal images."""
    own = np.array([OWN[side] for side in catalogue.sides], dtype=np.int8)
    usable = records["row"] >= 0
    if (own == UNUSED).any() and not (own == VALIDATION).any():
        own[own == UNUSED] = VALIDATION  # a test set, and nothing else to measure on
    if min((own[usable] == side).sum() for side in (TRAIN, VALIDATION)) >= LEAST_ON_A_SIDE:
        return own
    return np.where(own == UNUSED, UNUSED, np.where(by_content, VALIDATION, TRAIN)).astype(np.int8)


OWN = {None: TRAIN, "train": TRAIN, "validation": VALIDATION, "test": UNUSED}


def named_records(catalogue: Catalogue) -> np.ndarray:
    """Records of images that nobody has looked at: each is told from the others by its name."""
    records = np.zeros(len(catalogue.names), RECORD)  # row 0, not -1: nothing is known to be wrong with them
    for record, name in zip(records, catalogue.names, strict=True):
        record["content"] = np.void(digest(name.encode(errors="surrogateescape")))
    return records


def mean_bytes(catalogue: Catalogue) -> float:
    """Of an encoded image, by a few of them."""
    sizes = []
    for index in np.linspace(0, len(catalogue.names) - 1, 16).astype(int):
        try:
            sizes.append(len(catalogue.reader.read(int(index))))
        except (OSError, ValueError):
            continue
    return float(np.mean(sizes)) if sizes else 100_000.0


def first_unreadable(catalogue: Catalogue, packed: Pack) -> str:
    number, why = next(iter(packed.unreadable.items()))
    return f"`{shortened(catalogue.names[number])}` {shortened(why)}"
