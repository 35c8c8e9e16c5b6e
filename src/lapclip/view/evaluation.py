"""What `lapclip eval` measured, in words and as a document, with paired tests against another model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lapclip.errors import code, shortened
from lapclip.files import write_atomically
from lapclip.units import count, listed, percent, plural
from lapclip.view.document import (
    Document,
    Found,
    HeatMap,
    Query,
    Range,
    Ranges,
    Section,
    Table,
    columns_of,
    find,
)
from lapclip.view.html import as_html
from lapclip.view.learning import difficulty_section
from lapclip.view.lines import interval
from lapclip.view.summary import recall_words

WAYS = (("text_to_image", "text → image"), ("image_to_text", "image → text"))
KS = (1, 5, 10)
SIGNIFICANT = 0.05  # a difference with a smaller p-value is called one
NUM_TEMPLATES = 3  # that are written out
MAX_CLASSES = 100  # in the table
MAX_NAMES = 40  # of classes beside the confusion matrix; more would not fit
MAX_UNREADABLE = 20  # images that are named


def write_evaluation(path: Path, result: Mapping[str, Any], images: Mapping[int, bytes]) -> None:
    """Writes the page; `images` are small square JPEGs by their index in the source."""
    write_atomically(path, evaluation_page(result, images))


def evaluation_page(result: Mapping[str, Any], images: Mapping[int, bytes]) -> str:
    facts = [shortened(str(result["source"]), 80)] if result.get("source") else []
    facts += [plural(result["num_images"], "image"), plural(result["num_captions"], "caption")]
    sections = sections_of(result, images)
    title, footer = shortened(str(result["model"]), 100), "Written by `lapclip eval`."
    return as_html(Document(title, "lapclip eval", " · ".join(facts), sections, tiles_of(result), footer))


def tiles_of(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers one asks for first."""
    tiles = []
    for (way, name), k in ((WAYS[0], 1), (WAYS[0], 10), (WAYS[1], 1)):
        found, chance = percent(result[way][f"recall@{k}"]), percent(result[way][f"chance@{k}"])
        tiles.append((f"{name} recall@{k}", found, f"chance {chance}"))
    rank = f"{result['text_to_image']['median_rank']:,g}"
    tiles.append(("median rank", rank, f"among {count(pool_size(result))}"))
    if zero_shot := result.get("zero_shot"):
        tiles.append(("zero-shot", percent(zero_shot["top1"]), f"chance {percent(zero_shot['chance'])}"))
    return tiles


def sections_of(result: Mapping[str, Any], images: Mapping[int, bytes]) -> list[Section]:
    """In the order they are read."""
    words = [recall_words(result, pool_size(result)), *zero_shot_words(result)[:1], *comparison(result)[:1]]
    return [
        Section("Summary", words),
        recall_section(result),
        Section(
            "Zero-shot", zero_shot_words(result), tables=class_tables(result), heat_maps=confusion(result)
        ),
        comparison_section(result),
        difficulty_section({str(result["model"]): result["negatives"]} if result.get("negatives") else {}),
        mistakes_section(result, images),
        Section("Left out", points=left_out(result)),
    ]


def pool_size(result: Mapping[str, Any]) -> int:
    return int(find(result, "pool", "size") or result["num_images"])


def how_measured(result: Mapping[str, Any]) -> str:
    """The candidates and the protocol, in words."""
    size, num_pools = pool_size(result), int(find(result, "pool", "num_pools") or 1)
    if num_pools > 1:
        among = f"Each query is ranked within one of {num_pools:,} pools of {size:,} images; the figures are means."
    else:
        among = f"Each query is ranked among {plural(size, 'image')}."
    if result.get("protocol") == "published":
        return f"{among} Only the image that a caption was written for is correct, as in published tables."
    return f"{among} Equal captions and equal images count as one: any of them is correct."


def recall_section(result: Mapping[str, Any]) -> Section:
    ranges = [
        Range(f"{name} @{k}", found[f"recall@{k}"], found.get(f"interval@{k}"), found[f"chance@{k}"])
        for name, found in ((name, result[way]) for way, name in WAYS)
        for k in KS
    ]
    rows = [(r.name, r.value, interval(r.interval), r.mark) for r in ranges]
    ranks = [f"{result[way]['median_rank']:,g} ({name})" for way, name in WAYS]
    columns = columns_of(", recall: share, 95% interval: number, chance: share")
    table = Table("Recall@k", columns, rows, f"Median rank of the correct one: {listed(ranks)}.")
    drawn = Ranges("Recall with its 95% interval; | is chance", ranges)
    return Section("Recall", [how_measured(result)], tables=[table], ranges=[drawn])


def zero_shot_words(result: Mapping[str, Any]) -> list[str]:
    """Naming images by their class, without having been taught the classes."""
    zero_shot = result.get("zero_shot")
    if not zero_shot:
        return []
    where = f", 95% interval {interval(ends)}" if (ends := zero_shot.get("interval@1")) else ""
    first = (
        f"Of {plural(zero_shot['num_images'], 'image')}, {percent(zero_shot['top1'])} get the name of their class "
        f"among {zero_shot['num_classes']:,} (chance {percent(zero_shot['chance'])}{where})"
    )
    if zero_shot["num_classes"] > 5:
        first += f"; for {percent(zero_shot['top5'])} it is among the first five"
    said = [first + "."]
    if templates := zero_shot.get("templates"):
        more = [f"{len(templates) - NUM_TEMPLATES} more templates"] * (len(templates) > NUM_TEMPLATES)
        quoted = [code(shortened(str(template), 60)) for template in templates[:NUM_TEMPLATES]]
        said.append(f"Asked as {listed(quoted + more)}.")
    return said


def class_tables(result: Mapping[str, Any]) -> list[Table]:
    if not result.get("zero_shot"):
        return []
    classes = sorted(result["zero_shot"]["classes"], key=lambda c: (c["top1"], str(c["label"])))
    rows = [
        (shortened(str(c["label"]), 60), c["num_images"], c["top1"])
        + ((shortened(str(c["taken_for"]), 60), c["num_taken_for"]) if c.get("taken_for") else ("", ""))
        for c in classes[:MAX_CLASSES]
    ]
    left = len(classes) - len(rows)
    note = f"The {len(rows)} with the lowest accuracy; {left:,} more are in `--json`." if left else ""
    columns = columns_of("class, images: count, correct: share, classified as, times: count")
    return [Table("By class, lowest accuracy first", columns, rows, note)]


def confusion(result: Mapping[str, Any]) -> list[HeatMap]:
    """The confusion matrix."""
    found = (result.get("zero_shot") or {}).get("confusion") or {}
    if not found.get("counts"):
        return []
    labels, counts = [shortened(str(label), 16) for label in found["labels"]], found["counts"]
    shares: list[list[float | None]] = [[n / sum(row) if n else None for n in row] for row in counts]
    hints = [
        [f"{labels[y]} as {labels[x]}: {n:,} of {sum(row):,}" if n else "" for x, n in enumerate(row)]
        for y, row in enumerate(counts)
    ]
    right = sum(row[place] for place, row in enumerate(counts))
    about = (
        "A row is a class, a column the class it was given; the stronger the colour, the larger the share of the row. "
        f"The framed diagonal is correct: {right:,} of {sum(map(sum, counts)):,} images."
    )
    names = labels if len(labels) <= MAX_NAMES else [""] * len(labels)
    return [HeatMap("Confusion matrix", about, names, [], shares, hints, has_diagonal=True)]


def is_told(test: Mapping[str, Any]) -> bool:
    """Whether a difference is significant: p-value and interval both say so."""
    low, high = test["interval"]
    return bool(test["p_value"] < SIGNIFICANT and (low > 0 or high < 0))


def tests_of(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every difference that was measured, by its name."""
    against = result.get("against") or {}
    tests = [
        (f"{name} @{k}", against[way][f"recall@{k}"]) for way, name in WAYS if way in against for k in KS
    ]
    return tests + ([("zero-shot", against["zero_shot"]["top1"])] if against.get("zero_shot") else [])


def comparison(result: Mapping[str, Any]) -> list[str]:
    """One sentence for recall@1 in each direction, and one for the zero-shot accuracy."""
    against = result.get("against") or {}
    if not against:
        return []
    what = {"text_to_image": "the correct image first", "image_to_text": "the correct caption first"}
    tests = [(found, against[way]["recall@1"]) for way, found in what.items() if way in against]
    if against.get("zero_shot"):
        tests.append(("the correct class", against["zero_shot"]["top1"]))
    names = code(result["model"]), code(against["model"])
    return [in_a_sentence(*names, found, test) for found, test in tests]


def in_a_sentence(model: str, other: str, what: str, test: Mapping[str, Any]) -> str:
    points = 100 * test["difference"]
    p_value = "p < 0.001" if test["p_value"] < 0.001 else f"p = {test['p_value']:.2g}"
    if not is_told(test):
        return (
            f"No significant difference between {model} and {other} in how often they find {what}: "
            f"{points:+.1f} points (95% interval {points_between(test, signed=True)}; {p_value})."
        )
    return (
        f"{model} finds {what} {abs(points):.1f} points {'more' if points > 0 else 'less'} often than {other} "
        f"(95% interval {points_between(test)}; {p_value})."
    )


def points_between(test: Mapping[str, Any], *, signed: bool = False) -> str:
    low, high = (100 * end for end in test["interval"])
    if signed:
        return f"{low:+.1f} to {high:+.1f}"
    return " to ".join(f"{end:.1f}" for end in sorted((abs(low), abs(high))))


def comparison_section(result: Mapping[str, Any]) -> Section:
    tests = tests_of(result)
    if not tests:
        return Section("Comparison", comparison(result))
    rows = [
        (name, f"{100 * t['difference']:+.1f}", points_between(t, signed=True), f"{t['p_value']:.2g}", is_told(t))
        for name, t in tests
    ]  # fmt: skip
    note = (
        "The same images and captions for both. The interval is of resampled images; p is how often a difference this "
        "large arises when each image's results are assigned to the two models at random."
    )
    columns = columns_of(", points: number, 95% interval: number, p: number, significant")
    table = Table(f"Compared with {code(result['against']['model'])}", columns, rows, note)
    ranges = [Range(name, test["difference"], test["interval"], 0.0) for name, test in tests]
    drawn = Ranges("Difference in points, with its 95% interval", ranges, is_difference=True)
    return Section("Comparison", comparison(result), tables=[table], ranges=[drawn])


def mistakes_section(result: Mapping[str, Any], images: Mapping[int, bytes]) -> Section:
    """Each mistake as its caption, the correct image, and what was found instead."""
    queries = []
    for mistake in result.get("mistakes") or []:
        found = [
            Found("image/jpeg", images.get(place.get("index", -1), b""), place["score"], place is mistake)
            for place in (mistake, *mistake["found"])
        ]
        queries.append(Query(shortened(str(mistake["caption"])), mistake["rank"], found))
    words = (
        f"The worst {len(queries):,}: the correct image, then what was ranked before it, with the cosines."
    )
    return Section("Mistakes", [words] if queries else [], queries=queries)


def left_out(result: Mapping[str, Any]) -> list[str]:
    names = list(result.get("unreadable") or [])
    more = [f"and {len(names) - MAX_UNREADABLE:,} more"] * (len(names) > MAX_UNREADABLE)
    return [shortened(str(name)) for name in names[:MAX_UNREADABLE]] + more
