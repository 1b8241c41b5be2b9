"""Lazy imports of a package's public names, so that importing a configuration does not import torch."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of a package whose names are imported on first use (PEP 562).

    The names are those that the package's source imports under `if TYPE_CHECKING:`, where type checkers and the
    documentation find them, too. `import name as name` marks them as public (PEP 484), and the call is in the `else`
    branch: type checkers would accept every name in a module with `__getattr__`.

    Example:
        >>> import cribo.pretraining.figures
        >>> cribo.pretraining.figures.__all__
        ['FIGURES', 'PCAColours', 'WrittenFigures', 'pca_colours', 'write_figures']
    """
    module_of: dict[str, str] = {}
    for block in ast.parse(inspect.getsource(sys.modules[package])).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    module_of |= {alias.name: node.module for alias in node.names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return get, sorted(module_of)
