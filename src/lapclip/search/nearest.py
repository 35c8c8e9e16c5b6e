"""The rows nearest to a vector, exactly: one product over all of them, which the disk's pages are read for once.

Shapes: R rows, N rows that may be found, E numbers in an embedding. NumPy's own loop on one thread, not BLAS: alone
that is faster, but after torch has embedded the words its threads and those of BLAS are in each other's way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK_BYTES = 32 << 20  # of rows that are copied at a time
MANY = (
    4  # when more than one row in so many may be found, all are looked at: reading on is faster than picking
)
NOISE = 4e-6  # by which the order of sums may change a product of unit rows
MOST_TIED = 4096  # rows within that noise of the last place that are told apart


@dataclass(frozen=True)
class Hits:
    """Rows and their cosines, best first; among equals the lower row."""

    rows: np.ndarray  # int64 [N]
    scores: np.ndarray  # float64 [N]


def nearest(vectors_RE: np.ndarray, vector_E: np.ndarray, rows_N: np.ndarray, top: int) -> Hits:
    """The `top` of some rows (ascending, each once) that are nearest to a unit vector; NaN is never found."""
    scores_N = products(vectors_RE, vector_E, rows_N)
    return exactly(vectors_RE, vector_E, rows_N[highest(scores_N, top)], top)


def products(vectors_RE: np.ndarray, vector_E: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
    """Cosines of some rows; minus infinity where a row is not made of numbers."""
    matrix_RE, vector_E = np.asarray(vectors_RE), vector_E.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if len(rows_N) * MANY > len(matrix_RE):
            scores_N = np.einsum("re,e->r", matrix_RE, vector_E)[rows_N]
        else:
            scores_N = np.empty(len(rows_N), dtype=np.float32)
            for part in blocks(matrix_RE, len(rows_N)):
                scores_N[part] = np.einsum("re,e->r", matrix_RE[rows_N[part]], vector_E)
    scores_N[~np.isfinite(scores_N)] = -np.inf
    return scores_N


def highest(scores_N: np.ndarray, top: int) -> np.ndarray:
    """Places of the highest scores; a few more than asked for where the last ones are as good as tied."""
    if top <= 0 or not len(scores_N):
        return np.empty(0, dtype=np.int64)
    if top >= len(scores_N):
        return np.arange(len(scores_N))
    last = np.partition(scores_N, len(scores_N) - top)[len(scores_N) - top]
    surely = np.flatnonzero(scores_N > last + NOISE)
    tied = np.flatnonzero((scores_N >= last - NOISE) & (scores_N <= last + NOISE))
    return np.concatenate([surely, tied[: MOST_TIED + top]])


def exactly(vectors_RE: np.ndarray, vector_E: np.ndarray, rows_N: np.ndarray, top: int) -> Hits:
    """The best of a few rows by cosines in double precision, so that a score depends on nothing but its row."""
    matrix_RE, exact_E = np.asarray(vectors_RE), vector_E.astype(np.float64)
    scores_N = np.empty(len(rows_N), dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for part in blocks(matrix_RE, len(rows_N)):
            scores_N[part] = (matrix_RE[rows_N[part]] * exact_E).sum(axis=1)
    order = np.lexsort((rows_N, -scores_N))
    order = order[np.isfinite(scores_N[order])][:top]
    return Hits(rows_N[order].astype(np.int64), scores_N[order])


def blocks(matrix_RE: np.ndarray, num_rows: int) -> Iterator[slice]:
    """Parts of so many rows, each small enough to be copied."""
    step = max(1, BLOCK_BYTES // max(1, matrix_RE.itemsize * matrix_RE.shape[1]))
    return (slice(start, start + step) for start in range(0, num_rows, step))


def merged(one: Hits, other: Hits, top: int) -> Hits:
    """The best of two searches over different rows."""
    rows, scores = np.concatenate([one.rows, other.rows]), np.concatenate([one.scores, other.scores])
    order = np.lexsort((rows, -scores))[:top]
    return Hits(rows[order], scores[order])
