"""Work done ahead in threads, in order: for what lets go of the interpreter, as reading, hashing and decoding do."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from lapclip.machine.hardware import num_usable_cores

A = TypeVar("A")
B = TypeVar("B")


def in_order(
    function: Callable[[A], B], items: Iterable[A], threads: int | None = None, ahead: int | None = None
) -> Iterator[B]:
    """`function` of each item, in order; at most `ahead` of them are begun before they are asked for.

    What one of them raises is raised at its place. Closing the iterator drops what was not begun.
    """
    threads = threads or max(1, num_usable_cores())
    ahead = ahead or 32 * threads
    waiting = iter(items)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ahead")
    try:
        begun: deque[Future[B]] = deque(pool.submit(function, item) for item in islice(waiting, ahead))
        while begun:
            result = begun.popleft().result()
            begun.extend(pool.submit(function, item) for item in islice(waiting, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
