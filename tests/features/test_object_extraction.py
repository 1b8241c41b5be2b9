from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval.core import mask as coco_mask
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from cribo.base.errors import ConfigError
from cribo.data.reading import read_image
from cribo.features import Encoder, mean_colour_encoder, object_extraction
from cribo.features.config import ObjectSettings
from cribo.features.object_extraction import extract_objects, patch_of_pixel, prepare_image, read_prepared
from cribo.models import build_backbone

SETTINGS = ObjectSettings(num_objects=5, size=None, min_share=0.0)


def street(seed: int, height: int = 70, width: int = 100) -> Tensor:
    """Noise with two coloured rectangles."""
    image = torch.randint(90, 130, (3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    image[0, 10:40, 10:45] = 250
    image[2, 30:, 60:90] = 250
    return image


def test_masks_partition_the_image_and_boxes_and_areas_are_those_of_the_masks() -> None:
    [found] = extract_objects(mean_colour_encoder(8), [street(0)], SETTINGS)
    masks = np.stack([each.mask.pixels() for each in found.objects])
    assert masks.shape == (len(found.objects), 70, 100)
    assert (masks.sum(axis=0) == 1).all()
    assert [each.number for each in found.objects] == list(range(len(found.objects)))
    assert [each.area for each in found.objects] == sorted((each.area for each in found.objects), reverse=True)
    for each, mask in zip(found.objects, masks, strict=True):
        rows, columns = mask.nonzero()
        assert each.area == mask.sum()
        assert each.share == pytest.approx(mask.mean())
        assert each.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert (coco_mask.decode(each.mask.coco()) == mask).all()


def test_vectors_are_the_directions_of_the_mean_tokens() -> None:
    [found] = extract_objects(mean_colour_encoder(8), [street(1)], SETTINGS)
    for each in found.objects:
        mean = found.tokens[torch.from_numpy(each.mask.patches().flatten())].mean(dim=0)
        torch.testing.assert_close(torch.from_numpy(each.vector), torch.nn.functional.normalize(mean, dim=0))


def test_an_image_has_the_same_objects_in_any_company() -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 2, "embed_dim": 32, "num_heads": 2}, image_size=32)
    encoder = Encoder(backbone)
    images = [street(seed, *size) for seed, size in enumerate([(70, 100), (64, 96), (70, 100), (160, 90), (70, 100)])]
    settings = ObjectSettings(num_objects=5, size=128)
    together = extract_objects(encoder, images, settings)
    torch.manual_seed(7)  # must have no effect
    for image, objects in zip(images, together, strict=True):
        [alone] = extract_objects(encoder, [image], settings)
        assert [each.mask for each in alone.objects] == [each.mask for each in objects.objects]
        for one, other in zip(alone.objects, objects.objects, strict=True):
            np.testing.assert_allclose(one.vector, other.vector, atol=1e-5)


def test_different_images_start_from_different_tokens() -> None:
    keys = [prepare_image(street(seed), mean_colour_encoder(8), SETTINGS).key for seed in (0, 1, 0)]
    assert keys[0] == keys[2] != keys[1]


def test_small_objects_are_left_out() -> None:
    settings = ObjectSettings(num_objects=5, size=None, min_share=0.1)
    [all_of_them], [found] = (
        extract_objects(mean_colour_encoder(8), [street(0)], each) for each in (SETTINGS, settings)
    )
    assert 0 < len(found.objects) < len(all_of_them.objects)
    assert min(each.share for each in found.objects) >= 0.1
    expected = [each.mask for each in all_of_them.objects if each.share >= 0.1]
    assert [each.mask for each in found.objects] == expected


def test_adaptive_marginals_find_fewer_objects_in_simple_images() -> None:
    encoder = mean_colour_encoder(8)
    plain = torch.full((3, 128, 128), 90, dtype=torch.uint8)
    plain[0, :, 64:] = 250
    adaptive, uniform = (
        len(extract_objects(encoder, [plain], ObjectSettings(num_objects=8, marginals=marginals, size=None))[0].objects)
        for marginals in ("adaptive", "uniform")
    )
    assert 2 <= adaptive < uniform == 8


def test_images_with_fewer_patches_than_objects_have_an_object_for_each_patch_at_most() -> None:
    [found] = extract_objects(mean_colour_encoder(16), [street(0, 20, 30)], ObjectSettings(num_objects=16, size=None))
    assert 1 <= len(found.objects) <= 2
    assert sum(each.area for each in found.objects) == 600


def test_the_vector_of_a_box_is_the_mean_of_its_tokens_by_their_overlap() -> None:
    [found] = extract_objects(mean_colour_encoder(16), [street(3, 64, 64)], ObjectSettings(num_objects=2, size=None))
    tokens = found.tokens.view(4, 4, -1).double()
    expected = 16 * 8 * tokens[0, 0] + 16 * 16 * tokens[0, 1] + 8 * 8 * tokens[1, 0] + 8 * 16 * tokens[1, 1]
    expected = torch.nn.functional.normalize(expected, dim=0).float()
    torch.testing.assert_close(torch.from_numpy(found.box_vector((8, 0, 32, 24))), expected)
    inside = torch.nn.functional.normalize(tokens[2, 3], dim=0).float()
    torch.testing.assert_close(torch.from_numpy(found.box_vector((50, 40, 51, 41))), inside)


@given(st.integers(1, 300), st.integers(1, 60))
def test_a_pixel_belongs_to_the_patch_containing_its_centre(pixels: int, patches: int) -> None:
    expected = [int((place + 0.5) / pixels * patches + 1e-9) for place in range(pixels)]
    assert patch_of_pixel(pixels, patches).tolist() == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_objects", 0), ("marginals", "even"), ("position_weight", -1.0), ("size", 0), ("min_share", 1.0)],
)
def test_settings_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be .*{value}"):
        ObjectSettings(**{option: value})


def test_invalid_encoders_are_rejected() -> None:
    short = Encoder.from_function(lambda images: torch.ones(len(images), 3, 4), 8)
    with pytest.raises(ValueError, match="must return 64 patch features, got 3"):
        extract_objects(short, [street(0, 64, 64)], SETTINGS)
    broken = Encoder.from_function(lambda images: torch.full((len(images), 64, 4), torch.nan), 8)
    with pytest.raises(ValueError, match="not finite"):
        extract_objects(broken, [street(0, 64, 64)], SETTINGS)


def test_a_large_jpeg_is_reduced_while_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((800, 600), Image.Resampling.BICUBIC).save(tmp_path / "large.jpg", quality=95)
    decoded: list[tuple[int, ...]] = []
    reduced = object_extraction.read_reduced

    def watched(*arguments: Any, **options: Any) -> Any:
        result = reduced(*arguments, **options)
        decoded.append(tuple(result[0].shape))
        return result

    monkeypatch.setattr(object_extraction, "read_reduced", watched)
    settings, encoder = ObjectSettings(size=64), mean_colour_encoder(16)
    found = read_prepared(tmp_path / "large.jpg", encoder, settings)
    assert decoded == [(3, 150, 200)]
    whole = prepare_image(read_image(tmp_path / "large.jpg"), encoder, settings)
    assert (found.height, found.width, found.pixels.shape) == (600, 800, whole.pixels.shape)
    assert (found.pixels.float() - whole.pixels.float()).abs().mean() < 3
    assert read_prepared(tmp_path / "large.jpg", encoder, ObjectSettings(size=480)).pixels.shape[1] == 480
    assert decoded[1] == (3, 600, 800)


def test_networks_of_fixed_size_encode_images_at_that_size() -> None:
    args = {"depth": 4, "embed_dim": 32, "num_heads": 2}
    encoder = Encoder(build_backbone("beit_base_patch16_224", args=args, image_size=64))
    [found] = extract_objects(encoder, [street(0)], SETTINGS)
    assert found.grid == (64 // encoder.patch_size, 64 // encoder.patch_size)
    assert sum(each.area for each in found.objects) == 70 * 100
