"""Runs in processes of their own: started, killed, hung up, out of disk; and what is said of them then."""

import contextlib
import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SMALL, as_flags, command, environment, wait_for

from lapclip.cli import app, run_command
from lapclip.errors import UserError
from lapclip.runs.background import as_arguments, start_training
from lapclip.runs.run import Run, find_run, new_run
from lapclip.runs.status import status_of

# So much is said that nothing is left to be measured while it is set up.
SAID = {"chunk": 8, "eval_every": "50", "save_every": "20", "device": "cpu"}
ENDLESS = [*as_flags(SMALL | SAID | {"steps": 1_000_000}), "--keep-memory"]


@pytest.fixture
def started(call):
    """Starts background runs, and sees to it that none outlives the test."""
    begun: list[int] = []

    def start(*arguments: str) -> tuple[Run, int]:
        done = call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        begun.append(said["pid"])
        return Run(Path(said["run"])), said["pid"]

    yield start
    for pid in begun:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)  # a process started by `call` is a child of ours


def wait_for_step(run: Run, step: int) -> None:
    wait_for(lambda: status_of(run).history.num_steps >= step or status_of(run).state != "running")
    assert status_of(run).state == "running", log_of(run)


def log_of(run: Run) -> str:
    return (run.path / "output.log").read_text()


def newest_checkpoint(run: Run) -> int:
    return max(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))


def test_settings_are_typed_as_they_are_read():
    flags = SMALL | {"flip": False, "compile": True, "lr": 1e-3, "source": "-odd name + emoji@2"}
    _, bound, _ = app.parse_args(["train", *as_arguments(flags)], exit_on_error=False, print_error=False)
    assert {name: bound.arguments[name] for name in flags} == flags


@pytest.mark.slow
def test_a_background_run_survives_its_session_stops_goes_on_is_killed_and_goes_on_to_its_end(started, call):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shell = subprocess.run(
        command("train", "--background", "--json", *ENDLESS),
        capture_output=True, text=True, env=environment(), start_new_session=True, timeout=30,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert shell.returncode == 0, shell.stderr
    said = json.loads(shell.stdout)
    run, pid = find_run(said["name"]), said["pid"]
    try:
        assert said["run"] == "runs/synthetic-200-nano-1"
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5, "without torch"
        now = status_of(run)
        assert (now.state, now.lock.owner, now.history.num_steps) == ("running", pid, 0), (
            "while it is being set up"
        )
        assert call("train", "--run", run.name, *ENDLESS).returncode == 1, "the name is taken"
        assert os.getsid(pid) == pid != os.getsid(0), "no terminal's end reaches it"
        wait_for_step(run, 5)
        stopped = call("runs", "stop", run.name)
        assert stopped.returncode == 0 and "stopped and saved at step" in stopped.stderr, stopped.stderr
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    now = status_of(run)
    assert (now.state, now.lock.owner, now.seconds_left) == ("stopped", None, None)
    assert newest_checkpoint(run) == now.history.num_steps > 0
    again = call("runs", "stop", run.name)
    assert again.returncode == 0 and "it is stopped, at step" in again.stderr

    _, pid = started("runs", "resume", run.name)
    wait_for_step(run, now.history.num_steps + 25)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: run.owner() is None)
    dead = status_of(run)
    assert (dead.state, dead.lock.owner, dead.seconds_left) == ("crashed", None, None)
    assert dead.history.num_steps >= now.history.num_steps + 25
    last = str(dead.history.num_steps + 5)
    done = call("train", "--resume", run.name, "--steps", last, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == int(last)
    assert status_of(run).state == "finished"
    refused = call("runs", "resume", run.name, "--steps", "3")
    assert refused.returncode == 1 and "has used up this budget" in refused.stderr
    assert status_of(run).state == "finished", "a refusal changes nothing"


@pytest.mark.slow
def test_killed_or_stopped_while_it_is_set_up_it_is_not_running_and_blocks_nothing(started, call):
    run, pid = started("train", "--background", "--run", "early", *ENDLESS)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: run.owner() is None)
    assert (status_of(run).state, status_of(run).history.num_steps) == ("crashed", 0)
    assert call("train", "--resume", "early").returncode == 1
    run, pid = started("train", "--background", "--run", "early", *ENDLESS)  # the name is free again
    done = call("runs", "stop", "early")  # it has not begun to listen yet
    assert done.returncode == 0 and re.search("being set up|before its first step", done.stderr), done.stderr
    assert (status_of(run).state, status_of(run).history.num_steps) == ("stopped", 0)
    assert call("runs", "remove", "early", "--yes").returncode == 0 and not run.path.exists()


@pytest.mark.slow
def test_what_fails_while_it_is_set_up_is_said(started, call):
    uncut = [*as_flags(SMALL | SAID | {"image_size": 60}), "--keep-memory"]
    run, _ = started("train", "--background", "--run", "bad", *uncut)
    wait_for(lambda: run.owner() is None)
    status = status_of(run)
    assert status.state == "failed" and status.failed.hint
    assert "is not a multiple of the patch size" in status.failed.message
    wait_for(lambda: "\nhint: " in log_of(run))
    assert "error: " in log_of(run) and "Traceback" not in log_of(run)
    assert log_of(run).startswith("lapclip train ")
    assert "is not a multiple of the patch size" in call("runs").stdout
    assert run_command(["eval", "bad"]) == 1


def test_mistakes_are_said_at_once_and_leave_no_folder(call):
    for arguments, message in (
        (["--steps", "0"], "less than 1"),
        (["nowhere/pictures"], "does not exist"),
        (["--run", "a b"], "name of a run"),
        (["--resume", "none"], "no run `none`"),
        (["--config", "none.toml"], "none.toml"),
    ):
        done = call("train", "--background", *arguments)
        assert done.returncode == 1 and message in done.stderr, done.stderr
    assert not list(Path("runs").glob("*"))


AS_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
def test_a_closed_terminal_saves_and_stops(call):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", AS_ITS_TERMINAL, *command("train", "--run", "hung-up", *ENDLESS)],
        stdin=slave, stdout=slave, stderr=slave, env=environment(TERM="xterm"), start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    run = Run(Path("runs/hung-up"))
    deadline = time.monotonic() + 60
    try:
        while status_of(run).history.num_steps < 5:
            if select.select([master], [], [], 0.05)[0]:
                os.read(master, 1 << 16)  # or it would wait for the terminal
            assert time.monotonic() < deadline and process.poll() is None
        os.close(master)
        process.wait(timeout=60)
    finally:  # or a failure would leave it training for ever, beside all other tests
        process.kill()
        process.wait()
    wait_for(lambda: run.owner() is None)
    status = status_of(run)
    assert status.state == "stopped" and newest_checkpoint(run) == status.history.num_steps
    assert call("train", "--resume", "hung-up", "--steps", str(status.history.num_steps + 2)).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "lapclip-test", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root, and a system that has tmpfs")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_with_room_the_run_goes_on(small_disk, monkeypatch, started, call):
    monkeypatch.chdir(small_disk)
    run, _ = started("train", "--background", "--run", "full", *ENDLESS)
    wait_for_step(run, 25)  # one checkpoint is there
    with contextlib.suppress(OSError), Path("filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1024))
    wait_for(lambda: run.owner() is None)
    status = status_of(run)
    assert status.state == "failed" and "no space left on device" in status.failed.message, status
    assert "free some disk space" in status.failed.hint and "no space left" in call("runs").stdout
    refused = call("train", "--resume", "full", "--steps", str(status.history.num_steps + 3))
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert status_of(run).state == "failed", "still"
    subprocess.run(["mount", "-o", "remount,size=160m", small_disk], check=True)
    done = call("train", "--resume", "full", "--steps", str(status.history.num_steps + 3))
    assert done.returncode == 0, done.stderr
    assert status_of(run).state == "finished"


def test_the_lock_goes_from_hand_to_hand():
    """The run is owned from before the process is started until it ends, with no moment in between."""
    run = new_run("held", prefix="x")
    pid = start_training(run, ["--run", "held", "--steps", "many"])
    assert run.owner() == pid and run.handle is None
    with pytest.raises(UserError, match=f"process {pid}"):
        run.take_lock()
    os.waitpid(pid, 0)
    assert run.owner() is None and "--steps" in log_of(run)
