"""Batches from worker processes; workers that die or hang are restarted at the current batch."""

import logging
import os
import sys
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch

from cribo.base.errors import WorkersFailed
from cribo.data.batches import Batches, unchanged
from cribo.data.channels import DIM_IMAGES
from cribo.data.samples import Batch, SampleDataset, StepBatchSampler
from cribo.data.workers import BackgroundReader, WorkerFault

log = logging.getLogger("cribo")


class BatchLoader:
    """Iterates over the batches of a data set from the current step to the end of its epoch.

    Workers that die or hang are replaced, starting at the same batch; batches depend only on their keys.

    Args:
        dataset: creates a batch from its keys.
        sampler: returns the keys of each batch.
        workers: number of worker processes; 0 loads in the main process, without a timeout.
        pin_memory: return batches in page-locked memory if a GPU is available.
        device: GPU to copy the batches to, each while the one before is used.
        timeout: seconds without a batch after which workers count as hung; longer than all `storage.RETRY_DELAYS`.
        max_restarts: maximum number of restarts for one batch.

    Attributes:
        restarts: number of restarts so far.

    Raises:
        WorkersFailed: workers died or hung more than `max_restarts` times.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        sampler: StepBatchSampler,
        *,
        workers: int,
        pin_memory: bool,
        device: torch.device | None = None,
        timeout: float = 420.0,
        max_restarts: int = 3,
    ) -> None:
        self._reader: BackgroundReader | None = None
        self._due = -1  # step of the reader's next batch; -1 if unknown
        self._owner = os.getpid()
        self.dataset, self.sampler, self.workers = dataset, sampler, workers
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.device = device
        self.timeout, self.max_restarts = timeout, max_restarts
        self.restarts = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches from the current step to the end of its epoch."""
        if not self.workers:
            batches: Iterator[Batch] = iter(self._batches(self.sampler))
        else:
            due = self.sampler.position()
            batches = map(self._batch, range(due, due - due % len(self) + len(self)))
        return batches if self.device is None else _copied_ahead(batches, self.device)

    def close(self) -> None:
        """Stop the workers; the next batch starts new ones."""
        if self._reader is not None:
            self._reader.end()
            self._reader = None

    def __del__(self) -> None:
        # A forked copy of this process must not end its parent's workers.
        if os.getpid() == self._owner and not sys.is_finalizing():
            self.close()

    def _batches(self, keys: Any) -> Batches:
        """Return the batches of some keys, without drawing from the global random number generator."""
        options = {"batch_sampler": keys, "pin_memory": self.pin_memory, "generator": torch.Generator()}
        return Batches(self.dataset, unchanged, workers=self.workers, **options)

    def _batch(self, step: int) -> Batch:
        """Return the batch of a step from workers, which continue across epochs, restarting them if necessary."""
        failures = 0
        while True:
            try:
                if self._reader is None or self._due != step:
                    self.close()
                    self._reader = BackgroundReader(self._batches(_endless(self.sampler, step)))
                self._due = -1  # an interruption or error might lose the batch
                batch = self._reader.next(self.timeout)
                self._due = step + 1
                DIM_IMAGES.extend(batch.dim)
                return batch
            except WorkerFault as fault:
                self.close()
                failures += 1
                if failures > self.max_restarts:
                    text = f"{fault}; workers have failed {failures} times for the same batch. {fault.advice}"
                    raise WorkersFailed(text) from None
                self.restarts += 1
                log.warning("%s; restarting workers at the same batch (restart %d)", fault, self.restarts)


def _copied_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on a GPU; the next one is copied on a stream of its own before a batch is used."""
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    def copied() -> tuple[Batch, torch.cuda.Event] | None:
        if (batch := next(batches, None)) is None:
            return None
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            on_device = batch.to(device)
            event.record(stream)
        return on_device, event

    ahead = copied()
    while ahead is not None:
        batch, event = ahead
        ahead = copied()
        current.wait_event(event)
        batch.record_stream(current)  # or the memory could be reused by a copy while it is still read
        yield batch


def _endless(sampler: StepBatchSampler, step: int) -> Iterator[list[tuple[int, int]] | Exception]:
    """Iterate over the keys of all batches from a step on, or over the error if the sampler fails."""
    try:
        while True:
            for keys in sampler.batches_from(step):
                yield keys
                step += 1
    except Exception as error:
        yield from repeat(error)
