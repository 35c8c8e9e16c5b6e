"""Times one training step beside other implementations of the same shape and batch, in turn and in one process.

    python benchmarks/step.py                  # `small`, batch 12, 224 px: about ten minutes on two cores
    python benchmarks/step.py --size tiny      # batch 128, 64 px
    python benchmarks/step.py --memory         # peak memory, each in a process of its own

- `documents`: attention with a softmax of its own, dropout, AdamW that is not fused, as the documents describe it;
- `transformers`: `CLIPModel` with the fused AdamW, `open_clip`: `CLIP` and `ClipLoss` with `AdamW`; both are given
  images already normalised, and captions padded to the text length, as their training scripts do;
- `lapclip`: the same mathematics, all patches; `lapclip recipe`: the default share of patches of that size.

Each round runs one step of each, in another order. The rate of matrix products is that of the three products of the
image tower's first MLP layer, measured in each round: by torch, and each by the faster of torch and oneDNN. A step
with only such products would have a share of 100%.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import torchvision_without_cuda  # noqa: F401 - both others import torchvision

from lapclip.autotune.resolve import RECIPES
from lapclip.autotune.work import place
from lapclip.config import Plan, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.device import processor, set_up_process
from lapclip.machine.hardware import limit_openmp_spinning
from lapclip.model.blocks import ONEDNN
from lapclip.model.clip import CLIP, SIZES, flops_per_pair
from lapclip.model.towers import Size
from lapclip.step.loss import softmax_loss
from lapclip.step.optim import build_optimizer
from lapclip.step.step import Update, choose_patches, move

VOCAB_SIZE = 4096
SHORTEST, LONGEST = 0.3, 0.7  # caption of a batch, as a share of the text length

Step = Callable[[], object]


class DocumentsBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = q @ k.transpose(-2, -1) * (D // self.heads) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        y = self.dropout(scores.softmax(-1)) @ v
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(B, T, D)))
        return x + self.mlp(self.norm2(x))


class DocumentsClip(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        image, text = size.image, size.text
        self.patches = nn.Conv2d(3, image.width, size.patch_size, size.patch_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, image.width) * 0.02)
        self.image_positions = nn.Parameter(torch.randn(1, size.num_patches + 1, image.width) * 0.02)
        self.embed = nn.Embedding(VOCAB_SIZE, text.width)
        self.text_positions = nn.Parameter(torch.randn(1, size.text_length, text.width) * 0.02)
        self.image_blocks = nn.ModuleList(
            DocumentsBlock(image.width, image.heads) for _ in range(image.depth)
        )
        self.text_blocks = nn.ModuleList(DocumentsBlock(text.width, text.heads) for _ in range(text.depth))
        self.image_norm, self.text_norm = nn.LayerNorm(image.width), nn.LayerNorm(text.width)
        self.image_out = nn.Linear(image.width, size.embedding)
        self.text_out = nn.Linear(text.width, size.embedding)
        self.log_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, images: Tensor, tokens: Tensor, ends: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.image_positions
        for block in self.image_blocks:
            x = block(x, None)
        image = F.normalize(self.image_out(self.image_norm(x)[:, 0]), dim=-1)
        x = self.embed(tokens) + self.text_positions
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for block in self.text_blocks:
            x = block(x, mask)
        text = F.normalize(self.text_out(self.text_norm(x)[torch.arange(len(x)), ends]), dim=-1)
        return contrast(self.log_scale.exp() * image @ text.T)


def contrast(logits: Tensor) -> Tensor:
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def stepper(model: nn.Module, loss: Callable[[], Tensor], *, fused: bool | None, lr: float) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def documents(size: Size, batch: Batch, lr: float) -> Step:
    model, inputs = DocumentsClip(size), whole_inputs(size, batch)
    return stepper(model, lambda: model(*inputs), fused=None, lr=lr)


def hugging_face(size: Size, batch: Batch, lr: float) -> Step:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    def shared(shape):
        return {"hidden_size": shape.width, "intermediate_size": shape.mlp_width, "num_hidden_layers": shape.depth,
                "num_attention_heads": shape.heads, "projection_dim": size.embedding, "hidden_act": "gelu"}  # fmt: skip

    length = {"max_position_embeddings": size.text_length, "bos_token_id": 2, "eos_token_id": 1}
    text = CLIPTextConfig(**shared(size.text), vocab_size=VOCAB_SIZE, **length)
    vision = CLIPVisionConfig(**shared(size.image), image_size=size.image_size, patch_size=size.patch_size)
    model = CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=size.embedding)
    )
    images, tokens, _ = whole_inputs(size, batch)
    return stepper(
        model, lambda: model(input_ids=tokens, pixel_values=images, return_loss=True).loss, fused=True, lr=lr
    )


def open_clip(size: Size, batch: Batch, lr: float) -> Step:
    import open_clip
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    image, text = size.image, size.text
    vision = CLIPVisionCfg(
        layers=image.depth, width=image.width, head_width=image.width // image.heads,
        patch_size=size.patch_size, image_size=size.image_size,
    )  # fmt: skip
    texts = CLIPTextCfg(
        context_length=size.text_length,
        vocab_size=VOCAB_SIZE,
        width=text.width,
        heads=text.heads,
        layers=text.depth,
    )
    model = open_clip.CLIP(size.embedding, vision, texts)
    images, tokens, ends = whole_inputs(size, batch)
    tokens = tokens.clone()
    tokens[torch.arange(len(tokens)), ends] = VOCAB_SIZE - 1  # it reads out at the highest token
    contrastive = open_clip.ClipLoss()
    return stepper(model, lambda: contrastive(*model(images, tokens)), fused=None, lr=lr)


def ours(size: Size, batch: Batch, lr: float, share: float = 1.0) -> Step:
    model = place(CLIP(size, vocab_size=VOCAB_SIZE), processor(), compile=False)
    optimizer = build_optimizer(model, TrainConfig(lr=lr))
    plan = Plan("cpu", "fp32", torch.get_num_threads(), len(batch.images))
    update = Update(model, optimizer, softmax_loss, 1.0, plan)
    keep = choose_patches(0, seed=0, batch_size=len(batch.images), num_patches=size.num_patches, share=share)
    inputs = move(batch, processor(), keep)
    return lambda: update.run(inputs)


def whole_inputs(size: Size, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.from_numpy(batch.tokens)
    tokens = F.pad(tokens, (0, size.text_length - tokens.shape[1]))
    return (torch.from_numpy(batch.images).float() - 120) / 70, tokens, torch.from_numpy(batch.ends)


def random_batch(size: Size, num_pairs: int) -> Batch:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_pairs, 3, size.image_size, size.image_size), dtype=np.uint8)
    longest = round(LONGEST * size.text_length)
    lengths = rng.integers(round(SHORTEST * size.text_length), longest + 1, num_pairs)
    lengths[0] = longest
    tokens = rng.integers(3, VOCAB_SIZE - 1, (num_pairs, lengths.max()))
    tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = 0
    tokens[np.arange(num_pairs), lengths - 1] = 1  # the end
    return Batch(images, tokens, lengths - 1, np.arange(num_pairs), np.arange(num_pairs))


def products(size: Size, num_rows: int, *, fastest: bool) -> Step:
    """The three products of one MLP layer, by torch, or each by the faster of torch and oneDNN."""
    width, hidden = size.image.width, size.image.mlp_width
    x, weight, gradient = (
        torch.randn(num_rows, width),
        torch.randn(hidden, width),
        torch.randn(num_rows, hidden),
    )
    pairs = [(x, weight.T), (gradient, weight), (gradient.T, x)]
    ways: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    if fastest and ONEDNN:
        ways.append(lambda a, b: ONEDNN(a, b.T, None, "none", [], ""))
    chosen = [min(ways, key=partial(fastest_of_five, pair)) for pair in pairs]

    def step() -> None:
        for multiply, pair in zip(chosen, pairs, strict=True):
            multiply(*pair)

    return step


def fastest_of_five(pair: tuple[Tensor, Tensor], multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
    return min(timed(lambda: multiply(*pair)) for _ in range(5))


CONTENDERS: dict[str, Callable[..., Step]] = {
    "documents": documents, "transformers": hugging_face, "open_clip": open_clip, "lapclip": ours
}  # fmt: skip


def prepare(asked: argparse.Namespace) -> tuple[Size, Batch, float]:
    limit_openmp_spinning()
    torch.manual_seed(0)
    recipe = RECIPES[asked.size]
    size = SIZES[asked.size]
    return size, random_batch(size, asked.batch_size or recipe.batch_size), recipe.lr


def timed(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def compare(asked: argparse.Namespace) -> dict:
    size, batch, lr = prepare(asked)
    set_up_process(torch.get_num_threads(), keep_memory=True)
    num_pairs, share = len(batch.images), RECIPES[asked.size].keep_patches
    steps = {name: make(size, batch, lr) for name, make in CONTENDERS.items()}
    steps["lapclip recipe"] = ours(size, batch, lr, share)
    num_patches = {"lapclip": size.num_patches, "lapclip recipe": round(share * size.num_patches)}
    for name, num_kept in num_patches.items():
        for by in ("torch", "fastest"):
            num_rows = num_pairs * (num_kept + 1)
            steps[f"products of {name}, {by}"] = products(size, num_rows, fastest=by == "fastest")
    seconds = interleaved(steps, asked.rounds, asked.seconds)
    shares, ratios = {}, {}
    for name, num_kept in num_patches.items():
        lengths = [int(end) + 1 for end in batch.ends]  # padding does not count
        each = [flops_per_pair(size, num_tokens=length, num_patches=num_kept) for length in lengths]
        operations = statistics.mean(each)
        of_products = 2 * (num_kept + 1) * size.image.width * size.image.mlp_width
        ratio = operations / of_products
        shares[name] = {
            by: statistics.median(
                ratio * b / a
                for a, b in zip(seconds[name], seconds[f"products of {name}, {by}"], strict=True)
            )
            for by in ("torch", "fastest")
        }
        ratios[name] = {
            other: statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))
            for other in ("documents", "transformers", "open_clip")
        }
    return {
        "size": asked.size,
        "batch_size": num_pairs,
        "rounds": asked.rounds,
        "pairs_per_second": {n: num_pairs / statistics.median(own) for n, own in seconds.items()},
        "seconds": {name: [min(own), max(own)] for name, own in seconds.items()},
        "times_as_fast_as": ratios,
        "share_of_product_rate": shares,
    }


def interleaved(steps: dict[str, Step], num_rounds: int, min_seconds: float) -> dict[str, list[float]]:
    """The seconds of each step in each round; short ones are repeated, so that all are timed for about as long."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_rounds + 1):
        for name in random.Random(number).sample(sorted(steps), len(steps)):
            took = [timed(steps[name])]
            while sum(took) < min_seconds:
                took.append(timed(steps[name]))
            if number:  # the first round warms up
                seconds[name].append(statistics.mean(took))
    return seconds


def run_alone(asked: argparse.Namespace) -> None:
    """Three steps of one contender; prints the peak memory of this process."""
    size, batch, lr = prepare(asked)
    if asked.alone == "lapclip":
        set_up_process(torch.get_num_threads(), keep_memory=True)
    step = CONTENDERS[asked.alone](size, batch, lr)
    for _ in range(3):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def compare_memory(asked: argparse.Namespace) -> dict:
    peaks = {}
    for name in CONTENDERS:
        command = [sys.executable, __file__, "--size", asked.size, "--alone", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[name] = int(done.stdout.split()[-1])
    return {
        "peak_bytes": peaks,
        "share_of_documents": {n: peak / peaks["documents"] for n, peak in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="small", choices=[n for n in RECIPES if not SIZES[n].image_encoder])
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="at least so long is each one timed in a round"
    )
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--alone", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        run_alone(asked)
        return
    print(json.dumps(compare_memory(asked) if asked.memory else compare(asked), indent=2))


if __name__ == "__main__":
    main()
