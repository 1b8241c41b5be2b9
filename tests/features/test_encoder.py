from pathlib import Path

import pytest
import torch
from tests.hub_server import Hub

from cribo.base.errors import ConfigError
from cribo.features import BackboneSource, backbone_encoder, backbone_name, mean_colour_encoder
from cribo.features.encoder import image_encoder, image_encoders, mean_colour_backbone, open_encoder, open_network
from cribo.models import build_backbone, normalise, save_backbone


def test_the_backbone_encoder_uses_evaluation_mode_and_restores_the_mode() -> None:
    backbone = build_backbone("resnet10t", image_size=32)
    backbone.train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    features = backbone_encoder(backbone).encode(torch.rand(2, 3, 64, 32))
    assert features.shape == (2, 2, backbone.embed_dim)
    assert backbone.training
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_identities_depend_on_weights_and_layers() -> None:
    args = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    first, same_, other = (build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=s) for s in (0, 0, 1))
    assert backbone_encoder(first).identity == backbone_encoder(same_).identity
    assert backbone_encoder(first).identity != backbone_encoder(other).identity
    assert backbone_encoder(first).identity != backbone_encoder(first, layers=2).identity
    assert backbone_encoder(first, layers=2).encode(torch.rand(1, 3, 32, 32)).shape == (1, 4, 64)


def test_the_mean_colour_encoder_returns_mean_colours() -> None:
    images = torch.rand(1, 3, 16, 16)
    shuffled = images.unfold(2, 8, 8).unfold(3, 8, 8).flatten(4)[..., torch.randperm(64)]
    shuffled = shuffled.unflatten(4, (8, 8)).permute(0, 1, 2, 4, 3, 5).reshape(1, 3, 16, 16)
    encode = mean_colour_encoder(8).encode
    torch.testing.assert_close(encode(images), encode(shuffled))
    assert encode(images).shape == (1, 4, 3)


def test_an_image_encoder_returns_the_global_token_and_restores_the_mode() -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 2, "embed_dim": 32, "num_heads": 2}, image_size=32)
    backbone.train()
    pixels = torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8)
    found = image_encoder(backbone).features(pixels)
    assert backbone.training
    assert torch.equal(found, backbone.eval().encode(normalise(pixels / 255)).global_token)
    assert image_encoder(backbone).identity != backbone_encoder(backbone).identity


def test_the_mean_colour_of_an_image_is_that_of_its_patches() -> None:
    images = torch.rand(2, 3, 16, 32)
    found = image_encoder(mean_colour_backbone()).encode(images)
    assert torch.allclose(found, normalise(images).mean(dim=(2, 3)), atol=1e-6)


def test_each_device_has_its_own_copy_of_the_network(tmp_path: Path) -> None:
    args = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), tmp_path)
    backbone, about = open_network(BackboneSource(str(tmp_path)))
    encoders = image_encoders(backbone, ["cpu", "cpu"], image_size=32)
    assert encoders[0].encode is not encoders[1].encode
    assert encoders[0].identity == encoders[1].identity
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(encoders[0].encode(images), encoders[1].encode(images))
    assert about["fingerprint"] in str(encoders[0].identity)


def test_results_record_the_commit_and_licences_of_weights(hub: Hub, tmp_path: Path) -> None:
    args = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), tmp_path)
    repository = hub.add_folder("owner/net", tmp_path)
    commit = repository.commit({"README.md": b"---\nlicense: mit\n---\n"})
    about = open_network(BackboneSource("hf://owner/net"))[1]
    assert (about["revision"], about["licences"][0]["name"]) == (commit, "mit")


def test_unsupported_image_sizes_are_refused(tmp_path: Path) -> None:
    args = {"depth": 1, "embed_dim": 48, "num_heads": 2}
    save_backbone(build_backbone("samvit_base_patch16", args=args, image_size=64), tmp_path)
    with pytest.raises(ConfigError, match="crop must be 64, the fixed input size of"):
        image_encoders(open_network(BackboneSource(str(tmp_path)))[0], ["cpu"], image_size=80)
    with pytest.raises(ConfigError, match=r"crop must be a multiple of 16, .* got 70: use 64"):
        image_encoders(open_network(BackboneSource(str(tmp_path)))[0], ["cpu"], image_size=70)


def test_names_of_backbones(tmp_path: Path) -> None:
    (tmp_path / "dino.pth").touch()
    assert backbone_name(BackboneSource(str(tmp_path / "dino.pth"))) == "dino"
    assert backbone_name(BackboneSource("runs/camvid")) == "camvid"
    assert backbone_name(BackboneSource("runs/camvid/backbone.safetensors")) == "camvid"
    assert backbone_name(BackboneSource("vit_small_patch16_224.dino")) == "vit_small_patch16_224.dino"
    assert backbone_name(BackboneSource("resnet50", pretrained=False)) == "resnet50-random"


def test_the_identity_of_the_mean_colour_is_stable() -> None:
    encoder, about = open_encoder(BackboneSource("mean-colour"), "cpu")
    assert (encoder.identity, about["name"]) == ("mean-colour-16", "mean-colour")
    assert mean_colour_encoder(8).identity == "mean-colour-8"
