"""A training step to be timed: the real model, optimizer and update over one batch; what is timed is what trains."""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.device import Device, device_named, set_up_process
from lapclip.model.clip import CLIP, build_model, shape_of
from lapclip.step.loss import LOSSES, NEEDS_BIAS, Loss
from lapclip.step.optim import build_optimizer
from lapclip.step.step import Inputs, Plan, choose_patches, fixed_length, move, update


@dataclass(frozen=True)
class Work:
    """What is timed: a model, a batch, and how it is trained; all of it resolved."""

    model: ModelConfig
    train: TrainConfig
    vocab_size: int
    num_tokens: int  # of the longest caption of a usual batch

    @property
    def batch_size(self) -> int:
        assert self.train.batch_size is not None, "resolved"
        return self.train.batch_size

    def key(self) -> dict[str, Any]:
        """What the time of a step depends on."""
        size = asdict(shape_of(self.model))
        train = self.train
        return size | {
            "vocab_size": self.vocab_size,
            "recompute": self.model.recompute,
            "batch_size": train.batch_size,
            "loss": train.loss,
            "keep_patches": train.keep_patches,
            "num_tokens": self.num_tokens,
        }


class Rig:
    """The model of some work on one device; runs any plan with that device and compilation."""

    def __init__(self, work: Work, device: str, *, compile: bool = False):
        self.work, self.device, self.loss_fn = work, device_named(device), loss_of(work)
        self.model = placed_model(work, self.device, compile=compile)
        self.optimizer = build_optimizer(self.model, work.train)
        self.length = fixed_length(self.device, compile, self.model.size.text_length)
        self.inputs = self.some_inputs(work.batch_size)

    def step(self, plan: Plan, inputs: Inputs | None = None) -> float:
        """Runs one whole step; how many seconds it took."""
        set_up_process(plan.threads, keep_memory=plan.keep_memory)
        self.device.synchronize()
        started = time.perf_counter()
        update(
            self.model,
            self.optimizer,
            inputs or self.inputs,
            self.loss_fn,
            plan=plan,
            clip_norm=self.work.train.clip_norm,
        )
        return time.perf_counter() - started

    def step_of_few(self, plan: Plan, num_pairs: int) -> float:
        return self.step(replace(plan, chunk=num_pairs), self.some_inputs(num_pairs))

    def some_inputs(self, num_pairs: int) -> Inputs:
        """A batch such as training sees, on the device."""
        keep_BK = some_patches(self.work, num_pairs)
        return move(some_batch(self.work, num_pairs), self.device, keep_BK, fixed_length=self.length)


def loss_of(work: Work) -> Loss:
    assert work.train.loss is not None, "resolved"
    return LOSSES[work.train.loss]


def placed_model(work: Work, device: Device, *, compile: bool = False) -> CLIP:
    """The model of some work, its weights as at the start of a run."""
    has_bias = work.train.loss in NEEDS_BIAS
    model = device.place(
        build_model(work.model, vocab_size=work.vocab_size, has_bias=has_bias, seed=work.train.seed)
    )
    if compile:
        model.compile_towers()
    return model


def some_patches(work: Work, num_pairs: int) -> Tensor | None:
    assert work.train.keep_patches is not None, "resolved"
    size = shape_of(work.model)
    num_patches = (size.image_size // size.patch_size) ** 2
    return choose_patches(
        0, seed=work.train.seed, batch_size=num_pairs, num_patches=num_patches, share=work.train.keep_patches
    )


def some_batch(work: Work, num_pairs: int) -> Batch:
    """Images and captions that all differ: for time their content makes no difference."""
    random = np.random.default_rng(work.train.seed)
    size = shape_of(work.model)
    length = min(work.num_tokens, size.text_length)
    return Batch(
        images=random.integers(0, 256, (num_pairs, 3, size.image_size, size.image_size), dtype=np.uint8),
        tokens=random.integers(0, work.vocab_size, (num_pairs, length)),
        ends=np.full(num_pairs, length - 1),
        image_ids=np.arange(num_pairs),
        caption_ids=np.arange(num_pairs),
    )
