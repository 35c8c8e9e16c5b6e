"""The split: which images show the same, on which side each is, and which ones a model is evaluated on.

Images show the same when their bytes are equal, or one was scaled, brightened or saved again. Such a group is never on
both sides, or validation would ask for what training has shown.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from lapclip.data.catalogue import Side
from lapclip.data.decode import THUMB, Unreadable
from lapclip.data.pack import size_for
from lapclip.data.pairs import ALL, TRAIN, UNUSED, VALIDATION
from lapclip.data.source import Mixed, Source, Streamed, TableSource
from lapclip.errors import UserError

if TYPE_CHECKING:
    from lapclip.data.open import Data, Files

MIN_ON_A_SIDE = 2
OWN_SIDES = {None: TRAIN, "train": TRAIN, "validation": VALIDATION, "test": UNUSED}

NUM_VALUES = THUMB * THUMB * 3  # in a thumb
MAX_BITS = 4  # of the difference hash; a photo saved again as JPEG 50 keeps within them 99 times in 100
MAX_DIFFERENCE = 8.0  # of 255, on average over the thumb; 5% brighter is 5
MAX_STRETCH = 1.05  # of the ratio of the sides, which a thumb does not show; half the size rounds them
MAX_ANYWHERE = 20  # in the thumb; saved again at half the size and 5% brighter, 99 in 100 stay within 18
# Drawings on a plain ground, such as emoji, may differ in one place alone, so they must agree in each to within what
# saving them again changes.
MAX_PLAIN_DIFFERENCE, MAX_PLAIN_ANYWHERE = 1.5, 8
PLAIN_STEP, PLAIN_SHARE = 3, 0.1  # plain: so small a step between so many of the neighbours in the thumb
# Near-duplicates must agree in each tile of 8 x 8 pixels (4 x 4 of small images), eight on the shorter side, to within
# so much of their deviation in brightness: of 300 photos at half the size 299 do, different line drawings do not.
TILE, MAX_TILES, MAX_APART, MIN_DEVIATION, BLANK, MAX_FIRSTS = 8, 128, 0.3, 8.0, 12, 512
# and, whatever its mean, to within so much of its own detail: renders of two sockets do not.
MAX_DETAIL, MIN_DETAIL = 0.5, 4.0
Look = Callable[[int, int], Image.Image]  # an image by its number, with so many pixels on the longer side

# Hashes that differ in at most 4 bits agree in at least two of six blocks: those are candidates.
NUM_BLOCKS = 6
# Pairs of candidates looked at for each choice of blocks, nearest in brightness first. Photos have one or two each
# in a million; a million plain images are all candidates of each other.
MAX_PAIRS, MAX_PAIRS_EACH = 2**22, 4
PIECE = 2**16  # images or pairs looked at together, so that memory stays small


def content_groups(records: np.ndarray) -> np.ndarray:
    """A number for each record, the same for the same image; an unreadable one is always alone."""
    readable = np.flatnonzero(records["row"] >= 0)
    # In order of their bytes from here on: nothing depends on the order of the source.
    _, first, number = np.unique(contents(records)[readable], return_index=True, return_inverse=True)
    distinct = readable[first]
    labels = near_groups(records, distinct)
    groups = len(labels) + np.arange(len(records))
    groups[readable] = labels[number]
    return by_first_member(groups)


def contents(records: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(records["content"])


def by_first_member(groups: np.ndarray) -> np.ndarray:
    """The same groups, counted from 0 in the order in which they first appear."""
    _, first, number = np.unique(groups, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def near_groups(records: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A label for the record at each of these places."""
    thumbs, hashes = records["thumb"], records["dhash"][places]
    sides = np.log(np.maximum([records["width"][places], records["height"][places]], 1))
    shape, max_apart = sides[0] - sides[1], np.log(MAX_STRETCH)
    sums, is_plain, mixed = outlines(thumbs, places)
    brightness = sums.sum(axis=1)
    bound = np.where(is_plain, MAX_PLAIN_DIFFERENCE, MAX_DIFFERENCE) * NUM_VALUES
    # Equal thumbs lie next to each other, and those of similar brightness near.
    by_brightness = np.lexsort((mixed, brightness))
    labels = np.arange(len(hashes))
    edges = [64 * number // NUM_BLOCKS for number in range(NUM_BLOCKS + 1)]
    blocks = [np.uint64(2**high - 2**low) for low, high in pairwise(edges)]
    for first, second in combinations(range(NUM_BLOCKS), 2):
        keys = hashes & (blocks[first] | blocks[second])
        order = by_brightness[np.argsort(keys[by_brightness], kind="stable")]
        for left, right in neighbours(order, keys, brightness, bound):
            limit = np.minimum(bound[left], bound[right])
            differ = hashes[left] ^ hashes[right]
            near = (np.bitwise_count(differ) <= MAX_BITS) & (labels[left] != labels[right])
            near &= np.abs(shape[left] - shape[right]) <= max_apart
            for block in blocks[:first] + blocks[first + 1 : second]:
                near &= (differ & block) != 0  # or these two have met before
            # The thumbs differ by no less than their sums, which are sooner looked at.
            near[near] = np.abs(sums[left[near]] - sums[right[near]]).sum(axis=1) <= limit[near]
            one, other = left[near], right[near]
            total, largest = differences(thumbs, places[one], places[other])
            agree = largest <= np.where(is_plain[one] | is_plain[other], MAX_PLAIN_ANYWHERE, MAX_ANYWHERE)
            same = agree & (total <= limit[near])
            labels = joined(labels, one[same], other[same])
    return labels


def outlines(thumbs: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each thumb the sums of its channels, whether it is plain, and a number that unequal ones hardly share."""
    sums_and_mixed = np.empty((len(places), 4))
    is_plain = np.empty(len(places), dtype=bool)
    # Whole numbers, small enough for floats to add them up exactly.
    factors = np.random.default_rng(0).integers(2**36, size=(NUM_VALUES, 4)).astype(np.float64)
    factors[:, :3] = np.tile(np.eye(3), (NUM_VALUES // 3, 1))
    for start in range(0, len(places), PIECE):
        here = slice(start, start + PIECE)
        thumb = thumbs[places[here]].astype(np.int16)
        sums_and_mixed[here] = thumb.reshape(-1, NUM_VALUES) @ factors
        is_plain[here] = (plain_share(thumb, axis=1) + plain_share(thumb, axis=2)) / 2 > PLAIN_SHARE
    return sums_and_mixed[:, :3].astype(np.int32), is_plain, sums_and_mixed[:, 3]


def plain_share(thumb: np.ndarray, axis: int) -> np.ndarray:
    """The share of neighbours along an axis that are of nearly the same colour."""
    is_small = np.abs(np.diff(thumb, axis=axis)) <= PLAIN_STEP
    is_same = is_small[..., 0] & is_small[..., 1] & is_small[..., 2]
    return is_same.reshape(len(thumb), -1).mean(axis=1)


def neighbours(
    order: np.ndarray, keys: np.ndarray, brightness: np.ndarray, bound: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs with equal keys and similar brightness, the nearest in the order first, until they are too many."""
    keys, brightness = keys[order], brightness[order]
    reach = brightness + bound[order]
    left, distance = np.arange(len(order)), 0
    num_left = max(MAX_PAIRS, MAX_PAIRS_EACH * len(order))
    while num_left > 0:
        distance += 1
        left = left[: np.searchsorted(left, len(order) - distance)]
        right = left + distance
        # One that is too bright already is followed by others that are.
        left = left[(keys[left] == keys[right]) & (brightness[right] <= reach[left])]
        if not len(left):
            return
        num_left -= len(left)
        yield order[left], order[left + distance]


def differences(thumbs: np.ndarray, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much each two thumbs differ, over all values together and at most in one."""
    total, largest = np.empty((2, len(left)), dtype=np.int64)
    for start in range(0, len(left), PIECE):
        here = slice(start, start + PIECE)
        apart = thumbs[left[here]].astype(np.int16) - thumbs[right[here]]
        apart = np.abs(apart).reshape(-1, NUM_VALUES)
        total[here], largest[here] = apart.sum(axis=1), apart.max(axis=1)
    return total, largest


def joined(labels: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Labels after each two were made one; always the smallest, so that the order does not matter."""
    while len(left):
        low = np.minimum(labels[left], labels[right])
        np.minimum.at(labels, labels[left], low)
        np.minimum.at(labels, labels[right], low)
        while (labels[labels] != labels).any():
            labels = labels[labels]
        apart = labels[left] != labels[right]
        left, right = left[apart], right[apart]
    return labels


def duplicates(records: np.ndarray, groups: np.ndarray) -> list[list[int]]:
    """The images that are there more than once, the most frequent first; of each the one with most pixels first."""
    pixels = records["width"].astype(np.int64) * records["height"]
    order = np.lexsort((np.arange(len(groups)), -pixels, groups))
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    found = [order[at : at + n].tolist() for at, n in zip(starts, sizes, strict=True) if n > 1]
    return sorted(found, key=lambda members: (-len(members), min(members)))


def told_apart(records: np.ndarray, groups: np.ndarray, look: Look, *, one_blank: bool = False) -> np.ndarray:
    """The groups without images that differ in detail, as drawings and pages of text do. Equal files are not read."""
    every, groups, fresh = contents(records), groups.copy(), int(groups.max(initial=0)) + 1
    for members in duplicates(records, groups):
        sides = [max(1, int(records[side][members[0]])) for side in ("width", "height")]
        tiles = [min(MAX_TILES, round(8 * side / min(sides))) for side in sides]
        known: dict[bytes, int] = {}  # by content, the first image that it agrees with
        firsts: deque[tuple[Any, ...]] = deque(maxlen=MAX_FIRSTS)  # or the time is quadratic
        for number in members if (every[members] != every[members[0]]).any() else ():
            if (content := bytes(every[number])) not in known:
                short = min(records["width"][number], records["height"][number])
                size = [(TILE if short >= 8 * TILE else TILE // 2) * count for count in tiles]
                image = Image.new("L", (TILE, TILE))
                with suppress(OSError, ValueError, Unreadable):
                    image = look(number, 2 * max(size)).convert("L")
                pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR), dtype=np.float32)
                # A nearly uniform image, such as white on transparency, has nothing to compare: it agrees with none.
                deviation = np.inf if np.ptp(pixels) <= BLANK and not one_blank else float(pixels.std())
                pixels = pixels - pixels.mean()
                known[content] = next((n for n, *other in firsts if agree(pixels, deviation, *other)), number)
                if known[content] == number:
                    firsts.append((number, pixels, deviation))
            groups[number] = fresh + known[content]
    return groups


def agree(pixels: np.ndarray, deviation: float, other: np.ndarray, its_deviation: float) -> bool:
    """Whether two images differ little in each tile; overall they differ by no less than their deviations."""
    limit = MAX_APART * max(MIN_DEVIATION, min(deviation, its_deviation))
    if not abs(deviation - its_deviation) <= limit:
        return False
    if pixels.shape != other.shape:
        size, images = min(pixels.shape, other.shape)[::-1], map(Image.fromarray, (pixels, other))
        pixels, other = (np.asarray(image.resize(size, Image.Resampling.BILINEAR)) for image in images)
    apart, tile = pixels - other, min(pixels.shape) // 8
    if np.vdot(apart, apart) > apart.size * limit**2:  # on average over the tiles, which is quick
        return False
    tiled = [one.reshape(len(one) // tile, tile, -1, tile) for one in (apart, pixels, other)]
    differing, *details = (one.var(axis=(1, 3)) for one in tiled)
    is_equal = differing <= np.maximum(MIN_DETAIL**2, MAX_DETAIL**2 * np.minimum(*details))
    return bool(is_equal.all() and np.square(tiled[0]).mean(axis=(1, 3)).max() <= limit**2)


def split(
    records: np.ndarray, groups: np.ndarray, own_sides: Sequence[Sequence[Side | None]], share: float
) -> np.ndarray:
    """The side of each image of one or several parts: as the part itself defines it, or else by content.

    Within one part its own split is taken as it is; an image that two parts hold is never on both sides.
    """
    by_content, usable = is_chosen(records, groups, share), records["row"] >= 0
    sides, start = np.empty(len(records), dtype=np.int8), 0
    for own in own_sides:
        here = slice(start, start := start + len(own))
        sides[here] = part_sides(own, usable[here], by_content[here])
    if len(own_sides) > 1:
        sides[(sides == TRAIN) & np.isin(groups, groups[sides == VALIDATION])] = UNUSED
    return sides


def part_sides(own_sides: Sequence[Side | None], usable: np.ndarray, by_content: np.ndarray) -> np.ndarray:
    own = np.array([OWN_SIDES[side] for side in own_sides], dtype=np.int8)
    if (own == UNUSED).any() and not (own == VALIDATION).any():
        own[own == UNUSED] = VALIDATION  # a test set, and nothing else to measure on
    if min((own[usable] == side).sum() for side in (TRAIN, VALIDATION)) >= MIN_ON_A_SIDE:
        return own
    return np.where(own == UNUSED, UNUSED, np.where(by_content, VALIDATION, TRAIN)).astype(np.int8)


def is_chosen(records: np.ndarray, groups: np.ndarray, share: float) -> np.ndarray:
    """True where an image is for validation: by chance, but always the same, whatever else is there.

    The chance is a hash of the group's bytes. Of at least four groups two are for validation, and never all.
    """
    readable = np.flatnonzero(records["row"] >= 0)
    in_order = readable[np.argsort(contents(records)[readable], kind="stable")]
    own, first = np.unique(groups[in_order], return_index=True)
    smallest = contents(records)[in_order[first]].tobytes()
    hashes = (blake2b(smallest[at : at + 16], digest_size=8) for at in range(0, len(smallest), 16))
    chances = np.array([int.from_bytes(one.digest(), "big") / 2**64 for one in hashes])
    num_validation = int((chances < share).sum())
    num_validation = min(max(num_validation, 2 if len(own) >= 4 else 0), max(len(own) - 1, 0))
    validation = own[np.argsort(chances, kind="stable")[:num_validation]]
    return np.isin(groups, validation) & (records["row"] >= 0)


@dataclass(frozen=True)
class EvaluationSet:
    """Images to evaluate on, and the class of each where a source has classes."""

    source: Source
    labels: list[str | None]  # by the numbers of `source`
    classes: tuple[str, ...]  # of the whole source, also those of which no image is in it
    unreadable: tuple[str, ...]  # names
    own_sides: tuple[str, ...]  # `test` or `validation`, where a source itself defines what to evaluate on
    for_other: Source | None = None  # the same for a model of another image size


def evaluation_set(data: "Data", *, validation_only: bool, image_size: int | None = None) -> EvaluationSet:
    """The validation images of what a model was trained on; of another source all, or its own test side."""
    sources: list[Source] = []
    labels: list[str | None] = []
    unreadable: list[str] = []
    classes: set[str] = set()
    own_sides: set[str] = set()
    for part in data.parts:
        source, files = part.validation, part.files
        if files and isinstance(source, TableSource) and not validation_only:
            name, side = own_side(files)
            source, own_sides = replace(source, side=side), own_sides | ({name} - {""})
        if not source.num_pairs:
            continue
        if files and isinstance(source, TableSource) and image_size:  # as in a pack for that size
            shown = source.table, size_for(image_size), source.side
            source = Streamed(*shown, reader=files.catalogue.reader, mean_bytes=1.0)
        sources.append(source)
        if files and isinstance(source, TableSource):
            catalogue = files.catalogue
            labels += [catalogue.labels[n] for n in source.table.numbers[source.image_of].tolist()]
            classes |= {label for label in catalogue.labels if label is not None}
            unreadable += [catalogue.names[number] for number in files.pack.unreadable]
        else:
            labels += [None] * source.num_different
    if not sources:
        hint = "name another source to evaluate on"
        raise UserError(f"`{data.source}` has no validation images", hint=hint)
    source = sources[0] if len(sources) == 1 else Mixed(tuple(sources), (1.0,) * len(sources))
    return EvaluationSet(source, labels, tuple(sorted(classes)), tuple(unreadable), tuple(sorted(own_sides)))


def own_side(files: "Files") -> tuple[str, int]:
    """The name and the side of the dataset's own test images, or else its validation images; otherwise all."""
    usable = files.pack.records["row"] >= 0
    for name, sides in (("test", (UNUSED, VALIDATION)), ("validation", (VALIDATION,))):
        is_own = np.array([side == name for side in files.catalogue.sides])[usable]
        for side in sides:
            if is_own.sum() >= MIN_ON_A_SIDE and np.array_equal(files.sides[usable] == side, is_own):
                return name, side
    return "", ALL
