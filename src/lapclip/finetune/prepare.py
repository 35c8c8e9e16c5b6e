"""Prepares a run that starts from pretrained weights: what is trained, on which features, with which settings."""

import json
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from lapclip.autotune.resolve import (
    ASKED,
    Choice,
    Choices,
    DataSummary,
    asked_or,
    resolve_eval_every,
    resolve_looks,
)
from lapclip.config import BUDGETS, SHAPE, Config, LossName, TrainConfig, value_of, with_values
from lapclip.data.batches import Batch
from lapclip.data.open import Data
from lapclip.data.source import Source
from lapclip.embedder import Embedder, find_model, load_checkpoint
from lapclip.errors import UserError, code
from lapclip.evaluate.pool import Pool
from lapclip.finetune import encoders
from lapclip.finetune.features import Features, compute_features
from lapclip.finetune.heads import BATCH_SIZE, STEPS, Candidate, sweep, with_heads
from lapclip.finetune.inherit import inherit
from lapclip.machine.device import DEFAULT_THREADS, processor, set_up_process
from lapclip.machine.hardware import read_machine
from lapclip.model.clip import Size, shape_of
from lapclip.model.encoders import Onnx
from lapclip.model.lora import add_adapters, targets
from lapclip.model.towers import Vocabulary
from lapclip.runs.run import Run
from lapclip.train.prepare import SIDE_WORDS, draft_of, resolve_here, sample_captions, write_run
from lapclip.units import LongWork, Progress, percent
from lapclip.weights import checkpoint
from lapclip.weights.reading import Pretrained

CROP = 0.35  # minimum share of an image in a crop: stronger than from scratch, since heads learn faster


@dataclass(frozen=True)
class CachedFeatures:
    """The features of both sides and of the general source, as the training loop takes them."""

    training: Features
    validation: Features
    general: Features | None = None

    def batches(self, _: Generator[Batch], /, **draw: int) -> Generator[Batch]:
        return self.training.batches(self.training.rows, **draw)

    def pool(self, embedder: Embedder, source: Source, num_images: int) -> Pool:
        own = next(one for one in (self.validation, self.general) if one and one.source is source)
        return own.pool(embedder, own.sample(num_images))


def find_pretrained(config: Config, *, is_inherited: bool = False) -> tuple[Config, Pretrained]:
    """The model to start from, or a smaller one of the config's size made of it, and the config with its shape."""
    asked = config.model
    if asked.base and (asked.image_tower or asked.text_tower):
        hint = "omit `--image-tower` and `--text-tower`"
        raise UserError("`--from` names a whole model, towers included", hint=hint)
    if asked.base:
        found = find_model(Path(asked.base))
    elif asked.image_tower and asked.text_tower:
        found = encoders.compose(asked.image_tower, asked.text_tower)
    else:
        missing = "--text-tower minilm" if asked.image_tower else "--image-tower efficientnet-lite0"
        raise UserError("a model needs both towers", hint=f"add `{missing}`")
    tokenizer, model = found.tokenizer, found.model
    ids = tokenizer.start, tokenizer.end, tokenizer.pad
    model.size = replace(model.size, vocabulary=Vocabulary(model.vocab_size, *ids))
    if is_inherited:
        model = inherit(model, shape_of(replace(asked, shape=None)))
        found = replace(found, model=model, weights=None)
    return with_shape(config, model.size), found


def with_shape(config: Config, size: Size) -> Config:
    sizes = {name: getattr(size, name) for name in SHAPE}
    return with_values(config, {"shape": json.dumps(size.described()), **sizes})


def preparing_heads(
    config: Config, found: Pretrained, name: str | None, data: Data, reserved: Run | None = None
) -> Generator[Progress | str, None, tuple[Run, CachedFeatures]]:
    """Computes features, compares head settings, and writes a run that trains the best ones."""
    threads = config.device.threads or DEFAULT_THREADS
    set_up_process(threads, keep_memory=True)
    captions = sample_captions(data.training)
    sides = sum(bool(SIDE_WORDS.search(caption)) for caption in captions) / max(1, len(captions))
    streamed = any(part.files is not None and part.files.is_streamed for part in data.parts)
    counts = data.training.num_pairs, data.validation.num_pairs
    summary = DataSummary(*counts, is_drawn=False, says_sides=sides, is_streamed=streamed, found=data.found)
    looks = resolve_looks(summary) | {"crop": Choice(CROP, "crops vary images that are used many times")}
    looks = {key: asked_or(config, key, choice) for key, choice in looks.items()}
    config = with_values(config, {key: choice.value for key, choice in looks.items()})
    cached = yield from open_features(config, found, data)
    loss: LossName = "sigmoid" if found.model.bias is not None else "softmax"
    batch_size = min(config.train.batch_size or BATCH_SIZE, len(cached.training.rows))
    # With the same settings whatever is asked for, so that further runs find the result on disk.
    judged = yield from sweep(found, cached.training, TrainConfig(loss=loss, batch_size=batch_size), threads)
    choices = resolve_heads(config, judged, batch_size, loss, data) | looks
    config = with_values(config, {key: choice.value for key, choice in choices.items()})
    model = with_heads(found, judged[0].head, cached.training, seed=config.train.seed)
    config = with_values(with_shape(config, model.size), data.settings)
    machine = asdict(read_machine()) | {"sweep": [asdict(candidate) for candidate in judged]}
    run = write_run(config, choices, data, found.tokenizer, name, machine, model.num_parameters, reserved)
    checkpoint.save_start(run.checkpoints, model, is_kept=found.is_aligned)
    return run, cached


def preparing_towers(
    config: Config, found: Pretrained, name: str | None, data: Data, reserved: Run | None = None
) -> Generator[Progress | str, None, tuple[Run, None]]:
    """A run that trains the towers or parts of them on images and captions, from the pretrained weights."""
    model, size = found.model, found.model.size
    for tower in (model.image, model.text):
        if isinstance(tower, Onnx):
            problem = f"{code(tower.name)} is an ONNX file, which cannot be trained"
            raise UserError(problem, hint="train heads on it: omit `--tune`")
    if not found.is_aligned:
        hint = f"train heads first, then `--from` that run with `--tune {config.train.tune}`"
        raise UserError("two towers that were never trained together need heads first", hint=hint)
    if config.train.tune == "lora":
        if not targets(model):
            problem = f"{code(found.name)} has no attention layers, which `--tune lora` adds adapters to"
            raise UserError(problem, hint="use `--tune last-k` or `--tune full`")
        size = replace(size, lora_rank=config.train.lora_rank)
    loss: LossName = "sigmoid" if model.bias is not None else "softmax"
    config = with_values(with_shape(config, size), {"loss": loss, "tokenizer": found.tokenizer.kind})
    _, draft = draft_of(config, data, found.tokenizer)
    resolved, choices, rate = yield from resolve_here(draft)
    determined = ("loss", "tokenizer", *(name for name in SHAPE if name in choices))
    choices |= {n: Choice(value_of(resolved, n), "as for the pretrained model") for n in determined}
    if config.train.tune:
        choices["tune"] = Choice(config.train.tune, ASKED, "asked")
    machine = asdict(draft.machine) | {"bench": rate}
    run = write_run(resolved, choices, data, found.tokenizer, name, machine, model.num_parameters, reserved)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(resolved.train.seed)
        if size.lora_rank:
            add_adapters(model, size.lora_rank)
    # What a smaller model starts from is of no use at the end.
    checkpoint.save_start(run.checkpoints, model, is_kept=bool(resolved.train.tune))
    return run, None


def open_features(config: Config, found: Pretrained, data: Data) -> LongWork[CachedFeatures]:
    embedder = Embedder(found.model.eval(), found.tokenizer, processor())
    return CachedFeatures(*(yield from compute_features(embedder, data, config.data)))


def reopen_features(config: Config, run: Run, data: Data) -> LongWork[CachedFeatures]:
    """Of a run that is resumed; they are computed again only if they were removed."""
    newest = checkpoint.latest(run.checkpoints)
    if newest is None:
        raise UserError(f"run `{run.name}` has no checkpoint", hint="start it again")
    return (yield from open_features(config, load_checkpoint(run, newest, run.name), data))


def resolve_heads(config: Config, judged: list[Candidate], batch_size: int, loss: str, data: Data) -> Choices:
    best = judged[0]
    how = "best on Flickr8k; there are too few images here to compare settings"
    if best.recall:
        others = ", ".join(percent(candidate.recall) for candidate in judged[1:])
        how = f"of {len(judged)} head settings, judged on training images held back, the heads with the most dropout "
        how += f"within a point of the best: mean recall {percent(best.recall)}, others {others}"
    proposed: Choices = {
        "tune": Choice("heads", "the towers are frozen, their features computed once"),
        "batch_size": Choice(batch_size, "large batches cost little on features"),
        "lr": Choice(best.lr, how),
        "keep_patches": Choice(1.0, "features are of whole images"),
        "workers": Choice(0, "features are only copied"),
        "precision": Choice("fp32", "the most precise"),
        "threads": Choice(DEFAULT_THREADS, "torch's default"),
        "chunk": Choice(batch_size, "the whole batch"),
        "compile": Choice(False, "heads are small"),
        "keep_memory": Choice(True, "otherwise, on Linux, each step allocates its memory again"),
    }
    if all(getattr(config.train, budget) is None for budget in BUDGETS):
        proposed["steps"] = Choice(STEPS, "as measured on Flickr8k")
        proposed["eval_every"] = Choice(str(STEPS // 5), "five evaluations per run")
    else:
        proposed["eval_every"] = resolve_eval_every(config, data.training.num_pairs, batch_size)
    choices = {key: asked_or(config, key, choice) for key, choice in proposed.items()}
    choices["device"] = Choice("cpu", "heads are small")
    choices["loss"] = Choice(loss, "as for the pretrained model")
    if (num := data.validation.num_pairs) < config.data.num_validation:
        choices["num_validation"] = Choice(num, f"all validation images of `{config.data.source}`")
    return choices
