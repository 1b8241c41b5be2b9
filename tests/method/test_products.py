import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cribo.method.products import by_onednn, parts_on_grid, product, rows_on_grid


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shapes", [((5, 7), (3, 7)), ((0, 7), (3, 7)), ((5, 7), (0, 7)), ((64, 96), (200, 96)), ((300, 500), (77, 500))]
)
def test_rows_are_multiplied_with_rows(dtype: torch.dtype, shapes: tuple[tuple[int, int], tuple[int, int]]):
    a, b = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    found = product(a, b)
    assert found.dtype == dtype
    error = (found.double() - a.double() @ b.double().T).abs()
    assert (error <= 4 * torch.finfo(dtype).eps * (a.double().abs() @ b.double().abs().T)).all()


def test_strided_operands_are_read_as_they_lie():
    a, b = torch.randn(12, 20), torch.randn(20, 9)
    expected = a[::2, ::2].double() @ b.T[:, ::2].double().T
    torch.testing.assert_close(product(a[::2, ::2], b.T[:, ::2]).double(), expected, rtol=0, atol=1e-5)


def test_without_onednn_pytorch_multiplies():
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not by_onednn(a, b)
        torch.testing.assert_close(product(a, b), a @ b.T)


class Sizes(TorchDispatchMode):
    """Notes the sizes that oneDNN's product is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_linear_pointwise" in str(func):
            self.seen.add((*args[0].shape, *args[1].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not by_onednn(), reason="oneDNN's product is for x86 processors")
def test_any_number_of_rows_takes_few_sizes_of_onednn() -> None:
    """Each would have code generated, and kept."""
    rows, others = torch.randn(1000, 24), torch.randn(100, 24)
    for which in range(3):
        with Sizes() as sizes:
            for count in range(1, 1001):
                if which == 0:
                    product(rows[:count], others)
                elif which == 1:
                    product(others, rows[:count])
                else:
                    product(rows.T[:, :count], rows.T[:, :count])
        assert 10 < len(sizes.seen) < 40


@pytest.mark.parametrize("count", [1, 15, 16, 17, 300, 1025])
def test_rows_that_are_added_are_zero_and_few(count: int) -> None:
    rows = torch.randn(count, 3)
    padded = rows_on_grid(rows)
    assert torch.equal(padded[:count], rows)
    assert not padded[count:].any()
    assert len(padded) <= max(16, count + 15, 1.125 * count)


@pytest.mark.parametrize(("rows", "most"), [(0, 8), (1, 8), (8, 8), (4999, 1024), (5000, 3000)])
def test_parts_follow_each_other_in_few_lengths(rows: int, most: int) -> None:
    parts = list(parts_on_grid(rows, most))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    lengths = [part.stop - part.start for part in parts]
    assert all(length == most or (length < most and math.log2(length).is_integer()) for length in lengths)
