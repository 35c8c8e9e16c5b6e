"""CLIP models of OpenAI and OpenCLIP: a file of weights, with `open_clip_config.json` beside it if OpenCLIP wrote it.

Both use the same names, but not the same activation; a file that does not say which one it needs is refused.
"""

import gzip
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from lapclip.data.tokenizer import Tokenizer, openai_tokenizer
from lapclip.errors import UserError, shortened
from lapclip.files import WEIGHT_FILES, open_regular
from lapclip.model.blocks import Shape
from lapclip.model.clip import Size
from lapclip.model.towers import PIXEL_MEAN, PIXEL_STD
from lapclip.weights import hub, layouts, reading
from lapclip.weights.hugging_face import checked_pixels, fold_pixels, framed, has_tokenizer
from lapclip.weights.reading import TOKENIZER, Opened, Pretrained, read_json

DESCRIPTION = "open_clip_config.json"
FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
refused = partial(reading.refused, hint="choose a CLIP model with OpenAI's architecture, or train one")
# OpenAI's own, all with QuickGELU.
OPENAI_FILES = ("vit-b-32", "vit-b-16", "vit-l-14", "vit-l-14-336px", "vit-l-14@336px")
# Of a tower: what its weights say too, or what changes nothing; any other setting means another architecture.
SETTINGS = {
    "layers", "width", "head_width", "heads", "mlp_ratio", "patch_size", "image_size", "context_length", "vocab_size",
    "no_ln_pre", "patch_dropout", "pad_id", "eos_id", "attn_pooler_queries", "attn_pooler_heads", "hf_tokenizer_name",
    "tokenizer_kwargs",
}  # fmt: skip
DEFAULTS = {"pool_type": ("tok", "argmax"), "pos_embed_type": ("learnable",), "proj_type": ("linear",)}
RESIZES = {"shortest": "crop-rounded", "squash": "squash"}
FILTERS = {"bicubic": "", "random": "", "bilinear": "-bilinear"}
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
NUM_MERGES, MAX_TEXT = 49152 - 256 - 2, 2**24


def model_file(path: Path) -> Path | None:
    """The file of weights that a path means: itself, OpenCLIP's in a folder, or the only one of a folder."""
    if path.is_file():
        return path if path.name.endswith(WEIGHT_FILES) else None
    found = [file for file in path.iterdir() if file.name.endswith(WEIGHT_FILES)] if path.is_dir() else []
    own = [path / name for name in FILES if path / name in found]
    return own[0] if own else found[0] if len(found) == 1 else None


def load_file(file: Path) -> Pretrained:
    folder = file.parent
    about = read_json(folder / DESCRIPTION) if (folder / DESCRIPTION).is_file() else None
    with reading.opened_weights(folder, file.name) as opened:
        size, vocab_size, pixels = described(file, opened, about)
        reading.check_numbers(folder, size, vocab_size)
        tokenizer = framed(folder, find_tokenizer(folder), 2)
        reading.check_ids(folder, tokenizer, vocab_size)
        has_bias = "logit_bias" in opened.shapes
        model = reading.model_from(folder, opened, size, vocab_size, has_bias, layouts.OPENAI)
    name = folder.absolute().name if file.name in FILES else file.stem
    return Pretrained(name, fold_pixels(model, pixels), tokenizer)


def described(file: Path, opened: Opened, about: dict[str, Any] | None) -> tuple[Size, int, np.ndarray]:
    """The size and the vocabulary's, by the shapes of the tensors, and how pixels are normalised, by the config."""
    folder, shapes = file.parent, opened.shapes
    try:
        config = {} if about is None else about["model_cfg"]
        vision, text = (config.get(key) or {} for key in ("vision_cfg", "text_cfg"))
        refuse_others(folder, image=vision, text=text)
        width, _, _, patch = shapes["visual.conv1.weight"]
        length, text_width = shapes["positional_embedding"]
        image = tower_shape(shapes, "image", width, width // vision.get("head_width", 64))
        words = tower_shape(shapes, "text", text_width, text.get("heads", 8 if about else text_width // 64))
        side = round((shapes["visual.positional_embedding"][0] - 1) ** 0.5) * patch
        shown = (about or {}).get("preprocess_cfg") or {}
        used = shown.get("mean") or PIXEL_MEAN, shown.get("std") or PIXEL_STD
        pixels = checked_pixels(folder, 255 * np.array(used, dtype=float))
        mode, by = shown.get("resize_mode") or "shortest", shown.get("interpolation") or "bicubic"
        is_quick = is_openai(file, opened) if about is None else config.get("quick_gelu") is True
        size = Size(
            image, words, side, patch, length, shapes["text_projection"][1], "quick_gelu" if is_quick else "gelu",
            "visual.ln_pre.weight" in shapes, False, False, resize=RESIZES[mode] + FILTERS[by],
        )  # fmt: skip
        return size, shapes["token_embedding.weight"][0], pixels
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ArithmeticError):
        what = f"`{file.name}` and `{DESCRIPTION}` do" if about else f"`{file.name}` does"
        raise refused(folder, f"{what} not describe a CLIP with OpenAI's towers") from None


def tower_shape(shapes: dict[str, tuple[int, ...]], tower: str, width: int, heads: int) -> Shape:
    prefix = layouts.OPENAI.towers[tower]
    depth = sum(f"{prefix}.{number}.ln_1.weight" in shapes for number in range(reading.MAX["depth"]))
    hidden = shapes[f"{prefix}.0.mlp.c_fc.weight"][0]
    return Shape(width, depth, heads, None if hidden == 4 * width else hidden)


def refuse_others(folder: Path, **towers: dict[str, Any]) -> None:
    for tower, its in towers.items():
        for key, value in its.items():
            if key not in SETTINGS and value and value not in DEFAULTS.get(key, ()):
                said = f"`{shortened(key, 40)}` of the {tower} tower is {shortened(repr(value), 40)}"
                raise refused(folder, f"{said}, which means another architecture")


def is_openai(file: Path, opened: Opened) -> bool:
    """Whether a file without a config is known to be one of OpenAI's."""
    if set(reading.OPENAI_SIGN) <= opened.ignored or file.stem.lower().replace("_", "-") in OPENAI_FILES:
        return True
    own = f"if it is one of OpenAI's, call it as they do: `ViT-B-32{file.suffix}`"
    what = f"`{file.name}` does not say whether it needs GELU or QuickGELU"
    raise refused(file.parent, what, hint=f"put its `{DESCRIPTION}` beside it; {own}")


def find_tokenizer(folder: Path) -> Tokenizer:
    """That of the folder, or OpenAI's vocabulary from there or from an installed package that has it."""
    if has_tokenizer(folder):
        return reading.read_tokenizer(folder)
    packages = [importlib.util.find_spec(name) for name in ("open_clip", "clip")]
    places = [folder, *(Path(spec.origin).parent for spec in packages if spec and spec.origin)]
    place = next((place for place in places if (place / VOCABULARY).is_file()), None)
    if place is None:
        for other in filter(has_tokenizer, hub.downloaded()):
            found = reading.read_tokenizer(other)
            if found.pipeline.token_to_id("<|endoftext|>") == NUM_MERGES + 2 * 256 + 1:  # it is OpenAI's
                return found
        hint = f"copy `{TOKENIZER}` of a CLIP with OpenAI's vocabulary there"
        raise UserError(f"`{folder}` has no `{TOKENIZER}`", hint=f"{hint}, or `lapclip models get clip-b32`")
    try:
        with open_regular(place / VOCABULARY) as file, gzip.open(file) as text:
            lines = text.read(MAX_TEXT).decode("utf-8").split("\n")
        merges = [(first, second) for first, second in map(str.split, lines[1 : NUM_MERGES + 1])]
        letters = sorted(ByteLevel.alphabet())
        tokens = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
        return openai_tokenizer({token: number for number, token in enumerate(tokens)}, merges)
    except Exception as error:  # as of `load_tokenizer`
        raise reading.not_readable(place / VOCABULARY, str(error)) from None
