"""Accelerators for machines that have none: devices that compute on the processor, each with one peculiarity;
and `follow`, which watches every operation of a program and says where it would fail, or wait, on a real one.

Everything there lies on `cpu:0`, everything else on `cpu`: two names of one memory, which torch keeps apart.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import lapclip
from lapclip.config import PrecisionName
from lapclip.machine.device import Device

aten = torch.ops.aten
HERE, THERE = torch.device("cpu"), torch.device("cpu", 0)


@dataclass(frozen=True, eq=False)
class Elsewhere(Device):
    """An honest accelerator: right in all it does, and no faster than the processor."""

    name: str = "mps"
    is_accelerator: bool = True
    claims: tuple[PrecisionName, ...] = ("fp32",)

    @property
    def torch(self) -> torch.device:
        return THERE

    def about(self) -> str:
        return "a pretended accelerator"

    def precisions(self) -> tuple[PrecisionName, ...]:
        return self.claims


@dataclass(frozen=True, eq=False)
class Peculiar(Elsewhere):
    """One that computes the operations of a forward pass in a way of its own: the `run` of a subclass."""

    @contextmanager
    def autocast(self, precision: PrecisionName) -> Iterator[None]:
        with super().autocast(precision), EveryOperation(self.run):
            yield


@dataclass(frozen=True, eq=False)
class Slow(Peculiar):
    """Only takes orders in the forward pass; whoever waits for it waits for every operation, the backward pass too."""

    operation_seconds: float = 75e-6
    ordered: list[str] = field(default_factory=list)

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        self.ordered.append(str(operation))
        return operation(*args, **kwargs)

    def synchronize(self) -> None:
        time.sleep(3 * len(self.ordered) * self.operation_seconds)
        self.ordered.clear()


@dataclass(frozen=True, eq=False)
class Wrong(Elsewhere):
    """Computes the gradient of one parameter, drawn from the seed, too long or too short; of models placed from now on."""

    factor: float = 1.01
    seed: int = 0
    chosen: list[str] = field(default_factory=list)

    def place(self, model: nn.Module) -> nn.Module:
        name, parameter = random.Random(self.seed).choice(list(model.named_parameters()))
        self.chosen.append(name)
        parameter.register_hook(lambda gradient: gradient * self.factor)
        return super().place(model)


@dataclass(frozen=True, eq=False)
class WrongOnPermuted(Peculiar):
    """Reads images, and what attention is given, as if they lay in memory in the order of their shape."""

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        is_attention = "scaled_dot_product" in str(operation)

        def misread(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim != 4 or value.is_contiguous():
                return value
            is_image = value.shape[1] == 3
            # What is spread by an expansion has no memory of that size to be misread.
            num_bytes = value.nbytes + value.storage_offset() * value.itemsize
            if not (is_attention or is_image) or num_bytes > value.untyped_storage().nbytes():
                return value
            return value.as_strided(value.shape, torch.empty(value.shape, device="meta").stride())

        return operation(*tree_map(misread, args), **kwargs)


@dataclass(frozen=True, eq=False)
class Small(Peculiar):
    """Has no room for any tensor of the forward pass beyond some bytes."""

    limit_bytes: int = 1 << 20
    refused: list[int] = field(default_factory=list)

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        result = operation(*args, **kwargs)
        given = {memory(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.nbytes > self.limit_bytes and memory(tensor) not in given:
                self.refused.append(tensor.nbytes)
                raise torch.OutOfMemoryError(
                    f"MPS backend out of memory. Tried to allocate {tensor.nbytes} bytes."
                )
        return result


@dataclass(frozen=True, eq=False)
class Cannot(Peculiar):
    """Lacks an operation."""

    operation: str = "aten::gather"

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        if operation.name().split(".")[0] == self.operation:
            said = f"The operator '{self.operation}' is not currently implemented for the MPS device."
            raise NotImplementedError(said)
        return operation(*args, **kwargs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def memory(tensor: Tensor) -> StorageWeakRef:
    """What a tensor and all its views share; while this is kept, nothing else is ever found there."""
    return StorageWeakRef(tensor.untyped_storage())


class EveryOperation(TorchDispatchMode):
    """Hands each operation to a function instead of running it."""

    def __init__(self, run: Callable[[Any, tuple, dict], Any]):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # What the function itself looks at is no call of the program's.
        with torch._C.DisableTorchFunction():
            return self.run(func, args, kwargs or {})


# An accelerator's queue is waited for, because the size or the path of what follows depends on numbers.
WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.equal,
}  # fmt: skip
COPIES = {Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__}
WITHOUT = {torch.float64, torch.complex128}  # what Apple's graphics do not have
OURS = (str(Path(lapclip.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Finding:
    """One thing a program did with tensors that are there."""

    operation: str
    place: str  # the file and function of ours that led to it
    num_elements: int


class Follower:
    """Which tensors are there, and what was done with them that should not have been, or not often."""

    def __init__(self) -> None:
        self.mixed: list[Finding] = []
        self.float64: list[Finding] = []
        self.copied: list[Finding] = []
        # A weak reference, while it lasts, keeps the address from use.
        self.memory: set[StorageWeakRef] = set()
        # For each call under way, whether what torch makes inside of it, out of nothing, belongs there.
        self.calls: list[bool] = [False]

    def is_there(self, value: Any) -> bool:
        return isinstance(value, Tensor) and memory(value) in self.memory

    def bring(self, value: Any, operation: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.dtype in WITHOUT and not self.is_there(tensor):
                self.float64.append(finding(operation, tensor))
            self.memory.add(memory(tensor))

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Runs one operation, notes what it did, and where its results are."""
        there: list[Tensor] = []
        left: list[Tensor] = []
        for tensor in tensors_in((args, kwargs)):
            (there if self.is_there(tensor) else left).append(tensor)
        result = operation(*args, **kwargs)
        packet = operation.overloadpacket
        if packet is aten.copy_:
            if self.is_there(args[1]) and not self.is_there(args[0]):
                self.copied.append(finding(operation, args[1]))
            return result
        has_mask = packet is aten.index and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if there and (packet in WAITS or has_mask):
            self.copied.append(finding(operation, there[0]))
        if there and left and not are_numbers(operation, args, left):
            self.mixed.append(finding(operation, left[0]))
        if there or kwargs.get("device") == THERE or (not left and self.calls[-1]):
            self.bring(result, operation)
        return result


class EveryCall(TorchFunctionMode):
    """Tells a follower what operations do not show: which device was named, and numbers read from memory."""

    def __init__(self, follower: Follower):
        super().__init__()
        self.follower = follower

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, follower = kwargs or {}, self.follower
        involved = any(follower.is_there(tensor) for tensor in tensors_in((args, kwargs)))
        if func == Tensor.device.__get__:
            return THERE if involved else HERE
        if func in COPIES or func is Tensor.to:
            target = HERE if func in COPIES else target_device(follower, *args[1:], **kwargs)
            if target == HERE and follower.is_there(args[0]):
                follower.copied.append(finding(func, args[0]))
                with torch.utils._python_dispatch._disable_current_modes():
                    copy = args[0].detach().clone()
                return copy if func is Tensor.cpu else func(copy, *args[1:], **kwargs)
            if target == THERE and not follower.is_there(args[0]):
                with torch.utils._python_dispatch._disable_current_modes():
                    moved = func(*args, **kwargs).clone()
                follower.bring(moved, func)
                return moved
        is_made = func in _device_constructors()
        follower.calls.append(involved and not is_made)
        try:
            result = func(*args, **kwargs)
            if is_made and "device" in kwargs and torch.device(kwargs["device"] or HERE) == THERE:
                follower.bring(result, func)
            return result
        finally:
            follower.calls.pop()


@contextmanager
def follow() -> Iterator[Follower]:
    """Follows what is done inside; models must be placed and optimizers built inside, too."""
    follower = Follower()
    calls = EveryCall(follower)
    run_backward, group = torch.autograd._engine_run_backward, torch._C._group_tensors_by_device_and_dtype

    def run_backward_followed(*args: Any, **kwargs: Any) -> Any:
        with calls:  # inside of a call calls are not followed; but in a backward pass there is code of ours
            return run_backward(*args, **kwargs)

    def group_by_place(lists: list[list[Tensor]], *args: Any) -> dict:
        groups = group(lists, *args).items()
        is_there = any(follower.is_there(tensor) for tensor in lists[0])
        return {(THERE if is_there else device, dtype): found for (device, dtype), found in groups}

    with (
        patch.object(torch.autograd, "_engine_run_backward", run_backward_followed),
        patch.object(torch._C, "_group_tensors_by_device_and_dtype", group_by_place),
        # Recomputing compares devices that it saw inside of a call with those it sees outside.
        patch.dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns, default=lambda t: t.shape),
        EveryOperation(follower.run),
        calls,
    ):
        yield follower


def are_numbers(operation: Any, args: tuple, left: list[Tensor]) -> bool:
    """Whether those left behind are single numbers, read by an operation that takes each element by itself."""
    is_written = operation._schema.is_mutable and any(tensor is args[0] for tensor in left)
    are_single = all(tensor.ndim == 0 for tensor in left)
    return torch.Tag.pointwise in operation.tags and are_single and not is_written


def target_device(follower: Follower, *args: Any, **kwargs: Any) -> torch.device | None:
    """Where `tensor.to(...)` is to go, if it says so."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return THERE if follower.is_there(value) else HERE
        if isinstance(value, torch.device | str):
            return torch.device(value)
    return None


def finding(operation: Any, tensor: Tensor) -> Finding:
    frame = sys._getframe(1)
    while frame and (not frame.f_code.co_filename.startswith(OURS) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else ""
    name = operation.name() if hasattr(operation, "_schema") else operation.__name__
    return Finding(name, place, tensor.numel())
