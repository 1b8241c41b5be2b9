"""Custom networks, by import path."""

import sys
from pathlib import Path

import pytest
import torch

from cribo.base.errors import InputError, Untrusted
from cribo.models import build_backbone, load_backbone, save_backbone

NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Conv2d(3, width, 8, 8)

    def forward_features(self, images):
        return self.body(images)

class Strict(Net):
    def forward_features(self, images):
        assert images.shape[2] > 500, "too small"
        return super().forward_features(images)

def no_network():
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a network that has not been imported."""
    (tmp_path / "nets_of_a_user.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nets_of_a_user", raising=False)
    return "nets_of_a_user"


def test_a_custom_network_is_built_saved_and_loaded(module: str, tmp_path: Path) -> None:
    backbone = build_backbone(f"{module}.Net", args={"width": 16}, image_size=64)
    assert (backbone.embed_dim, backbone.patch_size) == (16, 8)
    images = torch.randn(2, 3, 64, 32)
    features = backbone.encode(images)
    assert features.tokens.shape == (2, 32, 16)
    assert features.grid == (8, 4)
    save_backbone(backbone, tmp_path / "saved")
    with pytest.raises(Untrusted, match=f"{module}.Net.*--trust"):
        load_backbone(tmp_path / "saved")  # although its module has been imported
    assert torch.equal(load_backbone(tmp_path / "saved", name=f"{module}.Net").encode(images).tokens, features.tokens)


def test_weights_do_not_import_code_without_trust(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_backbone(build_backbone(f"{module}.Net", image_size=64), tmp_path / "saved")
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(Untrusted, match=f"{module}.Net.*--trust"):
        load_backbone(tmp_path / "saved")
    assert module not in sys.modules
    assert load_backbone(tmp_path / "saved", trust=True).embed_dim == 8


def test_assertions_of_a_custom_network_are_named(module: str) -> None:
    with pytest.raises(InputError, match=rf"{module}.Strict does not encode .* \(too small\)") as raised:
        build_backbone(f"{module}.Strict", image_size=64)
    assert isinstance(raised.value.__cause__, AssertionError)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("{}.Nets", {}, "module {} has no 'Nets': did you mean {}.Net"),
        ("{}.no_network", {}, "must return a module whose forward_features"),
        ("{}.Net", {"depth": 3}, "cannot be called with {'depth': 3}"),
        ("nowhere.Net", {}, "module 'nowhere' not found"),
        ("pathlib.Path", {}, "must be a subclass of torch.nn.Module"),
    ],
)
def test_invalid_networks_are_rejected(module: str, name: str, args: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{}", module)):
        build_backbone(name.format(module), args=args, image_size=64)


def test_drop_path_requires_a_network_with_drop_path(module: str) -> None:
    with pytest.raises(ValueError, match="has no drop path: use drop_path=0"):
        build_backbone(f"{module}.Net", image_size=64, drop_path=0.1)
