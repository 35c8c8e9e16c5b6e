"""Measures the peak memory of training `small` (76.7M parameters, 224 px), with child processes, saving and evaluation.

    python benchmarks/memory.py    # about 25 minutes on two cores; batch 512 takes most of it

Each case is an actual `lapclip train` in a separate process, sampled from outside every 20 ms. It needs at least two
steps, because the optimizer state is allocated at the end of the first; the first case has more, since captions of many
lengths leave gaps in the heap.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time

import psutil

CASES = [
    # name, flags, maximum GB
    ("batch 12 in one chunk", ["--batch-size", "12", "--chunk", "12", "--steps", "30"], 2.9),
    ("batch 12, chunk 4", ["--batch-size", "12", "--chunk", "4", "--steps", "4"], 2.1),
    (
        "batch 512, chunk 4",
        ["--batch-size", "512", "--chunk", "4", "--steps", "2"],
        None,
    ),  # 0.3 more than the one before
]


def resident_bytes(process: psutil.Process) -> int:
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue
    return total


def measure(flags: list[str], folder: str) -> dict:
    command = [
        sys.executable,
        "-m",
        "lapclip",
        "train",
        "--size",
        "small",
        "--keep-patches",
        "1",
        "--json",
        "--num-validation",
        "24",
    ]
    command += ["--save-every", "2", "--eval-every", "2", *flags]
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as training:
        process, peak, done = psutil.Process(training.pid), 0, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.is_set():
                try:
                    peak = max(peak, resident_bytes(process))
                except psutil.Error:
                    return
                time.sleep(0.02)

        sampler = threading.Thread(target=sample)
        sampler.start()
        output, said = training.communicate()
        done.set()
        sampler.join()
    if training.returncode:
        sys.exit(said)
    result = json.loads(output)
    return {
        "peak_gb": peak / 1e9,
        "reported_gb": result["peak_memory_bytes"] / 1e9,
        "seconds": time.perf_counter() - started,
        "pairs_per_second": result["pairs_per_second"],
        "num_parameters": result["num_parameters"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, help="run one case, by its number from 0")
    arguments = parser.parse_args()
    peak_before = 2.1
    for name, flags, most in CASES if arguments.only is None else [CASES[arguments.only]]:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(flags, folder)
        allowed = most or peak_before + 0.3
        verdict = "ok" if found["peak_gb"] <= allowed else "OVER"
        peak_before = found["peak_gb"]
        print(
            f"{name:24} peak {peak_before:.2f} GB (at most {allowed:.2f}: {verdict})",
            json.dumps(found),
            flush=True,
        )


if __name__ == "__main__":
    main()
