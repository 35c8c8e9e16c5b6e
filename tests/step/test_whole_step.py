"""What can be known about an accelerator without one: no tensor of a step is left behind, none is a float64,
and nothing is copied back but the few numbers that are logged.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import Elsewhere, Follower, WrongOnPermuted, follow
from tiny import BATCH, assert_alike, attempt, new_model
from torch.nn import functional as F

from lapclip.config import Plan
from lapclip.machine.device import DEVICES
from lapclip.runs.events import Finished, Step
from lapclip.step.loss import softmax_loss
from lapclip.train.loop import train
from lapclip.train.prepare import prepare
from lapclip.weights.checkpoint import Progress

PLAN = Plan("mps", "fp32", threads=1, chunk=8)
CHUNKED = replace(PLAN, chunk=5)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def followed(plan: Plan = PLAN, **options) -> Follower:
    """What a step did on an honest accelerator."""
    with follow() as follower:
        found = attempt(plan, Elsewhere(), **options)
    assert found.numbers.are_finite
    return follower


@pytest.mark.parametrize(
    ("plan", "loss", "share", "recompute"),
    [
        (PLAN, "softmax", 1.0, False),
        (PLAN, "sigmoid", 0.5, True),
        (CHUNKED, "softmax", 0.5, True),
        (CHUNKED, "sigmoid", 1.0, False),
        (replace(PLAN, precision="fp16"), "softmax", 0.5, False),
    ],
)
def test_a_step_leaves_nothing_behind_and_copies_only_its_numbers_back(plan, loss, share, recompute):
    model, now = new_model(loss, recompute=recompute), Progress(loss_scale=1024.0)
    follower = followed(plan, loss=loss, share=share, model=model, now=now)
    assert follower.mixed == follower.float64 == []
    assert [found.place for found in follower.copied] == ["step.py:run"]
    assert follower.copied[0].num_elements <= 8


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


# The check must be able to fail: each of these mistakes would stop or slow a real accelerator, and none a processor.


def without_a_device(image_BE, text_BE, *others):
    return F.cross_entropy(image_BE @ text_BE.T, torch.arange(len(image_BE)))


def in_double(image_BE, text_BE, *others):
    weights_BB = torch.eye(len(image_BE), dtype=torch.float64, device=image_BE.device)
    return (weights_BB * (image_BE @ text_BE.T)).float().sum()


def test_what_is_made_elsewhere_or_as_a_float64_is_caught_and_named():
    assert followed(loss_fn=without_a_device).mixed[0].place == "test_whole_step.py:without_a_device"
    assert followed(loss_fn=in_double).float64[0].place == "test_whole_step.py:in_double"


@pytest.mark.parametrize("look", [lambda loss, same: f"{loss:.3f}", lambda loss, same: same[same]])
def test_a_look_at_the_loss_is_caught_and_named(look):
    def looking(*given):
        loss = softmax_loss(*given)
        look(loss, given[-1])
        return loss

    follower = followed(loss_fn=looking)
    assert follower.mixed == follower.float64 == []
    first, last = follower.copied
    assert first.place == "test_whole_step.py:<lambda>" and last.place == "step.py:run"


def test_attention_and_images_are_given_as_contiguous_tensors():
    """Some versions of an accelerator misread others; `WrongOnPermuted` does too."""
    right = attempt(PLAN, Elsewhere()).gradients
    assert_alike(attempt(PLAN, WrongOnPermuted()).gradients, right, 1e-4)
    permuted = np.ascontiguousarray(BATCH.images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    misread = attempt(PLAN, WrongOnPermuted(), batch=replace(BATCH, images=permuted)).gradients
    with pytest.raises(AssertionError):
        assert_alike(misread, right, 1e-4)
