"""A small residual network as image tower (arXiv 1512.03385), which learns from few images more than a transformer.

Shapes: B images, C channels, H and W pixels, D width of the last stage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Mean and spread of OpenAI's training images; every CLIP since has kept them, so weights can be exchanged.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
GROUP = 32  # images that are normalised together; a chunk consists of whole groups
MOMENTUM = 0.025  # of the running statistics, per group
STEM_STRIDE = 2


class ResNet(nn.Module):
    """One residual block per stage, each stage at half the resolution of the one before; the mean over all places."""

    mean: Tensor
    std: Tensor

    def __init__(self, widths: Sequence[int]):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, STEM_STRIDE, padding=1, bias=False)
        self.norm = BatchNorm(widths[0])
        pairs = zip([widths[0], *widths], widths, strict=False)
        self.blocks = nn.Sequential(*(ResBlock(i, o, stride=1 + (n > 0)) for n, (i, o) in enumerate(pairs)))
        for name, values in (("mean", PIXEL_MEAN), ("std", PIXEL_STD)):
            self.register_buffer(name, 255 * torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor, keep_BK: Tensor | None = None) -> Tensor:
        """From pixels [B, 3, H, W], bytes or floats already normalised."""
        if images.dtype == torch.uint8:
            images = (images - self.mean) / self.std
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        return self.blocks(F.relu(self.norm(x))).mean((2, 3))


class ResBlock(nn.Module):
    """Two convolutions with a residual connection; at first the connection alone."""

    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.norm1 = BatchNorm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = BatchNorm(out, gain=0.0)
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.project = nn.Conv2d(width, out, 1, bias=False) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.project(self.pool(x)) + y)


class BatchNorm(nn.Module):
    """Batch norm over groups of images, so that it does not depend on how a batch is cut into chunks of whole groups.

    While gradients are computed the running statistics are updated, once per step; evaluation uses them.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, gain: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), gain))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # Frozen, it normalises as in evaluation.
        is_training = self.training and self.weight.requires_grad and not torch.is_inference_mode_enabled()
        # The first pass of a step in chunks has no gradients, and leaves the statistics to the second.
        is_kept = not is_training or torch.is_grad_enabled()
        mean, var = (self.running_mean, self.running_var) if is_kept else (None, None)
        settings = mean, var, self.weight, self.bias, is_training, MOMENTUM
        groups = x.split(GROUP) if is_training else (x,)
        return torch.cat([F.batch_norm(group, *settings) for group in groups])


def resnet_flops(widths: Sequence[int], image_size: int) -> int:
    """Floating-point operations of the convolutions in a forward pass of one image."""
    side = image_size // STEM_STRIDE
    total, before = side**2 * 9 * 3 * widths[0], widths[0]
    for number, width in enumerate(widths):
        side //= 1 + (number > 0)
        total += side**2 * width * (9 * (before + width) + before * (before != width))
        before = width
    return 2 * total


def resnet_activations(widths: Sequence[int], image_size: int) -> int:
    """About how many numbers are kept of one image for the backward pass."""
    return sum(8 * width * (image_size // STEM_STRIDE >> number) ** 2 for number, width in enumerate(widths))
