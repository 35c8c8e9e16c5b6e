"""`lapclip watch`: on real pseudo-terminals of several sizes, on a pipe, and for programs, beside a run that trains."""

import codecs
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest
from conftest import SMALL, as_flags, command, environment, lapclip

from lapclip.events import Inspected, Paused, Started, Step, Warned, to_line
from lapclip.monitor.panels import view
from lapclip.monitor.panels_text import text_of, width_of
from lapclip.monitor.terminal_run import Watched, find_run
from lapclip.run import Run

SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\x1b(.)", re.DOTALL)
ESSENTIAL = (
    "running", "left", "loss", "in-batch accuracy", "recall@1", "recall@10", "chance", "tau", "gradient norm",
    "pairs/s", "data", "transfer", "forward", "backward", "optimizer", "memory", "peak", "activations", "core",
    "temperature", "power", "battery", "q leaves this view; training goes on",
)  # fmt: skip


class Glass:
    """A terminal's two screens, for the few sequences the view uses; anything else is a mistake."""

    def __init__(self, columns: int, rows: int):
        self.columns, self.rows = columns, rows
        self.row = self.column = 0
        self.is_other = False
        self.lines: dict[bool, list[str]] = {False: [], True: []}

    @property
    def shown(self) -> list[str]:
        return self.lines[self.is_other]

    def take(self, text: str) -> None:
        place = 0
        for found in SEQUENCE.finditer(text):
            self.write(text[place : found.start()])
            place = found.end()
            self.obey(*found.groups())
        self.write(text[place:])

    def obey(self, private: str, numbers: str, letter: str, single: str | None) -> None:
        assert single is None, f"an unknown sequence {single!r}"
        if private:
            assert numbers in ("1049", "25", "2026"), numbers
            if numbers == "1049":
                self.is_other = letter == "h"
        elif letter == "H":
            self.row, self.column = (int(number) - 1 for number in numbers.split(";"))
            assert self.row < self.rows, "below the window"
        elif letter == "K":
            self.put(self.line()[: self.column])
        elif letter == "J" and numbers == "2":
            self.lines[self.is_other] = []
        elif letter == "J":
            self.lines[self.is_other] = self.shown[: self.row]
        else:
            assert letter == "m", f"an unknown sequence {letter}"

    def line(self) -> str:
        self.shown.extend([""] * (self.row + 1 - len(self.shown)))
        return self.shown[self.row]

    def put(self, line: str) -> None:
        self.line()
        self.shown[self.row] = line

    def write(self, text: str) -> None:
        for letter in text:
            if letter == "\r":
                self.column = 0
            elif letter == "\n":
                self.row, self.column = self.row + 1, 0
            else:
                assert letter.isprintable(), repr(letter)
                line = self.line().ljust(self.column)
                self.put(line[: self.column] + letter + line[self.column + 1 :])
                self.column += 1
                assert self.column <= self.columns or not self.is_other, f"too wide: {self.line()!r}"


class Terminal:
    """A command on a pseudo-terminal of a size, and what stands on its screen."""

    def __init__(self, *arguments: str, columns: int, rows: int, **more: str):
        self.ours, theirs = pty.openpty()
        self.theirs = (
            theirs  # kept open, so that what was written last can be read after the process has ended
        )
        self.resize(columns, rows)
        kept = {name: value for name, value in environment().items() if name not in ("COLUMNS", "NO_COLOR")}
        self.process = subprocess.Popen(
            command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=kept | {"TERM": "xterm-256color"} | more,
        )  # fmt: skip
        self.raw = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.rest = ""  # of a sequence that has come half

    def resize(self, columns: int, rows: int) -> None:
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.glass = Glass(columns, rows)

    def read(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and select.select([self.ours], [], [], left)[0]:
            new = self.decoder.decode(os.read(self.ours, 65536))
            self.raw += new
            whole = re.fullmatch(r"(.*?)(\x1b(?:\[[?0-9;]*)?)?", self.rest + new, re.DOTALL)
            assert whole is not None
            self.rest = whole[2] or ""
            self.glass.take(whole[1])

    def wait_for(self, *words: str, seconds: float = 30) -> str:
        """The screen as soon as all of these stand on it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read(0.3)
            text = "\n".join(self.glass.shown)
            if all(word in text for word in words):
                return text
        missing = [word for word in words if word not in "\n".join(self.glass.shown)]
        raise AssertionError(f"{missing} not on\n" + "\n".join(self.glass.shown))

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def code(self) -> int:
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.1)
        self.read(0.2)
        return self.process.wait(timeout=1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


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
    with live_run(tmp_path_factory.mktemp("training")) as found:
        yield found


@contextmanager
def live_run(folder: Path) -> Iterator[tuple[Path, subprocess.Popen]]:
    """A run that trains until the block ends."""
    settings = SMALL | {"steps": 1_000_000, "eval_every": "2s"}
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            command("train", *as_flags(settings), "--run", "live"), cwd=folder, stdout=said, stderr=said,
            env=environment(LAPCLIP_CACHE=str(folder / "cache")),
        )  # fmt: skip
    events, deadline = folder / "runs" / "live" / "events.jsonl", time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        written = events.read_text() if events.exists() else ""
        if '"Evaluated"' in written and '"Inspected"' in written:
            break
        time.sleep(0.2)
    assert process.poll() is None, (folder / "said").read_text()
    yield folder, process
    process.kill()
    process.wait()


@pytest.fixture
def beside(training, monkeypatch):
    monkeypatch.chdir(training[0])
    return training[1]


def step_now() -> int:
    now = watched_now().history.step
    assert now is not None
    return now.step


def watched_now() -> Watched:
    watched = Watched(find_run("live"))
    watched.read()
    return watched


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_everything_essential_fits_the_window_and_q_leaves_the_training_alone(
    beside, terminal, columns, rows
):
    window = terminal("watch", columns=columns, rows=rows)
    text = window.wait_for("live", *ESSENTIAL)  # the glass itself refuses what is too wide or too far down
    assert len(text.splitlines()) == rows and text.splitlines()[-1].strip().startswith("q leaves")
    assert "\x1b[36m" in window.raw, "a terminal gets colours"
    before = step_now()
    window.press(b"q")
    assert window.code() == 0
    said = " ".join("".join(window.glass.lines[False]).split())
    assert not window.glass.is_other and "`live` goes on training" in said
    deadline = time.monotonic() + 20
    while step_now() <= before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert step_now() > before and beside.poll() is None


@pytest.mark.slow
def test_a_window_that_changes_its_size_is_drawn_anew_and_ctrl_c_leaves(beside, terminal):
    window = terminal("watch", "live", columns=120, rows=40, NO_COLOR="1")
    window.wait_for("live", "q leaves")
    window.read(0.3)
    window.resize(64, 20)
    os.kill(window.process.pid, signal.SIGWINCH)
    text = window.wait_for("live", "running", "loss", "tau", "q leaves", seconds=5)
    assert len(text.splitlines()) == 20 and max(map(len, text.splitlines())) <= 64
    assert not re.search(r"\x1b\[[0-9;]*m", window.raw), "NO_COLOR"
    os.kill(window.process.pid, signal.SIGINT)
    assert window.code() == 130
    assert "goes on training" in "".join(window.glass.lines[False]) and beside.poll() is None


@pytest.mark.slow
def test_on_a_pipe_it_says_plain_lines_and_goes_on_until_told(beside):
    follower = subprocess.Popen(
        command("watch", "live"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert follower.stdout is not None
    lines = [follower.stdout.readline() for _ in range(3)]
    follower.send_signal(signal.SIGINT)
    rest, said = follower.communicate(timeout=20)
    assert follower.returncode == 130 and "goes on training" in said
    assert re.match(r"run live: running, step [\d,]+: \d+%, loss [\d.]+, accuracy .* left$", lines[0])
    assert all(re.match(r"step [\d,]+: ", line) for line in lines[1:])
    assert "recall@1" in "".join(lines) and "\x1b" not in "".join(lines) + rest + said


@pytest.mark.slow
def test_programs_get_one_object_and_watching_loads_no_torch(beside):
    code = (
        "import sys, lapclip.cli; code = lapclip.cli.run_command(['watch', '--json']);"
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
    once = lapclip("watch", "live", "--once")
    assert once.returncode == 0 and "in-batch accuracy" in once.stdout and "\x1b" not in once.stdout
    assert all(len(line) <= 80 for line in once.stdout.splitlines()) and "q leaves" not in once.stdout


@pytest.mark.slow
def test_following_costs_training_less_than_a_hundredth(beside):
    """A reader may use 10 ms of processor time a second; reading from the beginning is not counted."""
    watched = watched_now()
    began = time.monotonic()
    spent = 0.0
    for _ in range(2):
        time.sleep(1)
        before = time.process_time()
        watched.read()
        assert len(view(watched, 199, 50)) == 50
        spent += time.process_time() - before
    # Looked at once a second here and every two seconds in reality.
    assert spent / 2 / (time.monotonic() - began) < 0.01


def test_without_a_run_it_says_what_to_do(call):
    for arguments in (("watch",), ("watch", "--json")):
        said = call(*arguments)
        assert said.returncode == 1 and "there is no run" in said.stderr and "lapclip train" in said.stderr
    assert call("watch", "nothing").returncode == 1
    assert call("watch", ".").returncode == 1
    assert call("watch", "--port", "80").returncode == 1 and call("watch", "--web", "--json").returncode == 1


def written(path: Path, *events: object) -> Watched:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").touch()
    with (path / "events.jsonl").open("a") as file:
        file.writelines(map(to_line, events))  # type: ignore[arg-type]
    watched = Watched(Run(path))
    watched.read()
    return watched


def started() -> Started:
    return Started(
        step=0, seconds=0.0, pid=1, num_parameters=999_999_999, num_train=10**9, batch_size=32768, chunk=64,
        device="cpu", threads=16, minutes=None, total_steps=10**7,
    )  # fmt: skip


def step(number: int) -> Step:
    return Step(
        step=number, epoch=123.45, num_pairs_seen=10**11, loss=123.456, accuracy=0.0004, lr=1.23e-05,
        temperature=0.0123, grad_norm=12345.6, pairs_per_second=123456.0, data_seconds=0.1, seconds=359999.0,
        progress=0.5, seconds_left=359999.0,
    )  # fmt: skip


def inspected(number: int, **readings: object) -> Inspected:
    parts = dict.fromkeys(("data", "transfer", "forward", "backward", "optimizer", "other"), 123.4)
    kinds = ("parameters", "gradients", "optimizer", "activations", "data")
    memory: dict[str, int | None] = dict.fromkeys(kinds, 123 * 10**9) | {"activations": None}
    return Inspected(
        step=number, parts=parts, memory=memory, memory_used=900 * 10**9, memory_peak=950 * 10**9,
        memory_limit=999 * 10**9, grad_norms={"scale": 1.0}, readings=readings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "height"), [(79, 24), (199, 50), (40, 10), (20, 5), (119, 30), (149, 34), (300, 90)]
)
@pytest.mark.parametrize("num_cores", [0, 2, 64])
@pytest.mark.parametrize("num_warnings", [0, 1, 30])
def test_no_view_is_larger_than_its_window_at_the_largest_numbers(
    tmp_path, width, height, num_cores, num_warnings
):
    readings = {
        "cores": [1.0] * num_cores, "other_cores": 15.5, "temperature": 105.0, "power_watts": 250.5,
        "battery": 100, "is_plugged": True, "speed_limit": 0.5, "swap_used": 10**11,
    }  # fmt: skip
    warned = [
        Warned(step=n, message="a long sentence " * 20, hint="do this " * 30) for n in range(num_warnings)
    ]
    numbers = range(10**6, 10**6 + 50)
    watched = written(
        tmp_path / ("n" * 60), started(), *map(step, numbers), inspected(10**6, **readings), *warned
    )
    for is_live in (True, False):
        lines = view(watched, width, height, is_live=is_live)
        assert len(lines) <= height and all(width_of(line) <= width for line in lines)
        text = text_of(lines)
        if width >= 79 and height >= 24:
            for word in (
                "loss",
                "chance",
                "recall@10",
                "tau",
                "pairs/s",
                "backward",
                "activations",
                "105",
                "250.5 W",
            ):
                assert word in text
            assert ("hint: do this" in text) == (num_warnings > 0)


def test_what_cannot_be_measured_is_said_so(tmp_path):
    text = text_of(view(written(tmp_path / "a", started(), step(1), inspected(1)), 79, 24))
    assert "not measured: temperature, power, battery" in text and "cores not measured" in text
    assert "recall@1 not evaluated yet" in text


def test_a_run_that_is_being_set_up_is_waited_for_and_an_old_folder_is_not(tmp_path):
    new = written(tmp_path / "new")
    assert new.state == "running" and "being set up" in text_of(view(new, 79, 24))
    for name in (".", "config.toml", "events.jsonl"):
        os.utime(tmp_path / "new" / name, (1e9, 1e9))
    new.read()
    assert new.is_over and "--resume" in text_of(view(new, 79, 24))


def test_a_file_that_begins_anew_is_read_anew(tmp_path):
    watched = written(tmp_path / "a", started(), step(1), step(2))
    (tmp_path / "a" / "events.jsonl").write_text(to_line(started()) + to_line(step(7)))
    watched.read()
    assert [s.step for s in watched.history.steps] == [7] and watched.loss.count == 1


def test_the_speed_is_compared_with_what_bench_measured(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "machine.json").write_text('{"bench": {"pairs_per_second": 246912.0}}')
    watched = written(tmp_path / "a", started(), step(1))
    assert watched.bench_share == 0.5 and "50% of bench" in text_of(view(watched, 79, 24))


def test_it_stays_on_the_run_it_watches(tmp_path):
    written(tmp_path / "runs" / "first", started(), step(1))
    watched = Watched(find_run(None))
    time.sleep(0.02)
    written(tmp_path / "runs" / "second", started(), step(9))
    watched.read()
    assert watched.run.name == "first" and find_run(None).name == "second"


def test_a_run_without_inspections_opens(tmp_path):
    for width, height in ((79, 24), (199, 50)):
        text = text_of(view(written(tmp_path / f"run-{width}", started(), step(1)), width, height))
        assert (
            "memory by kind: not measured yet" in text and "a step's time by part: not measured yet" in text
        )


def test_a_pause_says_why(tmp_path):
    (tmp_path / "a").mkdir()
    with Run(tmp_path / "a").owned():
        watched = written(tmp_path / "a", started(), step(1), Paused(step=1, reason="the battery is at 19%"))
        assert watched.state == "paused"
        assert "paused: the battery is at 19%" in text_of(view(watched, 79, 24))


def test_a_terminal_without_these_characters_gets_others(tmp_path):
    written(tmp_path / "runs" / "a", started(), step(1), step(2), inspected(2, cores=[0.5]))
    shown = subprocess.run(
        command("watch", "a", "--once"),
        capture_output=True,
        check=True,
        env=environment(PYTHONIOENCODING="latin-1"),
    )
    assert shown.stdout.isascii() and b"loss 123.456" in shown.stdout and b"=====---" in shown.stdout


def test_whoever_reads_only_the_first_line_gets_no_complaint(tmp_path):
    written(tmp_path / "runs" / "a", started(), step(1))
    piped = f"{shlex.join(command('watch', 'a'))} | head -n 1"
    said = subprocess.run(piped, shell=True, capture_output=True, text=True, check=True, env=environment())
    assert said.stdout.startswith("run a: crashed") and said.stderr == ""


@pytest.mark.slow
def test_a_finished_run_opens_too(terminal, call, tmp_path):
    assert call("train", *as_flags(SMALL), "--run", "done").returncode == 0
    window = terminal("watch", columns=80, rows=24)
    assert window.code() == 0
    text = "\n".join(window.glass.lines[False])
    assert "finished" in text and "100%" in text and "recall@1" in text
    assert "1049h" not in window.raw, "it goes into the scrollback at once"
    piped = call("watch", str(tmp_path / "runs" / "done"))
    assert piped.returncode == 0 and piped.stdout.splitlines()[-1].startswith("finished: 6 steps")


@pytest.mark.slow
def test_a_killed_run_is_told_with_how_to_go_on(tmp_path, terminal, call):
    with live_run(tmp_path) as (_, process):
        window = terminal("watch", columns=80, rows=24)
        window.wait_for("live", "running", "pairs/s")
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert window.code() == 0
    left = "\n".join(window.glass.lines[False])
    assert not window.glass.is_other and "in-batch accuracy" in left
    assert "crashed" in left and "lapclip train --resume live" in left
    again = call("watch", "live")
    assert again.returncode == 0 and "crashed" in again.stdout and "--resume live" in again.stdout
