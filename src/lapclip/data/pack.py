"""The pack: each image of a source decoded and resized once, in a file that is mapped into memory.

    records     one RECORD an image ever seen, appended as it is done: what is there need not be done again
    pixels      bytes [3, S, S] one after the other, in the order of their rows
    why.jsonl   what is wrong with the images that could not be decoded
    pack.json   what this folder is, for `lapclip data clean`

An image is known by its name and stamp without being read, or by its content without being decoded.
"""

import json
import shutil
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lapclip.data.catalogue import Catalogue, Reader
from lapclip.data.decode import RECORD, Unreadable, decode, digest
from lapclip.data.journal import Fault, Journal, Outcome, locked, read_whys
from lapclip.data.workers import held, worker_pool
from lapclip.errors import UserError
from lapclip.files import cache_folder, write_atomically
from lapclip.machine.hardware import num_usable_cores
from lapclip.units import Progress

VERSION = 1
PACKING = "packing images"
PIECE = 32  # images a process decodes at once
FEW = 200  # images that are decoded here, sooner than processes start
SPARE_BYTES = 2**30  # of the disk, never taken


@dataclass(frozen=True)
class Pack:
    """A source's images, by their numbers in its catalogue."""

    path: Path
    size: int  # pixels of each side
    records: np.ndarray  # RECORD, one an image
    unreadable: dict[int, str]  # why, by number
    num_reused: int  # images that were there already
    num_needing: Counter[str] = field(
        default_factory=Counter
    )  # images that an optional dependency would read

    @property
    def num_bytes(self) -> int:
        return folder_bytes(self.path)


def size_for(image_size: int) -> int:
    """A little above the size of training, so that crops of it are worth looking at."""
    return -(-image_size * 9 // 64) * 8


def packs_folder() -> Path:
    return cache_folder() / "packs"


def folder_for(identity: str, size: int) -> Path:
    """Where the pack of a source lies; the identity is what finds the same images again."""
    plain = "".join(c if c.isalnum() else "-" for c in Path(identity).name)[:40].strip("-") or "source"
    return (
        packs_folder()
        / f"{plain}-{size}px-{digest(bytes([VERSION]), identity.encode(errors='surrogateescape')).hex()[:12]}"
    )


def pack(
    catalogue: Catalogue, identity: str, size: int, workers: int | None = None
) -> Generator[Progress, None, Pack]:
    """Decodes what is not in the pack yet, and says how far it is; killed, it goes on from there the next time."""
    path = folder_for(identity, size)
    stamps = np.fromiter(all_stamps(catalogue), dtype=np.uint64, count=len(catalogue.names))
    with locked(path):
        describe_folder(path, identity, size)
        with Journal(path, size) as journal:
            found = journal.find(stamps)
            num_reused = int((journal.chosen(found)["row"] >= 0).sum())
            missing = np.flatnonzero((found < 0) & (stamps != 0))
            needed = len(missing) * (journal.row_bytes + RECORD.itemsize)
            check_disk(needed)
            passing: dict[int, str] = {}
            num_needing: Counter[str] = Counter()
            num_unreadable = 0
            yield Progress(PACKING, 0, len(missing), 0, needed)
            decoder = Decoder(catalogue.reader, size, journal.contents)
            for done, numbers, outcomes in decode_all(decoder, missing, workers):
                for number, outcome in zip(numbers.tolist(), outcomes, strict=True):
                    num_unreadable += isinstance(outcome, Fault)
                    if isinstance(outcome, Fault) and not outcome.is_lasting:
                        passing[number] = outcome.why  # tried again the next time
                        num_needing.update(filter(None, [outcome.extra]))
                    else:
                        found[number] = journal.add(int(stamps[number]), outcome)
                yield Progress(PACKING, done, len(missing), num_unreadable, needed)
            records = journal.chosen(found)
        whys = read_whys(path)
        broken = np.flatnonzero(records["row"] < 0).tolist()
        unreadable = {i: passing.get(i) or whys.get(int(stamps[i]), "is missing") for i in broken}
        return Pack(path, size, records, unreadable, num_reused, num_needing)


def describe_folder(path: Path, identity: str, size: int) -> None:
    """Says whose folder it is, for `lapclip data clean`."""
    if not (path / "pack.json").exists():
        write_atomically(
            path / "pack.json", json.dumps({"version": VERSION, "source": identity, "size": size})
        )


def all_stamps(catalogue: Catalogue) -> Iterator[int]:
    """A number for each image's name and state; 0 for one that is gone."""
    for index, name in enumerate(catalogue.names):
        stamp = catalogue.reader.stamp(index)
        key = digest(name.encode(errors="surrogateescape"), stamp.encode())[:8]
        yield int.from_bytes(key, "little") or 1 if stamp else 0


def decode_all(
    decoder: "Decoder", numbers: np.ndarray, workers: int | None
) -> Iterator[tuple[int, np.ndarray, list[Outcome]]]:
    """How many are done, some images' numbers, and what became of them; in order, by all cores together."""
    pieces = deque(numbers[i : i + PIECE] for i in range(0, len(numbers), PIECE))
    done = 0
    if len(numbers) <= FEW or workers == 0:
        for piece in pieces:
            done += len(piece)
            yield done, piece, decoder.decode(piece)
        return
    workers = min(workers or num_usable_cores(), len(pieces))
    with worker_pool(decoder, workers) as pool:
        waiting: deque[tuple[np.ndarray, Future]] = deque()
        while pieces or waiting:
            while pieces and len(waiting) < 2 * workers:  # a bounded number of images is in flight
                waiting.append((pieces[0], pool.submit(decode_held, pieces.popleft())))
            piece, future = waiting.popleft()
            done += len(piece)
            yield done, piece, future.result()


def decode_held(numbers: np.ndarray) -> list[Outcome]:
    return held().decode(numbers)


@dataclass
class Decoder:
    """Decodes images, but none that it or the pack has met before."""

    reader: Reader
    size: int
    packed: np.ndarray  # keys of contents, ascending
    met: set[int] = field(default_factory=set)

    def decode(self, numbers: np.ndarray) -> list[Outcome]:
        return [self.decode_one(int(number)) for number in numbers]

    def decode_one(self, number: int) -> Outcome:
        try:
            data = self.reader.read(number)
            content = digest(data)
            key = int.from_bytes(content[:8], "little")
            if self.is_known(key):
                record = np.zeros((), RECORD)
                record["content"] = np.void(content)
                return record, None
            decoded = decode(data, self.size, content)
            self.met.add(key)
            return decoded.record, decoded.pixels
        except Unreadable as problem:
            return Fault(str(problem), is_lasting=problem.extra is None, extra=problem.extra)
        except OSError as error:
            return Fault(f"cannot be read: {(error.strerror or str(error)).lower()}", is_lasting=False)
        except ValueError as error:
            return Fault(str(error), is_lasting=False)

    def is_known(self, key: int) -> bool:
        place = int(np.searchsorted(self.packed, np.uint64(key)))
        return key in self.met or (place < len(self.packed) and int(self.packed[place]) == key)


def needed_bytes(catalogue: Catalogue, size: int) -> int:
    """What a pack takes on the disk, at most."""
    return len(catalogue.names) * (3 * size * size + RECORD.itemsize)


def room_bytes() -> int:
    """What may be taken of the disk that packs lie on."""
    folder = packs_folder()
    while not folder.exists():
        folder = folder.parent
    return max(0, shutil.disk_usage(folder).free - SPARE_BYTES)


def check_disk(needed: int) -> None:
    room = room_bytes()
    if needed > room:
        raise UserError(
            f"the pack needs {needed / 1e9:.2f} GB more in `{packs_folder()}`, and {room / 1e9:.2f} GB can be had",
            hint="make room (`lapclip data clean` lists old packs), or set LAPCLIP_CACHE to a folder on a larger disk",
        )


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@dataclass(frozen=True)
class Kept:
    """A pack in the cache."""

    path: Path
    source: str
    num_bytes: int
    last_used: float


def list_packs() -> list[Kept]:
    """Every pack in the cache, the one used last first."""
    kept = []
    for file in packs_folder().glob("*/pack.json"):
        try:
            source = str(json.loads(file.read_text("utf-8"))["source"])
        except (OSError, ValueError, KeyError, TypeError):
            source = "?"
        kept.append(
            Kept(file.parent, source, folder_bytes(file.parent), (file.parent / "lock").stat().st_mtime)
        )
    return sorted(kept, key=lambda pack: -pack.last_used)


def remove_pack(kept: Kept) -> None:
    """Only what has the form of a pack, and that nobody is packing into."""
    with locked(kept.path):
        shutil.rmtree(kept.path)
