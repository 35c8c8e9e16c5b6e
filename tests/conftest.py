"""Small real things to test with: a model that steps in milliseconds, a run trained in a second."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torchvision_without_cuda  # noqa: F401
from PIL import Image

from lapclip.cli import run_command
from lapclip.config import Config, DataConfig, load_config
from lapclip.data.open import Data, open_source
from lapclip.machine.hardware import limit_openmp_spinning
from lapclip.runs.events import Evaluated, Inspected, read_events
from lapclip.units import finished

limit_openmp_spinning()  # before torch is imported, as the command line does

ROOT = Path(__file__).resolve().parent.parent
# A test may import another folder's test module, also in a process that it starts.
FOLDERS = [str(folder) for folder in (ROOT / "tests", *sorted((ROOT / "tests").rglob("[a-z]*/")))]
sys.path += [folder for folder in FOLDERS if folder not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *FOLDERS])

# As flags, for commands, and as settings, for calls: the same small training.
SMALL = {
    "source": "synthetic:200",
    "size": "nano",
    "image_size": 16,
    "num_validation": 16,
    "batch_size": 8,
    "steps": 6,
    "workers": 0,
    "threads": 1,
    "eval_every": "6",  # else ten times in six steps
}
# For a browser: keeps what was drawn last at the left axis of each chart.
RECORD_LABELS = """
const { clearRect, fillText } = CanvasRenderingContext2D.prototype;
Object.assign(CanvasRenderingContext2D.prototype, {
  clearRect(...box) { this.canvas.labels = []; return clearRect.apply(this, box); },
  fillText(text, ...at) { if (this.textAlign === "right" && text) this.canvas.labels.push(text); return fillText.call(this, text, ...at); },
});"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def one_thread():
    """For what computes too little to share."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_config() -> Config:
    return load_config(flags=SMALL)


@pytest.fixture
def with_train(small_config):
    """The small config with some training settings changed."""

    def change(**settings) -> Config:
        if settings.keys() & {"minutes", "epochs"}:
            settings.setdefault("steps", None)
        return replace(small_config, train=replace(small_config.train, **settings))

    return change


def picture_folder(path: Path, count: int, *, first: int = 0, side: int = 40) -> Path:
    """Different images, each with a caption beside it."""
    path.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        random = np.random.default_rng(number)
        coarse = random.integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side * 4 // 3, side)).save(path / f"{number:02}.jpg", quality=95)
        words = random.choice(["red", "green", "blue", "old", "new", "cat", "dog", "tree"], 3)
        (path / f"{number:02}.txt").write_text(f"{' '.join(words)} number {number}")
    return path


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length one."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def opened(source: object, image_size: int = 16, **settings) -> Data:
    """A source as training opens it."""
    return finished(open_source(DataConfig(source=str(source), workers=0, **settings), image_size))


def as_flags(settings: dict) -> list[str]:
    flags = []
    for name, value in settings.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def lapclip(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Runs the command in a process of its own, as a person would, on a pipe."""
    options = {"capture_output": True, "text": True, "timeout": 120, "env": environment()} | options
    return subprocess.run(command(*arguments), **options)


@pytest.fixture
def call(capfd, monkeypatch):
    """Runs the command in this process, which has torch loaded already; for what needs no process of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv(
        "PATH", os.path.dirname(sys.executable), prepend=os.pathsep
    )  # as in an activated environment

    def run(*arguments: str) -> subprocess.CompletedProcess:
        capfd.readouterr()
        code = run_command(list(arguments))
        said = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return run


@pytest.fixture
def quick(monkeypatch):
    """A bench that measures for a moment only."""
    from lapclip.autotune import measure as race
    from lapclip.autotune import plans
    from lapclip.bench import show, steps
    from lapclip.bench.ops import bandwidth_gbs, gemm_gflops, time_ops
    from lapclip.bench.sizes import study_sizes
    from lapclip.train import prepare

    monkeypatch.setattr(plans, "MAX_OTHER_CORES", 1000)  # other programs of whoever runs the tests
    monkeypatch.setattr(steps, "RACE_SECONDS", 0.3)
    monkeypatch.setattr(steps, "PATIENCE", 0.02)
    monkeypatch.setattr(prepare, "NUM_CAPTIONS_READ", 300)  # of what lapclip draws, for the tokenizer
    monkeypatch.setattr(race, "BLOCK_SECONDS", 0.01)
    monkeypatch.setattr(steps, "gemm_gflops", partial(gemm_gflops, sizes=(64,), budget_seconds=0.02))
    monkeypatch.setattr(
        steps, "bandwidth_gbs", partial(bandwidth_gbs, max_bytes=1 << 20, budget_seconds=0.02)
    )
    monkeypatch.setattr(show, "time_ops", partial(time_ops, sizes=(8,)))
    monkeypatch.setattr(show, "study_sizes", partial(study_sizes, names=("nano",)))


def begin(folder: Path, *program: str, **options) -> subprocess.Popen:
    """A program in a process of its own, in a folder that has a cache of its own."""
    own = environment(LAPCLIP_CACHE=str(folder / "cache"))
    return subprocess.Popen(program, cwd=folder, env=own, text=True, **options)


@contextmanager
def being_trained(folder: Path, **settings) -> Iterator[subprocess.Popen]:
    """A run `live` that is trained for as long as its tests take."""
    flags = as_flags(SMALL | {"run": "live", "steps": 1_000_000} | settings)
    events, log = folder / "runs" / "live" / "events.jsonl", folder / "train.log"
    with log.open("w") as said:
        process = begin(folder, *command("train", *flags), stdout=said, stderr=said)

    def is_under_way() -> bool:
        assert process.poll() is None, log.read_text()
        return {Evaluated, Inspected} <= {type(event) for event in read_events(events)}

    try:
        wait_for(is_under_way, seconds=150)
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Until something has happened in another process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lapclip", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "80", **more}
