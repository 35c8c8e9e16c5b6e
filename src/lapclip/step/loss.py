"""Embeddings of a batch in, loss out; pairs that show or say the same are never each other's negatives.

Shapes: B pairs in the batch, E embedding. `same_BB` is true where the row's image and the column's caption belong
together; its diagonal is true.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def softmax_loss(
    image_BE: Tensor, text_BE: Tensor, scale: Tensor, bias: Tensor | None, same_BB: Tensor
) -> Tensor:
    """CLIP's loss: each image selects its caption among B, each caption its image (arXiv 2103.00020)."""
    logits_BB = scale * image_BE @ text_BE.T
    logits_BB = logits_BB.masked_fill(off_diagonal(same_BB), -torch.inf)
    pairs_B = torch.arange(len(logits_BB), device=logits_BB.device)
    return (F.cross_entropy(logits_BB, pairs_B) + F.cross_entropy(logits_BB.T, pairs_B)) / 2


def sigmoid_loss(
    image_BE: Tensor, text_BE: Tensor, scale: Tensor, bias: Tensor | None, same_BB: Tensor
) -> Tensor:
    """SigLIP's loss: each of the B x B combinations is judged alone, a pair or not (arXiv 2303.15343, eq. 1)."""
    assert bias is not None, "the model has one for this loss"
    logits_BB = scale * image_BE @ text_BE.T + bias
    pairs_BB = torch.eye(len(logits_BB), device=logits_BB.device)
    loss_BB = -F.logsigmoid((2 * pairs_BB - 1) * logits_BB)
    return loss_BB.masked_fill(off_diagonal(same_BB), 0.0).sum() / len(logits_BB)


def off_diagonal(same_BB: Tensor) -> Tensor:
    return same_BB & ~torch.eye(len(same_BB), dtype=torch.bool, device=same_BB.device)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}
NEEDS_BIAS = {"sigmoid"}
