"""The loop, top to bottom: a generator of events that prints nothing and knows no screen.

`prepare` makes a run folder that is alone enough to train from; `train` goes on from wherever that folder stands.
Leaving the generator early (`break`, or `close()`) saves first.
"""

import json
import math
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lapclip import checkpoint, plot
from lapclip.checkpoint import Progress
from lapclip.config import Config, is_due
from lapclip.data.batches import load_batches
from lapclip.data.source import Source, open_source
from lapclip.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from lapclip.device import default_threads, pick_device, set_up_process
from lapclip.embedder import Embedder
from lapclip.errors import UserError
from lapclip.evaluate import Pool, embed_pool, retrieval
from lapclip.events import Evaluated, Event, Finished, Saved, Started, Step, Warned
from lapclip.loss import LOSSES
from lapclip.machine import peak_memory_bytes, read_machine
from lapclip.model.clip import build_model
from lapclip.optim import build_optimizer, schedule, set_lr
from lapclip.run import Run, new_run, write_atomically
from lapclip.settle import DataSummary, settle, settle_tokenizer, total_steps
from lapclip.step import choose_patches, contrastive_step, move

NUM_CAPTIONS_READ = 20_000  # to train the tokenizer on


def prepare(config: Config, name: str | None = None) -> Run:
    """Trains the tokenizer, settles what is undecided, and writes the run folder."""
    device, why_device = pick_device(config.device.device)
    training, held_out = open_source(config.data.source)
    kind, _ = settle_tokenizer(config)
    tokenizer = train_tokenizer(kind, first_captions(training, NUM_CAPTIONS_READ), config.data.max_vocab)
    with torch.device("meta"):  # counts without filling a gigabyte
        num_parameters = build_model(
            config.model, vocab_size=tokenizer.vocab_size, has_bias=False
        ).num_parameters
    machine = read_machine()
    settled, reasons = settle(
        replace(config, device=replace(config.device, device=device.name)),
        DataSummary(training.num_pairs, held_out.num_pairs),
        machine,
        threads=default_threads(),
        num_parameters=num_parameters,
    )
    reasons["device"] = why_device
    checkpoint.check_space(Path(), num_parameters)
    run = new_run(name, prefix=f"{config.data.source.replace(':', '-')}-{config.model.size}")
    run.checkpoints.mkdir()
    tokenizer.save(run.tokenizer_file)
    facts = asdict(machine) | {"torch": torch.__version__, "reasons": reasons}
    write_atomically(run.path / "machine.json", json.dumps(facts, indent=2))
    run.write_config(settled)
    return run


def first_captions(source: Source, most: int) -> Iterator[str]:
    return islice((caption for index in range(source.num_pairs) for caption in source.captions(index)), most)


def train(config: Config, run: Run) -> Generator[Event]:
    """Trains a prepared run to the end of its budget; writes each event to the run, then yields it."""
    cfg = config.train
    assert cfg.batch_size and cfg.chunk and cfg.lr and cfg.keep_patches and cfg.eval_every, "settled"
    training, held_out = open_source(config.data.source)
    steps = total_steps(cfg, training.num_pairs, cfg.batch_size)
    newest = checkpoint.latest(run.checkpoints)
    now = checkpoint.load_progress(newest) if newest else Progress()
    refuse_if_finished(run, now, config, steps)

    with run.owned():
        run.write_config(config)  # a resumed run may have been given more time
        device, _ = pick_device(config.device.device)
        set_up_process(config.device.threads or default_threads())
        tokenizer = load_tokenizer(run.tokenizer_file)
        has_bias = cfg.loss == "sigmoid"
        model = build_model(config.model, vocab_size=tokenizer.vocab_size, has_bias=has_bias, seed=cfg.seed)
        model.to(device.torch)
        optimizer = build_optimizer(model, cfg)
        if newest:
            checkpoint.load_weights(newest, model)
            checkpoint.load_optimizer(newest, model, optimizer)
        embedder = Embedder(model, tokenizer, device, chunk=min(64, cfg.chunk))
        pool = None
        saved_step, saved_seconds = now.step, now.seconds

        def report(event: Event) -> Event:
            run.write(event)
            return event

        def save() -> Event:
            nonlocal saved_step, saved_seconds
            started = time.perf_counter()
            path = checkpoint.save(run.checkpoints, model, optimizer, now)
            saved_step, saved_seconds = now.step, now.seconds
            return report(
                Saved(now.step, str(path), checkpoint.num_bytes(path), time.perf_counter() - started)
            )

        batches = load_batches(
            training,
            tokenizer,
            batch_size=cfg.batch_size,
            image_size=model.size.image_size,
            text_length=model.size.text_length,
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
                    batch_size=cfg.batch_size,
                    chunk=cfg.chunk,
                    device=device.name,
                    threads=torch.get_num_threads(),
                    minutes=cfg.minutes,
                    total_steps=steps,
                )
            )
            if warning := captions_cut(training, tokenizer, model.size.text_length, now.step):
                yield report(warning)

            while (share := share_done(now, config, steps)) < 1:
                # one step
                started = time.perf_counter()
                batch = next(batches)
                data_seconds = time.perf_counter() - started
                keep_BK = choose_patches(
                    now.step,
                    seed=cfg.seed,
                    batch_size=cfg.batch_size,
                    num_patches=model.image.num_patches,
                    share=cfg.keep_patches,
                )
                set_lr(optimizer, lr := cfg.lr * schedule(share, cfg.warmup))
                optimizer.zero_grad()
                outcome = contrastive_step(model, move(batch, device, keep_BK), LOSSES[cfg.loss], cfg.chunk)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_norm).item()
                loss = outcome.loss.item()
                if not math.isfinite(loss + norm):
                    raise diverged(now.step, loss, cfg.lr, newest=checkpoint.latest(run.checkpoints))
                optimizer.step()
                device.synchronize()
                step_seconds = time.perf_counter() - started
                now.step += 1
                now.seconds += step_seconds
                now.num_pairs_seen += cfg.batch_size
                share = share_done(now, config, steps)
                yield report(
                    Step(
                        step=now.step,
                        epoch=now.num_pairs_seen / training.num_pairs,
                        num_pairs_seen=now.num_pairs_seen,
                        loss=loss,
                        accuracy=outcome.accuracy.item(),
                        lr=lr,
                        temperature=1 / model.scale().item(),
                        grad_norm=norm,
                        pairs_per_second=cfg.batch_size / step_seconds,
                        data_seconds=data_seconds,
                        seconds=now.seconds,
                        progress=min(1.0, share),
                        seconds_left=max(0.0, now.seconds / share - now.seconds),
                    )
                )

                # once in a while, and at the end: recall over the held-out pool
                if share >= 1 or is_due(
                    cfg.eval_every, now.step - now.last_eval_step, now.seconds - now.last_eval_seconds
                ):
                    started = time.perf_counter()
                    pool = embed_pool(embedder, held_out, config.data.num_validation)
                    recall = retrieval(pool)
                    is_best = now.best_recall is None or goodness(recall) > goodness(now.best_recall)
                    now.last_eval_step, now.last_eval_seconds = now.step, now.seconds
                    if is_best:
                        now.best_step, now.best_recall = now.step, recall
                    yield report(Evaluated(now.step, recall, is_best, time.perf_counter() - started))

                # a checkpoint: in time, for the best so far, and at the end
                is_time = is_due(cfg.save_every, now.step - saved_step, now.seconds - saved_seconds)
                if share >= 1 or now.best_step == now.step or is_time:
                    yield save()

            best = checkpoint.best(run.checkpoints)
            if best and (now.best_step != now.step or pool is None):
                checkpoint.load_weights(best, model)
                pool = embed_pool(embedder, held_out, config.data.num_validation)
            if pool:
                draw_learned(run, held_out, pool)
            batches.close()  # its processes end here, so that their memory is counted
            yield report(finished("budget", now, run, training.num_pairs, model.num_parameters))
        except GeneratorExit:
            batches.close()
            if not checkpoint.is_saved(run.checkpoints, now.step):
                save()
            if share_done(now, config, steps) < 1:
                report(finished("stopped", now, run, training.num_pairs, model.num_parameters))
            raise
        finally:
            batches.close()


def finished(reason: str, now: Progress, run: Run, num_train: int, num_parameters: int) -> Finished:
    return Finished(
        reason=reason,
        step=now.step,
        epochs=now.num_pairs_seen / num_train,
        seconds=now.seconds,
        num_pairs_seen=now.num_pairs_seen,
        pairs_per_second=now.num_pairs_seen / max(now.seconds, 1e-9),
        peak_memory_bytes=peak_memory_bytes(),
        num_parameters=num_parameters,
        recall=now.best_recall,
        best_step=now.best_step,
        checkpoint=str(checkpoint.best(run.checkpoints)),
    )


def share_done(now: Progress, config: Config, steps: int | None) -> float:
    """How much of the budget is used, from 0 to 1."""
    if steps is not None:
        return now.step / steps
    assert config.train.minutes is not None
    return now.seconds / (config.train.minutes * 60)


def refuse_if_finished(run: Run, now: Progress, config: Config, steps: int | None) -> None:
    if share_done(now, config, steps) < 1:
        return
    done = f"{now.seconds / 60:.1f} minutes" if steps is None else f"{now.step} steps"
    more = f"--minutes {math.ceil(now.seconds / 30)}" if steps is None else f"--steps {2 * now.step}"
    raise UserError(
        f"run `{run.name}` has had its budget: {done} of training",
        hint=f"give it a larger one, counted from its start: `lapclip train --resume {run.name} {more}`",
    )


def goodness(recall: dict[str, Any]) -> tuple[float, float]:
    """What makes one evaluation better than another."""
    return recall["text_to_image"]["recall@1"], recall["text_to_image"]["recall@10"]


def captions_cut(source: Source, tokenizer: Tokenizer, text_length: int, step: int) -> Warned | None:
    """A warning when many captions lose their end."""
    lengths = tokenizer.lengths(list(first_captions(source, 1000)))
    share = float((lengths > text_length).mean())
    if share < 0.01:
        return None
    return Warned(
        step,
        message=f"{share:.0%} of the captions are longer than {text_length} tokens and lose their end",
        hint=f"`--text-length {int(lengths.max())}` would keep them whole, at some cost in time",
    )


def diverged(step: int, loss: float, lr: float, *, newest: Path | None) -> UserError:
    kept = f"; `{newest}` is from before" if newest else "; no checkpoint had been saved yet"
    return UserError(
        f"training diverged at step {step + 1}: the loss is {loss}{kept}",
        hint=f"start again with a lower learning rate: `--lr {lr / 3:.1g}`",
    )


def draw_learned(run: Run, source: Source, pool: Pool, num_queries: int = 5, num_found: int = 6) -> None:
    """Writes `learned.png`: a few captions of the pool, and the pictures the model finds for them."""
    num_captions = len(pool.text_ME)
    rows = []
    for query in range(0, num_captions, -(-num_captions // num_queries)):
        found = (pool.text_ME[query] @ pool.image_NE.T).argsort()[::-1][:num_found]
        right = int(pool.image_of_caption[query])
        pictures = [(source.picture(int(index), plot.TILE), int(index) == right) for index in found]
        rows.append((pool.captions[query], pictures))
    plot.draw_found(run.path / "learned.png", rows)
