"""Measuring: which plans are worth timing, what timing them finds, which is chosen, and what the cache keeps."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, replace
from typing import Any

import fakes
import pytest
import torch

from lapclip.autotune import measure as race
from lapclip.autotune.cache import MAX_DAYS, folder_for, recall, remember
from lapclip.autotune.measure import measure
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
from lapclip.autotune.work import Work
from lapclip.config import Plan, load_config
from lapclip.machine.device import DEVICES, Device
from lapclip.machine.hardware import Machine, num_usable_cores
from lapclip.units import age, finished

LAPTOP = Machine("M1", "macOS", "3.11", num_cores=8, memory_bytes=8 * 10**9, available_bytes=4 * 10**9)
PLAIN = Plan("cpu", "fp32", threads=4, chunk=64)
HERE = Plan("cpu", "fp32", threads=1, chunk=8)


def timed(rate: float | None, rejected: str | None = None, first: float = 0.0, **changed) -> Candidate:
    return Candidate(replace(PLAIN, **changed), rate, 0.01 if rate else None, first, rejected)


def measured(*candidates: Candidate, when: float | None = None) -> Measured:
    return Measured(candidates, time.time() if when is None else when)


def test_the_fastest_that_works_is_chosen_and_among_equals_the_plainest():
    slow, fast, plain = timed(10), timed(200, device="mps"), timed(100)
    assert choose([slow, fast, timed(150, threads=2)]) is fast
    refused = [timed(None, "out of memory"), timed(900, "the loss differs", device="mps")]
    assert choose([slow, *refused]) is slow
    assert choose([]) is None is choose(refused)
    other_parts = {"chunk": 32, "compile": True, "threads": 2, "precision": "bf16", "device": "mps"}
    for part, value in other_parts.items():
        assert choose([timed(104, **{part: value}), plain]) is plain, "4% is no difference"
        assert choose([timed(110, **{part: value}), plain]) is not plain, "10% is one"


def test_a_compiled_plan_must_earn_its_compilation():
    plain, compiled = timed(100), timed(150, first=100.0, compile=True)
    assert choose([plain, compiled], budget=Budget(seconds=200)) is plain
    assert choose([plain, compiled], budget=Budget(seconds=3600)) is compiled
    assert choose([plain, compiled], budget=Budget(seconds=10)) is plain, "longer than the whole run"
    assert choose([plain, compiled], Budget(steps=2), batch_size=64) is plain
    assert (
        "compiled is 50% faster, but slow to start"
        in reasons_for(plain, measured(plain, compiled))["compile"]
    )


def test_reasons_name_every_rival_with_a_factor_or_its_refusal():
    choice = timed(120)
    slow = "a step of 8 pairs takes 12.0 times as long as in fp32"
    rivals = [timed(40, threads=2), timed(110, chunk=32), timed(119, chunk=16)]
    rejected = [timed(None, slow, precision="bf16"), timed(None, "out of memory", device="mps")]
    reasons = reasons_for(choice, measured(choice, *rivals, *rejected))
    assert reasons == {
        "device": "`mps`: out of memory",
        "precision": f"`bf16`: {slow}",
        "threads": "3.0 times as fast as 2 threads",
        "chunk": "9% faster than chunks of 32; as fast as chunks of 16",
    }, "the other parts had no rival"


def test_a_reason_compares_plans_that_differ_in_nothing_else():
    choice = timed(300, threads=1)
    reasons = reasons_for(choice, measured(choice, timed(202), timed(200, keep_memory=False)))
    assert reasons["keep_memory"] == "as fast as with freed memory released", (
        "not 1.5 times: that is one thread"
    )
    assert "1.5 times as fast as 4 threads" in reasons["threads"]


def test_threads_are_the_fast_cores_all_cores_and_half_of_the_fast_ones():
    assert thread_counts(replace(LAPTOP, num_performance_cores=4), 4) == [8, 4, 2]
    assert thread_counts(replace(LAPTOP, num_cores=1), 1) == [1]
    assert 6 in thread_counts(LAPTOP, 6), "what torch chose"
    container = replace(LAPTOP, num_cores=2, num_performance_cores=8)
    assert thread_counts(container, 2) == [2, 1], "no more than there are cores for"


class Bare(Device):
    """A processor without hardware for low precision."""

    def precisions(self):
        return ("fp32",)


BARE = Bare("cpu")


@pytest.mark.parametrize("thorough", [False, True])
def test_what_was_asked_for_is_the_only_value_tried(thorough):
    asked = {"precision": "fp32", "compile": False, "keep_memory": True}
    assert plans_on(BARE, asked, [3], [16], thorough=thorough) == [Plan("cpu", "fp32", threads=3, chunk=16)]
    asked = {"precision": "bf16", "keep_memory": False, "compile": True}
    for plan in plans_on(BARE, asked, [4, 2], [64, 32], thorough=thorough):
        assert (plan.precision, plan.keep_memory, plan.compile) == ("bf16", False, True)


def test_bench_tries_threads_with_chunks_and_bf16_once_and_compiling_only_when_asked(monkeypatch):
    plans = plans_on(BARE, {}, [4, 2], [64, 32], thorough=True)
    assert {(plan.threads, plan.chunk) for plan in plans} == {(4, 64), (4, 32), (2, 64), (2, 32)}
    assert [plan.precision for plan in plans].count("bf16") == 1 and not any(plan.compile for plan in plans)
    assert len(plans) == len(set(plans)), "nothing is timed twice"
    assert {plan.precision for plan in plans_on(BARE, {}, [4, 2], [64, 32])} == {"fp32"}
    assert any(plan.compile for plan in plans_on(BARE, {}, [4], [64], compile=True))
    accelerator(monkeypatch, fakes.Elsewhere())
    plans = plans_on(DEVICES["mps"], {}, [4, 2], [64, 32], thorough=True)
    assert {plan.threads for plan in plans} == {4} and {plan.chunk for plan in plans} == {64, 32}


@pytest.fixture
def work(monkeypatch) -> Work:
    monkeypatch.setattr(race, "BLOCK_SECONDS", 0.01)
    flags = {"size": "nano", "image_size": 16, "batch_size": 8, "chunk": 8, "loss": "softmax", "lr": 1e-3}
    config = load_config(flags=flags | {"keep_patches": 1.0})
    return Work(config.model, config.train, vocab_size=64, num_tokens=8)


def accelerator(monkeypatch, device: Device) -> Plan:
    monkeypatch.setitem(DEVICES, "mps", device)
    return replace(HERE, device="mps")


def followed(work: Generator) -> tuple[list, Any]:
    """What was said meanwhile, and the result."""
    said = []
    while True:
        try:
            said.append(next(work))
        except StopIteration as end:
            return said, end.value


def test_the_slow_device_loses_and_keeps_its_rate_with_a_reason(work, monkeypatch):
    slow = accelerator(monkeypatch, fakes.Slow(operation_seconds=2e-4))
    said, found = followed(measure(work, [HERE, slow], seconds=0.1))
    here, there = found.candidates
    assert choose(found.candidates).plan == HERE
    assert here.rejected is None and there.pairs_per_second < here.pairs_per_second / 1.5
    assert there.rejected is None and "x as long" in remark_on(there, found)
    assert "times as fast as `mps`" in reasons_for(here, found)["device"]
    assert here.spread >= 0 and here.first_call_seconds > 0
    assert "trying cpu fp32, 1 thread, chunk 8" in said
    assert any(sentence.startswith("round 1: ") for sentence in said)


def test_every_plan_has_its_rounds_when_the_time_is_used_up_at_once(work):
    plans = [HERE, replace(HERE, chunk=4), replace(HERE, keep_memory=False)]
    said, found = followed(measure(work, plans, seconds=0, min_rounds=1))
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
def test_what_does_not_work_is_rejected_in_words_and_the_rest_is_timed(device, why, work, monkeypatch):
    found = finished(measure(work, [HERE, accelerator(monkeypatch, device)], seconds=0.1))
    here, there = found.candidates
    assert why in there.rejected and there.pairs_per_second is None
    assert choose(found.candidates) == here and here.pairs_per_second > 0
    assert choose(finished(measure(work, [there.plan], seconds=0.1)).candidates) is None


def test_one_that_fails_later_or_is_slow_without_hardware_is_rejected_too(work, monkeypatch):
    there, low = accelerator(monkeypatch, fakes.Elsewhere()), replace(HERE, precision="bf16")
    monkeypatch.setitem(DEVICES, "cpu", BARE)
    step = race.Rig.step

    def failing(rig, plan, *given):
        if plan.device == "mps" and rig.steps_left.pop() == 0:
            raise torch.OutOfMemoryError("MPS backend out of memory")
        return step(rig, plan, *given) * (20 if plan.precision == "bf16" else 1)

    monkeypatch.setattr(race.Rig, "steps_left", [0, 1, 2, 3, 4], raising=False)
    monkeypatch.setattr(race.Rig, "step", failing)
    found = finished(measure(work, [HERE, there, low], seconds=0.1, patience=0.0))
    here, late, slow = found.candidates
    assert here.pairs_per_second > 0
    assert late.rejected == "out of memory" and late.ran_out_of_memory and late.pairs_per_second is None
    assert slow.rejected.startswith("a step of 2 pairs takes") and "as long as in fp32" in slow.rejected


# What is remembered.


def test_what_was_measured_beside_busy_programs_is_said_and_not_kept(work):
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_usable_cores() + 1)
    ]
    try:
        found = finished(measure(work, [HERE], seconds=1.0))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert found.is_disturbed and re.match(r"other programs used \d+% of the CPU", found.others_in_words)
    folder = folder_for(LAPTOP, work.key())
    remember(folder, found)
    assert recall(folder, {HERE}) is None
    calm = replace(found, other_cores=0.1)
    remember(folder, calm)
    assert recall(folder, {HERE}) == calm


def test_the_newest_measurement_of_all_that_is_asked_for_comes_back(work):
    folder, now = folder_for(LAPTOP, work.key()), time.time()
    known = measured(timed(100), timed(None, "the loss differs", device="mps"), when=now - 1000)
    remember(folder, known)
    assert recall(folder, known.plans) == known
    only = replace(known, candidates=known.candidates[:1])
    assert recall(folder, {PLAIN}) == only, "it timed more than is asked for, and says only that"
    assert recall(folder, {PLAIN}, lambda plan: True) == known, "others are recalled where they are allowed"
    assert recall(folder, {PLAIN, replace(PLAIN, threads=1)}) is None, "one was not timed"
    remember(folder, measured(timed(90), when=now - 10))
    assert recall(folder, {PLAIN}).when == now - 10 and recall(folder, known.plans) == known


def test_what_ran_out_of_memory_is_old_or_from_the_future_is_not_recalled(work):
    folder = folder_for(LAPTOP, work.key())
    full = replace(timed(None, "out of memory", device="mps"), ran_out_of_memory=True)
    remember(folder, measured(timed(100), full))
    for when in (time.time() - (MAX_DAYS + 1) * 86400, time.time() + 86400):
        remember(folder, measured(timed(100), when=when))
    assert recall(folder, {PLAIN}) is None


def test_another_machine_torch_model_or_batch_was_not_measured(work, monkeypatch):
    here = folder_for(LAPTOP, work.key())
    assert folder_for(replace(LAPTOP, available_bytes=1), work.key()) == here, "free memory does not matter"
    others = [
        folder_for(replace(LAPTOP, chip="M2"), work.key()),
        folder_for(replace(LAPTOP, num_cores=4), work.key()),
        folder_for(LAPTOP, replace(work, model=replace(work.model, size="tiny")).key()),
        folder_for(LAPTOP, replace(work, train=replace(work.train, batch_size=16)).key()),
        folder_for(LAPTOP, replace(work, num_tokens=16).key()),
    ]
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    others.append(folder_for(LAPTOP, work.key()))
    assert len({here, *others}) == 1 + len(others)


GOOD = asdict(timed(100))
DAMAGED = [
    b"", b"[]", b"\x00" * 100, b"\xff\xfe", b"[" * 100_000, b"x" * 6_000_000, b'{"when": 1' + b"0" * 400 + b"}",
    b'{"when": NaN, "candidates": []}',
    *(json.dumps({"when": time.time()} | change).encode() for change in [
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


def test_a_damaged_cache_is_no_error_and_misleads_nobody(work):
    folder = folder_for(LAPTOP, work.key())
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.write_text("a file where a folder should be")
    remember(folder, measured(timed(100)))
    assert recall(folder, {PLAIN}) is None
    folder.parent.unlink()
    (folder / "a-folder.json").mkdir(parents=True)
    for number, content in enumerate(DAMAGED):
        (folder / f"{number}.json").write_bytes(content)
        assert recall(folder, {PLAIN}) is None, content[:200]
    good = measured(timed(100))
    remember(folder, good)
    assert recall(folder, {PLAIN}) == good, "the good one beside them is found"


def test_ages_are_said_in_words():
    said = {5: "just now", 60: "1 minute ago", 7300: "2 hours ago", 3 * 86400: "3 days ago"}
    assert {seconds: age(seconds) for seconds in said} == said
