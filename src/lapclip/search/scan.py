"""What images are on the disk: paths and stamps, and which folders could not be looked into.

A folder that cannot be reached, as that of an unplugged disk, says nothing about its images: they are not gone. The
same holds for a disk within a folder: where one was seen is remembered.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lapclip.data.catalogue import Problems
from lapclip.data.files import Folders, is_image_name
from lapclip.data.formats.folder import walk
from lapclip.errors import UserError
from lapclip.files import cache_folder


@dataclass(frozen=True)
class Stamp:
    """An image file, and what changes when it does."""

    path: bytes  # absolute, without links
    size: int
    mtime_ns: int


@dataclass
class Unopened(Problems):
    """The folders that could not be looked into, in full: what was known of them stays. And the disks seen."""

    folders: list[str] = field(default_factory=list)
    disks: set[str] = field(default_factory=set)  # where they are mounted, within what was looked through

    def add(self, what: str, name: str) -> None:
        super().add(what, name)
        self.folders.append(name)


def images_under(root: str, folders: Folders, unopened: Unopened) -> Iterator[Stamp]:
    """Every image file under a folder; hidden ones, links out of the folders and lapclip's own are left out.

    A link to an image is that image, which then may come twice.
    """
    own = os.path.realpath(cache_folder()) + os.sep
    device = device_of(root)
    for entry in walk(root, unopened):
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
            if found.st_dev != device and path == entry.path and not is_under(path, unopened.disks):
                unopened.disks |= disks_above(path, root)
            yield Stamp(os.fsencode(path), found.st_size, found.st_mtime_ns)


def device_of(folder: str) -> int | None:
    try:
        return os.stat(folder).st_dev
    except OSError:
        return None


def disks_above(path: str, root: str) -> set[str]:
    """The nearest folder of a path in which a disk is mounted, unless that is not within the root."""
    folder = os.path.dirname(path)
    while is_under(folder, [root]):
        if os.path.ismount(folder):
            return {folder}
        folder = os.path.dirname(folder)
    return set()


def is_under(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def real_folders(folders: Iterable[str], known: Sequence[str] = ()) -> list[str]:
    """Folders as they are kept; UserError for one that is none, unless it is known and only away."""
    real = []
    for folder in folders:
        path = os.path.realpath(os.path.expanduser(folder))
        if not os.path.isdir(path) and path not in known:
            what = "is a file, not a folder" if os.path.exists(path) else "does not exist"
            raise UserError(
                f"`{folder}` {what}", hint="name a folder with images: `lapclip index ~/Pictures`"
            )
        real.append(path)
    return real


def outermost(folders: Iterable[str]) -> list[str]:
    """Folders of which none lies within another."""
    kept: list[str] = []
    for folder in sorted(set(folders), key=lambda name: (name.count(os.sep), name)):
        if folder not in kept and not Folders(*kept).contains(folder):
            kept.append(folder)
    return sorted(kept)


def why_away(folder: str, num_known: int) -> str | None:
    """Why a folder says nothing about its images now; None when it can be looked into."""
    try:
        with os.scandir(folder) as entries:
            is_empty = next(entries, None) is None
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "it is empty now" if is_empty and num_known else None  # as where a disk was mounted
