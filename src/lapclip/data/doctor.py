"""The data doctor: everything worth knowing about a source before training on it, and what to do about it."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lapclip.data.advice import MAX_TEXT_LENGTH, Advice, DataFacts, advise, percentiles, share_outside_a_to_z
from lapclip.data.catalogue import NUM_NAMED, Catalogue
from lapclip.data.decode import FORMATS, THUMB, TRAITS, read_whole
from lapclip.data.formats.folder import are_classes, folders_of
from lapclip.data.formats.names import are_captions, caption_in_name
from lapclip.data.open import Files
from lapclip.data.pairs import TRAIN, VALIDATION
from lapclip.data.split import duplicates, told_apart
from lapclip.errors import shortened, shortened_path
from lapclip.units import percent, plural

NUM_CAPTIONS_NAMED = 20
MAX_READ = 100_000  # captions whose letters are looked at, from all over the source
NUM_COMPARED, MIN_COMPARED = 10_000, 20  # images, and different captions, to see what captions have in common
LANGUAGE_MARK = re.compile(r"[a-z]{2,3}([_@.][a-zA-Z0-9-]+)*=")  # `de.utf8=`, `pt_BR.utf8=`
MAX_PLAIN = 0.01  # of the images
MAX_LONG, LONG = 0.1, 2  # share of images whose longer side is that many times the other
PERCENTILES = (50, 90, 95, 99, 100)
SCRIPT_NAMES = {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana", "KATAKANA-HIRAGANA": "Kana"}
EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u27bf\u2b50\u2b55]")


@dataclass(frozen=True, kw_only=True)
class Report(DataFacts):
    """What `lapclip data check --json` prints; counts are of all, names of the first 10,000."""

    num_images: int  # that can be read and have captions
    num_captions: int  # of these
    captions_per_image: dict[str, float]
    unreadable: list[str]
    unreadable_why: dict[str, str]
    num_links: int  # to other images of the source; they are no duplicates
    duplicate_images: list[list[str]]
    num_duplicate_captions: int  # equal but for case, beyond the first image of each
    duplicate_captions: dict[str, int]
    sizes: dict[str, Any] | None  # None where no image was decoded
    num_small: int  # smaller than images are trained on
    traits: dict[str, int]
    formats: dict[str, int]
    columns: dict[str, str]  # of a table
    languages: dict[str, float] = field(default_factory=dict)  # no longer guessed; the key stays for programs
    num_unused: int  # the dataset's own test images
    own_split: bool
    leaks: list[list[str]]
    problems: dict[str, dict[str, Any]]
    advice: list[Advice] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        kinds = [advice.kind for advice in self.advice]
        return asdict(self) | {"advice": [advice.sentence for advice in self.advice], "advice_kinds": kinds}


def examine(
    files: Files, lengths: np.ndarray, *, text_length: int, tokenizer: str, image_size: int
) -> Report:
    """Everything about a source; `lengths` are tokens of all captions in order, start and end included."""
    catalogue, records, unreadable = files.catalogue, files.pack.records, files.pack.unreadable
    groups = told_apart(records, files.groups, lambda n, size: read_whole(catalogue.reader.read(n), size))
    is_readable = records["row"] >= 0
    readable = np.flatnonzero(is_readable)
    file_of = {catalogue.reader.stamp(number) or str(number): number for number in readable[::-1].tolist()}
    own = np.sort([*file_of.values()])  # without links to other images of the source
    num_each = np.array([len(own) for own in catalogue.captions], dtype=np.int64)
    lengths = lengths[np.repeat(is_readable, num_each)]
    captions = [caption for number in readable.tolist() for caption in catalogue.captions[number]]
    num_each, mean = num_each[readable], round(float(num_each[readable].mean()), 2)
    known = readable[records["width"][readable] > 0]

    def names(numbers: Iterable[int]) -> list[str]:
        return [shortened_path(catalogue.names[number]) for number in list(numbers)[:NUM_NAMED]]

    own_test = np.array([side == "test" for side in catalogue.sides], dtype=bool)
    is_validation = is_readable & (files.sides == VALIDATION)
    is_train = is_readable & ~is_validation & ~own_test
    trained, first = np.unique(groups[is_train], return_index=True)
    leaked = np.flatnonzero(is_validation & np.isin(groups, trained))
    same = np.flatnonzero(is_train)[first[np.searchsorted(trained, groups[leaked])]]
    traits, formats = records["traits"][readable], Counter(records["format"][known].tolist())
    of_each = (dict.fromkeys(map(str.casefold, catalogue.captions[number])) for number in readable.tolist())
    counts = Counter(caption for own in of_each for caption in own)
    shared = Counter({caption: count for caption, count in counts.items() if count > 1})
    limits = sorted({MAX_TEXT_LENGTH, text_length})
    report = Report(
        num_images=len(readable),
        num_captions=len(captions),
        captions_per_image={"min": int(num_each.min()), "mean": mean, "max": int(num_each.max())},
        num_unreadable=len(catalogue.names) - len(readable),
        unreadable=names(unreadable),
        unreadable_why=dict(zip(names(unreadable), unreadable.values(), strict=False)),
        num_links=len(readable) - len(own),
        num_duplicate_images=len(own) - len(np.unique(groups[own])),
        duplicate_images=[names(own[same]) for same in duplicates(records[own], groups[own])[:NUM_NAMED]],
        num_duplicate_captions=shared.total() - len(shared),
        duplicate_captions={shortened(words): n for words, n in shared.most_common(NUM_CAPTIONS_NAMED)},
        num_distinct_captions=len(counts),
        share_shared_captions=shared.total() / len(captions),
        tokenizer=tokenizer,
        text_length=text_length,
        caption_tokens=percentiles(lengths, PERCENTILES),
        caption_tokens_cut={str(n): float((lengths > n).mean()) for n in limits},
        sizes=sizes_of(records, known, catalogue.names) if len(known) else None,
        num_small=int((np.minimum(records["width"], records["height"])[known] < image_size).sum()),
        columns=catalogue.columns,
        traits={name: int((traits >> bit & 1).sum()) for bit, name in enumerate(TRAITS)},
        formats={FORMATS[number]: count for number, count in formats.most_common()},
        scripts=dict(Counter(map(script_of, captions)).most_common()),
        share_outside_a_to_z=share_outside_a_to_z(captions[:: -(-len(captions) // MAX_READ)]),
        num_train=int(is_train.sum()),
        num_validation=int(is_validation.sum()),
        num_unused=int((is_readable & ~is_validation & own_test).sum()),
        own_split=has_own_split(catalogue, is_readable, is_validation),
        num_leaks=len(leaked),
        leaks=[names(pair) for pair in zip(leaked[:NUM_NAMED], same, strict=False)],
        classes=classes_of(catalogue.labels[number] for number in readable.tolist()),
        problems={
            what: {"count": count, "names": list(catalogue.problems.names.get(what, []))}
            for what, count in catalogue.problems.counts.most_common()
        },
    )
    return replace(report, advice=[*advise(report), *remarks(catalogue, records), *unseen_classes(files)])


def unseen_classes(files: Files) -> Iterator[Advice]:
    """Classes that are for validation only."""
    labels, split = files.catalogue.labels, files.sides.tolist()
    learned = {label for label, side in zip(labels, split, strict=True) if side == TRAIN}
    asked = Counter(label for label, side in zip(labels, split, strict=True) if side == VALIDATION and label)
    if unseen := sorted({*asked} - learned):
        classes = listed([f"`{brief(name)}`" for name in unseen])
        images = f"{sum(asked[name] for name in unseen):,} of {plural(asked.total(), 'validation image')}"
        why = "" if any(files.catalogue.sides) else "; copies of an image stay together in the split"
        what = f"{images} are of classes without training images: {classes}"
        yield Advice(None, None, what + why, "unseen")


def remarks(catalogue: Catalogue, records: np.ndarray) -> Iterator[Advice]:
    """What captions are, or captions and images have in common, that may not be meant."""
    sides = np.sort([records["width"], records["height"]], axis=0)
    num_long, num_known = int((sides[1] > LONG * sides[0]).sum()), int((sides[0] > 0).sum())
    if num_long > MAX_LONG * num_known:
        what = f"{percent(num_long / num_known)} of the images have an aspect ratio above {LONG}:1"
        yield Advice(None, None, f"{what}; the model sees only the centre square of each", "cropped")
    thumbs = records["thumb"][sides[0] > 0].reshape(num_known, THUMB * THUMB, 3)
    num_plain = int((np.ptp(thumbs, axis=1) <= 1).all(axis=1).sum()) if num_known else 0
    if num_plain > MAX_PLAIN * num_known:
        what = f"{percent(num_plain / num_known)} of the images are of a single colour"
        yield Advice(None, None, f"{what}; transparent parts are drawn on white", "plain")
    some = catalogue.captions[:: -(-len(catalogue.captions) // NUM_COMPARED)]
    captions = list(dict.fromkeys(caption for own in some for caption in own))
    if owners := {"classes": "folders", "names": "files"}.get(catalogue.format):
        few = listed([f"`{brief(caption)}`" for caption in captions])
        yield Advice(None, None, f"the captions are the names of the {owners}: {few}", "names")
    folders = folders_of(catalogue.names) if catalogue.format in ("names", "metadata") else []
    if are_classes(folders):
        few = listed([f"`{brief(folder)}`" for folder in sorted({*folders} - {""})])
        what = f"the images are in folders that may be classes: {few}; `--format classes` uses their names"
        yield Advice(None, None, what, "classes")
    names = catalogue.names[:: -(-len(catalogue.names) // NUM_COMPARED)]
    is_shared = catalogue.format in ("txt", "metadata", "classes") and 2 * len(captions) < sum(map(len, some))
    if is_shared and are_captions(names, min_words=1):
        few = listed([f"`{brief(name)}`" for name in map(caption_in_name, names) if name])
        what = f"most images share their caption, but not their file name: {few}; try `--format names`"
        yield Advice(None, None, what, "shared")
    if column := catalogue.guessed_column:
        what = f"the captions are in the column `{brief(column)}`: {listed([f'`{brief(c)}`' for c in captions[:3]])}"
        yield Advice(None, None, f"{what}; `--caption-column` chooses another", "column")
    if catalogue.tables:
        used, *unused = (f"`{brief(table)}`" for table in catalogue.tables)
        what = f"the captions are in the table {used}, not in {listed(unused)}"
        yield Advice(None, None, f"{what}; to use another table, pass its file", "table")
    marks = Counter(mark[0] for mark in map(LANGUAGE_MARK.match, captions) if mark)
    ordered, edge = sorted(captions), len(captions) // 40
    ends = ordered[edge], ordered[-1 - edge]  # 95% lie between, and share what these share
    shared = re.sub(r"[^\W_]*$", "", os.path.commonprefix(ends)[:200])  # noqa: RUF071 - not paths
    if len(marks) > 1 and 2 * marks.total() > len(captions):
        what = f"the captions are in {len(marks)} languages, marked by prefixes such as `{brief(next(iter(marks)))}`"
        yield Advice(None, None, f"{what}, which are learned as words; keep one language", "languages")
    elif len(captions) >= MIN_COMPARED and len(shared) > 2:
        what = f"nearly all captions begin with `{brief(shared)}`"
        yield Advice(None, None, f"{what}; remove it unless it describes the images", "prefix")


def has_own_split(catalogue: Catalogue, is_readable: np.ndarray, is_validation: np.ndarray) -> bool:
    """Whether validation is what the dataset itself calls so, or its test set."""
    for name in ("validation", "test"):
        own = np.array([side == name for side in catalogue.sides], dtype=bool) & is_readable
        if own.any():
            return bool((own == is_validation).all())
    return False


def sizes_of(records: np.ndarray, known: np.ndarray, names: list[str]) -> dict[str, Any]:
    """Of the originals, in pixels."""
    widths, heights = records["width"][known], records["height"][known]
    order = np.lexsort((widths, widths.astype(np.int64) * heights))
    ends = {
        end: {"name": shortened_path(names[known[at]]), "width": int(widths[at]), "height": int(heights[at])}
        for end, at in (("smallest", order[0]), ("largest", order[-1]))
    }
    return {"width": percentiles(widths, (5, 50, 95)), "height": percentiles(heights, (5, 50, 95)), **ends}


def classes_of(labels: Iterable[str | None]) -> dict[str, Any] | None:
    counts = Counter(label for label in labels if label is not None)
    if not counts:
        return None
    by_size = sorted(counts.items(), key=lambda item: (item[1], item[0]))
    smallest, largest = ([shortened(label), count] for label, count in (by_size[0], by_size[-1]))
    return {"num": len(counts), "smallest": smallest, "largest": largest}


def script_of(caption: str) -> str:
    """The script of most letters; "Emoji" or "none" where there are no letters."""
    if caption.isascii():
        return "Latin" if any(map(str.isalpha, caption)) else "none"
    scripts = Counter(map(script_of_letter, filter(str.isalpha, caption)))
    if scripts:
        return max(sorted(scripts), key=scripts.__getitem__)
    return "Emoji" if EMOJI.search(caption) else "none"


@lru_cache(maxsize=100_000)
def script_of_letter(letter: str) -> str:
    """By its Unicode name; a letter in a circle or of full width counts as the plain one."""
    plain = unicodedata.normalize("NFKD", letter)[0]
    first = unicodedata.name(plain, "OTHER").split()[0]
    return SCRIPT_NAMES.get(first, first.capitalize())


def lines(report: Report) -> Iterator[tuple[str, str]]:
    """The report as rows of a table, a label and a sentence; what would say nothing is omitted."""
    num_all = report.num_images + report.num_unreadable
    readable = f" of {num_all:,} readable" if report.num_unreadable else ", all readable"
    links = f"; {report.num_links:,} of them are links to others" if report.num_links else ""
    yield "images", f"{report.num_images:,}{readable}{links}"
    least, mean, most = (report.captions_per_image[key] for key in ("min", "mean", "max"))
    each = f"{'one' if most == 1 else f'{most:,}'} per image"
    if least != most:
        each = f"{least:,} to {most:,} per image, {mean:.1f} on average"
    yield "captions", f"{report.num_captions:,}, {each}"
    if report.columns:
        yield "columns", listed([f"{what} column `{brief(name)}`" for what, name in report.columns.items()])
    if report.classes:
        (rarest, few), (commonest, many) = report.classes["smallest"], report.classes["largest"]
        ends = f"from {few:,} (`{brief(rarest)}`) to {many:,} images (`{brief(commonest)}`)"
        yield "classes", f"{report.classes['num']:,}, {ends}"
    if sizes := report.sizes:
        small, large = (f"{s['width']} x {s['height']}" for s in (sizes["smallest"], sizes["largest"]))
        median = f"{sizes['width']['50']} x {sizes['height']['50']} (median); {small} to {large}"
        yield "size", median if small != large else f"all {small}"
    if report.num_small:
        yield "small", f"{plural(report.num_small, 'image')} smaller than the training resolution; enlarged"
    kinds = listed([f"{count:,} {name}" for name, count in report.formats.items()])
    traits = listed([f"{n:,} {trait.replace('_', ' ')}" for trait, n in report.traits.items() if n])
    if kinds or traits:
        yield "kinds", "; ".join(filter(None, (kinds, traits)))
    tokens = report.caption_tokens
    lengths = f"{tokens['50']} (median), 99% have up to {tokens['99']}, the longest {tokens['100']}"
    cut = f"{percent(report.share_cut)} of the captions are" if report.share_cut else "no caption is"
    yield "tokens", f"{lengths}; {cut} truncated at {report.text_length}"
    if set(report.scripts) - {"Latin"}:
        shares = [f"{s} {percent(n / report.num_captions)}" for s, n in report.scripts.items()]
        yield "scripts", listed(shares)
    whose = "the dataset's own split" if report.own_split else "by a hash of the content"
    unused = f"; {report.num_unused:,} for testing, not used" if report.num_unused else ""
    yield "split", f"{report.num_train:,} training, {report.num_validation:,} validation ({whose}){unused}"
    if report.duplicate_images:
        num = report.num_duplicate_images
        copies = "1 copy or near-duplicate" if num == 1 else f"{num:,} copies or near-duplicates"
        yield "duplicates", f"{copies}: {equal(report.duplicate_images)}"
    if report.duplicate_captions:
        caption, count = next(iter(report.duplicate_captions.items()))
        share = percent(report.share_shared_captions)
        yield "shared", f"{share} of the captions belong to several images, `{brief(caption)}` to {count:,}"
    if report.num_leaks:
        leaked = plural(report.num_leaks, "validation image")
        yield "leaks", f"{leaked} also in training: {equal(report.leaks)}"
    if report.num_unreadable:
        whys = [f"`{shortened_path(name, 40)}` {why}" for name, why in report.unreadable_why.items()]
        yield "unreadable", f"{report.num_unreadable:,}: {listed(whys)}"
    for what, found in report.problems.items():
        shown = f"`{shortened_path(found['names'][0], 40)}` {what}" if found["names"] else what
        yield "noticed", shown + (f", and {found['count'] - 1:,} more" if found["count"] > 1 else "")


def equal(groups: list[list[str]]) -> str:
    shown = [" = ".join(f"`{shortened_path(name, 40)}`" for name in names[:3]) for names in groups]
    return listed([one + " = ..." * (len(names) > 3) for one, names in zip(shown, groups, strict=True)])


def listed(items: list[str]) -> str:
    """The first three, and whether there are more."""
    return ", ".join(items[:3]) + (", ..." if len(items) > 3 else "")


def brief(name: str) -> str:
    return shortened(name, 40)
