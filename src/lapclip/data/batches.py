"""Pairs in, batches out: shuffled again each epoch, every pair once.

Which pairs a batch holds is a pure function of seed and step, so the position in the data is the step itself. What must
be drawn or decoded is fetched by other processes.
"""

from collections.abc import Generator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np

from lapclip.data.decode import Unreadable
from lapclip.data.source import Source
from lapclip.data.tokenizer import Tokenizer
from lapclip.data.workers import submit_ahead, with_held, worker_pool
from lapclip.errors import UserError, shortened, shortened_path

PIECE = 64  # pairs a worker prepares at once: small, so that a large batch is shared and never held twice
MAX_CACHED_CAPTIONS = 100_000  # captions whose tokens are kept in memory: 30 MB
MAX_TRIES = 100  # pairs tried in place of one whose image is broken


@dataclass(frozen=True)
class Batch:
    """Pairs contrasted with one another, as arrays."""

    images: np.ndarray  # bytes [B, 3, H, W]
    tokens: np.ndarray  # [B, T]; with several captions of each image [B, N, T], and all about captions [B, N]
    ends: np.ndarray  # [B], where each caption ends
    image_ids: np.ndarray  # [B], equal for equal images
    caption_ids: np.ndarray  # [B], equal for equal captions
    faults: tuple[str, ...] = ()  # images that could not be read; others took their places
    indices: np.ndarray | None = None  # [B], the number of each image in its source
    captions: tuple[str, ...] = ()
    teacher: tuple[np.ndarray, np.ndarray] | None = None  # its embeddings of images and captions [B, E]


@dataclass(frozen=True)
class Fetched:
    """Some pairs: their images, and the captions of one after those of the other, as many of each."""

    indices: np.ndarray
    images: np.ndarray
    captions: list[str]
    faults: tuple[str, ...] = ()


def pairs_of_step(source: Source, step: int, *, batch_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of one step, counted from 0, and the epoch that each belongs to; a batch may span two epochs."""
    epochs, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), source.num_pairs)
    pairs = [epoch_order(source, int(e), seed)[p] for e, p in zip(epochs, places, strict=True)]
    return np.array(pairs), epochs


@lru_cache(maxsize=2)
def epoch_order(source: Source, epoch: int, seed: int) -> np.ndarray:
    return source.order(epoch, seed)


def load_batches(
    source: Source,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    image_size: int,
    text_length: int,
    seed: int,
    first_step: int,
    workers: int,
    captions_per_image: int = 1,
) -> Generator[Batch]:
    """Batches without end, from some step on, in the size the source keeps its images in."""
    if source.only_copies and source.num_different <= MAX_CACHED_CAPTIONS:
        tokenizer.max_cached = MAX_CACHED_CAPTIONS
    stored, each = source.stored_size(image_size), captions_per_image
    fetched = fetch_ahead(source, batch_size, stored, seed, first_step, workers, each)
    with closing(fetched):
        for some in fetched:
            tokens, ends = tokenizer.encode(some.captions, text_length)
            # By tokens, not by letters: what the model cannot tell apart is the same caption.
            _, caption_ids = np.unique(tokens, axis=0, return_inverse=True)
            if each > 1:
                several = (batch_size, each)
                tokens, ends = tokens.reshape(*several, -1), ends.reshape(several)
                caption_ids = caption_ids.reshape(several)
            about = some.faults, some.indices, tuple(some.captions[::each])
            yield Batch(some.images, tokens, ends, source.groups(some.indices), caption_ids, *about)


def fetch_ahead(
    source: Source, batch_size: int, size: int, seed: int, first_step: int, workers: int, each: int
) -> Generator[Fetched]:
    """The pairs of each step; with workers, the next ones are fetched while these are used."""
    if workers == 0:
        for step in count(first_step):
            indices, epochs = pairs_of_step(source, step, batch_size=batch_size, seed=seed)
            yield fetch(source, indices, epochs, size, seed, each)
    with worker_pool(source, workers) as pool:

        def submit(step: int) -> list[Future]:
            indices, epochs = pairs_of_step(source, step, batch_size=batch_size, seed=seed)
            return [
                pool.submit(with_held, fetch, indices[i : i + PIECE], epochs[i : i + PIECE], size, seed, each)
                for i in range(0, batch_size, PIECE)
            ]

        for pieces in submit_ahead(submit, count(first_step), 2):
            yield collect(pieces, batch_size, size)


def collect(pieces: list[Future], batch_size: int, size: int) -> Fetched:
    """Copies fetched pieces into one batch, and releases each one at once."""
    indices = np.empty(batch_size, dtype=np.int64)
    images = np.empty((batch_size, 3, size, size), dtype=np.uint8)
    captions: list[str] = []
    faults: tuple[str, ...] = ()
    num_fetched = 0
    while pieces:
        piece: Fetched = pieces.pop(0).result()
        place = slice(num_fetched, num_fetched := num_fetched + len(piece.indices))
        indices[place], images[place] = piece.indices, piece.images
        captions += piece.captions
        faults += piece.faults
    return Fetched(indices, images, captions, faults)


def fetch(
    source: Source, indices: np.ndarray, epochs: np.ndarray, size: int, seed: int, each: int = 1
) -> Fetched:
    """Images [n, 3, H, W] and some captions of each: the wordings of an image take turns, epoch after epoch."""
    faults: tuple[str, ...] = ()
    try:
        images = source.pixels(indices, size)
    except Unreadable:
        indices, images, faults = fetch_singly(source, indices, size)
    turns = zip(indices.tolist(), epochs.tolist(), strict=True)
    first = [(index, scattered(index, seed) + epoch * each) for index, epoch in turns]
    captions = [source.caption(index, turn + n) for index, turn in first for n in range(each)]
    return Fetched(indices, images, captions, faults)


def scattered(index: int, seed: int) -> int:
    """A number that neighbours do not share, so that not all images begin with their first caption."""
    return ((index + 1) * 0x9E3779B97F4A7C15 + seed * 0x2545F4914F6CDD1D) >> 32 & 0xFFFF


def fetch_singly(
    source: Source, indices: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Image by image; the next pair takes the place of one whose image is broken."""
    taken, images, faults = indices.copy(), [], []
    for place in range(len(taken)):
        for _ in range(MAX_TRIES):
            try:
                images.append(source.pixels(taken[place : place + 1], size)[0])
                break
            except Unreadable as problem:
                faults.append(f"`{shortened_path(source.name(int(taken[place])))}` {shortened(str(problem))}")
                taken[place] = (taken[place] + 1) % source.num_different
        else:
            hint = "check that the source still exists: `lapclip data check` lists its problems"
            what = f"{MAX_TRIES} images in a row cannot be read, the last one {faults[-1]}"
            raise UserError(what, hint=hint)
    return taken, np.stack(images), tuple(faults)
