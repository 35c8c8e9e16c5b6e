"""What is measured before a run begins, what it is worth, and what is resolved from it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from test_measure import followed
from test_resolve import DATA, LAPTOP, resolved

from lapclip.autotune import measure as race
from lapclip.autotune import plans
from lapclip.autotune import quick as tryout
from lapclip.autotune.cache import folder_for, remember
from lapclip.autotune.plans import Candidate, Measured
from lapclip.autotune.quick import plans_for
from lapclip.autotune.resolve import Choices, resolve_workers
from lapclip.config import Config, Plan
from lapclip.errors import UserError
from lapclip.files import cache_folder
from lapclip.machine.device import DEVICES
from lapclip.runs.run import Run
from lapclip.train.prepare import draft_of, open_here, prepare, preparing
from lapclip.units import finished

LONG = 3000  # steps: long enough for a twentieth of them to be worth measuring


def reasons_of(run: Run) -> dict[str, str]:
    return run.load_machine()["reasons"]


def remembered() -> list[Path]:
    return sorted(cache_folder().glob("measured/*/*.json"))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(race, "BLOCK_SECONDS", 0.01)
    monkeypatch.setattr(tryout, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(plans, "MAX_OTHER_CORES", 1000)  # other programs of whoever runs the tests


def test_too_short_a_run_or_one_with_everything_asked_for_measures_nothing(with_train):
    for budget in ({"steps": 6}, {"epochs": 0.1}, {"minutes": 0.1}):
        run = prepare(with_train(**({"steps": None} | budget)))
        assert not remembered() and run.load_config().train.chunk == 8
    config = with_train(steps=LONG, chunk=4)
    device = replace(config.device, device="cpu", precision="fp32", compile=False, keep_memory=True)
    run = prepare(replace(config, device=device))
    assert not remembered()
    asked = {reasons_of(run)[name] for name in ("device", "precision", "threads", "chunk", "compile")}
    assert asked == {"asked for"}


def test_a_long_run_is_measured_within_a_twentieth_of_it_and_gives_reasons(with_train, quick):
    config = with_train(minutes=5.0)
    started = time.perf_counter()
    said, run = followed(preparing(config, None, finished(open_here(config))))
    assert time.perf_counter() - started < 30, "fifteen seconds are allowed, and some for preparing"
    assert "measuring which execution plan is fastest" in said and len(said) > 3
    reasons = reasons_of(run)
    assert "chunks of 4" in reasons["chunk"] and "fast" in reasons["chunk"]
    assert reasons["threads"] == "asked for" and len(remembered()) == 1


def test_the_second_run_takes_what_was_measured_and_says_how_old_it_is(with_train, quick):
    config = with_train(steps=LONG)
    first = prepare(config)
    (file,) = remembered()
    stored = json.loads(file.read_text())
    content = json.dumps(stored | {"when": stored["when"] - 7300})
    file.write_text(content)
    second, third = prepare(config), prepare(config)
    assert file.read_text() == content, "nothing was measured again"
    assert "measured 2 hours ago" in reasons_of(second)["device"]
    assert second.load_config() == third.load_config() == first.load_config()
    assert reasons_of(second) == reasons_of(third)
    short = prepare(with_train(steps=7))
    assert reasons_of(short)["chunk"] == reasons_of(first)["chunk"], "also for a run too short to measure"


def with_memory_of(config: Config, *more: Plan, rejected: str | None = None) -> Config:
    """The same settings; and it is known of their plans that all are slow, of some more that they are fast."""
    _, draft = draft_of(config)
    candidates = [Candidate(plan, 100.0, 0.01, 0.1, rejected) for plan in plans_for(draft)]
    candidates += [Candidate(plan, 900.0, 0.01, 0.1) for plan in more]
    known = Measured(tuple(candidates), time.time())
    remember(folder_for(draft.machine, draft.work.key()), known)
    return config


FASTER = [
    Plan("cpu", "fp32", threads=2, chunk=8),
    Plan("cpu", "bf16", threads=1, chunk=8),
    Plan("mps", "fp32", threads=1, chunk=8),
    Plan("cpu", "fp32", threads=1, chunk=2),
]


def test_what_was_asked_for_stays_though_something_faster_is_known(with_train, monkeypatch):
    monkeypatch.setitem(DEVICES, "mps", fakes.Elsewhere())
    config = with_train(steps=LONG, chunk=8)
    # Compiling stays open, as it does for most people; it is tried by `lapclip bench` only.
    device = replace(config.device, device="cpu", precision="fp32", threads=1)
    config = prepare(with_memory_of(replace(config, device=device), *FASTER)).load_config()
    asked = (config.device.device, config.device.precision, config.device.threads, config.train.chunk)
    assert asked == ("cpu", "fp32", 1, 8)


def test_a_limit_of_memory_holds_though_a_larger_chunk_was_measured_before(with_train):
    config = with_train(steps=LONG, batch_size=128)
    config = replace(config, model=replace(config.model, image_size=64))
    limited = replace(config, device=replace(config.device, max_memory=0.5))
    chunk = draft_of(limited)[1].resolve()[0].train.chunk
    assert chunk is not None and chunk < 128
    whole = Plan("cpu", "fp32", threads=1, chunk=128)
    config = prepare(with_memory_of(limited, whole)).load_config()
    assert config.train.chunk <= chunk


def test_where_every_plan_was_refused_the_usual_one_is_taken(with_train):
    config = with_memory_of(with_train(steps=LONG), rejected="wrong")
    config = prepare(config).load_config()
    assert (config.device.device, config.device.precision, config.train.chunk) == ("cpu", "fp32", 8)


# Memory.


def resolved_within(gigabytes: float, **flags) -> tuple[Config, Choices]:
    return resolved({"size": "small", "batch_size": 64, "max_memory": gigabytes} | flags)


def test_the_chunk_follows_the_memory_that_may_be_used_and_too_little_is_refused_in_a_sentence():
    chunks = [resolved_within(gigabytes)[0].train.chunk for gigabytes in (2, 3, 5, 100)]
    assert chunks == sorted(chunks) and 1 <= chunks[0] < chunks[-1] == 64
    with pytest.raises(UserError, match=r"`--max-memory` allows 1\.0") as refusal:
        resolved_within(1)
    assert "allow more: `--max-memory 1.8`" in refusal.value.hint
    resolved_within(1.8)
    with pytest.raises(UserError, match=r"chunks of 64 need about .* GB with `small`") as refusal:
        resolved_within(2, chunk=64)
    assert "`--max-memory" in refusal.value.hint
    config, choices = resolved_within(2, chunk=1)
    assert config.train.chunk == 1 and choices["chunk"].origin == "asked"


# Workers.


def test_workers_follow_drawing_time_against_step_time():
    for fetch_seconds, workers in ((0.0001, 0), (0.1, 1), (0.3, 3), (10.0, 4)):
        found = resolve_workers(replace(DATA, fetch_seconds=fetch_seconds), LAPTOP, 8, step_seconds=0.81)
        assert found.value == workers and f"{fetch_seconds * 8 / 0.81:.0%} of a step" in found.reason
    drawn = replace(DATA, fetch_seconds=10.0)
    assert resolve_workers(replace(drawn, only_copies=True), LAPTOP, 8, step_seconds=1).value == 0
    assert resolve_workers(replace(drawn, is_remote=True), LAPTOP, 8, step_seconds=1).value == 1
    assert resolve_workers(drawn, replace(LAPTOP, num_cores=1), 8, step_seconds=1).value == 1


def test_a_faster_step_needs_more_workers():
    data, plan = replace(DATA, fetch_seconds=0.01), Plan("cpu", "fp32", threads=4, chunk=8)
    for pairs_per_second, workers in ((8.0, 1), (300.0, 3), (100_000.0, 4)):
        known = Measured((Candidate(plan, pairs_per_second, 0.0),), time.time())
        config, _ = resolved({"size": "nano", "batch_size": 8, "threads": 4}, data=data, measured=known)
        assert config.data.workers == workers
