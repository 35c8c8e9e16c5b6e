"""Images of the index to look at: the path of an indexed file in, a new JPEG out.

A file may have changed since it was indexed: it is looked up again, must still lie in the index's folders after every
link was followed, and is always encoded again, so that nothing but the image is sent.
"""

import os
from collections.abc import Sequence
from functools import lru_cache

from lapclip.data.decode import Unreadable, as_jpeg, read_whole
from lapclip.data.files import MAX_BYTES, Folders, Problem
from lapclip.files import open_regular

THUMBNAIL_SIDE = 320
IMAGE_SIDE = 1600
MAX_KEPT = 1000  # thumbnails, of some 20 KB each; one of pure noise has 80 KB


class Missing(Exception):
    """The image no longer exists."""


def thumbnail_of(path: str, folders: Sequence[str]) -> bytes:
    """A small JPEG of a file of the index; those asked for last are kept, until the file changes."""
    try:
        now = os.lstat(find(path, folders))
    except OSError:
        raise Missing from None
    return kept_thumbnail(path, tuple(folders), now.st_mtime_ns, now.st_size)


@lru_cache(MAX_KEPT)
def kept_thumbnail(path: str, folders: tuple[str, ...], mtime_ns: int, num_bytes: int) -> bytes:
    return image_of(path, folders, THUMBNAIL_SIDE)


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
        found = find(path, folders)
        with open_regular(found) as file:
            opened = os.fstat(file.fileno())
            # Looked up again once it is open, so that no link slips in between.
            is_same = find(path, folders) == found and os.path.samestat(opened, os.lstat(found))
            if not is_same or opened.st_size > MAX_BYTES:
                raise Missing
            data = file.read(MAX_BYTES)
        return as_jpeg(read_whole(data, max_side))
    except (OSError, ValueError, Unreadable):
        raise Missing from None
