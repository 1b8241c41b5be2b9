"""Save backbones in the format of timm's models on the Hugging Face hub.

This package, timm and transformers can load it.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from cribo.base.errors import InputError
from cribo.base.files import write_json
from cribo.models.backbone import RGB, Backbone
from cribo.models.channels import described_images
from cribo.models.numerics import Numerics
from cribo.models.saving import DESCRIBED, TIMM_TAG, describe, how_to_normalise, how_to_read_out, late_norm

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"

_READOUT = "the readout layer is stored as timm's classifier; the code that loads it applies it"

_LOAD = """\
import timm
model = timm.create_model("{place}", pretrained=True).eval(){half}
transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
"""
_TOKENS = "tokens = model.forward_features(transform(picture)[None]{half})[:, {prefix}:]"
_MAP = "feature_map = model.forward_features(transform(picture)[None]{half})"


def write_timm_layout(backbone: Backbone, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `model.safetensors` and `config.json` to an existing folder.

    Args:
        backbone: the backbone, on any device.
        folder: the folder.
        dtype: type of the stored weights.

    Raises:
        InputError: the network is not timm's.
    """
    if (reason := not_of_timm(backbone)) is not None:
        raise InputError(f"{reason}: save it with cribo.models.save_backbone")
    state = {key: value.detach().cpu().contiguous().clone() for key, value in backbone.model.state_dict().items()}
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    safetensors.torch.save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    write_json(folder / CONFIG_FILE, timm_config(backbone))


def not_of_timm(backbone: Backbone) -> str | None:
    """Return the reason why timm cannot build the network; None if it can."""
    return None if hasattr(backbone.model, "pretrained_cfg") else f"{backbone.name} is not a network of timm"


def resizes_otherwise(backbone: Backbone) -> str | None:
    """Return the reason why timm computes other features at other image sizes; None if it computes the same."""
    how = backbone.numerics.positions
    if how == "timm" or getattr(backbone.model, "pos_embed", None) is None:
        return None
    return (
        f"timm resizes the position embedding by its own method, and these weights expect that of their project ({how})"
    )


def timm_config(backbone: Backbone) -> dict[str, Any]:
    """Return the content of timm's `config.json`, with the readout, if any, as classifier."""
    about = backbone.model.pretrained_cfg
    size = backbone.image_size
    width = 0 if backbone.readout is None else backbone.embed_dim
    names = {each.name for each in backbone.licences if each.role == "weights"}
    return {
        "architecture": backbone.name,
        "num_classes": width,
        "num_features": backbone.model.num_features,
        "model_args": {key: value for key, value in backbone.arguments.items() if key != "num_classes"},
        "pretrained_cfg": {
            "tag": TIMM_TAG,
            "custom_load": False,
            "input_size": [backbone.in_chans, size, size],
            "fixed_input_size": not backbone.takes_any_size,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "squash",  # resize without cropping, as transformers does
            "mean": list(backbone.mean),
            "std": list(backbone.std),
            "num_classes": width,
            "pool_size": None,
            # timm would inflate a first layer that it knows, also one with the channels of the images.
            "first_conv": about.get("first_conv") if backbone.in_chans == RGB else None,
            "classifier": about.get("classifier"),
            "license": names.pop() if len(names) == 1 else None,
        },
        DESCRIBED: describe(backbone),
    }


def how_to_load(backbone: Backbone, place: str, dtype: torch.dtype = torch.float32) -> str:
    """Return Python code that loads the layout from a place, such as `hf-hub:owner/name`, and encodes a picture."""
    code = _LOAD.replace("{place}", place) + how_to_encode(backbone, _MAP, _TOKENS)
    if backbone.in_chans != RGB:
        code = _of_channels(code, backbone)
    return code.replace("{half}", ".half()" if dtype == torch.float16 else "")


def _of_channels(code: str, backbone: Backbone) -> str:
    """Return code of pictures as code of `pixels` (h, w, C), an array in uint8."""
    lines = code.replace("import timm\n", "import timm, torch\n").replace("transform(picture)[None]", "images")
    pixels = f"{how_to_normalise(backbone)}  # of pixels (height, width, {backbone.in_chans}) in uint8"
    return "\n".join(pixels if line.startswith("transform =") else line for line in lines.splitlines())


def how_to_encode(backbone: Backbone, feature_map: str, tokens: str) -> str:
    """Return the line of Python that encodes a picture as feature map or tokens, with last norm and readout."""
    prefix = getattr(backbone.model, "num_prefix_tokens", None)
    line = feature_map if prefix is None else tokens.replace("{prefix}", str(prefix))
    name, _, features = line.partition(" = ")
    if backbone.readout is not None:
        return f"{name} = {how_to_read_out(backbone, features)}"
    norm = late_norm(backbone.model)
    return line if norm is None else f"{name} = model.{norm}({features})"


def notes_on(backbone: Backbone) -> tuple[str, ...]:
    """Return notes for users of the layout: what timm does differently."""
    notes = []
    if backbone.in_chans != RGB or backbone.pixels:
        notes.append(f"images are {described_images(backbone)}")
    if backbone.numerics != Numerics():
        what = ", ".join(
            f"{field.name} {getattr(backbone.numerics, field.name)}"
            for field in fields(Numerics)
            if getattr(backbone.numerics, field.name) != field.default
        )
        notes.append(
            f"timm's configuration cannot store the numerics of these weights ({what}): timm computes features with "
            "its defaults, and they differ from those of cribo.load_backbone, which applies these numerics"
        )
    if backbone.readout is not None:
        notes.append(_READOUT)
    elif norm := late_norm(backbone.model):
        notes.append(
            f"the final norm follows the pooling: tokens are model.{norm}(features), as in the code that loads it; "
            "timm's forward_features does not apply this norm"
        )
    return tuple(notes)
