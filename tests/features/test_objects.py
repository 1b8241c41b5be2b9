import pytest
from hypothesis import given
from hypothesis import strategies as st

from cribo.base.errors import InputError
from cribo.features.objects import GridMask


@given(st.binary(max_size=40))
def test_any_counts_of_a_database_give_a_mask_or_an_error(counts: bytes) -> None:
    """They come from files of others, and COCO's library would read and write beyond its memory."""
    try:
        assert GridMask((4, 6), counts, (64, 96)).patches().shape == (4, 6)
    except InputError as error:
        assert "counts of run lengths" in str(error)  # noqa: PT017 - one of both


def test_counts_of_another_grid_are_refused() -> None:
    assert GridMask((2, 3), b"06", (32, 48)).patches().all()
    with pytest.raises(InputError, match="whose sum is 12"):
        GridMask((3, 4), b"06", (32, 48)).patches()
