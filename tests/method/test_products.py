import pytest
import torch

from cribo.method.products import by_onednn, product


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shapes", [((5, 7), (3, 7)), ((0, 7), (3, 7)), ((5, 7), (0, 7)), ((64, 96), (200, 96))])
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
