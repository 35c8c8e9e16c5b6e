"""An index with the model it was made with: terms in, images out, best first."""

import os
import shlex
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lapclip.data.catalogue import shortened
from lapclip.data.decode import Unreadable
from lapclip.data.images import decode_as_trained
from lapclip.errors import UserError
from lapclip.search import approximate
from lapclip.search.alike import groups_of
from lapclip.search.nearest import Hits, exactly, nearest
from lapclip.search.query import Term, combined
from lapclip.search.scan import is_under, why_away
from lapclip.search.store import Entry, Index

if TYPE_CHECKING:
    from lapclip.embedder import Embedder

MOST_EXACT = 1_000_000  # rows that are all looked at; more only where `usearch` is not installed
MOST_LOOKED_UP = 10_000  # results whose files are gone, before the search ends with fewer
NUM_FOLDERS_KEPT = 16  # whose rows are remembered


@dataclass(frozen=True)
class Found:
    """An image that was found."""

    entry: Entry
    score: float  # cosine of its embedding with what was asked
    copies: tuple[Entry, ...] = ()  # other files with equal bytes


@dataclass(frozen=True)
class Answer:
    """What was found, and what would have been."""

    found: list[Found]
    num_gone: int = 0  # files on the way that are no longer where they were
    away: tuple[str, ...] = ()  # indexed folders that cannot be looked into now, as on an unplugged disk


class Searcher:
    """Searches an index. All but `vector`, which uses the model, may be called from several threads at a time."""

    def __init__(self, index: Index, embedder: "Embedder", *, most_exact: int = MOST_EXACT):
        self.index, self.embedder, self.most_exact = index, embedder, most_exact
        self.rows_of = lru_cache(NUM_FOLDERS_KEPT)(index.live_rows)
        self.rows_N = self.rows_of()
        self.wants_graph = len(self.rows_N) > most_exact
        self.graph: approximate.Graph | None = None
        if self.wants_graph and approximate.is_installed():
            self.graph = approximate.open_graph(index.path, index.vectors)

    @property
    def needs_graph(self) -> bool:
        """Whether there are so many images that making a graph of them, once, pays."""
        is_there = self.graph is not None and not self.graph.is_worn(self.rows_N)
        return self.wants_graph and not is_there and approximate.is_installed()

    def build_graph(self) -> Generator[tuple[int, int], None, None]:
        """Makes the graph of a very large index, and says how far it is; not a must: without it all rows are read."""
        for done in approximate.build_graph(self.index.path, self.index.vectors, self.rows_N):
            yield done, len(self.rows_N)
        self.graph = approximate.open_graph(self.index.path, self.index.vectors)

    def vector(self, terms: Sequence[Term]) -> np.ndarray:
        """What terms ask for, as one unit row: what is wanted added, what is not taken away."""
        if not terms:
            raise UserError("nothing is asked", hint="say what to look for, as `red bicycle`")
        words = [term.words for term in terms if term.words]
        pictures = [image_pixels(term.picture, self.embedder.image_size) for term in terms if term.picture]
        word_rows = iter(self.embedder.texts(words, progress=False) if words else ())
        image_rows = iter(self.embedder.pixels(np.stack(pictures)) if pictures else ())
        rows = [
            next(word_rows)
            if term.words
            else next(image_rows)
            if term.picture
            else self.entry_row(term.entry)
            for term in terms
        ]
        return combined(np.stack(rows), [term.sign for term in terms])

    def entry_row(self, id: int) -> np.ndarray:
        entry = self.index.entry(id)
        if entry is None:
            raise UserError(f"the index has no image `{id}`", hint="search again, for images it has")
        return self.index.vectors[entry.row]

    def search(
        self,
        vector_E: np.ndarray,
        *,
        top: int = 10,
        min_score: float | None = None,
        folder: str | None = None,
        without: Sequence[int] = (),
    ) -> list[Found]:
        """The images nearest to a unit vector, best first; see `ask`."""
        return self.ask(vector_E, top=top, min_score=min_score, folder=folder, without=without).found

    def ask(
        self,
        vector_E: np.ndarray,
        *,
        top: int = 10,
        min_score: float | None = None,
        folder: str | None = None,
        without: Sequence[int] = (),
    ) -> Answer:
        """The nearest images that are still there, and what is missing; never those of the ids `without`."""
        places = [*self.index.folders, *self.index.disks]
        away = tuple(path for path in places if why_away(path, 1) and self.index.has_under(path))
        rows_N = self.rows_that_count(folder, away)
        left_out = [entry.row for entry in map(self.index.entry, without) if entry is not None]
        if left_out:
            rows_N = rows_N[~np.isin(rows_N, left_out)]
        asked = top
        while True:
            hits = self.nearest(vector_E, rows_N, asked)
            is_complete = len(hits.rows) < asked
            if min_score is not None:
                kept = int(np.count_nonzero(hits.scores >= min_score))
                is_complete = is_complete or kept < len(hits.rows)
                hits = Hits(hits.rows[:kept], hits.scores[:kept])
            found, num_gone = self.look_up(hits, top, folder, away)
            if len(found) == top or is_complete or asked > MOST_LOOKED_UP:
                return Answer(found, num_gone, away)
            asked *= 4

    def rows_that_count(self, folder: str | None, away: tuple[str, ...]) -> np.ndarray:
        """The rows of a folder, or of all that can be looked into now."""
        if folder is not None:
            refuse_unknown(self.index, folder)
            return self.rows_of(os.path.realpath(os.path.expanduser(folder)))
        return self.rows_of(None, away) if away else self.rows_N

    def nearest(self, vector_E: np.ndarray, rows_N: np.ndarray, top: int) -> Hits:
        if self.graph is not None and len(rows_N) > self.most_exact:
            return approximate.nearly_nearest(self.graph, self.index.vectors, vector_E, rows_N, top)
        return nearest(self.index.vectors, vector_E, rows_N, top)

    def look_up(
        self, hits: Hits, top: int, folder: str | None, away: tuple[str, ...]
    ) -> tuple[list[Found], int]:
        """The first files of some rows that are there, and how many on the way are not."""
        found: list[Found] = []
        num_gone = 0
        within = None if folder is None else os.path.expanduser(folder)
        for row, score in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True):
            entries = [
                entry for entry in self.index.entries_at(row, within) if not is_under(entry.path, away)
            ]
            there = [entry for entry in entries if os.path.isfile(entry.path)]
            num_gone += len(entries) - len(there)
            if there:
                found.append(Found(there[0], score, tuple(there[1:])))
            if len(found) == top:
                break
        return found, num_gone

    def duplicates(self, min_score: float) -> list[list[Found]]:
        """Groups of images that are equal or nearly; see the function of this name."""
        work = duplicates(self.index, min_score)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value


def duplicates(
    index: Index, min_score: float, folder: str | None = None
) -> Generator[tuple[int, int], None, list[list[Found]]]:
    """Groups of images that are equal or nearly: the one indexed first, then those like it, by path; needs no model.

    Each has its cosine with the first. Yields how far it is. The work grows with the square of the number of images.
    """
    rows_N = index.live_rows(folder)
    groups = yield from groups_of(index.vectors, rows_N, min_score)
    if index.num_pictures > len(rows_N):  # some may be copies of each other, and like no other image
        joined = np.concatenate([np.empty(0, np.int64), *groups])
        groups += [np.array([row]) for row in rows_N[~np.isin(rows_N, joined)].tolist()]
    found = []
    for group in groups:
        entries = [entry for row in group for entry in index.entries_at(int(row), folder)]
        there = [entry for entry in entries if os.path.isfile(entry.path)]
        there[1:] = sorted(there[1:], key=lambda entry: entry.path)
        if len(there) > 1:
            first_E = np.asarray(index.vectors[there[0].row])
            hits = exactly(index.vectors, first_E, np.unique([e.row for e in there]), len(there))
            scores = dict(zip(hits.rows.tolist(), hits.scores.tolist(), strict=True))
            found.append([Found(entry, scores.get(entry.row, 0.0)) for entry in there])
    return sorted(found, key=lambda group: group[0].entry.path)


def image_pixels(data: bytes, image_size: int) -> np.ndarray:
    try:
        return decode_as_trained(data, image_size).pixels
    except Unreadable as problem:
        raise UserError(f"what was given as an image {problem}", hint="give a JPEG or PNG image") from None


def refuse_unknown(index: Index, folder: str) -> None:
    """Refuses a folder of which the index has no image."""
    if not index.has_under(os.path.expanduser(folder)):
        raise UserError(
            f"no image under `{shortened(folder)}` is indexed",
            hint=f"index it: `lapclip index {shlex.quote(shortened(folder))}`",
        )
