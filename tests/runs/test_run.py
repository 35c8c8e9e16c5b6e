"""The run folder: names, lock, events."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_events import step

from lapclip.errors import UserError
from lapclip.files import write_atomically
from lapclip.runs.events import Failed, read_events, to_line
from lapclip.runs.run import new_run, open_run


def test_runs_without_a_name_are_numbered_and_a_taken_name_is_refused_with_both_ways_out():
    assert [new_run(None, prefix="nano").name for _ in range(3)] == ["nano-1", "nano-2", "nano-3"]
    with pytest.raises(UserError, match="already") as caught:
        new_run("nano-1", prefix="x")
    assert "--resume nano-1" in caught.value.hint and "--run" in caught.value.hint


@pytest.mark.parametrize("name", ["../up", "a/b", "", "..", "-x", "nul\0", "two words"])
def test_a_name_that_leaves_the_folder_is_refused(name):
    with pytest.raises(UserError, match="name of a run"):
        new_run(name, prefix="x")


def test_a_folder_that_cannot_be_written_is_named():
    Path("runs").write_text("not a folder")
    with pytest.raises(UserError, match="runs"):
        new_run("cats", prefix="x")
    with pytest.raises(UserError, match="runs"):
        new_run(None, prefix="x")


def test_a_run_opens_by_name_and_by_path():
    run = new_run("cats", prefix="x")
    (run.path / "config.toml").write_text("")
    assert open_run("cats").path == open_run("runs/cats").path == run.path
    assert open_run(str(run.path.absolute())).name == "cats"
    with pytest.raises(UserError, match="did you mean `cats`"):
        open_run("catz")


def test_only_one_process_trains_a_run():
    run = new_run("cats", prefix="x")
    program = (
        "from pathlib import Path; from lapclip.runs.run import Run\n"
        "with Run(Path('runs/cats')).owned():\n    print('mine', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"mine\n"
        assert run.owner() == other.pid
        with pytest.raises(UserError, match=f"process {other.pid}"), run.owned():
            pass
        other.kill()
    assert run.owner() is None, "a killed owner does not keep the run"
    with run.owned():
        assert run.owner() == os.getpid()
    assert run.owner() is None


@pytest.mark.slow
def test_of_many_processes_that_want_a_run_one_gets_it():
    new_run("cats", prefix="x")
    program = (
        "import time; from pathlib import Path; from lapclip.runs.run import Run; from lapclip.errors import UserError\n"
        "try:\n    with Run(Path('runs/cats')).owned(): print('mine'); time.sleep(3)\n"
        "except UserError: print('taken')"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    said = sorted(racer.communicate(timeout=60)[0].strip() for racer in racers)
    assert said == ["mine"] + 5 * ["taken"]


def test_what_ends_a_run_badly_is_written_down():
    run = new_run("cats", prefix="x")
    with pytest.raises(ZeroDivisionError), run.owned():
        1 / 0  # noqa: B018  # the point is that it raises
    (event,) = run.events()
    assert isinstance(event, Failed) and "division" in event.message and run.owner() is None


def test_an_unknown_event_and_an_unknown_field_break_no_reader(tmp_path):
    newer = json.dumps(json.loads(to_line(step(2))) | {"new_field": 1})
    (tmp_path / "events.jsonl").write_text(to_line(step(1)) + '{"event":"Later","x":1}\n' + newer + "\n")
    assert [event.step for event in read_events(tmp_path / "events.jsonl")] == [1, 2]


def test_many_steps_a_second_keep_the_file_small():
    run = new_run("cats", prefix="x")
    for number in range(5000):
        run.write(step(number))
    assert (run.path / "events.jsonl").stat().st_size < 5000


def test_nothing_is_written_through_a_link_that_a_stranger_left(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".report.html.writing").symlink_to(precious)
    write_atomically(tmp_path / "report.html", "page")
    assert precious.read_text() == "mine" and (tmp_path / "report.html").read_text() == "page"


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, "new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer" and list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_at_the_same_time_do_not_harm_one_another(tmp_path):
    """Threads and processes, of this file and of one whose name begins alike: a reader only ever sees whole contents."""
    program = (
        "import sys, threading; from pathlib import Path; from lapclip.files import write_atomically\n"
        "def write(name, letter):\n"
        "    for _ in range(100):\n        write_atomically(Path(name), letter * 100_000)\n"
        "both = [threading.Thread(target=write, args=x) for x in (('page', sys.argv[1]), ('page', 'x'), ('page.html', 'y'))]\n"
        "[one.start() for one in both]; [one.join() for one in both]\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, x], stderr=subprocess.PIPE) for x in "ab"]
    while any(writer.poll() is None for writer in writers):
        for page in tmp_path.glob("page*"):
            content = page.read_text()
            assert len(content) == 100_000 and len(set(content)) == 1
    assert [writer.communicate()[1] for writer in writers] == [b"", b""]
    assert {path.name for path in tmp_path.iterdir()} == {"page", "page.html"}


def test_what_a_killed_writer_left_is_removed_also_when_its_process_id_is_ours(tmp_path):
    with subprocess.Popen(["true"]) as gone:
        pass
    for left in (
        f".file.{gone.pid}.0a-1.writing",
        f".file.{os.getpid()}.0a-1.writing",
        f".file.{gone.pid}.writing",
    ):
        (tmp_path / left).mkdir()
    (tmp_path / f".file.{os.getppid()}.0a-1.writing").touch()  # somebody else's
    write_atomically(tmp_path / "file", "new")
    assert {path.name for path in tmp_path.iterdir()} == {"file", f".file.{os.getppid()}.0a-1.writing"}
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_an_event_after_a_torn_line_is_not_lost():
    run = new_run("cats", prefix="x")
    (run.path / "events.jsonl").write_text(to_line(step(1)) + to_line(step(2))[:30])
    with run.owned():
        run.write(step(3))
    assert [event.step for event in run.events()] == [1, 3]
