"""The parity check: a device or precision with wrong numbers is refused with the name of what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fakes import Cannot, Elsewhere, Peculiar, Small, Wrong, WrongOnPermuted
from tiny import CONFIG, ONE_PAIR, TOKENIZER, first_batch, new_model

from lapclip.autotune import parity
from lapclip.autotune.parity import NUM_PAIRS, Gradients, difference, disagreement, place_checked
from lapclip.autotune.work import Work
from lapclip.config import Plan
from lapclip.errors import UserError
from lapclip.machine.device import DEVICES, Device, processor
from lapclip.model.clip import CLIP
from lapclip.step.loss import LOSSES
from lapclip.step.optim import build_optimizer

PLAIN = Plan("cpu", "fp32", 1, 16)
BATCH = first_batch(NUM_PAIRS)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def checked_on(monkeypatch) -> Callable[..., CLIP]:
    """Takes a new model to a device, through the check."""

    def check(
        device: Device, *, precision="fp32", loss="softmax", share=1.0, chunk=NUM_PAIRS, model=None
    ) -> CLIP:
        monkeypatch.setitem(DEVICES, device.name, device)
        plan = Plan(device.name, precision, 1, chunk)
        return place_checked(model or new_model(loss), work_of(loss, share), BATCH, plan)

    return check


def work_of(loss="softmax", share=1.0) -> Work:
    train = replace(CONFIG.train, loss=loss, keep_patches=share, batch_size=NUM_PAIRS)
    return Work(CONFIG.model, train, TOKENIZER.vocab_size, num_tokens=32)


def refusal(check: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        check()
    assert "`--device cpu --precision fp32 --no-compile`" in caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(("loss", "share", "chunk"), [("softmax", 1.0, NUM_PAIRS), ("sigmoid", 0.5, 5)])
def test_an_honest_device_is_trusted(checked_on, loss, share, chunk):
    checked_on(Elsewhere(), loss=loss, share=share, chunk=chunk)


@pytest.mark.parametrize(("seed", "loss"), [(0, "softmax"), (1, "sigmoid"), (2, "softmax"), (3, "sigmoid")])
def test_a_gradient_off_by_one_percent_is_refused_by_its_name(checked_on, seed, loss):
    device = Wrong(seed=seed, factor=1.01 if seed % 2 else 0.99)
    said = refusal(lambda: checked_on(device, loss=loss))
    # The model was placed first; the check may place more than that.
    assert f"the gradient of `{device.chosen[0]}` differs from the CPU's by 1.00%" in said
    assert said.startswith("`mps` in fp32 gives wrong results for this model")


@pytest.mark.parametrize("loss", LOSSES)
def test_no_tensor_s_gradient_is_too_small_for_one_percent_to_be_seen(loss):
    """Not only of those that chance draws: all of them."""
    right = parity.reference(new_model(loss), work_of(loss), BATCH, PLAIN)
    assert right.by_name.keys() == dict(new_model(loss).named_parameters()).keys()
    for name in right.by_name:
        off = right.by_name | {name: right.by_name[name] * 1.01}
        assert f"`{name}`" in (difference(Gradients(right.loss, off), right, 1e-3) or "")


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_gradient_that_is_no_number_or_missing_or_turned_is_refused(checked_on, factor):
    device = Wrong(factor=factor)
    said = refusal(lambda: checked_on(device))
    assert f"the gradient of `{device.chosen[0]}`" in said


@dataclass(frozen=True, eq=False)
class Fails(Peculiar):
    """Cannot do anything, and says so in many lines or none."""

    words: str = ""

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        raise RuntimeError(self.words)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (Fails(words=""), ": RuntimeError"),
        (Fails(words="no such kernel\nat line 3\nat line 4"), ": no such kernel"),
        (Cannot(), "'aten::gather' is not currently implemented"),
        (WrongOnPermuted(), "with permuted inputs"),
        (Small(limit_bytes=100), "memory for even one pair"),
    ],
    ids=repr,
)
def test_one_that_cannot_do_it_is_refused_with_the_reason(checked_on, device, said):
    with pytest.raises(UserError, match=said) as caught:
        checked_on(device)
    assert "at line 3" not in caught.value.message


def test_an_optimizer_that_goes_too_far_is_refused(checked_on, monkeypatch):
    rates = iter((1e-3, 1.01e-3))
    monkeypatch.setattr(
        parity, "build_optimizer", lambda layer, cfg: build_optimizer(layer, replace(cfg, lr=next(rates)))
    )
    assert "AdamW's update differs from the CPU's by" in refusal(lambda: checked_on(Elsewhere()))


@pytest.mark.parametrize(("precision", "loss"), [("bf16", "softmax"), ("fp16", "sigmoid")])
def test_less_precision_on_the_processor_is_right_for_what_it_is(checked_on, precision, loss):
    checked_on(processor(), precision=precision, loss=loss)


@pytest.mark.parametrize(("precision", "factor"), [("bf16", 1.3), ("bf16", 0.7), ("fp16", 1.1)])
def test_a_gradient_that_is_wrong_beyond_its_precision_is_refused(checked_on, precision, factor):
    device = Wrong(factor=factor, claims=("fp32", precision))
    said = refusal(lambda: checked_on(device, precision=precision))
    assert f"`{device.chosen[0]}`" in said and f"`mps` in {precision}" in said


def test_a_single_number_whose_gradient_happens_to_vanish_is_not_judged_by_its_rounding():
    right = Gradients(2.0, {"weight": torch.ones(100), "log_scale": torch.tensor([3e-4])})
    rounded = Gradients(2.0, {"weight": torch.ones(100), "log_scale": torch.tensor([6e-4])})
    turned = Gradients(2.0, {"weight": torch.ones(100), "log_scale": torch.tensor([-7e-2])})
    assert difference(rounded, right, parity.TOLERANCES["bf16"]) is None
    assert "`log_scale`" in (difference(turned, right, parity.TOLERANCES["bf16"]) or "")


@pytest.mark.parametrize(
    "device", [Wrong(seed=1), WrongOnPermuted()], ids=lambda device: type(device).__name__
)
def test_the_check_leaves_weights_as_they_were_and_no_gradients(monkeypatch, device):
    monkeypatch.setitem(DEVICES, "mps", device)
    model, work = device.place(new_model()), work_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    right = parity.reference(new_model(), work, BATCH, PLAIN)
    assert disagreement(model, work, BATCH, right, Plan("mps", "fp32", 1, 4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_that_is_merely_small_is_not_wrong(checked_on):
    device = Small(limit_bytes=3 * ONE_PAIR)
    checked_on(device)
    assert len(device.refused) > 0, "it was tried with more pairs first"


def test_the_processor_agrees_with_itself_whatever_the_chunk(checked_on):
    model, work = new_model(), work_of(share=0.5)
    assert checked_on(processor(), model=model) is model, "which needs no check"
    right = parity.reference(model, work, BATCH, PLAIN)
    for chunk in (3, NUM_PAIRS):
        assert disagreement(model, work, BATCH, right, Plan("cpu", "fp32", 1, chunk)) is None
