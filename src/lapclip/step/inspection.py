"""Every few seconds one step is looked at closely, and the machine with it."""

import time

from torch.optim import Optimizer

from lapclip.machine.device import device_named
from lapclip.machine.hardware import memory_now
from lapclip.machine.sensors import Sensors
from lapclip.model.clip import CLIP
from lapclip.runs.events import PARTS, Inspected
from lapclip.step.profile import NO_PROFILER, Profiler, StepProfiler
from lapclip.step.step import Inputs, Plan

SECONDS_BETWEEN = 5.0  # with the steps in between, events stay under 5 MB an hour


class Inspector:
    """Says which steps are looked at, and makes an event of what was seen."""

    def __init__(self, *, max_memory: float | None, recompute: bool):
        self.limit = int(max_memory * 1e9) if max_memory is not None else None
        self.peak = 0
        self.recompute = recompute
        self.sensors = Sensors()
        self.sensors.read()  # shares are counted from here
        self.last = time.monotonic() - SECONDS_BETWEEN / 2  # not the first steps, which warm up

    def watch_next(self, plan: Plan) -> Profiler:
        """What the next step is watched with."""
        if time.monotonic() - self.last < SECONDS_BETWEEN:
            return NO_PROFILER
        # What a compiled or recomputing model keeps cannot be counted from outside.
        return StepProfiler(device_named(plan.device), can_count=not (plan.compile or self.recompute))

    def inspected(
        self,
        watch: StepProfiler,
        *,
        step: int,
        seconds: float,
        model: CLIP,
        optimizer: Optimizer,
        inputs: Inputs,
        plan: Plan,
    ) -> Inspected:
        self.last = time.monotonic()
        device = device_named(plan.device)
        used, peak = (device.peak_bytes(),) * 2 if device.is_accelerator else memory_now()
        self.peak = max(self.peak, peak)
        parts = {part: round(watch.parts[part], 6) for part in PARTS}
        known = sum(parts.values()) - parts["other"] + watch.looking_seconds
        parts["other"] = round(max(0.0, seconds - known), 6)
        return Inspected(
            step=step,
            parts=parts,
            memory=watch.memory(model, optimizer, inputs.tensors),
            memory_used=used,
            memory_peak=self.peak,
            memory_limit=self.limit or device.memory_bytes(),
            grad_norms=watch.grad_norms,
            readings=self.sensors.read(),
        )
