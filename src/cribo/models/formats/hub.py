"""Configurations of the Hugging Face hub beside weights: epsilon, activation and normalisation of images."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cribo.base.errors import InputError
from cribo.models.backbone import IMAGENET_MEAN, IMAGENET_STD
from cribo.models.formats.beside import HUB_CONFIG, HUB_IMAGES, WeightFile, read_beside
from cribo.models.formats.recognised import Expected, Recognised

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


def hub(recognised: Recognised, file: WeightFile, *, notes_without_mean: tuple[str, ...] = ()) -> Recognised:
    """Apply the configurations of transformers, timm or open_clip, if there are any.

    Raises:
        ValueError: a value is unsupported or malformed.
    """
    mean, std = _image_normalisation(file, recognised.expected)
    eps = "norm_eps" if recognised.expected.final_norm_eps is None else "final_norm_eps"
    return recognised.expecting(
        *(notes_without_mean if mean is None else ()),
        **{eps: file.tower.get("layer_norm_eps")},
        mean=mean,
        std=std,
        act_layer=_activation_of(file),
    )


def huggingface(recognised: Recognised, file: WeightFile) -> Recognised:
    """Apply the configurations of transformers; note that the format's normalisation is assumed if they lack it."""
    mean = recognised.expected.mean or IMAGENET_MEAN
    note = f"no {HUB_IMAGES} beside it: assumed a mean of {mean} for images"
    return hub(recognised, file, notes_without_mean=(note,))


def _activation_of(file: WeightFile) -> str | None:
    """Return timm's name of the activation in a configuration of transformers; None for gated MLPs."""
    config = file.tower
    if "hidden_act" not in config or config.get("use_swiglu_ffn") or config.get("use_gated_mlp"):
        return None
    if config["hidden_act"] not in _ACTIVATIONS:
        raise InputError(
            f"{file.path.with_name(HUB_CONFIG)} has hidden_act {config['hidden_act']!r}: it must be one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[config["hidden_act"]]


def _image_normalisation(
    file: WeightFile, expected: Expected
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return mean and standard deviation, of images between 0 and 1, by the files beside weights; None if not given.

    Values of a preprocessor_config.json replace those of the configuration. A factor by which images are multiplied
    before, other than 1/255, is included in both.
    """
    stated: Mapping[str, Any] = file.tower.get("pretrained_cfg") or {}
    images = {**stated, **read_beside(file.path, HUB_IMAGES)}
    source = file.path.with_name(HUB_IMAGES)
    mean = _channels(images.get("image_mean", images.get("mean")), "mean", source)
    std = _channels(images.get("image_std", images.get("std")), "std", source)
    scale = 255 * _number(images.get("rescale_factor", 1 / 255), "rescale_factor", source)
    if images.get("do_rescale") is False:
        scale = 255.0
        if images.get("do_normalize") is not False and max(std or (1.0,)) <= 1:
            raise InputError(
                f"{source} has do_rescale false with an image_std of {std or 'its default'}, which is for images "
                "between 0 and 1: set do_rescale to true, or give mean and std of images between 0 and 255"
            )
    if images.get("do_normalize") is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    if abs(scale - 1) < 1e-3:  # some files round 1/255
        return mean, std
    mean, std = mean or expected.mean or IMAGENET_MEAN, std or expected.std or IMAGENET_STD
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _channels(value: Any, name: str, source: Path) -> tuple[float, ...] | None:
    """Return one number for each channel; a file may give one for all."""
    if value is None:
        return None
    values = list(value) if isinstance(value, list | tuple) else [value] * 3
    if len(values) != 3:
        raise InputError(f"{source} has {len(values)} values of {name}, expected one for each of 3 channels")
    return tuple(_number(each, name, source, least=-math.inf if name == "mean" else 0.0) for each in values)


def _number(value: Any, name: str, source: Path, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < math.inf:
        raise InputError(f"{source} has {name} {value!r}, expected a number above {least:g}: correct it")
    return float(value)
