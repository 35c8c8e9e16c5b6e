"""Reads the numbers, tokenizer and weights of any run or model folder, checked before memory is allocated for them.

A folder is untrusted: nothing in it is executed, and every fault is a `UserError`.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lapclip import files
from lapclip.data.tokenizer import Tokenizer, load_tokenizer
from lapclip.errors import UserError, shortened
from lapclip.machine.hardware import memory_limit_bytes
from lapclip.model.clip import CLIP, Size, count_parameters
from lapclip.weights.checkpoint import PROGRESS, shape_difference

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
# Beyond any CLIP: larger numbers are a mistake or an attack.
MAX = {
    "width": 8192, "depth": 128, "heads": 256, "image_size": 1024, "patch_size": 256, "text_length": 8192,
    "embedding": 16384, "vocab_size": 2_000_000,
}  # fmt: skip
MAX_GROWTH = 1000  # of a text by normalization
MAX_PATCHES = 16384  # attention grows with their square
IGNORED = ("position_ids",)  # 0, 1, 2, ..., written by old versions of transformers
FLOATS = ("F64", "F32", "F16", "BF16")
Opened = tuple[Any, dict[str, tuple[int, ...]]]  # a file of weights, and the shape of each
COPY_AGAIN = "copy the whole folder again"


@dataclass(frozen=True)
class Pretrained:
    """A model that was read from a folder."""

    name: str
    model: CLIP
    tokenizer: Tokenizer
    weights: Path | None  # a file that holds the same weights under the same names
    is_aligned: bool = True  # whether its projections are trained


def read_json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise not_readable(path, why) from None


def not_readable(path: Path, why: str) -> UserError:
    is_checkpoint = (path.parent / PROGRESS).exists()
    hint = f"remove `{path.parent}` to use the checkpoint before it" if is_checkpoint else COPY_AGAIN
    return UserError(f"cannot read `{path}`: {shortened(why)}", hint=hint)


def refused(folder: Path, why: str, hint: str = COPY_AGAIN) -> UserError:
    return UserError(f"`{folder}` cannot be loaded: {why}", hint=hint)


def check_numbers(folder: Path, size: Size, vocab_size: Any) -> None:
    """Refuses numbers that are no plausible shape of a model."""
    numbers = {
        **{f"{name} of the {tower} tower": (name, getattr(getattr(size, tower), name))
           for tower in ("image", "text") for name in ("width", "depth", "heads")},
        **{name: (name, getattr(size, name)) for name in ("image_size", "patch_size", "text_length", "embedding")},
        "vocab_size": ("vocab_size", vocab_size),
    }  # fmt: skip
    for said, (name, value) in numbers.items():
        if type(value) is not int or not 1 <= value <= MAX[name]:
            raise refused(folder, f"{said} is {shortened(repr(value), 40)}, not from 1 to {MAX[name]:,}")
    for shape in (size.image, size.text):
        if shape.width % shape.heads:
            raise refused(folder, f"a width of {shape.width} is not a multiple of {shape.heads} heads")
    for encoder in (size.image_encoder, size.text_encoder):
        if encoder is not None and (problem := encoder.problem()):
            raise refused(folder, problem)
    side, patch = size.image_size, size.patch_size
    if side % patch:
        raise refused(folder, f"image size {side} is not a multiple of patch size {patch}")
    if (num_patches := (side // patch) ** 2) > MAX_PATCHES:
        raise refused(folder, f"{num_patches:,} patches per image are more than {MAX_PATCHES:,}")
    if size.text_length < 3:
        raise refused(folder, f"a text length of {size.text_length} tokens is too short")


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, if it can encode any text and does not make texts enormous."""
    tokenizer = load_tokenizer(folder / TOKENIZER)
    normalizer = tokenizer.pipeline.normalizer
    if normalizer is not None and growth(json.loads(normalizer.__getstate__())) > MAX_GROWTH:
        raise refused(folder, f"its `{TOKENIZER}` would make texts more than {MAX_GROWTH:,} times as long")
    try:
        tokenizer.pipeline.encode("a \N{SNOWMAN}", add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        why = shortened(str(error))
        raise refused(folder, f"its `{TOKENIZER}` cannot encode every text: {why}") from None
    return tokenizer


def growth(normalizer: dict[str, Any]) -> int:
    """The maximum factor by which this makes a text longer."""
    inner = math.prod(growth(step) for step in normalizer.get("normalizers", ()))
    return inner * (1 + len(normalizer.get("content", normalizer.get("prepend", ""))))


def check_ids(folder: Path, tokenizer: Tokenizer, ids: Iterable[Any], vocab_size: int) -> None:
    if not all(type(id) is int and 0 <= id < vocab_size for id in [*ids, tokenizer.highest_id]):
        highest = f"ids up to {tokenizer.highest_id:,}, the model only {vocab_size:,} tokens"
        raise refused(folder, f"its `{TOKENIZER}` has {highest}")


def read_run(folder: Path, size: Size) -> Tokenizer:
    """The tokenizer of a run whose settings describe a model of this size."""
    tokenizer = read_tokenizer(folder)
    check_numbers(folder, size, tokenizer.vocab_size)
    check_ids(folder, tokenizer, [tokenizer.start, tokenizer.end, tokenizer.pad], tokenizer.vocab_size)
    return tokenizer


def read_model(
    folder: Path, size: Size, vocab_size: int, has_bias: bool, recipe: dict[str, Sequence[str]] | None = None
) -> CLIP:
    """The model with its weights in fp32; `recipe` says which tensors of the file are concatenated to one of ours."""
    with opened_weights(folder) as opened:  # once: a running training removes old checkpoints
        check_stored(folder, opened, size, vocab_size, has_bias)
        with torch.random.fork_rng(devices=[]):
            model = CLIP(size, vocab_size=vocab_size, has_bias=has_bias)
        read_weights(folder, opened, model, recipe)
    return model


def check_stored(folder: Path, opened: Opened, size: Size, vocab_size: int, has_bias: bool) -> None:
    """Refuses a model that is larger than its file: the file limits the memory, whatever is said about the model."""
    num_stored = sum(map(math.prod, opened[1].values()))
    expected = count_parameters(size, vocab_size=vocab_size, has_bias=has_bias)
    if expected > num_stored:
        raise refused(folder, f"it describes {expected:,} parameters, and `{WEIGHTS}` holds {num_stored:,}")
    refuse_too_large(folder, 4 * expected)


def load_weights(folder: Path, model: CLIP) -> None:
    with opened_weights(folder) as opened:
        read_weights(folder, opened, model)


def read_weights(
    folder: Path, opened: Opened, model: CLIP, recipe: dict[str, Sequence[str]] | None = None
) -> None:
    """Reads a folder's weights into a model of the same shape, one tensor at a time; all of them are finite."""
    ours = model.state_dict()
    sources = recipe or {name: (name,) for name in ours}
    part_shapes = {
        part: shape_of_part(part, ours[name], parts) for name, parts in sources.items() for part in parts
    }
    stored, shapes = opened
    with torch.no_grad():
        if difference := shape_difference(shapes, part_shapes):
            raise refused(folder, f"`{WEIGHTS}` is of another model: {difference}")
        for name, parts in sources.items():
            tensors = [torch.atleast_1d(stored.get_tensor(part)) for part in parts]
            joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
            ours[name].copy_(joined.reshape(ours[name].shape))
    # A sum is finite only if all its terms are, and takes a tenth of the time of looking at each.
    if not all(bool(tensor.sum().isfinite()) for tensor in [*ours.values(), model.scale()]):
        raise refused(folder, f"`{WEIGHTS}` holds values that are not finite")


@contextmanager
def opened_weights(folder: Path) -> Iterator[Opened]:
    """The weights of a folder, open, and the shape of each: floats, and not more than fit into memory."""
    file = folder / WEIGHTS
    try:
        with files.open_regular(file) as opened:  # the library would wait for a pipe's writer
            refuse_too_large(folder, os.fstat(opened.fileno()).st_size)  # a sparse file can claim any size
        with safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if not name.endswith(IGNORED)]  # noqa: SIM118  # it is no dict
            slices = {name: stored.get_slice(name) for name in names}
            for name, part in slices.items():
                if part.get_dtype() not in FLOATS:
                    raise refused(folder, f"`{shortened(name)}` holds {part.get_dtype()}, not floats")
            yield stored, {name: tuple(part.get_shape()) for name, part in slices.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise not_readable(file, getattr(error, "strerror", None) or str(error)) from None


def load_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` file; whatever else it holds is refused, and nothing in it is executed."""
    try:
        with files.open_regular(file) as opened:
            refuse_too_large(file, os.fstat(opened.fileno()).st_size)
            stored = torch.load(opened, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file it raises nearly anything
        raise not_readable(file, str(error)) from None
    if not isinstance(stored, dict) or not all(isinstance(each, Tensor) for each in stored.values()):
        raise refused(file, "it is not a table of tensors by name")
    return stored


def refuse_too_large(folder: Path, num_bytes: int) -> None:
    if num_bytes > memory_limit_bytes():
        what = f"it needs {num_bytes / 1e9:,.0f} GB of memory, more than is available"
        raise refused(folder, what, hint="choose a smaller model")


def shape_of_part(part: str, ours: Tensor, parts: Sequence[str]) -> tuple[int, ...]:
    """The expected shape in the file of one of the tensors that ours is concatenated from."""
    if part == "logit_scale":
        return ()
    if part.endswith("patch_embedding.weight"):  # of a convolution, where ours is a matrix
        side = math.isqrt(ours.shape[1] // 3)
        return (ours.shape[0], 3, side, side)
    return (ours.shape[0] // len(parts), *ours.shape[1:])
