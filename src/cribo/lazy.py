"""Lazy imports of a package's public names, so that importing a configuration does not import torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(package: str, places: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its names on first use (PEP 562).

    Args:
        package: name of the package.
        places: maps each module to the names that it defines; modules of the package start with a dot.

    Example:
        >>> __getattr__ = lazy_names("cribo.data", {".randomness": ("keyed_generator",)})
        >>> __getattr__("keyed_generator").__module__
        'cribo.data.randomness'
    """
    module_of = {name: module for module, names in places.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], package), name)

    return get
