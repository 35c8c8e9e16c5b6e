"""A source in, batches as the model looks at them out: cropped and varied on the processor, ahead of the step.

While a step runs, on whatever device, one thread prepares the next batch.
"""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import torch

from lapclip.config import DataConfig
from lapclip.data.batches import Batch, load_batches
from lapclip.data.source import Source
from lapclip.data.tokenizer import Tokenizer
from lapclip.model.clip import Size
from lapclip.step.augment import augment


def feed(
    source: Source,
    tokenizer: Tokenizer,
    size: Size,
    config: DataConfig,
    *,
    batch_size: int,
    seed: int,
    first_step: int,
    workers: int,
) -> Generator[Batch]:
    """Batches without end, from some step on, at the model's size."""
    batches = load_batches(
        source,
        tokenizer,
        batch_size=batch_size,
        image_size=size.image_size,
        text_length=size.text_length,
        seed=seed,
        first_step=first_step,
        workers=workers,
    )
    seen = (
        look_at(batch, config, image_size=size.image_size, seed=seed, step=step)
        for step, batch in enumerate(batches, first_step)
    )
    with closing(batches):
        # Drawing and decoding are left to workers: in a thread, heavy Python holds up the step's own.
        yield from ahead(seen) if source.only_copies or workers > 0 else seen


def look_at(batch: Batch, config: DataConfig, *, image_size: int, seed: int, step: int) -> Batch:
    images = augment(
        torch.from_numpy(batch.images), image_size, step=step, seed=seed,
        crop=config.crop or 1.0, flip=bool(config.flip), colour=config.colour or 0.0,
    )  # fmt: skip
    return replace(batch, images=images.numpy())


def ahead(batches: Iterator[Batch]) -> Generator[Batch]:
    """The next batch is made while this one is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches)
        while True:
            batch = coming.result()
            coming = thread.submit(next, batches)
            yield batch
