"""Model folders as lapclip writes them: `model.json`, `tokenizer.json`, `model.safetensors`, and nothing else."""

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError, shortened
from lapclip.files import atomic_path, writing
from lapclip.model.blocks import ACTIVATIONS
from lapclip.model.clip import CLIP, Size
from lapclip.model.towers import Shape
from lapclip.weights.checkpoint import write_tensors
from lapclip.weights.reading import (
    TOKENIZER,
    WEIGHTS,
    Pretrained,
    check_ids,
    check_numbers,
    read_json,
    read_model,
    read_tokenizer,
    refused,
)

DESCRIPTION = "model.json"
SWITCHES = ("pre_norm", "patch_bias", "projection_bias")


def describe(name: str, model: CLIP, tokenizer: Tokenizer, fingerprint: str) -> str:
    """The content of `model.json`: everything but the weights and the vocabulary."""
    content = {
        "name": name,
        "fingerprint": fingerprint,
        "size": asdict(model.size),
        "vocab_size": model.text.embed.num_embeddings,
        "has_bias": model.bias is not None,
        "tokens": {"start": tokenizer.start, "end": tokenizer.end, "pad": tokenizer.pad},
    }
    return json.dumps(content, indent=2)


def load_model_folder(folder: Path) -> Pretrained:
    """A model that lapclip wrote, with the name it had."""
    about = read_json(folder / DESCRIPTION)
    try:
        size = Size(
            image=Shape(**about["size"]["image"]),
            text=Shape(**about["size"]["text"]),
            **{key: value for key, value in about["size"].items() if key not in ("image", "text")},
        )
        vocab_size, tokens = about["vocab_size"], about["tokens"]
        start, end, pad = tokens["start"], tokens["end"], tokens["pad"]
        has_bias, name = about["has_bias"] is True, str(about["name"])
    except (KeyError, TypeError, AttributeError) as error:
        raise refused(folder, f"its `{DESCRIPTION}` lacks something: {shortened(str(error))}") from None
    check_numbers(folder, size, vocab_size)
    has_switches = all(type(getattr(size, name)) is bool for name in SWITCHES)
    if not has_switches or size.activation not in list(ACTIVATIONS):
        raise refused(folder, f"its `{DESCRIPTION}` has an unknown setting in `size`")
    tokenizer = read_tokenizer(folder)
    check_ids(folder, tokenizer, [start, end, pad], vocab_size)
    own = Tokenizer(tokenizer.pipeline, start=start, end=end, pad=pad)
    model = read_model(folder, size, vocab_size, has_bias)
    return Pretrained(shortened(name), model, own, weights=folder / WEIGHTS)


def write_model_folder(
    folder: Path, name: str, model: CLIP, tokenizer: Tokenizer, fingerprint: str, weights: Path | None
) -> None:
    """Whole or not at all; the same model is left as it is, and anything else is never overwritten."""
    if not folder.name or "\0" in folder.name:
        raise UserError(f"`{folder}` is not a valid name for a folder", hint="choose another name")
    with writing(folder):
        is_used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_used:
        refuse_other_content(folder, fingerprint)
        return
    with atomic_path(folder, is_folder=True) as beside:
        write_weights(beside / WEIGHTS, model, weights)
        (beside / TOKENIZER).write_text(tokenizer.to_json(), "utf-8")
        (beside / DESCRIPTION).write_text(describe(name, model, tokenizer, fingerprint), "utf-8")


def refuse_other_content(folder: Path, fingerprint: str) -> None:
    if not (folder / DESCRIPTION).is_file():
        raise UserError(f"`{folder}` exists already and is not a model folder", hint="choose another folder")
    if read_json(folder / DESCRIPTION).get("fingerprint") != fingerprint:
        hint = "choose another folder, or remove that one"
        raise UserError(f"`{folder}` holds another model already", hint=hint)


def write_weights(file: Path, model: CLIP, source: Path | None) -> None:
    """Links the file they came from if it still holds them: a checkpoint is replaced but never modified."""
    if source is not None:
        with contextlib.suppress(OSError, SafetensorError):
            os.link(os.path.realpath(source), file)
            if holds_weights(file, model):
                return
        file.unlink(missing_ok=True)
    write_tensors({name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}, file)


def holds_weights(file: Path, model: CLIP) -> bool:
    """Whether a file has exactly a model's weights."""
    with safe_open(file, framework="pt") as stored:
        ours = model.state_dict()
        return set(stored.keys()) == ours.keys() and all(
            torch.equal(stored.get_tensor(name).to(tensor.dtype), tensor.cpu())
            for name, tensor in ours.items()
        )
