from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cribo.features.grid import encoding_size, grid_size, window_starts
from cribo.features.patches import (
    augment_image,
    augment_labels,
    class_counts,
    labels_in_memory,
    majority_label,
    rarest_patches,
)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((360, 480), (352, 480)),  # 22.5 patches: ties are rounded down, since the paper down-samples
        ((376, 500), (368, 496)),  # 23.5: also rounded down, unlike round half to even
        ((7, 9), (16, 16)),  # at least one patch
        ((375, 249), (368, 256)),
    ],
)
def test_the_closest_multiple_of_the_patch_size(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert grid_size(*size, 16) == expected


@given(st.integers(2, 20_000), st.integers(2, 20_000), st.sampled_from([8, 14, 16, 32]), st.sampled_from([None, 480]))
def test_encoding_sizes_are_bounded_and_keep_the_shape(height: int, width: int, patch: int, side: int | None) -> None:
    scale = 1.0 if side is None else side / min(height, width)
    rows, columns = encoding_size(height, width, patch, scale=scale, max_patches=4096)
    assert rows % patch == columns % patch == 0
    assert 1 <= (rows // patch) * (columns // patch) <= 4096
    if side is not None and 1 / 4 < height / width < 4 and patch >= 14:
        assert abs(min(rows, columns) - side) <= patch / 2 or rows * columns > 0.8 * 4096 * patch**2
    if min(rows, columns) >= 8 * patch:
        assert (rows / columns) / (height / width) == pytest.approx(1, abs=0.15)


@given(st.integers(20, 5000), st.integers(20, 5000), st.sampled_from([8, 14, 16, 32]))
def test_an_image_can_have_about_a_number_of_patches(height: int, width: int, patch: int) -> None:
    found = encoding_size(height, width, patch, patches=432)
    exact = [patch * side * (432 / (height * width)) ** 0.5 for side in (height, width)]
    assert all(abs(side - near) <= patch / 2 + 1e-6 or side == patch for side, near in zip(found, exact, strict=True))


def test_a_fixed_input_size_takes_precedence() -> None:
    assert encoding_size(100, 200, 16, fixed=224, scale=3.0, max_patches=2) == (224, 224)
    assert encoding_size(100, 200, 16, fixed=224, patches=50) == (224, 224)


def test_windows_cover_the_length() -> None:
    for length in range(1, 30):
        for side in range(1, 8):
            for step in range(1, side + 1):
                covered = {place for start in window_starts(length, side, step) for place in range(start, start + side)}
                assert covered >= set(range(length))
                assert max(window_starts(length, side, step)) == max(0, length - side)


def noisy_labels(height: int, width: int, seed: int = 0) -> torch.Tensor:
    labels = torch.randint(0, 5, (height, width), generator=torch.Generator().manual_seed(seed))
    labels[labels == 4] = 255
    return labels


def patches(labels: torch.Tensor, side: int) -> list[list[int]]:
    height, width = labels.shape
    return [
        labels[top : top + side, left : left + side].flatten().tolist()
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


@pytest.mark.parametrize("side", [1, 3, 4])
def test_class_counts_against_counting(side: int) -> None:
    labels = noisy_labels(12, 24)
    counts = class_counts(labels, side, 4, 255)
    for row, values in zip(counts.tolist(), patches(labels, side), strict=True):
        counted = Counter(values)
        assert row == [counted[0], counted[1], counted[2], counted[3], counted[255]]


@pytest.mark.parametrize("side", [1, 3, 4])
def test_patch_labels_are_the_majority(side: int) -> None:
    labels = noisy_labels(12, 24, seed=1)
    found = majority_label(class_counts(labels, side, 4, 255), "drop", 255).tolist()
    expected = []
    for values in patches(labels, side):
        counts = Counter(values)
        most = max(counts.values())
        # Ties go to the smallest class index, and to ignored pixels last.
        expected.append(min(value for value, count in counts.items() if count == most))
    assert found == expected


# Pixels of classes 0 and 1, and ignored pixels, in five patches.
COUNTS = torch.tensor([[3, 1, 0], [1, 2, 6], [0, 4, 4], [0, 0, 9], [2, 2, 1]])


@pytest.mark.parametrize(
    ("unlabelled", "kept", "classes"),
    [
        ("drop", [0, 2, 4], [0, 1, 0]),
        ("outvote", [0, 1, 2, 4], [0, 1, 1, 0]),
        ("class", [0, 1, 2, 3, 4], [0, 2, 1, 2, 0]),
        ("first", [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]),
    ],
)
def test_ignored_pixels_in_the_memory(unlabelled, kept: list[int], classes: list[int]) -> None:
    before = COUNTS.clone()
    counts, rows = labels_in_memory(COUNTS, unlabelled)
    assert rows.tolist() == kept
    assert counts[rows].argmax(dim=1).tolist() == classes
    assert torch.equal(COUNTS, before)


def test_ignored_pixels_can_count_as_background() -> None:
    counts, _ = labels_in_memory(COUNTS, "first")
    assert counts.tolist() == [[3, 1], [7, 2], [4, 4], [9, 0], [3, 2]]


def test_patches_to_score() -> None:
    assert majority_label(COUNTS, "drop", -1).tolist() == [0, -1, 1, -1, 0]
    assert majority_label(COUNTS, "outvote", -1).tolist() == [0, 1, 1, -1, 0]
    # Ignored patches are not scored, regardless of the memory.
    assert majority_label(COUNTS, "class", -1).tolist() == majority_label(COUNTS, "drop", -1).tolist()


# ------------------------------------------------------------------ bounded memory


def test_rare_classes_are_preferred() -> None:
    """With one patch of a class and 99 of another, the scores are 1 x U and 99 x U."""
    counts = torch.zeros(100, 2, dtype=torch.long)
    counts[:, 0] = 16
    counts[37] = torch.tensor([0, 16])
    chosen = [37 in rarest_patches(counts, 10, torch.Generator().manual_seed(seed)).tolist() for seed in range(50)]
    assert sum(chosen) >= 45


def test_draws_are_uniform_within_a_class_and_scores_add_up() -> None:
    counts = torch.full((40, 1), 16)
    generator = torch.Generator().manual_seed(0)
    times = Counter(row for _ in range(400) for row in rarest_patches(counts, 10, generator).tolist())
    assert min(times.values()) > 60  # 100 are expected of each
    assert max(times.values()) < 140
    # The score of a patch with both classes is the sum of both, so it is the least preferred.
    mixed = torch.tensor([[16, 0]] * 20 + [[0, 16]] * 20 + [[8, 8]] * 20)
    times = Counter(row // 20 for _ in range(200) for row in rarest_patches(mixed, 10, generator).tolist())
    assert times[2] < 0.75 * min(times[0], times[1])


def test_a_large_memory_keeps_all_patches() -> None:
    rows = rarest_patches(torch.ones(7, 2, dtype=torch.long), 9, torch.Generator())
    assert rows.tolist() == list(range(7))


# ------------------------------------------------------------------ augmentation


def test_image_and_labels_are_cropped_consistently() -> None:
    """The image encodes its labels, so both must agree after any crop."""
    labels = torch.arange(4).repeat_interleave(20).view(1, 80).repeat(60, 1).to(torch.uint8)
    labels[30:] += 4
    image = (labels * 20)[None].repeat(3, 1, 1)
    cut = set()
    for number in range(20):
        key = (0, 5, number)
        seen = augment_image(image, (48, 64), "bilinear", key)
        cropped = augment_labels(labels, (48, 64), key)
        assert cropped.shape == (48, 64)
        # All four adjustments keep grey values grey and in the order of the labels.
        inner = torch.stack([seen[0][cropped == label].float().median() for label in cropped.unique()])
        assert (inner.diff() > 0).all()
        cut.add(tuple(cropped.unique().tolist()))
    assert len(cut) >= 3


def test_an_augmentation_depends_on_its_key_only() -> None:
    image = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    first = augment_image(image, (32, 32), "bilinear", (0, 1, 0))
    torch.rand(3)
    assert torch.equal(first, augment_image(image, (32, 32), "bilinear", (0, 1, 0)))
    assert not torch.equal(first, augment_image(image, (32, 32), "bilinear", (0, 1, 1)))
    assert not torch.equal(first, augment_image(image, (32, 32), "bilinear", (1, 1, 0)))


@pytest.mark.parametrize("shape", [(8, 400), (400, 8), (1, 1)])
def test_extreme_shapes(shape: tuple[int, int]) -> None:
    for number in range(10):
        assert augment_labels(torch.zeros(shape, dtype=torch.uint8), (16, 16), (0, 0, number)).shape == (16, 16)
