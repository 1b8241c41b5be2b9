import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cribo.models import build_backbone
from cribo.models.linear import _ONEDNN, Linear, linear, use_onednn

needs_onednn = pytest.mark.skipif(_ONEDNN is None, reason="needs PyTorch with oneDNN on an x86 processor")
SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 8}


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN for products of any size; otherwise small tests would test PyTorch."""
    monkeypatch.setattr("cribo.models.linear._FEWEST", 1)
    monkeypatch.setattr("cribo.models.linear._FEWEST_ROWS", 0)
    monkeypatch.setattr("cribo.models.linear.has_amd_processor", lambda: True)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Operators(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def uses_onednn(call: Callable[[], object]) -> bool:
    with Operators() as operators:
        call()
    return any("_linear_pointwise" in name for name in operators.seen)


def inputs() -> dict[str, torch.Tensor]:
    """Return float32 inputs of 24 channels in all memory layouts."""
    return {
        "two dimensions": numbers(10, 24),
        "three": numbers(2, 5, 24),
        "four": numbers(2, 3, 5, 24),
        "one row": numbers(1, 24),
        "transposed": numbers(24, 10).t(),
        "batch first swapped": numbers(5, 2, 24).transpose(0, 1),
        "expanded": numbers(1, 24).expand(10, 24),
        "every other row": numbers(20, 24)[::2],
        "some channels": numbers(10, 48)[:, 8:32],
    }


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", inputs())
def test_values_and_gradients_match_pytorch(kind: str, bias: bool) -> None:
    results = []
    for function in (linear, F.linear):
        x = inputs()[kind].requires_grad_()
        weight, shift = numbers(40, 24, seed=1).requires_grad_(), numbers(40, seed=2).requires_grad_()
        out = function(x, weight, shift if bias else None)
        (out * numbers(*out.shape, seed=3)).sum().backward()
        gradients = [x.grad, weight.grad, *([shift.grad] if bias else [])]
        assert out.shape == (*x.shape[:-1], 40)
        results.append([out, *gradients])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert uses_onednn(lambda: linear(inputs()[kind], numbers(40, 24)))


@needs_onednn
@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)))
def test_only_requested_gradients_are_computed(needed: tuple[bool, bool, bool]) -> None:
    leaves = [
        numbers(*shape, seed=seed).requires_grad_(need)
        for seed, (shape, need) in enumerate(zip(((10, 24), (40, 24), (40,)), needed, strict=True))
    ]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = linear(*leaves)
    # The input is saved only for the weight's gradient, and the weight only for the input's.
    expected_kept = {leaf.data_ptr() for leaf, need in ((leaves[0], needed[1]), (leaves[1], needed[0])) if need}
    assert {t.data_ptr() for t in kept} == expected_kept
    assert out.requires_grad == any(needed)
    if not out.requires_grad:
        return
    out.sum().backward()  # its gradient is an expanded scalar
    expected = (leaves[1].sum(0).expand(10, 24), leaves[0].sum(0).expand(40, 24), torch.full((40,), 10.0))
    for leaf, need, gradient in zip(leaves, needed, expected, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            torch.testing.assert_close(leaf.grad, gradient.detach(), rtol=1e-5, atol=1e-4)


@needs_onednn
def test_a_layer_used_twice_adds_its_gradients() -> None:
    gradients = []
    for function in (linear, F.linear):
        weight = (0.2 * numbers(24, 24)).requires_grad_()
        function(function(numbers(10, 24, seed=1), weight), weight).square().sum().backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_gradients_of_gradients() -> None:
    results = []
    for function in (linear, F.linear):
        x, weight = numbers(10, 24).requires_grad_(), numbers(40, 24, seed=1).requires_grad_()
        out = function(x, weight, numbers(40, seed=2))
        first = torch.autograd.grad(out.pow(2).mean(), (x, weight), create_graph=True)
        (first[0].square().sum() + first[1].square().sum()).backward()
        results.append([*first, x.grad, weight.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_without_gradients_nothing_is_saved() -> None:
    x, weight = numbers(10, 24), numbers(40, 24).requires_grad_()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = linear(x, weight)
        assert out.grad_fn is None
        torch.testing.assert_close(out, x @ weight.detach().t(), rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_other_types_and_autocast_use_pytorch() -> None:
    x, weight, bias = numbers(10, 24), numbers(40, 24, seed=1), numbers(40, seed=2)
    exact = (x.double(), weight.double(), bias.double())
    assert torch.equal(linear(*exact), F.linear(*exact))
    assert not uses_onednn(lambda: linear(*exact))
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight, bias)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, F.linear(x, weight, bias))
    assert linear(x.to("meta"), weight.to("meta"), bias.to("meta")).shape == (10, 40)
    assert linear(numbers(24), weight, bias).shape == (40,)
    assert linear(numbers(2, 0, 24), weight, bias).shape == (2, 0, 40)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not uses_onednn(lambda: linear(x, weight, bias))
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_shapes_that_do_not_fit_get_pytorchs_error() -> None:
    with pytest.raises(RuntimeError):
        linear(numbers(10, 23), numbers(40, 24))


def test_small_products_use_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.models.linear._FEWEST", 10 * 24 * 40 + 1)
    assert not uses_onednn(lambda: linear(numbers(10, 24), numbers(40, 24)))


@needs_onednn
def test_compiled_code_contains_pytorchs_operator() -> None:
    layer = use_onednn(nn.Sequential(nn.Linear(24, 40)))
    operators: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x = numbers(10, 24)
    torch.testing.assert_close(torch.compile(layer, backend=look, fullgraph=True)(x), layer(x))
    assert len(operators) == 1
    assert "linear" in operators[0]
    assert "pointwise" not in operators[0]


# ------------------------------------------------------------------ modules


class Scaled(nn.Linear):
    """A linear layer with a custom forward method."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return 2 * super().forward(input)


@needs_onednn
def test_modules_do_not_change_except_for_the_library() -> None:
    plain = nn.Sequential(nn.Linear(24, 40), nn.GELU(), Scaled(40, 24), nn.Linear(24, 8, bias=False))
    fast = use_onednn(copy.deepcopy(plain))
    x = numbers(10, 24)
    assert [type(module) for module in fast] == [Linear, nn.GELU, Scaled, Linear]
    assert repr(fast) == repr(plain)
    assert uses_onednn(lambda: fast(x))
    assert not uses_onednn(lambda: plain(x))
    torch.testing.assert_close(fast(x), plain(x))
    fast.load_state_dict(plain.state_dict())
    assert list(fast.state_dict()) == list(plain.state_dict())
    for again in (copy.deepcopy(fast), through_a_file(fast)):
        assert torch.equal(again(x), fast(x))
        assert again[0].weight is not fast[0].weight
        assert type(again[0]) is Linear


def through_a_file(module: nn.Module) -> nn.Sequential:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@needs_onednn
def test_the_linear_layers_of_a_backbone_use_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args=SMALL, image_size=32)
    x = numbers(2, 3, 32, 32)
    fingerprint = backbone.fingerprint()
    assert uses_onednn(lambda: backbone.encode(x))
    results = []
    for fewest in (1, 2**60):
        monkeypatch.setattr("cribo.models.linear._FEWEST", fewest)
        backbone.zero_grad()
        features = backbone.encode(x)
        features.tokens.square().mean().backward()
        results.append([features.tokens, *(p.grad for p in backbone.parameters() if p.grad is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert backbone.fingerprint() == fingerprint
