"""A step that is looked at closely computes the same, and what is seen adds up."""

import pytest
import torch
from tiny import BATCH, new_model
from torch import nn

from lapclip.config import Plan, TrainConfig
from lapclip.machine.device import has_glibc, processor, set_up_process
from lapclip.machine.hardware import memory_now
from lapclip.model.clip import CLIP
from lapclip.runs.events import KINDS_OF_MEMORY, PARTS
from lapclip.step.loss import softmax_loss
from lapclip.step.optim import build_optimizer
from lapclip.step.profile import Inspector, StepProfiler, gradient_norms
from lapclip.step.step import Update, move

pytestmark = pytest.mark.usefixtures("one_thread")

B = 8
INPUTS = move(BATCH, processor(), None)


def step(profiler=None, *, chunk=B, **shape) -> tuple[CLIP, torch.optim.Optimizer]:
    model = new_model(**shape)
    optimizer = build_optimizer(model, TrainConfig(lr=1e-3))
    update = Update(model, optimizer, softmax_loss, clip_norm=1.0, plan=Plan("cpu", "fp32", 1, chunk))
    update.run(INPUTS, **({"profiler": profiler} if profiler else {}))
    return model, optimizer


def test_every_part_of_the_step_takes_time_and_memory_by_kind_is_what_adamw_needs():
    profiler = StepProfiler(processor(), can_count=True)
    profiler.lap("data")
    model, optimizer = step(profiler)
    assert list(profiler.parts) == list(PARTS)
    assert all(profiler.parts[part] > 0 for part in ("data", "forward", "backward", "optimizer"))
    memory = profiler.memory(model, optimizer, INPUTS.tensors)
    assert list(memory) == list(KINDS_OF_MEMORY)
    assert memory["parameters"] == memory["gradients"] == 4 * model.num_parameters
    assert memory["optimizer"] >= 8 * model.num_parameters
    assert memory["data"] > INPUTS.images.nbytes and memory["activations"] > 0


def test_activations_grow_with_the_pairs_in_memory_at_once():
    held = {}
    for chunk in (2, 4, B):
        profiler = StepProfiler(processor(), can_count=True)
        step(profiler, chunk=chunk)
        held[chunk] = profiler.peak
        assert profiler.held == 0, "all is let go after the backward pass"
    assert held[2] < held[4] < held[B] / 1.5
    # In one chunk both towers are held, otherwise one after the other.
    assert held[4] == pytest.approx(2 * held[2], rel=0.2)


def test_what_cannot_be_counted_is_not_guessed():
    profiler = StepProfiler(processor(), can_count=False)
    model, optimizer = step(profiler, recompute=True)
    assert profiler.memory(model, optimizer, [])["activations"] is None


def test_a_storage_that_many_tensors_share_counts_once():
    profiler, x = StepProfiler(processor(), can_count=True), torch.ones(100, requires_grad=True)
    with profiler.counting([x]):
        y = x * 2
        z = (y * y[:100]) * x
    assert profiler.peak == 2 * 400, "y, and its square; x is there anyway"
    z.sum().backward()
    del y, z
    assert profiler.held == 0


def test_norms_by_layer_are_the_whole_gradient_in_order():
    model, profiler = new_model("sigmoid"), StepProfiler(processor(), can_count=False)
    assert gradient_norms(model) == {}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    norms = gradient_norms(model)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(float(total), rel=1e-3)
    assert list(norms) == [
        "image.patches", "image.0", "image.1", "image.2", "image.out",
        "text.tokens", "text.0", "text.1", "text.out", "scale",
    ]  # fmt: skip
    profiler.record_gradients(model)
    assert profiler.grad_norms == norms


@pytest.mark.skipif(not has_glibc(), reason="another allocator")
def test_memory_that_is_held_but_free_is_returned_to_the_system():
    set_up_process(1, keep_memory=True)
    inspector, profiler = (
        Inspector(max_memory=None, recompute=False),
        StepProfiler(processor(), can_count=True),
    )
    model, optimizer = step(profiler)
    memory = profiler.memory(model, optimizer, INPUTS.tensors)
    before = inspector.inspected(profiler, memory, step=1, seconds=1.0).memory_used
    blocks = [torch.ones(2**18) for _ in range(1024)]
    last = blocks.pop()  # above the others, so that the heap cannot shrink
    del blocks
    with_gaps = inspector.inspected(profiler, memory, step=2, seconds=1.0).memory_used
    assert with_gaps > before + 2**29, "the allocator keeps it"
    assert memory_now()[0] < before + 2**29 < with_gaps
    assert last.sum() == 2**18
