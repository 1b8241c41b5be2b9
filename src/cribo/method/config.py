"""Options of the method; does not import torch, so that a command line starts fast."""

from dataclasses import dataclass
from typing import Literal

from cribo.base.errors import InputError

Marginals = Literal["adaptive", "uniform"]
Criterion = Literal["cycle", "none"]


@dataclass(frozen=True)
class ViewRecipe:
    """Distribution of the views. Pairs of numbers are (view 1, view 2) or (low, high), as documented.

    Attributes:
        size: side of a view in pixels.
        area: (low, high) share of the image that a crop covers.
        aspect: (low, high) width / height of a crop.
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

    size: int = 224
    area: tuple[float, float] = (0.25, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    greyscale: float = 0.2
    blur: tuple[float, float] = (1.0, 0.1)
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise: tuple[float, float] = (0.0, 0.2)
    solarise_threshold: float = 128

    def __post_init__(self) -> None:
        def check(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            if not all(low <= number <= high for number in numbers):
                raise InputError(f"{name} must be between {low:g} and {high:g}, got {value}")

        check("size", 1, 8192)
        for name in ("flip", "jitter", "greyscale", "blur", "solarise", "brightness", "contrast", "saturation"):
            check(name, 0, 1)
        check("area", 1e-4, 1)
        check("aspect", 0.01, 100)
        check("hue", 0, 0.5)
        check("blur_sigma", 0.01, 100)
        check("solarise_threshold", 0, 255)
        for name in ("area", "aspect", "blur_sigma"):
            low, high = getattr(self, name)
            if low > high:
                raise InputError(f"{name} must be ordered (low, high), got ({low}, {high})")
