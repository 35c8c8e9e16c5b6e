"""The index on the disk: what readers see while it is written, compacted, damaged or removed."""

import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lapclip.errors import UserError
from lapclip.search import writer as writing
from lapclip.search.index import Filter, Index, IndexInfo, find_index, indexes_folder, list_indexes
from lapclip.search.scan import Stamp
from lapclip.search.update import forget
from lapclip.search.writer import Writer, owned

WIDTH = 4


def row_for(number: int) -> np.ndarray:
    return np.full(WIDTH, number, dtype=np.float32)


def content_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put_images(writer: Writer, numbers: range, folder: bytes = b"/photos") -> None:
    """Files `0.jpg` and so on, each with a content of its own, embedded as its number."""
    vectors_NE = np.stack([row_for(number) for number in numbers])
    first = writer.num_rows
    writer.add_images([content_of(number) for number in numbers], [(8, 6)] * len(numbers), vectors_NE)
    for number in numbers:
        writer.put(Stamp(b"%b/%d.jpg" % (folder, number), 1, 1), first + number - numbers.start)


def make_index(count: int = 5, fingerprint: str = "0" * 16, **said) -> IndexInfo:
    path = indexes_folder() / fingerprint
    info = IndexInfo(path, "mine", "/runs/mine", WIDTH, ("/photos",), time.time(), True)
    info = IndexInfo(**{**vars(info), **said})
    with owned(path), Writer(path, WIDTH) as writer:
        writer.write_folders(info.folders)
        if count:
            put_images(writer, range(count))
    info.write()
    return info


def numbers_in(index: Index) -> dict[str, float]:
    """What every file is embedded as, by name: its number, if all is well."""
    return {
        os.path.basename(entry.path): float(index.vectors[row][0])
        for row in index.live_rows().tolist()
        for entry in index.entries_at(row)
    }


def as_numbered(names: Iterable[int]) -> dict[str, float]:
    return {f"{number}.jpg": float(number) for number in names}


def test_an_index_is_read_as_it_was_written():
    info = make_index()
    with Writer(info.path, WIDTH) as writer:
        writer.put(Stamp(b"/photos/other/caf\xe9.jpg", 1, 1), 2)  # a copy of 2.jpg, in no encoding
        writer.put(Stamp(b"/photos/bad.jpg", 1, 1), None, "is text")
    index = find_index()
    assert index.num_images == 6 and index.folders == ["/photos"]
    assert index.live_rows().tolist() == [0, 1, 2, 3, 4]
    first, second = index.entries_at(2)
    assert first.path == "/photos/2.jpg" and os.fsencode(second.path) == b"/photos/other/caf\xe9.jpg"
    assert (first.row, first.width, first.height) == (2, 8, 6) and index.entry(first.id) == first
    other = Filter("/photos/other")
    assert index.live_rows(other).tolist() == [2] and index.live_rows(Filter("/photo")).tolist() == []
    assert index.entries_at(2, other) == [second]
    assert index.entry(99) is None and index.entry(2**70) is None and index.entries_at(99) == []


def test_a_reader_keeps_its_state_through_updates_and_compaction(monkeypatch):
    monkeypatch.setattr(writing, "MAX_DEAD", 2)
    info = make_index(9)
    before = Index(info)
    seen = numbers_in(before)
    assert seen == as_numbered(range(9)) and not before.has_changed()
    with Writer(info.path, WIDTH) as writer:
        for number in range(6):
            writer.write("DELETE FROM file WHERE path = ?", b"/photos/%d.jpg" % number)
        put_images(writer, range(20, 23))
        writer.commit()
        assert writer.compact_when_due()
        assert writer.num_rows == 6
        assert (numbers_in(before), before.num_images) == (seen, 9)
        put_images(writer, range(30, 32))
    assert before.has_changed() and numbers_in(before) == seen
    now = Index(info)
    assert numbers_in(now) == as_numbered([*range(6, 9), *range(20, 23), *range(30, 32)])
    assert not now.has_changed()
    assert [path.name for path in info.path.glob("vectors*")] == ["vectors-2"]


def test_what_was_never_committed_is_cut_off_and_written_again():
    info = make_index(3)
    with (info.path / "vectors").open("ab") as file:
        file.write(b"\x7f" * 37)
    (info.path / "vectors-9").write_bytes(b"left by a killed compaction")
    assert numbers_in(Index(info)) == as_numbered(range(3))
    with Writer(info.path, WIDTH) as writer:
        put_images(writer, range(3, 5))
    assert numbers_in(Index(info)) == as_numbered(range(5))
    assert not (info.path / "vectors-9").exists()
    with pytest.raises(ZeroDivisionError), Writer(info.path, WIDTH) as writer:
        put_images(writer, range(5, 7))
        raise ZeroDivisionError
    assert numbers_in(Index(info)) == as_numbered(range(7)), "an error takes nothing with it"


def test_a_full_disk_is_said_and_what_was_there_stays():
    info = make_index(3)
    with pytest.raises(UserError, match="no space") as raised, Writer(info.path, WIDTH) as writer:
        put_images(writer, range(3, 5))
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, writer.vectors)
        os.close(full)
        put_images(writer, range(5, 7))
    assert "free some disk space" in raised.value.hint
    assert numbers_in(Index(info)) in (as_numbered(range(3)), as_numbered(range(5)))


@pytest.mark.parametrize("name", ["files.db", "vectors", "both"])
@pytest.mark.parametrize("harm", ["overwritten", "cut", "gone", "other"])
def test_a_damaged_index_is_said_with_a_way_out(name, harm):
    info = make_index(400)
    for file in ("files.db", "vectors") if name == "both" else (name,):
        spoil(info.path / file, harm)
    if (name, harm) in (("vectors", "overwritten"), ("vectors", "other")):
        return  # any bytes are numbers
    for use in (numbers_in_all, lambda: Writer(info.path, WIDTH).__exit__(None)):
        if use is not numbers_in_all and harm == "overwritten":
            continue  # a writer may not come by the bytes in question
        try:
            use()
        except UserError as problem:
            assert "index --fresh" in problem.hint, problem
        else:
            assert use is not numbers_in_all and name != "vectors" and harm == "gone"  # made again


def numbers_in_all() -> None:
    with closing(find_index()) as index:
        numbers_in(index)


def spoil(path: Path, harm: str) -> None:
    match harm:
        case "overwritten":
            data = bytearray(path.read_bytes())
            for place in range(100, len(data), 512):
                data[place : place + 256] = os.urandom(256)
            path.write_bytes(data)
        case "cut":
            os.truncate(path, path.stat().st_size // 2)
        case "gone":
            path.unlink()
        case "other":
            path.write_bytes(b"not what you think" * 1000)


def test_a_hostile_index_cannot_name_other_files_or_rows():
    info = make_index(3)
    with sqlite3.connect(info.path / "files.db") as db:
        db.execute("UPDATE file SET row = 1000000 WHERE row = 1")
    db.close()
    with pytest.raises(UserError, match="do not exist"):
        Index(info).live_rows()
    with sqlite3.connect(info.path / "files.db") as db:
        db.execute("UPDATE about SET value = '../../secret' WHERE key = 'vectors'")
    db.close()
    with pytest.raises(UserError, match="cannot be used"):
        Index(info)


@pytest.mark.parametrize(
    "said", ["", "[]", "null", '{"name": 3, "folders": "x", "updated": "y"}', "[" * 100_000]
)
def test_a_damaged_about_file_stops_nothing(said):
    info = make_index(3)
    (info.path / "about.json").write_text(said)
    assert numbers_in(find_index()) == as_numbered(range(3))
    assert find_index(info.path.name).num_images == 3


def test_the_index_updated_last_is_found_and_a_finished_one_before_a_newer_of_the_same_model():
    with pytest.raises(UserError, match="no model and no index yet"):
        find_index()
    make_index(1, "a" * 16, updated=1.0)
    make_index(2, "b" * 16, updated=2.0, name="yours", model="/runs/yours")
    make_index(3, "c" * 16, updated=3.0, is_complete=False)  # `mine`, trained on
    assert [Index(info).num_images for info in list_indexes()] == [3, 2, 1]
    assert find_index().num_images == 1
    assert find_index("yours").num_images == 2 and find_index("c" * 16).num_images == 3
    forget(list_indexes()[-1], "/photos")
    assert list_indexes()[-1].updated == 1.0, "forgetting a folder does not change which index is used"
    with pytest.raises(UserError, match="did you mean `yours`"):
        find_index("yuors")


def test_one_process_at_a_time_writes():
    path = indexes_folder() / ("0" * 16)
    with owned(path), pytest.raises(UserError, match=f"process {os.getpid()} is updating"), owned(path):
        pass
    with owned(path):
        pass


def test_a_forgotten_folder_takes_only_its_own_images():
    info = make_index(3, folders=("/photos", "/photos-2"))
    with Writer(info.path, WIDTH) as writer:
        put_images(writer, range(10, 12), b"/photos-2")
    assert forget(info, "/photos") == 3
    assert numbers_in(find_index()) == as_numbered(range(10, 12))
    assert find_index().folders == ["/photos-2"] and list_indexes()[0].folders == ("/photos-2",)


def test_an_index_in_a_folder_that_cannot_be_written_can_be_read():
    info = make_index(3)
    if os.access(info.path, os.W_OK) and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    info.path.chmod(0o555)
    assert numbers_in(Index(info)) == as_numbered(range(3))
    info.path.chmod(0o755)


def test_fifty_thousand_images_open_within_a_quarter_of_a_second():
    count = 50_000
    path = indexes_folder() / ("0" * 16)
    path.mkdir(parents=True)
    with Writer(path, WIDTH) as writer:
        writer.write_folders(["/photos"])  # begins a transaction
        with writer.lock:
            images = ((number, content_of(number), 8, 6) for number in range(count))
            writer.db.executemany("INSERT INTO picture VALUES (?, ?, ?, ?)", images)
            files = ((b"/photos/%03d/%d.jpg" % (number % 100, number), number) for number in range(count))
            writer.db.executemany("INSERT INTO file (path, size, mtime_ns, row) VALUES (?, 1, 1, ?)", files)
        os.truncate(path / "vectors", count * writer.row_bytes)
    info = IndexInfo(path, "mine", "/runs/mine", WIDTH, ("/photos",), time.time(), True)
    started = time.process_time()  # which others on the machine do not lengthen
    index = Index(info)
    assert len(index.live_rows()) == count
    assert time.process_time() - started < 0.25
    assert len(index.live_rows(Filter("/photos/007"))) == count // 100 and index.num_images == count
