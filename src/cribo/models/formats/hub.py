"""Configurations in the formats of the Hugging Face hub: transformers, timm and open_clip."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cribo.errors import InputError
from cribo.models.formats.reading import read_json
from cribo.models.formats.training_configs import read_yaml

HUB_CONFIG = "config.json"

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


def read_beside(path: Path, name: str) -> dict[str, Any]:
    """Read a mapping from a JSON or YAML file beside another file; empty if there is none."""
    beside = path.with_name(name)
    if not beside.is_file():
        return {}
    if beside.suffix == ".json":
        return read_json(beside)
    return read_yaml(beside)
