"""A source in, batches at the model's size out: augmented on the CPU, ahead of the step.

What happens to an image or a caption depends on seed and step alone. While a step runs, on whatever device, one thread
prepares the next batch. Shapes: B images, S pixels a side as stored, H as the model sees them.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lapclip.config import DataConfig
from lapclip.data.batches import Batch, load_batches
from lapclip.data.source import Source
from lapclip.data.tokenizer import PAD, Tokenizer
from lapclip.data.workers import in_order
from lapclip.model.towers import Size


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
        captions_per_image=config.captions_per_image or 1,
    )
    augmented = (
        drop_words(
            augment_batch(batch, config, image_size=size.image_size, seed=seed, step=step),
            config.word_dropout or 0.0,
            np.random.default_rng([seed, step, 3]),
        )
        for step, batch in enumerate(batches, first_step)
    )
    with closing(batches):
        # Drawing and decoding are left to workers: in a thread, heavy Python holds up the step's own.
        yield from ahead(augmented) if source.only_copies or workers > 0 else augmented


def ahead(batches: Iterator[Batch]) -> Generator[Batch]:
    """The next batch is prepared while this one is used."""
    return in_order(lambda _: next(batches), count(), threads=1, ahead=2)


def augment_batch(batch: Batch, config: DataConfig, *, image_size: int, seed: int, step: int) -> Batch:
    """Bytes [B, 3, S, S] in, bytes [B, 3, H, H] out; unchanged when there is nothing to do."""
    crop, flip, colour = config.crop or 1.0, bool(config.flip), config.colour or 0.0
    num, stored = len(batch.images), batch.images.shape[-1]
    if crop == 1 and not flip and colour == 0 and stored == image_size:
        return batch
    rng = np.random.default_rng([seed, step, 2])  # 1 is for patches
    share = rng.uniform(crop, 1.0, num)
    stretch = np.exp(rng.uniform(-0.15, 0.15, num)) if crop < 1 else np.ones(num)
    width, height = (np.minimum(1.0, np.sqrt(share * s)) for s in (stretch, 1 / stretch))
    left, top = (rng.uniform(-1, 1, num) * (1 - extent) for extent in (width, height))
    mirrored = np.where(rng.random(num) < 0.5 * flip, -1.0, 1.0)
    grid_BHH2 = sampling_grid(left, mirrored * width, top, height, image_size)
    images = F.grid_sample(torch.from_numpy(batch.images).float(), grid_BHH2, align_corners=False)
    if colour > 0:
        factors = torch.from_numpy(rng.uniform(1 - colour, 1 + colour, (3, num, 1, 1, 1)).astype(np.float32))
        images = jitter(images, *factors)
    return replace(batch, images=images.clamp_(0, 255).round_().to(torch.uint8).numpy())


def drop_words(batch: Batch, share: float, rng: np.random.Generator) -> Batch:
    """Removes about that share of the tokens between the start and the end of each caption."""
    if share == 0:
        return batch
    places, ends = np.arange(batch.tokens.shape[-1]), batch.ends[..., None]
    is_dropped = (places > 0) & (places < ends) & (rng.random(batch.tokens.shape, np.float32) < share)
    num_dropped = is_dropped.sum(-1, keepdims=True)
    # Those that stay move forward, in their order.
    tokens = np.take_along_axis(batch.tokens, is_dropped.argsort(-1, kind="stable"), -1)
    tokens[places > ends - num_dropped] = PAD
    return replace(batch, tokens=tokens, ends=(ends - num_dropped)[..., 0])


def sampling_grid(
    left: np.ndarray, width: np.ndarray, top: np.ndarray, height: np.ndarray, size: int
) -> Tensor:
    """[B, H, H, 2]: for each pixel, its x and y in the stored image, which reaches from -1 to 1."""
    centres_H = (2 * np.arange(size) + 1) / size - 1
    grid = np.empty((len(left), size, size, 2), dtype=np.float32)
    grid[..., 0] = (left[:, None] + width[:, None] * centres_H)[:, None, :]
    grid[..., 1] = (top[:, None] + height[:, None] * centres_H)[:, :, None]
    return torch.from_numpy(grid)


def jitter(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Scales brightness, then contrast around the mean, then saturation around each pixel's grey."""
    images = images * brightness
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + (images - mean) * contrast
    grey = images.mean(dim=1, keepdim=True)
    return grey + (images - grey) * saturation
