from pathlib import Path

import pytest
import torch

from cribo.base.errors import ConfigError
from cribo.cli.doctor import speed
from cribo.cli.doctor.expectations import expectations
from cribo.cli.doctor.speed import Speed, measure_speed
from cribo.pretraining.loading import load_config


def measured(**changes: float | None) -> Speed:
    values = {
        "pretrain_image": 0.5,
        "pretrain_update": 2.0,
        "adapt_step": 0.6,
        "adapt_encode": 0.1,
        "adapt_agreement": 0.3,
        "segment_image": 0.25,
    }
    return Speed("cpu", "32-true", **(values | changes))  # pyright: ignore[reportArgumentType]


def test_the_cost_of_an_update_is_shared_by_the_images_of_a_batch() -> None:
    assert measured().pretrain_rate == pytest.approx(256 / (2 + 256 * 0.5))
    assert measured().segment_rate == 4


def test_an_adaptation_trains_at_most_500_steps_within_its_time() -> None:
    fast = measured().adaptation()
    assert fast is not None
    assert fast.steps == 500
    assert 500 * 0.6 <= fast.training < 1.1 * 500 * 0.6
    assert fast.seconds == fast.closed_form + fast.training + fast.verdict
    slow = measured(adapt_step=6.0).adaptation()
    assert slow is not None
    assert 0 < slow.steps < 500
    assert 0.8 * 900 < slow.seconds < 1.2 * 900
    assert slow.closed_form == fast.closed_form
    for changes in ({"adapt_encode": 0.2}, {"adapt_agreement": 0.6}):
        slower = measured(**changes).adaptation()
        assert slower is not None
        assert slower.closed_form > fast.closed_form
        assert slower.verdict > fast.verdict
    never = measured(adapt_encode=10.0).adaptation()
    assert never is not None
    assert never.steps == 0


def test_what_failed_is_named_and_the_rest_is_expected() -> None:
    partly = measured(pretrain_image=None)
    partly.failures["pretrain"] = "OutOfMemoryError: CUDA out of memory"
    rows = expectations(partly)
    assert rows["pretrain"] == ("not measured", "OutOfMemoryError: CUDA out of memory")
    assert rows["segment"] == ("vit_small_patch14_dinov2, 640 x 480 pixels: 4 images/s", "4.2 minutes for 1,000 images")
    assert "500 steps 5.2 minutes" in rows["adapt"][1]


@pytest.mark.slow
def test_small_networks_are_measured_and_a_failure_does_not_end_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The test itself, with smaller networks and images."""
    monkeypatch.chdir(tmp_path)
    vit = {"patch_size": 16, "depth": 12, "embed_dim": 16, "num_heads": 1}
    small = {
        "backbone.name": "vit_tiny_patch16_224",
        "backbone.args": vit,
        "views.size": 64,
        "head.prototypes": 64,
        "objects.num_objects": 16,
    }
    monkeypatch.setattr(speed, "load_config", lambda name, changes=None: load_config(name, (changes or {}) | small))
    monkeypatch.setattr(speed, "ADAPTED", "vit_tiny_patch16_224")
    monkeypatch.setattr(speed, "IMAGE", (64, 96))
    monkeypatch.setattr(speed, "_SMALL_BANK", 100)
    monkeypatch.setattr(speed, "SegmentationMemory", lambda *_, **__: 1 / 0)
    phases: list[tuple[str, int, int]] = []
    found = measure_speed("cpu", lambda *phase: phases.append(phase))
    assert found.failures == {"segment": "ZeroDivisionError: division by zero"}
    assert found.segment_rate is None
    assert found.pretrain_rate is not None
    assert found.pretrain_rate > 0
    assert (course := found.adaptation()) is not None
    assert course.seconds > 0
    assert found.pretrain_batch == 256
    assert phases[-1] == ("speed test", 3, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'cuda' cannot be used .*: use cpu"):
        measure_speed("cuda")
