"""Updates an index: walks the folders, reads what is new or changed, embeds contents that were never seen.

An unchanged file is recognised by path, size and time without being opened; a copied or moved one by its content
without being decoded, and a moved file keeps its id. Threads read, hash, decode and embed files side by side.
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

from lapclip.data.decode import Unreadable, digest
from lapclip.data.files import MAX_BYTES, Folders
from lapclip.data.workers import in_order
from lapclip.errors import UserError, reason_for
from lapclip.files import atomic_path, open_regular
from lapclip.search.index import INFO, MODEL, IndexInfo, folder_for, index_errors, list_indexes, read_info
from lapclip.search.scan import Stamp, images_under, outermost, real_folders, why_unreachable
from lapclip.search.writer import Writer, clear, owned
from lapclip.units import LongWork, Progress

if TYPE_CHECKING:
    from lapclip.embedder import Embedder

FILES_PER_REPORT = 1000  # while scanning folders
BATCH = 32  # files a thread takes at once: enough for the model, few enough to share the last ones evenly
SECONDS_BETWEEN_COMMITS = 5.0
SPARE_BYTES = 2**28  # of disk space, never used
NUM_NAMED = 5  # unreadable files in a summary
EMBEDDING = "embedding images"
TRY_AGAIN = -1  # stored in place of the time, so that the file counts as changed


@dataclass
class Summary:
    """What an update did. New, changed and unchanged count files; embedded counts contents."""

    path: Path
    num_indexed: int = 0  # images in the index now
    num_embedded: int = 0
    num_new: int = 0
    num_changed: int = 0
    num_unchanged: int = 0
    num_moved: int = 0
    num_copied: int = 0  # new or changed files with a content that was embedded before
    num_removed: int = 0
    num_links: int = 0  # to images that are in the index by their own paths
    num_unreadable: int = 0  # files in the index now
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # the first of these, and why
    unreachable: dict[str, str] = field(default_factory=dict)  # folders left as they are, and why
    empty: list[str] = field(default_factory=list)  # folders that were named and hold no image
    unopened: list[str] = field(default_factory=list)  # subfolders left as they are
    # Folders that were named and have no readable file, and how many unreadable ones.
    unusable: dict[str, int] = field(default_factory=dict)
    extra: str | None = None  # optional dependencies that would read some of the unreadable files
    folders: list[str] = field(default_factory=list)
    num_replaced: int = 0  # older indexes of the same model that were removed
    seconds: float = 0.0


@dataclass(frozen=True)
class ReadFile:
    """A file that was opened: its content, and its pixels if the content is new; or why it cannot be used."""

    stamp: Stamp
    content: bytes = b""  # digest
    pixels: np.ndarray | None = None  # until they are embedded
    row_E: np.ndarray | None = None
    size: tuple[int, int] = (0, 0)  # width and height of the original
    why: str = ""
    extra: str | None = None


def update(
    embedder: "Embedder", *, name: str, model: str, folders: Sequence[str] = (), fresh: bool = False
) -> LongWork[Summary]:
    """Embeds the images of some folders, by default all of the index; if closed or killed, the next update continues.

    A model that was trained since has another index: everything is embedded again, then the old index is removed.
    """
    started = time.perf_counter()
    path = folder_for(model, embedder.fingerprint)
    earlier = [info for info in list_indexes() if info.model == model and info.path != path]
    with owned(path):
        info = read_info(path)
        if fresh:
            clear(path)
        if fresh or not (path / MODEL).is_dir():
            with atomic_path(path / MODEL, is_folder=True) as beside:
                embedder.save(beside)
        with Writer(path, embedder.width) as writer:
            known = writer.folders() or [*(info.folders if info else ())]
            known = known or [folder for old in earlier for folder in old.folders]
            asked = real_folders(folders, known)
            every = outermost([*known, *asked])
            if not every:
                raise UserError(
                    f"no folder is indexed with `{name}` yet", hint="name one: `lapclip index ~/Pictures`"
                )
            was_complete = info is not None and info.is_complete and not fresh
            writer.write_folders(every)
            writer.commit()
            info = IndexInfo(path, name, model, embedder.width, tuple(every), time.time(), was_complete)
            info.write()
            summary = Summary(path, folders=every)
            scopes = outermost(asked) if asked and was_complete else every
            yield from update_folders(writer, embedder, scopes, summary)
            summary.num_removed = writer.remove_gone()
            writer.commit()
            writer.compact_when_due()
            summary.num_indexed, summary.num_unreadable = writer.count()
            bad = writer.ask("SELECT path, why FROM file WHERE row IS NULL ORDER BY path LIMIT ?", NUM_NAMED)
            summary.unreadable += [(os.fsdecode(path), why) for path, why in bad]
            summary.unreadable = [*dict.fromkeys(summary.unreadable)][:NUM_NAMED]
            named = asked or ([] if summary.num_indexed else every)
            counts = {folder: writer.count(folder) for folder in named if folder not in summary.unreachable}
            summary.unusable = {folder: bad for folder, (num_images, bad) in counts.items() if not num_images}
            dropped = {*summary.empty} & {*summary.unusable} - {*known}
            summary.folders = [folder for folder in every if folder not in dropped]
            writer.write_folders(summary.folders)
            writer.commit()
        is_complete = was_complete or not summary.unreachable
        info = replace(info, folders=tuple(summary.folders), updated=time.time(), is_complete=is_complete)
        info.write()
    if is_complete:
        for old in earlier:
            with suppress(UserError):  # another process is updating it; removed next time
                remove(old)
                summary.num_replaced += 1
    summary.seconds = time.perf_counter() - started
    return summary


def update_folders(
    writer: Writer, embedder: "Embedder", folders: Sequence[str], summary: Summary
) -> LongWork[None]:
    """Walks folders and embeds their images; files that are gone are recorded, and not yet removed."""
    for folder in folders:
        if why := why_unreachable(folder, sum(writer.count(folder))):
            summary.unreachable[folder] = why
    reached = [folder for folder in folders if folder not in summary.unreachable]
    if not reached:
        folder, why = next(iter(summary.unreachable.items()))
        hint = f"connect its disk, or remove it from the index: `lapclip index --forget '{folder}'`"
        raise UserError(f"`{folder}` cannot be opened: {why}; its images stay in the index", hint=hint)
    inside, num_found = Folders(*summary.folders), 0
    for folder in reached:
        stamps, num_before = images_under(folder, inside, summary.unopened), num_found
        while some := list(islice(stamps, FILES_PER_REPORT)):
            num_found += len(some)
            summary.num_links += len(some) - writer.add_found(some)
            yield Progress("scanning folders", num_found)
        if num_found == num_before:
            summary.empty.append(folder)
    total, summary.num_unchanged = writer.compare_found(reached, summary.unopened)
    writer.commit()
    yield Progress(EMBEDDING, 0, total, needed_bytes=check_disk(writer, total))
    done = 0
    with embedder.side_by_side() as threads, closing(read_batches(writer, embedder, threads)) as batches:
        for batch in batches:
            store_batch(writer, batch, summary)
            done += len(batch)
            if time.monotonic() - writer.last_commit > SECONDS_BETWEEN_COMMITS:
                writer.commit()
            yield Progress(EMBEDDING, done, total, summary.num_unreadable)


def read_batches(writer: Writer, embedder: "Embedder", threads: int) -> Generator[list[ReadFile], None, None]:
    """The files to read, in batches and in order, with the embeddings of new contents."""

    def read_and_embed(paths: list[bytes]) -> list[ReadFile]:
        reads = [read for path in paths if (read := read_image(path, embedder, writer))]
        pixels = [read.pixels for read in reads if read.pixels is not None]
        rows = iter(embedder.pixels(np.stack(pixels)) if pixels else ())
        return [replace(r, pixels=None, row_E=next(rows)) if r.pixels is not None else r for r in reads]

    paths = writer.todo()
    some = iter(lambda: list(islice(paths, BATCH)), [])
    yield from in_order(read_and_embed, some, threads, ahead=2 * threads)


def read_image(path: bytes, embedder: "Embedder", writer: Writer) -> ReadFile | None:
    """Opens one file; its stamp is as it was before its bytes were read. None if it is gone. Runs in threads."""
    stamp = Stamp(path, 0, TRY_AGAIN)
    try:
        with open_regular(os.fsdecode(path)) as file:
            found = os.fstat(file.fileno())
            stamp = Stamp(path, found.st_size, found.st_mtime_ns)
            if found.st_size > MAX_BYTES:
                return ReadFile(stamp, why=f"is {found.st_size / 1e9:.1f} GB, too large for an image")
            data = file.read()
        content = digest(data)
        if writer.row_of(content) is not None:
            return ReadFile(stamp, content)
        decoded = embedder.decode(data)
        size = (int(decoded.record["width"]), int(decoded.record["height"]))
        return ReadFile(stamp, content, decoded.pixels, size=size)
    except Unreadable as problem:
        mtime_ns = stamp.mtime_ns if problem.extra is None else TRY_AGAIN
        return ReadFile(replace(stamp, mtime_ns=mtime_ns), why=str(problem), extra=problem.extra)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = f"cannot be read: {reason_for(error).lower()}"
        return ReadFile(replace(stamp, mtime_ns=TRY_AGAIN), why=why)


def store_batch(writer: Writer, reads: Sequence[ReadFile], summary: Summary) -> None:
    """Adds the embeddings of new contents, each once, and records every file."""
    new = {read.content: read for read in reads if read.row_E is not None}
    new = {content: read for content, read in new.items() if writer.row_of(content) is None}
    if new:
        rows_NE = np.stack([read.row_E for read in new.values() if read.row_E is not None])
        writer.add_images([*new], [read.size for read in new.values()], rows_NE)
        summary.num_embedded += len(new)
    for read in reads:
        if not read.why:
            store_file(writer, read, new.get(read.content) is read, summary)
            continue
        summary.num_unreadable, summary.extra = summary.num_unreadable + 1, summary.extra or read.extra
        summary.unreadable.append((os.fsdecode(read.stamp.path), read.why))
        del summary.unreadable[NUM_NAMED:]
        # One that was read before stays, unless the fault is in its bytes.
        if read.stamp.mtime_ns != TRY_AGAIN or writer.known_row(read.stamp.path) in (None, (None,)):
            writer.put(read.stamp, None, read.why)


def store_file(writer: Writer, read: ReadFile, was_embedded: bool, summary: Summary) -> None:
    known, row = writer.known_row(read.stamp.path), writer.row_of(read.content)
    assert row is not None, "all contents of a batch have been embedded"
    if known is None and writer.move(read.stamp, row):
        summary.num_moved += 1
        return
    writer.put(read.stamp, row)
    if known == (row,):
        summary.num_unchanged += 1  # only its time differs
        return
    summary.num_new += known is None
    summary.num_changed += known is not None
    summary.num_copied += not was_embedded


def check_disk(writer: Writer, num_images: int) -> int:
    """The bytes that new images need; UserError if there is not enough disk space."""
    needed = num_images * (writer.row_bytes + 500)  # 500: about what the database needs
    free = shutil.disk_usage(writer.path).free
    if needed + SPARE_BYTES > free:
        what = f"the index needs {needed / 1e9:.2f} GB in `{writer.path}`, which has {free / 1e9:.2f} GB left"
        raise UserError(what, hint="free some disk space, or set LAPCLIP_CACHE to a folder on a larger disk")
    return needed


def forget(info: IndexInfo, folder: str) -> int:
    """Removes a folder, without links, from an index; returns how many images it had."""
    with owned(info.path):
        with Writer(info.path, info.width) as writer:
            num_images = writer.remove_folder(folder)
            writer.commit()
            writer.compact_when_due()
            folders = tuple(writer.folders())
        replace(info, folders=folders).write()  # which index is updated last stays the same
    return num_images


def remove(info: IndexInfo) -> None:
    """Removes an index; UserError while another process is updating it."""
    with owned(info.path), index_errors(info.path):
        (info.path / INFO).unlink(missing_ok=True)  # first, so that a partly removed index is none
        shutil.rmtree(info.path)
