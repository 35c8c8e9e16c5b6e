"""What a step runs on. The only file that names a backend: the rest of lapclip does not know."""

import ctypes
import platform
from dataclasses import dataclass

import torch

from lapclip.config import DeviceName
from lapclip.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class Device:
    """A place for tensors, and the few things that differ between places."""

    name: DeviceName

    @property
    def torch(self) -> torch.device:
        return torch.device(self.name)

    def synchronize(self) -> None:
        """Waits until everything asked of the device is done, so that a clock means something."""
        if self.name == "cuda":
            torch.cuda.synchronize()
        elif self.name == "mps":
            torch.mps.synchronize()


def pick_device(name: DeviceName) -> tuple[Device, str]:
    """The device and the reason for it. `auto` stays on the processor; an accelerator must be asked for by name."""
    present = {"cpu": True, "mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    if name == "auto":
        others = [f"`--device {other}`" for other, is_there in present.items() if is_there and other != "cpu"]
        return (
            Device("cpu"),
            f"the processor; {' and '.join(others)} would use the accelerator"
            if others
            else "the only device here",
        )
    if not present[name]:
        there = ", ".join(f"`{other}`" for other, is_there in present.items() if is_there)
        raise UserError(
            f"there is no device `{name}` here, or this PyTorch cannot use it; there is {there}",
            hint="leave `--device` away",
        )
    return Device(name), "asked for"


def set_up_process(threads: int) -> None:
    """Threads, and on glibc an allocator that keeps what it frees: otherwise each step faults its memory in again."""
    torch.set_num_threads(threads)
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def release_memory() -> None:
    """Gives back to the system what was freed, which the allocator otherwise keeps for the next step."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def default_threads() -> int:
    """What torch chose: the performance cores on a Mac, the cores this process may use elsewhere."""
    return torch.get_num_threads()
