"""The processor behind a wait, for tests of what is timed around blocks."""

import time

import torch

from lapclip.machine.device import Device


class SlowToAnswer(Device):
    """The processor behind a wait that no small operation is worth: what an accelerator is to whoever waits each time."""

    wait_seconds = 0.012

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        time.sleep(self.wait_seconds)
