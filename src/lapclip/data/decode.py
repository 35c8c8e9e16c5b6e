"""One image: encoded bytes in, a small upright RGB square and what is worth knowing about the original out.

The only place where a stranger's image is decoded: few formats, limited pixels, and every fault becomes a sentence.
"""

import hashlib
import io
import math
import re
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from lapclip.data.image_formats import FORMATS, formats, undisturbed, what_it_is

# What a record notes about an image, one bit each.
TRAITS = ("grey", "cmyk", "sixteen_bit", "alpha", "palette", "rotated", "animated")
MOST_PIXELS = 2**27  # after a JPEG was scaled while decoding
MOST_BYTES = 640 * 10**6  # held while decoding one image, in each of several processes on a laptop
MOST_SCANS = 100  # of a JPEG, each a pass over all of it; a progressive one has about ten
# Bytes a pixel that a decoder holds besides the image itself, as measured.
BESIDE = {"WEBP": 12, "AVIF": 10, "HEIF": 8, "GIF": 1}
RLE_BESIDE = 36  # of a run-length BMP, which Pillow decodes in Python: for its time, not its memory
BLOCK_BESIDE = 8  # of a TIFF's strip or tile, which is decoded whole
WHOLE = 2**22  # pixels that are converted at once; more go in bands of a quarter of that
THUMB = 8  # pixels each side of the thumbnail that near duplicates are seen by

# One image in a pack. `stamp` is of its name and the reader's stamp, so that an unchanged file is known unread;
# `content` is of its bytes, so that a moved or copied one is known undecoded.
RECORD = np.dtype(
    [
        ("stamp", "<u8"),
        ("content", "V16"),
        ("row", "<i8"),  # of the pixels; -1 when it could not be decoded
        ("width", "<u4"),  # of the original, upright
        ("height", "<u4"),
        ("num_bytes", "<u8"),
        ("format", "u1"),  # place in FORMATS
        ("traits", "u1"),  # bits of TRAITS
        ("dhash", "<u8"),  # 64 bits: is the image darker to the right, over an 8 x 8 grid
        ("thumb", "u1", (THUMB, THUMB, 3)),
    ]
)


class Unreadable(Exception):
    """Why an image cannot be used; `extra` is the group of optional dependencies that would read it."""

    def __init__(self, why: str, extra: str | None = None):
        super().__init__(why)
        self.extra = extra


@dataclass(frozen=True)
class Decoded:
    """An image as a pack keeps it."""

    pixels: np.ndarray  # bytes [3, S, S]
    record: np.ndarray  # a RECORD without stamp and row


def digest(*parts: bytes) -> bytes:
    """Sixteen bytes that stand for some others."""
    state = hashlib.sha256()  # which processors have instructions for
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()[:16]


def decode(data: bytes, size: int, content: bytes | None = None) -> Decoded:
    """The middle square of an image, upright, at a size; Unreadable when it is none. `content` is its digest."""
    square, record = read_square(data, size)
    record["content"], record["num_bytes"] = np.void(content or digest(data)), len(data)
    record["thumb"] = np.asarray(square.resize((THUMB, THUMB), Image.Resampling.BOX))
    record["dhash"] = difference_hash(square)
    return Decoded(np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1)), record)


def read_square(data: bytes, size: int) -> tuple[Image.Image, np.ndarray]:
    """The middle square, RGB and upright, with a record of how the original was; Unreadable when it is none."""
    if not data:
        raise Unreadable("is empty")
    record = np.zeros((), RECORD)
    try:
        return open_square(data, size, record), record
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable(*what_it_is(data)) from None
    except Exception as error:  # a broken file can raise nearly anything: OSError, SyntaxError, struct.error
        raise Unreadable(f"cannot be decoded: {error}") from None


def open_square(data: bytes, size: int, record: np.ndarray) -> Image.Image:
    """The middle square of an image, RGB and upright; fills in what the record says of the original."""
    with undisturbed():
        image = Image.open(io.BytesIO(data), formats=formats(data))
        width, height = image.size
        if image.format in ("JPEG", "MPO"):
            image.draft("RGB", (size, size))  # scaled while decoding, to no less than what is kept
        refuse_too_large(image, data, width, height)  # before `getexif`, which may decode
        turned = orientation(image)
        record["width"], record["height"] = (height, width) if turned in (5, 6, 7, 8) else (width, height)
        record["format"] = FORMATS.index(image.format or "")
        record["traits"] = sum(1 << TRAITS.index(trait) for trait in traits(image, turned))
        scale = round(width / image.width)
        # Decoded sizes are rounded up: the last row may be half a one.
        extent = (width / scale, height / scale) if scale > 1 else (None, None)
        square = rgb_square(image, size, *extent)
        return upright(square, orientation(image))  # asked again: some turn as they load


def refuse_too_large(image: Image.Image, data: bytes, width: int, height: int) -> None:
    """Unreadable when decoding would take too much memory or time, for all that its header says."""
    num_pixels = image.width * image.height
    num_bytes: float = num_pixels * (stored_bytes(image.mode) + BESIDE.get(image.format or "", 0))
    codec = image.tile[0][0] if isinstance(image, ImageFile.ImageFile) and image.tile else ""
    if codec == "bmp_rle":
        num_bytes += num_pixels * RLE_BESIDE
    elif codec == "jpeg":
        num_bytes += width * height * kept_coefficients(image, data)
    elif isinstance(image, TiffImagePlugin.TiffImageFile):
        if codec == "libtiff":
            num_bytes += block_pixels(image) * BLOCK_BESIDE
        if orientation(image) != 1:  # turned as it loads
            num_bytes += num_pixels * stored_bytes(image.mode)
    if num_pixels > MOST_PIXELS or num_bytes > MOST_BYTES:
        raise Unreadable(
            f"has {width * height / 1e6:,.0f} million pixels and needs {num_bytes / 1e6:,.0f} MB of memory, "
            "too much to decode safely"
        )


def stored_bytes(mode: str) -> int:
    """What a pixel takes in Pillow, where three channels take as much as four."""
    return 1 if mode in ("1", "L", "P") else 2 if mode.startswith("I;16") else 4


def block_pixels(image: TiffImagePlugin.TiffImageFile) -> int:
    """How large a TIFF's strips or tiles are; tiles may be larger than the image."""
    tags = image.tag_v2
    if 322 in tags:  # TileWidth, and TileLength
        return tags[322] * tags.get(323, image.height)
    return image.width * min(tags.get(278, image.height), image.height)  # RowsPerStrip


def kept_coefficients(image: Image.Image, data: bytes) -> float:
    """Bytes a pixel, at full size, that a JPEG of several scans keeps until the last: all its coefficients."""
    layers = [layer[1:3] for layer in getattr(image, "layer", [])]
    progressive = "progressive" in image.info or "progression" in image.info
    num_scans = count_scans(data, len(layers), progressive)
    if num_scans > MOST_SCANS:
        raise Unreadable(f"is a JPEG of {num_scans:,} scans, too many to decode safely")
    if not num_scans and not progressive:
        return 0
    densest = max(across for across, _ in layers) * max(down for _, down in layers)
    return 2 * sum(across * down for across, down in layers) / max(densest, 1)


MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # of a JPEG's part; the others belong to a scan


def count_scans(data: bytes, num_layers: int, progressive: bool) -> int:
    """How many scans a JPEG is spread over; 0, and read no further, when the first holds everything."""
    num_scans, at = 0, 2
    while found := MARKER.search(data, at):
        at = found.start()
        kind = data[at + 1]
        if kind == 0xD9:  # its end
            break
        if kind == 0xDA:
            if not progressive and data[at + 4 : at + 5] == bytes([num_layers]):
                return 0
            num_scans += 1
        at += 2 if kind in (0x01, 0xD8) else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return num_scans


def orientation(image: Image.Image) -> int:
    return image.getexif().get(0x0112, 1)


def upright(square: Image.Image, turned: int) -> Image.Image:
    """A square as its orientation says it is seen; turning is cheap once the image is small."""
    method = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(turned)  # fmt: skip
    return square if method is None else square.transpose(method)


def traits(image: Image.Image, turned: int) -> list[str]:
    mode = image.mode
    return [
        trait
        for trait, is_so in (
            ("grey", mode in ("1", "L", "LA", "I", "F") or mode.startswith("I;16")),
            ("cmyk", mode == "CMYK"),
            ("sixteen_bit", mode == "I" or mode.startswith("I;16")),
            ("alpha", mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in image.info),
            ("palette", mode == "P"),
            ("rotated", turned not in (0, 1)),
            ("animated", getattr(image, "is_animated", False) and image.format != "MPO"),
        )
        if is_so
    ]


def rgb_square(
    image: Image.Image, size: int, width: float | None = None, height: float | None = None
) -> Image.Image:
    """The middle square as RGB; a large image is converted band by band, for a second one would not fit."""
    image.load()
    if is_plain(image) or image.width * image.height <= WHOLE:
        return middle_square(to_rgb(image), size, width, height)
    left, top, right, bottom = middle_box(width or image.width, height or image.height)
    factor = max(1, int((right - left) / size / 4))  # what is left is enough to look no different
    margin = 2 * (right - left) / size + factor  # what the filter sees beyond the edges
    across, down = max(0, math.floor(left - margin)), max(0, math.floor(top - margin))
    num_columns = min(image.width, math.ceil(right + margin)) - across
    num_rows = min(image.height, math.ceil(bottom + margin)) - down
    reduced = Image.new("RGB", (-(-num_columns // factor), -(-num_rows // factor)))
    step = max(1, WHOLE // 4 // num_columns // factor) * factor
    brightest = top_value(image)
    for row in range(0, num_rows, step):
        box = (across, down + row, across + num_columns, down + min(row + step, num_rows))
        reduced.paste(to_rgb(image.crop(box), brightest).reduce(factor), (0, row // factor))
    inner = (
        (left - across) / factor,
        (top - down) / factor,
        (right - across) / factor,
        (bottom - down) / factor,
    )
    return reduced.resize((size, size), Image.Resampling.BICUBIC, box=inner)


def is_plain(image: Image.Image) -> bool:
    return image.mode == "RGB" and "transparency" not in image.info


def top_value(image: Image.Image) -> float:
    """The value that white has in an image of more than eight bits."""
    return max(float(np.max(image.getextrema())), 1e-9) if image.mode == "F" else 65535.0


def to_rgb(image: Image.Image, brightest: float | None = None) -> Image.Image:
    """RGB as a viewer would show it: sixteen bits scaled down, transparency over white."""
    if image.mode == "I" or image.mode.startswith("I;16") or image.mode == "F":
        values = np.asarray(image, dtype=np.float32)
        scaled = values * (255 / (brightest or top_value(image)))
        image = Image.fromarray(scaled.clip(0, 255).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("LA", "PA", "RGBA", "RGBa", "La"):
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if is_plain(image) else image.convert("RGB")


def middle_square(
    image: Image.Image, size: int, width: float | None = None, height: float | None = None
) -> Image.Image:
    """The middle square, cropped and resized in one go; of a part of the image when its extent is given."""
    box = middle_box(width or image.width, height or image.height)
    if image.size == (size, size) and box == (0, 0, size, size):
        return image
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def middle_box(width: float, height: float) -> tuple[float, float, float, float]:
    """The edges of the middle square: left, top, right, bottom."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def difference_hash(square: Image.Image) -> np.uint64:
    grey = np.asarray(square.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    bits = np.packbits(grey[:, 1:] < grey[:, :-1])
    return bits.view("<u8")[0]


ImageFile.LOAD_TRUNCATED_IMAGES = False  # half an image is a broken one
