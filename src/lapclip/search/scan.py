"""Which images are on the disk: paths and stamps, and which folders could not be opened.

A folder that cannot be reached, as on an unplugged disk, says nothing about its images: they are not removed.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lapclip.data.files import Folders, is_image_name
from lapclip.data.formats.folder import walk
from lapclip.errors import UserError, reason_for, suggest_path
from lapclip.files import cache_folder


@dataclass(frozen=True)
class Stamp:
    """An image file, and what changes when it does."""

    path: bytes  # absolute, links resolved
    size: int
    mtime_ns: int


def images_under(root: str, folders: Folders, unopened: list[str]) -> Iterator[Stamp]:
    """Every image file under a folder except hidden ones, links out of the folders, and lapclip's own cache.

    A link to an image is that image, which then may come twice. Folders that cannot be opened are added to `unopened`.
    """
    own = os.path.realpath(cache_folder()) + os.sep
    for entry in walk(root, lambda kind, what, name: unopened.append(name)):
        if not is_image_name(entry.name) or entry.path.startswith(own):
            continue
        path = entry.path
        try:
            if entry.is_symlink():
                path = os.path.realpath(path)
                if not folders.contains(path):
                    continue
            found = os.lstat(path)
        except OSError:  # it has just been removed
            continue
        if stat.S_ISREG(found.st_mode):
            yield Stamp(os.fsencode(path), found.st_size, found.st_mtime_ns)


def real_folders(folders: Iterable[str], known: Sequence[str] = ()) -> list[str]:
    """Folders with links resolved; UserError for one that does not exist, unless it is known and only unreachable."""
    real = []
    for folder in folders:
        path = os.path.realpath(os.path.expanduser(folder))
        if not os.path.isdir(path) and path not in known:
            near = suggest_path(folder, is_folder=True)
            what = "is a file, not a folder" if os.path.exists(path) else f"does not exist{near}"
            hint = "name a folder with images: `lapclip index ~/Pictures`"
            raise UserError(f"`{folder}` {what}", hint=hint)
        real.append(path)
    return real


def outermost(folders: Iterable[str]) -> list[str]:
    """The folders that lie within no other."""
    kept: list[str] = []
    for folder in sorted(set(folders), key=lambda name: (name.count(os.sep), name)):
        if folder not in kept and not Folders(*kept).contains(folder):
            kept.append(folder)
    return sorted(kept)


def why_unreachable(folder: str, num_known: int) -> str | None:
    """Why a folder cannot be searched for images now; None when it can."""
    try:
        with os.scandir(folder) as entries:
            is_empty = next(entries, None) is None
    except OSError as error:
        return reason_for(error).lower()
    return "it is empty now" if is_empty and num_known else None  # as an unused mount point
