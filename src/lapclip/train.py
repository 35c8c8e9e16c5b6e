"""The loop, top to bottom: a generator of events that prints nothing and knows no screen.

It goes on from wherever the run folder stands. Leaving the generator early (`break`, or `close()`) saves first.
"""

import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lapclip import checkpoint, plot
from lapclip.checkpoint import Progress
from lapclip.config import Config, is_due
from lapclip.data.opening import Data, finished
from lapclip.data.source import Source
from lapclip.data.tokenizer import load_tokenizer
from lapclip.device import device_named, release_memory, set_up_process
from lapclip.embedder import Embedder
from lapclip.errors import UserError
from lapclip.evaluate import KS, Pool, belong_together, embed_pool, retrieval
from lapclip.events import Evaluated, Event, Finished, Saved, Started, Step, Warned
from lapclip.feed import feed
from lapclip.forewarn import has_changed, warnings_of
from lapclip.loss import LOSSES
from lapclip.machine import peak_memory_bytes
from lapclip.optim import build_optimizer, schedule, set_lr
from lapclip.prepare import open_here
from lapclip.recover import update_or_recover
from lapclip.run import Run
from lapclip.settle import half_a_step, share_done, total_steps, way_of, with_way
from lapclip.step import Way, choose_patches, fixed_length, move
from lapclip.trust import build_trusted

REPORT = "`lapclip bench --json` prints what a report needs"
MOST_FAULTS_SAID = 10  # each by itself, of pictures that turn out broken while training


def train(config: Config, run: Run, data: Data | None = None) -> Generator[Event]:
    """Trains a prepared run to the end of its budget; writes each event to the run, then yields it."""
    data = data or finished(open_here(config))
    training, held_out = data.training, data.held_out
    cfg = config.train
    assert cfg.batch_size and cfg.chunk and cfg.lr and cfg.keep_patches and cfg.eval_every and cfg.loss, (
        "settled"
    )
    batch_size = cfg.batch_size
    steps = total_steps(cfg, training.num_pairs, batch_size)
    with run.owned():
        newest = checkpoint.latest(run.checkpoints)
        now = checkpoint.load_progress(newest) if newest else Progress()
        way = way_of(config)
        set_up_process(way.threads, keep_memory=way.keep_memory)
        if config.device.max_memory is not None:
            device_named(way.device).limit_memory(int(config.device.max_memory * 1e9))
        release_memory()  # of whatever was done before, such as training a tokenizer
        tokenizer = load_tokenizer(run.tokenizer_file)
        reasons = run.load_machine().get("reasons", {})
        model, way, distrust = build_trusted(config, training, tokenizer, way, reasons)
        config, device = with_way(config, way), device_named(way.device)
        optimizer = build_optimizer(model, cfg)
        if newest:
            checkpoint.load_weights(newest, model)
            checkpoint.load_optimizer(newest, model, optimizer)
        embedder = Embedder(model, tokenizer, device, chunk=min(64, cfg.chunk))
        run.write_config(config)  # a resumed run may have been given more time
        saved_step, saved_seconds, is_over = now.step, now.seconds, False
        pool: Pool | None = None
        faults: dict[str, None] = {}

        def report(event: Event) -> Event:
            run.write(event)
            return event

        def evaluate() -> Event:
            nonlocal pool
            started = time.perf_counter()
            pool = embed_pool(embedder, held_out, config.data.num_validation)
            faults.update(dict.fromkeys(pool.faults))
            recall = retrieval(pool, batch_size)
            is_best = now.best_recall is None or goodness(recall) > goodness(now.best_recall)
            now.last_eval_step, now.last_eval_seconds = now.step, now.seconds
            if is_best:
                now.best_step, now.best_recall = now.step, recall
            return report(Evaluated(now.step, recall, is_best, time.perf_counter() - started))

        def save() -> Event:
            nonlocal saved_step, saved_seconds
            started = time.perf_counter()
            path = checkpoint.save(run.checkpoints, model, optimizer, now)
            saved_step, saved_seconds = now.step, now.seconds
            elapsed_seconds = time.perf_counter() - started
            return report(Saved(now.step, str(path), checkpoint.num_bytes(path), elapsed_seconds))

        def finish(reason: str, peak: int) -> Event:
            nonlocal is_over
            is_over = True
            best = checkpoint.best(run.checkpoints)
            return report(
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
            yield report(
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
            for warning in warnings_of(data, run, tokenizer, model.size.text_length, now.step):
                yield report(warning)
            if has_changed(run, data):
                now.best_step = now.best_recall = None  # measured on other pictures
                run.write_machine(run.load_machine() | {"data": data.fingerprint})
            data.release()
            release_memory()

            while (share := share_done(cfg, steps, now.step, now.seconds)) < 1:
                # one step
                started = time.perf_counter()
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
                length = fixed_length(device, way.compile, model.size.text_length)
                inputs = move(batch, device, keep_BK, fixed_length=length)
                try:
                    found, possible = update_or_recover(
                        model, optimizer, inputs, LOSSES[cfg.loss], way=way, clip_norm=cfg.clip_norm, now=now
                    )
                except UserError:
                    if now.step > saved_step:
                        save()  # the weights are as before the step
                    raise
                if not found.are_finite:
                    raise diverged(now.step, found.problem, cfg.lr, newest=checkpoint.latest(run.checkpoints))
                step_seconds = time.perf_counter() - started
                now.step += 1
                now.seconds += step_seconds
                now.num_pairs_seen += batch_size
                share = share_done(cfg, steps, now.step, now.seconds)
                yield report(
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
                    )
                )
                if possible != way:
                    way, config = possible, with_way(config, possible)
                    keep_way(run, config, {"chunk": "memory ran out with more"})
                    yield report(out_of_memory(now.step, way))

                is_eval = is_due(
                    cfg.eval_every, now.step - now.last_eval_step, now.seconds - now.last_eval_seconds
                )
                is_save = is_due(cfg.save_every, now.step - saved_step, now.seconds - saved_seconds)
                if (is_eval or is_save or share >= 1) and not is_finite(model):
                    what = "weights are no longer finite numbers"
                    raise diverged(now.step, what, cfg.lr, newest=checkpoint.latest(run.checkpoints))
                # once in a while: recall over the held-out pool
                if is_eval and share < 1:
                    yield evaluate()
                # a checkpoint: in time, and for the best so far
                if (is_save and share < 1) or now.best_step == now.step:
                    yield save()

            # at the end, also of a run that was stopped on its last step
            if now.last_eval_step != now.step:
                yield evaluate()
            if saved_step != now.step or now.best_step == now.step:
                yield save()
            peak = peak_memory_bytes()
            batches.close()
            if now.best_step != now.step or pool is None:
                optimizer.zero_grad()
                optimizer.state.clear()
                release_memory()  # reading a checkpoint would otherwise come on top of what training held
                checkpoint.load_weights(checkpoint.best(run.checkpoints) or run.path, model)
                pool = embed_pool(embedder, held_out, config.data.num_validation)
            if problem := draw_learned(run.path / "learned.png", held_out, pool, now.step):
                yield report(problem)
            yield finish("budget", peak)
        except GeneratorExit:
            if now.step > 0 and not checkpoint.is_saved(run.checkpoints, now.step):
                save()
            if not is_over:
                finish("stopped", peak_memory_bytes())
            raise
        finally:
            batches.close()


def keep_way(run: Run, config: Config, reasons: dict[str, str]) -> None:
    """Writes down how the run can be trained after all, and why, for when it is resumed."""
    run.write_config(config)
    machine = run.load_machine()
    run.write_machine(machine | {"reasons": machine.get("reasons", {}) | reasons})


def out_of_memory(step: int, way: Way) -> Warned:
    return Warned(
        step,
        message=f"memory ran out: from here on {way.chunk} pairs are held at once, with the same gradients",
        hint=f"close other programs, or start with `--chunk {way.chunk}`",
    )


def goodness(recall: dict[str, Any]) -> float:
    """What makes one evaluation better than another: all six recalls together, steadier than any one of them."""
    return sum(
        recall[direction][f"recall@{k}"] for direction in ("text_to_image", "image_to_text") for k in KS
    )


def is_finite(model: nn.Module) -> bool:
    return bool(torch.stack([parameter.isfinite().all() for parameter in model.parameters()]).all())


def refuse_if_too_many(faults: list[str], num_pairs: int, most: float) -> None:
    if len(faults) > max(MOST_FAULTS_SAID, most * num_pairs):
        raise UserError(
            f"{len(faults):,} pictures could not be read while training, the last one {faults[-1]}",
            hint="look whether the source is still there; `--max-unreadable` puts up with more",
        )


def diverged(step: int, what: str, lr: float, *, newest: Path | None) -> UserError:
    kept = f"; `{newest}` is from before" if newest else "; no checkpoint had been saved yet"
    return UserError(
        f"training diverged at step {step + 1}: {what}{kept}",
        hint=f"start again with a lower learning rate: `--lr {min(lr / 3, 1e-3):.1g}`",
    )


def draw_learned(path: Path, source: Source, pool: Pool, step: int, num_queries: int = 5) -> Warned | None:
    """Draws a few captions of the pool and the pictures the model finds for them; a picture is no reason to fail."""
    num_captions, is_pair_MN = len(pool.text_ME), belong_together(pool)
    rows = []
    for query in range(0, num_captions, -(-num_captions // num_queries)):
        found = (pool.text_ME[query] @ pool.image_NE.T).argsort()[::-1][: plot.NUM_FOUND]
        pictures = [
            (source.picture(int(pool.indices[n]), plot.TILE), bool(is_pair_MN[query, n])) for n in found
        ]
        rows.append((pool.captions[query], pictures))
    try:
        plot.draw_found(path, rows)
    except OSError as error:
        return Warned(
            step, f"cannot write `{path}`: {error.strerror}", "the model is saved; make room on the disk"
        )
    return None
