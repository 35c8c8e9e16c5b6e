"""Measures how long commands take to start, and to be set up; each round runs every case once.

    python benchmarks/start.py             # targets: `--help` 0.3 s, a wrong path 0.5 s, `search` 1.2 x `import torch`
    python benchmarks/start.py --set-up 3  # target: 1.25 x the time to install only torch; takes minutes and 1 GB

The model of the search is `tiny`; its index has 200 images.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = [sys.executable, "-c", "import torch"]
QUICK = ("--help", "train --help", "train --minuts 3", "--version")
WRONG = ("train none", "data check none", "eval none", "index . --model none", "search cat --model none")
MODEL = "train synthetic:2000 --size tiny --steps 2 --batch-size 16 --num-validation 16 --run tiny"


def lapclip(*words: str) -> list[str]:
    return [sys.executable, "-m", "lapclip", *words]


def run(command: list[str], **options) -> None:
    subprocess.run(command, capture_output=True, check=False, **options)


def compare(cases: dict[str, Callable[[], None]], rounds: int, base: str) -> None:
    """Wall and processor time of each case, medians, beside those of the base case in the same rounds."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            case()
            seconds, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
            took[name].append((seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime))
    for name, times in took.items():
        wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [
            statistics.median(own[i] / other[i] for own, other in zip(times, took[base], strict=True))
            for i in (0, 1)
        ]
        slowest = max(seconds for seconds, _ in times)
        print(
            f"{name:36} {wall:7.3f} s, at most {slowest:7.3f}; processor {processor:6.3f} s;"
            f" x {base}: {ratios[0]:.2f}, processor {ratios[1]:.2f}"
        )


def start_up(rounds: int) -> None:
    import numpy as np
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["LAPCLIP_CACHE"] = str(Path(folder, "cache"))
        Path("photos").mkdir()
        for number in range(200):
            pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"photos/{number}.png")
        for words in (MODEL, "index photos --model tiny"):
            subprocess.run(lapclip(*words.split()), capture_output=True, check=True)
        cases = {"import torch": TORCH, "lapclip search": lapclip("search", "a", "red", "circle")}
        cases |= {f"lapclip {words}": lapclip(*words.split()) for words in (*QUICK, *WRONG)}
        compare({name: lambda own=own: run(own) for name, own in cases.items()}, rounds, "import torch")


def set_up(rounds: int) -> None:
    """Both with a warm cache of downloads, from the second round on."""
    version = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if "torch==" in line)
    with tempfile.TemporaryDirectory() as folder:
        clone, venv = Path(folder, "clone"), Path(folder, "venv")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)

        def torch_alone() -> None:
            shutil.rmtree(venv, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            run([str(venv / "bin" / "python"), "-m", "pip", "install", version])

        def everything() -> None:
            shutil.rmtree(clone / ".venv", ignore_errors=True)
            run([sys.executable, "tools/bootstrap.py"], cwd=clone)

        compare({"only torch": torch_alone, "tools/bootstrap.py": everything}, rounds, "only torch")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--set-up", type=int, metavar="ROUNDS", help="measure this instead")
    options = parser.parse_args()
    set_up(options.set_up) if options.set_up else start_up(options.rounds)
