"""The loop: it learns, its budgets hold, and stopping, killing and resuming lose nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SMALL, as_flags, command, environment, wait_for
from safetensors.torch import load_file

import lapclip as library
from lapclip.config import Config, load_config
from lapclip.errors import UserError
from lapclip.machine.device import has_glibc
from lapclip.runs.events import Evaluated, Failed, Finished, Saved, Started, Step, Warned
from lapclip.runs.history import mean_recall
from lapclip.runs.run import Run, open_run
from lapclip.runs.status import refuse_if_finished
from lapclip.train.loop import train
from lapclip.train.prepare import prepare, revising
from lapclip.units import finished
from lapclip.weights import checkpoint


def trained(config, name="run"):
    run = prepare(config, name)
    return run, list(train(run.load_config(), run))


def revise(run: Run, flags: dict) -> Config:
    return finished(revising(run, flags, None))


def weights(run) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(run.checkpoints)
    return load_file(newest / "model.safetensors") | load_file(newest / "state" / "optimizer.safetensors")


def assert_equal_to_the_bit(one, other):
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def stop_after(step: int, run: Run, config: Config | None = None) -> None:
    for event in train(config or run.load_config(), run):
        if isinstance(event, Step) and event.step == step:
            break


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def trained_elsewhere(folder: Path, **settings):
    """A run that the tests of this file share, in a folder that none of them changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LAPCLIP_CACHE", str(folder / "cache"))
        _, events = trained(load_config(flags=SMALL | settings))
    return Run(folder / "runs" / "run"), events


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small run to its end, and what it told."""
    return trained_elsewhere(tmp_path_factory.mktemp("plain"), eval_every="3")


@pytest.fixture
def its_copy(plain):
    """The same run, to go on with."""
    shutil.copytree(plain[0].path, "runs/run")
    return open_run("run")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What runs that were stopped on their way are compared with."""
    return trained_elsewhere(tmp_path_factory.mktemp("straight"), **STRAIGHT)[0]


STRAIGHT = {"steps": 9, "keep_patches": 0.5, "eval_every": "4"}


def test_a_run_tells_its_story_in_events(plain):
    run, events = plain
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    assert [e.step for e in of(Step, events)] == [1, 2, 3, 4, 5, 6]
    assert all(e.lr > 0 for e in of(Step, events)), "every step learns, the first and the last too"
    assert of(Evaluated, events)[-1].step == of(Saved, events)[-1].step == events[-1].step == 6
    assert events[-1].reason == "budget" and events[-1].num_pairs_seen == 48
    written = list(run.events())
    assert written[0] == events[0] and written[-1] == events[-1]


@pytest.mark.skipif(
    not has_glibc(), reason="elsewhere the system takes freed memory back by itself, or not at all"
)
def test_the_peak_memory_of_a_run_leaves_out_what_was_freed_before_it():
    blocks = [b"x" * 60_000 for _ in range(10_000)]
    last, held = blocks[-1], psutil.Process().memory_info().rss
    del blocks  # but for the last, so that the heap does not shrink by itself
    _, events = trained(load_config(flags=SMALL), "run")
    assert events[-1].peak_memory_bytes < held - 300e6 and last


def test_the_run_folder_is_alone_enough_to_repeat_the_run(plain):
    run, _ = plain
    for file in ("config.toml", "machine.json", "tokenizer.json", "events.jsonl", "learned.png"):
        assert (run.path / file).stat().st_size > 0
    again, _ = trained(library.load_config(run.path / "config.toml"), "again")
    assert_equal_to_the_bit(run, again)
    machine = json.loads((run.path / "machine.json").read_text())
    assert machine["torch"] == torch.__version__ and machine["reasons"]["lr"] and machine["num_cores"] >= 1


def test_epochs_are_kept_exactly_and_another_seed_is_another_run(plain, with_train):
    other, events = trained(with_train(epochs=0.3, eval_every="100", seed=1))
    assert events[-1].step == 8 and events[-1].epochs == pytest.approx(0.32), (
        "0.3 of 200 pairs in batches of 8"
    )
    assert not torch.equal(weights(plain[0])["image.embed.weight"], weights(other)["image.embed.weight"])


def test_break_saves_and_a_resumed_run_equals_one_that_never_stopped(straight, with_train):
    run = prepare(with_train(**STRAIGHT), "broken")
    stop_after(5, run)
    assert checkpoint.latest(run.checkpoints).name == "step-000005"
    last = list(run.events())[-1]
    assert isinstance(last, Finished) and last.reason == "stopped" and run.owner() is None
    events = list(train(run.load_config(), run))
    assert events[0].step == 5 and [e.step for e in of(Step, events)] == [6, 7, 8, 9]
    assert_equal_to_the_bit(straight, run)


KILLS_ITSELF = """
import os, signal
from lapclip.runs.events import Saved
from lapclip.runs.run import open_run
from lapclip.train.loop import train
if __name__ == "__main__":
    run = open_run("killed")
    for event in train(run.load_config(), run):
        if isinstance(event, Saved) and event.step == 17:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_thirty_steps_equal_seventeen_a_kill_and_thirteen(with_train, call):
    """A real process, killed with SIGKILL after step 17, resumed in another from its last checkpoint: equal to the bit."""
    config = with_train(steps=30, save_every="17", eval_every="30", keep_patches=0.5)
    straight, _ = trained(config, "straight")
    run = prepare(config, "killed")
    Path("kills_itself.py").write_text(KILLS_ITSELF)
    done = subprocess.run([sys.executable, "kills_itself.py"], env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL and run.owner() is None
    assert checkpoint.latest(run.checkpoints).name == "step-000017"
    done = call("train", "--resume", "killed", "--workers", "1", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == 30, done.stderr
    assert_equal_to_the_bit(straight, run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.prove)])
def test_ctrl_c_and_sigterm_save_and_exit_with_130(number, call):
    flags = as_flags(SMALL | {"steps": 100_000, "workers": 1, "chunk": 8, "eval_every": "100000"})
    line = command("train", "--run", "asked", "--json", "--keep-memory", *flags)
    with subprocess.Popen(line, stdout=-1, stderr=-1, text=True, env=environment()) as process:
        wait_for(lambda: steps_written("asked") >= 2)
        os.kill(process.pid, number)
        output, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    result = json.loads(output)
    assert result["reason"] == "stopped"
    assert checkpoint.latest(open_run("asked").checkpoints).name == f"step-{result['steps']:06d}"
    assert "--resume asked" in said and "stopped and saved" in said and "Traceback" not in said
    again = call("train", "--resume", "asked", "--steps", str(result["steps"] + 3), "--json")
    assert json.loads(again.stdout)["steps"] == result["steps"] + 3


def steps_written(name: str) -> int:
    path = Path("runs") / name / "events.jsonl"
    return path.read_text().count('"event":"Step"') if path.exists() else 0


@pytest.mark.slow
def test_minutes_count_training_and_a_resume_keeps_clock_and_order(with_train):
    run = prepare(with_train(minutes=0.03), "run")
    before = []
    for event in train(run.load_config(), run):
        before += of(Step, [event])
        if before and before[-1].progress > 0.5:
            break
    events = list(train(run.load_config(), run))
    after = of(Step, events)
    assert after[0].step == before[-1].step + 1 and after[0].seconds > before[-1].seconds
    assert after[0].num_pairs_seen == before[-1].num_pairs_seen + 8
    assert after[0].lr < before[-1].lr * 1.05, "the schedule goes on, it does not start again"
    assert 1.8 <= events[-1].seconds < 2.8 and after[-1].progress == 1.0
    assert after[-1].lr < 0.02 * max(s.lr for s in before), "the last step is nearly still"


def test_a_finished_run_can_be_extended_but_not_just_resumed(with_train):
    run, _ = trained(with_train(steps=2, eval_every=None))
    with pytest.raises(UserError, match="has used up its budget") as caught:
        refuse_if_finished(run, revise(run, {}))
    assert "--steps 4" in caught.value.hint
    longer = revise(run, {"steps": 40})
    refuse_if_finished(run, longer)
    assert longer.train.eval_every == "4", "ten times in the new budget, not in the old one"
    stop_after(5, run, longer)
    assert run.load_config() == longer and checkpoint.latest(run.checkpoints).name == "step-000005"
    for flag, hint in (({"steps": 4}, "--steps 10"), ({"epochs": 0.02}, "--epochs")):
        with pytest.raises(UserError, match="has used up this budget: 5 steps") as caught:
            refuse_if_finished(run, load_config(run.path / "config.toml", flag))
        assert hint in caught.value.hint and "counted from its start" in caught.value.hint


def test_what_is_asked_for_on_resume_is_resolved_with_reasons(its_copy):
    run = its_copy
    config = revise(run, {"steps": 8, "chunk": 9999, "device": "auto", "workers": 1})
    assert (config.train.chunk, config.train.eval_every, config.device.device) == (8, "3", "cpu")
    reasons = run.load_machine()["reasons"]
    assert reasons["workers"] == "asked for" and "9999" in reasons["chunk"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step"), [(Started, 0), (Step, 6), (Evaluated, 6), (Saved, 6)])
def test_a_stop_at_any_moment_can_be_resumed_to_a_finished_run(plain, with_train, kind, step):
    run = prepare(with_train(eval_every="3"), "stopped")
    for event in train(run.load_config(), run):
        if isinstance(event, kind) and event.step == step:
            break
    last = list(run.events())[-1]
    assert isinstance(last, Finished) and last.reason == "stopped"
    config = revise(run, {})
    refuse_if_finished(run, config)
    events = list(train(config, run))
    assert events[-1].reason == "budget" and events[-1].step == 6 and events[-1].recall is not None
    assert (run.path / "learned.png").exists()
    assert_equal_to_the_bit(plain[0], run)


def test_a_diverged_run_stops_keeps_the_last_good_checkpoint_and_says_what_to_try(its_copy):
    run = its_copy
    config = run.load_config()
    wild = replace(config, train=replace(config.train, steps=40, lr=1e38, clip_norm=1e9))
    with pytest.raises(UserError, match="diverged") as caught:
        list(train(wild, run))
    assert "--lr 0.001" in caught.value.hint
    last = list(run.events())[-1]
    assert isinstance(last, Failed) and "diverged" in last.message
    assert checkpoint.latest(run.checkpoints).name == "step-000006" and "step-000006" in caught.value.message
    kept = load_file(checkpoint.latest(run.checkpoints) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_weights_that_are_no_numbers_are_neither_evaluated_nor_saved(with_train):
    """The last update itself can break the weights, after a loss that was still finite."""
    run = prepare(with_train(steps=1, lr=1e-3, warmup=0.0, weight_decay=10.0), "run")
    config = run.load_config()
    with pytest.raises(UserError, match="diverged"):
        list(train(replace(config, train=replace(config.train, lr=1e38)), run))
    assert checkpoint.latest(run.checkpoints) is None
    assert not of(Evaluated, run.events())


def test_the_best_checkpoint_is_the_last_one_that_is_as_good_as_the_best(with_train):
    run, events = trained(with_train(steps=12, eval_every="2", lr=3e-3))
    evaluated = of(Evaluated, events)
    assert len({mean_recall(event.recall) for event in evaluated}) > 2, "evaluations that differ"
    highest, best = 0.0, evaluated[0]
    for event in evaluated:
        is_near = mean_recall(event.recall) >= highest - (highest * (1 - highest) / 16) ** 0.5  # 16 images
        if is_near and (mean_recall(event.recall) >= mean_recall(best.recall) or event.loss <= best.loss):
            best = event
        highest = max(highest, mean_recall(event.recall))
    assert checkpoint.best(run.checkpoints).name == f"step-{best.step:06d}"
    assert events[-1].best_step == best.step and events[-1].recall == best.recall


def test_long_captions_are_warned_about(small_config):
    model, budget = replace(small_config.model, text_length=8), replace(small_config.train, steps=1)
    _, events = trained(replace(small_config, model=model, train=budget))
    (warning,) = [w for w in of(Warned, events) if w.kind != "small-pool"]
    assert "100% of the captions" in warning.message and "--text-length" in warning.hint
