"""Saving and loading of trained segmenters in a single file."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.colours import Colour
from cribo.base.errors import InputError
from cribo.base.files import parse_json, write_whole
from cribo.base.redaction import masked
from cribo.data.labelled.crops import Scale, fitted_size, resize
from cribo.evaluation.segmentation.inference import Inference, segment_pixels, segment_with_softmax
from cribo.evaluation.segmentation.segmenter import MaskTransformer, Segmenter
from cribo.features.memory.pixels import PixelLabels
from cribo.models import describe
from cribo.models.backbone import RESERVED_ARGS
from cribo.models.building import build_network, check_network, limited_size
from cribo.models.hub.download import source_name
from cribo.models.licences import Licence, licences_of
from cribo.models.saving import numerics_of

SEGMENTER_FILE = "segmenter.safetensors"
"""File of the network with the best learning rate of `cribo evaluate segmenter`."""

_ENTRY = "cribo_segmenter"
_FORMAT = 2  # 1 has no `stretch` in `inference`


@dataclass(frozen=True)
class TrainedSegmenter:
    """A trained segmenter with its preprocessing and inference settings.

    Attributes:
        network: network in evaluation mode.
        classes: class names.
        palette: colour of each class in pictures.
        scale: scale to which images are resized; None keeps their size.
        inference: inference settings.
    """

    network: Segmenter
    classes: tuple[str, ...]
    palette: tuple[Colour, ...]
    scale: Scale | None
    inference: Inference

    @torch.no_grad()
    def segment(self, image: UInt8[Tensor, "chans h w"]) -> UInt8[Tensor, "h w"]:
        """Return the class of each pixel of an RGB image, on the network's device."""
        size = (image.shape[1], image.shape[2])
        return segment_pixels(self._resized(image), self.network.backbone, self._logits, size, self.inference)[0]

    @torch.no_grad()
    def label(self, image: UInt8[Tensor, "chans h w"]) -> PixelLabels:
        """Return the classes of `segment` with their softmax as confidence, which is not calibrated."""
        size = (image.shape[1], image.shape[2])
        return segment_with_softmax(self._resized(image), self.network.backbone, self._logits, size, self.inference)

    def _resized(self, image: UInt8[Tensor, "chans h w"]) -> UInt8[Tensor, "chans new_h new_w"]:
        device = next(self.network.backbone.parameters()).device
        return resize(image, fitted_size(image.shape[1], image.shape[2], self.scale)).to(device)

    def _logits(self, images: Float[Tensor, "b chans h w"]) -> Float[Tensor, "1 b c rows columns"]:
        return self.network(images)[None]


def save_segmenter(trained: TrainedSegmenter, path: str | os.PathLike[str]) -> None:
    """Write a segmenter to a file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    network, decoder = trained.network, trained.network.decoder
    layers = len(decoder.blocks)
    about = {
        "format": _FORMAT,
        "backbone": describe(network.backbone),
        "decoder": {**{name: getattr(decoder, name) for name in ("classes", "width", "heads")}, "layers": layers},
        "classes": trained.classes,
        "palette": trained.palette,
        "scale": trained.scale,
        "inference": dataclasses.asdict(trained.inference),
    }
    # Clone tensors, because safetensors rejects tensors that share memory.
    state = {name: value.detach().cpu().contiguous().clone() for name, value in network.state_dict().items()}

    def write(part: Path) -> None:
        try:
            safetensors.torch.save_file(state, part, {_ENTRY: json.dumps(masked(about))})
        except safetensors.SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error

    write_whole(Path(path), write)


def segmenter_file(path: str | os.PathLike[str]) -> Path:
    """Return the file of a segmenter, given it or its folder."""
    path = Path(path).expanduser()
    return path / SEGMENTER_FILE if path.is_dir() else path


def load_segmenter(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", *, trust: bool = False, name: str | None = None
) -> TrainedSegmenter:
    """Load a segmenter for inference.

    Args:
        path: folder of an evaluation, or its `segmenter.safetensors`.
        device: device of the network.
        trust: import the custom network that the file names. Use only with files from a trusted source.
        name: import path of the custom network, which allows it to be imported.

    Raises:
        Untrusted: the file names a custom network, and neither `trust` nor the same `name` is given.
        FileNotFoundError: the file does not exist.
        InputError: the file is corrupt, not a segmenter, or of a newer format.

    Example:
        >>> from cribo.data.reading import read_image
        >>> segmenter = load_segmenter("evaluations/segmenter-camvid-mine")  # doctest: +SKIP
        >>> labels = segmenter.segment(read_image("street.jpg"))  # doctest: +SKIP
        >>> segmenter.classes[labels[200, 300]]  # doctest: +SKIP
        'road'
    """
    file = segmenter_file(path)
    if not file.is_file():
        raise FileNotFoundError(f"no segmenter at {file}: give the folder of a finished `cribo evaluate segmenter`")
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            about = parse_json((content.metadata() or {}).get(_ENTRY, "null"))
        state = safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): copy it again") from error
    if not isinstance(about, dict):
        raise InputError(f"{file} is not a segmenter: give a file written by `cribo evaluate segmenter`")
    try:
        return _restore(about, state, file, device, trust=trust, name=name, source=source_name(str(path)))
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{file}: its description is damaged or does not fit its weights ({reason}): copy it again"
        ) from error


def _restore(
    about: Mapping[str, Any],
    state: Mapping[str, Tensor],
    file: Path,
    device: torch.device | str,
    *,
    trust: bool,
    name: str | None,
    source: str,
) -> TrainedSegmenter:
    """Build the network that a file describes, and load its weights."""
    if about["format"] > _FORMAT:
        raise InputError(
            f"{file} has format {about['format']}, this version of cribo reads up to {_FORMAT}: update cribo"
        )
    check_network(about["backbone"]["name"], file, trust=trust, given=name)
    network = _build(about["backbone"], about["decoder"])
    network.backbone.licences = licences_of(about["backbone"], Licence(source), file)
    network.load_state_dict(state)
    return TrainedSegmenter(
        network.eval().to(device),
        classes=tuple(about["classes"]),
        palette=tuple(tuple(colour) for colour in about["palette"]),
        scale=None if about["scale"] is None else tuple(about["scale"]),
        inference=Inference(**about["inference"]),
    )


def _build(of_backbone: Mapping[str, Any], of_decoder: Mapping[str, Any]) -> Segmenter:
    backbone = build_network(
        of_backbone["name"],
        args={name: value for name, value in of_backbone["args"].items() if name not in RESERVED_ARGS},
        image_size=of_backbone["image_size"],
        initialise=False,
    )
    backbone.mean, backbone.std = tuple(of_backbone["mean"]), tuple(of_backbone["std"])
    backbone.pixels = of_backbone.get("pixels")
    backbone.set_numerics(numerics_of(of_backbone))
    with limited_size():
        return Segmenter(backbone, MaskTransformer(backbone.embed_dim, **of_decoder))
