"""The long proofs, for `make prove`: a fresh machine, a built wheel, and many kills."""

import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from conftest import ROOT, SMALL, as_flags, command, environment, lapclip
from safetensors.torch import load_file

from lapclip import __version__
from lapclip.runs.run import open_run
from lapclip.weights import checkpoint

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]
QUICK = " ".join(as_flags(SMALL | {"steps": 3}))


def run(*arguments: str | Path, cwd: Path) -> str:
    # Without what this test itself runs in, so that nothing of ours is found by accident.
    clean = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    clean["PATH"] = os.pathsep.join(p for p in clean["PATH"].split(os.pathsep) if ".venv" not in p)
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_fresh_clone_trains_and_a_second_make_installs_nothing(tmp_path):
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone", cwd=tmp_path)
    first = run("make", "train", f"ARGS={QUICK}", cwd=tmp_path / "clone")
    assert "setting up .venv" in first and "learned.png" in first
    started = time.monotonic()
    assert "setting up" not in run("make", "train", f"ARGS={QUICK}", cwd=tmp_path / "clone")
    assert time.monotonic() - started < 60


def test_the_built_wheel_installs_and_trains(tmp_path):
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)  # the wheel from the sdist
    (wheel,), (sdist,) = tmp_path.glob("lapclip-*.whl"), tmp_path.glob("lapclip-*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=tmp_path)
    check_contents(wheel, sdist)
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    pip = [tmp_path / "env/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    said = run(tmp_path / "env" / "bin" / "lapclip", "train", *QUICK.split(), cwd=tmp_path)
    assert "text → image" in said


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel has the package with its pages and all licences, and nothing else; the sdist also what builds it."""
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "lapclip").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"lapclip/py.typed", "lapclip/page/search.html", "lapclip/page/uPlot.LICENSE"} < package
    about = f"lapclip-{__version__}.dist-info"
    licences = {f"{about}/licenses/LICENSE", f"{about}/licenses/src/lapclip/page/uPlot.LICENSE"}
    others = {
        f"{about}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")
    }
    with ZipFile(wheel) as archive:
        assert set(archive.namelist()) == package | licences | others
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    documents = {"README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE"}
    build = {"pyproject.toml", "MANIFEST.in", "setup.cfg", "PKG-INFO"}
    made = {name for name in names if name.startswith("src/lapclip.egg-info/")}
    assert names - made == {f"src/{name}" for name in package} | documents | build


def test_twenty_kills_at_any_moment_change_nothing():
    """SIGKILL after a random while, resumed each time: the weights end equal, to the bit, to a run that was left alone."""
    flags = as_flags(
        SMALL | {"steps": 400, "workers": 1, "keep_patches": 0.5, "save_every": "20", "eval_every": "400"}
    )
    assert lapclip("train", "--run", "straight", *flags).returncode == 0
    moments, arguments = random.Random(0), ["train", "--run", "killed", *flags]
    for _ in range(20):
        with subprocess.Popen(command(*arguments), stderr=subprocess.DEVNULL, env=environment()) as process:
            time.sleep(moments.uniform(3.0, 7.0))
            process.send_signal(signal.SIGKILL)
        if Path("runs/killed/config.toml").exists():
            arguments = ["train", "--resume", "killed"]
    done = lapclip("train", "--resume", "killed")
    assert done.returncode == 0 or "has used up its budget" in done.stderr, done.stderr
    ours, theirs = (checkpoint.latest(open_run(name).checkpoints) for name in ("straight", "killed"))
    assert ours.name == theirs.name == "step-000400"
    for file in ("model.safetensors", "state/optimizer.safetensors"):
        left, right = load_file(ours / file), load_file(theirs / file)
        assert all(torch.equal(left[name], right[name]) for name in left), file
