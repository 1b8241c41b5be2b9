"""Completion of commands and options in a shell, by argcomplete."""

import argparse
import os
from collections.abc import Sequence

import argcomplete
from argcomplete.lexers import split_line


def words_to_complete(commands: Sequence[str]) -> list[str]:
    """Complete the name of a command and exit, or return the words of the command to complete.

    Each command has its own parser. `_ARGCOMPLETE` is the index of the word that it treats as the program name.
    """
    from cribo.cli.evaluate import EVALUATIONS

    _, _, _, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    depth = 2 if words[1:2] == ["evaluate"] else 1
    os.environ["_ARGCOMPLETE"] = str(min(len(words), depth + 1))
    if len(words) <= depth:
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("command", choices=EVALUATIONS if depth == 2 else commands)
        argcomplete.autocomplete(parser)
    return words[1 : depth + 1]
