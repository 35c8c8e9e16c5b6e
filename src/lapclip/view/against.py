"""Whether one model finds more than another, in words and numbers: paired tests on the same images and captions."""

from collections.abc import Mapping
from typing import Any

from lapclip.errors import code
from lapclip.view.intervals import Range
from lapclip.view.section import Table

WAYS = (("text_to_image", "words -> image"), ("image_to_text", "image -> words"))
KS = (1, 5, 10)
SURE = 0.05  # a difference with a smaller p-value is called one


def is_told(test: Mapping[str, Any]) -> bool:
    """Whether a difference can be told from chance: p-value and interval both say so."""
    low, high = test["interval"]
    return bool(test["p_value"] < SURE and (low > 0 or high < 0))


def p_words(p_value: float) -> str:
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"


def tests_of(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every difference that was measured, by its name."""
    against = result.get("against") or {}
    tests = [
        (f"{name} @{k}", against[way][f"recall@{k}"]) for way, name in WAYS if way in against for k in KS
    ]
    return tests + ([("zero-shot", against["zero_shot"]["top1"])] if against.get("zero_shot") else [])


def comparison(result: Mapping[str, Any]) -> list[str]:
    """One sentence for each of the ways at its first place, and whether the other places say more."""
    tests = dict(tests_of(result))
    if not tests:
        return []
    names = code(result["model"]), code(result["against"]["model"])
    what = {
        "words -> image @1": "the right image first",
        "image -> words @1": "the right words first",
        "zero-shot": "the right class",
    }
    return [in_a_sentence(*names, what[name], test) for name, test in tests.items() if name in what]


def in_a_sentence(model: str, other: str, what: str, test: Mapping[str, Any]) -> str:
    points = 100 * test["difference"]
    if not is_told(test):
        return (
            f"No difference can be told between {model} and {other} in how often they find {what}: "
            f"{points:+.1f} points (95% sure: {points_between(test, signed=True)}; {p_words(test['p_value'])})."
        )
    return (
        f"{model} finds {what} {abs(points):.1f} points {'more' if points > 0 else 'less'} often than {other} "
        f"(95% sure: {points_between(test)}; {p_words(test['p_value'])})."
    )


def points_between(test: Mapping[str, Any], *, signed: bool = False) -> str:
    low, high = (100 * end for end in test["interval"])
    if signed:
        return f"{low:+.1f} to {high:+.1f}"
    return " to ".join(f"{end:.1f}" for end in sorted((abs(low), abs(high))))


def comparison_tables(result: Mapping[str, Any]) -> list[Table]:
    rows = [
        (
            name,
            f"{100 * test['difference']:+.1f}",
            points_between(test, signed=True),
            f"{test['p_value']:.2g}",
            "yes" if is_told(test) else "no",
        )
        for name, test in tests_of(result)
    ]
    if not rows:
        return []
    note = (
        "The same images and captions for both. The interval is of resampled images; p is how often so large a "
        "difference comes about when it is left to chance, image by image, which model gets which result."
    )
    header = ("", "points", "95% sure", "p", "told from chance")
    return [Table(f"Compared with {code(result['against']['model'])}", header, rows, note)]


def comparison_ranges(result: Mapping[str, Any]) -> list[Range]:
    return [Range(name, test["difference"], test["interval"], mark=0.0) for name, test in tests_of(result)]
