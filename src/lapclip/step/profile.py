"""One step looked at closely: where its time goes, what it holds in memory, how long each layer's gradient is.

Looking makes a step a little slower and changes none of its numbers; it is done every few seconds.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lapclip.machine.device import Device
from lapclip.runs.events import PARTS


class Profiler:
    """The profiler of a step that is not profiled: it does nothing."""

    def lap(self, part: str) -> None:
        """Counts the time since the last lap for a part."""

    def counting(self, anyway: Iterable[Tensor]) -> AbstractContextManager:
        """Counts what is kept for the backward pass, while it is kept; not what is held anyway."""
        return nullcontext()

    def look_at_gradients(self, model: nn.Module) -> None:
        """Notes the gradients as they are now."""


NO_PROFILER = Profiler()


class StepProfiler(Profiler):
    """Filled while one step runs."""

    def __init__(self, device: Device, *, can_count: bool):
        self.device = device
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.grad_norms: dict[str, float] = {}
        self.gradient_bytes = 0
        self.kept = Kept() if can_count else None
        self.looking_seconds = 0.0  # no part of the step
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        self.device.synchronize()
        now = time.perf_counter()
        self.parts[part] += now - self.last
        self.last = now

    def counting(self, anyway: Iterable[Tensor]) -> AbstractContextManager:
        if self.kept is None:
            return nullcontext()
        self.kept.anyway = {tensor.untyped_storage().data_ptr() for tensor in anyway}
        return saved_tensors_hooks(self.kept.keep, self.kept.give_back)

    def look_at_gradients(self, model: nn.Module) -> None:
        self.lap("optimizer")
        self.grad_norms = gradient_norms(model)
        self.gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        now = time.perf_counter()
        self.looking_seconds += now - self.last
        self.last = now

    def memory(
        self, model: nn.Module, optimizer: Optimizer, batch: Iterable[Tensor]
    ) -> dict[str, int | None]:
        """Bytes by kind: of the activations the most that were held at once."""
        states = (value for state in optimizer.state.values() for value in state.values())
        return {
            "parameters": sum(p.nbytes for p in model.parameters()),
            "gradients": self.gradient_bytes,
            "optimizer": sum(value.nbytes for value in states if isinstance(value, Tensor)),
            "activations": None if self.kept is None else self.kept.most,
            "data": sum(tensor.nbytes for tensor in batch),
        }


class Kept:
    """The storages that autograd holds for the backward pass, each counted once however many tensors share it."""

    def __init__(self) -> None:
        self.anyway: set[int] = set()  # storages that are there with or without a backward pass
        self.bytes_of: dict[int, int] = {}
        self.holders: Counter[int] = Counter()
        self.held = self.most = 0

    def keep(self, tensor: Tensor) -> "Holder":
        return Holder(tensor, self)

    @staticmethod
    def give_back(holder: "Holder") -> Tensor:
        return holder.tensor

    def add(self, storage: int, num_bytes: int) -> None:
        self.holders[storage] += 1
        if self.holders[storage] == 1 and storage not in self.anyway:
            self.bytes_of[storage] = num_bytes
            self.held += num_bytes
            self.most = max(self.most, self.held)

    def remove(self, storage: int) -> None:
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self.held -= self.bytes_of.pop(storage, 0)


class Holder:
    """One tensor kept for the backward pass; autograd lets go of it when it needs it no more."""

    __slots__ = ("kept", "storage", "tensor")

    def __init__(self, tensor: Tensor, kept: Kept):
        self.tensor, self.kept = tensor, kept
        self.storage = tensor.untyped_storage().data_ptr()
        kept.add(self.storage, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        self.kept.remove(self.storage)


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """The length of each layer's gradient, the towers from their input to their output."""
    with_gradient = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if not with_gradient:
        return {}
    squares = torch.stack([grad.float().norm() for _, grad in with_gradient]).square().tolist()
    sums: dict[str, float] = {}
    for (name, _), square in zip(with_gradient, squares, strict=True):
        layer = layer_of(name)
        sums[layer] = sums.get(layer, 0.0) + square
    return {layer: float(f"{sums[layer] ** 0.5:.4g}") for layer in sorted(sums, key=place_of)}


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


def place_of(layer: str) -> tuple[int, int]:
    tower, _, part = layer.partition(".")
    block = int(part) if part.isdecimal() else 10**6 if part == "out" else -1
    return ["image", "text", "scale"].index(tower), block
