"""Images in, tokens in: one vector each comes out, not yet of unit length.

Shapes: B pairs, T tokens, P patches, K patches kept, D width, E embedding.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lapclip.model.blocks import AttentionPool, Block, Packing, Shape
from lapclip.model.encoders import Encoder
from lapclip.model.resnet import PIXEL_MEAN, PIXEL_STD


@dataclass(frozen=True)
class Head:
    """The shape of what projects frozen features: a linear layer, and beside it an MLP."""

    hidden: int
    dropout: float = 0.0  # of features
    hidden_dropout: float = 0.0


@dataclass(frozen=True)
class Vocabulary:
    """The number of tokens, and those that start, end and pad a text."""

    size: int
    start: int | None
    end: int
    pad: int


@dataclass(frozen=True)
class Size:
    """Everything that decides the shape of a model but its vocabulary."""

    image: Shape
    text: Shape
    image_size: int
    patch_size: int
    text_length: int
    embedding: int
    activation: str = "gelu"
    pre_norm: bool = False  # a norm before the image tower's first block, as OpenAI's towers have
    patch_bias: bool = True
    projection_bias: bool = True
    norm_eps: float = 1e-5
    siglip: bool = False  # attention pooling in place of a class token; bidirectional texts of full length
    head: Head | None = None  # in place of the linear projections, where the towers are frozen
    image_encoder: Encoder | None = None  # in place of the image tower
    text_encoder: Encoder | None = None
    token_mean: bool = False  # the text tower is the mean of its token embeddings
    lora_rank: int = 0  # of the adapters that are trained in place of the towers' weights
    resize: str = "packed"  # how images become squares: one of `data.decode.RESIZES`
    vocabulary: Vocabulary | None = None  # None: that of lapclip's own tokenizers

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def described(self) -> dict[str, Any]:
        """As written in files, without later additions that have no effect: fingerprints stay as they were."""
        about = asdict(self)
        later = list(about)[list(about).index("norm_eps") :]
        about = {k: v for k, v in about.items() if k not in later or v != getattr(Size, k)}
        return about | {t: {k: v for k, v in about[t].items() if v is not None} for t in ("image", "text")}


class Transformer(nn.Module):
    """A stack of blocks; read out at one place of each row, the last block does its work there alone."""

    def __init__(self, shape: Shape, activation: str, norm_eps: float):
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape, activation, norm_eps) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, norm_eps)
        self.recompute = False
        self.packs = False  # leaves padding out; each batch then has a shape of its own

    def forward(self, x_BTD: Tensor, at_B: Tensor | None, causal: bool) -> Tensor:
        """The token at one place of each row [B, D]; all of them [B, T, D] without `at_B`."""
        T = x_BTD.shape[1]
        places_T = torch.arange(T, device=x_BTD.device)
        mask_TT = places_T <= places_T[:, None] if causal else None
        mask_last = (places_T <= at_B[:, None])[:, None, None, :] if causal and at_B is not None else None
        packing, x = None, x_BTD
        if self.packs and causal and at_B is not None:
            packing = Packing.of(at_B, T)
            x, at_B = packing.pack(x_BTD), packing.ends_B
        *blocks, last = self.blocks
        for block in blocks:
            x = self.run(block, x, mask_TT, None, packing)
        x = self.norm(self.run(last, x, mask_last, at_B, packing))
        return x if at_B is None else x.squeeze(1)

    def run(self, block: nn.Module, *inputs: Tensor | Packing | None) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            # Nothing in a block is random, so there is no random state to keep for the second pass.
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        return as_is(block)(*inputs)


def as_is(module: nn.Module) -> Callable[..., Tensor]:
    """The module, compiled if it is; but as written while evaluating, whose many shapes would each be compiled."""
    return module.forward if torch.is_inference_mode_enabled() else module


class ImageTower(nn.Module):
    """A vision transformer read out at its class token, or as SigLIP's by attention pooling."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: Size):
        super().__init__()
        self.patch_size, width, num_pixels = size.patch_size, size.image.width, size.patch_size**2
        self.embed = nn.Linear(3 * num_pixels, width, bias=size.patch_bias)
        self.class_token = None if size.siglip else nn.Parameter(torch.empty(width))
        self.positions = nn.Parameter(torch.empty(size.num_patches + (not size.siglip), width))
        self.pre_norm = nn.LayerNorm(width, size.norm_eps) if size.pre_norm else nn.Identity()
        self.transformer = Transformer(size.image, size.activation, size.norm_eps)
        self.pool = AttentionPool(size.image, size.activation, size.norm_eps) if size.siglip else None
        for name, values in (("mean", PIXEL_MEAN), ("std", PIXEL_STD)):
            self.register_buffer(name, torch.tensor(values).repeat_interleave(num_pixels), persistent=False)

    def forward(self, images: Tensor, keep_BK: Tensor | None = None) -> Tensor:
        """From pixels [B, 3, H, W], bytes or floats already normalised; `keep_BK` names the patches to look at."""
        patches = self.cut(images)
        of_patches = self.positions if self.class_token is None else self.positions[1:]
        positions = of_patches.expand(len(images), -1, -1)
        if keep_BK is not None:
            patches = patches.gather(1, keep_BK[..., None].expand(-1, -1, patches.shape[-1]))
            # Not by indexing, whose gradient several threads add up in any order: a run could not be repeated.
            positions = F.embedding(keep_BK, of_patches)
        if patches.dtype == torch.uint8:
            patches = (patches / 255 - self.mean) / self.std
        x_BPD = self.embed(patches) + positions
        if self.class_token is None or self.pool is not None:
            assert self.pool is not None
            return self.pool(self.transformer(self.pre_norm(x_BPD), None, causal=False))
        class_B1D = (self.class_token + self.positions[0]).expand(len(images), 1, -1)
        at_B = torch.zeros(len(images), dtype=torch.long, device=images.device)
        return self.transformer(self.pre_norm(torch.cat([class_B1D, x_BPD], dim=1)), at_B, causal=False)

    def cut(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] into rows of patches [B, P, 3 * patch * patch], channels first as a convolution has them."""
        B, C, H, W = images.shape
        p = self.patch_size
        return images.reshape(B, C, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * p * p)


class TextTower(nn.Module):
    """A causal transformer read out at the end token, which alone has seen the whole caption and no padding.

    As in SigLIP: not causal, read out at the last place of rows that are always padded to their full length.
    """

    def __init__(self, size: Size, *, vocab_size: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, size.text.width)
        self.positions = nn.Parameter(torch.empty(size.text_length, size.text.width))
        self.transformer = Transformer(size.text, size.activation, size.norm_eps)
        self.is_causal = not size.siglip

    def forward(self, tokens_BT: Tensor, ends_B: Tensor) -> Tensor:
        """From token ids and the place of each caption's end token."""
        x_BTD = self.embed(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        at_B = ends_B if self.is_causal else torch.full_like(ends_B, tokens_BT.shape[1] - 1)
        return self.transformer(x_BTD, at_B, causal=self.is_causal)


class TokenMean(nn.Module):
    """The mean of a caption's token embeddings: from few captions it generalises better than a transformer."""

    def __init__(self, size: Size, *, vocab_size: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, size.text.width)
        self.norm = nn.LayerNorm(size.text.width, size.norm_eps)

    def forward(self, tokens_BT: Tensor, ends_B: Tensor) -> Tensor:
        is_caption_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) <= ends_B[:, None]
        total_BD = (self.embed(tokens_BT) * is_caption_BT[..., None]).sum(1)
        return self.norm(total_BD / (ends_B[:, None] + 1))


class Projection(nn.Module):
    """A linear layer plus an MLP that starts at zero, on standardised features: training starts at the linear layer."""

    mean: Tensor
    std: Tensor

    def __init__(self, width: int, embedding: int, head: Head):
        super().__init__()
        self.head = head
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.linear = nn.Linear(width, embedding)
        self.up = nn.Linear(width, head.hidden)
        self.down = nn.Linear(head.hidden, embedding)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = drop((x_BD - self.mean) / self.std, self.head.dropout)
        return self.linear(x_BD) + self.down(drop(F.gelu(self.up(x_BD)), self.head.hidden_dropout))


def drop(x: Tensor, rate: float) -> Tensor:
    """Dropout while gradients are computed, its rate rounded to 1/256.

    One random byte decides for each number: torch's own draws each from a distribution, on one core only, and took a
    quarter of the time of a step.
    """
    num_dropped = round(256 * rate)
    if not torch.is_grad_enabled() or num_dropped == 0:
        return x
    bits = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    is_kept = bits.view(torch.uint8)[: x.numel()].view_as(x) >= num_dropped
    return x * is_kept * (256 / (256 - num_dropped))
