"""Errors before any work, and the number of loader processes."""

import os
import re
from collections.abc import Callable

import pytest
import torch

from cribo.base.errors import ConfigError, DataError
from cribo.pretraining import PretrainConfig
from cribo.pretraining.batches import fit_batch
from cribo.pretraining.session import Session, local_processes

Tiny = Callable[..., PretrainConfig]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nine cores and no GPU, without a launcher."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(9)), raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(("devices", "workers"), [(1, 8), (2, 3), (4, 1), (8, 1)])
def test_processes_of_one_machine_share_its_cores(tiny: Tiny, devices: int, workers: int) -> None:
    """Each process keeps one core of its share for itself."""
    common = {"data.workers": None, "objects.group_size": 1, "runtime.devices": devices}
    assert Session(tiny(common)).workers == workers
    assert Session(tiny({**common, "data.workers": 5})).workers == 5


@pytest.mark.usefixtures("cores")
def test_a_launcher_sets_the_number_of_local_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [local_processes(devices) for devices in (3, "2", "auto")] == [3, 2, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_processes("auto") == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert [local_processes(devices) for devices in (3, "auto")] == [6, 6]


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"objects.group_size": 3}, "3 x 1 x 1 = 3, got 8"),
        ({"objects.group_size": 4, "optim.micro_batches": 4}, "4 x 4 x 1 = 16, got 8"),
        ({"objects.group_size": 4, "runtime.devices": 4}, "4 x 1 x 4 = 16, got 8"),
        ({"objects.group_size": 8, "optim.batch_size": 3}, "8 x 1 x 1 = 8, got 3"),
        ({"objects.group_size": 8, "optim.batch_size": 7, "data.scenes.count": 7}, "8 x 1 x 1 = 8, got 7"),
        ({"objects.group_size": 5, "data.scenes.count": 8}, "5 x 1 x 1 = 5, got 8"),
    ],
)
def test_a_batch_is_split_into_whole_groups(tiny: Tiny, changes: dict[str, object], sizes: str) -> None:
    """The error names values of options, each of which helps alone."""
    wanted = f"objects.group_size x optim.micro_batches x devices = {sizes}: "
    with pytest.raises(ConfigError, match=wanted) as caught:
        Session(tiny(changes))
    ways = named_options(str(caught.value).removeprefix("optim.batch_size must be"))
    assert ways
    for name, value in ways.items():
        Session(tiny({**changes, name: value}))
    Session(tiny({"objects.group_size": 4, "optim.micro_batches": 2}))


def named_options(message: str) -> dict[str, int]:
    """Return the values of options that an error advises to set."""
    return {name: int(value) for name, value in re.findall(r"([a-z]+\.[a-z_]+) to (\d+)", message)}


@pytest.mark.parametrize(
    ("objective", "images", "changes"),
    [
        ("cribo", 1, {}),
        ("mae", 3, {}),
        ("cribo", 7, {"optim.batch_size": 24, "optim.micro_batches": 4, "objects.group_size": 6}),
        ("neco", 40, {"optim.batch_size": 64, "objects.group_size": 32}),
        ("croc", 5, {"runtime.devices": 2, "objects.group_size": 4}),
        ("dino", 5, {"runtime.devices": 2, "objects.group_size": 4}),
    ],
)
def test_few_images_are_an_error_that_names_all_that_helps(
    tiny: Tiny, objective: str, images: int, changes: dict[str, object]
) -> None:
    given = {"objective.name": objective, "data.scenes.count": images, **changes}
    with pytest.raises(DataError, match="fewer than one batch") as caught:
        Session(tiny(given))
    options = named_options(str(caught.value))
    assert 0 < options["optim.batch_size"] <= images
    Session(tiny({**given, **options}))


def test_a_batch_of_few_images_is_as_large_as_possible(tiny: Tiny) -> None:
    config = tiny({"optim.batch_size": 64, "optim.micro_batches": 2, "objects.group_size": 16})
    assert fit_batch(config, 64) == config
    for images in range(1, 64):
        fitted = fit_batch(config, images)
        batch, micro_batches = fitted.optim.batch_size, fitted.optim.micro_batches
        assert images / 2 < batch <= images
        assert batch % (fitted.objects.group_size * micro_batches) == 0
        assert batch / micro_batches <= 32
