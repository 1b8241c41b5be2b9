"""Configuration files: YAML mappings without aliases and repeated keys."""

from collections import deque
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from cribo.base.errors import ConfigError, DataError
from cribo.base.files import parse_yaml, read_text


def read_config(path: Path, *, example: str) -> str:
    """Read the YAML text of a configuration file.

    Args:
        path: the file.
        example: a line of such a file, for error messages.

    Raises:
        ConfigError: the file is not a YAML mapping, has aliases, or has a key twice.
    """
    try:
        text = read_text(path)
        values = parse_yaml(text)
        has_aliases = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        repeated = _repeated_key(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except DataError as error:  # a pipe, or too large
        raise ConfigError(str(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a configuration: it is not UTF-8 text") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2020-99-99
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply") from error
    if values is None:
        raise ConfigError(f"{path} is empty: add a value, such as {example}")
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "one value"
        raise ConfigError(f"{path} must be a mapping of names to values in YAML, got {kind}")
    if has_aliases:  # a short file with nested aliases may expand to exceed the memory
        raise ConfigError(f"{path} must not contain YAML aliases (*name): write the values instead")
    if repeated is not None:
        raise ConfigError(f"{path} has {repeated}: remove one")
    return text


def _repeated_key(text: str) -> str | None:
    """Return the first key that YAML text has twice, also as `a.b: 1` and `a: {b: 1}`, with both lines; None without.

    Example:
        >>> _repeated_key("optim:\\n  lr: 1\\noptim.lr: 2")
        'the key optim.lr in lines 2 and 3'
    """
    lines: dict[str, int] = {}
    nodes = deque([("", yaml.compose(text, yaml.SafeLoader))])
    seen: set[yaml.Node] = set()  # aliases repeat nodes
    while nodes:
        place, node = nodes.popleft()
        if node in seen:
            continue
        seen.update([node] if node else [])
        if isinstance(node, yaml.SequenceNode):
            nodes.extend((f"{place}[{number}]", value) for number, value in enumerate(node.value))
        if not isinstance(node, yaml.MappingNode):
            continue
        for key, value in node.value:
            name = f"{place}.{key.value}".lstrip(".")
            line = key.start_mark.line + 1
            if name in lines:
                first, second = sorted((lines[name], line))
                return f"the key {name} in lines {first} and {second}" if first < second else f"the key {name} twice"
            lines[name] = line
            nodes.append((name, value))
    return None


_load_yaml = get_loader("yaml")


def _load_without_repetitions(text: str) -> Any:
    """Load YAML as jsonargparse does, for values on the command line and the files that they name."""
    value = _load_yaml(text)
    if isinstance(value, dict | list) and (repeated := _repeated_key(text)):
        raise ConfigError(f"got {repeated}: remove one")
    return value


set_loader("yaml", _load_without_repetitions, (yaml.YAMLError,))
