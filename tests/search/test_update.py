"""`lapclip index`: what is embedded, and what need not be; whatever happens to files, folders and models meanwhile."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, picture_folder
from PIL import Image

from lapclip.config import load_config
from lapclip.runs.run import Run
from lapclip.search.index import Index, find_index, list_indexes
from lapclip.search.update import update

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Runs `a` and `b` of the smallest model, with the weights that training begins from; for every test to copy."""
    folder = tmp_path_factory.mktemp("trained")
    for seed, name in enumerate("ab"):
        make_run(folder / name, seed)
    return folder


def make_run(path: Path, seed: int) -> None:
    from safetensors.torch import save_file

    from lapclip.data.tokenizer import train_tokenizer
    from lapclip.model.clip import build_model

    run, config = Run(path), load_config(flags=SMALL)
    (run.checkpoints / "step-000001").mkdir(parents=True)
    run.write_config(config)
    (path / "machine.json").write_text("{}")
    tokenizer = train_tokenizer("bpe", ["a red cat", "a blue dog"], 300)
    run.tokenizer_file.write_text(tokenizer.to_json())
    model = build_model(config.model, vocab_size=tokenizer.vocab_size, has_bias=False, seed=seed)
    save_file(model.state_dict(), run.checkpoints / "step-000001" / "model.safetensors")


@pytest.fixture
def here(tmp_path, trained) -> Path:
    """The folder we are in, with a run `a` and twelve different images in `photos`."""
    shutil.copytree(trained / "a", tmp_path / "runs" / "a")
    picture_folder(tmp_path / "photos", 12)
    return tmp_path


@pytest.fixture
def index(call):
    """Runs the command; what it says as JSON."""

    def run(*arguments: str) -> dict:
        done = call("index", *map(str, arguments), "--json")
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout), "said": done.stderr}

    return run


def counts(result: dict) -> dict[str, int]:
    """The counts of what happened that are not zero."""
    names = ("embedded", "new", "changed", "moved", "copied", "removed")
    return {name: result[f"num_{name}"] for name in names if result[f"num_{name}"]}


def by_path(index: Index) -> dict[str, tuple[int, np.ndarray]]:
    return {
        entry.path: (entry.id, index.vectors[row])
        for row in index.live_rows().tolist()
        for entry in index.entries_at(row)
    }


def assert_is_right(*folders: Path, model: str = "a") -> None:
    """The index holds exactly the images of some folders, each embedded as the model embeds it now."""
    from lapclip.embedder import load

    found = by_path(find_index())
    paths = sorted(str(path) for folder in folders for path in folder.rglob("*.jpg"))
    assert sorted(found) == paths
    np.testing.assert_allclose([found[path][1] for path in paths], load(model).images(paths), atol=1e-5)


def test_only_what_is_new_or_changed_is_embedded(here, index):
    photos = here / "photos"
    first = index("photos")
    assert counts(first) == {"embedded": 12, "new": 12} and "`a`, the newest run" in first["said"]
    again = index()
    assert counts(again) == {} and again["num_unchanged"] == 12
    ids = {path: id for path, (id, _) in by_path(find_index()).items()}

    picture_folder(photos / "more", 3, first=50)
    shutil.copy(photos / "00.jpg", photos / "copy.jpg")
    (photos / "sub").mkdir()
    (photos / "01.jpg").rename(photos / "sub" / "moved.jpg")
    (photos / "02.jpg").unlink()
    shutil.copy(picture_folder(here / "other", 1, first=60) / "60.jpg", photos / "03.jpg")
    os.utime(photos / "04.jpg", (1, 1))
    result = index()
    assert counts(result) == {
        "embedded": 4, "new": 4, "changed": 1, "moved": 1, "copied": 1, "removed": 1,
    }  # fmt: skip
    assert result["num_indexed"] == 15 and result["num_unchanged"] == 9
    assert_is_right(photos)
    now = by_path(find_index())
    assert now[f"{photos}/sub/moved.jpg"][0] == ids[f"{photos}/01.jpg"]
    assert now[f"{photos}/03.jpg"][0] == ids[f"{photos}/03.jpg"]
    for image in photos.rglob("*.jpg"):
        stamp = image.stat()
        image.write_bytes(b"x" * stamp.st_size)  # nobody can tell, unless it is read
        os.utime(image, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert counts(index()) == {}


def test_what_comes_back_is_not_embedded_again(here, index):
    index("photos")
    (here / "photos" / "00.jpg").rename(here / "00.jpg")
    assert counts(index()) == {"removed": 1}
    (here / "00.jpg").rename(here / "photos" / "00.jpg")
    assert counts(index()) == {"new": 1, "copied": 1}
    (here / "photos" / "01.jpg").rename(here / "x.jpg")
    (here / "photos" / "02.jpg").rename(here / "photos" / "01.jpg")
    (here / "x.jpg").rename(here / "photos" / "02.jpg")
    assert counts(index()) == {"changed": 2, "copied": 2}  # two that changed their names
    assert_is_right(here / "photos")


def test_threads_side_by_side_embed_equal_images_once_and_mix_nothing_up(here, index):
    import torch

    for number in range(20):  # more than a batch apart, so that several threads have the same ones at once
        shutil.copytree(here / "photos", here / "copies" / str(number))
    torch.set_num_threads(4)
    result = index("copies")
    torch.set_num_threads(1)
    assert counts(result)["embedded"] == 12 and result["num_indexed"] == 12 * 20
    assert_is_right(here / "copies")


def test_width_and_height_are_those_of_the_original_upright(here, index):
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.new("RGB", (300, 200), "red").save(here / "photos" / "turned.jpg", exif=exif)
    Image.new("RGB", (2000, 10), "blue").save(here / "photos" / "wide.png")
    index("photos")
    found = find_index()
    entries = [found.entry(id) for id, _ in by_path(found).values()]
    sizes = {os.path.basename(entry.path): (entry.width, entry.height) for entry in entries}
    assert (sizes["turned.jpg"], sizes["wide.png"], sizes["00.jpg"]) == ((200, 300), (2000, 10), (53, 40))


def test_unreadable_images_are_named_and_not_tried_until_they_change(here, index):
    (here / "photos" / "text.jpg").write_text("not an image")
    (here / "photos" / "empty\x1b[31m.png").touch()
    first = index("photos")
    assert (first["num_indexed"], first["num_unreadable"]) == (12, 2)
    assert "is text, not an image" in first["said"] and "\x1b" not in first["said"]
    second = index()
    assert second["num_unreadable"] == 2 and second["unreadable"] == first["unreadable"], "named every time"
    shutil.copy(here / "photos" / "00.jpg", here / "photos" / "text.jpg")
    assert (index()["num_unreadable"], find_index().num_images) == (1, 13)


def test_a_folder_of_which_nothing_can_be_read_is_an_error(here, index, call, monkeypatch):
    index("photos", "--model", "a")
    (here / "broken").mkdir()
    for number in range(3):
        (here / "broken" / f"{number}.jpg").write_text("not an image")
    for _ in range(2):  # also when nothing is new
        done = call("index", "broken", "--json")
        assert done.returncode == 1 and json.loads(done.stdout)["num_unreadable"] == 3
        assert "3 unreadable" in done.stderr and "nothing new" not in done.stderr
        assert "error: no image in" in done.stderr and done.stderr.count("hint: ") == 1
    assert call("index").returncode == 0, "what was not named is only counted"
    (here / "phone").mkdir()
    (here / "phone" / "1.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    assert "pip install 'lapclip[heic]'\n" in call("index", "phone").stderr


def test_an_empty_folder_that_was_named_is_an_error_and_the_others_are_indexed(here, index, call):
    (here / "empty").mkdir()
    done = call("index", "photos", "empty", "--json")
    assert (
        done.returncode == 1
        and f"error: there is no image in a supported format in `{here / 'empty'}`" in done.stderr
    )
    assert done.stderr.count("hint: ") == 1 and done.stderr.count("empty`") == 1
    result = json.loads(done.stdout)
    assert (result["num_indexed"], result["folders"]) == (12, [str(here / "photos")])
    assert_is_right(here / "photos")
    (here / "photos" / "below").mkdir()
    (here / "empty" / "drawing.svg").touch()
    alone = call("index", "empty")
    assert alone.returncode == 1 and "SVG" in alone.stderr and "in the index" not in alone.stderr
    assert call("index", "photos/below").returncode == 1 and "next:" not in alone.stderr
    assert index()["folders"] == [str(here / "photos")] and find_index().num_images == 12


def test_links_hidden_files_and_names_in_no_encoding(here, index):
    photos = here / "photos"
    outside = picture_folder(here / "outside", 2, first=70)
    (photos / "out.jpg").symlink_to(outside / "70.jpg")
    (photos / "folder").symlink_to(outside)
    (photos / "in.jpg").symlink_to(photos / "00.jpg")
    shutil.copy(photos / "00.jpg", photos / ".hidden.jpg")
    odd = os.fsencode(photos) + b"/caf\xe9.jpg"
    shutil.copy(os.fsencode(photos / "01.jpg"), odd)
    shutil.copytree(here / "runs" / "a", photos / "run")
    shutil.copy(photos / "00.jpg", photos / "run" / "learned.jpg")
    os.mkfifo(photos / "pipe.jpg")
    result = index("photos")
    assert result["num_indexed"] == 13 and os.fsdecode(odd) in by_path(find_index())
    assert result["num_links"] == 1 and "1 link to images already indexed" in result["said"]


def test_folders_within_one_another_are_one(here, index):
    picture_folder(here / "photos" / "2024", 2, first=50)
    assert index("photos/2024")["num_indexed"] == 2
    result = index("photos", "photos/2024", "photos/../photos")
    assert result["folders"] == [str(here / "photos")] and result["num_embedded"] == 12
    (here / "photos" / "00.jpg").unlink()
    picture_folder(here / "photos" / "2024", 1, first=60)
    result = index("photos/2024")
    assert counts(result) == {"embedded": 1, "new": 1}, "only that part was looked through"
    assert counts(index()) == {"removed": 1}


def test_a_folder_that_is_away_keeps_its_images(here, index, call):
    picture_folder(here / "disk", 3, first=50)
    index("photos", "disk")
    (here / "disk").rename(here / "unplugged")
    (here / "photos" / "00.jpg").unlink()
    result = index()
    assert counts(result) == {"removed": 1} and result["unreachable"] == [str(here / "disk")]
    assert result["num_indexed"] == 14 and "--forget" in result["said"]
    (here / "disk").mkdir()  # as an empty place to mount at
    assert counts(index()) == {} and find_index().num_images == 14
    alone = call("index", "disk")
    assert alone.returncode == 1 and "is empty now" in alone.stderr and find_index().num_images == 14
    (here / "disk").rmdir()
    (here / "unplugged").rename(here / "disk")
    assert counts(index()) == {}
    assert index("--forget", "disk")["num_removed"] == 3
    assert_is_right(here / "photos")


def test_a_model_trained_since_is_indexed_again_and_the_old_index_serves_until_then(here, index, trained):
    from lapclip.embedder import load

    picture_folder(here / "disk", 3, first=50)
    index("photos", "disk")
    old = find_index()
    shutil.rmtree(here / "runs" / "a")
    shutil.copytree(trained / "b", here / "runs" / "a")
    work = update(load("a"), name="a", model=str(here / "runs" / "a"))
    while not (now := next(work)).total or not now.done:
        pass
    work.close()
    assert find_index("a").path == old.path, "the new one is not complete"
    (here / "disk").rename(here / "unplugged")
    away = index()
    assert find_index("a").path == old.path, "the new one lacks a folder"
    assert away["num_replaced"] == 0
    (here / "unplugged").rename(here / "disk")
    result = index()
    assert "trained since" not in result["said"]
    assert (result["num_replaced"], result["num_indexed"]) == (1, 15)
    assert [index.path for index in list_indexes()] == [Path(result["path"])] and not old.path.exists()
    assert_is_right(here / "photos", here / "disk")
    assert len(by_path(old)) == 15, "who has it open still sees it"


def test_an_index_outlives_its_run(here, index):
    index("photos")
    shutil.rmtree(here / "runs")
    picture_folder(here / "photos", 1, first=90)
    result = index()
    assert counts(result) == {"embedded": 1, "new": 1} and "its run no longer exists" in result["said"]
    assert counts(index("--fresh")) == {"embedded": 13, "new": 13}
    assert_is_right(here / "photos", model=str(find_index().model_folder))


def test_an_identical_copy_of_a_run_has_an_index_of_its_own_and_a_moved_run_keeps_its(here, index, trained):
    picture_folder(here / "more", 2, first=50)
    first = index("photos")
    shutil.copytree(here / "runs/a", here / "runs/b")
    assert counts(index("more", "--model", "b")) == {"embedded": 2, "new": 2}
    assert [find_index(name).num_images for name in "ab"] == [12, 2]
    shutil.rmtree(here / "runs/b/checkpoints")
    shutil.copytree(trained / "b/checkpoints", here / "runs/b/checkpoints")
    again = index("--model", "b")
    assert "trained further" in again["said"] and (again["num_replaced"], again["num_indexed"]) == (1, 2)
    assert find_index("a").path == Path(first["path"]) and counts(index("--model", "a")) == {}
    (here / "runs/a").rename(here / "runs/moved")
    moved = index("--model", "moved")
    assert moved["path"] == first["path"] and counts(moved) == {}


def test_a_damaged_index_is_rebuilt_when_asked(here, index, call):
    index("photos")
    path = find_index().path
    (path / "files.db").write_bytes(b"\x00\xff" * 5000)
    for suffix in ("-wal", "-shm"):
        (path / f"files.db{suffix}").unlink(missing_ok=True)
    failed = call("index")
    assert failed.returncode == 1 and "lapclip index --fresh" in failed.stderr
    listed = call("index", "--list")
    assert listed.returncode == 0 and "damaged" in listed.stdout
    assert counts(index("--fresh")) == {"embedded": 12, "new": 12}
    assert_is_right(here / "photos")


def test_indexes_are_listed_and_removed(here, index, call, trained):
    assert "there is no index yet" in call("index", "--list").stderr
    index("photos")
    shutil.copytree(trained / "b", here / "runs" / "b")
    index("photos", "--model", "b")
    listed = call("index", "--list", "--json")
    names = [(one["name"], one["num_pictures"]) for one in json.loads(listed.stdout)["indexes"]]
    assert names == [("b", 12), ("a", 12)]
    assert "index --remove" in call("index", "--list").stderr
    assert call("index", "--remove", "b").returncode == 0
    assert [one.name for one in list_indexes()] == ["a"]
    unknown = call("index", "--remove", "c")
    assert unknown.returncode == 1 and "there is no index" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "`nowhere` does not exist\n"),
        (["photso"], "`photso` does not exist; did you mean `photos`?"),
        (["./runs/b"], "`./runs/b` does not exist\n"),
        (["photos/00.txt"], "is a file, not a folder"),
        ([], "no folder is indexed with `"),
        (["photos", "--model", "none"], "none"),
        (["--forget", "photos"], "nothing is indexed yet"),
        (["--list", "photos"], "cannot be combined with folders"),
    ],
)
def test_mistakes_are_answered_with_one_thing_to_do(here, call, arguments, said):
    done = call("index", *arguments)
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("hint:") == 1
    assert done.stdout == ""
