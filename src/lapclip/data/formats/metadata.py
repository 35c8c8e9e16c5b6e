"""What an image says about itself: captions that people wrote into EXIF, IPTC, XMP or PNG text with their programs.

Only headers are read, nothing is decoded, and whatever is wrong with an image here just means that it says nothing.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image, IptcImagePlugin

from lapclip.data.catalogue import clean_caption
from lapclip.data.decode import formats
from lapclip.files import open_regular

MAX_XMP_BYTES = 2**20
EXIF_DESCRIPTION, EXIF_FOLDER, EXIF_USER_COMMENT = 0x010E, 0x8769, 0x9286
XP_TITLE, XP_COMMENT, XP_SUBJECT = 0x9C9B, 0x9C9C, 0x9C9F  # Windows' own, in UTF-16
IPTC_CAPTION, IPTC_TITLE = (2, 120), (2, 5)
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"
IPTC_CORE = "{http://iptc.org/std/Iptc4xmpCore/1.0/xmlns/}"
RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"

# What cameras, phones and programs write where a person could have written a caption.
JUNK = re.compile(
    r"""(olympus|(konica\ )?minolta|sony|kodak|samsung|sanyo|ricoh|pentax|casio)?\ ?
        (digital\ (still\ )?camera|dsc|digital\ image|techwin)?
      | exif[_ ]jpeg.* | (jpeg|digital|my)?\ ?(picture|photo|image|bild|foto) | dcim.* | ascii | charset=.*
      | default | untitled | unknown | none | null | screenshot | binary\ comment | ai_generated
      | (no\ )?(title|description|caption|comment)
      | dav | sdr | mde | oznor\w* | hdr\w* | rhdr | cof | btf | ptr | lv_\d+.*
      | (created|processed|edited|generated|made|written|compressed|resized|optimi[sz]ed|scanned|rendered)
        \ (by|with|using)\b.*
      | file\ (written|source)\b.* | (creator|software):.* | copyright\b.* | lavc.* | adobe\ photoshop.*
      | \{.* | <.* | \w*filter\w*\s*:.* | https?://\S*
      | (img|dsc\w?|pxl|mvimg|p|cimg|dji|imag|gopr|sam|wp)[_\ -]?\d[\d_-]*(\.\w{2,4})*""",
    re.IGNORECASE | re.VERBOSE,
)
MAX_JUNK = 200


def description(source: bytes | str | Path) -> list[str]:
    """The captions within an image file, descriptions before titles; none when there are none, or it is broken."""
    try:
        opened = io.BytesIO(source) if isinstance(source, bytes) else open_regular(source)
        with opened as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            allowed = formats(file.read(12))
            file.seek(0)
            with Image.open(file, formats=allowed) as image:
                found = [clean_caption(text) for text in texts(image)]
    except Exception:  # a broken file can raise nearly anything: OSError, SyntaxError, struct.error
        return []
    said = (text for text in found if len(text) > MAX_JUNK or not JUNK.fullmatch(text))
    return [text for text in dict.fromkeys(said) if any(c.isalpha() for c in text)]


def texts(image: Image.Image) -> list[str]:
    """All that could be a caption, in order of preference; a fault in one block leaves the others."""
    found: list[tuple[bool, str]] = []
    for block in (xmp_texts, iptc_texts, exif_texts, png_texts):
        with suppress(Exception):  # as above: Pillow's parsers raise what they like
            found.extend(block(image))
    return [text for _, text in sorted(found, key=itemgetter(0))]


def xmp_texts(image: Image.Image) -> Iterator[tuple[bool, str]]:
    """Whether each is a title, and the text; in the default language, or the first one there is."""
    data = image.info.get("xmp", b"")
    if not isinstance(data, bytes) or not 0 < len(data) <= MAX_XMP_BYTES:
        return
    packet = data.decode("utf-8", "replace").strip("\0\ufeff \t\r\n")  # in all these formats XMP is UTF-8
    if "<!DOCTYPE" in packet or "<!ENTITY" in packet:
        return  # entities can grow a small document to gigabytes; XMP has none
    root = ElementTree.fromstring(packet)  # noqa: S314 - without entities; as text, so that no encoding can hide one
    for tag in (DUBLIN_CORE + "description", IPTC_CORE + "AltTextAccessibility", DUBLIN_CORE + "title"):
        is_title = tag == DUBLIN_CORE + "title"
        for element in root.iter(tag):
            choices = list(element.iter(RDF + "li"))
            choices.sort(key=lambda choice: choice.get(LANGUAGE) != "x-default")
            yield is_title, (choices[0] if choices else element).text or ""
        for element in root.iter(RDF + "Description"):
            yield is_title, element.get(tag, "")


def iptc_texts(image: Image.Image) -> Iterator[tuple[bool, str]]:
    if image.format not in ("JPEG", "MPO", "TIFF"):
        return
    found = IptcImagePlugin.getiptcinfo(image) or {}  # type: ignore[arg-type]  # it is an ImageFile: it was opened
    for tag, is_title in ((IPTC_CAPTION, False), (IPTC_TITLE, True)):
        value = found.get(tag, b"")
        # The charset in 1:90 is UTF-8 or missing in practice, and missing often means UTF-8 all the same.
        yield is_title, plain_text(value[0] if isinstance(value, list) else value)


def exif_texts(image: Image.Image) -> Iterator[tuple[bool, str]]:
    exif = Image.Image.getexif(image)  # PNG's own would decode the image
    yield False, mended(exif.get(EXIF_DESCRIPTION))
    yield True, utf_16(exif.get(XP_TITLE))
    yield False, utf_16(exif.get(XP_COMMENT))
    yield False, utf_16(exif.get(XP_SUBJECT))
    yield False, user_comment(exif.get_ifd(EXIF_FOLDER).get(EXIF_USER_COMMENT), exif.endian)


def png_texts(image: Image.Image) -> Iterator[tuple[bool, str]]:
    if image.format == "PNG":
        for key, is_title in (("Description", False), ("Comment", False), ("Title", True)):
            yield is_title, mended(image.info.get(key))


def user_comment(value: object, endian: str | None) -> str:
    """EXIF's comment: eight bytes name the character set of the rest."""
    if not isinstance(value, bytes):
        return mended(value)
    charset, rest = value[:8].rstrip(b"\0 "), value[8:]
    if charset == b"UNICODE":
        # In the byte order of the block by the standard, in that of the program's author in practice.
        low, high = rest[0::2].count(0), rest[1::2].count(0)
        is_big = endian == ">" if low == high else low > high
        return rest.decode("utf-16-be" if is_big else "utf-16-le", "replace").strip("\0\ufeff")
    return plain_text(rest if charset in (b"", b"ASCII") else value)


def utf_16(value: object) -> str:
    return value.decode("utf-16-le", "replace").split("\0")[0] if isinstance(value, bytes) else ""


def mended(value: object) -> str:
    """Text that was read byte by byte, as Pillow does with EXIF and PNG, though it often is UTF-8."""
    if not isinstance(value, str):
        return plain_text(value) if isinstance(value, bytes) else ""
    try:
        return plain_text(value.encode("latin-1"))
    except UnicodeEncodeError:
        return value.strip("\0")


def plain_text(data: bytes) -> str:
    """Text in UTF-8, or in what Windows wrote before that."""
    try:
        return data.decode("utf-8").strip("\0")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace").strip("\0")
