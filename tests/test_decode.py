"""Decoding one picture: what a viewer would show, within limits, and every fault in words."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from lapclip.data.decode import FORMATS, TRAITS, Unreadable, decode


def encoded(picture: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def traits_of(data: bytes) -> set[str]:
    bits = int(decode(data, 16).record["traits"])
    return {trait for number, trait in enumerate(TRAITS) if bits >> number & 1}


def halves(mode: str, left, right, size: int = 32) -> Image.Image:
    picture = Image.new(mode, (size, size), right)
    picture.paste(left, (0, 0, size // 2, size))
    return picture


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "HEIF", "AVIF"])
def test_every_format_gives_the_same_picture(format):
    if format == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    decoded = decode(encoded(halves("RGB", (200, 30, 30), (20, 20, 220)), format), 16)
    assert decoded.pixels.shape == (3, 16, 16) and FORMATS[int(decoded.record["format"])] == format
    assert np.abs(decoded.pixels[:, 8, 2].astype(int) - [200, 30, 30]).max() < 25
    assert np.abs(decoded.pixels[:, 8, 13].astype(int) - [20, 20, 220]).max() < 25


def test_odd_modes_look_as_a_viewer_shows_them():
    assert decode(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), 8).pixels[0].mean() > 200
    sixteen = Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16))
    assert abs(decode(encoded(sixteen), 8).pixels.mean() - 40_000 / 257) < 2
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert decode(encoded(clear), 8).pixels.min() == 255, "transparency is paper, not ink"
    palette = Image.new("RGB", (8, 8), (10, 200, 30)).convert("P")
    assert abs(int(decode(encoded(palette), 8).pixels[1].mean()) - 200) < 12


def test_traits_are_noted():
    assert "cmyk" in traits_of(encoded(Image.new("CMYK", (8, 8)), "JPEG"))
    assert "sixteen_bit" in traits_of(encoded(Image.fromarray(np.zeros((8, 8), dtype=np.uint16))))
    assert "alpha" in traits_of(encoded(Image.new("RGBA", (8, 8))))
    assert "grey" in traits_of(encoded(Image.new("L", (8, 8))))
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    assert "animated" in traits_of(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert traits_of(encoded(Image.new("RGB", (8, 8)))) == set()


def test_a_turned_photo_stands_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to see it upright
    lying = halves("RGB", (255, 255, 255), (0, 0, 0))
    decoded = decode(encoded(lying.resize((64, 32)), "JPEG", exif=exif), 16)
    assert decoded.pixels[:, 1].mean() > 200 and decoded.pixels[:, 14].mean() < 50
    assert (int(decoded.record["width"]), int(decoded.record["height"])) == (32, 64)
    assert "rotated" in traits_of(encoded(lying, "JPEG", exif=exif))


def test_a_turned_tiff_is_turned_once():
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = halves("RGB", (255, 255, 255), (0, 0, 0)).resize((64, 32))
    decoded = decode(encoded(lying, "TIFF", exif=exif), 16)
    assert decoded.pixels[:, 1].mean() > 200 and decoded.pixels[:, 14].mean() < 50


def test_a_large_jpeg_is_scaled_while_decoding_and_looks_the_same():
    rng = np.random.default_rng(0)
    photo = Image.fromarray(rng.integers(0, 255, (9, 12, 3), dtype=np.uint8)).resize(
        (1000, 750), Image.Resampling.BICUBIC
    )
    data = encoded(photo, "JPEG", quality=95)
    whole = Image.open(io.BytesIO(data)).crop((125, 0, 875, 750)).resize((72, 72), Image.Resampling.BICUBIC)
    difference = np.abs(
        decode(data, 72).pixels.transpose(1, 2, 0).astype(int) - np.asarray(whole).astype(int)
    )
    assert difference.mean() < 2


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it is so large and holds next to nothing: a decompression bomb."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


JPEG = encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (JPEG[:20], "cannot be decoded|known format"),
        (b"these are just words\n" * 20, "is text"),
        (bytes(range(256)) * 4, "known format"),
        (png_of_size(100_000, 100_000), "10,000 million pixels"),
        (png_of_size(30_000, 30_000), "900 million pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is text"),
    ],
)
def test_what_is_no_picture_is_said_in_words(data, why):
    with pytest.raises(Unreadable, match=why):
        decode(data, 16)


def test_a_picture_of_a_hundred_megapixels_is_decoded_in_little_memory():
    """JPEG is scaled while decoding; a grey one here, to be quick to make."""
    data = encoded(Image.linear_gradient("L").resize((10_000, 10_000)), "JPEG")
    decoded = decode(data, 16)
    assert (
        int(decoded.record["width"]) == 10_000 and decoded.pixels[0, 0].mean() < decoded.pixels[0, -1].mean()
    )
