"""An image to be looked at: all of it, upright, as small as its place; with the guards of `decode`."""

import io

from PIL import Image, UnidentifiedImageError

from lapclip.data.decode import Unreadable, orientation, refuse_too_large, to_rgb, top_value, upright
from lapclip.data.image_formats import formats, undisturbed, what_it_is


def whole(data: bytes, most_side: int) -> Image.Image:
    """The whole image, RGB and upright, no side longer than that; Unreadable when it is none."""
    if not data:
        raise Unreadable("is empty")
    try:
        with undisturbed():
            image = Image.open(io.BytesIO(data), formats=formats(data))
            width, height = image.size
            if image.format in ("JPEG", "MPO"):
                image.draft("RGB", fitted_size(width, height, most_side))
            refuse_too_large(image, data, width, height)
            image.load()
            small = shrink(image, fitted_size(width, height, most_side))
            return upright(small, orientation(image))
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable(*what_it_is(data)) from None
    except Exception as error:  # a broken file can raise nearly anything
        raise Unreadable(f"cannot be decoded: {error}") from None


def shrink(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """As RGB at that size; a large one is made smaller before it is converted, so that no large copy is made."""
    brightest = top_value(image)
    factor = max(1, min(image.width // size[0], image.height // size[1]) // 2)
    if factor > 1 and image.mode not in ("1", "P"):
        info = image.info
        between = (2 * size[0], 2 * size[1])
        smaller = image.resize(between) if image.mode.startswith("I;16") else image.reduce(factor)
        smaller.info = info
        image = smaller
    return to_rgb(image, brightest).resize(size, Image.Resampling.BICUBIC)


def fitted_size(width: int, height: int, most_side: int) -> tuple[int, int]:
    scale = min(1.0, most_side / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def as_jpeg(image: Image.Image, quality: int = 85) -> bytes:
    """The image alone: nothing of what its file said about place, time or camera."""
    out = io.BytesIO()
    bare = Image.frombytes("RGB", image.size, image.convert("RGB").tobytes())
    bare.save(out, format="JPEG", quality=quality)
    return out.getvalue()
