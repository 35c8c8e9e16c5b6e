"""The data doctor counts what is there, names what is wrong, and advises only what the numbers support."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lapclip.config import SETTINGS, DataConfig
from lapclip.data.advice import DataFacts, advise, share_outside_a_to_z
from lapclip.data.catalogue import Catalogue, Gathering
from lapclip.data.decode import FORMATS, RECORD, TRAITS
from lapclip.data.doctor import Report, examine, lines, remarks, script_of
from lapclip.data.files import FileReader
from lapclip.data.open import Files, open_source
from lapclip.data.pack import Pack
from lapclip.data.pairs import TRAIN, VALIDATION
from lapclip.units import finished


def catalogue_of(*captions: list[str], sides=None, labels=None) -> Catalogue:
    gathering = Gathering()
    for n, own in enumerate(captions):
        gathering.add(f"{n}.jpg", own, side=sides and sides[n], label=labels and labels[n])
    return gathering.catalogue("photos", "names", FileReader([f"{n}.jpg" for n in range(len(captions))]))


def records_for(catalogue: Catalogue) -> np.ndarray:
    records = np.zeros(len(catalogue.names), RECORD)
    records["row"] = np.arange(len(records))
    records["width"], records["height"] = 500, 375
    records["thumb"][..., 0] = np.arange(records["thumb"].shape[2])
    return records


def checked(
    catalogue: Catalogue, records=None, unreadable=None, groups=None, validation=(), **options
) -> Report:
    records = records_for(catalogue) if records is None else records
    files = Files("photos", catalogue, None)
    files.pack = Pack(Path("pack"), 72, records, unreadable or {})
    files.groups = np.arange(len(records)) if groups is None else np.array(groups)
    files.sides = np.where(np.isin(np.arange(len(records)), validation), VALIDATION, TRAIN)
    lengths = np.array([len(c.split()) + 2 for own in catalogue.captions for c in own])
    return examine(files, lengths, **({"text_length": 32, "tokenizer": "bpe", "image_size": 64} | options))


def settings_of(**facts) -> dict[str | None, object]:
    """Advised values by setting; what is said without one is under None."""
    found = advise(DataFacts(**({"num_train": 10_000, "num_validation": 500} | facts)))
    said = " ".join(advice.why for advice in found if not advice.setting)
    return {None: said} | {advice.setting: advice.value for advice in found if advice.setting}


def test_images_and_captions_are_counted_without_what_cannot_be_read():
    catalogue = catalogue_of(["a dog", "two dogs"], ["a cat"], ["a " * 40], ["a bird"], [""])
    records = records_for(catalogue)
    records["row"][2] = -1
    report = checked(catalogue, records, {2: "is empty"}, validation=[1])
    assert report.problems["has an empty caption"] == {"count": 1, "names": ["4.jpg"]}
    assert (report.num_images, report.num_captions, report.num_unreadable) == (3, 4, 1)
    assert report.unreadable == ["2.jpg"] and report.unreadable_why == {"2.jpg": "is empty"}
    assert report.captions_per_image == {"min": 1, "mean": 1.33, "max": 2}
    assert (report.num_train, report.num_validation) == (2, 1)
    assert report.caption_tokens["100"] == 4, "the long caption belongs to the broken image"


def test_equal_captions_count_across_images_whatever_their_case_and_once_for_each_image():
    report = checked(catalogue_of(["A dog", "a DOG"], ["a dog", "a cat"], ["a bird"], ["a cat"], ["a dog"]))
    assert report.num_duplicate_captions == 3, "`a dog` of two more images, `a cat` of one"
    assert list(report.duplicate_captions.values()) == [3, 2]
    assert next(iter(report.duplicate_captions)).casefold() == "a dog"
    assert report.num_distinct_captions == 3


def test_an_image_that_the_datasets_own_split_has_on_both_sides_is_a_leak():
    sides = ["train", "train", "validation", "validation", "test"]
    catalogue = catalogue_of(*[[f"caption {n}"] for n in range(5)], sides=sides)
    report = checked(catalogue, groups=[0, 1, 1, 2, 0], validation=[2, 3])
    assert report.own_split and report.num_leaks == 1 and report.leaks == [["2.jpg", "1.jpg"]]
    assert (report.num_train, report.num_validation, report.num_unused) == (2, 2, 1)
    assert any("training" in advice.why for advice in report.advice)


def test_captions_that_would_be_cut_are_a_share_at_both_lengths_and_classes_are_counted():
    report = checked(catalogue_of(*[["word " * 10]] * 8, ["word " * 50], ["word " * 100]), validation=[1])
    assert report.caption_tokens_cut == {"32": 0.2, "77": 0.1}
    assert report.caption_tokens == {"50": 12, "90": 52, "95": 102, "99": 102, "100": 102}
    assert not report.own_split and report.num_leaks == 0
    labels = ["cat"] * 30 + ["dog"] * 2
    report = checked(catalogue_of(*[[f"a photo of a {label}"] for label in labels], labels=labels))
    assert report.classes == {"num": 2, "smallest": ["dog", 2], "largest": ["cat", 30]}


def test_sizes_formats_and_traits_are_of_the_originals():
    catalogue = catalogue_of(["a"], ["b"], ["c"])
    records = records_for(catalogue)
    records["width"], records["height"] = [500, 40, 800], [400, 30, 600]
    records["format"] = [FORMATS.index("JPEG"), FORMATS.index("PNG"), FORMATS.index("JPEG")]
    records["traits"] = [0, 1 << TRAITS.index("alpha"), 1 << TRAITS.index("rotated")]
    report = checked(catalogue, records, image_size=64)
    assert report.sizes["smallest"] == {"name": "1.jpg", "width": 40, "height": 30}
    assert report.sizes["largest"]["name"] == "2.jpg" and report.sizes["width"]["50"] == 500
    assert report.formats == {"JPEG": 2, "PNG": 1} and report.num_small == 1
    assert report.traits["alpha"] == report.traits["rotated"] == 1 and report.traits["cmyk"] == 0
    assert "cropped" not in report.as_json()["advice_kinds"]
    records["width"], records["height"] = [600, 200, 600], [200, 600, 200]
    report = checked(catalogue, records)
    assert "cropped" in report.as_json()["advice_kinds"] and "all" not in dict(lines(report))["size"]
    records["width"] = records["height"] = 0  # as of images that are not decoded
    report = checked(catalogue, records)
    assert report.sizes is None and not report.num_small and report.formats == {}


def test_the_rows_name_what_is_wrong_and_leave_out_what_is_not():
    sound = checked(catalogue_of(*[[f"a dog number {n}"] for n in range(9)]), validation=[1, 2])
    assert {"duplicates", "leaks", "unreadable", "classes", "noticed"}.isdisjoint(dict(lines(sound)))
    assert dict(lines(sound))["images"] == "9, all readable"
    catalogue = catalogue_of(["a dog"], ["a dog"], ["a cat"])
    records = records_for(catalogue)
    records["row"][2] = -1
    report = checked(catalogue, records, {2: "is empty"}, groups=[0, 0, 1])
    assert report.num_duplicate_images == 1 and report.duplicate_images == [["0.jpg", "1.jpg"]]
    rows = dict(lines(report))
    assert rows["duplicates"] == "1 copy or near-duplicate: `0.jpg` = `1.jpg`"
    assert rows["unreadable"] == "1: `2.jpg` is empty"
    assert rows["images"] == "2 of 3 readable"


def test_a_hostile_name_cannot_move_the_cursor():
    catalogue = catalogue_of(["a dog"], ["a cat"])
    catalogue.names[0] = "\x1b[2J\r" + "x" * 5000 + "/dog.jpg"
    records = records_for(catalogue)
    records["row"][0] = -1
    report = checked(catalogue, records, {0: "is empty"})
    shown = json.dumps(report.as_json(), ensure_ascii=False) + str([*lines(report)])
    assert "\x1b" not in shown and len(shown) < 5000
    assert "x/dog.jpg` is empty" in dict(lines(report))["unreadable"], "of a long path the end is kept"


def test_advice_names_settings_that_exist_and_values_they_take():
    tokens = {"50": 10, "99": 30, "100": 60}
    facts = DataFacts(num_train=50, num_validation=3, text_length=20, caption_tokens=tokens, tokenizer="bpe")
    odd = replace(facts, tokenizer="characters", share_outside_a_to_z=0.5, scripts={"Han": 9})
    found = [advice for advice in advise(facts) + advise(odd) if advice.setting]
    assert {advice.setting for advice in found} == {"batch_size", "text_length", "tokenizer"}
    for advice in found:
        assert SETTINGS[advice.setting].problem(advice.value) is None and advice.why


@pytest.mark.parametrize(
    ("text_length", "p99", "longest", "advised"),
    # Shorter keeps 99 in 100 whole; but batches are no longer than their captions anyway.
    [(48, 27, 46, 32), (48, 27, 30, None), (48, 16, 17, None), (32, 50, 60, 56), (32, 32, 90, None), (32, 5, 40, 16), (32, 300, 500, 77)],
)  # fmt: skip
def test_text_length_keeps_99_in_100_captions_whole(text_length, p99, longest, advised):
    tokens = {"50": 4, "99": p99, "100": longest}
    assert settings_of(text_length=text_length, caption_tokens=tokens).get("text_length") == advised


@pytest.mark.parametrize("num_train", [2, 3, 10, 100, 255, 256])
def test_a_batch_is_at_most_half_of_a_small_source(num_train):
    advised = settings_of(num_train=num_train).get("batch_size")
    assert advised is None if num_train == 256 else 2 <= advised <= max(2, num_train // 2)


def test_bpe_and_softmax_are_advised_only_where_they_help():
    assert settings_of(tokenizer="characters", share_outside_a_to_z=0.3)["tokenizer"] == "bpe"
    assert "tokenizer" not in settings_of(tokenizer="characters", share_outside_a_to_z=0.001)
    assert "tokenizer" not in settings_of(tokenizer="bpe", share_outside_a_to_z=0.9)
    assert settings_of(share_shared_captions=0.9)["loss"] == "softmax"
    assert "loss" not in settings_of(share_shared_captions=0.05)


@pytest.mark.parametrize(
    ("facts", "word"),
    [({"num_train": 300}, "memorised"), ({"num_validation": 50}, "2.0 points"), ({"num_leaks": 3}, "too high"),
     ({"num_duplicate_images": 2000}, "duplicates"), ({"num_unreadable": 900}, "unreadable"),
     ({"classes": {"num": 10, "smallest": ["a", 1], "largest": ["b", 30]}}, "30 times"),
     ({"caption_tokens_cut": {"77": 0.2}}, "truncated")],
)  # fmt: skip
def test_what_would_mislead_is_said(facts, word):
    assert word in settings_of(**facts)[None] and not settings_of()[None]


WORDS = [
    f"{animal} {place}" for animal in ("ein Hund", "la pie", "cats", "Pferde") for place in "abcdefghijkl"
]


@pytest.mark.parametrize(
    ("captions", "kind", "named"),
    [
        ([f"de.utf8={words}" for words in WORDS], "prefix", "`de.utf8=`"),
        (["an exception", *(f"a photo of {words}" for words in WORDS)], "prefix", "`a photo of `"),
        ([*WORDS[:3], *(f"a photo of {words}" for words in WORDS)], "", ""),
        (["ab" + "_a" * 4000], "", ""),
        (
            [f"{mark}{words}" for words in WORDS for mark in ("", "de.utf8=", "pt_BR.utf8=")],
            "languages",
            "2 languages",
        ),
        (WORDS, "", ""),
        (["de.utf8=ein Hund"] * 50, "", ""),
    ],
)
def test_what_captions_begin_with_is_pointed_out_only_if_nearly_all_share_it(captions, kind, named):
    catalogue = replace(catalogue_of(*([caption] for caption in captions)), format="txt")
    found = [*remarks(catalogue, records_for(catalogue))]
    assert [remark.kind for remark in found] == [kind] * bool(kind) and named in "".join(r.why for r in found)


def test_the_script_of_a_caption_is_that_of_its_letters():
    captions = {
        "ein Mädchen": "Latin", "собака бежит": "Cyrillic", "قطة صغيرة": "Arabic", "कुत्ता": "Devanagari",
        "一只狗": "Han", "いぬがはしる": "Kana", "개가 달린다": "Hangul", "🦄🐶": "Emoji",
        "🦄 unicorn": "Latin", "\uff44\uff4f\uff47": "Latin", "123 !": "none", "": "none",
    }  # fmt: skip
    assert {caption: script_of(caption) for caption in captions} == captions
    assert share_outside_a_to_z(["Dog 123 🦄!"]) == 0 and share_outside_a_to_z(["äb", "собы"]) == 5 / 6


def test_folders_that_may_be_classes_are_pointed_out_where_captions_are_names_of_files(tmp_path):
    for number, folder in enumerate(["cats", "dogs"] * 12):
        path = (
            tmp_path
            / "photos"
            / folder
            / f"a {['red', 'small', 'old'][number % 3]} toy {chr(97 + number)}x.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 24), 60 + number).save(path)
    found = finished(open_source(DataConfig(source=str(tmp_path / "photos")), 16)).parts[0].files
    assert found.catalogue.format == "names"
    (advice,) = [one for one in remarks(found.catalogue, found.pack.records) if one.kind == "classes"]
    assert "`cats`, `dogs`" in advice.why and "`--format classes`" in advice.why


def test_images_of_a_single_colour_are_pointed_out(tmp_path):
    """As white icons on transparency, which is drawn on white."""
    folder = tmp_path / "icons"
    folder.mkdir()
    for number in range(12):
        icon = Image.new("RGBA", (24, 24), (255, 255, 255, 0))
        icon.paste((255, 255, 255, 255) if number < 3 else (20 * number, 0, 90, 255), (4, 4, 20, 9 + number))
        icon.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"icon number {number}")
    found = finished(open_source(DataConfig(source=str(folder)), 16)).parts[0].files
    (advice,) = [one for one in remarks(found.catalogue, found.pack.records) if one.kind == "plain"]
    assert advice.why == "25.0% of the images are of a single colour; transparent parts are drawn on white"
