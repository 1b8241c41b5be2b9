"""Batches from worker processes; workers that die or hang are restarted at the current batch."""

import copy
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from cribo.data.images import DataError
from cribo.data.samples import Batch, SampleDataset, StepBatchSampler
from cribo.errors import Stopped

log = logging.getLogger("cribo")

TIMEOUT = 420.0
"""Seconds without a batch after which workers count as hung; exceeds the sum of `storage.RETRY_DELAYS`."""

MAX_RESTARTS = 3
"""Restarts allowed for one batch."""

_PREFETCHED = 4  # batches per worker
_SEEN_SECONDS = 0.5  # from a connection error to the exit of the worker
_END_SECONDS = 5.0  # for workers to exit
_DROP_SECONDS = 1.0  # for the destructor of the iterator, after the workers have exited

_MORE_MEMORY = (
    "Use fewer data.workers, or give the job more memory (SIGKILL) or shared memory (SIGBUS; --shm-size of docker); "
    "lower data.max_pixels if single images are too large; set data.workers 0 to see other failures"
)


class WorkersFailed(Stopped):
    """Workers died or hung too often."""


class BatchLoader:
    """Iterates over the batches of a data set from the current step to the end of its epoch.

    Workers that die or hang are replaced, starting at the same batch. Batches depend only on their keys, so they are
    bitwise identical.

    Args:
        dataset: creates a batch from its keys.
        sampler: returns the keys of each batch.
        workers: number of worker processes; 0 loads in the main process, without a timeout.
        pin_memory: return batches in page-locked memory if a GPU is available.
        timeout: seconds without a batch after which the workers count as hung.
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
        timeout: float = TIMEOUT,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self._owner = os.getpid()
        self._crew: _Crew | None = None
        self.dataset = dataset
        self.sampler = sampler
        self.workers = workers
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.timeout = timeout
        self.max_restarts = max_restarts
        self.restarts = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches from the current step to the end of its epoch."""
        due = self.sampler.position()
        end = due - due % len(self) + len(self)
        return map(self._batch, range(due, end)) if self.workers else self._from_here(due)

    def close(self) -> None:
        """Stop the workers; the next batch starts new ones."""
        if self._crew is not None:
            self._crew.end()
            self._crew = None

    def __del__(self) -> None:
        # A forked copy of this process must not end its parent's workers.
        if os.getpid() == self._owner and not sys.is_finalizing():
            self.close()

    def _from_here(self, step: int) -> Iterator[Batch]:
        for keys in self.sampler.batches_from(step):
            batch = self.dataset.__getitems__(keys)
            yield batch.pin_memory() if self.pin_memory else batch

    def _batch(self, step: int) -> Batch:
        """Return the batch of a step, restarting the workers if necessary."""
        failures = 0
        while True:
            try:
                if self._crew is None or self._crew.due != step:
                    self.close()
                    self._crew = _Crew(self.dataset, self.sampler, step, self.workers, pin_memory=self.pin_memory)
                return self._crew.next(self.timeout)
            except _Fault as fault:
                if self._crew is not None:
                    self._crew.kill()
                    self._crew = None
                failures += 1
                if failures > self.max_restarts:
                    raise WorkersFailed(
                        f"{fault}; workers have failed {failures} times for the same batch. {fault.advice}"
                    ) from None
                self.restarts += 1
                log.warning("%s; restarting workers at the same batch (restart %d)", fault, self.restarts)


class _Fault(Exception):
    """A failure of workers, with advice for the user."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


class _Crew:
    """The workers of one `DataLoader` iterator, which continues across epochs.

    A worker that dies may leave a partial message or a locked lock, so that the next read blocks forever. A SIGCHLD
    handler interrupts the read by raising an error in the main thread as soon as a worker dies. Workers that hang are
    killed by a timer, with the same effect.

    Args:
        dataset, sampler: those of the loader.
        step: step of the first batch.
        workers: number of workers.
        pin_memory: return batches in page-locked memory.

    Attributes:
        due: step of the next batch; None if unknown.

    Raises:
        _Fault: the workers cannot be started.
    """

    def __init__(
        self, dataset: SampleDataset, sampler: StepBatchSampler, step: int, workers: int, *, pin_memory: bool
    ) -> None:
        self.due: int | None = step
        self._hung = False
        self._dropping: threading.Thread | None = None
        self._processes: list[BaseProcess] = []
        self._iterators: list[Iterator[Any]] = []  # one, until the workers end
        loader = DataLoader(
            _ErrorsAsValues(dataset),
            batch_sampler=cast(Any, _endless(sampler, step)),
            num_workers=workers,
            collate_fn=unchanged,
            pin_memory=pin_memory,
            prefetch_factor=_PREFETCHED,
            worker_init_fn=_begin_worker,
            multiprocessing_context=_recording(self._processes),
            generator=torch.Generator(),  # instead of the global one, which would be advanced
        )
        errors: list[BaseException] = []

        def start() -> None:
            try:
                self._iterators.append(iter(loader))
            except BaseException as error:
                errors.append(error)

        # Fork in another thread, since signal handlers run in the main thread: an error that a handler raises during
        # a fork is lost, and leaves the locks of `logging` acquired.
        thread = threading.Thread(target=start, name="start of workers")
        thread.start()
        try:
            thread.join()
        except BaseException as error:  # an interruption
            thread.join()  # `kill` must know all workers
            errors.append(error)
        self._processes[:] = [process for process in self._processes if process.pid is not None]
        if errors:
            self.kill()
        for error in errors:
            if isinstance(error, OSError):
                raise _Fault(f"workers could not be started: {error}", "Use fewer data.workers")
            raise error

    def next(self, timeout: float) -> Batch:
        """Return the next batch.

        Raises:
            _Fault: a worker died, or no batch came within the timeout.
        """
        due, self.due = self.due, None  # an interruption might lose the batch
        assert due is not None
        fault = batch = None
        timer = threading.Timer(timeout, self._kill_hung)
        timer.daemon = True
        timer.start()
        try:
            with _raising_when_ended(self._processes):
                # Workers that are already dead send no signal.
                fault = self._fault(timeout)
                batch = None if fault else next(self._iterators[0])
        except Exception:
            fault = self._fault(timeout, wait=_SEEN_SECONDS)
            if fault is None:
                raise
        finally:
            timer.cancel()
        if fault is not None:
            raise fault  # outside the except block, whose exception references the iterator
        if isinstance(batch, Exception):
            raise batch
        self.due = due + 1
        return cast(Batch, batch)

    def end(self) -> None:
        """Wait for the workers to exit; kill those that do not."""
        self._drop_iterator()
        self._join()
        self.kill()

    def kill(self) -> None:
        """Kill the workers."""
        for process in self._processes:
            process.kill()
        self._join()
        self._drop_iterator()
        if self._dropping is not None:
            # If the process exits now, interpreter shutdown could close objects that the destructor uses.
            self._dropping.join(_DROP_SECONDS)

    def _drop_iterator(self) -> None:
        # In a thread, since the iterator's destructor may wait forever for a lock held by a dead worker.
        if self._iterators:
            self._dropping = threading.Thread(target=self._iterators.clear, daemon=True, name="end of workers")
            self._dropping.start()

    def _join(self) -> None:
        until = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))

    def _kill_hung(self) -> None:
        self._hung = True
        for process in self._processes:
            process.kill()

    def _fault(self, timeout: float, *, wait: float = 0.0) -> _Fault | None:
        """Return the reason for restarting the workers, or None."""
        count = len(self._processes)
        if self._hung:
            advice = "Check that data.root can be read, or raise data.timeout if storage is slow"
            return _Fault(f"no batch from {count} workers for {timeout:g} s", advice)
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes], timeout=wait)
        for process in self._processes:
            if process.sentinel in ended:
                process.join(_END_SECONDS)
                return _Fault(f"one of {count} workers {_described(process.exitcode)}", _MORE_MEMORY)
        return None


class _ErrorsAsValues(Dataset[Any]):
    """Dataset that returns user errors instead of raising them, since workers turn exceptions into traceback text."""

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: "list[tuple[int, int]] | Exception") -> "Batch | Exception":
        if isinstance(keys, Exception):
            return keys
        try:
            return self.dataset.__getitems__(keys)
        except (Stopped, DataError, ImportError) as error:
            return error


def _endless(sampler: StepBatchSampler, step: int) -> Iterator[list[tuple[int, int]] | Exception]:
    """Iterate endlessly over the keys of all batches from a step on, or over the error if the sampler fails."""
    try:
        while True:
            for keys in sampler.batches_from(step):
                yield keys
                step += 1
    except Exception as error:
        while True:
            yield error


def unchanged(batch: Any) -> Any:
    """Return a batch unchanged: the `collate_fn` of data sets that return whole batches."""
    return batch


def _recording(processes: list[BaseProcess]) -> Any:
    """Return a `multiprocessing` context that records the processes it creates."""
    context: Any = copy.copy(multiprocessing.get_context())
    make = context.Process

    def recorded(*args: Any, **kwargs: Any) -> BaseProcess:
        processes.append(make(*args, **kwargs))
        return processes[-1]

    context.Process = recorded
    return context


@contextmanager
def _raising_when_ended(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Raise a RuntimeError in this context as soon as one of the processes exits.

    No-op outside the main thread and on systems without SIGCHLD. There, torch detects a dead worker within seconds,
    unless the worker left a partial message.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    usual = _WithoutErrors(before) if callable(before) and not isinstance(before, _WithoutErrors) else before

    def handle(number: int, frame: Any) -> None:
        if callable(usual):
            usual(number, frame)
        if multiprocessing.connection.wait([process.sentinel for process in processes], timeout=0):
            raise RuntimeError("a worker exited")

    signal.signal(signal.SIGCHLD, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if usual is None else usual)


class _WithoutErrors:
    """Wrapper of torch's SIGCHLD handler that suppresses its error about dead workers.

    The error could interrupt the main thread anywhere, for example during a training step.
    """

    def __init__(self, handler: Callable[[int, Any], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        with suppress(RuntimeError):
            self.handler(number, frame)


def _begin_worker(number: int) -> None:
    """Ignore signals to the process group, such as SIGINT from Ctrl-C, and exit when the parent exits."""
    signal.set_wakeup_fd(-1)  # the inherited descriptor would report the parent's signals again
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="end of the parent").start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # torch's own check does not end a worker that is blocked by a full pipe


def _described(status: int | None) -> str:
    """Describe the exit status of a process."""
    if status is None or status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed ({signal.Signals(-status).name})"
    except ValueError:  # real-time signals have no name
        return f"was killed (signal {-status})"
