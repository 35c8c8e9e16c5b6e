"""`caffeinate` is a stub that writes down how it was called and stays until it is ended."""

import os
import sys
import time

import psutil
import pytest

from lapclip.machine.awake import keep_awake

STUB = """#!/bin/sh
trap '{on_end}' TERM
echo "$$ $@" > {said}.new && mv {said}.new {said}
while true; do sleep 0.02; done
"""


@pytest.fixture
def on_a_mac(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.fixture
def caffeinate(tmp_path, monkeypatch, on_a_mac):
    said = tmp_path / "said"
    write_program(tmp_path / "bin" / "caffeinate", STUB.format(said=said, on_end="exit 0"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return said


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def wait_for(path) -> list[str]:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, "it was not started"
        time.sleep(0.01)
    return path.read_text().split()


def test_a_mac_is_kept_awake_for_as_long_as_this_process_lives_and_no_longer_than_asked(caffeinate):
    with keep_awake():
        pid, *arguments = wait_for(caffeinate)
        assert arguments == ["-i", "-w", str(os.getpid())]
        assert psutil.pid_exists(int(pid))
    assert not psutil.pid_exists(int(pid))


def test_nothing_is_left_behind_after_an_error(caffeinate):
    with pytest.raises(ZeroDivisionError), keep_awake():
        pid = int(wait_for(caffeinate)[0])
        raise ZeroDivisionError
    assert not psutil.pid_exists(pid)


def test_a_program_that_will_not_end_is_killed(caffeinate, tmp_path, monkeypatch):
    monkeypatch.setattr("lapclip.machine.awake.PATIENCE_SECONDS", 0.2)
    write_program(tmp_path / "bin" / "caffeinate", STUB.format(said=caffeinate, on_end=":"))
    with keep_awake():
        pid = int(wait_for(caffeinate)[0])
    assert not psutil.pid_exists(pid)


def test_a_mac_without_the_program_runs_as_well(tmp_path, monkeypatch, on_a_mac):
    monkeypatch.setenv("PATH", str(tmp_path))
    before = psutil.Process().children()
    with keep_awake():
        assert psutil.Process().children() == before


def test_a_program_that_cannot_start_is_no_error(caffeinate, tmp_path):
    write_program(tmp_path / "bin" / "caffeinate", "#!/nowhere/at/all\n")
    with keep_awake():
        pass
    assert not caffeinate.exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has the program")
def test_elsewhere_nothing_is_started(caffeinate, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    before = psutil.Process().children()
    with keep_awake():
        assert psutil.Process().children() == before
