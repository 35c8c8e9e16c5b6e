"""AdamW and its learning rate, a pure function of how far the run is."""

import math

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lapclip.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW; weight decay on matrices only, since decaying gains, biases and the temperature hurts small models."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    assert config.lr is not None, "resolved"
    optimizer = AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    # Allocated before the first activations: what stays must not be scattered among what comes and goes.
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def schedule(progress: float, warmup: float) -> float:
    """The share of the peak learning rate at some point of the run: linear warm-up, then half a cosine down."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (min(progress, 1.0) - warmup) / (1 - warmup)))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
