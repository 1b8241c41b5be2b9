"""What `runtime.strategy fsdp` refuses and warns of; runs on several processes are in test_spread.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cribo.models import build_backbone
from cribo.pretraining import ConfigError, PretrainConfig, pretrain
from cribo.pretraining.parameters import block_names

Tiny = Callable[..., PretrainConfig]


@pytest.mark.parametrize("devices", [1, "auto"])
def test_one_process_has_nobody_to_share_with(tiny: Tiny, tmp_path: Path, devices: int | str) -> None:
    config = tiny({"runtime.strategy": "fsdp", "runtime.devices": devices})
    with pytest.raises(ConfigError, match=r"several devices, got 1: use --runtime\.strategy ddp"):
        pretrain(config, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "size", "blocks"),
    [
        ("vit_tiny_patch16_224", 32, ["model.blocks.0", "model.blocks.11"]),
        ("resnet18", 64, ["model.layer1.0", "model.layer4.1"]),
        ("convnext_atto", 64, ["model.stages.0.blocks.0", "model.stages.3.blocks.1"]),
    ],
)
def test_blocks_are_parts_of_the_network(name: str, size: int, blocks: list[str]) -> None:
    backbone = build_backbone(name, image_size=size)
    found = block_names(name for name, _ in backbone.named_parameters())
    assert [found[0], found[-1]] == blocks
    assert set(found) <= {name for name, _ in backbone.named_modules()}
