"""Which kind of model a path leads to, by names of files; without torch, so that a wrong path is refused at once."""

from pathlib import Path
from typing import Literal

from lapclip.errors import UserError, shortened, suggest
from lapclip.runs.run import RUNS, is_run

MODEL = "model.safetensors"  # the weights of a checkpoint
OWN, HUGGING_FACE = "model.json", "config.json"  # what describes a model folder, ours or transformers'


def kind_of_model(path: Path) -> Literal["run", "checkpoint", "own", "hugging_face"]:
    """What `load` would open; a UserError where there is nothing."""
    try:
        if is_run(path) or is_run(RUNS / path):
            return "run"
        if (path / OWN).is_file():
            return "own"
        if (path / HUGGING_FACE).is_file():
            return "hugging_face"
        if (path / MODEL).is_file() and (path.absolute().parent.parent / "config.toml").is_file():
            return "checkpoint"
        raise nothing_there(path)
    except OSError as error:  # a name that is too long, a folder without permission
        what = f"`{shortened(str(path))}`: {(error.strerror or str(error)).lower()}"
        raise UserError(f"cannot open {what}", hint="name a readable folder") from None


def nothing_there(path: Path) -> UserError:
    """Names what could be loaded instead: the runs here, and models beside the path."""
    if path.is_file():
        hint = f"name its folder: `{path.parent}`"
        return UserError(f"`{path}` is a file, but a model is a folder", hint=hint)
    known = [
        child.name if folder == RUNS else str(child)
        for folder in (path.parent, RUNS)
        for child in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if child != path
        and any((child / name).is_file() for name in ("config.toml", OWN, HUGGING_FACE, MODEL))
    ]
    there = "; there are " + ", ".join(f"`{name}`" for name in known[:5]) if known else "; there is none here"
    shown = shortened(str(path))
    what = f"`{shown}` holds no model" if path.is_dir() else f"there is no model `{shown}`"
    hint = "name a run, a checkpoint, a model folder, or a Hugging Face CLIP folder"
    return UserError(f"{what}{suggest(str(path), known) or there}", hint=hint)
