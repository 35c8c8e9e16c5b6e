"""Images of the index to look at: the path of an indexed file in, a new JPEG out.

A file may have changed since it was indexed: it is looked up again, must still lie in the index's folders after every
link was followed, and is always encoded again, so that nothing but the image is sent.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence

from lapclip.data.decode import Unreadable, as_jpeg, read_whole
from lapclip.data.files import MAX_BYTES, Folders, Problem, open_regular

THUMBNAIL_SIDE = 320
IMAGE_SIDE = 1600
KEPT_BYTES = 64 << 20  # of thumbnails


class Missing(Exception):
    """The image no longer exists."""


class Thumbnails:
    """The thumbnails that were asked for last; threads may share it."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self.num_bytes = 0
        self.lock = threading.Lock()

    def of(self, path: str, folders: Sequence[str]) -> bytes:
        """A small JPEG of a file of the index; Missing when it no longer exists."""
        found = find(path, folders)
        try:
            now = os.lstat(found)
        except OSError:
            raise Missing from None
        key = (found, now.st_mtime_ns, now.st_size)
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
        made = image_of(path, folders, THUMBNAIL_SIDE)
        with self.lock:
            if key not in self.kept:
                self.kept[key] = made
                self.num_bytes += len(made)
            while self.num_bytes > KEPT_BYTES:
                self.num_bytes -= len(self.kept.popitem(last=False)[1])
        return made


def find(path: str, folders: Sequence[str]) -> str:
    """The real path of a file within the index's folders. Links are followed each time: they may have changed."""
    # Folders were indexed without links; one that has become a link leads elsewhere.
    found = Folders(*(folder for folder in folders if os.path.realpath(folder) == folder)).find(path)
    if isinstance(found, Problem):
        raise Missing
    return found


def image_of(path: str, folders: Sequence[str], max_side: int = IMAGE_SIDE) -> bytes:
    """A JPEG of a file of the index, no side longer than that; Missing when it no longer exists."""
    try:
        return as_jpeg(read_whole(read_inside(path, folders), max_side))
    except (OSError, ValueError, Unreadable):
        raise Missing from None


def read_inside(path: str, folders: Sequence[str]) -> bytes:
    """The bytes of a file of the index; once it is open it is looked up again, so that no link slips in between."""
    found = find(path, folders)
    with open_regular(found) as file:
        opened = os.fstat(file.fileno())
        is_same = find(path, folders) == found and os.path.samestat(opened, os.lstat(found))
        if not is_same or opened.st_size > MAX_BYTES:
            raise Missing
        return file.read(MAX_BYTES)
