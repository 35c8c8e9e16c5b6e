"""An accelerator is checked before it is trusted: its loss and every gradient against the CPU's, in fp32.

Backends have silently returned wrong numbers, mostly for permuted inputs: both kinds are tried.
"""

from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lapclip.autotune.work import Work, place
from lapclip.config import Config, Plan, TrainConfig
from lapclip.data.batches import Batch
from lapclip.data.source import Source
from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError
from lapclip.machine.device import Device, device_named, no_memory_left, processor, ran_out_of_memory
from lapclip.model.clip import CLIP, shape_of
from lapclip.step.feed import feed
from lapclip.step.loss import Loss
from lapclip.step.optim import build_optimizer
from lapclip.step.step import Inputs, contrastive_step

# The norm of a difference as a share of the gradient's norm. Two orders of sums differ by 1e-6 in fp32, bf16 by 3%
# and fp16 by 0.5% from fp32, as measured on a CPU; a gradient that is off by 1% must be noticed in fp32.
TOLERANCES = {"fp32": 1e-3, "fp16": 0.03, "bf16": 0.15}
# Of the whole gradient: a tensor's own gradient may vanish, and then is all rounding; a single number often does.
MIN_SHARE, MIN_SHARE_OF_NUMBER = 1e-4, 1e-2
MIN_NORM = 1e-8  # of a gradient that is not zero
NUM_PAIRS = 16  # are enough
MAX_LOSS_SCALE = 2.0**16


@dataclass(frozen=True)
class Gradients:
    """The loss of a batch and its gradient by tensor, on the CPU."""

    loss: float
    by_name: dict[str, Tensor]


def build_checked(
    config: Config, source: Source, tokenizer: Tokenizer, plan: Plan, *, is_asked: bool
) -> tuple[CLIP, Plan, str | None]:
    """The new model of a run where it is trained, its plan, and what was wrong with another plan.

    The first pairs of the training data are tried. A plan that was measured and computes wrong numbers is replaced by
    the CPU; one that was asked for is an error.
    """
    num_tokens = shape_of(config.model).text_length
    several = config.data.captions_per_image or 1
    work = Work(config.model, config.train, tokenizer.vocab_size, num_tokens, several)
    model = work.new_model(processor())
    if plan.is_plain:
        return model, plan, None
    first = {"batch_size": num_probed(plan, work.batch_size), "seed": config.train.seed, "first_step": 0}
    with closing(feed(source, tokenizer, model.size, config.data, workers=0, **first)) as batches:
        batch = next(batches)
    try:
        return place_checked(model, work, batch, plan), plan, None
    except UserError as problem:
        if is_asked:
            raise
        plain = replace(plan, device=processor().name, precision="fp32", compile=False)
        return work.new_model(processor()), plain, problem.message


def num_probed(plan: Plan, batch_size: int) -> int:
    """How many pairs are tried: a compiled program is one for its number of pairs, so it is tried with that."""
    return min(batch_size, plan.chunk if plan.compile else NUM_PAIRS)


def reference(model: CLIP, work: Work, batch: Batch, plan: Plan) -> Gradients:
    """The correct gradients: the CPU in fp32, with the model still there and no more in memory than the plan holds."""
    plain = Plan(processor().name, "fp32", threads=plan.threads, chunk=plan.chunk)
    inputs = work.inputs(batch, processor(), work.size.text_length)
    return gradients_in_memory(model, inputs, work.loss_fn, plain)


def gradients(model: CLIP, inputs: Inputs, loss_fn: Loss, plan: Plan) -> Gradients:
    """The gradients of one batch; the model keeps none. In fp16 with the largest loss scale that does not overflow."""
    loss_scale = MAX_LOSS_SCALE if plan.precision == "fp16" else 1.0
    while True:
        model.zero_grad()
        loss, _ = contrastive_step(model, inputs, loss_fn, plan, loss_scale=loss_scale)
        found = {
            name: parameter.grad.detach().float().cpu() / loss_scale
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        model.zero_grad()
        if loss_scale <= 1 or all(gradient.isfinite().all() for gradient in found.values()):
            return Gradients(loss.item(), found)
        loss_scale /= 4


def gradients_in_memory(model: CLIP, inputs: Inputs, loss_fn: Loss, plan: Plan) -> Gradients:
    """With as large a chunk as there is memory for: a device that is merely small is not wrong."""
    while True:
        try:
            return gradients(model, inputs, loss_fn, plan)
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error) or plan.chunk == 1:
                raise
        plan = replace(plan, chunk=(plan.chunk + 1) // 2)
        device_named(plan.device).release_memory()


def disagreement(model: CLIP, work: Work, batch: Batch, expected: Gradients, plan: Plan) -> str | None:
    """What is wrong with a plan, naming the worst tensor; None when it agrees with the CPU."""
    device = device_named(plan.device)
    if problem := optimizer_problem(device):
        return problem
    straight = work.inputs(batch, device, work.size.text_length)
    kinds = {"contiguous": straight, "permuted": permuted(straight)}
    if plan.compile:
        kinds.pop("permuted")  # would be compiled again, into a program that nothing trains with
    for kind, inputs in kinds.items():
        # Once whole and once in chunks: both are trained with.
        chunk = len(straight.images) if kind == "contiguous" else -(-len(straight.images) // 2)
        found = gradients_in_memory(model, inputs, work.loss_fn, replace(plan, chunk=min(plan.chunk, chunk)))
        if problem := difference(found, expected, TOLERANCES[plan.precision]):
            return f"{problem}, with {kind} inputs"
    return None


def place_checked(model: CLIP, work: Work, batch: Batch, plan: Plan) -> CLIP:
    """Moves a model from the CPU to where it is trained, and refuses where the numbers are wrong.

    A new model, also for a run that is resumed: the loss of a trained one nearly vanishes, and then its gradients in
    low precision are mostly rounding.
    """
    try:
        expected = None if plan.is_plain else reference(model, work, batch, plan)
        model = place(model, device_named(plan.device), compile=plan.compile)
        found = None if expected is None else disagreement(model, work, batch, expected, plan)
        problem = f"gives wrong results for this model: {found}" if found else None
    except (RuntimeError, MemoryError) as error:
        if ran_out_of_memory(error):
            raise no_memory_left(error) from None
        problem = f"does not run: {first_line(error)}"  # as where there is no C++ compiler
    if problem is not None:
        what = f"`{plan.device}` in {plan.precision}{', compiled' * plan.compile} {problem}"
        raise UserError(what, hint="train on the CPU: `--device cpu --precision fp32 --no-compile`")
    return model


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]


def optimizer_problem(device: Device) -> str | None:
    """Whether AdamW changes weights there as it does on the CPU; it has been wrong as well."""
    weights = torch.linspace(-1, 1, 35).view(5, 7)
    changes = []
    for where in (processor(), device):
        layer = nn.Linear(7, 5, bias=False)
        layer.weight.data = weights.clone()
        layer = where.place(layer)
        optimizer = build_optimizer(layer, TrainConfig(lr=1e-3))
        for step in range(1, 4):
            layer.weight.grad = torch.cos(step * layer.weight.detach())
            optimizer.step()
        changes.append(layer.weight.detach().cpu() - weights)
    expected, found = changes
    error = float((found - expected).norm() / expected.norm())
    if error <= TOLERANCES["fp32"]:
        return None
    return f"AdamW's update differs from the CPU's by {error:.2%}; {TOLERANCES['fp32']:.1%} is allowed"


def difference(found: Gradients, expected: Gradients, tolerance: float) -> str | None:
    """The worst of what differs by more than the tolerance."""
    errors = {"the loss": abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-3)}
    whole = torch.stack([gradient.norm() for gradient in expected.by_name.values()]).norm()
    for name, gradient in expected.by_name.items():
        least = MIN_SHARE if gradient.numel() > 1 else MIN_SHARE_OF_NUMBER
        norm = torch.maximum(gradient.norm(), least * whole).clamp_min(MIN_NORM)
        other = found.by_name.get(name, torch.full_like(gradient, torch.nan))
        errors[f"the gradient of `{name}`"] = float((other - gradient).norm() / norm)
    # NaN is the worst of all.
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    if errors[worst] <= tolerance:
        return None
    return f"{worst} differs from the CPU's by {errors[worst]:.2%}; {tolerance:.1%} is allowed"


def permuted(inputs: Inputs) -> Inputs:
    """The same numbers in another order of memory."""
    return replace(
        inputs,
        images=inputs.images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        tokens_BT=inputs.tokens_BT.mT.contiguous().mT,
        ends_B=inputs.ends_B.repeat_interleave(2, -1)[..., ::2],
        same_BB=inputs.same_BB.mT.contiguous().mT,
        keep_BK=None if inputs.keep_BK is None else inputs.keep_BK.T.contiguous().T,
    )
