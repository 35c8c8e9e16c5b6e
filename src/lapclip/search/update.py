"""Bringing an index up to date: looks through the folders, reads what is new or changed, embeds what was never seen.

A file is known by its path, size and time without being opened, by its content without being decoded, and one that was
moved keeps its id. Several threads work side by side, each on files of its own: reading, hashing, decoding, embedding.
"""

import os
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lapclip.data.ahead import in_order
from lapclip.data.decode import Unreadable, digest
from lapclip.data.files import MOST_BYTES, Folders, open_regular
from lapclip.data.images import decode_as_trained
from lapclip.errors import UserError
from lapclip.search.index import MODEL, About, all_abouts, indexes_folder, read_about, remove_files, speaking
from lapclip.search.scan import Stamp, Unopened, images_under, is_under, outermost, real_folders, why_away
from lapclip.search.writer import Writer, clear, owned

if TYPE_CHECKING:
    from lapclip.embedder import Embedder

FILES_AT_ONCE = 1000  # noted while looking through folders
BATCH = 32  # files that a thread takes at once: enough for the model, few enough for the end
SPARE_BYTES = 2**28  # of the disk, never taken
NUM_NAMED = 5  # unreadable images, in words
TRY_AGAIN = -1  # in place of a time, which no file has


@dataclass(frozen=True)
class Progress:
    """How far an update is; the total is 0 while folders are looked through."""

    done: int
    total: int
    num_embedded: int = 0
    num_unreadable: int = 0


@dataclass
class Summary:
    """What an update did. The counts of new, changed and unchanged are of files, those embedded of contents."""

    path: Path
    num_indexed: int = 0  # images in the index now
    num_embedded: int = 0
    num_new: int = 0
    num_changed: int = 0
    num_unchanged: int = 0
    num_moved: int = 0
    num_copied: int = 0  # new or changed, with a content that had been embedded
    num_removed: int = 0
    num_unreadable: int = 0  # files in the index now
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # the first met by this update, and why
    away: dict[str, str] = field(default_factory=dict)  # why, by folder; their images were left as they are
    empty: list[str] = field(default_factory=list)  # folders that were named and hold no image
    unopened: list[str] = field(default_factory=list)  # folders within these; their images were left as well
    folders: list[str] = field(default_factory=list)
    num_replaced: int = 0  # older indexes of the same model that were removed
    seconds: float = 0.0


@dataclass(frozen=True)
class Read:
    """A file that was opened: its content, and the pixels if that was never seen; or why there is none."""

    stamp: Stamp
    content: bytes = b""
    pixels: np.ndarray | None = None  # until they are embedded
    row_E: np.ndarray | None = None
    size: tuple[int, int] = (0, 0)  # width and height of the original
    why: str = ""
    is_lasting: bool = True  # the fault lies in the bytes, so that nobody need try again
    is_gone: bool = False


def update(
    embedder: "Embedder", *, name: str, model: str, folders: Sequence[str] = (), fresh: bool = False
) -> Generator[Progress, None, Summary]:
    """Embeds what some folders hold, by default all that the model's index has; closed or killed it goes on from there.

    A model that was trained on since has another index: everything is embedded anew, then the old one goes.
    """
    started = time.perf_counter()
    path = indexes_folder() / embedder.fingerprint
    earlier = [about for about in all_abouts() if about.model == model and about.path != path]
    with owned(path):
        about = read_about(path)
        if fresh:
            clear(path)
        keep_model(embedder, path, again=fresh)
        with Writer(path, embedder.width) as writer:
            known = writer.folders() or [*(about.folders if about else ())]
            known = known or [folder for old in earlier for folder in old.folders]
            asked = real_folders(folders, known)
            every = outermost([*known, *asked])
            if not every:
                raise UserError("no folder is indexed yet", hint="name one: `lapclip index ~/Pictures`")
            was_complete = about is not None and about.is_complete and not fresh
            writer.write_folders(every)
            writer.commit()
            about = About(path, name, model, embedder.width, tuple(every), time.time(), was_complete)
            about.write()
            summary = Summary(path, folders=every)
            scopes = outermost(asked) if asked and was_complete else every
            yield from bring_up_to_date(writer, embedder, scopes, summary)
            summary.num_removed = writer.drop_gone()
            writer.commit()
            writer.compact_when_due()
            summary.num_indexed, summary.num_unreadable = writer.count_images(), writer.count_unreadable()
        is_complete = was_complete or not summary.away
        replace(about, updated=time.time(), is_complete=is_complete).write()
    if is_complete:
        for old in earlier:
            with suppress(UserError):  # somebody is updating it; the next time, then
                remove(old)
                summary.num_replaced += 1
    summary.seconds = time.perf_counter() - started
    return summary


def keep_model(embedder: "Embedder", path: Path, *, again: bool) -> None:
    """Puts a copy of the model into the index, whole or not at all."""
    if (path / MODEL).is_dir() and not again:
        return
    beside = path / f".{MODEL}.writing"
    with speaking(path):
        shutil.rmtree(beside, ignore_errors=True)
        embedder.save(beside)
        shutil.rmtree(path / MODEL, ignore_errors=True)
        beside.rename(path / MODEL)


def bring_up_to_date(
    writer: Writer, embedder: "Embedder", scopes: Sequence[str], summary: Summary
) -> Generator[Progress, None, None]:
    """Looks through folders and embeds what they hold; what is gone is known afterwards, and not yet dropped."""
    reached, unopened = [], Unopened()
    for scope in scopes:
        if why := why_away(scope, writer.count_under(scope)):
            summary.away[scope] = why
        else:
            reached.append(scope)
    if not reached:
        folder, why = next(iter(summary.away.items()))
        raise UserError(
            f"`{folder}` cannot be looked into: {why}; its images stay in the index",
            hint=f"connect its disk, or drop it: `lapclip index --forget '{folder}'`",
        )
    inside, num_found = Folders(*summary.folders), 0
    for scope in reached:
        stamps, num_before = images_under(scope, inside, unopened), num_found
        while some := list(islice(stamps, FILES_AT_ONCE)):
            writer.note_found(some)
            num_found += len(some)
            yield Progress(num_found, 0)
        if num_found == num_before:
            summary.empty.append(scope)
    summary.unopened = unopened.folders
    disks_away = keep_disks(writer, reached, unopened, summary)
    total, summary.num_unchanged = writer.sort_out(reached, [*unopened.folders, *disks_away])
    writer.commit()
    check_disk(writer, total)
    yield Progress(0, total)
    done = 0
    with embedder.side_by_side() as threads, closing(batches(writer, embedder, threads)) as some_reads:
        for reads in some_reads:
            add(writer, reads, summary)
            done += len(reads)
            writer.commit_when_due()
            yield Progress(done, total, summary.num_embedded, summary.num_unreadable)


def keep_disks(writer: Writer, scopes: Sequence[str], seen: Unopened, summary: Summary) -> list[str]:
    """Remembers where disks are within the folders looked through; those whose images are away, not gone."""
    known = writer.disks()
    within = [disk for disk in known if is_under(disk, scopes) and disk not in seen.disks]
    away = {disk: why for disk in within if (why := why_away(disk, writer.count_under(disk)))}
    summary.away |= away
    writer.write_disks({*known, *seen.disks}.difference(within) | away.keys())
    return [*away]


def batches(writer: Writer, embedder: "Embedder", threads: int) -> Generator[list[Read], None, None]:
    """The files that are to be read, some at a time and in order, with the embeddings of contents that are new."""

    def read_and_embed(paths: list[bytes]) -> list[Read]:
        reads = [read_image(path, embedder.image_size, writer) for path in paths]
        pixels = [read.pixels for read in reads if read.pixels is not None]
        rows = iter(embedder.pixels(np.stack(pixels)) if pixels else ())
        return [
            read if read.pixels is None else replace(read, pixels=None, row_E=next(rows)) for read in reads
        ]

    paths = writer.todo()
    some = iter(lambda: list(islice(paths, BATCH)), [])
    yield from in_order(read_and_embed, some, threads, ahead=2 * threads)


def read_image(path: bytes, image_size: int, writer: Writer) -> Read:
    """Opens one file; its stamp is as it was before its bytes were read. Runs in threads."""
    stamp = Stamp(path, 0, TRY_AGAIN)
    try:
        with open_regular(os.fsdecode(path)) as file:
            found = os.fstat(file.fileno())
            stamp = Stamp(path, found.st_size, found.st_mtime_ns)
            if found.st_size > MOST_BYTES:
                return Read(stamp, why=f"is {found.st_size / 1e9:.1f} GB, too large for an image")
            data = file.read()
        content = digest(data)
        if writer.row_of(content) is not None:
            return Read(stamp, content)
        decoded = decode_as_trained(data, image_size)
        size = (int(decoded.record["width"]), int(decoded.record["height"]))
        return Read(stamp, content, decoded.pixels, size=size)
    except Unreadable as problem:
        return Read(stamp, why=str(problem), is_lasting="pip install" not in str(problem))
    except FileNotFoundError:
        return Read(stamp, why="is gone", is_gone=True)
    except OSError as error:
        why = f"cannot be read: {(error.strerror or str(error)).lower()}"
        return Read(stamp, why=why, is_lasting=False)
    except ValueError as error:
        return Read(stamp, why=str(error), is_lasting=False)


def add(writer: Writer, reads: Sequence[Read], summary: Summary) -> None:
    """Keeps the embeddings of contents that have none yet, each once, and notes every file."""
    new = {read.content: read for read in reads if read.row_E is not None}
    new = {content: read for content, read in new.items() if writer.row_of(content) is None}
    if new:
        rows_NE = np.stack([read.row_E for read in new.values() if read.row_E is not None])
        writer.add_images([*new], [read.size for read in new.values()], rows_NE)
        summary.num_embedded += len(new)
    for read in reads:
        note(writer, read, new.get(read.content) is read, summary)


def note(writer: Writer, read: Read, was_embedded: bool, summary: Summary) -> None:
    """Notes one file, and counts what became of it."""
    known = writer.known_row(read.stamp.path)
    if read.why:
        if read.is_gone:
            return
        summary.num_unreadable += 1
        summary.unreadable.append((os.fsdecode(read.stamp.path), read.why))
        del summary.unreadable[NUM_NAMED:]
        if read.is_lasting:
            writer.put(read.stamp, None, read.why)
        elif known is None or known[1] is None:  # what could be read once may be so again
            writer.put(Stamp(read.stamp.path, read.stamp.size, TRY_AGAIN), None, read.why)
        return
    row = writer.row_of(read.content)
    assert row is not None, "all contents of a batch have been embedded"
    if known is None and writer.move(read.stamp, row):
        summary.num_moved += 1
        return
    writer.put(read.stamp, row)
    if known is not None and known[1] == row:
        summary.num_unchanged += 1  # but for its time
        return
    summary.num_new += known is None
    summary.num_changed += known is not None
    summary.num_copied += not was_embedded


def check_disk(writer: Writer, num_pictures: int) -> None:
    needed = num_pictures * (writer.row_bytes + 500) + SPARE_BYTES  # with what the database takes
    free = shutil.disk_usage(writer.path).free
    if needed > free:
        raise UserError(
            f"the index needs {needed / 1e9:.2f} GB in `{writer.path}`, which has {free / 1e9:.2f} GB left",
            hint="make room, or set LAPCLIP_CACHE to a folder on a larger disk",
        )


def forget(about: About, folder: str) -> int:
    """Drops a folder from an index; how many images that were."""
    path = os.path.realpath(os.path.expanduser(folder))
    with owned(about.path):
        with Writer(about.path, about.width) as writer:
            num_pictures = writer.drop_folder(path)
            writer.commit()
            writer.compact_when_due()
            folders = tuple(writer.folders())
        replace(about, folders=folders, updated=time.time()).write()
    return num_pictures


def remove(about: About) -> None:
    """Removes an index; UserError while somebody is updating it."""
    with owned(about.path):
        remove_files(about.path)
