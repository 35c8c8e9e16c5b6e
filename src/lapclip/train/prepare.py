"""Makes a run folder that is sufficient to train from, changes what may change on resume, and checks data for both."""

import re
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapclip.autotune.plans import plan_of
from lapclip.autotune.quick import time_a_step, try_out
from lapclip.autotune.resolve import (
    Choices,
    DataSummary,
    Draft,
    recorded,
    recorded_choices,
    resolve_settings,
    resolve_tokenizer,
)
from lapclip.autotune.work import Work
from lapclip.config import BUDGETS, PLAN, Config, DataConfig, load_config, value_of, with_values
from lapclip.data.advice import (
    SHARE,
    Advice,
    advise,
    advise_text_length,
    facts_of_captions,
    share_outside_a_to_z,
)
from lapclip.data.batches import fetch
from lapclip.data.decode import digest
from lapclip.data.doctor import MAX_READ, Report, examine
from lapclip.data.open import Data, Files, Part, may_share, open_source, open_unseen, plain_name
from lapclip.data.pairs import TRAIN, VALIDATION
from lapclip.data.source import Sample, Source
from lapclip.data.split import evaluation_set
from lapclip.data.tokenizer import WORDS, Tokenizer, train_tokenizer, words_of
from lapclip.errors import UserError, install_command, shortened, shortened_path, typed
from lapclip.evaluate.difficulty import spread
from lapclip.files import write_atomically
from lapclip.machine.device import processor
from lapclip.machine.hardware import read_machine, reset_peak_memory, versions
from lapclip.model.clip import shape_of
from lapclip.runs.run import Run, bases_of, new_run
from lapclip.step.loss import NEEDS_BIAS
from lapclip.units import LongWork, StagedWork, age, finished, plural
from lapclip.weights import checkpoint, reading

NUM_CAPTIONS_READ = 20_000  # to train the tokenizer on
MAX_PAIRS_WITH_WORDS = 1_000_000  # whose words are recorded, in a few seconds
NUM_GENERAL = 512  # images at most; `num_validation` is lowered to what the training source has
NUM_COUNTED = 101  # images whose captions are counted
NUM_FETCHED = 16  # pairs, to know how long drawing or decoding one takes
NUM_FETCHES = 4  # of which the fastest counts: others may be busy
SIDE_WORDS = re.compile(r"\b(left|right|links|rechts|gauche|droite|izquierda|derecha)\b", re.IGNORECASE)


def open_here(config: Config) -> LongWork[Data]:
    """Opens the data of a run, and says how far packing is; too many broken images are an error."""
    if config.data.general and not config.model.base:
        what = "`--general` needs a pretrained model whose two towers were trained together"
        raise UserError(what, hint="name one: `--from MODEL`")
    if config.data.format == "images":
        what = "`--format images` is for checking images without captions, not for training"
        raise UserError(what, hint="search them instead: `lapclip index FOLDER --model NAME`")
    data = yield from open_source(config.data, shape_of(config.model).image_size)
    for part in data.parts:
        if part.files is not None:
            refuse_if_broken(part.files, config.data.max_unreadable)
    if config.data.general:
        data = replace(data, general=(yield from open_general(config, data)))
    if config.model.base and (seen := (yield from seen_before(config, data))):
        stamps = [stamp for part in data.parts if part.files for stamp in part.files.stamps(VALIDATION)]
        data = replace(data, num_seen=sum(stamp in seen for stamp in stamps))
    return data


def seen_before(config: Config, data: Data) -> LongWork[set[str]]:
    """The stamps of the images that the run this one starts from was trained on, and those before it."""
    own = replace(config.data, source=data.source, images=data.images)
    seen, image_size = set[str](), shape_of(config.model).image_size
    for base, run in bases_of(config):
        with suppress(UserError):  # its source is no longer there
            if run.may_open(base) and may_share(own, base.data):
                opened = yield from open_source(base.data, image_size)
                seen |= {stamp for part in opened.parts if part.files for stamp in part.files.stamps(TRAIN)}
    return seen


def open_general(config: Config, data: Data) -> LongWork[Sample]:
    """As `lapclip eval` opens it: of what this run or the pretrained model is trained on only validation images."""
    assert config.data.general and config.model.base
    share = config.data.validation_share or (data.found["validation_share"].value if data.found else None)
    own = replace(config.data, source=data.source, validation_share=share)
    bases = bases_of(config)
    trained = [own, *(base.data for base, _ in bases)]
    openable = [own, *(base.data for base, run in bases if run.may_open(base))]
    asked = DataConfig(source=config.data.general, workers=config.data.workers)
    opened, is_own, _ = yield from open_unseen(asked, shape_of(config.model).image_size, trained, openable)
    source = evaluation_set(opened, validation_only=is_own).source
    indices = source.sample(NUM_GENERAL)
    fingerprint = digest(opened.fingerprint.encode(), bytes([is_own]), indices.tobytes()).hex()
    return Sample(source, indices, opened.source, fingerprint)


def refuse_if_broken(files: Files, tolerated: float) -> None:
    catalogue, broken = files.catalogue, files.pack.unreadable
    missing = [what for what, kind in catalogue.problems.kinds.items() if kind in ("missing", "outside")]
    num_missing = sum(catalogue.problems.counts[what] for what in missing)
    if (share := num_missing / (len(catalogue.names) + num_missing)) > tolerated:
        first = f"`{catalogue.problems.names[missing[0]][0]}` {missing[0]}"
        what = f"{plural(num_missing, 'image')} that `{files.name}` lists cannot be found: {first}"
        raise UserError(what, hint=f"pass the folder of the images: `--images FOLDER`, or {allowing(share)}")
    if (share := len(broken) / len(catalogue.names)) > tolerated:
        some = list(broken.items())[:3]
        named = ", ".join(f"`{shortened_path(catalogue.names[n])}` {shortened(why)}" for n, why in some)
        what = f"{len(broken):,} of {len(catalogue.names):,} images cannot be used: {named}"
        needs_heic = files.pack.num_needing_extra == len(broken)
        hint = f"repair or remove them, or {allowing(share)}"
        raise UserError(what, hint=install_command("heic") if needs_heic else hint)


def allowing(share: float) -> str:
    return f"allow this share of unusable images: `--max-unreadable {min(share + 0.01, 1):.2f}`"


def prepare(config: Config, name: str | None = None, data: Data | None = None) -> Run:
    """A new run folder, sufficient to train from."""
    return finished(preparing(config, name, data or finished(open_here(config))))


def preparing(config: Config, name: str | None, data: Data, reserved: Run | None = None) -> StagedWork[Run]:
    """Trains the tokenizer, resolves what is undecided, and writes the run folder, whole or not at all."""
    processor().release_memory()  # what an earlier run in this process held is not counted in this one's peak
    reset_peak_memory()
    tokenizer, draft = draft_of(config, data)
    resolved, choices, rate = yield from resolve_here(draft)
    machine = asdict(draft.machine) | {"bench": rate}
    return write_run(resolved, choices, data, tokenizer, name, machine, draft.work.num_parameters, reserved)


def write_run(
    config: Config,
    choices: Choices,
    data: Data,
    tokenizer: Tokenizer,
    name: str | None,
    machine: dict[str, Any],
    num_parameters: int,
    reserved: Run | None,
) -> Run:
    """Writes a run folder, whole or not at all."""
    checkpoint.check_space(Path(), num_parameters)
    model = "finetuned" if config.train.tune else config.model.size
    run = reserved or new_run(name, prefix=f"{plain_name(config.data.source)}-{model}")
    with ExitStack() as undo:
        if reserved is None:
            undo.callback(shutil.rmtree, run.path, ignore_errors=True)
        write_atomically(run.tokenizer_file, tokenizer.to_json())
        facts = {"torch": torch.__version__, "data": data.fingerprint, **recorded(choices)}
        run.write_machine(machine | versions() | facts)
        run.write_config(config)
        undo.pop_all()
    if not config.model.shape and (words := training_words(data)):  # a pretrained model knows others
        write_atomically(run.tokenizer_file.with_name(WORDS), "\n".join(words))
    return run


def revising(run: Run, flags: Mapping[str, object], data: Data | None) -> StagedWork[Config]:
    """Changes a run's settings; what followed from them is resolved again."""
    before, machine = run.load_config(), run.load_machine()
    choices = recorded_choices(before, machine)
    has_budget = any(budget in flags for budget in BUDGETS)
    follow = {"eval_every"} if has_budget else set()
    if flags.keys() & {"device", "max_memory", "recompute"}:
        follow |= {*PLAN} if "device" in flags else {"chunk"}
    asked = {name for name, choice in choices.items() if choice.origin == "asked"}
    config = load_config(run.path / "config.toml", flags)
    # What a run that was written before there were these settings trains with.
    new = {"captions_per_image": 1, "word_dropout": 0.0, "dropout": 0.0}
    since_then = {name: value_of(config, name) or value for name, value in new.items()}
    config = with_values(config, dict.fromkeys(follow - flags.keys() - asked) | since_then)
    _, draft = draft_of(config, data or finished(open_here(config)), own_tokenizer(config, run))
    resolved, new_choices, rate = yield from resolve_here(draft)
    if resolved != before:
        kept = {name: choice for name, choice in choices.items() if not (has_budget and name in BUDGETS)}
        changed = {n: c for n, c in new_choices.items() if n in flags or c.origin != "asked"}
        run.write_machine(machine | recorded(kept | changed) | ({"bench": rate} if rate else {}))
    return resolved


def own_tokenizer(config: Config, run: Run) -> Tokenizer:
    """The tokenizer of a run; before memory is allocated for a model, what does not fit its weights is refused."""
    size = shape_of(config.model)
    tokenizer = reading.read_run(run.path, size)
    if newest := checkpoint.latest(run.checkpoints):
        with reading.opened_weights(newest) as opened:
            reading.check_stored(newest, opened, size, tokenizer.vocab_size, config.train.loss in NEEDS_BIAS)
    return tokenizer


def draft_of(
    config: Config, data: Data | None = None, tokenizer: Tokenizer | None = None
) -> tuple[Tokenizer, Draft]:
    """Resolves on this machine what needs no measuring; a new run trains its tokenizer."""
    data = data or finished(open_here(config))
    captions = sample_captions(data.training)
    kind = resolve_tokenizer(config, share_outside_a_to_z(captions))
    tokenizer = tokenizer or train_tokenizer(kind.value, captions, config.data.max_vocab)
    captions = [caption for part in data.parts for caption in captions_of(part)]
    lengths = tokenizer.lengths(captions)
    summary = summarise(config, data, tokenizer, captions, lengths)
    config = with_values(config, data.settings)
    config, choices = resolve_settings(config, summary, kind)
    assert config.train.batch_size and config.model.text_length
    random, several = np.random.default_rng(0), config.data.captions_per_image or 1
    in_batch = config.train.batch_size * several
    longest = [random.choice(lengths, in_batch).max() for _ in range(32)]
    num_tokens = min(config.model.text_length, -(-int(np.median(longest)) // 8) * 8)
    work = Work(config.model, config.train, tokenizer.vocab_size, num_tokens, several)
    return tokenizer, Draft(config, choices, summary, read_machine(), work)


def resolve_here(draft: Draft) -> StagedWork[tuple[Config, Choices, dict[str, float]]]:
    """Resolves on this machine, by measuring where that is worth it; and how fast the chosen plan was then."""
    measured = yield from try_out(draft)
    timed = (yield from time_a_step(draft)) if measured is None else None
    resolved, choices = draft.resolve(measured, timed)
    threads, device = choices["threads"], choices["device"]
    if measured is None and threads.origin != "asked" and draft.machine.num_cores > 1:
        reason = f"{threads.reason}; the run is too short to measure others"
        choices["threads"] = replace(threads, reason=reason)
    if measured is not None and time.time() - measured.when > 60 and device.origin != "asked":
        reason = f"{device.reason}; all speeds measured {age(time.time() - measured.when)}"
        choices["device"] = replace(device, reason=reason)
    candidates = measured.candidates if measured and not measured.is_disturbed else ()
    rate = next((c.pairs_per_second for c in candidates if c.plan == plan_of(resolved)), None)
    speeds = {"pairs_per_second": rate, "timed_pairs_per_second": timed}
    return resolved, choices, {name: speed for name, speed in speeds.items() if speed}


def summarise(
    config: Config, data: Data, tokenizer: Tokenizer, captions: list[str], lengths: np.ndarray
) -> DataSummary:
    """The facts that choices depend on, from a sample of the captions and their lengths in tokens."""
    is_drawn = all(part.files is None for part in data.parts)
    is_remote, size = any("://" in part.name for part in data.parts), shape_of(config.model)
    facts = facts_of_captions(
        captions,
        lengths,
        num_train=data.training.num_pairs,
        num_validation=data.validation.num_pairs,
        text_length=size.text_length,
        tokenizer=tokenizer.kind,
    )
    longer = advise_text_length(facts) if tokenizer.kind == "characters" else None
    longer = longer if longer and longer.value > size.text_length else None
    return DataSummary(
        num_train=data.training.num_pairs,
        num_validation=data.validation.num_pairs,
        # What lapclip draws is known, and the recipes were made for it; but characters need more tokens.
        advice={a.setting: a for a in advise(facts) if a.setting and (not is_drawn or a == longer)},
        is_drawn=is_drawn,
        says_sides=float(np.mean([bool(SIDE_WORDS.search(caption)) for caption in captions])),
        only_copies=data.training.only_copies,
        is_streamed=any(part.files is not None and part.files.is_streamed for part in data.parts),
        is_remote=is_remote,
        fetch_seconds=0.0 if is_remote else seconds_to_fetch(data.training, size.image_size),
        found=data.found,
        captions_per_image=typical_captions(data.training),
    )


def typical_captions(source: Source) -> int:
    """How many captions at least half of the images have."""
    some = np.linspace(0, source.num_different - 1, NUM_COUNTED).astype(int)
    return int(np.median([len(source.captions(int(index))) for index in some]))


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


def sample_captions(source: Source) -> list[str]:
    """Captions from all over a source."""
    num_pairs = min(source.num_different, NUM_CAPTIONS_READ)
    indices = np.unique(np.linspace(0, source.num_different - 1, num_pairs).astype(int))
    captions = [caption for index in indices for caption in source.captions(int(index))]
    return [captions[number] for number in spread(len(captions), NUM_CAPTIONS_READ)]


def captions_of(part: Part) -> list[str]:
    """Captions on both sides, as the doctor counts them: all, or many from all over."""
    if part.files is None:
        return sample_captions(part.training)
    return [part.files.table.caption(int(n)) for n in spread(int(part.files.table.first[-1]), MAX_READ)]


def training_words(data: Data) -> list[str] | None:
    """The words of all training captions; None where there are too many. What lapclip draws repeats its few words."""
    num_pairs, is_drawn = data.training.num_different, all(part.files is None for part in data.parts)
    num_pairs = min(num_pairs, NUM_CAPTIONS_READ) if is_drawn else num_pairs
    captions = (caption for index in range(num_pairs) for caption in data.training.captions(index))
    return words_of(captions) if num_pairs <= MAX_PAIRS_WITH_WORDS else None


def refuse_if_other(run: Run, data: Data) -> None:
    """A run may find its data in another place, but not other data."""
    if run.load_machine().get("data") not in (None, data.fingerprint):
        what = f"`{data.source}` has other pairs than when run `{run.name}` started"
        again = f"lapclip train --config {typed(run.path)}/config.toml --source ..."
        raise UserError(what, hint=f"make a run with its settings: `{again}`")


def check_up(config: Config, part: Part) -> Report:
    """What the data doctor says about one part, with the tokenizer and the settings that training would choose."""
    files = part.files
    assert files is not None, "what lapclip draws is sound"
    sample = sample_captions(part.training)
    kind = resolve_tokenizer(config, share_outside_a_to_z(sample)).value
    tokenizer = train_tokenizer(kind, sample, config.data.max_vocab)
    lengths = tokenizer.lengths([caption for own in files.catalogue.captions for caption in own])
    size = shape_of(config.model)
    report = examine(files, lengths, text_length=size.text_length, tokenizer=kind, image_size=size.image_size)
    share = [files.share] * (files.share.value > SHARE and not report.own_split)
    advice = [a for a in report.advice + share if not a.setting or value_of(config, a.setting) is None]
    num = files.pack.num_needing_extra
    try:
        refuse_if_broken(files, config.data.max_unreadable)
    except UserError as problem:
        advice.append(Advice(None, None, f"training refuses this source: {problem}; {problem.hint}"))
        num = 0 if num == len(files.pack.unreadable) else num  # then the hint says what to install
    if num:
        why = f"{num:,} of the unreadable images are HEIC: `{install_command('heic')}`, then try again"
        advice.append(Advice(None, None, why))
    return replace(report, advice=advice)
