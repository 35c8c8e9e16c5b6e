"""Which indexes there are, and in words what can go wrong with one. What stands in `about.json` is enough to find an
index, and to make it anew when its other files are damaged.
"""

import errno
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lapclip.errors import UserError
from lapclip.files import cache_folder, write_atomically

VERSION = 1
FILES, VECTORS, MODEL, ABOUT, LOCK = "files.db", "vectors", "model", "about.json", "lock"


@dataclass(frozen=True)
class About:
    """Whose index a folder is."""

    path: Path
    name: str
    model: str  # path of the run or folder it was made with
    width: int
    folders: tuple[str, ...]
    updated: float
    is_complete: bool  # once everything was embedded; until then an older index of the same model is searched

    def write(self) -> None:
        content = {**asdict(self), "version": VERSION}
        del content["path"]
        write_atomically(self.path / ABOUT, json.dumps(content))  # ASCII, which any name can be written in


@contextmanager
def speaking(path: Path) -> Iterator[None]:
    """Says in words what SQLite or the system refuses to do for the index in this folder."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise cannot_index(path, OSError(errno.ENOSPC, "no space left")) from None
        is_barred = code == sqlite3.SQLITE_CANTOPEN and not os.access(path, os.W_OK)
        if is_barred or code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
            raise cannot_index(path, OSError(errno.EACCES, str(error))) from None
        if code == sqlite3.SQLITE_BUSY:
            raise UserError(
                f"another program is using `{path / FILES}`", hint="wait until it is done, then try again"
            ) from None
        raise damaged(path, str(error)) from None
    except OSError as error:
        raise cannot_index(path, error) from None
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> UserError:
    is_default = [about.path for about in all_abouts()][:1] == [path]
    which = "" if is_default else f" --model {path.name}"
    return UserError(
        f"the index in `{path}` cannot be used: {why}", hint=f"make it anew: `lapclip index --fresh{which}`"
    )


def cannot_index(path: Path, error: OSError) -> UserError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return UserError(
        f"cannot keep the index in `{path}`: {(error.strerror or str(error)).lower()}",
        hint="make room; what is indexed already is kept"
        if is_full
        else "set LAPCLIP_CACHE to a folder you may write to",
    )


def indexes_folder() -> Path:
    return cache_folder() / "index"


def all_abouts() -> list[About]:
    """Every index there is, also those whose files are damaged; the one updated last first."""
    try:
        folders = [path for path in indexes_folder().iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)]
    except OSError:
        return []
    return sorted(filter(None, map(read_about, folders)), key=lambda about: -about.updated)


def read_about(path: Path) -> About | None:
    """Whose index a folder is; with nothing but its name where `about.json` is damaged, None where there is none."""
    try:
        said = json.loads((path / ABOUT).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        said = None
    said = said if isinstance(said, dict) else {}
    about = About(path, path.name, str(path / MODEL), 0, (), 0.0, False)
    kinds: dict[str, Any] = {"name": str, "model": str, "width": int, "updated": float, "is_complete": bool}
    fitting = {key: said[key] for key, kind in kinds.items() if isinstance(said.get(key), kind)}
    folders = said.get("folders")
    names = [name for name in folders if isinstance(name, str)] if isinstance(folders, list) else []
    return replace(about, **fitting, folders=tuple(names))


def remove_files(path: Path) -> None:
    """Removes an index; `about.json` first, so that half of one is none."""
    with speaking(path):
        (path / ABOUT).unlink(missing_ok=True)
        shutil.rmtree(path)
