"""CLIP models as transformers saves them: `config.json`, `model.safetensors`, `tokenizer.json`.

What the towers here cannot express is refused instead of computed wrongly.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError, shortened
from lapclip.model.blocks import ACTIVATIONS, Shape
from lapclip.model.clip import CLIP, Size
from lapclip.model.towers import PIXEL_MEAN, PIXEL_STD
from lapclip.weights import reading
from lapclip.weights.reading import TOKENIZER, WEIGHTS, Pretrained, read_json

DESCRIPTION = "config.json"
refused = partial(reading.refused, hint="choose a CLIP model with OpenAI's architecture, or train one")
# The defaults of transformers for numbers that a config omits.
THEIR_TEXT = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}  # fmt: skip
THEIR_VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip


def load_hugging_face_folder(folder: Path) -> Pretrained:
    """A CLIP model as transformers saves it: `config.json`, `model.safetensors`, `tokenizer.json`."""
    config = read_json(folder / DESCRIPTION)
    kind = config.get("model_type")
    if kind != "clip":
        raise refused(folder, f"it is a `{shortened(str(kind))}` model, and only `clip` can be loaded")
    require_files(folder)
    text, vision = section(config, "text", THEIR_TEXT), section(config, "vision", THEIR_VISION)
    size = Size(
        image=Shape(vision["hidden_size"], vision["num_hidden_layers"], vision["num_attention_heads"]),
        text=Shape(text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]),
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        text_length=text["max_position_embeddings"],
        embedding=config.get("projection_dim", 512),
        activation=text["hidden_act"],
        pre_norm=True,
        patch_bias=False,
        projection_bias=False,
    )
    vocab_size = text["vocab_size"]
    reading.check_numbers(folder, size, vocab_size)
    check_parts(folder, text, vision)
    pixels = their_pixels(folder)
    tokenizer = framed(folder, reading.read_tokenizer(folder), text["eos_token_id"])
    reading.check_ids(folder, tokenizer, [tokenizer.start, tokenizer.end], vocab_size)
    model = reading.read_model(folder, size, vocab_size, has_bias=False, recipe=their_names(size))
    return Pretrained(folder.absolute().name, fold_pixels(model, pixels), tokenizer, weights=None)


def require_files(folder: Path) -> None:
    for name, theirs in ((WEIGHTS, "CLIPModel"), (TOKENIZER, "CLIPTokenizerFast")):
        if not (folder / name).exists():
            unsafe = "; its `pytorch_model.bin` could execute code when opened"
            has_unsafe = name == WEIGHTS and (folder / "pytorch_model.bin").exists()
            convert = f"`{theirs}.from_pretrained(folder).save_pretrained(folder)` with transformers"
            hint = f"download the whole folder, or if you trust it, write that file: {convert}"
            raise UserError(f"`{folder}` has no `{name}`{unsafe if has_unsafe else ''}", hint=hint)


def section(config: dict[str, Any], name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one tower; in old files another key takes precedence."""
    for key in (f"{name}_config_dict", f"{name}_config"):
        if isinstance(config.get(key), dict):
            return defaults | config[key]
    return defaults


def check_parts(folder: Path, text: dict[str, Any], vision: dict[str, Any]) -> None:
    """Refuses what would be computed differently here than where the model was trained."""
    for tower, its in (("image", vision), ("text", text)):
        expected: dict[str, tuple] = {
            "intermediate_size": (4 * its["hidden_size"],),
            "layer_norm_eps": (1e-5,),
            "num_channels": (3,),
            "hidden_act": (vision["hidden_act"],) if tower == "text" else tuple(ACTIVATIONS),  # one for both
        }
        for name, values in expected.items():
            if its.get(name, values[0]) not in values:
                found = f"{shortened(repr(its[name]), 40)}, not {' or '.join(map(repr, values))}"
                raise refused(folder, f"`{name}` of the {tower} tower is {found}")


def framed(folder: Path, tokenizer: Tokenizer, end_read_at: Any) -> Tokenizer:
    """The tokenizer with its start and end tokens: the encoding of an empty text."""
    frame = tokenizer.pipeline.encode("", add_special_tokens=True).ids
    if len(frame) != 2:
        raise refused(folder, f"its `{TOKENIZER}` does not add one start and one end token to a text")
    start, end = frame
    # transformers pools a text at this token; if it is 2, as in old files, at the highest id of the row.
    is_read_at_end = end == tokenizer.highest_id if end_read_at == 2 else end == end_read_at
    if not is_read_at_end:
        pooled = f"pooled at token {shortened(str(end_read_at), 20)}"
        raise refused(folder, f"texts are {pooled}, but `{TOKENIZER}` ends them with {end}")
    return Tokenizer(tokenizer.pipeline, start=start, end=end, pad=end)


def their_names(size: Size) -> dict[str, Sequence[str]]:
    """For each of our tensors those of transformers, in the order in which they are concatenated."""
    names: dict[str, Sequence[str]] = {
        "log_scale": ["logit_scale"],
        "project_image.weight": ["visual_projection.weight"],
        "project_text.weight": ["text_projection.weight"],
        "image.class_token": ["vision_model.embeddings.class_embedding"],
        "image.embed.weight": ["vision_model.embeddings.patch_embedding.weight"],
        "image.positions": ["vision_model.embeddings.position_embedding.weight"],
        "text.embed.weight": ["text_model.embeddings.token_embedding.weight"],
        "text.positions": ["text_model.embeddings.position_embedding.weight"],
    }
    for kind in ("weight", "bias"):
        names[f"image.pre_norm.{kind}"] = [f"vision_model.pre_layrnorm.{kind}"]  # transformers' spelling
        names[f"image.transformer.norm.{kind}"] = [f"vision_model.post_layernorm.{kind}"]
        names[f"text.transformer.norm.{kind}"] = [f"text_model.final_layer_norm.{kind}"]
        for tower, theirs, shape in (("image", "vision", size.image), ("text", "text", size.text)):
            for number in range(shape.depth):
                block = f"{tower}.transformer.blocks.{number}"
                layer = f"{theirs}_model.encoder.layers.{number}"
                names[f"{block}.attention.qkv.{kind}"] = [f"{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"]
                names[f"{block}.attention.out.{kind}"] = [f"{layer}.self_attn.out_proj.{kind}"]
                names[f"{block}.mlp.up.{kind}"] = [f"{layer}.mlp.fc1.{kind}"]
                names[f"{block}.mlp.down.{kind}"] = [f"{layer}.mlp.fc2.{kind}"]
                names[f"{block}.norm1.{kind}"] = [f"{layer}.layer_norm1.{kind}"]
                names[f"{block}.norm2.{kind}"] = [f"{layer}.layer_norm2.{kind}"]
    return names


def their_pixels(folder: Path) -> np.ndarray:
    """Mean and standard deviation of each channel that the model was trained with, for pixels from 0 to 255."""
    files = (folder / "preprocessor_config.json", folder / "processor_config.json")
    about: Any = next((read_json(file) for file in files if file.exists()), {})
    about = about.get("image_processor", about)
    try:
        factor = float(about.get("rescale_factor") or 1 / 255) if about.get("do_rescale", True) else 1.0
        used = about.get("image_mean") or PIXEL_MEAN, about.get("image_std") or PIXEL_STD
        used = used if about.get("do_normalize", True) else ([0] * 3, [1] * 3)
        pixels = np.array(used, dtype=float) / factor
        if pixels.shape == (2, 3) and np.isfinite(pixels).all() and pixels[1].min() > 0:
            return pixels
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        pass
    raise refused(folder, "its images are not normalised by three means and standard deviations")


def fold_pixels(model: CLIP, pixels: np.ndarray) -> CLIP:
    """The same model for images normalised as here: the difference goes into the patch weights."""
    ours = 255 * np.array((PIXEL_MEAN, PIXEL_STD))
    if np.allclose(pixels, ours, rtol=1e-6):
        return model
    (mean, std), (our_mean, our_std) = (
        torch.from_numpy(each).repeat_interleave(model.size.patch_size**2, dim=1) for each in (pixels, ours)
    )
    with torch.random.fork_rng(devices=[]):
        folded = CLIP(replace(model.size, patch_bias=True), vocab_size=model.text.embed.num_embeddings)
    tensors = model.state_dict()
    weight = tensors["image.embed.weight"].double()
    tensors["image.embed.weight"] = (weight * (our_std / std)).float()
    tensors["image.embed.bias"] = (weight @ ((our_mean - mean) / std)).float()
    folded.load_state_dict(tensors)
    return folded
