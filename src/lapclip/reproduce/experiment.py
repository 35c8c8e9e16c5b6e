"""The settings of both runs of `lapclip reproduce`, and what is measured besides training."""

from collections.abc import Generator
from statistics import fmean
from typing import Any

import torch

from lapclip.bench.show import ops_section
from lapclip.bench.steps import bench_steps, look_over
from lapclip.config import load_config
from lapclip.data.open import open_source
from lapclip.embedder import load
from lapclip.evaluate.pool import embed_pool
from lapclip.machine.device import present_devices
from lapclip.model.clip import shape_of
from lapclip.reproduce.figures import BATCH_SIZE, LR, NUM_EPOCHS, NUM_STEPS, Evidence
from lapclip.runs.history import Summary
from lapclip.runs.run import Run
from lapclip.step.step import in_batch_accuracy
from lapclip.units import finished
from lapclip.weights.checkpoint import best, latest

QUICK_EPOCHS, QUICK_MINUTES = 2, 0.5
DOCUMENTS: dict[str, Any] = {
    "source": "synthetic:documents", "size": "small", "tokenizer": "characters", "batch_size": BATCH_SIZE, "lr": LR,
    "weight_decay": 0.01, "keep_patches": 1.0, "device": "cpu", "precision": "fp32", "eval_every": str(NUM_STEPS),
}  # fmt: skip


def settings_of(which: str, *, quick: bool, minutes: float = 0.0) -> dict[str, Any]:
    """Of the documents' experiment, or of lapclip's own run of so many minutes."""
    if which == "documents":
        return DOCUMENTS | {"epochs": QUICK_EPOCHS if quick else NUM_EPOCHS}
    return {"source": "synthetic", "minutes": QUICK_MINUTES if quick else minutes}


def measure(summary: Summary, *, quick: bool) -> Generator[str, None, Evidence]:
    """What the figures need besides the run; the quick command measures only what takes seconds."""
    if quick:
        return Evidence(summary)
    yield "measuring the validation accuracy"
    validation = validation_accuracies(summary.run)
    overview = yield from look_over(fresh=False)
    plans = {name: value for name, value in DOCUMENTS.items() if name not in ("device", "precision")}
    steps = yield from bench_steps(load_config(flags=plans), compile=False, fresh=False)
    crossovers = {}
    if any(device.is_accelerator for device in present_devices()):
        crossovers = (yield from ops_section(load_config(), fresh=False)).json["crossovers"]
    bandwidth = overview.rates["cpu"]["bandwidth_gbs"]
    return Evidence(summary, validation, steps, bandwidth, crossovers)


def validation_accuracies(run: Run) -> dict[str, float]:
    """In batches as in training, as the documents measure it, of the best and of the last checkpoint."""
    config = run.load_config()
    source = finished(open_source(config.data, shape_of(config.model).image_size)).validation
    found = {}
    for which, checkpoint in (("best", best(run.checkpoints)), ("last", latest(run.checkpoints))):
        if checkpoint is None:
            continue
        pool = embed_pool(load(checkpoint), source, source.num_pairs)
        images, texts = (torch.from_numpy(rows).split(BATCH_SIZE) for rows in (pool.image_NE, pool.text_ME))
        same = torch.eye(BATCH_SIZE, dtype=torch.bool)
        found[which] = fmean(in_batch_accuracy(i, t, same).item() for i, t in zip(images, texts, strict=True))
    return found
