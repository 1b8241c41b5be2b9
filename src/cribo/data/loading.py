"""Batches from worker processes, which are begun anew where they were when one of them is killed or hangs."""

import logging
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling

from cribo.data.images import DataError
from cribo.data.journal import Journal
from cribo.data.pairs import StepBatchSampler, ViewPairDataset, ViewPairs
from cribo.errors import Stopped

log = logging.getLogger("cribo")

TIMEOUT = 420.0
"""Seconds without a sign of life after which workers count as hung.

More than a shard's storage is given (`Patience`). Four times that, after which the run stops, is less than the half an
hour that the other processes of a run wait for this one.
"""

MAX_RESTARTS = 3
"""Restarts for one batch after which the run stops."""

_FREQUENT_BATCHES = 100  # more than three times as many restarts within so many batches stop the run, too
_PREFETCHED = 4  # batches of each worker
_AHEAD = 2  # batches that the thread keeps at hand, in page-locked memory if they are to be
_LOOK_SECONDS = 0.5  # between two looks at the workers, while nothing comes from them
_TELL_SECONDS = 60.0  # between two lines about reads that are tried again
_END_SECONDS = 5.0  # for workers that are killed, and for the thread that waits for them


class WorkersFailed(Stopped):
    """Workers were killed or hung too often."""


class PairLoader:
    """The batches of a data set from the current step to the end of its epoch, each time that it is iterated over.

    Workers that are killed, or give no sign of life, are begun anew at the batch that is due. Since batches are a
    function of their keys alone, they are the same bit for bit. An image during whose reading this happens twice in
    succession is left out: another one takes its place, and it is reported as unreadable. Nothing that a worker does,
    or leaves undone, can keep this process waiting for ever: what waits is a thread that is left behind with it.

    Args:
        dataset: makes a batch of its keys.
        sampler: gives the keys of each batch.
        workers: processes that load; with 0 this process does, and nobody can help it.
        pin_memory: have batches in page-locked memory, where there is a GPU.
        timeout: seconds without a sign of life (an image that is begun) after which workers that a batch is waited
            for from count as hung.
        max_restarts: of the workers for one batch; one more, or more than three times as many within a hundred
            batches, ends the loading.

    Attributes:
        journal: what the workers are at.
        restarts: of workers so far.

    Raises:
        WorkersFailed: workers were killed or hung more often than that.
    """

    def __init__(
        self,
        dataset: ViewPairDataset,
        sampler: StepBatchSampler,
        *,
        workers: int,
        pin_memory: bool,
        timeout: float = TIMEOUT,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self._process = os.getpid()
        self._crew: _Crew | None = None
        self.journal = Journal(workers)
        self.dataset = dataset.watched(self.journal)
        self.sampler = sampler
        self.workers = workers
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.timeout = timeout
        self.max_restarts = max_restarts
        self.restarts = 0
        self._restarted = _Restarts(max_restarts)
        self._told, self._told_at = 0, -float("inf")

    @property
    def retried(self) -> int:
        """How often reading an image was tried again."""
        return self.journal.retried

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[ViewPairs]:
        """Batches to the end of the epoch that the current step lies in."""
        due = self.sampler.position()
        end = due - due % len(self) + len(self)
        return self._from_workers(due, end) if self.workers else self._from_here(due)

    def close(self) -> None:
        """End the workers; they begin again when they are needed."""
        if self._crew is not None:
            self._crew.end()
            self._crew = None

    def __del__(self) -> None:
        # A process that was forked from this one has no say over its workers.
        if os.getpid() == self._process and not sys.is_finalizing():
            self.close()

    def _from_here(self, due: int) -> Iterator[ViewPairs]:
        for keys in self.sampler.batches_from(due):
            batch = self.dataset.__getitems__(keys)
            self._tell_retries()
            yield batch.pin_memory() if self.pin_memory else batch

    def _from_workers(self, due: int, end: int) -> Iterator[ViewPairs]:
        if self._crew is not None and not self._crew.idle:
            self.close()
        if self._crew is None:
            self._crew = self._new_crew()
        self._crew.begin(due)
        for step in range(due, end):
            yield self._batch(step)

    def _new_crew(self) -> "_Crew":
        return _Crew(self.dataset, self.sampler, workers=self.workers, pin_memory=self.pin_memory)

    def _batch(self, step: int) -> ViewPairs:
        """The batch of a step, whatever it takes."""
        while True:
            assert self._crew is not None
            try:
                return self._wait(self._crew)
            except _Fault as fault:
                self._crew.kill()
                self.journal.forget_work()
                self._note(fault, step)
                self._crew = self._new_crew()
                self._crew.begin(step)

    def _wait(self, crew: "_Crew") -> ViewPairs:
        signs, since = self.journal.signs, time.monotonic()
        while True:
            try:
                batch = crew.next(_LOOK_SECONDS)
            except queue.Empty:
                if signs != self.journal.signs:  # the batch may still come, even if another worker is dead
                    signs, since = self.journal.signs, time.monotonic()
                elif dead := crew.dead():
                    raise self._killed(dead) from None
                elif time.monotonic() - since > self.timeout:
                    raise self._hung() from None
            except Exception as error:
                # A worker's end may be felt in its connections a moment before it is seen.
                if dead := crew.dead(_LOOK_SECONDS):
                    raise self._killed(dead) from error
                raise
            else:
                return batch
            finally:
                self._tell_retries()

    def _killed(self, dead: "dict[int, BaseProcess]") -> "_Fault":
        worker, process = next(iter(dead.items()))
        process.join(_END_SECONDS)
        images = [image for image in map(self.journal.at_work, dead) if image is not None]
        what, advice = _end_of(process.exitcode)
        return _Fault(f"worker {worker + 1} of {self.workers} {what}{self._while_reading(images)}", advice, images)

    def _hung(self) -> "_Fault":
        at_work = [image for image in map(self.journal.at_work, range(self.workers)) if image is not None]
        # If all of them hang, it is the storage, and no image is to blame.
        images = at_work if len(at_work) < self.workers else []
        what = f"no sign of life from {self.workers} workers for {self.timeout:g} s{self._while_reading(at_work)}"
        advice = "See whether data.root can be read, or raise data.timeout if it is so slow"
        return _Fault(what, advice, images)

    def _while_reading(self, images: Sequence[int]) -> str:
        names = [self.dataset.source.name(image) for image in images]
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        return f" while reading {names[0]}{more}" if names else ""

    def _note(self, fault: "_Fault", step: int) -> None:
        """Count a restart, leave out images that are to blame, and give up if it is too much."""
        blamed = self._restarted.add(fault, step)
        for image in blamed:
            self.dataset.excluded[image] = f"left out, since twice: {fault.what}"
        if often := self._restarted.too_often:
            raise WorkersFailed(f"{fault.what}; workers have failed {often}. {fault.advice}")
        self.restarts += 1
        log.warning("%s; workers are begun anew at the same batch (restart %d)", fault.what, self.restarts)

    def _tell_retries(self) -> None:
        retried = self.journal.retried
        if retried == self._told or time.monotonic() - self._told_at < _TELL_SECONDS:
            return
        self._told, self._told_at = retried, time.monotonic()
        image, number = self.journal.last_retry
        name = self.dataset.source.name(image)
        log.warning("%s: %s; reading has been tried again %d times so far", name, os.strerror(number), retried)


class _Fault(Exception):
    """Why workers have to be begun anew, what helps against it, and the images that it may come from."""

    def __init__(self, what: str, advice: str, images: Sequence[int] = ()) -> None:
        super().__init__(what)
        self.what, self.advice, self.images = what, advice, frozenset(images)


class _Restarts:
    """How often workers were begun anew, and which images were being read each time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._steps: deque[int] = deque(maxlen=3 * most + 1)
        self._same = 0
        self._suspects: frozenset[int] = frozenset()

    def add(self, fault: _Fault, step: int) -> frozenset[int]:
        """Note a restart; the images that it is the second one in succession for."""
        blamed = fault.images & self._suspects
        self._suspects = fault.images - blamed
        if blamed or not self._steps or step != self._steps[-1]:
            self._same = 0  # it will be another batch
        self._same += 1
        self._steps.append(step)
        return blamed

    @property
    def too_often(self) -> str:
        """By which measure they are too many; empty if they are not."""
        if self._same > self.most:
            return f"{self._same} times for the same batch"
        if len(self._steps) > 3 * self.most and self._steps[-1] - self._steps[0] < _FREQUENT_BATCHES:
            return f"{len(self._steps)} times within {_FREQUENT_BATCHES} batches"
        return ""


class _Crew:
    """Some workers and the thread that waits for them, which are given up together.

    The thread takes batches out of a `DataLoader`. A worker that dies may leave half a message behind, or a lock that
    nobody opens any more, and whoever reads on waits for ever: that is not to be the process that trains.
    """

    def __init__(self, dataset: ViewPairDataset, sampler: StepBatchSampler, *, workers: int, pin_memory: bool) -> None:
        self._keys = _From(sampler, 0)
        self._loader = DataLoader(
            _Reported(dataset),
            batch_sampler=self._keys,
            num_workers=workers,
            collate_fn=_as_it_is,
            persistent_workers=True,
            prefetch_factor=_PREFETCHED,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # which it draws seeds from that nobody uses
        )
        self._device = torch.cuda.current_device() if pin_memory else None
        self._iterator: Any = None
        self._stop = threading.Event()
        self._batches: queue.Queue[Any] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all batches that were asked for have been fetched."""
        if self._thread is not None:
            self._thread.join(_LOOK_SECONDS)
        return self._batches.empty() and (self._thread is None or not self._thread.is_alive())

    def begin(self, step: int) -> None:
        """Fetch batches, from this step to the end of its epoch."""
        self._keys.step = step
        self._thread = threading.Thread(target=self._fetch, daemon=True, name="batches of workers")
        self._thread.start()

    def next(self, seconds: float) -> Any:
        """A batch; raises queue.Empty if none comes, and what went wrong with it."""
        item = self._batches.get(timeout=seconds)
        if isinstance(item, _Raised):
            raise item.error
        return item

    def dead(self, seconds: float = 0.0) -> dict[int, BaseProcess]:
        """The workers that have ended, by number; waits for one so long."""
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes], timeout=seconds)
        return {number: process for number, process in enumerate(self._processes) if process.sentinel in ended}

    def end(self) -> None:
        """Have the workers end by themselves; those that do not are killed."""
        self._stop.set()
        with suppress(queue.Empty):
            self._batches.get_nowait()  # the thread may wait for room
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        waiting = self._thread is not None and self._thread.is_alive()
        if self._iterator is not None and not waiting and not self.dead():
            # By a thread, since one worker after the other is waited for.
            ending = threading.Thread(target=self._iterator._shutdown_workers, daemon=True, name="end of workers")
            ending.start()
            ending.join(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the workers, whatever they do."""
        self._stop.set()
        processes = self._processes
        for process in processes:
            process.kill()
        until = time.monotonic() + _END_SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        if self._iterator is not None and not self._iterator._worker_result_queue._writer.closed:
            self._iterator._shutdown = True  # its own way to end waits for locks that the killed may have held
            # With nobody left who could write, a thread that waits for the rest of a message reads that it has ended.
            self._iterator._worker_result_queue._writer.close()

    @property
    def _processes(self) -> list[BaseProcess]:
        return [] if self._iterator is None else list(self._iterator._workers)

    def _fetch(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # each thread has its own
            self._begin_workers()
            for batch in self._iterator:
                pinned = batch.pin_memory() if self._device is not None and not isinstance(batch, _Raised) else batch
                if not self._offer(pinned):
                    return
        except Exception as error:
            self._offer(_Raised(error))

    def _begin_workers(self) -> None:
        try:
            self._iterator = iter(cast(Any, self._loader))
        except OSError as error:
            raise _Fault(f"workers could not be started: {error}", "Use fewer data.workers") from error
        if self._iterator._worker_pids_set:
            # torch would raise its error about a dead worker wherever the main thread is just then.
            cast(Any, signal_handling)._remove_worker_pids(id(self._iterator))
            self._iterator._worker_pids_set = False

    def _offer(self, item: Any) -> bool:
        """Hand over a batch or an error; False if nobody wants it any more."""
        while not self._stop.is_set():
            try:
                self._batches.put(item, timeout=_LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False


@dataclass(frozen=True)
class _Raised:
    """An error in place of a batch."""

    error: Exception


class _Reported(Dataset[Any]):
    """A data set whose errors for users arrive as they are: others come with the traceback of the worker."""

    def __init__(self, dataset: ViewPairDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> "ViewPairs | _Raised":
        try:
            return self.dataset.__getitems__(keys)
        except (Stopped, DataError, ImportError) as error:
            return _Raised(error)


class _From(Sampler[list[tuple[int, int]]]):
    """The batches of a sampler from a step on, to the end of its epoch."""

    def __init__(self, sampler: StepBatchSampler, step: int) -> None:
        self.sampler = sampler
        self.step = step

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.sampler.batches_from(self.step)


def _as_it_is(batch: Any) -> Any:
    return batch  # the data set makes whole batches


def _begin_worker(number: int) -> None:
    """Leave it to the process that trains what to do about signals that everybody gets, such as that of Ctrl-C."""
    signal.set_wakeup_fd(-1)  # inherited: it would count them once more for each worker
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _end_of(status: int | None) -> tuple[str, str]:
    """How a process ended, and what helps."""
    if status is None or status >= 0:
        return f"ended with status {status}", "Set data.workers 0 to see what it fails at"
    name = signal.Signals(-status).name
    if name == "SIGKILL":
        return "was killed (SIGKILL, as a system does that runs out of memory)", (
            "Use fewer data.workers, or give the job more memory; lower data.max_pixels if single images are too large"
        )
    if name == "SIGBUS":
        return "was killed (SIGBUS, as a system does without room for shared memory)", (
            "Give more shared memory (/dev/shm; --shm-size of docker), or use fewer data.workers"
        )
    return f"was killed ({name})", "Set data.workers 0 to see what it fails at"
