"""Types of options: what their values are called, and which of them have few values or several."""

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cribo.base.bounds import find_bounds

_NAMES: Mapping[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
    dict: ("a mapping of names to values", "mappings"),
    types.NoneType: ("null", "null"),
}
"""Names of types, singular and plural."""

_COUNTS = {2: "two", 3: "three", 4: "four"}


def without_bounds(hint: Any) -> Any:
    """Return a type without the bounds of its values.

    Example:
        >>> from cribo.base.bounds import at_least
        >>> without_bounds(Annotated[int, at_least(1)])
        <class 'int'>
    """
    if get_origin(hint) is Annotated:
        return hint.__origin__
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(without_bounds(part) for part in get_args(hint))]  # noqa: UP007
    return hint


def described(hint: Any) -> list[str]:
    """Describe the values that a type allows.

    Example:
        >>> from cribo.base.bounds import at_least
        >>> described(Literal["exact", "faiss"] | None), described(Annotated[int, at_least(1)])
        (['exact', 'faiss', 'null'], ['an integer >= 1'])
    """
    if get_origin(hint) in (Union, types.UnionType):
        return [words for part in get_args(hint) for words in described(part)]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if hint is bool:
        return ["true", "false"]
    bounds = find_bounds(hint)
    if elements := elements_of(hint):
        is_of_any_length = get_origin(hint) is list or ... in get_args(hint)
        count = "" if is_of_any_length else f"{_COUNTS.get(len(elements), len(elements))} "
        return [f"{count}{_NAMES[elements[0]][1]} separated by commas{f', each {bounds}' if bounds else ''}"]
    hint = without_bounds(hint)
    kind = get_origin(hint) or hint
    name = _NAMES[kind][0] if kind in _NAMES else getattr(kind, "__name__", str(kind))
    return [f"{name} {bounds}" if bounds else name]


def choices(hint: Any) -> list[str]:
    """List the values of a type that has few.

    Example:
        >>> choices(Literal["exact", "faiss"] | None), choices(bool), choices(int | None)
        (['exact', 'faiss'], ['true', 'false'], [])
    """
    if get_origin(hint) in (Union, types.UnionType):
        return [choice for part in get_args(hint) for choice in choices(part)]
    return described(hint) if hint is bool or get_origin(hint) is Literal else []


def elements_of(hint: Any) -> tuple[type, ...]:
    """Return the element types of an option with several values, or an empty tuple.

    Example:
        >>> elements_of(tuple[int, int] | None), elements_of(list[float]), elements_of(int)
        ((<class 'int'>, <class 'int'>), (<class 'float'>,), ())
        >>> elements_of(tuple[int | str, ...])
        (<class 'str'>,)
    """
    if get_origin(hint) in (Union, types.UnionType):
        found = [part for part in get_args(hint) if part is not types.NoneType]
        return elements_of(found[0]) if len(found) == 1 else ()
    elements = tuple(without_bounds(part) for part in get_args(hint) if part is not ...)
    elements = tuple(str if str in get_args(part) else part for part in elements)  # numbers or names
    return elements if get_origin(hint) in (tuple, list) and set(elements) <= {int, float, str} else ()
