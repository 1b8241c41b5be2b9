"""Deterministic shares of a collection for independent jobs."""

import re
from typing import NamedTuple

from cribo.arguments import ConfigError


class Share(NamedTuple):
    """The `number`-th (from 1) of `count` shares.

    Example:
        >>> share = Share.parse("2/3")
        >>> list(share.of(range(8))), str(share)
        ([1, 4, 7], '2/3')
    """

    number: int = 1
    count: int = 1

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
        """Return every `count`-th item."""
        return items[self.number - 1 :: self.count]

    @property
    def is_whole(self) -> bool:
        """Whether the share contains everything."""
        return self.count == 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"
