"""A folder as on the Hugging Face hub that timm loads: the network's own weights, and what builds and feeds it."""

from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from jaxtyping import Float
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from cribo.export.options import Options
from cribo.export.target import Encode, Exporter, Written
from cribo.files import write_json
from cribo.models import Backbone, normalise

_LOAD = """\
import timm
model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_data_config({{}}, model=model))
"""
_TOKENS = "tokens = model.forward_features(transform(picture)[None])[:, {prefix}:]"
_MAP = "feature_map = model.forward_features(transform(picture)[None])"


def write(backbone: Backbone, folder: Path, options: Options) -> Written:
    """Write `model.safetensors` and `config.json` in the layout of timm's own weights on the hub."""
    state = {key: value.detach().contiguous().clone() for key, value in backbone.model.state_dict().items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", timm_config(backbone))
    prefix = getattr(backbone.model, "num_prefix_tokens", None)
    encode = _MAP if prefix is None else _TOKENS.format(prefix=prefix)
    return Written(_LOAD + encode, _notes(backbone))


def timm_config(backbone: Backbone) -> dict[str, Any]:
    """What timm's `config.json` says of a network without a classifier."""
    about = backbone.model.pretrained_cfg
    size = backbone.image_size
    return {
        "architecture": backbone.name,
        "num_classes": 0,
        "num_features": backbone.model.num_features,
        "model_args": {key: value for key, value in backbone.arguments.items() if key != "num_classes"},
        "pretrained_cfg": {
            "tag": "cribo",
            "custom_load": False,
            "input_size": [3, size, size],
            "fixed_input_size": not backbone.takes_any_size,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(backbone.mean),
            "std": list(backbone.std),
            "num_classes": 0,
            "pool_size": None,
            "first_conv": about.get("first_conv"),
            "classifier": about.get("classifier"),
        },
    }


def load(folder: Path) -> Encode:
    """What timm makes of the folder, with the normalisation that timm finds there."""
    model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    about = resolve_data_config({}, model=model)

    @torch.no_grad()
    def encode(images: Float[Tensor, "b 3 h w"]) -> tuple[Tensor, Tensor]:
        features = model.forward_features(normalise(images, mean=about["mean"], std=about["std"]))
        if has_late_norm(model):
            features = model.fc_norm(features)
        return split(model, features)

    return encode


def split(model: Any, features: Tensor) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b d"]]:
    """Tokens and global token of what `forward_features` of a timm network gives."""
    if features.ndim == 4:
        is_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        tokens = features.flatten(1, 2) if is_last else features.flatten(2).mT
        return tokens, tokens.mean(dim=1)
    tokens = features[:, model.num_prefix_tokens :]
    has_global = model.num_prefix_tokens and model.cls_token is not None
    return tokens, features[:, 0] if has_global else tokens.mean(dim=1)


def has_late_norm(model: Any) -> bool:
    """Networks made for average pooling may keep their last norm behind it, where `forward_features` has ended."""
    late = getattr(model, "fc_norm", None)
    return isinstance(getattr(model, "norm", None), nn.Identity) and not isinstance(late, (nn.Identity, type(None)))


def _notes(backbone: Backbone) -> tuple[str, ...]:
    notes = []
    if backbone.norm_eps is not None:
        notes.append(
            f"timm's file has no place for the epsilon of these weights' layer norms, {backbone.norm_eps:g}, and takes "
            "its own: the difference below is with timm's"
        )
    if has_late_norm(backbone.model):
        notes.append(
            "the last norm stands behind the pooling: model.fc_norm(tokens) gives the tokens that were compared"
        )
    return tuple(notes)


TIMM = Exporter(write, load, lambda backbone, options: None)
