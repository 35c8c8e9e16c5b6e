"""Pictures as files, and the one rule about them: nothing outside the source's own folders is ever read."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# What pictures are called; whether they are pictures is seen when they are opened.
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
MOST_BYTES = 512 * 2**20  # of one picture file; more than any camera writes


def is_picture_name(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


@dataclass(frozen=True)
class FileReader:
    """Pictures in files, each by its path."""

    paths: Sequence[str]

    def read(self, index: int) -> bytes:
        return read_file(self.paths[index])

    def stamp(self, index: int) -> str:
        try:
            found = os.stat(self.paths[index])
        except OSError:
            return ""
        return f"{found.st_size} {found.st_mtime_ns}"


def read_file(path: str) -> bytes:
    """A regular file's bytes, if they are not far too many."""
    with open(
        os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb"
    ) as file:  # without waiting at a pipe for a writer
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("is not a regular file")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"is {found.st_size / 1e9:.1f} GB, too large for a picture")
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
