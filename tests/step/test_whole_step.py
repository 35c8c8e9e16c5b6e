"""What can be known about an accelerator without one: no tensor of a step is left behind, none is a float64,
and nothing is copied back but the few numbers that are logged; and the pretended devices are what they say.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import Cannot, Elsewhere, Follower, Slow, Small, Wrong, WrongOnPermuted, follow
from torch.nn import functional as F

from lapclip.config import Plan, load_config
from lapclip.data.batches import load_batches
from lapclip.data.synthetic import SceneSource
from lapclip.data.tokenizer import train_tokenizer
from lapclip.machine.device import DEVICES, Device, processor, ran_out_of_memory
from lapclip.model.clip import CLIP, build_model
from lapclip.runs.events import Finished, Step
from lapclip.step.loss import LOSSES, NEEDS_BIAS, softmax_loss
from lapclip.step.optim import build_optimizer
from lapclip.step.step import Numbers, Update, choose_patches, move
from lapclip.train.loop import train
from lapclip.train.prepare import prepare

B = 6
SOURCE = SceneSource(num_pairs=B)
TOKENIZER = train_tokenizer("bpe", [SOURCE.captions(i)[0] for i in range(B)], 300)
CONFIG = load_config(flags={"size": "nano", "image_size": 16, "lr": 1e-3})
BATCH = next(
    load_batches(
        SOURCE, TOKENIZER, batch_size=B, image_size=16, text_length=32, seed=0, first_step=0, workers=0
    )
)


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def step_on(monkeypatch):
    """One step of a new model on a device; returns the model with its gradients, and the numbers."""

    def step(
        device: Device,
        *,
        loss="softmax",
        loss_fn=None,
        chunk=B,
        share=1.0,
        recompute=False,
        precision="fp32",
        batch=BATCH,
        change=None,
        clip_norm=1.0,
        **options,
    ) -> tuple[CLIP, Numbers]:
        monkeypatch.setitem(DEVICES, device.name, device)
        shape = replace(CONFIG.model, recompute=recompute)
        model = build_model(shape, vocab_size=TOKENIZER.vocab_size, has_bias=loss in NEEDS_BIAS)
        if change:
            change(model)
        optimizer = build_optimizer(device.place(model), CONFIG.train)
        keep = choose_patches(0, seed=0, batch_size=B, num_patches=4, share=share)
        plan = Plan(device.name, precision, threads=1, chunk=chunk)
        inputs = move(batch, device, keep, fixed_length=32)
        loss_fn = loss_fn or LOSSES[loss]
        return model, Update(model, optimizer, loss_fn, clip_norm, plan).run(inputs, **options)

    return step


def assert_nothing_but_numbers_comes_back(follower: Follower):
    assert follower.mixed == follower.float64 == []
    assert [found.place for found in follower.copied] == ["step.py:run"]
    assert follower.copied[0].num_elements <= 8


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("chunk", [B, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_leaves_nothing_behind_and_copies_only_its_numbers_back(
    step_on, loss, chunk, share, recompute
):
    with follow() as follower:
        _, numbers = step_on(Elsewhere(), loss=loss, chunk=chunk, share=share, recompute=recompute)
    assert_nothing_but_numbers_comes_back(follower)
    assert numbers.are_finite


def test_so_does_a_step_in_less_precision_with_a_loss_scale(step_on):
    with follow() as follower:
        step_on(Elsewhere(), precision="bf16", loss_scale=1024.0)
    assert_nothing_but_numbers_comes_back(follower)


def test_following_a_step_changes_no_number_of_it(step_on):
    with follow():
        followed, numbers = step_on(Elsewhere(), chunk=4, share=0.5, recompute=True)
    # An accelerator's captions are padded further, which alone rounds differently.
    plain, plain_numbers = step_on(Elsewhere(), chunk=4, share=0.5, recompute=True)
    assert numbers == plain_numbers
    assert all(torch.equal(a, b) for a, b in zip(followed.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
def test_a_whole_run_leaves_nothing_behind_and_copies_once_a_step(small_config, monkeypatch):
    monkeypatch.setitem(DEVICES, "mps", Elsewhere())
    config = replace(
        small_config,
        data=replace(small_config.data, crop=0.5, flip=True, colour=0.2),
        train=replace(small_config.train, steps=3, chunk=5, keep_patches=0.5, eval_every="3"),
        device=replace(small_config.device, device="mps", precision="fp32"),
    )
    run = prepare(config, "elsewhere")
    with follow() as follower:
        events = list(train(run.load_config(), run))
    assert isinstance(events[-1], Finished) and events[0].device == "mps"
    assert follower.mixed == follower.float64 == []
    steps = [event.step for event in events if isinstance(event, Step)]
    places = [found.place for found in follower.copied]
    first = places.index("step.py:run")
    assert places[first : first + len(steps)] == ["step.py:run"] * len(steps), "and nothing between steps"
    # Besides: the check before the first step; at the end, embeddings to evaluate, and whether weights are finite.
    assert places.count("step.py:run") == len(steps) == 3
    assert {place.split(":")[0] for place in places[:first]} == {"parity.py"}
    assert {place.split(":")[0] for place in places[first + 3 :]} == {"embedder.py", "loop.py", "messages.py"}


# The check must be able to fail: each mistake of these would stop or slow a real accelerator, and none a processor.


def leave_the_mean_behind(model: CLIP) -> None:
    mean = model.image.mean
    del model.image.mean
    model.image.mean = mean


def test_a_buffer_left_behind_is_caught_and_named(step_on):
    with follow() as follower:
        step_on(Elsewhere(), change=leave_the_mean_behind)
    assert {(found.operation, found.place) for found in follower.mixed} == {
        ("aten::sub.Tensor", "towers.py:forward")
    }


def test_an_optimizer_built_before_the_model_was_placed_is_caught():
    with follow() as follower:
        model = build_model(CONFIG.model, vocab_size=30, has_bias=False)
        optimizer = build_optimizer(model, CONFIG.train)
        for parameter in Elsewhere().place(model).parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert {found.operation for found in follower.mixed} == {"aten::_fused_adamw_"}


def without_a_device(image_BE, text_BE, *others):
    pairs_B = torch.arange(len(image_BE))
    return F.cross_entropy(image_BE @ text_BE.T, pairs_B)


def stacking_a_number(image_BE, text_BE, *others):
    return torch.stack([softmax_loss(image_BE, text_BE, *others), torch.tensor(1.0)]).sum()


@pytest.mark.parametrize("mistake", [without_a_device, stacking_a_number])
def test_what_is_made_without_saying_where_is_caught_and_named(step_on, mistake):
    with follow() as follower:
        step_on(Elsewhere(), loss_fn=mistake)
    assert follower.mixed[0].place == f"test_whole_step.py:{mistake.__name__}"


def test_a_single_number_may_stay_behind_where_accelerators_let_it(step_on):
    with follow() as follower:
        step_on(Elsewhere(), loss_fn=lambda *given: softmax_loss(*given) * torch.tensor(2.0))
    assert_nothing_but_numbers_comes_back(follower)


def in_double(image_BE, text_BE, *others):
    weights_BB = torch.eye(len(image_BE), dtype=torch.float64, device=image_BE.device)
    return (weights_BB * (image_BE @ text_BE.T)).float().sum()


def test_a_float64_is_caught_and_named(step_on):
    with follow() as follower:
        step_on(Elsewhere(), loss_fn=in_double)
    assert follower.float64[0].operation == "aten::eye"
    assert follower.float64[0].place == "test_whole_step.py:in_double"


@pytest.mark.parametrize(
    "look",
    [
        lambda loss, same: loss.item(),
        lambda loss, same: bool(loss > 0),
        lambda loss, same: f"{loss:.3f}",
        lambda loss, same: loss.detach().cpu(),
        lambda loss, same: loss.detach().to("cpu", non_blocking=True),
        lambda loss, same: loss.detach().numpy(),
        lambda loss, same: np.asarray(loss.detach()),
        lambda loss, same: loss.tolist(),
        lambda loss, same: torch.zeros(()).copy_(loss.detach()),
        lambda loss, same: same.nonzero(),
        lambda loss, same: same[same],
    ],
    ids=["item", "bool", "format", "cpu", "to", "numpy", "asarray", "tolist", "copy_", "nonzero", "mask"],
)
def test_a_look_at_the_loss_is_caught_and_named(step_on, look):
    def looking(image_BE, text_BE, scale, bias, same_BB):
        loss = softmax_loss(image_BE, text_BE, scale, bias, same_BB)
        look(loss, same_BB)
        return loss

    with follow() as follower:
        step_on(Elsewhere(), loss_fn=looking)
    assert follower.mixed == follower.float64 == []
    first, last = follower.copied
    assert first.place == "test_whole_step.py:<lambda>" and last.place == "step.py:run"


class Peeking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss * 1

    @staticmethod
    def backward(ctx, gradient):
        torch.zeros(3).mul(gradient)
        return gradient * gradient.tolist()


def test_the_backward_pass_is_watched_too(step_on):
    with follow() as follower:
        step_on(Elsewhere(), loss_fn=lambda *given: Peeking.apply(softmax_loss(*given)))
    assert [found.place for found in follower.mixed] == ["test_whole_step.py:backward"]
    assert follower.copied[0].place == "test_whole_step.py:backward" and len(follower.copied) == 2


# The pretended devices.


def differing(one: CLIP, other: CLIP) -> list[str]:
    theirs = dict(other.named_parameters())
    return [
        name
        for name, parameter in one.named_parameters()
        if not torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-7)
    ]


def test_an_honest_accelerator_agrees_with_the_processor(step_on):
    assert differing(step_on(Elsewhere())[0], step_on(processor())[0]) == []


@pytest.mark.parametrize("chunk", [B, 4])
def test_a_wrong_one_is_wrong_in_the_gradient_it_names_and_in_no_other(step_on, chunk):
    right, _ = step_on(Elsewhere(), chunk=chunk, clip_norm=1e9)
    one, other = Wrong(seed=0), Wrong(seed=1, factor=0.99)
    for device in (one, other):
        assert differing(step_on(device, chunk=chunk, clip_norm=1e9)[0], right) == [device.tensor]
    assert one.tensor != other.tensor


def test_one_that_misreads_what_is_permuted_is_right_for_the_rest(step_on):
    """The model hands attention its tensors in order, and images come in order: so they must."""
    right, _ = step_on(Elsewhere())
    assert differing(step_on(WrongOnPermuted())[0], right) == []
    permuted = np.ascontiguousarray(BATCH.images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    batch = replace(BATCH, images=permuted)
    assert differing(step_on(Elsewhere(), batch=batch)[0], right) == []
    assert differing(step_on(WrongOnPermuted(), batch=batch)[0], right)


def test_attention_given_permuted_tensors_would_be_misread():
    query = torch.randn(2, 5, 4, 8, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    expected = F.scaled_dot_product_attention(query, query, query)
    with WrongOnPermuted().autocast("fp32"):
        in_order = F.scaled_dot_product_attention(*[query.contiguous()] * 3)
        permuted = F.scaled_dot_product_attention(query, query, query)
    assert torch.allclose(in_order, expected, atol=1e-6) and not torch.allclose(permuted, expected, atol=1e-2)


def test_a_small_one_runs_out_until_the_chunk_fits(step_on):
    one_pair = 32 * 4 * 128 * 4  # bytes: the perceptron's wide side for one caption
    device = Small(limit_bytes=2 * one_pair)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step_on(device, chunk=B)
    assert ran_out_of_memory(caught.value) and device.num_refusals == 1
    _, numbers = step_on(device, chunk=2)
    assert numbers.are_finite and device.num_refusals == 1


def test_one_that_lacks_an_operation_says_which(step_on):
    with pytest.raises(NotImplementedError, match="'aten::gather' is not currently implemented"):
        step_on(Cannot())


def test_a_slow_one_has_done_its_work_when_it_was_waited_for(step_on):
    device = Slow(operation_seconds=0.0)
    with device.autocast("fp32"):
        torch.ones(3) + torch.ones(3)
    assert len(device.ordered) == 3
    step_on(device)
    assert device.ordered == []
