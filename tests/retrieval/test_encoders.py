from pathlib import Path

import torch

from cribo.models import build_backbone
from cribo.retrieval import BackboneConfig, backbone_encoder, backbone_name, mean_colour_encoder
from cribo.retrieval.encoders import mean_colour_backbone


def test_the_backbone_encoder_evaluates_and_leaves_the_mode() -> None:
    backbone = build_backbone("resnet10t", image_size=32)
    backbone.train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    features = backbone_encoder(backbone).encode(torch.rand(2, 3, 64, 32))
    assert features.shape == (2, 2, backbone.embed_dim)
    assert backbone.training
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_backbones_are_told_apart_by_their_weights_and_layers() -> None:
    args = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    first, same_, other = (build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=s) for s in (0, 0, 1))
    assert backbone_encoder(first).identity == backbone_encoder(same_).identity
    assert backbone_encoder(first).identity != backbone_encoder(other).identity
    assert backbone_encoder(first).identity != backbone_encoder(first, layers=2).identity
    assert backbone_encoder(first, layers=2).encode(torch.rand(1, 3, 32, 32)).shape == (1, 4, 64)


def test_the_mean_colour_encoder_knows_the_colour_and_nothing_else() -> None:
    images = torch.rand(1, 3, 16, 16)
    shuffled = images.unfold(2, 8, 8).unfold(3, 8, 8).flatten(4)[..., torch.randperm(64)]
    shuffled = shuffled.unflatten(4, (8, 8)).permute(0, 1, 2, 4, 3, 5).reshape(1, 3, 16, 16)
    encode = mean_colour_encoder(8).encode
    torch.testing.assert_close(encode(images), encode(shuffled))
    assert encode(images).shape == (1, 4, 3)


def test_names_of_backbones(tmp_path: Path) -> None:
    (tmp_path / "dino.pth").touch()
    assert backbone_name(BackboneConfig(str(tmp_path / "dino.pth"))) == "dino"
    assert backbone_name(BackboneConfig("runs/camvid")) == "camvid"
    assert backbone_name(BackboneConfig("runs/camvid/backbone.safetensors")) == "camvid"
    assert backbone_name(BackboneConfig("vit_small_patch16_224.dino")) == "vit_small_patch16_224.dino"
    assert backbone_name(BackboneConfig("resnet50", pretrained=False)) == "resnet50-random"


def test_the_mean_colour_as_a_network_is_the_encoder() -> None:
    images = torch.rand(2, 3, 32, 48)
    found = backbone_encoder(mean_colour_backbone()).encode(images)
    assert torch.allclose(found, mean_colour_encoder(16).encode(images), atol=1e-6)
