"""What a person sees while it trains: one live line on a terminal, plain lines on a pipe."""

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import pytest
from conftest import SMALL, as_flags, command, environment
from rich.console import Console

from lapclip.runs.events import Continued, Evaluated, Interpolated, Paused, Started, Step, Warned
from lapclip.runs.history import History
from lapclip.units import duration, percent
from lapclip.view.lines import Screen, sentence


def in_a_terminal(*arguments: str, columns: int, rows: int = 24) -> str:
    """Everything a command writes to a real pseudo-terminal of that size."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    clean = {name: value for name, value in environment().items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        command(*arguments), stdout=theirs, stderr=theirs, env=clean | {"TERM": "xterm-256color"}
    )
    os.close(theirs)
    output, deadline = b"", time.monotonic() + 90
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 0.2)
        if ready:
            try:
                output += os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
        elif process.poll() is not None:
            break
    os.close(ours)
    assert process.wait(timeout=30) == 0, output.decode(errors="replace")
    return output.decode()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=pytest.mark.prove)])
def test_the_live_line_is_one_line_that_is_drawn_again(columns):
    output = in_a_terminal("train", *as_flags(SMALL | {"steps": 60}), columns=columns)
    assert "\x1b" in output, "a terminal gets colours and a moving line"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    live = [line for line in re.split(r"[\r\n]+", plain) if re.match(r"\s*\d+%  loss", line)]
    assert len(live) >= 2 and all(len(line.rstrip()) <= columns for line in live)
    for part in ("loss", "acc", "chance", "pairs/s", "tau", "left"):
        assert part in live[-1]
    assert "text → image" in plain and "next:" in plain


def screen_at(columns: int) -> Screen:
    return Screen(Console(file=sys.stderr, width=columns))


def test_a_live_line_fits_into_80_columns_at_its_longest(capsys):
    screen = screen_at(80)
    screen.show(Started(0, 0.0, 1, 2, 3, 512, 5, "cpu", 2, None, 10))
    screen.show(Step(99999, 1.5, 10**9, 12.345, 1.0, 1e-3, 0.0701, 1.0, 123456.0, 0.0, 9e4, 1.0, 35999.0))
    line = capsys.readouterr().err.splitlines()[-1].partition(": ")[2]
    assert len(line) <= 80 and "(chance 0.2%)" in line, "a small chance is not said to be none"


def test_what_a_run_says_cannot_steer_the_terminal(capsys):
    screen = screen_at(80)
    screen.show(Warned(1, "a\x1b[2Jb", "c\x9b0md"))
    screen.show(Paused(1, "\x1b]0;owned\x07"))
    said = capsys.readouterr().err
    assert not set("\x1b\x9b\x07") & set(said)
    assert "warning: a [2Jb; hint: c" in said and "owned" in said


def test_a_pause_is_said_once_and_its_end_too(capsys):
    screen = screen_at(200)
    low = Paused(3, "low battery")
    for event in (low, low, Continued(3, 90.0), Paused(4, "again low")):
        screen.show(event)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in said] == [
        "paused, everything is saved: low battery",
        "continuing after a pause of 1m30s",
        "paused, everything is saved: again low",
    ]


def test_an_evaluation_is_one_sentence_everywhere():
    def evaluated(step: int, share: float) -> Evaluated:
        way = {"recall@1": share, "recall@5": share, "recall@10": 0.9, "chance@1": 0.01, "chance@10": 0.1}
        return Evaluated(step, {"text_to_image": way, "image_to_text": way}, True, 1.0)

    history = History().extend([evaluated(1200, 0.5)])
    said = sentence(history.evaluated, history)
    assert said == "step 1,200: recall@1 50.0% (chance 1.0%), recall@10 90.0% (chance 10.0%), saved as `best`"
    history.add(evaluated(1300, 0.45))
    lower = sentence(history.evaluated, history)
    assert lower.endswith("within the noise of the highest: the later checkpoint is kept as `best`")
    history.add(evaluated(1400, 0.5))
    assert sentence(history.evaluated, history).endswith(", saved as `best`")


def test_a_trained_model_that_is_best_as_it_is_is_called_so():
    way = {"recall@1": 0.5, "recall@5": 0.5, "recall@10": 0.5}
    recall = [{"text_to_image": way, "image_to_text": way}] * 2
    said = sentence(Interpolated(7, [0.0, 1.0], recall, None, 1.0), History())
    assert said == (
        "step 7: `best` is the trained model, which none exceeds by a whole image; "
        "mean recall by the share of the trained weights, the rest being pretrained: 0: 50.0%, 1: 50.0%"
    )


def test_shares_and_durations_read_well():
    shares = (1.0, 0.5, 0.1, 0.0996, 0.034, 0.0039, 0.0005, 1 / 32768, 0.0)
    assert [percent(share) for share in shares] == [
        "100%", "50.0%", "10.0%", "10.0%", "3.4%", "0.4%", "0.1%", "0.003%", "0%",
    ]  # fmt: skip
    seconds = (0, 2e-5, 0.0012, 0.0123, 0.123, 8.3, 59.6, 61, 3600, 9000)
    assert [duration(s) for s in seconds] == [
        "0 s", "20 us", "1.2 ms", "12.3 ms", "123 ms", "8.3 s", "1m00s", "1m01s", "1h00m", "2h30m",
    ]  # fmt: skip
