from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cribo.features import Encoder
from cribo.features.config import ProbeSettings
from cribo.features.probes.encoding import encode_grids, probe_encoder
from cribo.models import build_backbone

PATCH = 4


def _means(images: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(images, PATCH).flatten(2).mT + 0.01


LOCAL = Encoder.from_function(_means, PATCH, identity="means")
"""Encoder without context, so windows have no effect."""


def encoded(*images: torch.Tensor, encoder: Encoder = LOCAL, batch_size: int = 3, **settings) -> list[torch.Tensor]:
    return encode_grids(encoder, images, ProbeSettings(**settings), batch_size=batch_size)


def size(height: int, width: int, **settings) -> tuple[int, int]:
    """Return the size in pixels at which an image is encoded."""
    [features] = encoded(torch.zeros(3, height, width, dtype=torch.uint8), **settings)
    return features.shape[0] * PATCH, features.shape[1] * PATCH


def noise(*size: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"scale": 1.0}, (40, 56)), ({}, (84, 112)), ({"size": 20}, (20, 28)), ({"scale": 0.05}, (4, 4))],
)
def test_sizes_at_which_images_are_encoded(settings: dict, expected: tuple[int, int]) -> None:
    assert size(42, 57 if settings != {"size": 20} else 58, **settings) == expected
    assert encoded(noise(42, 57))[0].shape[2:] == (1, 3)


def test_large_images_are_reduced_by_default() -> None:
    assert size(3000, 4000) == (1024, 1364)
    assert size(300, 400) == (384, 512)
    assert size(480, 640) == (480, 640)
    assert size(3000, 4000, scale=1.0) == (3000, 4000)


@pytest.mark.parametrize(("height", "width"), [(40, 60), (16, 60), (40, 8), (12, 12), (17, 61)])
def test_windows_keep_the_positions_of_patches(height: int, width: int) -> None:
    image = noise(height, width)
    wanted: tuple[dict[str, Any], ...] = ({}, {"window": 16, "stride": 8})
    whole, windows = (encoded(image, scale=1.0, **more)[0] for more in wanted)
    torch.testing.assert_close(windows, whole)


def test_overlapping_windows_have_the_largest_weight_at_their_centre() -> None:
    def first_column(images: torch.Tensor) -> torch.Tensor:
        """Return one-hot features of the left and right half of the encoded window."""
        rows, columns = images.shape[2] // PATCH, images.shape[3] // PATCH
        left = (torch.arange(columns) < columns // 2).float().expand(len(images), rows, columns)
        return torch.stack((left, 1 - left), dim=-1).flatten(1, 2)

    encoder = Encoder.from_function(first_column, PATCH)
    [found] = encoded(noise(32, 48), encoder=encoder, batch_size=2, scale=1.0, window=32, stride=16)
    row = found[0, :, 0]
    # Patches 4 to 7 are right in the first window, 0 to 3 of the second one: near the middle of the first at 4.
    assert row[:4, 0].tolist() == [1, 1, 1, 1]
    assert (row[4:8, 1] / row[4:8, 0]).tolist() == sorted((row[4:8, 1] / row[4:8, 0]).tolist(), reverse=True)
    assert row[4, 1] > row[4, 0]
    assert row[7, 1] < row[7, 0]
    torch.testing.assert_close(row.norm(dim=-1), torch.ones(12))


def test_images_of_one_size_are_encoded_together_and_returned_in_order() -> None:
    batches = []

    def counted(images: torch.Tensor) -> torch.Tensor:
        batches.append(tuple(images.shape))
        return _means(images)

    encoder = Encoder.from_function(counted, PATCH)
    images = [noise(8, 12) + number for number in range(3)] + [noise(12, 8)] + [noise(8, 12) + 9, noise(8, 12) + 10]
    found = encoded(*images, encoder=encoder, scale=1.0)
    assert batches == [(3, 3, 8, 12), (2, 3, 8, 12), (1, 3, 12, 8)]
    for image, own in zip(images, found, strict=True):
        torch.testing.assert_close(own, encoded(image, encoder=encoder, scale=1.0)[0])


def test_an_encoder_with_too_few_features() -> None:
    encoder = Encoder.from_function(lambda images: _means(images)[:, 1:], PATCH)
    with pytest.raises(ValueError, match="the encoder must return 4 patch features, got 3"):
        encoded(noise(4, 4), encoder=encoder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 2}, "window .*got 2: use 4"),
        ({"window": 18}, "window .*got 18: use 16 or 20"),
        ({"window": 16, "stride": 3}, "stride .*got 3: use 4"),
        ({"window": 16, "stride": 20}, "stride .*got 20"),
        ({"stride": 8}, "stride .*got 8"),
        ({"size": 100, "scale": 2.0}, r"size=100 and scale=2\.0"),
        ({"size": 0}, "size"),
        ({"neighbours": 0}, "neighbours"),
        ({"blocks": ()}, "blocks"),
        ({"blocks": (0, 2)}, "blocks"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_invalid_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoded(noise(16, 16), **settings)


def test_networks_of_fixed_size_encode_images_at_that_size() -> None:
    args = {"depth": 4, "embed_dim": 32, "num_heads": 2}
    encoder = probe_encoder(build_backbone("beit_base_patch16_224", args=args, image_size=64))
    side = 64 // encoder.patch_size
    images = [torch.zeros(3, *size, dtype=torch.uint8) for size in ((70, 100), (64, 64))]
    found = encoded(*images, encoder=encoder)
    assert [features.shape[:2] for features in found] == [(side, side)] * 2
