"""The data doctor: everything worth knowing about a source before training on it, and what to do about it. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lapclip.data.advice import DataFacts, advise, counted, percent
from lapclip.data.catalogue import NUM_NAMED, Catalogue
from lapclip.data.decode import FORMATS, TRAITS
from lapclip.data.scripts import languages_of, scripts_of, share_outside_a_to_z
from lapclip.data.split import duplicates
from lapclip.errors import shortened

CLIP_TEXT_LENGTH = 77
NUM_CAPTIONS_NAMED = 20
MOST_READ = 100_000  # captions whose words are looked at, from all over the source
PERCENTILES = (50, 90, 95, 99, 100)


@dataclass(frozen=True)
class Report:
    """What `lapclip data check --json` prints; counts are of all, names of the first hundred."""

    num_images: int  # that can be read and have captions
    num_captions: int  # of these
    captions_per_image: dict[str, float]
    num_unreadable: int
    unreadable: list[str]
    unreadable_why: dict[str, str]
    num_duplicate_images: int  # beyond the first of each
    duplicate_images: list[list[str]]
    num_duplicate_captions: int  # equal but for case, beyond the first image of each
    duplicate_captions: dict[str, int]
    num_distinct_captions: int
    share_shared_captions: float
    tokenizer: str
    text_length: int
    caption_tokens: dict[str, int]
    caption_tokens_cut: dict[str, float]
    sizes: dict[str, Any] | None  # None where no image was looked at
    num_small: int | None  # smaller than images are trained on; None where that is not known
    traits: dict[str, int]
    formats: dict[str, int]
    scripts: dict[str, int]
    languages: dict[str, float]
    share_outside_a_to_z: float
    num_train: int
    num_validation: int
    num_unused: int  # the dataset's own test images
    own_split: bool
    num_leaks: int  # validation images that are in training too
    leaks: list[list[str]]
    classes: dict[str, Any] | None
    problems: dict[str, dict[str, Any]]
    advice: list[str]


def examine(
    catalogue: Catalogue,
    records: np.ndarray,
    unreadable: dict[int, str],
    groups: np.ndarray,
    is_validation: np.ndarray,
    lengths: np.ndarray,
    *,
    text_length: int,
    vocab: str,
    image_size: int | None = None,
) -> Report:
    """Everything about a source; `lengths` are tokens of all captions in order, start and end included."""
    names = catalogue.names
    is_readable = records["row"] >= 0
    readable = np.flatnonzero(is_readable)
    num_each = np.array([len(own) for own in catalogue.captions], dtype=np.int64)
    lengths = lengths[np.repeat(is_readable, num_each)]
    captions = [caption for number in readable.tolist() for caption in catalogue.captions[number]]
    some = captions[:: -(-len(captions) // MOST_READ) or 1]
    num_each = num_each[readable]

    own_test = np.array([side == "test" for side in catalogue.sides], dtype=bool)
    is_train = is_readable & ~is_validation & ~own_test
    is_validation = is_readable & is_validation
    leaks = find_leaks(groups, is_train, is_validation)
    copies = duplicates(records, groups)
    shared, num_distinct, num_sharing = shared_captions(captions, np.repeat(readable, num_each))
    is_known = records["width"][readable] > 0
    report = Report(
        num_images=len(readable),
        num_captions=len(captions),
        captions_per_image=spread(num_each),
        num_unreadable=len(names) - len(readable),
        unreadable=[shortened(names[number]) for number in list(unreadable)[:NUM_NAMED]],
        unreadable_why={shortened(names[n]): why for n, why in list(unreadable.items())[:NUM_NAMED]},
        num_duplicate_images=len(readable) - len(np.unique(groups[readable])),
        duplicate_images=[[shortened(names[n]) for n in same[:NUM_NAMED]] for same in copies[:NUM_NAMED]],
        num_duplicate_captions=num_sharing - len(shared),
        duplicate_captions={
            shortened(captions[place]): count for place, count in shared[:NUM_CAPTIONS_NAMED]
        },
        num_distinct_captions=num_distinct,
        share_shared_captions=num_sharing / max(len(captions), 1),
        tokenizer=vocab,
        text_length=text_length,
        caption_tokens=percentiles(lengths, PERCENTILES),
        caption_tokens_cut={
            str(most): float((lengths > most).mean()) if len(lengths) else 0.0
            for most in sorted({CLIP_TEXT_LENGTH, text_length})
        },
        sizes=sizes_of(records, readable[is_known], names) if is_known.any() else None,
        num_small=count_small(records[readable[is_known]], image_size),
        traits={
            trait: int((records["traits"][readable] >> bit & 1).sum()) for bit, trait in enumerate(TRAITS)
        },
        formats={
            FORMATS[number]: count
            for number, count in Counter(records["format"][readable[is_known]].tolist()).most_common()
        },
        scripts=dict(scripts_of(captions).most_common()),
        languages=languages_of(some),
        share_outside_a_to_z=share_outside_a_to_z(some),
        num_train=int(is_train.sum()),
        num_validation=int(is_validation.sum()),
        num_unused=int((is_readable & ~is_validation & own_test).sum()),
        own_split=has_own_split(catalogue, is_readable, is_validation),
        num_leaks=len(leaks),
        leaks=[[shortened(names[one]), shortened(names[other])] for one, other in leaks[:NUM_NAMED]],
        classes=classes_of([catalogue.labels[number] for number in readable.tolist()]),
        problems={
            what: {"count": count, "names": list(catalogue.problems.names.get(what, []))}
            for what, count in catalogue.problems.counts.most_common()
        },
        advice=[],
    )
    return replace(report, advice=[advice.sentence for advice in advise(facts_of(report))])


def facts_of(report: Report) -> DataFacts:
    """What advice is made from."""
    classes = report.classes
    return DataFacts(
        num_train=report.num_train,
        num_validation=report.num_validation,
        num_unreadable=report.num_unreadable,
        num_duplicate_images=report.num_duplicate_images,
        num_leaks=report.num_leaks,
        text_length=report.text_length,
        tokenizer=report.tokenizer,
        tokens=report.caption_tokens,
        share_cut=report.caption_tokens_cut[str(report.text_length)],
        share_shared=report.share_shared_captions,
        num_distinct_captions=report.num_distinct_captions,
        scripts=report.scripts,
        share_outside_a_to_z=report.share_outside_a_to_z,
        num_classes=classes["num"] if classes else 0,
        class_ratio=classes["largest"][1] / classes["smallest"][1] if classes else 1.0,
    )


def percentiles(numbers: np.ndarray, which: Sequence[int]) -> dict[str, int]:
    """Numbers that so many percent do not exceed, each one of those given; none of nothing."""
    values = np.percentile(numbers, which, method="inverted_cdf") if len(numbers) else ()
    return {str(percent): int(value) for percent, value in zip(which, values, strict=False)}


def spread(numbers: np.ndarray) -> dict[str, float]:
    if not len(numbers):
        return {"min": 0, "mean": 0.0, "max": 0}
    return {"min": int(numbers.min()), "mean": round(float(numbers.mean()), 2), "max": int(numbers.max())}


def shared_captions(captions: list[str], images: np.ndarray) -> tuple[list[tuple[int, int]], int, int]:
    """Captions of several images, as a place where each is said and how many images, the most frequent first;
    how many distinct captions there are; and how often one of several images is said."""
    # Numbers instead of the words: millions of captions have to fit beside the images.
    words = np.fromiter((hash(c.casefold()) for c in captions), dtype=np.int64, count=len(captions))
    order = np.lexsort((images, words))
    is_new = np.diff(words[order], prepend=0) != 0
    is_new[:1] = True
    is_other_image = is_new | (np.diff(images[order], prepend=-1) != 0)
    number = np.cumsum(is_new) - 1
    counts = np.bincount(number[is_other_image])
    first = np.minimum.reduceat(order, np.flatnonzero(is_new)) if len(order) else order
    several = np.flatnonzero(counts > 1)
    shared = sorted(
        zip(first[several].tolist(), counts[several].tolist(), strict=True), key=lambda s: (-s[1], s[0])
    )
    return shared, len(counts), int(counts[several].sum())


def find_leaks(groups: np.ndarray, is_train: np.ndarray, is_validation: np.ndarray) -> list[tuple[int, int]]:
    """Each validation image that training shows as well, with the first one that it is the same as."""
    trained, first = np.unique(groups[is_train], return_index=True)
    validation = np.flatnonzero(is_validation)
    validation = validation[np.isin(groups[validation], trained)]
    same = np.flatnonzero(is_train)[first[np.searchsorted(trained, groups[validation])]]
    return list(zip(validation.tolist(), same.tolist(), strict=True))


def has_own_split(catalogue: Catalogue, is_readable: np.ndarray, is_validation: np.ndarray) -> bool:
    """Whether validation is what the dataset itself calls so, or its test set."""
    for name in ("validation", "test"):
        own = np.array([side == name for side in catalogue.sides], dtype=bool) & is_readable
        if own.any():
            return bool((own == (is_validation & is_readable)).all())
    return False


def sizes_of(records: np.ndarray, known: np.ndarray, names: list[str]) -> dict[str, Any]:
    """Of the originals, in pixels."""
    widths, heights = records["width"][known], records["height"][known]
    areas = widths.astype(np.int64) * heights

    ends = {
        end: {
            "name": shortened(names[known[place]]),
            "width": int(widths[place]),
            "height": int(heights[place]),
        }
        for end, place in (("smallest", areas.argmin()), ("largest", areas.argmax()))
    }
    return {"width": percentiles(widths, (5, 50, 95)), "height": percentiles(heights, (5, 50, 95)), **ends}


def count_small(records: np.ndarray, image_size: int | None) -> int | None:
    if image_size is None:
        return None
    return int((np.minimum(records["width"], records["height"]) < image_size).sum())


def classes_of(labels: list[str | None]) -> dict[str, Any] | None:
    counts = Counter(label for label in labels if label is not None)
    if not counts:
        return None
    by_size = sorted(counts.items(), key=lambda item: (item[1], item[0]))
    smallest, largest = by_size[0], by_size[-1]
    return {
        "num": len(counts),
        "smallest": [shortened(smallest[0]), smallest[1]],
        "largest": [shortened(largest[0]), largest[1]],
    }


def lines(report: Report) -> list[tuple[str, str]]:
    """The report as rows of a table, a label and a sentence; what says nothing is left out."""
    return [(label, sentence) for label, sentence in all_lines(report) if sentence]


def all_lines(report: Report) -> Iterator[tuple[str, str]]:
    yield "pictures", images_line(report)
    yield "captions", captions_line(report)
    if report.classes:
        (least, few), (most, many) = report.classes["smallest"], report.classes["largest"]
        yield (
            "classes",
            f"{report.classes['num']:,}, from {few:,} (`{brief(least)}`) to {many:,} images (`{brief(most)}`)",
        )
    if report.sizes:
        width, height = report.sizes["width"]["50"], report.sizes["height"]["50"]
        ends = [f"{s['width']} x {s['height']}" for s in (report.sizes["smallest"], report.sizes["largest"])]
        yield (
            "size",
            f"{width} x {height} (median); {ends[0]} to {ends[1]}"
            if ends[0] != ends[1]
            else f"all {ends[0]}",
        )
    if report.num_small:
        yield (
            "small",
            f"{counted(report.num_small, 'picture')} with fewer pixels than training looks at; enlarged",
        )
    kinds = listed(f"{count:,} {name}" for name, count in report.formats.items())
    traits = listed(f"{n:,} {trait.replace('_', ' ')}" for trait, n in report.traits.items() if n)
    yield "kinds", "; ".join(filter(None, (kinds, traits)))
    yield "tokens", tokens_line(report)
    if set(report.scripts) - {"Latin"}:
        yield "scripts", listed(f"{s} {percent(n / report.num_captions)}" for s, n in report.scripts.items())
    yield "language", listed(f"{language} {percent(share)}" for language, share in report.languages.items())
    whose = "the dataset's own split" if report.own_split else "held out by content"
    unused = f"; {report.num_unused:,} for testing, not used" if report.num_unused else ""
    yield "split", f"{report.num_train:,} to train, {report.num_validation:,} to validate ({whose}){unused}"
    yield "duplicates", duplicates_line(report)
    if report.duplicate_captions:
        words, count = next(iter(report.duplicate_captions.items()))
        yield (
            "same words",
            f"{percent(report.share_shared_captions)} of the captions are said of several images, "
            f"`{brief(words)}` of {count:,}",
        )
    if report.num_leaks:
        pairs = (f"`{brief(one)}` = `{brief(other)}`" for one, other in report.leaks)
        yield (
            "leaks",
            f"{report.num_leaks:,} to validate that training shows too: {listed(pairs, report.num_leaks)}",
        )
    if report.num_unreadable:
        whys = (f"`{brief(name)}` {why}" for name, why in report.unreadable_why.items())
        yield "unreadable", f"{report.num_unreadable:,}: {listed(whys, report.num_unreadable)}"
    for what, found in report.problems.items():
        shown = f"`{brief(found['names'][0])}` {what}" if found["names"] else what
        yield "noticed", shown + (f", and so {found['count'] - 1:,} more" if found["count"] > 1 else "")


def images_line(report: Report) -> str:
    if not report.num_unreadable:
        return f"{report.num_images:,}, all readable"
    return f"{report.num_images:,} of {report.num_images + report.num_unreadable:,} readable"


def captions_line(report: Report) -> str:
    least, mean, most = (report.captions_per_image[key] for key in ("min", "mean", "max"))
    if least == most:
        return f"{report.num_captions:,}, {'one' if most == 1 else f'{most:,}'} for each image"
    return f"{report.num_captions:,}, {least:,} to {most:,} for each image, {mean:.1f} on average"


def tokens_line(report: Report) -> str:
    tokens = report.caption_tokens
    if not tokens:
        return ""
    share_cut = report.caption_tokens_cut[str(report.text_length)]
    cut = f"{percent(share_cut)} of the captions are cut" if share_cut else "no caption is cut"
    lengths = f"{tokens['50']} (median), 99% have up to {tokens['99']}, the longest {tokens['100']}"
    return f"{lengths}; {cut} at {report.text_length}"


def duplicates_line(report: Report) -> str:
    if not report.duplicate_images:
        return ""
    same = (" = ".join(f"`{brief(name)}`" for name in names[:3]) for names in report.duplicate_images)
    copies = "1 copy" if report.num_duplicate_images == 1 else f"{report.num_duplicate_images:,} copies"
    return f"{copies}: {listed(same, len(report.duplicate_images))}"


def listed(items: Iterator[str], total: int | None = None, most: int = 3) -> str:
    """The first few, and whether there are more."""
    shown = list(items)
    return ", ".join(shown[:most]) + (", ..." if (total or len(shown)) > most else "")


def brief(name: str) -> str:
    return shortened(name, 40)
