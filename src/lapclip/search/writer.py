"""An index open for writing: one process at a time, and whenever it is killed what was committed stays whole.

Embeddings are synced before the database says that they are there. Those who read go on with the state they have seen.
"""

import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from lapclip.errors import UserError
from lapclip.files import Taken, read_lock, release_lock, take_lock, write_lock_owner
from lapclip.search.index import ABOUT, FILES, LOCK, MODEL, VECTORS, VERSION, damaged, speaking
from lapclip.search.scan import Stamp, is_under
from lapclip.search.store import SCHEMA, count_rows, disks_in, read_facts, under

SECONDS_BETWEEN_COMMITS = 5.0
FEW_DEAD = 1000  # rows that no file has; so many, and a third of all, are worth a new file of vectors
ROWS_AT_ONCE = 4096  # copied by a compaction
# What is on the disk now, what of it is to be read, and which files are no longer there: beside the index, and on the
# disk too where they are many.
SCRATCH = """
CREATE TEMP TABLE found (path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER) WITHOUT ROWID;
CREATE TEMP TABLE todo (number INTEGER PRIMARY KEY, path BLOB);
CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY, row INTEGER);
CREATE INDEX gone_row ON gone (row);
"""


class Writer:
    """Adds files and embeddings to an index. Threads may look up contents while one of them writes."""

    def __init__(self, path: Path, width: int):
        self.path, self.width = path, width
        self.row_bytes = 4 * width
        self.lock = threading.RLock()
        with speaking(path):
            self.db = sqlite3.connect(path / FILES, check_same_thread=False, isolation_level=None, timeout=30)
            try:
                # Readers keep their state while we commit; a killed process leaves the last commit.
                self.db.execute("PRAGMA journal_mode = WAL")
                if not self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    self.create()
                facts = read_facts(self.db)
                if facts["width"] != width:
                    raise ValueError(f"its embeddings have {facts['width']} numbers, not {width}")
                self.run_all(SCRATCH)
                self.vectors_name = str(facts["vectors"])
                self.num_rows = count_rows(self.db)
                self.vectors = os.open(path / self.vectors_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                if os.fstat(self.vectors).st_size < self.num_rows * self.row_bytes:
                    os.close(self.vectors)
                    raise damaged(path, "some of its embeddings are gone")
                os.ftruncate(self.vectors, self.num_rows * self.row_bytes)  # what was never committed
            except BaseException:
                self.db.close()
                raise
        for left in path.glob(f"{VECTORS}*"):  # by a compaction that was killed
            if left.name != self.vectors_name:
                left.unlink(missing_ok=True)
        self.last_commit = time.monotonic()

    def create(self) -> None:
        for left in self.path.glob(
            f"{VECTORS}*"
        ):  # of a lost database; never cut, for somebody may be reading it
            left.unlink()
        self.db.execute("BEGIN IMMEDIATE")
        self.run_all(SCHEMA)
        facts = {"version": VERSION, "width": self.width, "vectors": VECTORS, "updated": time.time()}
        self.db.executemany("INSERT INTO about VALUES (?, ?)", facts.items())
        self.db.execute("COMMIT")

    def run_all(self, statements: str) -> None:
        for statement in filter(str.strip, statements.split(";")):
            self.db.execute(statement)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with (
                suppress(UserError) if kind else speaking(self.path)
            ):  # the first problem is the one to hear of
                self.commit()
        finally:
            self.db.close()
            os.close(self.vectors)

    def ask(self, query: str, *values: object) -> list[tuple]:
        with self.lock, speaking(self.path):
            return self.db.execute(query, values).fetchall()

    def write(self, statement: str, *values: object) -> int:
        """Changes something, to be committed later; how many records it changed."""
        with self.lock, speaking(self.path):
            if not self.db.in_transaction:
                self.db.execute("BEGIN IMMEDIATE")
            return self.db.execute(statement, values).rowcount

    def commit(self) -> None:
        """Embeddings first: the database never promises what is not there."""
        with self.lock, speaking(self.path):
            if self.db.in_transaction:
                os.fsync(self.vectors)
                self.db.execute("UPDATE about SET value = ? WHERE key = 'updated'", [time.time()])
                self.db.execute("COMMIT")
        self.last_commit = time.monotonic()

    def commit_when_due(self) -> None:
        if time.monotonic() - self.last_commit > SECONDS_BETWEEN_COMMITS:
            self.commit()

    def folders(self) -> list[str]:
        return [os.fsdecode(path) for (path,) in self.ask("SELECT path FROM folder ORDER BY path")]

    def write_folders(self, folders: Iterable[str]) -> None:
        self.write("DELETE FROM folder")
        for folder in folders:
            self.write("INSERT INTO folder VALUES (?)", os.fsencode(folder))

    def disks(self) -> list[str]:
        """Where disks within the folders were mounted when they were last seen."""
        with self.lock, speaking(self.path):
            return disks_in(read_facts(self.db))

    def write_disks(self, disks: Iterable[str]) -> None:
        self.write("INSERT OR REPLACE INTO about VALUES ('disks', ?)", json.dumps(sorted(disks)))

    def count_images(self) -> int:
        return int(self.ask("SELECT count(row) FROM file")[0][0])

    def count_unreadable(self) -> int:
        return int(self.ask("SELECT count(*) FROM file WHERE row IS NULL")[0][0])

    def count_under(self, folder: str) -> int:
        """Files known under a folder."""
        return int(self.ask("SELECT count(*) FROM file WHERE path >= ? AND path < ?", *under(folder))[0][0])

    def row_of(self, content: bytes) -> int | None:
        """The row of a content that was embedded before, also when no file has it any more."""
        found = self.ask("SELECT row FROM picture WHERE content = ?", content)
        return int(found[0][0]) if found else None

    def add_images(self, contents: list[bytes], sizes: list[tuple[int, int]], vectors_NE: np.ndarray) -> None:
        """Appends embeddings: of contents that have none yet, with the width and height of the originals."""
        data = np.ascontiguousarray(vectors_NE, dtype="<f4").tobytes()
        assert len(data) == len(contents) * self.row_bytes
        with speaking(self.path):
            at, left = self.num_rows * self.row_bytes, memoryview(data)
            while left:
                written = os.pwrite(self.vectors, left, at)
                at, left = at + written, left[written:]
        for content, size in zip(contents, sizes, strict=True):
            self.write("INSERT INTO picture VALUES (?, ?, ?, ?)", self.num_rows, content, *size)
            self.num_rows += 1

    def note_found(self, stamps: Iterable[Stamp]) -> None:
        """Some files that are on the disk; the same one may come twice."""
        values = [(stamp.path, stamp.size, stamp.mtime_ns) for stamp in stamps]
        with self.lock, speaking(self.path):
            if not self.db.in_transaction:
                self.db.execute("BEGIN IMMEDIATE")
            self.db.executemany("INSERT OR IGNORE INTO found VALUES (?, ?, ?)", values)

    def sort_out(self, scopes: Iterable[str], unopened: Iterable[str]) -> tuple[int, int]:
        """Compares what was found with what is known; the number of files to read, and of images left as they are."""
        num_todo = self.write(
            "INSERT INTO todo (path) SELECT found.path FROM found LEFT JOIN file ON file.path = found.path "
            "WHERE file.id IS NULL OR file.size != found.size OR file.mtime_ns != found.mtime_ns"
        )
        for scope in scopes:
            self.write(
                "INSERT OR IGNORE INTO gone SELECT id, row FROM file WHERE path >= ? AND path < ? "
                "AND NOT EXISTS (SELECT 1 FROM found WHERE found.path = file.path)",
                *under(scope),
            )
        for folder in unopened:
            self.write(
                "DELETE FROM gone WHERE id IN (SELECT id FROM file WHERE path >= ? AND path < ?)",
                *under(folder),
            )
        num_same = self.ask(
            "SELECT count(*) FROM found JOIN file ON file.path = found.path WHERE file.row IS NOT NULL "
            "AND file.size = found.size AND file.mtime_ns = found.mtime_ns"
        )
        return num_todo, int(num_same[0][0])

    def todo(self) -> Iterator[bytes]:
        """The paths of the files to read, ascending."""
        last = 0
        while some := self.ask(
            "SELECT number, path FROM todo WHERE number > ? ORDER BY number LIMIT 1000", last
        ):
            yield from (path for _, path in some)
            last = some[-1][0]

    def known_row(self, path: bytes) -> tuple[int, int | None] | None:
        """The id and the row of a file that the index has; the row is None where it could not be read."""
        found = self.ask("SELECT id, row FROM file WHERE path = ?", path)
        return found[0] if found else None

    def put(self, stamp: Stamp, row: int | None, why: str | None = None) -> None:
        """Notes a file as it is now; a known path keeps its id."""
        self.write(
            "INSERT INTO file (path, size, mtime_ns, row, why) VALUES (?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE "
            "SET size = excluded.size, mtime_ns = excluded.mtime_ns, row = excluded.row, why = excluded.why",
            *(stamp.path, stamp.size, stamp.mtime_ns, row, why),
        )

    def move(self, stamp: Stamp, row: int) -> bool:
        """Gives a new path to a file that is gone and had the same content, if there is one."""
        found = self.ask("SELECT id FROM gone WHERE row = ? ORDER BY id LIMIT 1", row)
        for (id,) in found:
            self.write(
                "UPDATE file SET path = ?, size = ?, mtime_ns = ? WHERE id = ?",
                *(stamp.path, stamp.size, stamp.mtime_ns, id),
            )
            self.write("DELETE FROM gone WHERE id = ?", id)
        return bool(found)

    def drop_gone(self) -> int:
        """Removes the files that are gone and were not moved; how many images these are."""
        num_gone = int(self.ask("SELECT count(row) FROM gone")[0][0])
        self.write("DELETE FROM file WHERE id IN (SELECT id FROM gone)")
        return num_gone

    def drop_folder(self, folder: str) -> int:
        """Removes a folder and its files; how many images these are."""
        inside = "FROM file WHERE path >= ? AND path < ?"
        num_pictures = int(self.ask(f"SELECT count(row) {inside}", *under(folder))[0][0])
        self.write(f"DELETE {inside}", *under(folder))
        self.write("DELETE FROM folder WHERE path = ?", os.fsencode(folder))
        self.write_disks(disk for disk in self.disks() if disk != folder and not is_under(disk, [folder]))
        return num_pictures

    def compact_when_due(self) -> bool:
        """Leaves out the rows that no file has, when they are many; readers keep the old file until they look again."""
        num_live = int(self.ask("SELECT count(DISTINCT row) FROM file")[0][0])
        num_dead = self.num_rows - num_live
        if num_dead <= FEW_DEAD or 3 * num_dead <= self.num_rows:
            return False
        self.commit()
        number = int(self.vectors_name.partition("-")[2] or 1) + 1
        name = f"{VECTORS}-{number}"
        in_use = "SELECT DISTINCT row FROM file WHERE row IS NOT NULL ORDER BY row"
        live_rows = np.array(self.ask(in_use), dtype=np.int64).reshape(-1)
        with speaking(self.path):
            copy_rows(self.path / self.vectors_name, self.path / name, live_rows, self.width)
        with self.lock, speaking(self.path):
            self.db.execute("BEGIN IMMEDIATE")
            self.db.execute("CREATE TEMP TABLE place (old INTEGER PRIMARY KEY, new INTEGER)")
            places = ((int(old), new) for new, old in enumerate(live_rows))
            self.db.executemany("INSERT INTO place VALUES (?, ?)", places)
            self.db.execute("DELETE FROM picture WHERE row NOT IN (SELECT old FROM place)")
            # Below zero first, where no row is in the way of another.
            self.db.execute("UPDATE picture SET row = -1 - (SELECT new FROM place WHERE old = row)")
            self.db.execute("UPDATE picture SET row = -1 - row")
            self.db.execute(
                "UPDATE file SET row = (SELECT new FROM place WHERE old = file.row) WHERE row IS NOT NULL"
            )
            self.db.execute("UPDATE about SET value = ? WHERE key = 'vectors'", [name])
            self.db.execute("UPDATE about SET value = ? WHERE key = 'updated'", [time.time()])
            self.db.execute("COMMIT")
            self.db.execute("DROP TABLE place")
            os.close(self.vectors)
            self.vectors = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC)
            (self.path / self.vectors_name).unlink(missing_ok=True)
        self.vectors_name, self.num_rows = name, num_live
        return True


def copy_rows(old: Path, new: Path, rows: np.ndarray, width: int) -> None:
    """Writes some rows of a file of vectors into another one, some at a time."""
    vectors = np.memmap(old, dtype="<f4", mode="r").reshape(-1, width)
    with new.open("wb") as file:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            file.write(vectors[rows[start : start + ROWS_AT_ONCE]].tobytes())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Makes the folder of an index, if need be, and holds its lock; the lock ends with the process."""
    with speaking(path):
        path.mkdir(parents=True, exist_ok=True)
        try:
            handle = take_lock(path / LOCK)
        except Taken:
            owner = read_lock(path / LOCK).owner
            raise UserError(
                f"process {owner or '?'} is updating this index",
                hint="wait until it is done; what it has embedded so far can be searched",
            ) from None
        write_lock_owner(handle, os.getpid())
    try:
        yield
    finally:
        release_lock(handle)


def clear(path: Path) -> None:
    """Removes what an index holds but not its model, so that it can be made anew, from the run or without it."""
    with speaking(path):
        for file in path.iterdir():
            if file.name in (MODEL, LOCK, ABOUT):
                continue
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            else:
                file.unlink()
