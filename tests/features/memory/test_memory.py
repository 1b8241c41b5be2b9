import dataclasses
import json
import logging
import logging.handlers
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import save_file

import cribo
from cribo.apps.segment.suggesting import suggest
from cribo.base.colours import distinct_colours
from cribo.base.errors import DataError, UnreadableImage
from cribo.data.labelled.inputs import DecodedImage
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.data.scenes import Scenes
from cribo.features import BackboneSource, Encoder
from cribo.features.memory import Example, SegmentationMemory, SegmentationSettings
from cribo.features.memory.settings import Refine
from cribo.features.memory.storage import read_memory, write_memory
from cribo.features.probes.fitting import Probe, class_ious
from cribo.models import Backbone, build_backbone

from .coded import EXACT, PERFECT, blocks, image_of, save_image, save_labels

FIRST = blocks([0, 1, 2], [2, 2, 0])
SECOND = blocks([3, 3, 3], [1, 255, 3])
NEW = blocks([2, 3], [0, 1], [1, 1])


def tiny(seed: int = 0) -> Backbone:
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    return build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=seed)


def perfect(**settings) -> SegmentationMemory:
    return SegmentationMemory(PERFECT, settings=dataclasses.replace(EXACT, **settings), device="cpu")


def filled(**settings) -> SegmentationMemory:
    memory = perfect(**settings)
    memory.extend([Example(image_of(FIRST), FIRST), Example(image_of(SECOND), SECOND)])
    return memory


def test_a_new_image_takes_the_labels_of_its_nearest_patches() -> None:
    found = filled(neighbours=1).segment(image_of(NEW))
    # Votes are interpolated between the centres of patches.
    middles = (slice(1, None, 4), slice(1, None, 4))
    assert torch.equal(found.labels[middles], NEW[middles])
    assert found.labels.dtype == torch.uint8
    assert found.confidence.shape == NEW.shape
    assert found.confidence.min() > 0.2
    assert found.confidence.max() == 1
    measured = {name: float((found.labels == int(name)).double().mean()) for name in found.shares}
    assert found.shares == pytest.approx(measured)
    assert list(found.shares) == sorted(found.shares, key=lambda name: -found.shares[name])


def test_all_kinds_of_input_are_the_same_image(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", FIRST)
    save_labels(tmp_path / "l.png", FIRST)
    array = image_of(FIRST).permute(1, 2, 0).numpy()
    memory = perfect()
    assert memory.add(tmp_path / "a.png", tmp_path / "l.png")
    for image in (str(tmp_path / "a.png"), array, Image.fromarray(array), image_of(FIRST)):
        for labels in (str(tmp_path / "l.png"), FIRST, FIRST.long(), FIRST.numpy(), FIRST.numpy().astype(np.int16)):
            assert not memory.add(image, labels)
    assert len(memory) == 1
    assert memory.names == ["a.png"]


def test_examples_may_be_added_later() -> None:
    memory = perfect(neighbours=1)
    memory.add(image_of(FIRST), FIRST)
    assert memory.classes == ["0", "1", "2"]
    assert "3" not in memory.segment(image_of(NEW)).shares
    memory.add(image_of(SECOND), SECOND)
    assert memory.classes == ["0", "1", "2", "3"]
    assert memory.segment(image_of(NEW)).shares["3"] > 0.05
    named = cribo.SegmentationMemory(PERFECT, classes=["a", "b", "c", "d", "e"], settings=EXACT)
    named.add(image_of(SECOND), SECOND)
    assert named.absent == ["a", "c", "e"]


def test_corrected_labels_replace_the_old_ones() -> None:
    memory = filled(neighbours=1)
    before = memory.patches
    corrected = torch.where(FIRST == 2, 3, FIRST)
    assert memory.add(image_of(FIRST), corrected)
    assert (len(memory), memory.patches) == (2, before)
    assert "2" not in memory.segment(image_of(NEW)).shares


def test_patches_without_labels_are_excluded() -> None:
    memory = perfect()
    labels = FIRST.clone()
    labels[:4] = 255
    labels[0, 0] = 1  # a single labelled pixel is enough
    memory.add(image_of(FIRST), labels)
    assert memory.patches == 4


def test_confidence_is_calibrated_by_several_images_that_are_mostly_labelled(tmp_path: Path) -> None:
    memory = perfect()
    memory.add(image_of(FIRST), FIRST)
    assert memory.uncalibrated == "there is only one example: label a second image"
    memory.add(image_of(SECOND), SECOND)
    assert memory.uncalibrated == ""
    strokes = torch.full_like(FIRST, 255)
    strokes[0, 0] = 1
    memory.add(image_of(FIRST), strokes)
    assert memory.uncalibrated == ""  # 1 of 6 and 5 of 6 patches
    memory.add(image_of(SECOND), strokes)
    assert memory.uncalibrated == "only 17% of the examples' area is labelled: label at least 50%"
    memory.save(tmp_path / "memory.safetensors")
    read = SegmentationMemory.load(tmp_path / "memory.safetensors", PERFECT)
    assert read.uncalibrated == memory.uncalibrated


def test_a_thin_stroke_in_a_large_image_is_not_lost() -> None:
    memory = perfect(size=16, scale=None)
    labels = torch.full((160, 160), 255)
    labels[3, 20:140] = 1
    memory.add(torch.zeros(3, 160, 160, dtype=torch.uint8), labels)
    assert memory.patches == 4


def test_a_small_memory_uses_all_patches_and_warns_once() -> None:
    memory = perfect(neighbours=30)
    memory.add(image_of(FIRST), FIRST)
    said = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("cribo")
    logger.addHandler(said)
    try:
        memory.segment(image_of(FIRST))
        memory.segment(image_of(FIRST))
    finally:
        logger.removeHandler(said)
    assert [record.getMessage() for record in said.buffer if record.levelno == logging.WARNING] == [
        "the memory has 6 patches, fewer than neighbours=30: all of them vote"
    ]


@pytest.mark.parametrize("refine", ["none", "bilateral"])
def test_images_of_several_sizes_are_labelled_independently(refine: Refine) -> None:
    memory = SegmentationMemory(tiny(), settings=SegmentationSettings(refine=refine, neighbours=5))
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8)
        for size in ((40, 56), (31, 17), (40, 56), (3, 90))
    ]
    for image in images[:2]:
        memory.add(image, torch.randint(0, 3, image.shape[1:], generator=generator))
    for image, together in zip(images, memory.segment_all(images), strict=True):
        alone = memory.segment(image)
        assert together.labels.shape == image.shape[1:]
        # Rounding may decide between two classes with equal votes.
        assert (alone.labels != together.labels).float().mean() < 0.01
        torch.testing.assert_close(alone.confidence, together.confidence, atol=1e-3, rtol=1e-3)
        assert together.confidence.min() >= 0
        assert together.confidence.max() <= 1


def test_the_backbone_is_unchanged() -> None:
    backbone = tiny().train()
    memory = SegmentationMemory(backbone, settings=EXACT)
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    memory.add(image, image[0])
    assert backbone.training


# ----------------------------------------------------------------------------------------------- on disk


def test_a_loaded_memory_gives_the_same_labels(tmp_path: Path) -> None:
    memory = SegmentationMemory(tiny(), classes=["a", "b", "c"], settings=SegmentationSettings(neighbours=4))
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, 40, 48), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (40, 48), generator=generator)
    labels[:10] = 255
    memory.add(image, labels, name="one")
    memory.save(tmp_path / "m.safetensors")
    read = SegmentationMemory.load(tmp_path / "m.safetensors", tiny())
    assert (read.classes, read.names, read.palette) == (["a", "b", "c"], ["one"], memory.palette)
    assert (read.settings, read.fingerprint) == (memory.settings, memory.fingerprint)
    assert not read.add(image, labels)
    before, after = memory.segment(image), read.segment(image)
    assert torch.equal(before.labels, after.labels)
    assert torch.equal(before.confidence, after.confidence)


def test_settings_of_votes_can_change_on_loading(tmp_path: Path) -> None:
    filled().save(tmp_path / "m")
    read = SegmentationMemory.load(tmp_path / "m", PERFECT, changes={"neighbours": 1})
    assert read.settings.neighbours == 1
    assert read.fingerprint != filled().fingerprint
    with pytest.raises(ValueError, match=r"scale is 1\.0 in the memory and cannot be changed to 2\.0"):
        SegmentationMemory.load(tmp_path / "m", PERFECT, changes={"scale": 2.0})


def test_the_memory_of_another_backbone_is_refused_by_name(tmp_path: Path) -> None:
    memory = SegmentationMemory(tiny())
    memory.add(image_of(FIRST), FIRST)
    memory.save(tmp_path / "m")
    with pytest.raises(DataError, match=r"another backbone, vit_tiny_patch16_224 with random weights \([0-9a-f]{12}\)"):
        SegmentationMemory.load(tmp_path / "m", tiny(seed=1))
    for other in (PERFECT, deep(), build_backbone("resnet10t", image_size=64)):
        with pytest.raises(DataError, match="another backbone"):
            SegmentationMemory.load(tmp_path / "m", other)


def test_damaged_memories_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m"

    def refuse(named: str) -> None:
        with pytest.raises(DataError, match=named):
            SegmentationMemory.load(path, PERFECT)

    refuse("there is no 'm'")
    filled().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    refuse("is not a memory, or is damaged")
    for damaged in (whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], whole.replace(b"neighbours", b"neighbourz", 1)):
        path.write_bytes(damaged)
        refuse("its checksum does not match")
    save_file({"weight": torch.zeros(2)}, path)
    refuse(r"contains weight.*not a memory of `cribo segment`")
    for number, named in ((99, "has format 99, but this version of cribo reads format 2"), (1, "create it again")):
        about = {"cribo segmentation memory": json.dumps({"format": number, "sha256": ""})}
        save_file({"features": torch.zeros(2)}, path, metadata=about)
        refuse(named)


def test_a_failed_write_keeps_the_old_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    filled().save(path)
    old = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        filled(neighbours=2).save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_empty_memories_and_those_without_identity_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the memory is empty"):
        perfect().segment(image_of(FIRST))
    with pytest.raises(ValueError, match="cannot write an empty memory"):
        perfect().save(tmp_path / "m")
    memory = SegmentationMemory(Encoder.from_function(PERFECT.tokens, PERFECT.patch_size), settings=EXACT)
    memory.add(image_of(FIRST), FIRST)
    with pytest.raises(ValueError, match="an encoder without an identity"):
        memory.save(tmp_path / "m")


# ----------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (blocks([0, 1], [1, 1]), "size of their image, 12 x 8, got 8 x 8"),
        (torch.full((8, 12), 255), r"every pixel is 255 \(no class\)"),
        (torch.full((8, 12), 2), r"0\.\.1 \(road, sky\) or 255 \(no class\), got 2"),
        (torch.full((8, 12), 300), r"classes 0 to 254, .* got 300 at 96 of 96 pixels"),
        (torch.full((8, 12), -1), "got -1 at 96 of 96 pixels"),
    ],
)
def test_invalid_labels(labels: torch.Tensor, named: str) -> None:
    memory = SegmentationMemory(PERFECT, classes=["road", "sky"], settings=EXACT)
    with pytest.raises(DataError, match=named):  # all or none are added
        memory.extend([Example(image_of(FIRST), FIRST.clamp(max=1)), Example(image_of(FIRST), labels)])
    assert len(memory) == 0


def test_invalid_images(tmp_path: Path) -> None:
    memory = filled()
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(UnreadableImage, match=r"broken\.jpg: not an image"):
        memory.segment(tmp_path / "broken.jpg")
    with pytest.raises(ValueError, match=r"uint8 array \(H, W, 3\), got float64"):
        memory.segment(np.zeros((8, 8, 3)))
    with pytest.raises(ValueError, match=r"uint8 tensor \(3, H, W\), got torch.uint8 \(8, 8, 3\)"):
        memory.segment(torch.zeros(8, 8, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"labels must be integers \(H, W\), got float32"):
        memory.add(image_of(FIRST), FIRST.float())


def test_the_colours_of_the_first_palette_are_kept_and_others_refused(tmp_path: Path) -> None:
    palette = [1, 2, 3, 40, 50, 60, 7, 8, 9]
    save_labels(tmp_path / "a.png", FIRST, palette)
    memory = perfect()
    memory.add(image_of(FIRST), tmp_path / "a.png")
    assert memory.palette == [(1, 2, 3), (40, 50, 60), (7, 8, 9)]
    save_labels(tmp_path / "grey.png", SECOND)
    memory.add(image_of(SECOND), tmp_path / "grey.png")
    assert memory.palette == [(1, 2, 3), (40, 50, 60), (7, 8, 9), distinct_colours(4)[3]]
    save_labels(tmp_path / "other.png", blocks([0, 2]), [1, 2, 3, 0, 0, 0, 9, 9, 9])
    with pytest.raises(DataError, match=r"class 2 has the colour \(9, 9, 9\) in its palette, but \(7, 8, 9\)"):
        memory.add(image_of(blocks([0, 2])), tmp_path / "other.png")
    # Colours of classes that do not occur in the image are not compared.
    save_labels(tmp_path / "part.png", blocks([0, 0]), [1, 2, 3, 0, 0, 0])
    assert memory.add(image_of(blocks([0, 0])), tmp_path / "part.png")


# ----------------------------------------------------------------------------------------------- fit


def deep(seed: int = 0) -> Backbone:
    args = {"patch_size": 8, "depth": 6, "embed_dim": 32, "num_heads": 2}
    return build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=seed)


def scenes(memory: SegmentationMemory, count: int) -> SegmentationMemory:
    found = Scenes(count, size=64, seed=0)
    memory.extend([Example(found.load(index), found.labels(index)) for index in range(count)])
    return memory


def test_a_score_of_one_class_is_unknown() -> None:
    """Any prediction would be right."""
    memory = SegmentationMemory(PERFECT, settings=EXACT)
    left = image_of(blocks([0, 1, 2, 3]))
    memory.add(left, blocks([1, 1, 255, 255]))
    assert memory.unmeasured == "all labels are in one half of a single image"
    memory.add(image_of(blocks([1, 1, 0, 0])), blocks([1, 1, 1, 255]))
    assert (memory.fit().expected, memory.fit().per_class) == (None, {})
    with pytest.raises(DataError, match="all labelled patches have the same class, so nothing can be left out"):
        memory.left_out()
    memory.add(left, blocks([0, 1, 255, 255]))
    memory.add(image_of(blocks([0, 1, 1, 0])), blocks([0, 1, 1, 0]))
    assert memory.unmeasured is None
    assert memory.fit().expected is not None


def test_adding_an_example_chooses_again() -> None:
    memory = scenes(SegmentationMemory(deep()), 2)
    before = memory.fit()
    assert memory.fit() is before
    left_out = memory.left_out()
    assert len(left_out) == len(memory)
    assert sum(class_ious(left_out).values()) / len(before.per_class) == pytest.approx(before.expected)
    assert class_ious(left_out) == before.per_class
    found = Scenes(3, size=64, seed=0)
    memory.add(found.load(2), found.labels(2))
    assert memory.fit().per_class != before.per_class


def test_the_choice_is_stored_and_repeated_for_other_settings(tmp_path: Path) -> None:
    memory = scenes(SegmentationMemory(deep()), 3)
    choice = memory.fit()
    memory.save(tmp_path / "m")
    read = SegmentationMemory.load(tmp_path / "m", deep())
    assert read._choice == choice  # not fitted again
    assert SegmentationMemory.load(tmp_path / "m", deep(), changes={"min_confidence": 0.5})._choice == choice
    image = Scenes(4, size=64, seed=0).load(3)
    assert torch.equal(read.segment(image).labels, memory.segment(image).labels)
    changed = SegmentationMemory.load(tmp_path / "m", deep(), changes={"head": "knn", "blocks": (5, 6), "whiten": True})
    assert changed.fit().probe == Probe((5, 6), True, "knn")
    assert SegmentationMemory.load(tmp_path / "m", deep(), changes={"prior": 1.0}).fit().probe.prior == 1.0
    with pytest.raises(ValueError, match="has features of blocks 3, 4, 5, 6, not of 2"):
        SegmentationMemory.load(tmp_path / "m", deep(), changes={"blocks": (2, 6)})


def test_memories_of_earlier_versions_choose_again(tmp_path: Path) -> None:
    memory = scenes(SegmentationMemory(deep()), 3)
    choice = memory.fit()
    memory.save(tmp_path / "m")
    stored = read_memory(tmp_path / "m")
    assert stored.choice is not None
    added = ("penalty", "prior")
    probe = {name: value for name, value in stored.choice["probe"].items() if name not in added}
    settings = {name: value for name, value in stored.settings.items() if name not in added}
    earlier = dataclasses.replace(stored, choice={**stored.choice, "probe": probe}, settings=settings)
    write_memory(tmp_path / "m", earlier)
    read = SegmentationMemory.load(tmp_path / "m", deep())
    assert read.fit() == choice
    assert read.fingerprint == memory.fingerprint


def test_unknown_blocks_are_refused() -> None:
    convolutional = build_backbone("resnet10t", image_size=64)
    for backbone, chosen, named in (
        (deep(), (3, 7), "blocks must be at most 6, the depth of vit_tiny_patch16_224, got 7"),
        (convolutional, (3,), "resnet10t only provides features of its last block: omit blocks"),
        ("mean-colour", (3,), "mean-colour only provides features of its last block: omit blocks"),
        (PERFECT, (3,), "blocks must be among 1 for an encoder named one-hot, got 3"),
        (BackboneSource("x", layers=2), (), r"layers must be 1, got 2: .*--blocks 9,10"),
    ):
        settings = SegmentationSettings(blocks=chosen) if chosen else None
        with pytest.raises(ValueError, match=named):
            SegmentationMemory(backbone, settings=settings)


def test_images_with_unknown_content_are_suggested_once() -> None:
    memory = perfect()
    memory.add(image_of(FIRST), FIRST)  # classes 0 to 2
    known, new, other = blocks([0, 1], [2, 0]), blocks([4, 4], [5, 4]), blocks([6, 6], [6, 7])
    images = [image_of(labels) for labels in (known, new, new, other, known)]
    assert set(suggest(memory, images, 2)) == {1, 3}
    assert len(suggest(memory, images, 9)) == 5
    assert suggest(memory, [], 2) == []


def test_patches_without_data_are_not_suggested() -> None:
    memory = perfect()
    memory.add(image_of(FIRST), FIRST)
    part, known, new = image_of(blocks([0, 1], [9, 9])), image_of(blocks([0, 1], [2, 0])), image_of(blocks([1, 5]))
    valid = torch.ones(part.shape[1:], dtype=torch.bool)
    valid[4:] = False
    images = [known, DecodedImage(part, valid), new]
    assert suggest(memory, [known, part, new], 1) == [1]
    assert suggest(memory, images, 1) == [2]
    empty = DecodedImage(part, torch.zeros_like(valid))
    assert suggest(memory, [known, empty, new], 1) == [2]
    assert suggest(memory, [empty], 1) == []


def test_the_padding_of_a_palette_is_ignored(tmp_path: Path) -> None:
    labels = Image.fromarray(FIRST.numpy())
    labels.putpalette([1, 2, 3, 4, 5, 6, 7, 8, 9])
    labels.save(tmp_path / "a.png", bits=8)
    memory = perfect()
    memory.add(image_of(FIRST), tmp_path / "a.png")
    save_labels(tmp_path / "b.png", SECOND, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert memory.add(image_of(SECOND), tmp_path / "b.png")
    assert memory.palette == [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12)]


def test_a_memory_with_a_filter_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    memory = filled()
    memory.save(tmp_path / "m")
    stored = read_memory(tmp_path / "m")
    write_memory(tmp_path / "m", dataclasses.replace(stored, settings={**stored.settings, "refine": "guided"}))
    assert SegmentationMemory.load(tmp_path / "m", PERFECT).settings.refine == "bilateral"
    with pytest.raises(ValueError, match="refine must be none or bilateral, got 'guided'"):
        SegmentationSettings(refine="guided")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_confidence": 1.0}, r"min_confidence must be >= 0 and < 1, got 1\.0"),
        ({"contrast": float("nan")}, "contrast must be > 0, got nan"),
        ({"neighbours": 0}, "neighbours must be >= 1, got 0"),
    ],
)
def test_invalid_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentationSettings(**settings)


def test_pixels_without_data_are_no_examples_and_get_no_labels(tmp_path: Path) -> None:
    heights = np.full((64, 64), 100, dtype=np.float32)
    heights[:, 32:] = 900
    heights[:16] = np.nan
    tifffile.imwrite(tmp_path / "0.tif", heights)
    memory = SegmentationMemory("mean-colour", settings=SegmentationSettings(range=(0, 1000), scale=1.0))
    memory.add(tmp_path / "0.tif", (torch.arange(64) >= 32).expand(64, 64))
    assert sum(memory.classes_of(0).values()) == pytest.approx(1)
    assert memory.patches == 12  # of 16
    found = memory.segment(tmp_path / "0.tif")
    assert (found.labels[:16] == IGNORE_INDEX).all()
    assert not found.confidence[:16].any()
    assert (found.labels[16:] != IGNORE_INDEX).all()
    assert sum(found.shares.values()) == pytest.approx(0.75)
