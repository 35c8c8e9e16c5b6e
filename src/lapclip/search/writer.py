"""An index open for writing, by one process at a time; if it is killed, what was committed stays intact.

Embeddings are synced before the database refers to them. Readers keep the snapshot they opened.
"""

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np

from lapclip.errors import UserError
from lapclip.files import Taken, read_lock, refuse_pipes, release_lock, take_lock, write_lock_owner
from lapclip.search.index import (
    FILES,
    INFO,
    LOCK,
    SCHEMA,
    VECTORS,
    VERSION,
    count_rows,
    damaged,
    index_errors,
    path_range,
    read_facts,
)
from lapclip.search.scan import Stamp

MAX_DEAD = 1000  # rows without a file; with more, and more than a third of all, the vectors are compacted
ROWS_PER_COPY = 4096
# What is on the disk now, what of it is to be read, and which indexed files are gone.
SCRATCH = """
CREATE TEMP TABLE found (path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER) WITHOUT ROWID;
CREATE TEMP TABLE todo (number INTEGER PRIMARY KEY, path BLOB);
CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY, row INTEGER);
CREATE INDEX gone_row ON gone (row);
"""
# Rows that some file has, renumbered without gaps; negative first, since rows are unique.
NEW_PLACES = """
CREATE TEMP TABLE IF NOT EXISTS place (old INTEGER PRIMARY KEY, new INTEGER);
DELETE FROM place;
INSERT INTO place SELECT row, row_number() OVER (ORDER BY row) - 1 FROM (SELECT DISTINCT row FROM file WHERE row >= 0);
"""
RENUMBER = """
DELETE FROM picture WHERE row NOT IN (SELECT old FROM place);
UPDATE picture SET row = -1 - (SELECT new FROM place WHERE old = row);
UPDATE picture SET row = -1 - row;
UPDATE file SET row = (SELECT new FROM place WHERE old = file.row) WHERE row IS NOT NULL;
"""


class Writer:
    """Adds files and embeddings to an index. Threads may look up contents while one thread writes."""

    def __init__(self, path: Path, width: int):
        self.path, self.width = path, width
        self.row_bytes = 4 * width
        self.lock = threading.RLock()
        with index_errors(path):
            refuse_pipes(path)
            self.db = sqlite3.connect(path / FILES, check_same_thread=False, isolation_level=None, timeout=30)
            try:
                # Readers keep their snapshot while we commit; a killed process leaves the last commit.
                self.db.execute("PRAGMA journal_mode = WAL")
                if not self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    self.create()
                facts = read_facts(self.db)
                if facts["width"] != width:
                    raise ValueError(f"its embeddings have {facts['width']} values, not {width}")
                self.run_all(SCRATCH)
                self.vectors_name = str(facts["vectors"])
                self.num_rows = count_rows(self.db)
                self.vectors = os.open(path / self.vectors_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                if os.fstat(self.vectors).st_size < self.num_rows * self.row_bytes:
                    os.close(self.vectors)
                    raise damaged(path, "some of its embeddings are missing")
                os.ftruncate(self.vectors, self.num_rows * self.row_bytes)  # what was never committed
            except BaseException:
                self.db.close()
                raise
        self.remove_vectors(keep=self.vectors_name)  # left by a compaction that was killed
        self.last_commit = time.monotonic()

    def create(self) -> None:
        self.remove_vectors(keep=None)  # of a lost database; not truncated: a reader may have them open
        self.db.execute("BEGIN IMMEDIATE")
        self.run_all(SCHEMA)
        facts = {"version": VERSION, "width": self.width, "vectors": VECTORS, "updated": time.time()}
        self.db.executemany("INSERT INTO about VALUES (?, ?)", facts.items())
        self.db.execute("COMMIT")

    def remove_vectors(self, keep: str | None) -> None:
        for path in self.path.glob(f"{VECTORS}*"):
            if path.name != keep:
                path.unlink(missing_ok=True)

    def run_all(self, statements: str) -> None:
        for statement in filter(str.strip, statements.split(";")):
            self.db.execute(statement)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with suppress(UserError) if kind else nullcontext():  # an earlier error is the one to report
                self.commit()
        finally:
            self.db.close()
            os.close(self.vectors)

    def ask(self, query: str, *values: object) -> list[tuple]:
        with self.lock, index_errors(self.path):
            return self.db.execute(query, values).fetchall()

    def write(self, statement: str, *values: object) -> int:
        """Changes something, to be committed later; returns the number of changed records."""
        with self.lock, index_errors(self.path):
            self.begin()
            return self.db.execute(statement, values).rowcount

    def begin(self) -> None:
        if not self.db.in_transaction:
            self.db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Embeddings first: the database never refers to rows that are not on the disk."""
        with self.lock, index_errors(self.path):
            if self.db.in_transaction:
                os.fsync(self.vectors)
                self.db.execute("UPDATE about SET value = ? WHERE key = 'updated'", [time.time()])
                self.db.execute("COMMIT")
        self.last_commit = time.monotonic()

    def folders(self) -> list[str]:
        return [os.fsdecode(path) for (path,) in self.ask("SELECT path FROM folder ORDER BY path")]

    def write_folders(self, folders: Iterable[str]) -> None:
        self.write("DELETE FROM folder")
        for folder in folders:
            self.write("INSERT INTO folder VALUES (?)", os.fsencode(folder))

    def count(self, folder: str = "/") -> tuple[int, int]:
        """The images and the unreadable files under a folder."""
        query = "SELECT count(row), count(*) - count(row) FROM file WHERE path >= ? AND path < ?"
        return self.ask(query, *path_range(folder))[0]

    def row_of(self, content: bytes) -> int | None:
        """The row of a content that was embedded before, even if no file has it any more."""
        found = self.ask("SELECT row FROM picture WHERE content = ?", content)
        return int(found[0][0]) if found else None

    def add_images(self, contents: list[bytes], sizes: list[tuple[int, int]], vectors_NE: np.ndarray) -> None:
        """Appends the embeddings of new contents, with the width and height of the originals."""
        data = np.ascontiguousarray(vectors_NE, dtype="<f4").tobytes()
        assert len(data) == len(contents) * self.row_bytes
        with index_errors(self.path):
            if os.pwrite(self.vectors, data, self.num_rows * self.row_bytes) < len(data):
                raise OSError(errno.ENOSPC, "no space left on device")
        for content, size in zip(contents, sizes, strict=True):
            self.write("INSERT INTO picture VALUES (?, ?, ?, ?)", self.num_rows, content, *size)
            self.num_rows += 1

    def add_found(self, stamps: Iterable[Stamp]) -> int:
        """Records files that are on the disk; returns how many, of which the same one counts once."""
        values = [(stamp.path, stamp.size, stamp.mtime_ns) for stamp in stamps]
        with self.lock, index_errors(self.path):
            self.begin()
            return self.db.executemany("INSERT OR IGNORE INTO found VALUES (?, ?, ?)", values).rowcount

    def compare_found(self, folders: Iterable[str], unopened: Iterable[str]) -> tuple[int, int]:
        """Compares what was found with what is known; the numbers of files to read and of unchanged images."""
        num_todo = self.write(
            "INSERT INTO todo (path) SELECT path FROM found "
            "LEFT JOIN file USING (path, size, mtime_ns) WHERE id IS NULL"
        )
        for folder in folders:
            self.write(
                "INSERT OR IGNORE INTO gone SELECT id, row FROM file WHERE path >= ? AND path < ? "
                "AND NOT EXISTS (SELECT 1 FROM found WHERE found.path = file.path)",
                *path_range(folder),
            )
        for folder in unopened:
            query = "DELETE FROM gone WHERE id IN (SELECT id FROM file WHERE path >= ? AND path < ?)"
            self.write(query, *path_range(folder))
        num_same = self.ask("SELECT count(row) FROM found JOIN file USING (path, size, mtime_ns)")
        return num_todo, int(num_same[0][0])

    def todo(self) -> Iterator[bytes]:
        """The paths of the files to read, ascending."""
        last, query = 0, "SELECT number, path FROM todo WHERE number > ? ORDER BY number LIMIT 1000"
        while some := self.ask(query, last):
            yield from (path for _, path in some)
            last = some[-1][0]

    def known_row(self, path: bytes) -> tuple[int | None] | None:
        """The row of a file that the index has, None where it could not be read; None for an unknown file."""
        found = self.ask("SELECT row FROM file WHERE path = ?", path)
        return found[0] if found else None

    def put(self, stamp: Stamp, row: int | None, why: str | None = None) -> None:
        """Records a file as it is now; a known path keeps its id."""
        self.write(
            "INSERT INTO file (path, size, mtime_ns, row, why) VALUES (?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE "
            "SET size = excluded.size, mtime_ns = excluded.mtime_ns, row = excluded.row, why = excluded.why",
            *(stamp.path, stamp.size, stamp.mtime_ns, row, why),
        )

    def move(self, stamp: Stamp, row: int) -> bool:
        """Gives a new path to a file that is gone and had the same content, if there is one."""
        found = self.ask("SELECT id FROM gone WHERE row = ? ORDER BY id LIMIT 1", row)
        for (id,) in found:
            place = (stamp.path, stamp.size, stamp.mtime_ns)
            self.write("UPDATE file SET path = ?, size = ?, mtime_ns = ? WHERE id = ?", *place, id)
            self.write("DELETE FROM gone WHERE id = ?", id)
        return bool(found)

    def remove_gone(self) -> int:
        """Removes the files that are gone and were not moved; returns how many images they are."""
        num_gone = int(self.ask("SELECT count(row) FROM gone")[0][0])
        self.write("DELETE FROM file WHERE id IN (SELECT id FROM gone)")
        return num_gone

    def remove_folder(self, folder: str) -> int:
        """Removes a folder and its files; returns how many images they are."""
        num_images, _ = self.count(folder)
        self.write("DELETE FROM file WHERE path >= ? AND path < ?", *path_range(folder))
        self.write("DELETE FROM folder WHERE path = ?", os.fsencode(folder))
        return num_images

    def compact_when_due(self) -> bool:
        """Drops the rows that no file has when there are many; readers keep the old vectors until they reopen."""
        num_live = int(self.ask("SELECT count(DISTINCT row) FROM file")[0][0])
        num_dead = self.num_rows - num_live
        if num_dead <= MAX_DEAD or 3 * num_dead <= self.num_rows:
            return False
        self.commit()
        name = f"{VECTORS}-{int(self.vectors_name.partition('-')[2] or 1) + 1}"
        with self.lock, index_errors(self.path):
            with self.db:  # rolled back if anything fails
                self.db.execute("BEGIN IMMEDIATE")
                self.run_all(NEW_PLACES)
                live_rows = [row for (row,) in self.ask("SELECT old FROM place ORDER BY new")]
                copy_rows(self.path / self.vectors_name, self.path / name, live_rows, self.width)
                self.run_all(RENUMBER)
                self.db.execute("UPDATE about SET value = ? WHERE key = 'vectors'", [name])
                self.db.execute("UPDATE about SET value = ? WHERE key = 'updated'", [time.time()])
            os.close(self.vectors)
            self.vectors = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC)
            (self.path / self.vectors_name).unlink(missing_ok=True)
        self.vectors_name, self.num_rows = name, num_live
        return True


def copy_rows(old: Path, new: Path, rows: list[int], width: int) -> None:
    """Copies some rows of a file of vectors into a new one."""
    vectors = np.memmap(old, dtype="<f4", mode="r").reshape(-1, width)
    with new.open("wb") as file:
        for start in range(0, len(rows), ROWS_PER_COPY):
            file.write(vectors[rows[start : start + ROWS_PER_COPY]].tobytes())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Creates the folder of an index if necessary, and holds its lock."""
    with index_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        try:
            handle = take_lock(path / LOCK)
        except Taken:
            owner = read_lock(path / LOCK).owner or "?"
            hint = "wait until it is done; images that are already embedded can be searched"
            raise UserError(f"process {owner} is updating this index", hint=hint) from None
        write_lock_owner(handle, os.getpid())
    try:
        yield
    finally:
        release_lock(handle)


def clear(path: Path) -> None:
    """Removes the content of an index but not its model, so that it can be rebuilt even without the run."""
    with index_errors(path):
        for file in path.iterdir():
            if file.name not in (LOCK, INFO) and not file.is_dir():
                file.unlink()
