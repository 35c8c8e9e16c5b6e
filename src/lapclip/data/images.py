"""Images as people pass them in Python: a path, a PIL image, an array or a tensor in; a square of bytes out.

A model is trained and evaluated on images from packs, which are a little larger than its input. Whatever it is shown
later is resized by way of that size too, so that it sees what it was trained on; models of other programs are shown
images as those resize them.
"""

import os
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from PIL import Image

from lapclip.data.decode import Decoded, Unreadable, center_square, channels_first, read_square, square_by
from lapclip.data.files import read_file
from lapclip.data.pack import size_for
from lapclip.data.workers import in_order
from lapclip.errors import UserError, install_command, printable, reason_for

MIN_FOR_THREADS = 8  # images; for fewer no threads are started
TOLERANCE = 1e-4  # beyond 0 and 1, as interpolation leaves it


def as_list(several: Any) -> Any:
    """A list of images or texts; one alone is a list of one."""
    dimensions = getattr(several, "ndim", 1)  # of an array or a tensor
    if isinstance(several, str | bytes | os.PathLike | Image.Image) or dimensions in (2, 3):
        return [several]
    is_list = hasattr(several, "__len__") and hasattr(several, "__getitem__") and dimensions > 0
    if isinstance(several, Mapping) or not is_list:
        name = type(several).__name__
        raise UserError(f"expected a list, but got a `{name}`", hint="convert it: `list(...)`")
    return several


def list_of_texts(several: Any) -> Any:
    several = as_list(several)
    for number, text in enumerate(several):
        if not isinstance(text, str):
            problem = f"text {number} has type `{type(text).__name__}`, not string"
            raise UserError(problem, hint="pass strings only")
    return several


def squares(images: Any, size: int, resize: str = "packed") -> Generator[np.ndarray, None, None]:
    """Each image as bytes [3, size, size]; many files are decoded ahead in threads."""

    def square(numbered: tuple[int, Any]) -> np.ndarray:
        return square_of(numbered[1], size, resize, called=f"image {numbered[0]}")

    if len(images) > MIN_FOR_THREADS and all(isinstance(image, str | os.PathLike) for image in images):
        yield from in_order(square, enumerate(images))  # which is closed with this
    else:
        yield from map(square, enumerate(images))


def square_of(image: Any, size: int, resize: str, called: str) -> np.ndarray:
    """Bytes [3, size, size]: upright, the middle square; a file as a pack would decode it. `called` is for errors."""
    try:
        if isinstance(image, str | os.PathLike):
            called = f"`{printable(os.fsdecode(image))}`"
            return decode_as_trained(read_file(os.fsdecode(image)), size, resize).pixels
        if hasattr(image, "detach"):  # a tensor, whose library is not imported for this
            image = channels_last(image)
        image = array_image(image, called) if isinstance(image, np.ndarray) else image
        if not isinstance(image, Image.Image):
            hint = "pass a path, a PIL image, an array [height, width, 3] or a tensor [3, height, width]"
            raise UserError(f"{called} has type `{type(image).__name__}`, which is not an image", hint=hint)
        if 0 in image.size:
            raise Unreadable("has no pixels")
        stored = square_by(resize, image, first_size(size, resize))
        return channels_first(center_square(stored, size))
    except (Unreadable, OSError, ValueError) as error:
        what = f"cannot read {called} as an image: {printable(reason_for(error))}"
        raise UserError(what, hint=way_out(error)) from None


def way_out(error: Exception) -> str:
    """What to do about an image that cannot be read."""
    if isinstance(error, Unreadable) and error.extra:
        return install_command(error.extra)
    return "check its path" if isinstance(error, OSError) else "omit it, or convert it to JPEG"


def decode_as_trained(data: bytes, size: int, resize: str = "packed") -> Decoded:
    """What a model that looks at `size` pixels is to be shown of an image; its record holds no thumbnail."""
    stored, record = read_square(data, first_size(size, resize), resize=resize)
    return Decoded(channels_first(center_square(stored, size)), record)


def first_size(size: int, resize: str) -> int:
    """What images are first resized to: as packs store them, or at once to what the model looks at."""
    return size_for(size) if resize == "packed" else size


def array_image(array: np.ndarray, called: str) -> Image.Image:
    """An array [H, W], or [H, W, C] with C of 1, 3 or 4, of bytes or of floats from 0 to 1, as an image."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if is_image and 0 in array.shape:
        raise Unreadable("has no pixels")
    if is_image and np.issubdtype(array.dtype, np.floating):
        lowest, highest = float(array.min()), float(array.max())
        if not (lowest >= -TOLERANCE and highest <= 1 + TOLERANCE):  # so for NaN too
            what = f"{called} has values from {lowest:.4g} to {highest:.4g}, but floats must be from 0 to 1"
            raise UserError(what, hint="scale it: `array / 255`, or undo its normalisation")
        array = np.rint(array.clip(0, 1) * 255).astype(np.uint8)
    if not is_image or array.dtype != np.uint8:
        found = f"{called} is an array of {array.dtype} {list(array.shape)}"
        hint = "convert it: `numpy.moveaxis(array, 0, -1).astype(numpy.uint8)`"
        raise UserError(f"{found}, not of uint8 or floats [height, width, 3]", hint=hint)
    return Image.fromarray(np.ascontiguousarray(array))


def channels_last(tensor: Any) -> np.ndarray:
    """A tensor [C, H, W] or [H, W] as the array that an image is."""
    plain = tensor.detach().cpu()
    plain = plain.float() if plain.is_floating_point() else plain
    has_channels_first = plain.ndim == 3 and plain.shape[0] in (1, 3, 4)
    return (plain.permute(1, 2, 0) if has_channels_first else plain).numpy()
