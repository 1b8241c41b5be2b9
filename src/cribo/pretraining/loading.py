"""Load configurations from presets, files and overrides, with one parser for the command line and Python."""

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from cribo.base.arguments import Parser
from cribo.base.errors import ConfigError
from cribo.base.redaction import masked
from cribo.base.trust import is_address
from cribo.data.config import PIXEL_OPTIONS
from cribo.method import ViewRecipe
from cribo.pretraining.config import PretrainConfig

log = logging.getLogger("cribo")

DEFAULT_PRESET = "quickstart"
# `cribo pretrain --print_config` prints these with the configuration; such files can also be loaded.
_COMMAND_OPTIONS = ("out", "name", "minutes", "resume", "trust", "overwrite", "continue")


# Options of earlier versions, which are ignored in configuration files so that old runs can be resumed.
_REMOVED = {"runtime": ("bank", "tf32", "strategy", "on_nonfinite")}


SHORT = {
    "--logger": "--runtime.logger",
    **{f"--{name}": f"--data.{name}" for name in ("max_pixels", *PIXEL_OPTIONS)},
    "--objective": "--objective.name",
    "--objective.class_path": "--objective.name",
    "--objective.init_args": "--objective.args",
}
"""Aliases of options."""


def preset_names() -> list[str]:
    """Return the names of the presets."""
    folder = resources.files("cribo.pretraining") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def find_preset(name: str) -> Path | None:
    """Return the file of a preset; None if there is no preset of this name."""
    return (
        Path(str(resources.files("cribo.pretraining") / "presets" / f"{name}.yaml")) if name in preset_names() else None
    )


class ConfigParser(Parser):
    """Parser whose --config also accepts the name of a preset."""

    config_help = (
        f"a preset ({', '.join(preset_names())}) or a YAML file; other options override it (default: {DEFAULT_PRESET})"
    )
    config_example = "optim: {epochs: 100}"

    def find_config(self, name: str) -> Path:
        """Return the configuration file of a preset, a file or a run folder."""
        return find_config(name)

    def read_config(self, path: Path) -> str:
        """Read a configuration file, drop removed options, and rename those of `ObjectiveConfig`."""
        text = super().read_config(path)
        values = yaml.safe_load(text)
        groups = {name: group for name, group in values.items() if isinstance(group, dict)}
        removed = [
            (group, name) for group, names in _REMOVED.items() for name in names if name in groups.get(group, ())
        ]
        for group, name in removed:
            log.info("ignoring %s.%s in the configuration: the option was removed", group, name)
            del values[group][name]
        objective = values.get("objective")
        if objective is not None:
            values["objective"] = _objective(objective)
        return yaml.safe_dump(values, sort_keys=False) if removed or objective is not None else text


def find_config(name: str | Path) -> Path:
    """Return the configuration file of a preset, a file or a run folder.

    Raises:
        ConfigError: no preset or file has this name; the message suggests the most similar preset.
    """
    path = Path(name)
    if (preset := find_preset(str(name))) is not None:
        return preset
    try:
        if path.is_file():
            return path
        if path.is_dir() and (path / "config.yaml").is_file():
            return path / "config.yaml"
    except OSError as error:  # for example, the name is too long
        raise ConfigError(f"no preset or file named {str(name)[:80]}: {error.strerror}") from error
    names = preset_names()
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"no preset or file named {name}: {advice}the presets are {', '.join(names)}")


def _objective(value: Any) -> Any:
    """Convert an objective's name, or jsonargparse's form of a class, to the fields of `ObjectiveConfig`."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        return {{"class_path": "name", "init_args": "args"}.get(key, key): own for key, own in value.items()}
    return value


def with_preset(words: Sequence[str]) -> list[str]:
    """Add the default preset to command-line arguments without --config."""
    named = {word.partition("=")[0] for word in words} & {"--config", "--resume"}
    return list(words) if named else ["--config", DEFAULT_PRESET, *words]


def config_name(config: object) -> str:
    """Return the default name of a run: that of its preset, file, or original run."""
    path = Path(str(config))
    return path.resolve().parent.name if path.name == "config.yaml" else path.stem


def config_from(arguments: Namespace) -> PretrainConfig:
    """Return the configuration from parsed arguments.

    Raises:
        ConfigError: a value is out of range.
    """
    names = PretrainConfig.__dataclass_fields__
    only = Namespace(**{name: arguments[name] for name in names})
    try:
        made = _config_parser().instantiate(only)
        config = PretrainConfig(**{name: made[name] for name in names})
    except TypeError as error:  # the parser accepts a single value for a group
        wrong = next((name for name in names if name != "seed" and not isinstance(arguments[name], Namespace)), None)
        got = "" if wrong is None else f", got {arguments[wrong]!r} for {wrong}"
        raise ConfigError(f"each group of values must be a mapping of names to values{got}") from error
    except ValueError as error:
        # ViewRecipe's own errors name its fields without the section.
        in_views = str(error).partition(" ")[0] in ViewRecipe.__dataclass_fields__
        raise ConfigError(f"views.{error}" if in_views else str(error)) from error
    return _without_missing_subfolder(config, [str(name) for name in arguments.get("config") or ()])


def _without_missing_subfolder(config: PretrainConfig, sources: Sequence[str]) -> PretrainConfig:
    """Drop the sub-folder of a preset for published data, such as train2017, for another root that does not have it."""
    data = config.data
    presets = [Path(source) for source in sources if Path(source) == find_preset(Path(source).stem)]
    own = (yaml.safe_load(path.read_text(encoding="utf-8")).get("data", {}) for path in presets)
    if not any(values.get("images") == data.images != "" and values.get("root") != data.root for values in own):
        return config
    root = Path(data.root).expanduser()
    if is_address(data.root) or not root.exists() or (root / data.images).exists():
        return config
    log.warning("%s has no sub-folder %s, which the preset reads: all its images are read", root, data.images)
    return replace(config, data=replace(data, images=""))


def load_config(config: str | Path = DEFAULT_PRESET, overrides: Mapping[str, Any] | None = None) -> PretrainConfig:
    """Load a preset or file and override some values.

    Args:
        config: a preset's name, a YAML file, or a run folder.
        overrides: dotted names and their values, such as {"optim.epochs": 10}.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or out of range.

    Example:
        >>> load_config("imagenet_vits16", {"objects.num_objects": 12}).objects.num_objects
        12
    """
    words: list[str] = ["--config", str(config)]
    for name, value in (overrides or {}).items():
        if name in _COMMAND_OPTIONS:
            raise ConfigError(f"{name} is not an option of the configuration")
        if name == "objective":
            value = _objective(value)
        # Strings are not quoted: the quotes would become part of the value in options that also allow None.
        words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    return config_from(_config_parser().parse_args(words))


def dump_config(config: PretrainConfig) -> str:
    """Return the configuration as YAML, from which `load_config` restores the same values, except secrets in URLs."""
    return yaml.safe_dump(masked(asdict(config)), sort_keys=False)


@cache
def _config_parser() -> ConfigParser:
    """Return the parser of a configuration, which takes longer to build than to use."""
    parser = ConfigParser(short={short: long for short, long in SHORT.items() if short != "--objective"})
    parser.add_class_arguments(PretrainConfig)
    for name in _COMMAND_OPTIONS:
        parser.add_argument(f"--{name}")
    return parser
