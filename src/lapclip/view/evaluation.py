"""What `lapclip eval` measured, in words and as a document, with paired tests against another model."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from lapclip.errors import code, shortened, shortened_path
from lapclip.runs.history import KS
from lapclip.units import count, listed, percent, plural
from lapclip.view.document import Document, Found, HeatMap, Query, Range, Ranges, Section, Table, columns_of
from lapclip.view.html import as_html
from lapclip.view.learning import difficulty_section
from lapclip.view.lines import WAYS, interval
from lapclip.view.report import recall_words

IN_WORDS = {
    "text → image @1": "the correct image first",
    "image → text @1": "the correct caption first",
    "zero-shot": "the correct class",
}
SIGNIFICANT = 0.05  # a difference with a smaller p-value is called one
NUM_TEMPLATES = 3  # that are written out
MAX_CLASSES = 100  # in the table
MAX_NAMES = 40  # of classes beside the confusion matrix; more would not fit
MAX_UNREADABLE = 20  # images that are named


def evaluation_page(result: Mapping[str, Any], images: Mapping[int, bytes]) -> str:
    """The page; `images` are small square JPEGs by their index in the source."""
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
    compared, classified = comparison_section(result), zero_shot_words(result)
    words = [recall_words(result, pool_size(result)), *classified[:1], *compared.words[:1]]
    names = [shortened_path(str(name)) for name in result.get("unreadable") or []]
    more = [f"and {len(names) - MAX_UNREADABLE:,} more"] * (len(names) > MAX_UNREADABLE)
    return [
        Section("Summary", words),
        recall_section(result),
        Section("Zero-shot", classified, tables=class_tables(result), heat_maps=confusion(result)),
        compared,
        difficulty_section({str(result["model"]): result["negatives"]} if result.get("negatives") else {}),
        mistakes_section(result, images),
        Section("Omitted images", points=names[:MAX_UNREADABLE] + more),
    ]


def pool_size(result: Mapping[str, Any]) -> int:
    return int(result.get("pool", {}).get("size") or result["num_images"])


def how_measured(result: Mapping[str, Any]) -> str:
    """The candidates and the protocol, in words."""
    size, num_pools = pool_size(result), int(result.get("pool", {}).get("num_pools") or 1)
    if num_pools > 1:
        among = f"Each query is ranked within one of {num_pools:,} pools of {size:,} images; the figures are means."
    else:
        among = f"Each caption is compared with {plural(size, 'image')}, each image with all their captions."
    if result.get("protocol") == "published":
        return f"{among} Only the image that a caption was written for is correct, as in published tables."
    return f"{among} Of equal captions and equal images, any is correct."


def recall_section(result: Mapping[str, Any]) -> Section:
    ranges = []
    for (way, name), k in product(WAYS, KS):
        found, ends, chance = (result[way].get(f"{what}@{k}") for what in ("recall", "interval", "chance"))
        ranges.append(Range(f"{name} @{k}", found, ends, chance))
    rows = [(r.name, r.value, interval(r.interval), r.mark) for r in ranges]
    ranks = [f"{result[way]['median_rank']:,g} ({name})" for way, name in WAYS]
    columns = columns_of(", recall: share, 95% interval: number, chance: share")
    table = Table("Recall@k", columns, rows, f"Median rank of the correct one: {listed(ranks)}.")
    drawn = Ranges("Recall with its 95% interval; | is chance", ranges)
    return Section("Recall", [how_measured(result)], tables=[table], ranges=[drawn])


def zero_shot_words(result: Mapping[str, Any]) -> list[str]:
    """Naming images by their class, from the class names alone, and from a few labelled images of each."""
    zero_shot = result.get("zero_shot")
    if not zero_shot:
        return []
    where = f", 95% interval {interval(ends)}" if (ends := zero_shot.get("interval@1")) else ""
    first = (
        f"Of {plural(zero_shot['num_images'], 'image')}, {percent(zero_shot['top1'])} are assigned the correct "
        f"class among {zero_shot['num_classes']:,} (chance {percent(zero_shot['chance'])}{where})"
    )
    if zero_shot["num_classes"] > 5:
        first += f"; for {percent(zero_shot['top5'])} it is among the first five"
    said = [first + "."]
    if templates := zero_shot.get("templates"):
        more = [f"{len(templates) - NUM_TEMPLATES} more templates"] * (len(templates) > NUM_TEMPLATES)
        quoted = [code(shortened(str(template), 60)) for template in templates[:NUM_TEMPLATES]]
        said.append(f"Prompts: {listed(quoted + more)}.")
    if result.get("few_shot"):
        return said + few_shot_words(result["few_shot"])
    needs = "two different images of most classes, and not too many classes"
    return [*said, f"No few-shot accuracy: it needs {needs}."]


def few_shot_words(few_shot: Mapping[str, Any]) -> list[str]:
    learned, same = [], []
    for one in few_shot["results"]:
        num = one.get("num_smaller_classes", 0)
        fewer = f"; {num} class{'' if num == 1 else 'es'} with fewer" if num else ""
        how = f"({interval(one['range'])}{fewer})"
        learned.append(f"{percent(one['top1'])} with {one['examples_per_class']} {how}")
        same.append(percent(one["zero_shot"]))
    drawn = f"These are means and ranges of {few_shot['num_draws']} draws"
    said = f"Few-shot, by labelled images per class: {listed(learned)}."
    return [said, f"{drawn}; zero-shot on the same test images: {listed(same)}."]


def class_tables(result: Mapping[str, Any]) -> list[Table]:
    if not result.get("zero_shot"):
        return []
    classes = result["zero_shot"]["classes"]
    classes = sorted(classes, key=lambda c: (c["top1"], -c["num_images"], str(c["label"])))
    rows = []
    for c in classes[:MAX_CLASSES]:
        other = (shortened(str(c["taken_for"]), 60), c["num_taken_for"]) if c.get("taken_for") else ("", "")
        rows.append((shortened(str(c["label"]), 60), c["num_images"], c["top1"], *other))
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
        "Rows are correct classes, columns predicted ones; the stronger the colour, the larger the share of the row. "
        f"The framed diagonal is correct: {right:,} of {sum(map(sum, counts)):,} images."
    )
    names = labels if len(labels) <= MAX_NAMES else [""] * len(labels)
    return [HeatMap("Confusion matrix", about, names, [], shares, hints, has_diagonal=True)]


def comparison_section(result: Mapping[str, Any]) -> Section:
    """Every difference from another model that was measured; those that matter most also as a sentence."""
    against = result.get("against") or {}
    tests = {f"{name} @{k}": against[way][f"recall@{k}"] for way, name in WAYS if way in against for k in KS}
    if against.get("zero_shot"):
        tests["zero-shot"] = against["zero_shot"]["top1"]
    if not tests:
        return Section("Comparison")
    model, other = code(result["model"]), code(against["model"])
    words, rows = [], []
    for name, test in tests.items():
        points, ends = 100 * test["difference"], " to ".join(f"{100 * end:+z.1f}" for end in test["interval"])
        low, high = test["interval"]
        is_significant = test["p_value"] < SIGNIFICANT and (low > 0 or high < 0)
        rows.append((name, f"{points:+z.1f}", ends, f"{test['p_value']:.2g}", is_significant))
        p_value = "p < 0.001" if test["p_value"] < 0.001 else f"p = {test['p_value']:.2g}"
        if (what := IN_WORDS.get(name)) and is_significant:
            often = f"{abs(points):.1f} points {'more' if points > 0 else 'less'} often"
            words.append(f"{model} finds {what} {often} than {other} (95% interval {ends}; {p_value}).")
        elif what:
            alike = f"No significant difference between {model} and {other} in how often they find {what}"
            words.append(f"{alike}: {points:+z.1f} points (95% interval {ends}; {p_value}).")
    note = (
        "The same images and captions for both. p is how often a difference this large arises when each image's "
        "results are assigned to the two models at random; the interval has the differences that this test does not "
        "rule out."
    )
    columns = columns_of(", points: number, 95% interval: number, p: number, significant")
    ranges = [Range(name, test["difference"], test["interval"], 0.0) for name, test in tests.items()]
    drawn = Ranges("Difference in points, with its 95% interval", ranges, is_difference=True)
    table = Table(f"Compared with {other}", columns, rows, note)
    return Section("Comparison", words, tables=[table], ranges=[drawn])


def mistakes_section(result: Mapping[str, Any], images: Mapping[int, bytes]) -> Section:
    """Each mistake as its caption, the correct image, and what was found instead."""
    queries = []
    for mistake in result.get("mistakes") or []:
        found = [
            Found("image/jpeg", images.get(place.get("index", -1), b""), place["score"], place is mistake)
            for place in (mistake, *mistake["found"])
        ]
        queries.append(Query(shortened(str(mistake["caption"])), mistake["rank"], found))
    words = f"The worst {len(queries):,}: the correct image, then those ranked before it, with their scores."
    return Section("Mistakes", [words] if queries else [], queries=queries)
