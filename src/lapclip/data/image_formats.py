"""Which kinds of images are opened at all, and how Pillow is kept from refusing or warning meanwhile."""

import contextlib
import threading
import warnings
from collections.abc import Iterator

from PIL import Image

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


def formats(data: bytes) -> list[str]:
    """What an image that begins so may be opened as."""
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


def what_it_is(data: bytes) -> tuple[str, str | None]:
    """What is wrong with data that Pillow does not open, and the optional dependencies that would help."""
    if data[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1", b"ftyphevc"):
        return "is a HEIC image, which needs `pip install 'lapclip[heic]'`", "heic"
    if b"\0" not in data[:1024]:
        return "is text, not an image", None
    return "is not an image in a known format", None


lock = threading.Lock()
num_inside = 0
calm = contextlib.ExitStack()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While images are opened: no warnings about metadata, and not Pillow's own limit of pixels.

    That limit refuses large photos that are scaled while decoding. Both are of the whole process, so the first of
    several threads sets them and the last one restores them.
    """
    global num_inside
    with lock:
        num_inside += 1
        if num_inside == 1:
            calm.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            calm.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        with lock:
            num_inside -= 1
            if num_inside == 0:
                calm.close()
