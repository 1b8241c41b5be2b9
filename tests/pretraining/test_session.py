"""Errors before any work, and the number of loader processes."""

import os
from collections.abc import Callable

import pytest
import torch

from cribo.pretraining import ConfigError, PretrainConfig
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
    ],
)
def test_a_batch_is_split_into_whole_groups(tiny: Tiny, changes: dict[str, object], sizes: str) -> None:
    with pytest.raises(ConfigError, match=f"objects.group_size x optim.micro_batches x devices = {sizes}: use fewer"):
        Session(tiny(changes))
    Session(tiny({"objects.group_size": 4, "optim.micro_batches": 2}))
