"""A weight file with the configurations beside it, as transformers, timm and open_clip write them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from cribo.base.errors import InputError
from cribo.base.files import YAML_BYTES, parse_yaml, read_text
from cribo.models.formats.reading import read_json

HUB_CONFIG, HUB_IMAGES = "config.json", "preprocessor_config.json"

_OPEN_CLIP_CONFIG = "open_clip_config.json"

# Defaults that transformers omits from the nested configuration of an image tower.
_TOWER_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip": {"hidden_act": "quick_gelu", "num_attention_heads": 12, "layer_norm_eps": 1e-5},
    "siglip": {"hidden_act": "gelu_pytorch_tanh", "num_attention_heads": 12, "layer_norm_eps": 1e-6},
}


@dataclass(frozen=True)
class WeightFile:
    """A file or folder of weights, and its content, nested as saved."""

    path: Path
    content: Mapping[str, Any]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The `config.json` in the same folder; empty if there is none."""
        return read_beside(self.path, HUB_CONFIG)

    @cached_property
    def tower(self) -> dict[str, Any]:
        """The configuration of the image network, with transformers' names; for two-tower models, the image tower's."""
        if self.path.name.startswith("open_clip") and (config := read_beside(self.path, _OPEN_CLIP_CONFIG)):
            return _from_open_clip_config(config)
        defaults = _TOWER_DEFAULTS.get(str(self.config.get("model_type")))
        if defaults is not None and isinstance(tower := self.config.get("vision_config"), Mapping):
            return {**self.config, **defaults, **tower}
        return self.config or _from_open_clip_config(read_beside(self.path, _OPEN_CLIP_CONFIG))


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


def read_beside(path: Path, name: str) -> dict[str, Any]:
    """Read a mapping from a JSON or YAML file beside another file; empty if there is none."""
    beside = path.with_name(name)
    if not beside.is_file():
        return {}
    return read_json(beside) if beside.suffix == ".json" else read_yaml(beside)


class _PlainYamlLoader(yaml.SafeLoader):
    """Loader of plain data and tuples, which Segmenter's files contain; rejects all other Python tags."""


_PlainYamlLoader.add_constructor("tag:yaml.org,2002:python/tuple", yaml.SafeLoader.construct_yaml_seq)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file; empty if it contains something else.

    Raises:
        ValueError: the file is damaged, or has tags that could run code.
    """
    text = read_text(path, limit_bytes=YAML_BYTES, errors="replace")
    try:
        content = parse_yaml(text, _PlainYamlLoader)
    except (yaml.YAMLError, InputError) as error:
        raise InputError(f"{path} is damaged ({error}): copy it again") from error
    return content if isinstance(content, dict) else {}
