"""Parsing of the command line: one parser class for all commands."""

import copy
import dataclasses
import difflib
import os
import re
import sys
from argparse import Action, RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from cribo.base.bounds import find_bounds
from cribo.base.config_files import read_config
from cribo.base.errors import ConfigError
from cribo.base.option_types import choices, described, elements_of, without_bounds
from cribo.base.wording import enumerated, joined

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


class _HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the line breaks of the description, and prints bounds as in `int >= 1`."""

    def _get_type_str(self, action: Action) -> str | None:
        name = super()._get_type_str(action)
        if name is None or (bounds := find_bounds(getattr(action, "_typehint", None))) is None:
            return name
        name = re.sub(r"Annotated\[(\w+), .+?\]", r"\1", name)
        return f"{name}, each {bounds}" if re.search(r"(tuple|list|dict)\[", name) else f"{name} {bounds}"


class Parser(ArgumentParser):
    """A parser without abbreviations that suggests the nearest valid name for an unknown one.

    Options with several values accept `1,8,64` and `[1,8,64]`, and for numbers also `1 8 64`; those with `nargs="+"`
    can be repeated, or followed by several arguments. Options of two integers whose name ends in `size` also accept
    one integer for a square. Boolean options that are not true by default mean `true` if no value follows.

    Options in `by_position` can also be given without their name, such as IMAGES for --images.

    `--config FILE` reads options from a YAML file, in the same syntax and with the same short names; all other options
    of the command line override it.

    Attributes:
        config_help: help of --config.
        config_example: a line of a configuration file, for error messages.

    Args:
        short: short names of options, such as `--data` for `--data.name`.
        by_position: options that arguments without a name stand for, in this order.
        suggestions: what to pass, by name of a required option, for the error if it is missing.
        kwargs: passed to jsonargparse's parser.
    """

    config_help = "a YAML file of options, overridden by the command line"
    config_example = "overwrite: true"

    def __init__(
        self,
        *,
        short: Mapping[str, str] | None = None,
        by_position: Sequence[str] = (),
        suggestions: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self._short = dict(short or {})
        self._by_position = tuple(by_position)
        self._suggestions = dict(suggestions or {})
        self.add_argument("--config", action="config", help=self.config_help)

    def parse_args(self, args: Sequence[str] | None = None, **kwargs: Any) -> Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the arguments of a command line, or complete them for a shell."""
        words = list(sys.argv[1:] if args is None else args)
        if "_ARGCOMPLETE" in os.environ:
            self._set_completers()
        else:
            self._refuse_empty(words)
        words = self.expand(self._configs_first(words))
        self._check_group_files(words)
        return super().parse_args(words, **kwargs)

    def _refuse_empty(self, words: Sequence[str]) -> None:
        """Raise an error for an empty argument, which as a path would be the current folder."""
        may_be_empty = {option for action in self._actions if action.default == "" for option in action.option_strings}
        for before, word in zip(["", *words], words, strict=False):
            option, given, value = word.partition("=")
            if self._long(option if word else before) in may_be_empty:
                continue
            if not word or (option.startswith("--") and given and not value):
                place = option if word else before if before.startswith("--") and "=" not in before else "an argument"
                raise ConfigError(
                    f"{place} must not be empty: omit it or give a value; is a variable of the shell unset?"
                )

    def _check_group_files(self, words: Sequence[str]) -> None:
        """Raise an error for a group of options, such as --backbone of pretrain, with a file that is not YAML."""
        groups = [each.option_strings for each in self._actions if each.metavar == "CONFIG"]
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            option, given, value = word.partition("=")
            value = value if given else following
            if any(option in names for names in groups) and os.path.isfile(value):  # noqa: PTH113 (a long value is no error)
                try:
                    self.read_config(Path(value))
                except ConfigError as error:
                    parts = [name for each in self._actions for name in each.option_strings]
                    of_group = [name for name in parts if name.startswith(f"{option}.")]
                    raise ConfigError(f"{option} is a group of options ({enumerated(of_group, 4)}): {error}") from error

    def explain(self, option: str, text: str) -> None:
        """Replace the help of an option."""
        next(action for action in self._actions if option in action.option_strings).help = text

    def build(self, config_type: type[Config], parsed: Namespace, **others: Any) -> Config:
        """Create a dataclass from the parsed options of its names.

        Args:
            config_type: the dataclass.
            parsed: the parsed options.
            **others: fields that are not taken from the options.

        Raises:
            InputError: a value is out of range.
        """
        made = self.instantiate(parsed)
        names = [field.name for field in dataclasses.fields(config_type) if field.name not in others]
        return config_type(**{name: made[name] for name in names}, **others)

    def _set_completers(self) -> None:
        """Complete values by their choices, and others by names of files."""
        from argcomplete.completers import ChoicesCompleter, FilesCompleter

        for action in self._actions:
            if hint := _type(action):
                values = dict.fromkeys(choices(hint), "")
                completer = ChoicesCompleter(values) if values else FilesCompleter()
                action.completer = completer  # pyright: ignore[reportAttributeAccessIssue]

    def parse_path(self, path: Any, **kwargs: Any) -> Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse a configuration file."""
        text = self.read_config(Path(path))
        try:
            return self.parse_string(text, **kwargs)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def read_config(self, path: Path) -> str:
        """Read the YAML text of a configuration file.

        Raises:
            ConfigError: the file is not a YAML mapping, or has a key twice.
        """
        return read_config(path, example=self.config_example)

    def find_config(self, name: str) -> Path:
        """Return the file that --config names.

        Raises:
            ConfigError: there is no such file.
        """
        if not Path(name).is_file():
            raise ConfigError(f"--config: no file named {name}")
        return Path(name)

    def _configs_first(self, words: Sequence[str]) -> list[str]:
        """Move --config to the front, so that other options override it."""
        rest = iter(words)
        configs: list[str] = []
        others: list[str] = []
        for word in rest:
            option, given, value = word.partition("=")
            if option != "--config":
                others.append(word)
            elif given:
                configs.append(f"--config={self.find_config(value)}")
            else:
                configs += ["--config", *(str(self.find_config(name)) for name in islice(rest, 1))]
        return [*configs, *others]

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse the content of a configuration file."""
        return super().parse_string(self._in_full(content), *args, **kwargs)

    def _in_full(self, content: str) -> str:
        """Expand short names, sizes given as one number and lists separated by commas, as on the command line."""
        try:
            given = yaml.safe_load(content)
        except yaml.YAMLError:  # reported by the parser, with the line
            return content
        if not isinstance(given, dict):
            return content
        full = copy.deepcopy(given)
        values = {key: value for key, value in full.items() if isinstance(value, dict)}
        values |= {
            key if key in values else self._short.get(f"--{key}", f"--{key}").removeprefix("--"): value
            for key, value in full.items()
        }
        for option, elements in self._lists().items():
            for group, name in _places(values, option.removeprefix("--")):
                if isinstance(group[name], int | float | str):
                    group[name] = _bracketed([str(group[name])], square=_is_size(option, elements))
        for option in self._repeatable():
            for group, name in _places(values, option.removeprefix("--")):
                group[name] = group[name] if isinstance(group[name], list) else [group[name]]
        return content if values == given else yaml.safe_dump(values, sort_keys=False)

    def _lists(self) -> dict[str, tuple[type, ...]]:
        """Return the element types of each option with several values."""
        return {
            option: elements
            for action in self._actions
            if (elements := elements_of(_type(action)))
            for option in action.option_strings
        }

    def _switches(self) -> set[str]:
        hints = {action: _type(action) for action in self._actions}
        return {
            option
            for action, hint in hints.items()
            if bool in (hint, *get_args(hint)) and action.default is not True
            for option in action.option_strings
        }

    def _repeatable(self) -> set[str]:
        return {option for action in self._actions if action.nargs == "+" for option in action.option_strings}

    def expand(self, words: Sequence[str]) -> list[str]:
        """Expand short names, switches, lists, repeated options and those by position to the syntax of jsonargparse."""
        lists, switches = self._lists(), self._switches()
        flags = {option for action in self._actions if action.nargs == 0 for option in action.option_strings}
        repeated: dict[str, list[str]] = {option: [] for option in self._repeatable()}
        typed = {word.partition("=")[0] for word in words}
        names = iter([name for name in self._by_position if name not in typed])
        result: list[str] = []
        rest = deque(words)
        while rest:
            word = rest.popleft()
            if not word.startswith("-"):
                result += [name, word] if (name := next(names, None)) else [word]
                continue
            if word == "--" and self._by_position:
                result += [each for value in rest for each in (*islice(names, 1), value)]
                break
            option, given, value = word.partition("=")
            option = self._long(option)
            square = _is_size(option, lists.get(option, ()))
            if option in repeated:
                repeated[option] += [value] if given else _until_option(rest)
                continue
            if given:
                result.append(f"{option}={_bracketed([value], square=square) if option in lists else value}")
                continue
            result.append(option)
            if option in lists:
                if values := list(_values(rest, lists[option])):
                    result.append(_bracketed(values, square=square))
            elif option in switches and (not rest or rest[0].startswith("--")):
                result.append("true")
            elif option not in flags and rest and not rest[0].startswith("--"):
                result.append(rest.popleft())
        for option, values in repeated.items():
            result += [option, *values] if values else []
        return result

    def _long(self, option: str) -> str:
        """Expand a short name, also as the prefix of a longer one, such as `--objective.init_args.crops`."""
        if option in self._short:
            return self._short[option]
        start = next((short for short in self._short if option.startswith(f"{short}.") and "." in short), None)
        return option if start is None else self._short[start] + option.removeprefix(start)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help with short names, the options that usage and examples name first."""
        self._arrange_groups()
        text = re.sub(r"<class\s+'(?:\w+\.)*(\w+)'>", r"\1", super().format_help(*args, **kwargs))
        for short, long in self._short.items():
            removed = " " * (len(long) - len(short))  # keeps the column of the explanations
            text = re.sub(rf"^(  {re.escape(long)} \S+)( +)(?=\S)", rf"\1\2{removed}", text, flags=re.MULTILINE)
            text = re.sub(rf"{re.escape(long)}(?![\w.])", short, text)
        for option in self._by_position:
            name = option.removeprefix("--").upper()
            text = re.sub(rf"^  {option} {name} ", f"  {name}, {option}", text, flags=re.MULTILINE)
        return text

    def _arrange_groups(self) -> None:
        """Move options named in usage and description, and required ones, to a first group; hide redundant ones."""
        texts = f"{self.usage or ''} {self.description or ''}"
        named = [*self._by_position, *map(self._long, re.findall(r"--\w[\w.]*\b", texts))]
        often = self.add_argument_group("often used")
        used: dict[Any, int] = {}
        for group in self._action_groups:
            for action in group._group_actions:
                places = [named.index(option) for option in action.option_strings if option in named]
                if places or action.required:
                    used[action] = min(places, default=0)
            # Options with CONFIG read a single group from a file, as --config does.
            group._group_actions[:] = [
                action for action in group._group_actions if action not in used and action.metavar != "CONFIG"
            ]
        often._group_actions += sorted(used, key=used.__getitem__)
        self._action_groups = [often, *(group for group in self._action_groups if group is not often)]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error about the arguments.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(self._in_words(str(message)) or self._with_advice(str(message))) from ex

    def _in_words(self, message: str) -> str | None:
        """Rewrite jsonargparse's error about a missing or invalid value; return None for other errors."""
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            names = [self._as_typed(name) for name in missing[1].split(", ")]
            usage = "" if self.usage is None else f"; usage: {str(self.usage).splitlines()[0]}"
            advice = "".join(f"; {name}: {self._suggestions[name]}" for name in names if name in self._suggestions)
            return f"{joined(names, 'and')} {'is' if len(names) == 1 else 'are'} required{usage}{advice}"
        kinds = (
            r"Parser key \"([\w.]+)\":\s+(?:Expected a .*?Got value|Does not validate .*Given value): (.*)",
            r"Parser key \"([\w.]+)\":\s+Unable to load config '(.*?)'\n",
            r"argument --([\w.]+): invalid choice: '(.*)' \(choose from ",
        )
        found = next((found for kind in kinds if (found := re.match(kind, message, re.DOTALL))), None)
        action = next((action for action in self._actions if found and action.dest == found[1]), None)
        if not found or action is None or "is not accepted" in message:
            return None
        choices = [str(choice) for choice in action.choices or described(getattr(action, "_typehint", dict))]
        allowed = [choice for choice in choices if choice != "null"] or choices  # null is the same as no option
        return f"{self._shortened(found[1])} must be {joined(allowed, 'or')}, got {_quoted(found[2])}"

    def _as_typed(self, name: str) -> str:
        """Return an option with its dashes and short name, or the placeholder of a positional argument."""
        action = next((each for each in self._actions if name.removeprefix("--") == each.dest), None)
        option = f"--{name.removeprefix('--')}"
        if option in self._by_position:
            return option.removeprefix("--").upper()
        if action is not None and not action.option_strings:
            return str(action.metavar or name).upper()
        return next((short for short, long in self._short.items() if long == option), option)

    def _shortened(self, text: str) -> str:
        """Replace long option names by short ones."""
        for short, long in self._short.items():
            if len(short) < len(long):
                text = re.sub(rf"(?<![\w.-])(?:--)?{re.escape(long.removeprefix('--'))}(?![\w.])", short, text)
        return text

    def _with_advice(self, message: str) -> str:
        message = re.sub(r"^Parser key \"([\w.]+)\":\s+", r"\1: ", self._shortened(message))
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
            unknown = re.findall(r"--([\w.-]+)", message) + re.findall(r"[Oo]ption '([\w.]+)'", message)
        known += [option.removeprefix("--") for option in self._short]
        for name in unknown:
            meant = _SYNONYMS.get(name)
            plain = name.replace("-", "_")
            near = [meant] if meant in known else difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
            if name not in known and near:
                return f"{message.rstrip('.')}: did you mean {near[0]}?"
        if re.match(r"unrecognized arguments|[Oo]ption '[\w.]+' is not accepted", message):
            return f"{message.rstrip('.')}: {self.prog} --help lists the options"
        return message


_SYNONYMS = {"preset": "config", "threads": "workers"}
"""Other names that users may expect for an option."""

_NUMBERS = re.compile(r"[\[(]?[-+\d.,eE]+[\])]?")


def _type(action: Action) -> Any:
    """Return the type hint of an option without bounds; None if it has no type hint."""
    return without_bounds(getattr(action, "_typehint", None))


def _is_size(option: str, elements: tuple[type, ...]) -> bool:
    return option.endswith("size") and elements == (int, int)


def _places(values: dict[str, Any], option: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the mappings that hold an option such as `a.b`, as `a.b: 1` or as `a: {b: 1}`, and its key there."""
    if option in values:
        yield values, option
    group, dot, rest = option.partition(".")
    if dot and isinstance(values.get(group), dict):
        yield from _places(values[group], rest)


def _until_option(rest: deque[str]) -> list[str]:
    """Consume the arguments up to the next option."""
    found = []
    while rest and not rest[0].startswith("--"):
        found.append(rest.popleft())
    return found


def _values(rest: deque[str], elements: tuple[type, ...]) -> Iterator[str]:
    """Consume the values of an option: the next argument, and for numbers all numbers that follow."""
    if rest and not rest[0].startswith("--"):
        yield rest.popleft()
        while rest and str not in elements and _NUMBERS.fullmatch(rest[0]):
            yield rest.popleft()


def _bracketed(words: Sequence[str], *, square: bool = False) -> str:
    """Format `1,8`, `(1,8)` or `1 8` as `[1,8]`; leave null unchanged, and repeat a single number for a square."""
    if list(words) == ["null"]:
        return "null"
    values = [value for value in re.split(r"[\s,]+", ",".join(words).strip("()[] ")) if value]
    return f"[{','.join(values * 2 if square and len(values) == 1 else values)}]"


def _quoted(value: str) -> str:
    """Quote a value if it is a string."""
    return value if re.fullmatch(r"[-+\d.eE]+|[\[{(].*|None|True|False", value, re.S) else repr(value)
