"""A smaller model that starts from a larger one: some of its blocks, and the leading width of every weight.

Shapes: D width, C channels, G patches per side, S pixels per side of a patch.
"""

import math
import re
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lapclip.errors import UserError
from lapclip.model.clip import CLIP
from lapclip.model.towers import Size

BLOCK = re.compile(r"(image|text)\.transformer\.blocks\.(\d+)\.")


def inherit(large: CLIP, size: Size) -> CLIP:
    """A model with the widths, depths and lengths of `size`; all else, and the weights, are those of `large`."""
    size = inherited_size(large.size, size)
    with torch.random.fork_rng(devices=[]):
        small = CLIP(size, vocab_size=large.vocab_size, has_bias=large.bias is not None)

    def source(match: re.Match[str]) -> str:
        tower, at = match[1], int(match[2])
        depth, last = getattr(size, tower).depth, getattr(large.size, tower).depth - 1
        return f"{tower}.transformer.blocks.{round(at * last / (depth - 1)) if depth > 1 else last}."

    weights = large.state_dict()
    for name, tensor in small.state_dict().items():
        weight = weights[BLOCK.sub(source, name)]
        if name == "image.embed.weight":
            weight = resize_patches(weight, size.patch_size)
        elif name == "image.positions":
            weight = resize_positions(weight, size.image_size // size.patch_size, int(not size.siglip))
        num_parts = 3 if ".qkv." in name else 1  # queries, keys and values are stacked
        parts, into = (t.unflatten(0, (num_parts, -1)) for t in (weight, tensor))
        into.copy_(parts[tuple(map(slice, into.shape))])
    return small


def inherited_size(large: Size, small: Size) -> Size:
    """The shape of `small` with the activation, norms, pooling and vocabulary of `large`, which must be no smaller."""
    for what, is_there, hint in (
        ("other towers than transformers", large.image_encoder or large.text_encoder, "start from a CLIP"),
        ("trained heads", large.head, "start from the model that they were trained on"),
        ("adapters", large.lora_rank, "merge them first"),
    ):
        if is_there:
            raise UserError(f"a model with {what} cannot be made smaller", hint=hint)
    if small.image_encoder:
        what = "a residual network cannot start from the weights of a transformer"
        raise UserError(what, hint="choose another `--size`, such as `tiny`")
    # SigLIP's images have no projection: the tower's width is the embedding's.
    small = replace(small, embedding=small.image.width) if large.siglip else small
    other, shorter = "choose a smaller `--size`", f"pass `--text-length {large.text_length}`"
    numbers = [
        (f"{what} of the {tower} tower", getattr(new, name), getattr(old, name), other)
        for tower, new, old in (("image", small.image, large.image), ("text", small.text, large.text))
        for what, name in (("width", "width"), ("depth", "depth"), ("MLP width", "mlp_width"))
    ]
    numbers.append(("width of the embedding", small.embedding, large.embedding, other))
    numbers.append(("text length", small.text_length, large.text_length, shorter))
    for what, ours, theirs, hint in numbers:
        if ours > theirs:
            raise UserError(f"the {what} is {ours}, but only {theirs} in the model to start from", hint=hint)
    shapes = ("image", "text", "image_size", "patch_size", "text_length", "embedding")
    return replace(large, **{name: getattr(small, name) for name in shapes})


def resize_patches(weight: Tensor, patch_size: int) -> Tensor:
    """Patch embeddings [D, C * S * S] for another patch size; of a constant image they give about the same."""
    side = math.isqrt(weight.shape[1] // 3)
    kernel_DCSS = resize(weight.unflatten(1, (3, side, side)), patch_size)
    return kernel_DCSS.flatten(1) * (side / patch_size) ** 2


def resize_positions(weight: Tensor, grid: int, num_apart: int) -> Tensor:
    """Positions [1 + G * G, D] for another grid of patches; the class token's stays, where there is one."""
    apart, patches = weight[:num_apart], weight[num_apart:]
    side = math.isqrt(len(patches))
    grid_1DGG = resize(patches.T.unflatten(1, (side, side))[None], grid)
    return torch.cat([apart, grid_1DGG[0].flatten(1).T])


def resize(grid: Tensor, side: int) -> Tensor:
    if grid.shape[-1] == side:
        return grid
    return F.interpolate(grid, (side, side), mode="bilinear", antialias=True)
