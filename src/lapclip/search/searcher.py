"""The one place where a query becomes results: words and images in, matching images of an index out.

Shapes: T terms of a query, N rows, E numbers in an embedding.
"""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lapclip.data.decode import RECORD, Unreadable, decode, read_whole
from lapclip.data.files import read_file
from lapclip.data.workers import in_order
from lapclip.errors import UserError, shortened, typed
from lapclip.search import nearest
from lapclip.search.index import EVERY, Entry, Filter, Index
from lapclip.search.nearest import NOISE, Graph, Hits
from lapclip.search.scan import why_unreachable
from lapclip.units import LongWork, Progress

if TYPE_CHECKING:
    from lapclip.embedder import Embedder

# A sign between spaces; the hyphen of `red-haired` and the signs of `C++` belong to their words.
SIGN = re.compile(r"(?:^|(?<=\s))([+-])(?=\s|$)")
MAX_EXACT = 1_000_000  # rows that are all compared; more only where `usearch` is not installed
MAX_LOOKED_UP = 10_000  # rows whose files are looked up before a search returns fewer results
NUM_FILTERS_CACHED = 16
COMPARED_SIZE = 64  # pixels each side of an image whose content is compared


class NotIndexed(UserError):
    """An image or folder that the index does not have."""


@dataclass(frozen=True)
class Term:
    """One thing to look for (sign 1) or to avoid (-1): words, the bytes of an image, or the id of an indexed image."""

    sign: int
    words: str = ""
    image: bytes = b""
    entry: int | None = None


@dataclass(frozen=True)
class Match:
    """An image that was found."""

    entry: Entry
    score: float  # cosine of its embedding with the query
    copies: tuple[Entry, ...] = ()  # other files with equal bytes

    def record(self) -> dict[str, Any]:
        """A result as `search --json` and the HTTP API return it."""
        entry = self.entry
        return {
            "id": entry.id, "path": entry.path, "name": os.path.basename(entry.path), "score": self.score,
            "width": entry.width, "height": entry.height, "copies": [copy.path for copy in self.copies],
            "modified": entry.mtime_ns / 1e9,
        }  # fmt: skip


@dataclass(frozen=True)
class Duplicate(Match):
    """An image of a group of duplicates; its score and difference are those to the first one."""

    is_identical: bool = True  # in every byte
    difference: float = 0.0  # mean over thumbnails of 8 x 8 pixels; 1 is that between black and white

    def record(self) -> dict[str, Any]:
        return super().record() | {"identical": self.is_identical, "difference": self.difference}


@dataclass(frozen=True)
class Results:
    """The matches of a query, and what could not be searched."""

    matches: list[Match]
    num_gone: int = 0  # better matches whose files no longer exist
    unreachable: tuple[str, ...] = ()  # indexed folders that cannot be opened now, as on an unplugged disk


def parse_query(text: str) -> list[Term]:
    """The terms of `beach - people + sunset`; a sign with nothing after it is ignored."""
    first, *rest = SIGN.split(text)
    pieces = [("+", first), *zip(rest[::2], rest[1::2], strict=True)]
    signs = {"+": 1, "-": -1}
    return [Term(signs[sign], words=" ".join(words.split())) for sign, words in pieces if words.strip()]


def describe_query(terms: Iterable[Term], likes: Iterable[str] = (), unlikes: Iterable[str] = ()) -> str:
    """The query as a person would write it: `beach - people + like cat.jpg`."""
    parts = [(term.sign, term.words) for term in terms if term.words]
    parts += [(1, f"like {name}") for name in likes] + [(-1, f"like {name}") for name in unlikes]
    return " ".join(f"{'+' if sign > 0 else '-'} {what}" for sign, what in parts).removeprefix("+ ")


class Searcher:
    """Searches an index. All methods but `vector`, which uses the model, may be called from several threads."""

    def __init__(self, index: Index, embedder: "Embedder", *, max_exact: int = MAX_EXACT):
        self.index, self.embedder, self.max_exact = index, embedder, max_exact
        self.rows_of = lru_cache(NUM_FILTERS_CACHED)(index.live_rows)
        self.rows_N = self.rows_of()
        self.is_large = len(self.rows_N) > max_exact
        self.graph: Graph | None = None
        if self.is_large and nearest.has_usearch():
            self.graph = nearest.open_graph(index.path, index.vectors)

    @property
    def needs_graph(self) -> bool:
        """Whether building a graph, once, would make searching this index faster."""
        is_usable = self.graph is not None and not self.graph.is_stale(self.rows_N)
        return self.is_large and not is_usable and nearest.has_usearch()

    def build_graph(self) -> LongWork[None]:
        """Builds the graph of a very large index; without it all rows are compared."""
        for done in nearest.build_graph(self.index.path, self.index.vectors, self.rows_N):
            yield Progress("preparing", done, len(self.rows_N))
        self.graph = nearest.open_graph(self.index.path, self.index.vectors)

    def vector(self, terms: Sequence[Term]) -> np.ndarray:
        """The unit row that a query asks for."""
        words = [term.words for term in terms if term.words]
        try:
            images = [self.embedder.decode(term.image).pixels for term in terms if term.image]
        except Unreadable as problem:
            raise UserError(f"the query image {problem}", hint="pass a JPEG or PNG image") from None
        text_rows = self.embedder.texts(words, progress=False) if words else ()
        image_rows = self.embedder.pixels(np.stack(images)) if images else ()
        return self.combine(terms, text_rows, image_rows)

    def combine(
        self, terms: Sequence[Term], text_rows: Iterable[np.ndarray], image_rows: Iterable[np.ndarray]
    ) -> np.ndarray:
        """The unit row of a query whose words and images are embedded already: terms added and subtracted."""
        texts, images = iter(text_rows), iter(image_rows)

        def row_of(term: Term) -> np.ndarray:
            if term.words or term.image:
                return next(texts if term.words else images)
            return np.asarray(self.index.vectors[self.entry(term.entry or 0).row])

        rows_TE = np.stack([row_of(term) for term in terms])
        total_E = np.array([term.sign for term in terms], dtype=np.float64) @ rows_TE.astype(np.float64)
        length = float(np.linalg.norm(total_E))
        if not np.isfinite(length):
            hint = "index with another run: `lapclip index --model RUN`"
            raise UserError("the model returns embeddings that are not finite", hint=hint)
        if length < 1e-4:
            hint = "omit terms that are both added and subtracted"
            raise UserError("the terms of the query cancel out", hint=hint)
        return (total_E / length).astype(np.float32)

    def entry(self, id: int) -> Entry:
        """The file with this id; NotIndexed when the index does not have it."""
        entry = self.index.entry(id)
        if entry is None:
            raise NotIndexed(f"the index has no image {id}", hint="search again: it may have been removed")
        return entry

    def search(
        self,
        vector_E: np.ndarray,
        *,
        top: int = 10,
        min_score: float | None = None,
        wanted: Filter = EVERY,
        without: Sequence[int] = (),
    ) -> Results:
        """The images nearest to a unit vector whose files exist, best first; never those of the ids `without`."""
        lost = filter(lambda path: why_unreachable(path, 1), self.index.folders)
        unreachable = tuple(filter(self.index.has_under, lost))
        if wanted.folder is not None:
            refuse_unknown(self.index, wanted.folder)
        wanted = replace(wanted, without=unreachable)
        rows_N = self.rows_N if wanted == EVERY else self.rows_of(wanted)
        omitted = [entry.row for entry in map(self.index.entry, without) if entry is not None]
        if omitted:
            rows_N = rows_N[~np.isin(rows_N, omitted)]
        count = top
        while True:
            hits = self.nearest(vector_E, rows_N, count)
            is_complete = len(hits.rows) < count
            if min_score is not None:
                kept = int(np.count_nonzero(hits.scores >= min_score))
                is_complete = is_complete or kept < len(hits.rows)
                hits = Hits(hits.rows[:kept], hits.scores[:kept])
            matches, num_gone = self.look_up(hits, top, wanted)
            if len(matches) == top or is_complete or count > MAX_LOOKED_UP:
                return Results(matches, num_gone, unreachable)
            count *= 4

    def nearest(self, vector_E: np.ndarray, rows_N: np.ndarray, top: int) -> Hits:
        if self.graph is not None and len(rows_N) > self.max_exact:
            return nearest.nearest_by_graph(self.graph, self.index.vectors, vector_E, rows_N, top)
        return nearest.nearest(self.index.vectors, vector_E, rows_N, top)

    def look_up(self, hits: Hits, top: int, wanted: Filter) -> tuple[list[Match], int]:
        """The first matches whose files exist, and how many files before the last of them do not."""
        matches: list[Match] = []
        num_gone = 0
        for row, score in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True):
            entries = self.index.entries_at(row, wanted)
            existing = [entry for entry in entries if os.path.isfile(entry.path)]
            num_gone += len(entries) - len(existing)
            if existing:
                matches.append(Match(existing[0], score, tuple(existing[1:])))
            if len(matches) == top:
                break
        return matches, num_gone


def refuse_unknown(index: Index, folder: str) -> None:
    """Refuses a folder that has no image in the index."""
    if not index.has_under(folder):
        hint = f"index it: `lapclip index {typed(shortened(folder))} --model {typed(index.name)}`"
        raise NotIndexed(f"no image under `{shortened(folder)}` is indexed", hint=hint)


def duplicates(
    index: Index, min_score: float = -1, wanted: Filter = EVERY
) -> LongWork[list[list[Duplicate]]]:
    """Groups of the same images by the rule of `data check`, which reads every file: the largest, then by path."""
    from lapclip.data import split

    entries = [entry for row in index.live_rows(wanted).tolist() for entry in index.entries_at(row, wanted)]
    records = np.zeros(len(entries), RECORD)
    with closing(in_order(read_record, entries)) as read:
        for number, record in enumerate(read):
            records[number] = record
            yield Progress("comparing contents", number + 1, len(entries))
    found, contents, coarse = [], split.contents(records), split.content_groups(records)
    groups = split.told_apart(records, coarse, lambda n, size: read_whole(read_file(entries[n].path), size))
    for first, *others in split.duplicates(records, groups):
        places = np.array([first, *sorted(others, key=lambda number: entries[number].path)])
        group = [entries[number] for number in places]
        total, _ = split.differences(records["thumb"], np.full_like(places, first), places)
        vectors = index.vectors[[entry.row for entry in group]].astype(np.float64)
        scores, difference = np.nan_to_num(vectors @ vectors[0]), total / (255 * split.NUM_VALUES)
        rows = zip(group, scores, contents[places] == contents[first], difference, strict=True)
        members = [Duplicate(one, float(s), (), bool(same), float(d)) for one, s, same, d in rows]
        found.append([one for one in members if one.score >= min_score - NOISE])
    return sorted((group for group in found if group[1:]), key=lambda group: group[0].entry.path)


def read_record(entry: Entry) -> np.ndarray:
    """What the content of a file is compared by, as it is now; its row is -1 where it cannot be read."""
    record = np.zeros((), RECORD)
    record["row"] = -1
    with suppress(OSError, ValueError, Unreadable):
        record = decode(read_file(entry.path), COMPARED_SIZE).record
    return record
