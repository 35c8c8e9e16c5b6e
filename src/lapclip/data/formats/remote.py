"""Parts of large files, by offset and size: of local ones directly, of far ones in blocks that are kept for a while.

Both can be used by several threads, and sent to another process, where they begin with nothing open.
"""

import os
import stat
import time
from collections import OrderedDict
from concurrent.futures import Future
from threading import Lock
from typing import Any

from lapclip.errors import UserError

NUM_OPEN = 16  # local files at a time
STAMP_SECONDS = 1.0  # that a local file's state is believed for
BLOCK_BYTES = 8 * 2**20  # training reads neighbours together, so one request brings many images
NUM_BLOCKS = 24  # kept, 192 MB in all: eight runs of neighbours lie in up to 16, and the last ones overlap
NUM_TRIES = 3  # of a request; lines falter


class NoRanges(OSError):
    """The server sends whole files only."""


class Descriptor:
    """An open file, closed once the last thread that reads from it lets go."""

    def __init__(self, path: str):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe must not block
        found = os.fstat(self.number)
        self.length = found.st_size
        if not stat.S_ISREG(found.st_mode):
            raise OSError("is not a regular file")

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class LocalFiles:
    """Parts of local files."""

    def __init__(self) -> None:
        self.opened: OrderedDict[str, Descriptor] = OrderedDict()
        self.stamps: dict[str, tuple[float, str]] = {}
        self.lock = Lock()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return LocalFiles, ()

    def length(self, path: str) -> int:
        return self.descriptor(path).length

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Fewer bytes than asked for only at the file's end."""
        held = self.descriptor(path)  # by a name: otherwise another thread may close it before it is read
        return os.pread(held.number, size, offset)

    def stamp(self, path: str) -> str:
        """Changes whenever the file may have; empty when it is gone."""
        until, known = self.stamps.get(path, (0.0, ""))
        if time.monotonic() < until:
            return known
        try:
            found = os.stat(path)
            known = f"{found.st_size} {found.st_mtime_ns}"
        except OSError:
            known = ""
        self.stamps[path] = (time.monotonic() + STAMP_SECONDS, known)
        return known

    def descriptor(self, path: str) -> Descriptor:
        with self.lock:
            if path not in self.opened:
                self.opened[path] = Descriptor(path)
                if len(self.opened) > NUM_OPEN:
                    self.opened.popitem(last=False)
            self.opened.move_to_end(path)
            return self.opened[path]


class RemoteFiles:
    """Parts of files by URL, through fsspec; every failure is an OSError in words."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self.infos: dict[str, dict[str, Any]] = {}
        self.lock = Lock()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RemoteFiles, ()

    def length(self, url: str) -> int:
        size = self.info(url).get("size")
        if size is None or not self.info(url).get("partial", True):
            raise NoRanges("the server sends no parts of files")
        return int(size)

    def read(self, url: str, offset: int, size: int) -> bytes:
        """Fewer bytes than asked for only at the file's end."""
        end = min(offset + size, self.length(url))
        parts = []
        while offset < end:
            number, start = divmod(offset, BLOCK_BYTES)
            part = self.block(url, number)[start : start + end - offset]
            if not part:
                raise OSError(f"`{url}` ended early")
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stamp(self, url: str) -> str:
        """Changes whenever the file may have; empty when it is gone. Asked for once."""
        try:
            info = self.info(url)
        except OSError:
            return ""
        marks = (
            "ETag",
            "etag",
            "md5Hash",
            "Last-Modified",
            "LastModified",
            "last_modified",
            "mtime",
            "created",
        )
        mark = next((info[key] for key in marks if info.get(key)), "")
        return f"{info.get('size')} {mark}"

    def info(self, url: str) -> dict[str, Any]:
        if url not in self.infos:
            files, path = filesystem(url)
            self.infos[url] = attempt(url, files.info, path)
        return self.infos[url]

    def block(self, url: str, number: int) -> bytes:
        """One block; several threads that want it wait for the same request."""
        with self.lock:
            future = self.blocks.get((url, number))
            is_mine = future is None
            if future is None:
                future = self.blocks[url, number] = Future()
                if len(self.blocks) > NUM_BLOCKS:
                    self.blocks.popitem(last=False)
            self.blocks.move_to_end((url, number))
        if is_mine:
            try:
                start = number * BLOCK_BYTES
                end = min(start + BLOCK_BYTES, self.length(url))
                future.set_result(attempt(url, fetch, url, start, end, self.length(url)))
            except BaseException as error:
                with self.lock:
                    self.blocks.pop((url, number), None)
                future.set_exception(error)
        return future.result()


def fetch(url: str, start: int, end: int, length: int) -> bytes:
    files, path = filesystem(url)
    if not url.startswith(("http://", "https://")):
        return bytes(files.cat_file(path, start=start, end=end))
    # fsspec's `cat_file` would take a whole file from a server that ignores ranges; its file object refuses.
    with files.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none", size=length) as file:
        file.seek(start)
        try:
            return bytes(file.read(end - start))
        except ValueError as error:
            raise NoRanges("the server sends no parts of files") from error


def attempt(url: str, action: Any, *arguments: Any) -> Any:
    """Does something over the network, again if it fails; each protocol's package has errors of its own."""
    for left in reversed(range(NUM_TRIES)):
        try:
            return action(*arguments)
        except (NoRanges, UserError):
            raise
        except Exception as error:
            cause = error.__cause__ or error  # fsspec says "not found" for every failure over HTTP
            status = getattr(cause, "status", None)
            if status in (404, 410) or (isinstance(error, FileNotFoundError) and cause is error):
                raise FileNotFoundError(f"`{url}` is missing") from error
            if left == 0 or (isinstance(status, int) and 400 <= status < 500):
                raise OSError(f"`{url}` cannot be read: {str(cause) or type(cause).__name__}") from error
            time.sleep(0.2)
    raise AssertionError("the last try returns or raises")


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's way to a URL's files, and the path there; UserError with what to install."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(
            f"`{url}` cannot be opened without fsspec", hint="pip install 'lapclip[data]'"
        ) from None
    try:
        return url_to_fs(url)
    except ImportError as error:
        raise UserError(
            f"`{url}` cannot be opened: a package is missing",
            hint="pip install 'lapclip[data]'" if url.startswith("http") else str(error),
        ) from None
    except ValueError as error:
        raise UserError(
            f"`{url}` cannot be opened: {error}",
            hint="copy the shards to a folder and give `folder/*.tar`",
        ) from None
