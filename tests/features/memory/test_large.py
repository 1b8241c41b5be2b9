"""Labels of large images: equal to those of the image as a whole, and the same for any place of the windows."""

from pathlib import Path

import pytest
import torch
from tests.features.test_windows import ground, large

from cribo.features.memory.large import label_rows, memory_windows
from cribo.features.memory.memory import SegmentationMemory
from cribo.features.memory.settings import SegmentationSettings
from cribo.models import build_backbone


def memory_of(backbone: object, **settings: object) -> SegmentationMemory:
    memory = SegmentationMemory(
        backbone,  # pyright: ignore[reportArgumentType]
        classes=["grass", "soil", "water"],
        settings=SegmentationSettings(**settings),  # pyright: ignore[reportArgumentType]
        device="cpu",
        batch_size=2,
    )
    for seed in (1, 2):
        memory.add(*ground(400, 400, seed=seed))
    return memory


@pytest.mark.parametrize("refine", ["bilateral", "none"])
def test_labels_equal_those_of_the_whole_image(tmp_path: Path, refine: str) -> None:
    pixels, _ = ground(480, 656)
    options = {"scale": 1.0, "window": 160, "refine": refine}
    memory = memory_of("mean-colour", **options)
    bands = list(label_rows(memory, large(tmp_path / "a.tif", pixels)))
    assert len(bands) > 2
    whole = memory.segment(pixels)
    torch.testing.assert_close(torch.cat([band.image for band in bands], dim=1), pixels)
    torch.testing.assert_close(torch.cat([band.labels for band in bands]), whole.labels)
    torch.testing.assert_close(torch.cat([band.confidence for band in bands]), whole.confidence)


def test_images_of_any_size_are_covered(tmp_path: Path) -> None:
    memory = memory_of("mean-colour", scale=1.0, window=160)
    for size in ((333, 517), (100, 700), (700, 100)):
        pixels, kinds = ground(*size)
        found = torch.cat([band.labels for band in label_rows(memory, large(tmp_path / "a.tif", pixels))])
        assert found.shape == size
        assert (found == kinds).float().mean() > 0.9


def test_pixels_without_data_have_no_label(tmp_path: Path) -> None:
    memory = memory_of("mean-colour", scale=1.0, window=160)
    pixels, kinds = ground(520, 300)
    lost = torch.zeros(520, 300, dtype=torch.bool)
    lost[100:330, 90:180] = True
    image = large(tmp_path / "a.tif", pixels.masked_fill(lost, 0), extratags=[(42113, "s", 0, "0", True)])
    bands = list(label_rows(memory, image))
    assert len(bands) > 2
    labels, confidence = torch.cat([each.labels for each in bands]), torch.cat([each.confidence for each in bands])
    torch.testing.assert_close(labels == 255, lost)
    assert (confidence[lost] == 0).all()
    assert (labels == kinds)[~lost].float().mean() > 0.85


def test_a_shifted_grid_of_windows_gives_the_same_labels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    memory = memory_of(build_backbone("vit_tiny_patch16_224", image_size=64), window=256)
    pixels, _ = ground(640, 720, cell=90)
    down, right = 5 * 16, 3 * 16

    def labels(name: str, image: torch.Tensor) -> torch.Tensor:
        return torch.cat([band.labels for band in label_rows(memory, large(tmp_path / name, image))])

    first, second = labels("a.tif", pixels), labels("b.tif", pixels[:, down:, right:])
    inner = slice(96, -96)  # at the edges, the context differs
    assert (first[down:, right:] == second)[inner, inner].float().mean() >= 0.99


def test_patches_cover_as_many_pixels_as_in_the_examples(tmp_path: Path) -> None:
    memory = memory_of("mean-colour")
    assert memory.patch_pixels == 16
    assert memory_windows(memory, (2000, 3000)).side == 32
    assert memory_of("mean-colour", size=200).patch_pixels in range(31, 36)  # half their size
    assert memory_of("mean-colour", scale=2.0).patch_pixels == 8
    half = memory_of("mean-colour", size=200)
    pixels, kinds = ground(480, 656)
    found = torch.cat([band.labels for band in label_rows(half, large(tmp_path / "a.tif", pixels))])
    assert (found == kinds).float().mean() > 0.8
