"""Names in files are data: the code and the addresses that they name are used only if the user allows it.

Weights, runs, databases and other files may come from anyone. A name that the user writes on the command line, in a
configuration or in Python is the user's word; a name that is read from such a file is not, whether or not its module
has been imported. Every reader of such a file calls `check_import` or `check_address` before it imports or opens what
it names.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Collection
from typing import Any

from cribo.base.errors import ConfigError, Untrusted


def check_import(path: str, file: object, option: str, *, trust: bool, given: Collection[str] = ()) -> None:
    """Check that the import path in a file may be imported.

    Args:
        path: import path of a class or function.
        file: the file that names it, for the error.
        option: option by which the user can name the same path, for the error.
        trust: whether the user trusts the file.
        given: import paths that the user has named.

    Raises:
        Untrusted: the user does not trust the file and has not named the path.

    Example:
        >>> check_import("my_package.Net", "backbone.json", "--architecture", trust=False, given=["my_package.Net"])
    """
    if not trust and path not in given:
        raise Untrusted(
            f"{file} names {path}, which is not part of cribo or timm, and importing it could run any code: if you "
            f"trust its source, allow it with --trust (trust=True in Python), or name it with {option} {path}"
        )


def check_address(source: object, file: object, option: str, *, trust: bool, given: Collection[str] = ()) -> None:
    """Check that a path or address in a file may be opened; paths on this machine may always be.

    Args:
        source: path, URL, or name on the Hugging Face hub.
        file: the file that names it, for the error.
        option: option by which the user can give the same address, for the error.
        trust: whether the user trusts the file.
        given: addresses that the user has given.

    Raises:
        Untrusted: the source is an address, and the user neither trusts the file nor has given the address.

    Example:
        >>> check_address("pictures/train", "mine.db", "--images", trust=False)
    """
    if not trust and is_address(source) and source not in given:
        raise Untrusted(
            f"{file} names the address {source}, which is not opened without your word: give it with {option} "
            f"{source}, or if you trust the file's source, add --trust (trust=True in Python)"
        )


def is_address(source: object) -> bool:
    """Whether a string is a URL or a name on the Hugging Face hub.

    Example:
        >>> [is_address(source) for source in ("s3://bucket/a", "hf:/owner/name", "C:/images", "vit_small_patch16_224")]
        [True, True, False, False]
    """
    text = os.fspath(source) if isinstance(source, os.PathLike) else source
    return isinstance(text, str) and ("://" in text or text.startswith(("hf:", "hf-hub:")))


def import_by_path(path: str, option: str, *, known: Collection[str] = ()) -> Any:
    """Import the object at a path such as `package.module.name`.

    Args:
        path: the import path.
        option: name of the option, for error messages.
        known: names that are valid instead of a path.

    Raises:
        ConfigError: the module does not exist or does not define the name.

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
        sys.path.insert(0, "")  # like `python -m`: find modules in the current directory
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise  # the user's module itself imports a missing module
        raise ConfigError(
            f"{option} {path}: module {error.name!r} not found: install it, or run the command in its folder"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        advice = f": did you mean {module_name}.{near[0]}?" if near else ""
        raise ConfigError(f"{option} {path}: module {module_name} has no {name!r}{advice}")
    return getattr(module, name)
