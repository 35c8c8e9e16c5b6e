"""The schedule as a function of progress, and what weight decay touches."""

import pytest

from lapclip.config import ModelConfig, TrainConfig
from lapclip.model.clip import build_model
from lapclip.step.optim import build_optimizer, schedule, set_lr


def test_the_schedule_rises_then_falls_to_nothing():
    values = [schedule(i / 1000, 0.1) for i in range(1001)]
    assert values[0] == 0 and values[1000] == pytest.approx(0, abs=1e-12)
    assert max(values) == values[100] == 1
    assert values[:101] == sorted(values[:101]) and values[100:] == sorted(values[100:], reverse=True)
    assert schedule(1.7, 0.1) == pytest.approx(0, abs=1e-12), "also for a step that ends late"
    assert schedule(0.0, 0.0) == 1, "without warm-up it starts at the top"


def test_only_matrices_decay_and_the_rate_is_set_for_all_groups():
    model = build_model(ModelConfig(size="nano"), vocab_size=40, has_bias=True)
    optimizer = build_optimizer(model, TrainConfig(lr=1e-3, weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.3 if parameter.ndim >= 2 else 0.0), name
    assert decay[id(model.log_scale)] == 0.0
    set_lr(optimizer, 5e-5)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-5, 5e-5]
