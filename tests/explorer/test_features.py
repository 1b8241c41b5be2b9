import numpy as np
import torch

from cribo.base.painting import MARK
from cribo.explorer.features import colour_picture, cosines, patch_similarity
from cribo.explorer.network import Dense


def two_halves() -> Dense:
    """Return features that differ between the left and right half."""
    tokens = torch.zeros(4, 6, 3)
    tokens[:, :3, 0] = 2.0
    tokens[:, 3:, 1] = 0.5
    return Dense(tokens, (64, 96))


def test_similarity_is_the_cosine_regardless_of_norms() -> None:
    similarity = cosines(two_halves().tokens, 1, 4)
    assert similarity[:, 3:].eq(1).all()
    assert similarity[:, :3].eq(0).all()


def test_the_selected_patch_is_framed_and_similar_patches_are_bright() -> None:
    image = torch.full((3, 64, 96), 100, dtype=torch.uint8)
    found = patch_similarity(image, two_halves(), 99, -3)
    assert (found.row, found.column) == (3, 0)
    assert found.sentence.startswith("Patch in row 3 of 4, column 0 of 6")
    scale = found.picture.shape[0] / 64
    assert found.picture.shape[:2] == (64 * scale, 96 * scale)
    bright, dark = found.picture[10, 10].mean(), found.picture[10, -10].mean()
    assert bright > dark + 100
    framed = (found.picture == MARK).all(axis=2)
    rows, columns = framed.nonzero()
    assert rows.min() >= 40 * scale
    assert columns.max() <= 24 * scale


def test_colours_differ_between_the_halves() -> None:
    picture = colour_picture(two_halves()).astype(int)
    assert np.abs(picture[5, 5] - picture[5, -5]).max() > 200
    assert np.abs(picture[5, 5] - picture[-5, 5]).max() == 0
