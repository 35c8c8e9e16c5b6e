"""The files of a pack, and adding to them so that a killed process leaves a pack that is merely unfinished."""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lapclip.data.decode import RECORD
from lapclip.errors import UserError, shortened

SECONDS_BETWEEN_SYNCS = 5.0
SECONDS_OF_PATIENCE = 20.0  # with another process that has the pack


@dataclass(frozen=True)
class Fault:
    """Why an image has no pixels; a lasting one lies in its bytes, so that nobody need try again."""

    why: str
    is_lasting: bool
    extra: str | None = None  # the group of optional dependencies that would read it


Outcome = tuple[np.ndarray, np.ndarray | None] | Fault  # a record and its pixels, None when these are known


class Journal:
    """The files of a pack, open for adding to."""

    def __init__(self, path: Path, size: int):
        self.path, self.size = path, size
        self.row_bytes = 3 * size * size
        try:
            self.records_file: BinaryIO = (path / "records").open("ab+")
            self.pixels_file: BinaryIO = (path / "pixels").open("ab+")
            self.whys_file: BinaryIO = (path / "why.jsonl").open("ab")
        except OSError as error:
            raise cannot_pack(path, error) from None
        self.records = self.read_whole_records()
        self.num_rows = int(self.records["row"].max(initial=-1)) + 1
        self.pixels_file.truncate(self.num_rows * self.row_bytes)
        is_decoded = self.records["row"] >= 0
        self.contents = np.unique(content_keys(self.records[is_decoded]))
        self.num_records = len(self.records)
        self.last_sync = time.monotonic()

    @cached_property
    def decoded(self) -> dict[bytes, int]:
        """The number of a record for each content; made only when there is something to add."""
        contents = self.records["content"]
        return {contents[i].tobytes(): int(i) for i in np.flatnonzero(self.records["row"] >= 0)}

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.sync()
        finally:
            for file in (self.records_file, self.pixels_file, self.whys_file):
                with contextlib.suppress(OSError):  # said by `sync` already
                    file.close()

    def read_whole_records(self) -> np.ndarray:
        """The records whose pixels are on the disk; what a killed process left half done is cut off."""
        num_records = os.fstat(self.records_file.fileno()).st_size // RECORD.itemsize
        num_rows = os.fstat(self.pixels_file.fileno()).st_size // self.row_bytes
        if not num_records:
            self.records_file.truncate(0)
            return np.empty(0, RECORD)
        records: np.ndarray = np.memmap(self.path / "records", RECORD, mode="r", shape=(num_records,))
        torn = np.flatnonzero(records["row"] >= num_rows)
        records = records[: torn[0]] if len(torn) else records
        self.records_file.truncate(len(records) * RECORD.itemsize)
        return records

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

    def add(self, stamp: int, outcome: Outcome) -> int:
        """Appends an image; returns the number of its record."""
        if isinstance(outcome, Fault):
            record = np.zeros((), RECORD)
            record["row"] = -1
            self.write(self.whys_file, (json.dumps({"stamp": stamp, "why": outcome.why}) + "\n").encode())
        else:
            record = self.add_pixels(*outcome)
        record["stamp"] = stamp
        if not isinstance(outcome, Fault):
            self.decoded.setdefault(record["content"].tobytes(), self.num_records)
        self.write(self.records_file, record.tobytes())
        self.num_records += 1
        if time.monotonic() - self.last_sync > SECONDS_BETWEEN_SYNCS:
            self.sync()
        return self.num_records - 1

    def add_pixels(self, record: np.ndarray, pixels: np.ndarray | None) -> np.ndarray:
        """The record with its row: a new one, or that of the same content."""
        known = self.decoded.get(record["content"].tobytes())
        if known is not None:
            return self.read_record(known)
        assert pixels is not None, "known contents have a record"
        record["row"] = self.num_rows
        self.write(self.pixels_file, pixels.tobytes())
        self.num_rows += 1
        return record

    def read_record(self, number: int) -> np.ndarray:
        self.records_file.flush()
        data = os.pread(self.records_file.fileno(), RECORD.itemsize, number * RECORD.itemsize)
        return np.frombuffer(data, RECORD)[0:1].copy().reshape(())

    def write(self, file: BinaryIO, data: bytes) -> None:
        try:
            file.write(data)
        except OSError as error:
            raise cannot_pack(self.path, error) from None

    def sync(self) -> None:
        """Pixels first: a record never promises what is not there."""
        try:
            for file in (self.pixels_file, self.whys_file, self.records_file):
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_pack(self.path, error) from None
        self.last_sync = time.monotonic()

    def chosen(self, numbers: np.ndarray) -> np.ndarray:
        """The records of these numbers; -1 gives the record of an image that is gone."""
        self.records_file.flush()
        chosen = np.zeros(len(numbers), RECORD)
        chosen["row"] = -1
        if self.num_records:
            every = np.memmap(self.path / "records", RECORD, mode="r", shape=(self.num_records,))
            chosen[numbers >= 0] = every[numbers[numbers >= 0]]
        return chosen


def content_keys(records: np.ndarray) -> np.ndarray:
    """The first eight bytes of each content, as numbers."""
    return np.ascontiguousarray(records["content"]).view("<u8")[::2] if len(records) else np.empty(0, "<u8")


def read_whys(path: Path) -> dict[int, str]:
    whys = {}
    if (path / "why.jsonl").exists():
        for line in (path / "why.jsonl").read_text("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn last line
                entry = json.loads(line)
                whys[int(entry["stamp"])] = shortened(str(entry["why"]))
    return whys


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time adds to a pack; the lock ends with the process. Waits a while for another one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / "lock").open("a")
    except OSError as error:
        raise cannot_pack(path, error) from None
    with file:
        give_up = time.monotonic() + SECONDS_OF_PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise UserError(
                        f"another process is packing into `{path}`",
                        hint="wait until it is done, then try again",
                    ) from None
                time.sleep(0.05)
        os.utime(path / "lock")
        yield


def cannot_pack(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write `{path}`: {(error.strerror or str(error)).lower()}",
        hint="make room; what is packed already is kept"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        else "set LAPCLIP_CACHE to a folder you may write to",
    )
