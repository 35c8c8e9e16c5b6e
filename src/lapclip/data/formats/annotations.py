"""Captions in one JSON for many images: COCO's `captions_*.json`, and the `dataset_*.json` of Karpathy's splits."""

import json
import os
import re
from pathlib import Path
from typing import Any

from lapclip.data.catalogue import SIDES, Catalogue, Gathering, Options, Problems, Side
from lapclip.data.files import Folders, Problem
from lapclip.data.formats.folder import JSON_FORMS, folders_with, last_part, legible
from lapclip.data.formats.names import side_in, side_of
from lapclip.errors import UserError, reason_for, typed
from lapclip.files import open_regular

MAX_BYTES = 4 * 2**30  # of one JSON; COCO's largest has 92 MB
GLANCE_BYTES = 2**16  # at each end of a file, to see what it is
LISTS = re.compile(rb'"(images|annotations)"\s*:\s*\[')
COCO_KEYS = (re.compile(rb'"caption"\s*:'), re.compile(rb'"image_id"\s*:'))
KARPATHY_KEYS = (re.compile(rb'"sentences"\s*:\s*\['), re.compile(rb'"filename"\s*:'))

# The captions and the side of each image, by its name in the file.
Annotated = dict[str, tuple[list[str], Side | None]]


def looks_like_annotations(path: Path) -> bool:
    """Whether a file holds captions in one of the two forms; only its two ends are read."""
    try:
        with open_regular(path) as file:
            head = file.read(GLANCE_BYTES)
            rest = os.fstat(file.fileno()).st_size - len(head)
            file.seek(max(rest - GLANCE_BYTES, 0) + len(head))
            tail = file.read(GLANCE_BYTES)
    except (OSError, ValueError):
        return False
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") or not LISTS.search(head):
        return False
    seen = head + b" " + tail
    return any(all(key.search(seen) for key in keys) for keys in (COCO_KEYS, KARPATHY_KEYS))


def open_annotations(files: list[Path], name: str, options: Options) -> Catalogue:
    """The images that one or more such files name, wherever they lie beside them."""
    gathering = Gathering()
    found = [(file, *read_annotations(file, gathering.problems)) for file in files]
    forms = sorted({own for _, own, _ in found})
    form = options.format or forms[0]
    if len(forms) > 1 and options.format is None:
        which = ", ".join(f"`{file.name}` ({own})" for file, own, _ in found[:6])
        hint = f"pass the file you mean: `{typed(found[0][0])}`"
        raise UserError(f"`{name}` holds captions in two formats: {which}", hint=hint)
    if form not in forms:
        raise UserError(f"`{name}` has the format `{forms[0]}`, not `{form}`", hint="omit `--format`")
    for file, own, annotated in found:
        if own == form:
            gather(gathering, annotated, image_folders(file, list(annotated), options.images))
    return gathering.catalogue(name, form)


def gather(gathering: Gathering, annotated: Annotated, folders: Folders) -> None:
    """Adds the images that are there; each is called by its path within what the folders have in common."""
    start = len(os.path.commonpath(folders.roots).rstrip(os.sep)) + 1
    found = [folders.find(name) for name in annotated]
    last_parts = [os.path.basename(name) for name in annotated]
    if not any(isinstance(path, str) for path in found) and len({*last_parts}) == len(annotated):
        # The names may have folders of somebody else's disk, or the one that `--images` already means.
        found = [folders.find(name) for name in last_parts]
    for path, (name, (captions, side)) in zip(found, annotated.items(), strict=True):
        shown = name if isinstance(path, Problem) else legible(path[start:])
        gathering.add_file(shown, path, captions, side=side)


def image_folders(file: Path, names: list[str], images: str | None) -> Folders:
    """Where to look for images: in folders beside the file that hold some."""
    bases = [images or os.path.dirname(os.path.abspath(file))]
    if images is None and last_part(bases[0]) == "annotations":
        bases.append(os.path.dirname(bases[0]))
    folders = folders_with(bases, names)
    # Two folders may use the same names for different images: those of the file's own side are meant.
    own, sides = side_in(file.stem), {folder: side_of(last_part(folder)) for folder in folders}
    if own is not None and own in sides.values():
        folders = [folder for folder in folders if sides[folder] in (own, None)]
    return Folders(*folders)


def read_annotations(file: Path, problems: Problems) -> tuple[str, Annotated]:
    """The form of a file, and what it says."""
    try:
        with open_regular(file) as opened:
            content = json.loads(opened.read(MAX_BYTES + 1))  # a part of a file that is too large is no JSON
    except (OSError, ValueError, RecursionError) as error:
        damage = f"is damaged JSON, ends early or is larger than {MAX_BYTES >> 30} GB"
        what = f"`{file}` {damage}: {reason_for(error)[:200]}"
        raise UserError(what, hint="download it again: the file may be incomplete") from None
    images = content.get("images") if isinstance(content, dict) else None
    if isinstance(images, list) and isinstance(content.get("annotations"), list):
        return "coco", read_coco(images, content["annotations"], file, problems)
    if isinstance(images, list) and any(isinstance(i, dict) and "sentences" in i for i in images):
        return "karpathy", read_karpathy(images, file, problems)
    what = "has no list of `images` with `annotations` or `sentences`, and is no array of several images"
    raise UserError(f"`{file}` {what}", hint=f"write {JSON_FORMS}")


def read_coco(images: list[Any], annotations: list[Any], file: Path, problems: Problems) -> Annotated:
    result: Annotated = {}
    side = side_in(file.stem)
    names: dict[str | None, str] = {}  # by id
    for place, image in enumerate(images):
        fields = image if isinstance(image, dict) else {}
        key, name = as_key(fields.get("id")), fields.get("file_name")
        if key is None or not isinstance(name, str) or not name:
            problems.add("incomplete", "has no `id` or no `file_name`", f"images[{place}] of {file.name}")
        elif key in names:
            problems.add("skipped", "has the `id` of another image", name)
        else:
            names[key] = name
            result[name] = ([], side)
    for place, annotation in enumerate(annotations):
        fields = annotation if isinstance(annotation, dict) else {}
        name, caption = names.get(as_key(fields.get("image_id"))), fields.get("caption")
        if name is None:
            problems.add("incomplete", "belongs to no image", f"annotations[{place}] of {file.name}")
        else:
            add_caption(result[name][0], caption, name, problems)
    return result


def add_caption(captions: list[str], caption: object, name: str, problems: Problems) -> None:
    if isinstance(caption, str):
        captions.append(caption)
    else:
        problems.add("unreadable", "has a caption that is not text", name)


def as_key(value: object) -> str | None:
    """An id as text: other programs write 5 as "5" or as 5.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | str) and not isinstance(value, bool) else None


def read_karpathy(images: list[Any], file: Path, problems: Problems) -> Annotated:
    result: Annotated = {}
    for place, image in enumerate(images):
        fields = image if isinstance(image, dict) else {}
        name, folder, split, sentences = map(fields.get, ("filename", "filepath", "split", "sentences"))
        if not isinstance(name, str) or not name:
            problems.add("incomplete", "has no `filename`", f"images[{place}] of {file.name}")
            continue
        if isinstance(folder, str) and folder:
            name = f"{folder}/{name}"
        side = SIDES.get(split.lower()) if isinstance(split, str) else None
        captions, _ = result.setdefault(name, ([], side))
        for sentence in sentences if isinstance(sentences, list) else []:
            raw = sentence.get("raw") if isinstance(sentence, dict) else None
            add_caption(captions, raw, name, problems)
    return result
