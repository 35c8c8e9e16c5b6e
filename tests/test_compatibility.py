"""What people have on their disks and in their scripts goes on working: old runs, packs and indexes, flags, JSON, HTTP.

Only the command line, HTTP and files are used, so that these tests stand however the code is arranged. What is promised
lies in `fixtures/`, whose README says how each file was made; more may be added to what is promised, nothing taken away.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import SMALL, as_flags, command, environment, lapclip, picture_folder, wait_for
from earlier import NUM_PHOTOS, unpack
from promises import FIXTURES, broken, keys_of, promises_of

AS_PACKED = ("photos", "--size", "nano", "--image-size", "16", "--workers", "0", "--json")
PATIENCE = 60


def told(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- What an earlier version left on the disk ---


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    return unpack(tmp_path_factory.mktemp("earlier").resolve())


@pytest.fixture
def earlier(archive, monkeypatch) -> Path:
    monkeypatch.chdir(archive)
    monkeypatch.setenv("LAPCLIP_CACHE", str(archive / "cache"))
    return archive


@pytest.fixture
def expected(archive) -> dict:
    """What the earlier version itself came to with the same files."""
    return json.loads((archive / "expected.json").read_text())


def events_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_earlier_runs_are_listed_and_reported(earlier, call):
    runs = {run["name"]: run for run in told(call("runs", "--json"))["runs"]}
    assert {name: run["state"] for name, run in runs.items()} == {
        name: name for name in ("stopped", "finished")
    }
    assert runs["finished"]["step"] == runs["finished"]["steps"] == 6 and runs["stopped"]["steps"] == 200
    assert 150 <= runs["stopped"]["step"] < 200
    for name in runs:
        assert told(call("report", name, "--json")) and told(call("watch", name, "--json"))
        page = earlier / f"{name}.html"
        assert call("report", name, "--output", str(page)).returncode == 0
        assert "<svg" in page.read_text() or "<canvas" in page.read_text()
    assert told(call("runs", "compare", "stopped", "finished", "--json"))["settings"]


def test_an_earlier_run_is_evaluated_as_it_was_and_loaded_by_python(earlier, expected, call):
    import lapclip as package

    assert package.load("runs/finished").texts(["a red square"]).shape == (1, 128)
    assert package.load("runs/stopped").texts(["red cat"]).shape == (1, 128)
    now, before = told(call("eval", "finished", "--json")), expected["eval"]
    for way in ("text_to_image", "image_to_text"):
        for k in (1, 5, 10):  # within one of its 16 pictures: other processors round otherwise
            assert now[way][f"recall@{k}"] == pytest.approx(before[way][f"recall@{k}"], abs=1.01 / 16)


def test_an_earlier_run_resumes_and_comes_to_the_same(earlier, expected, call, tmp_path):
    run = shutil.copytree(earlier / "runs/stopped", tmp_path / "stopped")
    done = told(call("train", "photos", "--resume", str(run), "--json"))
    assert (done["steps"], done["reason"]) == (200, "budget")
    last = [event for event in events_of(run) if event["event"] == "Step"][-1]
    for name in ("step", "epoch", "num_pairs_seen", "lr", "num_different"):
        assert last[name] == expected["last_step"][name], name
    assert last["loss"] == pytest.approx(expected["last_step"]["loss"], rel=0.02)


def test_settings_of_an_earlier_run_train_the_same_again(earlier, call, tmp_path):
    """Weights, drawn scenes, captions, tokens and order all follow from the seed."""
    os.chdir(tmp_path)
    told(call("train", "--config", str(earlier / "runs/finished/config.toml"), "--run", "again", "--json"))
    runs = (Path("runs/again"), earlier / "runs/finished")
    assert len({(run / "tokenizer.json").read_text() for run in runs}) == 1
    kinds = ("Step", "Evaluated")
    now, before = ([event for event in events_of(run) if event["event"] in kinds] for run in runs)
    for place in (0, -1):  # of the steps in between only some are written
        assert now[place]["step"] == before[place]["step"]
        assert now[place]["loss"] == pytest.approx(before[place]["loss"], rel=1e-3)


def test_every_event_that_was_ever_written_is_read(earlier, call, tmp_path):
    run = shutil.copytree(earlier / "runs/stopped", tmp_path / "runs" / "odd")
    ends = [
        {"event": "Paused", "step": 153, "reason": "the battery is at 19%"},
        {"event": "Continued", "step": 153, "paused_seconds": 60.0},
        {"event": "Failed", "message": "the disk is full", "hint": "make room"},
    ]
    with (run / "events.jsonl").open("a") as file:
        for event in ends:
            file.write(json.dumps({"version": 1, "time": 1.8e9, **event}) + "\n")
    os.chdir(tmp_path)
    (status,) = told(call("runs", "--json"))["runs"]
    assert (status["state"], status["message"]) == ("failed", "the disk is full")


def test_an_earlier_pack_is_used(earlier, call):
    packed = told(call("data", "pack", *AS_PACKED))
    assert packed["num_reused"] == packed["num_images"] == NUM_PHOTOS and packed["num_unreadable"] == 0
    packs = told(call("data", "clean", "--json"))["packs"]
    assert [pack["name"] for pack in packs] == [Path(packed["path"]).name]


def test_an_earlier_index_is_searched_and_brought_up_to_date(earlier, expected, call):
    found, before = told(call("search", "red", "cat", "--json"))["results"], expected["search"]["results"]
    assert [Path(one["path"]).parent for one in found] == [earlier / "photos"] * len(before)
    for one, other in zip(found, before, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-3)
    assert (found[0]["id"], Path(found[0]["path"]).name) == (before[0]["id"], Path(before[0]["path"]).name)
    photo = str(earlier / "photos" / "07.jpg")
    assert told(call("search", "--like", photo, "--top", "1", "--json"))["results"][0]["path"] == photo
    indexed = told(call("index", "--json"))
    counts = {name: indexed[name] for name in ("num_indexed", "num_embedded", "num_copied", "num_removed")}
    assert counts == {"num_indexed": NUM_PHOTOS, "num_embedded": 0, "num_copied": 0, "num_removed": 0}
    assert len(told(call("index", "--list", "--json"))["indexes"]) == 1


# --- What programs read ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with photos, photos in classes, and two runs of a few seconds: enough for a close look at a step."""
    here = tmp_path_factory.mktemp("trained").resolve()
    picture_folder(here / "photos", NUM_PHOTOS)
    shutil.copy(here / "photos" / "03.jpg", here / "photos" / "copy.jpg")
    (here / "photos" / "copy.txt").write_text("a copy")
    for number, name in enumerate(("cat", "dog")):
        for file in picture_folder(here / "classes" / name, 4, first=30 + 4 * number).glob("*.txt"):
            file.unlink()
    flags = {**SMALL, "source": "photos", "num_validation": 6, "validation_share": 0.25, "minutes": 0.06}
    del flags["steps"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAPCLIP_CACHE", str(here / "cache"))
        done = lapclip("train", *as_flags(flags | {"eval_every": "3s"}), "--run", "a", "--json", cwd=here)
    (here / "train.json").write_text(json.dumps(told(done)))
    return here


@pytest.fixture
def in_trained(trained, monkeypatch) -> Path:
    monkeypatch.chdir(trained)
    monkeypatch.setenv("LAPCLIP_CACHE", str(trained / "cache"))
    return trained


SIZED = "--size nano --image-size 16 --workers 0"
COMMANDS = f"""
eval a
eval a classes
eval a --against b
data check photos {SIZED}
data pack photos {SIZED}
data show photos {SIZED}
data clean
index photos --model a
index --list
search red
search --duplicates --min-score -1
runs
runs compare a b
runs stop a
report a
report a b
watch a
index --forget photos
index --remove a
runs remove b --yes
"""


def test_json_keeps_its_keys(in_trained, call):
    shutil.copytree("runs/a", "runs/b")
    found = {"train": keys_of(json.loads(Path("train.json").read_text()))}
    for line in COMMANDS.strip().splitlines():
        found[line] = keys_of(told(call(*shlex.split(line), "--json")))
    assert "\n".join(broken("json-keys", found)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--ops", "--sizes"])
def test_json_of_bench_keeps_its_keys(flags, call, quick):
    step = "" if flags else "--size nano --image-size 16 --batch-size 8 --threads 1"
    found = keys_of(told(call(*f"bench {flags} {step} --json".split())))
    assert not broken("json-keys", {f"bench {flags}".strip(): found})


@pytest.mark.slow
def test_json_of_training_in_the_background_keeps_its_keys(tmp_path):
    small = as_flags(SMALL | {"steps": 10_000, "eval_every": "5000"})
    began = told(lapclip("train", *small, "--run", "c", "--background", "--json"))
    try:
        events = Path("runs/c/events.jsonl")
        wait_for(lambda: events.exists() and '"Step"' in events.read_text())
        running = told(lapclip("runs", "--json"))
    finally:
        ended = told(lapclip("runs", "stop", "c", "--json"))
    assert ended["state"] == "stopped" and running["runs"][0]["state"] == "running"
    resumed = told(lapclip("runs", "resume", "c", "--json"))
    again = told(lapclip("runs", "stop", "c", "--json"))
    assert again["step"] >= ended["step"]
    found = {
        "train --background": began,
        "runs (running)": running,
        "runs stop (running)": ended,
        "runs resume": resumed,
    }
    assert not broken("json-keys", {name: keys_of(value) for name, value in found.items()})


def test_events_keep_their_fields(trained):
    by_kind = defaultdict(list)
    for event in events_of(trained / "runs/a"):
        by_kind[event["event"]].append(event)
    found = {kind: keys_of(*same) for kind, same in by_kind.items()}
    assert found.keys() >= {"Started", "Step", "Inspected", "Evaluated", "Saved", "Finished"}
    assert not broken("events", found)


@contextmanager
def served() -> Iterator[str]:
    """The address of a server."""
    serve = command("serve", "--no-open")
    process = subprocess.Popen(serve, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        said = process.stderr.readline()
        yield re.search(r"http://127\.0\.0\.1:\d+", said)[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


def test_the_interface_over_http_keeps_what_it_has(earlier):
    def ask(path: str, body: bytes | None = None, kind: str = "application/json") -> dict:
        asked = urllib.request.Request(address + path, body, {"content-type": kind})
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return json.load(answer)

    photo = (earlier / "photos" / "05.jpg").read_bytes()
    with served() as address:
        found = {"openapi": dict(promises_of(ask("/openapi.json")))}
        found["GET /health"] = keys_of(ask("/health"))
        found["GET /search"] = keys_of(ask("/search?q=red+cat&top=3"))
        found["POST /search"] = keys_of(ask("/search?top=3", photo, "image/jpeg"))
        found["POST /embed"] = keys_of(ask("/embed", b'{"texts": ["red"]}'))
        found["GET /classify"] = keys_of(ask("/classify?id=1&label=cat&label=dog"))
    assert "\n".join(broken("http", found)) == ""


# --- What people type ---

NEEDED = {"eval": "run", "runs stop": "a", "runs compare": "a b", "runs resume": "a"}


def parse(words: list[str]) -> tuple:
    """What a command is given for some words, without running it. The one look inside: only the parser has all flags."""
    from lapclip.cli import app

    _, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
    return bound.args


@pytest.mark.parametrize("name", json.loads((FIXTURES / "flags.json").read_text()))
def test_every_flag_is_still_accepted(name):
    for flag in json.loads((FIXTURES / "flags.json").read_text())[name]:
        takes_it = flag.startswith(("--run ", "--name "))
        needed = [] if takes_it else NEEDED.get(name, "").split()
        arguments = parse([*name.split(), *needed, *flag.split()])
        assert flag.split()[0] not in arguments, f"`{flag}` is taken for a word"


def test_exit_codes_stay(call, tmp_path):
    codes = {
        "--version": 0, "--help": 0, "train --help": 0, "runs": 0, "runs --json": 0, "index --list": 0, "data clean": 0,
        "eval nothing": 1, "report nothing": 1, "watch nothing --json": 1, "train --resume nothing": 1, "search red": 1,
        "train no-such-folder": 1, "runs stop nothing": 1, "index no-such-folder": 1, "data check synthetic": 1,
        "train --minuts 3": 2, "train --steps many": 2, "train --size giant": 2, "runs nothing": 2, "nothing": 2,
        "eval": 2, "search --tops 3": 2,
    }  # fmt: skip
    assert {line: call(*line.split()).returncode for line in codes} == codes
    for line in ("runs", "eval nothing", "eval"):
        assert lapclip(*line.split()).returncode == codes[line], (
            "the process ends with the code of its command"
        )
