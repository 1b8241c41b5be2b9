"""How an image is looked at, named apart so that a configuration need not wait for torch."""

from dataclasses import dataclass
from typing import Literal

InferenceMode = Literal["whole", "slide"]


@dataclass(frozen=True)
class Inference:
    """How an image that is resized already is looked at; MMSegmentation's two test modes.

    Attributes:
        mode: `whole`, or `slide`: in windows whose logits are averaged where they overlap, the last ones flush with
            the image's edges.
        window: side of a window in pixels.
        stride: pixels from one window to the next.
        batch_size: windows in one pass.

    Raises:
        ValueError: a window, stride or batch size below 1, a stride beyond the window.
    """

    mode: InferenceMode = "whole"
    window: int = 512
    stride: int = 480
    batch_size: int = 4

    def __post_init__(self) -> None:
        for name in ("window", "stride", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.stride > self.window:
            raise ValueError(f"stride must be at most the window ({self.window}), got {self.stride}")

    def windows(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Rows and columns of each window of an image; none is larger than the image."""
        if self.mode == "whole":
            return [(slice(0, height), slice(0, width))]
        from cribo.retrieval.patches import window_starts

        rows, columns = (
            [slice(start, start + min(self.window, side)) for start in window_starts(side, self.window, self.stride)]
            for side in (height, width)
        )
        return [(down, across) for down in rows for across in columns]
