"""Settings of segmentation by example."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from cribo.base.bounds import above, at_least, below
from cribo.base.errors import InputError
from cribo.data.config import PIXEL_OPTIONS, PixelOptions, Reading
from cribo.features.config import ProbeSettings

Refine = Literal["none", "bilateral"]
OF_FEATURES = ("size", "scale", "window", "stride", "precision", *PIXEL_OPTIONS)
"""Settings on which the stored features depend; fixed when a memory is created."""


@dataclass(frozen=True, kw_only=True)
class SegmentationSettings(ProbeSettings, PixelOptions):
    """Settings for encoding images, labelling patches, and converting votes to pixel labels.

    Attributes:
        min_confidence: leave pixels below this confidence unlabelled (255).
        refine: align the borders of the labels with the edges of the image by a joint bilateral filter; or none.
        reach: radius of the filter, in patches.
        contrast: difference in colour (three times the mean over the channels, each 0 to 1) that counts as an edge.

    Raises:
        ValueError: a value is out of range, or two values exclude each other.
    """

    min_confidence: Annotated[float, at_least(0) & below(1)] = 0.0
    refine: Refine = "bilateral"
    reach: Annotated[float, above(0)] = 1.0
    contrast: Annotated[float, above(0)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        PixelOptions.__post_init__(self)
        if self.refine not in get_args(Refine):
            raise InputError(f"refine must be {' or '.join(get_args(Refine))}, got {self.refine!r}")

    @property
    def reading(self) -> Reading:
        """How images are read."""
        return Reading(**self.given)

    def changed(self, changes: Mapping[str, Any]) -> "SegmentationSettings":
        """Return a copy with some settings changed, for an existing memory.

        Raises:
            ValueError: a setting of the stored features changes, or a value is out of range.
        """
        wanted = dataclasses.replace(self, **changes)
        for name in OF_FEATURES:
            if name in changes and getattr(wanted, name) != getattr(self, name):
                raise InputError(
                    f"{name} is {getattr(self, name)} in the memory and cannot be changed to {changes[name]}: omit it, "
                    "or create another memory"
                )
        return wanted
