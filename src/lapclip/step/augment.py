"""Crop, flip and colour, for a whole batch at once; what happens to an image depends on seed and step alone.

Shapes: B images, S pixels a side as stored, H as the model looks at them.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def augment(
    images: Tensor, image_size: int, *, step: int, seed: int, crop: float, flip: bool, colour: float
) -> Tensor:
    """Bytes [B, 3, S, S] in, bytes [B, 3, H, H] out; as they are when there is nothing to do."""
    num, stored = len(images), images.shape[-1]
    if crop == 1 and not flip and colour == 0 and stored == image_size:
        return images
    rng = np.random.default_rng([seed, step, 2])  # 1 is for patches
    share = rng.uniform(crop, 1.0, num)
    stretch = np.exp(rng.uniform(-0.15, 0.15, num)) if crop < 1 else np.ones(num)
    width, height = (np.minimum(1.0, np.sqrt(share * s)) for s in (stretch, 1 / stretch))
    left, top = (rng.uniform(-1, 1, num) * (1 - extent) for extent in (width, height))
    mirrored = np.where(rng.random(num) < 0.5 * flip, -1.0, 1.0)
    grid_BHH2 = looked_at(left, mirrored * width, top, height, image_size).to(images.device)
    shown = F.grid_sample(images.float(), grid_BHH2, align_corners=False)
    if colour > 0:
        factors = torch.from_numpy(rng.uniform(1 - colour, 1 + colour, (3, num, 1, 1, 1)).astype(np.float32))
        shown = recolour(shown, *factors.to(images.device))
    return shown.clamp_(0, 255).round_().to(torch.uint8)


def looked_at(left: np.ndarray, width: np.ndarray, top: np.ndarray, height: np.ndarray, size: int) -> Tensor:
    """[B, H, H, 2]: for each pixel seen, its x and y in the stored image, which reaches from -1 to 1."""
    centres_H = (2 * np.arange(size) + 1) / size - 1
    grid = np.empty((len(left), size, size, 2), dtype=np.float32)
    grid[..., 0] = (left[:, None] + width[:, None] * centres_H)[:, None, :]
    grid[..., 1] = (top[:, None] + height[:, None] * centres_H)[:, :, None]
    return torch.from_numpy(grid)


def recolour(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Brighter or darker, then away from or towards the mean grey, then away from or towards each pixel's grey."""
    images = images * brightness
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + (images - mean) * contrast
    grey = images.mean(dim=1, keepdim=True)
    return grey + (images - grey) * saturation
