"""Work done ahead: by processes, which are spawned without torch and gone when their parent is, or by threads."""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeVar

from lapclip.errors import UserError
from lapclip.machine.hardware import num_usable_cores

STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
A = TypeVar("A")
B = TypeVar("B")


def submit_ahead(submit: Callable[[A], B], items: Iterable[A], num_ahead: int) -> Generator[B]:
    """What `submit` returns for each item, in order; at most `num_ahead` are begun before they are asked for."""
    waiting = iter(items)
    begun = deque(map(submit, islice(waiting, num_ahead)))
    while begun:
        yield begun.popleft()
        begun.extend(map(submit, islice(waiting, 1)))


def in_order(
    function: Callable[[A], B], items: Iterable[A], threads: int | None = None, ahead: int | None = None
) -> Generator[B]:
    """`function` of each item, in order, by threads: for what releases the GIL, as reading, hashing and decoding do.

    What one of them raises is raised at its place. Closing the iterator drops what was not begun.
    """
    threads = threads or num_usable_cores()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ahead")
    try:
        for future in submit_ahead(lambda item: pool.submit(function, item), items, ahead or 32 * threads):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def worker_pool(held: Any, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that hold something, such as a source; a dead one is an error, never a wait without end."""
    spawn = multiprocessing.get_context("spawn")  # the only way on macOS, and safe beside torch's threads
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker, initargs=(held,))
    try:
        # Workers start with the signals that stop the parent blocked, until they have left its group.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        with nullcontext() if type(held).__module__ == "__main__" else hidden_main():
            for _ in range(workers):
                pool.submit(os.getpid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield pool
    except (BrokenProcessPool, BrokenPipeError):  # the second when it dies while work is handed to it
        raise UserError("a worker process died while it prepared images", hint="try `--workers 0`") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def hidden_main() -> Iterator[None]:
    """New processes do not import the user's script, which without `if __name__ == "__main__":` would run again."""
    main = vars(sys.modules["__main__"])
    before = dict(main)
    main |= {"__spec__": None, "__file__": None}
    try:
        yield
    finally:
        for name in ("__spec__", "__file__"):
            main.pop(name)
        main |= {name: before[name] for name in ("__spec__", "__file__") if name in before}


held_here: Any  # of this worker process, set as it starts


def start_worker(held: Any) -> None:
    global held_here
    held_here = held
    warnings.filterwarnings("ignore", module="PIL")  # about metadata, as in the command line
    os.setpgid(0, 0)  # Ctrl-C and the like go to a whole group of processes; only the parent decides to stop
    for number in STOPPING:  # ignoring a signal discards one that came before, and would end this process now
        signal.signal(number, signal.signal(number, signal.SIG_IGN))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()


def die_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def with_held(function: Callable[..., B], *arguments: Any) -> B:
    """`function` of what this worker process was given, and of the arguments."""
    return function(held_here, *arguments)
