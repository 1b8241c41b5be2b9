"""Propagation against a literal implementation of DINO's evaluation in NumPy, and on moving squares."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cribo.features.config import PropagationSettings
from cribo.features.propagation import (
    LabelledFrame,
    encoded_size,
    frame_labels,
    label_frame,
    propagate,
    soft_labels,
)

ROWS, COLUMNS, DIM, OBJECTS = 5, 7, 6, 2


def made_frames(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [F.normalize(torch.randn(ROWS, COLUMNS, DIM, generator=generator), dim=2) for _ in range(count)]


def all_pairs(
    frame: np.ndarray, sources: list[tuple[np.ndarray, np.ndarray]], settings: PropagationSettings
) -> np.ndarray:
    """Return all affinities of a frame, masked by the neighbourhood, the best ones normalised to a sum of 1."""
    rows, columns = np.divmod(np.arange(ROWS * COLUMNS), COLUMNS)
    near = (np.abs(rows[:, None] - rows) <= settings.radius) & (np.abs(columns[:, None] - columns) <= settings.radius)
    queries = frame.reshape(-1, DIM)
    affinities = np.concatenate(
        [np.exp(queries @ features.reshape(-1, DIM).T / settings.temperature) * near for features, _ in sources], axis=1
    )
    kept = np.sort(affinities, axis=1)[:, -settings.neighbours]
    affinities[affinities < kept[:, None]] = 0
    affinities /= affinities.sum(axis=1, keepdims=True)
    labels = np.concatenate([labels.reshape(-1, OBJECTS + 1) for _, labels in sources])
    return (affinities @ labels).reshape(ROWS, COLUMNS, -1)


@pytest.mark.parametrize(
    "settings",
    [
        PropagationSettings(radius=2, previous=3, neighbours=4),
        PropagationSettings(radius=1, previous=2, neighbours=5, temperature=0.5),
        PropagationSettings(radius=12, previous=0, neighbours=1),
    ],
)
def test_labels_equal_those_of_all_pairs(settings: PropagationSettings) -> None:
    frames = made_frames(7)
    first = torch.randint(
        0, OBJECTS + 1, (ROWS, COLUMNS), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    found = list(propagate(iter(frames), soft_labels(first, (ROWS, COLUMNS), OBJECTS + 1), settings))
    arrays = [frame.double().numpy() for frame in frames]
    given = arrays[0], np.eye(OBJECTS + 1)[first.numpy()]
    queue: list[tuple[np.ndarray, np.ndarray]] = []
    for frame, labels in zip(arrays[1:], found, strict=True):
        expected = all_pairs(frame, [given, *queue], settings)
        np.testing.assert_allclose(labels.numpy(), expected, atol=1e-5)
        queue = [*queue, (frame, expected)][len(queue) >= settings.previous :]


def test_fewer_patches_than_neighbours() -> None:
    """Patches beyond the radius have no weight, even if there are not enough within it."""
    features = F.normalize(torch.ones(1, 1, 4, DIM), dim=3)
    labels = F.one_hot(torch.tensor([[[0, 1, 2, 0]]]), 3).float()
    found = label_frame(features, [LabelledFrame(features, labels)], neighbours=9, radius=1, temperature=0.1)
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([0.5, 0.5, 0.0]))
    torch.testing.assert_close(found[0, 0, 1], torch.tensor([1.0, 1.0, 1.0]) / 3)


def test_squares_are_tracked() -> None:
    """Two squares of 2 x 2 patches, with one feature each, move by a patch per frame."""
    frames, maps = [], []
    for step in range(6):
        objects = torch.zeros(8, 12, dtype=torch.uint8)
        objects[1:3, 1 + step : 3 + step] = 1
        objects[5:7, 9 - step : 11 - step] = 2
        maps.append(objects)
        frames.append(F.one_hot(objects.long(), 3).float())
    found = propagate(iter(frames), soft_labels(maps[0], (8, 12), 3), PropagationSettings(radius=2))
    for labels, objects in zip(found, maps[1:], strict=True):
        assert torch.equal(labels.argmax(dim=2), objects.long())
        assert torch.equal(frame_labels(labels, 4, (8, 12)).labels, objects)


def test_maps_are_upsampled_stretched_and_compared() -> None:
    """DINO's order: bilinear upsampling, each label scaled to 0-1 over the frame, arg-max, then nearest."""
    labels = torch.rand(ROWS, COLUMNS, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.2, 0.5])
    whole = F.interpolate(labels.permute(2, 0, 1)[None], scale_factor=4, mode="bilinear")[0].double().numpy()
    stretched = np.stack([(part - part.min()) / (part - part.min()).max() for part in whole])
    expected = stretched.argmax(axis=0)
    rows, columns = ((np.arange(side) + 0.5) * 4 * patches / side for side, patches in ((13, ROWS), (31, COLUMNS)))
    found = frame_labels(labels, 4, (13, 31)).labels.numpy()
    np.testing.assert_array_equal(found, expected[rows.astype(int)][:, columns.astype(int)])


def test_a_lost_object_is_not_found_again() -> None:
    labels = torch.zeros(ROWS, COLUMNS, 3)
    labels[..., 0] = 1
    assert not frame_labels(labels, 4, (20, 28)).labels.any()


@pytest.mark.parametrize(
    ("size", "patch", "expected"),
    [
        ((480, 854), 16, (480, 832)),
        ((480, 910), 8, (480, 896)),
        ((854, 480), 16, (832, 480)),
        ((480, 854), 14, (476, 854 // 14 * 14)),
        ((300, 300), 16, (480, 480)),
    ],
)
def test_frame_sizes_equal_those_of_dino(size: tuple[int, int], patch: int, expected: tuple[int, int]) -> None:
    assert encoded_size(size, 480, patch) == expected
