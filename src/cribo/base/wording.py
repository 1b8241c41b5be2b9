"""Wording of messages: commands, numbers with nouns, lists and groups of names, and shortened names."""

import difflib
import re
import shlex
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

_Group = TypeVar("_Group", bound=Hashable)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escape what would change a terminal or cannot be encoded: control characters, and bytes that are not UTF-8.

    Line feeds and tabs are kept.

    Example:
        >>> printable("red \x1b[31m.jpg"), printable("caf\udce9.jpg"), printable("straße")
        ('red \\x1b[31m.jpg', 'caf\\udce9.jpg', 'straße')
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def is_utf8(name: str) -> bool:
    r"""Whether a file name is valid UTF-8; libraries for JSON, Parquet and databases accept no others.

    Example:
        >>> is_utf8("straße.jpg"), is_utf8("caf\udce9.jpg")
        (True, False)
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def command_line(*words: object) -> str:
    """Join words of a command with spaces, quoted for a shell; for every command that is printed or stored.

    Example:
        >>> command_line("cribo", "search", "--db", "my street.db", "--image", "IMAGE", "--point", "x,y")
        "cribo search --db 'my street.db' --image IMAGE --point x,y"
    """
    return shlex.join(map(str, words))


def option_text(value: object) -> str:
    """Return the value of an option as it is given on the command line; "none" without one.

    Example:
        >>> option_text([0, 4095.0]), option_text(None), option_text(3)
        ('0,4095', 'none', '3')
    """
    if isinstance(value, list | tuple):
        return ",".join(f"{each:g}" if isinstance(each, int | float) else str(each) for each in value)
    return "none" if value is None else str(value)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, which takes an s in the plural unless `plural` is given.

    Example:
        >>> counted(1, "image"), counted(0, "image"), counted(2, "class", "classes")
        ('1 image', '0 images', '2 classes')
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def enumerated(names: Sequence[str], most: int = 8) -> str:
    """Join names with commas; names beyond the first `most` are counted.

    Example:
        >>> enumerated(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def joined(names: Sequence[str], last: str) -> str:
    """Join names with commas, and the last one with a word.

    Example:
        >>> joined(["a", "b", "c"], "or"), joined(["a"], "or")
        ('a, b or c', 'a')
    """
    return f" {last} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def grouped(pairs: Iterable[tuple[_Group, str]]) -> dict[_Group, list[str]]:
    """Return the names of each group from pairs (group, name), without repetitions, in order.

    Example:
        >>> grouped([("it trains", "linear"), ("no set", "image-nn"), ("it trains", "detection")])
        {'it trains': ['linear', 'detection'], 'no set': ['image-nn']}
    """
    groups: dict[_Group, dict[str, None]] = {}
    for group, name in pairs:
        groups.setdefault(group, {})[name] = None
    return {group: list(names) for group, names in groups.items()}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return advice for an unknown name: the most similar one, or all.

    Example:
        >>> nearest("pretrian", ["pretrain", "adapt"]), nearest("x", ["pretrain", "adapt"])
        ('did you mean pretrain?', 'use one of pretrain, adapt')
    """
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"


def shortened(name: str, letters: int) -> str:
    """Return a name with an ellipsis in its middle if it is longer than `letters`.

    Example:
        >>> shortened("night/camera-2/frame_000123.jpg", 20)
        'night/cam…000123.jpg'
        >>> shortened("street", 1)
        '…'
    """
    return name if len(name) <= letters else f"{name[: (letters - 1) // 2]}…{name[len(name) - letters // 2 :]}"
