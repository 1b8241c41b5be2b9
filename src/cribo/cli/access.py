"""Passwords and tokens of servers: from an option, a file or an environment variable."""

import os
from pathlib import Path

from cribo.base.errors import ConfigError


def read_secret(
    name: str, variable: str, file: Path | None, *, given: str | None = None, none: bool | None = None
) -> str | None:
    """Return the password or token of the options, or of an environment variable; None if there is none.

    Args:
        name: "password" or "token": the options are `--NAME`, `--NAME_file` and `--no_NAME`.
        variable: name of the environment variable.
        file: file whose first line it is.
        given: value of the option.
        none: whether there is none; None if there is no such option.

    Raises:
        ConfigError: several are given, one is empty, or the file cannot be read.
    """
    options = {f"--{name}": given, f"--{name}_file": file, f"--no_{name}": none or None}
    named = [option for option, value in options.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{named[0]} and {named[1]} exclude each other: omit one of them")
    if none:
        return None
    source = named[0] if named else variable
    if file is not None:
        try:
            given = next(iter(file.expanduser().read_text(encoding="utf-8").splitlines()), "")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --{name}_file {file}: {error}") from error
    elif given is None:
        given = os.environ.get(variable)
    if given is not None and not given.strip():
        raise ConfigError(
            f"{source} must not be empty: give a {name.rpartition('_')[2]}"
            + ("" if none is None else f", or use --no_{name}")
        )
    return given
