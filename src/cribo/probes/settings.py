"""Settings of the features and the choice of a probe."""

from dataclasses import dataclass
from typing import Any, Literal

from cribo.checks import require_least, require_positive, sorted_blocks
from cribo.errors import InputError
from cribo.retrieval.choices import FeaturePrecision

Head = Literal["knn", "ridge", "both"]

_ENLARGED = 2.0
_LEAST, _LARGEST = 384, 1024  # limits of the shorter side in pixels


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Settings for encoding images, and for choosing a probe.

    Attributes:
        size: shorter side in pixels at which images are encoded, rounded to the patch size; larger sizes give finer
            labels and are slower. [the image's own, clipped to 384-1024, but at most enlarged twice]
        scale: factor by which images are enlarged before encoding, instead of size; 1 for their own size.
        window: side in pixels of the square windows in which images are encoded, for images far larger than those of
            the backbone's training; features are averaged where windows overlap. [images are encoded as a whole]
        stride: distance between windows in pixels. [two thirds of the window]
        precision: data type of the features in the memory; float16 takes half the space.
        blocks: numbers, from 1, of the blocks whose features are used, such as 6,8,9,10. [chosen by cross-validation]
        whiten: whiten the features partially, with statistics of the examples: true or false. [chosen]
        head: knn (nearest neighbours), ridge (ridge regression) or both (their mean). [chosen]
        neighbours: k, the number of nearest patches that vote; larger values favour frequent classes.
        temperature: weights of neighbours are the softmax of cosine / temperature; lower values favour the nearest.

    Raises:
        ValueError: a value is out of range, or two values exclude each other.
    """

    size: int | None = None
    scale: float | None = None
    window: int | None = None
    stride: int | None = None
    precision: FeaturePrecision = "float16"
    blocks: tuple[int, ...] | None = None
    whiten: bool | None = None
    head: Head | None = None
    neighbours: int = 5
    temperature: float = 0.07

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", sorted_blocks(self.blocks))
        require_least(self, {"size": 1, "window": 1, "stride": 1, "neighbours": 1})
        require_positive(self, "scale", "temperature")
        if self.size is not None and self.scale is not None:
            raise InputError(f"size={self.size} and scale={self.scale} exclude each other: omit one of them")
        if self.stride is not None and (self.window is None or self.stride > self.window):
            raise InputError(
                f"stride must be at most the window, got {self.stride} with a window of {self.window}: a larger stride "
                "leaves gaps"
            )

    @property
    def of_choice(self) -> tuple[Any, ...]:
        """The settings that influence the choice of a probe."""
        return self.blocks, self.whiten, self.head, self.neighbours, self.temperature

    @property
    def voting(self) -> dict[str, Any]:
        """Keyword arguments of the vote of the nearest neighbours."""
        return {"neighbours": self.neighbours, "temperature": self.temperature}

    def factor(self, height: int, width: int) -> float:
        """Return the factor by which an image is resized before encoding."""
        shorter = min(height, width)
        if self.size is not None:
            return self.size / shorter
        if self.scale is not None:
            return self.scale
        return min(_ENLARGED, max(1.0, _LEAST / shorter), _LARGEST / shorter)

    def check(self, patch_size: int) -> None:
        """Check that windows fit the patches of a backbone.

        Raises:
            ValueError: window or stride is not a positive multiple of the patch size.
        """
        for name in ("window", "stride"):
            value = getattr(self, name)
            if value is not None and (value < patch_size or value % patch_size):
                below, above = value // patch_size * patch_size, (value // patch_size + 1) * patch_size
                raise InputError(
                    f"{name} must be a multiple of the backbone's patch size {patch_size}, got {value}: use "
                    f"{f'{below} or {above}' if below else above}"
                )

    def steps(self, patch_size: int) -> tuple[int, int] | None:
        """Return side and stride of windows in patches; None without windows."""
        if self.window is None:
            return None
        side = self.window // patch_size
        return side, self.stride // patch_size if self.stride is not None else max(1, side * 2 // 3)
