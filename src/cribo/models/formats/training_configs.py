"""Configurations of training runs, in a checkpoint, in its folder or in a folder above it; one function per project."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cribo.base.errors import InputError
from cribo.base.files import read_text
from cribo.models.backbone import IMAGENET_MEAN, IMAGENET_STD
from cribo.models.formats.architecture import Architecture
from cribo.models.formats.beside import WeightFile, read_beside, read_yaml
from cribo.models.formats.hub import hub
from cribo.models.formats.recognised import Recognised
from cribo.models.positions import Resizing


def cribo_run(recognised: Recognised, file: WeightFile) -> Recognised:
    """Note that a checkpoint of this package's earlier versions does not describe its backbone."""
    if not file.content.get("cribo", {}).get("config", {}).get("backbone", {}).get("pretrained"):
        return recognised
    note = "the checkpoint does not specify the normalisation that its weights expect: assumed ImageNet's"
    return replace(recognised, notes=(*recognised.notes, note))


def segmenter(recognised: Recognised, file: WeightFile) -> Recognised:
    """Apply the normalisation in the `variant.yml` of Segmenter, if there is one."""
    is_deit = (read_beside(file.path, "variant.yml").get("net_kwargs") or {}).get("normalization") == "deit"
    return recognised.expecting(mean=IMAGENET_MEAN, std=IMAGENET_STD) if is_deit else recognised


# ------------------------------------------------------------------------------------------------ DINOv2 and DINOv3

_ABOVE = 4
_DINOV3_EPS = {"layernorm": 1e-6, "layernormbf16": 1e-5}
_RESIZINGS: dict[tuple[bool, bool], Resizing] = {  # antialiased, with an offset
    (False, True): "bicubic_offset",
    (False, False): "bicubic",
    (True, False): "timm",
}


def dino(recognised: Recognised, file: WeightFile) -> Recognised:
    """Apply the `config.yaml` that the training of DINOv2 or DINOv3 writes at the top of its folder.

    Checkpoints are up to three folders deeper (`eval/training_<step>/teacher_checkpoint.pth`, `ckpt/<step>/`).

    Source: github.com/facebookresearch/dinov2, /dinov3: `configs/ssl_default_config.yaml`.

    Raises:
        ValueError: the configuration has unsupported numerics.
    """
    state, path = recognised.state, file.path
    is_rotary = recognised.rope_periods is not None
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    for folder in [path if path.is_dir() else path.parent, *path.absolute().parents][:_ABOVE]:
        config = folder / "config.yaml"
        content = read_yaml(config) if config.is_file() else {}
        student = content.get("student")
        if not isinstance(student, Mapping) or "arch" not in student:
            continue
        stored = student.get("n_storage_tokens" if is_rotary else "num_register_tokens", registers)
        if (student.get("patch_size"), stored) == (state["patch_embed.proj.weight"].shape[-1], registers):
            return _as_configured(recognised, student, content.get("crops") or {}, config)
    return recognised


def dino_training(recognised: Recognised, file: WeightFile) -> Recognised:
    """Apply the same `config.yaml` to a checkpoint of the training itself, and note its absence."""
    configured = dino(recognised, file)
    if configured is not recognised or recognised.rope_periods is None:
        return configured
    return recognised.expecting(
        "no config.yaml of its training beside or above it: assumed an epsilon of 1e-5 and rotary coordinates scaled "
        "for each side separately, as in the released networks"
    )


def _as_configured(
    recognised: Recognised, student: Mapping[str, Any], crops: Mapping[str, Any], config: Path
) -> Recognised:
    note = f"epsilon, positions and normalisation are those of {config}"
    values: dict[str, Any] = {key: tuple(crops[f"rgb_{key}"]) for key in ("mean", "std") if crops.get(f"rgb_{key}")}
    if recognised.rope_periods is None:
        how = (bool(student.get("interpolate_antialias", False)), bool(student.get("interpolate_offset", 0.1)))
        if how not in _RESIZINGS:
            raise InputError(f"{config} resizes positions with antialiasing and an offset, which is not supported")
        return replace(recognised.expecting(note, **values), positions=_RESIZINGS[how])
    norm = student.get("norm_layer", "layernorm")
    if norm not in _DINOV3_EPS:
        raise InputError(f"{config} has norm_layer {norm!r}: it must be one of {', '.join(_DINOV3_EPS)}")
    notes = [note]
    if student.get("pos_embed_rope_dtype", "bf16") != "fp32":
        notes.append("its training computes the rotary embedding in bfloat16; here it is computed in float32")
    coordinates = student.get("pos_embed_rope_normalize_coords", "separate")
    return recognised.expecting(*notes, norm_eps=_DINOV3_EPS[norm], rope_coordinates=coordinates, **values)


# ------------------------------------------------------------------------------------------------------- ResNets


def named_stride(content: Mapping[str, Any]) -> int | None:
    """Return the output stride in the name of a training's ResNet, such as resnet50_16s; None without one."""
    options = content.get("args", content.get("hyper_parameters"))
    options = options if isinstance(options, Mapping) else getattr(options, "__dict__", {})
    arch = content.get("arch", options.get("arch"))
    found = re.search(r"_(8|16)s$", arch) if isinstance(arch, str) else None
    return int(found[1]) if found else None


def mmsegmentation(recognised: Recognised, file: WeightFile) -> Recognised:
    """Apply the strides and dilations in the configuration of a ResNet of MMSegmentation, if there is one.

    Source: github.com/open-mmlab/mmsegmentation: `models/backbones/resnet.py`, `models/utils/res_layer.py`, where the
    first block of a dilated stage has half of its dilation with `contract_dilation` only.

    Raises:
        ValueError: timm has no network with these strides and dilations.
    """
    if "layer1.0.conv1.weight" not in recognised.state:
        return hub(recognised, file)
    text, source = _mmsegmentation_config(file)
    match = re.search(r"backbone=dict\(.*?(?=decode_head|neck=|auxiliary_head|$)", text, flags=re.DOTALL)
    if match is None:
        return hub(replace(recognised, may_be_dilated=recognised.output_stride is None), file)
    settings = {
        name: tuple(int(number) for number in re.findall(r"\d+", numbers))
        for name, numbers in re.findall(r"\b(strides|dilations|multi_grid)=[(\[]([\d,\s]+)[)\]]", match[0])
    }
    strides, dilations = settings.get("strides", (1, 2, 2, 2)), settings.get("dilations", (1, 1, 1, 1))
    style = next(iter(re.findall(r"\bstyle='(\w+)'", match[0])), "pytorch")
    known: dict[tuple[tuple[int, ...], ...], int]
    known = {((1, 2, 2, 2), (1, 1, 1, 1)): 32, ((1, 2, 2, 1), (1, 1, 1, 2)): 16, ((1, 2, 1, 1), (1, 1, 2, 4)): 8}
    output_stride = known.get((strides, dilations))
    if output_stride is None or "multi_grid" in settings or style != "pytorch":
        raise InputError(
            f"its configuration has strides {strides}, dilations {dilations}, multi_grid {settings.get('multi_grid')} "
            f"and style {style!r}, which no ResNet of timm has"
        )
    if output_stride < 32 and "layer1.0.conv3.weight" not in recognised.state:
        raise InputError(
            f"{file.path} has a dilated ResNet of basic blocks: MMSegmentation dilates the first convolution of a "
            "block, timm both, so features would differ"
        )
    notes = [] if source is None else [f"strides and dilations are those of {source}"]
    dilates = output_stride < 32 and "contract_dilation=True" not in match[0]
    configured = recognised.expecting(*notes, dilate_entries=dilates)
    return hub(replace(configured, output_stride=output_stride), file)


def stride_notes(recognised: Recognised, architecture: Architecture) -> tuple[str, ...]:
    """Return the note on a ResNet whose output stride is assumed."""
    if not recognised.may_be_dilated or "output_stride" in architecture.args:
        return ()
    can_dilate = "layer1.0.conv3.weight" in recognised.state and "avg_down" not in architecture.args
    way_out = ": args={'output_stride': 8}" if can_dilate else ""
    return (
        "the file does not specify the strides and dilations of its ResNet: assumed an output stride of 32; most of "
        f"MMSegmentation's have 8{way_out}",
    )


def _mmsegmentation_config(file: WeightFile) -> tuple[str, Path | None]:
    """Return the Python text of a training's configuration, and the file beside the checkpoint if it comes from one."""
    meta = file.content.get("meta")
    kept = [meta.get(key) for key in ("cfg", "config")] if isinstance(meta, Mapping) else []
    if text := next((text for text in kept if isinstance(text, str)), None):
        return text, None
    texts = {path: read_text(path, errors="replace") for path in file.path.parent.glob("*.py") if path.is_file()}
    # A configuration with `_base_` contains only part of the settings.
    whole = [path for path, text in texts.items() if "backbone=dict(" in text and "_base_" not in text]
    return (texts[whole[0]], whole[0]) if len(whole) == 1 else ("", None)


def detectron2(recognised: Recognised, file: WeightFile) -> Recognised:
    """Apply the colour order, normalisation and strides in the `config.yaml` of detectron2.

    Files with bare names are converted from PyTorch networks (`tools/convert-torchvision-to-d2.py`), which expect RGB.

    Raises:
        ValueError: there is no such file, or timm has no network with its strides.
    """
    if not re.search(r"(^|[./])backbone\.(bottom_up\.)?$", recognised.part):
        note = "assumed RGB images with ImageNet's normalisation, as for networks converted for detectron2"
        return recognised.expecting(note)
    config = file.path.with_name("config.yaml")
    content = read_yaml(config) if config.is_file() else {}
    if not isinstance(model := content.get("MODEL"), Mapping):
        raise InputError(
            f"{file.path} is from a detectron2 training, but its config.yaml is not beside it: only that file shows "
            "the channel order, the normalisation and the strides that the weights expect; copy it there"
        )
    resnet = model.get("RESNETS", {})
    if resnet.get("STRIDE_IN_1X1", True):
        raise InputError(
            f"{config} has STRIDE_IN_1X1: true, as in Caffe, whose networks have strides in the first convolution of a "
            "block; no network of timm has them there, so features would differ"
        )
    if resnet.get("RES5_DILATION", 1) != 1:
        raise InputError(f"{config} has RES5_DILATION {resnet['RES5_DILATION']}: only 1 is supported")
    mean, std = (tuple(value / 255 for value in model[key]) for key in ("PIXEL_MEAN", "PIXEL_STD"))
    if content.get("INPUT", {}).get("FORMAT", "BGR") == "BGR":
        state = {**recognised.state, "conv1.weight": recognised.state["conv1.weight"].flip(1)}
        recognised, mean, std = replace(recognised, state=state), mean[::-1], std[::-1]
    return recognised.expecting(f"colours and normalisation are those of {config}", mean=mean, std=std)


# --------------------------------------------------------------------------------------------------------- shards


def find_whole_network(path: Path) -> Path | None:
    """Return the most recent unsharded network saved by DINOv2, DINOv3 or CAPI during sharded training."""
    found = [
        whole
        for folder in (path.parent, *path.absolute().parents[1:3])
        for whole in folder.glob("eval/*/*_checkpoint.pth")
    ]
    return max(found, key=lambda whole: whole.stat().st_mtime, default=None)
