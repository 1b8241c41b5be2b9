"""Bounds of settings."""

import math
from collections.abc import Collection, Iterable, Mapping

from cribo.base.errors import ConfigError


def require_least(settings: object, least: Mapping[str, int], prefix: str = "") -> None:
    """Check lower bounds of settings; None is valid.

    Args:
        settings: object with the settings as attributes.
        least: minimum of each setting, by name.
        prefix: prefix of the names in error messages.

    Raises:
        ConfigError: a setting is below its minimum.
    """
    for name, bound in least.items():
        if (value := getattr(settings, name)) is not None and value < bound:
            raise ConfigError(f"{prefix}{name} must be >= {bound}, got {value}")


def require_positive(settings: object, *names: str, prefix: str = "") -> None:
    """Check that settings are positive and finite; None is valid.

    Args:
        settings: object with the settings as attributes.
        names: names of the settings.
        prefix: prefix of the names in error messages.

    Raises:
        ConfigError: a setting is zero, negative, infinite or not a number.
    """
    for name in names:
        if (value := getattr(settings, name)) is not None and not 0 < value < math.inf:
            raise ConfigError(f"{prefix}{name} must be > 0, got {value}")


def require_distinct(name: str, values: Collection[str], choices: Collection[str]) -> None:
    """Check that a setting lists some of its choices, each at most once.

    Raises:
        ConfigError: the list is empty, or a value is repeated or not a choice.
    """
    if not values or len({*values}) < len(values) or not {*values} <= {*choices}:
        raise ConfigError(f"{name} must be distinct values of {','.join(choices)}, got {','.join(values)}")


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
