"""Rows that are nearly equal, in groups: products of blocks of rows, in memory that does not grow with their number."""

from collections.abc import Generator

import numpy as np

from lapclip.search.nearest import NOISE

BLOCK = 2048  # rows of each side; 16 MB of cosines


def groups_of(
    vectors_RE: np.ndarray, rows_N: np.ndarray, min_score: float, block: int = BLOCK
) -> Generator[tuple[int, int], None, list[np.ndarray]]:
    """Groups of rows, each ascending; yields how many of the blocks are done.

    Every row of a group has a cosine of at least that much with its first, which is like no row before it that is first
    of a group. Chains, where only neighbours need be alike, would join half of all images at a low score.
    """
    matrix_RE = np.asarray(vectors_RE)
    first_N = np.arange(len(rows_N))  # the place of the first row of each one's group
    starts = range(0, len(rows_N), block)
    total, done = len(starts) * (len(starts) + 1) // 2, 0
    for start in starts:
        one_BE = matrix_RE[rows_N[start : start + block]]
        for other in range(start, len(rows_N), block):
            other_BE = one_BE if other == start else matrix_RE[rows_N[other : other + block]]
            with np.errstate(invalid="ignore", over="ignore"):
                is_alike_BB = one_BE @ other_BE.T >= min_score - NOISE
            join(first_N, is_alike_BB, start, other)
            done += 1
            yield done, total
    return together(rows_N, first_N)


def join(first_N: np.ndarray, is_alike_BB: np.ndarray, start: int, other: int) -> None:
    """Gives to those of one block that have none yet the first of another block, or of the same, that they are like.

    The blocks before it have had their turn, so that it is known which of its rows belong to others.
    """
    others = np.arange(other, other + is_alike_BB.shape[1])
    for place in np.flatnonzero(is_alike_BB.any(axis=1)).tolist():
        if first_N[start + place] == start + place:
            is_free = (first_N[others] == others) & (others > start + place)
            first_N[others[is_alike_BB[place] & is_free]] = start + place


def together(rows_N: np.ndarray, first_N: np.ndarray) -> list[np.ndarray]:
    """The rows of each group that has several."""
    order = np.argsort(first_N, kind="stable")
    edges = np.flatnonzero(np.diff(first_N[order])) + 1
    return [group for group in np.split(rows_N[order], edges) if len(group) > 1]
