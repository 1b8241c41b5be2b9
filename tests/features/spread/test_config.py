import dataclasses

import pytest

from cribo.base.errors import ConfigError
from cribo.base.shares import Share
from cribo.features.spread.config import EngineOptions, RayOptions


@pytest.mark.parametrize("name", ["workers", "cpus_per_worker"])
def test_workers_and_their_cpus_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be >= 1, got 0"):
        dataclasses.replace(RayOptions(), **{name: 0})


def test_gpus_are_not_negative() -> None:
    assert RayOptions(gpus_per_worker=0).gpus_per_worker == 0
    with pytest.raises(ConfigError, match="gpus_per_worker must be >= 0, got -1"):
        RayOptions(gpus_per_worker=-1)


def test_options_of_ray_require_its_engine() -> None:
    with pytest.raises(ConfigError, match=r"--ray.workers requires --engine ray"):
        EngineOptions(ray=RayOptions(workers=2)).check_engine()
    EngineOptions(engine="ray", ray=RayOptions(workers=2)).check_engine()


def test_the_share_is_checked() -> None:
    assert EngineOptions(part="2/3").share == Share(2, 3)
    with pytest.raises(ConfigError, match="got 4/3"):
        EngineOptions(part="4/3").check_engine()
