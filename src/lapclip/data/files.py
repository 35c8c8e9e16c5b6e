"""Image files, and the one rule about them: nothing outside the source's own folders is ever read."""

import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from lapclip.files import open_regular

# File name extensions of images; whether a file is an image is known once it is opened.
SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".heic", ".heif", ".avif",
)  # fmt: skip
MAX_BYTES = 512 * 2**20  # of one image file; more than any camera writes
MAX_PATH_BYTES = 4096

# missing, outside: an image that is named, but is not there or not in the source's folders. unreadable: a file, row or
# member that cannot be read. incomplete: an image without a caption, or the reverse. skipped: deliberately omitted.
# repaired: used, but with a change.
Kind = Literal["missing", "outside", "unreadable", "incomplete", "skipped", "repaired"]


class Problem(NamedTuple):
    """What is wrong with an image, a row or a file."""

    kind: Kind
    what: str  # for people; follows a name: "`cat.jpg` is missing"


MISSING = Problem("missing", "is missing")
OUTSIDE = Problem("outside", "lies outside the source's folder")


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
    """Identifies a file and its state, in ASCII, which any name can be written in; empty when it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns} {path!a}"


def read_file(path: str) -> bytes:
    """The bytes of a regular file of at most `MAX_BYTES`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise ValueError(f"is {size / 1e9:.1f} GB, too large for an image")
        return file.read()


class Folders:
    """The folders of a source: finds files by name, and refuses those outside of them."""

    def __init__(self, *roots: str | Path):
        self.roots = [os.path.realpath(root) for root in roots]
        self.real_folder = lru_cache(maxsize=100_000)(os.path.realpath)

    def find(self, name: str) -> str | Problem:
        """The path of a file without links, or why there is none."""
        try:
            encoded = os.fsencode(name)
        except UnicodeEncodeError:  # half a character, as a JSON file can hold
            encoded = b"\0"
        if b"\0" in encoded or len(encoded) > MAX_PATH_BYTES:
            return Problem("unreadable", "has no file name")
        problem = MISSING
        for root in self.roots:
            folder, file = os.path.split(os.path.join(root, name))
            path = os.path.join(self.real_folder(folder), file)
            try:
                found = os.lstat(path)
                if stat.S_ISLNK(found.st_mode):
                    path = os.path.realpath(path)
                    found = os.lstat(path)
            except OSError:
                continue
            if not self.contains(path):
                problem = OUTSIDE
            elif stat.S_ISREG(found.st_mode):
                return path
        return problem

    @cached_property
    def below(self) -> dict[str, str]:
        """The files below the first folder, by their names there in lower case if only one has it."""
        paths = [str(path.relative_to(self.roots[0])) for path in Path(self.roots[0]).rglob("*")]
        counts = Counter(path.lower() for path in paths)
        return {path.lower(): path for path in paths if counts[path.lower()] == 1}

    def contains(self, real_path: str) -> bool:
        return any(real_path.startswith(root.rstrip(os.sep) + os.sep) for root in self.roots)
