"""Decoding one image: what a viewer would show, within limits, and every fault in words."""

import io
import struct
import subprocess
import sys
import time
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from lapclip.data.decode import FORMATS, TRAITS, Unreadable, as_jpeg, decode, read_whole
from lapclip.data.workers import in_order


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def traits_of(data: bytes) -> set[str]:
    bits = int(decode(data, 16).record["traits"])
    return {trait for number, trait in enumerate(TRAITS) if bits >> number & 1}


def halves(mode: str, left, right, size: int = 32) -> Image.Image:
    image = Image.new(mode, (size, size), right)
    image.paste(left, (0, 0, size // 2, size))
    return image


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "HEIF", "AVIF"])
def test_every_format_gives_the_same_image(format):
    if format == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    decoded = decode(encoded(halves("RGB", (200, 30, 30), (20, 20, 220)), format), 16)
    assert decoded.pixels.shape == (3, 16, 16) and FORMATS[int(decoded.record["format"])] == format
    assert np.abs(decoded.pixels[:, 8, 2].astype(int) - [200, 30, 30]).max() < 25
    assert np.abs(decoded.pixels[:, 8, 13].astype(int) - [20, 20, 220]).max() < 25


def test_odd_modes_look_as_a_viewer_shows_them_and_are_noted():
    def shown(image: Image.Image, trait: str | None, format: str = "PNG", **options) -> np.ndarray:
        data = encoded(image, format, **options)
        assert traits_of(data) >= {trait} if trait else not traits_of(data)
        return decode(data, 8).pixels

    assert shown(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "cmyk", "JPEG")[0].mean() > 200
    sixteen = Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16))
    assert abs(shown(sixteen, "sixteen_bit").mean() - 40_000 / 257) < 2
    assert shown(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "alpha").min() == 255, "transparency is white"
    palette = Image.new("RGB", (8, 8), (10, 200, 30)).convert("P")
    assert abs(int(shown(palette, "palette")[1].mean()) - 200) < 12
    assert shown(Image.new("L", (8, 8), 7), "grey").max() == 7
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    assert shown(red, "animated", "GIF", save_all=True, append_images=[blue])[0].min() > 250
    assert shown(red, None).shape == (3, 8, 8)


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])  # Pillow itself turns a TIFF as it loads
def test_a_turned_photo_stands_upright(form):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to see it upright
    data = encoded(halves("RGB", (255, 255, 255), (0, 0, 0)).resize((64, 32)), form, exif=exif)
    decoded = decode(data, 16)
    assert decoded.pixels[:, 1].mean() > 200 and decoded.pixels[:, 14].mean() < 50
    assert (int(decoded.record["width"]), int(decoded.record["height"])) == (32, 64)
    assert "rotated" in traits_of(data)


def test_a_large_jpeg_is_scaled_while_decoding_and_looks_the_same():
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 12, 3), dtype=np.uint8))
    data = encoded(coarse.resize((1000, 750), Image.Resampling.BICUBIC), "JPEG", quality=95)
    whole = Image.open(io.BytesIO(data)).crop((125, 0, 875, 750)).resize((72, 72), Image.Resampling.BICUBIC)
    difference = decode(data, 72).pixels.transpose(1, 2, 0).astype(int) - np.asarray(whole)
    assert np.abs(difference).mean() < 2


@pytest.mark.parametrize("size", [(72, 72), (300, 200)])
def test_what_duplicates_are_found_by_does_not_depend_on_the_size_of_the_pack(size):
    noise = np.random.default_rng(0).integers(256, size=(*size[::-1], 3), dtype=np.uint8)
    small, large = (decode(encoded(Image.fromarray(noise)), side).record for side in (72, 256))
    assert small == large


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it is so large and holds next to nothing: a decompression bomb."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def tiff_of_doubles() -> bytes:
    """A valid TIFF that Pillow does not support."""
    single, double = (struct.pack("<HHII", 258, 3, 1, bits) for bits in (32, 64))
    return encoded(Image.new("F", (8, 8)), "TIFF").replace(single, double)


JPEG = encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (b"these are just words\n" * 20, "is text"),
        (bytes(range(256)) * 4, "known format"),
        (b"\x89PNG\r\n\x1a\n" + b" 123 junk " * 20, "is a PNG that cannot be decoded: broken PNG"),
        (tiff_of_doubles(), "is a TIFF that cannot be decoded: unknown pixel mode"),
        (png_of_size(100_000, 100_000), "10,000 million pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is text"),
        (encoded(Image.new("F", (8, 8)), "TIFF"), "floating-point"),
    ],
)
def test_what_is_no_image_is_said_in_words(data, why):
    with pytest.raises(Unreadable, match=why):
        decode(data, 16)


def jpeg_of_size(width: int, height: int, **options) -> bytes:
    """A JPEG that says it is so large and holds next to nothing."""
    data = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG", **options))
    frame = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def jpeg_in_several_scans(width: int, height: int) -> bytes:
    """Not progressive, and yet its coefficients are kept: the first scan holds one channel of three."""
    data = jpeg_of_size(width, height)
    start = data.index(b"\xff\xda")
    return data[:start] + bytes.fromhex("ffda 0008 01 0100 003f00") + data[start + 14 :]


def jpeg_of_scans(count: int) -> bytes:
    data = encoded(Image.new("L", (16, 16), 90), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * count + data[end:]


def tiff(tags: dict[int, int], pixels: bytes, num_pages: int = 1) -> bytes:
    """Pages that all show the same pixels, which begin at byte 8."""
    tags = dict(sorted({273: 8, 279: len(pixels), 258: 8, 262: 1, 277: 1, **tags}.items()))
    first, length = 8 + len(pixels), 6 + 12 * len(tags)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    next_pages = [*(first + length * page for page in range(1, num_pages)), 0]
    pages = (struct.pack("<H", len(tags)) + entries + struct.pack("<I", page) for page in next_pages)
    return b"II*\0" + struct.pack("<I", first) + pixels + b"".join(pages)


def run_length_bmp(side: int) -> bytes:
    body = b"\x01\x00\x00\x00" * side
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 4, 2, len(body), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 118 + len(body), 0, 0, 118) + header + bytes(64) + body


def webp_of_canvas(side: int) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = bytearray(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    data[24:30] = struct.pack("<I", side - 1)[:3] * 2
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (jpeg_of_size(24_000, 24_000, progressive=True), "576 million pixels"),
        (jpeg_in_several_scans(24_000, 24_000), "576 million pixels"),
        (jpeg_of_scans(2_000), "2,0.. scans"),
        (tiff({256: 16, 257: 16, 259: 8, 322: 16_000, 323: 16_000}, zlib.compress(bytes(256))), "2,048 MB"),
        (run_length_bmp(8_000), "64 million pixels"),
        (webp_of_canvas(11_500), "132 million pixels"),
    ],
    ids=["progressive", "several scans", "many scans", "large tiles", "run lengths", "canvas"],
)
def test_what_would_take_too_much_memory_or_time_is_refused_unseen(data, why):
    started = time.perf_counter()
    with pytest.raises(Unreadable, match=why):
        decode(data, 16)
    assert time.perf_counter() - started < 1


def test_a_tiff_of_many_pages_is_read_as_its_first():
    data = tiff({256: 1, 257: 1, 259: 1, 278: 1}, b"\x07\x00", num_pages=10_000)
    started = time.perf_counter()
    assert (decode(data, 16).pixels == 7).all() and "animated" in traits_of(data)
    assert time.perf_counter() - started < 1


def peak_megabytes(data: bytes, path) -> float:
    """What decoding adds to the memory of a process of its own."""
    path.write_bytes(data)
    program = """if True:
        import sys
        from lapclip.data.decode import decode
        from lapclip.machine.hardware import own_peak_bytes
        data = open(sys.argv[1], "rb").read()
        before = own_peak_bytes()
        decode(data, 16)
        sys.stdout.write(str((own_peak_bytes() - before) / 1e6))
    """
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.parametrize(("mode", "bytes_a_pixel"), [("RGB", 4), ("LA", 4), ("P", 1), ("I;16", 2)])
def test_an_image_is_held_in_memory_once(mode, bytes_a_pixel, tmp_path):
    options = {"transparency": 0} if mode == "P" else {}
    data = encoded(Image.new(mode, (4_000, 4_000)), compress_level=1, **options)
    assert peak_megabytes(data, tmp_path / "picture") < 16 * bytes_a_pixel + 32


def test_a_photo_of_two_hundred_megapixels_is_decoded_in_little_memory(tmp_path):
    """As a phone writes it; made of one strip again and again, to be quick."""
    strip = Image.linear_gradient("L").resize((16_384, 128)).convert("RGB")
    data = encoded(strip, "JPEG", restart_marker_rows=1, subsampling="4:2:0")
    frame, start = data.index(b"\xff\xc0"), data.index(b"\xff\xda") + 14
    header = data[: frame + 5] + struct.pack(">H", 12_288) + data[frame + 7 : start]
    data = header + b"\xff\xd7".join([data[start:-2]] * 96) + data[-2:]
    assert (decode(data, 16).record["width"], decode(data, 16).record["height"]) == (16_384, 12_288)
    assert peak_megabytes(data, tmp_path / "photo") < 100


def patches(mode: str) -> Image.Image:
    """A large image of coloured patches, partly transparent where the mode can be."""
    rng = np.random.default_rng(0)
    channels = [
        Image.fromarray(rng.integers(0, 255, (19, 25), dtype=np.uint8)).resize((2500, 1900), resample)
        for resample in (0, 0, 0, Image.Resampling.BICUBIC)
    ]
    if mode == "I;16":
        return Image.fromarray(np.asarray(channels[0]).astype(np.uint16) * 257)
    if mode == "P":
        return Image.merge("RGB", channels[:3]).quantize(64)
    return Image.merge(mode, channels[-len(Image.new(mode, (1, 1)).getbands()) :])


@pytest.mark.parametrize(
    ("mode", "format"), [("RGBA", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("I;16", "PNG"), ("CMYK", "TIFF")]
)
def test_a_large_image_looks_as_if_it_was_converted_whole(mode, format):
    """Transparent colours leave no fringes, and a palette is not resized by its numbers."""
    options = {"compress_level": 1} | ({"transparency": 3} if mode == "P" else {}) if format == "PNG" else {}
    data = encoded(patches(mode), format, **options)
    whole = Image.open(io.BytesIO(data))
    if mode == "I;16":
        rgba = Image.fromarray((np.asarray(whole) // 257).astype(np.uint8)).convert("RGBA")
    else:
        rgba = whole.convert("RGBA")
    over_white = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    expected = over_white.resize((72, 72), Image.Resampling.BICUBIC, box=(300, 0, 2200, 1900))
    difference = decode(data, 72).pixels.transpose(1, 2, 0).astype(int) - np.asarray(expected)
    assert np.abs(difference).max() <= 6 and np.abs(difference).mean() < 1


def gradient(width: int, height: int) -> Image.Image:
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, across / 2], axis=2).astype(np.uint8))


def test_all_of_an_image_is_seen_at_its_shape_and_says_nothing_of_where_it_was_taken():
    assert read_whole(encoded(gradient(40, 30)), 300).size == (40, 30)
    assert read_whole(encoded(gradient(3000, 2)), 300).size == (300, 1)
    seen = read_whole(encoded(gradient(900, 300), "JPEG"), 300)
    assert seen.size == (300, 100) and seen.mode == "RGB"
    corners = np.asarray(seen, dtype=int)[[0, 0, -1, -1], [0, -1, 0, -1], :2]
    assert np.abs(corners - [[0, 0], [255, 0], [0, 255], [255, 255]]).max() < 40
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    data = encoded(gradient(80, 40), "JPEG", exif=exif)
    seen = read_whole(data, 80)
    assert seen.size == (40, 80), "turned upright"
    shown = as_jpeg(seen)
    assert b"a camera" in data and b"a camera" not in shown and not Image.open(io.BytesIO(shown)).getexif()


def test_decoding_in_threads_gives_what_one_after_the_other_gives():
    images = [encoded(gradient(60 + n, 50), "JPEG") for n in range(40)]
    limit, filters = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    one_by_one = [decode(data, 32).pixels for data in images]
    at_once = [decoded.pixels for decoded in in_order(lambda data: decode(data, 32), images, threads=4)]
    np.testing.assert_array_equal(np.stack(one_by_one), np.stack(at_once))
    assert limit == Image.MAX_IMAGE_PIXELS and filters == warnings.filters, "the process is left as it was"
