"""Pure: config + measurements + a summary of the data in, complete config and the reason of each choice out."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from lapclip.autotune.memory import step_bytes
from lapclip.autotune.results import Budget, Candidate, Measured, choose, reasons_for
from lapclip.config import BUDGETS, Config, FormatName, LossName, TokenizerName, TrainConfig
from lapclip.data.advice import Advice, DataFacts, advise_tokenizer
from lapclip.errors import UserError
from lapclip.machine.hardware import Machine
from lapclip.model.clip import flops_per_pair, shape_of
from lapclip.step.step import Plan


@dataclass(frozen=True)
class DataSummary:
    """What choices need to know of the data."""

    num_train: int
    num_validation: int
    advice: dict[str, Advice] = field(default_factory=dict)  # of the doctor, by setting
    share_outside_a_to_z: float = 0.0  # of the captions' letters
    is_drawn: bool = True  # by lapclip itself: always new, and its captions say left and right
    says_sides: float = 1.0  # share of captions with `left` or `right`
    only_copies: bool = False  # nothing is drawn or decoded while training
    is_streamed: bool = False  # decoded in every epoch, for want of a pack
    is_remote: bool = False
    fetch_seconds: float = 0.0  # to draw or decode one pair, on one core
    format: FormatName | None = None  # what the one source turned out to be


@dataclass(frozen=True)
class Recipe:
    """What a size trains best with, as far as it was measured; docs/log.md tells how."""

    batch_size: int
    lr: float
    keep_patches: float
    why: str


RECIPES = {
    "nano": Recipe(128, 1e-3, 1.0, "as for `tiny`, at a quarter of its patches"),
    "tiny": Recipe(128, 1e-3, 0.5, "the best of what was tried, see docs/log.md"),
    "small": Recipe(12, 3e-4, 1.0, "as in the documents"),
    "base": Recipe(12, 3e-4, 1.0, "as in the documents"),
}
OTHER_SIZES = Recipe(32, 3e-4, 0.5, "assumed for this size, not measured")
CHARACTER_SIZES = ("small", "base")  # the documents' tokenizer; their parameter counts include its 33 symbols
DEFAULT_MINUTES = 3.0
LEAST_SECONDS = 15  # between evaluations, so that a short run does not consist of them
USUAL_FLOPS = 5e10  # a second, where nothing was measured
LITTLE = 0.03  # of a step: preparing a batch may take so long without help
SHARE_OF_MEMORY = 0.6  # of what is free, so that the machine stays usable

Reasons = dict[str, str]
ASKED = "asked for"
T = TypeVar("T")


def resolve_tokenizer(config: Config, share_outside_a_to_z: float) -> tuple[TokenizerName, str]:
    """The kind of tokenizer, which must be there before the rest can be resolved."""
    if config.data.tokenizer is not None:
        return config.data.tokenizer, ASKED
    if config.model.size not in CHARACTER_SIZES:
        return "bpe", "words of your captions become tokens, in any language"
    advised = advise_tokenizer(
        DataFacts(0, 0, tokenizer="characters", share_outside_a_to_z=share_outside_a_to_z)
    )
    if advised is not None:
        return advised.value, advised.why
    return "characters", f"`{config.model.size}` is the documents' model and counts their 33 symbols"


def resolve_text_length(config: Config, data: DataSummary) -> tuple[int, Reasons]:
    """As long as the size has it, unless captions need more or far less."""
    default = shape_of(config.model).text_length
    advised = data.advice.get("text_length")
    if config.model.text_length is not None or advised is None:
        return default, {}
    return advised.value, {"text_length": advised.why}


def resolve(
    config: Config,
    data: DataSummary,
    machine: Machine,
    *,
    threads: int,
    num_parameters: int,
    measured: Measured | None = None,
    room: Mapping[str, int] | None = None,
) -> tuple[Config, Reasons]:
    """Replaces every `None` but those that mean "look at the source"; what was asked for stays as it is.

    `threads` is what torch chose, `room` the memory that each device may use.
    """
    size = shape_of(config.model)
    recipe = RECIPES.get(config.model.size, OTHER_SIZES)
    tokenizer, why_tokenizer = resolve_tokenizer(config, data.share_outside_a_to_z)
    reasons: Reasons = {"tokenizer": why_tokenizer}

    def choose_one(name: str, asked: T | None, value: T, why: str) -> T:
        reasons[name] = ASKED if asked is not None else why
        return value if asked is None else asked

    train = config.train
    if all(getattr(train, budget) is None for budget in BUDGETS):
        train = replace(train, minutes=DEFAULT_MINUTES)
        reasons["minutes"] = "no budget given"
    batch_size = choose_one("batch_size", train.batch_size, *resolve_batch_size(recipe, data))
    if batch_size > data.num_train:
        raise UserError(
            f"a batch of {batch_size} pairs cannot be filled: `{config.data.source}` has {data.num_train}",
            hint=f"pass `--batch-size {data.num_train}` or less",
        )
    chosen, why = resolve_plan(
        replace(config, train=train),
        machine,
        num_parameters,
        num_train=data.num_train,
        batch_size=batch_size,
        threads=threads,
        measured=measured,
        room=room or {},
    )
    plan, reasons = chosen.plan, reasons | why
    step_seconds = batch_size / (
        chosen.pairs_per_second or USUAL_FLOPS / (3 * flops_per_pair(size, num_tokens=size.text_length))
    )
    resolved_train = replace(
        train,
        batch_size=batch_size,
        chunk=plan.chunk,
        loss=choose_one("loss", train.loss, *resolve_loss(data)),
        lr=choose_one("lr", train.lr, recipe.lr, recipe.why),
        keep_patches=choose_one("keep_patches", train.keep_patches, recipe.keep_patches, recipe.why),
        eval_every=choose_one(
            "eval_every",
            train.eval_every,
            resolve_eval_every(train, data.num_train, batch_size),
            "ten times in the run, or fewer in a short one",
        ),
    )
    resolved_model = replace(
        config.model, image_size=size.image_size, patch_size=size.patch_size, text_length=size.text_length
    )
    resolved_data = replace(
        config.data,
        tokenizer=tokenizer,
        num_validation=min(config.data.num_validation, data.num_validation),
        workers=choose_one(
            "workers", config.data.workers, *resolve_workers(data, machine, batch_size, step_seconds)
        ),
        **{
            name: choose_one(name, getattr(config.data, name), *value)
            for name, value in resolve_looks(data).items()
        },
    )
    if data.format is not None:
        found = choose_one("format", config.data.format, data.format, "what the source looks like")
        resolved_data = replace(resolved_data, format=found)
    if data.is_drawn:
        reasons = {name: why for name, why in reasons.items() if name not in LOOKS or why == ASKED}
    if resolved_data.num_validation < config.data.num_validation:
        reasons["num_validation"] = f"all that `{config.data.source}` holds out"
    resolved = Config(data=resolved_data, model=resolved_model, train=resolved_train, device=config.device)
    return with_plan(resolved, plan), reasons


def resolve_plan(
    config: Config,
    machine: Machine,
    num_parameters: int,
    *,
    num_train: int,
    batch_size: int,
    threads: int,
    measured: Measured | None,
    room: Mapping[str, int],
) -> tuple[Candidate, Reasons]:
    """How steps are run: the fastest of what was measured, or what usually is."""
    device, train = config.device, config.train
    steps = total_steps(train, num_train, batch_size)
    budget = Budget(
        seconds=train.minutes * 60 if train.minutes else None, num_pairs=steps * batch_size if steps else None
    )
    chosen = choose(measured.candidates, budget) if measured else None
    name = chosen.plan.device if chosen else "cpu" if device.device == "auto" else device.device
    limit = room.get(name, int(machine.available_bytes * SHARE_OF_MEMORY))
    chunk, reason = resolve_chunk(config, batch_size, num_parameters, limit)
    reasons = USUAL | {"chunk": reason}
    if measured is None and (others := [f"`{other}`" for other in room if other != name]):
        reasons["device"] = f"too short a run to find out whether {' or '.join(others)} is faster"
    if measured is not None and chosen is not None:
        found = reasons_for(chosen, measured)
        if chosen.plan.chunk == chunk and "chunk" in found:
            found["chunk"] = f"{reason}; {found['chunk']}"
        reasons = reasons | found
    asked = {part: getattr(device, part) for part in ("precision", "threads", "compile", "keep_memory")}
    asked |= {"device": None if device.device == "auto" else device.device, "chunk": train.chunk}
    reasons |= {part: ASKED for part, value in asked.items() if value is not None}
    if train.chunk is not None and train.chunk > batch_size:
        reasons["chunk"] = f"the whole batch; {train.chunk} would be more than there is"
    usual = Plan(
        device=name,
        precision=device.precision or "fp32",
        threads=device.threads or threads,
        chunk=min(batch_size, train.chunk or chunk),
        compile=bool(device.compile),
        keep_memory=device.keep_memory is not False,
    )
    return chosen or Candidate(usual), reasons


def plan_of(config: Config) -> Plan:
    """How the steps of a resolved run are run."""
    parts = {name: getattr(config.device, name) for name in asdict(config.device) if name != "max_memory"}
    assert config.device.device != "auto" and config.train.chunk and None not in parts.values(), "resolved"
    return Plan(**parts, chunk=config.train.chunk)


def with_plan(config: Config, plan: Plan) -> Config:
    """The config of a run with another plan."""
    parts = asdict(plan)
    train = replace(config.train, chunk=parts.pop("chunk"))
    return replace(config, train=train, device=replace(config.device, **parts))


USUAL = {
    "device": "the only device here",
    "precision": "the most exact",
    "threads": "what torch chose",
    "compile": "`lapclip bench --compile` would tell what it gains",
    "keep_memory": "otherwise, on Linux, each step takes its memory anew",
}


def resolve_chunk(config: Config, batch_size: int, num_parameters: int, limit: int) -> tuple[int, str]:
    """The largest chunk that fits into memory; a limit that was asked for is kept or refused."""
    recompute, size = config.model.recompute, shape_of(config.model)
    least = min(config.train.chunk or 1, batch_size)
    needed = step_bytes(size, num_parameters, least, recompute)
    if config.device.max_memory is not None and needed > limit:
        raise UserError(
            f"chunks of {least} need about {needed / 1e9:.1f} GB with `{config.model.size}`,"
            f" and `--max-memory` allows {limit / 1e9:.1f}",
            hint=f"allow more: `--max-memory {math.ceil(needed / 1e8) / 10:g}`"
            if least == 1
            else "choose a smaller `--chunk`, or leave it away",
        )
    chunk = batch_size
    while chunk > 1 and step_bytes(size, num_parameters, chunk, recompute) > limit:
        chunk = (chunk + 1) // 2
    if chunk == batch_size:
        return chunk, "the whole batch fits into memory"
    return chunk, f"more would not fit into the {limit / 1e9:.1f} GB that may be used"


def resolve_batch_size(recipe: Recipe, data: DataSummary) -> tuple[int, str]:
    advised = data.advice.get("batch_size")
    if advised is not None and advised.value < recipe.batch_size:
        return advised.value, advised.why
    if recipe.batch_size > data.num_train:
        return data.num_train, "all the pairs there are"
    return recipe.batch_size, recipe.why


def resolve_loss(data: DataSummary) -> tuple[LossName, str]:
    advised = data.advice.get("loss")
    return (advised.value, advised.why) if advised else ("softmax", "CLIP's own")


def resolve_workers(
    data: DataSummary, machine: Machine, batch_size: int, step_seconds: float
) -> tuple[int, str]:
    """Processes that draw or decode ahead, where that is a notable part of a step."""
    if data.only_copies:
        return 0, "a thread copies the next batch from the pack during a step"
    if data.is_remote:
        return 1, "one process reads ahead, so that nothing is fetched twice"
    share = data.fetch_seconds * batch_size / step_seconds
    taken = f"preparing a batch takes {share:.0%} of a step"
    if share < LITTLE:
        return 0, taken
    return min(
        math.ceil(share), max(1, machine.num_cores // 2)
    ), f"{taken} of {float(f'{step_seconds:.2g}'):g} s"


def resolve_looks(data: DataSummary) -> dict[str, tuple[Any, str]]:
    """How images are kept and varied, with reasons; what is drawn anew each time needs none of it."""
    says_sides = data.says_sides > 0.02
    return {
        "pack": (not data.is_streamed, f"there is {'no ' if data.is_streamed else ''}room for it"),
        "crop": (
            1.0 if data.is_drawn else 0.6,
            "the same images come again and again; crops keep them new",
        ),
        "flip": (
            not says_sides,
            f"{data.says_sides:.0%} of the captions say left or right"
            if says_sides
            else "hardly a caption says left or right",
        ),
        "colour": (0.0, "captions name colours"),
    }


LOOKS = ("pack", "crop", "flip", "colour")


def resolve_eval_every(train: TrainConfig, num_train: int, batch_size: int) -> str:
    total = total_steps(train, num_train, batch_size)
    if total is not None:
        return str(max(1, total // 10))
    assert train.minutes is not None
    return f"{max(train.minutes * 6, LEAST_SECONDS):g}s"


def total_steps(train: TrainConfig, num_train: int, batch_size: int) -> int | None:
    """Steps of the whole run; None when its budget is time."""
    if train.epochs is not None:
        return max(1, round(train.epochs * num_train / batch_size))
    return train.steps


def share_done(train: TrainConfig, total: int | None, step: int, seconds: float) -> float:
    """How much of the budget is used: 1 at its end."""
    if total is not None:
        return step / total
    assert train.minutes is not None, "one of them is the budget"
    return seconds / (train.minutes * 60)


def half_a_step(share: float, step: int, total: int | None) -> float:
    """From the start of a step to its middle, where the schedule is read: otherwise the first step would not learn."""
    if total is not None:
        return 0.5 / total
    return 0.5 * share / step if step else 0.005  # of a timed run's first step nobody knows the length
