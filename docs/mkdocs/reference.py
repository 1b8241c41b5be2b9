"""Extensions of griffe for the reference: lazily imported names, and sections named `Example`."""

import re
from typing import Any

from griffe import Extension, Module, Object


class ExampleSections(Extension):
    """Renames `Example:` to `Examples:`, the only one of Google's two names that griffe reads as a section."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


class LazyNames(Extension):
    """Exports what a package imports under `TYPE_CHECKING`: `__all__`, which griffe cannot compute (cribo/lazy.py)."""

    def on_module(self, *, mod: Module, **kwargs: Any) -> None:
        """Set the exports of a module that calls `lazy_names`."""
        if "lazy_names" in mod.members and mod.is_init_module:
            mod.exports = [name for name, member in mod.members.items() if member.is_alias and not member.runtime]
