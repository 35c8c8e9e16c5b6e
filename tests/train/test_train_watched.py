"""What a run tells while it trains: profiles, snapshots, pauses; and time that is not training is not counted."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, as_flags, command, environment, wait_for
from PIL import Image
from test_train import of, steps_written, trained, trained_elsewhere

from lapclip.evaluate.pool import Pool
from lapclip.machine.hardware import own_peak_bytes
from lapclip.machine.power import Battery
from lapclip.runs.events import PARTS, Continued, Evaluated, Finished, Inspected, Paused, Saved, Step, Warned
from lapclip.runs.run import open_run
from lapclip.step import profile
from lapclip.train import loop as training
from lapclip.train.loop import train
from lapclip.train.messages import Clock
from lapclip.train.prepare import prepare
from lapclip.train.snapshot import MAX_KEPT, take_snapshot

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_profile_accounts_for_the_whole_step_and_changes_nothing(with_train, monkeypatch):
    config = with_train(chunk=3, eval_every="6")
    config = replace(config, device=replace(config.device, max_memory=3.5))
    monkeypatch.setattr(profile, "SECONDS_BETWEEN", 1e9)
    plain = of(Step, trained(config, "plain")[1])
    monkeypatch.setattr(profile, "SECONDS_BETWEEN", 0.0)
    _, events = trained(config)
    steps, profiles = of(Step, events), of(Inspected, events)
    assert [step.loss for step in steps] == [step.loss for step in plain]
    assert [profiled.step for profiled in profiles] == [step.step for step in steps]
    for step, profiled in zip(steps, profiles, strict=True):
        assert list(profiled.parts) == list(PARTS)
        whole = step.num_pairs_seen / step.step / step.pairs_per_second
        assert 0.3 * whole < sum(profiled.parts.values()) <= 1.02 * whole, "but for profiling itself"
        assert profiled.parts["data"] == pytest.approx(step.data_seconds, abs=1e-3)
        total = sum(norm**2 for norm in profiled.grad_norms.values()) ** 0.5
        assert total == pytest.approx(step.grad_norm, rel=1e-3)
        assert 0 < profiled.memory["activations"] < profiled.memory_used <= profiled.memory_peak
        assert profiled.memory_limit == 3_500_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak of a process cannot be reset")
def test_the_peak_memory_of_a_run_is_not_that_of_what_the_process_did_before(with_train):
    earlier = np.ones(2**28)
    del earlier
    before = own_peak_bytes()
    _, events = trained(with_train(steps=2))
    assert 0 < of(Finished, events)[-1].peak_memory_bytes < before - 2**29


def test_evaluations_have_a_loss_and_snapshots_with_the_same_captions_all_through_the_run(tmp_path):
    run, events = trained_elsewhere(tmp_path, steps=4, eval_every="1")
    for evaluated in of(Evaluated, events):
        assert 0.5 * np.log(8) < evaluated.loss < 2 * np.log(8), "a batch of eight, at the beginning"
    snapshots = [json.loads((run.path / e.snapshot).read_text()) for e in of(Evaluated, events)]
    assert [s["step"] for s in snapshots] == [1, 2, 3, 4]
    assert len({tuple(q["text"] for q in s["queries"]) for s in snapshots}) == 1
    assert len({tuple(s["matrix"]["captions"]) for s in snapshots}) == 1
    assert snapshots[0]["matrix"]["cosine"] != snapshots[-1]["matrix"]["cosine"], "it has learned something"
    for snapshot in snapshots:
        for query in snapshot["queries"]:
            scores = [found["score"] for found in query["found"]]
            assert scores == sorted(scores, reverse=True)
            right = [place for place, found in enumerate(query["found"], 1) if found["is_right"]]
            assert right[:1] == ([query["rank"]] if query["rank"] <= len(scores) else [])
            for found in query["found"]:
                with Image.open(run.path / "snapshots" / found["picture"]) as image:
                    assert image.size == (96, 96)


class Pictures:
    """A source of plain images."""

    def image(self, index, size):
        return Image.new("RGB", (size, size))


def test_the_diagonal_of_the_matrix_is_each_image_with_its_own_caption(tmp_path):
    random = np.random.default_rng(0)
    vectors = random.normal(size=(5, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    image_of_caption = np.array([0, 0, 1, 2, 2, 3, 4])
    captions = [f"caption {number}" for number in range(7)]
    pool = Pool(vectors, vectors[image_of_caption], image_of_caption, captions, np.arange(5), np.arange(5))
    content = json.loads((tmp_path / take_snapshot(tmp_path, Pictures(), pool, 3)).read_text())
    assert np.diag(content["matrix"]["cosine"]) == pytest.approx(1, abs=1e-3)
    assert content["matrix"]["captions"] == [captions[m] for m in (0, 2, 3, 5, 6)]
    assert {query["rank"] for query in content["queries"]} == {1}


def test_a_snapshot_asks_for_different_captions(tmp_path):
    eye, captions = np.eye(9), ["red", "blue", "green"] * 3
    pool = Pool(eye, eye, np.arange(9), captions, np.arange(9), np.arange(9))
    content = json.loads((tmp_path / take_snapshot(tmp_path, Pictures(), pool, 3)).read_text())
    assert sorted(query["text"] for query in content["queries"]) == ["blue", "green", "red"]


def test_snapshots_do_not_pile_up(tmp_path):
    pool = Pool(np.eye(3), np.eye(3), np.arange(3), ["a", "b", "c"], np.arange(3), np.arange(3))
    for step in range(MAX_KEPT + 30):
        last = take_snapshot(tmp_path, Pictures(), pool, step)
    kept = sorted((tmp_path / "snapshots").glob("*.json"))
    assert len(kept) <= MAX_KEPT
    assert kept[0].name == "step-000000.json" and kept[-1].name == last.split("/")[1]


def test_a_snapshot_that_cannot_be_written_is_said_and_training_goes_on(with_train):
    run = prepare(with_train(steps=2, eval_every="1"), "run")
    (run.path / "snapshots").write_text("in the way")
    events = list(train(run.load_config(), run))
    assert [warned.kind for warned in of(Warned, events)].count("no-snapshot") == 1, "once"
    assert of(Evaluated, events)[-1].snapshot is None and events[-1].reason == "budget"


@pytest.fixture
def battery(monkeypatch):
    """A battery whose charge the test decides; looked at before every step."""
    now = {"battery": Battery(percent=80, is_plugged=False)}
    monkeypatch.setattr("lapclip.machine.power.read_battery", lambda: now["battery"])
    monkeypatch.setattr(training, "BATTERY_CHECK_SECONDS", -1)
    monkeypatch.setattr(training, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(training, "NUM_PAUSES", 2)
    return now


def test_training_waits_for_a_low_battery_with_all_saved_and_goes_on_when_plugged_in(with_train, battery):
    run = prepare(with_train(pause_below="20%", eval_every="6"), "run")
    told = []
    for event in train(run.load_config(), run):
        told.append(event)
        if isinstance(event, Step) and event.step == 2:
            battery["battery"] = Battery(percent=19, is_plugged=False)
        if len(of(Paused, told)) == 5:
            battery["battery"] = Battery(percent=19, is_plugged=True)
    kinds = [type(event) for event in told]
    pause = kinds.index(Paused)
    assert isinstance(told[pause - 1], Saved) and told[pause - 1].step == told[pause].step == 2
    assert "19%" in told[pause].reason and "20%" in told[pause].reason
    assert of(Continued, told) and told[-1].reason == "budget" and told[-1].step == 6
    written = list(run.events())
    assert len(of(Paused, written)) == 1, "a pause is written once, however long it is"


def test_a_paused_run_can_be_stopped(with_train, battery):
    run = prepare(with_train(pause_below="20%", eval_every="6"), "run")
    battery["battery"] = Battery(percent=5, is_plugged=False)
    events = train(run.load_config(), run)
    for event in events:
        if isinstance(event, Paused):
            break
    events.close()
    assert isinstance(list(run.events())[-1], Finished)
    assert list(run.events())[-1].reason == "stopped"


def test_without_a_battery_nothing_waits(with_train, battery):
    battery["battery"] = None
    _, events = trained(with_train(pause_below="99%", steps=2))
    assert not of(Paused, events)
    assert "no-battery" in {warned.kind for warned in of(Warned, events)}, "and that is said"


def test_a_stop_among_the_last_words_is_still_a_run_that_used_its_budget(with_train):
    config = with_train(steps=12, warmup=0.9, eval_every="12")  # ends with a high rate, which is warned about
    run = prepare(config, "run")
    events = train(run.load_config(), run)
    for event in events:
        if isinstance(event, Warned) and event.kind == "lr-still-high":
            break
    events.close()
    assert isinstance(list(run.events())[-1], Finished)


@pytest.fixture
def clock(monkeypatch):
    """A clock whose steps take what the test says: seconds, of them busy, of them waiting for data."""
    now = {"clock": 0.0, "busy": 0.0}
    monkeypatch.setattr("lapclip.train.messages.time.perf_counter", lambda: now["clock"])
    monkeypatch.setattr("lapclip.train.messages.time.process_time", lambda: now["busy"])
    made = Clock()

    def step(elapsed: float, busy: float, data: float = 0.0) -> float:
        made.start()
        now["clock"] += elapsed
        now["busy"] += busy
        return made.stop(data)[1]

    return step


def test_a_step_that_slept_counts_as_a_usual_one_and_steps_that_stay_slow_are_counted(clock):
    assert [clock(0.5, 0.5) for _ in range(3)] == [0.5, 0.5, 0.5]
    assert clock(3600, 0.5) == 0.5
    assert clock(0.5, 0.5) == 0.5
    assert clock(60, 0.5) == 0.5, "and again, later"
    assert clock(30.5, 0.5, data=30) == 30.5, "waiting for data is not sleep"
    assert clock(60, 55) == 60, "compiling is not either"
    assert [clock(0.5, 0.5) for _ in range(20)] == [0.5] * 20
    assert clock(3, 0.1) == 3, "nor a hiccup"
    assert [clock(0.5, 0.5) for _ in range(20)] == [0.5] * 20
    counted = [clock(8, 0.5) for _ in range(10)]
    assert counted[0] == pytest.approx(0.5, abs=1e-3) and counted[1:] == [8.0] * 9, (
        "nobody sleeps twice in a row"
    )


@pytest.mark.prove
def test_minutes_are_training_time_also_when_the_process_is_put_to_sleep():
    settings = {**SMALL, "minutes": 0.05, "run": "slept", "eval_every": "1000", "num_validation": 16}
    del settings["steps"]
    process = subprocess.Popen(command("train", *as_flags(settings)), env=environment(), stderr=-3, stdout=-3)
    wait_for(lambda: steps_written("slept") >= 2)  # the usual time of a step must be known
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0
    told = list(open_run("slept").events())
    assert [w.kind for w in of(Warned, told)].count("slept") <= 1, "none, if it fell between two steps"
    assert 3 <= told[-1].seconds < 5, "three seconds of training, however long it slept"
    assert told[-1].reason == "budget"
