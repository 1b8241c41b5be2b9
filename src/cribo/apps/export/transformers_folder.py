"""Export to transformers: a folder for `AutoModel.from_pretrained`.

Vision transformers are exported as `Dinov2WithRegistersModel`, without registers and with layer scales of 1 if the
network has none. It is the only vision transformer of transformers that resizes its position embedding as timm does
(bicubic, antialiased), so that features agree on images of any size. Those whose positions are resized without
antialiasing (`bicubic`) are exported as `Dinov2Model`, which does the same. DINOv3 is exported as `DINOv3ViTModel`.
Other networks are exported as `TimmWrapperModel`, which reads timm's folder; networks with a readout as
`TimmWrapperForImageClassification`, with the readout as classifier.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from timm.layers.activations import GELUTanh
from timm.models import Eva, VisionTransformer
from torch import Tensor, nn

from cribo.apps.export import timm_folder
from cribo.apps.export.config import ExportOptions
from cribo.apps.export.target import Encode, Exporter, Step, Written, data_type, in_precision, no_step
from cribo.models import Backbone, normalise
from cribo.models.backbone import RGB
from cribo.models.channels import described_images
from cribo.models.formats.inverse import write_as
from cribo.models.formats.naming import State, fold_positions
from cribo.models.formats.reading import read_json
from cribo.models.formats.table import NAMINGS
from cribo.models.hub.timm_layout import how_to_encode, not_of_timm, resizes_otherwise
from cribo.models.saving import how_to_normalise, late_norm

_LOAD = """\
from transformers import AutoImageProcessor, AutoModel
model = AutoModel.from_pretrained("{folder}"){half}
processor = AutoImageProcessor.from_pretrained("{folder}")
images = processor(picture, return_tensors="pt")["pixel_values"]{half}
"""
_LOAD_READOUT = """\
from transformers import AutoImageProcessor, AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained("{folder}").timm_model{half}
processor = AutoImageProcessor.from_pretrained("{folder}")
images = processor(picture, return_tensors="pt")["pixel_values"]{half}
"""
_TOKENS = "tokens = model(images).last_hidden_state[:, {prefix}:]"
_MAP = "feature_map = model(images).last_hidden_state"
_TIMM_TOKENS = "tokens = model.forward_features(images)[:, {prefix}:]"
_TIMM_MAP = "feature_map = model.forward_features(images)"

_POSITIONS = "embeddings.position_embeddings"
_NAMING = {naming.name: naming for naming in NAMINGS}
_BY_WRAPPER = "transformers loads it as {name}, which requires timm"


def write(backbone: Backbone, folder: Path, options: ExportOptions, progress: Step = no_step) -> Written:
    """Write the network as a native model of transformers if possible, otherwise in timm's layout."""
    import transformers

    with progress("writing"), _quiet():
        model = _native(backbone, transformers)
        if model is not None:
            model.to(data_type(options)).save_pretrained(folder)
            size = {"height": backbone.image_size, "width": backbone.image_size}
            mean, std = list(backbone.mean), list(backbone.std)
            processor = transformers.ViTImageProcessor(
                size=size, resample=3, image_mean=mean, image_std=std, do_convert_rgb=backbone.in_chans == RGB
            )
            processor.save_pretrained(folder)
    if model is not None:
        prefix = 1 + getattr(model.config, "num_register_tokens", 0)
        encode = in_precision(_LOAD + _TOKENS.replace("{prefix}", str(prefix)), options)
        return Written(
            _of_channels(encode, backbone), (f"transformers loads it as {type(model).__name__}", *_images(backbone))
        )
    notes = timm_folder.write(backbone, folder, options, progress).notes
    if backbone.readout is None:
        encode, name = _LOAD + how_to_encode(backbone, _MAP, _TOKENS), "TimmWrapperModel"
    else:
        encode = _LOAD_READOUT + how_to_encode(backbone, _TIMM_MAP, _TIMM_TOKENS)
        name = "TimmWrapperForImageClassification"
    return Written(_of_channels(in_precision(encode, options), backbone), (*notes, _BY_WRAPPER.format(name=name)))


def _images(backbone: Backbone) -> tuple[str, ...]:
    is_usual = backbone.in_chans == RGB and not backbone.pixels
    return () if is_usual else (f"images are {described_images(backbone)}",)


def _of_channels(code: str, backbone: Backbone) -> str:
    """Rewrite code that reads a picture to take `pixels`, a uint8 array (h, w, C); image processors are for RGB."""
    if backbone.in_chans == RGB:
        return code
    pixels = f"{how_to_normalise(backbone)}  # of pixels (height, width, {backbone.in_chans}) in uint8"
    lines = [line for line in code.splitlines() if not line.startswith("processor =")]
    half = ".half()" if code.find(").half()") >= 0 else ""
    lines = [pixels.replace("[None]", f"[None]{half}") if line.startswith("images =") else line for line in lines]
    return "\n".join(["import torch", *(line.replace("AutoImageProcessor, ", "") for line in lines)])


def load(folder: Path, options: ExportOptions) -> Encode:
    """Load the folder with transformers, with the normalisation of its image processor."""
    from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

    has_readout = bool(read_json(folder / "config.json").get("num_classes"))
    with _quiet():
        kind = AutoModelForImageClassification if has_readout else AutoModel
        model: Any = kind.from_pretrained(folder).eval().to(data_type(options))
        processor: Any = AutoImageProcessor.from_pretrained(folder)
    about = getattr(processor, "data_config", None) or {"mean": processor.image_mean, "std": processor.image_std}

    @torch.no_grad()
    def encode(images: Float[Tensor, "b c h w"]) -> tuple[Tensor, Tensor]:
        images = normalise(images, mean=about["mean"], std=about["std"]).to(data_type(options))
        if has_readout:
            return timm_folder.split(model.timm_model, model.timm_model.forward_features(images))
        output = model(images)
        if hasattr(model, "timm_model"):
            return timm_folder.split(model.timm_model, output.last_hidden_state)
        prefix = 1 + getattr(model.config, "num_register_tokens", 0)
        return output.last_hidden_state[:, prefix:], output.pooler_output

    return encode


def unsupported_reason(backbone: Backbone, options: ExportOptions) -> str | None:
    """Return an error message for networks that transformers cannot load, or would load without the final norm."""
    if (reason := not_of_timm(backbone)) is not None:
        return reason
    if backbone.readout is None and late_norm(backbone.model) is not None:
        return f"the final norm of {backbone.name} follows its pooling and is not applied to tokens"
    return None if _becomes_dinov2(backbone) else resizes_otherwise(backbone)


def _may_be_native(backbone: Backbone) -> bool:
    """Whether transformers may have a model like the network; others are wrapped."""
    network: Any = backbone.model
    return (
        isinstance(backbone.model, VisionTransformer | Eva)
        and network.cls_token is not None
        and backbone.readout is None
        and _activation(network.blocks[0].mlp) is not None
        and network.embed_dim % network.blocks[0].attn.num_heads == 0
    )


def _becomes_dinov2(backbone: Backbone) -> bool:
    """Whether the network is exported as `Dinov2Model`, which resizes without antialiasing and has no registers."""
    return backbone.numerics.positions == "bicubic" and _may_be_native(backbone) and backbone.model.reg_token is None


def _native(backbone: Backbone, transformers: Any) -> Any | None:
    """Convert the network to a native model of transformers; return None if none matches."""
    network: Any = backbone.model
    if not _may_be_native(backbone):
        return None
    common = {
        "num_channels": backbone.in_chans,
        "hidden_size": network.embed_dim,
        "num_hidden_layers": len(network.blocks),
        "num_attention_heads": network.blocks[0].attn.num_heads,
        "layer_norm_eps": network.norm.eps,
        "patch_size": backbone.patch_size,
        "image_size": backbone.image_size,
        "hidden_act": _activation(network.blocks[0].mlp),
    }
    build = _as_dinov3 if isinstance(network, Eva) else _as_dinov2
    try:
        model, naming, state = build(backbone, common, transformers)
        own = {key: value for key, value in model.state_dict().items() if not key.endswith("mask_token")}
        zero = (_POSITIONS,) if _POSITIONS in own and "reg_token" in state else ()
        tensors = write_as(_NAMING[naming], state, {key: value.shape for key, value in own.items()}, zero=zero)
    except ValueError:  # the network has parts that the model lacks
        return None
    model.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        model.embeddings.mask_token.zero_()
    return model.eval()


def _as_dinov2(backbone: Backbone, common: dict[str, Any], transformers: Any) -> tuple[Any, str, State]:
    network, block = backbone.model, backbone.model.blocks[0]
    state: State = {key: value for key, value in network.state_dict().items() if key not in backbone.unused_parameters}
    registers = state.pop("reg_token", state["cls_token"][:, :0])
    positions = state["pos_embed"].shape[1] - (backbone.image_size // backbone.patch_size) ** 2
    state = fold_positions({**state, "register_tokens": registers}, "register_tokens", positions)
    for number in range(len(network.blocks)):
        for scale in ("ls1", "ls2"):
            state.setdefault(f"blocks.{number}.{scale}.gamma", torch.ones(network.embed_dim))
    is_gated = block.mlp.fc1.out_features == 2 * block.mlp.fc2.in_features
    common |= {
        "mlp_ratio": 4 if is_gated else block.mlp.fc1.out_features // network.embed_dim,
        "use_swiglu_ffn": is_gated,
        "qkv_bias": block.attn.qkv.bias is not None,
    }
    if _becomes_dinov2(backbone):
        del state["reg_token"]
        state["pos_embed"] = torch.cat([torch.zeros_like(state["cls_token"]), state["pos_embed"]], dim=1)
        return transformers.Dinov2Model(transformers.Dinov2Config(**common)), "Hugging Face DINOv2", state
    config = transformers.Dinov2WithRegistersConfig(**common, num_register_tokens=registers.shape[1])
    return transformers.Dinov2WithRegistersModel(config), "Hugging Face DINOv2", state


def _as_dinov3(backbone: Backbone, common: dict[str, Any], transformers: Any) -> tuple[Any, str, State]:
    network, block = backbone.model, backbone.model.blocks[0]
    state: State = {key: value for key, value in network.state_dict().items() if key not in backbone.unused_parameters}
    state.setdefault("reg_token", state["cls_token"][:, :0])
    has_bias = "blocks.0.attn.q_bias" in state
    config = transformers.DINOv3ViTConfig(
        **common,
        intermediate_size=block.mlp.fc2.in_features,
        use_gated_mlp="blocks.0.mlp.fc1_g.weight" in state,
        query_bias=has_bias,
        key_bias=False,
        value_bias=has_bias,
        num_register_tokens=state["reg_token"].shape[1],
    )
    if not state["reg_token"].numel():
        del state["reg_token"]  # the naming treats it as optional
    return transformers.DINOv3ViTModel(config), "Hugging Face DINOv3", state


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and warnings of transformers."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _activation(mlp: Any) -> str | None:
    """Return the name in transformers of the activation of an MLP."""
    names = {nn.GELU: "gelu", GELUTanh: "gelu_pytorch_tanh", nn.SiLU: "silu"}
    return next((name for kind, name in names.items() if type(getattr(mlp, "act", None)) is kind), None)


TRANSFORMERS = Exporter(write, load, unsupported_reason)
