"""A run in TensorBoard and in Weights & Biases: the same numbers as in its events, once each."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import environment, wait_for
from made_events import evaluated, inspected, started, step

from lapclip.errors import UserError, install_command
from lapclip.runs.events import PARTS, Failed, Warned, read_events, to_line
from lapclip.runs.run import Run
from lapclip.view import loggers
from lapclip.view.loggers import scalars_of, to_tensorboard

FOLLOW = (
    "import sys; from pathlib import Path; from lapclip.runs.run import Run; from lapclip.view.loggers import LOGGERS\n"
    "is_whole = LOGGERS[sys.argv[1]](Run(Path(sys.argv[2])))\n"
    "print('whole' if is_whole else 'left')\n"
    "assert not {'torch', 'tensorflow'} & set(sys.modules)"
)


EVENTS = (started(), *(step(n, loss=1 / n) for n in range(1, 5)), inspected(4), evaluated(4))


def made_up(*events) -> Run:
    """A run in which exactly this happened."""
    run = Run(Path("runs/b"))
    run.path.mkdir(parents=True)
    (run.path / "config.toml").write_text('[train]\nlr = 0.002\nbatch_size = 8\n[model]\nsize = "nano"\n')
    (run.path / "events.jsonl").write_text("".join(map(to_line, events)))
    return run


@pytest.fixture
def run() -> Run:
    return made_up(*EVENTS)


def read_board(path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return board.Reload()


def points(board) -> dict[tuple[str, int], tuple[float, float]]:
    """Value and time by name and step, each only once."""
    found = {}
    for tag in board.Tags()["scalars"]:
        for point in board.Scalars(tag):
            assert (tag, point.step) not in found, "a point came twice"
            found[tag, point.step] = (point.value, point.wall_time)
    return found


def points_of_events(path: Path) -> dict[tuple[str, int], tuple[float, float]]:
    return {
        (tag, event.step): (pytest.approx(value, rel=1e-6, abs=1e-30), event.time)
        for event in read_events(path / "events.jsonl")
        for tag, value in scalars_of(event).items()
    }


def test_tensorboard_has_every_number_of_the_events(run, capfd):
    (run.path / "tensorboard").mkdir()
    other = run.path / "tensorboard" / "events.out.tfevents.1.somebody-else"
    other.write_bytes(b"")
    for _ in range(2):  # the second time replaces the first
        to_tensorboard(run)
    told = capfd.readouterr()
    assert "tensorboard --logdir runs" in told.err and not told.out
    assert len(list((run.path / "tensorboard").iterdir())) == 2 and other.exists()
    found = points(read_board(run.path))
    assert found == points_of_events(run.path)
    tags = {tag for tag, _ in found}
    assert {"training/loss", "recall/text_to_image@1", "validation/loss", "negatives/hard"} <= tags
    assert {"memory_bytes/parameters", "grad_norm/image.0", "machine/core_1", "machine/core_2"} <= tags
    assert "machine/core_0" not in tags, "cores are counted from one"
    shares = [value for (tag, step), (value, _) in found.items() if tag.startswith("share_of_step/")]
    assert len(shares) == len(PARTS) and sum(shares) == pytest.approx(1)


def test_settings_and_warnings_reach_the_board_and_lost_steps_are_removed():
    said = Warned(3, "captions repeat", "add others", kind="duplicate-captions", time=12.0)
    steps = [step(n, loss=9.0) for n in range(1, 9)]
    to_tensorboard(made_up(started(0), said, *steps, started(4), step(6, loss=1.0), Failed("no", "yes")))
    board = read_board(Path("runs/b"))
    (text,) = board.Tensors("warnings/duplicate-captions")
    assert text.tensor_proto.string_val == [b"captions repeat; add others"]
    assert (text.step, text.wall_time) == (3, 12.0)
    (settings,) = board.Tensors("settings")[0].tensor_proto.string_val
    assert {b"lr = 0.002", b"size = nano"} <= set(settings.splitlines())
    found = [(point.step, point.value) for point in board.Scalars("training/loss")]
    assert found == [(n, 9.0) for n in range(1, 5)] + [(6, 1.0)], "a killed process lost steps 5 to 8"


def test_a_run_without_events_and_a_folder_that_cannot_be_written_are_said(monkeypatch):
    monkeypatch.setattr(loggers, "SECONDS_TO_BEGIN", 0)
    run = made_up()
    with pytest.raises(UserError, match="no events yet"):
        to_tensorboard(run)
    shutil.rmtree(run.path / "tensorboard")
    (run.path / "tensorboard").write_text("a file")
    with pytest.raises(UserError, match="tensorboard"):
        to_tensorboard(run)


@pytest.mark.slow
def test_a_run_is_followed_while_it_trains_and_to_its_end(run):
    """Points are on the board while the run goes on, and when it has ended nothing is missing."""
    with run.owned():  # somebody trains it
        follower = subprocess.Popen([sys.executable, "-c", FOLLOW, "tensorboard", str(run.path)])
        wait_for(lambda: any(run.path.glob("tensorboard/*")) and read_board(run.path).Tags()["scalars"])
        assert follower.poll() is None
        run.write(step(9))
    assert follower.wait(timeout=60) == 0, "it ends with the run, by itself"
    assert points(read_board(run.path)) == points_of_events(run.path)


def follow_in_process(name: str, run: Run, *, interrupt_after="", **more: str) -> subprocess.CompletedProcess:
    """Follows in a process group of its own, as on a terminal, and presses Ctrl-C when told."""
    log_in = ("WANDB_API_KEY", "WANDB_MODE")
    home = {**{k: v for k, v in environment().items() if k not in log_in}, "HOME": str(Path.cwd()), **more}
    arguments = [sys.executable, "-c", FOLLOW, name, str(run.path)]
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=home, start_new_session=True,
    ) as process:  # fmt: skip
        if interrupt_after:
            while interrupt_after not in (said := process.stderr.readline()):
                assert said, "it ended before"
            time.sleep(1)  # more than enough for the few events there are
            os.killpg(process.pid, signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()  # or leaving `with` would wait for it
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def wandb_records(run: Run):
    """The records of the one file that is there, in the log format that it shares with LevelDB."""
    from wandb.proto import wandb_internal_pb2

    (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def wandb_rows(run: Run) -> list[dict]:
    return [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(run)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.slow
def test_wandb_without_an_account_keeps_every_number_and_asks_nothing(run):
    last = EVENTS[-1].step
    with (run.path / "events.jsonl").open("a") as file:
        file.writelines(to_line(Warned(last, word, "do", kind=word)) for word in ("one", "two"))
    for _ in range(2):  # the second time replaces the first
        done = follow_in_process("wandb", run)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "whole\n" and "wandb sync" in done.stderr
    rows = {row["_step"]: row for row in wandb_rows(run)}
    expected = {}
    for event in run.events():
        if values := scalars_of(event):
            expected.setdefault(event.step, {}).update(values | {"_timestamp": event.time})
    assert rows.keys() == expected.keys()
    assert [rows[last].pop(f"warnings/{word}") for word in ("one", "two")] == ["one; do", "two; do"]
    rows[last].pop("_timestamp"), expected[last].pop("_timestamp")
    for number, values in expected.items():
        assert {name: rows[number].get(name) for name in values} == pytest.approx(values), number
    (about,) = (r.run for r in wandb_records(run) if r.WhichOneof("record_type") == "run")
    settings = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert settings["batch_size"] == 8 and about.display_name == "b" and about.project == "lapclip"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_ctrl_c_leaves_what_came_so_far(name):
    run = made_up(started(0), step(1), step(2))
    with run.owned():  # somebody trains it
        done = follow_in_process(name, run, interrupt_after="writing to", WANDB_MODE="offline")
    assert done.returncode == 0 and done.stdout == "left\n" and "Traceback" not in done.stderr, done.stderr
    if name == "wandb":
        assert [row["_step"] for row in wandb_rows(run)] == [1, 2]
    else:
        assert [point.step for point in read_board(run.path).Scalars("training/loss")] == [1, 2]


def test_asking_for_online_without_an_account_is_an_error_not_a_question():
    run = made_up(started(0), step(1))
    done = follow_in_process("wandb", run, WANDB_MODE="online")
    assert done.returncode == 1 and "hint: run `wandb login`" in done.stderr


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_with_what_to_install(package, monkeypatch):
    for name in (package, "tensorboard.summary.writer.record_writer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"`{package}` cannot be imported") as problem:
        loggers.LOGGERS[package](made_up(started(0)))
    assert problem.value.hint == install_command(package)
