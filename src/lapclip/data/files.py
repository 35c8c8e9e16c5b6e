"""Images as files, and the one rule about them: nothing outside the source's own folders is ever read."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

# What images are called; whether they are images is seen when they are opened.
SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".png",
    ".webp",
    ".gif",
    ".tif",
    ".tiff",
    ".bmp",
    ".heic",
    ".heif",
    ".avif",
)
MOST_BYTES = 512 * 2**20  # of one image file; more than any camera writes
NOT_REGULAR = "is not a regular file"


def is_image_name(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


@dataclass(frozen=True)
class FileReader:
    """Images in files, each by its path."""

    paths: Sequence[str]  # without links

    def read(self, index: int) -> bytes:
        return read_file(self.paths[index])

    def stamp(self, index: int) -> str:
        return file_stamp(self.paths[index])


def file_stamp(path: str) -> str:
    """Which file it is and in what state, in ASCII, which any name can be written in; empty when it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns} {path!a}"


def open_regular(path: str | Path) -> BinaryIO:
    """A file to read from; a pipe, which would wait for a writer, or a device is a ValueError."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError(NOT_REGULAR)
    return open(number, "rb")


def read_file(path: str) -> bytes:
    """A regular file's bytes, if they are not far too many."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"is {size / 1e9:.1f} GB, too large for an image")
        return file.read()


class Folders:
    """The folders of a source: finds the files that its names mean, and refuses those that lead elsewhere."""

    def __init__(self, *roots: str | Path):
        self.roots = [os.path.realpath(root) for root in roots]
        self.real_folder = lru_cache(maxsize=100_000)(os.path.realpath)

    def find(self, name: str) -> tuple[str | None, str]:
        """The path of a file, or None and what is wrong with it, in words."""
        try:
            encoded = os.fsencode(name)
        except UnicodeEncodeError:  # half a letter, as a JSON file can hold
            encoded = b"\0"
        if b"\0" in encoded or len(encoded) > 4096:
            return None, "has no file name"
        outside = False
        for root in self.roots:
            path = os.path.join(root, name)
            folder, file = os.path.split(path)
            if not file:
                continue
            path = os.path.join(self.real_folder(folder), file)
            try:
                found = os.lstat(path)
                if stat.S_ISLNK(found.st_mode):
                    path = os.path.realpath(path)
                    found = os.lstat(path)
            except OSError:
                continue
            if not self.contains(path):
                outside = True
            elif stat.S_ISREG(found.st_mode):
                return path, ""
        return None, "lies outside the source's folder" if outside else "is missing"

    def contains(self, real_path: str) -> bool:
        return any(real_path.startswith(root.rstrip(os.sep) + os.sep) for root in self.roots)
