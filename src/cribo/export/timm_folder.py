"""A folder as on the Hugging Face hub that timm loads: the network's own weights, and what builds and feeds it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from jaxtyping import Float
from timm.data.config import resolve_data_config
from timm.models import ConvNeXt
from torch import Tensor, nn

from cribo.export.options import Options
from cribo.export.target import Encode, Exporter, Written
from cribo.files import write_json
from cribo.models import Backbone, normalise
from cribo.models.numerics import Numerics

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
        return split(model, model.forward_features(normalise(images, mean=about["mean"], std=about["std"])))

    return encode


def split(model: Any, features: Tensor) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b d"]]:
    """Tokens and global token of what `forward_features` of a timm network gives, each after the last norm."""
    norm = late_norm(model) or nn.Identity()
    if features.ndim == 4 and getattr(model, "output_fmt", "NCHW") == "NHWC":
        features = features.permute(0, 3, 1, 2)
    if features.ndim == 4:
        return norm(features).flatten(2).mT, norm(features.mean(dim=(2, 3), keepdim=True)).flatten(1)
    patches = features[:, model.num_prefix_tokens :]
    tokens = norm(patches)
    if getattr(model, "attn_pool", None) is not None:
        return tokens, model.attn_pool(tokens)
    has_global = model.cls_token is not None and late_norm(model) is None
    return tokens, features[:, 0] if has_global else norm(patches.mean(dim=1))


def late_norm(network: nn.Module) -> nn.Module | None:
    """The last norm of networks made for average pooling, if it comes after it, where `forward_features` has ended."""
    model: Any = network
    if isinstance(network, ConvNeXt):
        return model.head.norm
    late: nn.Module | None = getattr(model, "fc_norm", None)
    has_none = isinstance(late, (nn.Identity, type(None))) or not isinstance(getattr(model, "norm", None), nn.Identity)
    return None if has_none else late


def _notes(backbone: Backbone) -> tuple[str, ...]:
    notes = []
    if backbone.numerics != Numerics():
        what = ", ".join(
            f"{field.name} {getattr(backbone.numerics, field.name)}"
            for field in fields(Numerics)
            if getattr(backbone.numerics, field.name) != field.default
        )
        notes.append(
            f"timm's file has no place for what these weights expect beside timm's own arithmetic ({what}): the "
            "difference below is with timm's"
        )
    if late_norm(backbone.model) is not None:
        norm = "model.head.norm" if isinstance(backbone.model, ConvNeXt) else "model.fc_norm"
        notes.append(f"the last norm comes after the pooling: {norm}(features) gives the tokens that were compared")
    return tuple(notes)


TIMM = Exporter(write, load, lambda backbone, options: None)
