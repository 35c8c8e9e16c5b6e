"""Pure: config, measurements and a summary of the data in, complete config and the reason of each choice out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lapclip.autotune.plans import Budget, Candidate, Measured, asked_parts, choose, reasons_for
from lapclip.autotune.work import Work
from lapclip.config import BUDGETS, PLAN, SETTINGS, SHAPE, Config, Plan, value_of, with_values
from lapclip.data.advice import Advice, DataFacts, advise_tokenizer
from lapclip.errors import UserError
from lapclip.machine.device import DEFAULT_THREADS, Device, device_named, present_devices
from lapclip.machine.hardware import Machine
from lapclip.model.clip import flops_per_pair, shape_of
from lapclip.step.optim import USUAL_DECAY
from lapclip.units import plural

Origin = Literal["asked", "measured", "advised", "default"]
ASKED = "asked for"


@dataclass(frozen=True)
class Choice:
    """The value of a setting, where it comes from, and why in words."""

    value: Any
    reason: str
    origin: Origin = "default"


Choices = dict[str, Choice]  # by setting


@dataclass(frozen=True)
class DataSummary:
    """The facts about the data that choices depend on."""

    num_train: int
    num_validation: int
    advice: dict[str, Advice] = field(default_factory=dict)  # of the doctor, by setting
    is_drawn: bool = True  # by lapclip itself: always new, and its captions mention left and right
    says_sides: float = 1.0  # share of captions with `left` or `right`
    only_copies: bool = False  # nothing is drawn or decoded while training
    is_streamed: bool = False  # decoded in every epoch, for lack of a pack
    is_remote: bool = False
    fetch_seconds: float = 0.0  # to draw or decode one pair, on one core
    found: Mapping[str, Advice] = field(default_factory=dict)  # by opening the source
    captions_per_image: int = 1


@dataclass(frozen=True)
class Recipe:
    """What a size trains best with, as far as it was measured; docs/log.md tells how."""

    batch_size: int
    lr: float
    keep_patches: float
    why: str
    weight_decay: float = USUAL_DECAY


RECIPES = {
    "nano": Recipe(128, 1e-3, 1.0, "as for `tiny`, with a quarter of its patches"),
    "resnet-tiny": Recipe(128, 2e-3, 1.0, "best of the values tried", weight_decay=0.3),
    "tiny": Recipe(128, 1e-3, 0.5, "best of the values tried"),
    "small": Recipe(12, 3e-4, 0.3, "as in the documents, with fewer patches: three times their speed"),
    "base": Recipe(12, 3e-4, 1.0, "as in the documents"),
}
OTHER_SIZES = Recipe(32, 3e-4, 0.5, "assumed for this size, not measured")
FINETUNED = Recipe(128, 1e-4, 1.0, "small steps, which keep what the model knows")
CHARACTER_SIZES = ("small", "base")  # the documents' tokenizer; their parameter counts include its 33 symbols
DEFAULT_MINUTES = 3.0
MIN_SECONDS = 15  # between evaluations, so that a short run does not consist of them
TYPICAL_FLOPS = 1.2e11  # a second, where nothing was measured
NEGLIGIBLE = 0.03  # of a step: preparing a batch may take so long without workers
SHARE_OF_MEMORY = 0.6  # of what is free, so that the machine stays usable
MAX_CAPTIONS = 5  # of an image in a step
FEW_EPOCHS, MANY_EPOCHS = 6, 20  # up to the first, augmentation is weak; from the second on, strong
LOOKS = ("pack", "crop", "flip", "colour", "word_dropout", "dropout")  # how pairs are stored and augmented
DEFAULTS = {
    "device": "the only available device",
    "precision": "the most precise",
    "threads": "torch's default",
    "compile": "compiling takes a while; `lapclip bench --compile` measures the gain",
    "keep_memory": "otherwise, on Linux, each step allocates its memory again",
}


@dataclass(frozen=True)
class Draft:
    """A run with all settings resolved but its execution plan and workers, which follow from measurements."""

    config: Config
    choices: Choices
    data: DataSummary
    machine: Machine
    work: Work

    @property
    def budget(self) -> Budget:
        return Budget.of(self.config.train, self.data.num_train, self.work.batch_size)

    @property
    def undecided_looks(self) -> list[str]:
        """The settings of augmentation that follow from the number of epochs."""
        if self.config.train.tune is not None or self.data.is_drawn:
            return []
        return [name for name in resolve_augmentation(0) if self.choices[name].origin != "asked"]

    def resolve(self, measured: Measured | None = None, timed: float | None = None) -> tuple[Config, Choices]:
        """The complete config, and the choice of each setting that was undecided; `timed` is in pairs per second."""
        chosen, choices = resolve_plan(self, measured)
        rate = chosen.pairs_per_second or timed or typical_rate(self.config)
        workers = resolve_workers(self.data, self.machine, self.work.batch_size, self.work.batch_size / rate)
        choices |= self.choices | {"workers": asked_or(self.config, "workers", workers)}
        if self.undecided_looks:
            epochs = self.budget.num_epochs(self.data.num_train, self.work.batch_size, rate)
            stronger = resolve_augmentation(epochs)
            choices |= {name: stronger[name] for name in self.undecided_looks}
        values = {name: choice.value for name, choice in choices.items()}
        return with_values(self.config, values), {name: choices[name] for name in SETTINGS if name in choices}


def typical_rate(config: Config) -> float:
    """Pairs per second where nothing was measured."""
    size = shape_of(config.model)
    num_patches = round((config.train.keep_patches or 1.0) * size.num_patches)
    return TYPICAL_FLOPS / (3 * flops_per_pair(size, num_tokens=size.text_length, num_patches=num_patches))


def resolve_settings(config: Config, data: DataSummary, tokenizer: Choice) -> tuple[Config, Choices]:
    """Replaces every `None` that does not depend on speed, nor means "see the source"; what was asked for stays."""
    recipe = FINETUNED if config.train.tune else RECIPES.get(config.model.size, OTHER_SIZES)
    choices: Choices = {"tokenizer": tokenizer}
    if all(getattr(config.train, budget) is None for budget in BUDGETS):
        choices["minutes"] = Choice(DEFAULT_MINUTES, "no budget given")
        config = with_values(config, {"minutes": DEFAULT_MINUTES})
    batch_size = asked_or(config, "batch_size", resolve_batch_size(recipe, data))
    if batch_size.value > data.num_train:
        has = f"`{config.data.source}` has {plural(data.num_train, 'training pair')}"
        hint = f"pass `--batch-size {data.num_train}` or less"
        raise UserError(f"a batch of {batch_size.value} pairs cannot be filled: {has}", hint=hint)
    if shape_of(config.model).image_encoder and (config.train.keep_patches or 1.0) < 1:
        what = f"the image tower of `{config.model.size}` has no patches to drop"
        raise UserError(what, hint="omit `--keep-patches`, or pass `--size tiny`")
    proposed = {
        "batch_size": batch_size,
        "captions_per_image": resolve_captions(config, data),
        "loss": advised(data, "loss") or Choice("softmax", "as in CLIP"),
        "lr": Choice(recipe.lr, recipe.why),
        "weight_decay": Choice(recipe.weight_decay, recipe.why),
        "keep_patches": Choice(recipe.keep_patches, recipe.why),
        "eval_every": resolve_eval_every(config, data.num_train, batch_size.value),
        **resolve_looks(data),
    }
    choices |= {name: asked_or(config, name, choice) for name, choice in proposed.items()}
    choices |= {n: Choice(v, ASKED, "asked") for n in SHAPE if (v := value_of(config, n)) is not None}
    if config.model.text_length is None and (choice := advised(data, "text_length")):
        choices["text_length"] = choice
    if data.num_validation < config.data.num_validation:
        reason = f"all validation images of `{config.data.source}`"
        choices["num_validation"] = Choice(data.num_validation, reason)
    config = with_values(config, {name: choice.value for name, choice in choices.items()})
    size = shape_of(config.model)
    hidden = LOOKS * data.is_drawn + ("keep_patches",) * (size.image_encoder is not None)
    shown = {n: c for n, c in choices.items() if n not in hidden or c.origin == "asked"}
    return with_values(config, {name: getattr(size, name) for name in SHAPE}), shown


def asked_or(config: Config, name: str, choice: Choice) -> Choice:
    asked = value_of(config, name)
    return choice if asked is None or choice.origin == "asked" else Choice(asked, ASKED, "asked")


def advised(data: DataSummary, name: str) -> Choice | None:
    advice = data.advice.get(name)
    return Choice(advice.value, advice.why, "advised") if advice else None


def resolve_tokenizer(config: Config, share: float) -> Choice:
    """The kind of tokenizer, which must exist before the rest can be resolved; `share` of letters is outside a to z."""
    if config.data.tokenizer is not None:
        return Choice(config.data.tokenizer, ASKED, "asked")
    if config.model.size not in CHARACTER_SIZES:
        return Choice("bpe", "trained on your captions, in any language")
    facts = DataFacts(num_train=0, num_validation=0, tokenizer="characters", share_outside_a_to_z=share)
    if advice := advise_tokenizer(facts):
        return Choice(advice.value, advice.why, "advised")
    return Choice("characters", f"the 33 characters of the documents' `{config.model.size}` model")


def resolve_plan(draft: Draft, measured: Measured | None) -> tuple[Candidate, Choices]:
    """The fastest plan of those measured, or a plain one."""
    config, batch_size, asked = draft.config, draft.work.batch_size, asked_parts(draft.config)
    chosen = choose(measured.trusted, draft.budget, batch_size) if measured else None
    name = chosen.plan.device if chosen else asked.get("device", "cpu")
    chunk = resolve_chunk(draft, device_named(name))
    reasons = DEFAULTS | {"chunk": chunk.reason}
    others = [f"`{device.name}`" for device in devices_for(config) if device.name != name]
    if measured is None and others:
        reasons["device"] = f"the run is too short to measure whether {' or '.join(others)} is faster"
    found = reasons_for(chosen, measured) if measured and chosen else {}
    if measured and measured.is_disturbed:
        found = {part: why for part, why in found.items() if part == "device"}
        reasons["threads"] += f"; {measured.others_in_words}"
    if chosen and chosen.plan.chunk == chunk.value and "chunk" in found:
        found["chunk"] = f"{chunk.reason}; {found['chunk']}"
    told = reasons | found | dict.fromkeys(asked, ASKED)
    if asked.get("chunk", 0) > batch_size:
        told["chunk"] = f"the whole batch, which is smaller than {asked['chunk']}"
    parts = {"device": name, "precision": "fp32", "threads": DEFAULT_THREADS, "chunk": chunk.value} | asked
    usual = Plan(**parts | {"chunk": min(batch_size, parts["chunk"])})
    chosen = chosen or Candidate(usual)
    choices = {}
    for part in PLAN:
        origin: Origin = "asked" if part in asked else "measured" if part in found else "default"
        choices[part] = Choice(getattr(chosen.plan, part), told[part], origin)
    return chosen, choices


def devices_for(config: Config) -> list[Device]:
    """The one asked for, which must be present, or all that are."""
    asked = config.device.device
    return list(present_devices()) if asked == "auto" else [device_named(asked)]


def resolve_chunk(draft: Draft, device: Device) -> Choice:
    """The largest chunk that fits into memory; a limit that was asked for is kept or refused."""
    config, work, allowed = draft.config, draft.work, draft.config.device.max_memory
    free_bytes = device.free_bytes(draft.machine.available_bytes) * SHARE_OF_MEMORY
    limit = free_bytes if allowed is None else allowed * 1e9
    least = min(config.train.chunk or 1, work.batch_size)
    needed = work.step_bytes(least)
    if allowed is not None and needed > limit:
        need = f"chunks of {least} need about {needed / 1e9:.1f} GB with `{config.model.size}`"
        hint = f"allow more: `--max-memory {math.ceil(needed / 1e8) / 10:g}`"
        raise UserError(f"{need}, and `--max-memory` allows {limit / 1e9:.1f}", hint=hint)
    chunk = work.batch_size
    while chunk > 1 and work.step_bytes(chunk) > limit:
        chunk = (chunk + 1) // 2
    if chunk == work.batch_size:
        return Choice(chunk, "the whole batch fits into memory")
    return Choice(chunk, f"a larger chunk would not fit into {limit / 1e9:.1f} GB of memory")


def resolve_batch_size(recipe: Recipe, data: DataSummary) -> Choice:
    if (choice := advised(data, "batch_size")) and choice.value < recipe.batch_size:
        return choice
    if recipe.batch_size > data.num_train:
        return Choice(data.num_train, "all pairs of the source")
    return Choice(recipe.batch_size, recipe.why)


def resolve_captions(config: Config, data: DataSummary) -> Choice:
    """How many captions of an image a step uses: several where embedding a caption costs next to nothing."""
    if config.model.teacher or not shape_of(config.model).token_mean:
        return Choice(1, "each further one would take as long as the first")
    usual = min(data.captions_per_image, MAX_CAPTIONS)
    return Choice(usual, "more cost next to nothing" if usual > 1 else "most images have one")


def resolve_workers(data: DataSummary, machine: Machine, batch_size: int, step_seconds: float) -> Choice:
    """Processes that draw or decode ahead, where that is a notable part of a step."""
    if data.only_copies:
        return Choice(0, "a thread copies the next batch from the pack during a step")
    if data.is_remote:
        return Choice(1, "one process reads ahead, so that nothing is downloaded twice")
    share = data.fetch_seconds * batch_size / step_seconds
    reason = f"preparing a batch takes {share:.0%} of a step"
    if share < NEGLIGIBLE:
        return Choice(0, reason)
    workers = min(math.ceil(share), max(1, machine.num_cores // 2))
    return Choice(workers, f"{reason} of {float(f'{step_seconds:.2g}'):g} s", "measured")


def resolve_looks(data: DataSummary) -> Choices:
    """How images are read, stored and augmented; what is drawn again each time needs none of it."""
    says_sides, no = data.says_sides > 0.02, "not " if data.is_streamed else ""
    sides = f"{data.says_sides:.0%} of the captions mention left or right"
    return {
        "pack": Choice(not data.is_streamed, f"there is {no}enough disk space"),
        "crop": Choice(1.0 if data.is_drawn else 0.6, "crops vary images that are used many times"),
        "flip": Choice(not says_sides, sides if says_sides else "few captions mention left or right"),
        "colour": Choice(0.0, "captions may mention colours"),
        "word_dropout": Choice(0.0, "captions are used whole"),
        "dropout": Choice(0.0, "no features of the towers are dropped"),
        **{name: Choice(advice.value, advice.why) for name, advice in data.found.items()},
    }


def resolve_augmentation(epochs: float) -> Choices:
    """Stronger the more often each image is used: what a model may memorise must look new each time."""
    strength = min(1.0, max(0.0, (epochs - FEW_EPOCHS) / (MANY_EPOCHS - FEW_EPOCHS)))
    reason = f"for about {plural(max(1, round(epochs)), 'epoch')}: the more, the stronger"
    strongest = {"colour": 0.2, "word_dropout": 0.15, "dropout": 0.2}
    values = {name: strength * most for name, most in strongest.items()} | {"crop": 0.6 - 0.2 * strength}
    return {name: Choice(round(value, 2), reason) for name, value in values.items()}


def resolve_eval_every(config: Config, num_train: int, batch_size: int) -> Choice:
    budget = Budget.of(config.train, num_train, batch_size)
    every = f"{max((budget.seconds or 0.0) / 10, MIN_SECONDS):g}s"
    if budget.steps is not None:
        every = str(max(1, budget.steps // 10))
    return Choice(every, "ten evaluations per run, fewer in a short one")


def recorded(choices: Choices) -> dict[str, dict[str, str]]:
    """What `machine.json` keeps of choices; their values are in `config.toml`."""
    return {
        "reasons": {name: choice.reason for name, choice in choices.items()},
        "origins": {name: choice.origin for name, choice in choices.items()},
    }


def recorded_choices(config: Config, machine: Mapping[str, Any]) -> Choices:
    """The choices of a run. One written by version 0.1 has no origins; what was asked for is known by its reason."""
    choices = {}
    for name, reason in machine.get("reasons", {}).items():
        origin = machine.get("origins", {}).get(name, "asked" if reason == ASKED else "default")
        choices[name] = Choice(value_of(config, name), reason, origin)
    return choices
