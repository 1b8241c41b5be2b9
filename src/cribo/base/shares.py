"""Deterministic shares of a collection for independent jobs."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from cribo.base.errors import ConfigError
from cribo.base.wording import command_line, enumerated

_LISTED = 20


class Share(NamedTuple):
    """The `number`-th (from 1) of `shares` equal shares.

    Example:
        >>> share = Share.parse("2/3")
        >>> [list(Share(number, 3).of(range(8))) for number in (1, 2, 3)], str(share)
        ([[0, 1], [2, 3, 4], [5, 6, 7]], '2/3')
        >>> share.suffix, Share().suffix
        ('-2of3', '')
    """

    number: int = 1
    shares: int = 1

    @classmethod
    def parse(cls, text: str | None) -> "Share":
        """Read a share written as i/n; None is the whole.

        Raises:
            ConfigError: the text is malformed, or i is not in 1 to n.
        """
        if text is None:
            return cls()
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None:
            raise ConfigError(f"part must be i/n with i from 1 to n, such as 3/8, got {text}")
        number, count = int(found[1]), int(found[2])
        if not 1 <= number <= count:
            raise ConfigError(f"part must be i/n with i from 1 to n, got {text}: use 1/{count} to {count}/{count}")
        return cls(number, count)

    @property
    def suffix(self) -> str:
        """Suffix of names of the share's results; empty for the whole."""
        return "" if self.shares == 1 else f"-{self.number}of{self.shares}"

    def of(self, items: range, unit: str = "images") -> range:
        """Return adjacent items, since the images of a shard or a Parquet file are adjacent.

        Args:
            items: all items.
            unit: their name, for the message.

        Raises:
            ConfigError: there are fewer items than shares, so that shares would be empty.
        """
        if len(items) < self.shares:
            raise ConfigError(
                f"part {self}: there are more shares than {unit}, of which there are {len(items)}: use 1/{len(items)} "
                f"to {len(items)}/{len(items)}"
            )
        first, last = ((number * len(items)) // self.shares for number in (self.number - 1, self.number))
        return items[first:last]

    def __str__(self) -> str:
        return f"{self.number}/{self.shares}"


def order_shares(places: Sequence[str], parts: Sequence[str]) -> list[int]:
    """Return the indices of results in the order of their shares, which must be all shares of one division.

    Args:
        places: places of the results, for messages.
        parts: share of each, as i/n.

    Raises:
        ConfigError: a result is of all images; shares are of different divisions, repeated, or missing.

    Example:
        >>> order_shares(["a", "b", "c"], ["2/3", "3/3", "1/3"])
        [2, 0, 1]
    """
    shares = [Share.parse(part) for part in parts]
    first: dict[Share, int] = {}
    for index, share in enumerate(shares):
        place = places[index]
        if share.shares == 1:
            raise ConfigError(f"{place} contains the results of all images: give only results of --part i/n")
        if share.shares != shares[0].shares:
            raise ConfigError(
                f"{place} is part {share}, but {places[0]} is part {shares[0]}: give parts of the same division"
            )
        if share in first:
            other = places[first[share]]
            where = f"{place} is given twice" if place == other else f"{other} and {place} are both part {share}"
            raise ConfigError(f"{where}: give each part once")
        first[share] = index
    every = (Share(number, shares[0].shares) for number in range(1, shares[0].shares + 1))
    if missing := [*itertools.islice((str(share) for share in every if share not in first), _LISTED)]:
        verb = "is" if len(missing) == 1 else "are"
        again = command_line("--part", missing[0])
        raise ConfigError(
            f"part {enumerated(missing)} {verb} missing: run the command with {again}, or give its results"
        )
    return [first[share] for share in sorted(first, key=lambda share: share.number)]


def require_mergeable(first: str, other: str, changes: Sequence[str]) -> None:
    """Raise ConfigError if two parts differ in more than their share.

    Args:
        first: place of the results of one part.
        other: place of the results of another part.
        changes: the differences, as text.
    """
    if changes:
        raise ConfigError(
            f"{other} differs from {first} and cannot be merged with it: {'; '.join(changes)}. Run the commands of all "
            "parts with the same options and images"
        )
