"""Operations and rates: where the time of a call goes, and from which size on a device is faster."""

import gc
import time
from dataclasses import replace

import pytest
import torch
from waiting import SlowToAnswer

from lapclip.bench.ops import (
    LONG_SECONDS,
    MAX_CALL_SECONDS,
    NUM_BLOCKS,
    OPS,
    OpTiming,
    about_torch,
    bandwidth_gbs,
    best_seconds,
    calls_in_block,
    crossovers,
    ends,
    fits,
    gemm_gflops,
    parse_build,
    time_block,
    time_ops,
)
from lapclip.machine.device import Device, processor

pytestmark = pytest.mark.slow

SMALL = (8, 32)
WAIT_SECONDS = SlowToAnswer.wait_seconds


class Cramped(Device):
    def free_bytes(self, available_bytes: int) -> int:
        return 4 * 4 * 3 * 64 * 64  # a quarter of it holds three matrices of 64 x 64


@pytest.fixture(scope="module")
def both() -> list[OpTiming]:
    return list(time_ops([processor(), SlowToAnswer("slow", is_accelerator=True)], sizes=SMALL))


def test_every_operation_is_timed_at_every_size_on_every_device(both):
    asked = [(op, size, device) for op in OPS for size in SMALL for device in ("cpu", "slow")]
    assert [(timing.op, timing.size, timing.device) for timing in both] == asked
    for timing in both:
        assert timing.launch_seconds > 0 and timing.compute_seconds >= 0 and timing.first_call_seconds >= 0
        assert timing.launch_seconds + timing.compute_seconds == pytest.approx(timing.seconds)
        assert timing.allocate_seconds > 0 and timing.num_calls >= 1
        assert (timing.synchronise_seconds >= WAIT_SECONDS) == (timing.device == "slow"), (
            "waiting is told apart"
        )
        assert timing.device != "slow" or timing.launch_seconds < WAIT_SECONDS


def test_a_device_that_computes_no_faster_and_answers_late_never_overtakes(both):
    assert crossovers(both) == {"slow": dict.fromkeys(OPS)}
    assert crossovers(both, reference="slow") == {"cpu": dict.fromkeys(OPS, SMALL[0])}


def test_what_needs_more_than_a_quarter_of_free_memory_is_omitted_also_where_devices_share_it():
    timings = list(time_ops([Cramped("cpu")], sizes=(64, 128)))
    assert {timing.size for timing in timings if timing.op == "product"} == {64}
    assert fits(OPS["product"], 64, Cramped("cpu"), 1) and not fits(OPS["product"], 64, Cramped("cpu"), 2)


def test_an_operation_stops_growing_before_a_call_takes_too_long(both):
    slow = replace(both[0], size=1024, seconds=MAX_CALL_SECONDS / 6)
    assert not ends(OPS["product"], 2048, slow), "eight times the work"
    assert ends(OPS["attention"], 2048, slow), "four times the work"


def test_timings_come_as_they_are_measured_and_no_input_is_held_meanwhile():
    def num_tensors() -> int:
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    before = num_tensors()
    timings = time_ops([processor()], sizes=[4096, 8])
    first = next(timings)
    assert (first.op, first.size) == ("product", 8) and num_tensors() == before
    timings.close()


def timings_of(device: str, seconds: dict[int, float]) -> list[OpTiming]:
    return [OpTiming(device, "product", size, value, 0, 0, 0, value, 0, 1) for size, value in seconds.items()]


PROCESSOR = timings_of("cpu", {32: 1.0, 64: 2.0, 128: 4.0, 256: 8.0})


@pytest.mark.parametrize(
    ("graphics", "size"),
    [
        ({32: 0.5, 64: 3.0, 128: 3.0, 256: 3.0}, 128),  # a lucky small size is no promise
        ({32: 0.5, 64: 0.5, 128: 0.5, 256: 8.0}, None),  # as fast is not faster
        ({32: 0.5, 64: 0.5}, 32),  # larger ones did not fit there
    ],
)
def test_a_device_overtakes_where_it_stays_ahead(graphics, size):
    timings = PROCESSOR + timings_of("mps", graphics)
    assert crossovers(timings) == crossovers(reversed(timings)) == {"mps": {"product": size}}, "in any order"


# Rates

# As PyTorch prints it on an M2, of a time before its wheels had OpenMP, and on Linux; shortened.
MAC = (
    "  - LAPACK is enabled (usually provided by MKL)\n  - Build settings: BLAS_INFO=accelerate, USE_MKL=OFF\n"
)
LINUX = (
    "  - OpenMP 201511 (a.k.a. OpenMP 4.5)\n  - Build settings: BLAS_INFO=mkl, LAPACK_INFO=mkl, USE_MKL=ON\n"
)


class SlowWithinACall(SlowToAnswer):
    wait_seconds = 0.002


def test_rates_are_those_of_a_machine_within_its_time_and_memory():
    """Wide enough for a phone and a workstation, too narrow for a mistake in units."""
    assert 0.1 < gemm_gflops(processor(), sizes=(64, 128), budget_seconds=0.05) < 1e5
    assert 0.05 < bandwidth_gbs(processor(), max_bytes=1 << 24, budget_seconds=0.05) < 1e5
    # No machine could hold the second product, or what the copy is allowed.
    assert gemm_gflops(processor(), sizes=(128, 10_000_000), budget_seconds=1e-9) > 0
    assert bandwidth_gbs(Cramped("cpu"), max_bytes=1 << 60, budget_seconds=0.01) > 0


def test_a_slow_answer_is_shared_by_the_calls_of_a_block():
    device = SlowWithinACall("slow", is_accelerator=True)
    numbers = torch.rand(8, 8)
    num_calls = calls_in_block(lambda: numbers @ numbers, device)
    assert num_calls > 10
    assert time_block(lambda: numbers @ numbers, device, num_calls).launch_seconds < device.wait_seconds


def test_at_least_three_blocks_are_taken_however_small_the_budget():
    assert calls_in_block(lambda: time.sleep(0.03), processor()) == 1, "a block of its own"
    calls: list[None] = []
    best_seconds(lambda: calls.append(time.sleep(LONG_SECONDS)), processor(), budget_seconds=0)
    assert len(calls) == 1 + NUM_BLOCKS


@pytest.mark.parametrize(
    ("text", "blas", "openmp"), [(MAC, "accelerate", None), (LINUX, "mkl", "4.5"), ("", None, None)]
)
def test_the_libraries_are_read_from_what_torch_says_of_its_build(text, blas, openmp):
    assert parse_build(text) == {"blas": blas, "openmp": openmp}
    about = about_torch()
    assert about["version"] == torch.__version__ and about["threads"] == torch.get_num_threads()
    assert about["capability"] and about.keys() >= {"blas", "openmp"}
