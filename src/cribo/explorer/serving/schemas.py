"""JSON schemas of requests and responses."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
"""A JSON schema."""

BINARY: Schema = {}
"""Schema of bytes, as OpenAPI 3.1 has it."""


def string(description: str = "") -> Schema:
    """Return the schema of a text."""
    return _described({"type": "string"}, description)


def number(description: str = "") -> Schema:
    """Return the schema of a number."""
    return _described({"type": "number"}, description)


def integer(description: str = "") -> Schema:
    """Return the schema of an integer."""
    return _described({"type": "integer"}, description)


def array(items: Schema, description: str = "") -> Schema:
    """Return the schema of a list."""
    return _described({"type": "array", "items": items}, description)


def mapping(values: Schema, description: str = "") -> Schema:
    """Return the schema of values by name."""
    return _described({"type": "object", "additionalProperties": values}, description)


def record(fields: Mapping[str, Schema], description: str = "") -> Schema:
    """Return the schema of an object that has all these fields."""
    return _described({"type": "object", "properties": fields, "required": [*fields]}, description)


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description} if description else schema
