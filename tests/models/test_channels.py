"""Networks for images of any number of channels: the inflated first layer, files, fingerprints and errors."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from cribo.base.errors import InputError
from cribo.models import Backbone, build_backbone, describe, inflate, load_backbone, load_pretrained, save_backbone
from cribo.models.building import first_blocks, untrained

VIT = ("vit_tiny_patch16_224", {"depth": 2, "embed_dim": 64, "num_heads": 2})
RESNET = ("resnet18", {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 16)})
CONVNEXT = ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 16)})
CAPI = ("cribo.models.networks.Capi", {"dim": 64, "depth": 1, "heads": 2, "patch_size": 16})


def build(network: tuple[str, dict], **options) -> Backbone:
    name, args = network
    return build_backbone(name, args={**args, **options.pop("args", {})}, image_size=64, **options)


def images(channels: int, size: int = 64) -> torch.Tensor:
    return torch.rand(2, channels, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("network", [VIT, RESNET, CONVNEXT, CAPI])
def test_repeated_images_have_the_features_of_the_rgb_network(network: tuple[str, dict]) -> None:
    rgb = build(network).eval()
    rgb.mean, rgb.std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    wide = inflate(rgb, 6)
    assert wide.in_chans == 6
    assert wide.mean == rgb.mean * 2
    assert wide.std == rgb.std * 2
    assert rgb.in_chans == 3
    expected, found = (net.encode(each) for net, each in ((rgb, images(3)), (wide, images(3).repeat(1, 2, 1, 1))))
    torch.testing.assert_close(found.tokens, expected.tokens, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.global_token, expected.global_token, rtol=1e-4, atol=1e-5)


def test_weights_are_repeated_cyclically_and_scaled() -> None:
    rgb = build(VIT)
    weight = inflate(rgb, 5).model.patch_embed.proj.weight
    own = rgb.model.patch_embed.proj.weight
    assert torch.equal(weight, own[:, [0, 1, 2, 0, 1]] * (3 / 5))
    two = inflate(rgb, 2).model.patch_embed.proj.weight
    assert torch.equal(two, own[:, :2] * 1.5)


def test_inflation_keeps_everything_else() -> None:
    rgb = build(VIT, drop_path=0.2).train()
    rgb.set_readout(torch.rand(7, 64), torch.rand(7))
    rgb.model.pos_embed.requires_grad_(False)
    wide = inflate(rgb, 4)
    assert wide.drop_path_rates == rgb.drop_path_rates
    assert wide.training
    assert wide.readout is not None
    assert rgb.readout is not None
    assert torch.equal(wide.readout.weight, rgb.readout.weight)
    assert wide.encode(images(4)).tokens.shape[-1] == 7
    flags = [[each.requires_grad for each in net.parameters()] for net in (rgb, wide)]
    assert flags[0] == flags[1]
    assert inflate(wide, 4) is wide
    assert first_blocks(wide, 1).in_chans == untrained(wide).in_chans == 4


@pytest.mark.parametrize("network", [VIT, RESNET, CAPI])
def test_files_and_fingerprints(network: tuple[str, dict], tmp_path: Path) -> None:
    rgb = build(network)
    wide = inflate(rgb, 5)
    assert len({rgb.fingerprint(), wide.fingerprint(), inflate(rgb, 4).fingerprint()}) == 3
    save_backbone(wide, tmp_path)
    name = network[0] if network is CAPI else None
    loaded = load_backbone(tmp_path, name=name)
    assert loaded.in_chans == 5
    assert loaded.fingerprint() == wide.fingerprint()
    assert describe(loaded)["args"]["in_chans"] == 5
    assert describe(rgb)["args"].keys().isdisjoint({"in_chans"})


def test_a_folder_in_timms_layout_and_plain_weights(tmp_path: Path) -> None:
    wide = inflate(build(VIT), 5)
    wide.save_pretrained(tmp_path / "timm")
    assert load_backbone(tmp_path / "timm").fingerprint() == wide.fingerprint()
    safetensors.torch.save_file(wide.model.state_dict(), tmp_path / "weights.safetensors")
    plain = load_backbone(tmp_path / "weights.safetensors", args={"num_heads": 2})
    assert plain.in_chans == len(plain.mean) == 5
    assert torch.equal(plain.model.patch_embed.proj.weight, wide.model.patch_embed.proj.weight)


def test_pretrained_weights_of_rgb_are_inflated_and_others_refused(tmp_path: Path) -> None:
    rgb = build(VIT)
    save_backbone(rgb, tmp_path / "rgb")
    save_backbone(inflate(rgb, 5), tmp_path / "five")
    five = build(VIT, args={"in_chans": 5}, pretrained=str(tmp_path / "rgb"))
    assert torch.equal(five.model.patch_embed.proj.weight, inflate(rgb, 5).model.patch_embed.proj.weight)
    assert build(VIT, args={"in_chans": 5}, pretrained=str(tmp_path / "five")).in_chans == 5
    for in_chans in (3, 4):
        with pytest.raises(InputError, match=rf"5 channels.*\b{in_chans}\b.*--channels"):
            load_pretrained(build(VIT, args={"in_chans": in_chans}), tmp_path / "five")


def test_wrong_numbers_of_channels_are_refused() -> None:
    wide = inflate(build(VIT), 5)
    for in_chans in (3, 6):
        with pytest.raises(InputError, match=rf"5 channels.*\b{in_chans}\b.*--channels"):
            inflate(wide, in_chans)
    with pytest.raises(InputError, match=r"\(B, 5, H, W\)"):
        wide.encode(images(3))
    with pytest.raises(InputError, match="--channels"):
        inflate(build_backbone("tresnet_m"), 5)
