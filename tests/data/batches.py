"""View pairs of an image source, and whether two batches are the same."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cribo.data.images import ImageSource
from cribo.data.samples import Batch, SampleDataset
from cribo.method import ViewRecipe
from cribo.objectives.cribo import ViewPairs


def view_pairs(source: ImageSource, *, seed: int = 0, num_objects: int = 5, **options: Any) -> SampleDataset:
    """Pairs of views of 16 x 16 pixels with a grid of 4 x 4 patches."""
    transform = ViewPairs(ViewRecipe(size=16), grid=(4, 4), num_objects=num_objects, drop_path_sites=3)
    return SampleDataset(source, transform, seed=seed, **options)


def assert_same(ours: Sequence[Batch], theirs: Sequence[Batch], *, reasons: bool = True) -> None:
    """Equal bit for bit, but for how often reading was tried again; and for why images are unreadable, if so asked."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.images, other.images)
        assert_same_samples(mine, other)
        if reasons:
            assert mine.unreadable == other.unreadable
        else:
            assert [entry.name for entry in mine.unreadable] == [entry.name for entry in other.unreadable]


def assert_same_samples(ours: Batch, theirs: Batch) -> None:
    """Equal bit for bit, wherever the images come from."""
    assert ours.samples.keys() == theirs.samples.keys()
    for name, mine in ours.samples.items():
        other = theirs[name]
        assert type(mine) is type(other), name
        tensors = [(mine, other)] if isinstance(mine, Tensor) else zip(mine, other, strict=True)
        for first, second in tensors:
            assert first.dtype == second.dtype, name
            assert torch.equal(first, second), name
