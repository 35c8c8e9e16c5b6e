"""What can go wrong before and while training, in words: errors that end it, and warnings; the training clock."""

import time
from collections.abc import Collection, Iterator

import torch
from torch import nn

from lapclip.config import Config, Plan
from lapclip.data.advice import data_command, in_eights, percentiles
from lapclip.data.doctor import remarks, unseen_classes
from lapclip.data.open import Data, first_unreadable
from lapclip.data.split import own_side
from lapclip.diagnose.machine import RAN_OUT
from lapclip.embedder import Embedder
from lapclip.errors import UserError
from lapclip.machine.power import read_battery
from lapclip.runs.events import ValidationLimit, Warned
from lapclip.runs.run import Run
from lapclip.train.prepare import sample_captions
from lapclip.units import duration, plural
from lapclip.weights import checkpoint

MAX_FAULTS_NAMED = 10  # each by itself, of images that turn out unreadable while training
MAX_EPOCHS = 100  # that a model trained from scratch learns from; see docs/log.md
MIN_STEPS = 10  # in which a model learns next to nothing
MIN_SHARE_TRUNCATED = 0.01  # of the captions, to warn about
# A step that takes longer than so many seconds and times the usual, with the CPU no busier than this share.
SLEEP_SECONDS, SLEEP_FACTOR, SLEEP_BUSY = 5.0, 10, 0.2


def before_training(
    data: Data, embedder: Embedder, step: int, config: Config, has_changed: bool
) -> Iterator[Warned]:
    """What should be known before training starts, mostly about the data."""
    cfg = config.train
    if cfg.pause_below is not None and read_battery() is None:
        what = "the battery cannot be read on this machine"
        message = f"{what}, so training does not pause below {cfg.pause_below}"
        yield Warned(step, message, "omit `--pause-below`", kind="no-battery")
    if step and has_changed:
        hint = "training continues with the current source; to train from scratch, start a new run"
        yield Warned(step, "the source has changed since the run started", hint)
    if data.num_seen:
        images = plural(data.validation.num_different, "validation image")
        message = f"{data.num_seen:,} of {images} were training images of the model that this run starts from"
        hint = "recall on them says little about new images; use that run's `--validation-share`, or other images"
        yield Warned(step, message, hint, kind="seen-before")
    for part in data.parts:
        if part.files is None:
            continue
        catalogue, pack = part.files.catalogue, part.files.pack
        if part.files.is_streamed:
            message = f"`{part.name}` is not packed: its images are decoded again in every epoch"
            yield Warned(step, message, "`lapclip data pack` shows how much disk space a pack needs")
        own = part.name, config.data, catalogue.format
        hint = f"`{data_command('check --json', *own)}` lists all files with problems"
        for what, count in catalogue.problems.counts.most_common(3):
            more = f", and {count - 1:,} more" if count > 1 else ""
            yield Warned(step, f"`{catalogue.problems.names[what][0]}` {what}{more}", hint)
        if pack.unreadable:
            num, first = len(pack.unreadable), first_unreadable(catalogue, pack)
            yield Warned(step, f"{num:,} of {len(catalogue.names):,} images omitted: {first}", hint)
        for remark in (*remarks(catalogue, pack.records), *unseen_classes(part.files)):
            look = f"look at some of the pairs: `{data_command('show', *own)}`"
            yield Warned(step, remark.why, look, kind=remark.kind)
    lengths = embedder.tokenizer.lengths(sample_captions(data.training))
    text_length = embedder.model.size.text_length
    if (share := float((lengths > text_length).mean())) > MIN_SHARE_TRUNCATED:
        message = f"{share:.0%} of the captions are longer than {text_length} tokens and are truncated"
        hint = f"`--text-length {in_eights(percentiles(lengths, [99])['99'])}` keeps 99% whole, but is slower"
        yield Warned(step, message, hint)


def too_long(num_images: int, epochs: float) -> Iterator[Warned]:
    """A budget longer than the images can use, at the speed that was measured or is typical."""
    if epochs > 1.2 * MAX_EPOCHS:  # as far as the speed is known
        used = f"the budget is about {float(f'{epochs:.2g}'):,.0f} epochs of {num_images:,} images"
        message = f"{used}; after about {MAX_EPOCHS} a new model mostly memorises them"
        hint = f"more images would help most; `--epochs {MAX_EPOCHS}` takes less time"
        yield Warned(0, message, hint, kind="long-budget")


def too_short(config: Config, step_seconds: float) -> Iterator[Warned]:
    """A budget of minutes that is spent after a few steps."""
    minutes = config.train.minutes
    if minutes is not None and (num_steps := 60 * minutes / step_seconds) < MIN_STEPS:
        about = plural(max(1, round(num_steps)), "step")
        budget = duration(60 * minutes)
        message = f"a step may take {duration(step_seconds)}, so the budget of {budget} is about {about}"
        hint = "choose a smaller `--size` or `--batch-size`, or a larger budget"
        yield Warned(0, message, hint, kind="short-budget")


def validation_limit(data: Data, num_validation: int) -> ValidationLimit:
    if data.validation.num_different > num_validation:
        return "num_validation"
    is_by_share = any(part.files and not own_side(part.files)[0] for part in data.parts)
    return "validation_share" if is_by_share else "source"


def is_finite(model: nn.Module) -> bool:
    return bool(torch.stack([parameter.isfinite().all() for parameter in model.parameters()]).all())


def diverged(step: int, what: str, lr: float, run: Run) -> UserError:
    newest = checkpoint.latest(run.checkpoints)
    kept = f"; `{newest}` was saved before" if newest else "; no checkpoint had been saved yet"
    hint = f"start again with a lower learning rate: `--lr {min(lr / 3, 1e-3):.1g}`"
    return UserError(f"training diverged at step {step + 1}: {what}{kept}", hint=hint)


def refuse_if_too_many(faults: Collection[str], data: Data, tolerated: float) -> None:
    if len(faults) > max(MAX_FAULTS_NAMED, tolerated * data.training.num_pairs):
        what = f"{len(faults):,} images could not be read during training, the last one is {list(faults)[-1]}"
        raise UserError(what, hint="check that the source still exists; `--max-unreadable` allows more")


def out_of_memory(step: int, plan: Plan) -> Warned:
    message = f"memory ran out: the chunk is now {plan.chunk} pairs, with the same gradients"
    hint = f"close other programs, or start with `--chunk {plan.chunk}`"
    return Warned(step, message, hint, kind=RAN_OUT)


def slept(step: int, seconds: float) -> Warned:
    what = "the machine or the process was suspended"
    message = f"training stopped for {seconds:.0f} s: {what}; this is not counted"
    hint = "nothing is lost; to train without interruption, keep the lid open and the power connected"
    return Warned(step, message, hint, kind="slept")


class Clock:
    """Counts training time: a step during which the machine or the process slept counts as a usual one."""

    def __init__(self) -> None:
        self.usual: float | None = None  # seconds of a step
        self.has_just_slept = False
        self.started = self.busy_before = 0.0

    def start(self) -> float:
        """Begins a step; by the clock of the machine, which stands still while it sleeps."""
        self.started, self.busy_before = time.perf_counter(), time.process_time()
        return self.started

    def stop(self, data_seconds: float) -> tuple[float, float]:
        """The seconds of the step, and those of them that were training; waiting for data is part of it."""
        elapsed, busy = time.perf_counter() - self.started, time.process_time() - self.busy_before
        worked, usual = elapsed - data_seconds, self.usual or 0.0
        # Far longer than usual, with a processor that did hardly anything: compiling is no sleep. Twice in a row it is
        # no sleep either: then steps have become that slow.
        is_long = worked > max(SLEEP_SECONDS, SLEEP_FACTOR * usual)
        is_idle = busy < max(2 * usual, SLEEP_BUSY * worked)
        self.has_just_slept = self.usual is not None and not self.has_just_slept and is_long and is_idle
        if self.has_just_slept:
            return elapsed, data_seconds + usual
        # Half of each new step, so that a change of speed is soon usual.
        self.usual = worked if self.usual is None else (self.usual + worked) / 2
        return elapsed, elapsed
