"""One thread that computes for concurrent requests, several at once."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any

log = logging.getLogger("cribo")

Compute = Callable[[Sequence[Any]], Sequence[Any]]
"""Returns one result for each item."""


@dataclass
class _Task:
    compute: Compute
    item: Any
    future: Future[Any] = field(default_factory=Future)


class Batches:
    """A thread that computes for concurrent requests, in the order of their arrival.

    Whatever is waiting when the thread is free is computed at once, up to `size` items: a single request does not wait
    for others.

    Args:
        size: maximum number of items to compute at once.

    Example:
        >>> batches = Batches(4)
        >>> batches.submit(lambda items: [2 * item for item in items], 21).result()
        42
        >>> batches.close()
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._waiting: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cribo-batches", daemon=True)
        self._thread.start()

    def submit(self, compute: Compute, item: Any) -> Future[Any]:
        """Add an item; the items of equal functions are computed together.

        If the function fails for several items, it is called for each of them. Cancelling the future removes the item,
        unless it is already being computed.
        """
        task = _Task(compute, item)
        self._waiting.put(task)
        return task.future

    def close(self) -> None:
        """Stop the thread, after all items have been computed."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        task = self._waiting.get()
        while task is not None:
            tasks, task = [task], None
            while len(tasks) < self.size and not self._waiting.empty():
                if (following := self._waiting.get()) is None:
                    self._waiting.put(None)
                    break
                tasks.append(following)
            started = [each for each in tasks if each.future.set_running_or_notify_cancel()]
            for compute in dict.fromkeys(each.compute for each in started):
                _compute(compute, [each for each in started if each.compute == compute])
            del tasks, started  # images, which must not stay in memory until the next request
            task = self._waiting.get()


def _compute(compute: Compute, tasks: Sequence[_Task]) -> None:
    """Compute tasks that share a function, and set their results."""
    try:
        results = list(zip(tasks, compute([task.item for task in tasks]), strict=True))
    except Exception as error:
        if len(tasks) > 1:
            for task in tasks:
                _compute(compute, [task])
            return
        if error.__traceback__ is not None:  # its frames have the images
            clear_frames(error.__traceback__)
            error.__traceback__ = error.__traceback__.tb_next
        tasks[0].future.set_exception(error)
        return
    for task, result in results:
        task.future.set_result(result)
