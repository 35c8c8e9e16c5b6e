"""The files of a pack, and adding to them so that a killed process leaves a pack that is merely unfinished."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lapclip.data.catalogue import shortened
from lapclip.data.decode import RECORD
from lapclip.errors import UserError

SECONDS_BETWEEN_SYNCS = 5.0
Outcome = (
    tuple[np.ndarray, np.ndarray | None] | str
)  # a record and its pixels, None when known; or why it has none


class Journal:
    """The files of a pack, open for adding to."""

    def __init__(self, path: Path, size: int):
        self.path, self.size = path, size
        self.row_bytes = 3 * size * size
        try:
            self.records_file: BinaryIO = (path / "records").open("ab+")
            self.pixels_file: BinaryIO = (path / "pixels").open("ab+")
        except OSError as error:
            raise cannot_pack(path, error) from None
        self.records = self.read_whole_records()
        self.num_rows = int(self.records["row"].max(initial=-1)) + 1
        self.pixels_file.truncate(self.num_rows * self.row_bytes)
        is_decoded = self.records["row"] >= 0
        self.contents = np.unique(content_keys(self.records[is_decoded]))
        self.decoded: dict[
            bytes, int
        ] = {}  # record by content, looked up only when there is something to add
        self.added: list[np.ndarray] = []
        self.last_sync = time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.sync()
        self.records_file.close()
        self.pixels_file.close()

    def read_whole_records(self) -> np.ndarray:
        """The records whose pixels are on the disk; what a killed process left half done is cut off."""
        self.records_file.seek(0)
        num_records = os.fstat(self.records_file.fileno()).st_size // RECORD.itemsize
        num_rows = os.fstat(self.pixels_file.fileno()).st_size // self.row_bytes
        records = np.fromfile(self.records_file, dtype=RECORD, count=num_records)
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
        """Appends a picture; returns the number of its record."""
        if isinstance(outcome, str):
            record = np.zeros((), RECORD)
            record["row"] = -1
            with (self.path / "why.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"stamp": stamp, "why": outcome}) + "\n")
        else:
            record, pixels = outcome
            if not self.decoded:
                self.decoded = {
                    r["content"].tobytes(): i for i, r in enumerate(self.records) if r["row"] >= 0
                }
            known = self.decoded.get(record["content"].tobytes())
            if known is not None:
                record = self.record(known).copy()
            else:
                assert pixels is not None, "known contents have a record"
                record["row"] = self.num_rows
                self.write(self.pixels_file, pixels.tobytes())
                self.num_rows += 1
        record["stamp"] = stamp
        number = len(self.records) + len(self.added)
        if not isinstance(outcome, str):
            self.decoded.setdefault(record["content"].tobytes(), number)
        self.write(self.records_file, record.tobytes())
        self.added.append(record)
        if time.monotonic() - self.last_sync > SECONDS_BETWEEN_SYNCS:
            self.sync()
        return number

    def record(self, number: int) -> np.ndarray:
        known = len(self.records)
        return self.added[number - known] if number >= known else np.array(self.records[number])

    def write(self, file: BinaryIO, data: bytes) -> None:
        try:
            file.write(data)
        except OSError as error:
            raise cannot_pack(self.path, error) from None

    def sync(self) -> None:
        """Pixels first: a record never promises what is not there."""
        for file in (self.pixels_file, self.records_file):
            file.flush()
            os.fsync(file.fileno())
        self.last_sync = time.monotonic()

    def chosen(self, numbers: np.ndarray) -> np.ndarray:
        """The records of these numbers; -1 gives the record of a picture that is gone."""
        gone = np.zeros((), RECORD)
        gone["row"] = -1
        every = np.concatenate([self.records, np.array(self.added, dtype=RECORD), gone[None]])
        return every[numbers]


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
    """One process at a time adds to a pack; the lock ends with the process."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / "lock").open("a")
    except OSError as error:
        raise cannot_pack(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is packing into `{path}`", hint="wait until it is done, then try again"
            ) from None
        os.utime(path / "lock")
        yield


def cannot_pack(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write `{path}`: {(error.strerror or str(error)).lower()}",
        hint="make room, or set LAPCLIP_CACHE to a folder you may write to; what is packed already is kept",
    )
