"""Compares the plan that `lapclip bench` chooses with the best of an exhaustive sweep, and predicted with actual speed.

    python benchmarks/choice.py                 # `tiny`, about four minutes
    python benchmarks/choice.py --size nano

Everything runs in one process. First, bench measures and chooses, as `lapclip bench --fresh` does. Each later
round runs, in changing order, a block of actual training with the chosen plan (the `train` generator itself, including
image generation) and a block of every plan of an exhaustive sweep (all threads, chunks down to an eighth, both
allocators), so that load on the machine affects all of them. Training stops before the last fifth of the run, which
uses all patches.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from lapclip.config import load_config
from lapclip.machine.hardware import limit_openmp_spinning

BLOCK_SECONDS = 1.0
NUM_ALL = 3  # rounds with every plan of the sweep
NEAR = 0.8  # of the choice's speed, to be in the other rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    limit_openmp_spinning()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAPCLIP_CACHE"] = str(Path(folder) / "cache")
        os.chdir(folder)
        result = compare(asked.size, asked.rounds)
    if asked.json:
        print(json.dumps(result))
        return
    print(f"chosen: {result['choice']}")
    print(f"bench predicted {result['predicted']:.0f} pairs/s of training; measured {result['trained']:.0f}")
    print(f"actual training : predicted, a minute before     {result['trained_to_predicted']:.3f}")
    print(f"actual training : predicted in the same rounds   {result['trained_to_timed']:.3f}")
    print(f"best of the sweep: {result['best']}")
    print(f"chosen : best of the sweep                       {result['chosen_to_best']:.3f}")


def compare(size: str, rounds: int) -> dict[str, Any]:
    from lapclip.autotune.measure import Rigs
    from lapclip.bench.steps import bench_steps
    from lapclip.config import Plan
    from lapclip.units import finished

    config = load_config(flags={"size": size, "minutes": 60.0})
    found = finished(bench_steps(config, compile=False, fresh=True))
    choice = found.choice.plan
    batch_size = found.resolved.train.batch_size
    most = choice.threads
    plans = [
        Plan("cpu", "fp32", threads, chunk, False, keep)
        for threads, chunk, keep in product(
            range(1, os.cpu_count() + 1), [batch_size // n for n in (1, 2, 4, 8)], [True, False]
        )
    ]
    assert choice in plans and most <= os.cpu_count()
    from lapclip.train.prepare import draft_of

    rigs = Rigs(draft_of(config)[1].work)
    real = training(config)
    blocks: dict[Any, list[float]] = {plan: [] for plan in plans} | {"training": []}
    for plan in plans:
        rigs.rig(plan).step(plan)
    order = list(blocks)
    for number in range(rounds):
        if number == NUM_ALL:  # the rest of the time is for those that could be the best
            order = [
                one for one in order if one == "training" or paired_speed(blocks[one], blocks[choice]) > NEAR
            ]
        for one in order[:: -1 if number % 2 else 1]:
            if one == "training":
                apply(choice)
                next(real), next(real)  # untimed: the allocator, the caches, the worker's queue
                steps = [next(real) for _ in range(num_steps(blocks[choice]))]
                blocks[one].append(statistics.mean(steps))
                continue
            rig = rigs.rig(one)
            first = rig.step(one)
            count = max(1, round(BLOCK_SECONDS / 4 / first))
            blocks[one].append(statistics.mean(rig.step(one) for _ in range(count)))
    real.close()
    rate = {one: batch_size / statistics.median(taken) for one, taken in blocks.items()}
    near = [plan for plan in plans if plan in order]
    best = max(near, key=lambda plan: paired_speed(blocks[plan], blocks[choice]))
    paired = statistics.median(t / s for t, s in zip(blocks[choice], blocks["training"], strict=True))
    with_drawing = found.predicted / found.choice.pairs_per_second  # what bench says that drawing costs
    return {
        "choice": choice.in_words(),
        "predicted": found.predicted,
        "timed": rate[choice],
        "trained": rate["training"],
        "trained_to_timed": paired / with_drawing,
        "trained_to_predicted": rate["training"] / found.predicted,
        "best": best.in_words(),
        "chosen_to_best": 1 / max(paired_speed(blocks[plan], blocks[choice]) for plan in near),
        "rates": {str(one): value for one, value in rate.items()},
        "rounds": rounds,
    }


def paired_speed(one: list[float], other: list[float]) -> float:
    """How many times as fast the one is, round by round."""
    return statistics.median(o / s for s, o in zip(one, other, strict=True))


def num_steps(choice: list[float]) -> int:
    return max(2, round(BLOCK_SECONDS / (choice[-1] if choice else 0.5)))


def apply(plan: Any) -> None:
    from lapclip.machine.device import set_up_process

    set_up_process(plan.threads, keep_memory=plan.keep_memory)


def training(config: Any) -> Iterator[float]:
    """Seconds of each step of a real run; between two of them it stands still."""
    from lapclip.runs.events import Step
    from lapclip.train.loop import train
    from lapclip.train.prepare import prepare

    run = prepare(replace(config, train=replace(config.train, eval_every="100000", save_every="100000")))
    before = 0.0
    for event in train(run.load_config(), run):
        if isinstance(event, Step):
            took, before = event.seconds - before, event.seconds
            yield took


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"({time.perf_counter() - started:.0f} s)")
