"""Pictures of dense features: principal components as colours, and similarity between patches."""

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.explorer.network import Dense
from cribo.explorer.pictures import as_shown, box_of_patch, heat_picture, shown_size, with_box
from cribo.features import PCAColours


@dataclass(frozen=True)
class PatchSimilarity:
    """Similarity of all patches of an image to a selected patch.

    Attributes:
        picture: heat map over the image, with a frame around the selected patch.
        row, column: position of the selected patch.
        vector: feature of the selected patch.
        sentence: description of the picture.
    """

    picture: UInt8[np.ndarray, "h w 3"]
    row: int
    column: int
    vector: Float[np.ndarray, " d"]
    sentence: str


def colour_picture(dense: Dense) -> UInt8[np.ndarray, "h w 3"]:
    """Draw the first three principal components of an image's features as colours, at the shown size."""
    size = shown_size(*dense.size)
    colours = PCAColours([dense.tokens])(dense.tokens, size=size)
    return (255 * colours).round().byte().numpy()


def cosines(tokens: Float[Tensor, "h w d"], row: int, column: int) -> Float[Tensor, "h w"]:
    """Compute the cosine similarity of every patch to the patch at (row, column)."""
    directions = F.normalize(tokens, dim=-1)
    return directions @ directions[row, column]


def patch_similarity(image: UInt8[Tensor, "c h w"], dense: Dense, row: int, column: int) -> PatchSimilarity:
    """Compare all patches of an image with the patch at (row, column), which is clamped to the grid."""
    row, column = dense.clamped(row, column)
    similarity = cosines(dense.tokens, row, column)
    picture = as_shown(image)
    low = float(similarity.min())
    heat = heat_picture(picture, similarity, low=low, high=1.0)
    height, width = dense.grid
    sentence = (
        f"Patch in row {row} of {height}, column {column} of {width} (counted from 0): cosine similarity from "
        f"{low:.2f} (dark) to 1 (bright)."
    )
    box = box_of_patch(dense.grid, row, column, picture.shape[:2])
    return PatchSimilarity(with_box(heat, box), row, column, dense.tokens[row, column].numpy(), sentence)
