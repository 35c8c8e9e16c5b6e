"""Makes a run folder that is alone enough to train from, and changes what may change when a run goes on."""

import math
import re
import shutil
import time
import typing
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from lapclip.autotune.quick import devices_for, room_on, try_out
from lapclip.autotune.rehearsal import Work
from lapclip.autotune.resolve import (
    ASKED,
    DataSummary,
    Reasons,
    plan_of,
    resolve,
    resolve_text_length,
    resolve_tokenizer,
    share_done,
    total_steps,
)
from lapclip.autotune.results import Measured
from lapclip.config import BUDGETS, SETTINGS, Config, FormatName, load_config
from lapclip.data.advice import advise, facts_of_captions
from lapclip.data.batches import fetch
from lapclip.data.open import Data, Part, open_source, plain_name
from lapclip.data.scripts import share_outside_a_to_z
from lapclip.data.source import Source
from lapclip.data.tokenizer import NUM_CHARACTERS, Tokenizer, load_tokenizer, train_tokenizer
from lapclip.errors import UserError, shortened
from lapclip.files import write_atomically
from lapclip.machine.device import default_threads
from lapclip.machine.hardware import Machine, read_machine, versions
from lapclip.model.clip import count_parameters, shape_of
from lapclip.runs.run import Run, new_run
from lapclip.step.loss import NEEDS_BIAS
from lapclip.units import Progress, age, finished
from lapclip.weights import checkpoint

NUM_CAPTIONS_READ = 20_000  # to train the tokenizer on
NUM_CAPTIONS_TIMED = 2_000  # to know how long they usually are
NUM_FETCHED = 16  # pairs, to know how long drawing or decoding one takes
NUM_FETCHES = 4  # of which the fastest counts: others may be busy
SIDE_WORDS = re.compile(r"\b(left|right|links|rechts|gauche|droite|izquierda|derecha)\b", re.IGNORECASE)
PLAN = {"precision", "threads", "chunk", "compile", "keep_memory"}  # that follow from the device


def open_here(config: Config) -> Generator[Progress, None, Data]:
    """Opens the data of a run, and says how far packing is; too many broken images are an error."""
    data = yield from open_source(config.data, shape_of(config.model).image_size)
    for part in data.parts:
        refuse_if_broken(part, config.data.max_unreadable)
    return data


def refuse_if_broken(part: Part, most: float) -> None:
    if part.files is None:
        return
    catalogue, broken = part.files.catalogue, part.files.pack.unreadable
    missing = catalogue.problems.of_kind("missing", "outside")
    num_missing = sum(catalogue.problems.counts[what] for what in missing)
    if num_missing > most * (len(catalogue.names) + num_missing):
        name = catalogue.problems.names[missing[0]][0]
        raise UserError(
            f"{num_missing:,} images that `{part.name}` names cannot be found: `{name}` {missing[0]}",
            hint="say where the images are: `--images FOLDER`; or tolerate it: `--max-unreadable 1`",
        )
    if not broken:
        return
    num_pictures = len(catalogue.names)
    if (share := len(broken) / num_pictures) > most:
        first = list(broken.items())[:3]
        named = ", ".join(f"`{shortened(catalogue.names[n])}` {shortened(why)}" for n, why in first)
        raise UserError(
            f"{len(broken):,} of {num_pictures:,} images cannot be used: {named}",
            hint=f"mend or remove them, or put up with them: `--max-unreadable {share + 0.01:.2f}`",
        )


def prepare(config: Config, name: str | None = None, data: Data | None = None) -> Run:
    """A new run folder, alone enough to train from."""
    return finished(preparing(config, name, data or finished(open_here(config))))


def preparing(
    config: Config, name: str | None, data: Data, reserved: Run | None = None
) -> Generator[str, None, Run]:
    """Trains the tokenizer, resolves what is undecided, and writes the run folder, whole or not at all."""
    tokenizer = tokenizer_for(config, data)
    resolved, reasons, first, rate = yield from resolve_here(config, tokenizer, data)
    checkpoint.check_space(Path(), first.num_parameters)
    run = reserved or new_run(name, prefix=f"{plain_name(config.data.source)}-{config.model.size}")
    with ExitStack() as undo:
        if reserved is None:
            undo.callback(shutil.rmtree, run.path, ignore_errors=True)
        run.make_folders()
        write_atomically(run.tokenizer_file, tokenizer.to_json())
        facts = {"torch": torch.__version__, "data": data.fingerprint, "reasons": reasons, "bench": rate}
        run.write_machine(asdict(first.machine) | versions() | facts)
        run.write_config(resolved)
        undo.pop_all()
    return run


def tokenizer_for(config: Config, data: Data) -> Tokenizer:
    """Trains the tokenizer of a new run."""
    captions = sample_captions(data.training, NUM_CAPTIONS_READ)
    kind, _ = resolve_tokenizer(config, share_outside_a_to_z(captions))
    return train_tokenizer(kind, captions, config.data.max_vocab)


def revise(run: Run, flags: Mapping[str, object], data: Data | None = None) -> Config:
    """A run's settings with some changed, to go on with."""
    return finished(revising(run, flags, data))


def revising(run: Run, flags: Mapping[str, object], data: Data | None) -> Generator[str, None, Config]:
    """Changes a run's settings; what followed from them is resolved again."""
    before = run.load_config()
    machine = run.load_machine()
    reasons = machine.get("reasons", {})
    config = load_config(run.path / "config.toml", flags)
    follows_budget = any(budget in flags for budget in BUDGETS) and reasons.get("eval_every") != ASKED
    if follows_budget and "eval_every" not in flags:
        config = replace(config, train=replace(config.train, eval_every=None))
    follow = PLAN if "device" in flags else {"chunk"} if flags.keys() & {"max_memory", "recompute"} else set()
    undecided = {name for name in follow if name not in flags and reasons.get(name) != ASKED}
    if undecided:
        for section in ("train", "device"):
            here = {name: None for name in undecided if SETTINGS[name].section == section}
            config = replace(config, **{section: replace(getattr(config, section), **here)})
    data = data or finished(open_here(config))
    resolved, new_reasons, _, rate = yield from resolve_here(config, load_tokenizer(run.tokenizer_file), data)
    if resolved != before:
        if any(budget in flags for budget in BUDGETS):
            reasons = {name: reason for name, reason in reasons.items() if name not in BUDGETS}
        changed = {name: reason for name, reason in new_reasons.items() if name in flags or reason != ASKED}
        known = {"bench": rate} if rate else {}
        run.write_machine(machine | {"reasons": reasons | changed} | known)
    return resolved


@dataclass(frozen=True)
class Draft:
    """A run as far as it can be resolved without measuring, and what there is to measure."""

    asked: Config
    resolved: Config
    summary: DataSummary
    machine: Machine
    num_parameters: int
    work: Work
    reasons: Reasons  # of what comes before settling

    def resolve(self, measured: Measured | None) -> tuple[Config, Reasons]:
        return resolve_on(self.machine, self.asked, self.summary, self.num_parameters, measured)


def resolve_on(
    machine: Machine, config: Config, summary: DataSummary, num_parameters: int, measured: Measured | None
) -> tuple[Config, Reasons]:
    return resolve(
        config,
        summary,
        machine,
        threads=default_threads(),
        num_parameters=num_parameters,
        measured=measured,
        room=room_on(devices_for(config.device), config.device, machine),
    )


def draft(config: Config, tokenizer: Tokenizer, data: Data) -> Draft:
    """Resolves on this machine what needs no measuring."""
    machine = read_machine()
    summary = summarise(config, data, tokenizer)
    text_length, why_text_length = resolve_text_length(config, summary)
    config = replace(
        config,
        data=replace(config.data, source=data.source, images=data.images),
        model=replace(config.model, text_length=text_length),
    )
    num_parameters = count_parameters(
        shape_of(config.model),
        vocab_size=tokenizer.vocab_size,
        has_bias=(config.train.loss or "softmax") in NEEDS_BIAS,
    )
    resolved, _ = resolve_on(machine, config, summary, num_parameters, None)
    assert resolved.train.batch_size is not None
    lengths = tokenizer.lengths(sample_captions(data.training, NUM_CAPTIONS_TIMED))
    num_tokens = usual_tokens(lengths, resolved.train.batch_size, text_length)
    work = Work(resolved.model, resolved.train, tokenizer.vocab_size, num_tokens)
    return Draft(config, resolved, summary, machine, num_parameters, work, why_text_length)


def resolve_here(
    config: Config, tokenizer: Tokenizer, data: Data
) -> Generator[str, None, tuple[Config, Reasons, Draft, dict[str, float]]]:
    """Resolves on this machine, by measuring where that is worth it; and how fast the chosen plan was then."""
    first = draft(config, tokenizer, data)
    measured = yield from try_out(
        first.asked, first.resolved, first.work, first.machine, first.summary.num_train
    )
    resolved, reasons = first.resolve(measured)
    if measured is None and reasons["threads"] != ASKED and first.machine.num_cores > 1:
        reasons["threads"] += "; the run is too short to measure others"
    if measured is not None and time.time() - measured.when > 60 and reasons["device"] != ASKED:
        reasons["device"] += f"; all speeds measured {age(time.time() - measured.when)}"
    candidates = measured.candidates if measured else ()
    rate = next((c.pairs_per_second for c in candidates if c.plan == plan_of(resolved)), None)
    return resolved, reasons | first.reasons, first, {"pairs_per_second": rate} if rate else {}


def usual_tokens(lengths: np.ndarray, batch_size: int, text_length: int) -> int:
    """To which length captions of a batch are padded, most often."""
    random = np.random.default_rng(0)
    longest = np.median([random.choice(lengths, batch_size).max() for _ in range(32)])
    return min(text_length, -(-int(longest) // 8) * 8)


def summarise(config: Config, data: Data, tokenizer: Tokenizer) -> DataSummary:
    """What choices need to know, from a sample of the captions."""
    captions = sample_captions(data.training, NUM_CAPTIONS_READ)
    is_drawn = all(part.files is None for part in data.parts)
    is_remote = any("://" in part.name for part in data.parts)
    facts = facts_of_captions(
        captions,
        tokenizer.lengths(captions),
        num_train=data.training.num_pairs,
        num_validation=data.validation.num_pairs,
        text_length=shape_of(config.model).text_length,
        tokenizer="characters" if tokenizer.vocab_size == NUM_CHARACTERS else "bpe",
    )
    return DataSummary(
        num_train=data.training.num_pairs,
        num_validation=data.validation.num_pairs,
        # What lapclip draws is known, and the recipes were made for it.
        advice={} if is_drawn else {advice.setting: advice for advice in advise(facts) if advice.setting},
        share_outside_a_to_z=share_outside_a_to_z(captions),
        is_drawn=is_drawn,
        says_sides=float(np.mean([bool(SIDE_WORDS.search(caption)) for caption in captions])),
        only_copies=data.training.only_copies,
        is_streamed=any(part.files is not None and part.files.is_streamed for part in data.parts),
        is_remote=is_remote,
        fetch_seconds=0.0
        if is_remote
        else seconds_to_fetch(data.training, shape_of(config.model).image_size),
        format=format_of(data),
    )


def seconds_to_fetch(source: Source, image_size: int) -> float:
    """How long drawing or decoding one pair takes on one core; nothing for what is only copied."""
    if source.only_copies:
        return 0.0
    indices = np.unique(np.linspace(0, source.num_different - 1, NUM_FETCHED).astype(int))
    size, epochs = source.stored_size(image_size), np.zeros_like(indices)
    seconds = []
    for _ in range(NUM_FETCHES):
        started = time.perf_counter()
        fetch(source, indices, epochs, size, seed=0)
        seconds.append(time.perf_counter() - started)
    return min(seconds) / len(indices)


def format_of(data: Data) -> FormatName | None:
    """What `--format` would call it, for one source alone."""
    files = data.parts[0].files
    known = {name: name for name in typing.get_args(FormatName)}
    return known.get(files.catalogue.format) if files is not None and len(data.parts) == 1 else None


def sample_captions(source: Source, most: int) -> list[str]:
    """Captions from all over a source, all wordings of each pair."""
    num_pairs = min(source.num_different, most)
    indices = np.unique(np.linspace(0, source.num_different - 1, num_pairs).astype(int))
    return list(islice((c for index in indices for c in source.captions(int(index))), most))


def refuse_if_other(run: Run, data: Data) -> None:
    """A run may find its data in another place, but not other data."""
    if run.load_machine().get("data") not in (None, data.fingerprint):
        raise UserError(
            f"`{data.source}` holds other pairs than run `{run.name}` began with",
            hint=f"start a new run from its settings: `lapclip train --config {run.path}/config.toml --source ...`",
        )


def refuse_if_finished(run: Run, config: Config, num_pairs: int) -> None:
    """Refuses to go on with a run that ended with its budget and was given no larger one."""
    newest = checkpoint.latest(run.checkpoints)
    if newest is None or not run.is_finished():
        return
    now, cfg = checkpoint.load_progress(newest), config.train
    assert cfg.batch_size is not None, "resolved"
    steps = total_steps(cfg, num_pairs, cfg.batch_size)
    if share_done(cfg, steps, now.step, now.seconds) < 1:
        return
    done = f"{now.seconds / 60:.1f} minutes" if steps is None else f"{now.step} steps"
    more = f"--minutes {math.ceil(now.seconds / 30)}" if steps is None else f"--steps {2 * now.step}"
    raise UserError(
        f"run `{run.name}` has had its budget: {done} of training",
        hint=f"give it a larger one, counted from its start: `lapclip train --resume {run.reference} {more}`",
    )
