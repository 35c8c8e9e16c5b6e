"""The transformer block both towers are made of.

Shapes: B pairs, T tokens (or patches), Q queries, D width, H heads.
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


class Attention(nn.Module):
    """Multi-head attention: one projection in, one out; plain `Linear`s, so that LoRA, INT8 and exporters see them."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, mask: Tensor | None, query_BQD: Tensor | None = None) -> Tensor:
        """Every token attends to all that `mask` allows; with `query_BQD`, only these attend, to all tokens."""
        B, _, D = x_BTD.shape
        if query_BQD is None:
            q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        else:
            q = F.linear(query_BQD, self.qkv.weight[:D], self.qkv.bias[:D])
            k, v = F.linear(x_BTD, self.qkv.weight[D:], self.qkv.bias[D:]).chunk(2, dim=-1)
        # Contiguous, because MPS has returned wrong numbers for permuted inputs (pytorch#163597, #181133).
        q, k, v = (
            t.reshape(B, -1, self.heads, D // self.heads).transpose(1, 2).contiguous() for t in (q, k, v)
        )
        y_BHQD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y_BHQD.transpose(1, 2).reshape(B, -1, D))


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

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None, at_B: Tensor | None = None) -> Tensor:
        """All tokens, or with `at_B` the one at that place of each row, as [B, 1, D]: the same numbers, less work."""
        x_BQD, normed_BTD = x_BTD if at_B is None else pick(x_BTD, at_B), self.norm1(x_BTD)
        query_BQD = None if at_B is None else pick(normed_BTD, at_B)
        x_BQD = x_BQD + self.attention(normed_BTD, mask, query_BQD)
        return x_BQD + self.mlp(self.norm2(x_BQD))


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


def pick(x_BTD: Tensor, at_B: Tensor) -> Tensor:
    """The token at one place of each row, as [B, 1, D]."""
    return x_BTD.gather(1, at_B.view(-1, 1, 1).expand(-1, 1, x_BTD.shape[-1]))
