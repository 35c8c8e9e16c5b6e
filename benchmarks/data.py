"""Measures images/s of packing and pairs/s of loading, compared with a loop over files and with PyTorch's DataLoader.

    python benchmarks/data.py                      # about five minutes on two cores
    python benchmarks/data.py --image-size 224     # for the larger models
    python benchmarks/data.py --pictures 2000      # starting processes matters less

First, photos of 1000 x 750 pixels are made: from Flickr8k, cropped, enlarged and with added camera noise, if
`../shared/data` has it; otherwise smooth noise. Each measurement runs in a separate process whose memory is sampled
from outside. Each round runs all contenders in turn, so that load on the machine affects all of them. Files come from
the page cache.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

FLICKR = Path(__file__).resolve().parents[2] / "shared" / "data" / "flickr8k"
WIDTH, HEIGHT = 1000, 750
NUM_PROCESSES = os.cpu_count() or 1
BATCH = 128
TEXT_LENGTH = 48
SECONDS_DELIVERED = 4.0
GRAIN = 5.0  # a standard deviation; makes a file as large as that of a real photo
MEAN, STD = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)


def make_photos(folder: Path, num_photos: int) -> None:
    """JPEGs as a camera or the web has them, and a table with five captions each."""
    rng = np.random.default_rng(0)
    originals, captions = flickr_photos()
    rows = ["image,caption"]
    for number in range(num_photos):
        name = f"{number:06}.jpg"
        if originals:
            original = originals[number % len(originals)]
            photo, said = enlarged(original, rng), captions[original.name]
        else:
            photo = smooth_noise(rng)
            said = [f"image {number} of a fog, seen {k + 1} times" for k in range(5)]
        photo.save(folder / name, quality=90, subsampling="4:2:0")
        rows += [f'{name},"{caption}"' for caption in said]
    (folder / "captions.csv").write_text("\n".join(rows) + "\n", "utf-8")


def flickr_photos() -> tuple[list[Path], dict[str, list[str]]]:
    if not FLICKR.is_dir():
        return [], {}
    captions = read_captions(FLICKR / "captions.txt")
    originals = sorted(path for path in (FLICKR / "images").iterdir() if path.name in captions)
    return [originals[i] for i in np.random.default_rng(1).permutation(len(originals))], captions


def read_captions(table: Path) -> dict[str, list[str]]:
    captions: dict[str, list[str]] = {}
    for line in table.read_text("utf-8").splitlines()[1:]:
        name, _, caption = line.partition(",")
        captions.setdefault(name, []).append(caption.replace('"', ""))
    return captions


def enlarged(path: Path, rng: np.random.Generator) -> Image.Image:
    with Image.open(path) as opened:
        photo = opened.convert("RGB")
    width = min(photo.width, photo.height * WIDTH / HEIGHT) * rng.uniform(0.8, 1)
    height = width * HEIGHT / WIDTH
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    box = (left, top, left + width, top + height)
    return grainy(photo.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS, box=box), rng)


def smooth_noise(rng: np.random.Generator) -> Image.Image:
    coarse = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8))
    return grainy(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), rng)


def grainy(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """With the fine detail that enlarging lost: without it a file would be half the size of a real one."""
    grain = rng.normal(0, GRAIN, (HEIGHT, WIDTH, 1)).astype(np.float32)
    return Image.fromarray((np.asarray(photo) + grain).clip(0, 255).astype(np.uint8))


# The contenders: each is (number done, seconds), in a process that has done nothing else


def usual_transform(path: str, size: int) -> Any:
    """What torchvision's Compose of Resize, CenterCrop, ToTensor and Normalize does, without torchvision."""
    import torch

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    scale = size / min(image.size)
    width, height = (max(size, round(extent * scale)) for extent in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
    return (tensor - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


class Files:
    """The usual dataset: decodes a file when it is asked for it."""

    def __init__(self, folder: Path, size: int, tokenizer_file: Path | None = None):
        self.paths = sorted(str(path) for path in folder.glob("*.jpg"))
        self.size = size
        self.tokenizer: Any = None
        if tokenizer_file:
            from lapclip.data.tokenizer import load_tokenizer

            self.tokenizer = load_tokenizer(tokenizer_file)
            self.captions = read_captions(folder / "captions.csv")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = usual_transform(self.paths[index], self.size)
        if self.tokenizer is None:
            return image
        said = self.captions[os.path.basename(self.paths[index])]
        return image, said[np.random.randint(len(said))]

    def together(self, pairs: list[Any]) -> Any:
        """A batch, its captions tokenised all at once, in the worker."""
        import torch

        pictures, captions = zip(*pairs, strict=True)
        return torch.stack(pictures), *map(torch.from_numpy, self.tokenizer.encode(captions, TEXT_LENGTH))


def loop_alone(folder: Path, image_size: int) -> tuple[int, float]:
    import torch

    from lapclip.data.pack import size_for

    torch.set_num_threads(1)
    files = Files(folder, size_for(image_size))
    started = time.perf_counter()
    num_done = sum(1 for index in range(len(files)) if files[index] is not None)
    return num_done, time.perf_counter() - started


def loop_together(folder: Path, image_size: int) -> tuple[int, float]:
    from torch.utils.data import DataLoader

    from lapclip.data.pack import size_for

    files: Any = Files(folder, size_for(image_size))
    started = time.perf_counter()
    num_done = sum(len(batch) for batch in DataLoader(files, batch_size=32, num_workers=NUM_PROCESSES))
    return num_done, time.perf_counter() - started


def pack_once(folder: Path, image_size: int, workers: int | None) -> tuple[int, float]:
    """lapclip's own packing into an empty cache, with all it does to be safe and to be found again."""
    from lapclip.data.catalogue import Options
    from lapclip.data.formats.detect import open_catalogue
    from lapclip.data.pack import pack, size_for
    from lapclip.units import finished

    with tempfile.TemporaryDirectory() as cache:
        os.environ["LAPCLIP_CACHE"] = cache
        catalogue, identity = open_catalogue(str(folder), Options())
        started = time.perf_counter()
        packed = finished(pack(catalogue, identity, size_for(image_size), workers))
        seconds = time.perf_counter() - started
    assert not packed.unreadable and not packed.num_reused, "every photo was decoded"
    return len(packed.records), seconds


def deliver_files(folder: Path, image_size: int) -> tuple[int, float]:
    from torch.utils.data import DataLoader, RandomSampler

    files: Any = Files(folder, image_size, folder / "tokenizer.json")
    endless = RandomSampler(files, replacement=True, num_samples=10**9)
    loader = DataLoader(files, BATCH, sampler=endless, num_workers=NUM_PROCESSES, collate_fn=files.together)
    return rate(iter(loader))


def packed_batches(folder: Path, image_size: int) -> Iterator[Any]:
    """lapclip's own delivery: bytes, in the size that the pack keeps."""
    from lapclip.config import load_config
    from lapclip.data.batches import load_batches
    from lapclip.data.open import open_source
    from lapclip.data.tokenizer import load_tokenizer
    from lapclip.units import finished

    os.environ["LAPCLIP_CACHE"] = str(folder / "cache")
    data = finished(open_source(load_config(flags={"source": str(folder)}).data, image_size))
    return load_batches(
        data.training, load_tokenizer(folder / "tokenizer.json"),
        batch_size=BATCH, image_size=image_size, text_length=TEXT_LENGTH, seed=0, first_step=0, workers=0,
    )  # fmt: skip


def normalised(batches: Iterator[Any], image_size: int) -> Iterator[Any]:
    """What the DataLoader gives: numbers, in the size that the model looks at."""
    import torch

    from lapclip.config import DataConfig
    from lapclip.step.feed import augment_batch

    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    for step, batch in enumerate(batches):
        images = augment_batch(batch, DataConfig(), image_size=image_size, seed=0, step=step).images
        yield (torch.from_numpy(images).float() / 255 - mean) / std, batch.tokens, batch.ends


def rate(batches: Iterator[Any]) -> tuple[int, float]:
    """Pairs and seconds once the flow is steady: what was prepared ahead is used up first."""
    for _ in range(3 * NUM_PROCESSES):
        next(batches)
    started, num_batches = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS_DELIVERED:
        next(batches)
        num_batches += 1
    return num_batches * BATCH, time.perf_counter() - started


CONTENDERS: dict[str, Callable[[Path, int], tuple[int, float]]] = {
    "loop, one process": loop_alone,
    "pack, one process": lambda folder, size: pack_once(folder, size, 0),
    "loop, all cores": loop_together,
    "pack, all cores": lambda folder, size: pack_once(folder, size, None),
    "DataLoader": deliver_files,
    "from the pack": lambda folder, size: rate(packed_batches(folder, size)),
    "from the pack, normalised": lambda folder, size: rate(normalised(packed_batches(folder, size), size)),
}
# Which is how many times as fast as which, and at least how many times it should be.
RATIOS = {
    ("pack, one process", "loop, one process"): 2.5,
    ("pack, all cores", "loop, all cores"): 2.5,
    ("pack, all cores", "loop, one process"): None,
    ("from the pack", "DataLoader"): 20.0,
    ("from the pack, normalised", "DataLoader"): None,
}


# Measuring


def measure(contender: str, folder: Path, image_size: int) -> tuple[float, float]:
    """Images or pairs a second, and the peak of memory in GB, of a process of its own."""
    command = [sys.executable, __file__, "--contender", contender, "--folder", str(folder)]
    command += ["--image-size", str(image_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        peak, done = 0, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(0.05):
                with contextlib.suppress(psutil.Error):  # it may end while we look
                    peak = max(peak, held_bytes(psutil.Process(child.pid)))

        sampler = threading.Thread(target=sample)
        sampler.start()
        output, said = child.communicate()
        done.set()
        sampler.join()
    if child.returncode:
        sys.exit(f"{contender}: {said}")
    num_done, seconds = json.loads(output.splitlines()[-1])
    return num_done / seconds, peak / 1e9


def held_bytes(process: psutil.Process) -> int:
    """What a process and its children hold; what they share counts once where the system can say so."""
    total = 0
    with contextlib.suppress(psutil.Error):  # one that ended while we look; the next sample is soon
        for member in [process, *process.children(recursive=True)]:
            memory = member.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total


def prepare(folder: Path, num_photos: int) -> float:
    """Makes the photos and the tokenizer; returns the mean size of a file in kB."""
    from lapclip.data.tokenizer import train_tokenizer

    make_photos(folder, num_photos)
    captions = [caption for several in read_captions(folder / "captions.csv").values() for caption in several]
    (folder / "tokenizer.json").write_text(train_tokenizer("bpe", captions, 4000).to_json(), "utf-8")
    return statistics.mean(path.stat().st_size for path in folder.glob("*.jpg")) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument(
        "--image-size", type=int, default=64, help="pixels per side; the default model uses 64"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.contender:
        print(json.dumps(CONTENDERS[asked.contender](asked.folder, asked.image_size)))
        return
    with tempfile.TemporaryDirectory() as name:
        mean_kb = prepare(Path(name), asked.pictures)
        measure("from the pack", Path(name), asked.image_size)  # makes the pack that later ones find
        rounds = [
            {who: measure(who, Path(name), asked.image_size) for who in CONTENDERS}
            for _ in range(asked.rounds)
        ]
    found: dict[str, Any] = {key: getattr(asked, key) for key in ("pictures", "image_size", "rounds")} | {
        "mean_kb": mean_kb,
        "num_processes": NUM_PROCESSES,
    }
    found["per_second"] = {who: [one[who][0] for one in rounds] for who in CONTENDERS}
    found["peak_gb"] = {who: max(one[who][1] for one in rounds) for who in CONTENDERS}
    found["times_as_fast"] = {f"{f} / {s}": [one[f][0] / one[s][0] for one in rounds] for f, s in RATIOS}
    print(json.dumps(found) if asked.json else table(found))


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['pictures']} photos of {WIDTH} x {HEIGHT}, {found['mean_kb']:.0f} kB each; "
        f"images of {found['image_size']} px; {NUM_PROCESSES} cores; {found['rounds']} rounds",
        f"\n{'':28} {'median / s':>12} {'from':>10} {'to':>10} {'peak GB':>9}",
    ]
    for who, speeds in found["per_second"].items():
        median, peak = statistics.median(speeds), found["peak_gb"][who]
        lines.append(f"{who:28} {median:12,.0f} {min(speeds):10,.0f} {max(speeds):10,.0f} {peak:9.2f}")
    lines.append("")
    for (names, times), least in zip(found["times_as_fast"].items(), RATIOS.values(), strict=True):
        median = statistics.median(times)
        verdict = f" (at least {least:g}: {'ok' if median >= least else 'MISSED'})" if least else ""
        lines.append(f"{names}: {median:.1f} times, from {min(times):.1f} to {max(times):.1f}{verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
