"""What people have on their disks and in their scripts goes on working: old runs, packs and indexes, flags, JSON, HTTP.

Only the command line, HTTP and files are used, so that these tests stand however the code is arranged. What is promised
lies in `fixtures/`, whose README says how each file was made; more may be added to what is promised, nothing taken away.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import SMALL, as_flags, command, environment, lapclip, picture_folder, wait_for

FIXTURES = Path(__file__).parent / "fixtures"
IS_WRITING = "LAPCLIP_WRITE_PROMISES" in os.environ  # then what is found is added to what is promised
NUM_PHOTOS = 24  # of the archive
AS_PACKED = ("photos", "--size", "nano", "--image-size", "16", "--workers", "0", "--json")
# Objects whose keys are the machine's or the data's, not ours.
OPEN = {"caches", "readings", "grad_norms", "rates", "choice_by_device"}
PATIENCE = 60


def told(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def promised(name: str, found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """What a file of promises says; made or added to when asked for."""
    file = FIXTURES / f"{name}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    if IS_WRITING:
        known = {part: {**known.get(part, {}), **found.get(part, {})} for part in {**known, **found}}
        file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return known


def broken(name: str, found: dict[str, dict[str, str]]) -> list[str]:
    """Promises that do not hold: each key is still there, and of the same type; null goes with every type."""
    problems = []
    for part, keys in promised(name, found).items():
        for key, kinds in keys.items() if part in found else ():
            now = found[part].get(key)
            before, after = ({*kinds.split("|")} - {"null"}, {*(now or "").split("|")} - {"null"})
            if now is None:
                problems.append(f"{part}: `{key}` is gone")
            elif before and not after <= before:
                problems.append(f"{part}: `{key}` was {kinds}, and is {now}")
    return problems


def keys_of(*values: object) -> dict[str, str]:
    """Each key of nested JSON with its types: {"runs[].name": "str", "runs[].pid": "int|null"}."""
    found: dict[str, set[str]] = defaultdict(set)

    def look(value: object, path: str, name: str) -> None:
        found[path].add("null" if value is None else type(value).__name__)
        if isinstance(value, dict) and name not in OPEN:
            for key, inner in value.items():
                look(inner, f"{path}.{key}" if path else key, key)
        elif isinstance(value, list):
            for inner in value:
                look(inner, f"{path}[]", name)

    for value in values:
        look(value, "", "")
    return {path: "|".join(sorted(kinds)) for path, kinds in found.items()}


# --- What an earlier version left on the disk ---


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """Runs, photos, a pack and an index that an earlier version wrote, as if it had written them here."""
    here = tmp_path_factory.mktemp("earlier").resolve()
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
        "stopped": "stopped",
        "finished": "finished",
    }
    assert runs["finished"]["step"] == runs["finished"]["steps"] == 6 and runs["stopped"]["steps"] == 200
    assert 150 <= runs["stopped"]["step"] < 200
    for name in runs:
        assert told(call("report", name, "--json")) and told(call("watch", name, "--json"))
        page = earlier / f"{name}.html"
        assert call("report", name, "--output", str(page)).returncode == 0
        assert "<svg" in page.read_text() or "<canvas" in page.read_text()
    assert told(call("runs", "compare", "stopped", "finished", "--json"))["settings"]


def test_an_earlier_run_is_evaluated_as_it_was(earlier, expected, call):
    now, before = told(call("eval", "finished", "--json")), expected["eval"]
    for way in ("text_to_image", "image_to_text"):
        for k in (1, 5, 10):  # within one of its 16 pictures: other processors round otherwise
            assert now[way][f"recall@{k}"] == pytest.approx(before[way][f"recall@{k}"], abs=1.01 / 16)


def test_an_earlier_model_is_loaded_by_python(earlier, call):
    import lapclip as package

    told(call("runs", "--json"))
    assert package.load("runs/finished").texts(["a red square"]).shape == (1, 128)
    assert package.load("runs/stopped").texts(["red cat"]).shape == (1, 128)


def test_an_earlier_run_resumes_and_comes_to_the_same(earlier, expected, call, tmp_path):
    run = shutil.copytree(earlier / "runs/stopped", tmp_path / "stopped")
    done = told(call("train", "--resume", str(run), "--json"))
    assert (done["steps"], done["reason"]) == (200, "budget")
    last = [event for event in events_of(run) if event["event"] == "Step"][-1]
    for name in ("step", "epoch", "num_pairs_seen", "lr", "num_different"):
        assert last[name] == expected["last_step"][name], name
    assert last["loss"] == pytest.approx(expected["last_step"]["loss"], rel=0.02)


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
    assert [pack["name"] for pack in told(call("data", "clean", "--json"))["packs"]] == [
        Path(packed["path"]).name
    ]


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
    assert not broken("json-keys", found)


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
        wait_for(
            lambda: (
                Path("runs/c/events.jsonl").exists() and '"Step"' in Path("runs/c/events.jsonl").read_text()
            )
        )
        running = told(lapclip("runs", "--json"))
    finally:
        ended = told(lapclip("runs", "stop", "c", "--json"))
    assert ended["state"] == "stopped" and running["runs"][0]["state"] == "running"
    resumed = told(lapclip("runs", "resume", "c", "--json"))
    again = told(lapclip("runs", "stop", "c", "--json"))
    found = {
        "train --background": began,
        "runs (running)": running,
        "runs stop (running)": ended,
        "runs resume": resumed,
    }
    assert again["step"] >= ended["step"]
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
    process = subprocess.Popen(
        command("serve", "--no-open"), env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        said = process.stderr.readline()
        yield re.search(r"http://127\.0\.0\.1:\d+", said)[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


def promises_of(document: dict) -> Iterator[tuple[str, str]]:
    """Each path, method, parameter, kind of body, answer and property of an OpenAPI document, with its type."""

    def properties(schema: dict, place: str) -> Iterator[tuple[str, str]]:
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        yield place, str(schema.get("type", "any"))
        for name, inner in schema.get("properties", {}).items():
            always = "" if name in schema.get("required", ()) else "?"
            yield from properties(inner, f"{place}.{name}{always}")
        if "items" in schema:
            yield from properties(schema["items"], f"{place}[]")

    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            here = f"{method.upper()} {path}"
            yield f"{here} id", operation["operationId"]
            for one in operation.get("parameters", ()):
                yield from properties(one["schema"], f"{here} {one['in']} {one['name']}")
                yield f"{here} {one['in']} {one['name']} required", str(one.get("required", False))
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                yield from properties(body["schema"], f"{here} takes {kind} ")
            for code, answer in operation["responses"].items():
                yield from ((f"{here} {code} header {name}", "any") for name in answer.get("headers", ()))
                for kind, content in answer.get("content", {}).items():
                    yield from properties(content.get("schema", {}), f"{here} {code} {kind} ")


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
    assert not broken("http", found)


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
        needed = (
            [] if flag.startswith("--run ") or flag.startswith("--name ") else NEEDED.get(name, "").split()
        )
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


def test_a_process_ends_with_the_code_of_its_command():
    assert [lapclip(*line.split()).returncode for line in ("runs", "eval nothing", "runs --jsn")] == [0, 1, 2]
    module = subprocess.run([sys.executable, "-c", "import lapclip; lapclip.load"], capture_output=True)
    assert module.returncode == 0, module.stderr
