"""Keeps a Mac from falling asleep while something runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE_SECONDS = 5.0


@contextmanager
def keep_awake() -> Iterator[None]:
    """On macOS the machine does not sleep for want of somebody typing; elsewhere nothing is done."""
    process = start_caffeinate() if sys.platform == "darwin" else None
    try:
        yield
    finally:
        if process:
            end(process)


def start_caffeinate() -> subprocess.Popen[bytes] | None:
    program = shutil.which("caffeinate")
    if program is None:
        return None
    with suppress(OSError):
        # It watches our process, so that it ends even if we are killed; in a session of its own a Ctrl-C meant for us
        # does not reach it.
        return subprocess.Popen(  # noqa: S603 found in the person's own PATH
            [program, "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
