"""torch's `DataLoader`, with errors of samples re-raised unchanged in the main process."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from cribo.base.errors import Stopped

PREFETCHED = 4  # batches per worker


class Batches:
    """torch's `DataLoader`, with errors of samples re-raised unchanged in the main process.

    A plain `DataLoader` wraps the errors of workers in other exceptions whose message is the traceback. Here, workers
    also ignore signals to the process group, such as SIGINT from Ctrl-C, and exit with the main process.

    Args:
        dataset: map-style data set of the samples.
        collate: collates the samples of a batch: a list, or what `dataset.__getitems__` returns.
        workers: number of worker processes; 0 loads in the main process.
        options: further options of `DataLoader`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[Any], Any] = default_collate,
        *,
        workers: int = 0,
        **options: Any,
    ) -> None:
        self._loader: DataLoader[Any] = DataLoader(
            _ErrorsAsValues(dataset, collate),
            collate_fn=unchanged,
            num_workers=workers,
            prefetch_factor=PREFETCHED if workers else None,
            worker_init_fn=_begin_worker,
            **options,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> "BatchIterator":
        return BatchIterator(self._loader)


class BatchIterator(Iterator[Any]):
    """Iterator of `Batches`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batches: Any = iter(loader)
        self.workers: list[BaseProcess] = getattr(self._batches, "_workers", [])

    def __next__(self) -> Any:
        batch = next(self._batches)
        if isinstance(batch, Exception):
            raise batch
        return batch


class _ErrorsAsValues(Dataset[Any]):
    """Data set of batches that returns errors of samples instead of raising them."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)  # pyright: ignore[reportArgumentType]

    def __getitems__(self, keys: Any) -> Any:
        if isinstance(keys, Exception):  # of the sampler
            return keys
        try:
            read = getattr(self._dataset, "__getitems__", None)
            return self._collate(read(keys) if read else [self._dataset[key] for key in keys])
        except (Stopped, ValueError, OSError, ImportError) as error:
            if get_worker_info() is not None:
                error.add_note(traceback.format_exc())
            return error


def unchanged(batch: Any) -> Any:
    """Return a batch unchanged: the `collate` of data sets that return whole batches."""
    return batch


def _begin_worker(number: int) -> None:
    """Ignore signals to the process group, and exit when the main process exits."""
    signal.set_wakeup_fd(-1)  # the inherited descriptor would report the parent's signals again
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="end of the parent").start()


def _end_with_parent() -> None:
    """Exit when the parent exits; torch's own check does not end a worker that is blocked by a full pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
