"""Devices: one asked for by name must be there; the process is set up as told."""

import subprocess
import sys

import pytest
import torch
from conftest import environment

from lapclip.errors import UserError
from lapclip.machine.device import DEVICES, device_named, present_devices, ran_out_of_memory


def test_a_missing_device_is_never_a_silent_fall_to_the_processor_which_comes_first():
    assert next(iter(present_devices())).name == "cpu" == device_named("auto").name
    for name in ("mps", "cuda"):
        if DEVICES[name].is_present:
            assert device_named(name).name == name
            continue
        with pytest.raises(UserError, match=f"no device `{name}`"):
            device_named(name)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), RuntimeError("std::bad_alloc"),
     RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1 GB)")],
    ids=str,
)  # fmt: skip
def test_every_backend_s_word_for_no_memory_is_understood_and_other_errors_are_not_taken_for_it(error):
    assert ran_out_of_memory(error)
    assert not ran_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert ran_out_of_memory(caught.value), "the real thing"


def test_threads_are_set_and_freed_memory_is_kept_until_released():
    program = (
        "import torch, psutil, sys; from lapclip.machine.device import set_up_process, processor\n"
        "set_up_process(1); assert torch.get_num_threads() == 1\n"
        "rss = lambda: psutil.Process().memory_info().rss\n"
        "before = rss(); block = torch.ones(100_000_000); del block; kept = rss(); processor().release_memory(); after = rss()\n"
        "print(kept - before, after - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    kept, after = map(int, done.stdout.split())
    if sys.platform == "linux":
        assert kept > 300e6 > 100e6 > after
