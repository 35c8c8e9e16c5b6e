"""Operations: where the time of a call goes, and from which size a device is worth its price."""

import gc
from dataclasses import replace

import pytest
import torch
from waiting import SlowToAnswer

from lapclip.bench.ops import LONGEST_CALL_SECONDS, OPS, OpTiming, ends, fits, overtakes, time_ops
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


def test_launch_and_compute_are_the_whole_of_a_call(both):
    for timing in both:
        assert timing.launch_seconds > 0 and timing.compute_seconds >= 0 and timing.first_call_seconds >= 0
        assert timing.launch_seconds + timing.compute_seconds == pytest.approx(timing.seconds)
        assert timing.allocate_seconds > 0 and timing.num_calls >= 1


def test_waiting_is_told_apart_from_work(both):
    for timing in both:
        if timing.device == "slow":
            assert timing.synchronise_seconds >= WAIT_SECONDS and timing.launch_seconds < WAIT_SECONDS
        else:
            assert timing.synchronise_seconds < WAIT_SECONDS


def test_a_device_that_computes_no_faster_and_answers_late_never_overtakes(both):
    assert [overtakes(both, op, "slow") for op in OPS] == [None] * len(OPS)
    assert [overtakes(both, op, "cpu", reference="slow") for op in OPS] == [SMALL[0]] * len(OPS)


def test_timings_come_as_they_are_measured():
    timings = time_ops([processor()], sizes=[4096, 8])
    assert next(timings).size == 8
    timings.close()


def test_what_needs_more_than_a_quarter_of_free_memory_is_left_out():
    timings = list(time_ops([Cramped("cpu")], sizes=(64, 128)))
    assert {timing.size for timing in timings if timing.op == "product"} == {64}


def test_devices_that_may_share_a_memory_are_given_no_more_of_it_together():
    assert fits(OPS["product"], 64, Cramped("cpu"), 1) and not fits(OPS["product"], 64, Cramped("cpu"), 2)


def test_an_operation_stops_growing_before_a_call_takes_too_long(both):
    product = next(timing for timing in both if timing.op == "product")
    slow = replace(product, size=1024, seconds=LONGEST_CALL_SECONDS / 6)
    assert not ends(OPS["product"], 2048, slow), "eight times the work"
    assert ends(OPS["attention"], 2048, slow), "four times the work"
    assert ends(OPS["product"], 2048, None)


def test_no_input_is_held_while_somebody_looks_at_the_numbers():
    def num_tensors() -> int:
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    before = num_tensors()
    timings = time_ops([processor()], sizes=[8])
    assert next(timings).op == "product" and num_tensors() == before


def timings_of(device: str, seconds: dict[int, float]) -> list[OpTiming]:
    return [OpTiming(device, "product", size, value, 0, 0, 0, value, 0, 1) for size, value in seconds.items()]


PROCESSOR = timings_of("cpu", {32: 1.0, 64: 2.0, 128: 4.0, 256: 8.0})


@pytest.mark.parametrize(
    ("graphics", "size"),
    [
        ({32: 3.0, 64: 3.0, 128: 3.0, 256: 3.0}, 128),
        ({32: 0.5, 64: 3.0, 128: 3.0, 256: 3.0}, 128),  # a lucky small size is no promise
        ({32: 0.5, 64: 0.5, 128: 0.5, 256: 0.5}, 32),
        ({32: 0.5, 64: 0.5, 128: 0.5, 256: 8.0}, None),  # as fast is not faster
        ({32: 0.5, 64: 0.5}, 32),  # larger ones did not fit there
        ({}, None),
    ],
)
def test_a_device_overtakes_where_it_stays_ahead(graphics, size):
    timings = PROCESSOR + timings_of("mps", graphics)
    assert overtakes(timings, "product", "mps") == size
    assert overtakes(reversed(timings), "product", "mps") == size, "in any order"
    assert overtakes(timings, "attention", "mps") is None
