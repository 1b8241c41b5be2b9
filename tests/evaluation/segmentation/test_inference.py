"""Logits of whole images: windows, padding, upsampling."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cribo.evaluation.segmentation import inference as module
from cribo.evaluation.segmentation.inference import Inference, segment_image

PATCH = 4


def local(images: torch.Tensor) -> torch.Tensor:
    """Two heads that depend on a single patch: its mean colour, and the reversed channels."""
    means = F.avg_pool2d(images, PATCH)
    return torch.stack((means, means.flip(1)))


def noise(height: int, width: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(channels, height, width, generator=torch.Generator().manual_seed(0))


def plain(image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return the logits of an image whose sides are multiples of the patch size."""
    full = F.interpolate(local(image[None])[:, 0], size=image.shape[1:], mode="bilinear")
    return F.interpolate(full, size=size, mode="bilinear").argmax(dim=1)


def test_a_whole_image() -> None:
    image = noise(16, 24)
    found = segment_image(image, local, (37, 50), Inference(), divisor=PATCH)
    assert found.dtype == torch.uint8
    assert torch.equal(found.long(), plain(image, (37, 50)))


def test_windows_without_overlap_depend_only_on_their_part() -> None:
    image = noise(16, 32)
    found = segment_image(image, local, (16, 32), Inference("slide", 16, 16), divisor=PATCH)
    expected = torch.cat([plain(image[:, :, :16], (16, 16)), plain(image[:, :, 16:], (16, 16))], dim=2)
    assert torch.equal(found.long(), expected)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_overlapping_windows_are_averaged(batch_size: int) -> None:
    """Against a plain loop, with sides that are not multiples of the patch size."""
    image, window, stride = noise(22, 31), 10, 7
    total, count = torch.zeros(2, 3, 22, 31), torch.zeros(22, 31)
    for top in (0, 7, 12):
        for left in (0, 7, 14, 21):
            part = F.pad(image[:, top : top + window, left : left + window], (0, 2, 0, 2))
            full = F.interpolate(local(part[None])[:, 0], size=(12, 12), mode="bilinear")[:, :, :10, :10]
            total[:, :, top : top + 10, left : left + 10] += full
            count[top : top + 10, left : left + 10] += 1
    expected = F.interpolate(total / count, size=(40, 60), mode="bilinear").argmax(dim=1)
    found = segment_image(image, local, (40, 60), Inference("slide", window, stride, batch_size), divisor=PATCH)
    assert torch.equal(found.long(), expected)


def test_a_window_that_is_larger_than_the_image_is_the_whole_image() -> None:
    image = noise(13, 18)
    whole, slid = (
        segment_image(image, local, (26, 36), inference, divisor=PATCH)
        for inference in (Inference(), Inference("slide", 512, 480))
    )
    assert torch.equal(whole, slid)


def test_inputs_of_the_network_are_divisible() -> None:
    seen = []

    def watched(images: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(images.shape))
        return local(images)

    segment_image(noise(13, 18), watched, (13, 18), Inference(), divisor=8)
    segment_image(noise(13, 18), watched, (13, 18), Inference("slide", 10, 10, batch_size=3), divisor=12)
    assert seen == [(1, 3, 16, 24), (3, 3, 12, 12), (1, 3, 12, 12)]


def test_classes_are_upsampled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    mixing = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(1))

    def many(images: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hkc,bcij->hbkij", mixing, F.avg_pool2d(images, PATCH))

    image = noise(16, 24)
    at_once = segment_image(image, many, (33, 47), Inference(), divisor=PATCH)
    monkeypatch.setattr(module, "_BUDGET", 7 * 8 * 33 * 47)
    assert torch.equal(segment_image(image, many, (33, 47), Inference(), divisor=PATCH), at_once)
    assert len(at_once.unique()) > 10


def test_ties_of_logits_go_to_the_smaller_class() -> None:
    found = segment_image(torch.zeros(3, 8, 8), local, (8, 8), Inference(), divisor=PATCH)
    assert (found == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"stride": 0}, "stride must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"window": 100, "stride": 101}, r"stride must be at most the window \(100\), got 101"),
    ],
)
def test_invalid_windows(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Inference("slide", **arguments)
