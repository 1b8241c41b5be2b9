import pytest
import torch

from cribo.features.cache import in_blocks


@pytest.mark.parametrize("lengths", [[], [0], [3], [5, 0, 1, 9, 2], [4, 4]])
def test_in_blocks_regroups_parts_of_any_length(lengths: list[int]) -> None:
    rows = torch.arange(2 * sum(lengths)).view(-1, 2)
    blocks = list(in_blocks(rows.split(lengths), 4)) if lengths else list(in_blocks([], 4))
    assert [len(block) for block in blocks[:-1]] == [4] * (len(blocks) - 1)
    assert torch.equal(torch.cat([rows[:0], *blocks]), rows)
