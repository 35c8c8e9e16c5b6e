"""Low-rank adapters (LoRA, arXiv 2106.09685) on the attention of both towers: few parameters are trained.

As parametrizations of the weights, so that every module uses them as it is, and merging is exact.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

TARGETS = ("attention.qkv", "attention.out")
ADAPTER_DOWN = ".parametrizations.weight.0.down"  # how its name ends in a model


class LowRank(nn.Module):
    """Adds a product of two thin matrices to a weight; it starts at zero."""

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        out, width = weight.shape
        self.up = nn.Parameter(torch.zeros(out, rank))
        self.down = nn.Parameter(torch.randn(rank, width) * width**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def targets(model: nn.Module) -> list[nn.Linear]:
    """The layers that adapters are for."""
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.endswith(TARGETS)]


def add_adapters(model: nn.Module, rank: int) -> None:
    for module in targets(model):
        parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank), unsafe=True)


def merge_adapters(model: nn.Module) -> None:
    """Makes the adapters part of the weights."""
    for module in targets(model):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
