"""CLIP and SigLIP models as transformers saves them: `config.json`, `model.safetensors`, `tokenizer.json`.

What the towers here cannot express is refused instead of computed wrongly.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError, shortened
from lapclip.model.blocks import Shape
from lapclip.model.clip import CLIP, Size
from lapclip.model.towers import PIXEL_MEAN, PIXEL_STD, ImageTower
from lapclip.weights import layouts, reading
from lapclip.weights.reading import TOKENIZER, WEIGHTS, Pretrained, read_json

DESCRIPTION = "config.json"
PICKLED = "pytorch_model.bin"
NOT_NORMALISED = "its images are not normalised by three means and standard deviations"
refused = partial(reading.refused, hint="choose a CLIP or SigLIP model with the usual towers, or train one")
# Ours, by their names.
ACTIVATION = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# The defaults of transformers for numbers that a config omits.
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
TEXT = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}  # fmt: skip
NORM_EPS = (1e-5, 1e-6, 1e-12)
SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
DEFAULTS = {
    "clip": {"text": TEXT, "vision": VISION},
    "siglip": {
        "text": TEXT | SIGLIP | {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072,
                                 "num_attention_heads": 12, "max_position_embeddings": 64},
        "vision": VISION | SIGLIP | {"patch_size": 16},
    },
}  # fmt: skip


def load_hugging_face_folder(folder: Path) -> Pretrained:
    """A model as transformers saves it."""
    config = read_json(folder / DESCRIPTION)
    kind = config.get("model_type")
    if kind not in DEFAULTS:
        more = ", with images of any resolution (NaFlex)" if kind == "siglip2" else ""
        only = "only `clip` and `siglip` can be loaded"
        raise refused(folder, f"it is a `{shortened(str(kind))}` model{more}, and {only}")
    file = require_files(folder)
    text, vision = (section(config, name, DEFAULTS[kind][name]) for name in ("text", "vision"))
    is_siglip = kind == "siglip"
    size = Size(
        image=shape(vision),
        text=shape(text),
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        text_length=text["max_position_embeddings"],
        embedding=vision["hidden_size"] if is_siglip else config.get("projection_dim", 512),
        pre_norm=not is_siglip,
        patch_bias=is_siglip,
        projection_bias=is_siglip,
        norm_eps=text["layer_norm_eps"],
        siglip=is_siglip,
    )
    vocab_size = text["vocab_size"]
    reading.check_numbers(folder, size, vocab_size)
    check_parts(folder, text, vision)
    pixels, resize = their_transform(folder, size)
    size = replace(size, activation=ACTIVATION[text["hidden_act"]], resize=resize)
    tokenizer = reading.read_tokenizer(folder)
    tokenizer = ended(folder, tokenizer) if is_siglip else framed(folder, tokenizer, text["eos_token_id"])
    reading.check_ids(folder, tokenizer, vocab_size)
    layout = layouts.SIGLIP if is_siglip else layouts.CLIP
    with reading.opened_weights(folder, file) as opened:
        model = reading.model_from(folder, opened, size, vocab_size, is_siglip, layout)
    return Pretrained(folder.absolute().name, fold_pixels(model, pixels), tokenizer)


def require_files(folder: Path) -> str:
    """The name of the file of weights; UserError if that or the tokenizer is missing."""
    file = next((name for name in (WEIGHTS, PICKLED) if (folder / name).exists()), None)
    if file is None or not has_tokenizer(folder):
        name, what = (TOKENIZER, "tokenizer") if file else (WEIGHTS, "model")
        hint = f"download the whole folder, or write that file with transformers: `{what}.save_pretrained(folder)`"
        raise UserError(f"`{folder}` has no `{name}`", hint=hint)
    return file


def has_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).exists() for name in names) for names in ([TOKENIZER], reading.VOCABULARY))


def section(config: dict[str, Any], name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one tower; in old files another key takes precedence."""
    for key in (f"{name}_config_dict", f"{name}_config"):
        if isinstance(config.get(key), dict):
            return defaults | config[key]
    return defaults


def shape(its: dict[str, Any]) -> Shape:
    width, hidden = its["hidden_size"], its["intermediate_size"]
    usual = type(width) is int and hidden == 4 * width
    return Shape(width, its["num_hidden_layers"], its["num_attention_heads"], None if usual else hidden)


def check_parts(folder: Path, text: dict[str, Any], vision: dict[str, Any]) -> None:
    """Refuses what would be computed differently here than where the model was trained."""
    for tower, its in (("image", vision), ("text", text)):
        expected: dict[str, tuple] = {
            "num_channels": (3,),
            "layer_norm_eps": (vision["layer_norm_eps"],) if tower == "text" else NORM_EPS,  # one for both
            "hidden_act": (vision["hidden_act"],) if tower == "text" else tuple(ACTIVATION),
            "projection_size": (vision["hidden_size"],) if tower == "text" else (None,),  # of SigLIP
        }
        for name, values in expected.items():
            if its.get(name, values[0]) not in values:
                found = f"{shortened(repr(its[name]), 40)}, not {' or '.join(map(repr, values))}"
                raise refused(folder, f"`{name}` of the {tower} tower is {found}")


def framed(folder: Path, tokenizer: Tokenizer, end_read_at: Any = None) -> Tokenizer:
    """The tokenizer with its start and end tokens: the encoding of an empty text. A CLIP is read at its end token."""
    frame = tokenizer.pipeline.encode("", add_special_tokens=True).ids
    if len(frame) != 2:
        raise refused(folder, f"its `{TOKENIZER}` does not add one start and one end token to a text")
    start, end = frame
    # transformers pools a text at this token; if it is 2, as in old files, at the highest id of the row.
    is_read_at_end = end == (tokenizer.highest_id if end_read_at == 2 else end_read_at)
    if end_read_at is not None and not is_read_at_end:
        pooled = f"pooled at token {shortened(str(end_read_at), 20)}"
        raise refused(folder, f"texts are {pooled}, but `{TOKENIZER}` ends them with {end}")
    return Tokenizer(tokenizer.pipeline, start=start, end=end, pad=end)


def ended(folder: Path, tokenizer: Tokenizer) -> Tokenizer:
    """SigLIP's tokenizer: an end token, no start token, and rows that are padded to their full length."""
    frame = tokenizer.pipeline.encode("", add_special_tokens=True).ids
    if len(frame) != 1:
        raise refused(folder, f"its `{TOKENIZER}` does not add one end token to a text")
    file = folder / "tokenizer_config.json"
    named = read_json(file).get("pad_token") if file.exists() else None
    named = named.get("content") if isinstance(named, dict) else named
    pad = tokenizer.pipeline.token_to_id(named) if isinstance(named, str) else frame[0]
    if pad is None:
        raise refused(folder, f"its `{TOKENIZER}` has no token `{shortened(str(named))}` to pad with")
    return Tokenizer(tokenizer.pipeline, start=None, end=frame[0], pad=pad, is_full=True)


def their_transform(folder: Path, size: Size | None) -> tuple[np.ndarray, str]:
    """How images are normalised, for pixels from 0 to 255: mean and standard deviation; and how they are resized.

    An encoder that is no CLIP has no `size`; its images are resized as lapclip's own.
    """
    files = (folder / "preprocessor_config.json", folder / "processor_config.json")
    about: Any = next((read_json(file) for file in files if file.exists()), {})
    about = about.get("image_processor", about)
    mean, std = ([0.5] * 3, [0.5] * 3) if size and size.siglip else (PIXEL_MEAN, PIXEL_STD)
    try:
        factor = float(about.get("rescale_factor") or 1 / 255) if about.get("do_rescale", True) else 1.0
        used = about.get("image_mean") or mean, about.get("image_std") or std
        used = used if about.get("do_normalize", True) else ([0] * 3, [1] * 3)
        pixels = checked_pixels(folder, np.array(used, dtype=float) / factor)
        return pixels, their_resize(folder, about, size) if size else "packed"
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        raise refused(folder, NOT_NORMALISED) from None


def checked_pixels(folder: Path, pixels: np.ndarray) -> np.ndarray:
    if pixels.shape == (2, 3) and np.isfinite(pixels).all() and pixels[1].min() > 0:
        return pixels
    raise refused(folder, NOT_NORMALISED)


def their_resize(folder: Path, about: dict[str, Any], size: Size) -> str:
    """One of `RESIZES`; what the config omits is as is usual for the model."""
    side, by = size.image_size, {2: "-bilinear", 3: ""}.get(about.get("resample", 3))
    edges = about.get("size") or {}
    edges = edges if isinstance(edges, dict) else {"shortest_edge": edges}
    is_cropped = about.get("do_center_crop", not size.siglip) is True
    crop = about.get("crop_size") or {}
    crops = {*crop.values()} if isinstance(crop, dict) else {crop}
    is_known = by is not None and {*edges.values()} <= {side} and (not is_cropped or crops <= {side})
    is_short = "shortest_edge" in edges or (not edges and not size.siglip)
    if not is_known or about.get("do_resize", True) is not True or (is_short and not is_cropped):
        keys = ("size", "crop_size", "resample", "do_resize", "do_center_crop")
        said = ", ".join(f"`{key}` {about[key]}" for key in keys if key in about)
        raise refused(folder, f"its images are resized in another way: {shortened(said)}")
    return ("crop" if is_short else "squash") + str(by)


def fold_pixels(model: CLIP, pixels: np.ndarray) -> CLIP:
    """The same model for images normalised as here: the difference goes into the patch weights."""
    ours = 255 * np.array((PIXEL_MEAN, PIXEL_STD))
    if np.allclose(pixels, ours, rtol=1e-6):
        return model
    both = torch.from_numpy(np.stack([pixels, ours]))
    (mean, std), (our_mean, our_std) = both.repeat_interleave(model.size.patch_size**2, dim=2)
    assert isinstance(model.image, ImageTower)
    embed = model.image.embed
    weight, bias = embed.weight.detach().double(), 0 if embed.bias is None else embed.bias.detach()
    embed.weight = nn.Parameter((weight * (our_std / std)).float())
    embed.bias = nn.Parameter((bias + weight @ ((our_mean - mean) / std)).float())
    model.size = replace(model.size, patch_bias=True)
    return model
