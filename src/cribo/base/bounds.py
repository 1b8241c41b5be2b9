"""Bounds of numbers, declared in the types of settings and arguments."""

import math
import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from cribo.base.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True, repr=False)
class Bounds:
    """Bounds of a number; of a tuple, list or mapping, they are those of each number. Infinity and NaN are outside.

    A field declares its bounds in its type, and a dataclass checks them by `check_bounds`. `--help` prints them.

    Attributes:
        limits: the comparisons that hold for a valid number.

    Example:
        >>> from typing import Annotated
        >>> @dataclass
        ... class Schedule:
        ...     epochs: Annotated[int, at_least(1)] = 100
        ...     lr: Annotated[float, above(0) & at_most(10)] = 5e-4
        ...
        ...     def __post_init__(self) -> None:
        ...         check_bounds(self)
        >>> Schedule(lr=11)
        Traceback (most recent call last):
        cribo.base.errors.ConfigError: lr must be > 0 and <= 10, got 11
    """

    limits: tuple[tuple[str, float], ...]

    def __and__(self, other: "Bounds") -> "Bounds":
        return Bounds(self.limits + other.limits)

    def __contains__(self, number: float) -> bool:
        return -math.inf < number < math.inf and all(_COMPARISONS[sign](number, limit) for sign, limit in self.limits)

    def __str__(self) -> str:
        return " and ".join(f"{sign} {limit}" for sign, limit in self.limits)

    __repr__ = __str__  # in the types that jsonargparse prints

    def check(self, **values: Any) -> None:
        """Check values by their names; None is valid.

        Raises:
            ConfigError: a value is out of bounds.

        Example:
            >>> at_least(1).check(k=0)
            Traceback (most recent call last):
            cribo.base.errors.ConfigError: k must be >= 1, got 0
        """
        for name, value in values.items():
            if not all(number in self for number in _numbers(value)):
                raise ConfigError(f"{name} must be {self}, got {value}")


def at_least(limit: float) -> Bounds:
    """Return the bounds of numbers that are at least `limit`."""
    return Bounds(((">=", limit),))


def above(limit: float) -> Bounds:
    """Return the bounds of numbers above `limit`."""
    return Bounds(((">", limit),))


def at_most(limit: float) -> Bounds:
    """Return the bounds of numbers that are at most `limit`."""
    return Bounds((("<=", limit),))


def below(limit: float) -> Bounds:
    """Return the bounds of numbers below `limit`."""
    return Bounds((("<", limit),))


def between(low: float, high: float) -> Bounds:
    """Return the bounds of numbers from `low` to `high`, both included."""
    return at_least(low) & at_most(high)


def find_bounds(hint: Any) -> Bounds | None:
    """Return the bounds in a type.

    Example:
        >>> from typing import Annotated
        >>> find_bounds(Annotated[int, at_least(1)] | None), find_bounds(int)
        (>= 1, None)
    """
    if isinstance(hint, Bounds):
        return hint
    return next((found for part in get_args(hint) if (found := find_bounds(part)) is not None), None)


def check_bounds(settings: "DataclassInstance", prefix: str = "") -> None:
    """Check the fields of a dataclass whose types have bounds, and those of the dataclasses in it.

    A field that is a number or one of some words, `Annotated[float, above(0)] | Literal["auto"]`, may be a word.

    Args:
        settings: the dataclass.
        prefix: prefix of the names in error messages, such as `optim.`.

    Raises:
        ConfigError: a value is out of bounds.
    """
    for field in fields(settings):
        name, value = f"{prefix}{field.name}", getattr(settings, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            check_bounds(value, f"{name}.")
        elif (bounds := find_bounds(field.type)) is not None and value not in _words(field.type):
            bounds.check(**{name: value})


def _words(hint: Any) -> list[Any]:
    """Return the words that a type allows instead of a number."""
    return [word for part in get_args(hint) if get_origin(part) is Literal for word in get_args(part)]


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the number itself, or the numbers of a tuple, list or mapping, without None."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return (part for part in parts if part is not None)


def require_distinct(name: str, values: Collection[str], choices: Collection[str]) -> None:
    """Check that a setting lists some of its choices, each at most once.

    Raises:
        ConfigError: the list is empty, or a value is repeated or not a choice.
    """
    if not values or len({*values}) < len(values) or not {*values} <= {*choices}:
        raise ConfigError(f"{name} must be distinct values of {','.join(choices)}, got {','.join(values)}")


def require_distinct_numbers(name: str, numbers: Collection[float] | None, example: str) -> None:
    """Check that a setting lists at least one number, each once; None is valid.

    Raises:
        ConfigError: the list is empty, or a number is repeated.
    """
    if numbers is not None and len({*numbers}) < max(1, len(numbers)):
        raise ConfigError(
            f"{name} must be distinct numbers, such as {example}, got {','.join(map(str, numbers)) or 'none'}"
        )


def sorted_blocks(blocks: Iterable[int]) -> tuple[int, ...]:
    """Return block numbers in order, without duplicates.

    Raises:
        ConfigError: there are none, or one is below 1, the number of the first block.

    Example:
        >>> sorted_blocks([9, 6, 9])
        (6, 9)
    """
    found = tuple(sorted({*blocks}))
    if not found or found[0] < 1:
        raise ConfigError(f"blocks must be numbers from 1, got {list(found)}")
    return found
