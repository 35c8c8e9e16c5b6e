"""Lists of images beside a table that say which side each is on, one name a line."""

import os
from collections.abc import Collection
from pathlib import Path

from lapclip.data.catalogue import Side
from lapclip.data.files import Folders, is_image_name, open_regular

# What is tested on is settled first, so that nothing is also trained on.
LISTS: dict[str, Side] = {
    "test.txt": "test", "flickr_8k.testimages.txt": "test",
    "dev.txt": "validation", "val.txt": "validation", "validation.txt": "validation",
    "flickr_8k.devimages.txt": "validation",
    "train.txt": "train", "flickr_8k.trainimages.txt": "train",
}  # fmt: skip
MOST_LISTED = 64 * 2**20  # bytes of a list


def split_lists(folder: Path, known: Collection[str] | None = None) -> dict[str, Side]:
    """Base names of images and their sides, by the lists in a folder; a list of mostly unknown names is none."""
    own = Folders(folder)
    beside = {
        entry.name.lower(): entry
        for entry in folder.iterdir()
        if entry.name.lower() in LISTS and own.contains(os.path.realpath(entry))
    }
    sides: dict[str, Side] = {}
    for file, side in LISTS.items():
        names = listed_names(beside[file]) if file in beside else []
        num_fitting = sum(is_image_name(name) and (known is None or name in known) for name in names)
        if num_fitting > len(names) / 2:
            for name in names:
                sides.setdefault(name, side)
    return sides


def listed_names(path: Path) -> list[str]:
    """The base names in a file, one a line; none if it is too large or cannot be read."""
    try:
        with open_regular(path) as file:
            data = file.read(MOST_LISTED + 1)
    except (OSError, ValueError):
        return []
    text = data.decode("utf-8-sig", "replace") if len(data) <= MOST_LISTED else ""
    return [os.path.basename(name) for line in text.splitlines() if (name := line.strip().replace("\\", "/"))]
