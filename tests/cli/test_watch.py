"""`lapclip watch`: on real pseudo-terminals of several sizes, on a pipe, and for programs, beside a run that trains."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import being_trained, command, environment, wait_for
from glass import Terminal
from made_events import finished
from test_terminal import inspected, started, step, written

from lapclip.runs.history import Summary
from lapclip.runs.run import Run
from lapclip.runs.status import run_to_watch

ESSENTIAL = (
    "running", "left", "loss", "in-batch accuracy", "recall@1", "recall@10", "chance", "tau", "gradient norm",
    "pairs/s", "data", "transfer", "forward", "backward", "optimizer", "memory", "peak", "activations", "core",
    "temperature", "power", "battery", "q quits this view; training continues",
)  # fmt: skip


@pytest.fixture
def terminal():
    opened = []

    def run(*arguments: str, columns: int, rows: int, **more: str) -> Terminal:
        opened.append(Terminal(*arguments, columns=columns, rows=rows, **more))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A folder with a run that trains as long as these tests take."""
    folder = tmp_path_factory.mktemp("training")
    with being_trained(folder, eval_every="2s") as process:
        yield folder, process


@pytest.fixture
def beside(training, monkeypatch):
    monkeypatch.chdir(training[0])
    return training[1]


def step_now() -> int:
    watched = Summary(run_to_watch("live"))
    watched.read()
    assert watched.history.step is not None
    return watched.history.step.step


@pytest.mark.slow
def test_everything_essential_fits_the_window_and_q_leaves_the_training_alone(beside, terminal):
    window = terminal("watch", columns=80, rows=24)
    for columns, rows in ((80, 24), (200, 50)):
        if rows > 24:
            window.read(0.2)
            window.resize(columns, rows)
            os.kill(window.process.pid, signal.SIGWINCH)
        text = window.wait_for("live", *ESSENTIAL)  # the glass refuses what is too wide or too far down
        assert len(text.splitlines()) == rows and text.splitlines()[-1].strip().startswith("q quits")
    assert "\x1b[36m" in window.raw, "a terminal gets colours"
    before = step_now()
    window.press(b"q")
    assert window.code() == 0
    said = " ".join("".join(window.glass.lines[False]).split())
    assert not window.glass.is_other and "`live` continues training" in said
    wait_for(lambda: step_now() > before, 20)
    assert beside.poll() is None


@pytest.mark.slow
def test_a_window_that_changes_its_size_is_drawn_again_and_ctrl_c_leaves(beside, terminal):
    window = terminal("watch", "live", columns=120, rows=40, NO_COLOR="1")
    window.wait_for("live", "q quits")
    window.read(0.3)
    window.resize(64, 20)
    os.kill(window.process.pid, signal.SIGWINCH)
    text = window.wait_for("live", "running", "loss", "tau", "q quits")
    assert len(text.splitlines()) == 20 and max(map(len, text.splitlines())) <= 64
    assert not re.search(r"\x1b\[[0-9;]*m", window.raw), "NO_COLOR"
    os.kill(window.process.pid, signal.SIGINT)
    assert window.code() == 130
    assert "continues training" in "".join(window.glass.lines[False]) and beside.poll() is None


@pytest.mark.slow
def test_on_a_pipe_it_says_plain_lines_and_goes_on_until_told(beside):
    follower = subprocess.Popen(
        command("watch", "live"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert follower.stdout is not None
    try:
        lines = [follower.stdout.readline() for _ in range(2)]
        follower.send_signal(signal.SIGINT)
        rest, said = follower.communicate(timeout=20)
    finally:
        follower.kill()
    assert follower.returncode == 130 and "continues training" in said
    assert re.match(r"run live: running, step [\d,]+ of 1,000,000, epoch [\d.]+, .* of training$", lines[0])
    assert re.match(r"step [\d,]+: ", lines[1]) and "\x1b" not in "".join(lines) + rest + said


@pytest.mark.slow
def test_programs_get_one_object_and_watching_loads_no_torch(beside, call):
    code = (
        "import sys, lapclip.cli; code = lapclip.cli.run_command(['watch', '--json', '--once']);"
        " sys.exit(code or 9 * any(name in sys.modules for name in ('torch', 'numpy', 'starlette', 'wandb')))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(asked.stdout)
    assert found["run"] == "runs/live" and found["state"] == "running" and found["warnings"] is not None
    assert 0 < found["progress"] < 1 and found["step"] > 0 and found["seconds_left"] > 0
    assert found["loss"] > 0 and 0 <= found["accuracy"] <= 1 and found["pairs_per_second"] > 0
    assert found["parts"]["forward"] > 0 and found["memory"]["peak"] > 0 and found["cores"]
    assert found["recall"]["text_to_image"]["recall@10"] >= 0 and found["temperature"] > 0 and found["lr"] > 0
    assert {"grad_norm", "bench_share"} <= found.keys()
    once = call("watch", "live", "--once")
    assert once.returncode == 0 and "in-batch accuracy" in once.stdout and "\x1b" not in once.stdout
    assert all(len(line) <= 80 for line in once.stdout.splitlines()) and "q quits" not in once.stdout


@pytest.mark.slow
def test_a_finished_run_opens_too(training, terminal, call, tmp_path):
    others = shutil.ignore_patterns("checkpoints", "snapshots", ".*")
    shutil.copytree(training[0] / "runs" / "live", "runs/done", ignore=others)
    run = Run(Path("runs/done"))
    (run.path / "lock").unlink()
    with run.owned():
        run.write(finished(6, recall=None))
    window = terminal("watch", columns=80, rows=24)
    assert window.code() == 0
    text = "\n".join(window.glass.lines[False])
    assert "finished" in text and "100%" in text and "recall@1" in text
    assert "1049h" not in window.raw, "it goes into the scrollback at once"
    piped = call("watch", str(tmp_path / "runs" / "done"))
    assert piped.returncode == 0 and piped.stdout.splitlines()[-1].startswith("finished: 6 steps")


def test_without_a_run_it_says_what_to_do(call):
    for arguments in (("watch",), ("watch", "--json")):
        said = call(*arguments)
        assert said.returncode == 1 and "there is no run" in said.stderr and "lapclip train" in said.stderr
    for wrong in (("nothing",), (".",), ("--port", "80"), ("--web", "--json")):
        assert call("watch", *wrong).returncode == 1


def test_a_terminal_without_these_characters_shows_the_rest(tmp_path):
    written(tmp_path / "runs" / "a", started(), step(1), step(2), inspected(2, cores=[0.5]))
    latin = environment(PYTHONIOENCODING="latin-1")
    shown = subprocess.run(command("watch", "a", "--once"), capture_output=True, check=True, env=latin)
    assert b"loss 123.456" in shown.stdout and b"core use" in shown.stdout


def test_whoever_reads_only_the_first_line_gets_no_complaint(tmp_path):
    written(tmp_path / "runs" / "a", started(), step(1))
    piped = f"{shlex.join(command('watch', 'a'))} | head -n 1"
    said = subprocess.run(piped, shell=True, capture_output=True, text=True, check=True, env=environment())
    assert said.stdout.startswith("run a: crashed") and said.stderr == ""


HOLD = (
    "import sys; from pathlib import Path; from lapclip.runs.run import Run\n"
    "with Run(Path(sys.argv[1])).owned(): print('held', flush=True); sys.stdin.read()"
)


@pytest.mark.slow
def test_a_killed_run_is_told_with_how_to_go_on(tmp_path, terminal, call):
    (tmp_path / "runs" / "live").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, "runs/live"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            written(tmp_path / "runs" / "live", started(), step(1))
            window = terminal("watch", columns=80, rows=24)
            window.wait_for("live", "running", "pairs/s")
        finally:
            process.kill()
    assert window.code() == 0
    left = " ".join(" ".join(window.glass.lines[False]).split())
    assert not window.glass.is_other and "in-batch accuracy" in left
    assert "crashed" in left and "lapclip train --resume live" in left
    again = call("watch", "live")
    assert again.returncode == 0 and "crashed" in again.stdout and "--resume live" in again.stdout
