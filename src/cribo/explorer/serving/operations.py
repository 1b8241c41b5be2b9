"""Operations of a server as rows of a table, and their description in OpenAPI 3.1."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cribo.base.packages import PACKAGE
from cribo.explorer.serving.schemas import Schema, record, string
from cribo.explorer.serving.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]
"""Handles a request; raises `Denied` for an invalid one."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the query.

    Attributes:
        name: its name.
        description: what it means.
        values: the valid values.
    """

    name: str
    description: str
    values: Sequence[str]


@dataclass(frozen=True)
class Operation:
    """A method of a path.

    Attributes:
        method: such as POST.
        path: such as /segment.
        summary: what it does, in a few words.
        handle: handles a request.
        content: schema of the response by media type.
        description: what else a caller needs to know.
        body: schema of the request by media type; empty for none.
        parameters: parameters of the query.
        errors: statuses of errors, besides those of all operations.
        is_public: whether it needs no token.
    """

    method: str
    path: str
    summary: str
    handle: Handler
    content: Mapping[str, Schema]
    description: str = ""
    body: Mapping[str, Schema] = field(default_factory=dict)
    parameters: Sequence[Parameter] = ()
    errors: Sequence[HTTPStatus] = ()
    is_public: bool = False

    @property
    def all_errors(self) -> list[HTTPStatus]:
        """Statuses of its errors."""
        unauthorized = [] if self.is_public else [HTTPStatus.UNAUTHORIZED]
        return sorted({*self.errors, *unauthorized, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS})


ERROR = record({"error": string("what is wrong, the limit, and what to do")})
"""Schema of the body of every error."""


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the description of operations in OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "cribo serve", "version": version(PACKAGE), "summary": "A segmentation memory over HTTP"},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    described: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{operation.path.replace('/', '_').replace('.', '_')}",
        "summary": operation.summary,
        "description": operation.description,
        "parameters": [
            {
                "name": each.name,
                "in": "query",
                "description": each.description,
                "schema": {"type": "string", "enum": [*each.values]},
            }
            for each in operation.parameters
        ],
        "responses": {
            "200": {"description": "the result", "content": _contents(operation.content)},
            **{str(int(status)): {"description": status.phrase, "content": error} for status in operation.all_errors},
        },
        # Without a token, everything is open (--no_token, or a loopback address).
        "security": [] if operation.is_public else [{"token": []}, {}],
    }
    if operation.body:
        described["requestBody"] = {"required": True, "content": _contents(operation.body)}
    return described


def _contents(schemas: Mapping[str, Schema]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind, schema in schemas.items()}
