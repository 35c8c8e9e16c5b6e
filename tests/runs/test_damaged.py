"""A run, pack or index whose files are damaged or replaced: no command waits for a pipe, or fails with a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment
from earlier import unpack

# In a process of its own, which can be ended whatever it waits for: each file in turn, each command that reads it.
PROGRAM = r"""
import json, os, shutil, sys
from pathlib import Path
from lapclip.cli import run_command
damage, read = json.loads(sys.stdin.read())
for part in ("runs", "cache"):
    shutil.copytree(part, f"whole/{part}")
for name, command in read:
    for part in ("runs", "cache"):
        shutil.rmtree(part)
        shutil.copytree(f"whole/{part}", part)
    path = next(Path().glob(name))
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("" if damage == "holes" else "a = " * (path.suffix == ".toml") + "[" * 10_000 + "]" * 10_000)
        os.truncate(path, 30 * 2**30 if damage == "holes" else path.stat().st_size)
    print(f"\n@ {name}: {command}", file=sys.stderr, flush=True)
    run_command(command.split())
"""
READING = ("runs", "watch stopped --json", "report stopped --out page.html", "runs compare stopped finished")
TRAINING, EVALUATION = "train --resume stopped --steps 153", "eval stopped --json"
PACKING = "data pack photos --image-size 16 --workers 0"
SEARCHING = ("search red", "index --model finished photos")
RUN, NEWEST = "runs/stopped", "runs/stopped/checkpoints/step-000152"
READ = {
    f"{RUN}/events.jsonl": (*READING, TRAINING),
    f"{RUN}/config.toml": (*READING, TRAINING, EVALUATION),
    f"{RUN}/machine.json": (*READING, TRAINING),
    f"{RUN}/lock": (*READING, TRAINING),
    f"{RUN}/tokenizer.json": (TRAINING, EVALUATION),
    f"{RUN}/snapshots/step-000100.json": READING,
    f"{RUN}/checkpoints/best": (TRAINING, EVALUATION),
    f"{RUN}/checkpoints/step-000100/model.safetensors": (EVALUATION,),
    f"{NEWEST}/model.safetensors": (TRAINING,),
    f"{NEWEST}/state/optimizer.safetensors": (TRAINING,),
    f"{NEWEST}/state/progress.json": (TRAINING,),
    "cache/index/*/about.json": SEARCHING,
    "cache/index/*/files.db": SEARCHING,
    "cache/index/*/vectors": SEARCHING,
    "cache/index/*/lock": SEARCHING,
    "cache/packs/*/pack.json": ("data remove", PACKING),
    "cache/packs/*/pixels": (PACKING,),
    "cache/packs/*/view-*/rows.npy": ("eval finished --json",),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["pipe", "holes", "deep"])
def test_a_damaged_file_is_refused_or_passed_over(tmp_path, damage):
    unpack(tmp_path.resolve())
    is_text = damage == "deep"
    names = [name for name in READ if not is_text or Path(name).suffix in (".json", ".toml")]
    read = json.dumps([damage, [(name, command) for name in names for command in READ[name]]])
    options = {"env": environment(LAPCLIP_CACHE=str(tmp_path / "cache")), "timeout": 240, "text": True}
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=read, capture_output=True, **options)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-5000:]
    assert done.stderr.count("\n@ ") == sum(len(READ[name]) for name in names), "each was tried"
