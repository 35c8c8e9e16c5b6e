"""Model folders as lapclip writes them: `model.json`, `tokenizer.json`, `model.safetensors`, maybe `words.txt`."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from lapclip.data.decode import RESIZES
from lapclip.data.tokenizer import WORDS
from lapclip.errors import UserError, shortened
from lapclip.files import atomic_path, writing
from lapclip.model.blocks import ACTIVATIONS
from lapclip.model.clip import CLIP, Size
from lapclip.weights import reading
from lapclip.weights.checkpoint import write_tensors
from lapclip.weights.reading import TOKENIZER, WEIGHTS, Pretrained, read_json, refused

DESCRIPTION = "model.json"


@dataclass(frozen=True)
class Tokens:
    start: int | None  # SigLIP's texts have none
    end: int
    pad: int


@dataclass(frozen=True)
class Description:
    """The content of `model.json`: everything but the weights and the vocabulary."""

    name: str
    fingerprint: str
    size: Size
    vocab_size: int
    has_bias: bool
    tokens: Tokens
    templates: tuple[str, ...] | None = None


def load_model_folder(folder: Path) -> Pretrained:
    """A model that lapclip wrote, with the name it had."""
    try:
        about = msgspec.convert(read_json(folder / DESCRIPTION), Description)
    except msgspec.ValidationError as error:
        raise refused(folder, f"its `{DESCRIPTION}` is not valid: {shortened(str(error))}") from None
    reading.check_numbers(folder, about.size, about.vocab_size)
    for what, known in (("activation", ACTIVATIONS), ("resize", RESIZES)):
        if (value := getattr(about.size, what)) not in known:
            raise refused(folder, f"its `{what}` is `{shortened(value)}`, which is not known")
    own = reading.read_tokenizer(folder).with_ids(**vars(about.tokens), is_full=about.size.siglip)
    reading.check_ids(folder, own, about.vocab_size)
    model = reading.read_model(folder, about.size, about.vocab_size, about.has_bias)
    return Pretrained(shortened(about.name), model, own, folder / WEIGHTS, templates=about.templates)


def write_model_folder(folder: Path, whole: Pretrained, fingerprint: str) -> None:
    """Whole or not at all; the same model is left as it is, and anything else is never overwritten."""
    if not folder.name or "\0" in folder.name:
        raise UserError(f"`{folder}` is not a valid name for a folder", hint="choose another name")
    with writing(folder):
        is_used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_used and not (folder / DESCRIPTION).is_file():
        raise UserError(f"`{folder}` already exists and is not a model folder", hint="choose another folder")
    if is_used and read_json(folder / DESCRIPTION).get("fingerprint") != fingerprint:
        hint = "choose another folder, or remove that one"
        raise UserError(f"`{folder}` already holds another model", hint=hint)
    if is_used:
        return
    model, tokenizer = whole.model, whole.tokenizer
    tokens, has_bias = Tokens(tokenizer.start, tokenizer.end, tokenizer.pad), model.bias is not None
    shape = fingerprint, model.size, model.vocab_size, has_bias, tokens
    about = Description(whole.name, *shape, whole.templates)
    with atomic_path(folder, is_folder=True) as beside:
        write_weights(beside / WEIGHTS, model, whole.weights)
        (beside / TOKENIZER).write_text(tokenizer.to_json(), "utf-8")
        if tokenizer.words is not None:
            (beside / WORDS).write_text("\n".join(sorted(tokenizer.words)), "utf-8")
        content = asdict(about) | {"size": about.size.described()}
        (beside / DESCRIPTION).write_text(json.dumps(content, indent=2), "utf-8")


def write_weights(file: Path, model: CLIP, source: Path | None) -> None:
    """Links the file they came from if it still holds them: a checkpoint is replaced but never modified."""
    ours = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    if source is not None:
        with contextlib.suppress(OSError, SafetensorError):
            os.link(os.path.realpath(source), file)
            with safe_open(file, framework="pt") as stored:
                same = (torch.equal(stored.get_tensor(n).to(own.dtype), own) for n, own in ours.items())
                if set(stored.keys()) == ours.keys() and all(same):
                    return
        file.unlink(missing_ok=True)
    write_tensors(ours, file)
