"""The pack: each image of a source decoded and resized once, in a file that is mapped into memory.

A pack is a folder in the cache. `records` holds what is known of each image, `pixels` its decoded row; both
only grow, and pixels reach the disk before their records, so a killed process leaves a pack that is merely unfinished.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lapclip import files
from lapclip.data.catalogue import Catalogue, Reader
from lapclip.data.decode import RECORD, WHOLE, Decoded, Unreadable, decode, digest
from lapclip.data.files import MISSING
from lapclip.data.workers import submit_ahead, with_held, worker_pool
from lapclip.errors import UserError, reason_for
from lapclip.machine.hardware import num_usable_cores
from lapclip.units import LongWork, Progress

VERSION = 1
FAULTS = "unreadable.json"
PACKING = "packing images"
PIECE = 32  # images a process decodes at once
MIN_FOR_WORKERS = 200  # images; fewer are decoded here, sooner than processes start
SPARE_BYTES = 2**30  # of the disk, never taken
SECONDS_BETWEEN_SYNCS = 5.0
LOCK_PATIENCE_SECONDS = 20.0  # for another process that has the pack


@dataclass(frozen=True)
class Pack:
    """A source's images, by their numbers in its catalogue."""

    path: Path
    size: int  # pixels of each side
    records: np.ndarray  # RECORD, one an image
    unreadable: dict[int, str] = field(default_factory=dict)  # why, by number
    num_reused: int = 0  # images that were there already
    num_needing_extra: int = 0  # unreadable images that an optional dependency would read


Outcome = Decoded | Unreadable


def size_for(image_size: int) -> int:
    """A little above the size of training, so that random crops of it are worth taking."""
    return -(-image_size * 9 // 64) * 8


def packs_folder() -> Path:
    return files.cache_folder() / "packs"


def folder_for(identity: str, size: int) -> Path:
    """The folder of a source's pack; the identity opens the same source from any folder, and through any link."""
    identity = os.path.realpath(identity) if os.path.isabs(identity) else identity
    plain = "".join(c if c.isalnum() else "-" for c in Path(identity).name)[:40].strip("-") or "source"
    key = digest(bytes([VERSION]), identity.encode(errors="surrogateescape")).hex()[:12]
    return packs_folder() / f"{plain}-{size}px-{key}"


def pack(catalogue: Catalogue, identity: str, size: int, workers: int | None = None) -> LongWork[Pack]:
    """Decodes what is not in the pack yet, and yields its progress; when killed, the next call goes on from there."""
    path = folder_for(identity, size)
    stamps = np.fromiter(all_stamps(catalogue), dtype=np.uint64, count=len(catalogue.names))
    with locked(path):
        describe_folder(path, identity, size)
        with contextlib.closing(Journal(path, size)) as journal:
            found = journal.find(stamps)
            records = journal.chosen(found)
            # An older record of an image that is not square is made again; its pixels are kept.
            has_thumb = (records["traits"] & WHOLE != 0) | (records["width"] == records["height"])
            is_packed = (records["row"] >= 0) & has_thumb
            known: dict[str, str] = {}  # why unchanged files cannot be decoded, by stamp
            with contextlib.suppress(OSError, ValueError):
                known = files.read_json(path / FAULTS)
            is_known = np.array([stamp == 0 or str(stamp) in known for stamp in stamps.tolist()], dtype=bool)
            missing = np.flatnonzero(~is_packed & ~is_known)
            num_new = int((records["row"][missing] < 0).sum())
            needed = num_new * journal.row_bytes + len(missing) * RECORD.itemsize
            check_disk(needed)
            yield Progress(PACKING, 0, len(missing), 0, needed)
            faults: dict[int, Unreadable] = {}
            done = 0
            for piece, outcomes in decode_all(catalogue.reader, size, missing, workers):
                for number, outcome in zip(piece.tolist(), outcomes, strict=True):
                    if isinstance(outcome, Unreadable):
                        faults[number] = outcome
                    else:
                        found[number] = journal.add(int(stamps[number]), outcome)
                done += len(piece)
                yield Progress(PACKING, done, len(missing), len(faults), needed)
            records = journal.chosen(found)
        if lasting := {str(stamps[n]): str(why) for n, why in faults.items() if not why.may_pass}:
            files.write_atomically(path / FAULTS, json.dumps(known | lasting))
    num_needing_extra = sum(fault.extra is not None for fault in faults.values())
    broken = np.flatnonzero(records["row"] < 0).tolist()
    unreadable = {n: str(faults.get(n) or known.get(str(stamps[n]), MISSING.what)) for n in broken}
    return Pack(path, size, records, unreadable, int(is_packed.sum()), num_needing_extra)


def all_stamps(catalogue: Catalogue) -> Iterator[int]:
    """A number for each image's name and state; 0 for one that is gone."""
    for index, name in enumerate(catalogue.names):
        stamp = catalogue.reader.stamp(index)
        key = digest(name.encode(errors="surrogateescape"), stamp.encode())[:8]
        yield int.from_bytes(key, "little") or 1 if stamp else 0


def decode_all(
    reader: Reader, size: int, numbers: np.ndarray, workers: int | None
) -> Iterator[tuple[np.ndarray, list[Outcome]]]:
    """Some images' numbers, and what became of them; in order, by all cores together."""
    pieces = [numbers[i : i + PIECE] for i in range(0, len(numbers), PIECE)]
    if len(numbers) <= MIN_FOR_WORKERS or workers == 0:
        yield from ((piece, decode_some((reader, size), piece)) for piece in pieces)
        return
    workers = min(workers or num_usable_cores(), len(pieces))
    with worker_pool((reader, size), workers) as pool:
        futures = submit_ahead(lambda piece: pool.submit(with_held, decode_some, piece), pieces, 2 * workers)
        for piece, future in zip(pieces, futures, strict=True):
            yield piece, future.result()


def decode_some(held: tuple[Reader, int], numbers: np.ndarray) -> list[Outcome]:
    """Decodes images by number, in whichever process this is; held are their reader and the size."""
    return [decode_one(held[0], int(number), held[1]) for number in numbers]


def decode_one(reader: Reader, number: int, size: int) -> Outcome:
    try:
        return decode(reader.read(number), size)
    except Unreadable as problem:
        return Unreadable(str(problem), problem.extra)  # a new one: the caught one holds all of the image
    except OSError as error:
        return Unreadable(f"cannot be read: {reason_for(error).lower()}", may_pass=True)
    except ValueError as error:
        return Unreadable(str(error), may_pass=True)


class Journal:
    """The files of a pack, open for appending."""

    def __init__(self, path: Path, size: int):
        self.path, self.row_bytes = path, 3 * size * size
        with files.writing(path):
            self.pixels_file: BinaryIO = (path / "pixels").open("ab+")
            self.records_file: BinaryIO = (path / "records").open("ab+")
        # Records whose pixels are not on the disk, as a killed process leaves them, are cut off.
        num_rows = os.fstat(self.pixels_file.fileno()).st_size // self.row_bytes
        records = self.map_records(os.fstat(self.records_file.fileno()).st_size // RECORD.itemsize)
        torn = np.flatnonzero(records["row"] >= num_rows)
        self.records = records[: torn[0]] if len(torn) else records
        self.records_file.truncate(len(self.records) * RECORD.itemsize)
        self.num_records = len(self.records)
        self.num_rows = int(self.records["row"].max(initial=-1)) + 1
        self.pixels_file.truncate(self.num_rows * self.row_bytes)
        self.last_sync = time.monotonic()

    @cached_property
    def rows(self) -> dict[bytes, int]:
        """The row of each content; made only when there is something to add."""
        known = self.records[self.records["row"] >= 0]
        return dict(zip(map(bytes, known["content"]), known["row"].tolist(), strict=True))

    def close(self) -> None:
        try:
            self.sync()
        finally:
            for file in (self.records_file, self.pixels_file):
                with contextlib.suppress(OSError):  # reported by `sync` already
                    file.close()

    def map_records(self, count: int) -> np.ndarray:
        if not count:
            return np.empty(0, RECORD)  # an empty file cannot be mapped
        return np.memmap(self.path / "records", RECORD, mode="r", shape=(count,))

    def find(self, stamps: np.ndarray) -> np.ndarray:
        """The record of each stamp, -1 where there is none."""
        if not len(self.records):
            return np.full(len(stamps), -1)
        order = np.argsort(self.records["stamp"], kind="stable")
        ordered = self.records["stamp"][order]
        # From the right: of several records with one stamp the last one counts.
        place = np.searchsorted(ordered, stamps, side="right") - 1
        is_found = (place >= 0) & (ordered[place] == stamps)
        return np.where(is_found, order[place], -1)

    def add(self, stamp: int, decoded: Decoded) -> int:
        """Appends an image; returns the number of its record."""
        record = decoded.record
        row = self.rows.setdefault(record["content"].tobytes(), self.num_rows)
        record["stamp"], record["row"] = stamp, row
        with files.writing(self.path):
            if row == self.num_rows:  # no image of the same content is there
                self.pixels_file.write(decoded.pixels.tobytes())
                self.num_rows += 1
            self.records_file.write(record.tobytes())
        self.num_records += 1
        if time.monotonic() - self.last_sync > SECONDS_BETWEEN_SYNCS:
            self.sync()
        return self.num_records - 1

    def sync(self) -> None:
        """Pixels first: a record never promises what is not there."""
        with files.writing(self.path):
            for file in (self.pixels_file, self.records_file):
                file.flush()
                os.fsync(file.fileno())
        self.last_sync = time.monotonic()

    def chosen(self, numbers: np.ndarray) -> np.ndarray:
        """The records of these numbers; -1 gives the record of an image that is gone."""
        self.records_file.flush()
        chosen = np.zeros(len(numbers), RECORD)
        chosen["row"] = -1
        chosen[numbers >= 0] = self.map_records(self.num_records)[numbers[numbers >= 0]]
        return chosen


def describe_folder(path: Path, identity: str, size: int) -> None:
    """Writes whose folder it is, for `lapclip data remove`."""
    if not (path / "pack.json").exists():
        about = {"version": VERSION, "source": identity, "size": size}
        files.write_atomically(path / "pack.json", json.dumps(about))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time adds to a pack; the lock ends with the process. Waits a while for another one."""
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        with files.writing(path):
            try:
                path.mkdir(parents=True, exist_ok=True)
                handle = files.take_lock(path / "lock")
                break
            except (files.Taken, FileNotFoundError):  # the second when it was removed at this moment
                if time.monotonic() > deadline:
                    problem = f"another process is packing into `{path}`"
                    raise UserError(problem, hint="wait until it is done, then try again") from None
    try:
        os.utime(handle)  # when it was last used
        yield
    finally:
        files.release_lock(handle, keep=True)


def has_room(sources: list[tuple[Catalogue, str]], size: int) -> bool:
    """Whether the packs of all these sources fit on the disk, each given with its identity."""
    needed = sum(len(catalogue.names) for catalogue, _ in sources) * (3 * size * size + RECORD.itemsize)
    return needed <= free_bytes() + sum(folder_bytes(folder_for(name, size)) for _, name in sources)


def free_bytes() -> int:
    """What may be taken of the disk that packs lie on."""
    folder = packs_folder()
    while not folder.exists():
        folder = folder.parent
    return max(0, shutil.disk_usage(folder).free - SPARE_BYTES)


def check_disk(needed: int) -> None:
    if needed > (free := free_bytes()):
        what = f"the pack needs {needed / 1e9:.2f} GB more in `{packs_folder()}`, and {free / 1e9:.2f} GB are free"
        larger = "or set LAPCLIP_CACHE to a folder on a larger disk"
        raise UserError(what, hint=f"free some space (`lapclip data remove` lists old packs), {larger}")


def folder_bytes(path: Path) -> int:
    """Of its files; those that are removed meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


@dataclass(frozen=True)
class CachedPack:
    """A pack in the cache."""

    path: Path
    source: str
    num_bytes: int
    last_used: float


def list_packs() -> list[CachedPack]:
    """Every pack in the cache, the one used last first."""
    found = []
    for file in packs_folder().glob("*/pack.json"):
        try:
            source = str(files.read_json(file)["source"])
        except (OSError, ValueError, KeyError):
            source = "?"
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            last_used = (file.parent / "lock").stat().st_mtime
            found.append(CachedPack(file.parent, source, folder_bytes(file.parent), last_used))
    return sorted(found, key=lambda pack: -pack.last_used)


def remove_pack(pack: CachedPack) -> None:
    """Removes a pack, unless another process is packing into it."""
    with locked(pack.path):
        files.remove_folder(pack.path)
