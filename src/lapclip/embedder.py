"""A trained model with its tokenizer and transform: pictures and words in, unit rows out. What users hold."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lapclip.checkpoint import best, load_weights
from lapclip.config import DeviceName
from lapclip.data.decode import Unreadable, decode, rgb_square
from lapclip.data.files import read_file
from lapclip.data.tokenizer import Tokenizer, load_tokenizer
from lapclip.device import Device, device_named, no_memory_left, ran_out_of_memory
from lapclip.errors import UserError
from lapclip.loss import NEEDS_BIAS
from lapclip.model.clip import CLIP, build_model
from lapclip.run import open_run

Picture = str | Path | Image.Image
T = TypeVar("T")


class Embedder:
    """Embeds pictures and texts with one model, some at a time, so that memory does not grow with their number."""

    def __init__(self, model: CLIP, tokenizer: Tokenizer, device: Device, chunk: int = 64):
        self.model, self.tokenizer, self.device, self.chunk = model, tokenizer, device, chunk

    def images(self, pictures: Sequence[Picture]) -> np.ndarray:
        """Float32 unit rows, one a picture, given as paths or PIL images."""
        refuse_one(pictures)
        return self.embed(pictures, self.embed_pixels)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 unit rows, one a text."""
        refuse_one(texts)
        return self.embed(texts, self.embed_words)

    @torch.inference_mode()
    def embed(self, things: Sequence[T], embed_some: Callable[[Sequence[T]], Tensor]) -> np.ndarray:
        """Some at a time, and fewer from the moment that memory runs out."""
        rows = np.empty((len(things), self.model.size.embedding), dtype=np.float32)
        done = 0
        while done < len(things):
            some = things[done : done + self.chunk]
            try:
                rows[done : done + len(some)] = embed_some(some).cpu().numpy()
                done += len(some)
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                if self.chunk == 1:
                    raise no_memory_left(error) from None
                self.chunk = (self.chunk + 1) // 2
        return rows

    def embed_pixels(self, pictures: Sequence[Picture]) -> Tensor:
        pixels = np.stack([to_pixels(picture, self.model.size.image_size) for picture in pictures])
        return self.model.embed_images(self.device.move(torch.from_numpy(pixels)))

    def embed_words(self, texts: Sequence[str]) -> Tensor:
        tokens, ends = self.tokenizer.encode(list(texts), self.model.size.text_length)
        return self.model.embed_texts(*(self.device.move(torch.from_numpy(a)) for a in (tokens, ends)))


def refuse_one(several: object) -> None:
    if isinstance(several, str | Path | Image.Image):
        raise UserError(
            "a list is wanted, and this is one thing",
            hint="put it into brackets: `[...]`",
        )


def to_pixels(picture: Picture, image_size: int) -> np.ndarray:
    """Bytes [3, H, W]: turned upright, the middle square, at the model's size; a file as a pack would decode it."""
    if isinstance(picture, Image.Image):
        return np.asarray(rgb_square(picture, image_size)).transpose(2, 0, 1)
    try:
        return decode(read_file(str(picture)), image_size).pixels
    except (Unreadable, OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"cannot read `{picture}` as a picture: {why}", hint="leave it out, or convert it to JPEG"
        ) from None


def load(path: str | Path, device: DeviceName = "cpu") -> Embedder:
    """The best model of a run, by its name or path."""
    run = open_run(str(path))
    checkpoint = best(run.checkpoints)
    if checkpoint is None:
        raise UserError(
            f"run `{run.name}` has no checkpoint yet",
            hint=f"go on with it: `lapclip train --resume {run.reference}`",
        )
    config = run.load_config()
    tokenizer = load_tokenizer(run.tokenizer_file)
    place = device_named(device)
    model = build_model(
        config.model, vocab_size=tokenizer.vocab_size, has_bias=config.train.loss in NEEDS_BIAS
    )
    load_weights(checkpoint, model)
    return Embedder(place.place(model).eval(), tokenizer, place)
