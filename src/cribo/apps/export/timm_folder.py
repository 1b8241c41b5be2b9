"""Export to timm: a folder with weights and configuration in the layout of the Hugging Face hub."""

from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Float
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from cribo.apps.export.config import ExportOptions
from cribo.apps.export.target import Encode, Exporter, Step, Written, data_type, no_step
from cribo.models import Backbone, normalise
from cribo.models.hub.timm_layout import how_to_load, not_of_timm, notes_on, resizes_otherwise, write_timm_layout
from cribo.models.saving import late_norm


def write(backbone: Backbone, folder: Path, options: ExportOptions, progress: Step = no_step) -> Written:
    """Write `model.safetensors` and `config.json` in the layout of timm's own weights on the hub."""
    with progress("writing"):
        write_timm_layout(backbone, folder, data_type(options))
    return Written(how_to_load(backbone, "local-dir:{folder}", data_type(options)), notes_on(backbone))


def load(folder: Path, options: ExportOptions) -> Encode:
    """Load the folder with timm, with the normalisation of its configuration."""
    model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval().to(data_type(options))
    about = resolve_data_config({}, model=model)

    @torch.no_grad()
    def encode(images: Float[Tensor, "b c h w"]) -> tuple[Tensor, Tensor]:
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
        has_global = getattr(model, "cls_token", None) is not None and name is None
        global_token = features[:, 0] if has_global else norm(patches.mean(dim=1))
    return readout(tokens), readout(global_token)


TIMM = Exporter(write, load, lambda backbone, options: not_of_timm(backbone) or resizes_otherwise(backbone))
