"""Measures images/s of `lapclip index`, compared with a plain loop: open, convert, resize, stack, embed.

Run by `benchmarks/search.py`. Both process the same files with the same model, in turn. `lapclip index` also hashes
every file and writes its results to disk, so that a killed process loses nothing; the loop only fills an array.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from lapclip.config import load_config
from lapclip.data.open import open_synthetic
from lapclip.data.tokenizer import train_bpe
from lapclip.embedder import Embedder
from lapclip.machine.device import device_named
from lapclip.model.clip import CLIP, build_model
from lapclip.search.update import update

BATCH = 64
SIDES = (
    (None, 2000),
    ((1024, 768), 600),
    ((4000, 3000), 60),
)  # photos as they are, from the web, from a phone
MODELS = {"tiny": (SIDES, 5), "nano": (SIDES, 5), "vit-b-32": ((((1024, 768), 200),), 2)}  # with rounds
VOCAB_SIZE = 49_408  # of OpenAI's CLIP


def compare_indexing(photos: Path | None, only: str | None = None) -> None:
    for size in [only] if only else MODELS:
        embedder, (sides, rounds) = untrained(size), MODELS[size]
        for shape, count in sides:
            with tempfile.TemporaryDirectory() as folder:
                images = prepare(photos, shape, count, Path(folder) / "pictures")
                loop, ours = race(embedder, images, Path(folder), rounds)
            ratios = sorted(a / b for a, b in zip(loop, ours, strict=True))
            shown = "as they are" if shape is None else f"{shape[0]} x {shape[1]}"
            rates = [f"{len(images) / statistics.median(seconds):,.0f}/s" for seconds in (loop, ours)]
            print(
                f"`{size}`, {len(images):,} images {shown}: plain loop {rates[0]}, lapclip index {rates[1]}, "
                f"{statistics.median(ratios):.2f} times as fast "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {rounds} rounds)",
                flush=True,
            )


def untrained(size: str) -> Embedder:
    """A model that has learned nothing, which takes as long as one that has."""
    tokenizer = train_bpe(["a dog on the beach", "a red bicycle", "two people and a car in the snow"], 300)
    vocab_size = VOCAB_SIZE if size == "vit-b-32" else tokenizer.vocab_size
    model = build_model(load_config(flags={"size": size}).model, vocab_size=vocab_size, has_bias=False)
    return Embedder(model.eval(), tokenizer, device_named("cpu"), name=size)


def prepare(photos: Path | None, shape: tuple[int, int] | None, count: int, folder: Path) -> list[Path]:
    """JPEG files of some shape: photos, or without them drawings."""
    folder.mkdir()
    for number, picture in enumerate(some_images(photos, count)):
        path = folder / f"{number:05}.jpg"
        if shape is None and isinstance(picture, Path):
            path.write_bytes(picture.read_bytes())
            continue
        image = Image.open(picture) if isinstance(picture, Path) else picture
        image.convert("RGB").resize(shape or image.size, Image.Resampling.BICUBIC).save(path, quality=90)
    return sorted(folder.iterdir())


def some_images(photos: Path | None, count: int) -> Iterator[Path | Image.Image]:
    if photos is not None:
        yield from sorted(photos.rglob("*.jpg"))[:count]
        return
    source = open_synthetic("synthetic")[0]
    yield from (source.image(number, 144) for number in range(count))


def race(
    embedder: Embedder, images: list[Path], folder: Path, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each, round by round, the first of which is not counted; both must find the same."""
    loop, ours = [], []
    for number in range(-1, rounds):
        started = time.perf_counter()
        rows = plain_loop(embedder.model, images)
        looped = time.perf_counter() - started
        os.environ["LAPCLIP_CACHE"] = str(folder / f"cache-{number}")
        started = time.perf_counter()
        work = update(embedder, name="bench", model="bench", folders=[str(images[0].parent)])
        try:
            while True:
                next(work)
        except StopIteration as end:
            summary = end.value
        indexed = time.perf_counter() - started
        assert summary.num_indexed == len(images)
        vectors = np.fromfile(next(summary.path.glob("vectors*")), np.float32).reshape(-1, embedder.width)
        assert (np.sum(vectors * rows[: len(vectors)], axis=1) > 0.99).mean() > 0.95, "not the same images"
        if number >= 0:
            loop.append(looped)
            ours.append(indexed)
    return loop, ours


@torch.inference_mode()
def plain_loop(model: CLIP, images: list[Path]) -> np.ndarray:
    size, rows = model.size.image_size, []
    for start in range(0, len(images), BATCH):
        pixels = []
        for path in images[start : start + BATCH]:
            with Image.open(path) as picture:
                upright = ImageOps.exif_transpose(picture).convert("RGB")
            square = ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC)
            pixels.append(torch.from_numpy(np.array(square)).permute(2, 0, 1))
        rows.append(model.embed_images(torch.stack(pixels)))
    return torch.cat(rows).numpy()
