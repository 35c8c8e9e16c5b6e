"""From the name of a source to pairs that can be trained on: opened, packed, split."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lapclip.config import SETTINGS, DataConfig
from lapclip.data.advice import Advice, advise_share
from lapclip.data.catalogue import Catalogue, Options
from lapclip.data.decode import RECORD, digest
from lapclip.data.formats.detect import are_nested, open_catalogue, parse_source, real_names
from lapclip.data.pack import Pack, describe_folder, folder_for, has_room, locked, pack, size_for
from lapclip.data.pairs import ALL, TRAIN, VALIDATION, PairTable, write_pairs
from lapclip.data.source import Mixed, Packed, Sample, Source, Streamed
from lapclip.data.split import content_groups, own_side, split, told_apart
from lapclip.data.synthetic import DocumentsSource, SceneSource, ValidationScenes
from lapclip.errors import UserError, install_command, shortened, shortened_path, suggest
from lapclip.files import writing
from lapclip.units import LongWork, plural

MAX_SCENES = 100_000_000  # their order is held in memory
MIN_IMAGES = 4
PLAIN_STEMS = ("", "captions", "results", "metadata", "train", "data", "images")  # that name no dataset


@dataclass
class Files:
    """A source of files: found, then packed, then split."""

    name: str  # that finds it again from any folder
    catalogue: Catalogue
    images: str | None  # the folder that `--images` means
    is_streamed: bool = False
    pack: Pack = field(init=False)
    groups: np.ndarray = field(init=False)  # of each image of the catalogue; alike, so on one side
    same: np.ndarray = field(init=False)  # likewise; for a model the same image, so never contrasted
    sides: np.ndarray = field(init=False)
    share: Advice = field(init=False)  # of validation images
    table: PairTable = field(init=False)

    def stamps(self, side: int = ALL) -> list[str]:
        """Of the images of a side, the same in any source that has these files."""
        images = np.flatnonzero((self.sides == side) | (side == ALL)).tolist()
        return list(map(self.catalogue.reader.stamp, images))


@dataclass
class Part:
    """One of the sources named, opened."""

    name: str  # that finds it again from any folder
    weight: float
    training: Source
    validation: Source
    files: Files | None = None  # None for what lapclip draws itself, and once it is released


@dataclass(frozen=True)
class Data:
    """Pairs to train on, and pairs to validate with."""

    parts: tuple[Part, ...]
    fingerprint: str  # changes when images or captions do
    training: Source = field(repr=False)
    validation: Source = field(repr=False)
    images: str | None = None  # the folder that `--images` means
    found: Mapping[str, Advice] = field(default_factory=dict)  # settings that follow from the source
    general: Sample | None = field(default=None, repr=False)  # of another source: what a model forgets
    shares_images: bool = False  # with what models were trained on
    num_seen: int = 0  # validation images that the model which training starts from was trained on

    @property
    def settings(self) -> dict[str, Any]:
        """That open the same from any folder."""
        general = self.general.origin if self.general else None
        return {"source": self.source, "images": self.images, "general": general}

    @property
    def source(self) -> str:
        """The name that opens the same from any folder."""
        return " + ".join(p.name + (f"@{p.weight!r}" if p.weight != 1 else "") for p in self.parts)

    def release(self) -> None:
        """Frees what only opening and the doctor need: the captions of a million pairs."""
        for part in self.parts:
            part.files = None


def open_source(config: DataConfig, image_size: int, seen: Collection[str] = ()) -> LongWork[Data]:
    """Opens what `source` names, packs what is not packed, and yields its progress; what is seen is not evaluated."""
    named = parse_source(config.source)
    found = [None if name.split(":")[0] == "synthetic" else find_files(config, name) for name, _ in named]
    files = [one for one in found if one]
    size = size_for(image_size)
    sources = [(one.catalogue, one.name) for one in files]
    is_packed = has_room(sources, size) if config.pack is None else config.pack
    for one in files:
        one.is_streamed = not is_packed
        if is_packed:
            one.pack = yield from pack(one.catalogue, one.name, size, config.workers)
        else:
            one.pack = Pack(folder_for(one.name, size), size, named_records(one.catalogue))
    split_together(files, config.validation_share)
    shares_images = bool(seen) and hide(files, seen)
    parts = []
    for (name, weight), own in zip(named, found, strict=True):
        if own is None:
            parts.append(Part(name, weight, *open_synthetic(name)))
        else:
            own.table = write_table(own)
            training, validation = (make_source(own, side, config) for side in (TRAIN, VALIDATION))
            parts.append(Part(own.name, weight, training, validation, own))
    images = files[0].images if files else config.images
    fingerprints = [f"{p.files.table.fingerprint if p.files else p.name}@{p.weight}" for p in parts]
    fingerprint = digest(*map(str.encode, fingerprints)).hex()
    follows = {"validation_share": files[0].share} if files else {}
    if files and (VALIDATION in own_side(files[0]) or "validation" in files[0].catalogue.sides):
        follows["validation_share"] = replace(files[0].share, why="not used: the dataset has its own split")
    if len(parts) == len(files) == 1 and not SETTINGS["format"].problem(format := files[0].catalogue.format):
        columns = [f"{what} column `{name}`" for what, name in files[0].catalogue.columns.items()]
        follows["format"] = Advice("format", format, ", ".join(["detected", *columns]))
    return Data(tuple(parts), fingerprint, *mixed(parts), images, follows, shares_images=shares_images)


def open_unseen(
    config: DataConfig, image_size: int, trained: Sequence[DataConfig], openable: Sequence[DataConfig]
) -> LongWork[tuple[Data, bool, bool]]:
    """A source to evaluate on, whose validation side was trained on by none; whether some of it was trained on, and
    whether all sources of training that may overlap with it could be compared."""
    paths = [os.path.abspath(os.path.expanduser(name)) for name, _ in parse_source(config.source)]
    own = [one for one in trained if real_names(one.source) & {*map(os.path.realpath, paths)}]
    places, rest = [*paths, *filter(None, [config.images])], [one for one in trained if one not in own]
    nested = [one for one in rest if are_nested(places, {*real_names(one.source), one.images or os.sep})]
    compared = own + nested if nested or len({one.pack for one in own}) > 1 else []
    if trained:
        # Packing and the share decide the split, so they are those of training. A smaller validation share is a
        # part of a larger one: the smallest was trained on by none.
        shares = [share for one in own or trained if (share := one.validation_share) is not None]
        config = replace(config, pack=trained[0].pack, validation_share=min(shares, default=None))
    seen, is_known = set[str](), all(one in openable for one in compared)
    for one in (one for one in compared if one in openable):
        try:
            data = yield from open_source(one, image_size)
            seen |= {stamp for part in data.parts if part.files for stamp in part.files.stamps(TRAIN)}
        except UserError:  # it is no longer there
            is_known = False
    opened = yield from open_source(config, image_size, seen)
    is_own = any(real_names(one.source) & real_names(opened.source) for one in trained)
    return opened, is_own or opened.shares_images, is_known


def may_share(one: DataConfig, other: DataConfig) -> bool:
    """Whether two sources may have files in common, by where they are."""
    names, others = real_names(one.source), real_names(other.source)
    places = [*names, *filter(None, [one.images])]
    return bool(names & others) or are_nested(places, {*others, other.images or os.sep})


def hide(files: list[Files], seen: Collection[str]) -> bool:
    """If images with these stamps would be evaluated, makes all others the validation side, and says so."""
    is_seen = [np.array([stamp in seen for stamp in one.stamps()], dtype=bool) for one in files]
    measured = [(one.sides == side) | (side == ALL) for one in files for _, side in [own_side(one)]]
    is_any = any((one & other).any() for one, other in zip(is_seen, measured, strict=True))
    for one, own in zip(files, is_seen, strict=True) if is_any else ():
        one.sides = np.where(own, TRAIN, VALIDATION).astype(np.int8)
    return is_any


def mixed(parts: list[Part]) -> tuple[Source, Source]:
    """The training pairs and the validation pairs of all parts; a part that has none of one kind is not in it."""
    if len(parts) == 1:
        return parts[0].training, parts[0].validation
    used = [part for part in parts if part.training.num_pairs]
    training = Mixed([part.training for part in used], [part.weight for part in used])
    validation = [part.validation for part in parts if part.validation.num_pairs]
    return training, Mixed(validation, [1.0] * len(validation))


def find_files(config: DataConfig, name: str) -> Files:
    images = config.images and os.path.expanduser(config.images)
    if images:  # relative to the current folder, or to the table
        beside = os.path.join(os.path.dirname(os.path.abspath(name)), images)
        images = beside if not os.path.exists(images) and os.path.exists(beside) else os.path.abspath(images)
    options = Options(config.format, images, config.image_column, config.caption_column)
    catalogue, identity = open_catalogue(name, options)
    return Files(identity, catalogue, images)


def split_together(files: list[Files], share: float | None) -> None:
    """Decides the sides of all parts together, so that an image that two of them hold is on one side."""
    if not files:
        return
    records = np.concatenate([own.pack.records for own in files])
    groups = np.arange(len(records)) if files[0].is_streamed else content_groups(records)
    advice = advise_share(len(np.unique(groups)))
    sides = split(records, groups, [own.catalogue.sides for own in files], share or advice.value)
    ends = np.cumsum([len(own.pack.records) for own in files])

    def look(number: int, _: int) -> Image.Image:
        own = files[np.searchsorted(ends, number, side="right")].pack
        shape = (int(records["row"][number]) + 1, 3, own.size, own.size)
        pixels = np.memmap(own.path / "pixels", np.uint8, "r", shape=shape)[-1]
        return Image.fromarray(pixels.transpose(1, 2, 0))

    same, start = told_apart(records, groups, look, one_blank=True), 0
    for own in files:
        here = slice(start, start := start + len(own.pack.records))
        own.groups, own.same, own.sides, own.share = groups[here], same[here], sides[here], advice


def write_table(files: Files) -> PairTable:
    catalogue, packed = files.catalogue, files.pack
    usable = np.flatnonzero(packed.records["row"] >= 0)
    if len(usable) < MIN_IMAGES:
        whys = [first_unreadable(catalogue, packed)] if packed.unreadable else []
        kinds, examples = catalogue.problems.kinds, catalogue.problems.names
        whys += [f"`{examples[what][0]}` {what}" for what, kind in kinds.items() if kind != "repaired"]
        found = "; ".join([f"has {plural(len(usable), 'usable image')}", *whys[:3]])
        needs_heic = 0 < packed.num_needing_extra == len(packed.unreadable)
        hint = "add images with captions to it, or correct those that cannot be used"
        what = f"`{catalogue.name}` {found}; at least {MIN_IMAGES} are needed"
        raise UserError(what, hint=install_command("heic") if needs_heic else hint)
    with locked(packed.path), writing(packed.path):
        describe_folder(packed.path, files.name, packed.size)
        return write_pairs(packed.path, catalogue, packed.records, usable, files.same, files.sides)


def make_source(files: Files, side: int, config: DataConfig) -> Source:
    each_caption = config.captions == "all" and side == TRAIN
    common = (files.table, files.pack.size, side, each_caption)
    if not files.is_streamed:
        try:
            return Packed(*common, pixels_file=files.pack.path / "pixels")
        except (OSError, ValueError):
            problem = f"the pack `{files.pack.path}` is damaged, or another process removed it"
            raise UserError(problem, hint="run the command again; it rebuilds the pack") from None
    return Streamed(*common, reader=files.catalogue.reader, mean_bytes=mean_bytes(files.catalogue))


def named_records(catalogue: Catalogue) -> np.ndarray:
    """Records of images that are not decoded, each identified by its name."""
    records = np.zeros(len(catalogue.names), RECORD)  # row 0, not -1: nothing is known to be wrong with them
    for record, name in zip(records, catalogue.names, strict=True):
        record["content"] = np.void(digest(name.encode(errors="surrogateescape")))
    return records


def mean_bytes(catalogue: Catalogue) -> float:
    """Of an encoded image, by a few of them."""
    sizes = []
    for index in np.linspace(0, len(catalogue.names) - 1, 16).astype(int):
        with suppress(OSError, ValueError):
            sizes.append(len(catalogue.reader.read(int(index))))
    return float(np.mean(sizes)) if sizes else 100_000.0


def first_unreadable(catalogue: Catalogue, packed: Pack) -> str:
    number, why = next(iter(packed.unreadable.items()))
    return f"`{shortened_path(catalogue.names[number])}` {shortened(why)}"


def plain_name(source: str) -> str:
    """What a run over a source is called: `flickr8k` for `flickr8k/captions.txt`, `photos-emoji` for two."""
    names = []
    for name, _ in parse_source(source)[:2]:
        is_folder = name.partition(":")[0] not in ("synthetic", "emoji", "hf")
        path = Path(name if is_folder else name.replace("/", "-")).absolute()
        stem = re.sub(r"[{*\[].*", "", path.stem)  # of shards
        named = path.parent.name if stem in PLAIN_STEMS else stem
        names.append(re.sub(r"[^\w.]+", "-", named).strip("-._") or "run")
    return "-".join(names)


def open_synthetic(name: str) -> tuple[Source, Source]:
    """What lapclip draws itself; nothing is packed."""
    _, _, rest = name.partition(":")
    if rest == "documents":
        return DocumentsSource(first=0, num_pairs=216), DocumentsSource(first=216, num_pairs=24)
    if rest and not (rest.isascii() and rest.isdigit() and 2 <= int(rest) <= MAX_SCENES):
        end = f"a number of pairs from 2 to {MAX_SCENES:,}, or in `documents`{suggest(rest, ['documents'])}"
        hint = "write `synthetic:50000` or `synthetic:documents`"
        raise UserError(f"`{name}` should end in {end}", hint=hint)
    return (SceneSource(num_pairs=int(rest)) if rest else SceneSource()), ValidationScenes()
