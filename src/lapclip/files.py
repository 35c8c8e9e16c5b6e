"""Files on disk: atomic writes, locks, and the cache folder.

A lock is held through the operating system, so it ends with its process. The lock file also names its owner, for
people and for `lapclip runs`, and an open handle can be passed to a child process.
"""

import contextlib
import errno
import fcntl
import glob
import io
import itertools
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from lapclip.errors import UserError, code, reason_for

BLOCK = 4096  # bytes: the content stays within one block, so that it can be written on a full disk
PATIENCE_SECONDS = 3.0
TRIES = 4  # a process that reads the owner holds the lock for a moment
NOT_REGULAR = "is not a regular file"
MAX_JSON_BYTES = 10 * 2**20  # of a file of ours: more is a mistake or an attack
TOKEN, NUMBERS = os.urandom(4).hex(), itertools.count()  # make the names of temporary files unique


def open_regular(path: str | Path, flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """Opens a file; for a pipe, which would wait for its other end, or a device: an OSError (and ValueError)."""
    return open(open_handle(path, flags), mode)  # type: ignore[return-value]


def open_handle(path: str | Path, flags: int) -> int:
    # In an untrusted folder, a link may name any file of the user.
    own = os.O_NOFOLLOW if flags & os.O_RDWR else 0
    number = os.open(path, flags | own | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise unsupported(NOT_REGULAR)
    return number


def refuse_pipes(folder: Path) -> None:
    """For files that a library opens by their path."""
    for file in folder.glob("*"):
        if file.is_fifo():
            raise unsupported(f"`{file.name}` {NOT_REGULAR}")


def unsupported(why: str) -> OSError:
    """An OSError and ValueError; the reason is where the system gives one, too."""
    error = io.UnsupportedOperation(why)
    error.strerror = why
    return error


def read_bounded(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file that is not larger than expected: a sparse one can claim any size."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise unsupported("is too large")
        return file.read(max_bytes)


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file of ours that may be damaged or hostile: OSError or ValueError when it is not one."""
    try:
        content = json.loads(read_bounded(path))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    return content


WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin")  # that may hold a model
# By these, files that lapclip wrote are recognised.
HTML_SIGN = '<meta name="generator" content="lapclip report">'
PNG_SIGN = ("Software", "lapclip")


def refuse_foreign(path: Path) -> None:
    """Refuses a path where no file can be written, and to replace a page or an image that lapclip did not write."""
    is_taken = path.exists() and not (path.is_file() and os.access(path, os.R_OK | os.W_OK))
    if is_taken or not os.access(path.absolute().parent, os.W_OK):
        what = f"cannot write {code(path)}: it is not a writable file, or its folder is not writable"
        raise UserError(what, hint="name a file in an existing folder")
    if path.exists():
        with path.open("rb") as file:
            start = file.read(2000)
        if HTML_SIGN.encode() not in start and "\0".join(PNG_SIGN).encode() not in start:
            what = f"{code(path)} already exists and is not known to be written by lapclip"
            raise UserError(what, hint="name another file, or move the existing one")


class Taken(Exception):
    """Another process holds the lock."""


@dataclass(frozen=True)
class Held:
    """The content of a lock file, and whether a process holds the lock."""

    pid: int | None = None
    started: float | None = None  # when that process began, which tells it from a later one with the same id
    taken: float | None = None  # when it took the lock
    is_held: bool = False
    said: dict[str, Any] | None = None  # a message of the last owner

    @property
    def owner(self) -> int | None:
        """The process that holds the lock; the id that a killed process left behind does not count."""
        return self.pid if self.is_held else None


def read_lock(path: Path) -> Held:
    import msgspec  # as psutil below: `--help` does not need it, and would wait for it

    try:
        with open_regular(path) as file:
            held = replace(msgspec.json.decode(file.read(BLOCK), type=Held), is_held=False)
            if held.pid is not None:  # otherwise this would be in the way of a process that takes it
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    held = replace(held, is_held=True)
            return held
    except (OSError, ValueError, msgspec.MsgspecError):  # there is none, it is empty, or not one of ours
        return Held()


def take_lock(path: Path) -> int:
    """Takes a lock and returns its handle; Taken if another process holds it."""
    for tries_left in reversed(range(TRIES)):
        handle = open_handle(path, os.O_RDWR | os.O_CREAT)
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
    """The handle of a lock that the parent process took for this one."""
    if not is_same_file(handle, path):
        raise OSError(errno.EBADF, "not the lock", str(path))
    os.set_inheritable(handle, False)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while read_lock(path).pid != os.getpid() and time.monotonic() < deadline:
        time.sleep(0.01)  # until the parent has written our process id into it
    return handle


def is_same_file(handle: int, path: Path) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def write_lock_owner(handle: int, pid: int) -> None:
    """Writes the owner and the time into the lock."""
    import psutil

    write_lock(handle, {"pid": pid, "started": psutil.Process(pid).create_time(), "taken": time.time()})


def write_lock(handle: int, content: dict[str, Any]) -> None:
    """Overwrites in place, which needs no additional disk space."""
    text = json.dumps(content, ensure_ascii=False).encode(errors="replace")
    os.pwrite(handle, text.ljust(BLOCK), 0)


def release_lock(handle: int, *, keep: bool = False) -> None:
    """Releases the lock, and clears its content unless `keep`."""
    if not keep:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
    os.close(handle)


@contextlib.contextmanager
def atomic_path(path: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """A temporary file or folder beside `path`, which replaces it when the block ends; after an error it is removed.

    A folder that exists may only be written again with the same content: its files are replaced one after the other.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{TOKEN}-{next(NUMBERS)}.writing")
    with writing(path):
        try:
            remove_abandoned(path.parent, glob.escape(path.name))
            if is_folder:
                beside.mkdir(parents=True)
            else:  # never through a link, which an untrusted folder may contain
                os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
            yield beside
            for made in (*beside.rglob("*"), beside):
                sync(made)
            try:
                beside.replace(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                replace_files(beside, path)
            sync(path.parent)
        finally:
            remove(beside)


def replace_files(new: Path, old: Path) -> None:
    """Moves the files of a folder into another: a folder that has files cannot be replaced at once."""
    for file in filter(Path.is_file, list(new.rglob("*"))):
        target = old / file.relative_to(new)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        sync(target.parent)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Removes what killed processes left of files with such names; those being written now are left alone."""
    import psutil

    for found in folder.glob(f".{pattern}.*.writing"):
        named = re.fullmatch(r"\..+\.(\d{1,9})(\.\w+-\d+)?\.writing", found.name, re.DOTALL)
        pid = int(named[1]) if named else 0
        if TOKEN not in found.name if pid == os.getpid() else pid and not psutil.pid_exists(pid):
            remove(found)


def write_atomically(path: Path, content: str | bytes) -> None:
    """A reader sees the old content or the new one, also after a crash."""
    with atomic_path(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there and may be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Removes a folder that others may be looking for; what has its name is whole."""
    doomed = path.with_name(f".removed-{path.name}")
    with writing(path):
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write in the block into a sentence."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> UserError:
    hint = "choose a writable folder; `--resume` continues a run that had begun"
    if path.is_relative_to(cache_folder()):
        hint = "set LAPCLIP_CACHE to a folder on another disk"
    what = f"cannot write `{path}`: {reason_for(error).lower()}"
    return UserError(what, hint=f"free some disk space, or {hint}")


def cache_folder() -> Path:
    """The folder of what can be recomputed: `$LAPCLIP_CACHE`, or one in the user's cache folder."""
    if asked := os.environ.get("LAPCLIP_CACHE"):
        return Path(asked).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lapclip"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lapclip"
