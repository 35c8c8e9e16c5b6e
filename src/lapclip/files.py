"""Files on disk: atomic writes, locks, and the cache folder.

A lock is held through the operating system, so it ends with its process. The lock file also names its owner, for
people and for `lapclip runs`, and an open handle can be passed to a child process.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lapclip.errors import UserError

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


def take_lock(path: Path) -> int:
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


def adopt_lock(handle: int, path: Path) -> int:
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


def write_lock_owner(handle: int, pid: int) -> None:
    """Says in the lock whose it is, and since when."""
    write_lock(handle, {"pid": pid, "started": psutil.Process(pid).create_time(), "taken": time.time()})


def write_lock(handle: int, content: dict[str, Any]) -> None:
    """Overwrites in place, so that it needs no room where something stood before."""
    text = json.dumps(content, ensure_ascii=False).encode(errors="replace")
    os.pwrite(handle, text.ljust(BLOCK), 0)


def release_lock(handle: int, *, keep: bool = False) -> None:
    """Lets go of the lock; what stands in it goes, unless it is meant for others."""
    if not keep:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
    os.close(handle)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it when the block ends; an error leaves `path` unchanged."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        remove_abandoned(path)
        # Never through a link: a folder that a stranger made may have one there.
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """A reader sees the old content or the new one, also after a crash."""
    with atomic_path(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def remove_abandoned(path: Path) -> None:
    """Temporary files of this name whose process is gone, or is this one."""
    for found in path.parent.glob(f".{glob.escape(path.name)}.*writing"):
        pid = found.name.removeprefix(f".{path.name}.").removesuffix("writing").rstrip(".")
        if not pid.isdecimal() or int(pid) == os.getpid() or not psutil.pid_exists(int(pid)):
            found.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write `{path}`: {(error.strerror or str(error)).lower()}",
        hint="free some disk space, or choose a folder you may write to; `--resume` continues a run that had begun",
    )


def cache_folder() -> Path:
    """Where what can be made again is kept: `$LAPCLIP_CACHE`, or lapclip's place in the user's cache folder."""
    if asked := os.environ.get("LAPCLIP_CACHE"):
        return Path(asked).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lapclip"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lapclip"
