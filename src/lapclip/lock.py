"""A file that one process at a time holds. The system keeps the lock, so that it ends with the process.

The file tells people, and `lapclip runs`, whose it is. It can be handed to a process that is started with it open, so
that nobody comes in between.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

BLOCK = 4096  # bytes: what is written stays in the file's one block, and so can be on a full disk too
PATIENCE_SECONDS = 3.0
TRIES = 4  # whoever looks for the owner holds the lock for a moment


class Taken(Exception):
    """Another process holds the lock."""


@dataclass(frozen=True)
class Held:
    """What stands in a lock file, and whether the system says that somebody holds it."""

    pid: int | None = None
    started: float | None = None  # when that process began, which tells it from another with its number
    taken: float | None = None  # when it took the lock
    is_held: bool = False
    said: dict[str, Any] | None = None  # what was left there for others

    @property
    def owner(self) -> int | None:
        """The process that holds it; what a killed one left in the file does not count."""
        return self.pid if self.is_held else None


def read_lock(path: Path) -> Held:
    try:
        with path.open("rb") as file:
            content = file.read(BLOCK)
            said = json.loads(content) if content.strip() else {}
            if not isinstance(said, dict):
                return Held()
            is_held = False
            if "pid" in said:  # who looks at an empty one must not be in the way of who takes it
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    is_held = True
            left = said.get("said")
            return Held(
                pid=int(said["pid"]) if "pid" in said else None,
                started=float(said["started"]) if "started" in said else None,
                taken=float(said["taken"]) if "taken" in said else None,
                is_held=is_held,
                said=left if isinstance(left, dict) else None,
            )
    except (OSError, ValueError, TypeError):  # nobody's; or not written by us
        return Held()


def take(path: Path) -> int:
    """The handle of a lock that nobody else holds."""
    for tries_left in reversed(range(TRIES)):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_same_file(handle, path):
                return handle
        except BlockingIOError:
            if not tries_left or read_lock(path).owner is not None:
                os.close(handle)
                raise Taken from None
        os.close(handle)
        time.sleep(0.05)
    raise FileNotFoundError(errno.ENOENT, "it was removed", str(path))


def adopt(handle: int, path: Path) -> int:
    """The handle of a lock that the process that started this one took for it."""
    if not is_same_file(handle, path):
        raise OSError(errno.EBADF, "not the lock", str(path))
    os.set_inheritable(handle, False)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while read_lock(path).pid != os.getpid() and time.monotonic() < deadline:
        time.sleep(0.01)  # so that the other one writes our name there before we write anything
    return handle


def is_same_file(handle: int, path: Path) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def write_owner(handle: int, pid: int) -> None:
    """Says in the lock whose it is, and since when."""
    write(handle, {"pid": pid, "started": psutil.Process(pid).create_time(), "taken": time.time()})


def write(handle: int, content: dict[str, Any]) -> None:
    """Overwrites in place, so that it needs no room where something stood before."""
    text = json.dumps(content, ensure_ascii=False).encode(errors="replace")
    os.pwrite(handle, text.ljust(BLOCK), 0)


def release(handle: int, *, keep: bool = False) -> None:
    """Lets go of the lock; what stands in it goes, unless it is meant for others."""
    if not keep:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
    os.close(handle)
