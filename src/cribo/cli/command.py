"""A command as data: its help, its options, and the function that calls the library and prints."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from jsonargparse import Namespace
from rich.console import Console

from cribo.base.arguments import Parser

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


@dataclass(frozen=True)
class Call:
    """A command with the options that a user gave it.

    Attributes:
        options: values of all options.
        words: arguments of the command.
        name: name of the command, such as `cribo embed`.
        console: what to print to.
        parser: parser of the options.
    """

    options: Namespace
    words: Sequence[str]
    name: str
    console: Console
    parser: Parser

    @property
    def line(self) -> str:
        """The command line, to record in results."""
        return shlex.join([*self.name.split(), *self.words])

    def build(self, config_type: type[Config], **others: object) -> Config:
        """Create a dataclass from the options of its names, and fields that are not options.

        Raises:
            InputError: a value is out of range.
        """
        return self.parser.build(config_type, self.options, **others)


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: what it does, with examples.
        usage: the form of its command line, without `usage:`.
        less_memory: advice if a device runs out of memory.
        add_options: adds its options to a parser.
        run: calls the library with the options, and prints the results.
        short: short names of options, such as `--data` for `--data.name`.
        by_position: options that arguments without a name stand for, in this order.
        suggestions: what to pass, by name of a required option, for the error if it is missing.
        others: commands with options of their own, by the first argument, or the option, that selects them.
        parser: type of the parser.
        complete: completes the arguments, such as by a default preset, or refuses some, before they are parsed.
    """

    help: str
    usage: str
    less_memory: str
    add_options: Callable[[Parser], None]
    run: Callable[[Call], None]
    short: Mapping[str, str] = field(default_factory=dict)
    by_position: Sequence[str] = ()
    suggestions: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, "Command"] = field(default_factory=dict)
    parser: type[Parser] = Parser
    complete: Callable[[Sequence[str]], Sequence[str]] = list

    def call(self, words: Sequence[str], console: Console, *, name: str) -> None:
        """Parse the arguments, and run the command or the one of `others` that they select.

        Args:
            words: arguments of the command.
            console: what to print to.
            name: name of the command, such as `cribo embed`.

        Raises:
            ConfigError: an argument is invalid.
        """
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        for selector, other in self.others.items():
            if selector in given:
                return other.call(words, console, name=name)
            if [selector] == [*words[:1]]:
                return other.call(words[1:], console, name=f"{name} {selector}")
        parser = self.parser(
            prog=name,
            description=self.help,
            usage=self.usage,
            short=self.short,
            by_position=self.by_position,
            suggestions=self.suggestions,
        )
        self.add_options(parser)
        words = self.complete(words)
        return self.run(Call(parser.parse_args(words), words, name, console, parser))
