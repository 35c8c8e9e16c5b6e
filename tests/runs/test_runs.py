"""How runs stand, from their locks and the ends of their events; the list, comparing, stopping and removing."""

import fcntl
import json
import os
import pty
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import made_events
import psutil
import pytest
from conftest import command, environment
from made_events import RECALL, WAY

from lapclip.config import Config, load_config
from lapclip.errors import UserError
from lapclip.runs.events import (
    Continued,
    Evaluated,
    Event,
    Failed,
    Finished,
    Paused,
    Saved,
    Started,
    Step,
    to_line,
)
from lapclip.runs.run import Run, all_runs, new_run, newest_run, open_run
from lapclip.runs.status import remove, status_of

NOW = time.time()


def recall(at_1: float) -> dict:
    return RECALL | {"text_to_image": WAY | {"recall@1": at_1}}


def begun(total: int | None = 100, **changes) -> Started:
    return made_events.started(total_steps=total, time=NOW, **changes)


def step(number: int, of: int = 100) -> Step:
    return made_events.step(number, progress=number / of, seconds=number / 10, seconds_left=9.0, time=NOW)


def seen(number: int, at_1: float, *, best: bool = True) -> Evaluated:
    return Evaluated(number, recall(at_1), best, 1.0, 2.5, time=NOW)


def done(reason: str, number: int, at_1: float | None = 0.5) -> Finished:
    found = None if at_1 is None else recall(at_1)
    return Finished(reason, number, 0.1, 1.0, 8, 8.0, 2**30, 1000, found, number, "x", time=NOW)


def made(name: str, *events: Event, torn: str = "", config: Config | None = None) -> Run:
    """A run whose events are these."""
    run = new_run(name, prefix="x")
    run.write_config(config or load_config())
    run.tokenizer_file.write_text("{}")
    (run.path / "lock").touch()
    if events or torn:
        (run.path / "events.jsonl").write_text("".join(map(to_line, events)) + torn)
    return run


@pytest.fixture
def held():
    """Has another process own a run."""
    others = []

    def hold(run: Run) -> int:
        program = (
            f"from pathlib import Path; from lapclip.runs.run import Run\n"
            f"run = Run(Path({str(run.path)!r})); run.take_lock(); print('mine', flush=True); input()"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        others.append(other)
        assert other.stdout.readline() == b"mine\n"
        return other.pid

    yield hold
    for other in others:
        other.kill()
        other.communicate()


@pytest.mark.parametrize(
    ("events", "state", "at_step", "progress"),
    [
        ([], "stopped", 0, 0.0),
        ([begun()], "crashed", 0, 0.0),
        ([begun(), step(40)], "crashed", 40, 0.4),
        ([begun(), step(40), Saved(41, "x", 1, 1.0)], "crashed", 41, 0.4),
        ([begun(), step(40), Paused(41, "battery")], "crashed", 41, 0.4),
        ([begun(), step(40), done("stopped", 42)], "stopped", 42, 0.4),
        ([begun(), step(100), done("budget", 100)], "finished", 100, 1.0),
        ([begun(), step(40), Failed("oh", "try")], "failed", 40, 0.4),
        ([begun(), step(100), done("budget", 100), begun(200, step=100)], "crashed", 100, 0.5),
        ([begun(), step(60), begun(step=20)], "crashed", 20, 0.2),
        ([begun(None, minutes=1.0), step(30, of=120)], "crashed", 30, 0.25),
    ],
)
def test_the_last_events_tell_the_state(events, state, at_step, progress):
    status = status_of(made("a", *events))
    assert (status.state, status.history.num_steps) == (state, at_step)
    assert status.lock.owner is None and status.seconds_left is None
    assert status.history.progress == pytest.approx(progress)
    if state == "failed":
        assert (status.failed.message, status.failed.hint) == ("oh", "try")


def test_a_held_lock_is_a_run_that_lives(held):
    run = made("a", begun(), step(40), seen(40, 0.25))
    pid = held(run)
    assert (status_of(run).state, status_of(run).lock.owner) == ("running", pid)
    assert status_of(run).seconds_left is None, "what an earlier process foretold"
    for event, state in (
        (Paused(40, "battery"), "paused"),
        (Continued(40, 5.0), "running"),
        (Failed("oh", "try"), "running"),
        (Paused(40, "battery"), "paused"),
        (Step(**(vars(step(41)) | {"time": time.time() + 1})), "running"),
    ):
        run.write(event)
        assert status_of(run).state == state, event
    status = status_of(run)
    assert (status.seconds_left, status.history.total_steps, status.recall_1) == (9.0, 100, 0.25)
    psutil.Process(pid).kill()
    while run.owner():
        time.sleep(0.01)
    assert status_of(run).state == "crashed"


def test_killed_before_its_first_word_a_resumed_run_has_crashed(held):
    run = made("a", begun(), step(40), done("stopped", 40))
    psutil.Process(held(run)).kill()
    while run.owner():
        time.sleep(0.01)
    assert status_of(run).state == "crashed"


def test_a_process_with_the_number_of_the_owner_is_not_taken_for_it(call):
    """The file says a number; only the system says who holds the lock."""
    with subprocess.Popen(["sleep", "60"]) as other:
        run = made("a", begun(), step(40))
        content = {"pid": other.pid, "started": psutil.Process(other.pid).create_time(), "taken": NOW - 60}
        (run.path / "lock").write_text(json.dumps(content))
        assert (status_of(run).state, status_of(run).lock.owner) == ("crashed", None)
        assert call("runs", "stop", "a").returncode == 0 and other.poll() is None
        with (run.path / "lock").open() as file:  # held, but by another than the one that is named
            (run.path / "lock").write_text(json.dumps(content | {"started": 5.0}))
            fcntl.flock(file, fcntl.LOCK_EX)
            refused = call("runs", "stop", "a")
            assert refused.returncode == 1 and "not visible on this machine" in refused.stderr
        assert other.poll() is None
        other.kill()


def test_a_lock_of_anything_breaks_no_list():
    run = made("a", begun(), step(40))
    for content in ("{torn", "[]", '{"pid": "x"}', '{"said": 3}', '{"said": {"message": 5}}', "\x00" * 4096):
        (run.path / "lock").write_text(content)
        assert status_of(run).state == "crashed", content


def test_a_failure_that_no_event_could_tell_stands_in_the_lock():
    run = made("a", begun(), step(40))
    run.take_lock()
    (run.path / "events.jsonl").rename(run.path / "kept")
    (run.path / "events.jsonl").mkdir()  # so that nothing can be written
    run.let_go(UserError("the disk is full of \u732b" * 100, "make room"))
    (run.path / "events.jsonl").rmdir()
    (run.path / "kept").rename(run.path / "events.jsonl")
    status = status_of(run)
    assert status.state == "failed" and status.failed.message.startswith("the disk is full of \u732b")
    assert status.failed.hint == "make room" and (run.path / "lock").stat().st_size == 4096
    with run.owned():
        assert status_of(run).state == "running"
    assert status_of(run).state == "crashed", "what was said then is said no more"


@pytest.mark.parametrize(
    "torn",
    [to_line(step(41))[:50], "\x00" * 70_000, '{"event":"Later"}\n', "\n\n"],
    ids=["half a line", "no text", "unknown", "empty lines"],
)
def test_a_torn_end_does_not_hide_what_was_before(torn):
    assert status_of(made("a", begun(), step(40), torn=torn)).history.num_steps == 40


def test_what_lies_far_back_is_found():
    """The best recall may be hours old; it is looked for before the end."""
    many = [step(n, of=10_000) for n in range(1, 3000)]
    run = made("a", begun(10_000), seen(1, 0.4), *many[:2000], seen(2000, 0.3, best=False), *many[2000:])
    status = status_of(run)
    assert (status.recall_1, status.history.num_steps, status.history.total_steps) == (0.4, 2999, 10_000)


def test_a_hundred_long_runs_are_listed_quickly_by_their_ends():
    lines = to_line(step(29_999, of=30_000)) * 30_000
    end = to_line(step(30_000, of=30_000)) + to_line(done("budget", 30_000))
    for number in range(100):
        run = made(f"run-{number:03}", begun())
        if number < 5:
            with (run.path / "events.jsonl").open("a") as file:
                file.write(lines)
        with (run.path / "events.jsonl").open("a") as file:
            file.write(end)
    assert (Path("runs/run-000") / "events.jsonl").stat().st_size > 8e6
    before, started = bytes_read(), time.process_time()
    found = [status_of(run) for run in all_runs()]
    took, read = time.process_time() - started, bytes_read() - before
    assert len(found) == 100 and {status.state for status in found} == {"finished"}
    assert took < 0.5 and read < 2e6, "40 MB lie before the ends"


def bytes_read() -> int:
    """By this process, from files; nothing where the system does not count."""
    counted = Path("/proc/self/io")
    return int(counted.read_text().split()[1]) if counted.exists() else 0


def test_the_newest_run_is_the_one_that_lives_else_the_last_that_did(held):
    assert newest_run() is None and all_runs() == []
    for age, name in ((30, "old"), (10, "new"), (20, "middle")):
        run = made(name, begun())
        for file in run.path.iterdir():
            os.utime(file, (NOW - age, NOW - age))
    Path("runs/nothing").mkdir()
    Path("runs/a-file").write_text("")
    assert [run.name for run in all_runs()] == ["new", "middle", "old"] and newest_run().name == "new"
    os.utime("runs/old")  # a report was written
    with pytest.raises(UserError, match="the newest is `new`"):
        open_run("xyz")
    held(open_run("old"))
    assert newest_run().name == "old"


def test_the_list_says_it_to_people_and_to_programs(call):
    assert "holds no runs yet" in call("runs").stderr
    made("cats", begun(), step(40), seen(40, 0.25), Failed("the data is gone", "bring it back"))
    made("dogs", begun())
    shown = call("runs")
    assert max(map(len, shown.stdout.splitlines())) <= 80 and shown.stderr == ""
    assert "25.0% of 100 (1.0%)" in shown.stdout
    for word in ("cats", "failed", "40.0%", "just now", "the data is gone", "dogs", "crashed"):
        assert word in shown.stdout, word
    found = {run["name"]: run for run in json.loads(call("runs", "--json").stdout)["runs"]}
    assert found["cats"].keys() >= {"name", "state", "pid", "step", "steps", "recall@1", "seconds_left"}
    cats = found["cats"]
    assert (cats["state"], cats["recall@1"], cats["steps"]) == ("failed", 0.25, 100)
    assert cats["num_validation"] == RECALL["num_images"] and found["dogs"]["num_validation"] is None
    assert cats["message"] == "the data is gone" and cats["started"] == NOW


def test_the_list_has_one_line_for_each_run_in_80_columns(call, held):
    made("flickr8k-tiny-1", begun(), seen(40, 0.449), replace(done("budget", 12_345), time=NOW - 1200))
    held(made("photos-small-12", begun(), seen(30, 0.449), replace(step(40), time=NOW + 1000)))
    lines = call("runs").stdout.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert re.search(r"2\d minutes ago", lines[2]) and "9.0 s left" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["runs", "stpo", "cats"], 2, "did you mean `stop`"),
        (["runs", "stop"], 2, "`lapclip runs stop --help`"),
        (["runs", "stop", "catz"], 1, "did you mean `cats`"),
        (["runs", "compare", "cats"], 2, "an argument is missing: the run to compare it with"),
        (["eval"], 2, "an argument is missing: `RUN`"),
        (["export", "cats"], 2, "`--to` is missing: `hf` or `openclip`"),
        (["runs", "compare", "cats", "dogz"], 1, "no run `dogz`"),
        (["runs", "remove"], 1, "name a run"),
        (["runs", "--jsn"], 2, "`lapclip runs --help`"),
    ],
)
def test_a_mistake_is_a_sentence_with_a_way_out(arguments, code, message, call):
    made("cats", begun(), step(40))
    said = call(*arguments)
    assert said.returncode == code and message in said.stderr, said.stderr
    assert said.stderr.startswith("error: ") and "\nhint: " in said.stderr


def test_comparing_shows_what_differs_and_nothing_else(call):
    first = load_config(flags={"lr": 1e-3, "size": "nano"})
    second = load_config(flags={"lr": 1e-4, "size": "nano"})
    made("a", begun(), step(40), seen(40, 0.25), done("budget", 100, 0.5), config=first)
    made("b", begun(), step(40), seen(40, 0.3), config=second)
    Run(Path("runs/a")).write_machine({"chip": "one", "torch": "2"})
    Run(Path("runs/b")).write_machine({"chip": "another", "torch": "2"})
    found = json.loads(call("runs", "compare", "a", "b", "--json").stdout)
    assert found["settings"] == {"lr": [1e-3, 1e-4]} and found["machine"] == {"chip": ["one", "another"]}
    assert found["results"]["recall@1"] == [0.5, 0.3] and found["results"]["state"] == ["finished", "crashed"]
    assert found["results"]["peak_memory_bytes"] == [2**30, None]
    shown = call("runs", "compare", "a", "b").stdout
    for word in ("50.0%", "30.0%", "0.001", "0.0001", "one", "another", "1.07 GB", "validation loss"):
        assert word in shown, word
    assert "weight_decay" not in shown and "torch" not in shown
    assert "machine: the same" in call("runs", "compare", "a", "a").stdout


@pytest.mark.parametrize("other", [{"num_images": 31}, {"data": "other"}, {}], ids=str)
def test_recall_over_other_validation_images_is_said_not_to_be_comparable(call, other):
    made("a", begun(), seen(40, 0.5)).write_machine({"data": "one"})
    made("b", begun(), Evaluated(40, recall(0.5) | other, True, 1.0)).write_machine({"data": "one"} | other)
    told = json.loads(call("runs", "compare", "a", "b", "--json").stdout)
    assert told["same_validation"] is (not other)
    assert told["results"]["num_validation"][1] == other.get("num_images", RECALL["num_images"])
    shown = call("runs", "compare", "a", "b").stdout
    assert "validation images" in shown and ("cannot be compared" in shown) == bool(other)


def test_removing_asks_a_person_and_never_guesses(call, held):
    cats = made("cats", begun(), step(40), seen(40, 0.25))
    unasked = call("runs", "remove", "cats")
    assert unasked.returncode == 1 and "--yes" in unasked.stderr and cats.path.exists()
    for answer, is_kept in (("n\n", True), ("\n", True), ("y\n", False)):
        master, slave = pty.openpty()
        with subprocess.Popen(
            command("runs", "remove", "cats"),
            stdin=slave,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as process:
            os.write(master, answer.encode())
            said = process.communicate(timeout=30)[1]
        os.close(master)
        os.close(slave)
        assert "recall@1 25.0%" in said and "kB? [y/N]" in said and cats.path.exists() == is_kept, said
    assert list(Path("runs").iterdir()) == []
    dogs, birds = made("dogs", begun()), made("birds", begun())
    held(dogs)
    refused = call("runs", "remove", "birds", "dogs", "--yes")
    assert refused.returncode == 1 and "runs stop dogs" in refused.stderr and birds.path.exists()
    [removed] = json.loads(call("runs", "remove", "birds", "--yes", "--json").stdout)["removed"]
    assert removed["name"] == "birds"


def test_what_is_not_a_run_is_never_removed():
    folder = Path("runs/mine")
    folder.mkdir(parents=True)
    for name in ("config.toml", "lock", "thesis.tex"):
        (folder / name).write_text("")
    with pytest.raises(UserError, match="does not look like a lapclip run"):
        remove(Run(folder))
    assert (folder / "thesis.tex").exists()


def test_what_was_never_set_up_blocks_no_name_unless_something_else_is_in_it():
    run = new_run("cats", prefix="x")
    run.take_lock()
    with pytest.raises(UserError, match="already"):
        new_run("cats", prefix="x")
    run.let_go(UserError("no images", "bring some"))
    assert status_of(run).state == "failed"
    with pytest.raises(UserError, match="never set up"):
        open_run("cats")
    assert new_run("cats", prefix="x").path == run.path and list(run.path.iterdir()) == [run.checkpoints]
    (run.path / "lock").touch()
    (run.path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="already"):
        new_run("cats", prefix="x")
