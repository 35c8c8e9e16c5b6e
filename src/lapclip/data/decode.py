"""One picture: encoded bytes in, a small upright RGB square and what is worth knowing about the original out.

The only place where a stranger's picture is decoded: few formats, limited pixels, and every fault becomes a sentence.
"""

import contextlib
import hashlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

# What a record notes about a picture, one bit each.
TRAITS = ("grey", "cmyk", "sixteen_bit", "alpha", "palette", "rotated", "animated")
FORMATS = (
    "JPEG",
    "MPO",
    "PNG",
    "WEBP",
    "GIF",
    "TIFF",
    "BMP",
    "HEIF",
    "AVIF",
)  # nothing that runs a program, such as EPS
MOST_PIXELS = 2**27  # after a JPEG was scaled while decoding: 400 MB as RGB
THUMB = 8  # pixels each side of the thumbnail that near duplicates are seen by

# One picture in a pack. `stamp` is of its name and the reader's stamp, so that an unchanged file is known unread;
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
        ("dhash", "<u8"),  # 64 bits: is the picture darker to the right, over an 8 x 8 grid
        ("thumb", "u1", (THUMB, THUMB, 3)),
    ]
)


class Unreadable(Exception):
    """Why a picture cannot be used, in words."""


@dataclass(frozen=True)
class Decoded:
    """A picture as a pack keeps it."""

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
    """The middle square of a picture, upright, at a size; Unreadable when it is none. `content` is its digest."""
    if not data:
        raise Unreadable("is empty")
    record = np.zeros((), RECORD)
    record["content"], record["num_bytes"] = np.void(content or digest(data)), len(data)
    try:
        square = open_square(data, size, record)
        thumb = square.resize((THUMB, THUMB), Image.Resampling.BOX)
        record["thumb"] = np.asarray(thumb)
        record["dhash"] = difference_hash(square)
        pixels = np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable(what_it_is(data)) from None
    except Exception as error:  # a broken file can raise nearly anything: OSError, SyntaxError, struct.error
        raise Unreadable(f"cannot be decoded: {error}") from None
    return Decoded(pixels, record)


def open_square(data: bytes, size: int, record: np.ndarray) -> Image.Image:
    """The middle square of a picture, RGB and upright; fills in what the record says of the original."""
    with warnings.catch_warnings(), own_limit():
        warnings.simplefilter("ignore")  # about metadata
        picture = Image.open(io.BytesIO(data), formats=formats(data))
        width, height = picture.size
        if picture.format in ("JPEG", "MPO"):
            picture.draft("RGB", (size, size))  # scaled while decoding, to no less than what is kept
        if picture.width * picture.height > MOST_PIXELS:  # before `getexif`, which may decode
            raise Unreadable(f"has {width * height / 1e6:,.0f} million pixels, too many to decode safely")
        turned = picture.getexif().get(0x0112, 1)  # orientation
        record["width"], record["height"] = (height, width) if turned in (5, 6, 7, 8) else (width, height)
        record["format"] = FORMATS.index(picture.format or "")
        record["traits"] = sum(1 << TRAITS.index(trait) for trait in traits(picture, turned))
        scale = round(width / picture.width)
        # Decoded sizes are rounded up: the last row may be half a one.
        extent = (width / scale, height / scale) if scale > 1 else (None, None)
        square = middle_square(to_rgb(picture), size, *extent)
        return upright(square, picture.getexif().get(0x0112, 1))  # asked again: some turn as they load


def upright(square: Image.Image, turned: int) -> Image.Image:
    """A square as its orientation says it is seen; turning is cheap once the picture is small."""
    method = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(turned)  # fmt: skip
    return square if method is None else square.transpose(method)


@contextlib.contextmanager
def own_limit() -> Iterator[None]:
    """Instead of Pillow's limit of pixels, which refuses large photos that are scaled while decoding."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def formats(data: bytes) -> list[str]:
    """What a picture that begins so may be opened as."""
    if data[4:8] == b"ftyp":
        register_heif()
    Image.preinit()
    if not set(FORMATS) - {"HEIF"} <= Image.OPEN.keys():
        Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def register_heif() -> None:
    """Phones' HEIC, when the extra is installed."""
    if "HEIF" in Image.OPEN:
        return
    try:
        import pillow_heif
    except ImportError:
        return
    pillow_heif.register_heif_opener()


def traits(picture: Image.Image, turned: int) -> list[str]:
    mode = picture.mode
    return [
        trait
        for trait, is_so in (
            ("grey", mode in ("1", "L", "LA", "I", "F") or mode.startswith("I;16")),
            ("cmyk", mode == "CMYK"),
            ("sixteen_bit", mode == "I" or mode.startswith("I;16")),
            ("alpha", mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in picture.info),
            ("palette", mode == "P"),
            ("rotated", turned not in (0, 1)),
            ("animated", getattr(picture, "n_frames", 1) > 1 and picture.format != "MPO"),
        )
        if is_so
    ]


def to_rgb(picture: Image.Image) -> Image.Image:
    """RGB as a viewer would show it: sixteen bits scaled down, transparency over white."""
    if picture.mode == "I" or picture.mode.startswith("I;16") or picture.mode == "F":
        values = np.asarray(picture, dtype=np.float32)
        top = 65535.0 if picture.mode != "F" else max(float(values.max(initial=0.0)), 1e-9)
        picture = Image.fromarray((values * (255 / top)).clip(0, 255).astype(np.uint8))
    if "transparency" in picture.info or picture.mode in ("LA", "PA", "RGBA", "RGBa", "La"):
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return picture.convert("RGB")


def middle_square(
    picture: Image.Image, size: int, width: float | None = None, height: float | None = None
) -> Image.Image:
    """The middle square, cropped and resized in one go; of a part of the picture when its extent is given."""
    width, height = width or picture.width, height or picture.height
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    if picture.size == (size, size) and side == size:
        return picture
    return picture.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))


def difference_hash(square: Image.Image) -> np.uint64:
    grey = np.asarray(square.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    bits = np.packbits(grey[:, 1:] < grey[:, :-1])
    return bits.view("<u8")[0]


def what_it_is(data: bytes) -> str:
    if data[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1", b"ftyphevc"):
        return "is a HEIC picture, which needs `pip install 'lapclip[heic]'`"
    if b"\0" not in data[:1024]:
        return "is text, not a picture"
    return "is not a picture in a known format"


ImageFile.LOAD_TRUNCATED_IMAGES = False  # half a picture is a broken one
