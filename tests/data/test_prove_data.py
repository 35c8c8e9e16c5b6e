"""The long proofs about data: a million rows."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import as_flags, command, environment
from PIL import Image

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]

OPEN = """
import sys, time
started = time.perf_counter()
from lapclip.config import DataConfig
from lapclip.data.open import open_source
from lapclip.units import finished
from lapclip.machine.hardware import peak_memory_bytes
if __name__ == "__main__":
    data = finished(open_source(DataConfig(source="pairs.csv", captions="all"), 16))
    print(time.perf_counter() - started, peak_memory_bytes(), data.training.num_pairs, data.validation.num_pairs)
"""


@pytest.fixture
def million(tmp_path) -> Path:
    """A table of a million rows that share a thousand tiny images."""
    (tmp_path / "img").mkdir()
    for number in range(1000):
        coarse = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((16, 16)).save(tmp_path / "img" / f"{number}.png")
    words = ["red", "green", "blue", "old", "new", "cat", "dog", "tree", "house", "car", "boat"]
    chance = random.Random(0)
    with (tmp_path / "pairs.csv").open("w") as file:
        file.write("image,caption\n")
        for row in range(1_000_000):
            file.write(f"img/{row % 1000}.png,{' '.join(chance.choices(words, k=6))} {row}\n")
    return tmp_path


def own_bytes(pid: int) -> int:
    """Without the pages of mapped files, which the system takes back when it needs them."""
    held = psutil.Process(pid).memory_info()
    return held.rss - getattr(held, "shared", 0)


def test_a_million_rows_open_in_a_minute_and_a_gigabyte_and_a_run_over_them_does_not_grow(million):
    (million / "open.py").write_text(OPEN)
    done = subprocess.run(
        [sys.executable, "open.py"], capture_output=True, text=True, check=True, env=environment()
    )
    seconds, peak, num_train, num_validation = map(float, done.stdout.split())
    assert num_train + 1000 * num_validation == 1_000_000
    assert seconds < 60 and peak < 1e9, (seconds, peak)

    settings = {"size": "nano", "image_size": 16, "batch_size": 64, "minutes": 1.0, "threads": 1}
    run = subprocess.Popen(
        command("train", "pairs.csv", "--captions=all", "--eval-every=1h", "--run=m", *as_flags(settings)),
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    events, held = Path("runs/m/events.jsonl"), []
    while run.poll() is None:
        if events.exists() and '"Step"' in events.read_text():
            held.append(own_bytes(run.pid))
        time.sleep(1)
    assert run.returncode == 0
    # From the tenth second of training on; the last seconds hold the evaluation.
    early, late = np.median(held[10:20]), np.median(held[-15:-5])
    result = json.loads(events.read_text().splitlines()[-1])
    sys.stdout.write(
        f"opened in {seconds:.1f} s and {peak / 1e6:.0f} MB; trained {result['num_pairs_seen']:,} pairs, "
        f"from {early / 1e6:.0f} to {late / 1e6:.0f} MB\n"
    )
    assert late < early + 20e6
