"""AdamW and its learning rate, a pure function of how far the run is."""

import math
import re
from itertools import product

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lapclip.config import TrainConfig
from lapclip.model.clip import CLIP
from lapclip.model.lora import LowRank

USUAL_DECAY = 0.1
BLOCK = re.compile(r"(image|text)\.(?:.*\.)?blocks\.(\d+)\.")


def build_optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW; weight decay on matrices only, since decaying gains, biases and the temperature hurts small models."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    factors = layer_factors(model, config.layer_decay if config.tune in ("last-k", "text", "full") else 1.0)
    groups, decayed = [], USUAL_DECAY if config.weight_decay is None else config.weight_decay
    for factor, is_matrix in product(sorted(set(factors.values()), reverse=True), (True, False)):
        some = [p for name, p in trained.items() if factors[name] == factor and (p.ndim >= 2) == is_matrix]
        groups.append({"params": some, "weight_decay": decayed * is_matrix, "factor": factor})
    assert config.lr is not None, "resolved"
    optimizer = AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    # Allocated before the first activations: what stays must not be scattered among what comes and goes.
    for parameter in trained.values():
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
        group["lr"] = lr * group.get("factor", 1.0)


def freeze(model: CLIP, config: TrainConfig) -> None:
    """Leaves trainable what `tune` names: projections, temperature, and parts of the towers."""
    if config.tune in (None, "full"):
        return
    model.image.requires_grad_(False)
    model.text.requires_grad_(config.tune == "text")
    for tower in (model.image, model.text) if config.tune == "last-k" else ():
        blocks = next((list(m) for n, m in tower.named_modules() if n.split(".")[-1] == "blocks"), [])
        for block in blocks[-config.last_k :]:
            block.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, LowRank):
            module.requires_grad_(True)


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """For each parameter its share of the learning rate: lower blocks of a pretrained tower change less."""
    found = {name: BLOCK.match(name) for name, _ in model.named_parameters()}
    depth = {
        tower: 1 + max((int(m[2]) for m in found.values() if m and m[1] == tower), default=-1)
        for tower in ("image", "text")
    }
    factors = {}
    for name, match in found.items():
        tower = name.split(".")[0]
        above = depth[tower] - 1 - int(match[2]) if match else depth.get(tower, 0)
        is_top = tower not in depth or (".norm." in name and ".blocks." not in name) or ".pool." in name
        factors[name] = 1.0 if decay == 1 or is_top else decay ** (above + 1)
    return factors
