"""One optimizer update of any batch size in the memory of one chunk (GradCache, arXiv 2101.06983).

Shapes: B pairs in the batch, C pairs in a chunk, T tokens, P patches, K patches kept, E embedding.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from lapclip.config import Plan
from lapclip.data.batches import Batch
from lapclip.data.tokenizer import PAD
from lapclip.machine.device import Device, device_named, no_memory_left, ran_out_of_memory
from lapclip.model.clip import CLIP
from lapclip.step.loss import Loss
from lapclip.step.profile import NO_PROFILER, Profiler
from lapclip.weights.checkpoint import Progress

TEXT_LENGTHS = (16, 32)  # and the model's own: an accelerator compiles a program for each length
SCALE_GROWTH_STEPS = 1000  # without an overflow in fp16, until the loss scale is doubled
MAX_LOSS_SCALE = 2.0**24

T = TypeVar("T")
# What a model takes.
Chunk = tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor | None, Tensor | None]]


@dataclass(frozen=True)
class Inputs:
    """A batch on the model's device."""

    images: Tensor
    tokens_BT: Tensor
    ends_B: Tensor
    same_BB: Tensor  # with several captions of each image [N, B, B]
    keep_BK: Tensor | None
    chance: float  # of the accuracy
    teacher: tuple[Tensor, Tensor] | None = None  # a teacher's embeddings of the same images and captions
    drop: tuple[Tensor | None, Tensor | None] = (None, None)  # factors of the features of images and captions

    def chunk(self, rows: slice) -> Chunk:
        keep_CK, *drop = (None if whole is None else whole[rows] for whole in (self.keep_BK, *self.drop))
        return self.images[rows], self.tokens_BT[rows], self.ends_B[rows], keep_CK, (drop[0], drop[1])

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in vars(self).values() if isinstance(tensor, Tensor)]


def move(batch: Batch, device: Device, keep_BK: Tensor | None, *, fixed_length: int | None = None) -> Inputs:
    """The batch as tensors on the device; images travel as bytes. `fixed_length` pads captions to few lengths."""
    images, captions = torch.from_numpy(batch.image_ids), torch.from_numpy(batch.caption_ids)
    several = [same_pairs(images, captions_B) for captions_B in captions.view(len(images), -1).T]
    same_BB = several[0] if captions.ndim == 1 else torch.stack(several)
    tokens_BT = torch.from_numpy(batch.tokens)
    length = tokens_BT.shape[1]
    fixed_length = None if tokens_BT.is_floating_point() else fixed_length  # features have no length
    padding = padded_length(length, fixed_length) - length if fixed_length else 0
    teacher = None
    if batch.teacher is not None:
        image_BE, text_BE = (device.move(torch.from_numpy(rows)) for rows in batch.teacher)
        teacher = image_BE, text_BE
    return Inputs(
        images=device.move(torch.from_numpy(batch.images)),
        tokens_BT=device.move(F.pad(tokens_BT, (0, padding), value=PAD) if padding else tokens_BT),
        ends_B=device.move(torch.from_numpy(batch.ends)),
        same_BB=device.move(same_BB),
        keep_BK=None if keep_BK is None else device.move(keep_BK),
        chance=same_BB.float().mean().item(),
        teacher=teacher,
    )


def same_pairs(images: Tensor, captions: Tensor) -> Tensor:
    """[B, B]: an image and a caption belong together when some pair of the batch has that image and that caption."""
    if len(images.unique()) == len(captions.unique()) == len(images):
        return torch.eye(len(images), dtype=torch.bool)  # as is usual
    return (images[:, None] == images).float() @ (captions[:, None] == captions).float() > 0


def fixed_length(device: Device, compile: bool, text_length: int) -> int | None:
    """The model's text length where few different shapes should occur: a program is compiled and kept for each."""
    return text_length if compile or device.is_accelerator else None


def padded_length(length: int, longest: int) -> int:
    return next((few for few in TEXT_LENGTHS if length <= few <= longest), longest)


def choose_patches(step: int, *, seed: int, batch_size: int, num_patches: int, share: float) -> Tensor | None:
    """The patches kept of each image in a step, ascending; None for all of them.

    Drawn for the whole batch from seed and step alone: the same for every chunk, in both passes, on every device
    and after a resume.
    """
    num_kept = max(1, round(share * num_patches))
    if num_kept == num_patches:
        return None
    noise = np.random.default_rng([seed, step, 1]).random((batch_size, num_patches), dtype=np.float32)
    return torch.from_numpy(np.sort(noise.argpartition(num_kept, axis=1)[:, :num_kept], axis=1))


def choose_features(inputs: Inputs, model: CLIP, step: int, *, seed: int, dropout: float) -> Inputs:
    """Drops some features of each image and caption in a step; drawn for the whole batch, as `choose_patches` does."""
    if dropout == 0:
        return inputs
    rng = np.random.default_rng([seed, step, 4])
    shapes = (len(inputs.images), model.size.image.width), (*inputs.ends_B.shape, model.size.text.width)
    kept = ((rng.random(shape, np.float32) >= dropout).astype(np.float32) for shape in shapes)
    image_BD, text_BD = (torch.from_numpy(some / (1 - dropout)).to(inputs.images.device) for some in kept)
    return replace(inputs, drop=(image_BD, text_BD))


class Replica:
    """A second module with the same parameters, which computes one half of a batch beside the first module.

    Each half has half of the threads: threads that share each operation wait for one another at its end. A gradient is
    the sum of both halves, in either order. Running statistics change by the sum of what both halves change them by.
    """

    def __init__(self, model: CLIP):
        self.model = deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        self.thread = ThreadPoolExecutor(1, "half of a batch")

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> list[T]:
        num_threads = torch.get_num_threads()
        half = max(1, num_threads // 2)
        torch.set_num_threads(half)  # of the calling thread
        self.thread.submit(torch.set_num_threads, half)
        beside = self.thread.submit(second)
        try:
            return [first(), beside.result()]
        finally:
            wait([beside])
            torch.set_num_threads(num_threads)
            del beside  # an error in it would hold this frame, and with it the activations

    def copy_statistics(self, model: CLIP) -> list[Tensor]:
        """Starts with the running statistics of the first module; returns them."""
        for own, other in zip(model.buffers(), self.model.buffers(), strict=True):
            other.copy_(own)
        return [own.clone() for own in model.buffers()]

    def add_statistics(self, model: CLIP, before: list[Tensor]) -> None:
        """Adds the changes of this half to the running statistics of the first module, after the backward pass."""
        for own, other, start in zip(model.buffers(), self.model.buffers(), before, strict=True):
            own.add_(other - start)


def contrastive_step(
    model: CLIP,
    inputs: Inputs,
    loss_fn: Loss,
    plan: Plan,
    *,
    loss_scale: float = 1.0,
    profiler: Profiler = NO_PROFILER,
    replica: Replica | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds the gradient of the batch's loss, times `loss_scale`, to the parameters; holds one chunk's activations.

    Loss and in-batch accuracy, still on the device. A batch of one chunk is computed in halves if there is a replica.
    """
    autocast = partial(device_named(plan.device).autocast, plan.precision)
    counting = partial(profiler.counting, [*model.parameters(), *inputs.tensors])
    batch_size, multiple = len(inputs.images), model.chunk_multiple
    chunk = -(-plan.chunk // multiple) * multiple
    is_chunked = chunk < batch_size
    if replica and not is_chunked:
        chunk = -(-batch_size // (2 * multiple)) * multiple
    parts = [slice(start, start + chunk) for start in range(0, batch_size, chunk)]
    if is_chunked or len(parts) == 1:
        replica = None

    def embed(model: CLIP, rows: slice) -> tuple[Tensor, Tensor]:
        with autocast(), counting():
            return model(*inputs.chunk(rows))

    def run(works: list[Callable[[], T]]) -> list[T]:
        return replica.run(*works) if replica else [work() for work in works]

    if is_chunked:
        with torch.no_grad():
            embedded = [embed(model, rows) for rows in parts]
    else:
        modules = (model, replica.model if replica else model)
        before = replica.copy_statistics(model) if replica else []
        embedded = run([partial(embed, *each) for each in zip(modules, parts, strict=False)])
    image_BE, text_BE = (torch.cat(sides).detach().requires_grad_() for sides in zip(*embedded, strict=True))
    with counting():
        about = model.scale(), model.bias, inputs.same_BB
        if text_BE.ndim == 2:
            loss = total = loss_fn(image_BE, text_BE, *about)
        else:
            several = zip(text_BE.unbind(1), inputs.same_BB, strict=True)
            losses = [loss_fn(image_BE, own_BE, *about[:2], same_BB) for own_BE, same_BB in several]
            loss = total = torch.stack(losses).mean()
        if inputs.teacher is not None:  # each tower also learns to match the teacher's other one
            teacher_image_BE, teacher_text_BE = inputs.teacher
            total = loss + loss_fn(image_BE, teacher_text_BE, *about)
            total = total + loss_fn(teacher_image_BE, text_BE, *about)
    profiler.lap("forward")
    (total * loss_scale).backward()
    image_grad_BE, text_grad_BE = image_BE.grad, text_BE.grad
    assert image_grad_BE is not None and text_grad_BE is not None
    if not is_chunked:
        gradients = [(image_grad_BE[rows], text_grad_BE[rows]) for rows in parts]
        run([partial(backward, *each) for each in zip(embedded, gradients, strict=True)])
        if replica:
            replica.add_statistics(model, before)
    profiler.lap("backward")
    for rows in parts if is_chunked else ():
        images, tokens_CT, ends_C, keep_CK, drop = inputs.chunk(rows)
        towers = (
            (image_grad_BE[rows], partial(model.embed_images, images, keep_CK, drop[0])),
            (text_grad_BE[rows], partial(model.embed_texts, tokens_CT, ends_C, drop[1])),
        )
        # One tower after the other, so that never both towers' activations are held.
        for gradient_CE, embed_tower in towers:
            with autocast(), counting():
                chunk_CE = embed_tower()
            profiler.lap("forward")
            backward([chunk_CE], [gradient_CE])
            profiler.lap("backward")
    return loss.detach(), in_batch_accuracy(image_BE.detach(), text_BE.detach(), inputs.same_BB)


def backward(embedded: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    is_trained = [one.requires_grad for one in embedded]  # not that of a frozen tower
    if any(is_trained):
        torch.autograd.backward(list(compress(embedded, is_trained)), list(compress(gradients, is_trained)))


def in_batch_accuracy(image_BE: Tensor, text_BE: Tensor, same_BB: Tensor) -> Tensor:
    """How often the nearest caption of an image is its own, and the other way round: the documents' accuracy.

    Of several captions of each image, the first.
    """
    if text_BE.ndim == 3:
        text_BE, same_BB = text_BE[:, 0], same_BB[0]
    cosine_BB = image_BE @ text_BE.T
    pairs_B = torch.arange(len(cosine_BB), device=cosine_BB.device)
    captions_correct = same_BB[pairs_B, cosine_BB.argmax(dim=1)].float().mean()
    images_correct = same_BB[cosine_BB.argmax(dim=0), pairs_B].float().mean()
    return (captions_correct + images_correct) / 2


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


@dataclass
class Update:
    """Updates a model, one batch at a time; training and timing both run this."""

    model: CLIP
    optimizer: Optimizer
    loss_fn: Loss
    clip_norm: float
    plan: Plan

    @cached_property
    def replica(self) -> Replica:
        return Replica(self.model)

    @property
    def has_halves(self) -> bool:
        """Whether a batch is computed in halves: on the CPU with threads to share, where nothing random is drawn."""
        is_plain = not self.plan.compile and not device_named(self.plan.device).is_accelerator
        return is_plain and torch.get_num_threads() % 2 == 0 and self.model.size.head is None

    def run(self, inputs: Inputs, *, loss_scale: float = 1.0, profiler: Profiler = NO_PROFILER) -> Numbers:
        """One optimizer update; where a number is not finite the weights stay as they are."""
        model, optimizer = self.model, self.optimizer
        # In one chunk gradients take the room of activations as these go; over several chunks they stay.
        optimizer.zero_grad(set_to_none=self.plan.chunk >= len(inputs.images))
        profiler.lap("optimizer")
        replica = self.replica if self.has_halves else None
        loss, accuracy = contrastive_step(
            model, inputs, self.loss_fn, self.plan, loss_scale=loss_scale, profiler=profiler, replica=replica
        )
        if loss_scale != 1.0:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= loss_scale
        profiler.record_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
        logged = torch.stack([loss, accuracy, norm, model.scale().detach()[0]])
        numbers = Numbers(*logged.tolist())
        if numbers.are_finite:
            optimizer.step()
            model.limit_scale()
        device_named(self.plan.device).synchronize()
        profiler.lap("optimizer")
        return numbers

    def run_or_recover(self, inputs: Inputs, progress: Progress, profiler: Profiler = NO_PROFILER) -> Numbers:
        """One update, with a smaller chunk when memory runs out and a smaller loss scale when fp16 overflows.

        Each attempt starts from the same weights and computes the same mathematics. The plan keeps the smaller chunk;
        numbers that stay infinite are for the caller to judge.
        """
        is_fp16 = self.plan.precision == "fp16"
        if is_fp16 and progress.step - progress.last_overflow_step >= SCALE_GROWTH_STEPS:
            progress.loss_scale = min(2 * progress.loss_scale, MAX_LOSS_SCALE)
            progress.last_overflow_step = progress.step
        while True:
            try:
                scale = progress.loss_scale if is_fp16 else 1.0
                numbers = self.run(inputs, loss_scale=scale, profiler=profiler)
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                if self.plan.chunk == 1:
                    raise no_memory_left(error) from None
            else:
                if numbers.are_finite or not is_fp16 or progress.loss_scale <= 1:
                    return numbers
                progress.loss_scale /= 2
                progress.last_overflow_step = progress.step
                continue
            # Outside of `except`, whose error holds on to the activations.
            self.plan = replace(self.plan, chunk=(self.plan.chunk + 1) // 2)
            self.optimizer.zero_grad()
            device_named(self.plan.device).release_memory()
