"""Reads the numbers, tokenizer and weights of any run or model folder, checked before memory is allocated for them.

A folder is untrusted: nothing in it is executed, and every fault is a `UserError`.
"""

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lapclip import files
from lapclip.data.tokenizer import MAX_BYTES, Tokenizer, load_tokenizer, openai_tokenizer
from lapclip.errors import UserError, reason_for, shortened
from lapclip.machine.hardware import memory_limit_bytes
from lapclip.model.clip import CLIP, Size, count_parameters
from lapclip.model.lora import ADAPTER_DOWN
from lapclip.weights import onnx
from lapclip.weights.checkpoint import PROGRESS, shape_difference
from lapclip.weights.layouts import OURS, Layout

WEIGHTS, TOKENIZER, VOCABULARY = "model.safetensors", "tokenizer.json", ("vocab.json", "merges.txt")
# Beyond any CLIP: larger numbers are a mistake or an attack.
MAX = {
    "width": 8192, "hidden": 65536, "depth": 128, "heads": 256, "image_size": 1024, "patch_size": 1024,
    "text_length": 8192, "embedding": 16384, "vocab_size": 2_000_000,
}  # fmt: skip
MAX_GROWTH = 1000  # of a text by normalization
MAX_PATCHES = 16384  # attention grows with their square
# Whole numbers: 0, 1, 2, ..., written by old versions of transformers; and what OpenAI's files say of themselves.
OPENAI_SIGN = ("input_resolution", "context_length", "vocab_size")
IGNORED = ("position_ids", *OPENAI_SIGN)
FLOATS = ("F64", "F32", "F16", "BF16")
COPY_AGAIN = "copy the whole folder again"
SCRIPT_HINT = (
    "if you trust it, write its weights as safetensors: `safetensors.torch.save_file({k: v.contiguous() for k, v in "
    "torch.jit.load('ViT-B-32.pt', 'cpu').state_dict().items()}, 'ViT-B-32.safetensors')`"
)


@dataclass(frozen=True)
class Opened:
    """A file of weights."""

    name: str
    get: Callable[[str], Tensor]
    shapes: dict[str, tuple[int, ...]]
    ignored: Set[str]  # names of others that it holds


@dataclass(frozen=True)
class Pretrained:
    """A model that was read from a folder."""

    name: str
    model: CLIP
    tokenizer: Tokenizer
    weights: Path | None = None  # a file that holds the same weights under the same names
    is_aligned: bool = True  # whether its projections are trained
    templates: tuple[str, ...] | None = None  # prompts for a class, unless the usual ones


def read_json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise not_readable(path, reason_for(error)) from None


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
        **{f"MLP width of the {tower} tower": ("hidden", getattr(size, tower).hidden or 1)
           for tower in ("image", "text")},
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
    if not (folder / TOKENIZER).exists() and all((folder / name).exists() for name in VOCABULARY):
        return read_vocabulary(folder)
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


def read_vocabulary(folder: Path) -> Tokenizer:
    """OpenAI's tokenizer from `vocab.json` and `merges.txt`, as older folders have it."""
    vocab, merges = (folder / name for name in VOCABULARY)
    try:
        lines = files.read_bounded(merges, MAX_BYTES).decode("utf-8").split("\n")
        pairs = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
        return openai_tokenizer(files.read_json(vocab), pairs)  # type: ignore[arg-type]  # which it checks
    except Exception as error:  # as of `load_tokenizer`
        why = f"`{vocab.name}` and `{merges.name}` are no vocabulary: {shortened(str(error))}"
        raise refused(folder, why) from None


def growth(normalizer: dict[str, Any]) -> int:
    """The maximum factor by which this makes a text longer."""
    inner = math.prod(growth(step) for step in normalizer.get("normalizers", ()))
    return inner * (1 + len(normalizer.get("content", normalizer.get("prepend", ""))))


def check_ids(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    ids = [*tokenizer.before, tokenizer.end, tokenizer.pad, tokenizer.highest_id]
    if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
        highest = f"ids up to {tokenizer.highest_id:,}, the model only {vocab_size:,} tokens"
        raise refused(folder, f"its `{TOKENIZER}` has {highest}")


def read_run(folder: Path, size: Size) -> Tokenizer:
    """The tokenizer of a run whose settings describe a model of this size."""
    tokenizer, own = read_tokenizer(folder), size.vocabulary
    if own is not None:
        tokenizer = tokenizer.with_ids(own.start, own.end, own.pad, is_full=size.siglip, vocab_size=own.size)
    check_numbers(folder, size, tokenizer.vocab_size)
    check_ids(folder, tokenizer, tokenizer.vocab_size)
    return tokenizer


def read_model(folder: Path, size: Size, vocab_size: int, has_bias: bool) -> CLIP:
    with opened_weights(folder) as opened:  # once: a running training removes old checkpoints
        return model_from(folder, opened, size, vocab_size, has_bias)


def model_from(
    folder: Path, opened: Opened, size: Size, vocab_size: int, has_bias: bool, layout: Layout = OURS
) -> CLIP:
    """The model with its weights in fp32."""
    check_stored(folder, opened, size, vocab_size, has_bias)
    with torch.random.fork_rng(devices=[]):
        model = CLIP(size, vocab_size=vocab_size, has_bias=has_bias)
    read_weights(folder, opened, model, layout)
    return model


def check_stored(folder: Path, opened: Opened, size: Size, vocab_size: int, has_bias: bool) -> None:
    """Refuses a model that is larger than its file: the file limits the memory, whatever is said about the model."""
    num_stored = sum(map(math.prod, opened.shapes.values()))
    expected = count_parameters(size, vocab_size=vocab_size, has_bias=has_bias)
    if expected > num_stored:
        what = f"it describes {expected:,} parameters, and `{opened.name}` holds {num_stored:,}"
        raise refused(folder, what)
    refuse_too_large(folder, 4 * expected)


def load_weights(folder: Path, model: CLIP) -> None:
    with opened_weights(folder) as opened:
        read_weights(folder, opened, model)


def load_between(start: Path, trained: Path, alpha: float, model: CLIP) -> None:
    """Loads (1 - alpha) times the weights of one checkpoint plus alpha times those of another; exact for 0 and 1.

    Adapters start with `up` at zero: interpolating `up` alone, their product with `down` is interpolated, and so are
    the merged weights; interpolating both would square alpha.
    """
    load_weights(trained, model)
    with opened_weights(start) as opened, torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not name.endswith(ADAPTER_DOWN):
                tensor.copy_(torch.lerp(opened.get(name).to(tensor), tensor, alpha))


def read_weights(folder: Path, opened: Opened, model: CLIP, layout: Layout = OURS) -> None:
    """Reads weights into a model of the same shape, one tensor at a time; all of them are finite."""
    onnx.open_towers(model)
    ours = model.state_dict()
    theirs = layout.sources(model.size)
    sources = {name: theirs[name] if layout.names else [name] for name in ours}
    expected: dict[str, tuple[int, ...]] = {}
    for name, parts in sources.items():
        expected |= dict.fromkeys(parts, layout.stored_shape(name, tuple(ours[name].shape), len(parts)))
    # Dimensions of one, as in [1] for a number, are written by some and not by others.
    shapes = {
        name: expected[name] if plain(shape) == plain(expected.get(name, (0,))) else shape
        for name, shape in opened.shapes.items()
    }
    if difference := shape_difference(shapes, expected):
        raise refused(folder, f"`{opened.name}` is of another model: {difference}")
    with torch.no_grad():
        for name, parts in sources.items():
            tensors = [opened.get(part) for part in parts]
            ours[name].copy_(layout.to_ours(name, tensors, tuple(ours[name].shape)))
    # A sum is finite only if all its terms are, and takes a tenth of the time of looking at each.
    if not all(bool(tensor.sum().isfinite()) for tensor in [*ours.values(), model.scale()]):
        raise refused(folder, f"`{opened.name}` holds values that are not finite")


def plain(shape: tuple[int, ...]) -> list[int]:
    return [number for number in shape if number != 1]


@contextmanager
def opened_weights(folder: Path, name: str = WEIGHTS) -> Iterator[Opened]:
    """The weights of a folder, open, and the shape of each: floats, and not more than fit into memory."""
    file = folder / name
    try:
        with files.open_regular(file) as opened:  # the library would wait for a pipe's writer
            refuse_too_large(folder, os.fstat(opened.fileno()).st_size)  # a sparse file can claim any size
        if file.suffix != ".safetensors":
            yield opened_pickle(folder, file)
            return
        with safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if not name.endswith(IGNORED)]  # noqa: SIM118  # it is no dict
            slices = {name: stored.get_slice(name) for name in names}
            for name, part in slices.items():
                if part.get_dtype() not in FLOATS:
                    raise refused(folder, f"`{shortened(name)}` holds {part.get_dtype()}, not floats")
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            yield Opened(file.name, stored.get_tensor, shapes, set(stored.keys()) - {*names})
    except (OSError, ValueError, SafetensorError) as error:
        raise not_readable(file, reason_for(error)) from None


def opened_pickle(folder: Path, file: Path) -> Opened:
    tensors = load_pickled(file)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED)}
    for name, tensor in kept.items():
        if not tensor.is_floating_point():
            raise refused(folder, f"`{shortened(name)}` holds {tensor.dtype}, not floats")
    shapes = {name: tuple(tensor.shape) for name, tensor in kept.items()}
    return Opened(file.name, kept.__getitem__, shapes, tensors.keys() - kept.keys())


def load_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` file; whatever else it holds is refused, and nothing in it is executed."""
    try:
        is_zip = zipfile.is_zipfile(file)
        parts = zipfile.ZipFile(file).infolist() if is_zip else []
        if any(Path(part.filename).name == "constants.pkl" for part in parts):
            raise refused(file, "it is a TorchScript program, which is not run", SCRIPT_HINT)
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise refused(file, "it is compressed, as torch never writes it")
        refuse_too_large(file.parent, sum(part.file_size for part in parts))
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except Exception as error:  # of a damaged or hostile file it raises nearly anything
        why = str(error).strip().partition("\n")[0]
        hint = "download it again, or if you trust it, convert it to safetensors where it was made"
        raise UserError(f"cannot read `{file}`: {shortened(why)}", hint=hint) from None
    stored = stored.get("state_dict", stored) if isinstance(stored, dict) else None  # of a training state
    if not isinstance(stored, dict) or not all(isinstance(n, str) and is_dense(t) for n, t in stored.items()):
        raise refused(file, "it is not a table of tensors by name")
    # Training in several processes adds this prefix.
    return {name.removeprefix("module."): tensor for name, tensor in stored.items()}


def is_dense(each: object) -> bool:
    return isinstance(each, Tensor) and each.layout == torch.strided and not each.is_meta


def refuse_too_large(folder: Path, num_bytes: int) -> None:
    if num_bytes > memory_limit_bytes():
        what = f"it needs {num_bytes / 1e9:,.0f} GB of memory, more than is available"
        raise refused(folder, what, hint="choose a smaller model")
