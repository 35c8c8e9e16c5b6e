"""Nearest-neighbour search: exact over all rows; for very many rows a `usearch` graph proposes candidates.

Shapes: R rows, N rows that may be found, E numbers in an embedding.
"""

import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.files import atomic_path, remove_abandoned

BLOCK_BYTES = 32 << 20  # rows copied at a time
SCAN_SHARE = 4  # if more than 1 in 4 rows may be found, all are read: sequential reads beat gathering
NOISE = 4e-6  # by how much the order of summation may change a product of unit rows
MAX_TIED = 4096  # rows within that noise of the last rank that are scored again
CONNECTIVITY, EXPANSION_ADD, EXPANSION_SEARCH = 16, 128, 256  # larger: better recall, slower
ROWS_PER_ADD = 10_000  # between two progress reports
NUM_SAMPLED = 256  # rows that identify the vectors a graph was built from
MAX_STALE = 0.25  # share of rows added or removed since; beyond it the graph is rebuilt
MAX_CANDIDATES = 20_000  # beyond this an exact scan is faster


@dataclass(frozen=True)
class Hits:
    """Rows and their cosines, best first; among equals the lower row."""

    rows: np.ndarray  # int64 [N]
    scores: np.ndarray  # float64 [N]


def nearest(vectors_RE: np.ndarray, vector_E: np.ndarray, rows_N: np.ndarray, top: int) -> Hits:
    """The `top` of some rows (ascending, unique) that are nearest to a unit vector; NaN is never found."""
    scores_N = products(vectors_RE, vector_E, rows_N)
    return rescore(vectors_RE, vector_E, rows_N[highest(scores_N, top)], top)


def products(vectors_RE: np.ndarray, vector_E: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
    """Cosines of some rows; minus infinity for rows that are not finite.

    NumPy's single-threaded einsum, not BLAS: BLAS alone is faster, but right after torch has embedded the query their
    thread pools slow each other down.
    """
    matrix_RE, vector_E = np.asarray(vectors_RE), vector_E.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if len(rows_N) * SCAN_SHARE > len(matrix_RE):
            scores_N = np.einsum("re,e->r", matrix_RE, vector_E)[rows_N]
        else:
            scores_N = np.empty(len(rows_N), dtype=np.float32)
            for part in blocks(matrix_RE, len(rows_N)):
                scores_N[part] = np.einsum("re,e->r", matrix_RE[rows_N[part]], vector_E)
    scores_N[~np.isfinite(scores_N)] = -np.inf
    return scores_N


def highest(scores_N: np.ndarray, top: int) -> np.ndarray:
    """Positions of the highest scores; a few more than `top` where the last ones are tied within the noise."""
    if not 0 < top < len(scores_N):
        return np.arange(len(scores_N))[: max(0, top)]
    last = np.partition(scores_N, len(scores_N) - top)[len(scores_N) - top]
    above = np.flatnonzero(scores_N > last + NOISE)
    tied = np.flatnonzero((scores_N >= last - NOISE) & (scores_N <= last + NOISE))
    return np.concatenate([above, tied[: MAX_TIED + top]])


def rescore(vectors_RE: np.ndarray, vector_E: np.ndarray, rows_N: np.ndarray, top: int) -> Hits:
    """The best of a few rows by cosines in double precision, so that a score depends on its row alone."""
    matrix_RE, exact_E = np.asarray(vectors_RE), vector_E.astype(np.float64)
    scores_N = np.empty(len(rows_N), dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for part in blocks(matrix_RE, len(rows_N)):
            scores_N[part] = (matrix_RE[rows_N[part]] * exact_E).sum(axis=1)
    order = np.lexsort((rows_N, -scores_N))
    order = order[np.isfinite(scores_N[order])][:top]
    return Hits(rows_N[order].astype(np.int64), scores_N[order])


def blocks(matrix_RE: np.ndarray, num_rows: int) -> Iterator[slice]:
    """Slices of `num_rows` rows, each small enough to be copied."""
    step = max(1, BLOCK_BYTES // max(1, matrix_RE.itemsize * matrix_RE.shape[1]))
    return (slice(start, start + step) for start in range(0, num_rows, step))


class Graph:
    """A usearch graph over the live ones of the first `num_rows` rows. Threads may share it."""

    def __init__(self, index: Any, num_rows: int):
        self.index, self.num_rows, self.lock = index, num_rows, threading.Lock()

    def candidates(self, vector_E: np.ndarray, count: int) -> np.ndarray:
        """Rows near to a vector, ascending."""
        with self.lock:
            matches = self.index.search(vector_E.astype(np.float32), min(count, len(self.index)))
        return np.sort(np.asarray(matches.keys).astype(np.int64))

    def is_stale(self, rows_N: np.ndarray) -> bool:
        """Whether too many rows were added or removed since it was built."""
        num_covered = int(np.searchsorted(rows_N, self.num_rows))
        num_new, num_dead = len(rows_N) - num_covered, len(self.index) - num_covered
        return num_new + num_dead > MAX_STALE * len(rows_N)


def has_usearch() -> bool:
    return find_spec("usearch") is not None


def nearest_by_graph(
    graph: Graph, vectors_RE: np.ndarray, vector_E: np.ndarray, rows_N: np.ndarray, top: int
) -> Hits:
    """The nearest of some rows: rows added since exactly, the others among the graph's candidates.

    Candidates are scored again with the vectors, so a score is always exact; only a row may be missed.
    """
    split = int(np.searchsorted(rows_N, graph.num_rows))
    covered, new = rows_N[:split], rows_N[split:]
    count = 2 * top + 16
    while True:
        found = graph.candidates(vector_E, count)
        allowed = found[np.isin(found, covered, assume_unique=True)]
        if len(allowed) >= min(top, split):
            break
        count *= 4
        if count > min(MAX_CANDIDATES, 4 * len(graph.index)):  # nearly all candidates are filtered out
            return nearest(vectors_RE, vector_E, rows_N, top)
    added = nearest(vectors_RE, vector_E, new, top)
    return rescore(vectors_RE, vector_E, np.concatenate([allowed, added.rows]), top)


def open_graph(folder: Path, vectors_RE: np.ndarray) -> Graph | None:
    """The graph of these vectors, memory-mapped; None when there is none that fits."""
    from usearch.index import Index

    for path in folder.glob("near-*.usearch"):
        found = re.fullmatch(r"near-(\d{1,12})-[0-9a-f]{16}\.usearch", path.name)
        num_rows = int(found[1]) if found else 0
        if not 0 < num_rows <= len(vectors_RE) or path != graph_path(folder, vectors_RE, num_rows):
            continue
        try:
            index = Index.restore(str(path), view=True, expansion_search=EXPANSION_SEARCH)
        except (OSError, RuntimeError, ValueError):
            continue
        if index is not None and index.ndim == vectors_RE.shape[1]:
            return Graph(index, num_rows)
    return None


def build_graph(folder: Path, vectors_RE: np.ndarray, rows_N: np.ndarray) -> Iterator[int]:
    """Builds and writes the graph of some rows, and removes older ones; yields how many rows it has."""
    from usearch.index import Index

    graph = Index(
        ndim=vectors_RE.shape[1],
        metric="cos",
        dtype="i8",  # half the size and time of f16; candidates are scored again anyway
        connectivity=CONNECTIVITY,
        expansion_add=EXPANSION_ADD,
        expansion_search=EXPANSION_SEARCH,
    )
    yield 0
    for start in range(0, len(rows_N), ROWS_PER_ADD):
        some = rows_N[start : start + ROWS_PER_ADD]
        vectors = np.asarray(vectors_RE)[some]
        is_finite = np.isfinite(vectors).all(axis=1)
        if is_finite.any():
            graph.add(some[is_finite].astype(np.uint64), vectors[is_finite])
        yield start + len(some)
    path = graph_path(folder, vectors_RE, len(vectors_RE))
    with atomic_path(path) as beside:
        graph.save(str(beside))
    remove_abandoned(folder, "near-*")
    for old in folder.glob("near-*.usearch"):
        if old != path:
            old.unlink(missing_ok=True)


def graph_path(folder: Path, vectors_RE: np.ndarray, num_rows: int) -> Path:
    """The file of the graph of the first rows; its name holds a digest that identifies the vectors."""
    places = np.unique(np.linspace(0, num_rows - 1, NUM_SAMPLED).astype(np.int64))
    sample = np.ascontiguousarray(np.asarray(vectors_RE)[places])
    digest = hashlib.blake2b(sample.tobytes(), digest_size=8).hexdigest()
    return folder / f"near-{num_rows}-{digest}.usearch"
