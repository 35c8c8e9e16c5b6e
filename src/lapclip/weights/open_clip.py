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
from lapclip.weights import layouts, reading
from lapclip.weights.hugging_face import checked_pixels, fold_pixels, framed
from lapclip.weights.reading import TOKENIZER, Opened, Pretrained, read_json

DESCRIPTION = "open_clip_config.json"
FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
refused = partial(reading.refused, hint="choose a CLIP model with OpenAI's architecture, or train one")
# Names of OpenAI's own files, all with QuickGELU; `@` and `px` vary.
OPENAI_FILES = ("vit-b-32", "vit-b-16", "vit-l-14", "vit-l-14-336px", "vit-l-14@336px", "vit-l-14-336")
# What a config may say that changes nothing here; anything else is another architecture.
VISION = {
    "layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16, "image_size": 224,
    "no_ln_pre": False,
}  # fmt: skip
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0}
NEUTRAL = {
    "pool_type": ("tok", "argmax"), "pos_embed_type": ("learnable",), "proj_type": ("linear",), "block_type": ("default",),
}  # fmt: skip
UNUSED = {
    "patch_dropout", "pad_id", "eos_id", "attn_pooler_queries", "attn_pooler_heads", "hf_tokenizer_name",
    "tokenizer_kwargs", "timm_pool", "timm_proj", "timm_model_pretrained", "hf_model_pretrained",
    "hf_proj_type", "hf_pooler_type",
}  # fmt: skip
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
NUM_MERGES, MAX_TEXT = 49152 - 256 - 2, 2**24


def model_file(path: Path) -> Path | None:
    """The file of weights that a path means: itself, OpenCLIP's in a folder, or the only one of a folder."""
    if path.is_file():
        return path if path.name.endswith(WEIGHT_FILES) else None
    for name in FILES:
        if (path / name).exists():
            return path / name
    found = [file for file in path.iterdir() if file.name.endswith(WEIGHT_FILES)] if path.is_dir() else []
    return found[0] if len(found) == 1 else None


def load_file(file: Path) -> Pretrained:
    folder, own = file.parent, file.parent / DESCRIPTION
    about = read_json(own) if own.is_file() else {}
    with reading.opened_weights(folder, file.name) as opened:
        if about:
            size, vocab_size, pixels = described(folder, about)
        else:
            size, vocab_size, pixels = inferred(file, opened)
        reading.check_numbers(folder, size, vocab_size)
        tokenizer = framed(folder, find_tokenizer(folder), 2)
        reading.check_ids(folder, tokenizer, [tokenizer.start, tokenizer.end], vocab_size)
        has_bias = "logit_bias" in opened.shapes
        model = reading.model_from(folder, opened, size, vocab_size, has_bias, layouts.OPENAI)
    name = folder.absolute().name if file.name in FILES else file.stem
    return Pretrained(name, fold_pixels(model, pixels), tokenizer, weights=None)


def described(folder: Path, about: dict[str, Any]) -> tuple[Size, Any, np.ndarray]:
    """What `open_clip_config.json` says: the size, the vocabulary's, and how pixels are normalised."""
    config = about.get("model_cfg")
    config = config if isinstance(config, dict) else {}
    if config.get("custom_text") or config.get("multimodal_cfg"):
        raise refused(folder, "its text tower is not OpenAI's")
    vision, text = checked(folder, "image", config, VISION), checked(folder, "text", config, TEXT)
    try:
        image = Shape(
            vision["width"], vision["layers"], vision["width"] // vision["head_width"], hidden(vision)
        )
        words = Shape(text["width"], text["layers"], text["heads"], hidden(text))
        shown: dict[str, Any] = about.get("preprocess_cfg") or {}
        used = shown.get("mean") or PIXEL_MEAN, shown.get("std") or PIXEL_STD
        pixels = checked_pixels(folder, 255 * np.array(used, dtype=float))
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        raise refused(folder, f"the numbers in its `{DESCRIPTION}` are not valid") from None
    mode, by = shown.get("resize_mode") or "shortest", shown.get("interpolation") or "bicubic"
    if mode not in ("shortest", "squash") or by not in ("bicubic", "bilinear", "random"):
        raise refused(folder, f"its images are resized in another way: {shortened(f'{mode}, {by}', 60)}")
    resize = ("squash" if mode == "squash" else "crop-rounded") + ("-bilinear" if by == "bilinear" else "")
    size = openai_size(
        image, words, vision["image_size"], vision["patch_size"], text["context_length"], config.get("embed_dim"),
        is_quick=config.get("quick_gelu") is True, pre_norm=vision["no_ln_pre"] is not True, resize=resize,
    )  # fmt: skip
    return size, text["vocab_size"], pixels


def openai_size(
    image: Shape, text: Shape, side: Any, patch: Any, length: Any, embedding: Any, *, is_quick: bool,
    pre_norm: bool = True, resize: str = "crop-rounded",
) -> Size:  # fmt: skip
    activation = "quick_gelu" if is_quick else "gelu"
    return Size(
        image, text, side, patch, length, embedding, activation, pre_norm, False, False, resize=resize
    )


def checked(folder: Path, tower: str, config: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one tower; refuses an architecture that is not OpenAI's."""
    its = config.get("vision_cfg" if tower == "image" else "text_cfg")
    its = its if isinstance(its, dict) else {}
    for key, value in its.items():
        if key not in known and key not in UNUSED and value and value not in NEUTRAL.get(key, ()):
            said = f"`{shortened(key, 40)}` of the {tower} tower is {shortened(repr(value), 40)}"
            raise refused(folder, f"{said}, which is another architecture")
    return known | its


def hidden(its: dict[str, Any]) -> int | None:
    """The width of the MLPs, where it is not the usual one."""
    return None if its["mlp_ratio"] == 4 else int(its["width"] * its["mlp_ratio"])


def inferred(file: Path, opened: Opened) -> tuple[Size, int, np.ndarray]:
    """What the shapes of the tensors say, where nothing else is known: as OpenAI's own programs do."""
    folder, shapes = file.parent, opened.shapes
    if any(name.startswith("visual.layer1") for name in shapes):
        raise refused(folder, f"`{file.name}` has a ResNet as image tower")
    try:
        width, _, _, patch = shapes["visual.conv1.weight"]
        num_places, _ = shapes["visual.positional_embedding"]
        length, text_width = shapes["positional_embedding"]
        vocab_size, _ = shapes["token_embedding.weight"]
        _, embedding = shapes["text_projection"]
        depths, ups = {}, {}
        for tower, prefix in layouts.OPENAI.towers.items():
            depths[tower] = sum(
                f"{prefix}.{number}.ln_1.weight" in shapes for number in range(reading.MAX["depth"])
            )
            ups[tower] = shapes[f"{prefix}.0.mlp.c_fc.weight"][0]
        image, text = (
            Shape(wide, depths[tower], max(1, wide // 64), None if ups[tower] == 4 * wide else ups[tower])
            for tower, wide in (("image", width), ("text", text_width))
        )
    except (KeyError, ValueError):
        raise refused(
            folder, f"`{file.name}` does not hold a CLIP with the names of OpenAI's weights"
        ) from None
    is_openai = (
        set(reading.OPENAI_SIGN) <= opened.ignored or file.stem.lower().replace("_", "-") in OPENAI_FILES
    )
    if not is_openai:
        what = f"`{file.name}` does not say whether it needs GELU or QuickGELU"
        hint = f"put its `{DESCRIPTION}` beside it; one of OpenAI's own is known by a name such as `ViT-B-32{file.suffix}`"
        raise refused(folder, what, hint=hint)
    side = round((num_places - 1) ** 0.5) * patch
    size = openai_size(image, text, side, patch, length, embedding, is_quick=True)
    return size, vocab_size, 255 * np.array((PIXEL_MEAN, PIXEL_STD))


def find_tokenizer(folder: Path) -> Tokenizer:
    """That of the folder, or OpenAI's vocabulary from there or from an installed package that has it."""
    packages = [importlib.util.find_spec(name) for name in ("open_clip", "clip")]
    places = [folder, *(Path(spec.origin).parent for spec in packages if spec and spec.origin)]
    is_there = (folder / TOKENIZER).exists() or (
        (folder / "vocab.json").exists() and (folder / "merges.txt").exists()
    )
    place = next((place for place in places if (place / VOCABULARY).is_file()), None)
    if is_there:
        return reading.read_tokenizer(folder)
    if place is None:
        hint = f"copy `{TOKENIZER}` of any CLIP with OpenAI's vocabulary into that folder, or `pip install open_clip_torch`"
        raise UserError(f"`{folder}` has no `{TOKENIZER}`", hint=hint)
    try:
        with open_regular(place / VOCABULARY) as file, gzip.open(file) as text:
            lines = text.read(MAX_TEXT).decode("utf-8").split("\n")
        merges = [(first, second) for first, second in map(str.split, lines[1 : NUM_MERGES + 1])]
        letters = sorted(ByteLevel.alphabet())
        tokens = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
        tokens += ["<|startoftext|>", "<|endoftext|>"]
        return openai_tokenizer({token: number for number, token in enumerate(tokens)}, merges)
    except (OSError, EOFError, ValueError) as error:
        raise reading.not_readable(place / VOCABULARY, str(error)) from None
