"""Every setting, once: the name is the flag, the section is the TOML table, the sentence is the help.

`None` means "decide": `resolve` replaces it before training, with a reason. Reading a file or flags collects all
problems before it complains.
"""

import json
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from lapclip.errors import UserError, suggest
from lapclip.units import parse_every, parse_percent

SizeName = Literal[
    "nano", "tiny", "small", "base", "medium", "large", "huge", "vit-b-32", "vit-b-16", "vit-l-14"
]  # fmt: skip


TokenizerName = Literal["bpe", "characters"]
LossName = Literal["softmax", "sigmoid"]
DeviceName = Literal["auto", "cpu", "mps", "cuda"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
FormatName = Literal[
    "txt", "metadata", "classes", "names", "csv", "tsv", "jsonl", "parquet", "flickr", "coco", "karpathy", "tar", "hf"
]  # fmt: skip


def opt(default: Any, sentence: str, *, at_least: float | None = None, at_most: float | None = None) -> Any:
    """A setting: its default, its help, and the range its value must lie in."""
    return field(default=default, metadata={"help": sentence, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True)
class DataConfig:
    """What is learned from."""

    source: str = opt(
        "synthetic",
        "where pairs come from: a folder, a table, `captions_*.json`, `shards/*.tar`, `hf:NAME`, `emoji`,"
        " `synthetic`; several as `photos + emoji@2`, with a weight",
    )
    format: FormatName | None = opt(None, "what the source is, when lapclip takes it for something else")
    images: str | None = opt(None, "folder of the images that a table or annotation file names")
    image_column: str | None = opt(None, "column of a table that holds the images")
    caption_column: str | None = opt(None, "column of a table that holds the captions")
    captions: Literal["one", "all"] = opt(
        "one", "an epoch shows each image with one of its captions, in turn, or with all of them"
    )
    validation_share: float = opt(
        0.05,
        "share of the images held out, where a dataset has no split of its own",
        at_least=0.001,
        at_most=0.5,
    )
    max_unreadable: float = opt(0.1, "share of broken images that is put up with", at_least=0.0, at_most=1.0)
    pack: bool | None = opt(
        None, "keep a decoded copy of the images on the disk; without, they are decoded in every epoch"
    )
    crop: float | None = opt(
        None,
        "least share of an image that a random crop shows; 1 shows all of it",
        at_least=0.05,
        at_most=1.0,
    )
    flip: bool | None = opt(None, "mirror every second image")
    colour: float | None = opt(
        None, "how far brightness, contrast and saturation are changed at random", at_least=0.0, at_most=1.0
    )
    tokenizer: TokenizerName | None = opt(
        None, "how captions become tokens: a BPE trained on them, or 33 characters"
    )
    max_vocab: int = opt(4096, "most tokens the trained BPE may have", at_least=300)
    num_validation: int = opt(512, "held-out images that recall is measured over", at_least=2)
    workers: int | None = opt(
        None, "processes that prepare the next batches; 0 does it between steps", at_least=0
    )


@dataclass(frozen=True)
class ModelConfig:
    """What learns."""

    size: SizeName = opt("tiny", "the shape of the model, by name")
    image_size: int | None = opt(None, "pixels of each side of an image", at_least=8, at_most=1024)
    patch_size: int | None = opt(None, "pixels of each side of a patch", at_least=1)
    text_length: int | None = opt(None, "most tokens of a caption; the rest is cut", at_least=4)
    recompute: bool = opt(
        False, "compute activations twice instead of keeping them: less memory, a third more time"
    )


@dataclass(frozen=True)
class TrainConfig:
    """How it learns."""

    minutes: float | None = opt(
        None, "budget: minutes of training, not counting evaluation and saving", at_least=0.01
    )
    epochs: float | None = opt(None, "budget: times over the data", at_least=0.0001)
    steps: int | None = opt(None, "budget: optimizer updates", at_least=1)
    batch_size: int | None = opt(None, "pairs contrasted with one another in one step", at_least=2)
    chunk: int | None = opt(None, "pairs in memory at once; any chunk gives the same gradients", at_least=1)
    loss: LossName | None = opt(None, "softmax as in CLIP, or sigmoid as in SigLIP")
    lr: float | None = opt(None, "highest learning rate", at_least=1e-12)
    warmup: float = opt(0.1, "share of the run in which the learning rate rises", at_least=0.0, at_most=0.9)
    weight_decay: float = opt(0.1, "AdamW's weight decay; matrices only", at_least=0.0)
    beta1: float = opt(0.9, "AdamW's memory of the gradient", at_least=0.0, at_most=0.9999)
    beta2: float = opt(0.98, "AdamW's memory of its square", at_least=0.0, at_most=0.99999)
    clip_norm: float = opt(1.0, "longest gradient that is not shortened", at_least=1e-6)
    keep_patches: float | None = opt(
        None, "share of each image's patches looked at while training", at_least=0.05, at_most=1.0
    )
    whole_from: float = opt(
        0.8, "share of the run after which whole images are looked at", at_least=0.0, at_most=1.0
    )
    seed: int = opt(0, "decides weights, order and which patches are kept", at_least=0, at_most=2**31)
    save_every: str = opt("5m", "between checkpoints: steps (`500`) or training time (`90s`, `5m`, `1h`)")
    eval_every: str | None = opt(None, "between evaluations: steps or training time, written as above")
    pause_below: str | None = opt(
        None, "charge of the battery (`20%`) below which training waits until it is plugged in"
    )


@dataclass(frozen=True)
class DeviceConfig:
    """What it runs on."""

    device: DeviceName = opt("auto", "what to train on; one asked for by name must be there, and right")
    precision: PrecisionName | None = opt(None, "what products are computed in; weights stay in fp32")
    threads: int | None = opt(None, "processor threads", at_least=1)
    compile: bool | None = opt(None, "have torch compile the model; the first steps then take a minute")
    keep_memory: bool | None = opt(
        None, "the allocator keeps what a step frees, for the next one; makes a difference on Linux"
    )
    max_memory: float | None = opt(
        None,
        "most memory to use, in GB; the chunk follows from it. Without, a share of what is free",
        at_least=0.1,
    )


@dataclass(frozen=True)
class Config:
    """All settings; complete once resolved."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    device: DeviceConfig = DeviceConfig()


BUDGETS = ("minutes", "epochs", "steps")
MAX_SCALE = 100.0  # no setting: sharper than this makes training unstable (arXiv 2103.00020, section 2.5)


@dataclass(frozen=True)
class Setting:
    """One line of a section: what the command line, TOML files and the reference page are made from."""

    section: str
    name: str
    type: Any  # without the None that stands for "decide"
    field: Field

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

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
        low, high = self.field.metadata["at_least"], self.field.metadata["at_most"]
        if isinstance(value, float) and not math.isfinite(value):
            return f"is {value}, not a finite number"
        if low is not None and value < low:
            return f"is {value}, less than {low}"
        if high is not None and value > high:
            return f"is {value}, more than {high}"
        if self.name.endswith("_every"):
            try:
                parse_every(str(value))
            except ValueError:
                return f"is `{value}`, neither steps (`500`) nor a time (`90s`, `5m`, `1h`)"
        if self.name == "pause_below":
            try:
                parse_percent(str(value))
            except ValueError:
                return f"is `{value}`, not a percentage such as `20%`"
        return None


NAMES = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


def shown(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else json.dumps(value, default=str)


def settings() -> Iterator[Setting]:
    """Every setting there is, in order."""
    for section in fields(Config):
        for f, hint in zip(fields(section.type), typing.get_type_hints(section.type).values(), strict=True):  # type: ignore[arg-type]
            options = [t for t in typing.get_args(hint) if t is not type(None)]
            kind = options[0] if typing.get_origin(hint) in (typing.Union, types.UnionType) else hint
            yield Setting(section.name, f.name, kind, f)


SETTINGS = {setting.name: setting for setting in settings()}


def load_config(file: Path | None = None, flags: Mapping[str, object] | None = None) -> Config:
    """Defaults, then the file, then flags (by setting name); all problems of both are said at once."""
    problems: list[str] = []
    config = Config()
    if file is not None:
        config = overlay(
            config, read_toml(file, problems), problems, label=lambda s: f"`{s.section}.{s.name}`"
        )
    config = overlay(config, flags or {}, problems, label=lambda s: f"`{s.flag}`")
    problems += contradictions(config)
    if problems:
        raise UserError(*problems_in_words(problems, file))
    return config


def problems_in_words(problems: list[str], file: Path | None) -> tuple[str, str]:
    where = f"`{file}`" if file else "the command line"
    hint = "`--help` lists every setting under its section"
    if len(problems) == 1:
        return problems[0], hint
    return f"{where} has {len(problems)} mistakes:" + "".join(f"\n  - {p}" for p in problems), hint


def read_toml(file: Path, problems: list[str]) -> dict[str, object]:
    """The settings in a file by name; what does not belong there is added to `problems`."""
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read `{file}`: {error.strerror}", hint="pass a TOML file: `--config settings.toml`"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"`{file}` is not TOML: {error}", hint="write settings as `name = value` under [train] and so on"
        ) from None
    sections = [f.name for f in fields(Config)]
    values: dict[str, object] = {}
    for table, content in tables.items():
        if table not in sections:
            home = (
                f"; it belongs under [{SETTINGS[table].section}]"
                if table in SETTINGS
                else suggest(table, sections)
            )
            problems.append(f"`{table}` is not a section{home}")
        elif not isinstance(content, dict):
            problems.append(
                f"`{table}` is {shown(content)}, not a section; write [{table}] and its settings below"
            )
        else:
            here = [s.name for s in SETTINGS.values() if s.section == table]
            for name, value in content.items():
                if name in here:
                    values[name] = value
                else:
                    home = (
                        f"; it belongs under [{SETTINGS[name].section}]"
                        if name in SETTINGS
                        else suggest(name, here)
                    )
                    problems.append(f"`{table}.{name}` is not a setting{home}")
    return values


def overlay(config: Config, values: Mapping[str, object], problems: list[str], label: Any) -> Config:
    """The config with some settings replaced; a budget replaces whichever budget stood there before."""
    if any(name in BUDGETS for name in values):
        config = replace(config, train=replace(config.train, minutes=None, epochs=None, steps=None))
    for name, value in values.items():
        setting = SETTINGS[name]
        problem = setting.problem(value)
        if problem:
            problems.append(f"{label(setting)} {problem}")
            continue
        typed = float(value) if setting.type is float else value  # type: ignore[arg-type]  # checked above
        section = replace(getattr(config, setting.section), **{name: typed})
        config = replace(config, **{setting.section: section})
    return config


def contradictions(config: Config) -> list[str]:
    """What is wrong with settings that are each right on their own."""
    problems = []
    budgets = [name for name in BUDGETS if getattr(config.train, name) is not None]
    if len(budgets) > 1:
        problems.append(f"{' and '.join(f'`{b}`' for b in budgets)} are both budgets; keep one")
    image_size, patch_size = config.model.image_size, config.model.patch_size
    if image_size and patch_size and image_size % patch_size:
        problems.append(f"`image_size` {image_size} is not a multiple of `patch_size` {patch_size}")
    return problems


def to_toml(config: Config) -> str:
    """The settings as a file that `load_config` reads back; what is still undecided is left out."""
    lines = []
    for section in fields(Config):
        lines.append(f"[{section.name}]")
        for f in fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), f.name)
            if value is not None:
                # A JSON string is a TOML string too, but for surrogate pairs and the one control JSON leaves as it is.
                lines.append(f"{f.name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f"))
        lines.append("")
    return "\n".join(lines)
