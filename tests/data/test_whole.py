"""Images to look at, and decoding in several threads at once."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from lapclip.data.ahead import in_order
from lapclip.data.decode import Unreadable, decode
from lapclip.data.image_formats import undisturbed
from lapclip.data.whole import as_jpeg, whole


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def gradient(width: int, height: int) -> Image.Image:
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, across / 2], axis=2).astype(np.uint8))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_all_of_an_image_is_seen_at_its_shape(form):
    seen = whole(encoded(gradient(900, 300), form), 300)
    assert seen.size == (300, 100) and seen.mode == "RGB"
    corners = np.asarray(seen, dtype=int)[[0, 0, -1, -1], [0, -1, 0, -1], :2]
    assert np.abs(corners - [[0, 0], [255, 0], [0, 255], [255, 255]]).max() < 40


def test_a_small_image_is_not_enlarged_and_none_vanishes():
    assert whole(encoded(gradient(40, 30)), 300).size == (40, 30)
    assert whole(encoded(gradient(3000, 2)), 300).size == (300, 1)


def test_a_turned_image_is_upright_and_says_nothing_of_where_it_was_taken():
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    data = encoded(gradient(80, 40), "JPEG", exif=exif)
    seen = whole(data, 80)
    assert seen.size == (40, 80)
    shown = as_jpeg(seen)
    assert b"a camera" in data and b"a camera" not in shown and not Image.open(io.BytesIO(shown)).getexif()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_every_kind_of_pixels_can_be_looked_at(mode):
    grey = gradient(2000, 1000).convert("L")
    deep = Image.fromarray(np.asarray(grey, dtype=np.uint16) * 257)
    image = deep if mode == "I;16" else grey.convert(mode)
    seen = np.asarray(whole(encoded(image, "TIFF"), 100).convert("L"), dtype=float)
    assert seen.shape == (50, 100) and seen[:, 70:].mean() > seen[:, :30].mean() + 40


def test_transparency_is_white():
    clear = Image.new("RGBA", (1200, 1200), (0, 0, 0, 0))
    assert np.asarray(whole(encoded(clear), 50)).min() == 255


def test_what_is_no_image_is_said_to_be_none():
    bomb = b"P6 100000 100000 255\n"
    for data in (b"", b"words", encoded(gradient(50, 50), "JPEG")[:300], bomb):
        with pytest.raises(Unreadable):
            whole(data, 100)


def test_decoding_in_threads_gives_what_one_after_the_other_gives():
    images = [encoded(gradient(60 + n, 50), "JPEG") for n in range(40)]
    limit, filters = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    one_by_one = [decode(data, 32).pixels for data in images]
    at_once = [decoded.pixels for decoded in in_order(lambda data: decode(data, 32), images, threads=4)]
    np.testing.assert_array_equal(np.stack(one_by_one), np.stack(at_once))
    assert limit == Image.MAX_IMAGE_PIXELS and filters == warnings.filters, "the process is left as it was"


def test_the_limit_of_pixels_is_back_when_the_last_one_is_done():
    limit = Image.MAX_IMAGE_PIXELS
    with undisturbed():
        with undisturbed():
            assert Image.MAX_IMAGE_PIXELS is None
        assert Image.MAX_IMAGE_PIXELS is None
    assert limit == Image.MAX_IMAGE_PIXELS


def test_work_ahead_is_bounded_in_order_and_stops_when_it_is_closed():
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 7:
            raise ValueError("seven")
        return item * item

    results = in_order(work, iter(range(10**9)), threads=2, ahead=4)
    assert [next(results) for _ in range(7)] == [n * n for n in range(7)]
    with pytest.raises(ValueError, match="seven"):
        next(results)
    results.close()
    assert len(begun) <= 7 + 5
