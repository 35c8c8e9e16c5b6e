"""Processes that work ahead: spawned, without torch, deaf to Ctrl-C, and gone when their parent is."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from lapclip.errors import UserError

STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def worker_pool(held: Any, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that hold something, such as a source; a dead one is an error, never a wait without end."""
    spawn = multiprocessing.get_context("spawn")  # the only way on macOS, and safe beside torch's threads
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker, initargs=(held,))
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


held_here: Any  # of this worker process, set as it starts


def start_worker(held: Any) -> None:
    global held_here
    held_here = held
    os.setpgid(0, 0)  # Ctrl-C and the like go to a whole group of processes; only the parent decides to stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()


def die_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def held() -> Any:
    """What this worker process was given."""
    return held_here
