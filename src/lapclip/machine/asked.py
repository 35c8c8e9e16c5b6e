"""Programs asked in the background: started now and then, their answer taken at a later call, so that nobody waits."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

PAUSE_SECONDS = 10.0  # between two questions to one program
PAUSE_AFTER_FAILURE_SECONDS = 60.0
PATIENCE_SECONDS = 5.0  # then it is killed
OLD_SECONDS = 300.0  # an answer older than this says nothing about now; steps may take minutes


def always() -> bool:
    return True


class Asked:
    """One program with what it last said; a program that is not installed never says anything."""

    def __init__(
        self,
        command: list[str],
        parse: Callable[[str], dict[str, Any]],
        *,
        may_ask: Callable[[], bool] = always,
    ) -> None:
        self.program = shutil.which(command[0])
        self.arguments = command[1:]
        self.parse = parse
        self.may_ask = may_ask
        self.process: subprocess.Popen[bytes] | None = None
        self.output: IO[bytes] | None = None
        self.started = self.ask_again = self.answered = float("-inf")
        self.answer: dict[str, Any] = {}

    def latest(self, now: float) -> dict[str, Any]:
        """What it last said."""
        if self.process:
            self.collect(self.process, now)
        return self.answer if now - self.answered < OLD_SECONDS else {}

    def is_due(self, now: float) -> bool:
        return self.program is not None and self.process is None and now >= self.ask_again

    def start(self, now: float) -> None:
        self.ask_again = now + PAUSE_SECONDS
        if self.program is None or not self.may_ask():
            return
        # A file, because a program whose pipe is full waits until somebody reads.
        self.output = self.output or tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 `close` closes it
        self.output.seek(0)
        self.output.truncate()
        # Without closing files it is spawned, not forked: forking a process with much memory takes long.
        self.process = subprocess.Popen(  # noqa: S603 found in the person's own PATH
            [self.program, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.DEVNULL,
            close_fds=False,
        )
        self.started = now

    def collect(self, process: subprocess.Popen[bytes], now: float) -> None:
        code = process.poll()
        if code is None:
            if now - self.started > PATIENCE_SECONDS:
                process.kill()
            return
        self.process, self.answer, self.answered = None, {}, self.started
        if code == 0 and self.output:
            self.output.seek(0)
            self.answer = self.parse(self.output.read().decode(errors="replace"))
        else:
            self.ask_again = self.started + PAUSE_AFTER_FAILURE_SECONDS

    def close(self) -> None:
        if self.process:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1)
            self.process = None
        if self.output:
            self.output.close()
        self.program = self.output = None

    def __del__(self) -> None:
        if hasattr(self, "output"):
            self.close()


def ask_now(command: list[str]) -> str:
    """What a program says, waiting for it; nothing if it is missing, fails or takes long."""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(  # noqa: S603 found in the person's own PATH
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_SECONDS, check=True
        )
        return said.stdout.decode(errors="replace")
    return ""
