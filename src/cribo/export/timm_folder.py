"""Export to timm: a folder with weights and configuration in the layout of the Hugging Face hub."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from jaxtyping import Float
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from cribo.export.options import ExportOptions
from cribo.export.target import Encode, Exporter, Written, data_type, in_precision
from cribo.files import write_json
from cribo.models import Backbone, normalise
from cribo.models.numerics import Numerics
from cribo.models.saving import TIMM_TAG, how_to_read_out, late_norm

_LOAD = """\
import timm
model = timm.create_model("local-dir:{folder}", pretrained=True).eval(){half}
transform = timm.data.create_transform(**timm.data.resolve_data_config({{}}, model=model))
"""
_TOKENS = "tokens = model.forward_features(transform(picture)[None]{half})[:, {prefix}:]"
_MAP = "feature_map = model.forward_features(transform(picture)[None]{half})"
_READOUT = "the readout layer is stored as timm's classifier; the code below applies it"


def write(backbone: Backbone, folder: Path, options: ExportOptions) -> Written:
    """Write `model.safetensors` and `config.json` in the layout of timm's own weights on the hub."""
    state = {key: value.detach().contiguous().clone() for key, value in backbone.model.state_dict().items()}
    state = {key: value.to(data_type(options)) if value.is_floating_point() else value for key, value in state.items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", timm_config(backbone))
    return Written(in_precision(_LOAD + how_to_encode(backbone, _MAP, _TOKENS), options), _notes(backbone))


def how_to_encode(backbone: Backbone, feature_map: str, tokens: str) -> str:
    """Return the line of Python that encodes a picture as feature map or tokens, including the readout."""
    prefix = getattr(backbone.model, "num_prefix_tokens", None)
    line = feature_map if prefix is None else tokens.replace("{prefix}", str(prefix))
    if backbone.readout is None:
        return line
    name, _, features = line.partition(" = ")
    return f"{name} = {how_to_read_out(backbone, features)}"


def timm_config(backbone: Backbone) -> dict[str, Any]:
    """Return the content of timm's `config.json`, with the readout, if any, as classifier."""
    about = backbone.model.pretrained_cfg
    size = backbone.image_size
    width = 0 if backbone.readout is None else backbone.embed_dim
    return {
        "architecture": backbone.name,
        "num_classes": width,
        "num_features": backbone.model.num_features,
        "model_args": {key: value for key, value in backbone.arguments.items() if key != "num_classes"},
        "pretrained_cfg": {
            "tag": TIMM_TAG,
            "custom_load": False,
            "input_size": [3, size, size],
            "fixed_input_size": not backbone.takes_any_size,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "squash",  # resize without cropping, as transformers does
            "mean": list(backbone.mean),
            "std": list(backbone.std),
            "num_classes": width,
            "pool_size": None,
            "first_conv": about.get("first_conv"),
            "classifier": about.get("classifier"),
        },
    }


def load(folder: Path, options: ExportOptions) -> Encode:
    """Load the folder with timm, with the normalisation of its configuration."""
    model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval().to(data_type(options))
    about = resolve_data_config({}, model=model)

    @torch.no_grad()
    def encode(images: Float[Tensor, "b 3 h w"]) -> tuple[Tensor, Tensor]:
        images = normalise(images, mean=about["mean"], std=about["std"]).to(data_type(options))
        return split(model, model.forward_features(images))

    return encode


def split(model: Any, features: Tensor) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b d"]]:
    """Compute tokens and global token from the output of a timm network's `forward_features`."""
    name = late_norm(model)
    norm = model.get_submodule(name) if name else nn.Identity()
    readout = model.get_classifier() if getattr(model, "num_classes", 0) else nn.Identity()
    if features.ndim == 4 and getattr(model, "output_fmt", "NCHW") == "NHWC":
        features = features.permute(0, 3, 1, 2)
    if features.ndim == 4:
        tokens, global_token = norm(features).flatten(2).mT, norm(features.mean(dim=(2, 3), keepdim=True)).flatten(1)
        return readout(tokens), readout(global_token)
    patches = features[:, model.num_prefix_tokens :]
    tokens = norm(patches)
    if getattr(model, "attn_pool", None) is not None:
        global_token = model.attn_pool(tokens)
    else:
        has_global = model.cls_token is not None and name is None
        global_token = features[:, 0] if has_global else norm(patches.mean(dim=1))
    return readout(tokens), readout(global_token)


def _notes(backbone: Backbone) -> tuple[str, ...]:
    notes = []
    if backbone.numerics != Numerics():
        what = ", ".join(
            f"{field.name} {getattr(backbone.numerics, field.name)}"
            for field in fields(Numerics)
            if getattr(backbone.numerics, field.name) != field.default
        )
        notes.append(
            f"timm's configuration cannot store the numerics of these weights ({what}): the difference below is "
            "measured with timm's defaults"
        )
    if backbone.readout is not None:
        notes.append(_READOUT)
    elif norm := late_norm(backbone.model):
        notes.append(
            f"the final norm follows the pooling: model.{norm}(features) returns the tokens that were compared"
        )
    return tuple(notes)


TIMM = Exporter(write, load, lambda backbone, options: None)
