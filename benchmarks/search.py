"""Measures the time of a search, without start-up, in this process and over HTTP, and the speed of indexing.

    python benchmarks/search.py                       # everything; the graph of a million rows takes most of the time
    python benchmarks/search.py --most 100000         # without the million rows
    python benchmarks/search.py --pictures FOLDER     # index these photos instead of generated images
    python benchmarks/search.py --size vit-b-32       # a model of the shape of OpenAI's smallest CLIP only

The targets are 50 ms for 100,000 images, including the text embedding, and indexing 1.3 times as fast as a plain loop.
The time of a search does not depend on what the model has learned, so weights and embeddings are random.
"""

import argparse
import http.client
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
from serving import server

from lapclip.machine.hardware import limit_openmp_spinning
from lapclip.search.nearest import build_graph, nearest, nearest_by_graph, open_graph

limit_openmp_spinning()  # before torch is imported, as the command line does
MODELS = ("nano", "tiny", "vit-b-32")
SIZES = ((10_000, 128), (100_000, 128), (100_000, 512), (1_000_000, 128))
TOP = 24
NUM_TIMES, NUM_QUERIES = 100, 50
WORDS = ("a dog on the beach", "red bicycle", "two people - car", "snow + night", "a cat")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=1_000_000, help="maximum number of rows")
    parser.add_argument("--no-graph", action="store_true", help="without the approximate index")
    parser.add_argument("--pictures", type=Path, help="a folder of photos to index")
    parser.add_argument("--only", choices=["searching", "indexing"])
    parser.add_argument("--size", choices=MODELS, help="only this model, and not the nearest rows alone")
    arguments = parser.parse_args()
    if arguments.only != "indexing":
        whole_searches(min(100_000, arguments.most), [arguments.size] if arguments.size else MODELS)
        for count, width in () if arguments.size else SIZES:
            if count <= arguments.most:
                with tempfile.TemporaryDirectory() as folder:
                    contenders(count, width, Path(folder), not arguments.no_graph)
    if arguments.only != "searching":
        from indexing import compare_indexing

        compare_indexing(arguments.pictures, arguments.size)


def timed(search: Callable[[int], object], num_times: int = 200) -> str:
    """The middle and the slow end of many, in milliseconds, after a few that warm up."""
    took = []
    for number in range(-5, num_times):
        started = time.perf_counter()
        search(number)
        if number >= 0:
            took.append((time.perf_counter() - started) * 1000)
    return spread(took)


def spread(took: list[float]) -> str:
    slowest = sorted(took)[int(0.99 * len(took))]
    return f"p50 {statistics.median(took):7.2f} ms, p99 {slowest:7.2f} ms"


def random_rows(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Unit rows in clusters, as embeddings are; the clusters are the same for every seed."""
    centres = np.random.default_rng(0).standard_normal((1000, width), dtype=np.float32)
    random = np.random.default_rng([seed, 1])
    rows = centres[random.integers(0, 1000, count)] + random.standard_normal((count, width), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def whole_searches(count: int, sizes: Sequence[str]) -> None:
    """From words to paths, as `lapclip search` and `lapclip serve` do it when they have started."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAPCLIP_CACHE"] = folder
        for size in sizes:
            searcher = open_searcher(Path(folder), size, count)
            from lapclip.search.index import Filter
            from lapclip.search.searcher import parse_query

            def search(number: int, searcher=searcher) -> None:
                terms = parse_query(WORDS[number % len(WORDS)])
                assert len(searcher.search(searcher.vector(terms), top=24).matches) == 24

            def folder_search(number: int, searcher=searcher) -> None:
                terms, within = parse_query(WORDS[number % len(WORDS)]), f"{searcher.index.folders[0]}/3"
                results = searcher.search(searcher.vector(terms), top=24, wanted=Filter(within))
                assert len(results.matches) == 24

            def words(number: int, searcher=searcher) -> None:
                searcher.vector(parse_query(WORDS[number % len(WORDS)]))

            what = f"{count:,} images, `{size}` ({searcher.index.width} numbers)"
            print(f"{what}, text to 24 paths: {timed(search)}")
            print(f"{what}, under one folder of ten: {timed(folder_search)}")
            print(f"{what}, of which embedding the text: {timed(words)}", flush=True)
            with server(size, batching=True) as (port, _):
                connection = http.client.HTTPConnection("127.0.0.1", port)

                def ask(number: int, connection=connection) -> None:
                    connection.request("GET", f"/search?top=24&q={quote(WORDS[number % len(WORDS)])}")
                    answer = connection.getresponse()
                    assert answer.read() and answer.status == 200

                print(f"{what}, one client of `lapclip serve`: {timed(ask)}", flush=True)


def open_searcher(root: Path, size: str, count: int):
    """A searcher of an untrained model, over an index of random embeddings."""
    from indexing import untrained

    from lapclip.search.index import MODEL, Index, IndexInfo
    from lapclip.search.searcher import Searcher
    from lapclip.search.writer import Writer

    embedder = untrained(size)
    pictures = root / f"pictures-{size}"
    paths = [pictures / str(number % 10) / f"{number:06}.jpg" for number in range(count)]
    for number in range(10):
        (pictures / str(number)).mkdir(parents=True)
    for path in paths:
        path.touch()
    index = root / "index" / embedder.fingerprint
    index.mkdir(parents=True)
    embedder.save(index / MODEL)
    with Writer(index, embedder.width) as writer:
        contents = [number.to_bytes(16, "big") for number in range(count)]
        writer.add_images(contents, [(640, 480)] * count, random_rows(count, embedder.width))
        writer.write_folders([str(pictures)])
        for row, path in enumerate(paths):
            writer.write(
                "INSERT INTO file (path, size, mtime_ns, row) VALUES (?, 0, 0, ?)", os.fsencode(path), row
            )
    info = IndexInfo(index, size, str(index), embedder.width, (str(pictures),), time.time(), True)
    info.write()
    return Searcher(Index(info), embedder)


def contenders(count: int, width: int, folder: Path, has_graph: bool) -> None:
    """The nearest 24 of many rows: ours, plain NumPy and a library of approximate search, in turn in one run."""
    vectors_RE, rows_N = random_rows(count, width), np.arange(count)
    queries = random_rows(NUM_QUERIES, width, seed=1)

    def plain(query: np.ndarray) -> np.ndarray:
        return np.argsort(-(vectors_RE @ query))[:TOP]

    def partitioned(query: np.ndarray) -> np.ndarray:
        scores = vectors_RE @ query
        best = np.argpartition(-scores, TOP)[:TOP]
        return best[np.argsort(-scores[best])]

    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "lapclip, exact": lambda query: nearest(vectors_RE, query, rows_N, TOP).rows,
        "NumPy, sorted": plain,
        "NumPy, partitioned": partitioned,
    }
    built = ""
    if has_graph:
        started = time.perf_counter()
        for _ in build_graph(folder, vectors_RE, rows_N):
            pass
        built = f" (made in {time.perf_counter() - started:.0f} s)"
        graph = open_graph(folder, vectors_RE)
        assert graph is not None
        ways["usearch alone"] = lambda query: graph.index.search(query, TOP).keys
        ways["lapclip, with usearch"] = lambda query: (
            nearest_by_graph(graph, vectors_RE, query, rows_N, TOP).rows
        )
    took: dict[str, list[float]] = {name: [] for name in ways}
    right = dict.fromkeys(ways, 0)
    for number in range(-3, NUM_TIMES):
        query = queries[number % NUM_QUERIES]
        truth: set[int] = set()
        for name, search in ways.items():
            started = time.perf_counter()
            found = search(query)
            seconds = time.perf_counter() - started
            truth = truth or {*plain(query).tolist()}
            if number >= 0:
                took[name].append(1000 * seconds)
                right[name] += len(truth & {int(row) for row in found})
    print(f"{count:,} x {width}{built}")
    for name in ways:
        print(f"    {name:22} {spread(took[name])}, finds {right[name] / NUM_TIMES / TOP:.1%}", flush=True)


if __name__ == "__main__":
    main()
