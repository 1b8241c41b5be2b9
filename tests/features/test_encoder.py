import pickle
from pathlib import Path

import pytest
import torch
from tests.hub_server import Hub

from cribo.base.errors import ConfigError, InputError
from cribo.features import BackboneSource, Encoder, backbone_name, mean_colour_encoder
from cribo.features.encoder import encoders_on, open_network
from cribo.models import build_backbone, normalise, save_backbone


def test_an_encoder_uses_evaluation_mode_and_restores_the_mode() -> None:
    backbone = build_backbone("resnet10t", image_size=32)
    backbone.train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    features = Encoder(backbone).tokens(torch.rand(2, 3, 64, 32))
    assert features.shape == (2, 2, backbone.embed_dim)
    assert backbone.training
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_identities_depend_on_weights_and_layers() -> None:
    args = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    first, same_, other = (build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=s) for s in (0, 0, 1))
    assert Encoder(first).identity == Encoder(same_).identity
    assert Encoder(first).identity != Encoder(other).identity
    assert Encoder(first).identity != Encoder(first, layers=2).identity
    assert Encoder(first, layers=2).tokens(torch.rand(1, 3, 32, 32)).shape == (1, 4, 64)


def test_the_mean_colour_encoder_returns_mean_colours() -> None:
    images = torch.rand(1, 3, 16, 16)
    shuffled = images.unfold(2, 8, 8).unfold(3, 8, 8).flatten(4)[..., torch.randperm(64)]
    shuffled = shuffled.unflatten(4, (8, 8)).permute(0, 1, 2, 4, 3, 5).reshape(1, 3, 16, 16)
    encode = mean_colour_encoder(8).tokens
    torch.testing.assert_close(encode(images), encode(shuffled))
    assert encode(images).shape == (1, 4, 3)


def test_an_encoder_inflates_an_rgb_network_to_the_channels_of_its_images(tmp_path: Path) -> None:
    args = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=32)
    save_backbone(backbone, tmp_path)
    pixels = torch.randint(0, 256, (1, 3, 32, 48), dtype=torch.uint8)
    rgb, six = Encoder(str(tmp_path), device="cpu"), Encoder(str(tmp_path), device="cpu", in_chans=6)
    assert six.dim == rgb.dim == 32
    assert (six.in_chans, rgb.in_chans, backbone.in_chans) == (6, 3, 3)
    repeated = pixels.repeat(1, 2, 1, 1)
    torch.testing.assert_close(six.grids(repeated), rgb.grids(pixels), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(six.global_tokens(repeated), rgb.global_tokens(pixels), rtol=1e-4, atol=1e-5)
    assert len({each.identity for each in (rgb, six, Encoder(backbone, in_chans=5))}) == 3
    assert pickle.loads(pickle.dumps(six)).identity == six.identity == Encoder(backbone, in_chans=6).identity
    with pytest.raises(InputError):
        six.grids(pixels)
    with pytest.raises(InputError, match=r"6 channels.*\b4\b.*--channels"):
        Encoder(six.backbone, in_chans=4)


def test_the_mean_colour_of_five_channels() -> None:
    five, rgb = Encoder("mean-colour", device="cpu", in_chans=5), Encoder("mean-colour", device="cpu")
    assert five.dim == 5
    assert five.identity != rgb.identity == "mean-colour-16"


def test_global_tokens_are_those_of_the_network_in_evaluation_mode() -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 2, "embed_dim": 32, "num_heads": 2}, image_size=32)
    backbone.train()
    pixels = torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8)
    found = Encoder(backbone).global_tokens(pixels)
    assert backbone.training
    assert torch.equal(found, backbone.eval().encode(normalise(pixels / 255)).global_token)
    assert Encoder(backbone).global_identity != Encoder(backbone).identity


def test_the_mean_colour_of_an_image_is_that_of_its_patches() -> None:
    pixels = torch.randint(0, 256, (2, 3, 16, 32), dtype=torch.uint8)
    found = mean_colour_encoder(16).global_tokens(pixels)
    assert torch.allclose(found, normalise(pixels / 255).mean(dim=(2, 3)), atol=1e-6)


def test_each_device_has_its_own_copy_of_the_network(tmp_path: Path) -> None:
    args = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), tmp_path)
    backbone, about = open_network(BackboneSource(str(tmp_path)))
    first, second = encoders_on(backbone, ["cpu", "cpu"])
    assert first.backbone is not second.backbone
    assert first.global_identity == second.global_identity
    pixels = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(first.global_tokens(pixels), second.global_tokens(pixels))
    assert about["fingerprint"] in first.global_identity


def test_results_record_the_commit_and_licences_of_weights(hub: Hub, tmp_path: Path) -> None:
    args = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), tmp_path)
    repository = hub.add_folder("owner/net", tmp_path)
    commit = repository.commit({"README.md": b"---\nlicense: mit\n---\n"})
    about = open_network(BackboneSource("hf://owner/net"))[1]
    assert (about["revision"], about["licences"][0]["name"]) == (commit, "mit")


def test_names_of_backbones(tmp_path: Path) -> None:
    (tmp_path / "dino.pth").touch()
    assert backbone_name(BackboneSource(str(tmp_path / "dino.pth"))) == "dino"
    assert backbone_name(BackboneSource("runs/camvid")) == "camvid"
    assert backbone_name(BackboneSource("runs/camvid/backbone.safetensors")) == "camvid"
    assert backbone_name(BackboneSource("vit_small_patch16_224.dino")) == "vit_small_patch16_224.dino"
    assert backbone_name(BackboneSource("resnet50", pretrained=False)) == "resnet50-random"


def test_the_identity_of_the_mean_colour_is_stable() -> None:
    encoder = Encoder("mean-colour", device="cpu")
    assert (encoder.identity, encoder.about["name"]) == ("mean-colour-16", "mean-colour")
    assert mean_colour_encoder(8).identity == "mean-colour-8"


def test_a_pickle_has_the_source_and_not_the_network(tmp_path: Path) -> None:
    args = {"depth": 3, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), tmp_path)
    encoder = Encoder(str(tmp_path), blocks=(3, 1), device="cpu")
    assert not encoder.is_open
    pixels = torch.randint(0, 256, (1, 3, 32, 48), dtype=torch.uint8)
    grids = encoder.grids(pixels)
    assert grids.shape == (1, 2, 3, 64)
    sent = pickle.dumps(encoder)
    assert len(sent) < 4096
    other = pickle.loads(sent)
    assert not other.is_open
    assert torch.equal(other.grids(pixels), grids)
    assert (other.identity, other.blocks, other.dim) == (encoder.identity, (1, 3), 64)
    other = pickle.loads(sent)
    other.expect("another")
    with pytest.raises(ConfigError, match="put the same file on all machines"):
        other.grids(pixels)


def test_a_function_has_features_of_patches_only() -> None:
    encoder = Encoder.from_function(lambda images: images.mean(dim=(2, 3))[:, None], 8, identity="mean")
    pixels = torch.full((1, 3, 8, 8), 51, dtype=torch.uint8)
    torch.testing.assert_close(encoder.grids(pixels), torch.full((1, 1, 1, 3), 0.2))
    assert encoder.through(lambda images: 2 * encoder.tokens(images)).identity == "mean"
    with pytest.raises(InputError, match="give a backbone"):
        encoder.global_tokens(pixels)
