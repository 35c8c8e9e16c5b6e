"""What a step runs on. The only file that runs code for a backend.

A device is requested by name (`device_named`); what a backend does not override works as on the CPU.
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lapclip.config import DeviceName, PrecisionName
from lapclip.errors import UserError
from lapclip.machine.hardware import memory_limit_bytes, own_peak_bytes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The last is oneDNN's, which reports any failure to create a kernel like this; it is nearly always memory.
OUT_OF_MEMORY = (
    "can't allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED", "Invalid buffer size",
    "could not create a primitive",
)  # fmt: skip

# Torch's own choice, before another is set: performance cores on a Mac, elsewhere the cores this process may use.
DEFAULT_THREADS = torch.get_num_threads()

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Device:
    """A place for tensors, and the few things that differ between places. This class is the CPU."""

    name: str
    is_accelerator: bool = False

    @property
    def torch(self) -> torch.device:
        return torch.device(self.name)

    @property
    def is_present(self) -> bool:
        return True

    def about(self) -> str:
        """What it is, for people."""
        return f"processor, {torch.backends.cpu.get_cpu_capability()}"

    def precisions(self) -> tuple[PrecisionName, ...]:
        """What it claims to have hardware for; whether that is correct and fast is measured."""
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        has_fp16 = torch.cpu._is_amx_fp16_supported()
        return ("fp32", *(("bf16",) if has_bf16 else ()), *(("fp16",) if has_fp16 else ()))

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch)

    def place(self, model: Module) -> Module:
        return model.to(self.torch)

    def autocast(self, precision: PrecisionName) -> AbstractContextManager:
        """Computes the block in this precision; weights and sums stay in fp32."""
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.torch.type, dtype=DTYPES[precision])

    def synchronize(self) -> None:
        """Waits until the device has finished its queue, so that a clock measures the work."""

    def free_bytes(self, available_bytes: int) -> int:
        """Free memory of the device; that of the machine, where both share it."""
        return available_bytes

    def memory_bytes(self) -> int:
        """Total memory where tensors are."""
        return memory_limit_bytes()

    def limit_memory(self, num_bytes: int) -> None:
        """Makes the device refuse to allocate more, where it can."""

    def peak_bytes(self) -> int:
        """Peak memory where tensors are."""
        return own_peak_bytes()

    def release_memory(self) -> None:
        """Returns freed memory to the system; otherwise the allocator keeps it for the next step."""
        if has_glibc():
            ctypes.CDLL(None).malloc_trim(0)


class AppleGPU(Device):
    """Shares the machine's memory. bf16 came with macOS 14; float64 does not exist; no memory is pinned for it."""

    @property
    def is_present(self) -> bool:
        return torch.backends.mps.is_available()

    def about(self) -> str:
        return "Apple graphics, memory shared with the processor"

    def precisions(self) -> tuple[PrecisionName, ...]:
        return ("fp32", "fp16", "bf16") if torch.backends.mps.is_macos_or_newer(14, 0) else ("fp32", "fp16")

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def limit_memory(self, num_bytes: int) -> None:
        share = num_bytes / torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(min(max(share, 0.01), 2.0))

    def peak_bytes(self) -> int:
        return torch.mps.driver_allocated_memory()

    def release_memory(self) -> None:
        torch.mps.empty_cache()


class NvidiaGPU(Device):
    """Has memory of its own."""

    @property
    def is_present(self) -> bool:
        return torch.cuda.is_available()

    def about(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch)
        return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"

    def precisions(self) -> tuple[PrecisionName, ...]:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("fp32", "bf16", "fp16") if has_bf16 else ("fp32", "fp16")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_bytes(self, available_bytes: int) -> int:
        return torch.cuda.mem_get_info()[0]

    def memory_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def limit_memory(self, num_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(min(max(num_bytes / self.memory_bytes(), 0.01), 1.0))

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


DEVICES: dict[str, Device] = {
    "cpu": Device("cpu"),
    "mps": AppleGPU("mps", is_accelerator=True),
    "cuda": NvidiaGPU("cuda", is_accelerator=True),
}


def processor() -> Device:
    return DEVICES["cpu"]


def present_devices() -> Iterator[Device]:
    """The CPU first."""
    return (device for device in DEVICES.values() if device.is_present)


def device_named(name: DeviceName | str) -> Device:
    """The device of that name, which must exist; `auto` is the CPU where nothing was measured."""
    if name == "auto":
        return processor()
    device = DEVICES.get(name)
    if device is None or not device.is_present:
        there = ", ".join(f"`{other.name}`" for other in present_devices())
        hint = "omit `--device`, or pass `--device auto` to use the fastest device that computes correctly"
        what = f"there is no device `{name}`, or this PyTorch cannot use it; available: {there}"
        raise UserError(what, hint=hint)
    return device


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether a step ran out of memory, in the words of any backend."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    )


def no_memory_left(error: BaseException) -> UserError:
    said = str(error).strip().partition("\n")[0][:120]
    what = "there is not enough memory for even one pair at a time" + (f" ({said})" if said else "")
    return UserError(what, hint="close other programs, or choose a smaller `--size`")


def has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def set_up_process(threads: int, *, keep_memory: bool = True) -> None:
    """Sets threads, and on glibc whether the allocator keeps freed memory: otherwise each step faults it in again.

    Without `keep_memory` the limits are those glibc itself reaches once a block of 32 MB was freed.
    """
    torch.set_num_threads(threads)
    if has_glibc():
        libc = ctypes.CDLL(None)
        # Old ones refuse more than 32 MB; then nothing is changed.
        if libc.mallopt(M_MMAP_THRESHOLD, 1 << 30 if keep_memory else 1 << 25):
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1 if keep_memory else 1 << 26)
        libc.mallopt(M_ARENA_MAX, 1)  # threads share one heap: those of their own shrink after each step
