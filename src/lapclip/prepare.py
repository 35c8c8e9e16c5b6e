"""Makes a run folder that is alone enough to train from, and changes what may change when a run goes on."""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch

from lapclip import checkpoint
from lapclip.config import BUDGETS, Config, load_config
from lapclip.data.source import Source, open_source
from lapclip.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from lapclip.device import default_threads, pick_device
from lapclip.errors import UserError
from lapclip.loss import NEEDS_BIAS
from lapclip.machine import read_machine
from lapclip.model.clip import count_parameters, shape_of
from lapclip.run import Run, new_run, write_atomically
from lapclip.settle import ASKED, DataSummary, Reasons, settle, settle_tokenizer, share_done, total_steps

NUM_CAPTIONS_READ = 20_000  # to train the tokenizer on


def prepare(config: Config, name: str | None = None) -> Run:
    """Trains the tokenizer, settles what is undecided, and writes the run folder, whole or not at all."""
    training, _ = open_source(config.data.source)
    kind, _ = settle_tokenizer(config)
    tokenizer = train_tokenizer(kind, first_captions(training, NUM_CAPTIONS_READ), config.data.max_vocab)
    settled, reasons, num_parameters = settle_here(config, tokenizer)
    checkpoint.check_space(Path(), num_parameters)
    run = new_run(name, prefix=f"{config.data.source.replace(':', '-')}-{config.model.size}")
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, run.path, ignore_errors=True)
        run.make_folders()
        write_atomically(run.tokenizer_file, tokenizer.to_json())
        run.write_machine(asdict(read_machine()) | {"torch": torch.__version__, "reasons": reasons})
        run.write_config(settled)
        undo.pop_all()
    return run


def revise(run: Run, flags: Mapping[str, object]) -> Config:
    """A run's settings with some changed, to go on with; what followed from them is settled again."""
    before = run.load_config()
    machine = run.load_machine()
    reasons = machine.get("reasons", {})
    config = load_config(run.path / "config.toml", flags)
    follows_budget = any(budget in flags for budget in BUDGETS) and reasons.get("eval_every") != ASKED
    if follows_budget and "eval_every" not in flags:
        config = replace(config, train=replace(config.train, eval_every=None))
    settled, new_reasons, _ = settle_here(config, load_tokenizer(run.tokenizer_file))
    if settled != before:
        if any(budget in flags for budget in BUDGETS):
            reasons = {name: reason for name, reason in reasons.items() if name not in BUDGETS}
        changed = {name: reason for name, reason in new_reasons.items() if name in flags or reason != ASKED}
        run.write_machine(machine | {"reasons": reasons | changed})
    return settled


def settle_here(config: Config, tokenizer: Tokenizer) -> tuple[Config, Reasons, int]:
    """Settles on this machine; also counts the parameters."""
    device, why_device = pick_device(config.device.device)
    training, held_out = open_source(config.data.source)
    has_bias = config.train.loss in NEEDS_BIAS
    num_parameters = count_parameters(
        shape_of(config.model), vocab_size=tokenizer.vocab_size, has_bias=has_bias
    )
    settled, reasons = settle(
        replace(config, device=replace(config.device, device=device.name)),
        DataSummary(training.num_pairs, held_out.num_pairs),
        read_machine(),
        threads=default_threads(),
        num_parameters=num_parameters,
    )
    return settled, reasons | {"device": why_device}, num_parameters


def first_captions(source: Source, most: int) -> Iterator[str]:
    return islice((caption for index in range(source.num_pairs) for caption in source.captions(index)), most)


def refuse_if_finished(run: Run, config: Config) -> None:
    """Refuses to go on with a run that ended with its budget and was given no larger one."""
    newest = checkpoint.latest(run.checkpoints)
    if newest is None or not run.is_finished():
        return
    now, cfg = checkpoint.load_progress(newest), config.train
    training, _ = open_source(config.data.source)
    assert cfg.batch_size is not None, "settled"
    steps = total_steps(cfg, training.num_pairs, cfg.batch_size)
    if share_done(cfg, steps, now.step, now.seconds) < 1:
        return
    done = f"{now.seconds / 60:.1f} minutes" if steps is None else f"{now.step} steps"
    more = f"--minutes {math.ceil(now.seconds / 30)}" if steps is None else f"--steps {2 * now.step}"
    raise UserError(
        f"run `{run.name}` has had its budget: {done} of training",
        hint=f"give it a larger one, counted from its start: `lapclip train --resume {run.reference} {more}`",
    )
