"""Weights by timm's names, with or without a tag, such as `vit_small_patch16_224.dino`."""

from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import try_to_load_from_cache
from timm.models import load_state_dict_from_hf
from timm.models._pretrained import PretrainedCfg

from cribo.base.errors import InputError
from cribo.base.files import nearest_path
from cribo.models.building import nearest_names

_HUB_FILE = "pytorch_model.bin"  # timm prefers the model.safetensors beside it


def check_timm_name(name: str) -> None:
    """Check that timm has the architecture of a name.

    Raises:
        InputError: it has not; the error suggests similar files and names.
    """
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = nearest_path(Path(name)) if Path(name).suffix else None  # other names are rather those of networks
        advice = nearest_names(architecture) if near is None else f": did you mean the file {near}?"
        raise InputError(f"{name!r} is neither a file nor a timm name{advice}")


def timm_weights(name: str) -> PretrainedCfg:
    """Return timm's configuration of pretrained weights; without a tag, of the default ones.

    Raises:
        InputError: timm has no such weights, or not in a format of PyTorch.
    """
    architecture, _, tag = name.partition(".")
    tags = [full for full in timm.list_pretrained() if full.partition(".")[0] == architecture]
    if not tags:
        raise InputError(f"timm has no pretrained weights of {architecture}: give a file, or use random weights")
    if tag and name not in tags:
        raise InputError(f"timm has no weights {name!r}: it has {', '.join(tags)}")
    config = timm.get_pretrained_cfg(name)
    if config is None or _place(config) is None:
        raise InputError(f"the weights {name!r} are not in a PyTorch format: give a file")
    return config


def is_cached(name: str) -> bool:
    """Whether weights of the Hugging Face hub, by their timm name, are in its cache."""
    config = timm_weights(name)
    files = (config.hf_hub_filename or "model.safetensors", _HUB_FILE)
    return any(isinstance(try_to_load_from_cache(str(config.hf_hub_id), file), str) for file in files)


def download_timm(name: str, config: PretrainedCfg) -> dict[str, Any]:
    """Return the state dict of weights, from the cache or the internet.

    Raises:
        ConnectionError: they are not cached and cannot be downloaded.
    """
    place = _place(config)
    assert place is not None
    try:
        if not place.startswith("http"):
            return load_state_dict_from_hf(place, config.hf_hub_filename or _HUB_FILE, weights_only=True)
        return torch.hub.load_state_dict_from_url(place, map_location="cpu", weights_only=True)
    except Exception as error:  # the hub client's errors have no common base class
        address = place if place.startswith("http") else f"https://huggingface.co/{place}"
        raise ConnectionError(
            f"cannot download the weights {name!r} ({type(error).__name__}: {error}). Without a network: "
            f"download their file (model.safetensors) from {address} on another machine, and pass its path"
        ) from error


def _place(config: PretrainedCfg) -> str | None:
    """Return the repository on the hub or the URL of weights; None if they have a format of their own."""
    # `custom_load` refers to the file at the URL, unless it is "hf".
    if config.hf_hub_id and str(config.custom_load) != "hf":
        return config.hf_hub_id
    return config.url if not config.custom_load and isinstance(config.url, str) and config.url else None
