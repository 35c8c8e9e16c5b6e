"""Starts a training that goes on without the terminal it was started from.

The run's lock is taken here and handed to the new process while it is held, so that from the first moment the run is
owned, and nobody comes in between.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from lapclip.config import SETTINGS
from lapclip.errors import UserError
from lapclip.files import cannot_write, open_regular
from lapclip.runs.run import Run

# Until it listens to them: what is asked of it while it starts is not lost.
BLOCKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def log_of(run: Run) -> Path:
    """What it would have said on a terminal."""
    return run.path / "output.log"


def start_training(run: Run, arguments: Sequence[str]) -> int:
    """Starts `lapclip train` with these arguments, as the owner of a run, in a session of its own; its process."""
    run.take_lock()
    assert run.handle is not None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        with open_regular(log_of(run), os.O_RDWR | os.O_APPEND | os.O_CREAT, "ab") as log:
            log.write(f"lapclip train {shlex.join(arguments)}\n".encode(errors="surrogateescape"))
            log.flush()
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            own = [sys.executable, "-P", "-m", "lapclip", "train", *arguments, f"--lock-handle={run.handle}"]
            process = subprocess.Popen(own, start_new_session=True, pass_fds=[run.handle], **streams)  # noqa: S603
        run.hand_over(process.pid)
    except OSError as error:
        run.release()
        raise cannot_write(log_of(run), error) from None
    except psutil.Error:  # it is gone already, and its log says why
        run.release()
        what = "training ended immediately after it started"
        raise UserError(what, hint=f"`{log_of(run)}` says why") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.returncode = 0  # it outlives us, and nobody waits for it
    return process.pid


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Settings as they are typed."""
    arguments = []
    for name, value in flags.items():
        flag = SETTINGS[name].flag
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            arguments.append(f"{flag}={value}")
    return arguments
