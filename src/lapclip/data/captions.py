"""The words beside a pack's pixels: which images there are now, on which side, in which group, and their captions.

A view is a folder that is written once and never changed, named after its content, and mapped into memory: a million
captions cost a training run nothing. A source that changes gets another view of the same pack.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lapclip.data.catalogue import Catalogue
from lapclip.data.decode import digest

TRAIN, VALIDATION, UNUSED = 0, 1, 2
ALL = -1  # no image's own side: whoever asks for it gets every image
VERSION = 1
SECONDS_KEPT = 86_400


@dataclass(frozen=True)
class View:
    """The images that can be used, numbered anew, and what belongs to them. It can be sent to another process."""

    path: Path

    @property
    def fingerprint(self) -> str:
        """Stands for images, captions and sides, however they are packed."""
        return (self.path / "fingerprint").read_text()

    @cached_property
    def numbers(self) -> np.ndarray:
        """Each image's number in the catalogue."""
        return self.column("numbers")

    @cached_property
    def rows(self) -> np.ndarray:
        """Each image's row of pixels, -1 when it is not packed."""
        return self.column("rows")

    @cached_property
    def groups(self) -> np.ndarray:
        """Equal for images that show the same."""
        return self.column("groups")

    @cached_property
    def sides(self) -> np.ndarray:
        return self.column("sides")

    @cached_property
    def ranks(self) -> np.ndarray:
        """A random place that depends on the image alone."""
        return self.column("ranks")

    @cached_property
    def first(self) -> np.ndarray:
        """Where each image's captions start; one more at the end."""
        return self.column("first")

    @cached_property
    def caption_ends(self) -> np.ndarray:
        return self.column("caption_ends")

    @cached_property
    def caption_bytes(self) -> np.ndarray:
        return np.memmap(self.path / "captions", dtype=np.uint8, mode="r")

    @cached_property
    def name_ends(self) -> np.ndarray:
        return self.column("name_ends")

    @cached_property
    def name_bytes(self) -> np.ndarray:
        return np.memmap(self.path / "names", dtype=np.uint8, mode="r")

    def column(self, name: str) -> np.ndarray:
        return np.load(self.path / f"{name}.npy", mmap_mode="r")

    def hold(self) -> None:
        """Maps every column."""
        _ = self.numbers, self.rows, self.groups, self.sides, self.ranks, self.first
        _ = self.caption_ends, self.caption_bytes, self.name_ends, self.name_bytes

    def caption(self, number: int) -> str:
        return text_at(self.caption_bytes, self.caption_ends, number)

    def captions(self, image: int) -> tuple[str, ...]:
        return tuple(self.caption(n) for n in range(int(self.first[image]), int(self.first[image + 1])))

    def name(self, image: int) -> str:
        return text_at(self.name_bytes, self.name_ends, image)

    def __reduce__(self) -> tuple:
        return View, (self.path,)  # without what is mapped here


def text_at(data: np.ndarray, ends: np.ndarray, number: int) -> str:
    start = int(ends[number - 1]) if number else 0
    return data[start : int(ends[number])].tobytes().decode("utf-8", errors="replace")


def write_view(
    folder: Path, catalogue: Catalogue, usable: np.ndarray, rows: np.ndarray, keys: np.ndarray,
    groups: np.ndarray, sides: np.ndarray,
) -> View:  # fmt: skip
    """Writes a view of the usable images, unless it is there; `keys` stand for contents, and give their ranks."""
    captions = [catalogue.captions[i] for i in usable]
    caption_data, caption_ends = joined([caption for own in captions for caption in own])
    name_data, name_ends = joined([catalogue.names[i] for i in usable])
    columns = {
        "numbers": usable.astype(np.int64),
        "rows": rows,
        "groups": groups,
        "sides": sides.astype(np.int8),
        "ranks": keys,
        "first": np.concatenate([[0], np.cumsum([len(own) for own in captions], dtype=np.int64)]),
        "caption_ends": caption_ends,
        "name_ends": name_ends,
    }
    contents = {name: np.ascontiguousarray(column).tobytes() for name, column in columns.items()}
    fingerprint = digest(
        caption_data, name_data, contents["ranks"], contents["sides"], contents["first"]
    ).hex()
    path = folder / f"view-{digest(bytes([VERSION]), caption_data, name_data, *contents.values()).hex()}"
    if not path.exists():
        for left in folder.glob(".view-*"):
            shutil.rmtree(left, ignore_errors=True)  # by a killed process
        beside = folder / f".view-{os.getpid()}"
        beside.mkdir(parents=True)
        (beside / "captions").write_bytes(caption_data or b"\0")  # an empty file cannot be mapped
        (beside / "names").write_bytes(name_data or b"\0")
        (beside / "fingerprint").write_text(fingerprint)
        for name, column in columns.items():
            np.save(beside / f"{name}.npy", column)
        beside.rename(path)
        for other in folder.glob("view-*"):
            if time.time() - other.stat().st_mtime > SECONDS_KEPT:
                shutil.rmtree(other, ignore_errors=True)  # whoever trains from it has it open by now
    return View(path)


def joined(texts: Sequence[str]) -> tuple[bytes, np.ndarray]:
    """Texts one after the other, and where each ends."""
    encoded = [text.encode("utf-8", errors="replace") for text in texts]
    return b"".join(encoded), np.cumsum([len(e) for e in encoded], dtype=np.int64)
