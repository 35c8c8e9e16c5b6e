"""The transformer block both towers are made of.

Shapes: B pairs, T tokens (or patches), Q queries, D width, H heads, N tokens of a whole batch without padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class QuickGELU(nn.Module):
    """The sigmoid approximation of GELU that OpenAI's CLIP weights were trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU, "quick_gelu": QuickGELU, "gelu_tanh": partial(nn.GELU, approximate="tanh")
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The shape of one tower's transformer."""

    width: int
    depth: int
    heads: int
    hidden: int | None = None  # width of the MLPs; by default four times the width

    @property
    def mlp_width(self) -> int:
        return self.hidden or 4 * self.width


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch of causal rows stand when padding is left out of all work but attention itself."""

    places_N: Tensor  # in the padded batch, flattened
    ends_B: Tensor  # the last token of each row, among the N
    shape: tuple[int, int]  # B, T

    @classmethod
    def of(cls, ends_B: Tensor, length: int) -> "Packing":
        is_token_BT = torch.arange(length, device=ends_B.device) <= ends_B[:, None]
        places_N = is_token_BT.flatten().nonzero().squeeze(1)
        return cls(places_N, (ends_B + 1).cumsum(0) - 1, (len(ends_B), length))

    def pack(self, x_BTD: Tensor) -> Tensor:
        # Not by indexing, whose gradient several threads add up in any order.
        return F.embedding(self.places_N, x_BTD.flatten(0, 1))

    def pad(self, x_ND: Tensor) -> Tensor:
        B, T = self.shape
        return x_ND.new_zeros(B * T, x_ND.shape[1]).index_copy(0, self.places_N, x_ND).unflatten(0, (B, T))


class Attention(nn.Module):
    """Multi-head attention: one projection in, one out; plain `Linear`s, so that LoRA, INT8 and exporters see them."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: Tensor, mask: Tensor | None, query_BQD: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Every token attends to all that `mask` allows; with `query_BQD`, only these attend, to all tokens.

        Tokens are [B, T, D], or packed [N, D].
        """
        D = x.shape[-1]
        padded = packing.pad if packing else (lambda rows: rows)
        if query_BQD is None:
            q, k, v = padded(self.qkv(x)).chunk(3, dim=-1)
        else:
            q = F.linear(query_BQD, self.qkv.weight[:D], self.qkv.bias[:D])
            k, v = padded(F.linear(x, self.qkv.weight[D:], self.qkv.bias[D:])).chunk(2, dim=-1)
        B = k.shape[0]  # not `len`, which an export would take for a constant
        # Contiguous, because MPS has returned wrong numbers for permuted inputs (pytorch#163597, #181133).
        q, k, v = (
            t.reshape(B, -1, self.heads, D // self.heads).transpose(1, 2).contiguous() for t in (q, k, v)
        )
        y_BHQD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y_BQD = y_BHQD.transpose(1, 2).reshape(B, -1, D)
        return self.out(packing.pack(y_BQD) if packing and query_BQD is None else y_BQD)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, shape: Shape, activation: str):
        super().__init__()
        self.up = nn.Linear(shape.width, shape.mlp_width)
        self.activation = ACTIVATIONS[activation]()
        self.down = nn.Linear(shape.mlp_width, shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        wide = self.up(x_BTD)
        # A compiler decides by itself what it keeps; under autocast a step of our own would not be in its precision.
        is_ours = not torch.compiler.is_compiling() and not torch.is_autocast_enabled(wide.device.type)
        if wide.requires_grad and is_ours:
            return ActivatedLinear.apply(wide, self.down.weight, self.down.bias, self.activation)
        return self.down(self.activation(wide))


class ActivatedLinear(torch.autograd.Function):
    """`linear(activation(wide))` that keeps only `wide` for the backward pass, and computes the activation again there.

    Plain autograd keeps both sides of the activation: eight of the seventeen vectors a block keeps for each token.
    """

    @staticmethod
    def forward(ctx: Any, wide: Tensor, weight: Tensor, bias: Tensor, activation: nn.Module) -> Tensor:
        ctx.save_for_backward(wide, weight)
        ctx.activation = activation
        return F.linear(activation(wide), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        wide, weight = ctx.saved_tensors
        with torch.enable_grad():
            wide = wide.detach().requires_grad_()
            activated = ctx.activation(wide)
        rows = gradient.flatten(0, -2)
        (of_wide,) = torch.autograd.grad(activated, wide, gradient @ weight)
        return of_wide, rows.T @ activated.detach().flatten(0, -2), rows.sum(0), None


class Block(nn.Module):
    """Attention, then an MLP, each after a norm and with a residual connection."""

    def __init__(self, shape: Shape, activation: str, norm_eps: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, norm_eps)
        self.attention = Attention(shape.width, shape.heads)
        self.norm2 = nn.LayerNorm(shape.width, norm_eps)
        self.mlp = MLP(shape, activation)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        at_B: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """All tokens, or with `at_B` the one at that place of each row, as [B, 1, D]: the same numbers, less work."""
        x_Q, normed = x if at_B is None else pick(x, at_B), self.norm1(x)
        query_BQD = None if at_B is None else pick(normed, at_B)
        x_Q = x_Q + self.attention(normed, mask, query_BQD, packing)
        return x_Q + self.mlp(self.norm2(x_Q))


class AttentionPool(nn.Module):
    """SigLIP's pooling: one learned query attends to all patches; then an MLP with a residual connection."""

    def __init__(self, shape: Shape, activation: str, norm_eps: float):
        super().__init__()
        self.query = nn.Parameter(torch.empty(shape.width))
        self.attention = Attention(shape.width, shape.heads)
        self.norm = nn.LayerNorm(shape.width, norm_eps)
        self.mlp = MLP(shape, activation)

    def forward(self, x_BTD: Tensor) -> Tensor:
        pooled = self.attention(x_BTD, None, self.query.expand(len(x_BTD), 1, -1))
        return (pooled + self.mlp(self.norm(pooled))).squeeze(1)


def pick(x: Tensor, at_B: Tensor) -> Tensor:
    """The token at one place of each row, or of packed tokens, as [B, 1, D]."""
    if x.ndim == 2:
        return F.embedding(at_B, x)[:, None]
    return x.gather(1, at_B.view(-1, 1, 1).expand(-1, 1, x.shape[-1]))
