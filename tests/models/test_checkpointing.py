import copy
import shutil
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode

from cribo.models import Backbone, build_backbone
from cribo.models.config import Checkpointing

VIT: tuple[str, dict[str, Any]] = (
    "vit_tiny_patch16_224",
    {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2},
)
NETWORKS = [
    VIT,
    ("vit_base_patch14_reg4_dinov2", {"depth": 2, "embed_dim": 32, "num_heads": 2}),
    ("eva02_tiny_patch14_224", {"depth": 2, "embed_dim": 48, "num_heads": 2}),
    ("vit_small_patch16_dinov3", {"depth": 2, "embed_dim": 48, "num_heads": 2}),
]
MODES: list[Checkpointing] = ["selective", "blocks"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def build(name: str, args: dict[str, Any]) -> Backbone:
    return build_backbone(name, args=args, image_size=56 if "14" in name else 32, drop_path=0.5)


def inputs(backbone: Backbone) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, backbone.image_size, backbone.image_size, generator=generator)
    return images, torch.rand(4, backbone.num_drop_path_sites, generator=generator)


def gradients(backbone: Backbone, call: Any = None) -> list[torch.Tensor]:
    """Return the features and the gradient of every parameter, with drop path on."""
    images, noise = inputs(backbone)
    backbone.zero_grad()
    features = (call or backbone)(images, drop_path_noise=noise)
    # The final norm fixes the sum and the squares of its outputs, so that only weighted outputs have gradients.
    weights = torch.linspace(-1, 1, features.tokens.shape[-1])
    ((features.tokens * weights).square().mean() + (features.global_token * weights).sum()).backward()
    return [features.tokens.detach(), *(p.grad for p in backbone.parameters() if p.grad is not None)]


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "args"), NETWORKS)
def test_features_and_gradients_do_not_change(name: str, args: dict[str, Any], mode: Checkpointing) -> None:
    backbone = build(name, args)
    expected = gradients(backbone)
    assert not torch.equal(expected[0], backbone(inputs(backbone)[0]).tokens)  # drop path is on
    backbone.set_checkpointing(mode)
    for found, value in zip(gradients(backbone), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_features_and_gradients_do_not_change_in_16_bits(mode: Checkpointing) -> None:
    backbone = build(*VIT)
    results = []
    for own in ("none", mode):
        backbone.set_checkpointing(own)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(gradients(backbone))
    for found, value in zip(*results, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fewest", [1, 2**60], ids=["oneDNN", "PyTorch"])
def test_recomputed_operators(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.models.linear._FEWEST", fewest)
    backbone = build(*VIT)
    counts = {}
    for mode in ("none", *MODES):
        backbone.set_checkpointing(mode)
        images, noise = inputs(backbone)
        features = backbone(images, drop_path_noise=noise)
        with Operators() as counts[mode]:
            features.tokens.sum().backward()
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    again = {mode: {name: seen.count.get(name, 0) for name in (attention, "gelu")} for mode, seen in counts.items()}
    assert again["none"] == {attention: 0, "gelu": 0}
    assert again["selective"] == {attention: 0, "gelu": 3}
    assert again["blocks"] == {attention: 3, "gelu": 3}
    names = ("mm", "addmm", "_linear_pointwise")
    products = {mode: sum(seen.count.get(name, 0) for name in names) for mode, seen in counts.items()}
    assert products["selective"] == products["none"]
    # QKV, projection and the first layer of the MLP; gradients do not need the second layer's output.
    assert products["blocks"] >= products["none"] + 3 * 3


def test_blocks_save_only_their_input() -> None:
    backbone = build(*VIT)
    kept: dict[str, list[int]] = {"none": [], "blocks": []}
    for mode, sizes in kept.items():
        backbone.set_checkpointing("blocks" if mode == "blocks" else "none")
        images, noise = inputs(backbone)

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backbone(images, drop_path_noise=noise)
    assert sum(kept["blocks"]) < sum(kept["none"]) / 4


def test_without_gradients_nothing_is_saved_or_recomputed() -> None:
    backbone = build(*VIT)
    backbone.set_checkpointing("blocks")
    images, _ = inputs(backbone)
    with torch.no_grad(), Operators() as seen:
        features = backbone(images)
    assert features.tokens.grad_fn is None
    assert seen.count["gelu"] == 3
    backbone.set_checkpointing("none")
    assert torch.equal(features.tokens, backbone(images).tokens)


def test_a_copy_computes_with_its_own_parameters() -> None:
    student = build(*VIT)
    student.set_checkpointing("blocks")
    teacher = copy.deepcopy(student)
    expected = gradients(student)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    for found, value in zip(gradients(teacher), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)


def test_names_and_fingerprint_do_not_change_and_none_restores_the_forward() -> None:
    backbone, plain = build(*VIT), build(*VIT)
    backbone.set_checkpointing("selective")
    assert list(backbone.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in backbone.modules()] == [type(module) for module in plain.modules()]
    assert backbone.fingerprint() == plain.fingerprint()
    backbone.set_checkpointing("none")
    assert all("forward" not in module.__dict__ for module in backbone.modules())


def test_a_convolutional_network_is_refused() -> None:
    backbone = build_backbone("resnet10t", image_size=64)
    with pytest.raises(ValueError, match="resnet10t has no transformer blocks to checkpoint, got 'blocks'"):
        backbone.set_checkpointing("blocks")
    backbone.set_checkpointing("none")


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        *(("aot_eager_decomp_partition", mode) for mode in MODES),  # saves and recomputes as the compiler does
        pytest.param("inductor", "selective", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
@inductor.patch(compile_threads=1)  # each thread is a process that imports torch
def test_compiled_checkpointing_is_one_graph_with_the_same_results(backend: str, mode: Checkpointing) -> None:
    backbone = build(VIT[0], {**VIT[1], "depth": 2})
    expected = gradients(backbone)
    backbone.set_checkpointing(mode)
    names = list(backbone.state_dict())
    torch.compiler.reset()  # earlier tests in this process may have left functions that are not compiled again
    backbone.compile(fullgraph=True, backend=backend)
    assert list(backbone.state_dict()) == names
    for found, value in zip(gradients(backbone), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4 * value.abs().max().item())
    torch.compiler.reset()
