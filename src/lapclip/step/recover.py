"""One step, whatever it takes: fewer pairs at once when memory runs out, a smaller loss scale when fp16 overflows.

Each attempt begins with the same weights and computes the same mathematics.
"""

from dataclasses import replace

from torch.optim import Optimizer

from lapclip.machine.device import device_named, no_memory_left, ran_out_of_memory
from lapclip.model.clip import CLIP
from lapclip.step.loss import Loss
from lapclip.step.profile import NO_PROFILER, Profiler
from lapclip.step.step import Inputs, Numbers, Plan, update
from lapclip.weights.checkpoint import Progress

GROWS_AFTER = 1000  # steps without an overflow
MOST_LOSS_SCALE = 2.0**24


def update_or_recover(
    model: CLIP,
    optimizer: Optimizer,
    inputs: Inputs,
    loss_fn: Loss,
    *,
    plan: Plan,
    clip_norm: float,
    now: Progress,
    watch: Profiler = NO_PROFILER,
) -> tuple[Numbers, Plan]:
    """What the step found, and the plan it ran with; numbers that stay infinite are for the caller to judge."""
    while True:
        if now.step - now.last_overflow_step >= GROWS_AFTER and plan.precision == "fp16":
            now.loss_scale, now.last_overflow_step = min(2 * now.loss_scale, MOST_LOSS_SCALE), now.step
        try:
            found = update(
                model,
                optimizer,
                inputs,
                loss_fn,
                plan=plan,
                clip_norm=clip_norm,
                loss_scale=now.loss_scale if plan.precision == "fp16" else 1.0,
                watch=watch,
            )
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            if plan.chunk == 1:
                raise no_memory_left(error) from None
        else:
            if found.are_finite or plan.precision != "fp16" or now.loss_scale <= 1:
                return found, plan
            now.loss_scale, now.last_overflow_step = now.loss_scale / 2, now.step
            continue
        # Outside of `except`, whose error holds on to the activations.
        plan = replace(plan, chunk=(plan.chunk + 1) // 2)
        optimizer.zero_grad()
        device_named(plan.device).release_memory()
