"""Windows of large images: patches, global features and objects, against the image as a whole."""

from pathlib import Path

import numpy as np
import tifffile
import torch
from torch import Tensor

from cribo.data.config import Reading
from cribo.data.windows import LargeImage, open_large
from cribo.features.config import ObjectSettings
from cribo.features.encoder import Encoder
from cribo.features.large_features import large_global, large_objects, large_patches
from cribo.features.windows import WindowGrid, read_bands

ENCODER = Encoder("mean-colour", device="cpu")
SETTINGS = ObjectSettings(num_objects=6, size=160)


def ground(height: int, width: int, cell: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a picture of three kinds of ground, and the kind of each pixel."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 1, height // cell + 2, width // cell + 2, generator=generator)
    field = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic")[0, 0]
    kinds = (field > 0.35).byte() + (field > 0.6).byte()
    colours = torch.tensor([[60, 120, 60], [150, 120, 90], [90, 90, 160]])[kinds.long()]
    noise = 25 * torch.randn(height, width, 1, generator=generator)
    return (colours + noise).clamp(0, 255).byte().permute(2, 0, 1), kinds


def large(path: Path, pixels: Tensor, **layout: object) -> LargeImage:
    options = {"photometric": "rgb", "tile": (64, 64), "compression": "zlib", **layout}
    tifffile.imwrite(path, pixels.permute(1, 2, 0).numpy(), **options)
    image = open_large(path, Reading())  # in these tests, of any size
    assert image is not None
    return image


def test_bands_cover_the_image_and_repeat_its_last_pixels(tmp_path: Path) -> None:
    pixels, _ = ground(250, 203)
    windows = WindowGrid((250, 203), patch=16, side=6, step=4)
    assert windows.grid == (16, 13)
    bands = {top: rows.pixels for top, rows in read_bands(large(tmp_path / "a.tif", pixels), windows)}
    assert list(bands) == windows.tops == [0, 4, 8, 10]
    last = bands[10]
    assert last.shape == (3, 96, 208)
    torch.testing.assert_close(last[:, :90, :203], pixels[:, 160:])
    assert (last[:, 90:, :203] == pixels[:, -1:]).all()
    assert (last[:, :90, 203:] == pixels[:, 160:, -1:]).all()


def test_stitched_patches_equal_those_of_the_whole_image(tmp_path: Path) -> None:
    pixels, _ = ground(320, 480)
    found = large_patches(ENCODER, large(tmp_path / "a.tif", pixels), SETTINGS, 4)
    np.testing.assert_allclose(found, ENCODER.grids(pixels[None])[0].numpy(), atol=1e-5)


def test_the_global_feature_weighs_windows_by_their_area(tmp_path: Path) -> None:
    pixels, _ = ground(160, 208)
    found = large_global(ENCODER, large(tmp_path / "a.tif", pixels), SETTINGS, 4)
    first, last = ENCODER.global_tokens(torch.stack((pixels[:, :, :160], pixels[:, :, 48:])))
    np.testing.assert_allclose(found, (160 * first + 48 * last) / 208, atol=1e-5)


def test_objects_have_their_places_in_the_whole_image(tmp_path: Path) -> None:
    pixels, _ = ground(316, 475)  # no multiples of the patch size
    image = large(tmp_path / "a.tif", pixels)
    objects = large_objects(ENCODER, image, SETTINGS, 4)
    areas = [each.area for each in objects]
    assert areas == sorted(areas, reverse=True)
    assert [each.number for each in objects] == list(range(len(objects)))
    covered = np.zeros(image.size, dtype=bool)
    for each in objects:
        mask = each.mask.pixels()
        assert mask.shape == image.size
        y, x = mask.nonzero()
        box = np.array([x.min(), y.min(), x.max() + 1, y.max() + 1])
        assert np.abs(box - each.box).max() <= 5  # the grid of the mask is stretched over the last patches
        covered |= mask
    assert covered.mean() > 0.9
