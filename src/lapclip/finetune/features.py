"""The output of frozen towers for every image and caption of a source, computed once and kept on disk.

In half precision; an interrupted computation continues where it was.
Shapes: N images, U different captions, M captions, B pairs of a batch, D width of the features.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lapclip.config import DataConfig
from lapclip.data.batches import Batch
from lapclip.data.decode import Unreadable, channels_first, digest
from lapclip.data.images import squares
from lapclip.data.open import Data, plain_name
from lapclip.data.pack import check_disk, describe_folder, locked, packs_folder
from lapclip.data.source import Source
from lapclip.data.workers import in_order
from lapclip.embedder import Embedder
from lapclip.errors import UserError, shortened, shortened_path
from lapclip.evaluate.pool import Pool
from lapclip.files import read_json, write_atomically, writing
from lapclip.units import LongWork, Progress

IMAGES_AT_ONCE, TEXTS_AT_ONCE = 8, 32  # on each core; convolutions are fastest with few images
SECONDS_BETWEEN_WRITES = 5.0
NUM_CROPS = 2  # of a training image, besides all of it
MAX_PAIRS = 5_000_000


@dataclass(frozen=True)
class Features:
    """Of one side of the data."""

    folder: Path  # where they are stored
    source: Source
    views: tuple[np.ndarray, ...]  # of the images, [N, D] each: all of an image, then random crops
    text_UD: np.ndarray
    first: np.ndarray  # [N + 1]; the captions of image n are those from first[n] to first[n + 1]
    caption_ids: np.ndarray  # [M], the row of each caption
    captions: list[str]  # [M]
    faults: dict[int, str]  # images that cannot be read, and why

    @property
    def rows(self) -> np.ndarray:
        """The readable images."""
        return np.setdiff1d(np.arange(len(self.views[0])), list(self.faults))

    def batches(
        self, rows: np.ndarray, *, batch_size: int, seed: int, first_step: int = 0
    ) -> Generator[Batch]:
        """Pairs of features without end, a pure function of seed and step; one view and one caption of each image."""
        groups_N = self.source.groups(np.arange(len(self.views[0])))
        for step in count(first_step):
            epochs, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), len(rows))
            orders = {e: np.random.default_rng([seed, e]).permutation(rows) for e in {*epochs.tolist()}}
            chosen = np.array([orders[e][p] for e, p in zip(epochs.tolist(), places.tolist(), strict=True)])
            rng = np.random.default_rng([seed, step, 3])  # 1 is for patches, 2 for augmentation
            views = rng.integers(len(self.views), size=batch_size)
            turns = rng.integers(1 << 30, size=batch_size) % np.diff(self.first)[chosen]
            captions = self.caption_ids[self.first[chosen] + turns]
            images = np.empty((batch_size, self.views[0].shape[1]), np.float32)
            for view, rows_ND in enumerate(self.views):
                images[views == view] = rows_ND[chosen[views == view]]
            texts = self.text_UD[captions].astype(np.float32)
            torch.manual_seed(int(rng.integers(1 << 62)))  # for the heads' dropout in this step
            yield Batch(images, texts, np.zeros(batch_size, np.int64), groups_N[chosen], captions)

    def pool(self, embedder: Embedder, images: np.ndarray) -> Pool:
        """Some images with all their captions, embedded by the heads alone."""
        captions = np.concatenate([np.arange(*self.first[n : n + 2]) for n in images])
        model, move = embedder.model, embedder.device.move
        with torch.inference_mode():
            image_NE = model.embed_images(move(as_tensor(self.views[0][images])))
            text_MD = as_tensor(self.text_UD[self.caption_ids[captions]])
            text_ME = model.embed_texts(move(text_MD), move(torch.zeros(1)))
        return Pool(
            image_NE.cpu().numpy(),
            text_ME.cpu().numpy(),
            np.repeat(np.arange(len(images)), np.diff(self.first)[images]),
            [self.captions[m] for m in captions],
            images,
            self.source.groups(images),
            self.faults,
        )

    def sample(self, num_images: int) -> np.ndarray:
        return np.setdiff1d(self.source.sample(num_images), list(self.faults), assume_unique=True)


def as_tensor(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.float32))


def compute_features(embedder: Embedder, data: Data, config: DataConfig) -> LongWork[list[Features]]:
    """Of the training side, with crops of each image, the validation side, and the general source, if there is one."""
    num_crops = NUM_CROPS if config.crop != 1 or config.flip else 0
    sides: dict[str, Source] = {"training": data.training, "validation": data.validation}
    if data.general:
        sides[f"general-{data.general.fingerprint[:12]}"] = data.general
    found = []
    with feature_folder(embedder, data) as folder:
        for name, source in sides.items():
            crops = num_crops if source is data.training else 0
            found.append((yield from features_of(embedder, source, folder / name, config, crops)))
    return found


@contextmanager
def feature_folder(embedder: Embedder, data: Data) -> Iterator[Path]:
    """The folder of these towers' features of this data, locked; `lapclip data remove` lists it among the packs."""
    key = digest(towers_fingerprint(embedder).encode(), data.fingerprint.encode()).hex()[:12]
    folder = packs_folder() / f"{plain_name(data.source)[:40]}-features-{key}"
    with locked(folder), writing(folder):
        describe_folder(folder, data.source, embedder.image_size)
        yield folder


def towers_fingerprint(embedder: Embedder) -> str:
    """Of everything that features depend on, whatever comes after the towers."""
    size, tokenizer = embedder.model.size.described(), embedder.tokenizer
    size |= dict.fromkeys(("head", "embedding", "vocabulary"))
    about = [size, tokenizer.start, tokenizer.end, tokenizer.pad, tokenizer.to_json()]
    state = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for tower in (embedder.model.image, embedder.model.text):
        for name, tensor in sorted(tower.state_dict().items()):
            state.update(name.encode())
            state.update(tensor.detach().cpu().contiguous().numpy())
    return state.hexdigest()


def features_of(
    embedder: Embedder, source: Source, folder: Path, looks: DataConfig | None = None, num_crops: int = 0
) -> LongWork[Features]:
    num_images, size = source.num_different, embedder.model.size
    if num_images > MAX_PAIRS:
        hint = "choose a smaller source, or train the towers too: `--tune full`"
        raise UserError(f"{num_images:,} images are too many for cached features", hint=hint)
    captions_N = [source.captions(index) for index in range(num_images)]
    captions = [caption for some in captions_N for caption in some]
    number_of = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    folder.mkdir(exist_ok=True)
    looks, views = looks or DataConfig(), []
    faults: dict[int, str] = {}
    for view in range(1 + num_crops):
        name = f"crop-{looks.crop}-{looks.flip}-{view}" if view else "whole"
        store = open_store(folder / name, (num_images, size.image.width))
        said = f"embedding images, view {view + 1} of {1 + num_crops}" if num_crops else "embedding images"
        yield from embed_images(embedder, source, store, looks, view, said)
        faults |= {int(number): why for number, why in store.faults.items()}
        views.append(store.rows)
    store = open_store(folder / "captions", (len(number_of), size.text.width))
    yield from embed_texts(embedder, list(number_of), store)
    first = np.concatenate([[0], np.cumsum([len(some) for some in captions_N])])
    ids = np.array([number_of[caption] for caption in captions])
    return Features(folder, source, tuple(views), store.rows, first, ids, captions, faults)


@dataclass
class Store:
    """Rows of features in a file, and beside it how many of them are computed."""

    file: Path
    rows: np.memmap
    num_done: int
    faults: dict[str, str]  # images that cannot be read, and why
    written: float = 0.0

    def write_if_due(self) -> None:
        if time.monotonic() - self.written > SECONDS_BETWEEN_WRITES or self.num_done == len(self.rows):
            self.rows.flush()
            about = {"rows": self.num_done, "faults": self.faults}
            write_atomically(self.file.with_name(f"{self.file.name}.json"), json.dumps(about))
            self.written = time.monotonic()


def open_store(file: Path, shape: tuple[int, int]) -> Store:
    about = file.with_name(f"{file.name}.json")
    if not about.exists():
        check_disk(2 * math.prod(shape))
    done: dict[str, Any] = read_json(about) if about.exists() else {"rows": 0, "faults": {}}
    rows = np.memmap(file, np.float16, "r+" if done["rows"] else "w+", shape=shape)
    return Store(file, rows, done["rows"], done["faults"])


def embed_images(
    embedder: Embedder, source: Source, store: Store, looks: DataConfig, view: int, said: str
) -> LongWork[None]:
    size, stored = embedder.image_size, source.stored_size(embedder.image_size)

    def compute(start: int) -> int:
        indices = np.arange(start, min(start + IMAGES_AT_ONCE, len(store.rows)))
        pixels = np.zeros((len(indices), 3, size, size), np.uint8)
        for place, index in enumerate(indices.tolist()):
            try:
                whole = source.pixels(indices[place : place + 1], stored)[0]
                image = Image.fromarray(np.ascontiguousarray(whole.transpose(1, 2, 0)))
                pixels[place] = view_of(image, size, looks, index, view)
            except Unreadable as problem:  # only of a streamed source
                store.faults[str(index)] = f"`{shortened_path(source.name(index))}` {shortened(str(problem))}"
        with torch.inference_mode(), embedder.lock:
            features = embedder.model.image(embedder.device.move(torch.from_numpy(pixels)))
        store.rows[indices] = features.half().cpu().numpy()
        return len(indices)

    yield from side_by_side(embedder, compute, store, said, IMAGES_AT_ONCE)


def view_of(image: Image.Image, size: int, looks: DataConfig, index: int, view: int) -> np.ndarray:
    """All of an image, as the model is shown it later; or, beyond view 0, a random crop of it."""
    if view == 0:
        return next(squares([image], size))
    rng = np.random.default_rng([index, view])
    side = image.width * rng.uniform(looks.crop or 1.0, 1.0) ** 0.5
    left, top = rng.uniform(0, image.width - side, 2)
    box = (left, top, left + side, top + side)
    crop = channels_first(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
    return crop[:, :, ::-1] if looks.flip and rng.random() < 0.5 else crop


def embed_texts(embedder: Embedder, texts: list[str], store: Store) -> LongWork[None]:
    """Short ones first, so that texts embedded together have about the same length."""
    order = np.argsort(embedder.tokenizer.lengths(texts), kind="stable")

    def compute(start: int) -> int:
        some = order[start : start + TEXTS_AT_ONCE]
        encoded = embedder.tokenizer.encode([texts[n] for n in some], embedder.model.size.text_length)
        with torch.inference_mode(), embedder.lock:
            inputs = (embedder.device.move(torch.from_numpy(part)) for part in encoded)
            store.rows[some] = embedder.model.text(*inputs).half().cpu().numpy()
        return len(some)

    yield from side_by_side(embedder, compute, store, "embedding captions", TEXTS_AT_ONCE)


def side_by_side(
    embedder: Embedder, compute: Callable[[int], int], store: Store, said: str, at_once: int
) -> LongWork[None]:
    """Each core computes a few rows of its own at a time; `compute` writes those from some row on."""
    with embedder.side_by_side() as threads:
        starts = range(store.num_done, len(store.rows), at_once)
        for num_done in in_order(compute, starts, threads, ahead=2 * threads):
            store.num_done += num_done
            store.write_if_due()
            yield Progress(said, store.num_done, len(store.rows))
