"""One contrastive step of any batch size in the memory of one chunk (GradCache, arXiv 2101.06983).

Shapes: B pairs in the batch, C pairs in a chunk, T tokens, P patches, K patches kept, E embedding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lapclip.data.batches import Batch
from lapclip.device import Device
from lapclip.loss import Loss
from lapclip.model.clip import CLIP


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


def move(batch: Batch, device: Device, keep_BK: Tensor | None) -> Inputs:
    """The batch as tensors on the device; pictures travel as bytes."""
    images, captions = torch.from_numpy(batch.image_ids), torch.from_numpy(batch.caption_ids)
    # A picture and a caption belong together when some pair of the batch has that picture and that caption.
    same_BB = (images[:, None] == images).float() @ (captions[:, None] == captions).float() > 0
    return Inputs(
        images=torch.from_numpy(batch.images).to(device.torch),
        tokens_BT=torch.from_numpy(batch.tokens).to(device.torch),
        ends_B=torch.from_numpy(batch.ends).to(device.torch),
        same_BB=same_BB.to(device.torch),
        keep_BK=None if keep_BK is None else keep_BK.to(device.torch),
    )


def choose_patches(step: int, *, seed: int, batch_size: int, num_patches: int, share: float) -> Tensor | None:
    """The patches each picture of a step is looked at through, ascending; None for all of them.

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
    """What one step found, before the update."""

    loss: Tensor
    accuracy: Tensor  # in the batch, both directions


def contrastive_step(model: CLIP, inputs: Inputs, loss_fn: Loss, chunk: int) -> Outcome:
    """Adds the gradient of the batch's loss to the parameters, holding the activations of one chunk at a time."""
    batch_size = len(inputs.images)
    if chunk >= batch_size:
        image_BE, text_BE = model(*inputs.chunk(0, batch_size))
        loss = loss_fn(image_BE, text_BE, model.scale(), model.bias, inputs.same_BB)
        loss.backward()
        return Outcome(loss.detach(), in_batch_accuracy(image_BE.detach(), text_BE.detach(), inputs.same_BB))

    starts = range(0, batch_size, chunk)
    with torch.no_grad():
        embedded = [model(*inputs.chunk(start, chunk)) for start in starts]
    image_BE = torch.cat([image for image, _ in embedded]).requires_grad_()
    text_BE = torch.cat([text for _, text in embedded]).requires_grad_()
    loss = loss_fn(image_BE, text_BE, model.scale(), model.bias, inputs.same_BB)
    loss.backward()
    assert image_BE.grad is not None and text_BE.grad is not None
    for start in starts:
        # One tower after the other, so that never both towers' activations are held.
        images, tokens_CT, ends_C, keep_CK = inputs.chunk(start, chunk)
        model.embed_images(images, keep_CK).backward(image_BE.grad[start : start + chunk])
        model.embed_texts(tokens_CT, ends_C).backward(text_BE.grad[start : start + chunk])
    return Outcome(loss.detach(), in_batch_accuracy(image_BE.detach(), text_BE.detach(), inputs.same_BB))


def in_batch_accuracy(image_BE: Tensor, text_BE: Tensor, same_BB: Tensor) -> Tensor:
    """How often the nearest caption of a picture is its own, and the other way round: the documents' accuracy."""
    cosine_BB = image_BE @ text_BE.T
    pairs_B = torch.arange(len(cosine_BB), device=cosine_BB.device)
    captions_right = same_BB[pairs_B, cosine_BB.argmax(dim=1)].float().mean()
    images_right = same_BB[cosine_BB.argmax(dim=0), pairs_B].float().mean()
    return (captions_right + images_right) / 2
