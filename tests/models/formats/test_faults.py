"""Regression tests: files with formerly wrong features, unnecessary errors or misleading messages."""

import argparse
import io
import os
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.models.formats.architectures import (
    Resize,
    State,
    antialiased_bicubic,
    bicubic,
    dinov3,
    dinov3_state,
    scaled_bicubic,
    vit_state,
)
from tests.models.formats.cases import VIT_SIZES, Network, deviation, junk, save, under, vit
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from cribo.models import Backbone, build_backbone, load_backbone, load_pretrained, save_backbone

PATCH = 16


def assert_same(backbone: Backbone, network: Network, sizes: tuple[tuple[int, int], ...] = VIT_SIZES) -> None:
    assert max(deviation(backbone, network, size) for size in sizes) < 1e-5


HEADS_OF_DINO = junk("dino_head.mlp.0.weight", "ibot_head.mlp.0.weight")

# ------------------------------------------------------------------------------------------------------- Segmenter


def segmenter(folder: Path, normalization: str) -> Path:
    """Files as written by its training: `variant.yml` with Python tuples."""
    state = {**under("encoder.", vit_state(1)), **junk("encoder.head.weight", "decoder.cls_emb")}
    state |= junk("decoder.proj_dec.weight")
    net: dict[str, Any] = {"backbone": "vit", "image_size": (48, 48), "normalization": normalization}
    (folder / "variant.yml").write_text(yaml.dump({"net_kwargs": net, "inference_kwargs": {"window_size": 48}}))
    return save(folder, {"model": state, "optimizer": {}, "n_iter": 3})


def test_the_folder_of_segmenter(tmp_path: Path):
    path = segmenter(tmp_path, "vit")
    assert "!!python/tuple" in (tmp_path / "variant.yml").read_text()
    assert load_backbone(path).mean == (0.5, 0.5, 0.5)
    assert load_backbone(segmenter(tmp_path, "deit")).mean == (0.485, 0.456, 0.406)
    (tmp_path / "variant.yml").write_text("net_kwargs: !!python/object/apply:os.system ['exit 1']\n")
    with pytest.raises(ValueError, match=r"variant\.yml is damaged .*os\.system"):
        load_backbone(path)
    (tmp_path / "variant.yml").write_text("net_kwargs:\n")
    assert load_backbone(path).mean == (0.5, 0.5, 0.5)


def test_another_encoder_with_a_decoder_is_not_recognised_as_segmenter(tmp_path: Path):
    state = {**under("encoder.", vit_state(1)), **junk("decoder.conv.weight")}
    backbone = load_backbone(save(tmp_path, {"model": state}))
    assert_same(backbone, vit(vit_state(1), bicubic), VIT_SIZES[:1])
    assert (backbone.mean, backbone.numerics.norm_eps) == ((0.485, 0.456, 0.406), None)


# ---------------------------------------------------------------------------------------------------------- DINOv3


def dinov3_config(folder: Path, **student: Any) -> None:
    about = {"arch": "vit_small", "patch_size": PATCH, "n_storage_tokens": 4, "norm_layer": "layernormbf16"}
    about |= {"pos_embed_rope_dtype": "fp32", **student}
    crops = {"global_crops_size": 48, "rgb_mean": [0.4, 0.4, 0.4], "rgb_std": [0.2, 0.2, 0.2]}
    (folder / "config.yaml").write_text(yaml.safe_dump({"student": about, "crops": crops}))


@pytest.mark.parametrize("how", ["separate", "max", "min"])
def test_coordinates_are_scaled_as_configured_in_dinov3(tmp_path: Path, how: str):
    state = dinov3_state(1, bias="plain", base=30.0)
    network = partial(dinov3, state, heads=2, eps=1e-6, coordinates=how)
    folder = tmp_path / "eval/training_99"
    folder.mkdir(parents=True)
    teacher = {**under("backbone.", state), **HEADS_OF_DINO}
    torch.save({"teacher": teacher}, folder / "teacher_checkpoint.pth")
    backbone = load_backbone(folder / "teacher_checkpoint.pth")
    assert "no config.yaml of its training beside or above it" in str(backbone.loaded)
    dinov3_config(tmp_path, pos_embed_rope_normalize_coords=how, norm_layer="layernorm")
    backbone = load_backbone(folder / "teacher_checkpoint.pth")
    assert_same(backbone, network)
    assert (backbone.mean, backbone.std) == ((0.4,) * 3, (0.2,) * 3)
    assert str(tmp_path / "config.yaml") in str(backbone.loaded)
    save_backbone(backbone, tmp_path / "saved")
    assert_same(load_backbone(tmp_path / "saved"), network, VIT_SIZES[-1:])
    dinov3_config(tmp_path, pos_embed_rope_dtype="bf16")
    assert "rotary embedding in bfloat16" in str(load_backbone(folder / "teacher_checkpoint.pth").loaded)
    dinov3_config(tmp_path, norm_layer="rmsnorm")
    with pytest.raises(ValueError, match=r"teacher_checkpoint\.pth.*config\.yaml has norm_layer 'rmsnorm'"):
        load_backbone(folder / "teacher_checkpoint.pth")
    dinov3_config(tmp_path, patch_size=14)  # of another training
    assert "no config.yaml" in str(load_backbone(folder / "teacher_checkpoint.pth").loaded)


@pytest.mark.parametrize(
    ("student", "resize"),
    [
        ({"interpolate_antialias": False, "interpolate_offset": 0.1}, scaled_bicubic),
        ({"interpolate_antialias": False, "interpolate_offset": 0.0}, bicubic),
        ({"interpolate_antialias": True, "interpolate_offset": 0.0}, antialiased_bicubic),
    ],
    ids=["offset", "plain", "antialiased"],
)
@pytest.mark.parametrize("registers", [0, 4])
def test_positions_are_resized_as_configured_in_dinov2(
    tmp_path: Path, student: dict[str, Any], resize: Resize, registers: int
):
    state = vit_state(1, scale="ls{}.gamma", registers=registers)
    path = save(tmp_path, {"teacher": {**under("backbone.", state), **HEADS_OF_DINO}}, "teacher_checkpoint.pth")
    about = {"arch": "vit_small", "patch_size": PATCH, "num_register_tokens": registers, **student}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"student": about}))
    assert_same(load_backbone(path), vit(state, resize))


def test_franca(tmp_path: Path):
    """As released: a teacher without prefixes, with chunked blocks; RASA's head is in a separate file."""
    source = vit_state(1, scale="ls{}.gamma")
    state = {key.replace("blocks.", f"blocks.{int('blocks.1' in key)}."): value for key, value in source.items()}
    for content in (state, under("backbone.", {**state, **junk("rasa_head.pos_pred.weight")})):
        path = save(tmp_path, {"teacher": content}, "franca_vitb14_In21K.pth")
        assert_same(load_backbone(path), vit(source, scaled_bicubic))


# ---------------------------------------------------------------------------------------- checkpoints of many parts


def test_a_folder_of_torch_distributed_checkpoint(tmp_path: Path):
    """As written by DINOv3's training: `ckpt/<iteration>`, with optimiser and iteration."""
    state = dinov3_state(1)
    model = {
        **under("teacher.backbone.", state),
        **under("student.backbone.", {key: value + 0.1 for key, value in state.items() if "periods" not in key}),
        **under("teacher.", HEADS_OF_DINO),
        "student.backbone.rope_embed.periods": state["rope_embed.periods"],
    }
    optimizer = {"state": {"student.backbone.cls_token": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    for step in (9, 99):
        save_distributed(
            {"iteration": step, "model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / f"ckpt/{step}"
        )
    dinov3_config(tmp_path)
    for given in (tmp_path / "ckpt/99", str(tmp_path / "ckpt/99"), tmp_path):
        backbone = load_backbone(given)
        assert_same(backbone, partial(dinov3, state, heads=2))
        assert backbone.loaded is not None
        assert (backbone.loaded.format, backbone.loaded.network) == ("DINOv2 or DINOv3 training", "teacher")
    assert "using the last checkpoint of the training, ckpt/99" in str(backbone.loaded)
    assert load_pretrained(backbone, tmp_path / "ckpt/9").network == "teacher"
    piece = next((tmp_path / "ckpt/99").glob("*.distcp"))
    piece.write_bytes(piece.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"ckpt/99 is damaged"):
        load_backbone(tmp_path / "ckpt/99")
    piece.unlink()
    with pytest.raises(ValueError, match=r"ckpt/99 is damaged .*FileNotFoundError"):
        load_backbone(tmp_path / "ckpt/99")
    os.mkfifo(piece)
    with pytest.raises(ValueError, match="not a regular file"):
        load_backbone(tmp_path / "ckpt/99")
    piece.unlink()
    piece.symlink_to(next((tmp_path / "ckpt/9").glob("*.distcp")))
    with pytest.raises(ValueError, match="not inside"):
        load_backbone(tmp_path / "ckpt/99")


def test_one_ranks_part_of_a_network_is_rejected_and_the_whole_named(tmp_path: Path):
    whole = tmp_path / "eval/training_9/teacher_checkpoint.pth"
    part = tmp_path / "model_0000009.rank_1.pth"
    flat = {"teacher.backbone._fsdp_wrapped_module._flat_param": torch.ones(5), "teacher.dino_head.a": torch.ones(2)}
    torch.save({"model": flat, "iteration": 9}, part)
    with pytest.raises(ValueError, match=r"rank_1\.pth contains one rank's part .*teacher_checkpoint\.pth"):
        load_backbone(part)
    whole.parent.mkdir(parents=True)
    torch.save({"teacher": {}}, whole)
    with pytest.raises(ValueError, match=rf"{whole} may be the whole network"):
        load_backbone(part)
    # CAPI's rank files contain parts of each parameter.
    local = {"student.backbone.module.patch_embed.parametrizations.weight.original": torch.ones(2, 2)}
    torch.save({"model": local, "iteration": 9}, part)
    with pytest.raises(ValueError, match=r"contains one rank's part"):
        load_backbone(part)


def test_sharded_tensors_are_rejected(tmp_path: Path):
    """DINOv2 pickles PyTorch's sharded tensors, which require a process group."""
    content = io.BytesIO()
    torch.save({"model": {"a": torch.ones(2)}}, content)
    with zipfile.ZipFile(content) as archive, zipfile.ZipFile(tmp_path / "model.rank_0.pth", "w") as forged:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith("data.pkl"):
                data = b"\x80\x02ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n)\x81."
            forged.writestr(name, data)
    with pytest.raises(ValueError, match=r"rank_0\.pth contains one rank's part of a sharded network"):
        load_backbone(tmp_path / "model.rank_0.pth")


def test_orbax_is_rejected_with_a_conversion_command(tmp_path: Path):
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_9/_METADATA").write_text("{}")
    with pytest.raises(ValueError, match=r"step_9 is an Orbax checkpoint.*numpy\.savez"):
        load_backbone(tmp_path / "step_9")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["radio_model.model.patch_generator.embedder.weight"], r"is a RADIO checkpoint.*timm's copy"),
        (["visual_model.head.ln_final.weight", "text_model.backbone.token_embedding.weight"], r"is a dino\.txt check"),
        (["model/res2_0_branch2a_w", "conv1_w"], r"is a Caffe2 network"),
    ],
)
def test_known_unsupported_files_give_the_reason(tmp_path: Path, keys: list[str], message: str):
    content: dict[str, Any] = {}
    for key in keys:
        container, _, name = key.rpartition("/")
        (content.setdefault(container, {}) if container else content)[name] = torch.ones(2, 2)
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=rf"weights\.pth {message}"):
        load_backbone(tmp_path / "weights.pth")


# ------------------------------------------------------------------------------------------- notes, names and errors


def resnet_state(layers: tuple[int, ...] = (1, 1, 1, 1), seed: int = 0) -> State:
    args = {"layers": layers, "channels": (8, 16, 24, 32)}
    return dict(build_backbone("resnet50", args=args, image_size=64, seed=seed).model.state_dict())


@pytest.mark.parametrize("arch", ["resnet50_8s", "resnet50_16s", "resnet50"])
def test_the_stride_of_a_resnet_comes_from_the_options_in_the_file(tmp_path: Path, arch: str):
    for content in (
        {"args": argparse.Namespace(arch=arch), "model": resnet_state()},
        {"arch": arch, "state_dict": resnet_state()},
        {"hyper_parameters": {"arch": arch}, "state_dict": resnet_state()},
    ):
        torch.save(content, tmp_path / "weights.pth")
        backbone = load_backbone(tmp_path / "weights.pth")
        assert backbone.patch_size == {"8s": 8, "16s": 16}.get(arch[9:], 32)
    if backbone.patch_size < 32:
        other = build_backbone("resnet50", args={**backbone.args, "output_stride": 32}, image_size=64)
        with pytest.raises(ValueError, match=rf"stride of {backbone.patch_size}, the backbone has 32: build it with"):
            load_pretrained(other, tmp_path / "weights.pth")
    else:  # a file without strides allows any
        other = build_backbone("resnet50", args={**backbone.args, "output_stride": 8}, image_size=64)
        load_pretrained(other, tmp_path / "weights.pth")


def test_files_truncated_between_blocks_have_a_note(tmp_path: Path):
    state = build_backbone("vit_small_patch16_224", args={"depth": 11}, image_size=32).model.state_dict()
    torch.save(state, tmp_path / "weights.pth")
    assert "has 11 blocks, networks of this width usually 12" in str(load_backbone(tmp_path / "weights.pth").loaded)
    torch.save(resnet_state((3, 4, 6, 2)), tmp_path / "weights.pth")
    assert "stages have 3, 4, 6, 2 blocks, which no usual" in str(load_backbone(tmp_path / "weights.pth").loaded)


def test_the_error_for_a_wrong_name_contains_the_right_one(tmp_path: Path):
    torch.save({"state_dict": resnet_state()}, tmp_path / "weights.pth")
    for name in ("resnet50c", "vit_small_patch16_224"):
        with pytest.raises(
            ValueError, match=rf"does not fit {name}.*the file contains a resnet50 with .*: give that name"
        ):
            load_backbone(tmp_path / "weights.pth", name=name)


@pytest.mark.parametrize(
    ("extra", "group"),
    [
        ({"best_acc1": torch.tensor(71.0)}, "metric"),
        ({"val_miou": torch.tensor(0.5)}, "metric"),
        ({"class_weights": torch.ones(3)}, "metric"),
        ({"optimizer_of_the_head": {"state": {0: {"exp_avg": torch.ones(3)}}}}, "training state"),
        ({"lr_scheduler": {"last": torch.ones(1)}}, "training state"),
        ({"criterion": {"weight": torch.ones(3)}}, "loss"),
    ],
    ids=str,
)
def test_training_statistics_are_ignored(tmp_path: Path, extra: dict[str, Any], group: str):
    for content in ({"model": vit_state(1), **extra}, {**vit_state(1), **extra}):
        torch.save(content, tmp_path / "weights.pth")
        loaded = load_backbone(tmp_path / "weights.pth").loaded
        assert loaded is not None
        assert set(loaded.dropped) == {group}


@pytest.mark.parametrize(
    "content",
    [
        {"cls_token": torch.ones(1), "patch_embed.projection.weight": torch.ones(2)},
        {**vit_state(1), "pos_embed": torch.ones(1, 8, 128)},
        {"state_dict": {**vit_state(1), "blocks.0.gamma_1": torch.ones(2), "blocks.0.ls1.gamma": torch.ones(2)}},
        {"layers.0.attn.attn.in_proj_weight": torch.ones(2), "patch_embed.projection.weight": torch.ones(())},
        {"embeddings.patch_embeddings.weight": torch.ones(2), "layer.0.layer_scale1.lambda1": torch.ones(2)},
        {"epoch": 3},
    ],
)
def test_every_error_names_the_file(tmp_path: Path, content: dict[str, Any]):
    torch.save(content, tmp_path / "of_someone.pth")
    with pytest.raises(ValueError, match=r"of_someone\.pth"):
        load_backbone(tmp_path / "of_someone.pth")


def test_a_damaged_list_of_files_in_an_archive_is_reported(tmp_path: Path):
    path = tmp_path / "weights.npz"
    np.savez(path, vit_state(1)["cls_token"].numpy())
    path.write_bytes(path.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x03"))  # the list at the end of a zip file
    with pytest.raises(ValueError, match=r"weights\.npz is damaged or not a weight file"):
        load_backbone(path)
