"""Every few seconds one step is profiled: where its time goes, what it holds in memory, the norm of each gradient.

Profiling makes a step a little slower and changes none of its numbers.
"""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lapclip.config import Plan
from lapclip.machine.device import Device, device_named
from lapclip.machine.hardware import memory_now
from lapclip.machine.sensors import Sensors
from lapclip.runs.events import PARTS, Inspected

SECONDS_BETWEEN = 5.0  # with the steps in between, events stay under 5 MB an hour
MAX_GROWTH = 1.1  # of the memory in use, until what is free in it is returned to the system


class Profiler:
    """The profiler of a step that is not profiled: it does nothing."""

    def lap(self, part: str) -> None:
        """Adds the time since the last lap to a part of the step."""

    def counting(self, others: Iterable[Tensor]) -> AbstractContextManager:
        """Counts the bytes autograd saves for the backward pass; `others` are in memory anyway."""
        return nullcontext()

    def record_gradients(self, model: nn.Module) -> None:
        """Records the gradients as they are now."""


NO_PROFILER = Profiler()


class StepProfiler(Profiler):
    """Filled while one step runs."""

    def __init__(self, device: Device, *, can_count: bool):
        self.device = device
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.grad_norms: dict[str, float] = {}
        self.gradient_bytes = 0
        self.can_count = can_count
        self.others: set[int] = set()  # storages that exist with or without a backward pass
        self.holders: Counter[int] = Counter()  # by storage, which is counted once however many share it
        self.held = self.peak = 0  # bytes of these storages
        self.overhead_seconds = 0.0  # of profiling itself, not part of the step
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        self.device.synchronize()
        now = time.perf_counter()
        self.parts[part] += now - self.last
        self.last = now

    def counting(self, others: Iterable[Tensor]) -> AbstractContextManager:
        if not self.can_count:
            return nullcontext()
        self.others = {tensor.untyped_storage().data_ptr() for tensor in others}
        return saved_tensors_hooks(partial(SavedTensor, profiler=self), attrgetter("tensor"))

    def record_gradients(self, model: nn.Module) -> None:
        self.lap("optimizer")
        self.grad_norms = gradient_norms(model)
        self.gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        now = time.perf_counter()
        self.overhead_seconds += now - self.last
        self.last = now

    def memory(
        self, model: nn.Module, optimizer: Optimizer, batch: Iterable[Tensor]
    ) -> dict[str, int | None]:
        """Bytes by kind; of the activations, the maximum held at once."""
        states = (value for state in optimizer.state.values() for value in state.values())
        return {
            "parameters": sum(p.nbytes for p in model.parameters()),
            "gradients": self.gradient_bytes,
            "optimizer": sum(value.nbytes for value in states if isinstance(value, Tensor)),
            "activations": self.peak if self.can_count else None,
            "data": sum(tensor.nbytes for tensor in batch),
        }


class SavedTensor:
    """One tensor saved for the backward pass; deleted when autograd no longer needs it."""

    __slots__ = ("num_bytes", "profiler", "storage", "tensor")

    def __init__(self, tensor: Tensor, profiler: StepProfiler):
        self.tensor, self.profiler = tensor, profiler
        self.storage = tensor.untyped_storage().data_ptr()
        self.num_bytes = 0 if self.storage in profiler.others else tensor.untyped_storage().nbytes()
        if not profiler.holders[self.storage]:
            profiler.held += self.num_bytes
            profiler.peak = max(profiler.peak, profiler.held)
        profiler.holders[self.storage] += 1

    def __del__(self) -> None:
        self.profiler.holders[self.storage] -= 1
        if not self.profiler.holders[self.storage]:
            self.profiler.held -= self.num_bytes


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """The norm of each layer's gradient, the towers from their input to their output."""
    with_gradient = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if not with_gradient:
        return {}
    squares = torch.stack([grad.float().norm() for _, grad in with_gradient]).square().tolist()
    sums: defaultdict[str, float] = defaultdict(float)
    for (name, _), square in zip(with_gradient, squares, strict=True):
        sums[layer_of(name)] += square
    layers = sorted(sums, key="scale".__eq__)  # the model's own order, in which the scale would be first
    return {layer: float(f"{sums[layer] ** 0.5:.4g}") for layer in layers}


def layer_of(parameter: str) -> str:
    """`image.3` for what belongs to the fourth block of the image tower, `image.patches` for what comes before."""
    tower = next((t for t in ("image", "text") if t in parameter.split(".")[0]), None)
    if tower is None:
        return "scale"
    if block := re.search(r"\.blocks\.(\d+)\.", parameter):
        return f"{tower}.{block[1]}"
    if parameter.startswith("project_") or ".transformer.norm." in parameter:
        return f"{tower}.out"
    return f"{tower}.patches" if tower == "image" else f"{tower}.tokens"


class Inspector:
    """Decides which steps are profiled, and makes an event of each profile, with the machine's sensors."""

    def __init__(self, *, max_memory: float | None, recompute: bool):
        self.limit = int(max_memory * 1e9) if max_memory is not None else None
        self.peak, self.lowest = 0, math.inf  # of what was used at an inspection
        self.recompute = recompute
        self.sensors = Sensors()
        self.sensors.read()  # shares are counted from here
        self.last = time.monotonic() - SECONDS_BETWEEN / 2  # not the first steps, which warm up

    def profiler(self, plan: Plan) -> Profiler:
        """The profiler of the next step."""
        if time.monotonic() - self.last < SECONDS_BETWEEN:
            return NO_PROFILER
        # What a compiled or recomputing model saves cannot be counted from outside.
        return StepProfiler(device_named(plan.device), can_count=not (plan.compile or self.recompute))

    def inspected(
        self, profiler: StepProfiler, memory: dict[str, int | None], *, step: int, seconds: float
    ) -> Inspected:
        """The event of a step that was profiled and took so many seconds; `memory` is of its profiler."""
        self.last, device = time.monotonic(), profiler.device
        used, peak = (device.peak_bytes(),) * 2 if device.is_accelerator else memory_now()
        self.peak, self.lowest = max(self.peak, peak), min(self.lowest, used)
        if not device.is_accelerator and used > MAX_GROWTH * self.lowest:
            device.release_memory()  # captions of many lengths leave gaps in the heap
        parts = {part: round(profiler.parts[part], 6) for part in PARTS}
        known = sum(parts.values()) - parts["other"] + profiler.overhead_seconds
        parts["other"] = round(max(0.0, seconds - known), 6)
        return Inspected(
            step=step,
            parts=parts,
            memory=memory,
            memory_used=used,
            memory_peak=self.peak,
            memory_limit=self.limit or device.memory_bytes(),
            grad_norms=profiler.grad_norms,
            readings=self.sensors.read(),
        )
