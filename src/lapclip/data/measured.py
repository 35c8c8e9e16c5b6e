"""Which images a model is measured on, and the class of each where a source has classes."""

from dataclasses import dataclass, replace

import numpy as np

from lapclip.data.captions import ALL, UNUSED, VALIDATION
from lapclip.data.open import LEAST_ON_A_SIDE, Data, Files, Part
from lapclip.data.source import Mixed, Packed, Source, Viewed
from lapclip.errors import UserError


@dataclass(frozen=True)
class Measured:
    """Images to measure on."""

    source: Source
    labels: list[str | None]  # by the numbers of `source`
    classes: tuple[str, ...]  # of the whole source, also those of which no image is measured
    unreadable: tuple[str, ...]  # names
    own_sides: tuple[str, ...] = ()  # `test` or `validation`, where a source says itself what to measure on


def to_measure(data: Data, *, validation_only: bool) -> Measured:
    """The held-out images of what a model was trained on; of another source all, or its own test side."""
    sources: list[Source] = []
    labels: list[str | None] = []
    unreadable: list[str] = []
    classes: set[str] = set()
    own_sides: set[str] = set()
    for part in data.parts:
        source = part.validation if validation_only else whole(part)
        if not source.num_pairs:
            continue
        sources.append(source)
        labels += labels_of(source, part.files)
        if part.files:
            catalogue = part.files.catalogue
            classes |= {label for label in catalogue.labels if label is not None}
            own_sides |= set() if validation_only else {own_side(part.files)[0]} - {""}
            unreadable += [catalogue.names[number] for number in part.files.pack.unreadable]
    if not sources:
        raise UserError(
            f"`{data.source}` has no held-out images",
            hint="name another source to measure on",
        )
    source = sources[0] if len(sources) == 1 else Mixed(tuple(sources), (1.0,) * len(sources))
    return Measured(source, labels, tuple(sorted(classes)), tuple(unreadable), tuple(sorted(own_sides)))


def whole(part: Part) -> Source:
    """All images of a part; where it says itself which ones are for testing, only those."""
    validation = part.validation
    if part.files is None or not isinstance(validation, Viewed):
        return (
            validation  # what lapclip draws: there is always more to train on, and a fixed set to measure on
        )
    source = replace(validation, side=own_side(part.files)[1])
    if isinstance(source, Packed):
        source.hold()
    return source


def own_side(files: Files) -> tuple[str, int]:
    """The name and the side of the dataset's own test images, or else its validation images; otherwise all."""
    usable = files.pack.records["row"] >= 0
    for name, sides in (("test", (UNUSED, VALIDATION)), ("validation", (VALIDATION,))):
        is_own = np.array([side == name for side in files.catalogue.sides])[usable]
        for side in sides:
            if is_own.sum() >= LEAST_ON_A_SIDE and np.array_equal(files.sides[usable] == side, is_own):
                return name, side
    return "", ALL


def labels_of(source: Source, files: Files | None) -> list[str | None]:
    if files is None or not isinstance(source, Viewed):
        return [None] * source.num_different
    numbers = files.view.numbers[source.image_number(np.arange(source.num_different))]
    return [files.catalogue.labels[number] for number in numbers.tolist()]
