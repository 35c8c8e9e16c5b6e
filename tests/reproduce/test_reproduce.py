"""`lapclip reproduce`: two ordinary runs, a row for every figure, a verdict only on what was measured."""

import json
import math
import shlex
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, begin, command, wait_for

from lapclip.cli import app
from lapclip.config import load_config
from lapclip.reproduce import experiment
from lapclip.reproduce.figures import EPOCHS, NUM_STEPS, Evidence, Row, Verdict, compared, rows_of
from lapclip.reproduce.systems import NOT_YET, SYSTEMS
from lapclip.runs.events import Finished, Saved, Started, Step, to_line
from lapclip.runs.history import summarize
from lapclip.runs.run import Run
from lapclip.train.loop import train
from lapclip.train.prepare import prepare
from lapclip.units import number


@pytest.fixture
def nano(monkeypatch):
    """The same experiment with a model that trains in seconds."""
    monkeypatch.setattr(experiment, "DOCUMENTS", experiment.DOCUMENTS | {"size": "nano", "image_size": 32})
    monkeypatch.setattr(experiment, "QUICK_MINUTES", 0.05)


@pytest.mark.slow
def test_both_runs_are_trained_once_and_compared(call, nano):
    done = call("reproduce", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["figure"]: row for row in found["rows"]}
    assert rows["parameters"]["verdict"] == "differs", "it is another model"
    assert rows["training loss, epoch 1"]["verdict"] in ("agrees", "differs")
    assert rows["training loss, epoch 5"] == {
        "figure": "training loss, epoch 5", "documents": "2.750", "lapclip": "not measured",
        "verdict": "not measured", "why": "needs the full command, without `--quick`",
    }  # fmt: skip
    assert rows["memory of parameters"]["verdict"] == "cannot hold"
    assert all(row["why"] and row["documents"] and row["lapclip"] for row in rows.values())
    assert found["results"]["documents"]["steps"] == 2 * NUM_STEPS
    assert found["results"]["lapclip"]["state"] == "finished"
    assert Run(Path(found["runs"]["documents"])).load_config().train.keep_patches == 1, (
        "not the default of `small`"
    )
    listed = json.loads(call("runs", "--json").stdout)["runs"]
    assert {run["name"] for run in listed} == {"reproduce-quick-documents", "reproduce-quick-lapclip"}

    began = time.time()
    again = call("reproduce", "--quick")
    assert again.returncode == 0 and "finished before" in again.stderr
    assert max(Run(Path(path)).last_change() for path in found["runs"].values()) < began, "not trained again"
    page = Path(again.stdout.splitlines()[-1]).read_text()
    for text in ("cannot hold", "Core ML", "not yet", "reproduce-quick-lapclip", rows["parameters"]["why"]):
        assert text in page, text
    assert all(row["figure"] in again.stdout and row["why"] in again.stdout for row in rows.values())
    markdown = call("reproduce", "--quick", "--markdown").stdout
    assert markdown.startswith("# The documents' experiment") and markdown.count("\n| ") > 70


@pytest.mark.slow
def test_an_unfinished_run_goes_on_where_it_was(call, nano):
    run = prepare(
        load_config(flags=experiment.settings_of("documents", quick=True)), "reproduce-quick-documents"
    )
    with closing(train(run.load_config(), run)) as events:
        next(event for event in events if isinstance(event, Step) and event.step == 5)
    assert summarize(run).state == "stopped"
    found = json.loads(call("reproduce", "--quick", "--json").stdout)
    assert found["results"]["documents"]["steps"] == 2 * NUM_STEPS
    assert [start.step for start in summarize(run).history.starts] == [0, 5]


@pytest.mark.slow
def test_ctrl_c_saves_and_trains_nothing_more(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as said:
        process = begin(tmp_path, *command("reproduce", "--quick"), stdout=said, stderr=said)
    events = tmp_path / "runs" / "reproduce-quick-documents" / "events.jsonl"
    wait_for(lambda: events.exists() and '"Step"' in events.read_text(), 120)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert "lapclip reproduce --quick`" in log.read_text(), "continues with all of it"
    summary = summarize(Run(events.parent))
    assert summary.state == "stopped" and summary.history.saved, "and can go on"
    assert not (tmp_path / "runs" / "reproduce-quick-lapclip").exists()


def made_run(losses: dict[int, float]) -> Evidence:
    """A run of the documents' length whose epochs have these losses."""
    steps = [
        Step(n, n / NUM_STEPS, 12 * n, losses[math.ceil(n / NUM_STEPS)], 0.1, 3e-4, 0.07, 1.0, 2.0, 0.0, 6.0 * n, n / 270, 0.0)
        for n in range(1, NUM_STEPS * max(losses) + 1)
    ]  # fmt: skip
    last = steps[-1]
    events = [
        Started(0, 0.0, 1, 76_736_001, 216, 12, 12, "cpu", 2, None, 270),
        *steps,
        Saved(last.step, "step", 921_000_000, 1.0),
        Finished("budget", last.step, last.epoch, last.seconds, 12 * last.step, 2.0, 3 * 10**9, 76_736_001, None, None, None),
    ]  # fmt: skip
    folder = Path("runs/made")
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(map(to_line, events)))
    return Evidence(summarize(Run(folder)), summarize(Run(Path("runs/none"))))


def test_the_documents_own_numbers_agree_where_they_can():
    marks = sorted(EPOCHS)
    losses = {n: EPOCHS[max(m for m in marks if m <= n)][0] for n in range(1, 16)}
    rows = {row.figure: row for row in rows_of(made_run(losses))}
    agreeing = {"parameters", "checkpoint", "peak memory", *(f"training loss, epoch {n}" for n in marks)}
    assert {rows[figure].verdict for figure in agreeing} == {Verdict.AGREES}
    assert rows["temperature, epoch 1"].verdict == Verdict.AGREES
    assert {rows[f"temperature, epoch {n}"].verdict for n in (5, 10, 15)} == {Verdict.CANNOT_HOLD}
    assert rows["time of an epoch"].lapclip == "108 s" and rows["time of an epoch"].verdict == Verdict.DIFFERS
    for figure in (
        "energy of an epoch",
        "gradient norm of `image.0`, epoch 10",
        "threads",
        "memory bandwidth",
    ):
        assert rows[figure].verdict == Verdict.NOT_MEASURED, figure


@pytest.mark.parametrize(
    ("ours", "verdict"), [(None, "not measured"), (2.2, "agrees"), (1.79, "differs"), (3.31, "differs")]
)
def test_a_number_agrees_within_its_margin(ours, verdict):
    row = compared("x", (2.0, 3.0), ours, number, "because", missing="no way")
    shown = "not measured" if ours is None else number(ours)
    assert row == Row("x", "2.000 to 3.000", shown, Verdict(verdict), "because" if ours else "no way")
    refuted = compared("x", (2.0, 3.0), ours, number, "because", cannot="arithmetic")
    assert refuted == replace(row, verdict=Verdict.CANNOT_HOLD, why="arithmetic")


def test_every_system_is_where_it_says_and_its_command_exists():
    assert len(SYSTEMS) == 27
    assert [n for n, system in enumerate(SYSTEMS, 1) if not system.command] == [21, 22, 23]
    for system in SYSTEMS:
        assert bool(system.command) == (system.where != NOT_YET)
        if system.command:
            assert (ROOT / "src" / "lapclip" / system.where).exists(), system.where
            name, *arguments = shlex.split(system.command)
            assert name == "lapclip"
            app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_the_committed_page_has_every_figure_and_system():
    page = (ROOT / "docs" / "reproduction.md").read_text()
    for row in rows_of(made_run(dict.fromkeys(range(1, 16), 2.0))):
        assert f"| {row.figure} | {row.documents} |" in page, row.figure
    for n, system in enumerate(SYSTEMS, 1):
        where, typed = (
            (f"`src/lapclip/{system.where}`", f"`{system.command}`") if system.command else (NOT_YET, NOT_YET)
        )
        assert f"| {n} | {system.name} | {where} | {typed} |\n" in page, system.name
