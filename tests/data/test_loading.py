"""Faults of workers and files do not change the batches."""

import errno
import logging
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torchvision.transforms.v2  # noqa: F401 (imported here, since the import in each worker would exceed the timeouts)
from PIL import Image
from tests.data.batches import assert_same, view_pairs
from tests.data.faults import (
    ALWAYS,
    Fault,
    Faulty,
    Noise,
    after,
    crashes,
    drawn,
    fails,
    fails_within_pillow,
    kills,
    loses,
    stalls,
    stops,
)
from torch import Tensor
from torch.utils.data import DataLoader

from cribo.base.errors import DataError, MissingData, ShardError, WorkersFailed
from cribo.data.loading import BatchLoader
from cribo.data.samples import Batch, StepBatchSampler, Unreadable
from cribo.data.sources.images import ImageSource, open_images

BATCH = 4
IMAGES = 41  # ten batches and one image that is skipped
MANY = 73  # 18 batches, more than are prefetched
PATIENT = (0.001, 0.002, 0.003)
FEW_IMAGES, MANY_IMAGES = Noise(IMAGES), Noise(MANY)


class Training:
    """A minimal trainer: loads the batch of each step, epoch by epoch."""

    def __init__(
        self, source: ImageSource, *, workers: int = 2, timeout: float = 60, pin_memory: bool = False, **options: Any
    ) -> None:
        dataset = view_pairs(source, retry_delays=PATIENT)
        sampler = StepBatchSampler(source, BATCH, 0, position=lambda: self.step)
        self.step = 0
        before = set(multiprocessing.active_children())
        self._own: Callable[[], set[Any]] = lambda: set(multiprocessing.active_children()) - before
        self.loader = BatchLoader(dataset, sampler, workers=workers, pin_memory=pin_memory, timeout=timeout, **options)

    @property
    def workers(self) -> list[Any]:
        """Return the running worker processes."""
        return sorted(self._own(), key=lambda process: process.pid)

    def epoch(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.step += 1
            yield batch

    def batches(self, epochs: int = 1) -> list[Batch]:
        try:
            return [batch for _ in range(epochs) for batch in self.epoch()]
        finally:
            self.loader.close()


@cache
def expected(epochs: int = 1, *, source: ImageSource = FEW_IMAGES) -> list[Batch]:
    """Return the batches loaded in the main process."""
    return Training(source, workers=0).batches(epochs)


def retried(batches: Sequence[Batch]) -> int:
    return sum(batch.retried for batch in batches)


def skipped(batches: Sequence[Batch]) -> set[Unreadable]:
    return {entry for batch in batches for entry in batch.unreadable}


def threads() -> list[threading.Thread]:
    """Return the threads that read batches from workers."""
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def ended(processes: Sequence[Any], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(process.is_alive() for process in processes)


# ------------------------------------------------------------------ temporary faults


@pytest.mark.parametrize(
    ("fault", "restarts"),
    [(kills, 1), (stalls(3600), 1), (stops, 1), (stalls(0.3), 0)],
    ids=["killed", "hanging", "stopped", "slow"],
)
def test_a_worker_that_fails_once_changes_nothing(tmp_path: Path, fault: Fault, restarts: int) -> None:
    faulty = Faulty(FEW_IMAGES, tmp_path / "counts", {13: (fault, 1)})
    training = Training(faulty, timeout=3)
    batches = training.batches(2)
    assert_same(batches, expected(2))
    assert faulty.asked(13) == 1
    assert training.loader.restarts == restarts
    assert retried(batches) == 0


@pytest.mark.parametrize(
    ("fault", "workers"),
    [
        *((fault, 0) for fault in (fails(), fails(errno.ESTALE), fails(errno.ENETDOWN), fails_within_pillow)),
        *((fault, 2) for fault in (fails(), fails_within_pillow)),
    ],
    ids=["EIO", "ESTALE", "ENETDOWN", "Pillow", "EIO-workers", "Pillow-workers"],
)
def test_temporary_file_system_errors_are_retried(tmp_path: Path, fault: Fault, workers: int) -> None:
    """During a total outage, every image fails at first, and no image is given up."""
    faulty = Faulty(FEW_IMAGES, tmp_path / "counts", drawn(IMAGES, 0, 1.0, fault, times=len(PATIENT)))
    training = Training(faulty, workers=workers)
    batches = training.batches()
    assert_same(batches, expected())
    for batch in batches:
        assert all(faulty.asked(int(image)) == len(PATIENT) for image in batch.images)
    # Some faults may have occurred in workers that prefetch the next epoch.
    assert (
        retried(batches) == 10 * BATCH * len(PATIENT) if workers == 0 else retried(batches) > 8 * BATCH * len(PATIENT)
    )
    assert training.loader.restarts == 0
    assert skipped(batches) == set()


def test_several_faults_at_once(tmp_path: Path) -> None:
    count = 101
    faults: dict[int, tuple[Fault, int]] = {}
    for seed, (share, fault, times) in enumerate(
        [(0.02, kills, 1), (0.01, stalls(3600), 1), (0.1, fails(), 2), (0.05, stalls(0.1), 2)]
    ):
        faults = drawn(count, seed, share, fault, times) | faults
    faulty = Faulty(Noise(count, broken={3, 77}), tmp_path / "counts", faults)
    training = Training(faulty, timeout=3)
    batches = training.batches(2)
    assert_same(batches, expected(2, source=Noise(count, broken={3, 77})))
    assert 2 <= training.loader.restarts <= 3
    assert 1 <= retried(batches) <= 2 * 10  # retries for lost batches are not counted
    assert {entry.name for entry in skipped(batches)} == {"noise 3", "noise 77"}


class Wordy(Noise):
    """Images with names so long that workers are always in the middle of sending a message."""

    def name(self, index: int) -> str:
        return f"noise {index} " + 200_000 * "x"


def test_a_worker_killed_in_the_middle_of_a_message() -> None:
    """The pipe contains a partial message, whose remainder would be awaited forever."""
    source = Wordy(MANY, broken=range(0, MANY, 3))
    training = Training(source)
    batches = []
    for batch in training.epoch():
        batches.append(batch)
        if training.step in (2, 12):
            time.sleep(0.5)  # time for the workers to fill the pipe
            for worker in training.workers:
                worker.kill()
    training.loader.close()
    assert_same(batches, expected(source=source))
    assert training.loader.restarts == 2


def test_workers_killed_between_two_epochs_are_replaced() -> None:
    training = Training(FEW_IMAGES)
    batches = list(training.epoch())
    assert len(training.workers) == 2
    for worker in training.workers:
        worker.kill()
    batches += training.epoch()
    training.loader.close()
    assert_same(batches, expected(2))
    assert training.loader.restarts == 1


def use_another_loader() -> None:
    """After any DataLoader with workers, torch's handler raises errors anywhere in the main thread."""
    list(DataLoader(list(range(4)), num_workers=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(("another", "both"), [(None, False), (None, True), (0, False), (1, False)])
def test_a_dying_worker_does_not_interrupt_a_step(another: int | None, both: bool) -> None:
    """Another loader with workers is used before, during a step, or not at all."""
    if another == 0:
        use_another_loader()
    training = Training(MANY_IMAGES)
    batches = []
    for batch in training.epoch():
        if training.step == another:
            use_another_loader()
        if training.step == 3:
            for worker in training.workers[: 2 if both else 1]:
                worker.kill()
            for _ in range(20):  # the step
                time.sleep(0.01)
        batches.append(batch)
    training.loader.close()
    assert_same(batches, expected(source=MANY_IMAGES))
    assert training.loader.restarts == 1


def test_the_handler_of_the_program_is_kept() -> None:
    before = signal.signal(signal.SIGCHLD, handler := lambda number, frame: None)
    try:
        Training(FEW_IMAGES).batches()
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("both", [False, True])
def test_a_worker_stopped_during_a_step_is_replaced(both: bool) -> None:
    """Its prefetched batches are lost."""
    training = Training(MANY_IMAGES, timeout=3)
    batches = []
    for batch in training.epoch():
        if training.step == 3:
            for worker in training.workers[: 2 if both else 1]:
                os.kill(worker.pid, signal.SIGSTOP)
        batches.append(batch)
    training.loader.close()
    assert_same(batches, expected(source=MANY_IMAGES))
    assert training.loader.restarts == 1


def continue_workers(workers: Sequence[Any]) -> None:
    for worker in workers:
        os.kill(worker.pid, signal.SIGCONT)


def test_a_worker_that_continues_within_the_timeout_is_not_replaced() -> None:
    training = Training(MANY_IMAGES, timeout=30)
    batches = []
    for batch in training.epoch():
        if training.step == 3:
            for worker in training.workers:
                os.kill(worker.pid, signal.SIGSTOP)
            threading.Timer(1.0, continue_workers, (training.workers,)).start()
        batches.append(batch)
    training.loader.close()
    assert_same(batches, expected(source=MANY_IMAGES))
    assert training.loader.restarts == 0


def test_workers_killed_repeatedly_are_replaced() -> None:
    training = Training(FEW_IMAGES, max_restarts=1)
    batches = []
    for _ in range(3):
        for batch in training.epoch():
            batches.append(batch)
            if training.step % 6 == 0:
                for worker in training.workers:
                    worker.kill()
    training.loader.close()
    assert_same(batches, expected(3))
    assert training.loader.restarts == 4
    assert training.workers == []


def test_an_interruption_while_waiting_for_a_batch_loses_nothing(tmp_path: Path) -> None:
    training = Training(Faulty(FEW_IMAGES, tmp_path / "counts", drawn(IMAGES, 0, 1.0, stalls(0.3), 1)))

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        names = [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]
        if names[0] == "wait" and "next" in names:  # not while workers start or a lock is acquired
            raise Interrupted
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    before = signal.signal(signal.SIGALRM, interrupt)
    batches: list[Batch] = []
    interruptions = 0
    try:
        while training.step < 10:
            signal.setitimer(signal.ITIMER_REAL, 0.1 * 1.5**interruptions)
            try:
                for batch in training.loader:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    batches.append(batch)
                    training.step += 1
                    signal.setitimer(signal.ITIMER_REAL, 0.1 * 1.5**interruptions)
            except Interrupted:
                interruptions += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    training.loader.close()
    assert interruptions
    assert_same(batches, expected())


def test_page_locked_memory_is_not_used_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    for workers in (0, 1):
        batches = Training(FEW_IMAGES, workers=workers, pin_memory=True).batches()
        assert not any(batch["views"].is_pinned() for batch in batches)
        assert_same(batches, expected())


@pytest.mark.gpu
def test_batches_in_page_locked_memory_after_a_restart(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    training = Training(Faulty(FEW_IMAGES, tmp_path / "counts", {13: (kills, 1)}), pin_memory=True)
    batches = training.batches(2)
    assert training.loader.restarts == 1
    assert all(batch["views"].is_pinned() and batch["coordinates"].is_pinned() for batch in batches)
    assert_same(batches, expected(2))


# ------------------------------------------------------------------ permanent faults


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_file_is_skipped_after_the_last_attempt(tmp_path: Path, workers: int) -> None:
    faulty = Faulty(FEW_IMAGES, tmp_path / "counts", {7: (fails(), ALWAYS), 20: (fails(errno.EACCES), ALWAYS)})
    training = Training(faulty, workers=workers)
    batches = training.batches()
    assert_same(batches, expected(source=Noise(IMAGES, broken={7, 20})), reasons=False)
    assert skipped(batches) == {
        Unreadable("noise 7", str(OSError(errno.EIO, os.strerror(errno.EIO)))),
        Unreadable("noise 20", str(OSError(errno.EACCES, os.strerror(errno.EACCES)))),
    }
    assert retried(batches) == len(PATIENT)  # EACCES is not retried


def test_a_failed_image_is_not_retried_again(tmp_path: Path) -> None:
    faulty = Faulty(FEW_IMAGES, tmp_path / "counts", {7: (fails(), ALWAYS)})
    training = Training(faulty, workers=0)
    assert retried(training.batches(4)) == len(PATIENT)
    assert len(PATIENT) + 3 <= faulty.asked(7) <= len(PATIENT) + 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_deleted_file_is_skipped_immediately(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(12):
        pixels = Noise(12).load(index).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{index:02d}.png")
    files = open_images(folder)
    faulty = Faulty(files, tmp_path / "counts", {3: (loses(files, 3), 1)})
    training = Training(faulty, workers=workers)
    batches = training.batches(3)
    assert skipped(batches) == {Unreadable("03.png", "no such file")}
    assert retried(batches) == training.loader.restarts == 0
    assert_same(batches, expected(3, source=files))  # which no longer contains it


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (crashes, r"was killed \(SIGSEGV\)"),
        (stops, "no batch from 2 workers for 1 s"),
    ],
)
def test_an_image_that_always_kills_workers_stops_loading(tmp_path: Path, fault: Fault, message: str) -> None:
    faulty = Faulty(FEW_IMAGES, tmp_path / "counts", {13: (fault, ALWAYS)})
    training = Training(faulty, timeout=1, max_restarts=2)
    batches = []
    with pytest.raises(WorkersFailed, match=f"{message}.*; workers have failed 3 times for the same batch"):
        batches += training.epoch()
    wanted = [13 in (image for _, image in keys) for keys in StepBatchSampler(IMAGES, BATCH, 0, position=lambda: 0)]
    assert training.step <= wanted.index(True)
    assert training.loader.restarts >= 2
    assert ended(training.workers)


class Deadly(Noise):
    """A transform that kills workers at their first image."""

    def __init__(self, count: int, end: Callable[[], object]) -> None:
        super().__init__(count)
        self.end = end

    def load(self, index: int) -> Tensor:
        self.end()
        return super().load(index)


@pytest.mark.parametrize("most", [0, 2])
def test_workers_that_always_fail_stop_loading(most: int) -> None:
    training = Training(Deadly(IMAGES, kills), max_restarts=most)
    message = rf"one of 2 workers was killed \(SIGKILL.*\); workers have failed {most + 1} times for the same batch\. "
    with pytest.raises(WorkersFailed, match=message + r"Use fewer data\.workers, or give the job more memory"):
        training.batches()
    assert training.loader.restarts == most
    assert ended(training.workers)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os._exit(0), "ended with status 0"),
        (lambda: os._exit(3), "ended with status 3"),
        (lambda: os.kill(os.getpid(), 40), r"was killed \(signal 40\)"),
    ],
)
def test_workers_that_exit_in_any_way_stop_loading(end: Callable[[], None], message: str) -> None:
    training = Training(Deadly(IMAGES, end), max_restarts=1)
    with pytest.raises(WorkersFailed, match=f"one of 2 workers {message}; workers have failed 2 times .*data.workers"):
        training.batches()


def test_hanging_storage_stops_loading(tmp_path: Path) -> None:
    faulty = Faulty(FEW_IMAGES, tmp_path / "counts", drawn(IMAGES, 0, 1.0, stalls(3600), ALWAYS))
    training = Training(faulty, timeout=0.5, max_restarts=1)
    with pytest.raises(WorkersFailed, match=r"no batch from 2 workers for 0\.5 s; .*Check that data\.root can be read"):
        training.batches()
    assert training.step == 0


def begin_with_few_files(room: int, told: Any) -> None:
    """Load with a limit of open files, which is raised later."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1 + room, limits[1]))
    with suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(room):
        os.close(taken.pop())
    training = Training(FEW_IMAGES, max_restarts=1)
    try:
        next(training.epoch())
    except WorkersFailed as error:
        told.send(str(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_same(training.batches(), expected())
    told.send("the same")


@pytest.mark.parametrize("room", [1, 9])  # enough for no worker, and for one worker
def test_workers_that_cannot_be_started_stop_loading(room: int) -> None:
    heard, told = multiprocessing.Pipe()
    # In a new process, since threads of other tests may close files.
    process = multiprocessing.get_context("fork").Process(target=begin_with_few_files, args=(room, told))
    process.start()
    message = heard.recv()
    assert "workers could not be started: [Errno 24] Too many open files; workers have failed 2 times" in message
    assert "Use fewer data.workers" in message
    assert heard.recv() == "the same"
    process.join(30)
    assert process.exitcode == 0


# ------------------------------------------------------------------ messages


class Raising(Noise):
    """A transform that raises an error unrelated to images."""

    def __init__(self, count: int, error: Exception) -> None:
        super().__init__(count)
        self.error = error

    def load(self, index: int) -> Tensor:
        if index == 13:
            raise self.error
        return super().load(index)


@pytest.mark.parametrize("error", [ShardError("the shard a.tar: file not found"), DataError("not this")])
def test_user_errors_are_raised_unchanged(error: Exception) -> None:
    training = Training(Raising(IMAGES, error))
    with pytest.raises(type(error)) as raised:
        training.batches()
    assert str(raised.value) == str(error)
    assert training.loader.restarts == 0


class Lost(Noise):
    """A source whose order of the second epoch raises an error."""

    def epoch_order(self, seed: int, epoch: int) -> Tensor:
        if epoch:
            raise MissingData("the order is gone")
        return torch.arange(len(self))


@pytest.mark.parametrize(("step", "workers"), [(0, 0), (0, 2), (10, 2)])
def test_errors_of_the_order_are_raised_unchanged(step: int, workers: int) -> None:
    training = Training(Lost(IMAGES), workers=workers)
    training.step = step
    with pytest.raises(MissingData, match="the order is gone"):
        training.batches(2)
    assert training.step == 10
    assert training.loader.restarts == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("here"), RuntimeError("DataLoader timed out here")])
def test_internal_errors_keep_the_traceback_of_the_worker(error: Exception) -> None:
    training = Training(Raising(IMAGES, error))
    with pytest.raises(type(error), match=r"(?s)in DataLoader worker process.*in load.*here"):
        training.batches()
    assert training.loader.restarts == 0


def test_an_error_is_raised_at_its_batch() -> None:
    training = Training(Raising(IMAGES, DataError("not this")))
    batches: list[Batch] = []
    for _ in range(2):  # the batch can be requested again
        with pytest.raises(DataError):
            batches += training.epoch()
    wanted = [13 in (image for _, image in keys) for keys in StepBatchSampler(IMAGES, BATCH, 0, position=lambda: 0)]
    assert training.step == wanted.index(True)
    assert_same(batches, expected()[: training.step])
    training.loader.close()


def test_a_restart_is_logged_with_its_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Training(Faulty(FEW_IMAGES, tmp_path / "counts", {13: (kills, 1)})).batches()
    (told,) = caplog.messages
    assert told.startswith("one of 2 workers was killed (SIGKILL); ")
    assert told.endswith("restarting workers at the same batch (restart 1)")


# ------------------------------------------------------------------ start and stop


@pytest.mark.parametrize(("step", "workers"), [(7, 0), (7, 2), (10, 2), (19, 2)])
def test_loading_resumes_at_any_step(step: int, workers: int) -> None:
    training = Training(FEW_IMAGES, workers=workers)
    training.step = step
    assert_same(training.batches(2), expected(3)[step : 10 * (step // 10 + 2)])


def test_iteration_can_stop_and_restart_anywhere() -> None:
    training = Training(FEW_IMAGES)
    whole = expected(3)
    for step in (3, 14, 18, 2):
        training.step = step
        for batch in training.loader:
            assert_same([batch], [whole[training.step]])
            training.step += 1
            if training.step == step + 2:
                break
    training.loader.close()
    assert training.loader.restarts == 0


def test_two_concurrent_loaders_are_independent() -> None:
    training = Training(FEW_IMAGES)
    whole = expected(2)
    first = iter(training.loader)
    assert_same([next(first)], whole[:1])
    training.step = 12
    second = iter(training.loader)
    for turn in range(2):
        assert_same([next(second)], [whole[12 + turn]])
        assert_same([next(first)], [whole[1 + turn]])
    training.loader.close()


def test_workers_are_kept_across_epochs() -> None:
    training = Training(FEW_IMAGES)
    batches, workers = [], []
    for _ in range(3):
        epoch = training.epoch()
        for batch in epoch:
            batches.append(batch)
            workers.append([worker.pid for worker in training.workers])
            if training.step == 13:  # abandoned and continued at the same step
                epoch = training.epoch()
                break
        batches += epoch
    assert workers.count(workers[0]) == len(workers)
    training.loader.close()
    assert_same(batches, expected(3))


@pytest.mark.parametrize(
    ("fault", "how"), [(None, "closed"), (stops, "closed"), (stalls(3600), "closed"), (stops, "dropped")]
)
def test_closing_stops_the_workers(tmp_path: Path, fault: Fault | None, how: str) -> None:
    late = list(StepBatchSampler(IMAGES, BATCH, 0, position=lambda: 0))[5][0][1]
    first = tmp_path / "first"
    faults: Mapping[int, tuple[Fault, int]] = {} if fault is None else {late: (after(first, fault), 1)}
    before = threads()
    training = Training(Faulty(FEW_IMAGES, tmp_path / "counts", faults))
    next(training.epoch())
    first.touch()
    time.sleep(0.1)  # time for the fault to occur
    workers = training.workers
    assert len(workers) == 2
    began = time.monotonic()
    if how == "closed":
        training.loader.close()
        training.loader.close()
    else:
        del training.loader
    assert ended(workers, 0.1)
    assert time.monotonic() - began < 2.5
    assert ended([thread for thread in threads() if thread not in before])


def begin_and_die(source: ImageSource, told: Any) -> None:
    training = Training(source)
    next(training.epoch())
    time.sleep(0.5)  # time for the workers to fill the pipe
    told.send([worker.pid for worker in training.workers])
    kills()


@pytest.mark.parametrize("source", [Noise(IMAGES), Wordy(MANY, broken=range(0, MANY, 3))])
def test_workers_exit_with_the_training_process(source: ImageSource) -> None:
    """Also workers blocked by a full pipe."""
    heard, told = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=begin_and_die, args=(source, told))
    process.start()
    workers = heard.recv()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert len(workers) == 2
    assert ended([Adopted(pid) for pid in workers])


class Adopted:
    """A worker process of another parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False


def test_workers_ignore_signals_to_the_process_group() -> None:
    training = Training(FEW_IMAGES)
    batches = []
    for batch in training.epoch():
        if training.step == 2:
            for worker in training.workers:
                for number in (signal.SIGINT, signal.SIGUSR1):
                    os.kill(worker.pid, number)
        batches.append(batch)
    training.loader.close()
    assert training.loader.restarts == 0
    assert_same(batches, expected())
