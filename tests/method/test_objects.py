import pytest
import torch
from torch import Tensor

from cribo.method import pool_objects


def random_case(seed: int, *, batch: int = 3, tokens: int = 20, dim: int = 5, objects: int = 7):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(objects, (batch, 2, tokens), generator=generator)
    labels[0, 1][labels[0, 1] == 2] = 3  # object 2 is missing in one view, object 5 in both
    labels[0][labels[0] == 5] = 4
    return torch.randn(batch, 2, tokens, dim, generator=generator), labels


def naive(tokens: Tensor, labels: Tensor, num_objects: int) -> tuple[Tensor, Tensor]:
    batch, _, _, dim = tokens.shape
    objects = torch.zeros(batch, 2, num_objects, dim, dtype=tokens.dtype)
    kept = torch.ones(batch, num_objects, dtype=torch.bool)
    for image in range(batch):
        for view in (0, 1):
            for k in range(num_objects):
                members = tokens[image, view][labels[image, view] == k]
                if len(members):
                    objects[image, view, k] = members.mean(dim=0)
                else:
                    kept[image, k] = False
    return objects, kept


@pytest.mark.parametrize("seed", range(3))
def test_against_a_loop(seed: int) -> None:
    tokens, labels = random_case(seed)
    objects, kept = pool_objects(tokens, labels, 7)
    expected, expected_kept = naive(tokens, labels, 7)
    torch.testing.assert_close(objects, expected)
    assert torch.equal(kept, expected_kept)
    assert not kept[0, 2]
    assert not kept[0, 5]
    assert kept.any()


def test_the_gradient_matches_the_mean() -> None:
    tokens, labels = random_case(0)
    weights = torch.randn(3, 2, 7, 5)
    gradients = []
    for pool in (pool_objects, naive):
        leaf = tokens.clone().requires_grad_()
        (pool(leaf, labels, 7)[0] * weights).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_the_backward_pass_keeps_no_tokens() -> None:
    tokens, labels = random_case(0, dim=64)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved), lambda saved: saved):
        pool_objects(tokens.requires_grad_(), labels, 7)
    assert 0 < sum(saved.numel() for saved in kept) < tokens.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tokens_are_summed_in_float32(dtype: torch.dtype) -> None:
    tokens = torch.ones(1, 2, 3000, 4, dtype=dtype)  # a half-precision sum stops growing at 2048 or 256
    labels = torch.zeros(1, 2, 3000, dtype=torch.long)
    leaf = tokens.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        objects, _ = pool_objects(leaf, labels, 1)
    assert objects.dtype == torch.float32
    torch.testing.assert_close(objects, torch.ones(1, 2, 1, 4))
    objects.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype


def test_labels_of_any_integer_type() -> None:
    tokens, labels = random_case(1)
    for dtype in (torch.int16, torch.int32):
        assert torch.equal(pool_objects(tokens, labels.to(dtype), 7)[0], pool_objects(tokens, labels, 7)[0])


@pytest.mark.parametrize(
    ("tokens", "labels", "message"),
    [
        ((3, 20, 5), (3, 2, 20), r"tokens must have the shape \(B, 2, N, D\), got \(3, 20, 5\)"),
        ((3, 3, 20, 5), (3, 3, 20), r"tokens must have the shape \(B, 2, N, D\), got \(3, 3, 20, 5\)"),
        ((3, 2, 20, 5), (3, 40), r"labels must have the shape \(3, 2, 20\), got \(3, 40\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_errors(tokens: tuple[int, ...], labels: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool_objects(torch.zeros(tokens), torch.zeros(labels, dtype=torch.long), 4)
