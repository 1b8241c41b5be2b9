"""Cases for each row of `cribo.models.formats.table`: a small file in the project's format, and its features.

A row can have several cases. Files `cases_*.py` in this folder add more with the same decorator.
`benchmarks.checkpoints` writes their results into docs/checkpoints.md.
"""

import argparse
import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision
from torch import Tensor, nn

from cribo.models import Backbone, load_backbone
from cribo.models.positions import Resizing

from . import architectures
from .architectures import (
    Outputs,
    State,
    antialiased_bicubic,
    bicubic,
    bilinear,
    dinov3,
    dinov3_state,
    flax_arrays,
    flax_vit,
    jax_image_resize,
    mmsegmentation_state,
    mmsegmentation_vit,
    resnet,
    resnet_state,
    scaled_bicubic,
    scipy_zoom,
    sines_and_cosines,
    vit_state,
)

Network = Callable[[Tensor], Outputs]
IMAGENET = (0.485, 0.456, 0.406)
HALF = (0.5, 0.5, 0.5)
VIT_SIZES = ((48, 48), (80, 80), (64, 32))
SIZES_14 = ((42, 42), (70, 70), (56, 28))
RESNET_SIZES = ((64, 64), (96, 96), (128, 64))


@dataclass(frozen=True)
class Case:
    """A file to load, and the expected result.

    Attributes:
        row: name of the row of the table.
        about: difference from the row's other cases; empty for the first.
        write: function that writes a file into a folder, and returns its path, teacher (or only network), and student.
        sizes: of images: that of training first, then another square, then one that is not square; fewer for networks
            that take fewer.
        mean: expected normalisation of images.
        norm_eps: epsilon of the layer norms; None for networks without.
        final_norm_eps: epsilon of the last layer norm, if different.
        positions: expected resizing of positions; None for networks without.
        options: arguments of `load_backbone` that weights do not show; `image_size` resizes positions at loading.
    """

    row: str
    about: str
    write: Callable[[Path], tuple[Path, Network, Network | None]]
    sizes: tuple[tuple[int, int], ...] = VIT_SIZES
    mean: tuple[float, ...] = IMAGENET
    norm_eps: float | None = 1e-6
    final_norm_eps: float | None = None
    positions: Resizing | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the test."""
        return f"{self.row}, {self.about}" if self.about else self.row


CASES: list[Case] = []


def case(row: str, about: str = "", **expected: Any) -> Callable[[Any], Any]:
    """Register the function below as `write` of a case."""

    def register(write: Any) -> Any:
        CASES.append(Case(row, about, write, **expected))
        return write

    return register


@torch.no_grad()
def deviation(backbone: Backbone, network: Network, size: tuple[int, int]) -> float:
    """Return the largest difference of any feature, relative to the largest feature."""
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    found = backbone.eval().encode(images)
    largest = 0.0
    for ours, theirs in zip((found.global_token, found.tokens), network(images), strict=True):
        assert ours.shape == theirs.shape, f"{tuple(ours.shape)} instead of {tuple(theirs.shape)}"
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        assert math.isfinite(difference), "features that are not finite"  # `max` would ignore a NaN
        largest = max(largest, difference)
    return largest


def measure(case: Case, folder: Path) -> tuple[Backbone, float]:
    """Load a case's file, and compare its networks with the project's at every size."""
    path, teacher, student = case.write(folder)
    backbone = load_backbone(path, **case.options)
    largest = max(deviation(backbone, teacher, size) for size in case.sizes)
    if student is not None:
        other = load_backbone(path, network="student", **case.options)
        largest = max(largest, *(deviation(other, student, size) for size in case.sizes))
    return backbone, largest


def load_cases() -> list[Case]:
    """Return all cases, of this file and of all `cases_*.py`."""
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
    return CASES


# ------------------------------------------------------------------------------------------------------- helpers


def under(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {prefix + key: value for key, value in state.items()}


def junk(*keys: str) -> State:
    """Other tensors that a project stores with its networks."""
    return {key: torch.ones(2, 2) for key in keys}


def save(folder: Path, content: object, name: str = "checkpoint.pth") -> Path:
    torch.save(content, folder / name)
    return folder / name


def vit(state: State, resize: architectures.Resize, heads: int = 2, eps: float = 1e-6) -> Network:
    return partial(architectures.vit, state, heads=heads, resize=resize, eps=eps)


OPTIMISER = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
DINO_HEAD = junk("head.mlp.0.weight", "head.mlp.0.bias", "head.last_layer.weight_g", "head.last_layer.weight_v")
CROC_HEAD = {**DINO_HEAD, **junk("head.last_layer_c.weight_g", "head.last_layer_c.weight_v")}


def multi_crop(teacher: State, student: State, head: State, **rest: object) -> dict[str, Any]:
    """`MultiCropWrapper(backbone, head)` of DINO and projects based on it; the student in DistributedDataParallel."""
    return {
        "student": {**under("module.backbone.", student), **under("module.", head)},
        "teacher": {**under("backbone.", teacher), **head},
        "optimizer": OPTIMISER,
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_small", patch_size=16, out_dim=65536),
        "fp16_scaler": {"scale": 65536.0},
        **rest,
    }


# --------------------------------------------------------------------------------------------- DINO and later


@case("cribo run", positions="timm")
def cribo_run(folder: Path):
    teacher, student = vit_state(1), vit_state(2)
    heads = junk("teacher.head.mlp.0.weight", "student.head.mlp.0.weight", "teacher.image_prototypes")
    networks = {**under("teacher.backbone.model.", teacher), **under("student.backbone.model.", student)}
    name, args = "vit_small_patch16_224", {"embed_dim": 128, "depth": 2, "num_heads": 2}
    about = {"name": name, "args": args, "image_size": 48, "mean": IMAGENET, "std": (0.229, 0.224, 0.225)}
    run = {"backbone": about, "config": {"backbone": {"name": name, "args": args}, "views": {"size": 48}}}
    path = save(folder, {"state_dict": {**networks, **heads}, "cribo": run, "global_step": 3})
    return path, vit(teacher, antialiased_bicubic), vit(student, antialiased_bicubic)


def of_multi_crop(
    folder: Path, head: State = DINO_HEAD, *, network: Mapping[str, Any] | None = None, **rest: Any
) -> tuple[Path, Network, Network]:
    teacher, student = (vit_state(seed, **(network or {})) for seed in (1, 2))
    content = multi_crop(teacher, student, head, **rest)
    content["student"] |= junk("module.backbone.masked_embed") if "ibot_loss" in rest else {}
    return save(folder, content), vit(teacher, scaled_bicubic), vit(student, scaled_bicubic)


CENTRE = {"center": torch.zeros(1, 2)}
IBOT_HEAD = {**DINO_HEAD, **junk("head.last_layer2.weight_g", "head.last_layer2.weight_v")}
QUEUES = {f"{name}_queue_cpu": torch.ones(2, 3) for name in ("centroids", "cls", "cpv")}
for row, about, content in (
    ("CrIBo", "", {"head": CROC_HEAD, "cribo_loss": CENTRE, **QUEUES}),
    ("CrIBo or CrOC", "", {"head": CROC_HEAD, "croc_loss": CENTRE}),
    ("iBOT", "", {"head": IBOT_HEAD, "ibot_loss": {**CENTRE, "center2": torch.zeros(1, 2)}}),
    ("iBOT", "layer scale", {"network": {"scale": "gamma_{}"}, "ibot_loss": CENTRE}),
    ("DINO", "", {"dino_loss": CENTRE}),
):
    case(row, about, positions="bicubic_offset")(partial(of_multi_crop, **content))
case("DINO", "8 pixels a patch", sizes=((32, 32), (56, 56), (40, 24)), positions="bicubic_offset")(
    partial(of_multi_crop, network={"patch": 8, "side": 4})
)


@case("DINO", "ResNet", sizes=RESNET_SIZES, norm_eps=None)
def dino_resnet(folder: Path):
    teacher, student = resnet_state(1), resnet_state(2)
    content = multi_crop(teacher, student, DINO_HEAD)
    return save(folder, content), partial(resnet, teacher), partial(resnet, student)


@case("TimeT", positions="bicubic_offset")
def timet(folder: Path):
    teacher, student = vit_state(1), vit_state(2)
    head = junk("head.0.weight", "head.2.bias")
    content = {
        **under("feature_extractor.backbone.", student),
        **under("feature_extractor.", head),
        **under("teacher.backbone.", teacher),
        **under("teacher.", head),
        **junk("prototypes", "teacher_prototypes", "queue"),
    }
    return save(folder, content), vit(teacher, scaled_bicubic), vit(student, scaled_bicubic)


@case("TimeT", "without a teacher", positions="bicubic_offset")
def timet_alone(folder: Path):
    student = vit_state(2)
    content = {**under("feature_extractor.backbone.", student), **junk("feature_extractor.head.0.weight", "prototypes")}
    return save(folder, content), vit(student, scaled_bicubic), None


@case("NeCo or Leopart", positions="bicubic_offset")
def neco(folder: Path):
    teacher, student = vit_state(1), vit_state(2)
    head = junk("projection_head.0.weight", "projection_head.0.bias", "projection_head.4.weight")
    networks = {**under("model.", {**student, **head}), **under("teacher.", {**teacher, **head})}
    content = {
        "state_dict": {**networks, **junk("preds_miou_layer4.metric_21.tp")},
        "hyper_parameters": {"arch": "vit-small", "patch_size": 16},
        "optimizer_states": [OPTIMISER],
        "loops": {"fit_loop": {}},
        "callbacks": {},
        "pytorch-lightning_version": "1.5.0",
    }
    return save(folder, content), vit(teacher, scaled_bicubic), vit(student, scaled_bicubic)


@case("NeCo or Leopart", "on DINOv2", sizes=SIZES_14, positions="bicubic_offset")
def neco_on_dinov2(folder: Path):
    teacher, student = (vit_state(seed, patch=14, scale="ls{}.gamma") for seed in (1, 2))
    rest = {"mask_token": torch.ones(1, 128), **junk("projection_head.0.weight")}
    state = {**under("model.", {**student, **rest}), **under("teacher.", {**teacher, **rest})}
    content = {"state_dict": state, "hyper_parameters": {"arch": "vit-small", "arch_version": "v2"}}
    return save(folder, content), vit(teacher, scaled_bicubic), vit(student, scaled_bicubic)


# ------------------------------------------------------------------------------------------------ DINOv2 and v3


def dinov2(folder: Path, resize: architectures.Resize = scaled_bicubic, **options: Any):
    state = vit_state(1, patch=14, scale="ls{}.gamma", **options)
    return save(folder, {**state, "mask_token": torch.ones(1, 128)}), vit(state, resize), None


case("DINOv2", sizes=SIZES_14, positions="bicubic_offset")(dinov2)
case("DINOv2", "gated", sizes=SIZES_14, positions="bicubic_offset")(partial(dinov2, swiglu=True))
case("DINOv2", "registers", sizes=SIZES_14, positions="timm")(partial(dinov2, resize=antialiased_bicubic, registers=4))


TRAINING_HEADS = junk("dino_head.mlp.0.weight", "dino_head.last_layer.weight_g", "ibot_head.last_layer.weight_v")


@case("DINOv2 or DINOv3 training", "DINOv2's teacher", positions="bicubic_offset")
def dinov2_teacher(folder: Path):
    """Trained with `block_chunks`: blocks keep their global number within their chunk."""
    state = vit_state(1, depth=4, scale="ls{}.gamma")
    chunked = {
        f"blocks.{int(number) // 2}.{number}.{rest}" if key.startswith("blocks.") else key: value
        for key, value in state.items()
        for number, _, rest in (key.removeprefix("blocks.").partition("."),)
    }
    teacher = under("backbone.", {**chunked, "mask_token": torch.ones(1, 128)})
    path = save(folder, {"teacher": {**teacher, **TRAINING_HEADS}}, "teacher_checkpoint.pth")
    return path, vit(state, scaled_bicubic), None


@case("DINOv2 or DINOv3 training", "DINOv2's whole state", positions="bicubic_offset")
def dinov2_training(folder: Path):
    teacher, student = (vit_state(seed, scale="ls{}.gamma") for seed in (1, 2))
    model = {}
    for name, state in (("teacher", teacher), ("student", student)):
        model |= under(f"{name}.backbone.", {**state, "mask_token": torch.ones(1, 128)})
        model |= under(f"{name}.", TRAINING_HEADS)
    model |= junk("dino_loss.center", "ibot_patch_loss.center")
    content = {"model": model, "optimizer": OPTIMISER, "iteration": 1249}
    return save(folder, content, "model_final.rank_0.pth"), vit(teacher, scaled_bicubic), vit(student, scaled_bicubic)


@case("DINOv2 or DINOv3 training", "DINOv3's teacher", norm_eps=1e-5)
def dinov3_teacher(folder: Path):
    state = dinov3_state(1)
    path = save(folder, {"teacher": {**under("backbone.", state), **TRAINING_HEADS}}, "teacher_checkpoint.pth")
    return path, partial(dinov3, state, heads=2), None


def dinov3_released(folder: Path, *rest: str, heads: int = 2, **options: Any):
    state = dinov3_state(1, heads=heads, **options)
    return save(folder, {**state, **junk(*rest)}), partial(dinov3, state, heads=heads), None


LOCAL_NORM = ("local_cls_norm.weight", "local_cls_norm.bias")
for about, options in (
    ("", {}),
    ("gated", {"swiglu": True}),
    ("a rotated bias of keys (mask_k_bias: false), no registers", {"bias": "plain", "registers": 0}),
):
    case("DINOv3", about, norm_eps=1e-5)(partial(dinov3_released, **options))
case("DINOv3", "no bias, two registers, four heads, base 50", norm_eps=1e-5)(
    lambda folder: dinov3_released(folder, LOCAL_NORM[0], heads=4, bias=None, registers=2, base=50.0)
)
case("DINOv3 SAT-493M", norm_eps=1e-5, mean=(0.430, 0.411, 0.296))(lambda folder: dinov3_released(folder, *LOCAL_NORM))


def timm_network(model: Any) -> Network:
    """Timm's features: [CLS] and patches."""

    @torch.no_grad()
    def encode(images: Tensor) -> Outputs:
        tokens = model.forward_features(images)
        return tokens[:, 0], tokens[:, model.num_prefix_tokens :]

    return encode


def randomise(module: nn.Module, seed: int, std: float = 0.05) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in sorted(module.state_dict().items()):
            if value.is_floating_point():
                value.add_(std * torch.randn(value.shape, generator=draw))
                if key.endswith("running_var"):
                    value.abs_()


def shrink_embeddings(module: nn.Module) -> None:
    """Make the inputs of the first norms small, so that their epsilon affects the features."""
    with torch.no_grad():
        for key, value in module.state_dict().items():
            if re.search(r"embed|cls_token|stem\.0", key) and value.is_floating_point():
                value.mul_(0.02)


@case("timm DINOv3", norm_eps=1e-5)
def timm_dinov3(folder: Path):
    options = {"embed_dim": 128, "depth": 2, "num_heads": 2, "dynamic_img_size": True, "img_size": 48}
    model = timm.create_model("vit_small_patch16_dinov3_qkvb", num_classes=5, **options).eval()
    randomise(model, 1)
    return save(folder, {"model": model.state_dict()}), timm_network(model), None


# -------------------------------------------------------------------------------------------------- other ViTs


@case("timm ViT", positions="timm")
def timm_vit(folder: Path):
    state = vit_state(1)
    return save(folder, {**state, **junk("head.weight", "head.bias")}), vit(state, antialiased_bicubic), None


@case(
    "timm ViT",
    "iBOT's backbone, as the caller says",
    options={"positions": "bicubic_offset"},
    positions="bicubic_offset",
)
def ibot_backbone(folder: Path):
    state = vit_state(1)
    return save(folder, {"state_dict": state}), vit(state, scaled_bicubic), None


def with_distillation(state: State) -> State:
    positions = torch.cat([state["pos_embed"][:, :1], state["pos_embed"]], dim=1)
    return {**state, "dist_token": state["cls_token"].flip(2), "pos_embed": positions}


@case("timm ViT", "DeiT's distillation token", options={"args": {"num_heads": 2}}, positions="timm")
def deit(folder: Path):
    state = with_distillation(vit_state(1))
    content = {"model": {**state, **junk("head.weight", "head_dist.weight")}}
    return save(folder, content), vit(state, antialiased_bicubic), None


MOCO_HEAD = junk("head.0.weight", "head.1.running_mean", "head.6.weight")


def fixed(state: State, *, rows_first: bool) -> State:
    dim = state["cls_token"].shape[2]
    return {**state, "pos_embed": sines_and_cosines(3, dim, rows_first=rows_first)}


@case("MoCo v3", positions="timm")
def moco_v3(folder: Path):
    """Its own code supports only the training size; other sizes are compared with timm's resizing."""
    teacher, student = (fixed(vit_state(seed, dim=384), rows_first=True) for seed in (1, 2))
    state = {
        **under("module.base_encoder.", {**student, **MOCO_HEAD}),
        **under("module.momentum_encoder.", {**teacher, **MOCO_HEAD}),
        **junk("module.predictor.0.weight", "module.predictor.1.num_batches_tracked"),
    }
    content = {"epoch": 300, "arch": "vit_small", "state_dict": state, "optimizer": OPTIMISER, "scaler": {"scale": 1.0}}
    return (
        save(folder, content),
        vit(teacher, antialiased_bicubic, heads=12),
        vit(student, antialiased_bicubic, heads=12),
    )


@case("MoCo v3", "ResNet", sizes=RESNET_SIZES, norm_eps=None)
def moco_v3_resnet(folder: Path):
    teacher, student = resnet_state(1), resnet_state(2)
    head = junk("fc.0.weight", "fc.1.running_mean")
    state = {
        **under("module.base_encoder.", {**student, **head}),
        **under("module.momentum_encoder.", {**teacher, **head}),
        **junk("module.predictor.0.weight"),
    }
    content = {"epoch": 300, "arch": "resnet50", "state_dict": state, "optimizer": OPTIMISER}
    return save(folder, content), partial(resnet, teacher), partial(resnet, student)


@case("timm ViT", "MoCo v3's ViT-S by convert_to_deit", positions="timm")
def moco_v3_converted(folder: Path):
    state = fixed(vit_state(1, dim=384), rows_first=True)
    return save(folder, {"model": state}), vit(state, antialiased_bicubic, heads=12), None


@case("timm ViT", "a ViT-S with MAE's positions", positions="bicubic")
def mae_small(folder: Path):
    state = fixed(vit_state(1, dim=384), rows_first=False)
    return save(folder, {"model": state}), vit(state, bicubic, heads=6), None


MAE_DECODER = junk(
    "mask_token",
    "decoder_pos_embed",
    "decoder_embed.weight",
    "decoder_blocks.0.attn.qkv.weight",
    "decoder_norm.weight",
    "decoder_pred.weight",
)


@case("MAE", positions="bicubic")
def mae(folder: Path):
    state = fixed(vit_state(1), rows_first=False)
    content = {"model": {**state, **MAE_DECODER}, "optimizer": OPTIMISER, "epoch": 799, "scaler": {"scale": 1.0}}
    return save(folder, content), vit(state, bicubic), None


@case("timm ViT", "MAE's encoder as released", positions="bicubic")
def mae_encoder(folder: Path):
    state = fixed(vit_state(1), rows_first=False)
    return save(folder, {"model": state}), vit(state, bicubic), None


@case("timm ViT", "MAE fine-tuned", options={"positions": "bicubic"}, positions="bicubic")
def mae_fine_tuned(folder: Path):
    """The global token is the norm of the mean of the patches; patch features are defined as each patch's norm."""
    state = vit_state(1, last_norm="fc_norm")
    content = {"model": {**state, **junk("head.weight", "head.bias")}, "args": argparse.Namespace(global_pool=True)}
    return save(folder, content), vit(state, bicubic), None


@case("Segmenter", mean=HALF, norm_eps=1e-5, positions="bilinear")
def segmenter(folder: Path):
    state = vit_state(1)
    decoder = junk("decoder.cls_emb", "decoder.proj_dec.weight", "decoder.blocks.0.attn.qkv.weight")
    decoder |= junk("decoder.mask_norm.weight", "decoder.decoder_norm.bias", "decoder.proj_patch")
    content = {"model": {**under("encoder.", {**state, **junk("head.weight")}), **decoder}, "optimizer": OPTIMISER}
    variant = "net_kwargs:\n  image_size: !!python/tuple\n  - 48\n  - 48\n  normalization: vit\n"
    (folder / "variant.yml").write_text(variant)
    return save(folder, content), vit(state, bilinear, eps=1e-5), None


@case("Segmenter", "linear decoder, DeiT's images", norm_eps=1e-5, positions="bilinear")
def segmenter_linear(folder: Path):
    state = vit_state(1)
    content = {"model": {**under("encoder.", {**state, **junk("head.weight")}), **junk("decoder.head.weight")}}
    (folder / "variant.yml").write_text("net_kwargs:\n  normalization: deit\n")
    return save(folder, content), vit(state, bilinear, eps=1e-5), None


@case("Segmenter", "distilled DeiT", mean=HALF, norm_eps=1e-5, positions="bilinear")
def segmenter_distilled(folder: Path):
    state = with_distillation(vit_state(1))
    encoder = {**state, **junk("head.weight", "head_dist.weight")}
    content = {"model": {**under("encoder.", encoder), **junk("decoder.cls_emb", "decoder.proj_dec.weight")}}
    return save(folder, content), vit(state, bilinear, eps=1e-5), None


# -------------------------------------------------------------------------------------------------------- OpenMMLab


def mmsegmentation(state: State, *heads: str) -> dict[str, Any]:
    meta = {"mmseg_version": "1.2.2", "dataset_meta": {"classes": ("wall",), "palette": [[120, 120, 120]]}}
    content = {**under("backbone.", state), **junk("decode_head.conv_seg.weight", "decode_head.conv_seg.bias", *heads)}
    return {"meta": meta, "state_dict": content, "message_hub": {}, "optimizer": OPTIMISER}


def mmsegmentation_of_vit(
    folder: Path, *heads: str, network: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Path, Network, None]:
    state = mmsegmentation_state(1, **(network or {}))
    return save(folder, mmsegmentation(state, *heads)), partial(mmsegmentation_vit, state, heads=2, **options), None


WITHOUT_NORM = {"network": {"final_norm": False}}
for row, about, heads, options, expected in (
    ("", "", ("decode_head.lateral_convs.0.conv.weight", "auxiliary_head.conv_seg.weight"), WITHOUT_NORM, {}),
    ("", "final norm, no bias of patches", (), {"network": {"patch_bias": False}}, {}),
    (
        " Segmenter",
        "",
        ("decode_head.cls_emb", "decode_head.layers.0.attn.attn.in_proj_weight"),
        {},
        {"mean": HALF},
    ),
    (
        " SETR",
        "",
        ("decode_head.up_convs.0.0.conv.weight", "auxiliary_head.0.up_convs.0.0.conv.weight"),
        {**WITHOUT_NORM, "resize": bilinear},
        {"positions": "bilinear"},
    ),
    (  # with `with_cls_token=False`: the blocks never read [CLS]
        " SETR-MLA",
        "",
        ("neck.mla.channel_proj.0.conv.weight", "auxiliary_head.0.conv_seg.weight"),
        {**WITHOUT_NORM, "resize": bilinear, "has_cls": False},
        {"positions": "bilinear"},
    ),
    (  # without `norm_cfg`, so norms have mmcv's default epsilon
        " DPT",
        "",
        ("decode_head.reassemble_blocks.projects.0.conv.weight",),
        {**WITHOUT_NORM, "eps": 1e-5},
        {"norm_eps": 1e-5},
    ),
):
    case(f"MMSegmentation{row}", about, **{"positions": "bicubic", **expected})(
        lambda folder, heads=heads, options=options: mmsegmentation_of_vit(folder, *heads, **options)
    )


@case("MMSegmentation", "ResNet", sizes=RESNET_SIZES, norm_eps=None)
def mmsegmentation_resnet(folder: Path):
    state = resnet_state(1)
    return save(folder, mmsegmentation(state, "auxiliary_head.conv_seg.weight")), partial(resnet, state), None


@case("MMSegmentation ViT", positions="bicubic")
def mmsegmentation_backbone(folder: Path):
    state = mmsegmentation_state(1)
    return save(folder, {"state_dict": state}), partial(mmsegmentation_vit, state, heads=2), None


# -------------------------------------------------------------------------------------------------------------- JAX

LOCA_REST = {
    "cross_attention_block/LayerNorm_0/scale": np.ones(3, np.float32),
    "final_norm/scale": np.ones(3, np.float32),
    "position_predictor/kernel": np.ones((3, 9), np.float32),
    "projection_head_for_clustering_prediction/prototypes/kernel": np.ones((3, 4), np.float32),
}


@case("LOCA", positions="bilinear_antialiased")
def loca(folder: Path):
    teacher, student = (flax_arrays(seed, is_loca=True) for seed in (1, 2))
    arrays = {f"ema_params/{key}": value for key, value in {**teacher, **LOCA_REST}.items()}
    arrays |= {f"params/{key}": value for key, value in {**student, **LOCA_REST}.items()}
    arrays |= {f"opt_state/0/mu/{key}": value for key, value in student.items()}
    np.savez(folder / "state.npz", allow_pickle=False, **arrays)
    networks = (partial(flax_vit, each, resize=jax_image_resize) for each in (teacher, student))
    return folder / "state.npz", *networks


@case("LOCA", "Flax's msgpack, as released", positions="bilinear_antialiased")
def loca_msgpack(folder: Path):
    """Nested arrays, each as (shape, dtype, bytes)."""
    import msgpack

    def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, array in arrays.items():
            *folders, name = key.split("/")
            inner = tree
            for part in folders:
                inner = inner.setdefault(part, {})
            inner[name] = msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))
        return tree

    teacher, student = (flax_arrays(seed, is_loca=True, heads=8) for seed in (1, 2))
    state = {
        "opt_state": {"hyperparams": {}, "inner_state": {"0": {"mu": nested(student)}}},
        "ema_params": nested({**teacher, **LOCA_REST}),
        "params": nested({**student, **LOCA_REST}),
        "rng": nested({"key": np.ones(2, np.uint32)})["key"],
        "global_step": 5,
        "metadata": {"chrono": {"note": "x"}},
    }
    (folder / "loca_vsmall").write_bytes(bytes(msgpack.packb(state) or b""))
    networks = (partial(flax_vit, each, resize=jax_image_resize) for each in (teacher, student))
    return folder / "loca_vsmall", *networks


@case("JAX ViT", mean=HALF, positions="bilinear_corners")
def jax_vit(folder: Path):
    arrays = flax_arrays(1, is_loca=False)
    head = {"head/kernel": np.ones((128, 5), np.float32), "pre_logits/bias": np.ones(3, np.float32)}
    np.savez(folder / "B_16.npz", allow_pickle=False, **arrays, **head)
    return folder / "B_16.npz", partial(flax_vit, arrays, resize=scipy_zoom), None


@case("JAX ViT", "average pooling", mean=HALF, positions="bilinear_corners")
def jax_vit_gap(folder: Path):
    arrays = flax_arrays(1, is_loca=False, has_cls=False)
    np.savez(folder / "B_16.npz", allow_pickle=False, **arrays)
    return folder / "B_16.npz", partial(flax_vit, arrays, resize=scipy_zoom), None


# ---------------------------------------------------------------------------------------------------------- ResNets


def slotcon(folder: Path, arch: str = "resnet50") -> tuple[Path, Network, Network]:
    teacher, student = (resnet_state(seed, blocks=(1, 2, 1, 2)) for seed in (1, 2))
    state = {
        **under("module.encoder_q.", student),
        **under("module.encoder_k.", teacher),
        **junk("module.projector_q.mlp.0.weight", "module.projector_k.mlp.0.weight", "module.center"),
        **junk("module.grouping_q.slot_embed.weight", "module.grouping_k.slot_embed.weight"),
        **junk("module.predictor_slot.mlp.0.weight"),
    }
    content = {"args": argparse.Namespace(arch=arch), "model": state, "optimizer": OPTIMISER, "scheduler": {}}
    network = partial(resnet, dilations=(1, 1, 1, 2) if arch.endswith("_16s") else (1, 1, 1, 1))
    return save(folder, content), partial(network, teacher), partial(network, student)


case("SlotCon", sizes=RESNET_SIZES, norm_eps=None)(slotcon)
case("SlotCon", "resnet50_16s", sizes=RESNET_SIZES, norm_eps=None)(partial(slotcon, arch="resnet50_16s"))


@case("DenseCL", sizes=RESNET_SIZES, norm_eps=None)
def densecl(folder: Path):
    teacher, student = resnet_state(1), resnet_state(2)
    state = {
        **under("encoder_q.0.", student),
        **under("encoder_k.0.", teacher),
        **under("backbone.", student),
        **junk("encoder_q.1.mlp.0.weight", "encoder_k.1.mlp2.0.weight", "head.weight"),
        **junk("queue", "queue_ptr", "queue2", "queue2_ptr"),
    }
    content = {"meta": {"epoch": 200, "time": "2021"}, "state_dict": state, "optimizer": OPTIMISER}
    return save(folder, content), partial(resnet, teacher), partial(resnet, student)


@case("MoCo", sizes=RESNET_SIZES, norm_eps=None)
def moco(folder: Path):
    teacher, student = resnet_state(1), resnet_state(2)
    head = junk("fc.0.weight", "fc.2.bias")
    state = {
        **under("module.encoder_q.", {**student, **head}),
        **under("module.encoder_k.", {**teacher, **head}),
        **junk("module.queue", "module.queue_ptr"),
    }
    content = {"epoch": 200, "arch": "resnet50", "state_dict": state, "optimizer": OPTIMISER}
    return save(folder, content), partial(resnet, teacher), partial(resnet, student)


@case("ORL or BYOL", sizes=RESNET_SIZES, norm_eps=None)
def orl(folder: Path):
    teacher, student = resnet_state(1), resnet_state(2)
    neck = junk("fc0.weight", "bn0.running_mean")
    state = {
        **under("online_net.0.", student),
        **under("online_net.1.", neck),
        **under("target_net.0.", teacher),
        **under("target_net.1.", neck),
        **under("backbone.", student),
        **under("neck.", neck),
        **junk("global_head.predictor.fc0.weight", "local_intra_head.predictor.fc0.weight"),
    }
    content = {"meta": {"epoch": 800}, "state_dict": state, "optimizer": OPTIMISER}
    return save(folder, content), partial(resnet, teacher), partial(resnet, student)


@case("ResNet", sizes=RESNET_SIZES, norm_eps=None)
def resnet_alone(folder: Path):
    state = resnet_state(1)
    return save(folder, {**state, **junk("fc.weight", "fc.bias")}), partial(resnet, state), None


@case("ResNet", "torchvision's own, basic blocks", sizes=RESNET_SIZES, norm_eps=None)
def torchvision_resnet(folder: Path):
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 2, 1]).eval()
    randomise(model, 1, std=0.01)

    path = save(folder, model.state_dict())
    model.double()

    @torch.no_grad()
    def encode(images: Tensor) -> Outputs:
        places = nn.Sequential(*list(model.children())[:-2])(images.double())
        return places.mean((2, 3)), places.flatten(2).mT

    return path, encode, None


# ----------------------------------------------------------------------------------------------------- Hugging Face


def hugging_face(model: str, config: str, prefix: int, **options: Any) -> Callable[[Path], Any]:
    """A folder as `save_pretrained` writes it; the network is transformers' own."""

    def write(folder: Path) -> tuple[Path, Network, None]:
        import transformers

        settings = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        settings |= {"image_size": 48, "patch_size": 16, **options}
        source: Any = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
        randomise(source, 1)
        encoder = next((getattr(source, part) for part in ("vit", "dinov2") if hasattr(source, part)), source)
        interpolate = {"interpolate_pos_encoding": True} if config == "ViTConfig" else {}

        @torch.no_grad()
        def encode(images: Tensor) -> Outputs:
            tokens = encoder(images, **interpolate).last_hidden_state
            return tokens[:, 0], tokens[:, prefix:]

        source.save_pretrained(folder)
        return folder, encode, None

    return write


case("Hugging Face ViT", mean=HALF, norm_eps=1e-12, positions="bicubic")(hugging_face("ViTModel", "ViTConfig", 1))
case("Hugging Face ViT", "tanh, no bias", mean=HALF, norm_eps=1e-12, positions="bicubic")(
    hugging_face("ViTModel", "ViTConfig", 1, hidden_act="gelu_new", qkv_bias=False)
)
case("Hugging Face ViT", "classifier", mean=HALF, norm_eps=1e-12, positions="bicubic")(
    hugging_face("ViTForImageClassification", "ViTConfig", 1)
)
case("Hugging Face DINOv2", positions="bicubic")(hugging_face("Dinov2Model", "Dinov2Config", 1))
case("Hugging Face DINOv2", "gated", positions="bicubic")(
    hugging_face("Dinov2Model", "Dinov2Config", 1, use_swiglu_ffn=True)
)
case("Hugging Face DINOv2", "classifier", positions="bicubic")(
    hugging_face("Dinov2ForImageClassification", "Dinov2Config", 1)
)
case("Hugging Face DINOv2", "registers", positions="timm")(
    hugging_face("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", 4, num_register_tokens=3)
)
case("Hugging Face DINOv3", norm_eps=1e-5)(hugging_face("DINOv3ViTModel", "DINOv3ViTConfig", 5, num_register_tokens=4))
case("Hugging Face DINOv3", "gated", norm_eps=1e-5)(
    hugging_face("DINOv3ViTModel", "DINOv3ViTConfig", 3, num_register_tokens=2, use_gated_mlp=True, hidden_act="silu")
)


def epsilon(backbone: Backbone) -> float | None:
    """Return the epsilon of a network's layer norms, except the last one if it differs."""
    found = {module.eps for module in backbone.modules() if isinstance(module, nn.LayerNorm)}
    if (final := backbone.numerics.final_norm_eps) is not None:
        found.remove(final)
    assert len(found) <= 1, f"layer norms of several epsilons: {found}"
    return next(iter(found), None)
