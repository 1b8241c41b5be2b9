"""Deterministic shares of a collection for independent jobs."""

import re
from typing import NamedTuple

from cribo.arguments import ConfigError


class Share(NamedTuple):
    """The `number`-th (from 1) of `shares` equal shares.

    Example:
        >>> share = Share.parse("2/3")
        >>> [list(Share(number, 3).of(range(8))) for number in (1, 2, 3)], str(share)
        ([[0, 1], [2, 3, 4], [5, 6, 7]], '2/3')
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

    def of(self, items: range) -> range:
        """Return adjacent items, since the images of a shard or a Parquet file are adjacent."""
        first, last = ((number * len(items)) // self.shares for number in (self.number - 1, self.number))
        return items[first:last]

    def __str__(self) -> str:
        return f"{self.number}/{self.shares}"
