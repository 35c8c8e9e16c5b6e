"""Measures what preparing batches costs a step: prepared ahead by a thread, between steps, and one repeated batch.

    python benchmarks/feeding.py                                  # Flickr8k, `tiny`, about three minutes
    python benchmarks/feeding.py SOURCE --size nano --rounds 300

All steps run in one process, in turn, in an order that changes between rounds, so that load on the machine affects all
of them. Prepared batches are copied from the pack, cropped and flipped; the repeated batch needs none of this, so it
shows the cost of the step alone. Waiting time is what training reports as `data_seconds`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from lapclip.config import Config, load_config
from lapclip.machine.hardware import limit_openmp_spinning

TEXT_LENGTH = 16  # short, so that every batch is cut to it, and fed steps are no longer than the repeated one
FLICKR = Path(__file__).resolve().parents[2] / "shared" / "data" / "flickr8k"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", default=str(FLICKR))
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--steps", type=int, default=1, help="steps per block")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    limit_openmp_spinning()
    flags = {"source": asked.source, "size": asked.size, "text_length": TEXT_LENGTH}
    result = compare(load_config(flags=flags), asked.rounds, asked.steps)
    if asked.json:
        print(json.dumps(result))
        return
    print(f"{result['batch_size']} pairs per step, {asked.rounds} rounds of {asked.steps} steps each")
    for name, words in (
        ("ahead", "prepared by a thread"),
        ("between", "prepared between steps"),
        ("repeated", "one batch, repeated"),
    ):
        waiting = result["wait_share"].get(name)
        said = f", of which {waiting:.2%} waiting" if waiting is not None else ""
        print(f"{words:24}{result['ms'][name]:.1f} ms per step{said}")
    for name, (median, low, high) in result["speed"].items():
        print(f"speed, {name:24}{median:.3f} (median of rounds; quartiles {low:.3f} to {high:.3f})")


def compare(config: Config, rounds: int, steps: int) -> dict[str, Any]:
    """Medians over rounds, and where the middle half of the rounds lies."""
    from lapclip.autotune.plans import plan_of
    from lapclip.data.batches import load_batches
    from lapclip.machine.device import set_up_process
    from lapclip.model.clip import shape_of
    from lapclip.step.feed import augment_batch, feed
    from lapclip.train.prepare import draft_of, open_here
    from lapclip.units import finished

    data = finished(open_here(config))
    tokenizer, draft = draft_of(config, data)
    config, _ = draft.resolve()
    plan = plan_of(config)
    set_up_process(plan.threads)
    assert config.train.batch_size and config.model.text_length and config.model.image_size
    size = shape_of(config.model)
    ahead = feed(
        data.training, tokenizer, size, config.data,
        batch_size=config.train.batch_size, seed=0, first_step=0, workers=config.data.workers or 0,
    )  # fmt: skip
    plain = load_batches(
        data.training, tokenizer, batch_size=config.train.batch_size, image_size=size.image_size,
        text_length=size.text_length, seed=0, first_step=0, workers=0,
    )  # fmt: skip
    between = (
        augment_batch(batch, config.data, image_size=size.image_size, seed=0, step=step)
        for step, batch in enumerate(plain)
    )
    ways: dict[str, Iterator[Any]] = {"ahead": ahead, "between": between, "repeated": repeat(next(ahead))}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    waited: dict[str, list[float]] = {name: [] for name in ways}
    stepper = Stepper(config, tokenizer.vocab_size)
    for batches in ways.values():
        stepper.run(batches, 3)
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            took, waiting = stepper.run(ways[name], steps)
            seconds[name].append(took / steps)
            waited[name].append(waiting / took)
    ahead.close()

    def speed(one: str, other: str) -> tuple[float, float, float]:
        ratios = sorted(o / s for s, o in zip(seconds[one], seconds[other], strict=True))
        return statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]

    return {
        "batch_size": config.train.batch_size,
        "ms": {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()},
        "wait_share": {name: statistics.median(waited[name]) for name in ("ahead", "between")},
        "speed": {
            "ahead : between": speed("ahead", "between"),
            "ahead : repeated": speed("ahead", "repeated"),
        },
    }


class Stepper:
    """The training step as `lapclip.train.loop` does it, without events."""

    def __init__(self, config: Config, vocab_size: int):
        from lapclip.model.clip import build_model
        from lapclip.step.optim import build_optimizer

        self.config = config
        self.model = build_model(config.model, vocab_size=vocab_size, has_bias=False, seed=0)
        self.optimizer = build_optimizer(self.model, config.train)
        self.num_steps = 0

    def run(self, batches: Iterator[Any], steps: int) -> tuple[float, float]:
        """Seconds of so many steps, and of those the seconds spent waiting for batches."""
        from lapclip.autotune.plans import plan_of
        from lapclip.machine.device import device_named
        from lapclip.step.loss import LOSSES
        from lapclip.step.step import Update, choose_patches, move

        train, plan = self.config.train, plan_of(self.config)
        assert train.batch_size and train.keep_patches and train.loss
        update = Update(self.model, self.optimizer, LOSSES[train.loss], train.clip_norm, plan)
        started, waiting = time.perf_counter(), 0.0
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            waiting += time.perf_counter() - asked
            keep = choose_patches(
                self.num_steps, seed=0, batch_size=train.batch_size,
                num_patches=self.model.size.num_patches, share=train.keep_patches,
            )  # fmt: skip
            inputs = move(batch, device_named(plan.device), keep)
            update.run(inputs)
            self.num_steps += 1
        return time.perf_counter() - started, waiting


if __name__ == "__main__":
    main()
