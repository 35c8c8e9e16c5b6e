"""A trained model with its tokenizer and transform: images and texts in, unit rows out.

Shapes: N images, M texts, L labels, E embedding.
"""

import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lapclip.config import DeviceName
from lapclip.data.decode import Decoded
from lapclip.data.images import as_list, decode_as_trained, list_of_texts, squares
from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError, printable, reason_for, shortened, suggest
from lapclip.machine.device import Device, device_named, no_memory_left, ran_out_of_memory
from lapclip.model.clip import CLIP, shape_of
from lapclip.runs.run import RUNS, Run, is_run, open_run
from lapclip.step.loss import NEEDS_BIAS
from lapclip.units import plural
from lapclip.weights import folder as own
from lapclip.weights import hub, hugging_face, open_clip, reading
from lapclip.weights.checkpoint import MODEL, best
from lapclip.weights.reading import Pretrained

ImageInput = str | Path | Image.Image | np.ndarray | Tensor
Images = ImageInput | Sequence[ImageInput]
Rows = np.ndarray  # float32 [n, E], embedded already
Method = TypeVar("Method", bound=Callable[..., np.ndarray])
T = TypeVar("T")
Some = TypeVar("Some", np.ndarray, list[str])

# Prompts for a label; the mean over several is more robust than any one.
TEMPLATES = ("a photo of a {}", "a photo of the {}", "a picture of a {}", "a {}", "{}")
MIN_FOR_BAR = 1000  # images or texts; more may take long enough for a progress bar
PRIOR_VARIANCE = 3.0  # of the weights that `learn` fits, around those of the labels; 1 to 10 are equally good


def accepts_pictures(method: Method) -> Method:
    """Earlier versions called the first argument `pictures`."""

    @wraps(method)
    def call(self: "Embedder", *given: Any, **named: Any) -> np.ndarray:
        return method(self, *([named.pop("pictures")] if "pictures" in named else []), *given, **named)

    return cast("Method", call)


class Truncated(UserWarning):
    """A text was longer than the model's context."""


@dataclass(frozen=True)
class Classifier:
    """What `Embedder.learn` returns: labels, and a row [E] for each that images are compared with."""

    labels: tuple[str, ...]
    rows: Rows


@contextmanager
def one_thread() -> Iterator[int]:
    """Has each operation run on one core; yields how many threads there were.

    Two threads with a batch each are faster than two that share one: they never wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


class Embedder:
    """Embeds images and texts with one model, in chunks, so that memory does not grow with their number."""

    def __init__(
        self,
        model: CLIP,
        tokenizer: Tokenizer,
        device: Device,
        chunk: int = 64,
        *,
        name: str = "model",
        weights: Path | None = None,  # a file that holds exactly the model's weights
        templates: Sequence[str] | None = None,
    ):
        self.model, self.tokenizer, self.device, self.chunk = model, tokenizer, device, chunk
        self.name, self.weights = name, weights
        self.templates = tuple(templates or TEMPLATES)  # prompts for a label, unless others are passed
        self.has_warned = False  # that a text was too long
        self.lock: AbstractContextManager[Any] = threading.Lock() if device.is_accelerator else nullcontext()
        self.side_by_side = one_thread  # while several threads embed at once; yields how many to use

    def __repr__(self) -> str:
        what = f"{self.image_size} px images and texts as {self.width} numbers each"
        return f"<Embedder `{printable(self.name)}`: {what}>"

    @property
    def image_size(self) -> int:
        """Pixels of each side of the model's input."""
        return self.model.size.image_size

    @property
    def width(self) -> int:
        """Numbers in an embedding."""
        return self.model.size.embedding

    @property
    def scale(self) -> float:
        """The logit scale: 1 / temperature."""
        return self.model.scale().item()

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of weights, tokenizer and shape: models with the same fingerprint embed equally."""
        tokenizer = self.tokenizer
        about = [self.model.size.described(), tokenizer.start, tokenizer.end, tokenizer.to_json()]
        about += [tokenizer.pad] if tokenizer.is_full else []  # else no token sees the padding
        state = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            state.update(f"{name} {list(tensor.shape)}".encode())
            state.update(tensor.detach().cpu().contiguous().numpy())
        return state.hexdigest()[:16]

    @accepts_pictures
    def images(self, images: Images, *, progress: bool | None = None) -> Rows:
        """Float32 unit rows, one per image: paths, PIL images, arrays or tensors of any size, or a batch; or just one.

        Many files are decoded in threads while the model works. `progress` shows or hides a progress bar; by default
        there is one for many images, on a terminal or in a notebook.
        """
        several = as_list(images)
        with closing(squares(several, self.image_size, self.model.size.resize)) as items:
            return self.in_chunks(items, len(several), lambda some: self.pixels(np.stack(some)), progress)

    def texts(self, texts: Sequence[str] | np.ndarray, *, progress: bool | None = None) -> Rows:
        """Float32 unit rows, one per text, also of one string; texts longer than the model's context are truncated."""
        texts = list_of_texts(texts)
        return self.in_chunks(texts, len(texts), lambda few: self.embed(few, self.embed_words), progress)

    def decode(self, data: bytes) -> Decoded:
        """An encoded image as `pixels` takes it; Unreadable when it is none."""
        return decode_as_trained(data, self.image_size, self.model.size.resize)

    def pixels(self, pixels: np.ndarray) -> Rows:
        """Float32 unit rows of images that are bytes [n, 3, S, S] already, with S = `image_size`."""
        size = self.image_size
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (3, size, size):
            what = f"pixels are {pixels.dtype} {list(pixels.shape)}, not uint8 [n, 3, {size}, {size}]"
            raise UserError(what, hint="use `images`, which takes images of any size")
        return self.embed(pixels, self.embed_pixels)

    @accepts_pictures
    def similarity(self, images: Images, texts: Sequence[str] | Rows) -> np.ndarray:
        """Cosines [images, texts]; either may be rows that are embedded already."""
        text_ME = texts if self.is_rows(texts) else self.texts(texts)
        return self.image_rows(images) @ np.asarray(text_ME, dtype=np.float32).T

    def image_rows(self, images: Images) -> Rows:
        """Rows of images, or the rows themselves if they are embedded already."""
        if isinstance(images, Tensor) and images.ndim == 2 and images.is_floating_point():
            images = images.detach().float().cpu().numpy()
        return np.asarray(images if self.is_rows(images) else self.images(images), dtype=np.float32)

    def label_rows(self, labels: Sequence[str], templates: Sequence[str] | None = None) -> Rows:
        """Unit rows [labels, E]: each label in every template, averaged."""
        prompts = label_prompts(labels, self.templates if templates is None else templates)
        return mean_of_prompts(self.texts(prompts, progress=False), len(as_list(labels)))

    @accepts_pictures
    def classify(
        self, images: Images, labels: Sequence[str] | Classifier, templates: Sequence[str] | None = None
    ) -> np.ndarray:
        """Probabilities [images, labels], each row summing to one: which of these labels fits an image best."""
        label_LE = labels.rows if isinstance(labels, Classifier) else self.label_rows(labels, templates)
        return self.probabilities(self.similarity(images, label_LE)).astype(np.float32)

    def learn(
        self, images: Images, labels: Sequence[str], templates: Sequence[str] | None = None
    ) -> Classifier:
        """A classifier for `classify` from labelled images, one label per image; the model itself does not change."""
        labels = list_of_texts(labels)
        several: Any = images if getattr(images, "ndim", 0) == 2 else as_list(images)  # rows, or images
        if len(several) != len(labels):
            problem = f"there are {plural(len(several), 'image')} and {plural(len(labels), 'label')}"
            raise UserError(problem, hint="pass one label per image")
        classes = sorted(set(labels))
        if len(classes) < 2:
            found = f"there is {len(classes)} class, but a classifier needs at least two"
            raise UserError(found, hint="pass images with different labels")
        number_of = {label: number for number, label in enumerate(classes)}
        true_N = np.array([number_of[label] for label in labels])
        label_LE = self.label_rows(classes, templates)
        rows = fit_label_rows(self.image_rows(images), true_N, label_LE, self.scale)
        return Classifier(tuple(classes), rows)

    def probabilities(self, cosine_NL: np.ndarray) -> np.ndarray:
        """Softmax over labels of the scaled cosines of images and labels, in double precision."""
        logit_NL = self.scale * cosine_NL.astype(np.float64)
        power_NL = np.exp(logit_NL - logit_NL.max(axis=1, keepdims=True))
        return power_NL / power_NL.sum(axis=1, keepdims=True)

    def save(self, folder: str | Path) -> Path:
        """Writes a model folder that `load` reads, whole or not at all; the weights are hard-linked if possible."""
        whole = Pretrained(self.name, self.model, self.tokenizer, self.weights, templates=self.templates)
        own.write_model_folder(Path(folder), whole, self.fingerprint)
        return Path(folder)

    def is_rows(self, given: object) -> bool:
        """Whether these are embeddings; an array [H, W] is not a list of images."""
        if not isinstance(given, np.ndarray) or given.ndim != 2 or given.dtype.kind != "f":
            return False
        if given.shape[1] != self.width:
            what = f"these rows have {given.shape[1]} values each, but those of this model have {self.width}"
            raise UserError(what, hint="embed all inputs with this model")
        return True

    def in_chunks(
        self, items: Iterable[T], total: int, embed_some: Callable[[list[T]], Rows], progress: bool | None
    ) -> Rows:
        rows, done, left = np.empty((total, self.width), dtype=np.float32), 0, iter(items)
        is_main = threading.current_thread() is threading.main_thread()
        is_shown = is_main and total >= MIN_FOR_BAR if progress is None else progress
        bar = progress_bar(total, always=progress is True) if is_shown else nullcontext(lambda _: None)
        with bar as show:
            while some := list(islice(left, self.chunk)):
                rows[done : done + len(some)] = embed_some(some)
                done += len(some)
                show(done)
        return rows

    @torch.inference_mode()
    def embed(self, items: Some, embed_some: Callable[[Some], Tensor]) -> Rows:
        """In chunks, and in smaller ones from the moment that memory runs out."""
        rows = np.empty((len(items), self.width), dtype=np.float32)
        done = 0
        while done < len(items):
            some = items[done : done + self.chunk]
            try:
                with self.lock:
                    rows[done : done + len(some)] = embed_some(some).cpu().numpy()
                done += len(some)
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                if self.chunk == 1:
                    raise no_memory_left(error) from None
                self.chunk = (self.chunk + 1) // 2
        return rows

    def embed_pixels(self, pixels: np.ndarray) -> Tensor:
        return self.model.embed_images(self.device.move(torch.from_numpy(np.ascontiguousarray(pixels))))

    def embed_words(self, texts: Sequence[str]) -> Tensor:
        # A tokenizer refuses lone surrogates, which names of files and JSON can hold.
        whole = [text.encode("utf-8", "replace").decode() for text in texts]
        length = self.model.size.text_length
        tokens, ends = self.tokenizer.encode(whole, length)
        if not self.has_warned and (ends == length - 1).any():  # full rows, of which some may be just as long
            full = [text for text, end in zip(whole, ends, strict=True) if end == length - 1]
            self.has_warned = bool((self.tokenizer.lengths(full) > length).any())
            if self.has_warned:
                said = f"a text has more than {length} tokens: the rest is ignored"
                warnings.warn(said, Truncated, stacklevel=2)
        return self.model.embed_texts(*(self.device.move(torch.from_numpy(a)) for a in (tokens, ends)))


def label_prompts(labels: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Every label in every template: the templates of the first label first."""
    labels, templates = list_of_texts(labels), list_of_texts(templates)
    without = [template for template in templates if "{}" not in template]
    if without or not len(templates):
        what = f"the template `{printable(without[0])}`" if without else "an empty list of templates"
        raise UserError(f"{what} has no placeholder for the label", hint="write `{}` where the label goes")
    if not len(labels):
        raise UserError("the list of labels is empty", hint="pass at least one label")
    return [template.replace("{}", label) for label in labels for template in templates]


def mean_of_prompts(row_PE: Rows, num_labels: int) -> Rows:
    """Unit rows [labels, E] from the embeddings of `label_prompts`."""
    mean_LE = row_PE.reshape(num_labels, -1, row_PE.shape[1]).mean(axis=1)
    return mean_LE / np.linalg.norm(mean_LE, axis=1, keepdims=True).clip(1e-12)


@one_thread()  # small matrices: two threads take as long, and several times as long beside other programs
def fit_label_rows(image_NE: Rows, true_N: np.ndarray, label_LE: Rows, scale: float) -> Rows:
    """Rows that classify the examples: those of the labels, moved by logistic regression.

    The weights are `scale` times the rows. Their prior is a Gaussian around those of the labels times a factor, which
    is learned too and comes out small where names mislead. So a few examples move the rows a little, and many decide.
    """
    image, label = (torch.from_numpy(rows).double() for rows in (image_NE, scale * label_LE))
    zero_shot_NL, true = image @ label.T, torch.from_numpy(true_N)
    moved_LE, trust = torch.zeros_like(label).requires_grad_(), label.new_ones(1).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [moved_LE, trust], max_iter=100, tolerance_grad=1e-3, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logit_NL = trust * zero_shot_NL + image @ moved_LE.T
        prior = moved_LE.square().sum() / PRIOR_VARIANCE + (trust - 1).square().sum()
        total = F.cross_entropy(logit_NL, true, reduction="sum") + prior / 2
        total.backward()
        return total

    optimizer.step(loss)
    return ((trust * label + moved_LE).detach() / scale).float().numpy()


@contextmanager
def progress_bar(total: int, *, always: bool, what: str = "embedding") -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr: on a terminal or in a notebook; elsewhere only its end is printed, with `always`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    moves = console.is_terminal or console.is_jupyter
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=moves, disable=not (moves or always)) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def load(path: str | Path, device: DeviceName = "cpu") -> Embedder:
    """The best model of a run, by its name or path; or a checkpoint, a model folder, a CLIP of Hugging Face's hub.

    Also a folder of another program (CLIP and SigLIP of transformers, OpenCLIP), or a file of weights as OpenAI's.
    """
    place = device_named(device)
    try:
        found = find_model(Path(path))
    except OSError as error:  # a name that is too long, a folder without permission
        what = f"`{shortened(str(path))}`: {reason_for(error).lower()}"
        raise UserError(f"cannot open {what}", hint="name a readable folder") from None
    about: dict[str, Any] = {"name": found.name, "weights": found.weights, "templates": found.templates}
    return Embedder(place.place(found.model).eval(), found.tokenizer, place, **about)


def find_model(path: Path) -> Pretrained:
    path = path.parent if path.name == MODEL and path.is_file() else path
    if is_run(path) or is_run(RUNS / path):
        run = open_run(str(path))
        return load_checkpoint(run, None, run.name)
    if (path / own.DESCRIPTION).is_file():
        return own.load_model_folder(path)
    others = open_clip.model_file(path)
    is_open_clip = others is not None and (others.parent / open_clip.DESCRIPTION).is_file()
    if (path / hugging_face.DESCRIPTION).is_file() and not (is_open_clip and not (path / MODEL).exists()):
        return hugging_face.load_hugging_face_folder(path)
    run_above = path.absolute().parent.parent
    if (path / MODEL).is_file() and (run_above / "config.toml").is_file():
        return load_checkpoint(Run(run_above), path, f"{run_above.name} {path.absolute().name}")
    if others is not None:
        return open_clip.load_file(others)
    if hub.must_fetch(reference := str(path)):
        work = hub.fetch(reference)
        with progress_bar(next(work).total, always=False, what=f"downloading {reference} (MB)") as show:
            for now in work:
                show(now.done)
    if folder := hub.local(reference):
        return replace(find_model(folder), name=reference)
    raise nothing_there(path)


def load_checkpoint(run: Run, checkpoint: Path | None, name: str) -> Pretrained:
    """A checkpoint of a run, or its best one, with the run's settings and tokenizer."""
    config = run.load_config()
    size = shape_of(config.model)
    tokenizer = reading.read_run(run.path, size)
    # As late as possible: a running training removes old ones.
    checkpoint = checkpoint or best(run.checkpoints)
    if checkpoint is None:
        hint = f"continue it: `lapclip train --resume {run.reference}`"
        raise UserError(f"run `{run.name}` has no checkpoint yet", hint=hint)
    model = reading.read_model(checkpoint, size, tokenizer.vocab_size, config.train.loss in NEEDS_BIAS)
    if size.lora_rank:
        model.merge_adapters()
    templates = ("{}",) if config.data.format == "classes" else None  # as the captions, which are bare names
    weights = None if size.lora_rank else checkpoint / MODEL
    return Pretrained(name, model, tokenizer, weights, templates=templates)


def nothing_there(path: Path) -> UserError:
    """Names what could be loaded instead: the runs here, and models beside the path."""
    if path.is_file():
        hint = f"name its folder: `{path.parent}`"
        return UserError(f"`{path}` is a file, but a model is a folder or a file of weights", hint=hint)
    markers = ("config.toml", own.DESCRIPTION, hugging_face.DESCRIPTION, open_clip.DESCRIPTION, MODEL)
    folders = [folder for folder in dict.fromkeys((path.parent, RUNS)) if folder.is_dir()]
    others = [child for folder in folders for child in sorted(folder.iterdir()) if child != path]
    models = [child for child in others if any((child / marker).is_file() for marker in markers)]
    known = [child.name if child.parent == RUNS else str(child) for child in models]
    there = "; there are " + ", ".join(f"`{name}`" for name in known[:5]) if known else "; there is none here"
    shown = shortened(str(path))
    what = f"`{shown}` holds no model" if path.is_dir() else f"there is no model `{shown}`"
    hint = "name a run, a checkpoint, or a folder or file of a CLIP model"
    return UserError(f"{what}{suggest(str(path), known) or there}", hint=hint)
