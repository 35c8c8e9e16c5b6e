"""Warnings provoked by real runs; and a usual run, which has none. Made-up events are next door."""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from conftest import SMALL, picture_folder
from safetensors.torch import load_file, save_file

import lapclip.step.profile
from lapclip.config import SETTINGS, load_config
from lapclip.diagnose import learning, machine
from lapclip.machine.hardware import num_usable_cores
from lapclip.runs.events import Evaluated, Event, Inspected, Step, Warned
from lapclip.train.loop import train
from lapclip.train.prepare import prepare
from lapclip.weights import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# What other programs on the machine of the test can provoke at any time.
OF_THE_MACHINE = {"slower", "data-bound", "memory-near-limit", "slept"}
EVALUATE_LATER = {"eval_every": "100000"}


@dataclass
class Ran:
    """A run as far as it was trained, by what was said of it."""

    run: object
    events: list[Event] = field(default_factory=list)

    @property
    def said(self) -> dict[str, Warned]:
        return {event.kind: event for event in self.events if isinstance(event, Warned) and event.kind}

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]


def trained(*, until: str | None = None, **flags) -> Ran:
    """Trains a small run to its end, or until something is said."""
    run = prepare(load_config(flags=SMALL | flags), "run")
    return go_on(run, until=until)


def go_on(run, *, until: str | None = None) -> Ran:
    ran = Ran(run)
    for event in train(run.load_config(), run):
        ran.events.append(event)
        if until and until in ran.said:
            break
    return ran


def assert_said(ran: Ran, kind: str, *parts: str, also: set[str] = frozenset()) -> None:
    """It is said once, as a sentence with one real flag or command, and nothing else is that should not be."""
    times = [event for event in ran.events if isinstance(event, Warned) and event.kind == kind]
    assert len(times) == 1, sorted(ran.said)
    warned = times[0]
    for part in parts:
        assert part in f"{warned.message} | {warned.hint}", warned
    for word in warned.hint.split("`")[1::2]:
        flag = next((w for w in word.split() if w.startswith("--")), None)
        assert flag is None or flag[2:].replace("-", "_") in SETTINGS or flag == "--resume", warned.hint
    assert ran.said.keys() - also - OF_THE_MACHINE <= {kind}


@pytest.fixture
def look_often(monkeypatch):
    monkeypatch.setattr(lapclip.step.profile, "SECONDS_BETWEEN", 0.1)


def test_a_usual_run_beats_chance_by_far_and_gives_no_cause_for_words():
    ran = trained(source="synthetic:2000", batch_size=16, steps=130, num_validation=128, eval_every="26")
    words = ran.events[-1].recall["text_to_image"]
    assert words["recall@10"] > 5 * words["chance@10"] and words["chance@10"] == pytest.approx(10 / 128)
    assert ran.steps[-1].loss < ran.steps[0].loss / 2, "it learned"
    assert ran.said.keys() <= OF_THE_MACHINE, ran.said


def test_a_learning_rate_that_makes_all_embeddings_alike_is_said():
    ran = trained(until="collapsed", lr=0.1, steps=150, **EVALUATE_LATER)
    assert_said(ran, "collapsed", "ln 8", "chance", "`--lr 0.002`")
    assert ran.steps[-1].loss == pytest.approx(math.log(8), rel=0.01)


@pytest.mark.parametrize(("scale", "advice"), [(100.0, "`--batch-size 16`"), (1.0, "`--lr 3e-06`")])
def test_a_temperature_at_its_limit_is_said(monkeypatch, scale, advice):
    monkeypatch.setattr(learning, "PINNED_STEPS", 8)
    monkeypatch.setattr(learning, "PINNED_LOW_STEPS", 8)
    # Getting there takes hours: the scale of a real checkpoint is put at its limit, and the run goes on from it.
    run = prepare(load_config(flags=SMALL | EVALUATE_LATER | {"steps": 60, "lr": 1e-5}), "run")
    for event in train(run.load_config(), run):
        if isinstance(event, Step) and event.step == 2:
            break
    file = checkpoint.latest(run.checkpoints) / "model.safetensors"
    tensors = load_file(file)
    tensors["log_scale"].fill_(math.log(scale))
    save_file(tensors, file)
    ran = go_on(run, until="scale-pinned")
    assert_said(ran, "scale-pinned", f"limit of {1 / scale:.2g}", "8 steps", advice, also={"lr-still-high"})


def test_waiting_for_data_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "DATA_SECONDS", 1.0)
    source = picture_folder(tmp_path / "photos", 12, side=700)  # large images, decoded at every step
    ran = trained(until="data-bound", source=str(source), pack=False, validation_share=0.3, steps=100,
                  batch_size=4, **EVALUATE_LATER)  # fmt: skip
    waited = sum(s.data_seconds for s in ran.steps) / sum(4 / s.pairs_per_second for s in ran.steps)
    assert_said(ran, "data-bound", "`--pack`", also={"duplicate-captions", "lr-still-high"})
    said = int(ran.said["data-bound"].message.partition("%")[0])
    assert said >= 25 and abs(said - 100 * waited) < 10, "the first batches are waited for longer"


def test_learning_by_heart_is_said_with_where_to_end():
    ran = trained(until="over-fitting", source="synthetic:40", batch_size=16, steps=120, num_validation=128)
    assert_said(ran, "over-fitting", "recall no longer rises", "`best` is step", also={"lr-still-high"})
    lowest = min((e for e in ran.events if isinstance(e, Evaluated)), key=lambda e: e.loss)
    assert f"{lowest.loss:.2f} at step {lowest.step}" in ran.said["over-fitting"].message
    assert f"`--epochs {lowest.step * 16 / 40:.2g}`" in ran.said["over-fitting"].hint


def test_layers_that_no_longer_learn_are_named(look_often):
    ran = trained(until="vanishing-gradients", lr=1e-3, weight_decay=900.0, steps=150, **EVALUATE_LATER)
    # Which tower shows it first depends on which steps were profiled.
    assert_said(ran, "vanishing-gradients", "hardly learn", ".out`", "`--weight-decay 0.1`",
                also={"collapsed", "lr-still-high"})  # fmt: skip
    named, reference = re.search(
        r" in `(.+?)`, .* in `(.+?)`", ran.said["vanishing-gradients"].message
    ).groups()
    assert reference == f"{named.partition('.')[0]}.out" and re.fullmatch(r"(image|text)\.\w+", named)


def test_memory_near_its_limit_is_said_with_a_smaller_chunk(look_often):
    held = np.ones(40_000_000)  # 320 MB that are none of training's, but of its process
    ran = trained(until="memory-near-limit", steps=40, max_memory=0.5, chunk=4, **EVALUATE_LATER)
    assert held.nbytes == 320_000_000
    assert_said(ran, "memory-near-limit", "allowed by `--max-memory`", "`--chunk 2`", also={"lr-still-high"})


@pytest.mark.prove  # which takes 250 steps; what is said of such steps is tested with made-up ones
def test_exploding_gradients_are_said_with_their_layer(look_often):
    # Weights that shrink without end make gradients longer without end.
    ran = trained(until="exploding-gradients", source="synthetic:2000", lr=1e-4, weight_decay=300.0, warmup=0.9,
                  steps=250, **EVALUATE_LATER)  # fmt: skip
    assert_said(
        ran, "exploding-gradients", "the largest in `text.", "`--weight-decay 0.1`", also={"lr-still-high"}
    )
    assert max(s.grad_norm for s in ran.steps[-50:]) > 10 * np.median(
        [s.grad_norm for s in ran.steps[50:100]]
    )


@pytest.mark.prove  # twenty seconds, most of them waiting; the sign itself is tested with made steps
def test_another_busy_program_is_found_to_make_training_slower(monkeypatch, look_often):
    monkeypatch.setattr(machine, "BLOCK_SECONDS", 0.5)
    monkeypatch.setattr(machine, "BLOCK_STEPS", 4)
    run = prepare(load_config(flags=SMALL | EVALUATE_LATER | {"steps": 20_000}), "run")
    ran, busy, started = Ran(run), [], time.monotonic()
    try:
        for event in train(run.load_config(), run):
            ran.events.append(event)
            if ran.steps and ran.steps[-1].seconds > 3 and not busy:
                busy = [start_busy_program() for _ in range(2 * num_usable_cores())]
                began = ran.steps[-1].step
            if "slower" in ran.said or time.monotonic() - started > 40:
                break
    finally:
        for process in busy:
            os.kill(process, signal.SIGKILL)
    looks = [event for event in ran.events if isinstance(event, Inspected)]
    before = [look.readings["other_cores"] for look in looks[1:] if look.step <= began]
    after = [look.readings["other_cores"] for look in looks if look.step > began + 2]
    # On a machine that was busy before, there may be nothing left to take.
    cause = "other programs keep" if np.mean(after) - np.mean(before) > 2 * machine.BUSY_CORES else ""
    assert_said(ran, "slower", "pairs/s instead of", cause, also={"lr-still-high"})


def start_busy_program() -> int:
    """A program that is no child of ours; its process id."""
    orphan = f"{shlex.quote(sys.executable)} -c 'while True: pass' >&- 2>&- & echo $!"
    return int(subprocess.run(["sh", "-c", orphan], capture_output=True, check=True).stdout)
