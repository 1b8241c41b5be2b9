"""Regression tests: files with formerly wrong features, unnecessary errors or misleading messages."""

import argparse
import io
import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import yaml
from timm.data.config import resolve_data_config
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from cribo.models import build_backbone, load_backbone, load_pretrained, save_backbone
from cribo.models.config import NetworkName

State = dict[str, Tensor]
WIDTH, HEADS, DEPTH, PATCH, SIDE = 64, 1, 2, 16, 3
SIZES = [(48, 48), (80, 80), (48, 96)]


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height * 1000 + width))


def vit_state(seed: int = 0, *, rotary: bool = False, scaled: bool = False, registers: int = 0) -> State:
    """Tensors of a vision transformer under the names of DINO, DINOv2 (`scaled`) and DINOv3 (`rotary`)."""
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, WIDTH), "norm.weight": (WIDTH,), "norm.bias": (WIDTH,)}
    shapes |= {"patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH), "patch_embed.proj.bias": (WIDTH,)}
    if rotary:
        shapes["storage_tokens"] = (1, registers, WIDTH)
    else:
        shapes["pos_embed"] = (1, SIDE * SIDE + 1, WIDTH)
        shapes |= {"register_tokens": (1, registers, WIDTH)} if registers else {}
    shapes |= {"mask_token": (1, WIDTH)} if scaled or rotary else {}
    for block in (f"blocks.{number}." for number in range(DEPTH)):
        layers = {"attn.qkv": (WIDTH, 3 * WIDTH), "attn.proj": (WIDTH, WIDTH)}
        layers |= {"mlp.fc1": (WIDTH, 4 * WIDTH), "mlp.fc2": (4 * WIDTH, WIDTH)}
        for name, (inputs, outputs) in layers.items():
            shapes |= {f"{block}{name}.weight": (outputs, inputs), f"{block}{name}.bias": (outputs,)}
        for name in ("norm1", "norm2"):
            shapes |= {f"{block}{name}.weight": (WIDTH,), f"{block}{name}.bias": (WIDTH,)}
        if scaled or rotary:
            shapes |= {f"{block}ls1.gamma": (WIDTH,), f"{block}ls2.gamma": (WIDTH,)}
    generator = torch.Generator().manual_seed(seed)
    state = {key: 0.2 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return {key: value + 1 if "norm" in key and key.endswith("weight") else value for key, value in state.items()}


def vit_tokens(
    state: State,
    batch: Tensor,
    *,
    eps: float = 1e-6,
    positions: dict[str, Any] | None = None,
    rope: Tensor | None = None,
) -> Tensor:
    """[CLS] and patch tokens; `positions`: options of `interpolate` and the offset of scale factors; `rope`: angles."""
    patches = F.conv2d(batch, state["patch_embed.proj.weight"], state.get("patch_embed.proj.bias"), stride=PATCH)
    grid = patches.shape[2:]
    tokens = torch.cat([state["cls_token"].expand(len(batch), -1, -1), patches.flatten(2).mT], dim=1)
    if "pos_embed" in state:
        position = state["pos_embed"]
        if grid != (SIDE, SIDE):
            options = {"mode": "bicubic", "offset": None, **(positions or {})}
            offset = options.pop("offset")
            size: dict[str, Any] = {"size": tuple(grid)}
            if offset is not None:
                size = {"scale_factor": tuple((length + offset) / SIDE for length in grid)}
            table = F.interpolate(position[:, 1:].mT.unflatten(2, (SIDE, SIDE)), **size, **options)
            position = torch.cat([position[:, :1], table.flatten(2).mT], dim=1)
        tokens = tokens + position
    extra = next((state[key] for key in ("register_tokens", "storage_tokens") if key in state), None)
    prefix = 1
    if extra is not None:
        tokens = torch.cat([tokens[:, :1], extra.expand(len(batch), -1, -1), tokens[:, 1:]], dim=1)
        prefix += extra.shape[1]

    def norm(value: Tensor, name: str) -> Tensor:
        return F.layer_norm(value, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    def turned(value: Tensor) -> Tensor:
        if rope is None:
            return value
        first, second = value[..., prefix:, :].chunk(2, dim=-1)
        rotated = value[..., prefix:, :] * rope.cos() + torch.cat([-second, first], dim=-1) * rope.sin()
        return torch.cat([value[..., :prefix, :], rotated], dim=-2)

    for block in (f"blocks.{number}" for number in range(DEPTH)):
        bias = state[f"{block}.attn.qkv.bias"] * state.get(f"{block}.attn.qkv.bias_mask", 1)
        mixed = F.linear(norm(tokens, f"{block}.norm1"), state[f"{block}.attn.qkv.weight"], bias)
        query, key, value = mixed.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (turned(query) @ turned(key).mT / math.sqrt(WIDTH // HEADS)).softmax(-1)
        out = (weights @ value).transpose(1, 2).flatten(2)
        out = F.linear(out, state[f"{block}.attn.proj.weight"], state[f"{block}.attn.proj.bias"])
        tokens = tokens + out * state.get(f"{block}.ls1.gamma", 1)
        hidden = F.linear(
            norm(tokens, f"{block}.norm2"), state[f"{block}.mlp.fc1.weight"], state[f"{block}.mlp.fc1.bias"]
        )
        out = F.linear(F.gelu(hidden), state[f"{block}.mlp.fc2.weight"], state[f"{block}.mlp.fc2.bias"])
        tokens = tokens + out * state.get(f"{block}.ls2.gamma", 1)
    tokens = norm(tokens, "norm")
    return torch.cat([tokens[:, :1], tokens[:, prefix:]], dim=1)


def assert_same(backbone: Any, expected: Any, sizes: list[tuple[int, int]] = SIZES) -> None:
    for size in sizes:
        batch = images(*size)
        found, wanted = backbone.eval().encode(batch), expected(batch)
        torch.testing.assert_close(found.tokens, wanted[:, 1:], rtol=0, atol=1e-5)
        torch.testing.assert_close(found.global_token, wanted[:, 0], rtol=0, atol=1e-5)


def under(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


OFFSET = {"offset": 0.1}
HEADS_OF_DINO = {f"{head}.mlp.0.weight": torch.ones(2, 2) for head in ("dino_head", "ibot_head")}

# ------------------------------------------------------------------------------------------------------- Segmenter


def segmenter(folder: Path, normalization: str) -> Path:
    """Files as written by its training: `variant.yml` with Python tuples."""
    state = {**under("encoder.", vit_state()), "encoder.head.weight": torch.ones(2, WIDTH)}
    state |= {"decoder.cls_emb": torch.ones(1, 2, WIDTH), "decoder.proj_dec.weight": torch.ones(WIDTH, WIDTH)}
    torch.save({"model": state, "optimizer": {}, "n_iter": 3}, folder / "checkpoint.pth")
    net: dict[str, Any] = {"backbone": "vit", "image_size": (48, 48), "normalization": normalization}
    (folder / "variant.yml").write_text(yaml.dump({"net_kwargs": net, "inference_kwargs": {"window_size": 48}}))
    return folder / "checkpoint.pth"


def test_the_folder_of_segmenter(tmp_path: Path):
    path = segmenter(tmp_path, "vit")
    assert "!!python/tuple" in (tmp_path / "variant.yml").read_text()
    backbone = load_backbone(path)
    options = {"mode": "bilinear"}
    assert_same(backbone, lambda batch: vit_tokens(vit_state(), batch, eps=1e-5, positions=options))
    assert backbone.mean == (0.5, 0.5, 0.5)
    assert load_backbone(segmenter(tmp_path, "deit")).mean == (0.485, 0.456, 0.406)
    (tmp_path / "variant.yml").write_text("net_kwargs: !!python/object/apply:os.system ['exit 1']\n")
    with pytest.raises(ValueError, match=r"variant\.yml is damaged .*os\.system"):
        load_backbone(path)
    (tmp_path / "variant.yml").write_text("net_kwargs:\n")
    assert load_backbone(path).mean == (0.5, 0.5, 0.5)


def test_another_encoder_with_a_decoder_is_not_recognised_as_segmenter(tmp_path: Path):
    state = {**under("encoder.", vit_state()), "decoder.conv.weight": torch.ones(2, 2)}
    torch.save({"model": state}, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_same(backbone, lambda batch: vit_tokens(vit_state(), batch), SIZES[:1])
    assert (backbone.mean, backbone.numerics.norm_eps) == ((0.485, 0.456, 0.406), None)


# -------------------------------------------------------------------------------------------------- MMSegmentation


def test_a_vit_of_mmsegmentation_without_patch_bias(tmp_path: Path):
    names = {
        "norm.": "ln1.",
        "blocks.": "layers.",
        "patch_embed.proj": "patch_embed.projection",
        ".norm": ".ln",
        ".attn.qkv.": ".attn.attn.in_proj_",
        ".attn.proj.": ".attn.attn.out_proj.",
        ".mlp.fc1.": ".ffn.layers.0.0.",
        ".mlp.fc2.": ".ffn.layers.1.",
    }
    source = {key: value for key, value in vit_state().items() if key != "patch_embed.proj.bias"}
    state = {}
    for key, value in source.items():
        for own, theirs in names.items():
            key = key.replace(own, theirs)
        state[f"backbone.{key}"] = value
    state["decode_head.conv_seg.weight"] = torch.ones(2, 2)
    torch.save({"meta": {"PALETTE": []}, "state_dict": state}, tmp_path / "vit.pth")
    assert_same(load_backbone(tmp_path / "vit.pth"), lambda batch: vit_tokens(source, batch))


# ---------------------------------------------------------------------------------------------------------- DINOv3


def rope_angles(periods: Tensor, grid: tuple[int, int], how: str = "separate") -> Tensor:
    rows, columns = (torch.arange(size) + 0.5 for size in grid)
    sides = {"separate": grid, "max": (max(grid),) * 2, "min": (min(grid),) * 2}[how]
    places = torch.cartesian_prod(rows / sides[0], columns / sides[1]) * 2 - 1
    angles = (2 * math.pi * places[:, :, None] / periods.float()).flatten(1)
    return torch.cat([angles, angles], dim=1)


def dinov3_state(*, masked: bool, base: float = 100.0) -> State:
    state = vit_state(rotary=True, registers=4)
    quarter = WIDTH // HEADS // 4
    state["rope_embed.periods"] = (base ** (torch.arange(quarter) / quarter)).bfloat16()
    for block in range(DEPTH):
        if masked:
            mask = torch.ones(3 * WIDTH)
            mask[WIDTH : 2 * WIDTH] = 0
            state[f"blocks.{block}.attn.qkv.bias_mask"] = mask
    return state


def dinov3_tokens(state: State, batch: Tensor, *, eps: float = 1e-5, how: str = "separate") -> Tensor:
    grid = (batch.shape[2] // PATCH, batch.shape[3] // PATCH)
    return vit_tokens(state, batch, eps=eps, rope=rope_angles(state["rope_embed.periods"], grid, how))


def dinov3_config(folder: Path, **student: Any) -> None:
    about = {"arch": "vit_small", "patch_size": PATCH, "n_storage_tokens": 4, "norm_layer": "layernormbf16"}
    about |= {"pos_embed_rope_dtype": "fp32", **student}
    crops = {"global_crops_size": 48, "rgb_mean": [0.4, 0.4, 0.4], "rgb_std": [0.2, 0.2, 0.2]}
    (folder / "config.yaml").write_text(yaml.safe_dump({"student": about, "crops": crops}))


@pytest.mark.parametrize("masked", [True, False])
def test_dinov3_uses_stored_periods_and_key_bias(tmp_path: Path, masked: bool):
    state = dinov3_state(masked=masked)
    torch.save(state, tmp_path / "dinov3.pth")
    backbone = load_backbone(tmp_path / "dinov3.pth")
    assert_same(backbone, lambda batch: dinov3_tokens(state, batch))
    save_backbone(backbone, tmp_path / "saved")
    assert_same(load_backbone(tmp_path / "saved"), lambda batch: dinov3_tokens(state, batch))


@pytest.mark.parametrize("how", ["separate", "max", "min"])
def test_coordinates_are_scaled_as_configured_in_dinov3(tmp_path: Path, how: str):
    state = dinov3_state(masked=False, base=30.0)
    folder = tmp_path / "eval/training_99"
    folder.mkdir(parents=True)
    teacher = {**under("backbone.", state), **HEADS_OF_DINO}
    torch.save({"teacher": teacher}, folder / "teacher_checkpoint.pth")
    backbone = load_backbone(folder / "teacher_checkpoint.pth")
    assert "no config.yaml of its training beside or above it" in str(backbone.loaded)
    dinov3_config(tmp_path, pos_embed_rope_normalize_coords=how, norm_layer="layernorm")
    backbone = load_backbone(folder / "teacher_checkpoint.pth")
    assert_same(backbone, lambda batch: dinov3_tokens(state, batch, eps=1e-6, how=how))
    assert (backbone.mean, backbone.std) == ((0.4,) * 3, (0.2,) * 3)
    assert str(tmp_path / "config.yaml") in str(backbone.loaded)
    save_backbone(backbone, tmp_path / "saved")
    assert_same(
        load_backbone(tmp_path / "saved"), lambda batch: dinov3_tokens(state, batch, eps=1e-6, how=how), SIZES[-1:]
    )
    dinov3_config(tmp_path, pos_embed_rope_dtype="bf16")
    assert "rotary embedding in bfloat16" in str(load_backbone(folder / "teacher_checkpoint.pth").loaded)
    dinov3_config(tmp_path, norm_layer="rmsnorm")
    with pytest.raises(ValueError, match=r"teacher_checkpoint\.pth.*config\.yaml has norm_layer 'rmsnorm'"):
        load_backbone(folder / "teacher_checkpoint.pth")
    dinov3_config(tmp_path, patch_size=14)  # of another training
    assert "no config.yaml" in str(load_backbone(folder / "teacher_checkpoint.pth").loaded)


@pytest.mark.parametrize(
    ("student", "options"),
    [
        ({"interpolate_antialias": False, "interpolate_offset": 0.1}, OFFSET),
        ({"interpolate_antialias": False, "interpolate_offset": 0.0}, {}),
        ({"interpolate_antialias": True, "interpolate_offset": 0.0}, {"antialias": True}),
    ],
    ids=["offset", "plain", "antialiased"],
)
@pytest.mark.parametrize("registers", [0, 4])
def test_positions_are_resized_as_configured_in_dinov2(
    tmp_path: Path, student: dict[str, Any], options: dict[str, Any], registers: int
):
    state = vit_state(scaled=True, registers=registers)
    torch.save({"teacher": {**under("backbone.", state), **HEADS_OF_DINO}}, tmp_path / "teacher_checkpoint.pth")
    about = {"arch": "vit_small", "patch_size": PATCH, "num_register_tokens": registers, **student}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"student": about}))
    backbone = load_backbone(tmp_path / "teacher_checkpoint.pth")
    assert_same(backbone, lambda batch: vit_tokens(state, batch, positions=options))


def test_franca(tmp_path: Path):
    """As released: a teacher without prefixes, with chunked blocks; RASA's head is in a separate file."""
    source = vit_state(scaled=True)
    state = {key.replace("blocks.", f"blocks.{int('blocks.1' in key)}."): value for key, value in source.items()}
    for content in (state, under("backbone.", {**state, "rasa_head.pos_pred.weight": torch.ones(2, 2)})):
        torch.save({"teacher": content}, tmp_path / "franca_vitb14_In21K.pth")
        backbone = load_backbone(tmp_path / "franca_vitb14_In21K.pth")
        assert_same(backbone, lambda batch: vit_tokens(source, batch, positions=OFFSET))


# ---------------------------------------------------------------------------------------- checkpoints of many parts


def test_a_folder_of_torch_distributed_checkpoint(tmp_path: Path):
    """As written by DINOv3's training: `ckpt/<iteration>`, with optimiser and iteration."""
    state = dinov3_state(masked=True)
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
        assert_same(backbone, lambda batch: dinov3_tokens(state, batch))
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


@pytest.mark.parametrize("networks", [("encoder_q.0.", "encoder_k.0."), ("online_net.0.", "target_net.0.")])
def test_student_and_teacher_of_densecl_and_orl(tmp_path: Path, networks: tuple[str, str]):
    student, teacher = resnet_state(seed=1), resnet_state(seed=2)
    state = {**under(networks[0], student), **under(networks[1], teacher)}
    state |= {"queue": torch.ones(2, 2), "queue2": torch.ones(2, 2)} if "encoder" in networks[0] else {}
    torch.save({"state_dict": state}, tmp_path / "weights.pth")
    expected: tuple[tuple[NetworkName, State], ...] = (("student", student), ("teacher", teacher))
    for which, source in expected:
        backbone = load_backbone(tmp_path / "weights.pth", network=which)
        assert backbone.loaded is not None
        assert backbone.loaded.network == which
        torch.testing.assert_close(backbone.model.conv1.weight.data, source["conv1.weight"])
    wrong: dict[str, Any] = {"network": "foo"}
    with pytest.raises(ValueError, match=r"weights\.pth.*network must be one of teacher, student, got 'foo'"):
        load_backbone(tmp_path / "weights.pth", **wrong)


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
    for content in ({"model": vit_state(), **extra}, {**vit_state(), **extra}):
        torch.save(content, tmp_path / "weights.pth")
        loaded = load_backbone(tmp_path / "weights.pth").loaded
        assert loaded is not None
        assert set(loaded.dropped) == {group}


@pytest.mark.parametrize(
    "content",
    [
        {"cls_token": torch.ones(1), "patch_embed.projection.weight": torch.ones(2)},
        {**vit_state(), "pos_embed": torch.ones(1, 8, WIDTH)},
        {"state_dict": {**vit_state(), "blocks.0.gamma_1": torch.ones(2), "blocks.0.ls1.gamma": torch.ones(2)}},
        {"layers.0.attn.attn.in_proj_weight": torch.ones(2), "patch_embed.projection.weight": torch.ones(())},
        {"embeddings.patch_embeddings.weight": torch.ones(2), "layer.0.layer_scale1.lambda1": torch.ones(2)},
        {"epoch": 3},
    ],
)
def test_every_error_names_the_file(tmp_path: Path, content: dict[str, Any]):
    torch.save(content, tmp_path / "of_someone.pth")
    with pytest.raises(ValueError, match=r"of_someone\.pth"):
        load_backbone(tmp_path / "of_someone.pth")


def test_plain_timm_gets_the_expected_normalisation_from_our_description(tmp_path: Path):
    torch.save({"teacher": under("backbone.", vit_state())}, tmp_path / "weights.pth")
    save_backbone(load_backbone(tmp_path / "weights.pth"), tmp_path)
    about = json.loads((tmp_path / "backbone.json").read_text())
    model = timm.create_model(about["name"], **about["args"])
    assert resolve_data_config(model=model)["mean"] == [0.485, 0.456, 0.406]


def test_a_damaged_list_of_files_in_an_archive_is_reported(tmp_path: Path):
    path = tmp_path / "weights.npz"
    np.savez(path, vit_state()["cls_token"].numpy())
    path.write_bytes(path.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x03"))  # the list at the end of a zip file
    with pytest.raises(ValueError, match=r"weights\.npz is damaged or not a weight file"):
        load_backbone(path)
