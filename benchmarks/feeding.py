"""Does feeding cost a step anything? Steps fed from a pack against steps that repeat one batch from memory.

    python benchmarks/feeding.py                                  # Flickr8k, `tiny`, about three minutes
    python benchmarks/feeding.py SOURCE --size nano --rounds 300

Both do the same work, augmentation included, in one process: blocks of steps take turns, in an order that changes from
round to round, so that a busy minute is shared. Waiting is what training itself reports as `data_seconds`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

from lapclip.config import Config, load_config
from lapclip.machine import wait_calmly

TEXT_LENGTH = 16  # short, so that every batch is cut to it, and fed steps are no longer than the repeated one
FLICKR = Path(__file__).resolve().parents[2] / "shared" / "data" / "flickr8k"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", default=str(FLICKR))
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--steps", type=int, default=1, help="in a block")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    wait_calmly()
    flags = {"source": asked.source, "size": asked.size, "text_length": TEXT_LENGTH}
    result = compare(load_config(flags=flags), asked.rounds, asked.steps)
    if asked.json:
        print(json.dumps(result))
        return
    print(f"{result['batch_size']} pairs a step, {asked.rounds} rounds of {asked.steps} steps each way")
    print(
        f"fed from the pack     {result['fed_ms']:.1f} ms a step, of which {result['wait_share']:.2%} waiting"
    )
    print(f"one batch, repeated   {result['repeated_ms']:.1f} ms a step")
    low, high = result["ratio_range"]
    print(
        f"speed, fed : repeated {result['ratio']:.3f} (median of rounds; middle half {low:.3f} to {high:.3f})"
    )


def compare(config: Config, rounds: int, steps: int) -> dict[str, Any]:
    """Medians over rounds, and where the middle half of the rounds lies."""
    from lapclip.data.batches import load_batches
    from lapclip.data.opening import finished
    from lapclip.data.tokenizer import train_tokenizer
    from lapclip.device import default_threads, set_up_process
    from lapclip.prepare import open_here, sample_captions, settle_here

    data = finished(open_here(config))
    tokenizer = train_tokenizer("bpe", sample_captions(data.training, 20_000), config.data.max_vocab)
    config, _, _ = settle_here(config, tokenizer, data)
    set_up_process(default_threads())
    assert config.train.batch_size and config.model.text_length and config.model.image_size
    fed = load_batches(
        data.training, tokenizer, batch_size=config.train.batch_size, image_size=config.model.image_size,
        text_length=config.model.text_length, seed=0, first_step=0, workers=config.data.workers or 0,
    )  # fmt: skip
    stepper = Stepper(config, tokenizer.vocab_size)
    repeated = repeat(next(fed))
    ways: dict[str, Iterator[Any]] = {"fed": fed, "repeated": repeated}
    seconds: dict[str, list[float]] = {"fed": [], "repeated": []}
    waited = []
    for warm in ways.values():
        stepper.run(warm, 3)
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            took, waiting = stepper.run(ways[name], steps)
            seconds[name].append(took / steps)
            if name == "fed":
                waited.append(waiting / took)
    fed.close()
    ratios = sorted(r / f for f, r in zip(seconds["fed"], seconds["repeated"], strict=True))
    return {
        "batch_size": config.train.batch_size,
        "fed_ms": 1e3 * statistics.median(seconds["fed"]),
        "repeated_ms": 1e3 * statistics.median(seconds["repeated"]),
        "wait_share": statistics.median(waited),
        "ratio": statistics.median(ratios),
        "ratio_range": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
    }


class Stepper:
    """The training step as `lapclip.train` does it, without events."""

    def __init__(self, config: Config, vocab_size: int):
        from lapclip.device import pick_device
        from lapclip.model.clip import build_model
        from lapclip.optim import build_optimizer

        self.config = config
        self.device, _ = pick_device(config.device.device)
        self.model = build_model(config.model, vocab_size=vocab_size, has_bias=False, seed=0)
        self.optimizer = build_optimizer(self.model, config.train)
        self.num_steps = 0

    def run(self, batches: Iterator[Any], steps: int) -> tuple[float, float]:
        """Seconds of so many steps, and of those the seconds spent waiting for batches."""
        import torch

        from lapclip.augment import augment
        from lapclip.loss import LOSSES
        from lapclip.step import choose_patches, contrastive_step, move

        train, looks = self.config.train, self.config.data
        assert train.batch_size and train.chunk and train.keep_patches and looks.crop and train.loss
        started, waiting = time.perf_counter(), 0.0
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            waiting += time.perf_counter() - asked
            keep = choose_patches(
                self.num_steps, seed=0, batch_size=train.batch_size,
                num_patches=self.model.image.num_patches, share=train.keep_patches,
            )  # fmt: skip
            inputs = move(batch, self.device, keep)
            images = augment(
                inputs.images, self.model.size.image_size, step=self.num_steps, seed=0,
                crop=looks.crop, flip=bool(looks.flip), colour=looks.colour or 0.0,
            )  # fmt: skip
            self.optimizer.zero_grad(set_to_none=True)
            contrastive_step(self.model, replace(inputs, images=images), LOSSES[train.loss], train.chunk)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_norm)
            self.optimizer.step()
            self.num_steps += 1
        return time.perf_counter() - started, waiting


if __name__ == "__main__":
    main()
