import numpy as np
import pytest
import torch

from cribo.base.errors import DataError
from cribo.data.labelled.label_maps import LabelledBox, LabelMap
from cribo.features.memory import SegmentationMemory
from cribo.features.memory.prompts import PromptImage

from .coded import EXACT, PATCH, PERFECT, blocks, image_of

ROWS = [[0] * 8, [0, 0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 3, 3], [0, 0, 1, 1, 0, 0, 3, 3], [0] * 8]
SCENE = blocks(*ROWS)  # a cross on a plain background, and another object
CROSS = (PATCH, PATCH, 5 * PATCH, 4 * PATCH)
MIDDLES = (slice(1, None, PATCH), slice(1, None, PATCH))  # scores are interpolated between the centres of patches
OTHER = (6 * PATCH, 2 * PATCH, 8 * PATCH, 4 * PATCH)


def memory() -> SegmentationMemory:
    return SegmentationMemory(PERFECT, classes=["a", "b", "c", "d"], settings=EXACT, device="cpu")


def prompts(scene: torch.Tensor = SCENE) -> PromptImage:
    own = memory()
    image = image_of(scene)
    return own.prompts(image, own.encode([image])[0])


def test_the_object_in_a_box_is_what_differs_from_its_surroundings() -> None:
    for corners in (CROSS, (-5.0, 0.0, 5.9 * PATCH, 4.9 * PATCH)):
        found = prompts().mask_of_box(LabelledBox(1, corners))
        assert torch.equal(found[MIDDLES], (SCENE == 1)[MIDDLES])


@pytest.mark.parametrize("box", [(9, 9, 12, 11), (-4, -4, 900, 900), (9.5, 3, 9.6, 3.1)])
def test_a_box_without_surroundings_or_of_few_patches_is_filled(box: tuple[float, ...]) -> None:
    left, top, right, bottom = box
    labelled = LabelledBox(1, (left, top, right, bottom))
    place = labelled.clipped(*SCENE.shape)
    assert place is not None
    expected = torch.zeros(SCENE.shape, dtype=torch.bool)
    expected[place[1] : place[3], place[0] : place[2]] = True
    assert torch.equal(prompts().mask_of_box(labelled), expected)


def test_objects_of_the_same_class_are_not_the_surroundings_of_each_other() -> None:
    # An object fills 6 of the 16 patches of its box, and resembles 30 patches of others.
    scene = blocks([0] * 24, *3 * [6 * [0, 1, 1, 0]], [0] * 24, [0] * 24)
    boxes = tuple(LabelledBox(1, (4 * PATCH * n, 0, 4 * PATCH * (n + 1), 4 * PATCH), rest=0) for n in range(6))
    unknown = torch.full(scene.shape, 255, dtype=torch.uint8)
    filled = prompts(scene).fill(LabelMap(unknown, boxes=boxes))
    assert torch.equal(filled[MIDDLES][:4], scene[MIDDLES][:4])
    assert (filled[4 * PATCH :] == 255).all()


def test_labels_are_kept_and_smaller_boxes_are_on_top() -> None:
    labels = torch.full(SCENE.shape, 255, dtype=torch.uint8)
    labels[2 * PATCH + 1, 2 * PATCH + 1] = 2
    whole = LabelledBox(0, (0, 0, 8 * PATCH, 5 * PATCH))
    filled = prompts().fill(LabelMap(labels, boxes=(LabelledBox(3, OTHER), LabelledBox(1, CROSS), whole)))
    expected = SCENE.clone()
    expected[2 * PATCH + 1, 2 * PATCH + 1] = 2
    assert torch.equal(filled[MIDDLES], expected[MIDDLES])
    assert int((labels != 255).sum()) == 1  # unchanged


@pytest.mark.parametrize(("x", "y"), [(2.5 * PATCH, 2.5 * PATCH), (1.0 * PATCH, 2.9 * PATCH)])
def test_a_point_gives_the_connected_region_that_resembles_it(x: float, y: float) -> None:
    rows = np.array(ROWS)
    rows[0, 7] = 1  # apart
    assert torch.equal(prompts(blocks(*rows.tolist())).mask_at_point(x, y)[MIDDLES], (SCENE == 1)[MIDDLES])
    assert prompts().mask_at_point(1e9, -5)[0, -1]


def test_boxes_are_examples() -> None:
    by_boxes, by_masks = memory(), memory()
    boxes = [LabelledBox(1, CROSS), LabelledBox(3, OTHER)]
    assert by_boxes.add(image_of(SCENE), boxes)
    assert not by_boxes.add(image_of(SCENE), boxes)
    assert by_masks.add(image_of(SCENE), torch.where(SCENE == 0, 255, SCENE))
    places = SCENE[MIDDLES] != 0
    for own in (by_boxes, by_masks):
        assert torch.equal(own.segment(image_of(SCENE)).labels[MIDDLES][places], SCENE[MIDDLES][places])
    assert by_boxes.add(image_of(SCENE), boxes[:1])
    assert (len(by_boxes), by_boxes.absent) == (1, ["a", "c", "d"])


@pytest.mark.parametrize(
    ("label", "corners"), [(9, CROSS), (-1, CROSS), (255, CROSS), (1, (4, 4, 4, 9)), (1, (900, 4, 910, 9))]
)
def test_invalid_boxes_are_refused(label: int, corners: tuple[float, float, float, float]) -> None:
    with pytest.raises(DataError):
        memory().add(image_of(SCENE), [LabelledBox(label, corners)])
