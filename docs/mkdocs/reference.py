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
    """Exports what a package imports under `TYPE_CHECKING`: `__all__`, which griffe cannot compute (base/lazy.py)."""

    def on_module(self, *, mod: Module, **kwargs: Any) -> None:
        """Set the exports of a package that calls `lazy_names`; `cribo` itself defines its own `TYPE_CHECKING`."""
        is_root = "TYPE_CHECKING" in mod.members and not mod.members["TYPE_CHECKING"].is_alias
        if mod.is_init_module and (is_root or "lazy_names" in mod.members):
            aliases = {name: member for name, member in mod.members.items() if member.is_alias}
            mod.exports = [name for name, member in aliases.items() if is_root or not member.runtime]
