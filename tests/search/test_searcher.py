"""Searching a real index of a small model: what is asked for, what is found, and what is no longer there."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import picture_folder
from PIL import Image
from test_index import make_run

from lapclip.cli import run_command
from lapclip.errors import UserError
from lapclip.search.query import Term, parse_words
from lapclip.search.searcher import Searcher
from lapclip.search.store import find_index

COPIED, CHANGED = "05.jpg", "07.jpg"


class Made(NamedTuple):
    root: Path  # where `runs/small` is
    photos: Path
    cache: Path
    model: str


def make_index(root: Path) -> Made:
    """A model and an index of 12 images in one folder and two others in another: a copy, and one saved anew."""
    photos, cache = root / "photos", root / "cache"
    picture_folder(photos / "a", 12)
    (photos / "b").mkdir()
    (photos / "b" / "copy.jpg").write_bytes((photos / "a" / COPIED).read_bytes())
    with Image.open(photos / "a" / CHANGED) as picture:
        picture.resize((50, 38)).save(photos / "b" / "smaller.jpg", quality=90)
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
    with find_index(made.model) as index:
        yield Searcher(index, embedder)


def names(found) -> list[str]:
    return [os.path.basename(one.entry.path) for one in found]


def test_an_image_finds_itself_first_with_a_score_of_one_and_its_copies_as_one(searcher, made):
    for name in ("00.jpg", COPIED):
        data = (made.photos / "a" / name).read_bytes()
        found = searcher.search(searcher.vector([Term(1, picture=data)]), top=3)
        assert found[0].entry.path == str(made.photos / "a" / name)
        assert found[0].score == pytest.approx(1, abs=1e-5)
        assert [copy.path for copy in found[0].copies] == (
            [str(made.photos / "b" / "copy.jpg")] if name == COPIED else []
        )
    assert (found[0].entry.width, found[0].entry.height) == (53, 40)


def test_everything_is_found_once_best_first(searcher, embedder):
    vector = searcher.vector(parse_words("red cat"))
    found = searcher.search(vector, top=100)
    assert len(found) == 13 and sum(1 + len(one.copies) for one in found) == 14
    assert len({one.entry.id for one in found}) == 13
    cosines = embedder.similarity([one.entry.path for one in found], ["red cat"])[:, 0]
    assert cosines.tolist() == sorted(cosines.tolist(), reverse=True)
    np.testing.assert_allclose(cosines, [one.score for one in found], atol=1e-5)


def test_terms_are_added_and_taken_away_as_unit_rows(searcher, embedder, made):
    picture = (made.photos / "a" / "03.jpg").read_bytes()
    entry = searcher.search(searcher.vector([Term(1, picture=picture)]), top=1)[0].entry
    terms = [
        *parse_words("red cat - tree"),
        Term(1, picture=picture),
        Term(-1, entry=entry.id),
        Term(1, words="old"),
    ]
    cat, tree, old = embedder.texts(["red cat", "tree", "old"])
    wanted = cat - tree + old  # the image and what the index knows of it cancel out
    vector = searcher.vector(terms)
    np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=1e-4)
    assert vector.dtype == np.float32 and np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(searcher.vector(parse_words("- tree")), -tree, atol=1e-5)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ([], "nothing is asked"),
        (parse_words("cat - cat"), "cancels itself out"),
        ([Term(1, entry=99999)], "no image `99999`"),
        ([Term(1, picture=b"this is no picture")], "is text, not an image"),
    ],
)
def test_what_cannot_be_asked_is_said(searcher, terms, said):
    with pytest.raises(UserError, match=said):
        searcher.vector(terms)


def test_limits_are_exact(searcher, made):
    vector = searcher.vector(parse_words("red cat"))
    every = searcher.search(vector, top=100)
    assert searcher.search(vector, top=4) == every[:4]
    least = every[5].score
    assert searcher.search(vector, top=100, min_score=least) == every[:6]
    assert searcher.search(vector, top=3, min_score=least) == every[:3]
    assert searcher.search(vector, min_score=1.0) == []
    without = every[0].entry.id
    assert searcher.search(vector, top=100, without=[without, 99999]) == every[1:]
    in_b = searcher.search(vector, top=100, folder=str(made.photos / "b"))
    assert sorted(names(in_b)) == ["copy.jpg", "smaller.jpg"] and not any(one.copies for one in in_b)
    assert searcher.search(vector, top=100, folder=str(made.root)) == every
    with pytest.raises(UserError, match="no image under"):
        searcher.search(vector, folder="/nowhere")


def test_leaving_out_an_image_leaves_out_its_copies(searcher, made):
    (first,) = searcher.search(
        searcher.vector([Term(1, picture=(made.photos / "a" / COPIED).read_bytes())]), top=1
    )
    found = searcher.search(
        searcher.vector([Term(1, entry=first.entry.id)]), top=100, without=[first.copies[0].id]
    )
    assert len(found) == 12 and not {COPIED, "copy.jpg"} & {*names(found)}


def test_what_is_gone_makes_room_for_the_next_and_is_counted(searcher, made):
    vector = searcher.vector(parse_words("red cat"))
    every = searcher.search(vector, top=100)
    gone = [Path(one.entry.path) for one in every[:3] if not one.copies]
    for path in gone:
        path.rename(path.with_suffix(".away"))
    try:
        answer = searcher.ask(vector, top=2)
        left = [one for one in every if Path(one.entry.path) not in gone]
        assert answer.found == left[:2] and answer.num_gone >= len(gone) - 1 and answer.away == ()
    finally:
        for path in gone:
            path.with_suffix(".away").rename(path)
    assert searcher.search(vector, top=100) == every


def test_a_copy_stands_in_for_a_file_that_is_gone(searcher, made):
    path = made.photos / "a" / COPIED
    vector = searcher.vector([Term(1, picture=path.read_bytes())])
    path.rename(path.with_suffix(".away"))
    try:
        answer = searcher.ask(vector, top=1)
        assert names(answer.found) == ["copy.jpg"] and answer.num_gone == 1
    finally:
        path.with_suffix(".away").rename(path)


def test_a_folder_that_is_away_is_left_out_and_named(searcher, made):
    vector = searcher.vector(parse_words("red cat"))
    (made.photos / "a").rename(made.photos / "unplugged")
    try:
        answer = searcher.ask(vector, top=100)
        assert sorted(names(answer.found)) == ["copy.jpg", "smaller.jpg"]
        assert answer.away == (str(made.photos / "a"),) and answer.num_gone == 0
    finally:
        (made.photos / "unplugged").rename(made.photos / "a")


def test_threads_may_search_at_once(searcher):
    vectors = [searcher.vector(parse_words(words)) for words in ("red cat", "old tree", "dog", "new")] * 5
    alone = [searcher.search(vector, top=5) for vector in vectors]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda vector: searcher.search(vector, top=5), vectors)] == alone


def test_a_large_index_is_searched_with_a_graph_that_is_made_once(searcher, embedder):
    vector = searcher.vector(parse_words("red cat"))
    exact = searcher.search(vector, top=5)
    assert not searcher.needs_graph
    large = Searcher(searcher.index, embedder, most_exact=5)
    assert large.needs_graph and large.search(vector, top=5) == exact
    assert [*large.build_graph()][-1] == (13, 13)
    assert not large.needs_graph and large.search(vector, top=5) == exact
    again = Searcher(searcher.index, embedder, most_exact=5)
    assert not again.needs_graph and again.graph is not None and again.search(vector, top=5) == exact


def test_duplicates_are_groups_of_equal_and_nearly_equal_images(searcher):
    def found(min_score: float) -> list[list[str]]:
        return [names(group) for group in searcher.duplicates(min_score)]

    assert found(1.0) == [[COPIED, "copy.jpg"]]
    near = next(group for group in searcher.duplicates(0.0) if len(group) > 2)
    score = next(
        float(searcher.index.vectors[a.entry.row] @ searcher.index.vectors[b.entry.row])
        for a in near
        for b in near
        if (os.path.basename(a.entry.path), os.path.basename(b.entry.path)) == (CHANGED, "smaller.jpg")
    )
    assert [CHANGED, "smaller.jpg"] in found(score) and [COPIED, "copy.jpg"] in found(score)
    assert found(-1.0) == [sorted(names(near), key=lambda name: (not name[0].isdigit(), name))]
