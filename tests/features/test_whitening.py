import pytest
import torch

from cribo.features import Moments, partial_whitening


def features(count: int = 4000, dim: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64) @ mixing + 100.0


def moments_of(vectors: torch.Tensor) -> Moments:
    moments = Moments(vectors.shape[-1])
    moments.update(vectors)
    return moments


def test_moments_of_parts_equal_those_of_all_vectors():
    vectors = features()
    moments = Moments(6)
    for part in vectors.split([1, 0, 700, 3299]):
        moments.update(part.unflatten(0, (1, -1)))
    torch.testing.assert_close(moments.mean, vectors.mean(0))
    torch.testing.assert_close(moments.covariance, torch.cov(vectors.T, correction=0))


def test_whitening_decorrelates_and_reduces_variances_by_the_power():
    vectors = features()
    variances = torch.linalg.eigvalsh(torch.cov(vectors.T, correction=0)).flip(0)
    for power in (0.0, 0.6, 1.0):
        weight, bias = partial_whitening(moments_of(vectors), power=power)
        result = vectors @ weight.double().T + bias
        expected = torch.diag(variances ** (1 - power))
        torch.testing.assert_close(
            torch.cov(result.T, correction=0), expected, atol=2e-4 * float(expected.max()), rtol=0
        )
        torch.testing.assert_close(result.mean(0), torch.zeros(6, dtype=torch.float64), atol=1e-3, rtol=0)


def test_power_0_preserves_distances():
    vectors = features(50)
    weight, bias = partial_whitening(moments_of(vectors), power=0.0)
    torch.testing.assert_close(
        torch.cdist(vectors @ weight.double().T + bias, vectors @ weight.double().T + bias),
        torch.cdist(vectors, vectors),
        atol=1e-3,
        rtol=0,
    )


def test_directions_without_variance_are_dropped():
    vectors = features() @ torch.diag(torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64))
    weight, _ = partial_whitening(moments_of(vectors), power=1.0)
    assert weight.shape == (4, 6)
    assert weight.isfinite().all()
    with pytest.raises(ValueError, match="dims must be 1 to 4"):
        partial_whitening(moments_of(vectors), power=1.0, dims=5)


def test_invalid_whitening_is_refused():
    with pytest.raises(ValueError, match="power"):
        partial_whitening(moments_of(features()), power=1.5)
    with pytest.raises(ValueError, match="at least 2 vectors"):
        partial_whitening(moments_of(features(1)), power=0.5)
