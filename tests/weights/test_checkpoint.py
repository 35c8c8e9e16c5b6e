"""Checkpoints: whole or not at all, without pickle, and only for the model they were made of."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import environment
from made_events import RECALL

from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.pack import folder_bytes
from lapclip.errors import UserError
from lapclip.model.clip import build_model
from lapclip.step.optim import build_optimizer
from lapclip.weights import checkpoint
from lapclip.weights.checkpoint import Progress
from lapclip.weights.reading import load_weights

NANO = ModelConfig(size="nano", image_size=16)


def model_and_optimizer(seed: int = 0, config: ModelConfig = NANO, vocab_size: int = 40):
    model = build_model(config, vocab_size=vocab_size, has_bias=False, seed=seed)
    return model, build_optimizer(model, TrainConfig(lr=1e-3))


def trained(seed: int = 0):
    model, optimizer = model_and_optimizer(seed)
    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    image, text = model(images, torch.ones(2, 5, dtype=torch.long), torch.tensor([2, 4]))
    (model.scale() * (image * text).sum()).backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int, best: int | None = None, made=None) -> Path:
    folder.mkdir(exist_ok=True)
    return checkpoint.save(folder, *(made or trained()), Progress(step=step, best_step=best))


def run(program: str) -> subprocess.CompletedProcess:
    arguments = [sys.executable, "-c", program]
    return subprocess.run(arguments, capture_output=True, text=True, env=environment(), check=True)


def test_everything_comes_back_to_the_bit(tmp_path):
    model, optimizer = trained()
    progress = Progress(7, 1.25, 56, 5, 0.1 + 0.2, 5, RECALL)
    path = checkpoint.save(tmp_path, model, optimizer, progress)
    other, its_optimizer = model_and_optimizer(seed=9)
    load_weights(path, other)
    checkpoint.load_optimizer(path, other, its_optimizer)
    assert checkpoint.load_progress(path) == progress
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files == {"model.safetensors", "state/optimizer.safetensors", "state/progress.json"}
    pairs = ((model, optimizer), (other, its_optimizer))
    before, after = (checkpoint.optimizer_tensors(*pair) for pair in pairs)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_the_last_two_and_the_best_are_kept(tmp_path):
    for step in (1, 2, 3, 999_999, 1_000_000):
        save(tmp_path, step, best=2 if step >= 2 else None)
    (tmp_path / "step-2000000 copy").mkdir()
    names = [path.name for path in checkpoint.all_checkpoints(tmp_path)]
    assert names == ["step-000002", "step-999999", "step-1000000"]
    assert checkpoint.latest(tmp_path).name == (tmp_path / "latest").read_text() == "step-1000000"
    assert checkpoint.best(tmp_path).name == "step-000002"


@pytest.mark.parametrize("other", [{"config": ModelConfig(size="nano", image_size=32)}, {"vocab_size": 41}])
def test_a_checkpoint_of_another_shape_names_what_differs(tmp_path, other):
    path = save(tmp_path, 1)
    model, _ = model_and_optimizer(**other)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match="another model") as caught:
        load_weights(path, model)
    assert "image.positions" in caught.value.message or "text.embed.weight" in caught.value.message
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "nothing half loaded"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8 + b"{}"])
def test_a_damaged_file_is_named_with_a_way_back(tmp_path, damage):
    path = save(tmp_path, 1)
    (path / "model.safetensors").write_bytes(damage)
    with pytest.raises(UserError, match=r"model\.safetensors") as caught:
        load_weights(path, model_and_optimizer()[0])
    assert "remove" in caught.value.hint
    for progress in ("{", "[]", '{"step": "5"}', '{"seconds": NaN}', '{"best_step": -1}', "[" * 5000):
        (path / "state" / "progress.json").write_text(progress)
        with pytest.raises(UserError, match=r"progress\.json") as caught:
            checkpoint.load_progress(path)
        assert f"remove `{path}`" in caught.value.hint, "the whole checkpoint, not a part of it"


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)  # so that forking is safe
from test_checkpoint import save, trained

def die_at(count):
    # Python's own report of what is done to the disk decides the moment, not a patched function.
    seen = 0
    def watch(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and "step" in str(arguments):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

for count in range(1, 100):
    if os.fork() == 0:
        folder = Path(str(count))
        made = trained()
        for step in {before}:
            save(folder, step, best=1, made=made)
        die_at(count)
        save(folder, {step}, best=1, made=made)
        os._exit(0)
    _, status = os.wait()
    if status == 0:
        break
print(count)
"""


@pytest.mark.prove
@pytest.mark.parametrize(("before", "step"), [((1, 2), 3), ((1,), 1)])
def test_a_kill_at_any_point_of_a_save_leaves_a_loadable_run(before, step):
    """Killed with SIGKILL at the first, second, third ... thing a save does to the disk, until one save survives.

    Of a new step, and of the only one again, as the end of a run does.
    """
    program = KILLED.format(tests=str(Path(__file__).parent), before=before, step=step)
    done = run(program)
    num_moments = int(done.stdout)
    assert 10 < num_moments < 90
    found = []
    for count in range(1, num_moments + 1):
        folder = Path(str(count))
        path = checkpoint.latest(folder)
        model, optimizer = model_and_optimizer(seed=5)
        load_weights(path, model)
        checkpoint.load_optimizer(path, model, optimizer)
        found.append(checkpoint.load_progress(path).step)
        assert path.name == f"step-{found[-1]:06d}"
        assert checkpoint.best(folder).name == "step-000001"
        if list(folder.glob(".*")) and count % 3 == 0:
            save(folder, step, best=1)  # and the next save clears what the kill left behind
            assert not list(folder.glob(".*")), list(folder.iterdir())
    assert found == sorted(found), "the old one, and from some moment on the new one"
    assert set(found) == {before[-1], step}


@pytest.mark.slow
def test_a_full_disk_is_said_and_keeps_the_last_checkpoint(tmp_path):
    """A real failed write: the system refuses files over a limit, as it does when a disk is full."""
    program = (
        f"import sys, signal; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; from test_checkpoint import save, trained; from lapclip.errors import UserError\n"
        "import resource; made = trained(); save(Path('c'), 1, made=made)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "try:\n    save(Path('c'), 2, made=made)\n"
        "except UserError as error:\n    print(error.message)\n"
    )
    done = run(program)
    assert "cannot write" in done.stdout and "step-000002" in done.stdout, done.stderr
    assert checkpoint.latest(Path("c")).name == "step-000001" and not list(Path("c").glob(".*"))


def test_a_disk_that_is_too_small_is_refused_before_training(tmp_path):
    with pytest.raises(UserError, match="GB left"):
        checkpoint.check_space(tmp_path, 10**15)


@pytest.mark.slow
def test_saving_does_not_hold_a_second_copy(tmp_path):
    """Peak memory of a process that saves 400 MB grows by far less than 400 MB."""
    program = (
        "import torch, resource, sys; from torch import nn; from pathlib import Path\n"
        "from lapclip.weights import checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)\n"
        "model = nn.Linear(5000, 6000, bias=False); optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "model.weight.grad = torch.ones_like(model.weight); optimizer.step(); model.weight.grad = None\n"
        "before = peak(); checkpoint.save(Path('c'), model, optimizer, checkpoint.Progress(1)); print(peak() - before)\n"
    )
    Path("c").mkdir()
    assert int(run(program).stdout) < 150e6
    assert folder_bytes(Path("c/step-000001")) > 350e6
