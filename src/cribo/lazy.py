"""Names of a package that are imported when they are first used: a configuration must not wait for torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(package: str, places: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package (PEP 562).

    Args:
        package: its name.
        places: names by the module that defines them; modules of the package begin with a dot.

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
