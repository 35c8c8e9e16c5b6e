"""Every setting, once: the name is the flag, the section is the TOML table, the sentence is the help.

`None` means "decide": `resolve` replaces it before training, with a reason. Reading a file or flags reports all
problems at once.
"""

import json
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from lapclip.errors import UserError, suggest
from lapclip.files import read_bounded
from lapclip.units import parse_every, parse_percent, plural

SizeName = Literal[
    "nano", "tiny", "resnet-tiny", "small", "base", "medium", "large", "huge", "vit-b-32", "vit-b-16", "vit-l-14"
]  # fmt: skip
TokenizerName = Literal["bpe", "characters"]
TuneName = Literal["heads", "lora", "last-k", "text", "full"]
LossName = Literal["softmax", "sigmoid"]
DeviceName = Literal["auto", "cpu", "mps", "cuda"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
FormatName = Literal[
    "txt", "metadata", "classes", "names", "images", "csv", "tsv", "jsonl", "parquet", "flickr", "coco", "karpathy",
    "tar", "hf",
]  # fmt: skip


def opt(default: Any, sentence: str, low: float | None = None, high: float | None = None) -> Any:
    """A setting: its default, its help, and its minimum and maximum."""
    return field(default=default, metadata={"help": sentence, "low": low, "high": high})


@dataclass(frozen=True)
class DataConfig:
    """The data."""

    source: str = opt(
        "synthetic",
        "the training data: a folder, a table, `captions_*.json`, `shards/*.tar`, `hf:NAME`, `emoji`,"
        " `synthetic` (the default of `train`); several with optional weights as `photos + emoji@2`",
    )
    format: FormatName | None = opt(None, "format of the source; detected by default")
    images: str | None = opt(None, "folder of the images that a table or annotation file refers to")
    image_column: str | None = opt(None, "table column with the images")
    caption_column: str | None = opt(None, "table column with the captions")
    captions: Literal["one", "all"] = opt("one", "captions of an image used per epoch: one, in turn, or all")
    captions_per_image: int | None = opt(
        None, "captions of an image that one step compares with its images", 1, 64
    )
    validation_share: float | None = opt(None, "share of validation images, if there is no split", 0.001, 0.5)
    max_unreadable: float = opt(0.1, "maximum share of unreadable images", 0.0, 1.0)
    pack: bool | None = opt(None, "store decoded images on disk; otherwise they are decoded in each epoch")
    crop: float | None = opt(None, "minimum share of an image in a random crop; 1 disables it", 0.05, 1.0)
    flip: bool | None = opt(None, "flip images horizontally at random")
    colour: float | None = opt(None, "strength of brightness, contrast and saturation jitter", 0.0, 1.0)
    word_dropout: float | None = opt(
        None, "share of a caption's tokens omitted at random in training", 0.0, 0.9
    )
    tokenizer: TokenizerName | None = opt(None, "BPE trained on the captions, or 33 characters")
    max_vocab: int = opt(4096, "maximum vocabulary size of the trained BPE", 300, 1_000_000)
    num_validation: int = opt(512, "validation images that recall is measured over", 2, 1_000_000)
    general: str | None = opt(
        None, "a second source, to see what a pretrained model forgets: its recall before, during and after"
    )
    workers: int | None = opt(None, "worker processes that prepare batches; 0: none", 0, 256)


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    size: SizeName = opt(
        "resnet-tiny", "model size, from `nano` (1.6 million parameters) to `huge` (1 billion)"
    )
    image_size: int | None = opt(None, "image resolution in pixels per side", 8, 1024)
    patch_size: int | None = opt(None, "patch size in pixels per side", 1, 1024)
    text_length: int | None = opt(None, "maximum tokens per caption; the rest is truncated", 4, 8192)
    embedding: int | None = opt(None, "numbers in an embedding", 2, 8192)
    recompute: bool = opt(False, "recompute activations: less memory, a third more time")
    base: str | None = opt(
        None,
        "pretrained model to start from: a run, a model folder, `hf-hub:OWNER/NAME`; with `--size`, a smaller model"
        " starts from a part of its weights",
    )
    image_tower: str | None = opt(
        None, "pretrained image encoder, frozen: `efficientnet-lite0`, `timm:NAME`, an ONNX file"
    )
    text_tower: str | None = opt(
        None, "pretrained text encoder, frozen: `minilm`, a folder of transformers, an ONNX file"
    )
    teacher: str | None = opt(
        None,
        "trained model from whose embeddings the new model also learns (distillation), named as for `--from`",
    )
    shape: str | None = opt(None, "shape of a model with pretrained weights, as JSON; written by training")


@dataclass(frozen=True)
class TrainConfig:
    """The optimization."""

    minutes: float | None = opt(None, "budget: minutes of training, without evaluation and saving", 0.01, 1e6)
    epochs: float | None = opt(None, "budget: passes over the data", 0.0001, 1e6)
    steps: int | None = opt(None, "budget: optimizer updates", 1, 10**9)
    batch_size: int | None = opt(None, "pairs contrasted with one another in one step", 2, 2**20)
    chunk: int | None = opt(None, "pairs in memory at once; does not affect the gradients", 1, 2**20)
    tune: TuneName | None = opt(
        None,
        "what is trained of a pretrained model: heads on cached features, LoRA adapters, the last blocks of each"
        " tower, all but the image tower, or all",
    )
    last_k: int = opt(2, "blocks of each tower that `--tune last-k` trains", 1, 1000)
    lora_rank: int = opt(8, "rank of the adapters of `--tune lora`", 1, 1024)
    layer_decay: float = opt(
        0.8, "learning rate of a pretrained block, as a share of the next one's", 0.1, 1.0
    )
    loss: LossName | None = opt(None, "loss function: softmax as in CLIP, or sigmoid as in SigLIP")
    lr: float | None = opt(None, "peak learning rate", 1e-12, 1000.0)
    warmup: float = opt(0.1, "share of the run with linear learning rate warm-up", 0.0, 0.9)
    weight_decay: float | None = opt(None, "AdamW weight decay, applied to matrices only", 0.0, 1000.0)
    beta1: float = opt(0.9, "AdamW beta1", 0.0, 0.9999)
    beta2: float = opt(0.98, "AdamW beta2", 0.0, 0.99999)
    clip_norm: float = opt(1.0, "gradient clipping norm", 1e-6, 1e12)
    dropout: float | None = opt(None, "share of a tower's features dropped before the projection", 0.0, 0.9)
    keep_patches: float | None = opt(None, "share of patches kept in training (patch dropout)", 0.05, 1.0)
    whole_from: float = opt(0.8, "share of the run after which all patches are kept", 0.0, 1.0)
    seed: int = opt(0, "random seed of weights, order, augmentation and patches", 0, 2**31)
    save_every: str = opt("5m", "checkpoint interval: steps (`500`) or training time (`90s`, `5m`, `1h`)")
    eval_every: str | None = opt(None, "evaluation interval: steps or training time, as above")
    pause_below: str | None = opt(None, "pause below this battery charge (`20%`) until plugged in")


@dataclass(frozen=True)
class DeviceConfig:
    """The machine."""

    device: DeviceName = opt("auto", "device; a named one must be present and pass the check against the CPU")
    precision: PrecisionName | None = opt(None, "precision of matrix products; weights stay in fp32")
    threads: int | None = opt(None, "CPU threads", 1, 1024)
    compile: bool | None = opt(None, "compile the model with torch.compile; the first steps take a minute")
    keep_memory: bool | None = opt(
        None, "keep freed memory for the next step instead of returning it to the system (Linux)"
    )
    max_memory: float | None = opt(None, "maximum memory in GB; automatic: 60% of the free memory", 0.1, 1e6)


@dataclass(frozen=True)
class Config:
    """All settings; complete once resolved."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    device: DeviceConfig = DeviceConfig()


BUDGETS = ("minutes", "epochs", "steps")
SHAPE = ("image_size", "patch_size", "text_length", "embedding")  # as the size, unless set
MAX_SCALE = 100.0  # no setting: sharper than this makes training unstable (arXiv 2103.00020, section 2.5)
# Other names under which flags and TOML files may give a setting; a renamed setting keeps its old name here.
ALIASES = {"color": "colour", "learning_rate": "lr", "grad_clip": "clip_norm"}


@dataclass(frozen=True)
class Plan:
    """An execution plan: the settings of how a step is run. None changes what is computed, but for rounding."""

    device: str
    precision: PrecisionName
    threads: int
    chunk: int
    compile: bool = False
    keep_memory: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is the reference for all others: the CPU in fp32, not compiled."""
        return self.device == "cpu" and self.precision == "fp32" and not self.compile

    def in_words(self) -> str:
        said = f"{self.device} {self.precision}, {plural(self.threads, 'thread')}, chunk {self.chunk}"
        return said + ", compiled" * self.compile + ", memory released" * (not self.keep_memory)


PLAN = tuple(f.name for f in fields(Plan))


@dataclass(frozen=True)
class Setting:
    """One line of a section: what the command line, TOML files and the reference page are made from."""

    section: str
    name: str
    type: Any  # without None, which means "decide"
    field: Field

    @property
    def flag(self) -> str:
        return "--from" if self.name == "base" else "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        return self.field.metadata["help"]

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        if typing.get_origin(self.type) is Literal:
            known = typing.get_args(self.type)
            if value in known:
                return None
            return f"is {shown(value)}, not one of {', '.join(f'`{k}`' for k in known)}{suggest(str(value), known)}"
        # TOML and Python write 3 for 3.0, but true is not a number.
        accepted = (int, float) if self.type is float else self.type
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.type is not bool):
            return f"is {shown(value)}, not {NAMES[self.type]}"
        low, high = self.field.metadata["low"], self.field.metadata["high"]
        if isinstance(value, float) and not math.isfinite(value):
            return f"is {value}, not a finite number"
        if low is not None and value < low:
            return f"is {value}, less than {low}"
        if high is not None and value > high:
            return f"is {value}, more than {high}"
        try:
            if self.name.endswith("_every"):
                expected = "neither steps (`500`) nor a time (`90s`, `5m`, `1h`)"
                parse_every(str(value))
            elif self.name == "pause_below":
                expected = "not a percentage such as `20%`"
                parse_percent(str(value))
        except ValueError:
            return f"is `{value}`, {expected}"
        return None


NAMES = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


def shown(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else json.dumps(value, default=str)


def settings() -> Iterator[Setting]:
    """Every setting there is, in order."""
    for section in fields(Config):
        for f in fields(section.type):  # type: ignore[arg-type]
            is_plain = typing.get_origin(f.type) in (None, Literal)
            kind = f.type if is_plain else typing.get_args(f.type)[0]  # of `int | None`
            yield Setting(section.name, f.name, kind, f)


SETTINGS = {setting.name: setting for setting in settings()}


def value_of(config: Config, name: str) -> Any:
    return getattr(getattr(config, SETTINGS[name].section), name)


def model_name(settings: Mapping[str, Any]) -> str:
    """What a run trains, by its settings of the model: a pretrained model, two towers, or a size."""
    if settings.get("base") and not settings.get("tune"):  # a smaller model made of it
        return f"{settings['size']} from {settings['base']}"
    towers = [str(tower) for name in ("image_tower", "text_tower") if (tower := settings.get(name))]
    return str(settings.get("base") or " and ".join(towers) or settings.get("size") or "")


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with some settings replaced."""
    for section in fields(Config):
        here = {name: value for name, value in values.items() if SETTINGS[name].section == section.name}
        config = replace(config, **{section.name: replace(getattr(config, section.name), **here)})
    return config


def load_config(file: Path | None = None, flags: Mapping[str, object] | None = None) -> Config:
    """Defaults, then the file, then flags (by setting name); all problems of both are reported at once."""
    problems: list[str] = []
    written = read_toml(file, problems) if file else {}
    config = overlay(Config(), written, problems, "`{0.section}.{0.name}`")
    config = overlay(config, flags or {}, problems, "`{0.flag}`")
    problems += contradictions(config)
    if problems:
        where = f"`{file}`" if file else "the command line"
        several = "\n  - ".join([f"{where} has {len(problems)} mistakes:", *problems])
        hint = "`--help` lists every setting under its section"
        raise UserError(several if len(problems) > 1 else problems[0], hint=hint)
    return config


def read_toml(file: Path, problems: list[str]) -> dict[str, object]:
    """The settings in a file by name; what does not belong there is added to `problems`."""
    try:
        tables = tomllib.loads(read_bounded(file).decode("utf-8"))
        json.dumps(tables, default=str)  # a value that is too large or too deep to be shown is refused here
    except OSError as error:
        hint = "pass a TOML file: `--config settings.toml`"
        raise UserError(f"cannot read `{file}`: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        hint = "write settings as `name = value` under a section such as [train]"
        raise UserError(f"`{file}` is not TOML: {error}", hint=hint) from None
    sections = [f.name for f in fields(Config)]
    values: dict[str, object] = {}
    for table, content in tables.items():
        if table not in sections:
            problems.append(f"`{table}` is not a section{home_of(table, sections)}")
        elif not isinstance(content, dict):
            what = f"{shown(content)}, not a section; write [{table}] above its settings"
            problems.append(f"`{table}` is {what}")
        else:
            here = [setting.name for setting in SETTINGS.values() if setting.section == table]
            for given, value in content.items():
                name = str(ALIASES.get(given, given))
                if name in here:
                    values[name] = value
                else:
                    problems.append(f"`{table}.{given}` is not a setting{home_of(name, here)}")
    return values


def home_of(name: str, known: list[str]) -> str:
    """Where a misplaced setting belongs, or which known name is meant."""
    return f"; it belongs under [{SETTINGS[name].section}]" if name in SETTINGS else suggest(name, known)


def overlay(config: Config, given: Mapping[str, object], problems: list[str], label: str) -> Config:
    """The config with some settings replaced; a budget replaces whichever budget it had before."""
    values: dict[str, object] = dict.fromkeys(BUDGETS) if any(name in BUDGETS for name in given) else {}
    for name, value in given.items():
        setting = SETTINGS[ALIASES.get(name, name)]
        if problem := setting.problem(value):
            problems.append(f"{label.format(setting)} {problem}")
        else:
            values[setting.name] = float(value) if setting.type is float else value  # type: ignore[arg-type]
    return with_values(config, values)


def contradictions(config: Config) -> list[str]:
    """What is wrong with settings that are each valid on their own."""
    problems = []
    budgets = [name for name in BUDGETS if getattr(config.train, name) is not None]
    if len(budgets) > 1:
        problems.append(f"{' and '.join(f'`{b}`' for b in budgets)} are both budgets; keep one")
    image_size, patch_size = config.model.image_size, config.model.patch_size
    if image_size and patch_size and image_size % patch_size:
        problems.append(f"`image_size` {image_size} is not a multiple of `patch_size` {patch_size}")
    return problems


def to_toml(config: Config) -> str:
    """The settings as a file that `load_config` reads back; what is still undecided is omitted."""
    lines = []
    for section in fields(Config):
        lines.append(f"[{section.name}]")
        for name, value in vars(getattr(config, section.name)).items():
            if value is not None:
                # A JSON string is a TOML string too, except for surrogate pairs and one control character.
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f"))
        lines.append("")
    return "\n".join(lines)
