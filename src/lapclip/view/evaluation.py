"""How well a model finds, in words and as one HTML page: what `lapclip eval` measured in, sentences and sections out.

The page needs nothing beside itself, runs no script, and trusts no caption, label or name.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lapclip.errors import code, shortened
from lapclip.files import write_atomically
from lapclip.runs.history import find
from lapclip.units import UNKNOWN, count, listed, percent, plural, share
from lapclip.view.against import KS, WAYS, comparison, comparison_ranges, comparison_tables
from lapclip.view.found import Found, Query
from lapclip.view.html import SIGN, query_html, read, said, section_html, slugs, words
from lapclip.view.intervals import Range, draw_confusion, draw_ranges
from lapclip.view.section import Section, Table

NUM_TEMPLATES = 3  # that are written out
MOST_CLASSES = 100  # in the table
MOST_NAMED = 20  # unreadable images
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = """
figure { max-width: 46rem; margin: 1rem 0; }
figure svg.ranges { max-width: 540px; }
svg .range { stroke: var(--c); stroke-width: 5; stroke-opacity: 0.35; stroke-linecap: round; fill: none; }
svg .value { font-weight: 600; fill: var(--ink); }
svg .own { fill: none; stroke: var(--right); }
.confusion { overflow-x: auto; }
.confusion svg { min-width: 22rem; }
#how-often-it-finds table, #comparison table, #zero-shot .n { white-space: nowrap; }
#how-often-it-finds tbody th { white-space: normal; }
"""


def write_evaluation(path: Path, result: Mapping[str, Any], images: Mapping[int, bytes]) -> None:
    """Writes the page; `images` are small square JPEGs by their index in the source."""
    write_atomically(path, evaluation_page(result, images))


def evaluation_page(result: Mapping[str, Any], images: Mapping[int, bytes]) -> str:
    sections = [s for s in sections_of(result) if s.has_content]
    drawn = {
        "How often it finds": ranges_html(
            recall_ranges(result), "Recall, with what is 95% sure; | is chance"
        ),
        "Zero-shot": confusion_html(result),
        "Comparison": ranges_html(comparison_ranges(result), "Difference in points, with what is 95% sure"),
        "Mistakes": "".join(query_html(query) for query in queries_of(result, images)),
    }
    names = slugs([section.title for section in sections])
    links = "".join(
        f'<li><a href="#{name}">{said(section.title)}</a></li>'
        for name, section in zip(names[1:], sections[1:], strict=True)
    )
    parts = [
        section_html(name, section, tiles_of(result) if name == "summary" else ()).removesuffix("</section>")
        + drawn.get(section.title, "")
        + "</section>"
        for name, section in zip(names, sections, strict=True)
    ]
    title = shortened(str(result["model"]), 100)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8">{SIGN}',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark"><title>{said(title)}: lapclip eval</title>',
            f"<style>{read('report.css')}{STYLE}</style></head>",
            '<body><a class="skip" href="#summary">To the summary</a>',
            f'<header><p class="kicker">lapclip eval</p><h1>{said(title)}</h1>',
            f'<p class="about">{words(about(result))}</p></header>',
            f'<main>{parts[0]}\n<nav aria-label="Contents"><ul>{links}</ul></nav>',
            *parts[1:],
            "</main><footer><p>Written by <code>lapclip eval</code>. ",
            "This page is one file and loads nothing.</p></footer>",
            "</body></html>\n",
        ]
    )


def about(result: Mapping[str, Any]) -> str:
    source = [shortened(str(result["source"]), 80)] if result.get("source") else []
    sizes = [plural(result["num_images"], "image"), plural(result["num_captions"], "caption")]
    return " · ".join(source + sizes)


def tiles_of(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers one asks for first."""
    to_image, to_text = result["text_to_image"], result["image_to_text"]
    tiles = [
        (f"words find it {place}", share(to_image[f"recall@{k}"]), f"chance {share(to_image[f'chance@{k}'])}")
        for k, place in ((1, "first"), (10, "in ten"))
    ]
    tiles += [
        ("images find words", share(to_text["recall@1"]), f"chance {share(to_text['chance@1'])}"),
        ("median rank", f"{to_image['median_rank']:,g}", f"among {count(pool_size(result))}"),
    ]
    if zero_shot := result.get("zero_shot"):
        tiles.append(("zero-shot", share(zero_shot["top1"]), f"chance {share(zero_shot['chance'])}"))
    return tiles


def sections_of(result: Mapping[str, Any]) -> list[Section]:
    """In the order they are read; those without content are left out by the page."""
    return [
        Section("Summary", summary(result)),
        Section("How often it finds", [how_measured(result)], tables=[recall_table(result)]),
        Section("Zero-shot", zero_shot_words(result) + mistaken_words(result), tables=class_tables(result)),
        Section("Comparison", comparison(result), tables=comparison_tables(result)),
        difficulty_section(result),
        Section("Mistakes", mistakes_words(result)),
        Section("Left out", points=left_out(result)),
    ]


def summary(result: Mapping[str, Any]) -> list[str]:
    """What it came to, in a few sentences."""
    found = result["text_to_image"]
    said = [
        f"Words find their image among {count(pool_size(result))} first in {share(found['recall@1'])} of cases "
        f"(chance {share(found['chance@1'])}) and within the first ten in {share(found['recall@10'])} "
        f"(chance {share(found['chance@10'])}); images find their words first in "
        f"{share(result['image_to_text']['recall@1'])}."
    ]
    return said + zero_shot_words(result)[:1] + comparison(result)[:1]


def pool_size(result: Mapping[str, Any]) -> int:
    return int(find(result, "pool", "size") or result["num_images"])


def how_measured(result: Mapping[str, Any]) -> str:
    """The pool and the protocol, in words."""
    size, num_pools = pool_size(result), int(find(result, "pool", "num_pools") or 1)
    if num_pools > 1:
        among = f"Each is looked for in one of {num_pools:,} pools of {size:,} images; the figures are means."
    else:
        among = f"Each is looked for among {plural(size, 'image')}."
    if result.get("protocol") == "published":
        return f"{among} Only the image that a caption was written for is right, as in published tables."
    return f"{among} Equal captions and equal images are one: any of them is right."


def recall_table(result: Mapping[str, Any]) -> Table:
    rows = [
        (
            f"{name} @{k}",
            share(found[f"recall@{k}"]),
            between(found.get(f"interval@{k}")),
            share(found[f"chance@{k}"]),
        )
        for name, found in ((name, result[way]) for way, name in WAYS)
        for k in KS
    ]
    ranks = [f"{result[way]['median_rank']:,g} ({name})" for way, name in WAYS]
    note = f"The right one is at place {listed(ranks)} or before it in half of the cases."
    return Table("Recall", ("", "found", "95% sure", "chance"), rows, note)


def between(interval: Sequence[float] | None) -> str:
    return f"{percent(interval[0])} to {percent(interval[1])}" if interval else UNKNOWN


def recall_ranges(result: Mapping[str, Any]) -> list[Range]:
    return [
        Range(
            f"{name} @{k}",
            result[way][f"recall@{k}"],
            result[way].get(f"interval@{k}"),
            mark=result[way][f"chance@{k}"],
        )
        for way, name in WAYS
        for k in KS
    ]


def zero_shot_words(result: Mapping[str, Any]) -> list[str]:
    """Naming images by their class, without having been taught the classes."""
    zero_shot = result.get("zero_shot")
    if not zero_shot:
        return []
    sure = zero_shot.get("interval@1")
    where = f", 95% sure {between(sure)}" if sure else ""
    first = (
        f"Of {plural(zero_shot['num_images'], 'image')}, {share(zero_shot['top1'])} get the name of their class "
        f"among {zero_shot['num_classes']:,} (chance {share(zero_shot['chance'])}{where})"
    )
    if zero_shot["num_classes"] > 5:
        first += f"; for {share(zero_shot['top5'])} it is among the first five"
    said = [first + "."]
    if templates := zero_shot.get("templates"):
        more = [f"{len(templates) - NUM_TEMPLATES} more ways"] * (len(templates) > NUM_TEMPLATES)
        shown = [code(shortened(str(template), 60)) for template in templates[:NUM_TEMPLATES]]
        said.append(f"Asked as {listed(shown + more)}.")
    return said


def mistaken_words(result: Mapping[str, Any], most: int = 3) -> list[str]:
    """The classes that are taken for another one most often."""
    classes = [c for c in (result.get("zero_shot") or {}).get("classes", ()) if c.get("taken_for")]
    classes.sort(key=lambda c: (-c["num_taken_for"] / c["num_images"], -c["num_taken_for"]))
    pairs = [
        f"{code(shortened(str(c['label']), 60))} for {code(shortened(str(c['taken_for']), 60))} "
        f"({c['num_taken_for']:,} of {c['num_images']:,})"
        for c in classes[:most]
    ]
    return [f"Taken for another most: {listed(pairs)}."] if pairs else []


def class_tables(result: Mapping[str, Any]) -> list[Table]:
    if not result.get("zero_shot"):
        return []
    classes = sorted(result["zero_shot"]["classes"], key=lambda c: (c["top1"], str(c["label"])))
    rows = [
        (
            shortened(str(c["label"]), 60),
            count(c["num_images"]),
            share(c["top1"]),
            shortened(str(c["taken_for"]), 60) if c.get("taken_for") else "",
            count(c["num_taken_for"]) if c.get("taken_for") else "",
        )
        for c in classes[:MOST_CLASSES]
    ]
    left = len(classes) - len(rows)
    note = f"The {len(rows)} that are named worst; {left:,} more are in `--json`." if left else ""
    return [
        Table("By class, the worst first", ("class", "images", "right", "taken for", "times"), rows, note)
    ]


def confusion_html(result: Mapping[str, Any]) -> str:
    confusion = (result.get("zero_shot") or {}).get("confusion") or {}
    if not confusion.get("counts"):
        return ""
    drawn = draw_confusion(confusion["labels"], confusion["counts"])
    return (
        '<figure class="confusion"><figcaption><strong>What is taken for what</strong> <span>A row is a class, a '
        "column the name it was given; the stronger the colour, the larger the share of the row. The framed "
        f"diagonal is right.</span></figcaption>{drawn}</figure>"
    )


def ranges_html(ranges: Sequence[Range], title: str) -> str:
    if not ranges:
        return ""
    return f"<figure><figcaption><strong>{said(title)}</strong></figcaption>{draw_ranges(ranges, title)}</figure>"


def difficulty_section(result: Mapping[str, Any]) -> Section:
    measured = result.get("negatives")
    if not measured:
        return Section("By difficulty")
    explained = (
        f"How often words find their own image among {count(measured['num_choices'])}, when the wrong ones are easy, "
        "medium or hard: the thirds of the images whose words are least, somewhat and most alike."
    )
    levels = ("easy", "medium", "hard", "chance")
    row = tuple(share(measured[level]) for level in levels)
    return Section("By difficulty", [explained], tables=[Table("Accuracy by difficulty", levels, [row])])


def mistakes_words(result: Mapping[str, Any]) -> list[str]:
    mistakes = result.get("mistakes") or []
    if not mistakes:
        return []
    return [f"The worst {len(mistakes):,}: the right image, then what was found before it, with the cosines."]


def queries_of(result: Mapping[str, Any], images: Mapping[int, bytes]) -> list[Query]:
    """Each mistake as words, the right image, and what was found instead."""
    return [
        Query(
            f"{shortened(str(mistake['caption']))}",
            mistake["rank"],
            [shown(mistake, images, is_right=True)]
            + [shown(found, images, is_right=False) for found in mistake["found"]],
        )
        for mistake in result.get("mistakes") or []
    ]


def shown(place: Mapping[str, Any], images: Mapping[int, bytes], *, is_right: bool) -> Found:
    return Found("image/jpeg", images.get(place.get("index", -1), b""), place["score"], is_right)


def left_out(result: Mapping[str, Any]) -> list[str]:
    names = list(result.get("unreadable") or [])
    if not names:
        return []
    more = [f"and {len(names) - MOST_NAMED:,} more"] * (len(names) > MOST_NAMED)
    return [f"{shortened(str(name))}" for name in names[:MOST_NAMED]] + more
