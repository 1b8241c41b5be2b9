import numpy as np
import pytest
import torch

from cribo.data.scenes import GROUND_CLASSES, OBJECT_CLASSES, Scenes, held_out_scenes


@pytest.fixture(scope="module")
def sample() -> tuple[torch.Tensor, torch.Tensor, int]:
    scenes = Scenes(120, seed=3)
    images = torch.stack([scenes.load(index) for index in range(len(scenes))])
    labels = torch.stack([scenes.labels(index) for index in range(len(scenes))])
    return images, labels, len(scenes.classes)


def test_shapes_types_and_names() -> None:
    scenes = Scenes(3, 48, seed=5, first=10)
    assert scenes.load(0).shape == (3, 48, 48)
    assert scenes.load(0).dtype == torch.uint8
    assert scenes.labels(0).shape == (48, 48)
    assert scenes.labels(0).dtype == torch.uint8
    assert scenes.name(2) == "scene-5-000012"
    assert scenes.classes == [*OBJECT_CLASSES, *GROUND_CLASSES]


def test_a_scene_depends_on_seed_and_number_only() -> None:
    forward, backward = Scenes(4, 48, seed=1), Scenes(4, 48, seed=1)
    expected = [forward.load(index) for index in range(4)]
    np.random.seed(0)
    torch.manual_seed(0)
    for index in reversed(range(4)):
        assert torch.equal(backward.load(index), expected[index])
        assert torch.equal(Scenes(1, 48, seed=1, first=index).load(0), expected[index])
    assert not torch.equal(expected[0], expected[1])
    assert not torch.equal(expected[0], Scenes(4, 48, seed=2).load(0))


@pytest.mark.parametrize("memory", [1, 5000])
def test_held_out_scenes_are_disjoint_and_queries_independent_of_the_memory(memory: int) -> None:
    train, queries = held_out_scenes(memory, 10)
    assert train.name(memory - 1) < queries.name(0)
    assert queries == held_out_scenes(200, 10)[1]


def test_a_scene_can_be_changed_by_its_reader() -> None:
    scenes = Scenes(1, 16)
    expected = scenes.load(0).clone()
    scenes.load(0).zero_()
    assert torch.equal(scenes.load(0), expected)


def test_every_class_covers_some_pixels_and_no_other_value_occurs(sample: tuple) -> None:
    _, labels, num_classes = sample
    share = torch.bincount(labels.flatten().long(), minlength=num_classes) / labels.numel()
    assert len(share) == num_classes
    assert (share > 0.02).all()


def test_labels_follow_the_picture(sample: tuple) -> None:
    """Neighbouring pixels differ more across a label border than inside a region."""
    images, labels, _ = sample
    step = (images[..., 1:].float() - images[..., :-1].float()).abs().mean(1)
    border = labels[..., 1:] != labels[..., :-1]
    assert step[border].mean() > 1.3 * step[~border].mean()


def test_the_mean_colour_does_not_reveal_the_class(sample: tuple) -> None:
    """A linear fit to mean colours explains almost nothing of the class, and the classes have equal means."""
    images, labels, num_classes = sample
    colours, classes = [], []
    for image, label in zip(images.float() / 255, labels, strict=True):
        for present in label.unique():
            region = label == present
            if region.sum() >= 100:
                colours.append(image[:, region].mean(1))
                classes.append(int(present))
    colour, kind = torch.stack(colours), torch.tensor(classes)
    means = torch.stack([colour[kind == index].mean(0) for index in range(num_classes)])
    between = (means[kind] - colour.mean(0)).square().sum()
    assert between / (colour - colour.mean(0)).square().sum() < 0.06


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count must be >= 1, got 0"),
        ({"count": 1, "size": 8}, "size must be >= 16, got 8"),
        ({"count": 1, "seed": -1}, "seed must be >= 0, got -1"),
        ({"count": 1, "first": -1}, "first must be >= 0, got -1"),
        ({"count": 1, "max_objects": 2}, "max_objects must be >= min_objects"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenes(**arguments)


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=r"scene index must be in 0\.\.2"):
        Scenes(3).load(index)


def test_moving_scenes_start_as_still_ones_and_move() -> None:
    still, moving = Scenes(3, size=48), Scenes(3, size=48, frames=4)
    assert len(moving) == 12
    for scene in range(3):
        assert torch.equal(moving.load(4 * scene), still.load(scene))
        assert torch.equal(moving.labels(4 * scene), still.labels(scene))
        changed = [(moving.labels(4 * scene + frame) != still.labels(scene)).float().mean() for frame in range(1, 4)]
        assert 0 < changed[0] < changed[2] < 0.7
    assert moving.name(5) == "scene-0-000001-01"
