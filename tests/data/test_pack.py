"""The pack: each image decoded once, whatever happens in between, and never more than has changed."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import environment, lapclip, opened, picture_folder, wait_for
from PIL import Image

from lapclip.data import pack as packing
from lapclip.data.catalogue import Gathering
from lapclip.data.decode import RECORD, WHOLE, decode
from lapclip.errors import UserError
from lapclip.units import finished


def packed(source: object, image_size: int = 16):
    return opened(source, image_size).parts[0].files.pack


def test_a_pack_holds_what_decoding_gives(tmp_path):
    folder = picture_folder(tmp_path / "photos", 12)
    data = opened(folder)
    training = data.training
    assert training.num_pairs + data.validation.num_pairs == 12
    for index in range(training.num_pairs):
        pixels = decode((folder / training.name(index)).read_bytes(), training.size).pixels
        assert np.array_equal(training.pixels(np.array([index]), training.size)[0], pixels)
        assert training.captions(index) == ((folder / training.name(index)).with_suffix(".txt").read_text(),)


def test_a_folder_reached_through_a_link_has_the_same_pack(tmp_path):
    one = packed(picture_folder(tmp_path / "photos", 12))
    (tmp_path / "link").symlink_to("photos")
    data = opened(f"{tmp_path}/link/")
    assert data.parts[0].files.pack.path == one.path and data.parts[0].files.pack.num_reused == 12
    assert data.source == f"{tmp_path}/link", "a link that is set anew still finds the data of a run"


def test_the_second_time_nothing_is_read(tmp_path):
    folder = picture_folder(tmp_path / "photos", 12)
    assert packed(folder).num_reused == 0
    for file in folder.glob("*.jpg"):
        known = file.stat()
        file.write_bytes(bytes(known.st_size))  # destroyed, but the same to anyone who only looks
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
    again = packed(folder)
    assert again.num_reused == 12 and not again.unreadable


def test_only_what_changed_is_decoded_again(tmp_path):
    folder = picture_folder(tmp_path / "photos", 12)
    before = packed(folder)
    (folder / "00.jpg").rename(folder / "moved.jpg")
    (folder / "00.txt").rename(folder / "moved.txt")
    os.utime(folder / "01.jpg")  # touched
    picture_folder(folder, 1, first=50)  # new
    Image.new("RGB", (30, 20), "red").save(folder / "02.jpg")  # changed
    (folder / "03.jpg").unlink()
    (folder / "03.txt").unlink()
    num_rows = (before.path / "pixels").stat().st_size // (3 * before.size**2)
    after = packed(folder)
    assert after.path == before.path and after.num_reused == 8
    rows_added = (after.path / "pixels").stat().st_size // (3 * after.size**2) - num_rows
    assert rows_added == 2  # the new and the changed one; a moved or touched image keeps its row


def test_an_older_pack_is_compared_by_whole_images_too_and_keeps_its_pixels(tmp_path):
    folder = picture_folder(tmp_path / "photos", 12)
    Image.new("RGB", (30, 30), "red").save(folder / "00.jpg")  # square: its center is all of it
    before = packed(folder)
    pixels = (before.path / "pixels").read_bytes()
    older = np.fromfile(before.path / "records", RECORD)
    older["traits"] &= ~np.uint8(WHOLE)
    older["thumb"][1:] = 0
    older.tofile(before.path / "records")
    after = packed(folder)
    assert after.num_reused == 1 and (after.path / "pixels").read_bytes() == pixels
    assert (after.records["thumb"] == before.records["thumb"]).all() and packed(folder).num_reused == 12


def test_equal_images_share_a_row_and_a_side(tmp_path):
    folder = picture_folder(tmp_path / "photos", 20)
    for number in range(20):
        shutil.copy(folder / f"{number:02}.jpg", folder / f"copy-{number:02}.jpg")
        (folder / f"copy-{number:02}.txt").write_text("again")
    data = opened(folder, validation_share=0.3)
    assert len(np.unique(data.parts[0].files.pack.records["row"])) == 20
    sides = [
        {source.name(i).removeprefix("copy-") for i in range(source.num_pairs)}
        for source in (data.training, data.validation)
    ]
    assert sides[0].isdisjoint(sides[1]) and len(sides[1]) >= 2
    groups = data.training.groups(np.arange(data.training.num_pairs))
    assert len(np.unique(groups)) == data.training.num_pairs / 2


@pytest.mark.slow
def test_killed_packing_goes_on_from_there(tmp_path):
    """A real process is killed while it packs, several times; nothing is decoded twice, and nothing is lost."""
    folder = picture_folder(tmp_path / "photos", 300, side=900)
    (folder / "00.jpg").write_bytes(b"no image")  # met before the first kill
    arguments = [sys.executable, "-m", "lapclip", "data", "pack", str(folder), "--image-size", "64"]
    done = []
    for _ in range(2):
        process = subprocess.Popen(arguments, env=environment(), stderr=-3, stdout=-3)
        enough = records_written() + 40
        wait_for(lambda: process.poll() is not None or records_written() > enough)  # noqa: B023
        process.kill()
        process.wait()
        done.append(records_written())
    result = lapclip("data", "pack", str(folder), "--image-size", "64", "--json")
    assert '"num_images": 299' in result.stdout
    assert records_written() == 299 and 0 < done[0] < done[1] < 299
    assert packed(folder, 64).unreadable == {0: "is text, not an image"}


def test_a_pack_may_be_removed_at_any_moment(tmp_path):
    """By one thread, while others pack and list: each waits, packs again, or says in one sentence what happened."""
    folder = picture_folder(tmp_path / "photos", 8)

    def pack_often() -> None:
        for _ in range(25):
            with suppress(UserError):  # it was removed after it had been packed
                assert len(packed(folder).records) == 8

    with ThreadPoolExecutor() as pool:
        packers = [pool.submit(pack_often) for _ in range(3)]
        while not all(packer.done() for packer in packers):
            for one in packing.list_packs():
                packing.remove_pack(one)
        for packer in packers:
            packer.result()  # raises anything but a sentence
    packed(folder)
    assert len(packing.list_packs()) == 1


def records_written() -> int:
    files = list(packing.packs_folder().glob("*/records"))
    return files[0].stat().st_size // packing.RECORD.itemsize if files else 0


def test_records_without_their_pixels_are_done_again(tmp_path):
    """As after a power cut: the disk kept the last records, and not the pixels they speak of."""
    folder = picture_folder(tmp_path / "photos", 10)
    first = packed(folder)
    pixels = first.path / "pixels"
    whole = pixels.read_bytes()
    pixels.write_bytes(whole[: len(whole) * 7 // 10 - 5])
    with (first.path / "records").open("ab") as file:
        file.write(b"torn")
    again = packed(folder)
    assert again.num_reused == 6 and pixels.read_bytes() == whole


def test_without_room_images_are_decoded_as_they_are_needed_and_no_pack_is_begun(tmp_path, monkeypatch):
    folder = picture_folder(tmp_path / "photos", 12)
    kept = opened(folder, validation_share=0.2).training
    pixels = {kept.name(i): kept.pixels(np.array([i]), 24) for i in range(kept.num_pairs)}
    shutil.rmtree(packing.packs_folder())
    monkeypatch.setattr(packing, "SPARE_BYTES", 10**18)
    streamed = opened(folder, validation_share=0.2).training
    assert not streamed.only_copies and not list(packing.packs_folder().glob("*/pixels"))
    for index in range(streamed.num_pairs):
        if (name := streamed.name(index)) in pixels:
            assert np.array_equal(streamed.pixels(np.array([index]), 24), pixels[name])
    with pytest.raises(UserError, match=r"needs 0\.00 GB more"):
        opened(folder, pack=True)
    assert [file.stat().st_size for file in packing.packs_folder().glob("*/pixels")] in ([], [0])


def test_one_process_at_a_time_packs_and_others_wait_a_while(tmp_path, monkeypatch):
    folder = picture_folder(tmp_path / "photos", 8)
    path = packed(folder).path
    monkeypatch.setattr(packing, "LOCK_PATIENCE_SECONDS", 0.2)
    with packing.locked(path), pytest.raises(UserError, match="another process is packing"):
        packed(folder)


@pytest.mark.slow
def test_two_commands_at_once_get_along(tmp_path):
    folder = picture_folder(tmp_path / "photos", 60)
    arguments = [sys.executable, "-m", "lapclip", "data", "pack", str(folder), "--json"]
    both = [subprocess.Popen(arguments, env=environment(), stdout=-1, text=True) for _ in range(2)]
    results = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    assert [result["num_images"] for result in results] == [60, 60] and records_written() == 60


@pytest.mark.slow
def test_a_full_disk_is_said_in_words_and_what_is_packed_is_kept(tmp_path):
    """A real limit of the system: no file may grow beyond 100 kB."""
    folder = picture_folder(tmp_path / "photos", 40)
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));" \
        "from lapclip.cli import run_command; sys.exit(run_command(sys.argv[1:]))"  # fmt: skip
    arguments = ["data", "pack", str(folder), "--image-size", "64", "--workers", "0"]
    done = subprocess.run(
        [sys.executable, "-c", limited, *arguments], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1 and "cannot write" in done.stderr and "file too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert packed(folder, 64).num_reused >= 4


@dataclass(frozen=True)
class Flaky:
    """Files on a disk that does not answer, for as long as a file called `down` is there."""

    paths: list[str]

    def read(self, index):
        if index == 3 and os.path.exists("down"):
            raise OSError(5, "Input/output error")
        return Path(self.paths[index]).read_bytes()

    def stamp(self, index):
        return "always the same"


def test_a_fault_that_goes_away_is_forgotten(tmp_path):
    folder = picture_folder(tmp_path / "photos", 12)
    gathering = Gathering()
    paths = [str(path) for path in sorted(folder.glob("*.jpg"))]
    for path in paths:
        gathering.add(path, ["words"])
    catalogue = gathering.catalogue("flaky", "txt", Flaky(paths))
    Path("down").touch()
    broken = finished(packing.pack(catalogue, "flaky", 24, 0)).unreadable
    assert broken == {3: "cannot be read: input/output error"}
    Path("down").unlink()
    again = finished(packing.pack(catalogue, "flaky", 24, 0))
    assert not again.unreadable and again.num_reused == 11


def test_an_unchanged_file_that_cannot_be_decoded_is_not_tried_again(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 12)
    (folder / "03.jpg").write_text("not an image")
    first = packed(folder)
    assert first.unreadable == {3: "is text, not an image"} == packed(folder).unreadable
    assert "packing" in call("data", "pack", str(folder), "--size", "nano").stderr
    assert "packing" not in call("data", "pack", str(folder), "--size", "nano").stderr
    Image.new("RGB", (20, 20)).save(folder / "03.jpg")
    assert not packed(folder).unreadable


def test_removing_or_extending_a_pack_does_not_disturb_whoever_has_it_open(tmp_path):
    folder = picture_folder(tmp_path / "photos", 12)
    data = opened(folder)
    path = data.parts[0].files.pack.path
    with (path / "pixels").open("ab") as file:
        file.write(bytes(1000))  # half a row, as while another process packs
    other = opened(folder)
    shutil.rmtree(path)
    for held in (data, other):
        validation = held.validation
        assert validation.image(0, 16).size == (24, 24) and validation.captions(0) and validation.name(0)
        assert held.training.pixels(np.arange(5), 24).any() and held.training.caption(2, 1)


def test_clean_lists_and_removes(tmp_path, call):
    folder = picture_folder(tmp_path / "photos", 8)
    path = packed(folder).path
    assert path.name in call("data", "clean").stdout
    assert call("data", "clean", "nothing").returncode == 1
    assert call("data", "clean", path.name).returncode == 0
    assert not path.exists() and not packing.list_packs()
    assert Path(folder).exists()
