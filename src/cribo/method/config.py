"""Options of the method; does not import torch, so that a command line starts fast."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cribo.base.bounds import between, check_bounds
from cribo.base.errors import InputError

Marginals = Literal["adaptive", "uniform"]
Criterion = Literal["cycle", "none"]
Interpolation = Literal["bicubic", "bilinear"]
HeadWeights = Literal["kaiming", "lecun", "pytorch"]
UnitInterval = Annotated[float, between(0, 1)]


@dataclass(frozen=True)
class ViewRecipe:
    """Distribution of the views. Pairs of numbers are (view 1, view 2) or (low, high), as documented.

    Attributes:
        size: side of a view in pixels.
        area: (low, high) share of the image that a crop covers.
        aspect: (low, high) width / height of a crop.
        interpolation: interpolation of crops that are resized, with antialiasing.
        flip: probability of a horizontal flip.
        jitter: probability of colour jitter.
        brightness: strength x: the factor is drawn from [1 - x, 1 + x].
        contrast: strength x: the factor is drawn from [1 - x, 1 + x].
        saturation: strength x: the factor is drawn from [1 - x, 1 + x].
        hue: strength x: the shift is drawn from [-x, x], in turns.
        greyscale: probability of conversion to greyscale.
        blur: (view 1, view 2) probability of Gaussian blur.
        blur_sigma: (low, high) standard deviation of the blur in pixels of the view.
        solarise: (view 1, view 2) probability of solarisation.
        solarise_threshold: threshold of solarisation in grey levels, 0 to 255.

    Raises:
        ValueError: a value out of range.
    """

    size: Annotated[int, between(1, 8192)] = 224
    area: tuple[Annotated[float, between(1e-4, 1)], Annotated[float, between(1e-4, 1)]] = (0.25, 1.0)
    aspect: tuple[Annotated[float, between(0.01, 100)], Annotated[float, between(0.01, 100)]] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bicubic"
    flip: UnitInterval = 0.5
    jitter: UnitInterval = 0.8
    brightness: UnitInterval = 0.4
    contrast: UnitInterval = 0.4
    saturation: UnitInterval = 0.2
    hue: Annotated[float, between(0, 0.5)] = 0.1
    greyscale: UnitInterval = 0.2
    blur: tuple[UnitInterval, UnitInterval] = (1.0, 0.1)
    blur_sigma: tuple[Annotated[float, between(0.01, 100)], Annotated[float, between(0.01, 100)]] = (0.1, 2.0)
    solarise: tuple[UnitInterval, UnitInterval] = (0.0, 0.2)
    solarise_threshold: Annotated[float, between(0, 255)] = 128

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("area", "aspect", "blur_sigma"):
            low, high = getattr(self, name)
            if low > high:
                raise InputError(f"{name} must be ordered (low, high), got ({low}, {high})")
