"""Removal of passwords, tokens and signatures in URLs from everything that is written to a file or printed."""

import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import TracebackType
from typing import Any

MASK = "***"
"""Replaces each secret."""

_SECRETS = re.compile(
    r"(?:(?<=://)|(?<=\w\w:/))[^/?#\s\"]+(?=@)"  # a path has one slash
    r"|(?<=[?&;])([\w.-]*(?:token|key|secret|passw(?:or)?d|pwd|credentials?|sig|signature|auth|authorization"
    r"|expires|accessid)=|X-Amz-[\w-]+=)[^&;#\s'\"]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Mask user names, passwords, tokens and signatures in URLs.

    URLs that differ in their secrets only become equal. Secrets outside URLs are not recognised.

    Example:
        >>> without_secrets("https://me:secret@host/api?write_token=secret&run=1")
        'https://***@host/api?write_token=***&run=1'
    """
    return _SECRETS.sub(lambda found: f"{found[1] or ''}{MASK}", text)


def masked(value: Any) -> Any:
    """Return a value with `without_secrets` applied to all strings in mappings, lists, tuples and dataclasses.

    Example:
        >>> masked({"roots": ("s3://me:secret@host", "here"), "seed": 3})
        {'roots': ('s3://***@host', 'here'), 'seed': 3}
    """
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {masked(name): masked(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(masked, value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map(masked, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: masked(getattr(value, each.name)) for each in fields(value) if each.init})
    return value


def is_masked(url: str) -> bool:
    """Whether a URL lacks its secrets, because it was read from a record.

    Example:
        >>> is_masked("https://***@host/images"), is_masked("https://host/images")
        (True, False)
    """
    return without_secrets(url) == url and (f"://{MASK}@" in url or f"={MASK}" in url)


def mask_messages() -> None:
    """Mask secrets in all log records, warnings and tracebacks of this process, those of libraries too."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, _MaskedRecords):
        logging.setLogRecordFactory(_MaskedRecords(make))
        warnings.formatwarning = _MaskedWarnings(warnings.formatwarning)
    if sys.excepthook is sys.__excepthook__:  # otherwise a debugger or notebook prints errors
        sys.excepthook = _print_masked


class _MaskedRecords:
    """A factory of log records without secrets in messages and tracebacks."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        try:
            text = record.getMessage()
        except Exception:  # an invalid format: `logging` reports it when the record is printed
            return record
        if (shown := without_secrets(text)) != text:
            record.msg, record.args = shown, ()
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = without_secrets(logging.Formatter().formatException(record.exc_info))
        return record


class _MaskedWarnings:
    """A format of warnings without secrets."""

    def __init__(self, form: Callable[..., str]) -> None:
        self._form = form

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return without_secrets(self._form(*args, **kwargs))


def _print_masked(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    sys.stderr.write(without_secrets("".join(traceback.format_exception(kind, error, where))))
