"""`lapclip search`: what people and programs read, what a hostile name cannot do, and images in a terminal."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import command, environment
from glass import Terminal
from PIL import Image
from safetensors.torch import load_file, save_file
from test_searcher import CHANGED, COPIED, make_index
from test_thumbnails import decoded
from test_update import make_run

from lapclip.cli import run_command
from lapclip.cli.thumbnails import COLUMNS, GAP, ROWS
from lapclip.weights.checkpoint import MODEL, best


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_thread):
    return make_index(tmp_path_factory.mktemp("made"))


@pytest.fixture
def search(made, call, monkeypatch):
    """Searches the small index in this process."""
    monkeypatch.setenv("LAPCLIP_CACHE", str(made.cache))
    for name in ("TMUX", "KITTY_WINDOW_ID", "TERM_PROGRAM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: call("search", *arguments)


def test_json_has_what_programs_read(search, made):
    copied = str(made.photos / "a" / COPIED)
    done = search("red cat", "- tree", "--like", copied, "--top", "4", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    assert result["query"] == f"red cat - tree + like {copied}"
    assert len(result["results"]) == 4 and result["num_pictures"] == 14 and result["milliseconds"] > 0
    assert result["model"] == made.model and result["num_gone"] == 0
    apart = json.loads(search("red", "cat", "-", "tree", "--like", copied, "--top", "4", "--json").stdout)
    assert apart["query"] == result["query"] and apart["results"] == result["results"]
    (one,) = json.loads(search("--like", copied, "--top", "1", "--json").stdout)["results"]
    assert one["path"] == copied and one["score"] > 0.999 and (one["width"], one["height"]) == (53, 40)
    assert one["copies"] == [str(made.photos / "b" / "copy.jpg")]


def test_the_table_has_a_line_for_each_image_and_folds_copies(search, made, monkeypatch):
    monkeypatch.chdir(made.photos)
    done = search("red", "cat", "--top", "13")
    lines = done.stdout.splitlines()
    assert len(lines) == 14 and all(" x " in line for line in lines[1:])
    assert any(re.search(rf"\b0?\.\d+\s+a/{COPIED}\s+53 x 40\s+\+1 copy", line) for line in lines)
    assert "13 of 14 images for `red cat`" in done.stderr and "ms" in done.stderr
    assert "\x1b" not in done.stdout, "images on a pipe only when asked for"
    assert "\N{UPPER HALF BLOCK}" in search("cat", "--thumbnails", "--top", "1").stdout


def test_paths_are_all_that_a_pipe_gets(search, made):
    results = json.loads(search("dog", "--json").stdout)["results"]
    for flag, end in (("--paths", "\n"), ("-0", "\0")):
        assert search("dog", flag).stdout == "".join(found["path"] + end for found in results)
    assert search("dog", "--min-score", "1", "--paths").stdout == ""


def test_hostile_names_steer_nothing_and_come_out_whole(tmp_path, made, call, monkeypatch):
    """A name with an end of line, an escape and bytes that are no UTF-8."""
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path / "cache"))
    folder = os.fsencode(tmp_path / "odd")
    os.mkdir(folder)
    name = folder + b"/a\nb\x1b[31m\xff[red].jpg"
    with open(made.photos / "a" / "00.jpg", "rb") as given, open(name, "wb") as odd:
        odd.write(given.read())
    assert call("index", str(tmp_path / "odd"), "--model", made.model).returncode == 0
    table = call("search", "cat")
    assert table.returncode == 0 and "\x1b" not in table.stdout and "[red].jpg" in table.stdout
    assert len(table.stdout.splitlines()) == 2
    refused = call("search", "cat", "--paths")
    assert refused.returncode == 1 and refused.stdout == "" and "-0" in refused.stderr
    (found,) = json.loads(call("search", "cat", "--json").stdout)["results"]
    assert os.fsencode(found["path"]) == name
    assert call("search", "cat", "--sheet", "found.png").returncode == 0


def test_a_locale_without_utf_8_escapes_what_it_cannot_write(tmp_path, made, call, monkeypatch):
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "caf\xe9 \u2192"
    shutil.copytree(made.photos / "b", folder)
    assert call("index", str(folder), "--model", made.model).returncode == 0
    for flag, expected in (
        ("--top=9", b"caf\\xe9 \\u2192/copy.jpg"),
        ("--paths", os.fsencode(folder / "copy.jpg")),
    ):
        stdout = io.TextIOWrapper(io.BytesIO(), "ascii", errors="strict")
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run_command(["search", "cat", flag]) == 0
        stdout.flush()
        assert expected in stdout.buffer.getvalue()


@pytest.mark.slow
def test_a_search_imports_little_besides_torch_and_collects_no_garbage_meanwhile(made):
    """It takes at most 1.2 times as long as `import torch` (`benchmarks/start.py`)."""
    program = (
        "import gc, sys, lapclip.cli as c\n"
        "ended = []\n"
        "gc.callbacks.append(lambda phase, info: phase == 'stop' and 'torch' in sys.modules and ended.append(info))\n"
        "assert c.run_command(['search', 'cat']) == 0\n"
        "heavy = 'torch._dynamo torch._inductor transformers datasets matplotlib pandas starlette lapclip.train'\n"
        "assert not set(heavy.split()) & sys.modules.keys()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000 and len(ended) < 30, len(ended)\n"
    )
    own = environment(LAPCLIP_CACHE=str(made.cache))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr


def test_the_sheet_shows_what_was_found(search, tmp_path, made):
    done = search("dog", "--top", "3", "--sheet", str(tmp_path / "found.png"), "--paths")
    assert len(done.stdout.splitlines()) == 3
    with Image.open(tmp_path / "found.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 3 * 192
        first = sheet.copy()
    assert "will be replaced" not in done.stderr
    again = search(
        "dog - cat", "--top", "3", "--sheet", str(tmp_path / "found.png"), "--min-score", "-1", "--paths"
    )
    with Image.open(tmp_path / "found.png") as sheet:
        heading = (0, 0, sheet.width, 24)
        assert sheet.crop(heading) != first.crop(heading), "the query stands above the images"
    assert again.returncode == 0 and "found.png` exists and will be replaced" in again.stderr
    Image.new("RGB", (8, 8)).save(tmp_path / "mine.png")
    refused = search("dog", "--sheet", str(tmp_path / "mine.png"))
    assert refused.returncode == 1 and "is not known to be written by lapclip" in refused.stderr
    refused = search("dog", "--sheet", str(tmp_path / "none" / "found.png"))
    assert refused.returncode == 1 and "cannot write" in refused.stderr


def test_duplicates_are_listed_in_groups_with_how_sure_they_are(search, made):
    every = ("--duplicates",)
    result = json.loads(search(*every, "--json").stdout)
    copies = [str(made.photos / "a" / COPIED), str(made.photos / "b" / "copy.jpg")]
    near = [str(made.photos / "a" / CHANGED), str(made.photos / "b" / "smaller.jpg")]
    assert [[one["path"] for one in group] for group in result["groups"]] == [copies, near]
    assert [[one["identical"] for one in group] for group in result["groups"]] == [
        [True, True],
        [True, False],
    ]
    assert json.loads(search(*every, "--top", "1", "--json").stdout)["groups"] == result["groups"][:1]
    assert "1 of 2 groups: 1 of identical files" in search(*every, "--top", "1").stderr
    done = search(*every)
    assert re.search(r"copy\.jpg +53 x 40 +identical file", done.stdout)
    assert re.search(r"smaller\.jpg +50 x 38 +near-duplicate, thumbnails differ by \d\.\d%", done.stdout)
    assert "2 groups: 1 of identical files, 1 with near-duplicates" in done.stderr
    listed = search(*every, "--paths")
    assert listed.stdout == "\n".join(copies) + "\n\n" + "\n".join(near) + "\n"
    assert "1 with near-duplicates" in listed.stderr, "not all of these paths are copies"
    assert search(*every, "-0").stdout == "\0".join([*copies, *near, ""]), (
        "for `xargs -0` nothing between groups"
    )
    assert search("--duplicates", "--min-score", "1", "--paths").stdout.split() == copies
    for limits in (["--folder", str(made.photos / "a")], ["--min-size", "54"], ["--before", "2000"]):
        assert "no duplicates" in search(*every, *limits).stderr


def test_words_that_no_training_caption_has_are_named(search, made):
    """The index has a copy of the model, which keeps the words."""
    assert json.loads(search("asdkjhasd", "--json").stdout)["unknown_words"] is None, (
        "where they are not known"
    )
    (folder,) = (made.cache / "index").glob("*/model")
    (folder / "words.txt").write_text("cat\nred\nstra\u00dfe".casefold(), "utf-8")
    try:
        done = search("Red asdkjhasd", "-", "cat Hund", "--json")
        assert json.loads(done.stdout)["unknown_words"] == ["asdkjhasd", "hund"]
        for word in ("asdkjhasd", "hund"):
            assert f"note: no training caption contains `{word}`\n" in done.stderr
        assert "note" not in search("RED cat STRASSE").stderr
        near = search("strasssen", "asdkjhasd", "ctat").stderr
        assert "contains `strasssen`; did you mean `strasse`?" in near and "contains `asdkjhasd`\n" in near
        assert "contains `ctat`; did you mean `cat`?" in near, "each word"
        (folder / "words.txt").write_text("bird\ncat\nhand\nred\nslate\nsunset")
        for typo, meant in (("brid", "bird"), ("cta", "cat"), ("sunste", "sunset")):
            assert f"`{typo}`; did you mean `{meant}`?" in search("red", typo).stderr
        for word in ("hund", "steal", "brood", "tac"):
            assert "did you mean" not in search(word).stderr
        (folder / "words.txt").unlink()
        os.mkfifo(folder / "words.txt")
        assert json.loads(search("asdkjhasd", "--json").stdout)["unknown_words"] is None
    finally:
        (folder / "words.txt").unlink()


def test_which_of_several_indexes_answers_is_said(made, call, monkeypatch, tmp_path):
    monkeypatch.setenv("LAPCLIP_CACHE", str(shutil.copytree(made.cache, tmp_path / "cache")))
    assert "searching the index" not in call("search", "cat").stderr
    make_run(tmp_path / "runs" / "other", 1)
    assert call("index", str(made.photos / "b"), "--model", "other").returncode == 0
    done = call("search", "cat", "--json")
    assert "searching the index of `other`" in done.stderr
    result = json.loads(done.stdout)
    assert Path(result["index"]).parent == tmp_path / "cache" / "index" and result["model"].endswith("other")
    named = call("search", "cat", "--json", "--model", made.model)
    assert json.loads(named.stdout)["index"] != result["index"] and "searching" not in named.stderr


def test_results_are_copied_by_rank_and_nothing_is_overwritten(search, tmp_path):
    target = tmp_path / "new" / "found"
    result = json.loads(search("cat", "--top", "11", "--copy-to", str(target), "--json").stdout)
    assert result["copied"] == [str(path) for path in sorted(target.iterdir())]
    for rank, (path, found) in enumerate(zip(result["copied"], result["results"], strict=True), 1):
        assert os.path.basename(path) == f"{rank:02}-{found['name']}"
        assert Path(path).read_bytes() == Path(found["path"]).read_bytes()
        assert Path(path).stat().st_mtime == pytest.approx(found["modified"])
    (target / os.path.basename(result["copied"][0])).write_text("mine")
    Path(result["copied"][10]).unlink()
    refused = search("cat", "--top", "11", "--copy-to", str(target))
    assert refused.returncode == 1 and "already exists" in refused.stderr
    assert (target / os.path.basename(result["copied"][0])).read_text() == "mine"
    assert not Path(result["copied"][10]).exists(), "none is copied where one cannot be"


def test_the_best_result_is_opened_by_the_systems_viewer(search, tmp_path, monkeypatch):
    for name in ("open", "xdg-open"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$#" "$1" > opened\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    best_path = search("cat", "--open", "--paths").stdout.splitlines()[0]
    assert (tmp_path / "opened").read_text() == f"1 {best_path}\n"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "cannot open" in search("cat", "--open").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-"], 1, "the query is empty"),
        (["cat", "--top", "0"], 1, "`--top` is 0"),
        (["cat", "--top", "1.5"], 2, "1.5"),
        (["cat", "--min-score", "nan"], 1, "`--min-score` is nan"),
        (["cat", "--sheet", "found.jpg"], 1, "does not end in `.png`"),
        (["cat", "--after", "2024-13"], 1, "`2024-13` is not a date"),
        (
            ["cat", "--after", "2024-05", "--before", "2023"],
            1,
            "`--before 2023` is not later than `--after 2024-05`",
        ),
        (
            ["cat", "--after", "2024", "--before", "2024"],
            1,
            "`--before 2024` is not later than `--after 2024`",
        ),
        (["cat", "--min-size", "0"], 1, "`--min-size` is 0"),
        (["cat", "--paths", "--json"], 1, "cannot be combined"),
        (["cat", "--duplicates"], 1, "does not take a query"),
        (["cat", "--jsn"], 2, "did you mean `--json`"),
        (["--like", "none.jpg"], 1, "`none.jpg` cannot be used as an image: no such file"),
        (["--like", __file__], 1, "is text, not an image"),
        (["cat", "--folder", "/nowhere"], 1, "`/nowhere` does not exist hint: `lapclip index --list`"),
        (
            ["cat", "--folder", os.path.dirname(__file__)],
            1,
            f"lapclip index {os.path.dirname(__file__)} --model",
        ),
        (["cat", "--model", "smal"], 1, "did you mean `small`? hint: `lapclip index --list`"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_way_out(search, arguments, code, said):
    done = search(*arguments)
    assert (done.returncode, done.stdout) == (code, "") and said in done.stderr.replace("\n", " ")
    assert done.stderr.count("hint: ") == 1


def test_without_an_index_the_hint_is_what_comes_first(call):
    for arguments in (["search", "cat"], ["index", "."]):
        done = call(*arguments)
        assert done.returncode == 1 and "`lapclip train" in done.stderr
        assert ("without captions: `lapclip models`" in done.stderr) == (arguments[0] == "index")
    Path("runs/a/checkpoints/step-000001").mkdir(parents=True)
    assert "`lapclip index" in call("search", "cat").stderr


def test_a_sign_without_spaces_is_a_word_and_said_to_be_one(search):
    done = search("cat -tree")
    assert done.returncode == 0 and "to subtract it, write ` - tree` with spaces" in done.stderr
    assert "with spaces" not in search("red-haired cat - tree").stderr
    assert "for `-tree --json`" in search("--", "-tree", "--json").stderr


def test_a_filter_that_no_image_matches_is_named(search):
    assert (
        "no indexed image matches `--after` and `--min-size`"
        in search("cat", "--after", "2030", "--min-size", "1").stderr
    )
    done = search("cat", "--min-size", "53", "--top", "2")
    assert re.search(r"2 of 1\d matching images for `cat`", done.stderr) and "no indexed" not in done.stderr


def test_a_folder_without_images_is_said_once_and_never_missed(made, call, monkeypatch, tmp_path):
    monkeypatch.setenv("LAPCLIP_CACHE", str(shutil.copytree(made.cache, tmp_path / "cache")))
    (tmp_path / "empty").mkdir()
    assert "there is no image in" in call("index", "empty", "--model", made.model).stderr
    assert "empty" not in call("search", "cat").stderr


def test_what_is_gone_since_is_left_out_and_said(search, made):
    path = made.photos / "a" / "02.jpg"
    asked = ("--like", str(made.photos / "a" / "03.jpg"), "--top", "100")
    path.rename(path.with_suffix(".away"))
    try:
        done = search(*asked)
        assert "02.jpg" not in done.stdout and "1 image no longer exists: `lapclip index`" in done.stderr
    finally:
        path.with_suffix(".away").rename(path)
    assert "exists" not in search(*asked).stderr


def test_a_model_that_has_learned_since_is_said_and_the_index_searched_as_it_was(search, made):
    before = search("cat", "--json")
    assert "was trained" not in before.stderr
    checkpoints = Path(made.model) / "checkpoints"
    last, later, pointer = best(checkpoints), checkpoints / "step-000007", checkpoints / "best"
    shutil.copytree(last, later)
    weights = load_file(later / MODEL)
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, later / MODEL)
    pointer.write_text(later.name)
    try:
        after = search("cat", "--json")
        assert "`small` was trained further: `lapclip index`" in after.stderr
        assert json.loads(after.stdout)["results"] == json.loads(before.stdout)["results"]
        save_file(weights, later / MODEL, metadata={"the same": "in another file"})
        assert "was trained" not in search("cat", "--json").stderr
    finally:
        pointer.write_text(last.name)
        shutil.rmtree(later)


class Paper:
    """A screen that keeps what is written as it comes: what moves on it is not the point."""

    def __init__(self):
        self.text = ""

    def take(self, text: str) -> None:
        self.text += text

    @property
    def shown(self) -> list[str]:
        return self.text.splitlines()


@pytest.mark.slow
def test_a_terminal_that_can_shows_the_images_above_the_table(made, monkeypatch):
    monkeypatch.setenv("LAPCLIP_CACHE", str(made.cache))
    monkeypatch.delenv("TMUX", raising=False)
    terminal = Terminal("search", "cat", "--top", "3", columns=80, rows=50, KITTY_WINDOW_ID="1")
    terminal.glass = Paper()
    try:
        text = terminal.wait_for("3 of 14 images for `cat`", "53 x 40", seconds=60)
        assert terminal.code() == 0
    finally:
        terminal.close()
    pieces = re.findall(r"\x1b_G[^;]*;([^\x1b]*)\x1b", terminal.raw)
    assert decoded("".join(pieces)).shape == (ROWS * 20, (3 * COLUMNS + 2 * GAP) * 10, 4)
    assert text.index("_G") < text.index("score")


@pytest.mark.slow
def test_a_reader_that_has_had_enough_is_no_error(made):
    program = " ".join(command("search", "--duplicates", "--paths"))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{program} | true"],
        capture_output=True, text=True, env=environment(LAPCLIP_CACHE=str(made.cache)), check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr
