"""Shards as a person writes them, with braces, globs, URLs and `::` between several; and parts of files by URL."""

import glob
import os
import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any
from urllib.parse import unquote

import bracex

from lapclip.errors import MissingPackage, UserError, shortened

MAX_SHARDS = 100_000
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
# Protocols that would run a program, or open another file within one: shards are read from where they lie.
REFUSED = {
    "pipe", "simplecache", "filecache", "blockcache", "cached", "reference", "zip", "tar", "libarchive",
    "dir", "dask", "generic", "data", "git", "dvc", "jlab", "jupyter", "async_wrapper", "asyncwrapper", "asynclocal",
}  # fmt: skip
BETWEEN = re.compile(r"::(?![0-9a-fA-F:.]*\])")  # not within an IPv6 address
WEB = ("http://", "https://")
COPY_SHARDS = "copy the shards to a folder and pass `folder/*.tar`"

BLOCK_BYTES = 8 * 2**20  # training reads neighbours together, so one request brings many images
NUM_BLOCKS = 24  # kept, 192 MB in all: eight runs of neighbours lie in up to 16, and the last ones overlap
NUM_TRIES = 3  # of a request; connections falter
# Where the file systems of fsspec say that a file has changed.
MARKS = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "last_modified", "mtime", "created")


def is_shards(name: str) -> bool:
    """Whether a source's name is that of tar shards; decided by the name alone."""
    parts = [without_query(part).rstrip("}").lower() for part in BETWEEN.split(name)]
    return all(part.endswith((".tar", *COMPRESSED)) for part in parts) or name.lower().startswith("pipe:")


def is_url(path: str) -> bool:
    return "://" in path


def without_query(url: str) -> str:
    return re.split(r"[?#]", url, maxsplit=1)[0] if url.startswith(WEB) else url


def expand(pattern: str) -> list[str]:
    """Every shard that a pattern means, each once; UserError when there is none, or far too many."""
    shards: dict[str, None] = {}
    try:
        for written in BETWEEN.split(pattern):
            refuse(written, pattern)
            is_file = written.lower().startswith("file://")
            part = unquote(written[len("file://") :].removeprefix("localhost")) if is_file else written
            is_literal = os.path.exists(part)
            for name in [part] if is_literal else bracex.expand(part, keep_escapes=True, limit=MAX_SHARDS):
                shards.update(dict.fromkeys(matching(name)))
                if len(shards) > MAX_SHARDS:
                    raise bracex.ExpansionLimitException
    except (bracex.ExpansionLimitException, RecursionError):
        what = f"`{shortened(pattern)}` matches more than {MAX_SHARDS:,} shards"
        raise UserError(what, hint="check the numbers in its braces") from None
    if not shards:
        raise UserError(f"no shard matches `{pattern}`", hint="pass existing shards, such as `folder/*.tar`")
    return list(shards)


def refuse(part: str, pattern: str) -> None:
    if without_query(part).rstrip("}").lower().endswith(COMPRESSED):
        hint = "unpack it first, for example with `gunzip`, and pass the `.tar`"
        raise UserError(f"`{part}` is compressed, so single images cannot be read", hint=hint)
    protocol, colon, _ = part.lower().partition(":")
    if protocol in REFUSED and (colon or part != pattern):
        what = f"`{part}` is not opened: `{protocol}:` would run a program or open a file within another"
        raise UserError(what, hint=COPY_SHARDS)


def matching(name: str) -> list[str]:
    """The shards of a name without braces: those that its stars stand for, or itself."""
    if not is_url(name):
        if os.path.isdir(name):
            name = os.path.join(glob.escape(name), "*.tar")
        if os.path.exists(name) or not glob.has_magic(name):
            return [os.path.normpath(name)]
        found = sorted(islice(glob.iglob(name, recursive=True), MAX_SHARDS + 1))
        return [os.path.normpath(path) for path in found if not os.path.isdir(path)]
    if "*" not in name:
        return [name]
    if name.startswith(WEB):
        hint = "write out the numbers, such as `shard-{00000..00012}.tar`"
        raise UserError(f"`{name}` cannot be listed, because web servers do not list their files", hint=hint)
    files, path = filesystem(name)
    try:
        return [str(files.unstrip_protocol(found)) for found in sorted(attempt(name, files.glob, path))]
    except OSError as error:
        raise UserError(str(error), hint="check the URL and your access to it") from error


class NoRanges(OSError):
    """The server sends whole files only."""


@dataclass
class Block:
    """A part of a file, once it was fetched."""

    data: bytes = b""
    lock: Lock = field(default_factory=Lock)


class RemoteFiles:
    """Parts of files by URL, through fsspec; every failure is an OSError in words.

    It can be used by several threads, and sent to another process, where it begins empty. fsspec's own block cache has
    neither one bound for all files nor one request for several threads that need the same block.
    """

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[str, int], Block] = OrderedDict()
        self.infos: dict[str, dict[str, Any]] = {}
        self.lock = Lock()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RemoteFiles, ()

    def length(self, url: str) -> int:
        size = self.info(url).get("size")
        if size is None or not self.info(url).get("partial", True):
            raise NoRanges("the server does not support range requests")
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
        """Changes whenever the file may have changed; empty when it is gone. Asked for once."""
        try:
            info = self.info(url)
        except OSError:
            return ""
        return f"{info.get('size')} {next((info[key] for key in MARKS if info.get(key)), '')}"

    def info(self, url: str) -> dict[str, Any]:
        if url not in self.infos:
            files, path = filesystem(url)
            self.infos[url] = attempt(url, files.info, path)
        return self.infos[url]

    def block(self, url: str, number: int) -> bytes:
        """One block; several threads that need it wait for the same request."""
        with self.lock:
            block = self.blocks.setdefault((url, number), Block())
            self.blocks.move_to_end((url, number))
            if len(self.blocks) > NUM_BLOCKS:
                self.blocks.popitem(last=False)
        with block.lock:
            if not block.data:
                start, length = number * BLOCK_BYTES, self.length(url)
                block.data = attempt(url, fetch, url, start, min(start + BLOCK_BYTES, length), length)
        return block.data


def fetch(url: str, start: int, end: int, length: int) -> bytes:
    files, path = filesystem(url)
    if not url.startswith(WEB):
        return bytes(files.cat_file(path, start=start, end=end))
    # fsspec's `cat_file` would take a whole file from a server that ignores ranges; its file object refuses.
    with files.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none", size=length) as file:
        file.seek(start)
        try:
            return bytes(file.read(end - start))
        except ValueError as error:
            raise NoRanges("the server does not support range requests") from error


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
    """fsspec's file system of a URL, and the path there."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        return url_to_fs(url)
    except ImportError as error:  # fsspec, or what it needs for this protocol
        if url.startswith(WEB):
            raise MissingPackage(f"`{url}` cannot be opened: a package is missing", "data") from None
        raise UserError(f"`{url}` cannot be opened: a package is missing", hint=str(error)) from None
    except ValueError as error:
        raise UserError(f"`{url}` cannot be opened: {error}", hint=COPY_SHARDS) from None
