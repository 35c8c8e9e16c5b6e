"""One contrastive step of any batch size in the memory of one chunk (GradCache, arXiv 2101.06983).

Shapes: B pairs in the batch, C pairs in a chunk, T tokens, P patches, K patches kept, E embedding.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from lapclip.config import PrecisionName
from lapclip.data.batches import Batch
from lapclip.data.tokenizer import PAD
from lapclip.machine.device import Device, device_named
from lapclip.model.clip import CLIP
from lapclip.step.loss import Loss
from lapclip.step.profile import NO_PROFILER, Profiler


@dataclass(frozen=True)
class Plan:
    """An execution plan: how a step is run. None of it changes what is computed, but for rounding."""

    device: str
    precision: PrecisionName
    threads: int
    chunk: int
    compile: bool = False
    keep_memory: bool = True

    @property
    def is_plain(self) -> bool:
        """The plan that all others must agree with: the processor, in fp32, as written."""
        return not device_named(self.device).is_accelerator and self.precision == "fp32" and not self.compile

    def in_words(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        said = f"{self.device} {self.precision}, {threads}, chunk {self.chunk}"
        return said + ", compiled" * self.compile + ", memory given back" * (not self.keep_memory)


@dataclass(frozen=True)
class Inputs:
    """A batch where the model is."""

    images: Tensor
    tokens_BT: Tensor
    ends_B: Tensor
    same_BB: Tensor
    keep_BK: Tensor | None

    def chunk(self, start: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        stop = start + size
        keep = None if self.keep_BK is None else self.keep_BK[start:stop]
        return self.images[start:stop], self.tokens_BT[start:stop], self.ends_B[start:stop], keep

    @property
    def tensors(self) -> list[Tensor]:
        found = (self.images, self.tokens_BT, self.ends_B, self.same_BB, self.keep_BK)
        return [tensor for tensor in found if tensor is not None]


def move(batch: Batch, device: Device, keep_BK: Tensor | None, *, fixed_length: int | None = None) -> Inputs:
    """The batch as tensors on the device; images travel as bytes. With `fixed_length` captions have few lengths."""
    images, captions = torch.from_numpy(batch.image_ids), torch.from_numpy(batch.caption_ids)
    # An image and a caption belong together when some pair of the batch has that image and that caption.
    same_BB = (images[:, None] == images).float() @ (captions[:, None] == captions).float() > 0
    tokens_BT = torch.from_numpy(batch.tokens)
    length = tokens_BT.shape[1]
    padding = padded_length(length, fixed_length) - length if fixed_length else 0
    return Inputs(
        images=device.move(torch.from_numpy(batch.images)),
        tokens_BT=device.move(F.pad(tokens_BT, (0, padding), value=PAD) if padding else tokens_BT),
        ends_B=device.move(torch.from_numpy(batch.ends)),
        same_BB=device.move(same_BB),
        keep_BK=None if keep_BK is None else device.move(keep_BK),
    )


def fixed_length(device: Device, compile: bool, text_length: int) -> int | None:
    """The model's text length where few different shapes should be met: a program is made and kept for each."""
    return text_length if compile or device.is_accelerator else None


def padded_length(length: int, longest: int) -> int:
    return next((few for few in TEXT_LENGTHS if length <= few <= longest), longest)


TEXT_LENGTHS = (16, 32)  # and the longest


def choose_patches(step: int, *, seed: int, batch_size: int, num_patches: int, share: float) -> Tensor | None:
    """The patches each image of a step is looked at through, ascending; None for all of them.

    Drawn for the whole batch from seed and step alone: the same for every chunk, in both passes, on every device
    and after a resume.
    """
    num_kept = max(1, round(share * num_patches))
    if num_kept == num_patches:
        return None
    noise = np.random.default_rng([seed, step, 1]).random((batch_size, num_patches), dtype=np.float32)
    return torch.from_numpy(np.sort(noise.argpartition(num_kept, axis=1)[:, :num_kept], axis=1))


@dataclass(frozen=True)
class Outcome:
    """What one step found, before the update; still on the device."""

    loss: Tensor
    accuracy: Tensor  # in the batch, both directions


def contrastive_step(
    model: CLIP,
    inputs: Inputs,
    loss_fn: Loss,
    chunk: int,
    *,
    device: Device | None = None,
    precision: PrecisionName = "fp32",
    loss_scale: float = 1.0,
    watch: Profiler = NO_PROFILER,
) -> Outcome:
    """Adds the gradient of the batch's loss, times `loss_scale`, to the parameters; holds one chunk's activations."""
    device = device or device_named("cpu")
    batch_size = len(inputs.images)
    if chunk >= batch_size:
        with device.autocast(precision):
            image_BE, text_BE = model(*inputs.chunk(0, batch_size))
        loss = loss_fn(image_BE, text_BE, model.scale(), model.bias, inputs.same_BB)
        watch.lap("forward")
        (loss * loss_scale).backward()
        watch.lap("backward")
        return Outcome(loss.detach(), in_batch_accuracy(image_BE.detach(), text_BE.detach(), inputs.same_BB))

    starts = range(0, batch_size, chunk)
    with torch.no_grad(), device.autocast(precision):
        embedded = [model(*inputs.chunk(start, chunk)) for start in starts]
    image_BE = torch.cat([image for image, _ in embedded]).requires_grad_()
    text_BE = torch.cat([text for _, text in embedded]).requires_grad_()
    loss = loss_fn(image_BE, text_BE, model.scale(), model.bias, inputs.same_BB)
    watch.lap("forward")
    (loss * loss_scale).backward()
    watch.lap("backward")
    assert image_BE.grad is not None and text_BE.grad is not None
    for start in starts:
        # One tower after the other, so that never both towers' activations are held.
        images, tokens_CT, ends_C, keep_CK = inputs.chunk(start, chunk)
        with device.autocast(precision):
            image_CE = model.embed_images(images, keep_CK)
        watch.lap("forward")
        image_CE.backward(image_BE.grad[start : start + chunk])
        watch.lap("backward")
        with device.autocast(precision):
            text_CE = model.embed_texts(tokens_CT, ends_C)
        watch.lap("forward")
        text_CE.backward(text_BE.grad[start : start + chunk])
        watch.lap("backward")
    return Outcome(loss.detach(), in_batch_accuracy(image_BE.detach(), text_BE.detach(), inputs.same_BB))


@dataclass(frozen=True)
class Numbers:
    """What one step reports: all that is copied back from the device."""

    loss: float
    accuracy: float
    grad_norm: float
    scale: float  # before the update

    @property
    def are_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def problem(self) -> str:
        """Which of them is not finite."""
        return f"the gradient is {self.grad_norm}" if math.isfinite(self.loss) else f"the loss is {self.loss}"


def update(
    model: CLIP,
    optimizer: Optimizer,
    inputs: Inputs,
    loss_fn: Loss,
    *,
    plan: Plan,
    clip_norm: float,
    loss_scale: float = 1.0,
    watch: Profiler = NO_PROFILER,
) -> Numbers:
    """One whole step, as training and timing both run it; where a number is not finite the weights stay."""
    device = device_named(plan.device)
    # In one chunk gradients take the room of activations as these go; over several chunks they stay.
    optimizer.zero_grad(set_to_none=plan.chunk >= len(inputs.images))
    watch.lap("optimizer")
    with watch.counting([*model.parameters(), *inputs.tensors]):
        outcome = contrastive_step(
            model, inputs, loss_fn, plan.chunk, device=device, precision=plan.precision, loss_scale=loss_scale,
            watch=watch,
        )  # fmt: skip
    if loss_scale != 1.0:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= loss_scale
    watch.look_at_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    logged = torch.stack([outcome.loss, outcome.accuracy, norm, model.scale().detach()[0]])
    numbers = Numbers(*logged.tolist())
    if numbers.are_finite:
        optimizer.step()
        model.limit_scale()
    device.synchronize()
    watch.lap("optimizer")
    return numbers


def in_batch_accuracy(image_BE: Tensor, text_BE: Tensor, same_BB: Tensor) -> Tensor:
    """How often the nearest caption of an image is its own, and the other way round: the documents' accuracy."""
    cosine_BB = image_BE @ text_BE.T
    pairs_B = torch.arange(len(cosine_BB), device=cosine_BB.device)
    captions_right = same_BB[pairs_B, cosine_BB.argmax(dim=1)].float().mean()
    images_right = same_BB[cosine_BB.argmax(dim=0), pairs_B].float().mean()
    return (captions_right + images_right) / 2
