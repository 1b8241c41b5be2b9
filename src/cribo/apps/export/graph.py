"""Export of a backbone as a graph that needs neither timm nor this package: by torch.export, and from it to ONNX.

Batch size, height and width are dynamic: the position embedding of a vision transformer is resized in the graph, as in
timm. The inputs are RGB images in 0-1 in float32, which the graph normalises and converts to its precision.
"""

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import padding
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from timm.models import Beit, Eva, NaFlexVit, VisionTransformer, Xcit
from torch import Tensor, nn
from torch._export.serde.serialize import SerializeError
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from cribo.apps.export.config import ExportOptions
from cribo.apps.export.target import Encode, Exporter, Step, Written, data_type, no_step
from cribo.base.console import log_level
from cribo.base.errors import InputError
from cribo.models import Backbone, describe, normalise

_TORCH_FILE, _ONNX_FILE = "backbone.pt2", "backbone.onnx"
_TRACED, _LEAST, _MOST = (5, 7), 2, 4096  # rows and columns of patches: of the traced image, minimum and maximum

_LOAD_TORCH = """\
import numpy, torch
encode = torch.export.load("{{folder}}/{file}").module()
pixels = numpy.asarray(picture.convert("RGB").resize(({width}, {height}), 3), "float32")  # 3: bicubic
images = torch.from_numpy(pixels / 255).permute(2, 0, 1)[None]  # RGB in 0-1
tokens, global_token = encode(images)"""
_LOAD_ONNX = """\
import numpy, onnxruntime
session = onnxruntime.InferenceSession("{{folder}}/{file}")
pixels = numpy.asarray(picture.convert("RGB").resize(({width}, {height}), 3), "float32")  # 3: bicubic
images = (pixels / 255).transpose(2, 0, 1)[None]  # RGB in 0-1
tokens, global_token = session.run(["tokens", "global_token"], {{"images": images}})"""

_METADATA = "cribo"


class _Graph(nn.Module):
    """Maps (B, 3, H, W) RGB images in 0-1 to tokens and global token."""

    def __init__(self, backbone: Backbone, layers: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.layers = layers

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone.encode(normalise(images, mean=self.backbone.mean, std=self.backbone.std), self.layers)
        return features.tokens, features.global_token


@torch.no_grad()
def trace(backbone: Backbone, options: ExportOptions) -> ExportedProgram:
    """Trace the graph of a backbone on the host, for any batch and image size or for one image of a fixed size.

    Raises:
        ValueError: the network cannot be traced.
    """
    patch = backbone.patch_size
    rows, columns = (Dim(name, min=_LEAST, max=_MOST) for name in ("rows", "columns"))
    free: dict[int, Any] = {0: Dim("batch", min=1), 2: patch * rows, 3: patch * columns}
    example = torch.rand(2, 3, _TRACED[0] * patch, _TRACED[1] * patch)
    shapes: dict[str, Any] | None = {"images": free}
    if options.fixed_size is not None:
        example, shapes = torch.rand(1, 3, *options.fixed_size), None
    backbone = copy.deepcopy(backbone).to(data_type(options))
    return trace_module(_Graph(backbone, options.layers).eval(), backbone, example, shapes)


@torch.no_grad()
def trace_module(
    graph: nn.Module, backbone: Backbone, example: Tensor, shapes: dict[str, Any] | None
) -> ExportedProgram:
    """Trace a module that contains a backbone, on the host.

    Args:
        graph: module of one tensor.
        backbone: its backbone.
        example: the tensor.
        shapes: dynamic sizes of the tensor; None for a graph of its sizes.

    Raises:
        ValueError: the network cannot be traced.
    """
    try:
        with _free_sizes(backbone.model) if shapes is not None else contextlib.nullcontext():
            return _without_places(torch.export.export(graph, (example,), dynamic_shapes=shapes))
    except Exception as error:  # torch.export raises various errors
        reason = str(error).partition("\n")[0]
        advice = f": add --fixed_size {backbone.image_size}" if shapes is not None else ""
        raise InputError(f"{backbone.name} cannot be traced ({type(error).__name__}: {reason}){advice}") from error


def _without_places(program: ExportedProgram) -> ExportedProgram:
    """Remove the places in source files on this machine, which each node of a graph records."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


@contextlib.contextmanager
def _free_sizes(model: Any) -> Iterator[None]:
    """Replace timm's size computations by traceable ones within this context.

    timm divides sizes as floats, which would fix the traced size in the graph (DINOv3's rotary embedding), or add a
    node that cannot be serialised (same padding).
    """
    rope, same_padding = getattr(model, "rope", None), padding.get_same_padding
    plain = isinstance(rope, RotaryEmbeddingDinoV3) and (rope.normalize_coords, rope.grid_indexing)
    padding.get_same_padding = _same_padding
    if plain == ("separate", "ij"):
        vars(rope)["_create_embed"] = partial(_rotation, rope)
    try:
        yield
    finally:
        padding.get_same_padding = same_padding
        if plain:
            vars(rope).pop("_create_embed", None)


def _same_padding(x: int, kernel_size: int, stride: int, dilation: int) -> int:
    """Return the padding of a layer whose stride divides its input, because the output stride divides all images.

    It depends on no size: otherwise the sizes in a graph would grow to nested expressions, layer by layer.
    """
    return max((kernel_size - 1) * dilation + 1 - stride, 0)


def _rotation(rope: Any, feat_shape: Sequence[int], no_aug: bool = False) -> Float[Tensor, "n d"]:
    """Return sine and cosine of the angles at the patch centres, whose coordinates range from -1 to 1."""
    axes = [2 * (torch.arange(size).float() + 0.5 + rope.grid_offset) / size - 1 for size in feat_shape]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.cat(rope._get_pos_embed_from_coords(centres), dim=-1)


# ---------------------------------------------------------------------------------------------------- torch.export


def write_torch(backbone: Backbone, folder: Path, options: ExportOptions, progress: Step = no_step) -> Written:
    """Write a file for `torch.export.load`."""
    with progress("tracing"):
        program = trace(backbone, options)
    with progress("writing"):
        save_torch(program, folder / _TORCH_FILE, _about(backbone, options), backbone.name)
    return Written(_load(_LOAD_TORCH, _TORCH_FILE, backbone, options), _notes(backbone, options))


def save_torch(program: ExportedProgram, path: Path, about: str, name: str) -> None:
    """Write a traced graph with its description, a JSON object of strings.

    Raises:
        InputError: PyTorch cannot store the graph; `name` is that of the network in the message.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No complete tensor found")  # for views of a larger tensor
            torch.export.save(program, content := io.BytesIO(), extra_files={f"{_METADATA}.json": about})
            # PyTorch's own writer ends the process when the disk is full.
            path.write_bytes(content.getbuffer())
    except SerializeError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"PyTorch cannot store the graph of {name} ({reason}): use --to onnx") from error


def load_torch(folder: Path, options: ExportOptions) -> Encode:
    """Load the file with PyTorch."""
    module = torch.export.load(folder / _TORCH_FILE).module()

    @torch.no_grad()
    def encode(images: Float[Tensor, "b c h w"]) -> tuple[Tensor, Tensor]:
        return module(images)

    return encode


# ------------------------------------------------------------------------------------------------------------ ONNX


def write_onnx(backbone: Backbone, folder: Path, options: ExportOptions, progress: Step = no_step) -> Written:
    """Write an ONNX file with named inputs and outputs, and a description of the network in its metadata."""
    with progress("tracing"):
        program = trace(backbone, options)
    with progress("converting to ONNX"):
        exported = convert_to_onnx(program, "images", ("tokens", "global_token"), options.opset)
    if options.fixed_size is None:
        graph = exported.model.graph
        name_sizes(graph.inputs[0], ("batch", None, "height", "width"))
        name_sizes(graph.outputs[0], ("batch", "patches", None))
        name_sizes(graph.outputs[1], ("batch", None))
    exported.model.metadata_props.update(json.loads(_about(backbone, options)))
    with progress("writing"):
        exported.save(folder / _ONNX_FILE)
    return Written(_load(_LOAD_ONNX, _ONNX_FILE, backbone, options), _notes(backbone, options))


def convert_to_onnx(program: ExportedProgram, image: str, outputs: Sequence[str], opset: int) -> Any:
    """Convert a traced graph to a program of torch.onnx, with these names of its input and its outputs."""
    # The exporters' messages are for their developers.
    with log_level(logging.ERROR, "torch.onnx", "onnxscript"), warnings.catch_warnings(action="ignore"):
        return torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=[image],
            output_names=[*outputs],
            verbose=False,
        )


def load_onnx(folder: Path, options: ExportOptions) -> Encode:
    """Load the file with onnxruntime, on the host."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / _ONNX_FILE, providers=["CPUExecutionProvider"])

    def encode(images: Float[Tensor, "b c h w"]) -> tuple[Tensor, Tensor]:
        tokens, global_token = session.run(["tokens", "global_token"], {"images": images.numpy()})
        return torch.from_numpy(tokens), torch.from_numpy(global_token)

    return encode


def name_sizes(value: Any, names: Sequence[str | None]) -> None:
    """Name the dynamic sizes of an input or output of an ONNX graph; None keeps a size."""
    for place, name in enumerate(names):
        if name is not None:
            value.shape[place] = name


def _about(backbone: Backbone, options: ExportOptions) -> str:
    """Return the description of the network for the file's metadata, as a JSON object of strings."""
    about = {
        **describe(backbone),
        "layers": options.layers,
        "precision": options.precision,
        "images": "RGB in 0-1 in float32, normalised in the graph",
    }
    return json.dumps({key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()})


def _load(lines: str, file: str, backbone: Backbone, options: ExportOptions) -> str:
    height, width = options.fixed_size or (backbone.image_size, backbone.image_size)
    return lines.format(file=file, height=height, width=width)


def _notes(backbone: Backbone, options: ExportOptions) -> tuple[str, ...]:
    patch = backbone.patch_size
    images = f"images are RGB in 0-1, with sides that are multiples of {patch} and at least {_LEAST * patch} pixels"
    if options.fixed_size is not None:
        images = f"one image at a time, RGB in 0-1, of {options.fixed_size[0]} x {options.fixed_size[1]} pixels (h x w)"
    return (images,) if backbone.readout is None else (images, "the readout layer is part of the graph")


def _unsupported_reason(backbone: Backbone, options: ExportOptions) -> str | None:
    """Return an error message for networks with window attention (Swin, MaxViT), which tracing fixes to one size."""
    if options.fixed_size is not None or isinstance(backbone.model, VisionTransformer | Eva):
        return None
    side = backbone.image_size
    if not backbone.takes_any_size:
        return f"{backbone.name} takes images of one size only: add --fixed_size {side}"
    # The networks with feature maps that timm builds for an image size.
    if "img_size" in backbone.arguments and not isinstance(backbone.model, Xcit | Beit | NaFlexVit):
        return f"{backbone.name} uses window attention, whose windows depend on the image size: add --fixed_size {side}"
    return None


TORCH_EXPORT = Exporter(write_torch, load_torch, _unsupported_reason)
ONNX = Exporter(write_onnx, load_onnx, _unsupported_reason)
