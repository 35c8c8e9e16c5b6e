"""What is checked and timed: a model, a batch, and how it is trained; and about how much memory a step of it takes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.device import Device
from lapclip.model.clip import CLIP, Size, build_model, count_parameters, shape_of
from lapclip.model.resnet import resnet_activations
from lapclip.step.loss import LOSSES, NEEDS_BIAS, Loss
from lapclip.step.step import Inputs, choose_patches, move

PROCESS_BYTES = 400_000_000  # Python, torch and a few batches


@dataclass(frozen=True)
class Work:
    """A model and how it is trained; all of it resolved."""

    model: ModelConfig
    train: TrainConfig
    vocab_size: int
    num_tokens: int  # of the longest caption of a typical batch
    captions_per_image: int = 1

    @property
    def size(self) -> Size:
        return shape_of(self.model)

    @property
    def batch_size(self) -> int:
        assert self.train.batch_size is not None, "resolved"
        return self.train.batch_size

    @property
    def has_bias(self) -> bool:
        return self.train.loss in NEEDS_BIAS

    @property
    def loss_fn(self) -> Loss:
        assert self.train.loss is not None, "resolved"
        return LOSSES[self.train.loss]

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.size, vocab_size=self.vocab_size, has_bias=self.has_bias)

    def key(self) -> dict[str, Any]:
        """What the time of a step depends on."""
        return self.size.described() | {
            "vocab_size": self.vocab_size,
            "recompute": self.model.recompute,
            "num_tokens": self.num_tokens,
            **({"captions_per_image": self.captions_per_image} if self.captions_per_image > 1 else {}),
            **{name: getattr(self.train, name) for name in ("batch_size", "loss", "keep_patches")},
        }

    def new_model(self, device: Device, *, compile: bool = False) -> CLIP:
        """The model on a device, its weights as at the start of a run."""
        settings = {"vocab_size": self.vocab_size, "seed": self.train.seed}
        return place(build_model(self.model, has_bias=self.has_bias, **settings), device, compile=compile)

    def random_batch(self, num_pairs: int) -> Batch:
        """Images and captions that all differ: for time their content makes no difference."""
        random, side = np.random.default_rng(self.train.seed), self.size.image_size
        length = min(self.num_tokens, self.size.text_length)
        each = (num_pairs, self.captions_per_image) if self.captions_per_image > 1 else (num_pairs,)
        return Batch(
            images=random.integers(0, 256, (num_pairs, 3, side, side), dtype=np.uint8),
            tokens=random.integers(0, self.vocab_size, (*each, length)),
            ends=np.full(each, length - 1),
            image_ids=np.arange(num_pairs),
            caption_ids=np.arange(np.prod(each)).reshape(each),
        )

    def inputs(self, batch: Batch, device: Device, fixed_length: int | None) -> Inputs:
        """A batch as the first step takes it."""
        assert self.train.keep_patches is not None, "resolved"
        draw = {"seed": self.train.seed, "num_patches": self.size.num_patches}
        keep_BK = choose_patches(0, batch_size=len(batch.images), share=self.train.keep_patches, **draw)
        return move(batch, device, keep_BK, fixed_length=fixed_length)

    def step_bytes(self, chunk: int) -> int:
        """An estimate: the process, weights with gradients and AdamW's two moments, and the activations of one chunk.

        A pair saves about 14 vectors per token and layer for the backward pass; with `recompute` one per layer, and 14
        for the layer that is computed again.
        """
        size = self.size
        num_numbers = sum(
            (tower.depth + 14 if self.model.recompute else 14 * tower.depth) * tower.width * num_tokens
            for tower, num_tokens in ((size.image, 1 + size.num_patches), (size.text, size.text_length))
        )
        if size.image_encoder and size.image_encoder.kind == "resnet":
            num_numbers += resnet_activations(size.image_encoder.numbers["widths"], size.image_size)
        return PROCESS_BYTES + 16 * self.num_parameters + chunk * 4 * num_numbers


def place(model: CLIP, device: Device, *, compile: bool) -> CLIP:
    """Moves a model to where it is trained, and prepares it for that."""
    model = device.place(model)
    model.prepare_for(few_shapes=device.is_accelerator or compile, compile=compile)
    return model
