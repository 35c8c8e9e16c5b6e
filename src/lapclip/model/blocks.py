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
# With AVX-512, fp32 products by oneDNN with weights are 1.1 (Zen 4) to 2.3 times (Zen 5) as fast as torch's.
HAS_AVX512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if HAS_AVX512 else None
# Only AMD CPUs from Zen 5 on have both; there, oneDNN is also faster for the gradients of weights.
IS_ZEN5 = all(torch.cpu.get_capabilities().get(name) for name in ("sse4a", "avx_vnni"))
KEPT_BYTES = 64 << 20  # activations of a tower that are kept for the backward pass and not computed again


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
            q, k, v = padded(linear(x, self.qkv)).chunk(3, dim=-1)
        else:
            q = linear(query_BQD, self.qkv, rows=slice(D))
            k, v = padded(linear(x, self.qkv, rows=slice(D, None))).chunk(2, dim=-1)
        B = k.shape[0]  # not `len`, which an export would take for a constant
        # Contiguous, because MPS has returned wrong numbers for permuted inputs (pytorch#163597, #181133).
        q, k, v = (
            t.reshape(B, -1, self.heads, D // self.heads).transpose(1, 2).contiguous() for t in (q, k, v)
        )
        y_BHQD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y_BQD = y_BHQD.transpose(1, 2).reshape(B, -1, D)
        return linear(packing.pack(y_BQD) if packing and query_BQD is None else y_BQD, self.out)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, shape: Shape, activation: str):
        super().__init__()
        self.up = nn.Linear(shape.width, shape.mlp_width)
        self.activation = ACTIVATIONS[activation]()
        self.down = nn.Linear(shape.mlp_width, shape.width)
        self.depth = shape.depth

    def forward(self, x_BTD: Tensor) -> Tensor:
        wide = linear(x_BTD, self.up)
        # A compiler decides by itself what it keeps, and would make a program for each side of the limit.
        if torch.compiler.is_compiling() or wide.numel() * wide.element_size() * self.depth <= KEPT_BYTES:
            return linear(self.activation(wide), self.down)
        return linear(wide, self.down, self.activation)


def linear(
    x: Tensor, layer: nn.Linear, activation: nn.Module | None = None, rows: slice | None = None
) -> Tensor:
    """What a layer, or some rows of it, makes of `activation(x)`."""
    # Under autocast a step of our own would not be in its precision.
    is_plain = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    if not is_plain and torch.is_grad_enabled() and (activation or has_onednn(x)):
        parameters = (layer.weight, layer.bias) if rows is None else (layer.weight[rows], layer.bias[rows])
        return ActivatedLinear.apply(x, *parameters, activation)
    x = activation(x) if activation else x
    return layer(x) if rows is None else F.linear(x, layer.weight[rows], layer.bias[rows])


def has_onednn(x: Tensor) -> bool:
    return ONEDNN is not None and x.is_cpu and x.dtype == torch.float32


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if ONEDNN is not None and has_onednn(x):
        return ONEDNN(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class ActivatedLinear(torch.autograd.Function):
    """`linear(activation(x))` that keeps only `x` for the backward pass, and computes the activation again there.

    Plain autograd keeps both sides of the activation: eight of the seventeen vectors a block keeps for each token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, activation: nn.Module | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.activation = activation
        return product(activation(x) if activation else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = activated, _ = ctx.saved_tensors
        of_x = product(gradient, weight.T) if ctx.needs_input_grad[0] else None
        if ctx.activation:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                activated = ctx.activation(x)
            (of_x,) = torch.autograd.grad(activated, x, of_x) if of_x is not None else (None,)
        rows, inputs = gradient.flatten(0, -2), activated.detach().flatten(0, -2)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = product(rows.T, inputs.T) if IS_ZEN5 else rows.T @ inputs
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


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
