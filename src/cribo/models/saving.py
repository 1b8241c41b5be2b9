"""Save backbones as `backbone.safetensors` and `backbone.json`, which plain timm can read, too."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.models import Beit, ConvNeXt, Eva, NaFlexVit, VisionTransformer, Xcit
from torch import Tensor, nn

from cribo.base.errors import InputError
from cribo.base.files import sync, write_beside
from cribo.models.backbone import Backbone
from cribo.models.formats.reading import read_json
from cribo.models.formats.recognised import Expected, Recognised
from cribo.models.licences import describe_licences
from cribo.models.numerics import Numerics

WEIGHTS_FILE = "backbone.safetensors"
DESCRIPTION_FILE = "backbone.json"
DESCRIBED = "cribo"
"""Entry of `config.json` files in timm's layout with the description of the backbone (`describe`)."""

TIMM_TAG = "cribo"
"""Tag of timm `config.json` files written by this package."""
_HOW_TO_LOAD = (
    "import json, timm, safetensors.torch; about = json.load(open('backbone.json')); "
    "model = timm.create_model(about['name'], **about['args']).eval(); "
    "model.load_state_dict(safetensors.torch.load_file('backbone.safetensors')); "
    "inputs = dict(input_size=(3, about['image_size'], about['image_size']), mean=about['mean'], std=about['std'], "
    "interpolation='bicubic', crop_pct=1.0, crop_mode='squash'); "
    "transform = timm.data.create_transform(**timm.data.resolve_data_config(inputs, model=model))"
)
_HOW_TO_SET_EPS = "; [setattr(m, 'eps', about['norm_eps']) for m in model.modules() if type(m).__name__ == 'LayerNorm']"
_HOW_TO_SET_FINAL_EPS = "; model.head.norm.eps = about['final_norm_eps']"
_HOW_TO_SET_PERIODS = "; import torch; model.rope.periods = torch.tensor(about['rope_periods'])"
_HOW_TO_DILATE = (
    "; import torch; stages = [s for s in (model.layer2, model.layer3, model.layer4) if max(s[0].conv2.stride) == 1]; "
    "[(setattr(s[0].conv2, 'dilation', (2 ** i,) * 2), setattr(s[0].conv2, 'padding', (2 ** i,) * 2)) "
    "for i, s in enumerate(stages, 1)]"
)


def save_backbone(backbone: Backbone, folder: str | Path) -> Path:
    """Write `backbone.safetensors` and `backbone.json`, which plain timm can load; return the former.

    Both files are written under temporary names and renamed when complete, so a full disk or a kill does not damage an
    older pair.

    Raises:
        ValueError: the backbone was built with arguments that cannot be written as JSON.
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    # Clones, because safetensors rejects tensors that share memory.
    state = {key: value.detach().cpu().contiguous().clone() for key, value in backbone.model.state_dict().items()}
    try:
        json.dumps(backbone.arguments)
    except TypeError as error:
        raise InputError(
            f"the arguments of {backbone.name} cannot be written as JSON ({error}): give names where timm "
            f'accepts them (norm_layer="layernorm"), got {backbone.args}'
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    weights, description = folder / WEIGHTS_FILE, folder / DESCRIPTION_FILE
    new_weights = write_beside(weights, lambda path: _save_tensors(state, path, weights))
    new_description = None
    try:
        content = {
            **describe(backbone),
            "timm": timm.__version__,
            "torch": str(torch.__version__),
            "sha256": _sha256(new_weights),
            "how_to_load": _HOW_TO_LOAD
            + (_HOW_TO_SET_EPS if backbone.numerics.norm_eps is not None else "")
            + (_HOW_TO_SET_FINAL_EPS if backbone.numerics.final_norm_eps is not None else "")
            + (_HOW_TO_SET_PERIODS if backbone.numerics.rope_periods is not None else "")
            + (_HOW_TO_DILATE if backbone.numerics.dilate_entries else "")
            + (
                f"; tokens = {how_to_read_out(backbone, 'model.forward_features(images)')}"
                if backbone.readout is not None
                else ""
            ),
        }
        text = json.dumps(content, indent=2) + "\n"
        new_description = write_beside(description, lambda path: path.write_text(text, encoding="utf-8"))
        new_weights.replace(weights)
        new_description.replace(description)
    finally:
        for leftover in filter(None, (new_weights, new_description)):
            leftover.unlink(missing_ok=True)
    sync(folder)
    return weights


def describe(backbone: Backbone) -> dict[str, Any]:
    """Return the JSON description of a backbone: everything needed to rebuild it and its inputs, except weights."""
    arguments = dict(backbone.arguments)
    if timm.is_model(backbone.name):
        # timm's image functions (`resolve_data_config`) read mean and std from the network's configuration.
        arguments["pretrained_cfg_overlay"] = {"mean": list(backbone.mean), "std": list(backbone.std)}
    return {
        "name": backbone.name,
        "args": arguments,
        "image_size": backbone.image_size,
        "patch_size": backbone.patch_size,
        "embed_dim": backbone.embed_dim,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        **asdict(backbone.numerics),
        "parent": None if backbone.loaded is None else backbone.loaded.parent,
        "licences": describe_licences(backbone.licences),
        **({} if backbone.pixels is None else {"pixels": dict(backbone.pixels)}),
    }


def how_to_read_out(backbone: Backbone, features: str) -> str:
    """Return Python code that applies the layer after the features to the output of timm's `forward_features`."""
    model = backbone.model
    if norm := late_norm(model):
        features = f"model.{norm}({features})"
    is_map = not isinstance(model, VisionTransformer | Eva | Beit | Xcit | NaFlexVit)
    if is_map and getattr(model, "output_fmt", "NCHW") == "NCHW":
        features = f"{features}.permute(0, 2, 3, 1)"
    return f"model.get_classifier()({features})"


def late_norm(network: nn.Module) -> str | None:
    """Return the name of a network's last norm if it is after the pooling, outside timm's `forward_features`."""
    model: Any = network
    if isinstance(network, ConvNeXt):
        return "head.norm"
    late: nn.Module | None = getattr(model, "fc_norm", None)
    has_none = isinstance(late, (nn.Identity, type(None))) or not isinstance(getattr(model, "norm", None), nn.Identity)
    return None if has_none else "fc_norm"


def _save_tensors(state: Mapping[str, Tensor], path: Path, stands_for: Path) -> None:
    try:
        safetensors.torch.save_file(dict(state), path)
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {stands_for}: {error}") from error


def saved_description(path: Path) -> dict[str, Any] | None:
    """Return the description beside a file of `save_backbone`, under any name; None for other files.

    Raises:
        ValueError: the description lacks entries, or is that of another file.
    """
    description = path.with_name(DESCRIPTION_FILE)
    if path.is_dir() or not description.is_file():
        return None
    about = read_json(description)
    if path.name != WEIGHTS_FILE:
        return about if about.get("sha256") == _sha256(path) else None
    missing = {"name", "args", "image_size", "mean", "std", "sha256"} - set(about)
    if missing:
        raise InputError(f"{description} lacks {', '.join(sorted(missing))}: it does not describe a backbone")
    if about["sha256"] != _sha256(path):
        raise InputError(f"{path} does not match {description} (sha256 differs): copy both again from one run")
    return about


def reserve_readout(backbone: Backbone, width: int) -> None:
    """Add an uninitialised layer after the features, for weights that are loaded next; 0 removes it."""
    backbone.remove_readout()
    if width:
        backbone.set_readout(torch.zeros(width, backbone.embed_dim), torch.zeros(width))


def apply_description(recognised: Recognised, about: Mapping[str, Any]) -> Recognised:
    """Apply the expected numerics, images and parent of a description."""
    expected = Expected(mean=tuple(about["mean"]), std=tuple(about["std"]))
    return replace(recognised, expected=expected, numerics=numerics_of(about), notes=(), parent=about.get("parent"))


def numerics_of(about: Mapping[str, Any]) -> Numerics:
    """Return the numerics in a description; older ones contain at most an epsilon."""
    known = {field.name: about[field.name] for field in fields(Numerics) if field.name in about}
    if known.get("rope_periods") is not None:
        known["rope_periods"] = tuple(known["rope_periods"])
    return Numerics(**known)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
