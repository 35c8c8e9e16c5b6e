"""The index of a model, for reading: the embeddings of the images on this machine, and which files have them.

    files.db    which files there are, with their stamps, and the row that each one's content has; SQLite
    vectors     float32 rows, appended only; `files.db` says how many of them count, and what the file is called
    model/      a copy of the model, so that the index can be searched whatever becomes of the run
    about.json  whose index it is; written last, so that a folder with it is an index

Nothing here needs torch.
"""

import json
import os
import re
import sqlite3
import threading
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.errors import UserError, suggest
from lapclip.runs.run import RUNS, find_run
from lapclip.search.index import FILES, MODEL, VECTORS, VERSION, About, all_abouts, damaged, speaking

SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE folder (path BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE picture (row INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE, width INTEGER, height INTEGER);
CREATE TABLE file (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path BLOB NOT NULL UNIQUE, size INTEGER, mtime_ns INTEGER,
    row INTEGER, why TEXT);
CREATE INDEX file_row ON file (row);
"""
TRIES = 5  # a compaction may take away the vectors between two looks


@dataclass(frozen=True)
class Entry:
    """An image file of the index."""

    id: int  # stays when the file is moved or changed
    path: str  # absolute and without links; what is not Unicode in it as `os.fsdecode` has it
    row: int
    width: int  # of the original, upright
    height: int


class Index:
    """An index as it was when it was opened, also while somebody updates it. Threads may share it."""

    def __init__(self, about: About):
        self.path, self.name, self.model = about.path, about.name, about.model
        self.model_folder = about.path / MODEL
        self.lock = threading.Lock()
        for tries_left in reversed(range(TRIES)):
            with speaking(self.path):
                self.db = connect_to_read(self.path)
                self.identity = os.stat(self.path / FILES).st_ino
                self.facts = read_facts(self.db)  # from here on the database stands still for us
                self.width = int(self.facts["width"])
                self.updated = float(self.facts["updated"])
                num_rows = count_rows(self.db)
            try:
                self.vectors = map_vectors(self.path / str(self.facts["vectors"]), num_rows, self.width)
                break
            except FileNotFoundError:
                self.db.close()
                if not tries_left:
                    raise damaged(self.path, "its embeddings are gone") from None

    def close(self) -> None:
        """Lets go of the state that was seen; updates leave more on the disk while somebody holds an old one."""
        with self.lock:
            self.db.close()

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, query: str, *values: object) -> list[tuple]:
        with self.lock, speaking(self.path):
            return self.db.execute(query, values).fetchall()

    @cached_property
    def folders(self) -> list[str]:
        return [os.fsdecode(path) for (path,) in self.rows("SELECT path FROM folder ORDER BY path")]

    @cached_property
    def disks(self) -> list[str]:
        """Where disks within the folders are mounted."""
        with speaking(self.path):
            return disks_in(self.facts)

    @cached_property
    def num_pictures(self) -> int:
        """Files with an embedding; equal ones count each."""
        return int(self.rows("SELECT count(row) FROM file")[0][0])

    @cached_property
    def num_unreadable(self) -> int:
        return int(self.rows("SELECT count(*) FROM file WHERE row IS NULL")[0][0])

    def has_under(self, folder: str) -> bool:
        """Whether any image of the index lies under a folder."""
        query = "SELECT 1 FROM file WHERE row IS NOT NULL AND path >= ? AND path < ? LIMIT 1"
        return bool(self.rows(query, *under(folder)))

    def live_rows(self, folder: str | None = None, without: Sequence[str] = ()) -> np.ndarray:
        """The rows that some file has, under a folder if need be and not under some others; ascending, each once."""
        # As one text: a tuple a row would take most of the time, where there are a million.
        query = "SELECT group_concat(CAST(row AS INTEGER)) FROM file WHERE row IS NOT NULL"
        bounds = [*under(folder)] if folder is not None else []
        if bounds:
            query = f"{query} AND path >= ? AND path < ?"
        for other in without:
            query = f"{query} AND NOT (path >= ? AND path < ?)"
            bounds += under(other)
        text = self.rows(query, *bounds)[0][0]
        rows = np.unique(np.fromstring(text or "", dtype=np.int64, sep=","))
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(self.vectors):
            raise damaged(self.path, "it names embeddings that are not there")
        return rows

    def entries_at(self, row: int, folder: str | None = None) -> list[Entry]:
        """The files whose content has this row, by path; several are copies of one another."""
        query, bounds = f"{ENTRIES} WHERE file.row = ?", under(folder) if folder is not None else ()
        if bounds:
            query = f"{query} AND path >= ? AND path < ?"
        found = self.rows(f"{query} ORDER BY path", row, *bounds)
        with speaking(self.path):
            return [as_entry(one) for one in found]

    def entry(self, id: int) -> Entry | None:
        """The file with this id, if the index has it and it could be read."""
        if not -(2**63) <= id < 2**63:
            return None
        found = self.rows(f"{ENTRIES} WHERE file.id = ?", id)
        with speaking(self.path):
            return as_entry(found[0]) if found else None

    def unreadable(self, most: int = 100) -> list[tuple[str, str]]:
        """Some files that could not be read, and why."""
        found = self.rows("SELECT path, why FROM file WHERE row IS NULL ORDER BY path LIMIT ?", most)
        return [(os.fsdecode(path), str(why)) for path, why in found]

    def has_changed(self) -> bool:
        """Whether somebody updated, remade or removed the index since it was opened."""
        try:
            if os.stat(self.path / FILES).st_ino != self.identity:
                return True
            db = connect_to_read(self.path)
            try:
                return read_facts(db) != self.facts
            finally:
                db.close()
        except (OSError, sqlite3.Error, ValueError):
            return True


ENTRIES = "SELECT file.id, path, file.row, width, height FROM file JOIN picture ON picture.row = file.row"


def as_entry(found: tuple) -> Entry:
    id, path, row, width, height = found
    return Entry(int(id), os.fsdecode(path), int(row), int(width), int(height))


def under(folder: str) -> tuple[bytes, bytes]:
    """What the paths within a folder lie between: from the first, and before the second."""
    start = os.fsencode(os.path.realpath(folder)).rstrip(b"/")
    return start + b"/", start + b"0"  # which follows the slash


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that sees one state from its first look on, and writes nothing."""
    name = f"file:{url_path(path / FILES)}?mode=ro"
    if not os.access(path, os.W_OK) and not (path / f"{FILES}-wal").exists():
        name += "&immutable=1"  # nobody writes where SQLite could not note that we read
    db = sqlite3.connect(name, uri=True, check_same_thread=False, isolation_level=None, timeout=10)
    try:
        db.execute("BEGIN")
        db.execute("SELECT count(*) FROM about").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def url_path(path: Path) -> str:
    """A path within a URL, whatever bytes it is of."""
    return urllib.parse.quote(os.fsencode(path.absolute()))


def read_facts(db: sqlite3.Connection) -> dict[str, Any]:
    """What the database says of itself; refuses another version's."""
    facts = dict(db.execute("SELECT key, value FROM about").fetchall())
    if facts.get("version") != VERSION:
        raise ValueError(f"it is of version {facts.get('version')}, and this lapclip reads {VERSION}")
    name = str(facts.get("vectors"))
    if not re.fullmatch(rf"{VECTORS}(-\d+)?", name) or not 0 < int(facts.get("width", 0)) < 2**20:
        raise ValueError("it does not say where its embeddings are")
    return facts


def disks_in(facts: dict[str, Any]) -> list[str]:
    """What a database says of the disks within its folders; as JSON, in which any name can be written."""
    return [str(path) for path in json.loads(facts.get("disks", "[]"))]


def count_rows(db: sqlite3.Connection) -> int:
    """How many rows of the vectors count; what lies beyond them was never finished."""
    return int(db.execute("SELECT coalesce(max(row) + 1, 0) FROM picture").fetchone()[0])


def map_vectors(path: Path, num_rows: int, width: int) -> np.ndarray:
    if num_rows == 0:
        return np.empty((0, width), dtype=np.float32)
    if path.stat().st_size < num_rows * width * 4:
        raise damaged(path.parent, "some of its embeddings are gone")
    return np.memmap(path, dtype="<f4", mode="r", shape=(num_rows, width))


def all_indexes() -> list[Index]:
    """Every index that can be opened, the one updated last first."""
    found = []
    for about in all_abouts():
        try:
            found.append(Index(about))
        except UserError:
            continue
    return found


def find_index(model: str | None = None) -> Index:
    """The index of a model, by its run's name or path, its folder or the index's own name; or the one updated last."""
    found = abouts_of(model)
    if found:
        return Index(next((about for about in found if about.is_complete), found[0]))
    if model is None:
        is_trained = any(RUNS.glob("*/checkpoints/step-*"))
        hint = (
            "index a folder: `lapclip index ~/Pictures`"
            if is_trained
            else "train a model: `lapclip train photos/`"
        )
        raise UserError(
            "nothing is indexed yet" if is_trained else "there is no model and no index yet", hint=hint
        )
    like = suggest(model, [about.name for about in all_abouts()])
    raise UserError(
        f"there is no index of a model `{model}`{like}",
        hint=f"index a folder with it: `lapclip index ~/Pictures --model {model}`",
    )


def abouts_of(model: str | None) -> list[About]:
    """The indexes of a model, the one updated last first; two when it was trained on since. None: of the last model."""
    known = all_abouts()
    if model is None:
        return [about for about in known if about.model == known[0].model]
    path = path_of_model(model)
    return [about for about in known if about.model == path or about.path.name == model] or [
        about for about in known if path is None and about.name == model
    ]


def path_of_model(model: str) -> str | None:
    """The folder that a name or path of a model means, without links; None when there is none."""
    try:
        return os.path.realpath(find_run(model).path)
    except UserError:
        return os.path.realpath(model) if os.path.isdir(model) else None
