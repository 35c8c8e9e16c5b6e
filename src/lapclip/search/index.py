"""The index of a model: the embeddings of the images on this machine, and which files have them.

    files.db    the files, with size and time, and the row of each one's content; SQLite
    vectors     float32 rows, append-only; `files.db` says how many are valid, and the name of the file
    model/      a copy of the model, so that the index can be searched whatever becomes of the run
    about.json  which model and folders: enough to find an index, and to rebuild it when its other files are damaged

Nothing here needs torch.
"""

import hashlib
import io
import json
import os
import re
import sqlite3
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lapclip.errors import UserError, shortened, suggest, typed
from lapclip.files import WEIGHT_FILES, cache_folder, cannot_write, read_json, refuse_pipes, write_atomically
from lapclip.runs.run import RUNS, find_run
from lapclip.weights import hub

VERSION = 1
FILES, VECTORS, MODEL, INFO, LOCK = "files.db", "vectors", "model", "about.json", "lock"
# `picture` and `about` are names on disk: indexes of earlier versions have them.
SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE folder (path BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE picture (row INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE, width INTEGER, height INTEGER);
CREATE TABLE file (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path BLOB NOT NULL UNIQUE, size INTEGER, mtime_ns INTEGER,
    row INTEGER, why TEXT);
CREATE INDEX file_row ON file (row);
"""
ENTRIES = "SELECT file.id, path, file.row, width, height, mtime_ns FROM file JOIN picture USING (row)"
ROWS, COUNT = "SELECT row FROM file", "SELECT count(*) FROM file"
JOINED = "SELECT group_concat(CAST(row AS INTEGER)) FROM"  # a million tuples would take most of the time
STORAGE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR)
MAX_OPEN_TRIES = 5  # a compaction may replace the vectors between reading their name and opening them


@dataclass(frozen=True)
class IndexInfo:
    """The content of `about.json`."""

    path: Path
    name: str
    model: str  # path of the run or folder it was made with
    width: int
    folders: tuple[str, ...]
    updated: float
    is_complete: bool  # everything was embedded once; until then an older index of the same model is searched

    @property
    def fingerprint(self) -> str:
        """Of the model: the rows of another one mean something else."""
        return self.path.name[:16]

    def write(self) -> None:
        content = {**asdict(self), "version": VERSION}
        del content["path"]
        write_atomically(self.path / INFO, json.dumps(content))  # ASCII, so any file name can be stored


@dataclass(frozen=True)
class Entry:
    """An image file of the index."""

    id: int  # stays the same when the file is moved or changed
    path: str  # absolute, links resolved, decoded by `os.fsdecode`
    row: int
    width: int  # of the original, upright
    height: int
    mtime_ns: int  # of the file when it was indexed


@dataclass(frozen=True)
class Filter:
    """Which images of an index are wanted."""

    folder: str | None = None
    after_ns: int | None = None  # files modified then or later
    before_ns: int | None = None
    min_side: int | None = None  # pixels of the longer side
    without: tuple[str, ...] = ()  # folders

    def condition(self) -> tuple[str, list[Any]]:
        """As SQL on the table `file`, and its values."""
        inside = "path >= ? AND path < ?"
        tests: list[tuple[str, Sequence[Any]]] = [("file.row IS NOT NULL", ())]
        tests += [(inside, path_range(folder)) for folder in [self.folder] if folder is not None]
        tests += [(f"NOT ({inside})", path_range(folder)) for folder in self.without]
        numbers = {
            "mtime_ns >= ?": self.after_ns,
            "mtime_ns < ?": self.before_ns,
            "(SELECT max(width, height) FROM picture WHERE picture.row = file.row) >= ?": self.min_side,
        }
        tests += [(test, [number]) for test, number in numbers.items() if number is not None]
        values = [value for _, own in tests for value in own]
        return "WHERE " + " AND ".join(test for test, _ in tests), values


EVERY = Filter()


def parse_date(text: str) -> int:
    """When a day, a month or a year begins here, in nanoseconds: `2024-05-31`, `2024-05` or `2024`."""
    try:
        seconds = time.mktime(date.fromisoformat(text + "-01" * (2 - text.count("-"))).timetuple())
    except (ValueError, OverflowError):
        what = f"`{shortened(text, 40)}` is not a date"
        raise UserError(what, hint="write a date as `2024-05-31`, `2024-05` or `2024`") from None
    return int(max(-(2**63), min(2**63 - 1, seconds * 1e9)))  # what SQLite can compare


class Index:
    """A read-only snapshot of an index, consistent while another process updates it. Threads may share it."""

    def __init__(self, info: IndexInfo):
        self.path, self.name = info.path, info.name
        self.model, self.fingerprint = info.model, info.fingerprint
        self.model_folder = info.path / MODEL
        self.lock = threading.Lock()
        for tries_left in reversed(range(MAX_OPEN_TRIES)):
            with index_errors(self.path):
                self.db = connect_read_only(self.path)
                self.identity = os.stat(self.path / FILES).st_ino
                self.facts = read_facts(self.db)  # from here on this connection sees one state
                self.width = int(self.facts["width"])
                num_rows = count_rows(self.db)
            try:
                self.vectors = map_vectors(self.path / str(self.facts["vectors"]), num_rows, self.width)
                break
            except FileNotFoundError:
                self.db.close()
                if not tries_left:
                    raise damaged(self.path, "its embeddings are missing") from None

    def close(self) -> None:
        """Releases the snapshot; while it is open, SQLite cannot shrink the write-ahead log."""
        with self.lock:
            self.db.close()

    def rows(self, query: str, *values: object) -> list[tuple]:
        with self.lock, index_errors(self.path):
            return self.db.execute(query, values).fetchall()

    @cached_property
    def folders(self) -> list[str]:
        return [os.fsdecode(path) for (path,) in self.rows("SELECT path FROM folder ORDER BY path")]

    @cached_property
    def num_images(self) -> int:
        """Files with an embedding; equal ones count each."""
        return self.count(EVERY)

    def count(self, wanted: Filter) -> int:
        condition, values = wanted.condition()
        return int(self.rows(f"{COUNT} {condition}", *values)[0][0])

    def has_under(self, folder: str) -> bool:
        """Whether any image of the index is under a folder."""
        return self.count(Filter(folder)) > 0

    def live_rows(self, wanted: Filter = EVERY) -> np.ndarray:
        """The rows that some wanted file has; ascending, unique."""
        condition, values = wanted.condition()
        text = self.rows(f"{JOINED} ({ROWS} {condition})", *values)[0][0]
        rows = np.unique(np.fromstring(text or "", dtype=np.int64, sep=","))
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(self.vectors):
            raise damaged(self.path, "it refers to embeddings that do not exist")
        return rows

    def entries_at(self, row: int, wanted: Filter = EVERY) -> list[Entry]:
        """The wanted files whose content has this row, by path; several are copies of one another."""
        condition, values = wanted.condition()
        return self.entries(f"{condition} AND file.row = ? ORDER BY path", *values, row)

    def entry(self, id: int) -> Entry | None:
        """The readable file with this id, if there is one."""
        found = self.entries("WHERE file.id = ?", id) if -(2**63) <= id < 2**63 else []
        return found[0] if found else None

    def entries(self, condition: str, *values: object) -> list[Entry]:
        found = self.rows(f"{ENTRIES} {condition}", *values)
        with index_errors(self.path):
            return [Entry(int(id), os.fsdecode(path), *map(int, rest)) for id, path, *rest in found]

    def has_changed(self) -> bool:
        """Whether the index was updated, rebuilt or removed since it was opened."""
        try:
            if os.stat(self.path / FILES).st_ino != self.identity:
                return True
            with closing(connect_read_only(self.path)) as db:
                return read_facts(db) != self.facts
        except (OSError, sqlite3.Error, ValueError):
            return True


def path_range(folder: str) -> tuple[bytes, bytes]:
    """The half-open range that contains exactly the paths under a folder."""
    start = os.fsencode(os.path.realpath(folder)).rstrip(b"/")
    return start + b"/", start + b"0"  # "0" is the character after "/"


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that sees one state from its first query on."""
    refuse_pipes(path)  # by name: opening the files here would end the locks that SQLite has on them
    name = f"file:{urllib.parse.quote(os.fsencode((path / FILES).absolute()))}?mode=ro"
    if not os.access(path, os.W_OK) and not (path / f"{FILES}-wal").exists():
        name += "&immutable=1"  # SQLite cannot create its shared-memory file there, and nobody can write
    db = sqlite3.connect(name, uri=True, check_same_thread=False, isolation_level=None, timeout=10)
    db.execute("BEGIN")
    return db


def read_facts(db: sqlite3.Connection) -> dict[str, Any]:
    """The table `about` of the database; ValueError for another version's."""
    facts = dict(db.execute("SELECT key, value FROM about").fetchall())
    if facts.get("version") != VERSION:
        raise ValueError(f"it has version {facts.get('version')}, but this lapclip reads version {VERSION}")
    name = str(facts.get("vectors"))
    if not re.fullmatch(rf"{VECTORS}(-\d+)?", name) or not 0 < int(facts.get("width", 0)) < 2**20:
        raise ValueError("it does not record where its embeddings are")
    return facts


def count_rows(db: sqlite3.Connection) -> int:
    """How many rows of the vectors are valid; later ones were never committed."""
    return int(db.execute("SELECT coalesce(max(row) + 1, 0) FROM picture").fetchone()[0])


def map_vectors(path: Path, num_rows: int, width: int) -> np.ndarray:
    if num_rows == 0:
        return np.empty((0, width), dtype=np.float32)
    if path.stat().st_size < num_rows * width * 4:
        raise damaged(path.parent, "some of its embeddings are missing")
    return np.memmap(path, dtype="<f4", mode="r", shape=(num_rows, width))


@contextmanager
def index_errors(path: Path) -> Iterator[None]:
    """Turns errors of SQLite and the system about the index in this folder into a `UserError`."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_BUSY:
            hint = "wait until it is done, then try again"
            raise UserError(f"another program is using `{path / FILES}`", hint=hint) from None
        is_storage = code in STORAGE or (code == sqlite3.SQLITE_CANTOPEN and not os.access(path, os.W_OK))
        raise (cannot_write(path, OSError(str(error))) if is_storage else damaged(path, str(error))) from None
    except OSError as error:
        is_damage = isinstance(error, io.UnsupportedOperation)
        raise (damaged(path, str(error)) if is_damage else cannot_write(path, error)) from None
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> UserError:
    hint = f"rebuild it: `lapclip index --fresh --model {path.name}`"
    return UserError(f"the index in `{path}` cannot be used: {why}", hint=hint)


def indexes_folder() -> Path:
    return cache_folder() / "index"


def folder_for(model: str, fingerprint: str) -> Path:
    """Where the index of a model is: in a folder of its fingerprint, or of its path too while a copy of it has that."""
    shared = indexes_folder() / fingerprint
    own = shared.with_name(f"{fingerprint}-{hashlib.sha256(os.fsencode(model)).hexdigest()[:8]}")
    other = read_info(shared)
    is_taken = other and other.model not in (model, str(shared / MODEL)) and os.path.isdir(other.model)
    return own if is_taken or (own / INFO).exists() else shared


def list_indexes() -> list[IndexInfo]:
    """Every index, also those whose files are damaged; the one updated last first."""
    found = indexes_folder().glob("*")  # nothing where there is no such folder
    folders = [path for path in found if re.fullmatch("[0-9a-f]{16}(-[0-9a-f]{8})?", path.name)]
    return sorted(filter(None, map(read_info, folders)), key=lambda info: -info.updated)


def read_info(path: Path) -> IndexInfo | None:
    """The index in a folder, with default values if `about.json` is damaged; None where there is none."""
    try:
        return msgspec.convert({**read_json(path / INFO), "path": path}, IndexInfo)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.ValidationError):
        return IndexInfo(path, path.name, str(path / MODEL), 0, (), 0.0, is_complete=False)


def find_index(model: str | None = None) -> Index:
    """The index of a model, by its run's name or path, its folder or the index's own name; or the one updated last."""
    if found := indexes_of(model):
        return Index(next((info for info in found if info.is_complete), found[0]))
    if model is not None:
        hint = f"index a folder with it: `lapclip index ~/Pictures --model {typed(model)}`"
        near = suggest(model, [info.name for info in list_indexes()])
        if path_of_model(model) is None:
            hint = "`lapclip index --list` shows the indexes"
        raise UserError(f"there is no index of a model `{model}`{near}", hint=hint)
    if any(RUNS.glob("*/checkpoints/step-*")):
        raise UserError("nothing is indexed yet", hint="index a folder: `lapclip index ~/Pictures`")
    raise UserError("there is no model and no index yet", hint="train a model: `lapclip train photos/`")


def indexes_of(model: str | None) -> list[IndexInfo]:
    """The indexes of a model, the one updated last first; two when it was trained since. None: of the last model."""
    known = list_indexes()
    if model is None:
        return [info for info in known if info.model == known[0].model]
    path = path_of_model(model)
    found = [info for info in known if info.model == path or info.path.name == model]
    return found or [info for info in known if path is None and info.name == model]


def path_of_model(model: str) -> str | None:
    """The folder or file that a name or path of a model means, links resolved; None when there is none."""
    try:
        return os.path.realpath(find_run(model).path)
    except UserError:
        is_model = os.path.isdir(model) or (model.endswith(WEIGHT_FILES) and os.path.isfile(model))
        found = model if is_model else hub.local(model)
        return os.path.realpath(found) if found else None
