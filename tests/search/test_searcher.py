"""Searching a real index of a small model: what a query means, what is found, and what no longer exists."""

import os
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import picture_folder
from PIL import Image, ImageDraw
from test_update import make_run

from lapclip.cli import run_command
from lapclip.data import split
from lapclip.data.decode import read_whole
from lapclip.data.files import read_file
from lapclip.errors import UserError
from lapclip.search.index import Entry, Filter, find_index, parse_date
from lapclip.search.searcher import (
    NotIndexed,
    Searcher,
    Term,
    duplicates,
    parse_query,
    read_record,
)
from lapclip.units import finished

COPIED, CHANGED = "05.jpg", "07.jpg"


class Made(NamedTuple):
    root: Path  # where `runs/small` is
    photos: Path
    cache: Path
    model: str


def make_index(root: Path) -> Made:
    """A model and an index of 12 images in one folder and two in another: a copy, and one saved again."""
    photos, cache = root / "photos", root / "cache"
    picture_folder(photos / "a", 12)
    (photos / "b").mkdir()
    (photos / "b" / "copy.jpg").write_bytes((photos / "a" / COPIED).read_bytes())
    with Image.open(photos / "a" / CHANGED) as image:
        image.resize((50, 38)).save(photos / "b" / "smaller.jpg", quality=90)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("LAPCLIP_CACHE", str(cache))
        make_run(root / "runs" / "small", 0)
        folders = [str(photos / "a"), str(photos / "b")]
        assert run_command(["index", *folders, "--model", "small", "--json"]) == 0
    return Made(root, photos, cache, str(root / "runs" / "small"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_thread):
    return make_index(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def embedder(made):
    from lapclip.embedder import load

    return load(made.model)


@pytest.fixture
def searcher(made, embedder, monkeypatch):
    monkeypatch.setenv("LAPCLIP_CACHE", str(made.cache))
    with closing(find_index(made.model)) as index:
        yield Searcher(index, embedder)


@pytest.fixture
def red_cat(searcher):
    return searcher.vector(parse_query("red cat"))


def names(matches) -> list[str]:
    return [os.path.basename(match.entry.path) for match in matches]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("red bicycle", [(1, "red bicycle")]),
        ("beach - people + sunset", [(1, "beach"), (-1, "people"), (1, "sunset")]),
        ("a red-haired dog", [(1, "a red-haired dog")]),
        ("C++ book -50%", [(1, "C++ book -50%")]),
        ("- people", [(-1, "people")]),
        ("beach - + sea -", [(1, "beach"), (1, "sea")]),
        ("  beach \t-\n many   people ", [(1, "beach"), (-1, "many people")]),
        (" - + - ", []),
    ],
)
def test_signs_between_spaces_separate_and_others_belong_to_words(text, terms):
    assert parse_query(text) == [Term(sign, words=words) for sign, words in terms]


def test_everything_is_found_once_best_first(searcher, embedder, red_cat):
    found = searcher.search(red_cat, top=100).matches
    assert len({match.entry.id for match in found}) == 13 and sum(1 + len(m.copies) for m in found) == 14
    cosines = embedder.similarity([match.entry.path for match in found], ["red cat"])[:, 0]
    assert cosines.tolist() == sorted(cosines.tolist(), reverse=True)
    np.testing.assert_allclose(cosines, [match.score for match in found], atol=1e-5)


def test_terms_are_added_and_subtracted_as_unit_rows(searcher, embedder, made):
    image = (made.photos / "a" / "03.jpg").read_bytes()
    entry = searcher.search(searcher.vector([Term(1, image=image)]), top=1).matches[0].entry
    terms = [*parse_query("red cat - tree + old"), Term(1, image=image), Term(-1, entry=entry.id)]
    cat, tree, old = embedder.texts(["red cat", "tree", "old"])
    expected = cat - tree + old  # the image and the same image of the index cancel out
    vector = searcher.vector(terms)
    np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-4)
    assert vector.dtype == np.float32 and np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(searcher.vector(parse_query("- tree")), -tree, atol=1e-5)
    embedded = searcher.combine(terms, [cat, tree, old], embedder.images([made.photos / "a" / "03.jpg"]))
    np.testing.assert_allclose(embedded, vector, atol=1e-5)


@pytest.mark.parametrize(
    ("terms", "kind", "said"),
    [
        (parse_query("cat - cat"), UserError, "cancel out"),
        ([Term(1, entry=99999)], NotIndexed, "no image 99999"),
        ([Term(1, image=b"this is no image")], UserError, "is text, not an image"),
    ],
)
def test_a_query_that_means_nothing_is_refused(searcher, terms, kind, said):
    with pytest.raises(kind, match=said):
        searcher.vector(terms)
    with pytest.raises(UserError, match="not finite"):
        searcher.combine([Term(1, words="cat")], [np.full(searcher.index.width, np.nan, np.float32)], ())


def test_limits_are_exact(searcher, made, red_cat):
    every = searcher.search(red_cat, top=100).matches

    def found(**limits):
        return searcher.search(red_cat, **limits).matches

    least = every[5].score
    assert found(top=4) == every[:4] and found(top=100, min_score=least) == every[:6]
    assert found(top=3, min_score=least) == every[:3] and found(min_score=1.0) == []
    assert found(top=100, without=[every[0].entry.id, 99999]) == every[1:]
    in_b = found(top=100, wanted=Filter(str(made.photos / "b")))
    assert sorted(names(in_b)) == ["copy.jpg", "smaller.jpg"] and not any(match.copies for match in in_b)
    assert found(top=100, wanted=Filter(str(made.root))) == every
    with pytest.raises(NotIndexed, match="no image under"):
        found(wanted=Filter("/nowhere"))
    (copied,) = [match for match in every if match.copies]
    left = found(top=100, without=[copied.copies[0].id])
    assert len(left) == 12 and not {COPIED, "copy.jpg"} & {*names(left)}, "with an image its copies"


def test_dates_and_sizes_limit_before_the_best_are_taken(searcher, red_cat):
    every = searcher.search(red_cat, top=100).matches
    last = max(entry.mtime_ns for match in every for entry in (match.entry, *match.copies))

    def found(top: int, **limits):
        return searcher.search(red_cat, top=top, wanted=Filter(**limits)).matches

    assert found(100, after_ns=last + 1) == found(100, before_ns=0) == found(100, min_side=54) == []
    assert found(100, after_ns=0, before_ns=last + 1, min_side=50) == every
    larger = [match for match in every if match.entry.width >= 53]
    assert found(5, min_side=53) == larger[:5] and len(larger) == len(every) - 1
    late = found(1, after_ns=last)[0]
    assert {entry.mtime_ns for entry in (late.entry, *late.copies)} == {last}, (
        "copies that are older are not listed"
    )


def test_a_date_is_when_its_day_month_or_year_begins():
    assert parse_date("2024") == parse_date("2024-01") == parse_date("2024-01-01") < parse_date("2024-01-02")
    assert parse_date("9999") > parse_date("2262") > 0
    for text in ("", "24", "2024-13", "2024-1", "yesterday", "2024-05-32", "20240501"):
        with pytest.raises(UserError, match="is not a date"):
            parse_date(text)


def test_missing_files_are_counted_and_copies_or_the_next_matches_take_their_place(searcher, made, red_cat):
    every = searcher.search(red_cat, top=100).matches
    gone = [Path(match.entry.path) for match in every[:3] if not match.copies]
    copied = made.photos / "a" / COPIED
    vector = searcher.vector([Term(1, image=copied.read_bytes())])
    for path in {*gone, copied}:
        path.rename(path.with_suffix(".away"))
    try:
        results = searcher.search(red_cat, top=2)
        left = [match for match in every if Path(match.entry.path) not in gone]
        assert [match.entry.row for match in results.matches] == [match.entry.row for match in left[:2]]
        assert results.num_gone >= len(gone) - 1 and results.unreachable == ()
        results = searcher.search(vector, top=1)
        assert names(results.matches) == ["copy.jpg"] and results.num_gone == 1
    finally:
        for path in {*gone, copied}:
            path.with_suffix(".away").rename(path)
    assert searcher.search(red_cat, top=100).matches == every


def test_an_unreachable_folder_is_omitted_and_named(searcher, made, red_cat):
    (made.photos / "a").rename(made.photos / "unplugged")
    try:
        results = searcher.search(red_cat, top=100)
        assert sorted(names(results.matches)) == ["copy.jpg", "smaller.jpg"]
        assert results.unreachable == (str(made.photos / "a"),) and results.num_gone == 0
    finally:
        (made.photos / "unplugged").rename(made.photos / "a")


def test_a_large_index_is_searched_with_a_graph_that_is_built_once(searcher, embedder, red_cat):
    exact = searcher.search(red_cat, top=5)
    assert not searcher.needs_graph
    large = Searcher(searcher.index, embedder, max_exact=5)
    assert large.needs_graph and large.search(red_cat, top=5) == exact
    assert [(now.done, now.total) for now in large.build_graph()][-1] == (13, 13)
    assert not large.needs_graph and large.search(red_cat, top=5) == exact
    again = Searcher(searcher.index, embedder, max_exact=5)
    assert not again.needs_graph and again.graph is not None and again.search(red_cat, top=5) == exact


def test_duplicates_are_images_whose_contents_agree_and_not_those_merely_alike(searcher, made):
    def found(min_score: float) -> list[list[str]]:
        return [names(group) for group in finished(duplicates(searcher.index, min_score))]

    assert found(1.0) == [[COPIED, "copy.jpg"]]
    every = finished(duplicates(searcher.index))  # whatever the model makes of them
    assert [names(group) for group in every] == [[COPIED, "copy.jpg"], [CHANGED, "smaller.jpg"]]
    (_, copy), (first, smaller) = every
    assert copy.is_identical and copy.difference == 0 and not smaller.is_identical
    assert 0 < smaller.difference < 0.02 and first.score == pytest.approx(1) and 1 > smaller.score > 0.9
    path = made.photos / "b" / "copy.jpg"
    before = path.read_bytes()
    path.write_bytes((made.photos / "a" / "01.jpg").read_bytes())  # since it was indexed
    try:
        assert [COPIED, "copy.jpg"] not in found(-1.0), "what is there now is compared"
    finally:
        path.write_bytes(before)


def test_pages_with_other_text_are_no_near_duplicates_and_a_page_saved_again_is(tmp_path):
    def page(words: str) -> Image.Image:
        sheet = Image.new("RGB", (800, 1600), "white")
        ImageDraw.Draw(sheet).text((20, 60), words, "black", font_size=28)
        return sheet

    page("see you at the station").save(tmp_path / "1.png")
    page("the invoice is overdue").save(tmp_path / "2.png")
    page("see you at the station").save(tmp_path / "3.jpg", quality=50)
    page("see you at the station").resize((400, 800)).save(tmp_path / "4.png")
    sizes = ((800, 1600), (800, 1600), (800, 1600), (400, 800))
    entries = [
        Entry(0, str(path), 0, *size, 0) for path, size in zip(sorted(tmp_path.iterdir()), sizes, strict=True)
    ]
    records = np.array([read_record(entry) for entry in entries])
    assert len(set(split.content_groups(records).tolist())) == 1, "at 8 x 8 pixels they look alike"
    groups = split.content_groups(records)
    groups = split.told_apart(records, groups, lambda n, size: read_whole(read_file(entries[n].path), size))
    assert split.duplicates(records, groups) == [[0, 2, 3]]


def test_drawings_that_are_blank_on_white_are_duplicates_only_as_equal_files(tmp_path):
    entries = []
    for number, corner in enumerate((10, 30, 50, 10)):
        drawing = Image.new("RGBA", (100, 100))
        ImageDraw.Draw(drawing).ellipse((corner, 10, corner + 40, 70), "white")
        drawing.save(tmp_path / f"{number}.png")
        entries.append(Entry(0, str(tmp_path / f"{number}.png"), 0, 100, 100, 0))
    records = np.array([read_record(entry) for entry in entries])
    groups = split.content_groups(records)
    groups = split.told_apart(records, groups, lambda n, size: read_whole(read_file(entries[n].path), size))
    assert split.duplicates(records, groups) == [[0, 3]]
