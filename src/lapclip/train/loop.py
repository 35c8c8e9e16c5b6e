"""The loop, top to bottom: a generator of events that prints nothing and knows no screen.

It goes on from wherever the run folder stands. Leaving the generator early (`break`, or `close()`) saves first.
"""

import os
import time
from collections.abc import Generator, Iterator

import numpy as np
import torch

from lapclip.autotune.resolve import half_a_step, plan_of, share_done, total_steps, with_plan
from lapclip.autotune.trust import build_trusted
from lapclip.config import Config
from lapclip.data.decode import Unreadable
from lapclip.data.open import Data
from lapclip.data.tokenizer import load_tokenizer
from lapclip.diagnose import Diagnosis
from lapclip.embedder import Embedder
from lapclip.errors import UserError
from lapclip.evaluate.pool import Pool, embed_pool
from lapclip.evaluate.retrieval import pool_loss, retrieval
from lapclip.machine.device import device_named, release_memory, set_up_process
from lapclip.machine.hardware import peak_memory_bytes
from lapclip.machine.power import BATTERY_CHECK_SECONDS, reason_to_pause
from lapclip.runs.events import (
    Continued,
    Evaluated,
    Event,
    Finished,
    Paused,
    Saved,
    Started,
    Step,
    Warned,
    is_as_good,
    mean_recall,
)
from lapclip.runs.run import Run
from lapclip.step.feed import feed
from lapclip.step.inspection import Inspector
from lapclip.step.loss import LOSSES
from lapclip.step.optim import build_optimizer, schedule, set_lr
from lapclip.step.profile import StepProfiler
from lapclip.step.recover import update_or_recover
from lapclip.step.step import choose_patches, fixed_length, move
from lapclip.train.forewarn import has_changed, warnings_of
from lapclip.train.messages import (
    MOST_FAULTS_SAID,
    Clock,
    diverged,
    is_finite,
    keep_way,
    out_of_memory,
    refuse_if_too_many,
    slept,
)
from lapclip.train.prepare import open_here
from lapclip.train.snapshot import draw_learned, forget_images, no_snapshot, take_snapshot
from lapclip.units import finished, is_due
from lapclip.weights import checkpoint
from lapclip.weights.checkpoint import Progress

SECONDS_WAITED = 1.0  # while training is paused, before whoever follows may stop it
NUM_WAITS = 10  # then, before the battery is looked at again
REPORT = "`lapclip bench --json` prints what a report needs"


def train(config: Config, run: Run, data: Data | None = None) -> Generator[Event]:
    """Trains a prepared run to the end of its budget; writes each event to the run, then yields it."""
    data = data or finished(open_here(config))
    training, validation = data.training, data.validation
    cfg = config.train
    assert cfg.batch_size and cfg.chunk and cfg.lr and cfg.keep_patches and cfg.eval_every and cfg.loss, (
        "resolved"
    )
    batch_size = cfg.batch_size
    steps = total_steps(cfg, training.num_pairs, batch_size)
    with run.owned():
        newest = checkpoint.latest(run.checkpoints)
        now = checkpoint.load_progress(newest) if newest else Progress()
        plan = plan_of(config)
        set_up_process(plan.threads, keep_memory=plan.keep_memory)
        if config.device.max_memory is not None:
            device_named(plan.device).limit_memory(int(config.device.max_memory * 1e9))
        release_memory()  # of whatever was done before, such as training a tokenizer
        tokenizer = load_tokenizer(run.tokenizer_file)
        reasons = run.load_machine().get("reasons", {})
        model, plan, distrust = build_trusted(config, training, tokenizer, plan, reasons)
        config, device = with_plan(config, plan), device_named(plan.device)
        optimizer = build_optimizer(model, cfg)
        if newest:
            checkpoint.load_weights(newest, model)
            checkpoint.load_optimizer(newest, model, optimizer)
        embedder = Embedder(model, tokenizer, device, chunk=min(64, cfg.chunk))
        run.write_config(config)  # a resumed run may have been given more time
        saved_step, saved_seconds, is_over = now.step, now.seconds, False
        pool: Pool | None = None
        faults: dict[str, None] = {}
        clock, last_look = Clock(), 0.0
        inspector = Inspector(max_memory=config.device.max_memory, recompute=config.model.recompute)
        diagnosis = Diagnosis(config, run.reference)
        for event in run.events() if newest else ():
            diagnosis.look(event)  # of what was said before nothing is said again

        def report(event: Event) -> Event:
            run.write(event)
            return event

        def tell(event: Event) -> Iterator[Event]:
            """Reports an event, then whatever it shows to be wrong."""
            warnings = diagnosis.look(event)  # before anybody can stop here
            yield report(event)
            for warning in warnings:
                yield report(warning)

        def evaluate() -> Iterator[Event]:
            nonlocal pool
            started = time.perf_counter()
            pool = embed_pool(embedder, validation, config.data.num_validation)
            faults.update(dict.fromkeys(pool.faults))
            recall = retrieval(pool, batch_size)
            is_best = is_as_good(recall, now.highest)
            now.highest = max(now.highest or 0.0, mean_recall(recall))
            now.last_eval_step, now.last_eval_seconds = now.step, now.seconds
            if is_best:
                now.best_step, now.best_recall = now.step, recall
            with torch.no_grad():
                scale, bias = model.scale().cpu(), None if model.bias is None else model.bias.cpu()
                loss = pool_loss(pool, LOSSES[cfg.loss or "softmax"], scale, bias, batch_size)
            snapshot = None
            try:
                snapshot = take_snapshot(run.path, validation, pool, now.step)
            except (OSError, UserError, Unreadable) as problem:  # images are no reason to fail
                if not diagnosis.times("no-snapshot"):
                    yield from tell(no_snapshot(now.step, problem))
            elapsed_seconds = time.perf_counter() - started
            yield from tell(Evaluated(now.step, recall, is_best, elapsed_seconds, loss, snapshot))

        def save() -> Event:
            nonlocal saved_step, saved_seconds
            started = time.perf_counter()
            path = checkpoint.save(run.checkpoints, model, optimizer, now)
            saved_step, saved_seconds = now.step, now.seconds
            elapsed_seconds = time.perf_counter() - started
            return report(Saved(now.step, str(path), checkpoint.num_bytes(path), elapsed_seconds))

        def wait(reason: str) -> Iterator[Event]:
            """Waits while the battery is low; says so again and again, so that whoever follows can stop."""
            started = time.monotonic()
            yield from tell(paused := Paused(now.step, reason))
            while reason_to_pause(cfg.pause_below):
                for _ in range(NUM_WAITS):
                    time.sleep(SECONDS_WAITED)
                    yield paused
            yield from tell(Continued(now.step, time.monotonic() - started))

        def finish(reason: str, peak: int) -> Iterator[Event]:
            nonlocal is_over
            for warning in diagnosis.at_end(now.step):
                yield report(warning)
            is_over = True
            best = checkpoint.best(run.checkpoints)
            yield report(
                Finished(
                    reason=reason,
                    step=now.step,
                    epochs=now.num_pairs_seen / training.num_pairs,
                    seconds=now.seconds,
                    num_pairs_seen=now.num_pairs_seen,
                    pairs_per_second=now.num_pairs_seen / max(now.seconds, 1e-9),
                    peak_memory_bytes=peak,
                    num_parameters=model.num_parameters,
                    recall=now.best_recall,
                    best_step=now.best_step,
                    checkpoint=str(best) if best else None,
                )
            )

        batches = feed(
            training,
            tokenizer,
            model.size,
            config.data,
            batch_size=batch_size,
            seed=cfg.seed,
            first_step=now.step,
            workers=config.data.workers or 0,
        )
        try:
            yield from tell(
                Started(
                    step=now.step,
                    seconds=now.seconds,
                    pid=os.getpid(),
                    num_parameters=model.num_parameters,
                    num_train=training.num_pairs,
                    batch_size=batch_size,
                    chunk=cfg.chunk,
                    device=device.name,
                    threads=torch.get_num_threads(),
                    minutes=cfg.minutes,
                    total_steps=steps,
                )
            )
            if distrust is not None:
                keep_way(
                    run,
                    config,
                    {"device": distrust, "precision": "as the device", "compile": "as the device"},
                )
                yield report(Warned(now.step, f"{distrust}; training on the processor instead", REPORT))
            for warning in warnings_of(
                data, run, tokenizer, model.size.text_length, now.step, cfg.pause_below
            ):
                yield report(warning)
            if has_changed(run, data):
                now.best_step = now.best_recall = now.highest = None  # measured on other images
                run.write_machine(run.load_machine() | {"data": data.fingerprint})
                forget_images(run.path)
            data.release()
            release_memory()

            while (share := share_done(cfg, steps, now.step, now.seconds)) < 1:
                # once in a while: is there power enough to go on
                if cfg.pause_below and time.monotonic() - last_look > BATTERY_CHECK_SECONDS:
                    last_look = time.monotonic()
                    if reason := reason_to_pause(cfg.pause_below):
                        if now.step > saved_step:
                            yield save()
                        yield from wait(reason)
                # one step
                watch = inspector.watch_next(plan)
                started = clock.start()
                try:
                    batch = next(batches)
                    new_faults = [fault for fault in batch.faults if fault not in faults]
                    faults |= dict.fromkeys(new_faults)
                    refuse_if_too_many(list(faults), training.num_pairs, config.data.max_unreadable)
                except (UserError, OSError):
                    if now.step > saved_step:
                        save()
                    raise
                data_seconds = time.perf_counter() - started
                watch.lap("data")
                for fault in new_faults if len(faults) <= MOST_FAULTS_SAID else ():
                    yield report(
                        Warned(now.step, f"{fault}; another pair takes its place", "mend or remove it")
                    )
                keep_BK = choose_patches(
                    now.step,
                    seed=cfg.seed,
                    batch_size=batch_size,
                    num_patches=model.image.num_patches,
                    share=cfg.keep_patches if share < cfg.whole_from else 1.0,
                )
                set_lr(
                    optimizer,
                    lr := cfg.lr * schedule(share + half_a_step(share, now.step, steps), cfg.warmup),
                )
                length = fixed_length(device, plan.compile, model.size.text_length)
                watch.lap("other")
                inputs = move(batch, device, keep_BK, fixed_length=length)
                watch.lap("transfer")
                try:
                    found, possible = update_or_recover(
                        model, optimizer, inputs, LOSSES[cfg.loss],
                        plan=plan, clip_norm=cfg.clip_norm, now=now, watch=watch,
                    )  # fmt: skip
                except UserError:
                    if now.step > saved_step:
                        save()  # the weights are as before the step
                    raise
                if not found.are_finite:
                    raise diverged(now.step, found.problem, cfg.lr, newest=checkpoint.latest(run.checkpoints))
                elapsed_seconds, step_seconds = clock.stop(data_seconds)
                now.step += 1
                now.seconds += step_seconds
                now.num_pairs_seen += batch_size
                share = share_done(cfg, steps, now.step, now.seconds)
                yield from tell(
                    Step(
                        step=now.step,
                        epoch=now.num_pairs_seen / training.num_pairs,
                        num_pairs_seen=now.num_pairs_seen,
                        loss=found.loss,
                        accuracy=found.accuracy,
                        lr=lr,
                        temperature=1 / found.scale,
                        grad_norm=found.grad_norm,
                        pairs_per_second=batch_size / step_seconds,
                        data_seconds=data_seconds,
                        seconds=now.seconds,
                        progress=min(1.0, share),
                        seconds_left=max(0.0, now.seconds / share - now.seconds),
                        num_different=len(np.unique(batch.caption_ids)),
                    )
                )
                if step_seconds < elapsed_seconds:
                    yield report(slept(now.step, elapsed_seconds - step_seconds))
                elif isinstance(watch, StepProfiler):
                    yield from tell(
                        inspector.inspected(
                            watch, step=now.step, seconds=step_seconds, plan=plan,
                            model=model, optimizer=optimizer, inputs=inputs,
                        )
                    )  # fmt: skip
                if possible != plan:
                    plan, config = possible, with_plan(config, possible)
                    keep_way(run, config, {"chunk": "memory ran out with more"})
                    yield from tell(out_of_memory(now.step, plan))

                is_eval = is_due(
                    cfg.eval_every, now.step - now.last_eval_step, now.seconds - now.last_eval_seconds
                )
                is_save = is_due(cfg.save_every, now.step - saved_step, now.seconds - saved_seconds)
                if (is_eval or is_save or share >= 1) and not is_finite(model):
                    what = "weights are no longer finite numbers"
                    raise diverged(now.step, what, cfg.lr, newest=checkpoint.latest(run.checkpoints))
                # once in a while: recall over the held-out pool
                if is_eval and share < 1:
                    yield from evaluate()
                # a checkpoint: in time, and for the best so far
                if (is_save and share < 1) or now.best_step == now.step:
                    yield save()

            # at the end, also of a run that was stopped on its last step
            if now.last_eval_step != now.step:
                yield from evaluate()
            if saved_step != now.step or now.best_step == now.step:
                yield save()
            peak = peak_memory_bytes()
            batches.close()
            if now.best_step != now.step or pool is None:
                optimizer.zero_grad()
                optimizer.state.clear()
                release_memory()  # reading a checkpoint would otherwise come on top of what training held
                checkpoint.load_weights(checkpoint.best(run.checkpoints) or run.path, model)
                pool = embed_pool(embedder, validation, config.data.num_validation)
            if problem := draw_learned(run.path / "learned.png", validation, pool, now.step):
                yield report(problem)
            yield from finish("budget", peak)
        except GeneratorExit:
            if now.step > 0 and not checkpoint.is_saved(run.checkpoints, now.step):
                save()
            if not is_over:
                list(finish("stopped", peak_memory_bytes()))
            raise
        finally:
            batches.close()
