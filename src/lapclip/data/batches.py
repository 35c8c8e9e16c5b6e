"""Pairs in, batches out: shuffled anew each epoch, every pair once, and prepared ahead by other processes.

Which pairs a batch holds is a pure function of seed and step, so the position in the data is the step itself.
Workers are spawned, import no torch, and die with their parent.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lapclip.data.source import Source
from lapclip.data.tokenizer import Tokenizer
from lapclip.errors import UserError

STOPPING = {signal.SIGINT, signal.SIGTERM}
PIECE = 64  # pairs a worker prepares at once: small, so that a large batch is shared and never held twice


@dataclass(frozen=True)
class Batch:
    """Pairs contrasted with one another, as arrays."""

    images: np.ndarray  # bytes [B, 3, H, W]
    tokens: np.ndarray  # [B, T]
    ends: np.ndarray  # [B], where each caption ends
    image_ids: np.ndarray  # [B], equal for equal pictures
    caption_ids: np.ndarray  # [B], equal for equal captions


def pairs_of_step(step: int, *, num_pairs: int, batch_size: int, seed: int) -> np.ndarray:
    """The pairs of one step, counted from 0. A batch may hold the end of one epoch and the start of the next."""
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    return np.array([epoch_order(int(p // num_pairs), num_pairs, seed)[p % num_pairs] for p in places])


@lru_cache(maxsize=2)
def epoch_order(epoch: int, num_pairs: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_pairs)


def load_batches(
    source: Source,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    image_size: int,
    text_length: int,
    seed: int,
    first_step: int,
    workers: int,
) -> Generator[Batch]:
    """Batches without end, from some step on; with workers, the next one is prepared while this one is used."""
    fetched = fetch_ahead(source, batch_size, image_size, seed, first_step, workers)
    with closing(fetched):
        for indices, images, captions in fetched:
            tokens, ends = tokenizer.encode(captions, text_length)
            # By tokens, not by letters: what the model cannot tell apart is the same caption.
            _, caption_ids = np.unique(tokens, axis=0, return_inverse=True)
            yield Batch(images, tokens, ends, indices, caption_ids)


Fetched = tuple[np.ndarray, np.ndarray, list[str]]  # pair numbers, pictures, one caption each


def fetch_ahead(
    source: Source, batch_size: int, image_size: int, seed: int, first_step: int, workers: int
) -> Generator[Fetched]:
    step = first_step
    if workers == 0:
        while True:
            indices = pairs_of_step(step, num_pairs=source.num_pairs, batch_size=batch_size, seed=seed)
            yield indices, *fetch(source, indices, image_size, seed + step)
            step += 1
    with worker_pool(source, workers) as pool:
        waiting: deque[tuple[np.ndarray, list[Future]]] = deque()
        while True:
            while len(waiting) < 2:
                indices = pairs_of_step(step, num_pairs=source.num_pairs, batch_size=batch_size, seed=seed)
                pieces = [indices[i : i + PIECE] for i in range(0, batch_size, PIECE)]
                waiting.append(
                    (indices, [pool.submit(fetch_piece, piece, image_size, seed + step) for piece in pieces])
                )
                step += 1
            yield collect(*waiting.popleft(), image_size)


def collect(indices: np.ndarray, pieces: list[Future], image_size: int) -> Fetched:
    """Puts what the workers made into one batch, and lets go of each piece at once."""
    images = np.empty((len(indices), 3, image_size, image_size), dtype=np.uint8)
    captions: list[str] = []
    while pieces:
        piece_images, piece_captions = pieces.pop(0).result()
        images[len(captions) : len(captions) + len(piece_captions)] = piece_images
        captions += piece_captions
    return indices, images, captions


def fetch(
    source: Source, indices: np.ndarray, image_size: int, caption_seed: int
) -> tuple[np.ndarray, list[str]]:
    """Pictures [n, 3, H, W] and one caption each; which of several captions is drawn by the seed."""
    images = np.empty((len(indices), 3, image_size, image_size), dtype=np.uint8)
    captions = []
    for place, index in enumerate(indices):
        images[place] = np.asarray(source.picture(int(index), image_size)).transpose(2, 0, 1)
        wordings = source.captions(int(index))
        captions.append(
            wordings[np.random.default_rng([caption_seed, int(index)]).integers(len(wordings))]
            if len(wordings) > 1
            else wordings[0]
        )
    return images, captions


@contextmanager
def worker_pool(source: Source, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Spawned processes that hold the source; a dead one is an error, never a wait without end."""
    spawn = multiprocessing.get_context(
        "spawn"
    )  # the only way on macOS, and safe beside torch's threads everywhere
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker, initargs=(source,))
    try:
        # Workers are born deaf to what stops the parent, until they have left its group.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        for _ in range(workers):
            pool.submit(os.getpid)
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        yield pool
    except (BrokenProcessPool, BrokenPipeError):  # the second when it dies while work is handed to it
        raise UserError(
            "a process that prepares batches died",
            hint="in a script of your own, train under `if __name__ == '__main__':`; otherwise try `--workers 0`",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


worker_source: Source  # of this worker process, set as it starts


def start_worker(source: Source) -> None:
    global worker_source
    worker_source = source
    os.setpgid(0, 0)  # Ctrl-C and the like go to a whole group of processes; only the parent decides to stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()


def die_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def fetch_piece(indices: np.ndarray, image_size: int, caption_seed: int) -> tuple[np.ndarray, list[str]]:
    return fetch(worker_source, indices, image_size, caption_seed)
