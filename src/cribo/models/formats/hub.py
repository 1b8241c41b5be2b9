"""Configurations in the formats of the Hugging Face hub: transformers, timm and open_clip."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cribo.base.errors import InputError
from cribo.models.backbone import IMAGENET_MEAN, IMAGENET_STD
from cribo.models.formats.reading import read_json
from cribo.models.formats.table import Expected
from cribo.models.formats.training_configs import read_yaml

HUB_CONFIG, HUB_IMAGES = "config.json", "preprocessor_config.json"

_OPEN_CLIP_CONFIG = "open_clip_config.json"

# Defaults that transformers omits from the nested configuration of an image tower.
_TOWER_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip": {"hidden_act": "quick_gelu", "num_attention_heads": 12, "layer_norm_eps": 1e-5},
    "siglip": {"hidden_act": "gelu_pytorch_tanh", "num_attention_heads": 12, "layer_norm_eps": 1e-6},
}


def hub_config(path: Path) -> dict[str, Any]:
    """Read the configuration beside a file, with transformers' names; for two-tower models, the image tower's."""
    if path.name.startswith("open_clip") and (config := read_beside(path, _OPEN_CLIP_CONFIG)):
        return _from_open_clip_config(config)
    config = read_beside(path, HUB_CONFIG)
    defaults = _TOWER_DEFAULTS.get(str(config.get("model_type")))
    if defaults is not None and isinstance(tower := config.get("vision_config"), Mapping):
        return {**config, **defaults, **tower}
    return config or _from_open_clip_config(read_beside(path, _OPEN_CLIP_CONFIG))


def _from_open_clip_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a configuration of open_clip; for timm's towers, only the normalisation."""
    about, images = config.get("model_cfg", {}), config.get("preprocess_cfg", {})
    tower = about.get("vision_cfg", {})
    found: dict[str, Any] = {"pretrained_cfg": {key: images[key] for key in ("mean", "std") if key in images}}
    if not about or "timm_model_name" in tower:
        return found
    approximate = tower.get("act_kwargs", {}).get("approximate") == "tanh"
    found["hidden_act"] = "quick_gelu" if about.get("quick_gelu") else "gelu_pytorch_tanh" if approximate else "gelu"
    found["layer_norm_eps"] = tower.get("norm_kwargs", {}).get("eps", 1e-5)
    if isinstance(width := tower.get("width", 768), int):
        found["num_attention_heads"] = width // tower.get("head_width", 64)
    return found


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


def activation_of(config: Mapping[str, Any], path: Path) -> str | None:
    """Return timm's name of the activation in a configuration of transformers; None for gated MLPs.

    Raises:
        ValueError: timm does not have the activation.
    """
    if "hidden_act" not in config or config.get("use_swiglu_ffn") or config.get("use_gated_mlp"):
        return None
    if config["hidden_act"] not in _ACTIVATIONS:
        raise InputError(
            f"{path.with_name(HUB_CONFIG)} has hidden_act {config['hidden_act']!r}: it must be one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[config["hidden_act"]]


def image_normalisation(
    path: Path, config: Mapping[str, Any], expected: Expected
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return mean and standard deviation, of images between 0 and 1, by the files beside weights; None if not given.

    A factor by which images are multiplied before, other than 1/255, is included in both.

    Args:
        path: of the weights.
        config: the configuration beside them, whose values a preprocessor_config.json replaces.
        expected: what the format of the weights expects.

    Raises:
        ValueError: the values are not numbers, or contradict each other.
    """
    stated: Mapping[str, Any] = config.get("pretrained_cfg") or {}
    images = {**stated, **read_beside(path, HUB_IMAGES)}
    source = path.with_name(HUB_IMAGES)
    mean = _channels(images.get("image_mean", images.get("mean")), "mean", source)
    std = _channels(images.get("image_std", images.get("std")), "std", source)
    scale = 255 * _number(images.get("rescale_factor", 1 / 255), "rescale_factor", source)
    if images.get("do_rescale") is False:
        scale = 255.0
        if images.get("do_normalize") is not False and max(std or (1.0,)) <= 1:
            raise InputError(
                f"{source} has do_rescale false with an image_std of {std or 'its default'}, which is for images "
                "between 0 and 1: set do_rescale to true, or give mean and std of images between 0 and 255"
            )
    if images.get("do_normalize") is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    if abs(scale - 1) < 1e-3:  # some files round 1/255
        return mean, std
    mean, std = mean or expected.mean or IMAGENET_MEAN, std or expected.std or IMAGENET_STD
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _channels(value: Any, name: str, source: Path) -> tuple[float, ...] | None:
    """Return one number for each channel; a file may give one for all."""
    if value is None:
        return None
    values = list(value) if isinstance(value, list | tuple) else [value] * 3
    if len(values) != 3:
        raise InputError(f"{source} has {len(values)} values of {name}, expected one for each of 3 channels")
    return tuple(_number(each, name, source, least=-math.inf if name == "mean" else 0.0) for each in values)


def _number(value: Any, name: str, source: Path, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < math.inf:
        raise InputError(f"{source} has {name} {value!r}, expected a number above {least:g}: correct it")
    return float(value)


def read_beside(path: Path, name: str) -> dict[str, Any]:
    """Read a mapping from a JSON or YAML file beside another file; empty if there is none."""
    beside = path.with_name(name)
    if not beside.is_file():
        return {}
    if beside.suffix == ".json":
        return read_json(beside)
    return read_yaml(beside)
