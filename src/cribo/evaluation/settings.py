"""Base class of the settings of evaluation protocols. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, Self, TypeVar, get_args, get_type_hints

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import InputError

if TYPE_CHECKING:
    _T = TypeVar("_T")
    Decided = Annotated[_T, "None until set by `prepare`"]
else:
    Decided = Optional


Side = Annotated[int, at_least(1)]
"""Side of images in pixels."""

QUICK_SIDE = 224
"""Side of square images for `cribo benchmark --quick`, in pixels."""

UNDECIDED: Any = None
"""Default of a setting whose value depends on the variant or the schedule."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of the settings of a protocol, which are the fields of a frozen dataclass.

    A protocol that publications implement differently has a setting `variant`, whose type is a `Literal` of the names
    of these implementations, the default first. It is stored in results, and published values are only compared with
    results of the same variant.

    Attributes:
        name: name of the protocol on the command line.

    Raises:
        InputError: unknown variant, or a value out of range.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_bounds(self)
        if (variants := self.variants()) and (variant := vars(self)["variant"]) not in variants:
            raise InputError(f"{self.name}: variant must be one of {', '.join(variants)}, got {variant!r}")

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """Return the names of the variants, the default first; empty for a protocol without variants."""
        has_variants = any(setting.name == "variant" for setting in fields(cls))
        return get_args(get_type_hints(cls)["variant"]) if has_variants else ()

    def is_decided(self, name: str) -> bool:
        """Whether a setting is not None."""
        return getattr(self, name) is not None

    def decided(self, defaults: Mapping[str, Any]) -> Self:
        """Return a copy in which `defaults` replace settings that are None."""
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


def square(side: int, patch_size: int) -> tuple[int, int]:
    """Return the (height, width) of square images, `side` rounded down to a multiple of the patch size."""
    side = max(1, side // patch_size) * patch_size
    return side, side


def require_whole_patches(size: tuple[int, int], patch_size: int) -> None:
    """Check that height and width of images are multiples of the patch size.

    Raises:
        InputError: a side is not a positive multiple of the patch size.
    """
    height, width = size
    if height % patch_size or width % patch_size or min(height, width) < 1:
        raise InputError(f"size must be a multiple of the patch size {patch_size}, got {height}x{width}")
