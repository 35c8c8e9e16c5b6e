"""A run, pack or index whose files are damaged or replaced: no command waits for a pipe, or fails with a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment
from earlier import unpack

# In a process of its own, which can be ended whatever it waits for: each file in turn, each command that reads it.
PROGRAM = """
import json, os, shutil, sys
from pathlib import Path
from lapclip.cli import run_command
root = Path.cwd()
for damage, name, commands in json.loads(sys.stdin.read()):
    for command in commands:
        path = next(root.glob(name))
        keep = root / "keep"
        shutil.copytree(root / "runs", keep)
        shutil.copytree(root / "cache", root / "keep-cache")
        path.unlink()
        if damage == "pipe":
            os.mkfifo(path)
        elif damage == "holes":
            path.touch()
            os.truncate(path, 30 * 2**30)
        else:
            path.write_text(damage)
        print(f"{damage[:20]} {name}: {command}", file=sys.stderr, flush=True)
        code = run_command(command.split())
        print(json.dumps([name, command, code]), flush=True)
        for changed, kept in ((root / "runs", keep), (root / "cache", root / "keep-cache")):
            shutil.rmtree(changed)
            kept.rename(changed)
"""
READING = ("runs", "watch stopped --json", "report stopped --out page.html", "runs compare stopped finished")
TRAINING, EVALUATION = "train --resume stopped", "eval stopped --json"
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
    "runs/stopped/checkpoints/step-000100/model.safetensors": (EVALUATION,),
    f"{NEWEST}/model.safetensors": (TRAINING,),
    f"{NEWEST}/state/optimizer.safetensors": (TRAINING,),
    f"{NEWEST}/state/progress.json": (TRAINING,),
    "cache/index/*/about.json": SEARCHING,
    "cache/index/*/files.db": SEARCHING,
    "cache/index/*/vectors": SEARCHING,
    "cache/index/*/lock": SEARCHING,
    "cache/packs/*/pack.json": ("data remove", "data pack photos --image-size 16 --workers 0"),
    "cache/packs/*/pixels": ("data pack photos --image-size 16 --workers 0",),
    "cache/packs/*/records": ("data pack photos --image-size 16 --workers 0",),
    "cache/packs/*/view-*/rows.npy": ("eval finished --json",),
}
DEEP = "[" * 10_000 + "]" * 10_000


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["pipe", "holes", DEEP, f"a = {DEEP}", '{"step": "x", "best_recall": 3}'])
def test_a_damaged_file_is_refused_or_passed_over(tmp_path, damage):
    unpack(tmp_path.resolve())
    is_text = damage not in ("pipe", "holes")
    todo = [
        (damage, name, commands)
        for name, commands in READ.items()
        if not is_text or Path(name).suffix in (".json", ".toml")
    ]
    program = [sys.executable, "-c", PROGRAM]
    options = {"env": environment(LAPCLIP_CACHE=str(tmp_path / "cache")), "timeout": 240}
    done = subprocess.run(program, input=json.dumps(todo), capture_output=True, text=True, **options)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-5000:]
    assert len(done.stdout.splitlines()) >= sum(len(commands) for *_, commands in todo)
