"""The output of frozen towers for every image and caption of a source, computed once and kept on disk.

In half precision; an interrupted computation continues where it was.
Shapes: N images, V views, U different captions, M captions, B pairs of a batch, D width of the features.
"""

import hashlib
import json
import time
from collections.abc import Callable, Generator
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
from lapclip.data.open import Data
from lapclip.data.pack import check_disk, locked
from lapclip.data.source import Source
from lapclip.data.workers import in_order
from lapclip.embedder import Embedder
from lapclip.errors import UserError, shortened, shortened_path
from lapclip.evaluate.pool import Pool
from lapclip.files import cache_folder, read_json, write_atomically, writing
from lapclip.units import Progress

IMAGES_AT_ONCE, TEXTS_AT_ONCE = 8, 32  # on each core; convolutions are fastest with few images
SECONDS_BETWEEN_WRITES = 5.0
NUM_VIEWS = 3  # of a training image: all of it, and augmented ones
MAX_PAIRS = 5_000_000


@dataclass(frozen=True)
class Features:
    """Of one side of the data."""

    source: Source
    image_NVD: np.ndarray
    text_UD: np.ndarray
    first: np.ndarray  # [N + 1]; the captions of image n are those from first[n] to first[n + 1]
    caption_ids: np.ndarray  # [M], the row of each caption
    captions: list[str]  # [M]
    faults: dict[int, str]  # images that cannot be read, and why

    @property
    def rows(self) -> np.ndarray:
        """The readable images."""
        return np.setdiff1d(np.arange(len(self.image_NVD)), list(self.faults))

    def batches(
        self, rows: np.ndarray, *, batch_size: int, seed: int, first_step: int = 0
    ) -> Generator[Batch]:
        """Pairs of features without end, a pure function of seed and step; one view and one caption of each image."""
        groups_N = self.source.groups(np.arange(len(self.image_NVD)))
        for step in count(first_step):
            epochs, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), len(rows))
            orders = {
                e: np.random.default_rng([seed, e]).permutation(rows) for e in np.unique(epochs).tolist()
            }
            chosen = np.array([orders[e][p] for e, p in zip(epochs.tolist(), places.tolist(), strict=True)])
            rng = np.random.default_rng([seed, step, 3])  # 1 is for patches, 2 for augmentation
            views = rng.integers(self.image_NVD.shape[1], size=batch_size)
            turns = rng.integers(1 << 30, size=batch_size) % np.diff(self.first)[chosen]
            captions = self.caption_ids[self.first[chosen] + turns]
            images = self.image_NVD[chosen, views].astype(np.float32)
            texts = self.text_UD[captions].astype(np.float32)
            torch.manual_seed(int(rng.integers(1 << 62)))  # for the heads' dropout in this step
            yield Batch(images, texts, np.zeros(batch_size, np.int64), groups_N[chosen], captions)

    def pool(self, embedder: Embedder, images: np.ndarray) -> Pool:
        """Some images with all their captions, embedded by the heads alone."""
        captions = np.concatenate([np.arange(*self.first[n : n + 2]) for n in images])
        model, move = embedder.model, embedder.device.move
        with torch.inference_mode():
            image_NE = model.embed_images(move(as_tensor(self.image_NVD[images, 0])))
            text_ME = model.embed_texts(
                move(as_tensor(self.text_UD[self.caption_ids[captions]])), move(torch.zeros(1))
            )
        return Pool(
            image_NE.cpu().numpy(),
            text_ME.cpu().numpy(),
            np.repeat(np.arange(len(images)), np.diff(self.first)[images]),
            [self.captions[m] for m in captions],
            images,
            self.source.groups(images),
            tuple(self.faults.values()),
            tuple(self.faults),
        )

    def sample(self, num_images: int) -> np.ndarray:
        return np.setdiff1d(self.source.sample(num_images), list(self.faults), assume_unique=True)


def as_tensor(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.float32))


def compute_features(
    embedder: Embedder, data: Data, config: DataConfig
) -> Generator[Progress, None, list[Features]]:
    """Of the training side, with augmented views, the validation side, and the general source, if there is one.

    What is on disk is not computed again.
    """
    towers = towers_fingerprint(embedder)
    looks = DataConfig(crop=config.crop, flip=config.flip)
    is_varied = looks.crop != 1 or looks.flip
    sides: list[tuple[str, Source, str]] = [
        ("training", data.training, data.fingerprint),
        ("validation", data.validation, data.fingerprint),
    ]
    if data.general:
        sides.append(("general", data.general, data.general.fingerprint))
    found = []
    for side, source, fingerprint in sides:
        views = NUM_VIEWS if is_varied and side == "training" else 1
        key = digest(*map(str.encode, (towers, fingerprint, side, repr(looks) if views > 1 else "")))
        folder = cache_folder() / "features" / key.hex()
        found.append((yield from features_of(embedder, source, folder, views, looks)))
    return found


def towers_fingerprint(embedder: Embedder) -> str:
    """Of everything that features depend on; heads are not among it."""
    size, tokenizer = embedder.model.size.described() | {"head": None}, embedder.tokenizer
    state = hashlib.sha256(json.dumps([size, tokenizer.start, tokenizer.end, tokenizer.to_json()]).encode())
    for tower in (embedder.model.image, embedder.model.text):
        for name, tensor in sorted(tower.state_dict().items()):
            state.update(name.encode())
            state.update(tensor.detach().cpu().contiguous().numpy())
    return state.hexdigest()


def features_of(
    embedder: Embedder, source: Source, folder: Path, views: int, looks: DataConfig
) -> Generator[Progress, None, Features]:
    model, num_images = embedder.model, source.num_different
    if num_images > MAX_PAIRS:
        hint = "choose a smaller source, or train the towers too: `--tune full`"
        raise UserError(f"{num_images:,} images are too many for cached features", hint=hint)
    captions_N = [source.captions(index) for index in range(num_images)]
    captions = [caption for some in captions_N for caption in some]
    number_of = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    shapes = {
        "images": (num_images, views, model.size.image.width),
        "texts": (len(number_of), model.size.text.width),
    }
    with locked(folder), writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        done: dict[str, Any] = {"images": 0, "texts": 0, "faults": {}}
        if (folder / "done.json").exists():
            done = read_json(folder / "done.json")
        else:
            check_disk(sum(2 * int(np.prod(shape)) for shape in shapes.values()))
        arrays = {
            name: np.memmap(folder / name, np.float16, "r+" if done[name] else "w+", shape=shape)
            for name, shape in shapes.items()
        }
        store = Store(folder, arrays, done)
        yield from embed_images(embedder, source, store, looks)
        yield from embed_texts(embedder, list(number_of), store)
        store.write()
    first = np.concatenate([[0], np.cumsum([len(some) for some in captions_N])])
    ids = np.array([number_of[caption] for caption in captions])
    faults = {int(number): why for number, why in done["faults"].items()}
    return Features(source, arrays["images"], arrays["texts"], first, ids, captions, faults)


@dataclass
class Store:
    """Features on disk, and how many of them are computed."""

    folder: Path
    arrays: dict[str, np.memmap]
    done: dict[str, Any]
    written: float = 0.0

    def write_if_due(self) -> None:
        if time.monotonic() - self.written > SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        for array in self.arrays.values():
            array.flush()
        write_atomically(self.folder / "done.json", json.dumps(self.done))
        self.written = time.monotonic()


def embed_images(
    embedder: Embedder, source: Source, store: Store, looks: DataConfig
) -> Generator[Progress, None, None]:
    rows, size, stored = store.arrays["images"], embedder.image_size, source.stored_size(embedder.image_size)

    def compute(start: int) -> int:
        indices = np.arange(start, min(start + IMAGES_AT_ONCE, len(rows)))
        views = np.zeros((len(indices), rows.shape[1], 3, size, size), np.uint8)
        for place, index in enumerate(indices.tolist()):
            try:
                pixels = source.pixels(indices[place : place + 1], stored)[0]
                image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
                views[place] = [view_of(image, size, looks, index, view) for view in range(rows.shape[1])]
            except Unreadable as problem:  # only of a streamed source
                name = shortened_path(source.name(index))
                store.done["faults"][str(index)] = f"`{name}` {shortened(str(problem))}"
        with torch.inference_mode(), embedder.lock:
            moved = embedder.device.move(torch.from_numpy(views.reshape(-1, 3, size, size)))
            features = torch.cat([embedder.model.image(some) for some in moved.split(IMAGES_AT_ONCE)])
        rows[indices] = features.half().cpu().numpy().reshape(len(indices), rows.shape[1], -1)
        return len(indices)

    yield from side_by_side(embedder, compute, store, "images", IMAGES_AT_ONCE)


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


def embed_texts(embedder: Embedder, texts: list[str], store: Store) -> Generator[Progress, None, None]:
    """Short ones first, so that texts embedded together have about the same length."""
    rows = store.arrays["texts"]
    order = np.argsort(embedder.tokenizer.lengths(texts), kind="stable")

    def compute(start: int) -> int:
        some = order[start : start + TEXTS_AT_ONCE]
        encoded = embedder.tokenizer.encode([texts[n] for n in some], embedder.model.size.text_length)
        with torch.inference_mode(), embedder.lock:
            inputs = (embedder.device.move(torch.from_numpy(part)) for part in encoded)
            rows[some] = embedder.model.text(*inputs).half().cpu().numpy()
        return len(some)

    yield from side_by_side(embedder, compute, store, "texts", TEXTS_AT_ONCE)


def side_by_side(
    embedder: Embedder, compute: Callable[[int], int], store: Store, what: str, at_once: int
) -> Generator[Progress, None, None]:
    """Each core computes a few rows of its own at a time; `compute` writes those from some row on."""
    said, total = "embedding images" if what == "images" else "embedding captions", len(store.arrays[what])
    with embedder.side_by_side() as threads:
        starts = range(store.done[what], total, at_once)
        for num_done in in_order(compute, starts, threads, ahead=2 * threads):
            store.done[what] += num_done
            store.write_if_due()
            yield Progress(said, store.done[what], total)
