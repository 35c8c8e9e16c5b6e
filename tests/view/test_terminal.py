"""A run as `watch` reads and shows it: from events to lines of text, at all sizes and whatever is in its folder."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from lapclip.errors import UserError
from lapclip.runs.events import KINDS_OF_MEMORY, PARTS, Inspected, Paused, Started, Step, Warned, to_line
from lapclip.runs.history import Summary
from lapclip.runs.run import Run, find_run, refuse_name
from lapclip.runs.status import run_to_watch
from lapclip.serve import watch as server
from lapclip.view.live import now_of
from lapclip.view.terminal import View


def written(path: Path, *events: object) -> Summary:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").touch()
    append(path, *events)
    watched = Summary(Run(path))
    watched.read()
    return watched


def append(path: Path, *events: object) -> None:
    with (path / "events.jsonl").open("a") as file:
        file.writelines(map(to_line, events))  # type: ignore[arg-type]


def shown(summary, width: int = 80, height: int = 24, *, is_live: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(View(summary, is_live=is_live), end="")
    return console.file.getvalue()


def started() -> Started:
    return Started(0, 0.0, 1, 999_999_999, 10**9, 32768, 64, "cpu", 16, None, 10**7)


def step(number: int) -> Step:
    return Step(
        number, 123.45, 10**11, 123.456, 0.0004, 1.23e-05, 0.0123, 12345.6, 123456.0, 0.1, 359999.0, 0.5, 359999.0
    )  # fmt: skip


def inspected(number: int, **readings: object) -> Inspected:
    parts, memory = dict.fromkeys(PARTS, 123.4), dict.fromkeys(KINDS_OF_MEMORY, 123 * 10**9)
    held = (900 * 10**9, 950 * 10**9, 999 * 10**9)
    return Inspected(number, parts, memory | {"activations": None}, *held, {"scale": 1.0}, readings)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (20, 5), (149, 34)])
@pytest.mark.parametrize(("num_cores", "num_warnings"), [(0, 0), (64, 30)])
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
        text = shown(watched, width, height, is_live=is_live)
        rows = text.splitlines()
        assert len(rows) <= height and all(cell_len(row) <= width for row in rows)
        if width >= 79 and height >= 24:
            words = "loss chance recall@10 tau pairs/s backward activations 105 250.5 W"
            assert all(word in text for word in words.split())
            assert ("hint: do this" in text) == (num_warnings > 0)


def test_what_cannot_be_measured_is_said_so(tmp_path):
    text = shown(written(tmp_path / "a", started(), step(1), inspected(1)))
    assert "not measured: temperature, power, battery, energy" in text and "cores not measured" in text
    assert "recall@1 not evaluated yet" in text
    text = shown(written(tmp_path / "b", started(), step(1)))
    assert "memory by kind: not measured yet" in text and "time of a step: not measured yet" in text


def test_a_run_that_is_being_set_up_is_waited_for_and_an_old_folder_is_not(tmp_path):
    new = written(tmp_path / "new")
    assert new.state == "running" and "being set up" in shown(new)
    for name in (".", "config.toml", "events.jsonl"):
        os.utime(tmp_path / "new" / name, (1e9, 1e9))
    new.read()
    assert new.is_over and "--resume" in shown(new)


def test_what_follows_is_told_from_what_begins_again(tmp_path):
    watched = written(tmp_path / "a", started(), step(1))
    assert watched.read() == ([], False)
    append(tmp_path / "a", step(2))
    events, is_reset = watched.read()
    assert [event.step for event in events] == [2] and not is_reset
    append(tmp_path / "a", started(), step(1))
    assert watched.read()[1], "earlier steps were taken back"
    append(tmp_path / "a", *map(step, range(2, 3000)))
    events, is_reset = watched.read()
    assert is_reset and len(events) < 2998 and events[-1].step == 2999, "too many to hand on one by one"
    (tmp_path / "a" / "events.jsonl").write_text(to_line(started()) + to_line(step(7)))
    assert watched.read()[1] and [s.step for s in watched.history.steps] == [7]
    (tmp_path / "a" / "events.jsonl").write_text("")
    assert watched.read() == ([], True) and watched.history.step is None


NO_SPEEDS = ["fast", 0, True, float("nan"), 10**400]


@pytest.mark.parametrize(
    "facts", [[1], {"bench": [1]}, *({"bench": {"pairs_per_second": s}} for s in NO_SPEEDS)]
)
def test_facts_of_a_machine_that_somebody_else_wrote_break_no_view(tmp_path, facts):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "machine.json").write_text(json.dumps(facts))
    watched = written(tmp_path / "a", started(), step(1))
    assert watched.bench_share is None and watched.bench_speed is None and "of bench" not in shown(watched)
    assert now_of(watched)["lines"]["pairs_per_second"] is None
    (tmp_path / "a" / "machine.json").write_text('{"bench": {"pairs_per_second": 246912.0}}')
    watched = written(tmp_path / "a")
    assert watched.bench_share == 0.5 and "50% of bench" in shown(watched)


def test_a_name_means_the_same_run_as_in_every_other_command(tmp_path):
    for path in (tmp_path / "a", tmp_path / "runs" / "a"):
        path.mkdir(parents=True)
        (path / "events.jsonl").touch()
    assert run_to_watch("a").path == find_run("a").path == Path("runs/a")


EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b2J\r"


def test_a_name_cannot_steer_the_terminal(tmp_path, call):
    written(tmp_path / "runs" / EVIL, started(), step(1), Warned(1, EVIL, EVIL))
    for arguments in (
        ("runs",), ("watch", EVIL), ("watch", EVIL, "--once"), ("watch", f"no-{EVIL}"), ("runs", "stop", EVIL),
        ("runs", "compare", EVIL, EVIL), ("runs", "remove", EVIL),
    ):  # fmt: skip
        said = call(*arguments)
        shown = said.stdout + said.stderr
        assert "owned" in shown and not set("\x1b\x07\x9b\r") & set(shown), (arguments, shown)
    with pytest.raises(UserError, match="cannot be the name"):
        refuse_name("a\x1b[2J")
    written(tmp_path / "runs" / "a[bold]", started(), step(1))
    assert "`a[bold]` is not being trained" in call("runs", "stop", "a[bold]").stderr


def test_the_server_finds_runs_of_this_folder_only(tmp_path):
    written(tmp_path / "runs" / "a", started())
    written(tmp_path / "runs" / ".hidden", started())
    written(tmp_path / "outside", started())
    watching = server.Watching(None)
    for name in ("", ".", "..", ".hidden", "../outside", str(tmp_path / "outside"), "n" * 5000, "nul\0", "b"):
        with pytest.raises(UserError, match="there is no run"):
            watching.find(name)
    assert server.Watching(Run(tmp_path / "outside")).find("outside").path == tmp_path / "outside"
    assert watching.find("a").path == Path("runs/a")


def test_a_pause_says_why(tmp_path):
    (tmp_path / "a").mkdir()
    with Run(tmp_path / "a").owned():
        watched = written(tmp_path / "a", started(), step(1), Paused(step=1, reason="the battery is at 19%"))
        assert watched.state == "paused"
        assert "paused: the battery is at 19%" in shown(watched)
