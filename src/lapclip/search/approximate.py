"""A graph of neighbours for very many rows, by `usearch`: finds candidates without looking at each row.

It is made once beside the vectors, and its name says how many rows it covers and what they were. Candidates are scored
again with the vectors themselves, and rows added since are searched exactly, so that a score is always the true one;
only that a row may be missed.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.search.nearest import Hits, exactly, merged, nearest

CONNECTIVITY, EXPANSION_ADD, EXPANSION_SEARCH = 16, 128, 256  # more finds more, slower
AT_A_TIME = 10_000  # rows added between two looks at how far it is
NUM_SAMPLED = 256  # rows by which a graph knows its vectors again
WORN = 0.25  # share of rows that are new or dead since, from which on it is made anew
MOST_ASKED = 20_000  # candidates, before looking at every row is the better way
DAY_SECONDS = 86400.0


class Graph:
    """A graph over the live ones of the first `num_rows` rows. Threads may share it."""

    def __init__(self, found: Any, num_rows: int):
        self.found, self.num_rows, self.lock = found, num_rows, threading.Lock()

    def __len__(self) -> int:
        return len(self.found)

    def candidates(self, vector_E: np.ndarray, count: int) -> np.ndarray:
        """Rows near to a vector, in ascending order."""
        with self.lock:
            matches = self.found.search(vector_E.astype(np.float32), min(count, len(self)))
        return np.sort(np.asarray(matches.keys).astype(np.int64))

    def is_worn(self, rows_N: np.ndarray) -> bool:
        """Whether too many rows came or went since it was made."""
        num_covered = int(np.searchsorted(rows_N, self.num_rows))
        num_new, num_dead = len(rows_N) - num_covered, len(self) - num_covered
        return num_new + num_dead > WORN * len(rows_N)


def is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("usearch") is not None


def nearly_nearest(
    graph: Graph, vectors_RE: np.ndarray, vector_E: np.ndarray, rows_N: np.ndarray, top: int
) -> Hits:
    """The nearest of some rows: new ones exactly, the others as the graph finds them."""
    split = int(np.searchsorted(rows_N, graph.num_rows))
    covered, new = rows_N[:split], rows_N[split:]
    count = 2 * top + 16
    while True:
        found = graph.candidates(vector_E, count)
        allowed = found[np.isin(found, covered, assume_unique=True)]
        if len(allowed) >= min(top, split):
            break
        count *= 4
        if count > min(MOST_ASKED, 4 * len(graph)):  # nearly everything it finds is dead or filtered out
            return nearest(vectors_RE, vector_E, rows_N, top)
    known = exactly(vectors_RE, vector_E, allowed, top)
    return merged(known, nearest(vectors_RE, vector_E, new, top), top)


def open_graph(folder: Path, vectors_RE: np.ndarray) -> Graph | None:
    """The newest graph of these vectors, read as it is needed; None when there is none that fits."""
    from usearch.index import Index

    sizes = {path: covered_by(path) for path in folder.glob("near-*.usearch")}
    for path, num_rows in sorted(sizes.items(), key=lambda item: -item[1]):
        if not 0 < num_rows <= len(vectors_RE) or path != graph_path(folder, vectors_RE, num_rows):
            continue
        try:
            found = Index.restore(str(path), view=True, expansion_search=EXPANSION_SEARCH)
        except (OSError, RuntimeError, ValueError):
            continue
        if found is not None and found.ndim == vectors_RE.shape[1]:
            return Graph(found, num_rows)
    return None


def build_graph(folder: Path, vectors_RE: np.ndarray, rows_N: np.ndarray) -> Iterator[int]:
    """Makes the graph of some rows, and says how many it has; written beside and renamed, the older ones removed."""
    from usearch.index import Index

    graph = Index(
        ndim=vectors_RE.shape[1],
        metric="cos",
        dtype="i8",  # half the bytes and time of the others; candidates are scored again anyway
        connectivity=CONNECTIVITY,
        expansion_add=EXPANSION_ADD,
        expansion_search=EXPANSION_SEARCH,
    )
    yield 0
    for start in range(0, len(rows_N), AT_A_TIME):
        some = rows_N[start : start + AT_A_TIME]
        vectors = np.asarray(vectors_RE)[some]
        is_fine = np.isfinite(vectors).all(axis=1)
        if is_fine.any():
            graph.add(some[is_fine].astype(np.uint64), vectors[is_fine])
        yield start + len(some)
    path = graph_path(folder, vectors_RE, len(vectors_RE))
    beside = folder / f".{path.name}.{os.getpid()}.writing"
    try:
        graph.save(str(beside))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    for old in [*folder.glob("near-*.usearch"), *folder.glob(".near-*.writing")]:
        is_left_over = not old.name.startswith(".") or time.time() - old.stat().st_mtime > DAY_SECONDS
        if old != path and is_left_over:
            old.unlink(missing_ok=True)


def graph_path(folder: Path, vectors_RE: np.ndarray, num_rows: int) -> Path:
    """Where the graph of the first rows is; its name tells other vectors of the same number apart."""
    places = np.unique(np.linspace(0, num_rows - 1, NUM_SAMPLED).astype(np.int64))
    sample = np.ascontiguousarray(np.asarray(vectors_RE)[places])
    digest = hashlib.blake2b(sample.tobytes(), digest_size=8).hexdigest()
    return folder / f"near-{num_rows}-{digest}.usearch"


def covered_by(path: Path) -> int:
    found = re.fullmatch(r"near-(\d{1,12})-[0-9a-f]{16}\.usearch", path.name)
    return int(found[1]) if found else 0
