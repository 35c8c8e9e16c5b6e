"""Devices: one asked for by name must be there; the process is set up as told."""

import subprocess
import sys

import pytest
import torch
from conftest import environment

from lapclip.device import Device, pick_device
from lapclip.errors import UserError
from lapclip.machine import peak_memory_bytes, read_machine


def test_auto_says_why():
    device, reason = pick_device("auto")
    assert device == Device("cpu") and reason


@pytest.mark.parametrize("name", ["mps", "cuda"])
def test_a_missing_device_is_never_a_silent_fall_to_the_processor(name):
    if (torch.backends.mps if name == "mps" else torch.cuda).is_available():
        assert pick_device(name) == (Device(name), "asked for")
        return
    with pytest.raises(UserError, match=f"no device `{name}`"):
        pick_device(name)


def test_threads_are_set_and_freed_memory_is_kept_until_released():
    program = (
        "import torch, psutil, sys; from lapclip.device import set_up_process, release_memory\n"
        "set_up_process(1); assert torch.get_num_threads() == 1\n"
        "rss = lambda: psutil.Process().memory_info().rss\n"
        "before = rss(); block = torch.ones(100_000_000); del block; kept = rss(); release_memory(); after = rss()\n"
        "print(kept - before, after - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    kept, after = map(int, done.stdout.split())
    if sys.platform == "linux":
        assert kept > 300e6 > 100e6 > after


def test_the_machine_is_read_without_torch():
    machine = read_machine()
    assert machine.chip and machine.num_cores >= 1 and machine.memory_bytes > machine.available_bytes > 0


def test_peak_memory_counts_what_was_held_and_given_back():
    before = peak_memory_bytes()
    block = bytearray(b"x" * 300_000_000)
    del block
    assert peak_memory_bytes() > before + 200e6 or before > 1e9, (
        "a suite that has held more already shows nothing"
    )
