"""The page of `lapclip eval`: says what was measured, needs nothing beside itself, and trusts no text."""

import copy
import io
import re

import pytest
from PIL import Image
from test_report import HOSTILE, Looked, check_in_browser

from lapclip.files import refuse_foreign
from lapclip.view.document import Range, Ranges
from lapclip.view.evaluation import comparison_section, evaluation_page, how_measured, zero_shot_words


def way(one: float, five: float, ten: float) -> dict:
    found = {}
    for k, share in ((1, one), (5, five), (10, ten)):
        found |= {f"recall@{k}": share, f"interval@{k}": [0.9 * share, 1.1 * share], f"chance@{k}": k / 500}
    return found | {"median_rank": 14.0}


def difference(points: float, low: float, high: float, p_value: float) -> dict:
    return {"difference": points / 100, "interval": [low / 100, high / 100], "p_value": p_value}


@pytest.fixture
def result() -> dict:
    """All that can be measured; cats are often taken for dogs."""
    classes = [
        {"label": "cat", "num_images": 8, "top1": 0.25, "taken_for": "dog", "num_taken_for": 6},
        {"label": "dog", "num_images": 4, "top1": 1.0, "taken_for": None, "num_taken_for": 0},
    ]
    same = difference(0.4, -0.8, 1.6, 0.51)
    paired = {"recall@1": difference(3.1, 1.2, 5.0, 0.002), "recall@5": same, "recall@10": same}
    worse = {**paired, "recall@1": difference(-2.0, -3.0, -1.0, 0.0001)}
    mistake = {"caption": "a cat asleep", "picture": "7.jpg", "index": 7, "rank": 41, "score": 0.05}
    return {
        "model": "mine", "source": "photos", "held_out": True, "num_images": 1000, "num_captions": 5000,
        "pool": {"size": 500, "num_pools": 2}, "protocol": "shared",
        "text_to_image": way(0.123, 0.301, 0.45), "image_to_text": way(0.15, 0.34, 0.51),
        "in_batch": {"accuracy": 0.8, "chance": 0.1, "batch_size": 12},
        "negatives": {"easy": 0.95, "medium": 0.8, "hard": 0.6, "chance": 0.1, "num_choices": 10},
        "zero_shot": {
            "top1": 0.5, "top5": 1.0, "chance": 0.5, "num_classes": 2, "num_images": 12, "interval@1": [0.3, 0.7],
            "classes": classes, "confusion": {"labels": ["cat", "dog"], "counts": [[2, 6], [0, 4]]},
            "templates": ["a photo of a {}"],
        },
        "few_shot": {"num_draws": 5, "results": [
            {"examples_per_class": k, "num_images": 12 - k, "top1": top1, "range": [top1 - 0.05, top1 + 0.05], "zero_shot": 0.52}
            for k, top1 in ((1, 0.61), (4, 0.73))
        ]},
        "mistakes": [mistake | {"found": [{"picture": "9.jpg", "index": 9, "score": 0.4}]}],
        "unreadable": ["broken.jpg"],
        "against": {"model": "other", "text_to_image": paired, "image_to_text": worse, "zero_shot": {"top1": same}},
    }  # fmt: skip


@pytest.fixture
def images() -> dict[int, bytes]:
    drawn = {}
    for index, colour in ((7, "red"), (9, "blue")):
        out = io.BytesIO()
        Image.new("RGB", (8, 8), colour).save(out, format="JPEG")
        drawn[index] = out.getvalue()
    return drawn


def test_the_page_says_every_number_that_was_measured(result, images):
    text = " ".join(Looked(evaluation_page(result, images)).text.split())
    for expected in (
        "12.3%", "45.0%", "chance 0.2%", "11.1% to 13.5%", "2 pools of 500 images", "Zero-shot", "50.0%", "30.0% to 70.0%",
        "95.0%", "60.0%", "a cat asleep", "at rank 41", "broken.jpg", "3.1 points more often", "p = 0.002",
        "2.0 points less often", "p < 0.001", "No significant difference", "a photo of a {}",
        "61.0% with 1 (56.0% to 66.0%) and 73.0% with 4 (68.0% to 78.0%)", "5 draws", "same test images: 52.0% and 52.0%",
    ):  # fmt: skip
        assert expected in text, expected


def test_what_was_not_measured_has_no_section(result, images):
    for name in ("zero_shot", "against", "negatives"):
        result[name] = None
    result["mistakes"], result["unreadable"] = [], []
    page = evaluation_page(result, images)
    assert re.findall(r"<h2[^>]*>([^<]+)", page) == ["Summary", "Recall"]


def test_no_text_becomes_an_element_and_nothing_is_loaded(result, images):
    hostile = copy.deepcopy(result)
    hostile["model"] = hostile["source"] = hostile["against"]["model"] = HOSTILE
    hostile["unreadable"] = [HOSTILE]
    hostile["mistakes"][0] |= {"caption": HOSTILE, "picture": HOSTILE}
    hostile["zero_shot"]["classes"][0] |= {"label": HOSTILE, "taken_for": HOSTILE}
    hostile["zero_shot"]["confusion"]["labels"] = [HOSTILE, "dog"]
    hostile["zero_shot"]["templates"] = [HOSTILE + "{}"]
    page = evaluation_page(hostile, images)
    seen, plain = Looked(page), Looked(evaluation_page(result, images))
    assert "script" not in seen.tags
    tags = [
        [tag for tag in one.tags if tag != "code"] for one in (seen, plain)
    ]  # backticks become code, no more
    assert tags[0] == tags[1] and not seen.open
    assert seen.handlers == [] and seen.loads == [] and "img" in seen.tags
    assert "\u202e" not in page and "\x07" not in page
    assert "default-src 'none'" in page and "script-src" not in page


def test_protocol_pool_and_top_five_are_said_where_they_matter(result):
    assert "2 pools of 500" in how_measured(result) and "any is correct" in how_measured(result)
    one = result | {"pool": {"size": 1000, "num_pools": 1}, "protocol": "published"}
    assert "with 1,000 images" in how_measured(one) and "published" in how_measured(one)
    assert "first five" not in zero_shot_words(result)[0], "of two classes"
    result["zero_shot"]["num_classes"] = 10
    assert "100% it is among the first five" in zero_shot_words(result)[0]


@pytest.mark.parametrize(
    ("test", "told"),
    [
        (difference(3, 1, 5, 0.01), True),
        (difference(-3, -5, -1, 0.01), True),
        (difference(3, -1, 7, 0.01), False),
        (difference(3, 1, 5, 0.2), False),
        (difference(0, 0, 0, 1.0), False),
    ],
)
def test_a_difference_is_one_when_interval_and_p_value_say_so(result, test, told):
    result["against"]["text_to_image"]["recall@1"] = test
    assert comparison_section(result).words[0].startswith("No significant") == (not told)


def test_every_range_lies_within_its_axis():
    for first, second in ((Range("a", 1.0, [0.9, 1.0], 0.5), Range("b", 0.0, None, 0.01)),
                          (Range("a", -0.3, [-0.5, 0.1], 0.0), Range("b", 0.02, [0.01, 0.03], 0.0))):  # fmt: skip
        axis = Ranges("title", [first, second])
        assert all(
            0 <= axis.place(end) <= 100 for r in (first, second) for end in (r.value, *(r.interval or ()))
        )
    assert Ranges("title", [Range("a", 0.0, [0.0, 0.0], 0.0)]).place(0.0) == 0


def test_a_confusion_matrix_shows_its_share_by_colour(result, images):
    page = evaluation_page(result, images)
    assert 'title="cat as dog: 6 of 8"' in page and "6 of 12 images" in page
    assert re.findall(r'--strength:(\d+)%"', page) == ["30", "76", "100"]


@pytest.mark.slow
def test_a_browser_shows_it_at_any_width_without_complaint(result, images, tmp_path):
    def check(page):
        assert page.evaluate("[...document.images].every((i) => i.naturalWidth === 8)")

    (tmp_path / "page.html").write_text(evaluation_page(result, images))
    refuse_foreign(tmp_path / "page.html")  # which knows it again
    check_in_browser(tmp_path / "page.html", check)


def test_no_difference_has_no_sign_of_its_own():
    none = {"difference": -0.0001, "interval": [-0.0002, 0.0003], "p_value": 1.0}
    ways = {way: {f"recall@{k}": none for k in (1, 5, 10)} for way in ("text_to_image", "image_to_text")}
    section = comparison_section({"model": "mine", "against": {"model": "other", **ways}})
    assert "-0.0" not in str(section.words) + str([table.rows for table in section.tables])
