"""What is painted on an image, and its encoding in messages between browser and server."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.explorer.uploads import Refused


@dataclass
class Painting:
    """The classes that were painted on an image, at the shown size; 255 for none.

    Attributes:
        labels: as painted last.
        time: when that was painted, by the clock of the browser.
        confirmed: as added to the examples; None if the image is no example.
    """

    labels: UInt8[Tensor, "h w"]
    time: float = 0.0
    confirmed: UInt8[Tensor, "h w"] | None = None

    @property
    def is_changed(self) -> bool:
        """Whether something was painted or erased that is not confirmed."""
        if self.confirmed is None:
            return bool((self.labels != IGNORE_INDEX).any())
        return not torch.equal(self.labels, self.confirmed)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.labels.nbytes + (0 if self.confirmed is None else self.confirmed.nbytes)


def to_runs(labels: UInt8[Tensor, "h w"]) -> list[int]:
    """Encode labels, row by row, as runs of equal labels: label, length, label, length, and so on.

    Example:
        >>> to_runs(torch.tensor([[3, 3, 255], [255, 255, 0]], dtype=torch.uint8))
        [3, 2, 255, 3, 0, 1]
    """
    values, lengths = labels.flatten().unique_consecutive(return_counts=True)
    return torch.stack((values.long(), lengths), dim=1).flatten().tolist()


def from_runs(runs: Any, size: tuple[int, int], classes: int) -> UInt8[Tensor, "h w"]:
    """Decode labels that the browser sent (see `to_runs`).

    Args:
        runs: label, length, label, length, and so on.
        size: expected height and width.
        classes: number of classes; labels are below it, or 255.

    Raises:
        Refused: the runs are invalid.
    """
    height, width = size
    try:
        labels, lengths = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused("The painting is invalid: reload the page.") from error
    unknown = ((labels < 0) | (labels >= classes)) & (labels != IGNORE_INDEX)
    within = (lengths > 0) & (lengths <= height * width)
    if unknown.any() or not within.all() or lengths.sum() != height * width:
        raise Refused("The painting does not match its picture: reload the page.")
    return torch.from_numpy(np.repeat(labels.astype(np.uint8), lengths).reshape(size))
