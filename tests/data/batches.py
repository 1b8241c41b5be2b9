"""Data sets of view pairs, and comparison of batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cribo.data.samples import Batch, SampleDataset
from cribo.data.sources.images import ImageSource
from cribo.method import ViewRecipe
from cribo.objectives.views import ViewPairs


def view_pairs(source: ImageSource, *, seed: int = 0, num_objects: int = 5, **options: Any) -> SampleDataset:
    """Return a data set of view pairs of 16 x 16 pixels with a grid of 4 x 4 patches."""
    transform = ViewPairs(ViewRecipe(size=16), grid=(4, 4), num_objects=num_objects, drop_path_sites=3)
    return SampleDataset(source, transform, seed=seed, **options)


def assert_same(ours: Sequence[Batch], theirs: Sequence[Batch], *, reasons: bool = True) -> None:
    """Check that batches are bitwise equal, except for retries and optionally the reasons of failures."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.images, other.images)
        assert_same_samples(mine, other)
        if reasons:
            assert mine.unreadable == other.unreadable
        else:
            assert [entry.name for entry in mine.unreadable] == [entry.name for entry in other.unreadable]


def assert_same_samples(ours: Batch, theirs: Batch) -> None:
    """Check that the tensors of batches are bitwise equal."""
    assert ours.samples.keys() == theirs.samples.keys()
    for name, mine in ours.samples.items():
        other = theirs[name]
        assert type(mine) is type(other), name
        tensors = [(mine, other)] if isinstance(mine, Tensor) else zip(mine, other, strict=True)
        for first, second in tensors:
            assert first.dtype == second.dtype, name
            assert torch.equal(first, second), name
