"""Batches from worker processes; workers that die or hang are replaced, and loading goes on at the batch due."""

import copy
import logging
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from cribo.data.images import DataError
from cribo.data.samples import Batch, SampleDataset, StepBatchSampler
from cribo.errors import Stopped

log = logging.getLogger("cribo")

TIMEOUT = 420.0
"""Seconds without a batch after which workers count as hung: more than all of `storage.RETRY_DELAYS`."""

MAX_RESTARTS = 3
"""Restarts for one batch after which the run stops."""

_PREFETCHED = 4  # batches of each worker
_AHEAD = 2  # batches that the thread keeps at hand, in page-locked memory if they are to be
_LOOK_SECONDS = 0.5  # between two looks at the workers, while nothing comes from them
_END_SECONDS = 5.0  # for workers that are to end


class WorkersFailed(Stopped):
    """Workers were killed or hung too often."""


class BatchLoader:
    """The batches of a data set from the current step to the end of its epoch, each time that it is iterated over.

    Workers that are killed or hang are begun anew at the batch that is due. Since batches are a function of their keys
    alone, they are the same bit for bit. Nothing that a worker does, or leaves undone, can keep this process waiting
    for ever: what waits is a thread, which is left behind with it.

    Args:
        dataset: makes a batch of its keys.
        sampler: gives the keys of each batch.
        workers: processes that load; with 0 this process does, and nobody can help it.
        pin_memory: have batches in page-locked memory, where there is a GPU.
        timeout: seconds without a batch after which the workers count as hung.
        max_restarts: how often workers are replaced for one batch.

    Attributes:
        restarts: of workers so far.

    Raises:
        WorkersFailed: workers were killed or hung more often than that.
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
        """Batches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Batches to the end of the epoch that the current step lies in."""
        due = self.sampler.position()
        end = due - due % len(self) + len(self)
        return map(self._batch, range(due, end)) if self.workers else self._from_here(due)

    def close(self) -> None:
        """End the workers; they begin again when they are needed."""
        if self._crew is not None:
            self._crew.end()
            self._crew = None

    def __del__(self) -> None:
        # A process that was forked from this one has no say over its workers.
        if os.getpid() == self._owner and not sys.is_finalizing():
            self.close()

    def _from_here(self, step: int) -> Iterator[Batch]:
        for keys in self.sampler.batches_from(step):
            batch = self.dataset.__getitems__(keys)
            yield batch.pin_memory() if self.pin_memory else batch

    def _batch(self, step: int) -> Batch:
        """The batch of a step, whatever it takes."""
        _let_workers_die()
        failures = 0
        while True:
            if self._crew is None or self._crew.due != step:
                self.close()
                self._crew = _Crew(self.dataset, self.sampler, step, workers=self.workers, pin_memory=self.pin_memory)
            try:
                return self._crew.next(self.timeout)
            except _Fault as fault:
                self._crew.kill()
                self._crew = None
                failures += 1
                if failures > self.max_restarts:
                    raise WorkersFailed(
                        f"{fault}; workers have failed {failures} times for the same batch. {fault.advice}"
                    ) from None
                self.restarts += 1
                log.warning("%s; workers are begun anew at the same batch (restart %d)", fault, self.restarts)


# Iterators that threads take batches from. A process that is forked meanwhile has the iterators and not the threads:
# this keeps it from ending the workers of others.
_IN_USE: set[Any] = set()


class _Fault(Exception):
    """Why workers have to be begun anew, and what helps against it."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


class _Crew:
    """Some workers, and the thread that takes batches from them; both are given up together.

    A worker that dies or is stopped may leave half a message behind, a lock that nobody opens any more, or a batch that
    nobody hands over, and whoever reads on waits for ever: that is not to be the process that trains. Nor is it to end
    the iterator of a `DataLoader`, which takes such locks, too: the thread does, by dropping its last reference.

    Args:
        dataset, sampler: of the loader.
        step: that the first batch is for; the others follow, epoch after epoch.
        workers: how many.
        pin_memory: have batches in page-locked memory.

    Attributes:
        due: the step that the next batch is for; None if that is not known.
    """

    def __init__(
        self, dataset: SampleDataset, sampler: StepBatchSampler, step: int, *, workers: int, pin_memory: bool
    ) -> None:
        self.due: int | None = step
        self._processes: list[BaseProcess] = []
        self._loader = DataLoader(
            cast(Any, _Reported(dataset)),
            batch_sampler=cast(Any, _BatchesFrom(sampler, step)),
            num_workers=workers,
            collate_fn=_as_it_is,
            prefetch_factor=_PREFETCHED,
            worker_init_fn=_begin_worker,
            multiprocessing_context=_noting(self._processes),
            generator=torch.Generator(),  # which it draws seeds from that nobody uses
        )
        self._device = torch.cuda.current_device() if pin_memory else None
        self._batches: queue.Queue[Any] = queue.Queue(_AHEAD)
        self._stop, started = threading.Event(), threading.Event()
        threading.Thread(target=self._fetch, args=(started,), daemon=True, name="batches of workers").start()
        started.wait()  # rather than do anything while the thread forks

    def next(self, timeout: float) -> Batch:
        """The batch that is due.

        Raises:
            _Fault: it does not come, because a worker is dead or in that time.
        """
        since = time.monotonic()
        due, self.due = self.due, None  # until it is here: an interruption might lose it
        assert due is not None
        while True:
            try:
                batch = self._batches.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if dead := self._dead():
                    raise self._end_of(dead) from None
                if time.monotonic() - since > timeout:
                    raise _Fault(
                        f"no batch from {len(self._processes)} workers for {timeout:g} s",
                        "See whether data.root can be read, or raise data.timeout if it is so slow",
                    ) from None
            else:
                if isinstance(batch, _Raised):
                    # A worker's end may be felt in its connections a moment before it is seen.
                    raise self._end_of(dead) if (dead := self._dead(_LOOK_SECONDS)) else batch.error
                self.due = due + 1
                return batch

    def end(self) -> None:
        """Have the workers end by themselves; those that do not are killed."""
        self._stop.set()
        with suppress(queue.Empty):
            self._batches.get_nowait()  # the thread may wait for room
        self._wait()
        self.kill()

    def kill(self) -> None:
        """Kill the workers, whatever they do."""
        self._stop.set()
        for process in self._processes:
            process.kill()
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))

    def _dead(self, seconds: float = 0.0) -> list[BaseProcess]:
        """The workers that have ended; waits for one so long."""
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes], timeout=seconds)
        return [process for process in self._processes if process.sentinel in ended]

    def _end_of(self, dead: list[BaseProcess]) -> _Fault:
        dead[0].join(_END_SECONDS)
        what, advice = _described(dead[0].exitcode)
        return _Fault(f"a worker of {len(self._processes)} {what}", advice)

    def _fetch(self, started: threading.Event) -> None:
        """Take batches from the workers until nobody wants them; the end of this ends the workers."""
        iterator: Any = None
        try:
            iterator = self._begin(started)
            _IN_USE.add(iterator)
            if self._device is not None:
                torch.cuda.set_device(self._device)  # each thread has its own
            while not self._stop.is_set():
                batch = next(iterator)
                self._offer(batch if self._device is None else batch.pin_memory())
        except Exception as error:
            self._offer(_Raised(error.with_traceback(None)))  # which would have a reference to the iterator
        self._stop.wait()
        _IN_USE.discard(iterator)

    def _begin(self, started: threading.Event) -> Iterator[Any]:
        try:
            return iter(cast(Any, self._loader))
        except OSError as error:
            why = str(error)
        finally:
            self._processes[:] = [process for process in self._processes if process.pid is not None]
            started.set()
        raise _Fault(f"workers could not be started: {why}", "Use fewer data.workers")

    def _offer(self, item: Any) -> None:
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._batches.put(item, timeout=_LOOK_SECONDS)
                return


@dataclass(frozen=True)
class _Raised:
    """An error in place of a batch."""

    error: Exception

    def pin_memory(self) -> "_Raised":
        return self


class _Reported(Dataset[Any]):
    """A data set whose errors for users arrive as they are: others come with the traceback of the worker."""

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: "list[tuple[int, int]] | _Raised") -> "Batch | _Raised":
        if isinstance(keys, _Raised):
            return keys
        try:
            return self.dataset.__getitems__(keys)
        except (Stopped, DataError, ImportError) as error:
            return _Raised(error)


class _BatchesFrom(Sampler[Any]):
    """The batches of a sampler from a step on, epoch after epoch; an error of its own from the batch on that it has."""

    def __init__(self, sampler: StepBatchSampler, step: int) -> None:
        self.sampler = sampler
        self.step = step

    def __iter__(self) -> Iterator[list[tuple[int, int]] | _Raised]:
        step = self.step
        try:
            while True:
                for keys in self.sampler.batches_from(step):
                    yield keys
                    step += 1
        except Exception as error:
            while True:  # rather than an end, which would end the workers
                yield _Raised(error)


def _as_it_is(batch: Any) -> Any:
    return batch  # the data set makes whole batches


def _noting(processes: list[BaseProcess]) -> Any:
    """A context of `multiprocessing` that notes the processes made in it."""
    context: Any = copy.copy(multiprocessing.get_context())
    make = context.Process

    def noted(*args: Any, **kwargs: Any) -> BaseProcess:
        processes.append(make(*args, **kwargs))
        return processes[-1]

    context.Process = noted
    return context


class _Quiet:
    """A signal handler without its errors."""

    def __init__(self, handler: Callable[[int, Any], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        with suppress(RuntimeError):
            self.handler(number, frame)


def _let_workers_die() -> None:
    """Keep torch from raising an error about a dead worker wherever the main thread is just then.

    It does so once anybody has used a `DataLoader` with workers in there.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and not isinstance(handler, _Quiet):
        signal.signal(signal.SIGCHLD, _Quiet(handler))


def _begin_worker(number: int) -> None:
    """Leave it to the process that trains what to do about signals that everybody gets, such as that of Ctrl-C."""
    signal.set_wakeup_fd(-1)  # inherited: it would count them once more for each worker
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="end of the parent").start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # by itself it would wait for room in a pipe that nobody reads any more


def _described(status: int | None) -> tuple[str, str]:
    """How a process ended, and what helps."""
    if status is None or status >= 0:
        return f"ended with status {status}", "Set data.workers 0 to see what it fails at"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # not all have one
        name = f"signal {-status}"
    if name == "SIGKILL":
        return "was killed (SIGKILL, as a system does that runs out of memory)", (
            "Use fewer data.workers, or give the job more memory; lower data.max_pixels if single images are too large"
        )
    if name == "SIGBUS":
        return "was killed (SIGBUS, as a system does without room for shared memory)", (
            "Give more shared memory (/dev/shm; --shm-size of docker), or use fewer data.workers"
        )
    return f"was killed ({name})", "Set data.workers 0 to see what it fails at"
