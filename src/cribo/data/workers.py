"""Reads batches from worker processes, and detects workers that died or hang."""

import atexit
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from cribo.data.batches import Batches, BatchIterator

_CHECK_SECONDS = 0.2  # between checks of the workers
_EXIT_SECONDS = 0.5  # limit on the time between a connection error and the exit of its worker
_END_SECONDS = 1.0  # limit on the time in which workers end
_TORCH_SECONDS = 6.0  # longer than torch takes to notice that all workers have ended

_MORE_MEMORY = (
    "Use fewer data.workers, or give the job more memory (SIGKILL) or shared memory (SIGBUS; --shm-size of docker); "
    "lower data.max_pixels if single images are too large; set data.workers 0 to see other failures"
)


class WorkerFault(Exception):
    """A worker died, or no batch came within the timeout; `advice` says what the user can do."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


class BackgroundReader:
    """Reads batches from workers in a thread, because a read can block forever after a worker has died.

    A worker that is killed in the middle of a message leaves a part of it, or a locked lock. Neither the timeout of
    torch's `DataLoader` nor its destructor is prepared for that.

    Raises:
        WorkerFault: the workers cannot be started.
    """

    def __init__(self, batches: Batches) -> None:
        try:
            with _without_torchs_handler():
                iterator = iter(batches)
        except OSError as error:
            raise WorkerFault(f"workers could not be started: {error}", "Use fewer data.workers") from None
        self._workers = iterator.workers
        self._read: queue.Queue[Any] = queue.Queue(1)
        self._is_ended = threading.Event()
        arguments = (iterator, self._read, self._is_ended)
        self._thread = threading.Thread(target=_read, args=arguments, daemon=True, name="batches")
        self._thread.start()

    def next(self, timeout: float) -> Any:
        """Return the next batch, or raise the error of its samples.

        Raises:
            WorkerFault: a worker died, or no batch came within the timeout in seconds.
        """
        until = time.monotonic() + timeout
        while True:
            try:
                batch = self._read.get(timeout=min(_CHECK_SECONDS, timeout))
            except queue.Empty:
                self._require_running(0)
            else:
                if not isinstance(batch, Exception):
                    return batch
                self._require_running(_EXIT_SECONDS)
                raise batch
            if time.monotonic() > until:
                raise WorkerFault(
                    f"no batch from {len(self._workers)} workers for {timeout:g} s",
                    "Check that data.root can be read, or raise data.timeout if storage is slow",
                )

    def end(self) -> None:
        """End the workers; kill those that do not exit soon."""
        self._is_ended.set()
        with suppress(queue.Empty):
            self._read.get_nowait()  # the thread may be waiting for room in the queue
        if not self._ended_workers(0):  # reading from a worker that has ended may block the thread forever
            self._thread.join(_END_SECONDS)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(_END_SECONDS)
        if self._thread.is_alive():  # torch aborts the process if the thread still runs when the interpreter ends
            atexit.register(self._thread.join, _TORCH_SECONDS)

    def _require_running(self, seconds: float) -> None:
        """Raise a WorkerFault if a worker has ended or ends within some seconds."""
        for worker in self._ended_workers(seconds):
            until = time.monotonic() + _EXIT_SECONDS
            while worker.exitcode is None and time.monotonic() < until:
                time.sleep(0.01)  # None while another thread waits for the same process
            raise WorkerFault(f"one of {len(self._workers)} workers {_described(worker.exitcode)}", _MORE_MEMORY)

    def _ended_workers(self, seconds: float) -> list[BaseProcess]:
        """Return the workers that have ended, waiting some seconds for the first."""
        ended = connection.wait([worker.sentinel for worker in self._workers], seconds)
        return [worker for worker in self._workers if worker.sentinel in ended]


@contextmanager
def _without_torchs_handler() -> Iterator[None]:
    """Remove torch's SIGCHLD handler, which raises errors about dead workers anywhere in the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    yield
    is_torchs = getattr(before, "__module__", "").startswith("torch.")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_torchs or before is None else before)


def _read(iterator: BatchIterator, read: "queue.Queue[Any]", is_ended: threading.Event) -> None:
    """Read batches until the reader ends, then drop the iterator, which ends the workers."""
    try:
        while not is_ended.is_set():
            read.put(next(iterator))
    except Exception as error:
        error.__cause__ = error.__context__ = None  # their tracebacks, too, would keep the iterator alive
        read.put(error.with_traceback(None))
        is_ended.wait()  # dropping the iterator now would end the workers, which then look as if they had failed


def _described(status: int | None) -> str:
    """Describe the exit status of a process."""
    if status is None or status >= 0:
        return f"ended with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed ({names.get(-status, f'signal {-status}')})"  # real-time signals have no name
