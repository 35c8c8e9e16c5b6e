"""Checks whether two source trees train identically: every digit of each loss, and every byte of the weights.

python benchmarks/same_losses.py OLD NEW   # each has `src/lapclip`; exits with 1 if they differ
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

# Evaluating after each step has each step written to the events, where otherwise one in half a second is.
ALWAYS = """--size nano --image-size 16 --steps 30 --seed 5 --device cpu --precision fp32 --threads 1 --workers 0
            --run run --num-validation 8 --eval-every 1 --save-every 10"""
CASES = {
    "one chunk": "synthetic:200 --batch-size 16 --chunk 16",
    "four chunks": "synthetic:200 --batch-size 16 --chunk 4",
    "packed, with crops": "PHOTOS --chunk 8 --batch-size 8 --validation-share 0.3 --crop 0.4 --flip --colour 0.3",
    "half the patches": "synthetic:200 --batch-size 16 --chunk 16 --loss sigmoid --keep-patches 0.5",
}
FIELDS = ("event", "step", "loss", "accuracy", "grad_norm", "lr", "temperature", "num_different")


def main(old: str, new: str) -> int:
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "photos").mkdir()
        for number in range(40):
            coarse = Image.frombytes("RGB", (8, 6), random.Random(number).randbytes(8 * 6 * 3))
            coarse.resize((64, 48)).save(f"{folder}/photos/{number}.jpg")
            Path(folder, "photos", f"{number}.txt").write_text(f"picture {number} of {number % 7} colours")
        for case, flags in CASES.items():
            words = f"train {flags} {ALWAYS}".replace("PHOTOS", f"{folder}/photos").split()
            one = train(Path(old, "src"), Path(folder, case, "old"), words)
            other = train(Path(new, "src"), Path(folder, case, "new"), words)
            differing = [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]
            print(f"{case}: {'differs, first here:' if differing else 'equal'}", *differing[:1])
            code = 1 if differing else code
    return code


def train(source: Path, folder: Path, words: list[str]) -> list[str]:
    """What happened at each step, and at last the weights."""
    folder.mkdir(parents=True)
    places = {"PYTHONPATH": str(source.resolve()), "LAPCLIP_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "lapclip", *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in Path(folder, "runs/run/events.jsonl").read_text().splitlines()]
    steps = [str([e.get(k) for k in FIELDS]) for e in events if e["event"] in ("Step", "Evaluated")]
    assert len(steps) == 60, "30 steps, each with an evaluation"
    weights = Path(folder, "runs/run/checkpoints/step-000030/model.safetensors").read_bytes()
    return [*steps, f"weights {hashlib.sha256(weights).hexdigest()}"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
