"""Configurations by name, by file, and with overrides: one parser for the command line and for Python."""

import difflib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from cribo.arguments import ConfigError, Parser
from cribo.method import ViewRecipe
from cribo.pretraining.config import PretrainConfig

log = logging.getLogger("cribo")

DEFAULT_PRESET = "quickstart"
_MOST_VALUES = 100_000  # in a file, which has some hundred
# What `cribo pretrain --print_config` prints beside the configuration; such a file can be loaded, too.
_COMMAND_OPTIONS = ("out", "name", "minutes", "resume", "overwrite", "continue")


# Options of earlier versions. They are ignored in configuration files, so that runs that have them can be resumed.
_REMOVED = {"runtime": ("bank", "tf32", "strategy", "on_nonfinite")}


SHORT = {
    "--objective": "--objective.name",
    "--objective.class_path": "--objective.name",
    "--objective.init_args": "--objective.args",
}
"""Options that may be said otherwise."""


class ConfigParser(Parser):
    """A parser whose --config takes the name of a preset too, and gives way to every other word."""

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse the content of a configuration file."""
        return super().parse_string(_in_todays_terms(content), *args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, **kwargs: Any) -> Namespace:
        """Parse words."""
        words = iter(sys.argv[1:] if args is None else args)
        configs: list[str] = []
        others: list[str] = []
        for word in words:
            option, given, value = word.partition("=")
            if option != "--config":
                others.append(word)
            elif given:
                configs.append(f"--config={_readable(find_config(value))}")
            else:
                name = next(words, None)
                configs += ["--config"] if name is None else ["--config", str(_readable(find_config(name)))]
        return super().parse_args([*configs, *others], **kwargs)


def _in_todays_terms(content: str) -> str:
    """A configuration without options that were removed, and with one way to say which objective it is."""
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError:  # the parser's own message names the place
        return content
    if not isinstance(values, dict):
        return content
    groups = {name: group for name, group in values.items() if isinstance(group, dict)}
    found = [(group, name) for group, names in _REMOVED.items() for name in names if name in groups.get(group, ())]
    for group, name in found:
        log.info("ignoring %s.%s in the configuration: the option was removed", group, name)
        del values[group][name]
    objective = values.get("objective")
    if objective is not None:
        values["objective"] = _objective(objective)
    return yaml.safe_dump(values, sort_keys=False) if found or objective is not None else content


def _objective(value: Any) -> Any:
    """An objective by its name alone, or as jsonargparse writes classes, in the terms of `ObjectiveConfig`."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        return {{"class_path": "name", "init_args": "args"}.get(key, key): own for key, own in value.items()}
    return value


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    folder = resources.files("cribo") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def find_config(name: str | Path) -> Path:
    """The file of a preset's name or of a path.

    Raises:
        ConfigError: neither a preset nor a file; the nearest preset is offered.
    """
    path = Path(name)
    names = preset_names()
    if str(name) in names:
        return Path(str(resources.files("cribo") / "presets" / f"{name}.yaml"))
    try:
        if path.is_file():
            return path
        if path.is_dir() and (path / "config.yaml").is_file():
            return path / "config.yaml"
    except OSError as error:  # a name that is too long, for one
        raise ConfigError(f"no preset and no file is called {str(name)[:80]}: {error.strerror}") from error
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"no preset and no file is called {name}: {advice}the presets are {', '.join(names)}")


def _readable(path: Path) -> Path:
    """The file itself, if it is a mapping in YAML that stays small when its aliases are written out.

    Raises:
        ConfigError: it is not.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > _MOST_VALUES:
            raise ConfigError(f"{path} must have at most {_MOST_VALUES:,} characters, got {len(text):,}")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ConfigError(f"{path} is an empty configuration: give it a value, optim: {{epochs: 100}}, say")
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "one value"
            raise ConfigError(f"{path} must be a mapping of names to values in YAML, got {kind}")
        if (count := _written_out(root, {})) > _MOST_VALUES:
            raise ConfigError(f"{path} must hold at most {_MOST_VALUES:,} values, aliases written out, got {count:,}")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no configuration: it is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply, or a value in it holds itself") from error
    return path


def _written_out(node: yaml.Node, counted: dict[int, int]) -> int:
    """How many values there are in a node when each alias is a copy of what it stands for."""
    if id(node) not in counted:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        counted[id(node)] = 1 + sum(_written_out(part, counted) for part in inner)
    return counted[id(node)]


def with_preset(words: Sequence[str]) -> list[str]:
    """The words of a command line, with the default preset before them if they name no configuration."""
    named = {word.partition("=")[0] for word in words} & {"--config", "--resume"}
    return list(words) if named else ["--config", DEFAULT_PRESET, *words]


def config_name(config: object) -> str:
    """What a run of a configuration is called: after the preset, the file, or the run that it repeats."""
    path = Path(str(config))
    return path.resolve().parent.name if path.name == "config.yaml" else path.stem


def add_config_arguments(parser: ArgumentParser) -> None:
    """Give a parser --config and every value of a pretraining configuration."""
    parser.add_argument(
        "--config",
        action="config",
        help=f"a preset ({', '.join(preset_names())}) or a YAML file; the other options override it "
        f"(default: {DEFAULT_PRESET})",
    )
    parser.add_class_arguments(PretrainConfig)


def config_from(arguments: Namespace) -> PretrainConfig:
    """The checked configuration that parsed arguments hold.

    Raises:
        ConfigError: a value out of range.
    """
    names = PretrainConfig.__dataclass_fields__
    only = Namespace(**{name: arguments[name] for name in names})
    try:
        made = _config_parser().instantiate(only)
        return PretrainConfig(**{name: made[name] for name in names})
    except TypeError as error:  # another value in the place of a group is let through by the parser
        wrong = next((name for name in names if name != "seed" and not isinstance(arguments[name], Namespace)), None)
        got = "" if wrong is None else f", got {arguments[wrong]!r} for {wrong}"
        raise ConfigError(f"each group of values must be a mapping of names to values{got}") from error
    except ValueError as error:
        # A ViewRecipe is the method's own and does not know what it is called here.
        in_views = str(error).partition(" ")[0] in ViewRecipe.__dataclass_fields__
        raise ConfigError(f"views.{error}" if in_views else str(error)) from error


def load_config(config: str | Path = DEFAULT_PRESET, overrides: Mapping[str, Any] | None = None) -> PretrainConfig:
    """Read a preset or file and override some values.

    Args:
        config: a preset's name, a YAML file, or a run folder.
        overrides: dotted names and their values, such as {"optim.epochs": 10}.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or out of range.

    Example:
        >>> load_config("imagenet_vits16", {"objects.num_objects": 12}).objects.num_objects
        12
    """
    parser = _config_parser()
    for name in _COMMAND_OPTIONS:
        parser.add_argument(f"--{name}")
    words: list[str] = ["--config", str(config)]
    for name, value in (overrides or {}).items():
        if name in _COMMAND_OPTIONS:
            raise ConfigError(f"{name} is no value of the configuration")
        if name == "objective":
            value = _objective(_plain(value))
        # A text goes as it is: quoted, it would be taken with its quotes where None is allowed too.
        words.append(f"--{name}={value if isinstance(value, str) else json.dumps(_plain(value))}")
    return config_from(parser.parse_args(words))


def dump_config(config: PretrainConfig) -> str:
    """The configuration as YAML that `load_config` reads back to the same values."""
    return yaml.safe_dump(_plain(config), sort_keys=False)


def differing(one: PretrainConfig, other: PretrainConfig) -> list[tuple[str, Any, Any]]:
    """Dotted name and both values of each value that differs.

    Example:
        >>> differing(load_config("adapt"), load_config("adapt", {"optim.epochs": 7}))
        [('optim.epochs', 20, 7)]
    """
    values, others = _flat(_plain(one)), _flat(_plain(other))
    missing = "(not given)"
    return [
        (name, values.get(name, missing), others.get(name, missing))
        for name in dict.fromkeys((*values, *others))
        if values.get(name, missing) != others.get(name, missing)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _config_parser() -> ConfigParser:
    parser = ConfigParser(short={short: long for short, long in SHORT.items() if "." in short})
    add_config_arguments(parser)
    return parser


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value
