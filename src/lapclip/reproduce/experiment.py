"""The settings of both runs of `lapclip reproduce`, and what is measured besides them."""

from typing import Any

from lapclip.bench.show import ops_section
from lapclip.bench.steps import bench_steps, look_over
from lapclip.config import load_config
from lapclip.machine.device import present_devices
from lapclip.reproduce.figures import BATCH_SIZE, LR, NUM_EPOCHS, NUM_STEPS, Evidence
from lapclip.runs.history import Summary
from lapclip.units import StagedWork

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


def measure(summary: Summary, own: Summary, *, quick: bool) -> StagedWork[Evidence]:
    """What the figures need besides the run; the quick command measures only what takes seconds."""
    if quick:
        return Evidence(summary, own)
    overview = yield from look_over(fresh=False)
    plans = {name: value for name, value in DOCUMENTS.items() if name not in ("device", "precision")}
    steps = yield from bench_steps(load_config(flags=plans), compile=False, fresh=False)
    crossovers = {}
    if any(device.is_accelerator for device in present_devices()):
        crossovers = (yield from ops_section(load_config(), fresh=False)).json["crossovers"]
    bandwidth = overview.rates["cpu"]["bandwidth_gbs"]
    return Evidence(summary, own, steps, bandwidth, crossovers)
