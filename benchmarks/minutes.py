"""Compares the recall after equal minutes of training from scratch, on the validation set of one source.

    python benchmarks/minutes.py photos/ --minutes 20 --seeds 3
    python benchmarks/minutes.py photos/ --minutes 20 --only open_clip
    python benchmarks/minutes.py 'photos/ + more/' --on photos/ --minutes 20 --only lapclip
    python benchmarks/minutes.py flickr8k/ --photos 1000 --minutes 3 --only lapclip

- `lapclip`: `lapclip train SOURCE --minutes N`, nothing else set;
- `open_clip`: OpenCLIP's smallest ViT, `ViT-S-32-alt`, with its loss, tokenizer, random crops and the optimizer
  settings of its training script (AdamW, 5e-4, betas 0.9 and 0.98, eps 1e-6, weight decay 0.2, cosine schedule). The
  script's warm-up of 10,000 steps would not end within the minutes, so it is a tenth of the budget; batches of 128, in
  bf16 by autocast, its script's default;
- `documents`: `lapclip train SOURCE --minutes N --size small --keep-patches 1`, the documents' model and batch.

They run one after the other, each in a process of its own; evaluation is not counted. Prints one JSON object per run.
`wall_seconds` are from the beginning of the first step to the end, evaluations included; `lr_left` is the last learning
rate as a share of the highest.
"""

import argparse
import csv
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CONFIG = "ViT-S-32-alt"
BATCH_SIZE, LR, WEIGHT_DECAY, WARMUP = 128, 5e-4, 0.2, 0.1
SIZES = {"lapclip": [], "documents": ["--size", "small", "--keep-patches", "1"]}


def with_lapclip(flags: list[str], asked: argparse.Namespace, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        source = asked.source
        if asked.photos:
            flags = [*flags, "--images", f"{source}/images"]
            source = fewer(source, asked.photos, Path(folder))
        budget = ["--minutes", str(asked.minutes), "--seed", str(seed), "--run", "run"]
        result = json_of(["train", source, *budget, *flags], folder)
        lines = Path(folder, "runs/run/events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        evaluation = ["eval", "run", asked.on, "--num-validation", "512"]
        recall = json_of(evaluation, folder) if asked.on else result["recall"]
    steps = [event for event in events if event["event"] == "Step"]
    result["num_images"] = recall["num_images"]
    result["wall_seconds"] = events[-1]["time"] - steps[0]["time"] + steps[0]["seconds"]
    result["lr_left"] = steps[-1]["lr"] / max(step["lr"] for step in steps)
    names = ("steps", "num_pairs_seen", "seconds", "wall_seconds", "lr_left", "epochs", "num_images")
    return {name: result[name] for name in names} | recall["text_to_image"]


def fewer(source: str, num_photos: int, folder: Path) -> str:
    """A table of some of the training photos of Flickr8k, and of all its validation photos."""
    validation = set(Path(source, "dev.txt").read_text().split())
    with Path(source, "captions.txt").open(newline="") as file:
        rows = [(row["image"], row["caption"]) for row in csv.DictReader(file)]
    others = sorted({image for image, _ in rows} - validation)
    training = set(random.Random(0).sample(others, num_photos))
    with (folder / "pairs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("image", "caption", "split"))
        for image, caption in rows:
            if image in validation | training:
                split = "validation" if image in validation else "train"
                table.writerow((image, caption, split))
    return str(folder / "pairs.csv")


def json_of(arguments: list[str], folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "lapclip", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def with_open_clip(source: str, minutes: float, seed: int) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import torchvision_without_cuda  # noqa: F401, I001 - before what imports torchvision
    import open_clip
    from torchvision.transforms import v2

    from lapclip.config import DataConfig
    from lapclip.data.open import open_source
    from lapclip.evaluate.pool import Pool
    from lapclip.evaluate.retrieval import retrieval
    from lapclip.machine.device import set_up_process
    from lapclip.model.resnet import PIXEL_MEAN, PIXEL_STD
    from lapclip.units import finished

    torch.manual_seed(seed)
    set_up_process(torch.get_num_threads())
    model, tokenize = open_clip.create_model(CONFIG), open_clip.get_tokenizer(CONFIG)
    side = model.visual.image_size[0]
    data = finished(open_source(DataConfig(source=source), side))
    training, validation = data.training, data.validation
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    crop = v2.RandomResizedCrop(side, scale=(0.9, 1.0), antialias=True)
    stored = training.stored_size(side)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(training.num_pairs)
            for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
                indices = order[start : start + BATCH_SIZE]
                images = torch.stack(
                    [crop(image) for image in torch.from_numpy(training.pixels(indices, stored))]
                )
                captions = [training.caption(int(i), int(rng.integers(1000))) for i in indices]
                yield (images - mean) / std, tokenize(captions)

    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=1e-6)
    loss_fn, started, steps = open_clip.ClipLoss(), time.perf_counter(), 0
    for images, tokens in batches():
        share = (time.perf_counter() - started) / (60 * minutes)
        if share >= 1:
            break
        done = (share - WARMUP) / (1 - WARMUP)
        factor = share / WARMUP if share < WARMUP else 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = LR * factor
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            embedded = model(images, tokens)
        loss_fn(*(one.float() for one in embedded)).backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        steps += 1
    model.eval()
    indices = validation.sample(512)
    captions_N = [validation.captions(int(index)) for index in indices]
    captions = [caption for some in captions_N for caption in some]
    resize = v2.Resize(side, antialias=True)
    with torch.inference_mode():
        image_NE = [
            model.encode_image(
                (resize(torch.from_numpy(validation.pixels(some, stored))) - mean) / std, normalize=True
            )
            for some in np.array_split(indices, 16)
        ]
        text_ME = [
            model.encode_text(tokenize(captions[n : n + 100]), normalize=True)
            for n in range(0, len(captions), 100)
        ]
    pool = Pool(
        image_NE=torch.cat(image_NE).numpy(),
        text_ME=torch.cat(text_ME).numpy(),
        image_of_caption=np.repeat(np.arange(len(indices)), [len(some) for some in captions_N]),
        captions=captions,
        indices=indices,
        groups=validation.groups(indices),
    )
    return {
        "steps": steps,
        "num_pairs_seen": steps * BATCH_SIZE,
        **retrieval(pool, BATCH_SIZE)["text_to_image"],
    }


def absolute(source: str) -> str:
    path, *weight = source.split("@")
    return "@".join([str(Path(path).resolve()), *weight]) if Path(path).exists() else source


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--on", help="evaluate `lapclip` on the validation set of this source instead")
    parser.add_argument("--photos", type=int, help="train `lapclip` on so many of the photos of Flickr8k")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=1, help="of `lapclip`; the others run once")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", choices=["lapclip", "open_clip", "documents"])
    asked = parser.parse_args()
    if (asked.on or asked.photos) and asked.only != "lapclip":
        parser.error("`--on` and `--photos` are for `--only lapclip`")
    # Runs are made in folders of their own.
    asked.source = " + ".join(absolute(part) for part in asked.source.split(" + "))
    asked.on = asked.on and absolute(asked.on)
    for name in [asked.only] if asked.only else ["lapclip", "open_clip", "documents"]:
        for number in range(asked.seeds if name == "lapclip" else 1):
            seed = asked.first_seed + number
            if name == "open_clip":
                found = with_open_clip(asked.source, asked.minutes, seed)
            else:
                found = with_lapclip(SIZES[name], asked, seed)
            print(json.dumps({"name": name, "seed": seed, "minutes": asked.minutes, **found}), flush=True)


if __name__ == "__main__":
    main()
