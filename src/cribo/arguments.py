"""A command line's words into typed values: one parser for all commands."""

import difflib
import importlib
import re
import sys
import types
from argparse import RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace


class ConfigError(ValueError):
    """A configuration that cannot be used: an unknown name, a value of the wrong type or out of range."""


class _HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the description."""


class Parser(ArgumentParser):
    """A parser that takes no abbreviations and offers the nearest valid name for an unknown one.

    An option of several values takes them as `1,8,64` or `[1,8,64]`, and numbers as `1 8 64`, too. One of two whole
    numbers whose name ends in `size` takes a single one for a square.

    Args:
        short: options that may be said in fewer words, `--data` for `--data.name`, say.
        switches: options of two values that stand for `true` when they are given without one.
        kwargs: of jsonargparse's parser.
    """

    def __init__(
        self,
        *,
        short: Mapping[str, str] | None = None,
        switches: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self._short = dict(short or {})
        self._switches = switches

    def parse_args(self, args: Sequence[str] | None = None, **kwargs: Any) -> Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse words."""
        return super().parse_args(self.written_out(sys.argv[1:] if args is None else args), **kwargs)

    def written_out(self, words: Sequence[str]) -> list[str]:
        """Words with short names, switches and lists as jsonargparse wants them."""
        lists = {
            option: elements
            for action in self._actions
            if (elements := _elements(getattr(action, "_typehint", None)))
            for option in action.option_strings
        }
        result: list[str] = []
        rest = deque(words)
        while rest:
            word = rest.popleft()
            if not word.startswith("--"):
                result.append(word)
                continue
            option, given, value = word.partition("=")
            option = self._long(option)
            square = option.endswith("size") and lists.get(option) == (int, int)
            if given:
                result.append(f"{option}={_bracketed([value], square=square) if option in lists else value}")
                continue
            result.append(option)
            if option in lists:
                if values := list(_values(rest, lists[option])):
                    result.append(_bracketed(values, square=square))
            elif option in self._switches and (not rest or rest[0].startswith("--")):
                result.append("true")
        return result

    def _long(self, option: str) -> str:
        """What a short name stands for, also where it begins a longer one, such as `--objective.init_args.crops`."""
        if option in self._short:
            return self._short[option]
        start = next((short for short in self._short if option.startswith(f"{short}.") and "." in short), None)
        return option if start is None else self._short[start] + option.removeprefix(start)

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
        raise ConfigError(self._in_words(str(message)) or self._with_advice(str(message))) from ex

    def _in_words(self, message: str) -> str | None:
        """What jsonargparse says of a wrong value, in plain words; None of anything else."""
        kinds = (
            r"Parser key \"([\w.]+)\":\s+(?:Expected a .*?Got value|Does not validate .*Given value): (.*)",
            r"Parser key \"([\w.]+)\":\s+Unable to load config '(.*?)'\n",
            r"argument --([\w.]+): invalid choice: '(.*)' \(choose from ",
        )
        found = next((found for kind in kinds if (found := re.match(kind, message, re.DOTALL))), None)
        action = next((action for action in self._actions if found and action.dest == found[1]), None)
        if not found or action is None or "is not accepted" in message:
            return None
        choices = action.choices or _described(getattr(action, "_typehint", dict))
        *others, last = map(str, choices)
        allowed = f"{', '.join(others)} or {last}" if others else last
        return f"{self._shortened(found[1])} must be {allowed}, got {_quoted(found[2])}"

    def _shortened(self, text: str) -> str:
        """A text with the short names of options in place of the long ones."""
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
            unknown = re.findall(r"--([\w.]+)", message) + re.findall(r"[Oo]ption '([\w.]+)'", message)
        known += [option.removeprefix("--") for option in self._short]
        for name in unknown:
            meant = _SYNONYMS.get(name)
            near = [meant] if meant in known else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            if name not in known and near:
                return f"{message.rstrip('.')}: did you mean {near[0]}?"
        return message


_NAMES: Mapping[Any, tuple[str, str]] = {
    int: ("an int", "ints"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    Path: ("a path", "paths"),
    dict: ("a mapping of names to values", "mappings"),
    types.NoneType: ("null", "null"),
}
"""What types are called where one is wanted, and where several are."""

_SYNONYMS = {"preset": "config"}
"""Options by names that they do not have, and that are spelt like others."""

_COUNTS = {2: "two", 3: "three", 4: "four"}
_NUMBERS = re.compile(r"[\[(]?[-+\d.,eE]+[\])]?")


def _described(hint: Any) -> list[str]:
    """What a value of a type may be, in words.

    Example:
        >>> _described(Literal["exact", "faiss"] | None), _described(tuple[int, int])
        (['exact', 'faiss', 'null'], ['two ints'])
    """
    if get_origin(hint) in (Union, types.UnionType):
        return [words for part in get_args(hint) for words in _described(part)]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if hint is bool:
        return ["true", "false"]
    if elements := _elements(hint):
        several = _NAMES[elements[0]][1]
        if get_origin(hint) is list or ... in get_args(hint):
            return [f"{several} separated by commas"]
        return [f"{_COUNTS.get(len(elements), len(elements))} {several}"]
    kind = get_origin(hint) or hint
    return [_NAMES[kind][0] if kind in _NAMES else getattr(kind, "__name__", str(kind))]


def _elements(hint: Any) -> tuple[type, ...]:
    """The types of the values of an option that takes several; nothing for any other.

    Example:
        >>> _elements(tuple[int, int] | None), _elements(list[float]), _elements(int)
        ((<class 'int'>, <class 'int'>), (<class 'float'>,), ())
    """
    if get_origin(hint) in (Union, types.UnionType):
        found = [part for part in get_args(hint) if part is not types.NoneType]
        return _elements(found[0]) if len(found) == 1 else ()
    elements = tuple(part for part in get_args(hint) if part is not ...)
    return elements if get_origin(hint) in (tuple, list) and set(elements) <= {int, float, str} else ()


def _values(rest: deque[str], elements: tuple[type, ...]) -> Iterator[str]:
    """Take the words that are the values of an option: the next one, and of numbers, those that follow."""
    if rest and not rest[0].startswith("--"):
        yield rest.popleft()
        while rest and str not in elements and _NUMBERS.fullmatch(rest[0]):
            yield rest.popleft()


def _bracketed(words: Sequence[str], *, square: bool = False) -> str:
    """1,8 or (1,8), or 1 and 8, as [1,8]; null is left alone. Of a square, one side stands for both."""
    if list(words) == ["null"]:
        return "null"
    values = [value for value in re.split(r"[\s,]+", ",".join(words).strip("()[] ")) if value]
    return f"[{','.join(values * 2 if square and len(values) == 1 else values)}]"


def _quoted(value: str) -> str:
    """A value that was given, in quotes if it is a text."""
    return value if re.fullmatch(r"[-+\d.eE]+|[\[{(].*|None|True|False", value, re.S) else repr(value)


def import_by_path(path: str, option: str, *, known: Collection[str] = ()) -> Any:
    """What an import path such as `package.module.name` names.

    Args:
        path: the import path.
        option: that it was given for, for the message.
        known: names that could have been given in its place.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.

    Example:
        >>> import_by_path("collections.OrderedDict", "objective.class_path")
        <class 'collections.OrderedDict'>
    """
    choices = f"{option} must be {', '.join(known)}, or an import path" if known else f"{option} must be an import path"
    module_name, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        near = difflib.get_close_matches(path, known, n=1)
        advice = f": did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{choices} such as my_package.name, got {path!r}{advice}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: a file beside the user is found
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise  # something that the user's own module needs
        raise ConfigError(
            f"{option} {path}: there is no module {error.name!r}: install it, or run the command in the folder that "
            "holds it"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        advice = f": did you mean {module_name}.{near[0]}?" if near else ""
        raise ConfigError(f"{option} {path}: there is no {name!r} in {module_name}{advice}")
    return getattr(module, name)
