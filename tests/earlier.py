"""What an earlier version left on the disk, from `fixtures/earlier.tar.xz`, as if it had written it elsewhere.

Runs and models may be moved as they are. Packs and indexes know files by their whole paths, which are changed here.
"""

import hashlib
import json
import sqlite3
import tarfile
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
NUM_PHOTOS = 24


def unpack(here: Path) -> Path:
    """Runs, photos, a pack and an index that an earlier version wrote, as if it had written them here."""
    with tarfile.open(FIXTURES / "earlier.tar.xz") as file:
        file.extractall(here, filter="tar")
    there = json.loads((here / "expected.json").read_text())["root"]
    for file in (*here.glob("runs/*/config.toml"), *here.glob("cache/*/*/*.json")):
        file.write_text(file.read_text().replace(there, str(here)))
    move_pack(here, there)
    for file in here.glob("cache/index/*/files.db"):
        move_index(file, there.encode(), str(here).encode())
    return here


def digest(*parts: bytes) -> bytes:
    """What packs name things by: sixteen bytes of SHA-256 over all parts, each after its length."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()[:16]


def move_pack(here: Path, there: str) -> None:
    """A pack is in a folder named after the source's path; its records begin with what knows a file by its path."""
    (pack,) = here.glob("cache/packs/photos-24px-*")
    stamps = {}
    for photo in here.glob("photos/*.jpg"):
        size, mtime = photo.stat().st_size, photo.stat().st_mtime_ns
        old, new = (
            digest(photo.name.encode(), f"{size} {mtime} {path!a}".encode())[:8]
            for path in (f"{there}/photos/{photo.name}", str(photo))
        )
        stamps[old] = new
    records, step = (pack / "records").read_bytes(), (pack / "records").stat().st_size // NUM_PHOTOS
    moved = [records[i : i + step] for i in range(0, len(records), step)]
    (pack / "records").write_bytes(b"".join(stamps[record[:8]] + record[8:] for record in moved))
    pack.rename(pack.with_name(f"photos-24px-{digest(bytes([1]), f'{here}/photos'.encode()).hex()[:12]}"))


def move_index(file: Path, there: bytes, here: bytes) -> None:
    """The database of an index has whole paths, as bytes."""
    db = sqlite3.connect(file)
    for table in ("folder", "file"):
        for (path,) in db.execute(f"SELECT path FROM {table}").fetchall():
            db.execute(f"UPDATE {table} SET path = ? WHERE path = ?", (path.replace(there, here), path))
    db.commit()
    db.close()
