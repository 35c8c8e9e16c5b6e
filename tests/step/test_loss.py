"""The losses: the formulas of the papers, and pairs that are the same are not negatives."""

import math

import pytest
import torch
from torch.nn import functional as F

from lapclip.step.loss import LOSSES

SCALE, BIAS = torch.tensor([10.0]), torch.tensor([-3.0])


def embeddings(seed: int = 0, num_pairs: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(F.normalize(torch.randn(num_pairs, 8, generator=generator), dim=-1) for _ in range(2))


def same(num_pairs: int, *duplicates: tuple[int, int]) -> torch.Tensor:
    matrix = torch.eye(num_pairs, dtype=torch.bool)
    for i, j in duplicates:
        matrix[i, j] = matrix[j, i] = True
    return matrix


def test_softmax_is_the_mean_cross_entropy_of_both_directions():
    image, text = embeddings()
    logits = 10.0 * image @ text.T
    rows = [-math.log(math.exp(logits[i, i]) / sum(math.exp(x) for x in logits[i])) for i in range(6)]
    columns = [-math.log(math.exp(logits[i, i]) / sum(math.exp(x) for x in logits[:, i])) for i in range(6)]
    found = LOSSES["softmax"](image, text, SCALE, None, same(6)).item()
    assert found == pytest.approx(sum(rows + columns) / 12, rel=1e-5)


def test_sigmoid_judges_each_combination_alone():
    image, text = embeddings()
    logits = 10.0 * image @ text.T - 3.0
    terms = [math.log1p(math.exp(-(1 if i == j else -1) * logits[i, j])) for i in range(6) for j in range(6)]
    found = LOSSES["sigmoid"](image, text, SCALE, BIAS, same(6)).item()
    assert found == pytest.approx(sum(terms) / 6, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_duplicate_is_not_a_negative(loss):
    """With the same image and caption twice, perfect embeddings must be able to reach no loss at all."""
    image = F.normalize(torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]]), dim=-1)
    sharp, low = torch.tensor([100.0]), torch.tensor([-50.0])
    assert loss(image, image, sharp, low, same(3, (0, 1))).item() < 1e-6
    assert loss(image, image, sharp, low, same(3)).item() > 0.3, "as negatives they keep the loss up"
    image, text = (t.requires_grad_() for t in embeddings())
    loss(image, text, SCALE, BIAS, torch.ones(6, 6, dtype=torch.bool)).backward()
    assert (image.grad * text).sum() <= 0, "only the pull to the own caption remains"
