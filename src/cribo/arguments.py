"""A command line's words into typed values: one parser for all commands."""

import difflib
import re
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace


class ConfigError(ValueError):
    """A configuration that cannot be used: an unknown name, a value of the wrong type or out of range."""


class _HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the description."""


class Parser(ArgumentParser):
    """A parser that takes no abbreviations and offers the nearest valid name for an unknown one.

    Args:
        short: options that may be said in fewer words, `--data` for `--data.name`, say.
        switches: options of two values that stand for `true` when they are given without one.
        lists: options whose values may be given as `1,8,64`.
        kwargs: of jsonargparse's parser.
    """

    def __init__(
        self,
        *,
        short: Mapping[str, str] | None = None,
        switches: Collection[str] = (),
        lists: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self._short = dict(short or {})
        self._switches = switches
        self._lists = lists

    def parse_args(self, args: Sequence[str] | None = None, **kwargs: Any) -> Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse words."""
        return super().parse_args(self.written_out(sys.argv[1:] if args is None else args), **kwargs)

    def written_out(self, words: Sequence[str]) -> list[str]:
        """Words with short names, switches and lists as jsonargparse wants them."""
        result: list[str] = []
        for place, word in enumerate(words):
            option, given, value = word.partition("=")
            option = self._short.get(option, option)
            if result and result[-1] in self._lists:
                result.append(_bracketed(word))
            elif not given:
                result.append(option if word.startswith("--") else word)
                follower = words[place + 1] if place + 1 < len(words) else "--"
                if option in self._switches and follower.startswith("--"):
                    result.append("true")
            else:
                result.append(f"{option}={_bracketed(value) if option in self._lists else value}")
        return result

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help, with the short names."""
        # A group can be read from a file of its own; that is a second way beside --config, and left unsaid.
        text = re.sub(r"\n  --\S+ CONFIG\s+Path to a configuration file\.", "", super().format_help(*args, **kwargs))
        for short, long in self._short.items():
            text = re.sub(rf"{re.escape(long)}(?![\w.])", short, text)
        return text

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Refuse the arguments.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(self._with_advice(str(message))) from ex

    def _with_advice(self, message: str) -> str:
        for short, long in self._short.items():
            message = re.sub(rf"(?<![\w.]){re.escape(long.removeprefix('--'))}(?![\w.])", short, message)
        known = [
            option.removeprefix("--")
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--")
        ]
        in_group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
        if in_group:
            unknown = [f"{in_group[1]}.{in_group[2]}"]
        else:
            unknown = re.findall(r"--([\w.]+)", message) + re.findall(r"[Oo]ption '([\w.]+)'", message)
        known += [option.removeprefix("--") for option in self._short]
        for name in unknown:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            if name not in known and near:
                return f"{message.rstrip('.')}: did you mean {near[0]}?"
        return message


def _bracketed(value: str) -> str:
    """1,8 or (1,8) as [1,8]; null is left alone."""
    return value if value == "null" else f"[{value.strip('()[]')}]"
