"""Measuring: which plans are worth timing, what timing them finds, which is chosen, and what is remembered of it."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import fakes
import pytest
import torch

from lapclip.autotune import measure as race
from lapclip.autotune.cache import MAX_DAYS, folder_for, recall, remember
from lapclip.autotune.measure import Rigs, Work, measure
from lapclip.autotune.plans import (
    Budget,
    Candidate,
    Measured,
    choose,
    plans_on,
    reasons_for,
    remark_on,
    thread_counts,
)
from lapclip.config import Plan, load_config
from lapclip.machine.device import DEVICES, Device
from lapclip.machine.hardware import Machine
from lapclip.units import age

LAPTOP = Machine("M1", "macOS", "3.11", num_cores=8, memory_bytes=8 * 10**9, available_bytes=4 * 10**9)
PLAIN = Plan("cpu", "fp32", threads=4, chunk=64)


def timed(rate: float | None, rejected: str | None = None, first: float = 0.0, **changed) -> Candidate:
    spread = 0.01 if rate else None
    return Candidate(replace(PLAIN, **changed), rate, spread, first, rejected)


def measured(*candidates: Candidate, when: float | None = None) -> Measured:
    return Measured(candidates, time.time() if when is None else when, seconds=1.0)


def test_the_fastest_that_works_is_chosen_if_there_is_one():
    slow, fast = timed(10), timed(200, device="mps")
    assert choose([slow, fast, timed(150, threads=2)]) is fast
    refused = [timed(None, "out of memory"), timed(900, "the loss differs", device="mps")]
    assert choose([slow, *refused]) is slow
    assert choose([]) is None is choose(refused)


@pytest.mark.parametrize(
    "changed",
    [{"chunk": 32}, {"compile": True}, {"threads": 2}, {"precision": "bf16"}, {"device": "mps"}],
    ids=str,
)
def test_among_equals_the_plainest_is_chosen(changed):
    plain = timed(100)
    assert choose([timed(104, **changed), plain]) is plain, "4% is no difference"
    assert choose([timed(110, **changed), plain]) is not plain, "10% is one"


def test_a_compiled_plan_must_earn_its_compilation():
    plain, compiled = timed(100), timed(150, first=100.0, compile=True)
    assert choose([plain, compiled], budget=Budget(seconds=200)) is plain
    assert choose([plain, compiled], budget=Budget(seconds=3600)) is compiled
    assert choose([plain, compiled], budget=Budget(seconds=10)) is plain, "longer than the whole run"


def test_reasons_name_every_rival_with_a_factor_or_its_refusal():
    choice = timed(120)
    reasons = reasons_for(
        choice,
        measured(
            choice,
            timed(40, threads=2),
            timed(110, chunk=32),
            timed(119, chunk=16),
            timed(None, "a step takes 12.0 times as long as in fp32", precision="bf16"),
            timed(None, "out of memory", device="mps"),
        ),
    )
    assert "3.0 times as fast as 2 threads" in reasons["threads"]
    assert "9% faster than chunks of 32" in reasons["chunk"] and "as fast as chunks of 16" in reasons["chunk"]
    assert "`bf16`" in reasons["precision"] and "12.0 times as long" in reasons["precision"]
    assert "`mps`" in reasons["device"] and "out of memory" in reasons["device"]
    assert "compile" not in reasons and "keep_memory" not in reasons, "they had no rival"


def test_a_reason_compares_ways_that_differ_in_nothing_else():
    choice = timed(300, threads=1)
    reasons = reasons_for(choice, measured(choice, timed(202), timed(200, keep_memory=False)))
    assert "1.5" not in reasons["keep_memory"], "it is one thread that makes the difference"
    assert "1.5 times as fast as 4 threads" in reasons["threads"]


def test_threads_are_the_fast_cores_all_cores_and_half_of_the_fast_ones():
    assert thread_counts(replace(LAPTOP, num_performance_cores=4), 4) == [8, 4, 2]
    assert thread_counts(replace(LAPTOP, num_cores=2), 2) == [2, 1]
    assert thread_counts(replace(LAPTOP, num_cores=1), 1) == [1]
    assert 6 in thread_counts(LAPTOP, 6), "what torch chose"
    container = replace(LAPTOP, num_cores=2, num_performance_cores=8)
    assert max(thread_counts(container, 2)) == 2, "no more than there are cores for"


class Bare(Device):
    """A processor without hardware for low precision."""

    def precisions(self):
        return ("fp32",)


BARE = Bare("cpu")


@pytest.mark.parametrize("thorough", [False, True])
def test_what_was_asked_for_is_the_only_value_tried(thorough):
    asked = {"precision": "fp32", "compile": False, "keep_memory": True}
    plans = plans_on(BARE, asked, [3], [16], thorough=thorough)
    assert plans == [Plan("cpu", "fp32", threads=3, chunk=16)]
    asked = {"precision": "bf16", "keep_memory": False, "compile": True}
    for plan in plans_on(BARE, asked, [4, 2], [64, 32], thorough=thorough):
        assert (plan.precision, plan.keep_memory, plan.compile) == ("bf16", False, True)


def test_bench_tries_bf16_once_even_without_hardware_and_training_does_not():
    everything = plans_on(BARE, {}, [4, 2], [64, 32, 16], thorough=True)
    assert [plan.precision for plan in everything].count("bf16") == 1
    assert {plan.precision for plan in plans_on(BARE, {}, [4, 2], [64, 32])} == {"fp32"}
    assert len(everything) == len(set(everything)), "nothing is timed twice"


def test_every_pair_of_threads_and_chunk_is_tried_and_compiling_only_when_asked(monkeypatch):
    plans = plans_on(BARE, {}, [4, 2], [64, 32], thorough=True)
    pairs = {(plan.threads, plan.chunk) for plan in plans}
    assert pairs == {(4, 64), (4, 32), (2, 64), (2, 32)} and not any(plan.compile for plan in plans)
    assert any(plan.compile for plan in plans_on(BARE, {}, [4], [64], compile=True))
    accelerator(monkeypatch, fakes.Elsewhere())
    plans = plans_on(DEVICES["mps"], {}, [4, 2], [64, 32], thorough=True)
    assert {plan.threads for plan in plans} == {4} and {plan.chunk for plan in plans} == {64, 32}


@pytest.fixture
def work() -> Work:
    flags = {"size": "nano", "image_size": 16, "batch_size": 8, "chunk": 8, "loss": "softmax", "lr": 1e-3}
    config = load_config(flags=flags | {"keep_patches": 1.0})
    return Work(config.model, config.train, vocab_size=64, num_tokens=8)


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(race, "BLOCK_SECONDS", 0.01)


def accelerator(monkeypatch, device: Device) -> Plan:
    monkeypatch.setitem(DEVICES, "mps", device)
    return Plan("mps", "fp32", threads=1, chunk=8)


HERE = Plan("cpu", "fp32", threads=1, chunk=8)


def followed(work: Work, plans: list[Plan], seconds: float = 0.1, **options) -> tuple[list[str], Measured]:
    """What was said meanwhile, and what was found."""
    said, measuring = [], measure(work, plans, seconds=seconds, **options)
    while True:
        try:
            said.append(next(measuring))
        except StopIteration as end:
            return said, end.value


def test_the_slow_device_loses_and_keeps_its_rate_with_a_reason(work, monkeypatch, short_blocks):
    slow = accelerator(monkeypatch, fakes.Slow(operation_seconds=2e-4))
    said, found = followed(work, [HERE, slow])
    here, there = found.candidates
    assert choose(found.candidates).plan == HERE
    assert here.rejected is None and there.pairs_per_second < here.pairs_per_second / 1.5
    assert there.rejected is None and "x as long" in remark_on(there, found)
    assert "times as fast as `mps`" in reasons_for(here, found)["device"]
    assert here.spread >= 0 and here.first_call_seconds > 0 and found.seconds > 0
    assert any(sentence == "trying cpu fp32, 1 thread, chunk 8" for sentence in said)
    assert any(sentence.startswith("round 1: ") for sentence in said)


def test_every_way_has_its_rounds_when_the_time_is_used_up_at_once(work, short_blocks):
    plans = [HERE, replace(HERE, chunk=4), replace(HERE, keep_memory=False)]
    said, found = followed(work, plans, seconds=0, min_rounds=1)
    assert all(candidate.pairs_per_second for candidate in found.candidates)
    assert sum(sentence.startswith("round 1: ") for sentence in said) == len(plans)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (fakes.Small(limit_bytes=1), "out of memory"),
        (fakes.Cannot(operation="aten::native_layer_norm"), "aten::native_layer_norm"),
        (fakes.Wrong(factor=1.05), "gradient of `"),
    ],
    ids=["small", "cannot", "wrong"],
)
def test_what_does_not_work_is_rejected_in_words_and_the_rest_is_timed(
    device, why, work, monkeypatch, short_blocks
):
    _, found = followed(work, [HERE, accelerator(monkeypatch, device)])
    here, there = found.candidates
    assert why in there.rejected and there.pairs_per_second is None
    assert choose(found.candidates) == here and here.pairs_per_second > 0
    assert choose(followed(work, [there.plan])[1].candidates) is None


def test_an_honest_accelerator_is_timed_and_low_precision_too_or_its_cost_is_said(
    work, monkeypatch, short_blocks
):
    there = accelerator(monkeypatch, fakes.Elsewhere())
    _, found = followed(work, [HERE, there, replace(HERE, precision="bf16")])
    _, honest, low = found.candidates
    assert honest.pairs_per_second > 0
    assert low.pairs_per_second or "times as long as in fp32" in low.rejected


def test_timing_changes_nothing_that_the_check_looks_at(work, monkeypatch):
    plan = accelerator(monkeypatch, fakes.Elsewhere())
    untouched, stepped = Rigs(work), Rigs(work)
    for _ in range(5):
        stepped.rig(HERE).step(HERE)
        stepped.rig(plan).step(plan)
    assert untouched.problem(plan) is None and stepped.problem(plan) is None


# What is remembered.


def test_what_was_measured_comes_back_as_it_was(work):
    folder = folder_for(LAPTOP, work.key())
    known = measured(timed(100), timed(None, "the loss differs", device="mps"))
    remember(folder, known)
    assert recall(folder, known.plans) == known
    only = replace(known, candidates=known.candidates[:1])
    assert recall(folder, {PLAIN}) == only, "it timed more than is asked for, and says only that"
    assert recall(folder, {PLAIN}, lambda plan: True) == known, "others are recalled where they are allowed"
    assert recall(folder, {PLAIN, replace(PLAIN, threads=1)}) is None, "one was not timed"


def test_what_ran_out_of_memory_is_old_or_from_the_future_is_not_recalled(work):
    folder = folder_for(LAPTOP, work.key())
    full = replace(timed(None, "out of memory", device="mps"), ran_out_of_memory=True)
    old, future = time.time() - (MAX_DAYS + 1) * 86400, time.time() + 86400
    for known in (
        measured(timed(100), full),
        measured(timed(100), when=old),
        measured(timed(100), when=future),
    ):
        remember(folder, known)
        assert recall(folder, {PLAIN}) is None


def test_the_newest_counts(work):
    folder, now = folder_for(LAPTOP, work.key()), time.time()
    old = measured(timed(100), timed(50, threads=2), when=now - 1000)
    remember(folder, old)
    remember(folder, measured(timed(90), when=now - 10))
    assert recall(folder, {PLAIN}).when == now - 10 and recall(folder, old.plans).when == old.when


def test_another_machine_torch_model_or_batch_was_not_measured(work, monkeypatch):
    here = folder_for(LAPTOP, work.key())
    others = [
        folder_for(replace(LAPTOP, chip="M2"), work.key()),
        folder_for(replace(LAPTOP, num_cores=4), work.key()),
        folder_for(LAPTOP, replace(work, model=replace(work.model, size="tiny")).key()),
        folder_for(LAPTOP, replace(work, train=replace(work.train, batch_size=16)).key()),
        folder_for(LAPTOP, replace(work, num_tokens=16).key()),
    ]
    assert folder_for(replace(LAPTOP, available_bytes=1), work.key()) == here, (
        "what is free now does not matter"
    )
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    others.append(folder_for(LAPTOP, work.key()))
    assert len({here, *others}) == 1 + len(others)


GOOD = asdict(timed(100))
DAMAGED = [
    "", "[]", "\x00" * 100, "[" * 100_000, '{"when": 1' + "0" * 400 + "}", '{"when": NaN, "candidates": []}',
    *(json.dumps({"when": time.time(), "seconds": 1.0} | change) for change in [
        {},
        {"candidates": {"a": 1}},
        {"candidates": [GOOD], "when": "now"},
        {"candidates": [GOOD | {"pairs_per_second": "fast"}]},
        {"candidates": [GOOD | {"pairs_per_second": -1}]},
        {"candidates": [GOOD | {"rejected": 7}]},
        {"candidates": [GOOD | {"plan": [1]}]},
        {"candidates": [GOOD | {"plan": GOOD["plan"] | {"threads": "4"}}]},
        {"candidates": [GOOD, asdict(timed(900, device="../x"))]},
        {"candidates": [GOOD, asdict(timed(900, threads=-1))]},
    ]),
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_cache_is_no_error_and_misleads_nobody(content, work):
    folder = folder_for(LAPTOP, work.key())
    folder.mkdir(parents=True)
    (folder / "damaged.json").write_text(content)
    assert recall(folder, {PLAIN}) is None
    good = measured(timed(100))
    remember(folder, good)
    assert recall(folder, {PLAIN}) == good, "the good one beside it is found"


def test_a_cache_that_cannot_be_read_or_written_is_no_error(work):
    folder = folder_for(LAPTOP, work.key())
    Path(folder.parent.parent).mkdir(parents=True, exist_ok=True)
    folder.parent.write_text("a file where a folder should be")
    remember(folder, measured(timed(100)))
    assert recall(folder, {PLAIN}) is None
    folder.parent.unlink()
    (folder / "a.json").mkdir(parents=True)
    (folder / "b.json").write_bytes(b"\xff\xfe")
    assert recall(folder, {PLAIN}) is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(5, "just now"), (60, "1 minute ago"), (7300, "2 hours ago"), (3 * 86400, "3 days ago")],
)
def test_ages_are_said_in_words(seconds, said):
    assert age(seconds) == said
