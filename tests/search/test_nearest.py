"""The nearest rows: exactly those, in one order, whatever is filtered; and with a graph, nearly those."""

import numpy as np
import pytest

from lapclip.search import nearest
from lapclip.search.nearest import build_graph, nearest_by_graph, open_graph


def unit_rows(count: int, width: int = 32, seed: int = 0) -> np.ndarray:
    """Rows in clusters, as embeddings are."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((20, width))
    rows = centres[random.integers(0, 20, count)] + 0.7 * random.standard_normal((count, width))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def by_hand(vectors: np.ndarray, vector: np.ndarray, rows: np.ndarray, top: int) -> list[int]:
    """The definition: every cosine in double precision, sorted; among equals the lower row."""
    scores = vectors[rows].astype(np.float64) @ vector.astype(np.float64)
    scores = scores.round(12)  # equal rows are equal then
    order = [place for place in np.lexsort((rows, -scores)) if np.isfinite(scores[place])]
    return rows[order][:top].tolist()


@pytest.mark.parametrize("share", [1.0, 0.6, 0.1])
@pytest.mark.parametrize("top", [1, 10, 5000])
def test_exactly_the_nearest_of_the_rows_that_count(share, top, monkeypatch):
    monkeypatch.setattr(nearest, "BLOCK_BYTES", 32 * 4 * 100)  # several blocks
    vectors = unit_rows(1500)
    random = np.random.default_rng(1)
    rows = np.sort(random.choice(1500, int(1500 * share), replace=False))
    for vector in unit_rows(5, seed=2):
        hits = nearest.nearest(vectors, vector, rows, top)
        assert hits.rows.tolist() == by_hand(vectors, vector, rows, top)
        assert np.all(np.diff(hits.scores) <= 0)


@pytest.mark.parametrize("top", [1, 40, 1000])
def test_equal_rows_come_in_the_order_of_rows(top):
    """Products of equal rows may differ by where they stand in a matrix; nobody may see that."""
    vectors = np.repeat(unit_rows(10, width=131), 100, axis=0)
    rows, vector = np.arange(1000), unit_rows(1, width=131, seed=3)[0]
    assert nearest.nearest(vectors, vector, rows, top).rows.tolist() == by_hand(vectors, vector, rows, top)
    many = np.tile(np.float32([1, 0, 0, 0]), (20_000, 1))
    many[11_111, 0] = 1.5
    assert nearest.nearest(many, many[0], np.arange(20_000), 5).rows.tolist() == [11_111, 0, 1, 2, 3]


def test_what_is_not_a_number_is_never_found_nor_anything_among_nothing():
    vectors, none = unit_rows(50), np.empty(0, np.int64)
    vectors[7], vectors[8, 3], vectors[9] = np.nan, np.inf, 0
    for vector in (vectors[0], -vectors[0]):
        found = nearest.nearest(vectors, vector, np.arange(50), 50).rows.tolist()
        assert len(found) == 48 and not {7, 8} & {*found}
    for searched, rows, top in ((vectors, none, 3), (vectors, np.arange(5), 0), (vectors[:0], none, 3)):
        assert nearest.nearest(searched, vectors[0], rows, top).rows.tolist() == []


def test_a_score_does_not_depend_on_what_else_is_searched():
    vectors, vector = unit_rows(1000), unit_rows(1, seed=4)[0]
    everything = nearest.nearest(vectors, vector, np.arange(1000), 1000)
    of_row = dict(zip(everything.rows.tolist(), everything.scores.tolist(), strict=True))
    for rows in (np.arange(0, 1000, 7), np.array([5]), np.arange(300, 990)):
        some = nearest.nearest(vectors, vector, rows, 20)
        assert [of_row[row] for row in some.rows.tolist()] == some.scores.tolist()


@pytest.fixture(scope="module")
def graph_folder(tmp_path_factory):
    """A graph of the even ones of the first 3,000 of 4,000 rows, one of them broken."""
    folder = tmp_path_factory.mktemp("graph")
    vectors = unit_rows(4000)
    vectors[40] = np.nan
    said = [*build_graph(folder, vectors[:3000], np.arange(0, 3000, 2))]
    assert said[0] == 0 and said[-1] == 1500
    return folder, vectors


def recall(graph, vectors, rows, top=10) -> float:
    queries = unit_rows(40, seed=6)
    found = [nearest_by_graph(graph, vectors, vector, rows, top).rows.tolist() for vector in queries]
    right = [by_hand(vectors, vector, rows, top) for vector in queries]
    assert all(len(one) == len(other) for one, other in zip(found, right, strict=True))
    return float(np.mean([len({*a} & {*b}) / len(b) for a, b in zip(found, right, strict=True)]))


def test_a_graph_finds_nearly_all_with_true_scores_in_order(graph_folder):
    folder, vectors = graph_folder
    graph = open_graph(folder, vectors)
    rows = np.arange(0, 3000, 2)
    assert recall(graph, vectors, rows) > 0.95
    vector = unit_rows(1, seed=7)[0]
    hits = nearest_by_graph(graph, vectors, vector, rows, 10)
    exact = nearest.rescore(vectors, vector, np.sort(hits.rows), 10)
    assert hits.rows.tolist() == exact.rows.tolist() and hits.scores.tolist() == exact.scores.tolist()


def test_rows_added_since_are_found_exactly_and_dead_ones_never(graph_folder):
    folder, vectors = graph_folder
    graph = open_graph(folder, vectors)
    live = np.concatenate([np.arange(0, 3000, 6), np.arange(3000, 4000)])
    assert recall(graph, vectors, live) > 0.95
    for row in (3001, 3999):
        hits = nearest_by_graph(graph, vectors, vectors[row], live, 3)
        assert hits.rows[0] == row and {*hits.rows.tolist()} <= {*live.tolist()}
    few = np.array([6, 600, 2400])  # the graph would offer hundreds of others first
    hits = nearest_by_graph(graph, vectors, vectors[6], few, 3)
    assert hits.rows.tolist() == by_hand(vectors, vectors[6], few, 3)
    assert not graph.is_stale(np.arange(0, 3000, 2)) and not graph.is_stale(np.arange(0, 3200, 2))
    assert graph.is_stale(np.concatenate([np.arange(0, 3000, 2), np.arange(3000, 4000)]))
    assert graph.is_stale(np.arange(0, 3000, 4))


def test_a_graph_of_other_vectors_or_a_broken_one_is_not_opened(graph_folder, tmp_path):
    folder, vectors = graph_folder
    assert open_graph(folder, unit_rows(4000, seed=9)) is None
    assert open_graph(folder, vectors[:2999]) is None
    (path,) = folder.glob("near-*.usearch")
    for content in (b"", b"nonsense" * 100, path.read_bytes()[:50]):
        (tmp_path / path.name).write_bytes(content)
        assert open_graph(tmp_path, vectors) is None


def test_a_new_graph_replaces_the_old_one_and_a_stopped_one_leaves_nothing(tmp_path, monkeypatch):
    vectors = unit_rows(400)
    monkeypatch.setattr(nearest, "ROWS_PER_ADD", 50)
    work = build_graph(tmp_path, vectors[:300], np.arange(300))
    assert [next(work) for _ in range(4)] == [0, 50, 100, 150]
    work.close()
    assert not [*tmp_path.iterdir()]
    for count in (300, 400):
        assert [*build_graph(tmp_path, vectors[:count], np.arange(count))][-1] == count
    (path,) = tmp_path.iterdir()
    assert "near-400-" in path.name and open_graph(tmp_path, vectors).num_rows == 400
