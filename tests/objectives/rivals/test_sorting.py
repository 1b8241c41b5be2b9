"""Differentiable sorting networks, against golden values and ordinary sorting."""

from typing import Any

import pytest
import torch
from tests.objectives.golden import cases, load

from cribo.objectives.rivals.sorting import SortingNetwork


def golden() -> list[Any]:
    """Return the name of each case, which contains kind, number of wires and steepness, and its arrays."""
    found = []
    for file in cases("neco_sorting"):
        values = load(file)
        for name in sorted(key.removesuffix("_input") for key in values if key.endswith("_input")):
            own = {key.removeprefix(f"{name}_"): value for key, value in values.items() if key.startswith(f"{name}_")}
            found.append(pytest.param(name, own, id=f"{file.stem}-{name}"))
    return found


@pytest.mark.parametrize(("name", "arrays"), golden())
def test_golden_ranks(name: str, arrays: dict[str, torch.Tensor]) -> None:
    kind, count, steepness = name.rsplit("_", 2)
    network = SortingNetwork(int(count), kind, steepness=float(steepness))  # pyright: ignore[reportArgumentType]
    numbers = arrays["input"].requires_grad_()
    ordered, weights = network(numbers)
    torch.testing.assert_close(ordered, arrays["sorted"], rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, arrays["permutation"], rtol=0, atol=1e-12)
    (weights * arrays["probe"]).sum().backward()
    torch.testing.assert_close(numbers.grad, arrays["input_grad"], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["bitonic", "odd_even"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 17])
def test_steep_comparators_sort_any_number_of_wires(kind: Any, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    numbers = torch.stack([torch.randperm(count, generator=generator) for _ in range(20)]).double()
    ordered, weights = SortingNetwork(count, kind, steepness=1e12)(numbers)
    torch.testing.assert_close(ordered, torch.arange(count).double().expand(20, -1))
    torch.testing.assert_close(weights, torch.nn.functional.one_hot(numbers.long(), count).double())


@pytest.mark.parametrize("kind", ["bitonic", "odd_even"])
def test_weights_of_each_number_and_of_each_rank_sum_to_1(kind: Any) -> None:
    numbers = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = SortingNetwork(11, kind, steepness=3.0)(numbers)[1]
    assert (weights > 0).all()
    for dim in (1, 2):
        torch.testing.assert_close(weights.sum(dim=dim), torch.ones(5, 11, dtype=torch.float64))


def test_weights_stay_above_0_at_any_steepness() -> None:
    """NeCo takes their logarithm."""
    numbers = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    assert (SortingNetwork(11, steepness=1e7)(numbers)[1] > 0).all()


@pytest.mark.parametrize(
    ("count", "steepness", "message"),
    [(0, 1.0, "count must be >= 1, got 0"), (4, 0.0, r"steepness must be > 0, got 0\.0")],
)
def test_invalid_options_are_rejected(count: int, steepness: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SortingNetwork(count, steepness=steepness)
