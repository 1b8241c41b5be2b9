"""Work in threads ahead of its consumer, within a number of items and bytes."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

BUDGET = 2**28
"""Bytes that are held ahead of a consumer."""


def map_ahead(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    ahead: int,
    nbytes: Callable[[Item, Result | None], int | None],
    budget: int = BUDGET,
) -> Generator[Result, None, None]:
    """Apply a function to items in threads, and yield the results in order.

    The queue is kept full: an item is taken in before the oldest result is waited for.

    Args:
        function: called in the threads.
        items: iterated over in the calling thread, while the threads work.
        threads: that work.
        ahead: limit on the number of items that are being worked on or whose results are not consumed.
        nbytes: bytes that an item and its result hold; the result is None until it is complete. Where it then returns
            None, the size of the last complete one is assumed.
        budget: of these bytes; an item is let in while less is held.

    Example:
        >>> list(map_ahead(abs, [-3, 2, -1], threads=2, ahead=2, nbytes=lambda item, result: 8))
        [3, 2, 1]
    """
    pool = ThreadPoolExecutor(threads)
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    last: int | None = None

    def held() -> int:
        nonlocal last
        total = unknown = 0
        for item, future in waiting:
            size = nbytes(item, future.result() if future.done() else None)
            if size is None:
                unknown += 1
            else:
                total, last = total + size, size
        return total + unknown * (budget // threads if last is None else last)

    try:
        for item in items:
            while waiting and (len(waiting) >= ahead or held() >= budget):
                yield waiting.popleft()[1].result()
            waiting.append((item, pool.submit(function, item)))
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)
