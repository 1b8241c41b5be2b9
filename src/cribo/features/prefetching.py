"""Bounded prefetching: apply a function in threads ahead of the consumer."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice, tee
from typing import TypeVar

Item = TypeVar("Item")
Part = TypeVar("Part", bound=Sized)
Result = TypeVar("Result")

BUDGET = 2**28
"""Default memory limit of prefetched items and results, in bytes."""


def prefetch(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    ahead: int,
    nbytes: Callable[[Item, Result | None], int | None],
    budget: int = BUDGET,
) -> Generator[Result, None, None]:
    """Apply a function to items in threads, and yield the results in order.

    The queue is filled up to its limits before the oldest result is awaited.

    Args:
        function: function to call in the threads.
        items: items, iterated over in the calling thread.
        threads: number of threads.
        ahead: limit on the number of items that are queued, processed, or not yet consumed.
        nbytes: returns the size in bytes of an item and its result, which is None until it is complete. If it returns
            None, the size of the last complete item is assumed.
        budget: limit on the total size in bytes; items are added to the queue while the total is below it.

    Example:
        >>> list(prefetch(abs, [-3, 2, -1], threads=2, ahead=2, nbytes=lambda item, result: 8))
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


def prefetch_parts(
    read: Callable[[Part, int], Result],
    parts: Iterable[Part],
    *,
    threads: int,
    ahead: int,
    nbytes: Callable[[Result], int],
) -> Generator[tuple[Part, Iterator[Result]], None, None]:
    """Read the items of all parts in threads, also those of the next parts, and yield each part with its items.

    The items of a part must be consumed before the next part.

    Args:
        read: reads an item of a part by its index.
        parts: such as collections of images.
        threads: number of threads.
        ahead: limit on the number of items that are queued, read, or not yet consumed.
        nbytes: returns the size of an item in bytes.

    Example:
        >>> parts = prefetch_parts(lambda part, index: part[index] * 2, ["ab", "c"], threads=2, ahead=2, nbytes=len)
        >>> [(part, list(items)) for part, items in parts]
        [('ab', ['aa', 'bb']), ('c', ['cc'])]
    """
    read_next, yielded = tee(parts)
    items = prefetch(
        lambda place: read(*place),
        ((part, index) for part in read_next for index in range(len(part))),
        threads=threads,
        ahead=ahead,
        nbytes=lambda _, item: None if item is None else nbytes(item),
    )
    with closing(items):
        for part in yielded:
            yield part, islice(items, len(part))
