"""The parity gate: a device or precision with wrong numbers is refused with the name of what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fakes import Cannot, Elsewhere, Peculiar, Small, Wrong, WrongOnPermuted

from lapclip.autotune.parity import (
    NUM_PAIRS,
    Gradients,
    Probe,
    difference,
    disagreement,
    permuted,
    place_checked,
    reference,
)
from lapclip.config import Plan, load_config
from lapclip.data.batches import load_batches
from lapclip.data.synthetic import SceneSource
from lapclip.data.tokenizer import train_tokenizer
from lapclip.errors import UserError
from lapclip.machine.device import DEVICES, Device, processor
from lapclip.model.clip import CLIP, build_model
from lapclip.step.loss import LOSSES, NEEDS_BIAS
from lapclip.step.optim import build_optimizer
from lapclip.step.step import Update, choose_patches, move

SOURCE = SceneSource(num_pairs=2 * NUM_PAIRS)
TOKENIZER = train_tokenizer("bpe", [SOURCE.captions(i)[0] for i in range(NUM_PAIRS)], 300)
PLAIN = Plan("cpu", "fp32", 1, 16)
CONFIG = load_config(flags={"size": "nano", "image_size": 16, "lr": 1e-3})
BATCH = next(
    load_batches(
        SOURCE, TOKENIZER, batch_size=NUM_PAIRS, image_size=16, text_length=32, seed=0, first_step=0, workers=0
    )
)  # fmt: skip
TENSORS = [name for name, _ in build_model(CONFIG.model, vocab_size=300, has_bias=True).named_parameters()]


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def checked_on(monkeypatch) -> Callable[..., CLIP]:
    """Takes a new model to a device, through the gate."""

    def check(
        device: Device, *, precision="fp32", loss="softmax", share=1.0, chunk=NUM_PAIRS, model=None
    ) -> CLIP:
        monkeypatch.setitem(DEVICES, device.name, device)
        model = model or new_model(loss)
        return place_checked(model, probe_of(loss, share), Plan(device.name, precision, 1, chunk))

    return check


def new_model(loss="softmax") -> CLIP:
    return build_model(CONFIG.model, vocab_size=TOKENIZER.vocab_size, has_bias=loss in NEEDS_BIAS)


def probe_of(loss="softmax", share=1.0) -> Probe:
    keep = choose_patches(0, seed=0, batch_size=NUM_PAIRS, num_patches=4, share=share)
    return Probe(BATCH, keep, LOSSES[loss])


def wrong_in(device: Wrong) -> str:
    """Of the model, which was placed first; the gate may place more than that."""
    return device.chosen[0]


def refusal(check: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        check()
    assert "`--device cpu --precision fp32 --no-compile`" in caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("share", "chunk"), [(1.0, NUM_PAIRS), (0.5, 5)])
def test_an_honest_device_is_trusted(checked_on, loss, share, chunk):
    checked_on(Elsewhere(), loss=loss, share=share, chunk=chunk)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(6))
def test_a_gradient_off_by_one_percent_is_refused_by_its_name(checked_on, seed, loss):
    device = Wrong(seed=seed, factor=1.01 if seed % 2 else 0.99)
    said = refusal(lambda: checked_on(device, loss=loss))
    assert f"the gradient of `{wrong_in(device)}` differs from the CPU's by 1.00%" in said
    assert said.startswith("`mps` in fp32 cannot be trusted with this model")


@pytest.mark.parametrize("loss", LOSSES)
def test_no_tensor_s_gradient_is_too_small_for_one_percent_to_be_seen(loss):
    """Not only of those that chance draws: all of them."""
    right = reference(new_model(loss), probe_of(loss), PLAIN)
    assert len(right.by_name) == len(TENSORS) - (loss not in NEEDS_BIAS)
    for name in right.by_name:
        off = right.by_name | {name: right.by_name[name] * 1.01}
        assert f"`{name}`" in (difference(Gradients(right.loss, off), right, 1e-3) or "")


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_gradient_that_is_no_number_or_missing_or_turned_is_refused(checked_on, factor):
    device = Wrong(factor=factor)
    assert "the gradient of `" in (said := refusal(lambda: checked_on(device)))
    assert f"`{wrong_in(device)}`" in said


def test_one_that_misreads_permuted_inputs_is_refused_and_that_is_said(checked_on):
    assert "with permuted inputs" in refusal(lambda: checked_on(WrongOnPermuted()))


def test_permuted_inputs_are_the_same_numbers_in_another_order():
    straight = probe_of(share=0.5).inputs("cpu")
    turned = permuted(straight)
    for name in ("images", "tokens_BT", "ends_B", "same_BB", "keep_BK"):
        one, other = getattr(straight, name), getattr(turned, name)
        assert torch.equal(one, other) and one.is_contiguous() and not other.is_contiguous(), name


def test_one_that_lacks_an_operation_is_refused_with_its_name(checked_on):
    assert "'aten::gather' is not currently implemented" in refusal(lambda: checked_on(Cannot()))


@dataclass(frozen=True, eq=False)
class Fails(Peculiar):
    """Cannot do anything, and says so in many lines or none."""

    words: str = ""

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        raise RuntimeError(self.words)


@pytest.mark.parametrize(
    ("words", "said"), [("", "RuntimeError"), ("no such kernel\nat line 3\nat line 4", "no such kernel")]
)
def test_one_that_fails_is_refused_with_its_first_words(checked_on, words, said):
    assert refusal(lambda: checked_on(Fails(words=words))).endswith(f": {said}")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_less_precision_on_the_processor_is_right_for_what_it_is(checked_on, precision, loss):
    checked_on(processor(), precision=precision, loss=loss)


@pytest.mark.parametrize(("precision", "factor"), [("bf16", 1.3), ("bf16", 0.7), ("fp16", 1.1)])
def test_a_gradient_that_is_wrong_beyond_its_precision_is_refused(checked_on, precision, factor):
    device = Wrong(factor=factor, claims=("fp32", precision))
    said = refusal(lambda: checked_on(device, precision=precision))
    assert f"`{wrong_in(device)}`" in said and f"`mps` in {precision}" in said


@pytest.mark.parametrize(
    "device",
    [Elsewhere(), Wrong(seed=1), WrongOnPermuted(), Cannot()],
    ids=lambda device: type(device).__name__,
)
def test_the_gate_leaves_weights_as_they_were_and_no_gradients(monkeypatch, device):
    monkeypatch.setitem(DEVICES, "mps", device)
    model, probe = device.place(new_model()), probe_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        disagreement(model, probe, reference(new_model(), probe, PLAIN), Plan("mps", "fp32", 1, 4))
    except NotImplementedError:
        assert isinstance(device, Cannot)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_that_is_merely_small_is_not_wrong(checked_on):
    one_pair = 32 * 4 * 128 * 4  # bytes: the perceptron's wide side for one caption
    device = Small(limit_bytes=3 * one_pair)
    checked_on(device)
    assert device.num_refusals > 0, "it was tried with more pairs first"


def test_one_without_room_for_a_single_pair_is_told_as_that(checked_on):
    with pytest.raises(UserError, match="no memory for even one pair"):
        checked_on(Small(limit_bytes=100))


def test_what_is_asked_of_the_processor_itself_needs_no_check(checked_on):
    model = new_model()
    assert checked_on(processor(), model=model) is model


def test_the_processor_agrees_with_itself_whatever_the_chunk():
    model, probe = new_model(), probe_of(share=0.5)
    right = reference(model, probe, PLAIN)
    for chunk in (3, NUM_PAIRS):
        assert disagreement(model, probe, right, Plan("cpu", "fp32", 1, chunk)) is None


def test_weights_that_have_been_trained_for_a_while_are_judged_alike(checked_on):
    model, inputs = new_model(), move(BATCH, processor(), None)
    optimizer = build_optimizer(model, CONFIG.train)
    update = Update(model, optimizer, LOSSES["softmax"], clip_norm=1.0, plan=PLAIN)
    for _ in range(20):
        numbers = update.run(inputs)
    assert numbers.loss < 0.5
    for precision in ("fp32", "bf16", "fp16"):
        checked_on(Elsewhere(), precision=precision, model=model)
    device = Wrong(seed=2)
    said = refusal(lambda: checked_on(device, model=model))
    assert f"the gradient of `{wrong_in(device)}` differs from the CPU's by 1.00%" in said
