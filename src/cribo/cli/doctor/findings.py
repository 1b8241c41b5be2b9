"""Facts and problems of the examination."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30


@dataclass
class Section:
    """Facts about one subject, and the problems found.

    Attributes:
        title: the subject.
        facts: values by name.
        problems: one sentence each: what is wrong, and what to do.
        hint: a line to print below the facts, or an empty string.
    """

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    hint: str = ""

    def note(self, name: str, read: Callable[[], str]) -> None:
        """Add a fact; if reading it fails, the fact is the error."""
        try:
            self.facts[name] = read()
        except Exception as error:  # of any library or driver
            self.facts[name] = f"unknown ({described(error)})"

    def check(self, find: Callable[[], str | None]) -> None:
        """Add the problem that `find` returns, if any; no-op if it fails."""
        try:
            problem = find()
        except Exception:  # `note` has shown what is unknown
            return
        if problem is not None:
            self.problems.append(problem)


def described(error: BaseException) -> str:
    """Return type and first line of an error.

    Example:
        >>> described(OSError("libcuda.so.1: not found"))
        'OSError: libcuda.so.1: not found'
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def gib(number: float) -> str:
    """Format bytes in GiB with two digits.

    Example:
        >>> gib(64 * 2**20), gib(23.4 * 2**30), gib(252 * 2**30)
        ('0.062 GiB', '23 GiB', '252 GiB')
    """
    amount = number / GIB
    return f"{amount:.2g} GiB" if amount < 99.5 else f"{amount:.0f} GiB"


def short(path: str | Path) -> str:
    """Return a path with `~` for the home folder, whose name may be private.

    Example:
        >>> short(Path.home() / ".cache" / "torch")
        '~/.cache/torch'
    """
    try:
        return (Path("~") / Path(path).relative_to(Path.home())).as_posix()
    except (ValueError, RuntimeError):  # elsewhere, or no home folder
        return str(path)
