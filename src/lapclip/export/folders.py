"""Models as folders that transformers and OpenCLIP read: written, opened again by our own readers, and compared.

What a format has no place for is moved to where it has the same effect; what cannot be moved is refused.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from lapclip.data.tokenizer import Tokenizer
from lapclip.embedder import Embedder, load
from lapclip.errors import UserError
from lapclip.export.parity import MIN_COSINE, compare
from lapclip.files import atomic_path, writing
from lapclip.model.blocks import Shape
from lapclip.model.clip import Size
from lapclip.model.towers import PIXEL_MEAN, PIXEL_STD
from lapclip.weights import hugging_face, layouts, open_clip
from lapclip.weights.checkpoint import write_tensors
from lapclip.weights.reading import TOKENIZER, WEIGHTS

SAVE = "save it for lapclip: `lapclip.load(...).save(FOLDER)`"
FORMATS = {"hf": "transformers", "openclip": "OpenCLIP"}


@dataclass
class Exported:
    path: Path
    num_bytes: int
    measured: dict[str, Any]  # by `compare`
    notes: list[str] = field(default_factory=list)  # what is different in the other program


def export(embedder: Embedder, to: str, folder: Path) -> Exported:
    """Writes a folder, whole or not at all: if it does not embed as the model does, an error says so."""
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"`{folder}` already exists", hint="choose another folder, or remove that one")
    size, notes = embedder.model.size, list[str]()

    def refuse(what: str, hint: str = SAVE) -> None:
        raise UserError(f"{FORMATS[to]} has no place for {what}, which `{embedder.name}` has", hint=hint)

    if size.token_mean:
        hint = "train with `--size tiny` and export it `--to openclip`" + ", or train a `vit-*` size" * (
            to == "hf"
        )
        refuse("a residual network and a mean of token embeddings", hint=hint)
    if size.head or size.image_encoder or size.text_encoder:
        refuse("frozen encoders with heads")
    if to == "openclip":
        if size.siglip:
            refuse("SigLIP's attention pooling and bidirectional texts")
        if size.norm_eps != 1e-5 or size.activation == "gelu_tanh":
            refuse(f"`{size.activation}` with a norm epsilon of {size.norm_eps}")
    elif not size.siglip and not size.pre_norm:
        hint = "use `--to openclip`, which supports it"
        refuse("an image tower without a norm before its first block", hint=hint)
    tensors = {name: tensor.detach().cpu().float() for name, tensor in embedder.model.state_dict().items()}
    tokenizer = embedder.tokenizer
    if size.siglip:
        tensors.setdefault("bias", torch.zeros(1))
    else:
        fold_biases(tensors, refuse)
        tokenizer = with_highest_end(tokenizer, tensors)
        if to == "hf" and tensors.pop("bias", None) is not None:
            notes.append("the bias of the sigmoid loss is left out; embeddings do not depend on it")
    if size.resize == "packed":
        resized = "images are resized in one step there, and in two here"
        notes.append(f"{resized}, so embeddings of files differ a little")
    with atomic_path(folder, is_folder=True) as beside:
        layout = layouts.OPENAI if to == "openclip" else layouts.SIGLIP if size.siglip else layouts.CLIP
        file = WEIGHTS if to == "hf" else open_clip.FILES[0]
        write_tensors(layout.to_theirs(tensors, size), beside / file)
        vocab_size = embedder.model.vocab_size
        described = hugging_face_files if to == "hf" else open_clip_files
        about = described(size, vocab_size, tokenizer, "bias" in tensors) | tokenizer_files(size, tokenizer)
        for name, content in about.items():
            (beside / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), "utf-8")
        measured = compare(embedder, load(beside))
        if not measured["parity"]["min_cosine"] >= MIN_COSINE:
            found = f"only {measured['parity']['min_cosine']:.5f}"
            what = f"the cosine of `{embedder.name}` with its copy for {FORMATS[to]} is {found}: nothing is written"
            hint = "train it longer: weights of extreme size lose precision when converted"
            raise UserError(what, hint=hint)
    return Exported(folder, sum(file.stat().st_size for file in folder.iterdir()), measured, notes)


def fold_biases(tensors: dict[str, Tensor], refuse: Any) -> None:
    """Moves biases that CLIP has not: of patches into the positions, of projections into the norms before them."""
    if (bias := tensors.pop("image.embed.bias", None)) is not None:
        positions = tensors["image.positions"].clone()
        positions[1:] += bias
        tensors["image.positions"] = positions
    for tower in ("image", "text"):
        if (bias := tensors.pop(f"project_{tower}.bias", None)) is None:
            continue
        weight, norm = tensors[f"project_{tower}.weight"].double(), f"{tower}.transformer.norm.bias"
        shift = torch.linalg.lstsq(weight, bias.double()[:, None], driver="gelsd").solution
        if not torch.allclose(weight @ shift, bias.double()[:, None], rtol=1e-4, atol=1e-5):
            refuse(f"the bias of the {tower} tower's projection, which is outside of what it projects to,")
        tensors[norm] = (tensors[norm].double() + shift[:, 0]).float()


def with_highest_end(tokenizer: Tokenizer, tensors: dict[str, Tensor]) -> Tokenizer:
    """The end token with the highest id, at which OpenCLIP, and transformers at times, read a text."""
    end, highest = tokenizer.end, tokenizer.highest_id
    if end == highest:
        return tokenizer
    moved = {end: highest, highest: end}
    about = json.loads(tokenizer.to_json())
    if not isinstance(vocab := about["model"]["vocab"], dict):
        hint = "use `--to hf` with a CLIP model"
        raise UserError("this tokenizer has no place for another end token", hint=hint)
    about["model"]["vocab"] = {token: moved.get(id, id) for token, id in vocab.items()}
    added = [one | {"id": moved.get(one["id"], one["id"])} for one in about["added_tokens"]]
    about["added_tokens"] = sorted(added, key=lambda one: one["id"])
    about["post_processor"] = None
    rows = torch.arange(len(tensors["text.embed.weight"]))
    rows[[end, highest]] = rows[[highest, end]]
    tensors["text.embed.weight"] = tensors["text.embed.weight"][rows]
    start, pad = (moved.get(id, id) for id in (tokenizer.start or 0, tokenizer.pad))
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(about)), start=start, end=highest, pad=pad)


def tokenizer_files(size: Size, tokenizer: Tokenizer) -> dict[str, Any]:
    pipeline = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    ids = [*tokenizer.before, tokenizer.end]
    *before, end = (str(pipeline.id_to_token(id)) for id in ids)
    single, special = " ".join([*before, "$A", end]), [*zip([*before, end], ids, strict=True)]
    pipeline.post_processor = TemplateProcessing(single=single, special_tokens=special)
    # Only in SigLIP do tokens see the padding.
    pad = str(pipeline.id_to_token(tokenizer.pad)) if size.siglip else end
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": size.text_length, "eos_token": end,
        "pad_token": pad, **({"bos_token": before[0]} if before else {}),
    }  # fmt: skip
    return {TOKENIZER: json.loads(pipeline.to_str()), "tokenizer_config.json": config}


def hugging_face_files(size: Size, vocab_size: int, tokenizer: Tokenizer, has_bias: bool) -> dict[str, Any]:
    side = size.image_size
    kind, name = ("siglip", "Siglip") if size.siglip else ("clip", "CLIP")
    activation = next(theirs for theirs, ours in hugging_face.ACTIVATION.items() if ours == size.activation)

    def tower(shape: Shape) -> dict[str, Any]:
        return {
            "hidden_size": shape.width, "intermediate_size": shape.mlp_width, "num_hidden_layers": shape.depth,
            "num_attention_heads": shape.heads, "hidden_act": activation, "layer_norm_eps": size.norm_eps,
            **({} if size.siglip else {"projection_dim": size.embedding}),
        }  # fmt: skip

    text = tower(size.text) | {
        "vocab_size": vocab_size, "max_position_embeddings": size.text_length, "eos_token_id": tokenizer.end,
        "bos_token_id": tokenizer.start, "pad_token_id": tokenizer.pad if size.siglip else tokenizer.end,
        **({"projection_size": size.embedding} if size.siglip else {}),
    }  # fmt: skip
    config = {
        "model_type": kind, "architectures": [f"{name}Model"], "text_config": text,
        "vision_config": tower(size.image) | {"image_size": side, "patch_size": size.patch_size},
        **({} if size.siglip else {"projection_dim": size.embedding}),
    }  # fmt: skip
    square, is_squashed = {"height": side, "width": side}, size.resize.startswith("squash")
    images = {
        "image_processor_type": f"{name}ImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
        "size": square if is_squashed else {"shortest_edge": side}, "resample": 2 if is_bilinear(size) else 3,
        "do_center_crop": not is_squashed, **({} if is_squashed else {"crop_size": square}),
        "rescale_factor": 1 / 255, "image_mean": PIXEL_MEAN, "image_std": PIXEL_STD, "do_convert_rgb": True,
    }  # fmt: skip
    return {hugging_face.DESCRIPTION: config, "preprocessor_config.json": images}


def open_clip_files(size: Size, vocab_size: int, tokenizer: Tokenizer, has_bias: bool) -> dict[str, Any]:
    image, text = size.image, size.text
    config = {
        "embed_dim": size.embedding, "quick_gelu": size.activation == "quick_gelu",
        **({"init_logit_bias": -10} if has_bias else {}),
        "vision_cfg": {
            "image_size": size.image_size, "patch_size": size.patch_size, "layers": image.depth, "width": image.width,
            "head_width": image.width // image.heads, "mlp_ratio": image.mlp_width / image.width,
            "no_ln_pre": not size.pre_norm,
        },
        "text_cfg": {
            "context_length": size.text_length, "vocab_size": vocab_size, "width": text.width, "heads": text.heads,
            "layers": text.depth, "mlp_ratio": text.mlp_width / text.width, "hf_tokenizer_name": "this folder",
        },
    }  # fmt: skip
    images = {
        "mean": PIXEL_MEAN, "std": PIXEL_STD, "interpolation": "bilinear" if is_bilinear(size) else "bicubic",
        "resize_mode": "squash" if size.resize.startswith("squash") else "shortest",
    }  # fmt: skip
    return {open_clip.DESCRIPTION: {"model_cfg": config, "preprocess_cfg": images}}


def is_bilinear(size: Size) -> bool:
    return size.resize.endswith("-bilinear")
