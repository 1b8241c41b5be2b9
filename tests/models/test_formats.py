"""Files in the formats of other projects, written from networks with random weights, against those networks."""

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from cribo.models import Backbone, build_backbone, load_backbone, load_pretrained, save_backbone
from cribo.models.backbone import IMAGENET_MEAN, Numerics

State = dict[str, Tensor]
VIT = "vit_small_patch16_224"
SMALL = {"embed_dim": 128, "depth": 2, "num_heads": 2}
SMALL_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}
SIZE = 48


def network(seed: int, name: str = VIT, args: dict[str, Any] | None = None, size: int = SIZE) -> Backbone:
    """With every tensor random: with the zeros and ones of an initialisation, a wrong name can be right by chance."""
    backbone = build_backbone(name, args=SMALL if args is None else args, image_size=size)
    randomise(backbone.model, seed)
    return backbone.eval()


def randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in sorted(module.state_dict().items()):
            if value.is_floating_point():
                value.add_(0.05 * torch.randn(value.shape, generator=generator))
                if key.endswith("running_var"):
                    value.abs_()


def images(size: int = SIZE) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def assert_same_features(backbone: Backbone, expected: Backbone, size: int = SIZE) -> None:
    found, wanted = backbone.eval().encode(images(size)), expected.encode(images(size))
    torch.testing.assert_close(found.tokens, wanted.tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.global_token, wanted.global_token, rtol=0, atol=1e-5)


def under(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


def renamed(state: State, *rules: tuple[str, str]) -> State:
    for pattern, replacement in rules:
        state = {re.sub(pattern, replacement, key): value for key, value in state.items()}
    return state


def tensors(*keys: str) -> State:
    return {key: torch.ones(2, 2) for key in keys}


DINO_HEAD = tensors("head.mlp.0.weight", "head.last_layer.weight_g", "head.last_layer.weight_v")
CRIBO_HEAD = {**DINO_HEAD, **tensors("head.last_layer_c.weight_g", "head.last_layer_c.weight_v")}
TRAINING = {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}, "epoch": 3}


def dino(teacher: State, student: State, head: State) -> dict[str, Any]:
    return {
        "student": {**under("module.backbone.", student), **under("module.", head)},
        "teacher": {**under("backbone.", teacher), **head},
        "args": argparse.Namespace(arch="vit_small"),
        "dino_loss": {"center": torch.zeros(1, 2)},
        **TRAINING,
    }


def cribo_release(teacher: State, student: State) -> dict[str, Any]:
    queues = {f"{name}_queue_cpu": torch.ones(2, 3) for name in ("centroids", "cls", "cpv")}
    return {**dino(teacher, student, CRIBO_HEAD), **queues}


def ibot(teacher: State, student: State) -> dict[str, Any]:
    content = dino(teacher, student, {**DINO_HEAD, **tensors("head.last_layer2.weight_g")})
    content["student"]["module.backbone.masked_embed"] = torch.ones(1, 128)
    del content["dino_loss"]
    return {**content, "ibot_loss": {"center": torch.zeros(1, 2), "center2": torch.zeros(1, 2)}}


def mocov3(teacher: State, student: State) -> dict[str, Any]:
    head = tensors("head.0.weight", "head.1.running_mean", "head.6.weight")
    state = {
        **under("module.base_encoder.", {**student, **head}),
        **under("module.momentum_encoder.", {**teacher, **head}),
        **tensors("module.predictor.0.weight", "module.predictor.1.num_batches_tracked"),
    }
    return {"arch": "vit_small", "state_dict": state, "scaler": {"scale": 1.0}, **TRAINING}


def mae(teacher: State, student: State) -> dict[str, Any]:
    decoder = tensors(
        "mask_token",
        "decoder_pos_embed",
        "decoder_embed.weight",
        "decoder_blocks.0.attn.qkv.weight",
        "decoder_norm.weight",
        "decoder_pred.weight",
    )
    return {"model": {**teacher, **decoder}, **TRAINING}


def neco(teacher: State, student: State) -> dict[str, Any]:
    head = tensors("projection_head.0.weight")
    state = {**under("model.", {**student, **head}), **under("teacher.", {**teacher, **head})}
    state |= tensors("preds_miou_layer4.metric_21.tp")
    return {"state_dict": state, "optimizer_states": [TRAINING["optimizer"]], "loops": {"fit_loop": {}}, "epoch": 3}


def timet(teacher: State, student: State) -> dict[str, Any]:
    head = tensors("head.0.weight", "head.2.bias")
    return {
        **under("feature_extractor.backbone.", student),
        **under("feature_extractor.", head),
        **under("teacher.backbone.", teacher),
        **under("teacher.", head),
        **tensors("prototypes", "teacher_prototypes"),
    }


VIT_FILES: dict[str, tuple[Callable[[State, State], dict[str, Any]], str, str | None, set[str]]] = {
    "CrIBo": (cribo_release, "CrIBo", "teacher", {"head", "student", "training state", "loss", "queue"}),
    "CrOC": (
        lambda teacher, student: dino(teacher, student, CRIBO_HEAD),
        "CrIBo or CrOC",
        "teacher",
        {"head", "student", "training state", "loss"},
    ),
    "DINO": (
        lambda teacher, student: dino(teacher, student, DINO_HEAD),
        "DINO",
        "teacher",
        {"head", "student", "training state", "loss"},
    ),
    "DINO, backbone": (lambda teacher, student: teacher, "timm ViT", None, set()),
    "iBOT": (ibot, "iBOT", "teacher", {"head", "student", "training state", "loss"}),
    "iBOT, backbone": (lambda teacher, student: {"state_dict": teacher}, "timm ViT", None, set()),
    "MAE": (mae, "MAE", None, {"decoder", "mask token", "training state"}),
    "MAE, encoder": (lambda teacher, student: {"model": teacher}, "timm ViT", None, set()),
    "NeCo": (neco, "NeCo or Leopart", "teacher", {"head", "student", "metric", "training state"}),
    "NeCo, teacher": (
        lambda teacher, student: {**teacher, **tensors("projection_head.0.weight")},
        "timm ViT",
        None,
        {"head"},
    ),
    "TimeT": (timet, "TimeT", "teacher", {"head", "student"}),
    "TimeT, no teacher": (
        lambda teacher, student: {**under("feature_extractor.backbone.", teacher), **tensors("prototypes")},
        "TimeT",
        "student",
        {"head"},
    ),
    "ema": (
        lambda teacher, student: {"model": student, "model_ema": teacher},
        "timm ViT",
        "teacher",
        {"other network"},
    ),
}


@pytest.mark.parametrize(("write", "name", "taken", "dropped"), VIT_FILES.values(), ids=VIT_FILES)
def test_files_of_projects_with_timm_names(
    tmp_path: Path,
    write: Callable[[State, State], dict[str, Any]],
    name: str,
    taken: str | None,
    dropped: set[str],
):
    teacher, student = network(1), network(2)
    content = write(teacher.model.state_dict(), student.model.state_dict())
    torch.save(content, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_same_features(backbone, teacher)
    assert (backbone.name, backbone.args, backbone.image_size) == (VIT, SMALL, SIZE)
    assert backbone.mean == (0.485, 0.456, 0.406)
    loaded = backbone.loaded
    assert loaded is not None
    assert (loaded.format, loaded.network, set(loaded.dropped)) == (name, taken, dropped)
    assert name in str(loaded)
    assert len(loaded.used) == len(teacher.model.state_dict())
    if taken == "teacher" and "student" in dropped:
        assert_same_features(load_backbone(tmp_path / "weights.pth", network="student"), student)
    # Into a network that exists, the same.
    other = network(3)
    assert load_pretrained(other, tmp_path / "weights.pth").format == name
    assert_same_features(other, teacher)


@pytest.mark.parametrize("write", [case[0] for case in VIT_FILES.values()], ids=VIT_FILES)
def test_unknown_tensors_of_the_network_are_refused_and_others_ignored(
    tmp_path: Path, write: Callable[[State, State], dict[str, Any]]
):
    teacher = network(1)
    content = write(teacher.model.state_dict(), network(2).model.state_dict())
    inner: Any = content
    while not any(key.endswith("cls_token") for key in inner):
        inner = inner[next(key for key in ("state_dict", "model_ema", "teacher", "model") if key in inner)]
    prefix = next(key for key in reversed(inner) if key.endswith("cls_token")).removesuffix("cls_token")
    path = tmp_path / "weights.pth"
    beside = {"best_score": torch.tensor(0.7), "my_optimiser": {"moments": torch.ones(3)}}
    torch.save({**content, **beside, "class_weights": torch.ones(4)}, path)
    backbone = load_backbone(path)
    assert_same_features(backbone, teacher)
    assert backbone.loaded is not None
    assert "my_optimiser/moments" in str(backbone.loaded)
    inner[f"{prefix}surprise.weight"] = torch.ones(2)
    torch.save(content, path)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*{re.escape(prefix)}surprise\.weight.*ignore"):
        load_backbone(path)
    backbone = load_backbone(path, ignore=[r"surprise\."])
    assert_same_features(backbone, teacher)
    assert backbone.loaded is not None
    assert backbone.loaded.dropped["ignored as asked"][0].endswith("surprise.weight")


def test_a_mocov3_vit_s_has_12_heads(tmp_path: Path):
    args = {"depth": 2, "num_heads": 12}
    teacher, student = network(1, args=args), network(2, args=args)
    torch.save(mocov3(teacher.model.state_dict(), student.model.state_dict()), tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert backbone.args == args
    assert_same_features(backbone, teacher)
    assert backbone.loaded is not None
    assert (backbone.loaded.format, backbone.loaded.part) == ("MoCo v3", "state_dict/module.momentum_encoder.")
    assert set(backbone.loaded.dropped) == {"head", "student", "training state"}
    assert_same_features(load_backbone(tmp_path / "weights.pth", network="student"), student)
    with pytest.raises(ValueError, match=r"MoCo v3, .* num_heads 12, the backbone has 6: .*args=\{'num_heads': 12\}"):
        load_pretrained(network(3, args={"depth": 2}), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"num_heads 12, the backbone has 6"):
        load_backbone(tmp_path / "weights.pth", name="vit_small_patch16_224", args={"depth": 2})
    named = load_backbone(tmp_path / "weights.pth", name="vit_small_patch16_224", args=args, image_size=SIZE)
    assert_same_features(named, teacher)


def test_a_width_with_a_name_has_its_usual_heads(tmp_path: Path):
    source = network(1, args={"depth": 3})  # ViT-S/16: 384 channels, 6 heads
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_same_features(backbone, source)
    assert backbone.loaded is not None
    assert [note for note in backbone.loaded.notes if "heads" in note] == []
    assert "the file has 3 blocks, where networks of this width have 12" in str(backbone.loaded)


def test_heads_that_weights_do_not_show_come_from_the_caller(tmp_path: Path):
    source = network(1, args={"embed_dim": 96, "depth": 2, "num_heads": 4})
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"a width of 96 is no multiple .* give args=\{'num_heads': ...\}"):
        load_backbone(tmp_path / "weights.pth")
    assert_same_features(load_backbone(tmp_path / "weights.pth", args={"num_heads": 4}), source)
    wide = network(1, args={"embed_dim": 128, "depth": 2, "num_heads": 4})
    torch.save(wide.model.state_dict(), tmp_path / "weights.pth")
    guessed = load_backbone(tmp_path / "weights.pth").loaded
    assert guessed is not None
    assert "took 2 of 64 channels each" in guessed.notes[0]
    assert_same_features(load_backbone(tmp_path / "weights.pth", args={"num_heads": 4}), wide)


@pytest.mark.parametrize(
    "args",
    [
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "fc_norm": True},
        {"qkv_bias": False},
        {"mlp_ratio": 3.3},
        {"qk_norm": True},
        {"init_values": 0.1, "reg_tokens": 2, "no_embed_class": True},
        {"final_norm": False},
    ],
    ids=str,
)
def test_variants_of_the_vit_are_read_off_its_weights(tmp_path: Path, args: dict[str, Any]):
    source = network(1, args={**SMALL, **args})
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth", args={"act_layer": "gelu"})
    assert_same_features(backbone, source)


def test_layer_scale_as_ibot_names_it_and_a_distillation_token(tmp_path: Path):
    scaled = network(1, args={**SMALL, "init_values": 0.1})
    torch.save(renamed(scaled.model.state_dict(), (r"ls(\d)\.gamma", r"gamma_\1")), tmp_path / "scaled.pth")
    assert_same_features(load_backbone(tmp_path / "scaled.pth"), scaled)
    distilled = network(1, "deit_small_distilled_patch16_224")
    state = {**distilled.model.state_dict(), **tensors("head.weight", "head_dist.weight")}
    torch.save({"model": state}, tmp_path / "distilled.pth")
    assert_same_features(load_backbone(tmp_path / "distilled.pth"), distilled)
    backbone = network(2, "deit_small_distilled_patch16_224")
    load_pretrained(backbone, tmp_path / "distilled.pth")
    assert_same_features(backbone, distilled)


# ----------------------------------------------------------------------------------------------------- DINOv2 and v3


def dinov2_state(backbone: Backbone) -> State:
    """In the names of the original; [CLS] has a position there, also beside registers."""
    state = renamed(dict(backbone.model.state_dict()), (r"^reg_token$", "register_tokens"))
    if "register_tokens" in state:
        place = torch.full_like(state["cls_token"], 0.3)
        state["pos_embed"] = torch.cat([place, state["pos_embed"]], dim=1)
        state["cls_token"] = state["cls_token"] - place
    if len(state["blocks.0.mlp.fc1.weight"]) == 2 * state["blocks.0.mlp.fc2.weight"].shape[1]:
        state = renamed(state, (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))
    return {**state, "mask_token": torch.ones(1, backbone.embed_dim)}


DINOV2 = {
    "plain": ("vit_small_patch14_dinov2", SMALL),
    "registers": ("vit_small_patch14_reg4_dinov2", SMALL),
    "gated": ("vit_giant_patch14_dinov2", {**SMALL, "mlp_ratio": 4.0}),
    "patch 16": (VIT, {**SMALL, "init_values": 1e-5}),
}


@pytest.mark.parametrize(("name", "args"), DINOV2.values(), ids=DINOV2)
def test_dinov2_and_its_training_checkpoints(tmp_path: Path, name: str, args: dict[str, Any]):
    size = 32 if args.get("init_values") else 28
    source = network(1, name, args, size)
    state = dinov2_state(source)
    torch.save(state, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_same_features(backbone, source, size)
    assert backbone.loaded is not None
    assert backbone.loaded.format == "DINOv2"
    assert backbone.loaded.dropped == {"mask token": ("mask_token",)}
    assert backbone.numerics.positions == ("timm" if "reg4" in name else "bicubic_offset")
    # Trained in chunks of blocks, the heads beside the backbone.
    chunked = renamed(state, (r"^blocks\.(\d+)\.", r"blocks.0.\1."))
    heads = tensors("dino_head.mlp.0.weight", "ibot_head.last_layer.weight_v")
    torch.save({"teacher": {**under("backbone.", chunked), **heads}}, tmp_path / "teacher_checkpoint.pth")
    backbone = load_backbone(tmp_path / "teacher_checkpoint.pth")
    assert_same_features(backbone, source, size)
    assert backbone.loaded is not None
    assert backbone.loaded.format == "DINOv2 or DINOv3 training"
    assert set(backbone.loaded.dropped) == {"mask token", "head"}


def dinov3_state(backbone: Backbone) -> State:
    state = renamed(
        dict(backbone.model.state_dict()),
        (r"^reg_token$", "storage_tokens"),
        (r"gamma_(\d)$", r"ls\1.gamma"),
        (r"mlp\.fc2", "mlp.w3" if "blocks.0.mlp.fc1_g.weight" in backbone.model.state_dict() else "mlp.fc2"),
        (r"mlp\.fc1_g", "mlp.w1"),
        (r"mlp\.fc1_x", "mlp.w2"),
    )
    for block in range(backbone.depth):
        attention = f"blocks.{block}.attn."
        query, value = state.pop(f"{attention}q_bias"), state.pop(f"{attention}v_bias")
        state[f"{attention}qkv.bias"] = torch.cat([query, torch.full_like(query, 7.0), value])
        state[f"{attention}qkv.bias_mask"] = torch.cat([torch.ones_like(query), 0 * query, torch.ones_like(query)])
    quarter = backbone.embed_dim // backbone.model.blocks[0].attn.num_heads // 4
    return {
        **state,
        "mask_token": torch.ones(1, backbone.embed_dim),
        "rope_embed.periods": (100.0 ** (torch.arange(quarter) / quarter)).bfloat16(),
    }


DINOV3 = {
    "plain": ("vit_small_patch16_dinov3_qkvb", SMALL),
    "gated": ("vit_small_plus_patch16_dinov3_qkvb", {**SMALL, "mlp_ratio": 2.0}),
    "two registers": ("vit_small_patch16_dinov3_qkvb", {**SMALL, "num_reg_tokens": 2}),
}


@pytest.mark.parametrize(("name", "args"), DINOV3.values(), ids=DINOV3)
def test_dinov3(tmp_path: Path, name: str, args: dict[str, Any]):
    source = network(1, name, args)
    state = dinov3_state(source)
    torch.save(state, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    periods = tuple(state["rope_embed.periods"].float().tolist())  # rounded to bfloat16, as those of the original
    source.set_numerics(Numerics(rope_periods=periods))
    assert_same_features(backbone, source, 64)
    assert backbone.loaded is not None
    assert backbone.loaded.format == "DINOv3"
    assert set(backbone.loaded.dropped) == {"mask token"}
    assert (backbone.mean, backbone.loaded.notes) == (IMAGENET_MEAN, ())
    save_backbone(backbone, tmp_path / "saved")
    assert_same_features(load_backbone(tmp_path / "saved"), source, 64)
    source.set_numerics(Numerics())
    timm_state = {key: value for key, value in source.model.state_dict().items() if "rope" not in key}
    torch.save({"model": {**timm_state, **tensors("head.weight")}}, tmp_path / "timm.pth")
    assert_same_features(load_backbone(tmp_path / "timm.pth"), source, 64)
    state["rope_embed.periods"] = state["rope_embed.periods"] ** 2  # of another base
    torch.save(state, tmp_path / "weights.pth")
    source.set_numerics(Numerics(rope_periods=tuple(state["rope_embed.periods"].float().tolist())))
    assert_same_features(load_backbone(tmp_path / "weights.pth"), source, 64)


def test_dinov3_of_satellite_images_has_its_own_normalisation(tmp_path: Path):
    source = network(1, "vit_small_patch16_dinov3_qkvb", SMALL)
    torch.save({**dinov3_state(source), **tensors("local_cls_norm.weight")}, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    source.set_numerics(backbone.numerics)
    assert_same_features(backbone, source, 64)
    assert backbone.loaded is not None
    assert (backbone.loaded.format, set(backbone.loaded.dropped)) == (
        "DINOv3 SAT-493M",
        {"mask token", "norm of local crops"},
    )
    satellite = timm.get_pretrained_cfg("vit_large_patch16_dinov3.sat493m")
    assert satellite is not None
    assert (backbone.mean, backbone.std) == (satellite.mean, satellite.std)


def test_dinov3_weights_of_which_the_images_are_not_known_say_so(tmp_path: Path):
    """As the ViT-7B: no bias in the attention, a norm of local crops."""
    source = network(1, "vit_small_patch16_dinov3", SMALL)
    state = renamed(
        {key: value for key, value in source.model.state_dict().items() if "rope" not in key},
        (r"^reg_token$", "storage_tokens"),
        (r"gamma_(\d)$", r"ls\1.gamma"),
    )
    torch.save({**state, **tensors("local_cls_norm.weight")}, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_same_features(backbone, source, 64)
    assert backbone.mean == IMAGENET_MEAN
    assert backbone.loaded is not None
    assert "took ImageNet's normalisation" in backbone.loaded.notes[-1]


# --------------------------------------------------------------------------------------------------------- ResNets


def slotcon(teacher: State, student: State) -> dict[str, Any]:
    state = {
        **under("module.encoder_q.", student),
        **under("module.encoder_k.", teacher),
        **tensors("module.projector_q.mlp.0.weight", "module.projector_k.mlp.0.weight", "module.center"),
        **tensors("module.grouping_q.slot_embed.weight", "module.grouping_k.slot_embed.weight"),
        **tensors("module.predictor_slot.mlp.0.weight"),
    }
    return {"model": state, "args": argparse.Namespace(arch="resnet50"), "scheduler": {}, **TRAINING}


def densecl(teacher: State, student: State) -> dict[str, Any]:
    state = {
        **under("encoder_q.0.", student),
        **under("encoder_k.0.", teacher),
        **under("backbone.", student),
        **tensors("encoder_q.1.mlp.0.weight", "encoder_k.1.mlp2.0.weight", "head.weight"),
        **tensors("queue", "queue_ptr", "queue2", "queue2_ptr"),
    }
    return {"meta": {"epoch": 200}, "state_dict": state, **TRAINING}


def moco(teacher: State, student: State) -> dict[str, Any]:
    head = tensors("fc.0.weight", "fc.2.bias")
    state = {
        **under("module.encoder_q.", {**student, **head}),
        **under("module.encoder_k.", {**teacher, **head}),
        **tensors("module.queue", "module.queue_ptr"),
    }
    return {"arch": "resnet50", "state_dict": state, **TRAINING}


def orl(teacher: State, student: State) -> dict[str, Any]:
    neck = tensors("fc0.weight", "bn0.running_mean")
    state = {
        **under("online_net.0.", student),
        **under("online_net.1.", neck),
        **under("target_net.0.", teacher),
        **under("target_net.1.", neck),
        **under("backbone.", student),
        **under("neck.", neck),
        **tensors("global_head.predictor.fc0.weight", "local_intra_head.predictor.fc0.weight"),
    }
    return {"meta": {"epoch": 800}, "state_dict": state, **TRAINING}


RESNET_FILES = {
    "SlotCon": (
        slotcon,
        "SlotCon",
        "teacher",
        {"student", "head", "prototypes", "centre", "training state"},
    ),
    "DenseCL": (densecl, "DenseCL", "teacher", {"student", "other network", "head", "queue", "training state"}),
    "MoCo": (moco, "MoCo", "teacher", {"student", "head", "queue", "training state"}),
    "ORL": (orl, "ORL or BYOL", "teacher", {"student", "other network", "head", "training state"}),
    "DenseCL, backbone": (
        lambda teacher, student: {"state_dict": teacher, "author": "DenseCL"},
        "ResNet",
        None,
        set(),
    ),
    "DINO": (
        lambda teacher, student: dino(teacher, student, DINO_HEAD),
        "DINO",
        "teacher",
        {"head", "student", "training state", "loss"},
    ),
    "MoCo v3": (mocov3, "MoCo v3", "teacher", {"head", "student", "training state"}),
}


@pytest.mark.parametrize(("write", "name", "taken", "dropped"), RESNET_FILES.values(), ids=RESNET_FILES)
def test_resnets_of_other_projects(
    tmp_path: Path, write: Callable[[State, State], dict[str, Any]], name: str, taken: str | None, dropped: set[str]
):
    # ResNet-50's blocks, with few channels.
    teacher, student = (network(seed, "resnet50", SMALL_RESNET, 64) for seed in (1, 2))
    torch.save(write(teacher.model.state_dict(), student.model.state_dict()), tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_same_features(backbone, teacher, 64)
    assert backbone.loaded is not None
    found = backbone.loaded
    assert (found.format, found.network, set(found.dropped)) == (name, taken, dropped)
    if taken:
        assert_same_features(load_backbone(tmp_path / "weights.pth", network="student"), student, 64)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvision_resnets(tmp_path: Path, name: str):
    source = getattr(torchvision.models, name)().eval()
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth").eval()
    assert backbone.loaded is not None
    assert backbone.loaded.dropped == {"head": ("fc.weight", "fc.bias")}
    tokens = nn.Sequential(*list(source.children())[:-2])(images(64)).flatten(2).mT
    # Other threads add in another order: rounding is as large as the largest terms make it.
    scale = float(tokens.detach().abs().max())
    torch.testing.assert_close(backbone.encode(images(64)).tokens, tokens, rtol=0, atol=1e-4 * scale)


# ---------------------------------------------------------------------------------- other names, from independent code


def assert_features(backbone: Backbone, tokens: Tensor, size: int = SIZE, atol: float = 1e-5) -> None:
    torch.testing.assert_close(backbone.eval().encode(images(size)).tokens, tokens, rtol=0, atol=atol)


HUGGING_FACE = {
    "ViT": ("ViTModel", "ViTConfig", {}, 1, "Hugging Face ViT", {"head"}),
    "ViT, no bias": ("ViTModel", "ViTConfig", {"qkv_bias": False}, 1, "Hugging Face ViT", {"head"}),
    "ViT, tanh": ("ViTModel", "ViTConfig", {"hidden_act": "gelu_new"}, 1, "Hugging Face ViT", {"head"}),
    "ViT with a classifier": ("ViTForImageClassification", "ViTConfig", {}, 1, "Hugging Face ViT", {"head"}),
    "DINOv2": ("Dinov2Model", "Dinov2Config", {}, 1, "Hugging Face DINOv2", {"mask token"}),
    "DINOv2, gated": (
        "Dinov2Model",
        "Dinov2Config",
        {"use_swiglu_ffn": True},
        1,
        "Hugging Face DINOv2",
        {"mask token"},
    ),
    "DINOv2, classifier": (
        "Dinov2ForImageClassification",
        "Dinov2Config",
        {},
        1,
        "Hugging Face DINOv2",
        {"mask token", "head"},
    ),
    "DINOv2, registers": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        {"num_register_tokens": 3},
        4,
        "Hugging Face DINOv2",
        {"mask token"},
    ),
    "DINOv3": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        {"num_register_tokens": 4},
        5,
        "Hugging Face DINOv3",
        {"mask token"},
    ),
    "DINOv3, gated": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu"},
        3,
        "Hugging Face DINOv3",
        {"mask token"},
    ),
}


@pytest.mark.parametrize(
    ("model", "config", "options", "prefix", "name", "dropped"), HUGGING_FACE.values(), ids=HUGGING_FACE
)
def test_hugging_face(
    tmp_path: Path, model: str, config: str, options: dict[str, Any], prefix: int, name: str, dropped: set[str]
):
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    source = getattr(transformers, model)(
        getattr(transformers, config)(**settings, image_size=SIZE, patch_size=16, **options)
    ).eval()
    randomise(source, 1)
    encoder: Any = next((getattr(source, part) for part in ("vit", "dinov2") if hasattr(source, part)), source)
    with torch.no_grad():
        tokens = encoder(images()).last_hidden_state[:, prefix:]
    source.save_pretrained(tmp_path / "hub")
    (tmp_path / "hub/preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.4] * 3, "image_std": [0.2] * 3})
    )
    backbone = load_backbone(tmp_path / "hub")
    assert_features(backbone, tokens)
    assert (backbone.mean, backbone.std) == ((0.4, 0.4, 0.4), (0.2, 0.2, 0.2))
    assert backbone.loaded is not None
    assert (backbone.loaded.format, set(backbone.loaded.dropped)) == (name, dropped)
    # The same from memory, under the names that transformers uses there; heads and activation have to be given.
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    for size in (80, 32):
        with torch.no_grad():
            any_size = {} if "DINOv3" in model or "Dinov2" in model else {"interpolate_pos_encoding": True}
            assert_features(backbone, encoder(images(size), **any_size).last_hidden_state[:, prefix:], size)
    args = {"num_heads": 4, **({"act_layer": "gelu_tanh"} if options.get("hidden_act") == "gelu_new" else {})}
    alone = load_backbone(tmp_path / "weights.pth", args=args)
    assert_features(alone, tokens)
    assert alone.loaded is not None
    assert "no preprocessor_config.json lies beside it" in alone.loaded.notes[0]


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, hidden_act="silu")
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has hidden_act 'silu': it must be one of gelu, gelu_new"):
        load_backbone(tmp_path)


def test_a_folder_of_timm_on_the_hub(tmp_path: Path):
    convnext = {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)}
    source = network(1, "convnext_tiny", convnext, 64)
    state = {key: value.contiguous() for key, value in source.model.state_dict().items()}
    safetensors.torch.save_file({**state, **tensors("head.fc.weight")}, tmp_path / "model.safetensors")
    about = {
        "architecture": "convnext_tiny",
        "model_args": convnext,
        "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 64, 64]},
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    backbone = load_backbone(tmp_path)
    assert_same_features(backbone, source, 64)
    assert backbone.mean == (0.5, 0.5, 0.5)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "my convnext"}))  # of another program
    assert_same_features(load_backbone(tmp_path), source, 64)
    assert_same_features(load_backbone(tmp_path, name="convnext_tiny", args=convnext), source, 64)


class MMSegmentationLayer(nn.Module):
    """A layer of MMSegmentation's vision transformer, from torch's own attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn: Any = nn.Module()
        self.attn.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn: Any = nn.Module()
        self.ffn.layers = nn.Sequential(nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU()), nn.Linear(4 * dim, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.ln1(tokens)
        tokens = tokens + self.attn.attn(normed, normed, normed, need_weights=False)[0]
        return tokens + self.ffn.layers(self.ln2(tokens))


class MMSegmentationViT(nn.Module):
    def __init__(self, dim: int = 128, *, final_norm: bool) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 10, dim))
        self.patch_embed: Any = nn.Module()
        self.patch_embed.projection = nn.Conv2d(3, dim, 16, 16)
        self.layers = nn.ModuleList(MMSegmentationLayer(dim, 2) for _ in range(2))
        self.ln1 = nn.LayerNorm(dim, eps=1e-6) if final_norm else nn.Identity()

    def forward(self, batch: Tensor) -> Tensor:
        tokens = self.patch_embed.projection(batch).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(batch), -1, -1), tokens], dim=1) + self.pos_embed
        for layer in self.layers:
            tokens = layer(tokens)
        return self.ln1(tokens)[:, 1:]


@pytest.mark.parametrize("final_norm", [True, False])
def test_mmsegmentation(tmp_path: Path, final_norm: bool):
    source = MMSegmentationViT(final_norm=final_norm).eval()
    randomise(source, 1)
    head = tensors("decode_head.conv_seg.weight", "decode_head.layers.0.attn.attn.in_proj_weight")
    state = {**under("backbone.", source.state_dict()), **head, **tensors("auxiliary_head.conv_seg.bias")}
    torch.save({"meta": {"CLASSES": ("a",)}, "state_dict": state, **TRAINING}, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_features(backbone, source(images()).detach())
    assert backbone.loaded is not None
    assert backbone.loaded.format == "MMSegmentation"
    assert set(backbone.loaded.dropped) == {"head", "training state"}
    state["decode_head.cls_emb"] = torch.ones(1, 2, 128)
    torch.save({"state_dict": state}, tmp_path / "weights.pth")
    assert load_backbone(tmp_path / "weights.pth").mean == (0.5, 0.5, 0.5)


def test_segmenter_has_another_epsilon_and_its_own_normalisation(tmp_path: Path):
    source = network(1)
    source.set_numerics(Numerics(norm_eps=1e-5))
    with torch.no_grad():
        source.model.pos_embed.mul_(0.1)
        source.model.patch_embed.proj.weight.mul_(0.01)  # small tokens, for which the epsilon counts
    state = {**under("encoder.", source.model.state_dict()), **tensors("encoder.head.weight")}
    state |= tensors("decoder.cls_emb", "decoder.blocks.0.attn.qkv.weight", "decoder.mask_norm.weight")
    torch.save({"model": state, **TRAINING}, tmp_path / "checkpoint.pth")
    backbone = load_backbone(tmp_path / "checkpoint.pth")
    assert_same_features(backbone, source)
    assert (backbone.numerics.norm_eps, backbone.mean) == (1e-5, (0.5, 0.5, 0.5))
    assert backbone.loaded is not None
    assert backbone.loaded.format == "Segmenter"
    assert set(backbone.loaded.dropped) == {"head", "decoder", "training state"}
    (tmp_path / "variant.yml").write_text("net_kwargs:\n  normalization: deit\n")
    assert load_backbone(tmp_path / "checkpoint.pth").mean == (0.485, 0.456, 0.406)


def loca_parameters(seed: int, dim: int = 64, heads: int = 4) -> dict[str, Any]:
    """Shapes as Flax has them: kernels (in, out), attention by head."""
    draw = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return draw.normal(0, 0.2, shape).astype(np.float32)

    parameters = {
        "ToTokenSequence_0/embedding/kernel": random(16, 16, 3, dim) / 10,
        "ToTokenSequence_0/embedding/bias": random(dim),
        "ToTokenSequence_0/posembed_input": random(1, 3, 3, dim),
        "encoder_norm/scale": 1 + random(dim),
        "encoder_norm/bias": random(dim),
    }
    for block in (f"encoderblock_{number}" for number in range(2)):
        for norm in ("LayerNorm_0", "LayerNorm_1"):
            parameters |= {f"{block}/{norm}/scale": 1 + random(dim), f"{block}/{norm}/bias": random(dim)}
        attention = f"{block}/MultiHeadDotProductAttention_0"
        for name in ("query", "key", "value"):
            parameters[f"{attention}/{name}/kernel"] = random(dim, heads, dim // heads)
            parameters[f"{attention}/{name}/bias"] = random(heads, dim // heads)
        parameters |= {
            f"{attention}/out/kernel": random(heads, dim // heads, dim),
            f"{attention}/out/bias": random(dim),
        }
        mlp = f"{block}/MlpBlock_0"
        parameters |= {f"{mlp}/Dense_0/kernel": random(dim, 4 * dim), f"{mlp}/Dense_0/bias": random(4 * dim)}
        parameters |= {f"{mlp}/Dense_1/kernel": random(4 * dim, dim), f"{mlp}/Dense_1/bias": random(dim)}
    return parameters


def loca_tokens(parameters: dict[str, Any], batch: Tensor, cls_token: Tensor | None = None) -> Tensor:
    """LOCA's encoder, written out with the shapes that its parameters have; it has no [CLS], other JAX ViTs do."""
    weights = {key: torch.from_numpy(value) for key, value in parameters.items()}

    def norm(tokens: Tensor, name: str) -> Tensor:
        return F.layer_norm(tokens, tokens.shape[-1:], weights[f"{name}/scale"], weights[f"{name}/bias"], eps=1e-6)

    kernel = weights["ToTokenSequence_0/embedding/kernel"].permute(3, 2, 0, 1)
    grid = F.conv2d(batch, kernel, weights["ToTokenSequence_0/embedding/bias"], stride=16).permute(0, 2, 3, 1)
    tokens = (grid + weights["ToTokenSequence_0/posembed_input"]).flatten(1, 2)
    if cls_token is not None:
        tokens = torch.cat([cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
    for block in (f"encoderblock_{number}" for number in range(2)):
        attention, normed = f"{block}/MultiHeadDotProductAttention_0", norm(tokens, f"{block}/LayerNorm_0")
        query, key, value = (
            torch.einsum("bnd,dhc->bnhc", normed, weights[f"{attention}/{name}/kernel"])
            + weights[f"{attention}/{name}/bias"]
            for name in ("query", "key", "value")
        )
        similarity = torch.einsum("bnhc,bmhc->bhnm", query, key) / math.sqrt(query.shape[-1])
        mixed = torch.einsum("bhnm,bmhc->bnhc", similarity.softmax(-1), value)
        out = torch.einsum("bnhc,hcd->bnd", mixed, weights[f"{attention}/out/kernel"])
        tokens = tokens + out + weights[f"{attention}/out/bias"]
        hidden = norm(tokens, f"{block}/LayerNorm_1") @ weights[f"{block}/MlpBlock_0/Dense_0/kernel"]
        hidden = F.gelu(hidden + weights[f"{block}/MlpBlock_0/Dense_0/bias"], approximate="tanh")
        tokens = tokens + hidden @ weights[f"{block}/MlpBlock_0/Dense_1/kernel"]
        tokens = tokens + weights[f"{block}/MlpBlock_0/Dense_1/bias"]
    return norm(tokens, "encoder_norm")


LOCA_REST: dict[str, Any] = {
    "cross_attention_block/LayerNorm_0/scale": np.ones(3, np.float32),
    "final_norm/scale": np.ones(3, np.float32),
    "position_predictor/kernel": np.ones((3, 9), np.float32),
    "projection_head_for_clustering_prediction/prototypes/kernel": np.ones((3, 4), np.float32),
}


def test_loca_arrays(tmp_path: Path):
    teacher, student = loca_parameters(1), loca_parameters(2)
    np.savez(tmp_path / "bare.npz", **teacher, **LOCA_REST)
    backbone = load_backbone(tmp_path / "bare.npz")
    assert_features(backbone, loca_tokens(teacher, images()), atol=2e-5)
    assert backbone.mean == (0.485, 0.456, 0.406)
    assert backbone.loaded is not None
    assert set(backbone.loaded.dropped) == {"position predictor", "head"}
    both: dict[str, Any] = {f"ema_params/{key}": value for key, value in {**teacher, **LOCA_REST}.items()}
    both |= {f"params/{key}": value for key, value in {**student, **LOCA_REST}.items()}
    both |= {f"opt_state/0/mu/{key}": value for key, value in student.items()}
    np.savez(tmp_path / "state.npz", **both)
    backbone = load_backbone(tmp_path / "state.npz")
    assert_features(backbone, loca_tokens(teacher, images()), atol=2e-5)
    assert backbone.loaded is not None
    assert (backbone.loaded.format, backbone.loaded.network) == ("LOCA", "teacher")
    student_backbone = load_backbone(tmp_path / "state.npz", network="student")
    assert_features(student_backbone, loca_tokens(student, images()), atol=2e-5)


def test_a_loca_checkpoint_as_it_is_released(tmp_path: Path):
    """Flax's msgpack of the training state: nested, arrays as (shape, dtype, bytes)."""
    msgpack = pytest.importorskip("msgpack")

    def nested(arrays: dict[str, Any]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, array in arrays.items():
            *folders, name = key.split("/")
            inner = tree
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[name] = msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))
        return tree

    teacher, student = loca_parameters(1), loca_parameters(2)
    state = {
        "opt_state": {"hyperparams": {}, "inner_state": {"0": {"mu": nested(student)}}},
        "ema_params": nested({**teacher, **LOCA_REST}),
        "params": nested({**student, **LOCA_REST}),
        "rng": nested({"key": np.ones(2, np.uint32)})["key"],
        "global_step": 5,
        "metadata": {"chrono": {"note": "x"}},
    }
    (tmp_path / "loca_vsmall").write_bytes(msgpack.packb(state))
    backbone = load_backbone(tmp_path / "loca_vsmall")
    assert_features(backbone, loca_tokens(teacher, images()), atol=2e-5)
    assert backbone.loaded is not None
    assert (backbone.loaded.format, backbone.loaded.part) == ("LOCA", "ema_params/")


def test_the_heads_of_loca_are_in_its_arrays(tmp_path: Path):
    parameters = loca_parameters(1, dim=128, heads=8)
    np.savez(tmp_path / "weights.npz", **parameters)
    backbone = load_backbone(tmp_path / "weights.npz")
    assert backbone.args["num_heads"] == 8
    assert_features(backbone, loca_tokens(parameters, images()), atol=2e-5)


def test_a_jax_vit(tmp_path: Path):
    """Names as in the arrays of the original ViT; its [CLS] has a position."""
    parameters = loca_parameters(1)
    names = {
        "ToTokenSequence_0/embedding": "embedding",
        "ToTokenSequence_0/posembed_input": "Transformer/posembed_input/pos_embedding",
        "encoderblock_": "Transformer/encoderblock_",
        "encoder_norm": "Transformer/encoder_norm",
        "LayerNorm_1": "LayerNorm_2",
        "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
        "MlpBlock_0": "MlpBlock_3",
    }
    arrays: dict[str, Any] = {}
    for key, value in parameters.items():
        for old, new in names.items():
            key = key.replace(old, new)
        arrays[key] = value
    position = arrays["Transformer/posembed_input/pos_embedding"].reshape(1, 9, 64)
    arrays["Transformer/posembed_input/pos_embedding"] = np.concatenate([position[:, :1], position], axis=1)
    arrays |= {"cls": np.full((1, 1, 64), 0.5, np.float32), "head/kernel": np.ones((64, 5), np.float32)}
    np.savez(tmp_path / "weights.npz", **arrays)
    backbone = load_backbone(tmp_path / "weights.npz")
    assert backbone.loaded is not None
    assert backbone.loaded.format == "JAX ViT"
    assert (backbone.mean, backbone.args["num_heads"]) == ((0.5, 0.5, 0.5), 4)
    cls_token = torch.from_numpy(position[:, :1]) + 0.5
    assert_features(backbone, loca_tokens(parameters, images(), cls_token)[:, 1:], atol=2e-5)


# ------------------------------------------------------------------------------------------------ what is refused


def test_keys_that_only_a_wrapper_tells_apart_are_refused(tmp_path: Path):
    state = network(1).model.state_dict()
    torch.save({**state, "module.norm.weight": torch.zeros(128)}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"only wrappers tell apart: norm\.weight"):
        load_backbone(tmp_path / "weights.pth")


def test_files_with_several_networks_of_which_none_is_the_teacher(tmp_path: Path):
    state = network(1).model.state_dict()
    torch.save({**under("first.", state), **under("second.", state)}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"holds several networks and does not say which .*'first\.', 'second\.'"):
        load_backbone(tmp_path / "weights.pth")
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"holds one network, .* and no student"):
        load_backbone(tmp_path / "weights.pth", network="student")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {key: value for key, value in state.items() if "blocks.0." not in key}, "no network"),
        (lambda state: {key: value for key, value in state.items() if "blocks.1.mlp" not in key}, "4 keys missing"),
        (lambda state: {**state, "norm.weight": torch.ones(5)}, r"norm\.weight \(5,\) instead of \(128,\)"),
        (lambda state: {**state, "norm.weight": torch.full((128,), math.nan)}, "1 keys that are not finite: norm"),
        (lambda state: {**state, "pos_embed": torch.ones(1, 8, 128)}, "8 positions, .* is no square grid"),
        (lambda state: {**state, "patch_embed.proj.weight": torch.ones(128, 1, 16, 16)}, "for square patches of RGB"),
    ],
)
def test_networks_that_are_not_whole_are_refused(tmp_path: Path, change: Callable[[State], State], message: str):
    torch.save(change(dict(network(1).model.state_dict())), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=message):
        load_backbone(tmp_path / "weights.pth")


def test_a_missing_block_in_the_middle_is_named(tmp_path: Path):
    state = network(1, args={**SMALL, "depth": 3}).model.state_dict()
    torch.save({key: value for key, value in state.items() if "blocks.1." not in key}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"blocks are numbered to 2, but \[1\] are missing"):
        load_backbone(tmp_path / "weights.pth")
