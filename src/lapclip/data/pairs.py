"""The pairs of a pack: which images there are now, on which side of the split, in which group, and their captions.

A table of pairs is a folder that is written once and never changed, named after its content, and mapped into memory:
a million captions cost a training run nothing. A source that changes gets another table in the same pack.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from lapclip.data.catalogue import Catalogue
from lapclip.data.decode import digest
from lapclip.files import atomic_path, refuse_pipes, remove

TRAIN, VALIDATION, UNUSED = 0, 1, 2
ALL = -1  # not an image's side: selects every image
VERSION = 1
SECONDS_KEPT = 86_400
COLUMNS = ("numbers", "rows", "groups", "sides", "ranks", "first", "caption_ends", "name_ends")


class PairTable:
    """The images that can be used, numbered from 0, and what belongs to them. It can be sent to another process."""

    def __init__(self, path: Path):
        self.path = path
        refuse_pipes(path)
        # Stands for images, captions and sides, however they are packed.
        self.fingerprint = (path / "fingerprint").read_text()
        columns = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in COLUMNS}
        self.numbers = columns["numbers"]  # of each image in the catalogue
        self.rows = columns["rows"]  # of each image's pixels, -1 when it is not packed
        self.groups = columns["groups"]  # equal for images that a model sees as the same
        self.sides = columns["sides"]
        self.ranks = columns["ranks"]  # a random place that depends on the image alone
        self.first = columns["first"]  # where each image's captions start; one more at the end
        self.texts = {
            name: (np.memmap(path / f"{name}s", np.uint8, mode="r"), columns[f"{name}_ends"])
            for name in ("caption", "name")
        }

    def text(self, kind: str, number: int) -> str:
        data, ends = self.texts[kind]
        start = int(ends[number - 1]) if number else 0
        return data[start : int(ends[number])].tobytes().decode("utf-8", errors="replace")

    def caption(self, number: int) -> str:
        return self.text("caption", number)

    def captions(self, image: int) -> tuple[str, ...]:
        return tuple(map(self.caption, range(int(self.first[image]), int(self.first[image + 1]))))

    def name(self, image: int) -> str:
        return self.text("name", image)

    def __reduce__(self) -> tuple:
        return PairTable, (self.path,)  # without what is mapped here


def write_pairs(
    folder: Path, catalogue: Catalogue, records: np.ndarray, usable: np.ndarray, groups: np.ndarray, sides: np.ndarray
) -> PairTable:  # fmt: skip
    """Writes the table of the usable images, unless it is there; what is given belongs to all images."""
    captions = [catalogue.captions[i] for i in usable]
    caption_data, caption_ends = joined([caption for own in captions for caption in own])
    name_data, name_ends = joined([catalogue.names[i] for i in usable])
    first = np.concatenate([[0], np.cumsum([len(own) for own in captions], dtype=np.int64)])
    ranks = np.ascontiguousarray(records["content"][usable]).view("<u8")[::2]
    usable, groups, sides = usable.astype(np.int64), groups[usable], sides[usable].astype(np.int8)
    # As in COLUMNS:
    ordered = (usable, records["row"][usable], groups, sides, ranks, first, caption_ends, name_ends)
    columns = dict(zip(COLUMNS, map(np.ascontiguousarray, ordered), strict=True))
    contents = {name: column.tobytes() for name, column in columns.items()}
    fingerprint = digest(caption_data, name_data, *(contents[name] for name in ("ranks", "sides", "first")))
    path = folder / f"view-{digest(bytes([VERSION]), caption_data, name_data, *contents.values()).hex()}"
    with suppress(OSError, ValueError, EOFError):  # there is none yet, or it is damaged
        return PairTable(path)
    for left in folder.glob(".view-*"):
        remove(left)  # by a killed process
    with atomic_path(path, is_folder=True) as beside:
        (beside / "captions").write_bytes(caption_data or b"\0")  # an empty file cannot be mapped
        (beside / "names").write_bytes(name_data or b"\0")
        (beside / "fingerprint").write_text(fingerprint.hex())
        for name, column in columns.items():
            np.save(beside / f"{name}.npy", column)
    for other in folder.glob("view-*"):
        if time.time() - other.stat().st_mtime > SECONDS_KEPT:
            remove(other)  # a run that uses it has it open by now
    return PairTable(path)


def joined(texts: Sequence[str]) -> tuple[bytes, np.ndarray]:
    """Texts one after the other, and where each ends."""
    encoded = [text.encode("utf-8", errors="replace") for text in texts]
    return b"".join(encoded), np.cumsum([len(e) for e in encoded], dtype=np.int64)
