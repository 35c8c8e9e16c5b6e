"""One image: encoded bytes in, upright RGB pixels at a small size out, with a record of the original.

The only place where untrusted images are decoded: few formats, limited pixels, and every fault becomes a sentence.
"""

import contextlib
import hashlib
import io
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin

# Nothing that runs a program, such as EPS. Packs store places in this list and in the next.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "TIFF", "BMP", "HEIF", "AVIF")
TRAITS = ("grey", "cmyk", "sixteen_bit", "alpha", "palette", "rotated", "animated")
MAX_PIXELS = 2**27  # after a JPEG was scaled while decoding
MAX_BYTES = 640 * 10**6  # held while decoding one image, in each of several processes on a laptop
MAX_SCANS = 100  # of a JPEG, each a pass over all of it; a progressive one has about ten
# Bytes per pixel that a decoder holds besides the image itself, as measured.
DECODER_BYTES = {"WEBP": 12, "AVIF": 10, "HEIF": 8, "GIF": 1}
RLE_BYTES = 36  # of a run-length BMP, which Pillow decodes in Python: for its time, not its memory
BLOCK_BYTES = 8  # of a TIFF's strip or tile, which is decoded whole
CONVERTED_AT_ONCE = 2**22  # pixels; larger images are converted in bands of a quarter of that
THUMB = 8  # pixels each side of the thumbnail that near duplicates are found by
WHOLE = 1 << 7  # in `traits`: the thumbnail is of all of the image; in older packs it is of the center square

# One image in a pack. `stamp` is of its name and the reader's stamp, so that an unchanged file is known unread;
# `content` is of its bytes, so that equal images share their pixels.
RECORD = np.dtype(
    [
        ("stamp", "<u8"),
        ("content", "V16"),
        ("row", "<i8"),  # of the pixels; -1 when it could not be decoded
        ("width", "<u4"),  # of the original, upright
        ("height", "<u4"),
        ("num_bytes", "<u8"),
        ("format", "u1"),  # place in FORMATS
        ("traits", "u1"),  # bits of TRAITS, and of WHOLE
        ("dhash", "<u8"),  # 64 bits: is the image darker to the right, over an 8 x 8 grid
        ("thumb", "u1", (THUMB, THUMB, 3)),
    ]
)
# How an image becomes the square that a model looks at: in two steps, as packs store it; its short side resized, then
# the middle cropped, with half pixels as transformers or as torchvision round them; or both sides resized.
RESIZES = ("packed", *(how + by for how in ("crop", "crop-rounded", "squash") for by in ("", "-bilinear")))
Box = tuple[float, float, float, float]
ImageFile.LOAD_TRUNCATED_IMAGES = False  # half an image is a broken one


class Unreadable(Exception):
    """Why an image cannot be used; `extra` is what to install to read it, `may_pass` that it is worth another try."""

    def __init__(self, why: str, extra: str | None = None, *, may_pass: bool = False):
        super().__init__(why)
        self.extra, self.may_pass = extra, may_pass or extra is not None


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


def decode(data: bytes, size: int) -> Decoded:
    """The center square of an image, upright, at a size; Unreadable when it is none."""
    square, record = read_square(data, size, with_thumb=True)
    record["content"], record["num_bytes"] = np.void(digest(data)), len(data)
    return Decoded(channels_first(square), record)


def read_square(
    data: bytes, size: int, *, resize: str = "packed", with_thumb: bool = False
) -> tuple[Image.Image, np.ndarray]:
    """The center square, RGB and upright, with a record of the original; Unreadable when it is none."""
    record, smallest = np.zeros((), RECORD), partial(resized_whole, size=size, resize=resize, factor=2)
    with open_image(data, smallest) as (image, (width, height), extent):
        turned = orientation(image)
        is_lying = turned in (5, 6, 7, 8) and image.format != "TIFF"  # whose size Pillow gives upright
        record["width"], record["height"] = (height, width) if is_lying else (width, height)
        record["format"] = FORMATS.index(image.format or "")
        record["traits"] = trait_bits(image, turned)
        square = square_by(resize, image, size, extent)
        if with_thumb:
            # Of the image, not of the square: the split must not depend on the size of the pack.
            whole = upright(resize_rgb(image, (4 * THUMB, 4 * THUMB), (0, 0, *extent)), image)
            record["thumb"] = np.asarray(whole.resize((THUMB, THUMB), Image.Resampling.BOX))
            grey = np.asarray(whole.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
            record["dhash"] = np.packbits(grey[:, 1:] < grey[:, :-1]).view("<u8")[0]
            record["traits"] |= WHOLE
        return square, record


def resized_whole(width: float, height: float, size: int, resize: str, factor: int = 1) -> tuple[int, int]:
    """Width and height of all of an image before the middle is cropped, or a JPEG is decoded to at least.

    Others decode at full size; from twice the size of the result on there is hardly a difference.
    """
    if resize == "packed":
        return size, size
    size *= factor
    if resize.startswith("squash"):
        return size, size
    return (size, int(size * height / width)) if width <= height else (int(size * width / height), size)


def square_by(
    resize: str, image: Image.Image, size: int, extent: tuple[float, float] | None = None
) -> Image.Image:
    """A square as RGB, upright, by one of `RESIZES`; `packed` is the first of its two steps."""
    if resize == "packed":
        return upright(center_square(image, size, extent), image)
    image.load()  # which turns a TIFF upright
    width, height = extent or image.size
    across, down = resized_whole(width, height, size, resize)
    rounded, turned = resize.startswith("crop-rounded"), orientation(image)
    left, top = (round((long - size) / 2) if rounded else (long - size) // 2 for long in (across, down))
    # Of the image as it is before it is upright.
    left = across - size - left if turned in (2, 3, 7, 8) else left
    top = down - size - top if turned in (3, 4, 6, 7) else top
    x, y = width / across, height / down
    by = Image.Resampling.BILINEAR if resize.endswith("-bilinear") else Image.Resampling.BICUBIC
    box = (left * x, top * y, (left + size) * x, (top + size) * y)
    return upright(resize_rgb(image, (size, size), box, by), image)


def read_whole(data: bytes, max_side: int) -> Image.Image:
    """All of an image, RGB and upright, to be looked at; Unreadable when it is none."""

    def fitted(width: int, height: int) -> tuple[int, int]:
        scale = min(1.0, max_side / max(width, height))
        return max(1, round(width * scale)), max(1, round(height * scale))

    with open_image(data, fitted) as (image, original, extent):
        return upright(resize_rgb(image, fitted(*original), (0, 0, *extent)), image)


def as_jpeg(image: Image.Image, quality: int = 85) -> bytes:
    """The pixels as JPEG, without metadata such as place, time and camera."""
    out = io.BytesIO()
    bare = Image.frombytes("RGB", image.size, image.convert("RGB").tobytes())
    bare.save(out, format="JPEG", quality=quality)
    return out.getvalue()


@contextlib.contextmanager
def open_image(
    data: bytes, smallest: Callable[[int, int], tuple[int, int]]
) -> Iterator[tuple[Image.Image, tuple[int, int], tuple[float, float]]]:
    """An encoded image that is safe to decode, its own size, and how much of the decoded pixels it takes.

    Whatever is wrong with it, also in the block that uses it, becomes Unreadable. A JPEG is scaled while decoding, to
    no less than what `smallest` makes of its size.
    """
    if not data:
        raise Unreadable("is empty")
    try:
        image = open_encoded(data)
        width, height = image.size
        if image.format in ("JPEG", "MPO"):
            image.draft("RGB", smallest(width, height))
        refuse_too_large(image, data, width, height)  # before `getexif`, which may decode
        scale = round(width / image.width)  # decoded sizes are rounded up: the last row may be half a one
        yield image, (width, height), (width / scale, height / scale)
    except Unreadable:
        raise
    except Exception as error:  # a broken file can raise nearly anything: OSError, SyntaxError, struct.error
        raise Unreadable(f"cannot be decoded: {error}") from None


def open_encoded(data: bytes) -> ImageFile.ImageFile:
    """As `Image.open` does, without its limit of pixels: it refuses JPEGs that are to be scaled while decoding."""
    why = ""
    for name in formats(data):
        factory, accept = Image.OPEN[name]
        if accept is None or accept(data[:16]) is True:
            try:
                return factory(io.BytesIO(data), "")
            except (SyntaxError, IndexError, TypeError, struct.error) as error:  # damaged, or of a rare kind
                why = why or f"is a {name} that cannot be decoded: {error}"
    is_heic = data[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1", b"ftyphevc")
    if is_heic and "HEIF" not in Image.OPEN:
        raise Unreadable("is a HEIC image, which needs `pip install 'lapclip[heic]'`", extra="heic")
    is_text = b"\0" not in data[:1024]
    raise Unreadable(why or ("is text, not an image" if is_text else "is not an image in a known format"))


def formats(data: bytes) -> list[str]:
    """What an image that begins so may be opened as."""
    Image.init()
    if data[4:8] == b"ftyp" and "HEIF" not in Image.OPEN:
        with contextlib.suppress(ImportError):  # phones' HEIC, when the extra is installed
            import pillow_heif

            pillow_heif.register_heif_opener()
    return [name for name in FORMATS if name in Image.OPEN]


def refuse_too_large(image: Image.Image, data: bytes, width: int, height: int) -> None:
    """Unreadable when decoding would take too much memory or time, judged by its header alone."""
    # In Pillow three channels take as much memory as four.
    stored = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    num_pixels = image.width * image.height
    num_bytes: float = num_pixels * (stored + DECODER_BYTES.get(image.format or "", 0))
    codec = image.tile[0][0] if isinstance(image, ImageFile.ImageFile) and image.tile else ""
    if codec == "bmp_rle":
        num_bytes += num_pixels * RLE_BYTES
    elif codec == "jpeg":
        num_bytes += width * height * coefficient_bytes(image, data)
    elif isinstance(image, TiffImagePlugin.TiffImageFile):
        if codec == "libtiff":
            tags = image.tag_v2
            rows = min(tags.get(278, image.height), image.height)  # RowsPerStrip
            # TileWidth and TileLength, which may be larger than the image
            block = tags[322] * tags.get(323, image.height) if 322 in tags else image.width * rows
            num_bytes += block * BLOCK_BYTES
        if orientation(image) != 1:  # turned as it loads
            num_bytes += num_pixels * stored
    if num_pixels > MAX_PIXELS or num_bytes > MAX_BYTES:
        needs = f"{width * height / 1e6:,.0f} million pixels and needs {num_bytes / 1e6:,.0f} MB of memory"
        raise Unreadable(f"has {needs}, too much to decode safely")


def coefficient_bytes(image: Image.Image, data: bytes) -> float:
    """Bytes per pixel, at full size, that a JPEG of several scans keeps until the last: all its coefficients."""
    layers = [layer[1:3] for layer in getattr(image, "layer", [])]
    progressive = "progressive" in image.info or "progression" in image.info
    num_scans = count_scans(data, len(layers), progressive)
    if num_scans > MAX_SCANS:
        raise Unreadable(f"is a JPEG of {num_scans:,} scans, too many to decode safely")
    if not num_scans and not progressive:
        return 0
    densest = max(across for across, _ in layers) * max(down for _, down in layers)
    return 2 * sum(across * down for across, down in layers) / max(densest, 1)


MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # of a JPEG's segment; the others belong to a scan


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


def upright(image: Image.Image, loaded: Image.Image) -> Image.Image:
    """An image turned by the EXIF orientation that is left once its original is loaded; cheap once it is small."""
    method = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(orientation(loaded))  # fmt: skip
    return image if method is None else image.transpose(method)


def is_deep(mode: str) -> bool:
    return mode == "I" or mode.startswith("I;16")


def has_alpha(image: Image.Image) -> bool:
    return image.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in image.info


def trait_bits(image: Image.Image, turned: int) -> int:
    mode = image.mode
    is_so = (  # in the order of TRAITS
        mode in ("1", "L", "LA") or is_deep(mode),
        mode == "CMYK",
        is_deep(mode),
        has_alpha(image),
        mode == "P",
        turned not in (0, 1),
        getattr(image, "is_animated", False) and image.format != "MPO",
    )
    return sum(bool(has_trait) << bit for bit, has_trait in enumerate(is_so))


def center_square(image: Image.Image, size: int, extent: tuple[float, float] | None = None) -> Image.Image:
    """The center square as RGB, cropped and resized at once; `extent` is how much of the pixels the image takes."""
    width, height = extent or image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return resize_rgb(image, (size, size), (left, top, left + side, top + side))


def resize_rgb(
    image: Image.Image, size: tuple[int, int], box: Box, by: Image.Resampling = Image.Resampling.BICUBIC
) -> Image.Image:
    """A part of an image as RGB at a size; a large one is converted band by band: a second one would not fit."""
    image.load()
    left, top, right, bottom = box
    is_plain = image.mode == "RGB" and not has_alpha(image)
    if is_plain or image.width * image.height <= CONVERTED_AT_ONCE:
        rgb = to_rgb(image)
        is_same = rgb.size == size and box == (0, 0, *size)
        return rgb if is_same else rgb.resize(size, by, box=box)
    scale = min((right - left) / size[0], (bottom - top) / size[1])
    factor = max(1, int(scale / 4))  # what is left is enough to look no different
    margin = 2 * scale + factor  # what the filter sees beyond the edges
    across, down = max(0, math.floor(left - margin)), max(0, math.floor(top - margin))
    num_columns = min(image.width, math.ceil(right + margin)) - across
    num_rows = min(image.height, math.ceil(bottom + margin)) - down
    reduced = Image.new("RGB", (-(-num_columns // factor), -(-num_rows // factor)))
    step = max(1, CONVERTED_AT_ONCE // 4 // num_columns // factor) * factor
    for row in range(0, num_rows, step):
        band = image.crop((across, down + row, across + num_columns, down + min(row + step, num_rows)))
        reduced.paste(to_rgb(band).reduce(factor), (0, row // factor))
    left, right = (left - across) / factor, (right - across) / factor
    top, bottom = (top - down) / factor, (bottom - down) / factor
    return reduced.resize(size, by, box=(left, top, right, bottom))


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB as a viewer would show it: sixteen bits scaled down, transparency over white."""
    if image.mode == "F":
        raise Unreadable("has floating-point pixels, whose value of white is unknown")
    if is_deep(image.mode):
        scaled = np.asarray(image, dtype=np.float32) * (255 / 65535)
        image = Image.fromarray(scaled.clip(0, 255).astype(np.uint8))
    if has_alpha(image):
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def channels_first(image: Image.Image) -> np.ndarray:
    """Bytes [3, H, W]."""
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
