"""What a model finds now: a few fixed captions with the images it ranks first, and a matrix of similarities.

Small files in `snapshots/` that an event refers to; every image is written once.
"""

import json
from pathlib import Path

import numpy as np

from lapclip.data.decode import Unreadable, as_jpeg
from lapclip.data.source import Source
from lapclip.errors import UserError
from lapclip.evaluate.difficulty import spread
from lapclip.evaluate.pool import Pool, pair_matrix
from lapclip.files import write_atomically
from lapclip.runs.events import Warned
from lapclip.view import sheet

NUM_QUERIES = 6
MATRIX_SIDE = 24
IMAGE_SIDE = 96  # pixels
MAX_KEPT = 200  # snapshots; then every second one is removed


def take_snapshot(run: Path, source: Source, pool: Pool, step: int) -> str:
    """Writes what the model finds; the file's name in the run folder."""
    folder = run / "snapshots"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    kept = sorted(folder.glob("step-*.json"))
    for old in kept[1::2] if len(kept) >= MAX_KEPT else ():
        old.unlink()
    is_pair_MN, chosen = pair_matrix(pool), different_captions(pool, NUM_QUERIES)
    queries = [found_for(query, folder, source, pool, is_pair_MN) for query in chosen]
    content = {"step": step, "queries": queries, "matrix": matrix(folder, source, pool)}
    path = folder / f"step-{step:06d}.json"
    write_atomically(path, json.dumps(content, separators=(",", ":")))
    return f"{folder.name}/{path.name}"


def different_captions(pool: Pool, most: int) -> list[int]:
    """At most so many captions from all over the pool, no two with the same text."""
    places = sorted({caption: place for place, caption in enumerate(pool.captions)}.values())
    return [places[number] for number in spread(len(places), most)]


def found_for(query: int, folder: Path, source: Source, pool: Pool, is_pair_MN: np.ndarray) -> dict:
    """One caption, the rank of the first correct image, and the first images that are found."""
    cosine_N = pool.text_ME[query] @ pool.image_NE.T
    order = np.argsort(-cosine_N, kind="stable")
    return {
        "text": pool.captions[query],
        "rank": int(np.argmax(is_pair_MN[query, order])) + 1,
        "found": [
            {
                "picture": keep_image(folder, source, int(pool.indices[n])),
                "score": round(float(cosine_N[n]), 4),
                "is_right": bool(is_pair_MN[query, n]),
            }
            for n in order[: sheet.NUM_FOUND]
        ],
    }


def matrix(folder: Path, source: Source, pool: Pool) -> dict[str, object]:
    """Cosines of a few images and the first caption of each; pairs are on the diagonal."""
    images = spread(len(pool.indices), MATRIX_SIDE)
    first_caption_N = np.unique(pool.image_of_caption, return_index=True)[1]
    captions = first_caption_N[images]
    cosine = pool.text_ME[captions] @ pool.image_NE[images].T
    return {
        "captions": [pool.captions[m] for m in captions],
        "pictures": [keep_image(folder, source, int(pool.indices[n])) for n in images],
        "cosine": [[round(float(value), 3) for value in row] for row in cosine],
    }


def keep_image(folder: Path, source: Source, index: int) -> str:
    name = f"pictures/{index:06d}.jpg"
    if not (folder / name).exists():
        picture = source.image(index, IMAGE_SIDE).resize((IMAGE_SIDE, IMAGE_SIDE))
        write_atomically(folder / name, as_jpeg(picture))
    return name


def draw_learned(path: Path, source: Source, pool: Pool, step: int, num_queries: int = 5) -> Warned | None:
    """Draws a few captions of the pool and the images the model finds for them; an image is no reason to fail."""
    is_pair_MN = pair_matrix(pool)
    rows = []
    try:
        for query in different_captions(pool, num_queries):
            found = (pool.text_ME[query] @ pool.image_NE.T).argsort()[::-1][: sheet.NUM_FOUND]
            pictures = [source.image(index, sheet.TILE) for index in pool.indices[found].tolist()]
            rows.append((pool.captions[query], list(zip(pictures, is_pair_MN[query, found], strict=True))))
        sheet.draw_found(path, rows)
    except (UserError, Unreadable) as problem:
        return Warned(step, str(problem), "the model is saved; free some disk space")
    return None
