"""Weights and training state in and out of `checkpoints/step-000500/`, without pickle.

A killed process leaves either the old checkpoints or the new one.
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from lapclip.errors import UserError, shortened
from lapclip.files import atomic_path, open_regular, read_bounded, read_json, remove, write_atomically
from lapclip.runs.events import AboveZero, Count, Seconds, Share, is_recall

MODEL = "model.safetensors"
OPTIMIZER = "state/optimizer.safetensors"
PROGRESS = "state/progress.json"
INTERPOLATED = "step-*-alpha-*"  # weights between the start and a checkpoint, without training state
NUM_KEPT = 2  # newest checkpoints, besides the best and the start


@dataclass
class Progress:
    """How far a run is. Order, patches and schedule follow from it and the seed: there is no other random state."""

    step: Count = 0
    seconds: Seconds = 0.0  # of training
    num_pairs_seen: Count = 0
    last_eval_step: Count = 0
    last_eval_seconds: Seconds = 0.0
    best_step: Count | None = None
    best_recall: dict[str, Any] | None = None
    highest: Share | None = None  # mean recall so far; `best` may be a later checkpoint with the same recall
    best_loss: float | None = None  # of validation
    loss_scale: AboveZero = 2.0**16  # of fp16, where small gradients would underflow
    last_overflow_step: Count = 0


def save(folder: Path, model: nn.Module, optimizer: Optimizer | None, progress: Progress) -> Path:
    """Writes a checkpoint and makes it the latest; removes older ones except the newest, the best and the start.

    Before the first step there is no optimizer state.
    """
    target = folder / name_of(progress.step)
    with atomic_path(target, is_folder=True) as beside:  # the end of a run saves the same step again
        (beside / "state").mkdir()
        write_tensors(model.state_dict(), beside / MODEL)
        if optimizer is not None:
            write_tensors(optimizer_tensors(model, optimizer), beside / OPTIMIZER)
        (beside / PROGRESS).write_text(json.dumps(asdict(progress)), "utf-8")
    write_atomically(folder / "latest", target.name)
    if progress.best_step is not None:
        write_atomically(folder / "best", name_of(progress.best_step))
    prune(folder)
    return target


def save_start(folder: Path, model: nn.Module, *, is_kept: bool) -> None:
    """Writes the weights that a run starts from; `is_kept` for the interpolation at its end."""
    start = save(folder, model, None, Progress())
    if is_kept:
        write_atomically(folder / "start", start.name)


def keep_interpolated(folder: Path, model: nn.Module, trained: Path, alpha: float) -> None:
    """Makes weights between the start and a checkpoint the best; the checkpoints stay as they are."""
    target = folder / f"{trained.name}-alpha-{alpha:g}" if alpha < 1 else trained
    if alpha < 1:
        with atomic_path(target, is_folder=True) as beside:
            write_tensors(model.state_dict(), beside / MODEL)
    write_atomically(folder / "best", target.name)


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """OSError when there is no room; nothing is copied."""
    try:
        save_file(dict(tensors), file)
    except SafetensorError as error:
        raise OSError(str(error)) from None


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """AdamW's state by parameter name: `exp_avg/text.embed.weight` and so on; nothing is copied."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = [(names[id(parameter)], state) for parameter, state in optimizer.state.items()]
    return {f"{kind}/{name}": tensor for name, state in states for kind, tensor in state.items()}


def prune(folder: Path) -> None:
    """Removes all but the newest checkpoints, the best and the start, and what a killed process left incomplete."""
    checkpoints = all_checkpoints(folder)
    kept = {*checkpoints[-NUM_KEPT:], pointed_at(folder, "best"), pointed_at(folder, "start")}
    for path in folder.glob(".*writing*"):
        remove(path)
    for path in (*checkpoints, *folder.glob(INTERPOLATED)):
        if path not in kept:  # renamed first: what is called a checkpoint is always complete
            remove(path.rename(path.with_name(f".{path.name}.writing")))


def all_checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def pointed_at(folder: Path, pointer: str) -> Path | None:
    try:
        path = folder / read_bounded(folder / pointer).decode("utf-8").strip()
    except (OSError, ValueError):
        return None
    is_known = path in all_checkpoints(folder) or path in folder.glob(INTERPOLATED)
    return path if is_known and path.is_dir() else None


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, by its number: a process may be killed before it writes the pointer."""
    return next(reversed(all_checkpoints(folder)), None)


def best(folder: Path) -> Path | None:
    """The checkpoint with the best recall, or the newest if none was evaluated."""
    return pointed_at(folder, "best") or latest(folder)


def load_progress(checkpoint: Path) -> Progress:
    try:
        progress = msgspec.convert(read_json(checkpoint / PROGRESS), Progress)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise unreadable(checkpoint, PROGRESS, error) from None
    return progress if is_recall(progress.best_recall) else replace(progress, best_recall=None)


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    file, into = checkpoint / OPTIMIZER, optimizer_tensors(model, optimizer)
    try:
        open_regular(file).close()  # the library would wait for a pipe's writer
        with safe_open(file, framework="pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118  # no dict
            if difference := shape_difference(shapes, {name: tuple(one.shape) for name, one in into.items()}):
                hint = "use the `config.toml` and `tokenizer.json` it was trained with"
                raise UserError(f"`{file}` holds a model of another shape: {difference}", hint=hint)
            with torch.no_grad():
                for name, tensor in into.items():
                    tensor.copy_(stored.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise unreadable(checkpoint, OPTIMIZER, error) from None


def shape_difference(stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> str:
    """The first tensors whose name or shape differs; empty if none."""
    problems = [f"`{name}` is missing" for name in expected if name not in stored]
    problems += [f"`{shortened(name)}` is not in this model" for name in stored if name not in expected]
    differing = [(name, stored[name], expected[name]) for name in expected if name in stored]
    problems += [f"`{name}` is {list(a)}, not {list(b)}" for name, a, b in differing if a != b]
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return f"{', '.join(problems[:3])}{more}"


def unreadable(checkpoint: Path, file: str, error: Exception) -> UserError:
    hint = f"remove `{checkpoint}` to use the checkpoint before it"
    return UserError(f"cannot read `{checkpoint / file}`: {error}", hint=hint)


def check_space(folder: Path, num_parameters: int) -> None:
    """Refuses before training if the disk cannot hold the checkpoints of a run."""
    # Weights and two moments, 4 bytes each; the last two, the best, and the one being written. From a pretrained
    # model also the weights at the start, and interpolated ones.
    needed = (4 * 12 + 2 * 4) * num_parameters
    free = shutil.disk_usage(folder).free
    if free < needed:
        hint = "free some space, train in a folder on another disk, or choose a smaller `--size`"
        what = f"checkpoints need up to {needed / 1e9:.1f} GB, but `{folder}` has {free / 1e9:.1f} GB left"
        raise UserError(what, hint=hint)
