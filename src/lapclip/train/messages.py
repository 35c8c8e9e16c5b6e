"""What can go wrong while training, in words: an error that ends it, or a warning."""

import time
from pathlib import Path

import torch
from torch import nn

from lapclip.config import Config
from lapclip.errors import UserError
from lapclip.runs.events import Warned
from lapclip.runs.run import Run
from lapclip.step.step import Plan

MOST_FAULTS_SAID = 10  # each by itself, of images that turn out broken while training
# A step that takes longer than so many seconds and times the usual, with the processor no busier than this share.
SLEPT_SECONDS, SLEPT_FACTOR, SLEPT_BUSY = 5.0, 10, 0.2


def is_finite(model: nn.Module) -> bool:
    return bool(torch.stack([parameter.isfinite().all() for parameter in model.parameters()]).all())


def refuse_if_too_many(faults: list[str], num_pairs: int, most: float) -> None:
    if len(faults) > max(MOST_FAULTS_SAID, most * num_pairs):
        raise UserError(
            f"{len(faults):,} images could not be read while training, the last one {faults[-1]}",
            hint="look whether the source is still there; `--max-unreadable` puts up with more",
        )


def diverged(step: int, what: str, lr: float, *, newest: Path | None) -> UserError:
    kept = f"; `{newest}` is from before" if newest else "; no checkpoint had been saved yet"
    return UserError(
        f"training diverged at step {step + 1}: {what}{kept}",
        hint=f"start again with a lower learning rate: `--lr {min(lr / 3, 1e-3):.1g}`",
    )


def out_of_memory(step: int, plan: Plan) -> Warned:
    return Warned(
        step,
        message=f"memory ran out: from here on {plan.chunk} pairs are held at once, with the same gradients",
        hint=f"close other programs, or start with `--chunk {plan.chunk}`",
        kind="memory-ran-out",
    )


class Clock:
    """Counts training time: a step during which the machine or the process slept counts as a usual one."""

    def __init__(self) -> None:
        self.usual: float | None = None  # seconds of a step
        self.has_just_slept = False
        self.started = self.busy_before = 0.0

    def start(self) -> float:
        """Begins a step; by the clock of the machine, which stands still while it sleeps."""
        self.started, self.busy_before = time.perf_counter(), time.process_time()
        return self.started

    def stop(self, data_seconds: float) -> tuple[float, float]:
        """The seconds of the step, and those of them that were training; waiting for data is part of it."""
        elapsed = time.perf_counter() - self.started
        busy = time.process_time() - self.busy_before
        worked = elapsed - data_seconds
        # Twice in a row it is no sleep: then steps have become that slow.
        self.has_just_slept = (
            self.usual is not None and not self.has_just_slept and has_slept(worked, busy, self.usual)
        )
        if self.has_just_slept:
            assert self.usual is not None
            return elapsed, data_seconds + self.usual
        # Half of each new step, so that a change of speed is soon usual.
        self.usual = worked if self.usual is None else (self.usual + worked) / 2
        return elapsed, elapsed


def has_slept(elapsed: float, busy: float, usual: float) -> bool:
    """Far longer than usual, with a processor that did hardly anything: compiling is no sleep."""
    return elapsed > max(SLEPT_SECONDS, SLEPT_FACTOR * usual) and busy < max(2 * usual, SLEPT_BUSY * elapsed)


def slept(step: int, seconds: float) -> Warned:
    return Warned(
        step,
        message=f"training stood still for {seconds:.0f} s: the machine or the process slept; this is not counted",
        hint="nothing is lost; keep the lid open or the power plugged in to go on without a break",
        kind="slept",
    )


def keep_way(run: Run, config: Config, reasons: dict[str, str]) -> None:
    """Writes down how the run can be trained after all, and why, for when it is resumed."""
    run.write_config(config)
    machine = run.load_machine()
    run.write_machine(machine | {"reasons": machine.get("reasons", {}) | reasons})
