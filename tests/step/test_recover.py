"""A step that runs out of memory, or overflows, is repeated until it fits: same weights, same gradients."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import environment
from fakes import Peculiar, Small
from tiny import ONE_PAIR, SOURCE, TOKENIZER, assert_alike, attempt, new_model

from lapclip.config import Plan
from lapclip.embedder import Embedder
from lapclip.errors import UserError
from lapclip.machine.device import processor
from lapclip.model.clip import CLIP
from lapclip.runs.events import Step
from lapclip.step.step import SCALE_GROWTH_STEPS
from lapclip.train.loop import train
from lapclip.train.prepare import prepare
from lapclip.weights import checkpoint
from lapclip.weights.checkpoint import Progress

B = 8
HERE = Plan("cpu", "fp32", 1, B)
THERE = replace(HERE, device="mps")
FP16 = replace(HERE, precision="fp16")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture(scope="module")
def right(one_thread):
    return attempt(HERE)


# Memory.


@pytest.mark.parametrize(
    ("first", "fits", "num_refusals", "chunk"), [(8, 5, 1, 4), (8, 1, 3, 1), (7, 4, 1, 4)]
)
def test_the_chunk_is_halved_until_it_fits_and_the_gradients_stay(right, first, fits, num_refusals, chunk):
    device = Small(limit_bytes=fits * ONE_PAIR)
    found = attempt(replace(THERE, chunk=first), device)
    assert found.plan == replace(THERE, chunk=chunk) and len(device.refused) == num_refusals
    assert found.numbers.loss == pytest.approx(right.numbers.loss, abs=1e-5)
    assert_alike(found.gradients, right.gradients, 1e-4)


def test_no_memory_for_one_pair_is_a_sentence_and_other_errors_are_not_hidden():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        attempt(THERE, RunsOutOnce(error=RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    with pytest.raises(UserError, match="not enough memory for even one pair at a time") as caught:
        attempt(THERE, Small(limit_bytes=ONE_PAIR // 2))
    assert "--size" in caught.value.hint


@dataclass(frozen=True, eq=False)
class RunsOutOnce(Peculiar):
    """Has room, until in some forward pass there is none; afterwards there is again."""

    at: int = 0
    passes: list[int] = field(default_factory=list)
    error: Exception = field(default_factory=lambda: RuntimeError("MPS backend out of memory"))

    @contextmanager
    def autocast(self, precision) -> Iterator[None]:
        self.passes.append(len(self.passes))
        with super().autocast(precision):
            yield

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        if self.passes[-1] == self.at and "gelu" in str(operation):
            self.passes.append(len(self.passes))
            raise self.error
        return operation(*args, **kwargs)


# In chunks of four: all are embedded in the first pass, then come images, captions, images, captions.
@pytest.mark.parametrize("at", [0, 2, 3])
def test_running_out_in_the_middle_of_a_chunk_leaves_no_gradient_behind(right, at):
    error = RuntimeError("CUDA out of memory") if at % 2 else MemoryError()
    found = attempt(replace(THERE, chunk=4), RunsOutOnce(at=at, error=error))
    assert found.plan.chunk == 2
    assert found.numbers.grad_norm == pytest.approx(right.numbers.grad_norm, rel=1e-5)
    assert_alike(found.gradients, right.gradients, 1e-4)


def cramped(embed):
    """Has room for three at once."""

    def embed_few(model, rows, *more):
        if len(rows) > 3:
            raise torch.OutOfMemoryError("MPS backend out of memory")
        return embed(model, rows, *more)

    return embed_few


def test_an_embedder_takes_fewer_at_once_and_finds_the_same_rows(monkeypatch):
    model = new_model()
    pictures = [SOURCE.image(index, 16) for index in range(B)]
    words = [SOURCE.captions(index)[0] for index in range(B)]
    plain = Embedder(model, TOKENIZER, processor())
    images, texts = plain.images(pictures), plain.texts(words)
    assert plain.chunk == 64
    for name in ("embed_images", "embed_texts"):
        monkeypatch.setattr(CLIP, name, cramped(getattr(CLIP, name)))
    small = Embedder(model, TOKENIZER, processor(), chunk=B)
    np.testing.assert_allclose(small.images(pictures), images, atol=1e-6)
    assert small.chunk == 2
    np.testing.assert_allclose(small.texts(words), texts, atol=1e-6)


SHORT_OF_MEMORY = """
import ctypes, psutil, resource, torch
from lapclip.autotune import measure
from lapclip.autotune.work import Work
from lapclip.config import Plan, load_config
from lapclip.machine.device import processor
from lapclip.weights.checkpoint import Progress

torch.set_num_threads(1)
measure.set_up_process = lambda threads, keep_memory: None
for option in (-1, -3):  # freed memory goes back at once, so that what is held is what is needed
    ctypes.CDLL(None).mallopt(option, 1 << 18)
config = load_config(flags=dict(size="nano", batch_size=128, loss="softmax", lr=1e-9, keep_patches=1.0))
rig = measure.Rig(Work(config.model, config.train, vocab_size=300, num_tokens=8), Plan("cpu", "fp32", 1, 128))
for chunk in (8, 16, 32, 64, 128):  # a kernel for a new shape cannot be compiled once memory is short
    rig.step(Plan("cpu", "fp32", 1, chunk))
expected = rig.update.run(rig.inputs)
processor().release_memory()
limit = int(psutil.Process().memory_info().vms + 20e6)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
found = rig.update.run_or_recover(rig.inputs, Progress())
assert abs(found.loss - expected.loss) < 1e-4 and rig.update.plan.chunk < 128, (found, expected, rig.update.plan)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_a_processor_that_really_runs_out_takes_smaller_chunks_and_finds_the_same_loss():
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr


# The loss scale of fp16.


def test_fp16_gradients_are_near_those_of_fp32_whatever_the_scale(right):
    for scale in (1.0, 2.0**16):
        found = attempt(FP16, now=Progress(loss_scale=scale))
        assert found.now.loss_scale == scale
        assert found.numbers.grad_norm == pytest.approx(right.numbers.grad_norm, rel=0.01)
        assert_alike(found.gradients, right.gradients, 0.03)


def test_an_overflow_halves_the_scale_and_repeats_the_step():
    """The sigmoid loss begins with long gradients: times 2**24 they are beyond fp16."""
    now = Progress(step=5, loss_scale=2.0**20)
    found = attempt(replace(FP16, chunk=3), loss="sigmoid", now=now)
    assert 1 < now.loss_scale < 2.0**20 and now.last_overflow_step == 5
    assert found.numbers.are_finite and found.plan.chunk == 3
    assert_alike(found.gradients, attempt(HERE, loss="sigmoid").gradients, 0.03)
    assert all(tensor.isfinite().all() for tensor in found.model.state_dict().values())


def test_the_scale_grows_again_after_a_long_time_without_an_overflow():
    early, late = (Progress(step=SCALE_GROWTH_STEPS - before, loss_scale=8.0) for before in (1, 0))
    attempt(FP16, now=early)
    attempt(FP16, now=late)
    assert early.loss_scale == 8.0 and late.loss_scale == 16.0
    assert late.last_overflow_step == SCALE_GROWTH_STEPS, "the next time is as long again"


def test_numbers_that_no_scale_makes_finite_are_handed_on_and_change_no_weight():
    model = new_model()
    with torch.no_grad():
        model.project_image.weight[0, 0] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = attempt(FP16, model=model, now=Progress(loss_scale=4.0))
    assert not found.numbers.are_finite and found.now.loss_scale == 1.0
    same = [torch.equal(tensor, before[name]) for name, tensor in found.model.state_dict().items()]
    assert same.count(False) == 1, "the one that was not finite before"


def test_the_scale_is_in_the_checkpoint_and_a_resumed_run_equals_one_that_never_stopped(with_train):
    config = with_train(steps=4, loss="sigmoid", eval_every="4")
    config = replace(config, device=replace(config.device, device="cpu", precision="fp16"))

    def losses(run, stop=None):
        for event in train(run.load_config(), run):
            if isinstance(event, Step):
                yield event.loss
                if event.step == stop:
                    break

    straight, stopped = prepare(config, "straight"), prepare(config, "stopped")
    found = list(losses(stopped, stop=2))
    scale = checkpoint.load_progress(checkpoint.latest(stopped.checkpoints)).loss_scale
    assert scale < Progress().loss_scale, "the sigmoid loss overflows at first"
    assert found + list(losses(stopped)) == list(losses(straight))
    one, other = (checkpoint.load_progress(checkpoint.latest(r.checkpoints)) for r in (straight, stopped))
    assert one.loss_scale == other.loss_scale <= scale and one.last_overflow_step == other.last_overflow_step
