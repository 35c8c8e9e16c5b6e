"""Rows that are nearly equal, in groups: products of blocks of rows, in memory that does not grow with their number."""

from collections.abc import Generator, Iterable

import numpy as np

from lapclip.search.nearest import NOISE

BLOCK = 2048  # rows of each side; 16 MB of cosines


def groups_of(
    vectors_RE: np.ndarray, rows_N: np.ndarray, min_score: float, block: int = BLOCK
) -> Generator[tuple[int, int], None, list[np.ndarray]]:
    """Groups of rows joined by cosines of at least that much, each ascending; yields how many of the blocks are done.

    Of three in a row the outer two may differ more: a group is a chain.
    """
    matrix_RE = np.asarray(vectors_RE)
    label_N = np.arange(len(rows_N))  # of a group: the place of its first row
    starts = range(0, len(rows_N), block)
    total, done = len(starts) * (len(starts) + 1) // 2, 0
    for start in starts:
        one_BE = matrix_RE[rows_N[start : start + block]]
        for other in range(start, len(rows_N), block):
            other_BE = one_BE if other == start else matrix_RE[rows_N[other : other + block]]
            with np.errstate(invalid="ignore", over="ignore"):
                places, others = np.nonzero(one_BE @ other_BE.T >= min_score - NOISE)
            join(label_N, places + start, others + other)
            done += 1
            yield done, total
    return together(rows_N, label_N)


def join(label_N: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Gives the groups that pairs connect one label, the lowest."""
    pairs = np.stack([label_N[one], label_N[other]], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    if len(pairs):
        labels, roots = lowest_labels(pairs.tolist())
        is_joined = np.isin(label_N, labels)
        label_N[is_joined] = roots[np.searchsorted(labels, label_N[is_joined])]


def lowest_labels(pairs: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The labels of some pairs, ascending, and the lowest one that each is connected with: union-find."""
    parent: dict[int, int] = {}

    def root(label: int) -> int:
        parent.setdefault(label, label)
        while parent[label] != label:
            parent[label] = parent[parent[label]]
            label = parent[label]
        return label

    for one, other in pairs:
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    labels = sorted(parent)
    return np.array(labels), np.array([root(label) for label in labels])


def together(rows_N: np.ndarray, label_N: np.ndarray) -> list[np.ndarray]:
    """The rows of each label that several have."""
    order = np.argsort(label_N, kind="stable")
    edges = np.flatnonzero(np.diff(label_N[order])) + 1
    return [group for group in np.split(rows_N[order], edges) if len(group) > 1]
