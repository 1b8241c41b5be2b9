"""Defaults of the settings, and errors of invalid ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from cribo.base.errors import ConfigError
from cribo.evaluation.segmentation.linear import Linear
from cribo.features import BackboneSource
from cribo.models import Backbone

from .squares import tiny_vit


def settings(data: str = "voc", backbone: Backbone | None = None, **values: Any) -> Linear:
    return Linear(**values).for_data(data, backbone or tiny_vit())


def used(data: str = "voc", **values: Any) -> dict[str, Any]:
    run: Any = SimpleNamespace(source=BackboneSource("x"), data=SimpleNamespace(about={"name": data}))
    return settings(data, **values).used(run)


@pytest.mark.parametrize(
    ("data", "iterations", "scale"),
    [
        ("voc", 80_000, (2048, 512)),
        ("pascal-context", 80_000, (520, 520)),
        ("coco-stuff", 160_000, (2048, 512)),
        ("ade20k", 160_000, (2048, 512)),
        ("cityscapes", 80_000, (2048, 1024)),
        ("camvid", 80_000, None),
        ("folder", 80_000, None),
        ("scenes", 80_000, None),
    ],
)
def test_the_paper_schedule(data: str, iterations: int, scale: tuple[int, int] | None) -> None:
    made = settings(data)
    assert (made.iterations, made.batch_size, made.crop, used(data)["scale"]) == (iterations, 16, 512, scale)
    assert made.learning_rates == (8e-4, 3e-4, 1e-4, 8e-5)
    assert (made.windows.mode, made.windows.window, made.windows.stride) == ("whole", 512, 480)


def test_the_short_schedule_is_short_for_all_sets() -> None:
    for data in ("ade20k", "camvid"):
        made = settings(data, schedule="short")
        assert made.iterations <= 1000
        assert made.batch_size * made.crop**2 <= 8 * 256**2
        assert min(made.learning_rates) > max(settings().learning_rates)


def test_explicit_settings_override_the_schedule() -> None:
    made = settings(
        "ade20k", schedule="short", iterations=7, batch_size=3, crop=64, inference="slide", learning_rates=(0.5,)
    )
    assert made.learning_rates == (0.5,)
    assert (made.iterations, made.batch_size, made.crop) == (7, 3, 64)
    assert (made.windows.mode, made.windows.window, made.windows.stride) == ("slide", 64, 60)
    assert used(crop=64, inference="slide")["stride"] == 60
    assert used()["stride"] is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"iterations": 0}, "iterations must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"crop": 0}, "crop must be >= 1, got 0"),
        ({"crop": 8}, "crop must be a multiple of the patch size of vit_tiny_patch16_224, 16, got 8: use 16$"),
        ({"crop": 40}, "crop must be a multiple of .*, 16, got 40: use 32 or 48"),
        ({"learning_rates": ()}, "learning_rates must be distinct numbers, such as 8e-4,3e-4, got none"),
        ({"learning_rates": (1e-3, 0.0)}, "learning_rates must be > 0, got "),
        ({"learning_rates": (-1e-3,)}, "learning_rates must be > 0, got "),
        ({"learning_rates": (float("nan"),)}, "learning_rates must be > 0, got "),
        ({"learning_rates": (1e-3, 1e-4, 1e-3)}, "learning_rates must be distinct numbers"),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**values)


def test_networks_of_fixed_size_use_sliding_windows() -> None:
    backbone = tiny_vit()
    backbone.takes_any_size = False
    for values in ({"crop": 32}, {"crop": 64, "inference": "slide"}):
        with pytest.raises(ConfigError, match=r"pixels, got .*: use --crop 32 --inference slide"):
            settings("voc", backbone, **values)
    assert settings("voc", backbone, crop=32, inference="slide").windows.window == 32
