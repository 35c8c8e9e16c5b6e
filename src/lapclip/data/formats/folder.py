"""A folder of images, with captions beside them, within them, or as the names of folders or files."""

import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lapclip.data.catalogue import Catalogue, Gathering, Options, Problems, Side
from lapclip.data.files import Folders, Kind, Problem, is_image_name
from lapclip.data.formats.metadata import description
from lapclip.data.formats.names import FILLER, are_captions, caption_in_name, class_name, side_of, tells
from lapclip.errors import NoCaptions, UserError, reason_for, shortened, typed
from lapclip.files import NOT_REGULAR, open_regular

TEXT_SUFFIXES = (".txt", ".caption")
MAX_TEXT_BYTES = 10**6
MAX_LINES = 1000  # of captions of one image
# What systems leave behind, and lapclip itself; hidden files and folders are not seen either.
UNSEEN = ("__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini", "lapclip-sheet.png")
BOXES = re.compile(r"\s*+\d++(\s++-?(\d++(\.\d*+)?|\.\d++)){4,}+\s*+")  # objects as YOLO writes them
NOT_READ = (".svg", ".svgz", ".psd", ".xcf", ".jxl")  # images in formats that are not supported
ENDINGS = (".jpg", ".png", ".jpeg", ".webp")  # tried for a name without one
# Folders of images.
USUAL = re.compile(r"images|img|flickr30k_images|flicker8k_dataset|(train|val|test)\d{4}")
MAX_FOLDERS = 1_000  # beside a table or captions, that are looked into
NUM_OPENED = 40  # images or names, to see what a folder holds
JSON_FORMS = '`{"cat.jpg": "a cat", ...}`, `[{"image": "cat.jpg", "caption": "a cat"}, ...]` or as of COCO'


@dataclass
class Listing:
    """The files of a folder by their names within it, in an order that is the same on every file system."""

    root: str
    names: list[str]  # of images
    texts: dict[str, str]  # by name in lower case suffix and composed letters
    links: dict[str, str]  # where those files that are links lead
    num_files: int
    problems: Problems

    def path(self, name: str) -> str:
        return self.links.get(name) or os.path.join(self.root, name)


def open_folder(listing: Listing, name: str, options: Options) -> Catalogue:
    """The images of a folder, with captions as its kind has them."""
    gathering = Gathering()
    gathering.problems = listing.problems
    if not listing.names:
        found = f"{listing.num_files:,} files and no images" if listing.num_files else "no files"
        hint = "pass a folder with images, such as JPEG or PNG files"
        raise UserError(f"`{name}` holds {found}{gathering.most_common_problem()}", hint=hint)
    places, folders = placed(listing.names), folders_of(listing.names)
    kind = options.format or kind_of(listing)
    if kind is None:
        raise without_captions(name, listing, folders)
    has_classes = are_classes(folders)
    if kind == "txt":
        used = {text for image in listing.names for text in texts_beside(listing, image)}
        for text in sorted({*listing.texts.values()} - used):
            stem = os.path.join(listing.root, os.path.splitext(text)[0])
            has_other = any(os.path.exists(stem + ending) for ending in NOT_READ)
            what = "belongs to an image in an unsupported format" if has_other else "has no image beside it"
            listing.problems.add("incomplete", what, text)
    for image, folder in zip(listing.names, folders, strict=True):
        side, label = places[os.path.dirname(image)][0], None
        if kind == "txt":
            captions = captions_beside(listing, image)
        elif kind == "metadata":
            captions = description(listing.path(image))
        elif kind == "names":
            caption = caption_in_name(image, is_asked=options.format == "names")
            captions = [caption] if caption else []
        elif kind == "images":  # to examine them without captions
            captions = [legible(image)]
        elif label := class_name(folder) or ("" if has_classes else legible(folder)):
            captions = [label]
        else:
            gathering.problems.add("incomplete", "is not in a class folder", image)
            continue
        gathering.add_file(legible(image), listing.path(image), captions, side=side, label=label)
    return gathering.catalogue(name, kind)


def without_captions(name: str, listing: Listing, folders: list[str]) -> NoCaptions:
    """The error for images without captions; `folders` has the folder of each image."""
    images = listing.names
    example, found = shortened(images[0]), f"`{name.rstrip('/')}/` has images but no captions"
    for file in sorted(Path(listing.root).glob("*.json"))[:1]:
        found += f"; `{shortened(file.name)}` was expected to be {JSON_FORMS}"
    index = f"`lapclip models get tinyclip-8m`, then `lapclip index {typed(name)} --model tinyclip-8m`"
    hint = f"search them with a pretrained model: {index} (`lapclip models` lists others, a run works too); "
    if 2 * sum(caption_in_name(image) != "" for image in images) > len(images):
        hint += f"to train with names of files such as `{example}` as captions, use `--format names`"
    else:
        hint += f"to train, put `{os.path.splitext(example)[0]}.txt` next to `{example}`, or name a table: `pairs.csv`"
    if silent := [f"`{shortened(folder, 40)}`" for folder in sorted({*folders} - {""}) if not tells(folder)]:
        found += f"; names of folders such as {', '.join(silent[:3])} do not describe them"
        found += " (`--format classes` uses them anyway)"
    return NoCaptions(found, hint=hint)


def folders_of(names: list[str]) -> list[str]:
    """The class folder of each image; "" where there is none."""
    places = placed(names)
    return [places[os.path.dirname(image)][1] for image in names]


def are_classes(folders: list[str]) -> bool:
    """Whether most images lie in folders whose names say something, and not all the same."""
    told = [folder for folder in folders if tells(folder)]
    return len({*told}) > 1 and 2 * len(told) >= len(folders) >= 20 * folders.count("")


def walk(
    root: str, note: Callable[[Kind, str, str], None], entries: Sequence[os.DirEntry[str]] = ()
) -> Iterator[os.DirEntry[str]]:
    """All that is no folder, except hidden files; links to folders are not followed. Entries are those of the root."""
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            with nullcontext(entries) if entries and folder == root else os.scandir(folder) as found:
                for entry in found:
                    if entry.name.startswith(".") or entry.name in UNSEEN:
                        continue
                    if not entry.is_dir(follow_symlinks=False):
                        yield entry
                    elif not is_run(entry.path):
                        pending.append(entry.path)
        except OSError as error:
            note("unreadable", f"cannot be opened: {reason_for(error)}", folder)


def is_run(folder: str) -> bool:
    """Whether lapclip itself made this folder, with its own `learned.png`."""
    own = ("config.toml", "machine.json", "checkpoints")
    return all(os.path.exists(os.path.join(folder, name)) for name in own)


def folders_in(base: str) -> list[str]:
    """The folders in a folder; except hidden ones and links."""
    try:
        with os.scandir(base) as entries:
            inner = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
            return sorted(e.path for e in inner if e.name[0] != "." and e.name not in UNSEEN)[:MAX_FOLDERS]
    except OSError:
        return []


def folders_with(bases: list[str], names: list[str]) -> list[str]:
    """Some folders, and those in them that hold some of the named images; the one with most of them first."""
    inner = [folder for base in bases for folder in folders_in(base)]
    inner += [below for folder in inner if last_part(folder) == "images" for below in folders_in(folder)]
    counts = {folder: num_found(folder, names) for folder in [*bases, *inner[:MAX_FOLDERS]]}
    kept = [folder for folder in counts if counts[folder] or folder in bases]
    return sorted(kept, key=lambda folder: (-counts[folder], not USUAL.fullmatch(last_part(folder))))


def last_part(folder: str) -> str:
    return os.path.basename(folder).lower()


def num_found(folder: str, names: list[str]) -> int:
    """How many of the images lie there: few of many names, or many of few files, so both are looked at."""
    folders = Folders(folder)
    if found := sum(isinstance(find_image(folders, name), str) for name in spread(names, NUM_OPENED)):
        return found
    with suppress(OSError), os.scandir(folder) as entries:
        present = {entry.name for entry in islice(entries, 10 * NUM_OPENED)}
        return sum(os.path.basename(name) in present for name in names)
    return 0


def find_image(folders: Folders, name: str, is_asked: bool = False) -> str | Problem:
    """An image's file, also if its name was written without a suffix or, in a folder asked for, on another computer."""
    if name[:10].lower().startswith(("http://", "https://")):
        return Problem("skipped", "is a web address, and nothing is downloaded")
    found = folders.find(name)
    others = [name.replace("\\", "/")] if "\\" in name else []
    if not is_image_name(name):
        others += [other + ending for other in [name, *others] for ending in ENDINGS]
    for other in others if isinstance(found, Problem) else ():
        if not isinstance(path := folders.find(other), Problem):
            return path
    if is_asked and isinstance(found, Problem):
        parts = name.replace("\\", "/").lower().split("/")
        ends = (os.path.join(*parts[start:]) for start in range(len(parts)))
        return next((folders.find(folders.below[end]) for end in ends if end in folders.below), found)
    return found


def is_used(name: str) -> bool:
    return is_image_name(name) or name.lower().endswith(TEXT_SUFFIXES)


def look_through(path: Path, options: Options, entries: Sequence[os.DirEntry[str]] = ()) -> Listing:
    root = os.path.realpath(path)
    folders = Folders(root, *filter(None, [options.images]))
    listing = Listing(root, [], {}, {}, 0, Problems())
    start = len(root.rstrip(os.sep)) + 1
    found: list[str] = []
    linked: list[str] = []
    for entry in walk(root, listing.problems.add, entries):
        listing.num_files += 1
        if entry.is_symlink():
            linked.append(entry.path)
        elif is_used(entry.name) and entry.is_file():
            found.append(entry.path[start:])
        elif is_used(entry.name):
            listing.problems.add("skipped", NOT_REGULAR, entry.path[start:])
        elif entry.name.lower().endswith(NOT_READ):
            what = "has an unsupported format; convert it to PNG or JPEG"
            listing.problems.add("skipped", what, entry.path[start:])
    for path_of_link in sorted(linked):
        name, target = path_of_link[start:], folders.find(path_of_link)
        if os.path.isdir(path_of_link):
            listing.problems.add("skipped", "is a link to a folder; such links are not followed", name)
        elif not is_used(name):
            continue
        elif isinstance(target, Problem):
            listing.problems.add("skipped", target.what, name)
        else:
            listing.links[name] = target
            found.append(name)
    for name in sorted(found):
        if is_image_name(name):
            listing.names.append(name)
        else:
            stem, suffix = os.path.splitext(name)
            listing.texts.setdefault(composed(stem) + suffix.lower(), name)
    return listing


def kind_of(listing: Listing) -> str | None:
    """The first kind that most of the images fit, None for no captions; only a few images are opened for it."""
    names = listing.names
    if 10 * sum(bool(texts_beside(listing, name)) for name in names) >= len(names):
        return "txt"
    opened = spread(names, NUM_OPENED)
    described = [found[0] for name in opened if (found := description(listing.path(name)))]
    if len(described) * 2 >= len(opened) and len(set(described)) * 2 >= len(described):
        return "metadata"
    if are_captions(names):
        return "names"
    return "classes" if are_classes(folders_of(listing.names)) else None


def has_classes_too(name: str) -> bool:
    """Whether a source is a folder that is read by names or metadata of its files, but has class folders too."""
    path = Path(os.path.expanduser(name))
    listing = look_through(path, Options()) if path.is_dir() else None
    return bool(
        listing and kind_of(listing) in ("names", "metadata") and are_classes(folders_of(listing.names))
    )


def spread(names: list[str], most: int) -> list[str]:
    """Some of the names, from all over the list."""
    return [names[i * len(names) // most] for i in range(most)] if len(names) > most else names


def placed(names: list[str]) -> dict[str, tuple[Side | None, str]]:
    """For each folder with images its side, where there is a level such as `train`, and the class folder below it."""
    levels = {folder: folder.split(os.sep) if folder else [] for folder in {*map(os.path.dirname, names)}}
    shared = os.path.commonpath(list(levels))
    for part in shared.split(os.sep) if shared else []:
        if side_of(part):
            break
        levels = {folder: rest[1:] for folder, rest in levels.items()}
    for folder, rest in levels.items():
        if len(rest) > 1 and FILLER.fullmatch(rest[0].lower()) and side_of(rest[1]):
            levels[folder] = rest[1:]  # images/train2017/...
    tops = {rest[0] for rest in levels.values() if rest}
    sides = {top: side for top in tops if (side := side_of(top))}
    # "train" beside "bus" and "car" is a class.
    if len(sides) == len(tops) or ("train" in sides.values() and len({*sides.values()}) > 1):
        padded = ((folder, [*rest, "", ""]) for folder, rest in levels.items())
        return {f: (sides.get(rest[0]), class_in(rest[1:]) if rest[0] in sides else "") for f, rest in padded}
    return {folder: (None, class_in(rest)) for folder, rest in levels.items()}


def class_in(levels: list[str]) -> str:
    """The first folder whose name says something, of `2021/Italy`; or else the first."""
    return next((level for level in levels if tells(level)), levels[0] if levels else "")


def texts_beside(listing: Listing, image: str) -> list[str]:
    """The text files of an image: `cat.txt` or `cat.caption` of `cat.jpg`, or else `cat.jpg.txt`."""
    for stem in (os.path.splitext(image)[0], image):
        if found := [text for s in TEXT_SUFFIXES if (text := listing.texts.get(composed(stem) + s))]:
            return found
    return []


def captions_beside(listing: Listing, image: str) -> list[str]:
    captions: list[str] = []
    problems = listing.problems
    for name in texts_beside(listing, image):
        try:
            with open_regular(listing.path(name)) as file:
                data = file.read(MAX_TEXT_BYTES + 1)
        except (OSError, ValueError) as error:
            problems.add("unreadable", f"cannot be read: {reason_for(error)}", name)
            continue
        for line in text_of(data, name, problems).splitlines():
            if BOXES.fullmatch(line):
                problems.add("skipped", "holds the boxes of objects, not captions", name)
                break
            if len(captions) == MAX_LINES:
                what = f"has more than {MAX_LINES:,} captions; the others were omitted"
                problems.add("skipped", what, name)
                break
            if line.strip():
                captions.append(line)
    return captions


def text_of(data: bytes, name: str, problems: Problems) -> str:
    """The text in a file, in whatever a person's editor wrote it."""
    if len(data) > MAX_TEXT_BYTES:
        problems.add("repaired", f"has more than {MAX_TEXT_BYTES // 10**6} MB of text; it was cut", name)
        line_end = data.rfind(b"\n", 0, MAX_TEXT_BYTES)
        data = data[: line_end if line_end > 0 else MAX_TEXT_BYTES]
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    if b"\0" in data:
        problems.add("unreadable", "is not text", name)
        return ""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        problems.add("repaired", "is not UTF-8; it was read as Windows-1252", name)
        return data.decode("cp1252", "replace")


def composed(name: str) -> str:
    """Letters with their accents in one: a Mac may have written one of two names otherwise."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def legible(name: str) -> str:
    """A file name that can be written down; what is not Unicode in it appears as `\\xe9`."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")
