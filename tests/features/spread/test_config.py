import pytest

from cribo.base.errors import ConfigError
from cribo.base.shares import Share
from cribo.features.spread.config import EngineOptions, RayOptions


@pytest.mark.parametrize(("option", "value"), [("workers", 0), ("cpus_per_worker", 0), ("gpus_per_worker", -1)])
def test_workers_and_their_devices_are_bounded(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be >= {value + 1}"):
        RayOptions(**{option: value})  # pyright: ignore[reportArgumentType]


def test_options_of_ray_require_its_engine() -> None:
    with pytest.raises(ConfigError, match=r"--ray.workers requires --engine ray"):
        EngineOptions(ray=RayOptions(workers=2)).check_engine()
    EngineOptions(engine="ray", ray=RayOptions(workers=2)).check_engine()


def test_the_share_is_checked() -> None:
    assert EngineOptions(part="2/3").share == Share(2, 3)
    with pytest.raises(ConfigError, match="got 4/3"):
        EngineOptions(part="4/3").check_engine()
