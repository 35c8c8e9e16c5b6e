"""Rates: two numbers of a device, and what PyTorch is made of."""

import time

import pytest
import torch
from waiting import SlowToAnswer

from lapclip.bench.rates import (
    LONG_SECONDS,
    NUM_BLOCKS,
    about_torch,
    bandwidth_gbs,
    best_seconds,
    calls_in_block,
    gemm_gflops,
    parse_build,
    time_block,
)
from lapclip.machine.device import Device, processor

WAIT_SECONDS = 0.002
# As PyTorch prints it on an M2, of a time before its wheels had OpenMP, and on Linux; shortened.
MAC = """PyTorch built with:
  - GCC 4.2
  - clang 13.1.6
  - LAPACK is enabled (usually provided by MKL)
  - CPU capability usage: NO AVX
  - Build settings: BLAS_INFO=accelerate, BUILD_TYPE=Release, LAPACK_INFO=accelerate, USE_MKL=OFF
"""
LINUX = """PyTorch built with:
  - GCC 13.3
  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64 architecture applications
  - OpenMP 201511 (a.k.a. OpenMP 4.5)
  - CPU capability usage: AVX2
  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release, LAPACK_INFO=mkl, USE_MKL=ON
"""


class SlowWithinACall(SlowToAnswer):
    wait_seconds = WAIT_SECONDS


class Cramped(Device):
    """Has next to no memory left."""

    def free_bytes(self, available_bytes: int) -> int:
        return 800_000


def test_both_rates_are_those_of_a_machine_and_not_of_the_clock():
    """Wide enough for a phone and a workstation, too narrow for a mistake in units."""
    assert 0.1 < gemm_gflops(processor(), sizes=(64, 128), budget_seconds=0.05) < 1e5
    assert 0.05 < bandwidth_gbs(processor(), most_bytes=1 << 24, budget_seconds=0.05) < 1e5


def test_a_slow_answer_is_shared_by_the_calls_of_a_block():
    device = SlowWithinACall("slow", is_accelerator=True)
    numbers = torch.rand(8, 8)
    num_calls = calls_in_block(lambda: numbers @ numbers, device)
    assert num_calls > 10
    assert time_block(lambda: numbers @ numbers, device, num_calls).launch_seconds < WAIT_SECONDS


def test_a_call_that_takes_long_is_a_block_of_its_own():
    assert calls_in_block(lambda: time.sleep(0.03), processor()) == 1


def test_products_stop_growing_when_the_next_would_break_the_budget():
    """No machine could hold the second."""
    assert gemm_gflops(processor(), sizes=(128, 10_000_000), budget_seconds=1e-9) > 0


def test_a_copy_leaves_memory_to_others():
    """No machine could hold what is allowed, but little is free."""
    assert bandwidth_gbs(Cramped("cpu"), most_bytes=1 << 60, budget_seconds=0.01) > 0


def test_at_least_three_blocks_are_taken_however_small_the_budget():
    calls: list[None] = []
    best_seconds(lambda: calls.append(time.sleep(LONG_SECONDS)), processor(), budget_seconds=0)
    assert len(calls) == 1 + NUM_BLOCKS


@pytest.mark.parametrize(
    ("text", "blas", "openmp"), [(MAC, "accelerate", None), (LINUX, "mkl", "4.5"), ("", None, None)]
)
def test_the_libraries_are_read_from_what_torch_says_of_its_build(text, blas, openmp):
    assert parse_build(text) == {"blas": blas, "openmp": openmp}


def test_what_is_said_of_torch_is_that_of_this_process():
    about = about_torch()
    assert about["version"] == torch.__version__ and about["threads"] == torch.get_num_threads()
    assert about["capability"] and about.keys() >= {"blas", "openmp"}
