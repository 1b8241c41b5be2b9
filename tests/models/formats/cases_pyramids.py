"""Cases of ConvNeXt and Swin in the files of each project."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from .architectures import Draw, Outputs, State, _by_head, _depth, _gelu_mlp, _linear, _norm
from .cases import OPTIMISER, RESNET_SIZES, Network, case, junk, randomise, save, under

DIMS, DEPTHS = (8, 16, 24, 32), (1, 2, 1, 1)

# ------------------------------------------------------------------------------------------------------- ConvNeXt


def convnext_state(seed: int, *, version: int) -> State:
    """Tensors of `convnext`."""
    draw = Draw(seed)
    state = draw.norm("norm", DIMS[-1])
    for stage, (inputs, dim, depth) in enumerate(zip((3, *DIMS), DIMS, DEPTHS, strict=False)):
        convolution, norm = (1, 0) if stage else (0, 1)
        name = f"downsample_layers.{stage}"
        state |= draw.convolution(f"{name}.{convolution}", inputs, dim, 2 if stage else 4, bias=True)
        state |= draw.norm(f"{name}.{norm}", inputs if stage else dim)
        for block in (f"stages.{stage}.{number}" for number in range(depth)):
            state |= {f"{block}.dwconv.weight": draw(dim, 1, 7, 7), f"{block}.dwconv.bias": draw(dim)}
            state |= {**draw.norm(f"{block}.norm", dim), **draw.linear(f"{block}.pwconv1", dim, 4 * dim)}
            state |= draw.linear(f"{block}.pwconv2", 4 * dim, dim)
            if version == 1:
                state[f"{block}.gamma"] = draw(dim, mean=0.8)
            else:
                state |= {f"{block}.grn.{part}": draw(1, 1, 1, 4 * dim) for part in ("gamma", "beta")}
    return state


@torch.no_grad()
def convnext(state: State, images: Tensor) -> Outputs:
    """facebookresearch/ConvNeXt, models/convnext.py; facebookresearch/ConvNeXt-V2, models/convnextv2.py and utils.py.

    The global token is the norm of the mean of the last map. Features of positions are defined as each position's norm.
    """

    def convolve(x: Tensor, name: str, **options: int) -> Tensor:
        """Convolution of channels-last maps."""
        convolved = F.conv2d(x.permute(0, 3, 1, 2), state[f"{name}.weight"], state[f"{name}.bias"], **options)
        return convolved.permute(0, 2, 3, 1)

    x = images.permute(0, 2, 3, 1)
    for stage in range(4):
        if stage == 0:
            x = _norm(convolve(x, "downsample_layers.0.0", stride=4), state, "downsample_layers.0.1", 1e-6)
        else:
            name = f"downsample_layers.{stage}"
            x = convolve(_norm(x, state, f"{name}.0", 1e-6), f"{name}.1", stride=2)
        for block in (f"stages.{stage}.{number}" for number in range(_depth(state, f"stages.{stage}."))):
            y = _norm(convolve(x, f"{block}.dwconv", padding=3, groups=x.shape[3]), state, f"{block}.norm", 1e-6)
            y = F.gelu(_linear(y, state, f"{block}.pwconv1"))
            if f"{block}.grn.gamma" in state:
                energy = y.square().sum(dim=(1, 2), keepdim=True).sqrt()
                response = y * energy / (energy.mean(dim=-1, keepdim=True) + 1e-6)
                y = state[f"{block}.grn.gamma"] * response + state[f"{block}.grn.beta"] + y
            x = x + state.get(f"{block}.gamma", torch.ones(())) * _linear(y, state, f"{block}.pwconv2")
    return _norm(x.mean(dim=(1, 2)), state, "norm", 1e-6), _norm(x, state, "norm", 1e-6).flatten(1, 2)


def convnext_of_its_authors(folder: Path, version: int) -> tuple[Path, Network, None]:
    state = convnext_state(1, version=version)
    return save(folder, {"model": {**state, **junk("head.weight", "head.bias")}}), partial(convnext, state), None


for about, version in (("", 1), ("V2", 2)):
    case("ConvNeXt", about, sizes=RESNET_SIZES)(partial(convnext_of_its_authors, version=version))


def huggingface_convnext(folder: Path, version: str, is_classifier: bool) -> tuple[Path, Network, None]:
    """A folder as `save_pretrained` writes it, or one file without its configuration.

    The original normalises the pooled features; here, each position of the last map is also normalised.
    """
    import transformers

    config = getattr(transformers, f"ConvNext{version}Config")(hidden_sizes=list(DIMS), depths=list(DEPTHS))
    model: Any = getattr(transformers, f"ConvNext{version}Model")(config).eval()
    randomise(model, 1)

    @torch.no_grad()
    def encode(images: Tensor) -> Outputs:
        output = model(images)
        return output.pooler_output, model.layernorm(output.last_hidden_state.flatten(2).mT)

    if is_classifier:
        content = {**under("convnext.", model.state_dict()), **junk("classifier.weight", "classifier.bias")}
        return save(folder, content), encode, None
    model.save_pretrained(folder)
    return folder, encode, None


for version in ("", "V2"):
    for is_classifier in (False, True):
        about = ", ".join(filter(None, (version, "classifier without configuration" if is_classifier else "")))
        write = partial(huggingface_convnext, version=version, is_classifier=is_classifier)
        case("Hugging Face ConvNeXt", about, sizes=RESNET_SIZES, final_norm_eps=1e-12)(write)


def timm_convnext(folder: Path, name: str, is_tower: bool = False) -> tuple[Path, Network, None]:
    """Timm's features: each position after the last norm, even if it follows pooling."""
    model: Any = timm.create_model(name, depths=(1, 1, 1, 1), dims=DIMS, num_classes=5).eval()
    randomise(model, 1)

    @torch.no_grad()
    def encode(images: Tensor) -> Outputs:
        places = model.forward_features(images)
        normed = model.head.norm(places) if hasattr(model.head, "norm") else places
        return model.forward_head(places, pre_logits=True), normed.flatten(2).mT

    state = model.state_dict()
    if is_tower:
        state = {**under("visual.trunk.", state), **junk("visual.head.proj.weight", "text.token_embedding.weight")}
        state["logit_scale"] = torch.tensor(1.0)
    return save(folder, state), encode, None


for about, name in (
    ("", "convnext_tiny"),
    ("convolutions in the MLP", "convnext_atto"),
    ("V2", "convnextv2_atto"),
    ("norm before pooling", "convnext_tiny_hnf"),
):
    case("timm ConvNeXt", about, sizes=RESNET_SIZES)(partial(timm_convnext, name=name))

case("open_clip, tower of timm", "ConvNeXt", sizes=RESNET_SIZES, mean=(0.48145466, 0.4578275, 0.40821073))(
    partial(timm_convnext, name="convnext_base", is_tower=True)
)

# ----------------------------------------------------------------------------------------------------------- Swin

WINDOW, HEADS = 4, (1, 2, 4)
# Windows of 4 x 4 divide each of the maps: the original supports no other sizes.
SWIN_SIZES = ((64, 64), (128, 128), (64, 128), (128, 192))
# For other sizes, each project pads maps differently.
PADDED_SIZES = ((64, 64), (96, 96), (64, 128), (80, 128))


def swin_state(seed: int, *, dim: int = 16) -> State:
    """Tensors of `swin`, with the buffers in its files."""
    draw = Draw(seed)
    state = {**draw.convolution("patch_embed.proj", 3, dim, 4, bias=True), **draw.norm("patch_embed.norm", dim)}
    places = torch.cartesian_prod(torch.arange(WINDOW), torch.arange(WINDOW))
    offsets = places[:, None] - places[None] + WINDOW - 1
    for stage, heads in enumerate(HEADS):
        width = dim * 2**stage
        for block in (f"layers.{stage}.blocks.{number}" for number in range(2)):
            state |= {**draw.norm(f"{block}.norm1", width), **draw.norm(f"{block}.norm2", width)}
            state |= draw.linear(f"{block}.attn.qkv", width, 3 * width)
            state |= draw.linear(f"{block}.attn.proj", width, width)
            state[f"{block}.attn.relative_position_bias_table"] = draw((2 * WINDOW - 1) ** 2, heads, std=1.0)
            state[f"{block}.attn.relative_position_index"] = offsets[..., 0] * (2 * WINDOW - 1) + offsets[..., 1]
            state |= draw.linear(f"{block}.mlp.fc1", width, 4 * width)
            state |= draw.linear(f"{block}.mlp.fc2", 4 * width, width)
        if stage + 1 < len(HEADS):
            merging = f"layers.{stage}.downsample"
            state |= draw.norm(f"{merging}.norm", 4 * width)
            state |= draw.linear(f"{merging}.reduction", 4 * width, 2 * width, bias=False)
    return {**state, **draw.norm("norm", dim * 2 ** (len(HEADS) - 1)), "layers.0.blocks.1.attn_mask": torch.zeros(2, 2)}


def windows_of(values: Tensor) -> Tensor:
    """Reshape (B, h, w, C) to (B, windows, positions, C)."""
    parts = values.unflatten(1, (-1, WINDOW)).unflatten(3, (-1, WINDOW)).transpose(2, 3)
    return parts.flatten(3, 4).flatten(1, 2)


def attend_in_windows(state: State, block: str, x: Tensor, heads: int, shift: int) -> Tensor:
    """Attend within windows, to positions that are also neighbours in the image."""
    _, height, width, dim = x.shape
    region = torch.zeros(height, width)
    if shift:  # positions from the other side of the image are separate regions
        for axis, length in ((0, height), (1, width)):
            far = (torch.arange(length) >= length - shift).float() * (axis + 1)
            region = region + (far[:, None] if axis == 0 else far[None])
    parts = windows_of(torch.roll(x, (-shift, -shift), (1, 2)))
    regions = windows_of(region[None, ..., None])[0, ..., 0]
    query, key, value = (
        _by_head(part.flatten(0, 1), heads).unflatten(0, parts.shape[:2])
        for part in _linear(parts, state, f"{block}.qkv").chunk(3, dim=-1)
    )  # each (B, windows, heads, positions, D / heads)
    table, index = (state[f"{block}.relative_position_{name}"] for name in ("bias_table", "index"))
    scores = query @ key.mT / (dim // heads) ** 0.5 + table[index].permute(2, 0, 1)
    scores = scores - 100.0 * (regions[:, None, :, None] != regions[:, None, None, :])
    mixed = _linear((scores.softmax(-1) @ value).transpose(2, 3).flatten(3), state, f"{block}.proj")
    grid = mixed.unflatten(1, (height // WINDOW, width // WINDOW)).unflatten(3, (WINDOW, WINDOW)).transpose(2, 3)
    return torch.roll(grid.flatten(3, 4).flatten(1, 2), (shift, shift), (1, 2))


@torch.no_grad()
def swin(state: State, images: Tensor) -> Outputs:
    """microsoft/Swin-Transformer, models/swin_transformer.py: stages merge patches at their end.

    The original is built for one image size, and shifts the windows of maps that are larger than a window.
    """
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=4)
    x = _norm(x.permute(0, 2, 3, 1), state, "patch_embed.norm", 1e-5)
    for stage, heads in enumerate(HEADS):
        for number in range(2):
            block = f"layers.{stage}.blocks.{number}"
            shift = WINDOW // 2 if number % 2 and min(x.shape[1:3]) > WINDOW else 0
            x = x + attend_in_windows(state, f"{block}.attn", _norm(x, state, f"{block}.norm1", 1e-5), heads, shift)
            x = x + _gelu_mlp(_norm(x, state, f"{block}.norm2", 1e-5), state, block)
        merging = f"layers.{stage}.downsample"
        if f"{merging}.norm.weight" in state:
            corners = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
            x = _linear(_norm(corners, state, f"{merging}.norm", 1e-5), state, f"{merging}.reduction")
    x = _norm(x, state, "norm", 1e-5).flatten(1, 2)
    return x.mean(1), x


@case("Swin", sizes=SWIN_SIZES, norm_eps=1e-5)
def swin_of_its_authors(folder: Path):
    state = swin_state(1)
    content = {"model": {**state, **junk("head.weight", "head.bias")}, "optimizer": OPTIMISER, "epoch": 1}
    return save(folder, content), partial(swin, state), None


@case("SimMIM", "Swin", sizes=SWIN_SIZES, norm_eps=1e-5)
def swin_of_simmim(folder: Path):
    state = swin_state(1)
    encoder = under("encoder.", {**state, "mask_token": torch.ones(1, 1, 16)})
    content = {"model": {**encoder, **junk("decoder.0.weight", "decoder.0.bias")}, "optimizer": OPTIMISER, "epoch": 1}
    return save(folder, content), partial(swin, state), None


@case("timm Swin", sizes=PADDED_SIZES, norm_eps=1e-5)
def timm_swin(folder: Path):
    settings = {"embed_dim": 32, "depths": (2, 2, 2), "num_heads": (1, 2, 4), "window_size": WINDOW, "num_classes": 5}
    model: Any = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, strict_img_size=False, **settings)
    randomise(model.eval(), 1)

    @torch.no_grad()
    def encode(images: Tensor) -> Outputs:
        places = model.forward_features(images).flatten(1, 2)
        return places.mean(1), places

    return save(folder, model.state_dict()), encode, None


def huggingface_swin(form: str) -> Callable[[Path], tuple[Path, Network, None]]:
    """A folder as `save_pretrained` writes it, or one file with the names that transformers 5 has in memory."""

    def write(folder: Path) -> tuple[Path, Network, None]:
        import transformers

        settings: dict[str, Any] = {"embed_dim": 16, "depths": [1, 2, 2], "num_heads": list(HEADS)}
        config = transformers.SwinConfig(**settings, window_size=WINDOW, image_size=64)
        masked = transformers.SwinForMaskedImageModeling(config) if form == "masked" else None
        model: Any = transformers.SwinModel(config) if masked is None else masked.swin
        randomise(model.eval(), 1)

        @torch.no_grad()
        def encode(images: Tensor) -> Outputs:
            # The modules store the shift of the last image.
            output = copy.deepcopy(model)(images)
            return output.last_hidden_state.mean(1), output.last_hidden_state

        if form == "file":
            return save(folder, under("swin.", model.state_dict())), encode, None
        (model if masked is None else masked).save_pretrained(folder)
        return folder, encode, None

    return write


for about, form in (("", "folder"), ("without configuration", "file"), ("masked image modelling", "masked")):
    case("Hugging Face Swin", about, sizes=PADDED_SIZES, norm_eps=1e-5)(huggingface_swin(form))
