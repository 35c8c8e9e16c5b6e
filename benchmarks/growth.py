"""Measures how the time and memory of a training step grow with batch, chunk, image size, depth and width.

    python benchmarks/growth.py              # a transformer of 192 x 4 at 64 px: about five minutes on two cores

Each row doubles one number and reports the ratio of seconds and of memory above the smallest process to the row before.
Expected of time: 2 for batch and depth, 4 for the image size (a little more, since attention grows with the square of
the patches), up to 4 for width, 1 for the chunk of a fixed batch (chunks run the towers forward twice, the whole batch
once). Expected of memory: 2 for what is held for each pair of a chunk, 1 for a larger batch of the same chunks.
Every measurement runs in a process of its own; the order of rows alternates between rounds, and medians are compared.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace

ROWS = {
    "batch": [{"batch": n, "chunk": n} for n in (32, 64, 128)],
    "batch, chunks of 32": [{"batch": n, "chunk": 32} for n in (64, 128, 256)],
    "chunk": [{"batch": 128, "chunk": n} for n in (16, 32, 64, 128)],
    "image size (patches)": [{"image_size": n} for n in (32, 64, 128)],
    "depth": [{"depth": n} for n in (2, 4, 8)],
    "width": [{"width": n} for n in (96, 192, 384)],
}
USUAL = {"batch": 64, "chunk": 64, "image_size": 64, "depth": 4, "width": 192}


def run_alone(numbers: dict[str, int], num_steps: int) -> dict[str, float]:
    """Seconds of a step, and the peak memory of this process."""
    from lapclip.config import Config, Plan
    from lapclip.machine.device import DEFAULT_THREADS, processor, set_up_process
    from lapclip.machine.hardware import limit_openmp_spinning, peak_memory_bytes

    limit_openmp_spinning()
    from lapclip.autotune.work import Work
    from lapclip.model.blocks import Shape
    from lapclip.model.clip import CLIP, SIZES
    from lapclip.step.loss import softmax_loss
    from lapclip.step.optim import build_optimizer
    from lapclip.step.step import Update

    config = Config()
    train = replace(config.train, lr=1e-3, batch_size=numbers["batch"], loss="softmax", keep_patches=1.0)
    model_config = replace(config.model, size="tiny", image_size=numbers["image_size"])
    work = Work(model_config, train, vocab_size=1000, num_tokens=16)
    shape = Shape(numbers["width"], numbers["depth"], numbers["width"] // 32)
    model = CLIP(replace(SIZES["tiny"], image=shape, image_size=numbers["image_size"]), vocab_size=1000)
    plan = Plan("cpu", "fp32", DEFAULT_THREADS, numbers["chunk"])
    set_up_process(plan.threads, keep_memory=True)
    inputs = work.inputs(work.random_batch(numbers["batch"]), processor(), None)
    update = Update(model, build_optimizer(model, train), softmax_loss, 1.0, plan)
    seconds = []
    for _ in range(num_steps + 2):
        started = time.perf_counter()
        update.run(inputs)
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[2:]), "bytes": peak_memory_bytes()}


def measure(rounds: int, num_steps: int) -> dict[str, list[dict[str, float]]]:
    cases = [(name, {**USUAL, **row}) for name, rows in ROWS.items() for row in rows]
    found: dict[str, list[dict[str, float]]] = {json.dumps(numbers): [] for _, numbers in cases}
    for number in range(rounds):
        for case in list(found)[:: -1 if number % 2 else 1]:
            command = [sys.executable, __file__, "--alone", case, "--steps", str(num_steps)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[case].append(json.loads(done.stdout))
    least = min(one["bytes"] for several in found.values() for one in several)
    table: dict[str, list[dict[str, float]]] = {}
    for name, numbers in cases:
        several = found[json.dumps(numbers)]
        seconds = statistics.median(one["seconds"] for one in several)
        memory = statistics.median(one["bytes"] for one in several) - least
        rows = table.setdefault(name, [])
        before = rows[-1] if rows else None
        rows.append({
            **{key: value for key, value in numbers.items() if value != USUAL[key] or key in name},
            "ms per pair": 1000 * seconds / numbers["batch"], "MB": memory / 1e6,
            **({"time": seconds / before["s"], "memory": memory / max(before["MB"] * 1e6, 1)} if before else {}),
            "s": seconds,
        })  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        print(json.dumps(run_alone(json.loads(asked.alone), asked.steps)))
        return
    for name, rows in measure(asked.rounds, asked.steps).items():
        print(name)
        for row in rows:
            print("   " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
