"""Pairs by number, wherever they come from: what training and evaluation see of the data."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from PIL import Image

from lapclip.data.catalogue import Reader
from lapclip.data.decode import Unreadable, decode
from lapclip.data.pairs import ALL, TRAIN, PairTable

BUFFER_BYTES = 48 * 2**20  # of encoded images that a streamed source shuffles among


class Source(ABC):
    """Pairs by number. It can be sent to another process, and opening it does no work."""

    num_pairs: int  # in an epoch
    only_copies = False  # whether an image costs nothing but a copy, so that a thread can fetch it

    @property
    def num_different(self) -> int:
        """Pairs there are; indices lie below it. In an epoch some may come twice."""
        return self.num_pairs

    @abstractmethod
    def image(self, index: int, size: int) -> Image.Image:
        """The image, RGB, square, of about that size; Unreadable when it cannot be decoded."""

    @abstractmethod
    def captions(self, index: int) -> tuple[str, ...]:
        """Its captions, at least one."""

    def caption(self, index: int, turn: int) -> str:
        """One of the captions; they take turns."""
        wordings = self.captions(index)
        return wordings[turn % len(wordings)]

    def name(self, index: int) -> str:
        return f"image {index}"

    def stored_size(self, image_size: int) -> int:
        """The size its images come in when a model looks at `image_size`."""
        return image_size

    def pixels(self, indices: np.ndarray, size: int) -> np.ndarray:
        """Bytes [n, 3, size, size]."""
        images = np.empty((len(indices), 3, size, size), dtype=np.uint8)
        for place, index in enumerate(indices):
            images[place] = np.asarray(self.image(int(index), size)).transpose(2, 0, 1)
        return images

    def groups(self, indices: np.ndarray) -> np.ndarray:
        """Numbers that are equal for equal images."""
        return indices

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Which pairs an epoch shows, one after the other."""
        return np.random.default_rng([seed, epoch]).permutation(self.num_pairs)

    def sample(self, count: int) -> np.ndarray:
        """Some pairs that stand for all, always the same ones."""
        return np.arange(min(count, self.num_pairs))


@dataclass(frozen=True, eq=False)
class Sample(Source):
    """Some pairs of another source."""

    whole: Source
    indices: np.ndarray  # there
    origin: str  # the name that opens the whole source from any folder
    fingerprint: str  # changes when images or captions do

    @property
    def num_pairs(self) -> int:  # type: ignore[override]
        return len(self.indices)

    def image(self, index: int, size: int) -> Image.Image:
        return self.whole.image(int(self.indices[index]), size)

    def captions(self, index: int) -> tuple[str, ...]:
        return self.whole.captions(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.whole.name(int(self.indices[index]))

    def stored_size(self, image_size: int) -> int:
        return self.whole.stored_size(image_size)

    def pixels(self, indices: np.ndarray, size: int) -> np.ndarray:
        return self.whole.pixels(self.indices[indices], size)

    def groups(self, indices: np.ndarray) -> np.ndarray:
        return self.whole.groups(self.indices[indices])


@dataclass(frozen=True, eq=False)
class TableSource(Source):
    """One side of a table: images with their captions, or with `each_caption`, captions with their image."""

    table: PairTable
    size: int
    side: int
    each_caption: bool = False

    @cached_property
    def images(self) -> np.ndarray:
        """Those of this side; not to train on, in a random order, so that the first ones are a fair sample."""
        images = np.flatnonzero((self.table.sides == self.side) | (self.side == ALL))
        if self.side != TRAIN:
            images = images[np.argsort(self.table.ranks[images], kind="stable")]
        return images

    @cached_property
    def num_captions(self) -> np.ndarray:
        """Of each image."""
        return self.table.first[self.images + 1] - self.table.first[self.images]

    @cached_property
    def numbers(self) -> np.ndarray:
        """The numbers of the captions, with `each_caption`."""
        ends = np.cumsum(self.num_captions)
        starts = np.repeat(self.table.first[self.images + 1] - ends, self.num_captions)
        return starts + np.arange(len(starts))

    @cached_property
    def image_of(self) -> np.ndarray:
        """The number in the table of each pair's image."""
        return np.repeat(self.images, self.num_captions) if self.each_caption else self.images

    @property
    def num_pairs(self) -> int:  # type: ignore[override]
        return len(self.image_of)

    def captions(self, index: int) -> tuple[str, ...]:
        if self.each_caption:
            return (self.table.caption(int(self.numbers[index])),)
        return self.table.captions(int(self.images[index]))

    def caption(self, index: int, turn: int) -> str:
        if self.each_caption:
            return self.table.caption(int(self.numbers[index]))
        first, last = self.table.first[self.images[index] : self.images[index] + 2].tolist()
        return self.table.caption(first + turn % (last - first))

    def name(self, index: int) -> str:
        return self.table.name(int(self.image_of[index]))

    def groups(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self.table.groups[self.image_of[indices]])

    def stored_size(self, image_size: int) -> int:
        return self.size

    def image(self, index: int, size: int) -> Image.Image:
        return Image.fromarray(self.pixels(np.array([index]), self.size)[0].transpose(1, 2, 0))

    def __reduce__(self) -> tuple:
        """To another process, without what was mapped or computed in this one."""
        return partial(type(self), **{f.name: getattr(self, f.name) for f in fields(self)}), ()


@dataclass(frozen=True, eq=False)
class Packed(TableSource):
    """Pairs from a pack, mapped from the start, so that they stay even when the pack is removed."""

    only_copies = True
    pixels_file: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        _ = self.rows, self.images

    @cached_property
    def rows(self) -> np.ndarray:
        # As many as the table refers to: another process may be adding more.
        num_rows = int(self.table.rows.max()) + 1
        return np.memmap(self.pixels_file, np.uint8, mode="r", shape=(num_rows, 3, self.size, self.size))

    def pixels(self, indices: np.ndarray, size: int) -> np.ndarray:
        return self.rows[self.table.rows[self.image_of[indices]]]


@dataclass(frozen=True, eq=False)
class Streamed(TableSource):
    """Pairs decoded as they are needed, where there is no room for a pack; neighbours are read together."""

    reader: Reader = field(kw_only=True)
    mean_bytes: float = field(kw_only=True)  # of an encoded image

    def pixels(self, indices: np.ndarray, size: int) -> np.ndarray:
        images = np.empty((len(indices), 3, self.size, self.size), dtype=np.uint8)
        for place, image in enumerate(self.image_of[indices]):
            try:
                data = self.reader.read(int(self.table.numbers[image]))
            except (OSError, ValueError) as error:
                raise Unreadable(f"cannot be read: {error}") from None
            images[place] = decode(data, self.size).pixels
        return images

    def order(self, epoch: int, seed: int) -> np.ndarray:
        return local_order(self.num_pairs, max(64, int(BUFFER_BYTES / self.mean_bytes)), epoch, seed)


def local_order(num_pairs: int, window: int, epoch: int, seed: int, runs: int = 8) -> np.ndarray:
    """Shuffled in a window of a few runs of neighbours, taken from all over: what a bounded buffer can hold."""
    rng = np.random.default_rng([seed, epoch])
    run = max(1, window // runs)
    starts = rng.permutation(-(-num_pairs // run)) * run
    windows = [starts[i : i + runs] for i in range(0, len(starts), runs)]
    places = [np.concatenate([np.arange(s, min(s + run, num_pairs)) for s in some]) for some in windows]
    return np.concatenate([rng.permutation(some) for some in places])


@dataclass(frozen=True, eq=False)
class Mixed(Source):
    """Several sources as one; a pair of a source with weight 2 comes twice as often."""

    parts: Sequence[Source]
    weights: Sequence[float]

    @property
    def only_copies(self) -> bool:  # type: ignore[override]
        return all(part.only_copies for part in self.parts)

    @cached_property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([part.num_pairs for part in self.parts])])

    @property
    def num_pairs(self) -> int:  # type: ignore[override]
        return sum(self.counts)

    @property
    def num_different(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def counts(self) -> list[int]:
        """Pairs of each part in an epoch."""
        weighted = zip(self.parts, self.weights, strict=True)
        return [max(1, round(part.num_pairs * weight)) for part, weight in weighted]

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Each part in its own order, and by chance whose turn it is: a streamed part stays one."""
        turns = np.repeat(np.arange(len(self.parts)), self.counts)
        turns = np.random.default_rng([seed, epoch]).permutation(turns)
        order = np.empty(len(turns), dtype=np.int64)
        for number, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            rounds = -(-count // part.num_pairs)
            own = [part.order(epoch * rounds + r, seed + number) for r in range(rounds)]
            order[turns == number] = np.concatenate(own)[:count] + self.starts[number]
        return order

    def sample(self, count: int) -> np.ndarray:
        """As many of each part as its share."""
        places = np.concatenate([(np.arange(p.num_pairs) + 0.5) / p.num_pairs for p in self.parts])
        return np.sort(np.argsort(places, kind="stable")[:count])

    def part_of(self, index: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[number], index - int(self.starts[number])

    def image(self, index: int, size: int) -> Image.Image:
        part, own = self.part_of(index)
        return part.image(own, size)

    def captions(self, index: int) -> tuple[str, ...]:
        part, own = self.part_of(index)
        return part.captions(own)

    def name(self, index: int) -> str:
        part, own = self.part_of(index)
        return part.name(own)

    def stored_size(self, image_size: int) -> int:
        return max(part.stored_size(image_size) for part in self.parts)

    def pixels(self, indices: np.ndarray, size: int) -> np.ndarray:
        images = np.empty((len(indices), 3, size, size), dtype=np.uint8)
        for number, part in enumerate(self.parts):
            own = self.is_of(number, indices)
            if own.any():
                images[own] = part.pixels(indices[own] - self.starts[number], size)
        return images

    def groups(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of parts that were split together; for what is drawn, numbers of its own."""
        groups = np.empty(len(indices), dtype=np.int64)
        for number, part in enumerate(self.parts):
            own = self.is_of(number, indices)
            found = part.groups(indices[own] - self.starts[number])
            groups[own] = found if isinstance(part, TableSource) else -1 - found * len(self.parts) - number
        return groups

    def is_of(self, number: int, indices: np.ndarray) -> np.ndarray:
        return (indices >= self.starts[number]) & (indices < self.starts[number + 1])
