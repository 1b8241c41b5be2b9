"""Shared by all commands: dispatch, errors and exit status, options of a backbone."""

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rich.console import Console

from cribo.errors import Stopped
from cribo.processes import is_first_process

# Short options for the fields of a `BackboneSource`.
BACKBONE_SHORT = {
    "--backbone": "--backbone.source",
    "--pretrained": "--backbone.pretrained",
    "--trust": "--backbone.trust",
    "--layers": "--backbone.layers",
}
BACKBONE_SWITCHES = ("--backbone.trust",)


def dispatch(
    words: list[str], name: str, kind: str, usage: str, commands: Mapping[str, Callable[[list[str]], int]]
) -> int:
    """Run the command named by the first word with the remaining words."""
    if not words or words[0] in ("-h", "--help"):
        print(usage, end="")
        return 0 if words else 2
    word, *rest = words
    if word not in commands:
        print(f"{name}: unknown {kind} {word!r}{_nearest(word, commands)}", file=sys.stderr)
        return 2
    return commands[word](rest)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {near[0]}?" if near else f": use one of {', '.join(known)}"


def guarded(name: str, command: Callable[[list[str]], None], words: list[str], *, less_memory: str) -> int:
    """Run a command, and print errors that the user can fix as one line.

    Args:
        name: of the command, for messages.
        command: the function to call.
        words: its arguments.
        less_memory: advice if a device runs out of memory.

    Returns:
        The exit status.
    """
    try:
        command(words)
    except Stopped as error:
        # Other ranks exit 0; otherwise the launcher would report a crash.
        return 0 if error.everywhere and not is_first_process() else _failed(name, error, error.status)
    except (ValueError, FileNotFoundError, ConnectionError, ImportError) as error:  # invalid input
        return _failed(name, error, 2)
    except OSError as error:  # a full disk, for example
        return _failed(name, error, 1)
    except Exception as error:
        if not _out_of_memory(error):
            raise
        reason = str(error).partition(". ")[0]
        return _failed(name, f"{reason}: {less_memory}", 1)
    return 0


def _failed(name: str, error: object, status: int) -> int:
    print(f"{name}: {error}", file=sys.stderr)
    return status


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # not imported: not its error
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def print_places(console: Console, places: Mapping[str, Path | str]) -> None:
    """Print the path of each result on its own line."""
    width = max(13, *(len(label) + 1 for label in places))
    for label, place in places.items():
        console.print(f"  {label:<{width}}{place}")
