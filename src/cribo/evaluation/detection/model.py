"""YOLOS models of transformers, initialised with the weights of a backbone."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from timm.layers.activations import GELUTanh
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from timm.layers.weight_init import trunc_normal_
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from cribo.base.errors import ConfigError, MissingPackage
from cribo.base.packages import install_command
from cribo.evaluation.detection.config import ADVICE
from cribo.models import Backbone
from cribo.models.backbone import RGB
from cribo.models.formats.inverse import write_as
from cribo.models.formats.naming import State
from cribo.models.formats.table import NAMINGS
from cribo.models.linear import use_onednn

if TYPE_CHECKING:
    from transformers import YolosForObjectDetection

_NAMES = next(naming for naming in NAMINGS if naming.name == "Hugging Face ViT")
_POSITIONS = "embeddings.position_embeddings"
_NEW = ("detection_tokens", "mid_position_embeddings")  # suffixes; prefixes differ between versions of transformers
_ACTIVATIONS = {nn.GELU: "gelu", GELUTanh: "gelu_pytorch_tanh"}
_STD = 0.02  # standard deviation of new embeddings


def build_yolos(
    backbone: Backbone, classes: Sequence[str], *, positions: Sequence[int], tokens: int = 100, seed: int = 0
) -> "YolosForObjectDetection":
    """Build a YOLOS detector with the blocks of a backbone.

    Detection tokens are appended to [CLS] and patches; two MLPs predict a class and a box from their last features. The
    position embeddings of the detection tokens, and those added after every block except the last, are new (truncated
    normal with standard deviation 0.02; YOLOS, section 3 and its `models/backbone.py`). Layer scales are merged into
    the preceding linear layers. The position embedding is resized as in YOLOS, bicubic without anti-aliasing.

    Args:
        backbone: a plain vision transformer of timm; not modified.
        classes: class names.
        positions: image height and width in pixels of the stored position embeddings, in the first layer and between
            the others; for images of other sizes they are interpolated in each step.
        tokens: number of detection tokens, the maximum number of objects per image.
        seed: seed of the new weights.

    Raises:
        ImportError: transformers or scipy is not installed.
        ConfigError: the network is not a plain vision transformer, or positions are smaller than a patch.
    """
    transformers = require_transformers()
    reason = refusal(backbone)
    if reason is not None:
        raise ConfigError(f"YOLOS cannot be built on {backbone.name}: {reason}; {ADVICE}")
    height, width = (side // backbone.patch_size * backbone.patch_size for side in positions)
    if min(height, width) < backbone.patch_size:
        raise ConfigError(f"positions must be at least a patch of {backbone.patch_size} pixels, got {positions}")
    network = backbone.model
    config = transformers.YolosConfig(
        hidden_size=network.embed_dim,
        num_hidden_layers=len(network.blocks),
        num_attention_heads=network.blocks[0].attn.num_heads,
        intermediate_size=network.blocks[0].mlp.fc1.out_features,
        hidden_act=_ACTIVATIONS[type(network.blocks[0].mlp.act)],
        layer_norm_eps=_last_norm(network)[1].eps,
        qkv_bias=network.blocks[0].attn.qkv.bias is not None,
        image_size=[height, width],
        patch_size=backbone.patch_size,
        num_detection_tokens=tokens,
        num_labels=len(classes),
        id2label=dict(enumerate(classes)),
        label2id={name: number for number, name in enumerate(classes)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = transformers.YolosForObjectDetection(config)
        _begin(model, backbone)
    return use_onednn(model)


def require_transformers() -> Any:
    """Import and return transformers.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        import transformers
        from transformers import YolosForObjectDetection  # noqa: F401
    except ImportError as error:
        raise MissingPackage(f"detection needs transformers ({error}): {install_command('detection')}") from error
    return transformers


def save_yolos(model: Any, folder: Path) -> None:
    """Save a detector in the format of transformers, without its progress bar."""
    from transformers.utils import logging

    has_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if has_bars:
            logging.enable_progress_bar()


def refusal(backbone: Backbone) -> str | None:
    """Return the reason why YOLOS does not support a backbone; None if it does."""
    network: Any = backbone.model
    if type(network) is not VisionTransformer or any(type(block) is not Block for block in network.blocks):
        return "it is not a plain vision transformer"
    attention: Any = network.blocks[0].attn
    mlp: Any = network.blocks[0].mlp
    plain_attention = type(attention) is Attention and getattr(attention, "gate", None) is None
    activation = type(getattr(mlp, "act", None))
    reasons = {
        f"it takes images of {backbone.in_chans} channels": backbone.in_chans != RGB,
        "it has no [CLS] token": network.cls_token is None,
        f"it has {network.num_reg_tokens} register tokens": network.num_reg_tokens > 0,
        "it has no position embedding": network.pos_embed is None,
        "it has a norm before its blocks": _is_there(network.norm_pre),
        "it has a norm after its patch embedding": _is_there(network.patch_embed.norm),
        "it has no norm after its blocks": not _is_there(_last_norm(network)[1]),
        "its attention is not plain self-attention": not plain_attention
        or _is_there(attention.q_norm)
        or _is_there(attention.norm),
        f"its blocks have a {type(mlp).__name__} with {activation.__name__}": type(mlp) is not Mlp
        or activation not in _ACTIVATIONS
        or _is_there(mlp.norm),
        "its linear layers have no biases": attention.proj.bias is None or network.patch_embed.proj.bias is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_there(layer: Any) -> bool:
    return not isinstance(layer, nn.Identity)


def _last_norm(network: Any) -> tuple[str, Any]:
    """Return name and module of the last norm, which follows the pooling in networks with average pooling."""
    return ("fc_norm", network.fc_norm) if isinstance(network.norm, nn.Identity) else ("norm", network.norm)


def _begin(model: Any, backbone: Backbone) -> None:
    """Load the backbone's weights into a model, and initialise the new parameters."""
    own = {key: value.shape for key, value in model.vit.state_dict().items() if not key.endswith(_NEW)}
    state = _plain_state(backbone)
    size, dim = state["pos_embed"].shape[1:]
    tensors = write_as(_NAMES, state, {**own, _POSITIONS: torch.Size((1, size, dim))})
    embeddings = model.vit.embeddings
    new = torch.empty(1, embeddings.detection_tokens.shape[1], dim)
    patches = embeddings.patch_embeddings
    grid = patches.image_size[0] // patches.patch_size[0], patches.image_size[1] // patches.patch_size[1]
    positions = tensors.pop(_POSITIONS)
    tensors[_POSITIONS] = torch.cat((positions[:, :1], _resized(positions[:, 1:], grid), _drawn(new)), dim=1)
    model.vit.load_state_dict(tensors, strict=False)
    for name, parameter in model.vit.named_parameters():
        if name.endswith(_NEW):
            _drawn(parameter)
    # Initialised as in YOLOS; transformers uses a standard deviation of 0.02.
    for head in (model.class_labels_classifier, model.bbox_predictor):
        for layer in head.layers:
            layer.reset_parameters()


def _plain_state(backbone: Backbone) -> State:
    """Return timm's state dict with layer scales merged, and with the last norm named `norm`."""
    network: Any = backbone.model
    state: State = {key: value for key, value in network.state_dict().items() if key not in backbone.unused_parameters}
    name, _ = _last_norm(network)
    for part in ("weight", "bias"):
        state[f"norm.{part}"] = state.pop(f"{name}.{part}")
    for number in range(len(network.blocks)):
        for scale, layer in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
            gamma = state.pop(f"blocks.{number}.{scale}.gamma", None)
            if gamma is not None:
                weight, bias = f"blocks.{number}.{layer}.weight", f"blocks.{number}.{layer}.bias"
                state[weight], state[bias] = gamma[:, None] * state[weight], gamma * state[bias]
    if network.no_embed_class:
        state["pos_embed"] = nn.functional.pad(state["pos_embed"], (0, 0, 1, 0))
    return state


def _drawn(embedding: Tensor) -> Tensor:
    return trunc_normal_(embedding, std=_STD)


def _resized(positions: Float[Tensor, "1 n d"], grid: tuple[int, int]) -> Float[Tensor, "1 m d"]:
    side = round(positions.shape[1] ** 0.5)
    square = positions.mT.unflatten(2, (side, side))
    return nn.functional.interpolate(square, size=grid, mode="bicubic", align_corners=False).flatten(2).mT
