"""What the processes that load are at, in memory that they share with the one that waits for them."""

import enum

import torch
from torch.utils.data import get_worker_info


class _Column(enum.IntEnum):
    AT_WORK = 0  # 1 more than the image's index; 0 for none
    BEGUN = 1
    RETRIED = 2
    LAST_IMAGE = 3
    LAST_ERROR = 4


class Journal:
    """Notes of each worker: the image it reads, how many it has begun, how often it had to try again.

    Plain numbers in shared memory, so that they can be read while a worker hangs and after it has been killed.

    Args:
        workers: processes that write; 0 if the process itself loads.

    Example:
        >>> journal = Journal(0)
        >>> journal.begin(7)
        >>> journal.at_work(0), journal.signs
        (7, 1)
    """

    def __init__(self, workers: int) -> None:
        rows = torch.zeros((max(1, workers), len(_Column)), dtype=torch.int64)
        self._rows = rows.share_memory_() if workers else rows

    def begin(self, image: int) -> None:
        """This process begins to read an image."""
        row = self._row
        row[_Column.AT_WORK] = image + 1
        row[_Column.BEGUN] += 1

    def end(self) -> None:
        """This process has read it, or given it up."""
        self._row[_Column.AT_WORK] = 0

    def retry(self, image: int, error: int) -> None:
        """This process will try again to read an image, which failed with this `errno`."""
        row = self._row
        row[_Column.LAST_IMAGE] = image
        row[_Column.LAST_ERROR] = error
        row[_Column.RETRIED] += 1

    @property
    def signs(self) -> int:
        """A number that grows as long as any process does something."""
        return int(self._rows[:, _Column.BEGUN].sum())

    @property
    def retried(self) -> int:
        """How often reading was tried again, in all processes together."""
        return int(self._rows[:, _Column.RETRIED].sum())

    @property
    def last_retry(self) -> tuple[int, int]:
        """Image and `errno` of a read that was tried again, of the process that had to do so most often."""
        row = self._rows[int(self._rows[:, _Column.RETRIED].argmax())]
        return int(row[_Column.LAST_IMAGE]), int(row[_Column.LAST_ERROR])

    def at_work(self, worker: int) -> int | None:
        """The image that a worker reads; None for none."""
        image = int(self._rows[worker, _Column.AT_WORK])
        return image - 1 if image else None

    def forget_work(self) -> None:
        """Nobody reads anything: the workers are gone."""
        self._rows[:, _Column.AT_WORK] = 0

    @property
    def _row(self) -> torch.Tensor:
        worker = get_worker_info()
        # Without rows of their own workers count for themselves, in what they have been forked with.
        return self._rows[0 if worker is None or len(self._rows) == 1 else worker.id]
