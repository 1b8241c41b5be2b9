"""Whatever happens to workers and files, batches are those of a run in which nothing did."""

import errno
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.transforms.v2  # noqa: F401 (which each worker would import by itself, for longer than is waited here)
from PIL import Image
from tests.data.faults import (
    ALWAYS,
    Fault,
    Faulty,
    Noise,
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

from cribo.data.images import DataError, ImageSource, open_images
from cribo.data.loading import PairLoader, WorkersFailed
from cribo.data.pairs import StepBatchSampler, Unreadable, ViewPairDataset, ViewPairs
from cribo.data.storage import ShardError
from cribo.method import ViewRecipe

BATCH = 4
IMAGES = 41  # ten batches and an image that sits out
PATIENT = (0.001, 0.002, 0.003)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.data.loading._LOOK_SECONDS", 0.1)
    monkeypatch.setattr("cribo.data.loading._END_SECONDS", 1.0)


class Training:
    """What a trainer does with a loader: one step after the other, epoch after epoch."""

    def __init__(
        self, source: ImageSource, *, workers: int = 2, timeout: float = 60, pin_memory: bool = False, **options: Any
    ) -> None:
        dataset = ViewPairDataset(
            source, ViewRecipe(size=16), grid=(4, 4), num_objects=5, drop_path_sites=3, seed=0, retry_delays=PATIENT
        )
        sampler = StepBatchSampler(len(source), BATCH, 0, position=lambda: self.step)
        self.step = 0
        self.loader: PairLoader = PairLoader(
            dataset, sampler, workers=workers, pin_memory=pin_memory, timeout=timeout, **options
        )

    def epoch(self) -> Iterator[ViewPairs]:
        for batch in self.loader:
            self.step += 1
            yield batch

    def batches(self, epochs: int = 1) -> list[ViewPairs]:
        try:
            return [batch for _ in range(epochs) for batch in self.epoch()]
        finally:
            self.loader.close()


def assert_same(ours: Sequence[ViewPairs], theirs: Sequence[ViewPairs], *, reasons: bool = True) -> None:
    assert len(ours) == len(theirs)
    for first, second in zip(ours, theirs, strict=True):
        for field in fields(ViewPairs):
            mine, other = getattr(first, field.name), getattr(second, field.name)
            if isinstance(mine, Tensor):
                assert torch.equal(mine, other), field.name
            elif field.name == "photometric":
                assert all(torch.equal(getattr(mine, name), getattr(other, name)) for name in vars(mine))
            elif reasons:
                assert mine == other
            else:
                assert [entry.name for entry in mine] == [entry.name for entry in other]


def skipped(batches: Sequence[ViewPairs]) -> set[Unreadable]:
    return {entry for batch in batches for entry in batch.unreadable}


def ended(processes: Sequence[Any], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(process.is_alive() for process in processes)


# ------------------------------------------------------------------ faults that pass


@pytest.mark.parametrize(
    ("fault", "restarts"), [(kills, 1), (crashes, 1), (stalls(3600), 1), (stops, 1), (stalls(0.3), 0)]
)
def test_a_worker_that_fails_once_changes_nothing(tmp_path: Path, fault: Fault, restarts: int) -> None:
    faulty = Faulty(Noise(IMAGES), tmp_path / "counts", {13: (fault, 1)})
    training = Training(faulty, timeout=3)
    assert_same(training.batches(2), Training(Noise(IMAGES), workers=0).batches(2))
    assert faulty.asked(13) == 1
    assert training.loader.restarts == restarts
    assert training.loader.retried == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", [fails(), fails(errno.ESTALE), fails(errno.ETIMEDOUT), fails_within_pillow])
def test_a_file_system_that_fails_for_a_while_is_waited_for(tmp_path: Path, fault: Fault, workers: int) -> None:
    """A total outage: every image fails at first, and none is given up."""
    faulty = Faulty(Noise(IMAGES), tmp_path / "counts", drawn(IMAGES, 0, 1.0, fault, times=len(PATIENT)))
    training = Training(faulty, workers=workers)
    batches = training.batches()
    assert_same(batches, Training(Noise(IMAGES), workers=0).batches())
    assert training.loader.retried == 10 * BATCH * len(PATIENT)
    assert training.loader.restarts == 0
    assert skipped(batches) == set()


def test_everything_at_once(tmp_path: Path) -> None:
    count = 101
    faults: dict[int, tuple[Fault, int]] = {}
    for seed, (share, fault, times) in enumerate(
        [(0.02, kills, 1), (0.01, stalls(3600), 1), (0.1, fails(), 2), (0.05, stalls(0.1), 2)]
    ):
        faults = drawn(count, seed, share, fault, times) | faults
    faulty = Faulty(Noise(count, broken={3, 77}), tmp_path / "counts", faults)
    training = Training(faulty, timeout=3)
    batches = training.batches(2)
    assert_same(batches, Training(Noise(count, broken={3, 77}), workers=0).batches(2))
    assert 2 <= training.loader.restarts <= 3
    assert training.loader.retried >= 10
    assert {entry.name for entry in skipped(batches)} == {"noise 3", "noise 77"}


class Wordy(Noise):
    """Images whose names alone fill the pipe from a worker, so that it always is in the middle of a message."""

    def name(self, index: int) -> str:
        return f"noise {index} " + 200_000 * "x"


def test_a_worker_killed_in_the_middle_of_a_message() -> None:
    """Half a message is in the pipe: whoever reads the rest waits for ever."""
    source = Wordy(161, broken=range(0, 161, 3))
    training = Training(source)
    batches = []
    before = set(multiprocessing.active_children())
    for batch in training.epoch():
        batches.append(batch)
        if training.step in (2, 20):
            time.sleep(0.5)  # in which the workers go on until the pipe is full
            for worker in set(multiprocessing.active_children()) - before:
                worker.kill()
    training.loader.close()
    assert_same(batches, Training(source, workers=0).batches())
    assert training.loader.restarts == 2


def test_workers_that_are_killed_between_two_epochs() -> None:
    training = Training(Noise(IMAGES))
    before = set(multiprocessing.active_children())
    batches = list(training.epoch())
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    for worker in workers:
        worker.kill()
    batches += training.epoch()
    training.loader.close()
    assert_same(batches, Training(Noise(IMAGES), workers=0).batches(2))
    assert training.loader.restarts == 1


def test_the_death_of_a_worker_does_not_break_into_a_step() -> None:
    """Once there has been a DataLoader with workers, torch raises an error wherever the main thread is."""
    list(DataLoader(list(range(4)), num_workers=1))  # type: ignore[arg-type]
    training = Training(Noise(IMAGES))
    before = set(multiprocessing.active_children())
    batches = []
    for batch in training.epoch():
        if training.step == 3:
            for worker in set(multiprocessing.active_children()) - before:
                worker.kill()
            for _ in range(20):  # the step
                time.sleep(0.01)
        batches.append(batch)
    training.loader.close()
    assert_same(batches, Training(Noise(IMAGES), workers=0).batches())


@pytest.mark.gpu
def test_batches_in_page_locked_memory_after_a_restart(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    training = Training(Faulty(Noise(IMAGES), tmp_path / "counts", {13: (kills, 1)}), pin_memory=True)
    batches = training.batches(2)
    assert training.loader.restarts == 1
    assert all(batch.views.is_pinned() and batch.coordinates.is_pinned() for batch in batches)
    assert_same(batches, Training(Noise(IMAGES), workers=0).batches(2))


# ------------------------------------------------------------------ faults that do not pass


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_stays_unreadable_is_skipped_after_the_last_attempt(tmp_path: Path, workers: int) -> None:
    faulty = Faulty(Noise(IMAGES), tmp_path / "counts", {7: (fails(), ALWAYS), 20: (fails(errno.EACCES), ALWAYS)})
    training = Training(faulty, workers=workers)
    batches = training.batches()
    assert_same(batches, Training(Noise(IMAGES, broken={7, 20}), workers=0).batches(), reasons=False)
    assert skipped(batches) == {
        Unreadable("noise 7", str(OSError(errno.EIO, os.strerror(errno.EIO)))),
        Unreadable("noise 20", str(OSError(errno.EACCES, os.strerror(errno.EACCES)))),
    }
    assert training.loader.retried == len(PATIENT)  # of which EACCES has none


def test_what_was_waited_for_in_vain_is_not_waited_for_again(tmp_path: Path) -> None:
    faulty = Faulty(Noise(IMAGES), tmp_path / "counts", {7: (fails(), ALWAYS)})
    training = Training(faulty, workers=0)
    training.batches(4)
    assert training.loader.retried == len(PATIENT)
    assert len(PATIENT) + 3 <= faulty.asked(7) <= len(PATIENT) + 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_deleted_is_skipped_at_once(tmp_path: Path, workers: int) -> None:
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
    assert training.loader.retried == training.loader.restarts == 0
    assert_same(batches, Training(files, workers=0).batches(3))  # from which it is missing now


@pytest.mark.parametrize(("fault", "said"), [(crashes, "SIGSEGV"), (kills, "SIGKILL"), (stops, "no sign of life")])
def test_an_image_that_workers_fail_at_each_time_is_left_out(tmp_path: Path, fault: Fault, said: str) -> None:
    faulty = Faulty(Noise(IMAGES), tmp_path / "counts", {13: (fault, ALWAYS)})
    training = Training(faulty, timeout=3)
    batches = training.batches(2)
    assert_same(batches, Training(Noise(IMAGES, broken={13}), workers=0).batches(2), reasons=False)
    assert training.loader.restarts == faulty.asked(13) == 2
    (left_out,) = skipped(batches)
    assert left_out.reason.startswith("left out, since twice: ")
    assert said in left_out.reason


class Deadly(Noise):
    """Workers die of it before they begin to read any image."""

    def prepare(self, indices: Sequence[int]) -> None:
        kills()


@pytest.mark.parametrize("most", [0, 1, 3])
def test_workers_that_always_fail_stop_the_loading(most: int) -> None:
    training = Training(Deadly(IMAGES), max_restarts=most)
    message = rf"worker \d of 2 was killed \(SIGKILL.*\); workers have failed {most + 1} times for the same batch\. "
    with pytest.raises(WorkersFailed, match=message + r"Use fewer data\.workers, or give the job more memory"):
        training.batches()
    assert training.loader.restarts == most
    assert ended(multiprocessing.active_children())


def test_storage_that_hangs_stops_the_loading_and_blames_no_image(tmp_path: Path) -> None:
    faulty = Faulty(Noise(IMAGES), tmp_path / "counts", drawn(IMAGES, 0, 1.0, stalls(3600), ALWAYS))
    training = Training(faulty, timeout=0.5, max_restarts=1)
    with pytest.raises(WorkersFailed, match=r"no sign of life from 2 workers for 0\.5 s while reading noise \d+ and 1"):
        training.batches()
    assert training.loader.dataset.excluded == {}


def test_workers_that_fail_all_the_time_stop_the_loading(tmp_path: Path) -> None:
    """Each time at another image, and with batches in between."""
    images = [keys[0][1] for keys in list(StepBatchSampler(401, BATCH, 0, position=lambda: 0))[3::5]]
    faulty = Faulty(Noise(401), tmp_path / "counts", dict.fromkeys(images, (kills, 1)))
    training = Training(faulty, max_restarts=2)
    with pytest.raises(WorkersFailed, match="workers have failed 7 times within 100 batches"):
        training.batches()
    assert training.step > 0


# ------------------------------------------------------------------ words


class Raising(Noise):
    """Meets with an error that is none of an image."""

    def __init__(self, count: int, error: Exception) -> None:
        super().__init__(count)
        self.error = error

    def load(self, index: int) -> Tensor:
        if index == 13:
            raise self.error
        return super().load(index)


@pytest.mark.parametrize("error", [ShardError("the shard a.tar: it is not there (any more)"), DataError("not this")])
def test_an_error_for_users_arrives_as_it_is(error: Exception) -> None:
    training = Training(Raising(IMAGES, error))
    with pytest.raises(type(error)) as raised:
        training.batches()
    assert str(raised.value) == str(error)
    assert training.loader.restarts == 0


def test_a_mistake_in_a_program_keeps_the_traceback_of_the_worker() -> None:
    training = Training(Raising(IMAGES, ZeroDivisionError("here")))
    with pytest.raises(ZeroDivisionError, match=r"(?s)in DataLoader worker process.*in load.*here"):
        training.batches()


def test_retried_reads_are_told_of_now_and_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faulty = Faulty(Noise(IMAGES), tmp_path / "counts", drawn(IMAGES, 0, 1.0, fails(errno.ESTALE), 2))
    with caplog.at_level(logging.WARNING):
        Training(faulty).batches()
    told = [message for message in caplog.messages if "reading has been tried again" in message]
    assert len(told) == 1
    assert told[0].startswith("noise ")
    assert os.strerror(errno.ESTALE) in told[0]


def test_a_restart_is_told_of_with_its_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Training(Faulty(Noise(IMAGES), tmp_path / "counts", {13: (kills, 1)})).batches()
    (told,) = caplog.messages
    assert "SIGKILL, as a system does that runs out of memory) while reading noise 13" in told
    assert "begun anew at the same batch" in told


# ------------------------------------------------------------------ beginnings and ends


def test_breaking_off_and_beginning_again_anywhere() -> None:
    training = Training(Noise(IMAGES))
    expected = Training(Noise(IMAGES), workers=0).batches(3)
    for step in (3, 14):
        training.step = step
        for batch in training.loader:
            assert_same([batch], [expected[training.step]])
            training.step += 1
            if training.step == step + 4:
                break
    training.loader.close()


@pytest.mark.parametrize("fault", [None, stops, stalls(3600)])
def test_closing_ends_the_workers(tmp_path: Path, fault: Fault | None) -> None:
    late = list(StepBatchSampler(IMAGES, BATCH, 0, position=lambda: 0))[5][0][1]
    faults: Mapping[int, tuple[Fault, int]] = {} if fault is None else {late: (fault, 1)}
    training = Training(Faulty(Noise(IMAGES), tmp_path / "counts", faults))
    before = set(multiprocessing.active_children())
    next(training.epoch())
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    training.loader.close()
    assert ended(list(workers))


def test_workers_leave_signals_that_everybody_gets_to_who_trains(tmp_path: Path) -> None:
    training = Training(Noise(IMAGES))
    before = set(multiprocessing.active_children())
    batches = []
    for batch in training.epoch():
        if training.step == 2:
            for worker in set(multiprocessing.active_children()) - before:
                for number in (signal.SIGINT, signal.SIGUSR1):
                    assert worker.pid is not None
                    os.kill(worker.pid, number)
        batches.append(batch)
    training.loader.close()
    assert training.loader.restarts == 0
    assert_same(batches, Training(Noise(IMAGES), workers=0).batches())
