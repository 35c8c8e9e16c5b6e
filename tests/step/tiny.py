"""A model that steps in milliseconds, a batch for it, and one step of it on any device."""

from dataclasses import dataclass, replace

import pytest
import torch

from lapclip.config import Plan, load_config
from lapclip.data.batches import Batch, load_batches
from lapclip.data.synthetic import SceneSource
from lapclip.data.tokenizer import train_tokenizer
from lapclip.machine.device import DEVICES, Device, device_named
from lapclip.model.clip import CLIP, build_model
from lapclip.step.loss import LOSSES, NEEDS_BIAS
from lapclip.step.optim import build_optimizer
from lapclip.step.step import Numbers, Update, choose_patches, move
from lapclip.weights.checkpoint import Progress

SOURCE = SceneSource(num_pairs=16)
TOKENIZER = train_tokenizer("bpe", [SOURCE.captions(i)[0] for i in range(16)], 300)
CONFIG = load_config(flags={"size": "nano", "image_size": 16, "lr": 1e-3})
ONE_PAIR = 32 * 4 * 128 * 4  # bytes: the largest activation of one caption


def first_batch(batch_size: int, source=SOURCE, image_size: int = 16) -> Batch:
    sizes = {"batch_size": batch_size, "image_size": image_size, "text_length": 32}
    return next(load_batches(source, TOKENIZER, seed=0, first_step=0, workers=0, **sizes))


BATCH = first_batch(8)


def new_model(loss="softmax", **shape) -> CLIP:
    size = replace(CONFIG.model, **shape)
    return build_model(size, vocab_size=TOKENIZER.vocab_size, has_bias=loss in NEEDS_BIAS)


@dataclass
class Attempt:
    """One step of a new model, and all it left behind."""

    model: CLIP
    numbers: Numbers
    plan: Plan
    now: Progress

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


def attempt(plan: Plan, device: Device | None = None, *, loss="softmax", loss_fn=None, share=1.0, model=None, now=None,
            batch=BATCH) -> Attempt:  # fmt: skip
    """One step according to a plan, on a device that stands in for the plan's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, plan.device, device or device_named(plan.device))
        device = device_named(plan.device)
        model, now = device.place(model or new_model(loss)), now or Progress()
        optimizer = build_optimizer(model, CONFIG.train)
        num_patches = model.size.num_patches
        keep = choose_patches(0, seed=0, batch_size=len(batch.ends), num_patches=num_patches, share=share)
        inputs = move(batch, device, keep, fixed_length=32 if device.is_accelerator else None)
        update = Update(model, optimizer, loss_fn or LOSSES[loss], clip_norm=1e9, plan=plan)
        return Attempt(model, update.run_or_recover(inputs, now), update.plan, now)


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    """Each tensor differs by no more than a share of its length."""
    far = {name: float((one[name] - other[name]).norm() / other[name].norm()) for name in other}
    assert {name: error for name, error in far.items() if not error <= tolerance} == {}
