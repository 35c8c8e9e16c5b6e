"""Heads on cached features: a sweep over their settings, judged on a part of the training images."""

from collections.abc import Generator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from lapclip.config import Plan, TrainConfig
from lapclip.data.decode import digest
from lapclip.embedder import Embedder
from lapclip.evaluate.retrieval import retrieval
from lapclip.files import read_bounded, write_atomically
from lapclip.finetune.features import Features
from lapclip.machine.device import processor
from lapclip.model.clip import CLIP
from lapclip.model.towers import Head, Projection
from lapclip.runs.history import mean_recall
from lapclip.step.loss import LOSSES
from lapclip.step.optim import build_optimizer, schedule, set_lr
from lapclip.step.step import Update, move
from lapclip.units import LongWork, Progress
from lapclip.weights.reading import Pretrained

BATCH_SIZE, STEPS, SWEEP_STEPS = 1024, 150, 75
MIN_FOR_SWEEP = 100  # training images; fewer cannot tell settings apart
SHARE_HELD_BACK, MAX_HELD_BACK = 0.1, 1000  # of the training images, to judge settings on
TOLERANCE = 0.01  # of mean recall
MIN_STD = 1e-3  # of a feature; one that hardly varies is not enlarged


@dataclass(frozen=True)
class Candidate:
    """One combination of head settings, and its mean recall of the training images held back."""

    head: Head
    lr: float
    recall: float = 0.0


CANDIDATES = tuple(Candidate(Head(512, dropout, 0.2), 2.5e-3) for dropout in (0.5, 0.6, 0.4))


def with_heads(
    found: Pretrained, head: Head, features: Features, *, seed: int, has_towers: bool = True
) -> CLIP:
    """The model with new heads on its frozen towers; they start at its own projections where these are trained.

    Without towers it embeds features only, and is small.
    """
    model = found.model
    if found.is_aligned and model.size.head:
        head = replace(head, hidden=model.size.head.hidden)
    towers = (model.image, model.text) if has_towers else (nn.Identity(), nn.Identity())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        size, has_bias = replace(model.size, head=head), model.bias is not None
        new = CLIP(size, vocab_size=model.vocab_size, has_bias=has_bias, scale=20.0, towers=towers)
    new.image.requires_grad_(False)
    new.text.requires_grad_(False)
    with torch.no_grad():
        for projection, rows, old in (
            (new.project_image, features.views[0], model.project_image),
            (new.project_text, features.text_UD, model.project_text),
        ):
            assert isinstance(projection, Projection)
            sample = rows[:: 1 + len(rows) // 20_000].astype(np.float32)
            projection.mean.copy_(torch.from_numpy(sample.mean(0)))
            projection.std.copy_(torch.from_numpy(sample.std(0).clip(MIN_STD)))
            if found.is_aligned:
                start_at(projection, old)
        if found.is_aligned:
            new.log_scale.copy_(model.log_scale)
            if new.bias is not None and model.bias is not None:
                new.bias.copy_(model.bias)
    return new


def start_at(projection: Projection, old: nn.Module) -> None:
    """The same function as a trained projection, on standardised features."""
    if isinstance(old, Projection):
        projection.load_state_dict(old.state_dict())
        return
    weight: Tensor = old.weight if isinstance(old, nn.Linear) else torch.eye(len(projection.mean))
    projection.linear.weight.copy_(weight * projection.std)
    projection.linear.bias.copy_(weight @ projection.mean)
    if isinstance(old, nn.Linear) and old.bias is not None:
        projection.linear.bias.add_(old.bias)


def sweep(found: Pretrained, features: Features, cfg: TrainConfig, threads: int) -> LongWork[list[Candidate]]:
    """All candidates, the chosen one first, judged once. Without enough images to judge by, as they are."""
    rows = features.rows
    if len(rows) < MIN_FOR_SWEEP:
        return list(CANDIDATES)
    start = [found.model.project_image, found.model.project_text] if found.is_aligned else []
    weights = (tensor.numpy().tobytes() for own in start for tensor in own.state_dict().values())
    key = digest(repr((CANDIDATES, SWEEP_STEPS, cfg)).encode(), *weights).hex()[:12]
    file = features.folder / f"sweep-{key}.json"
    if file.exists():
        return msgspec.json.decode(read_bounded(file), type=list[Candidate])
    # By groups: equal images must not be on both sides.
    groups = features.source.groups(rows)
    drawn = np.random.default_rng(cfg.seed).permutation(np.unique(groups))
    num_held = min(MAX_HELD_BACK, round(SHARE_HELD_BACK * len(drawn)))
    is_held = np.isin(groups, drawn[:num_held])
    judged = []
    for number, candidate in enumerate(CANDIDATES):
        model = with_heads(found, candidate.head, features, seed=cfg.seed, has_towers=False)
        own = replace(cfg, lr=candidate.lr)
        for step in fit(model, features, rows[~is_held], own, threads):
            done = number * SWEEP_STEPS + step
            yield Progress("comparing head settings", done, len(CANDIDATES) * SWEEP_STEPS)
        pool = features.pool(Embedder(model, found.tokenizer, processor()), rows[is_held])
        judged.append(replace(candidate, recall=mean_recall(retrieval(pool, BATCH_SIZE))))
    # A short comparison prefers less dropout than the training needs: of nearly equal ones, that with the most.
    enough = max(candidate.recall for candidate in judged) - TOLERANCE
    judged.sort(key=lambda candidate: (candidate.recall < enough, -candidate.head.dropout))
    write_atomically(file, msgspec.json.encode(judged))
    return judged


def fit(model: CLIP, features: Features, rows: np.ndarray, cfg: TrainConfig, threads: int) -> Generator[int]:
    """Trains the heads as a run does, for half as long; yields after each step."""
    assert cfg.lr and cfg.loss, "resolved"
    batch_size = min(BATCH_SIZE, len(rows))
    optimizer = build_optimizer(model, cfg)
    plan = Plan("cpu", "fp32", threads, batch_size)
    update = Update(model, optimizer, LOSSES[cfg.loss], cfg.clip_norm, plan)
    batches = features.batches(rows, batch_size=batch_size, seed=cfg.seed)
    for step in range(SWEEP_STEPS):
        set_lr(optimizer, cfg.lr * schedule((step + 0.5) / SWEEP_STEPS, cfg.warmup))
        update.run(move(next(batches), processor(), None))
        yield step
