"""The training loop: a generator of events that prints nothing and knows no screen.

It continues from wherever the run folder stands. Leaving the generator early (`break`, or `close()`) saves first.
"""

import os
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from lapclip.autotune.parity import build_checked
from lapclip.autotune.plans import Budget, plan_of
from lapclip.autotune.resolve import Choice, recorded, recorded_choices, typical_rate
from lapclip.config import Config, with_values
from lapclip.data.batches import Batch
from lapclip.data.decode import Unreadable
from lapclip.data.open import Data
from lapclip.data.pack import folder_bytes
from lapclip.data.source import Source
from lapclip.diagnose.diagnosis import Diagnosis
from lapclip.embedder import Embedder
from lapclip.errors import UserError
from lapclip.evaluate.interpolation import sweep
from lapclip.evaluate.pool import Pool, embed_pool
from lapclip.evaluate.retrieval import pool_loss, retrieval
from lapclip.machine.device import device_named, processor, set_up_process
from lapclip.machine.hardware import peak_memory_bytes
from lapclip.machine.power import BATTERY_CHECK_SECONDS, reason_to_pause
from lapclip.runs.events import Continued, Evaluated, Event, Finished, Paused, Saved, Started, Step, Warned
from lapclip.runs.history import is_as_good, mean_recall
from lapclip.runs.run import Run
from lapclip.step.feed import feed
from lapclip.step.loss import LOSSES
from lapclip.step.optim import build_optimizer, freeze, schedule, set_lr
from lapclip.step.profile import Inspector, StepProfiler
from lapclip.step.step import Update, choose_features, choose_patches, fixed_length, move
from lapclip.train import messages
from lapclip.train.messages import Clock
from lapclip.train.prepare import open_here, own_tokenizer
from lapclip.train.snapshot import draw_learned, take_snapshot
from lapclip.units import finished, is_due
from lapclip.weights import checkpoint, reading
from lapclip.weights.checkpoint import Progress

PAUSE_SECONDS = 1.0  # while training is paused, before whoever follows may stop it
NUM_PAUSES = 10  # then, before the battery is checked again


def train(
    config: Config, run: Run, data: Data | None = None, cached: "Cached | None" = None
) -> Generator[Event]:
    """Trains a prepared run to the end of its budget; writes each event to the run, then yields it."""
    data = data or finished(open_here(config))
    with run.owned():
        loop = set_up(config, run, data, cached)
        try:
            yield from loop.begin()
            yield from loop.train()
            yield from loop.end()
        except GeneratorExit:
            loop.stop()
            raise
        finally:
            loop.batches.close()


class Cached(Protocol):
    """Features of frozen towers in place of images and captions, or a teacher's embeddings beside them."""

    def batches(self, usual: Generator[Batch], /, **draw: int) -> Generator[Batch]: ...
    def pool(self, embedder: Embedder, source: Source, num_images: int) -> Pool: ...


@dataclass
class Loop:
    """The state of a run while it is trained."""

    config: Config
    run: Run
    data: Data
    update: Update  # the model, its optimizer and execution plan
    embedder: Embedder
    now: Progress  # what a checkpoint keeps of it
    batches: Generator[Batch]
    diagnosis: Diagnosis
    inspector: Inspector
    distrust: str | None  # what was wrong with the execution plan that had been measured
    cached: Cached | None = None
    clock: Clock = field(default_factory=Clock)
    faults: dict[str, None] = field(default_factory=dict)  # unreadable images, in order
    pool: Pool | None = None  # the validation set as embedded last
    kept_recall: dict[str, Any] | None = None  # of the interpolated model, at the end
    last_battery_check: float = 0.0
    is_over: bool = False

    def __post_init__(self) -> None:
        cfg = self.config.train
        assert cfg.batch_size, "resolved"
        self.budget = Budget.of(cfg, self.data.training.num_pairs, cfg.batch_size)
        self.saved_step, self.saved_seconds = self.now.step, self.now.seconds

    def train(self) -> Iterator[Event]:
        cfg, now, model = self.config.train, self.now, self.update.model
        assert cfg.batch_size and cfg.lr and cfg.keep_patches and cfg.eval_every, "resolved"
        draw = {"seed": cfg.seed, "batch_size": cfg.batch_size}
        device = device_named(self.update.plan.device)
        length = fixed_length(device, self.update.plan.compile, model.size.text_length)
        while (share := self.budget.share_done(now.step, now.seconds)) < 1:
            yield from self.pause_if_low()
            profiler = self.inspector.profiler(self.update.plan)
            started = self.clock.start()
            with self.saved_on_failure():
                batch = next(self.batches)
                new_faults = [fault for fault in batch.faults if fault not in self.faults]
                self.faults |= dict.fromkeys(new_faults)
                messages.refuse_if_too_many(self.faults, self.data, self.config.data.max_unreadable)
            data_seconds = time.perf_counter() - started
            profiler.lap("data")
            if len(self.faults) <= messages.MAX_FAULTS_NAMED:
                told = [f"{fault}; another pair is used instead" for fault in new_faults]
                yield from self.tell(*(Warned(now.step, message, "repair or remove it") for message in told))
            kept = cfg.keep_patches if share < cfg.whole_from else 1.0
            keep_BK = choose_patches(now.step, num_patches=model.size.num_patches, share=kept, **draw)
            lr = cfg.lr * schedule(self.budget.middle(share, now.step), cfg.warmup)
            set_lr(self.update.optimizer, lr)
            profiler.lap("other")
            inputs = move(batch, device, keep_BK, fixed_length=length)
            inputs = choose_features(inputs, model, now.step, seed=cfg.seed, dropout=cfg.dropout or 0.0)
            profiler.lap("transfer")
            plan = self.update.plan
            with self.saved_on_failure():  # the weights are as before the step
                found = self.update.run_or_recover(inputs, now, profiler)
            if not found.are_finite:
                raise messages.diverged(now.step, found.problem, cfg.lr, self.run)

            elapsed_seconds, step_seconds = self.clock.stop(data_seconds)
            now.step += 1
            now.seconds += step_seconds
            now.num_pairs_seen += cfg.batch_size
            share = self.budget.share_done(now.step, now.seconds)
            step = Step(
                step=now.step,
                epoch=now.num_pairs_seen / self.data.training.num_pairs,
                num_pairs_seen=now.num_pairs_seen,
                loss=found.loss,
                accuracy=found.accuracy,
                lr=lr,
                temperature=1 / found.scale,
                grad_norm=found.grad_norm,
                pairs_per_second=cfg.batch_size / step_seconds,
                data_seconds=data_seconds,
                seconds=now.seconds,
                progress=min(1.0, share),
                seconds_left=max(0.0, now.seconds / share - now.seconds),
                num_different=len(np.unique(batch.caption_ids.reshape(cfg.batch_size, -1)[:, 0])),
                chance=inputs.chance,
            )
            yield from self.tell(step)
            if step_seconds < elapsed_seconds:
                yield from self.tell(messages.slept(now.step, elapsed_seconds - step_seconds))
            elif isinstance(profiler, StepProfiler):
                memory = profiler.memory(model, self.update.optimizer, inputs.tensors)
                seen = self.inspector.inspected(profiler, memory, step=now.step, seconds=step_seconds)
                yield from self.tell(seen)
            if self.update.plan != plan:
                self.keep_plan(chunk="memory ran out with more")
                yield from self.tell(messages.out_of_memory(now.step, self.update.plan))

            since_eval = now.step - now.last_eval_step, now.seconds - now.last_eval_seconds
            is_eval = is_due(cfg.eval_every, *since_eval)
            is_save = is_due(cfg.save_every, now.step - self.saved_step, now.seconds - self.saved_seconds)
            if (is_eval or is_save or share >= 1) and not messages.is_finite(model):
                raise messages.diverged(now.step, "the weights are no longer finite", cfg.lr, self.run)
            if is_eval and share < 1:
                yield from self.evaluate()
            if (is_save and share < 1) or now.best_step == now.step:
                yield self.save()

    def begin(self) -> Iterator[Event]:
        """What is reported before the first step."""
        cfg, now, run, data = self.config.train, self.now, self.run, self.data
        assert cfg.batch_size and cfg.chunk, "resolved"
        begun = Started(
            step=now.step,
            seconds=now.seconds,
            pid=os.getpid(),
            num_parameters=self.update.model.num_parameters,
            num_trained=self.update.model.num_trained if cfg.tune else None,
            num_train=data.training.num_pairs,
            batch_size=cfg.batch_size,
            chunk=cfg.chunk,
            device=self.update.plan.device,
            threads=torch.get_num_threads(),
            minutes=cfg.minutes,
            total_steps=self.budget.steps,
            validation_limit=messages.validation_limit(data, self.config.data.num_validation),
        )
        yield from self.tell(begun)
        if self.distrust is not None:
            self.keep_plan(device=self.distrust, precision="as the device", compile="as the device")
            hint = "include the output of `lapclip bench --json` in a bug report"
            yield from self.tell(Warned(now.step, f"{self.distrust}; training on the CPU instead", hint))
        has_changed = run.load_machine().get("data") not in (None, data.fingerprint)
        known = messages.before_training(data, self.embedder, now.step, self.config, has_changed)
        yield from self.tell(*known)
        if now.step == 0 and cfg.tune is None:
            bench, num = run.load_machine().get("bench", {}), data.training.num_pairs
            rate = (
                bench.get("pairs_per_second")
                or bench.get("timed_pairs_per_second")
                or typical_rate(self.config)
            )
            if self.update.plan.device == processor().name:
                yield from self.tell(*messages.too_short(self.config, cfg.batch_size / rate))
            if any(part.files for part in data.parts):
                yield from self.tell(
                    *messages.too_long(num, self.budget.num_epochs(num, cfg.batch_size, rate))
                )
        if has_changed:
            now.best_step = now.best_recall = now.highest = None  # measured on other images
            run.write_machine(run.load_machine() | {"data": data.fingerprint})
            shutil.rmtree(run.path / "snapshots", ignore_errors=True)  # an index may now be another image
        data.release()
        processor().release_memory()
        if data.general is not None and now.step == 0:
            yield from self.evaluate()

    def end(self) -> Iterator[Event]:
        """Evaluates, saves and draws; also for a run that was stopped on its last step."""
        now, run, model = self.now, self.run, self.update.model
        if now.last_eval_step != now.step:
            yield from self.evaluate()
        if self.saved_step != now.step or now.best_step == now.step:
            yield self.save()
        peak = peak_memory_bytes()
        self.batches.close()
        start = checkpoint.pointed_at(run.checkpoints, "start")  # of a pretrained model
        if start is not None or now.best_step != now.step or self.pool is None:
            self.update.optimizer.zero_grad()
            self.update.optimizer.state.clear()
            processor().release_memory()  # reading a checkpoint would otherwise come on top of what training held
        if start is not None:
            yield from self.interpolate(start)
        elif now.best_step != now.step or self.pool is None:
            reading.load_weights(checkpoint.best(run.checkpoints) or run.path, model)
            self.pool = self.embed(self.data.validation, self.config.data.num_validation)
        assert self.pool is not None
        if problem := draw_learned(run.path / "learned.png", self.data.validation, self.pool, now.step):
            yield from self.tell(problem)
        yield from self.finish("budget", peak)

    def stop(self) -> None:
        """Saves when the generator is left early."""
        if self.now.step > self.saved_step:
            self.save()
        if not self.is_over:
            list(self.finish("stopped", peak_memory_bytes()))

    def finish(self, reason: str, peak: int) -> Iterator[Event]:
        now = self.now
        yield from self.tell(*self.diagnosis.at_end(now.step))
        self.is_over = True
        best = checkpoint.best(self.run.checkpoints)
        ended = Finished(
            reason=reason,
            step=now.step,
            epochs=now.num_pairs_seen / self.data.training.num_pairs,
            seconds=now.seconds,
            num_pairs_seen=now.num_pairs_seen,
            pairs_per_second=now.num_pairs_seen / max(now.seconds, 1e-9),
            peak_memory_bytes=peak,
            num_parameters=self.update.model.num_parameters,
            recall=self.kept_recall or now.best_recall,
            best_step=now.best_step,
            checkpoint=str(best) if best else None,
        )
        yield from self.tell(ended)

    def evaluate(self) -> Iterator[Event]:
        now, model, batch_size = self.now, self.update.model, self.config.train.batch_size or 1
        validation, started = self.data.validation, time.perf_counter()
        pool, recall, general = self.measure()
        self.pool = pool
        self.faults |= dict.fromkeys(pool.unreadable.values())
        with torch.no_grad():
            scale, bias = model.scale().cpu(), None if model.bias is None else model.bias.cpu()
            loss = pool_loss(pool, self.update.loss_fn, scale, bias, batch_size)
        mean, num_images = mean_recall(recall), recall["num_images"]
        best = mean_recall(now.best_recall) if now.best_recall else 0.0, now.best_loss or 0.0
        is_best = now.step > 0 and is_as_good(mean, loss, num_images, now.highest, best)
        if now.step > 0:  # before, it is the pretrained model's
            now.highest = max(now.highest or 0.0, mean)
        now.last_eval_step, now.last_eval_seconds = now.step, now.seconds
        if is_best:
            now.best_step, now.best_recall, now.best_loss = now.step, recall, loss
        snapshot = None
        try:
            snapshot = take_snapshot(self.run.path, validation, pool, now.step)
        except (OSError, UserError, Unreadable) as problem:  # images are no reason to fail
            if not self.diagnosis.times("no-snapshot"):
                hint = getattr(problem, "hint", "training continues without snapshots")
                message = f"could not write a snapshot: {problem}"
                yield from self.tell(Warned(now.step, message, hint, "no-snapshot"))
        elapsed_seconds = time.perf_counter() - started
        yield from self.tell(Evaluated(now.step, recall, is_best, elapsed_seconds, loss, snapshot, general))

    def interpolate(self, start: Path) -> Iterator[Event]:
        """Makes the best of the models between the start and the best checkpoint the one that is loaded."""
        now, folder, model = self.now, self.run.checkpoints, self.update.model
        trained = folder / checkpoint.name_of(now.best_step or now.step)
        found, self.pool = yield from sweep(model, start, trained, self.measure, step=now.step)
        checkpoint.keep_interpolated(folder, model, trained, found.chosen)
        self.kept_recall = found.recall[found.place]
        yield from self.tell(found)

    def measure(self) -> tuple[Pool, dict[str, Any], dict[str, Any] | None]:
        """The validation set as the model embeds it now, its recall, and that of the general source."""
        batch_size, general = self.config.train.batch_size or 1, self.data.general
        pool = self.embed(self.data.validation, self.config.data.num_validation)
        recall = retrieval(pool, batch_size)
        if general is None:
            return pool, recall, None
        return pool, recall, retrieval(self.embed(general, general.num_pairs), batch_size)

    def embed(self, source: Source, num_images: int) -> Pool:
        embed = embed_pool if self.cached is None else self.cached.pool
        return embed(self.embedder, source, num_images)

    def save(self) -> Event:
        started = time.perf_counter()
        path = checkpoint.save(self.run.checkpoints, self.update.model, self.update.optimizer, self.now)
        self.saved_step, self.saved_seconds = self.now.step, self.now.seconds
        elapsed_seconds = time.perf_counter() - started
        saved = Saved(self.now.step, str(path), folder_bytes(path), elapsed_seconds)
        self.run.write(saved)
        return saved

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (UserError, OSError):
            if self.now.step > self.saved_step:
                self.save()
            raise

    def pause_if_low(self) -> Iterator[Event]:
        """Waits while the battery is low, saved; repeats that it does, so that whoever follows can stop."""
        below, started = self.config.train.pause_below, time.monotonic()
        if not below or started - self.last_battery_check <= BATTERY_CHECK_SECONDS:
            return
        self.last_battery_check = started
        if reason := reason_to_pause(below):
            if self.now.step > self.saved_step:
                yield self.save()
            yield from self.tell(paused := Paused(self.now.step, reason))
            while reason_to_pause(below):
                for _ in range(NUM_PAUSES):
                    time.sleep(PAUSE_SECONDS)
                    yield paused
            yield from self.tell(Continued(self.now.step, time.monotonic() - started))

    def keep_plan(self, **reasons: str) -> None:
        """Records the plan that works, and why it changed, for when the run is resumed."""
        self.config = with_values(self.config, vars(self.update.plan))
        self.run.write_config(self.config)
        machine = self.run.load_machine()
        changed = {name: Choice(getattr(self.update.plan, name), why) for name, why in reasons.items()}
        self.run.write_machine(machine | recorded(recorded_choices(self.config, machine) | changed))

    def tell(self, *events: Event) -> Iterator[Event]:
        """Reports events, and after each one whatever it shows to be wrong."""
        for event in events:
            warnings = self.diagnosis.look(event)  # before anybody can stop here
            for reported in (event, *warnings):
                self.run.write(reported)
                yield reported


def set_up(config: Config, run: Run, data: Data, cached: Cached | None) -> Loop:
    """The state at the newest checkpoint, or at the start."""
    newest = checkpoint.latest(run.checkpoints)
    now = checkpoint.load_progress(newest) if newest else Progress()
    plan, cfg = plan_of(config), config.train
    assert cfg.batch_size and cfg.chunk and cfg.loss, "resolved"
    set_up_process(plan.threads, keep_memory=plan.keep_memory)
    if config.device.max_memory is not None:
        device_named(plan.device).limit_memory(int(config.device.max_memory * 1e9))
    processor().release_memory()  # of whatever was done before, such as training a tokenizer
    tokenizer = own_tokenizer(config, run)
    choices = recorded_choices(config, run.load_machine())
    parts = [choices[name] for name in ("device", "precision", "compile") if name in choices]
    is_asked = any(choice.origin == "asked" for choice in parts)
    model, plan, distrust = build_checked(config, data.training, tokenizer, plan, is_asked=is_asked)
    config = with_values(config, vars(plan))
    freeze(model, cfg)
    optimizer = build_optimizer(model, cfg)
    if newest:
        reading.load_weights(newest, model)
        if now.step > 0:
            checkpoint.load_optimizer(newest, model, optimizer)
    run.write_config(config)  # a resumed run may have been given more time
    diagnosis = Diagnosis(config, run.reference)
    for event in run.events() if newest else ():
        diagnosis.look(event)  # of what was said before nothing is said again
    draw = {"seed": cfg.seed, "batch_size": cfg.batch_size, "first_step": now.step}
    workers = config.data.workers or 0
    batches = feed(data.training, tokenizer, model.size, config.data, workers=workers, **draw)
    batches = batches if cached is None else cached.batches(batches, **draw)
    update = Update(model, optimizer, LOSSES[cfg.loss], cfg.clip_norm, plan)
    embedder = Embedder(model, tokenizer, device_named(plan.device), chunk=min(64, cfg.chunk))
    inspector = Inspector(max_memory=config.device.max_memory, recompute=config.model.recompute)
    return Loop(config, run, data, update, embedder, now, batches, diagnosis, inspector, distrust, cached)
