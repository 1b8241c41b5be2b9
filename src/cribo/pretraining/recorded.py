"""Configurations recorded in run folders, which may come from anyone."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from cribo.base.errors import ConfigError, Untrusted
from cribo.base.trust import check_address, check_import, is_address
from cribo.base.wording import command_line
from cribo.data import ImageSource
from cribo.data.config import Reading
from cribo.data.sources.images import has_images, list_directly, read_list
from cribo.data.sources.parquet import PARQUET, open_parquet
from cribo.models.building import BUILT_IN_NETWORKS, is_import_path
from cribo.objectives.base import BUILT_IN, CONTROLS
from cribo.pretraining.config import DataConfig, ObjectiveConfig, PretrainConfig
from cribo.pretraining.files import CONFIG
from cribo.pretraining.loading import ConfigParser, load_config
from cribo.pretraining.session import open_source


def read_run_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> PretrainConfig:
    """Read the configuration of a run without importing or opening anything that it names.

    Args:
        folder: the run folder.
        overrides: dotted names and values that replace those of the run.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or out of range, or a class or file in place of a value.
    """
    path = folder / CONFIG
    _require_values(yaml.safe_load(ConfigParser().read_config(path)), path)
    return load_config(path, overrides)


def check_run_config(
    config: PretrainConfig, folder: Path, *, trust: bool, given: Collection[str] = (), names: Collection[str] = ()
) -> None:
    """Check that the code and the addresses that the configuration of a run names may be used.

    Args:
        config: the configuration.
        folder: the run folder.
        trust: whether the user trusts the run.
        given: import paths and addresses that the user has named.
        names: only check these options and the options below them. [all]

    Raises:
        Untrusted: the user does not trust the run and has not given one of them.
    """

    def concerns(option: str) -> bool:
        return not names or any(f"{option}.".startswith(f"{name}.") for name in names)

    for option, path in filter(lambda each: concerns(each[0]), _imports(config)):
        check_import(path, folder / CONFIG, f"--{option}", trust=trust, given=given)
    for option, source in filter(lambda each: concerns(each[0]), _addresses(config)):
        check_address(source, folder / CONFIG, f"--{option}", trust=trust, given=given)
    root = config.data.root
    if not trust and concerns("data.root") and root not in given and _lists_addresses(root, config.data.images):
        raise Untrusted(
            f"{folder / CONFIG} names {root}, which lists addresses that are not opened without your word: give it "
            f"with {command_line('--data.root', root)}, or if you trust its source, add --trust (trust=True in Python)"
        )
    cache = config.data.cache_dir
    if not trust and is_address(config.data.root) and cache not in (DataConfig.cache_dir, *given):
        raise Untrusted(
            f"{folder / CONFIG} names the folder {cache} for copies of shards: give a folder with --data.cache_dir, or "
            "if you trust the run's source, add --trust (trust=True in Python)"
        )


def names_in(config: PretrainConfig) -> set[str]:
    """Return the import paths of custom code, the addresses, and the place of the images, in a configuration."""
    return {config.data.root, *(name for _, name in (*_imports(config), *_addresses(config)))}


def open_run_images(
    config: PretrainConfig, folder: Path, images: str | Path | None, *, reading: Reading, command: str, trust: bool
) -> ImageSource:
    """Open images for pictures of a run. A custom objective, which may read clips, is not imported without `trust`.

    Args:
        config: the configuration of the run.
        folder: the run folder.
        images: the images, as given by the user. [synthetic scenes, if the run was trained on them]
        reading: how these images are read; without a range, by that of the run.
        command: command that opens the run, for the error.
        trust: whether the user trusts the run.

    Raises:
        Untrusted: `images` is missing: the folder that the run names is not opened.
        DataError: images are missing or invalid.
    """
    if not trust and _is_custom(config.objective.name):
        config = replace(config, objective=ObjectiveConfig())
    own = config.data
    if images is None and own.root != "scenes":
        place = own.root if not own.images else f"{own.root.rstrip('/')}/{own.images}"
        place = f"./{place}" if place.startswith("-") else place
        raise Untrusted(
            f"the images that {folder} names are opened only if you give them: "
            f"{command} {command_line(folder, '--images', place)}"
        )
    if images is not None:
        root = str(images)
        is_in_run = not is_address(root) and Path(root).expanduser().resolve().is_relative_to(folder.resolve())
        own = DataConfig(
            root=root,
            max_pixels=reading.max_pixels,
            **{**own.reading.given, **reading.given},
            inside=is_in_run,
            video=own.video,
        )
        config = replace(config, score=replace(config.score, held_out=0))  # all of these images
    return open_source(replace(config, data=own))


def _is_custom(objective: str) -> bool:
    return objective not in BUILT_IN and objective not in (*BUILT_IN.values(), *CONTROLS)


def _imports(config: PretrainConfig) -> Iterator[tuple[str, str]]:
    """Yield options and import paths of code outside cribo and timm."""
    networks = {"backbone.name": config.backbone.name}
    teacher = config.objective.args.get("teacher_network")
    if isinstance(teacher, str):
        networks["objective.args.teacher_network"] = teacher
    for option, name in networks.items():
        if is_import_path(name) and name not in BUILT_IN_NETWORKS:
            yield option, name
    if _is_custom(config.objective.name):
        yield "objective.name", config.objective.name
    for option in ("clustering", "criterion"):
        path = getattr(config.objects, option)
        if "." in path:
            yield f"objects.{option}", path


def _addresses(config: PretrainConfig) -> Iterator[tuple[str, str]]:
    """Yield options and URLs or names on the hub."""
    values = {
        "data.root": config.data.root,
        "score.root": config.score.root,
        "backbone.pretrained": config.backbone.pretrained,
        **{f"objective.args.{name}": value for name, value in config.objective.args.items()},
    }
    for option, value in values.items():
        if isinstance(value, str) and is_address(value):
            yield option, value


def _lists_addresses(root: str, images: str) -> bool:
    """Whether images are a list or Parquet files on this machine with URLs of images."""
    place = Path(root).expanduser() / images
    if is_address(root) or not place.exists():
        return False
    if place.suffix.lower() == ".txt" and place.is_file():
        return any(is_address(name) for _, name in read_list(place))
    if place.suffix.lower() == PARQUET or (place.is_dir() and list_directly(place, PARQUET) and not has_images(place)):
        source = open_parquet(place)
        return any(is_address(name) for name in map(source.name, range(len(source))))
    return False


def _require_values(values: Any, path: Path) -> None:
    """Require that each section is a mapping and no value a class, which jsonargparse would read or import."""
    groups: list[tuple[str, Any, Any]] = [("", values, PretrainConfig)]
    while groups:
        name, value, kind = groups.pop()
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: {name.strip('.') or 'it'} must be a mapping of names to values, got {value!r}")
        hints = get_type_hints(kind) if kind is not None else {}
        for key, own in value.items():
            option = f"{name}{key}"
            if key in ("config", "class_path", "init_args") and option not in _ALIASES:
                raise ConfigError(
                    f"{path} has {option}, which is not accepted in the configuration of a run: give the file by "
                    "--config if you trust its source"
                )
            section = _section(hints.get(key))
            if section is not None and not (key == "objective" and isinstance(own, str)):
                groups.append((f"{option}.", own, section))
            elif isinstance(own, Mapping):
                groups.append((f"{option}.", own, None))
            elif isinstance(own, list):
                groups += [(f"{option}.", each, None) for each in own if isinstance(each, Mapping)]


_ALIASES = ("objective.class_path", "objective.init_args")


def _section(hint: Any) -> type | None:
    """Return the dataclass of a section of the configuration; None for values."""
    return next((each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)), None)
