"""Folders of images: captions beside them, within them, or in the names of folders and files."""

import io
import os
import struct
from pathlib import Path

import pillow_heif
import pytest
from PIL import Image, PngImagePlugin

from lapclip.data.catalogue import Options
from lapclip.data.formats.folder import look_through, open_folder
from lapclip.data.formats.metadata import description
from lapclip.data.formats.names import caption_in_name, class_name, side_of
from lapclip.errors import UserError

FOLDER = Path("photos")


def draw(name: str, **options) -> Path:
    """A small image of its own colour in the folder."""
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), (len(name) * 7 % 256, 90, 30)).save(path, **options)
    return path


def touch(*names: str) -> None:
    """Files that are only called images: these kinds never open them."""
    for name in names:
        write(name, b"")


def write(name: str, text: str | bytes) -> None:
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def opened(format: str | None = None, **options):
    asked = Options(format=format, **options)
    return open_folder(look_through(FOLDER, asked), "photos", asked)


def captions(catalogue) -> dict[str, list[str]]:
    return dict(zip(catalogue.names, catalogue.captions, strict=True))


# Captions beside the images


def test_a_text_beside_an_image_is_its_captions_line_by_line():
    draw("cat.jpg"), draw("more/dog.PNG"), draw("bird.jpeg")
    write("cat.txt", "a cat\n\n  a cat asleep  \r\n")
    write("more/dog.TXT", "a dog")
    write("bird.caption", "a bird")
    catalogue = opened()
    assert catalogue.format == "txt"
    assert captions(catalogue) == {
        "bird.jpeg": ["a bird"],
        "cat.jpg": ["a cat", "a cat asleep"],
        "more/dog.PNG": ["a dog"],
    }
    assert not catalogue.problems.counts
    for number, name in enumerate(catalogue.names):
        assert catalogue.reader.read(number) == (FOLDER / name).read_bytes()


@pytest.mark.parametrize(
    "data", ["ein Bär".encode(), b"\xef\xbb\xbfein B\xc3\xa4r", "ein Bär\r\n".encode("utf-16"), b"ein B\xe4r"]
)
def test_text_is_read_in_the_encoding_that_its_editor_wrote(data):
    touch("a.jpg")
    write("a.txt", data)
    catalogue = opened()
    assert catalogue.captions == [["ein Bär"]]
    assert list(catalogue.problems.counts) == (
        ["is not UTF-8; it was read as Windows-1252"] if data == b"ein B\xe4r" else []
    )


def test_texts_that_are_huge_no_captions_missing_or_without_image_are_counted():
    touch("a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg", "f.jpg", "cafe\u0301.jpg")
    write("a.txt", b"first\n" + b"x" * 2_000_000)
    write("b.txt", "0 0.5 0.5 0.25 0.25\n2 0.1 0.1 0.2 0.2\n")
    write("c.txt", b"\0\1\2\3")
    write("d.txt", "".join(f"caption {i}\n" for i in range(5000)))
    write("e.txt", "\n \n")
    write("z.txt", "nothing to see")
    write("drawn.txt", "a drawing")
    touch("drawn.svg")
    write("caf\u00e9.txt", "the same letter, composed")
    catalogue = opened()
    assert catalogue.names == ["a.jpg", "cafe\u0301.jpg", "d.jpg"] and catalogue.captions[0] == ["first"]
    assert len(catalogue.captions[2]) == 1000
    assert catalogue.problems.names == {
        "has more than 1 MB of text; it was cut": ["a.txt"],
        "holds the boxes of objects, not captions": ["b.txt"],
        "is not text": ["c.txt"],
        "has more than 1,000 captions; the others were omitted": ["d.txt"],
        "has no image beside it": ["z.txt"],
        "has an unsupported format; convert it to PNG or JPEG": ["drawn.svg"],
        "belongs to an image in an unsupported format": ["drawn.txt"],
        "has no caption": ["b.jpg", "c.jpg", "e.jpg", "f.jpg"],
    }


# What is not read


def test_hidden_files_what_systems_leave_behind_and_pipes_are_not_read():
    touch("a.jpg", "._a.jpg", ".trash/b.jpg", "__MACOSX/a.jpg", "sub/@eaDir/c.jpg", "Thumbs.db")
    write("a.txt", "a thing")
    assert opened().names == ["a.jpg"] and not opened().problems.counts
    os.mkfifo(FOLDER / "pipe.jpg")
    os.mkfifo(FOLDER / "pipe.txt")
    assert opened().names == ["a.jpg"] and opened().problems.counts == {"is not a regular file": 2}


def test_nothing_outside_the_folder_is_read():
    Path("elsewhere").mkdir()
    Path("elsewhere/secret.txt").write_text("a secret")
    Path("elsewhere/secret.jpg").write_bytes(b"secret")
    touch("a.jpg", "b.jpg", "c.jpg")
    write("a.txt", "a thing")
    write("c.txt", "another")
    (FOLDER / "linked.jpg").symlink_to(Path("elsewhere/secret.jpg").resolve())
    (FOLDER / "linked.txt").write_text("a thing that is elsewhere")
    (FOLDER / "b.txt").symlink_to(Path("elsewhere/secret.txt").resolve())
    (FOLDER / "again.jpg").symlink_to("c.jpg")
    (FOLDER / "again.txt").symlink_to("c.txt")
    (FOLDER / "gone.jpg").symlink_to("nothing.jpg")
    (FOLDER / "folder").symlink_to(Path("elsewhere").resolve())
    (FOLDER / "loop").symlink_to(".")
    catalogue = opened()
    assert captions(catalogue) == {"a.jpg": ["a thing"], "again.jpg": ["another"], "c.jpg": ["another"]}
    assert catalogue.problems.names == {
        "lies outside the source's folder": ["b.txt", "linked.jpg"],
        "is a link to a folder; such links are not followed": ["folder", "loop"],
        "is missing": ["gone.jpg"],
        "has no image beside it": ["linked.txt"],
        "has no caption": ["b.jpg"],
    }
    assert "linked.jpg" in opened(images="elsewhere").names, "a folder that is named is the source's too"


def test_a_name_that_is_no_unicode_can_be_written_down():
    FOLDER.mkdir()
    try:
        Path(os.fsdecode(b"photos/caf\xe9.jpg")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system refuses such names")
    Path(os.fsdecode(b"photos/caf\xe9.txt")).write_text("a café")
    catalogue = opened()
    assert captions(catalogue) == {"caf\\xe9.jpg": ["a café"]} and catalogue.reader.read(0) == b""


# Captions within the images


def exif(**tags) -> Image.Exif:
    numbers = {"description": 0x010E, "title": 0x9C9B, "comment": 0x9C9C, "subject": 0x9C9F}
    block = Image.Exif()
    for tag, value in tags.items():
        if tag == "user_comment":
            block.get_ifd(0x8769)[0x9286] = value
        else:
            block[numbers[tag]] = value if tag == "description" else value.encode("utf-16-le") + b"\0\0"
    return block


def xmp(inside: str) -> bytes:
    return (
        '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        '<rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/"'
        ' xmlns:Iptc4xmpCore="http://iptc.org/std/Iptc4xmpCore/1.0/xmlns/">'
        f'{inside}</rdf:Description></rdf:RDF></x:xmpmeta>{" " * 200}<?xpacket end="w"?>'
    ).encode()


XMP = xmp(
    '<dc:title><rdf:Alt><rdf:li xml:lang="x-default">Fuchs</rdf:li></rdf:Alt></dc:title><dc:description><rdf:Alt>'
    '<rdf:li xml:lang="de">ein Fuchs</rdf:li><rdf:li xml:lang="x-default">a fox &amp; snow</rdf:li>'
    "</rdf:Alt></dc:description>"
)


def with_iptc(jpeg: bytes, *records: tuple[int, int, bytes]) -> bytes:
    """A JPEG with an APP13 segment as Photoshop writes it: an 8BIM block of IPTC records."""
    iptc = b"".join(struct.pack(">BBBH", 0x1C, a, b, len(data)) + data for a, b, data in records)
    block = b"8BIM" + struct.pack(">HHL", 0x0404, 0, len(iptc)) + iptc + b"\0" * (len(iptc) % 2)
    segment = b"Photoshop 3.0\0" + block
    return jpeg[:2] + b"\xff\xed" + struct.pack(">H", len(segment) + 2) + segment + jpeg[2:]


def encoded(format: str, **options) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(buffer, format, **options)
    return buffer.getvalue()


def png_text(**chunks: str) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    for key, text in chunks.items():
        info.add_itxt(key, text) if not text.isascii() else info.add_text(key, text)
    return info


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (encoded("JPEG", exif=exif(description="ein Bär".encode())), ["ein Bär"]),
        (encoded("PNG", exif=exif(description="a fox")), ["a fox"]),
        (encoded("JPEG", exif=exif(title="Füchse", comment="im Schnee 🦊")), ["im Schnee 🦊", "Füchse"]),
        (encoded("JPEG", exif=exif(user_comment=b"UNICODE\0" + "狐 fox".encode("utf-16-le"))), ["狐 fox"]),
        (encoded("JPEG", exif=exif(user_comment=b"\0" * 8 + "füchse".encode())), ["füchse"]),
        (encoded("JPEG", xmp=xmp("<dc:description>plain</dc:description>")), ["plain"]),
        (encoded("JPEG", xmp=XMP, exif=exif(description="another")), ["a fox & snow", "another", "Fuchs"]),
        (
            with_iptc(encoded("JPEG"), (2, 5, b"Fuchs"), (2, 120, "Füchslein".encode())),
            ["Füchslein", "Fuchs"],
        ),
        (with_iptc(encoded("JPEG"), (2, 120, b"ein F\xfcchslein")), ["ein Füchslein"]),
        (encoded("PNG", pnginfo=png_text(Title="Fox", Description="a fox")), ["a fox", "Fox"]),
        (encoded("PNG", pnginfo=png_text(Comment="ein Füchslein 🦊")), ["ein Füchslein 🦊"]),
        (encoded("PNG", pnginfo=png_text(**{"XML:com.adobe.xmp": XMP.decode()})), ["a fox & snow", "Fuchs"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "image",
)
def test_what_people_wrote_into_an_image_is_its_captions(image, expected):
    assert description(image) == expected


def test_phone_images_are_images_and_describe_themselves():
    pillow_heif.register_heif_opener()
    path = draw("IMG_0001.heic", exif=exif(description="a phone's image").tobytes())
    assert description(path) == ["a phone's image"] and opened().format == "metadata"
    write("IMG_0001.txt", "text beside it")
    assert captions(opened()) == {"IMG_0001.heic": ["text beside it"]}


@pytest.mark.parametrize(
    "junk", ["OLYMPUS DIGITAL CAMERA         ", "Created with GIMP", "   ", "DSC_0012.JPG", "2019", '{"a":1}']
)
def test_what_cameras_and_programs_write_is_no_caption(junk):
    assert description(encoded("JPEG", exif=exif(description=junk))) == []


@pytest.mark.parametrize(
    "data",
    [
        b"", b"not a picture", encoded("JPEG", exif=exif(description="a fox"))[:60], encoded("PNG")[:20],
        encoded("JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"), encoded("JPEG", xmp=b"<x:xmpmeta"),
    ],
)  # fmt: skip
def test_a_broken_image_just_says_nothing(data):
    assert description(data) == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be"])
def test_xml_that_grows_is_refused_in_every_encoding(encoding):
    bomb = '<!DOCTYPE a [<!ENTITY b "a fox"><!ENTITY c "&b;&b;">]>' + XMP.decode().replace(
        "a fox &amp; snow", "&c;"
    )
    block = exif(description="of another block")
    assert description(encoded("WEBP", xmp=bomb.encode(encoding), exif=block)) == ["of another block"]
    assert description(encoded("WEBP", xmp=XMP + b" " * 2**21)) == [], "nor is a huge one parsed"


def test_a_folder_of_described_images_is_seen_unless_all_say_the_same():
    for number in range(6):
        draw(f"{'ab'[number % 2]}/IMG_{number}.jpg", exif=exif(description=f"image number {number}"))
    draw("a/IMG_9.jpg")
    catalogue = opened()
    assert catalogue.format == "metadata"
    assert captions(catalogue)["b/IMG_3.jpg"] == ["image number 3"] and len(catalogue.names) == 6
    assert catalogue.problems.names == {"has no caption": ["a/IMG_9.jpg"]}
    for number in range(12):
        draw(f"{'ab'[number % 2]}/IMG_{number}.jpg", exif=exif(description="Studio Smith"))
    write("a/IMG_0.txt", "a note")
    assert opened().format == "classes", "one text in all images is no description, and one note no captions"


# Classes


def test_folders_are_classes_and_splits_are_sides():
    files = ("train/golden_retriever/1", "train/n02123045-tabby/2", "val/golden_retriever/3", "test/7/4")
    touch(*(f"{file}.jpg" for file in files))
    catalogue = opened()
    assert catalogue.format == "classes"
    found = zip(catalogue.names, catalogue.captions, catalogue.labels, catalogue.sides, strict=True)
    assert list(found) == [
        ("test/7/4.jpg", ["7"], "7", "test"),
        ("train/golden_retriever/1.jpg", ["golden retriever"], "golden retriever", "train"),
        ("train/n02123045-tabby/2.jpg", ["tabby"], "tabby", "train"),
        ("val/golden_retriever/3.jpg", ["golden retriever"], "golden retriever", "validation"),
    ]


def test_a_train_among_cars_is_a_class_and_folders_around_the_classes_do_not_matter():
    for kind in ("bus", "train", "big_car/old"):
        touch(*(f"archive/images/{kind}/{kind}_{i:04}.jpg" for i in (1, 2)))
    catalogue = opened()
    assert catalogue.labels == ["big car"] * 2 + ["bus"] * 2 + ["train"] * 2
    assert catalogue.sides == [None] * 6 and catalogue.names == sorted(catalogue.names)
    for name in ("images/train2017/a", "images/val2017/b", "cover"):
        touch(f"other/{name}.jpg")
        write(f"other/{name}.txt", "a thing")
    asked = Options(format="txt")
    catalogue = open_folder(look_through(FOLDER / "other", asked), "other", asked)
    assert catalogue.sides == [None, "train", "validation"], "sides are known for every kind"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("n02099267-flat-coated_retriever", "flat-coated retriever"), ("hot-dog", "hot dog"), ("2 apples", "2 apples"),
        ("001.Black_footed_Albatross", "Black footed Albatross"), ("AnnualCrop", "Annual Crop"), ("Äpfel", "Äpfel"),
        ("2021-07 Italien", "Italien"), ("20210704_Oma", "Oma"), ("14.07.2021 Zoo", "Zoo"), ("737-400", "737-400"),
        *((nothing, "") for nothing in (
            "2019", "2021-07", "July 2021", "Photos from 2019", "DCIM", "100APPLE", "sheets", "New folder (2)", "64x64",
            "n02099267",
        )),
    ],
)  # fmt: skip
def test_a_class_is_called_by_its_words(folder, name):
    assert class_name(folder) == name


def test_years_and_names_that_say_nothing_are_no_captions_unless_they_are_asked_for():
    touch("2019/IMG_1.jpg", "2020/IMG_2.jpg", "2021-07 Italien/IMG_3.jpg", "64/IMG_4.jpg", "sheets/IMG_5.jpg")
    with pytest.raises(
        UserError, match=r"no captions; names of folders such as `2019`, `2020`, `64` do"
    ) as caught:
        opened()
    assert (
        "`--format classes`" in caught.value.message
        and "`lapclip index photos --model tinyclip-8m`" in caught.value.hint
    )
    assert opened("classes").labels == ["2019", "2020", "Italien", "64", "sheets"]


def test_folders_that_say_nothing_among_classes_are_omitted_or_looked_into():
    touch(
        "2019/IMG_1.jpg",
        "2020/Rom/IMG_2.jpg",
        "2021-07 Italien/IMG_3.jpg",
        "7/IMG_4.jpg",
        "Oma/2019/IMG_5.jpg",
    )
    for format in (None, "classes"):  # as the first time, and as a run remembers it
        catalogue = opened(format)
        assert (catalogue.format, catalogue.labels) == ("classes", ["Rom", "Italien", "7", "Oma"])
        assert [*catalogue.problems.names.values()] == [["2019/IMG_1.jpg"]]


@pytest.mark.parametrize(
    ("folder", "side"),
    [
        ("train", "train"), ("Training_Set", "train"), ("val2017", "validation"), ("test_images", "test"),
        ("train_station", None), ("valley", None), ("images", None), ("train_val", None),
    ],
)  # fmt: skip
def test_a_side_is_a_word_of_its_own(folder, side):
    assert side_of(folder) == side


# Names


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("two dogs_playing-in snow (3).jpg", "two dogs playing in snow"),
        ("red%20fox%20in%20snow.jpg", "red fox in snow"),
        ("001_red+fox.jpg", "red fox"),
        ("a-cat-on-a-mat-1920x1080.webp", "a cat on a mat"),
        ("TwoDogsPlaying3.jpg", "Two Dogs Playing"),
        ("2024-01-05 birthday party.jpg", "birthday party"),
        ("sunset at the beach 9f86d081884c7d65.jpg", "sunset at the beach"),
        ("2 dogs in snow.jpg", "2 dogs in snow"),
        ("image of a dog.jpg", "image of a dog"),
        ("red fox - Copy.jpg", "red fox"),
        ("犬が雪の中で遊ぶ.jpg", "犬が雪の中で遊ぶ"),
        ("Train.png", "Train"),
        ("face2.png", "face"),
    ],
)
def test_a_name_of_words_is_a_caption(name, caption):
    assert caption_in_name(f"some/folder/{name}") == caption


@pytest.mark.parametrize(
    "name",
    [
        "IMG_1234.jpg", "DSC0001.JPG", "PXL_20230101_101010123.MP.jpg", "Screenshot 2024-01-01 at 10.00.00.png",
        "Screen Shot 2020-01-01 at 1.00.00\u202fPM.png", "WhatsApp Image 2024-01-01 at 10.10.10 (1).jpeg",
        "signal-2024-01-01-10-10-10-123.jpg", "photo_2024-01-01_10-10-10.jpg", "FB_IMG_1600000000.jpg",
        "550e8400-e29b-41d4-a716-446655440000.jpg", "667626_18933d713e.jpg", "COCO_train2014_000000391895.jpg",
        "jane-doe-dQw4w9WgXcQ-unsplash.jpg", "a.jpg", "train_0001.jpg", "test.jpg", "1f468-200d-2764-fe0f.png",
    ],
)  # fmt: skip
def test_a_name_that_a_camera_or_a_program_gave_is_none(name):
    assert caption_in_name(name) == ""


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("Scan 1.jpg", "Scan 1"), ("IMG 2033.png", "IMG 2033"), ("IMG_0001.jpg", "IMG 0001"), ("test.png", "test"),
        ("jane-doe-unsplash.jpg", "jane doe unsplash"), ("two dogs (3).jpg", "two dogs"), ("copy.png", "copy"),
        ("0001.jpg", ""), ("2024-01-05.jpg", ""), ("667626_18933d713e.jpg", ""), ("1920x1080.png", ""),
    ],
)  # fmt: skip
def test_names_that_are_asked_for_are_captions_unless_they_only_count(name, caption):
    assert caption_in_name(name, is_asked=True) == caption


def test_a_folder_of_named_images_is_seen():
    touch("a red fox.jpg", "two dogs_playing.jpg", "more/cat-on-a-mat (2).jpg", "IMG_0001.jpg")
    catalogue = opened()
    assert catalogue.format == "names"
    assert captions(catalogue) == {
        "a red fox.jpg": ["a red fox"],
        "more/cat-on-a-mat (2).jpg": ["cat on a mat"],
        "two dogs_playing.jpg": ["two dogs playing"],
    }
    assert catalogue.problems.names == {"has no caption": ["IMG_0001.jpg"]}


# In all kinds


def test_a_person_can_force_the_kind():
    for name in ("red fox/the red fox.jpg", "arctic fox/an arctic fox.jpg"):
        draw(name, exif=exif(description=f"description of {name[:5]}"))
        write(name.replace(".jpg", ".txt"), "text")
    expected = {
        "txt": "text",
        "metadata": "description of red f",
        "classes": "red fox",
        "names": "the red fox",
    }
    for kind, caption in expected.items():
        assert captions(opened(kind))["red fox/the red fox.jpg"] == [caption]
    assert opened().format == "txt"


def test_a_folder_without_images_or_without_captions_says_so():
    FOLDER.mkdir()
    with pytest.raises(UserError, match="`photos` holds no files"):
        opened()
    write("a.doc", "x")
    write("b.txt", "x")
    with pytest.raises(UserError, match="`photos` holds 2 files and no images"):
        opened()
    touch("IMG_0001.jpg", *(f"IMG_00{i}.jpg" for i in range(10, 30)))
    with pytest.raises(UserError, match="`photos/` has images but no captions") as caught:
        opened()
    assert "put `IMG_0001.txt` next to `IMG_0001.jpg`, or name a table" in caught.value.hint
    touch(*(f"flags/{country}.png" for country in ("albania", "bahrain", "chile")))
    assert opened("names").captions[-3:] == [["albania"], ["bahrain"], ["chile"]]
    touch("clock/am.png", "clock/screen_shot.png")
    found = captions(opened("names"))
    assert (found["clock/am.png"], found["clock/screen_shot.png"]) == (["am"], ["screen shot"])
    asked = Options()
    with pytest.raises(UserError, match="no captions") as caught:
        open_folder(look_through(FOLDER / "flags", asked), "flags", asked)
    assert "`albania.png`" in caught.value.hint and "`--format names`" in caught.value.hint
    assert "`lapclip index flags --model tinyclip-8m`" in caught.value.hint


def test_images_in_formats_that_are_not_read_are_counted():
    touch("a.svg", "b.SVG")
    with pytest.raises(
        UserError, match=r"2 files and no images: each of 2 has an unsupported format; convert it to PNG"
    ):
        opened()
    touch("c.jfif")
    write("c.txt", "a picture that a browser saved")
    assert opened().names == ["c.jfif"] and [*opened().problems.counts.values()] == [2]
