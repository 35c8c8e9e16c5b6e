"""`lapclip bench` as people and programs meet it: what it prints, what it keeps, what it refuses."""

import json
import os
import signal
import subprocess
import time
from functools import partial

import pytest
from conftest import command, environment, wait_for

from lapclip.autotune.cache import folder_for
from lapclip.bench import ops, show, sizes, steps
from lapclip.bench.sizes import SizeResult, measure_or_estimate, predicted_speed_up, speed_up, study_sizes
from lapclip.config import load_config
from lapclip.files import cache_folder
from lapclip.machine.device import DEVICES, present_devices, processor
from lapclip.machine.hardware import read_machine
from lapclip.units import finished

pytestmark = pytest.mark.slow

NANO = ("--size", "nano", "--image-size", "16", "--batch-size", "8", "--threads", "1")
CANDIDATE = {"device", "precision", "threads", "chunk", "compile", "pairs_per_second", "spread", "rejected"}
CONTRACT = {"machine", "gemm_gflops", "bandwidth_gbs", "candidates", "choice", "reasons", "seconds"}


@pytest.fixture(autouse=True)
def in_a_moment(quick, monkeypatch):
    monkeypatch.setattr(ops, "ROUND_SECONDS", 0.005)


@pytest.fixture
def bench(call):
    return partial(call, "bench")


def of_json(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "one object on one line"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("measured")


@pytest.fixture
def measured(bench, shared_cache, monkeypatch):
    """What was measured of a small step, once for all tests that look at it."""
    monkeypatch.setenv("LAPCLIP_CACHE", str(shared_cache))
    return of_json(bench(*NANO, "--json"))


def test_programs_find_every_key_of_the_contract_and_low_precision_is_judged(measured):
    found = measured
    assert found.keys() >= CONTRACT
    assert found["gemm_gflops"] > 0 and found["bandwidth_gbs"] > 0 and found["seconds"] > 0
    assert {"chip", "num_cores", "memory_bytes", "torch"} <= found["machine"].keys()
    for candidate in [*found["candidates"], found["choice"]]:
        assert candidate.keys() >= CANDIDATE
        assert (candidate["pairs_per_second"] is None) <= bool(candidate["rejected"]), "a rate or a reason"
    assert found["choice"] in found["candidates"] and found["choice"]["rejected"] is None
    assert {candidate["threads"] for candidate in found["candidates"]} == {1}
    assert {candidate["chunk"] for candidate in found["candidates"]} == {8, 4, 2}
    assert set(found["reasons"]) >= {"device", "precision", "threads", "chunk", "compile"}
    assert found["reasons"]["threads"] == "asked for" and "chunks of 4" in found["reasons"]["chunk"]
    (low,) = [c for c in found["candidates"] if c["precision"] == "bf16" and c["device"] == "cpu"]
    if low["rejected"] is None:
        assert low["pairs_per_second"] > 0, "there is hardware for it"
    else:
        assert "as long" in low["rejected"]
        assert low["pairs_per_second"] or low["rejected"] in found["reasons"]["precision"]


def test_the_second_time_it_is_remembered_and_fresh_measures_again(bench, measured):
    first = measured
    for file in cache_folder().glob("measured/*/*.json"):
        stored = json.loads(file.read_text())
        file.write_text(json.dumps(stored | {"when": stored["when"] - 7300}))
    second = of_json(bench(*NANO, "--json"))
    assert second["measured"] == pytest.approx(first["measured"] - 7300)
    assert second["candidates"] == first["candidates"] and second["choice"] == first["choice"]
    assert (second["gemm_gflops"], second["bandwidth_gbs"]) == (first["gemm_gflops"], first["bandwidth_gbs"])
    assert "measured 2 hours ago; `--fresh` measures again" in bench(*NANO).stdout
    assert of_json(bench(*NANO, "--json", "--fresh"))["measured"] > first["measured"]


@pytest.mark.usefixtures("measured")
def test_people_read_it_in_80_columns_and_get_what_a_page_shows(bench, tmp_path):
    done = bench(*NANO, "--picture", "bench.html")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    (header,) = [line for line in lines if line[:2] == ["device", "precision"]]
    assert header == ["device", "precision", "threads", "chunk", "pairs/s", "spread", "remark"]
    assert sum(any(word.startswith("chosen") for word in line) for line in lines) == 1
    (threads,) = [line for line in lines if line[0] == "threads"]
    assert threads == ["threads", "1", "asked", "for"]
    assert "uses this plan" in " ".join(done.stdout.split()) and "\x1b" not in done.stdout
    page = (tmp_path / "bench.html").read_text()
    assert 'class="range' in page and "chosen" in page and "results: bench.html" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--picture", "nowhere/bench.html"], 1, "cannot write `nowhere/bench.html`"),
        (["--out", "bench.png"], 1, "`bench.png` does not end in `.html`"),
        (["--minutes", "3"], 2, "--minutes"),
        (["--size", "gigantic"], 2, "gigantic"),
        (["--ops", "--size", "nano"], 1, "`--ops` does not use `--size`"),
        (["--device", "cuda"], 1, "no device `cuda`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_said_in_words_before_anything_is_measured(arguments, code, says, bench):
    if "cuda" in arguments and DEVICES["cuda"].is_present:
        pytest.skip("this machine has that device, so it cannot be missed here")
    done = bench(*arguments)
    assert done.returncode == code and says in done.stderr and "hint:" in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    assert not list(cache_folder().rglob("*.json"))


NAMES = [device.name for device in present_devices()]


def spoil(content: object, name: str) -> None:
    """Puts something into the place where a result is kept."""
    file = folder_for(read_machine(), {name: NAMES}) / f"{name}.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(content | {"when": time.time()} if isinstance(content, dict) else content))


@pytest.mark.parametrize(
    "content", [{"rates": {"cpu": {}}, "ops": [{"size": 5}]}, [], {"rates": {}, "ops": []}], ids=str
)
def test_spoilt_rates_and_operations_are_measured_again(content, monkeypatch):
    monkeypatch.setattr(ops, "OPS", {"copy": ops.OPS["copy"]})  # one is enough to see that it was measured
    for name in ("rates", "ops"):
        spoil(content, name)
    found = finished(steps.look_over(fresh=False))
    assert found.rates["cpu"]["gemm_gflops"] > 0 and found.rates["cpu"]["bandwidth_gbs"] > 0
    assert (
        steps.in_words(found) and finished(show.ops_section(load_config(flags={}), fresh=False)).json["ops"]
    )


def test_operations_are_shown_by_size_and_remembered(bench):
    found = of_json(bench("--ops", "--json"))
    assert {"machine", "gemm_gflops", "bandwidth_gbs", "seconds", "ops", "crossovers"} <= found.keys()
    assert {timing["size"] for timing in found["ops"]} == {8}
    done = bench("--ops")
    assert "product" in done.stdout and "measured just now" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert of_json(bench("--ops", "--json"))["ops"] == found["ops"]


# Sizes.


def result(size: str, rate: float, device: str = "cpu", **changed) -> SizeResult:
    values = {"num_parameters": 10**6, "batch_size": 8, "chunk": 8, "spread": 0.01, "memory_bytes": 10**9,
              "epoch_seconds": 10_000 / rate, "is_estimate": False, "flops_per_second": 1e10} | changed  # fmt: skip
    return SizeResult(size=size, device=device, pairs_per_second=rate, **values)


def test_speed_up_is_against_the_processor_at_the_same_size_and_predicted_to_grow_with_it():
    results = [result("nano", 100), result("tiny", 10), result("nano", 50, "mps"), result("tiny", 30, "mps")]
    assert [speed_up(results, r) for r in results] == [None, None, 0.5, 3.0]
    counts = (1e6, 60e6, 150e6, 300e6, 1e9)
    assert [predicted_speed_up(int(count)) for count in counts] == [0.1, 0.3, 0.8, 1.5, 3.0]


def test_an_estimate_is_marked_and_slower_than_what_it_is_made_from():
    guess = finished(measure_or_estimate("huge", "cpu", 0.0, measured := result("nano", 500.0)))
    assert guess.is_estimate and guess.spread is None and guess.chunk == 1
    assert 0 < guess.pairs_per_second < measured.pairs_per_second / 100
    assert guess.epoch_seconds == pytest.approx(10_000 / guess.pairs_per_second)
    assert guess.memory_bytes > 16 * guess.num_parameters > 16 * 900e6
    first, second = show.sizes_table([measured, guess]).cells
    assert not any("~" in cell for cell in first) and "0.1x" in first
    assert sum(cell.startswith("~") for cell in second) == 3 and "3x" in second, "rate, memory and epoch"


def test_sizes_are_measured_while_they_fit_and_estimated_beyond(bench):
    nano, huge = finished(study_sizes([processor()], ("nano", "huge"), fresh=False, max_memory=1.0))
    assert not nano.is_estimate and huge.is_estimate
    assert nano.epoch_seconds == pytest.approx(sizes.EPOCH_PAIRS / nano.pairs_per_second)
    assert nano.memory_bytes > 10**8
    assert len(list(cache_folder().rglob("size.json"))) == 1, "an estimate is not kept as if it were measured"
    (row,) = of_json(bench("--sizes", "--max-memory", "1", "--json"))["sizes"]
    assert row["pairs_per_second"] == nano.pairs_per_second, "remembered"
    assert row["predicted_speed_up"] == 0.1 and row["speed_up"] is None
    done = bench("--sizes", "--max-memory", "1")
    assert "no accelerator was timed" in " ".join(done.stdout.split())
    assert "nano" in done.stdout and "predicted" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments", [NANO, pytest.param(("--sizes",), marks=pytest.mark.prove)], ids=["steps", "sizes"]
)
def test_ctrl_c_ends_it_with_a_sentence(arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command("bench", *arguments), env=environment(), **pipes)
    wait_for(lambda: list(cache_folder().rglob("rates.json")))
    time.sleep(0.5)  # into the measuring that follows
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the children, too
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped while measuring" in said and "hint:" in said
    assert "Traceback" not in said and not printed
