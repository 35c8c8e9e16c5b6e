"""Whole runs on pretended devices: the wrong is refused, the slow loses, the small goes on with less."""

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, as_flags
from fakes import Elsewhere, Slow, Small, Wrong
from test_train import assert_equal_to_the_bit, of, revise
from tiny import ONE_PAIR

from lapclip.cli.train import show_resolved
from lapclip.config import Config, load_config
from lapclip.machine.device import DEVICES, Device
from lapclip.runs.events import Failed, Finished, Step, Warned
from lapclip.runs.run import Run, open_run
from lapclip.train.loop import train
from lapclip.train.prepare import prepare
from lapclip.weights import checkpoint

pytestmark = pytest.mark.slow

# All that could be measured but the device is said, and there are steps enough to measure that.
ENOUGH = SMALL | {"steps": 240, "chunk": 8, "precision": "fp32", "keep_memory": True, "eval_every": "240"}


@pytest.fixture
def there(monkeypatch):
    """Puts a pretended device among those of this machine, and takes the others away."""

    def put(device: Device) -> Device:
        for name in ("mps", "cuda"):
            monkeypatch.delitem(DEVICES, name, raising=False)
        monkeypatch.setitem(DEVICES, "mps", device)
        return device

    return put


def config_of(**flags) -> Config:
    return load_config(flags=SMALL | {"eval_every": "100"} | flags)


def events_of(config: Config, run: Run, *, stop: int | None = None) -> list:
    """All events, or those up to some step."""
    events = []
    for event in train(config, run):
        events.append(event)
        if isinstance(event, Step) and event.step == stop:
            break
    return events


def trained(name: str = "run", *, stop: int | None = None, **flags) -> tuple[Run, list]:
    run = prepare(config_of(**flags), name)
    return run, events_of(run.load_config(), run, stop=stop)


def losses(events) -> list[float]:
    return [event.loss for event in of(Step, events)]


# Wrong.


def test_a_wrong_device_asked_for_by_name_is_refused_and_the_run_goes_on_on_the_processor(call, there):
    device = there(Wrong(seed=1))
    done = call("train", "--run", "wrong", "--device", "mps", *as_flags(SMALL))
    said = " ".join(done.stderr.split())
    assert done.returncode == 1 and f"the gradient of `{device.chosen[0]}` differs" in said
    assert "Traceback" not in said and "--device cpu" in said
    run = open_run("wrong")
    assert checkpoint.latest(run.checkpoints) is None and of(Step, run.events()) == []
    assert isinstance(list(run.events())[-1], Failed)
    done = call("train", "--resume", "wrong", "--device", "cpu")
    assert done.returncode == 0 and isinstance(list(run.events())[-1], Finished), done.stderr
    assert_equal_to_the_bit(run, trained("straight", device="cpu", eval_every="6")[0])


def test_a_run_that_may_choose_falls_back_to_the_processor_and_says_why(there, capfd):
    device = there(Wrong())
    run, events = trained(stop=2, **ENOUGH)
    assert run.load_config().device.device == events[0].device == "cpu"
    why = run.load_machine()["reasons"]["device"]
    assert "`mps`" in why and f"the gradient of `{device.chosen[0]}` differs" in why
    assert len(losses(events)) == 2
    show_resolved(run.load_config(), run)
    every = capfd.readouterr().err
    show_resolved(run.load_config(), run, is_short=True)  # as on a terminal without `--verbose`
    short = capfd.readouterr().err
    assert "".join(why.split()) in "".join(every.split()), "what is kept is what is printed"
    assert "keep_patches" in every and "keep_patches" not in short and "`mps`: the gradient" in short
    assert len(re.findall(r"^\w", short, re.MULTILINE)) == 5 and f"{run.path}/machine.json" in short


def test_a_run_too_short_to_measure_trains_on_the_processor_and_does_not_claim_to_be_alone(there):
    there(Elsewhere())
    run, events = trained(steps=2)
    assert events[0].device == "cpu" and "`mps`" in run.load_machine()["reasons"]["device"]


def test_an_absent_device_is_an_error_and_leaves_no_run(call):
    if DEVICES["mps"].is_present:
        pytest.skip("this machine has that device, so it cannot be missed here")
    done = call("train", "--device", "mps", *as_flags(SMALL))
    assert done.returncode == 1 and "no device `mps`" in " ".join(done.stderr.split())
    assert not Path("runs").exists()


# Slow, or not.


@pytest.mark.parametrize("asked", [{"device": "mps"}, {"device": "cpu", "precision": "bf16"}], ids=str)
def test_what_is_asked_for_and_right_is_honoured_however_slow(there, asked):
    there(Slow())
    run, events = trained(steps=3, **asked)
    device = run.load_config().device
    assert (device.device, device.precision) == (asked["device"], asked.get("precision", "fp32"))
    assert events[0].device == asked["device"] and isinstance(events[-1], Finished)
    reasons = run.load_machine()["reasons"]
    assert {reasons[name] for name in asked} == {"asked for"}
    _, right = trained("right", steps=3, device="cpu", precision="fp32")
    np.testing.assert_allclose(losses(events), losses(right), atol=1e-4 if "precision" not in asked else 0.1)


# Small.


def test_a_run_that_runs_out_of_memory_goes_on_in_smaller_chunks_to_the_same_losses_also_when_resumed(there):
    flags = {"device": "mps", "keep_patches": 0.5, "text_length": 32}
    there(Elsewhere())
    _, straight = trained("straight", **flags)
    assert {w.kind for w in of(Warned, straight)} == {"small-pool"}
    device = there(Small(limit_bytes=5 * ONE_PAIR))
    run, events = trained("small", stop=3, **flags)
    (warned,) = [w for w in of(Warned, events) if w.kind == "memory-ran-out"]
    assert "the chunk is now 4 pairs" in warned.message and "--chunk 4" in warned.hint
    config, before = revise(run, {}), len(device.refused)
    resumed = list(train(config, run))
    assert events[0].chunk == 8 and resumed[0].chunk == config.train.chunk == 4
    assert {w.kind for w in of(Warned, resumed)} <= {"small-pool"}
    assert len(device.refused) == before > 0, "neither a step nor the check before the first one"
    np.testing.assert_allclose(losses(events) + losses(resumed), losses(straight), atol=1e-5)
