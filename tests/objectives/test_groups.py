"""Groups of images: cycles and losses of one group do not depend on the others."""

import pytest
import torch

from cribo.objectives.banks import RunBank
from cribo.objectives.objects import RowPairs, mean_over_groups

SIZES = (3, 0, 5, 4)  # objects of each image
DIM = 6


@pytest.fixture
def objects() -> RowPairs:
    rows = torch.randn(2, sum(SIZES), DIM, generator=torch.Generator().manual_seed(0))
    return RowPairs(rows, torch.arange(4).repeat_interleave(torch.tensor(SIZES)), list(SIZES))


def test_groups_are_consecutive_images(objects: RowPairs) -> None:
    assert objects.groups(2) == [slice(0, 3), slice(3, 12)]
    assert objects.groups(1) == [slice(0, 3), slice(3, 3), slice(3, 8), slice(8, 12)]


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_a_group_is_matched_as_if_it_were_alone(objects: RowPairs, group_size: int) -> None:
    bank = RunBank(num_images=20, num_objects=2)
    stored = torch.randn(2, 40, DIM, generator=torch.Generator().manual_seed(1))
    bank.allocate(stored).push(stored, torch.arange(100, 120).repeat_interleave(2), [2] * 20)
    matches = bank.match(objects, group_size=group_size, criterion="cycle")
    for start in range(0, 4, group_size):
        rows = slice(sum(SIZES[:start]), sum(SIZES[: start + group_size]))
        alone = bank.allocate(stored).match(objects.teacher[:, rows], objects.images[rows])
        assert torch.equal(matches.valid[:, rows], alone.valid)
        assert torch.equal(matches.nearest[:, rows], alone.nearest)
    assert 0 < matches.valid.sum() < matches.valid.numel()


def test_the_mean_counts_groups_equally(objects: RowPairs) -> None:
    values = torch.arange(12.0)
    assert mean_over_groups(objects.groups(2), lambda rows: values[rows].mean()) == (1 + 7) / 2
