"""Docstrings of the reference: sections named `Example` are shown as code (an extension of griffe)."""

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Renames `Example:` to `Examples:`, the only one of Google's two names that griffe reads as a section."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
