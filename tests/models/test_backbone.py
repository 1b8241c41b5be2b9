import copy
import json
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.layers.attention import Attention

from cribo.models import build_backbone, load_backbone, save_backbone
from cribo.models.building import first_blocks, with_stride
from cribo.models.numerics import Numerics

TINY_VIT = {"embed_dim": 64, "depth": 3, "num_heads": 2}
TINY_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}
TINY_CONVNEXT = {"depths": (1, 1, 1, 2), "dims": (8, 16, 32, 64)}
VIT = "vit_small_patch16_224"


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "args", "patch_size", "prefix"),
    [
        (VIT, TINY_VIT, 16, 1),
        ("vit_small_patch8_224", TINY_VIT, 8, 1),
        ("vit_tiny_patch16_224", TINY_VIT, 16, 1),
        ("vit_base_patch14_dinov2", TINY_VIT, 14, 1),
        ("vit_large_patch14_reg4_dinov2", TINY_VIT, 14, 5),
        ("vit_huge_patch14_224", TINY_VIT, 14, 1),
        ("vit_small_patch16_dinov3", {"depth": 2}, 16, 5),
    ],
)
def test_vit_features_are_the_normed_tokens_without_prefix(name, args, patch_size, prefix):
    backbone = build_backbone(name, args=args, image_size=4 * patch_size).eval()
    batch = images(2, 3, 4 * patch_size, 4 * patch_size)
    features = backbone.encode(batch)
    expected = backbone.model.forward_features(batch)
    assert backbone.patch_size == patch_size
    assert features.grid == (4, 4)
    torch.testing.assert_close(features.global_token, expected[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(features.tokens, expected[:, prefix:], rtol=0, atol=1e-6)
    assert features.tokens.shape == (2, 16, backbone.embed_dim)


def test_a_non_square_image_has_its_tokens_row_by_row():
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64).eval()
    # Without attention, MLP and position, a token depends on its own patch only.
    with torch.no_grad():
        backbone.model.pos_embed.zero_()
        for block in backbone.model.blocks:
            block.attn.proj.weight.zero_()
    batch = images(1, 3, 48, 80)
    changed = batch.clone()
    changed[:, :, 16:32, 48:64] += 1  # row 1, column 3
    before, after = backbone.encode(batch), backbone.encode(changed)
    assert before.grid == (3, 5)
    moved = (before.tokens - after.tokens).abs().amax(-1)[0] > 1e-4
    assert moved.nonzero().flatten().tolist() == [1 * 5 + 3]


def test_layers_are_concatenated_with_the_last_block_last():
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64).eval()
    batch = images(2, 3, 64, 64)
    options = {"indices": 3, "norm": True, "output_fmt": "NLC", "intermediates_only": True}
    expected = backbone.model.forward_intermediates(batch, **options)
    torch.testing.assert_close(backbone.encode(batch, layers=3).tokens, torch.cat(expected, -1))
    torch.testing.assert_close(backbone.encode(batch, layers=2).tokens, torch.cat(expected[1:], -1))
    assert torch.equal(backbone.encode(batch, layers=2).global_token, backbone.encode(batch, layers=1).global_token)
    for layers in (0, 4):
        with pytest.raises(ValueError, match=f"layers must be 1 to 3.*got {layers}"):
            backbone.encode(batch, layers=layers)


def test_without_class_token_the_global_token_is_pooled():
    args = {**TINY_VIT, "class_token": False, "global_pool": "avg"}
    backbone = build_backbone(VIT, args=args, image_size=64).eval()
    with torch.no_grad():
        backbone.model.fc_norm.weight.uniform_(0.5, 2)
    batch = images(2, 3, 64, 64)
    features = backbone.encode(batch)
    torch.testing.assert_close(features.tokens, backbone.model.fc_norm(backbone.model.forward_features(batch)))
    torch.testing.assert_close(features.global_token, backbone.model(batch))


@pytest.mark.parametrize(
    ("name", "args", "stride"),
    [
        ("resnet50", TINY_RESNET, 32),
        ("resnet50", {**TINY_RESNET, "output_stride": 8}, 8),
        ("convnext_tiny", TINY_CONVNEXT, 32),
        ("convnext_tiny", {**TINY_CONVNEXT, "output_stride": 16}, 16),
    ],
)
def test_a_feature_map_becomes_tokens(name, args, stride):
    backbone = build_backbone(name, args=args, image_size=96).eval()
    batch = images(2, 3, 64, 96)
    features = backbone.encode(batch)
    feature_map = backbone.model.forward_features(batch)
    if name == "convnext_tiny":
        feature_map = backbone.model.head.norm(feature_map)
    assert backbone.patch_size == stride
    assert features.grid == (64 // stride, 96 // stride)
    assert features.tokens.shape == (2, 64 * 96 // stride**2, backbone.embed_dim)
    torch.testing.assert_close(features.tokens[:, 1], feature_map[:, :, 0, 1])
    torch.testing.assert_close(features.global_token, backbone.model(batch))
    with pytest.raises(ValueError, match="one feature map, so layers must be 1, got 2"):
        backbone.encode(batch, layers=2)


def test_swin_has_its_channels_last():
    args = {"depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 1, 1, 1)}
    backbone = build_backbone("swin_tiny_patch4_window7_224", args=args).eval()
    batch = images(1, 3, 224, 224)
    features = backbone.encode(batch)
    torch.testing.assert_close(features.tokens, backbone.model.forward_features(batch).flatten(1, 2))


def test_networks_of_fixed_size_name_it():
    args = {"depth": 1, "embed_dim": 48, "num_heads": 2}
    backbone = build_backbone("samvit_base_patch16", args=args, image_size=64)
    assert backbone.encode(images(1, 3, 64, 64)).grid == (4, 4)
    with pytest.raises(ValueError, match="built for 64x64 images and accepts no other size, got 80x64"):
        backbone.encode(images(1, 3, 80, 64))


def test_only_parameters_that_encode_uses_are_trained():
    backbone = build_backbone("mobilenetv3_small_050", image_size=64)
    assert backbone.unused_parameters == {"conv_head.weight", "conv_head.bias"}  # after timm's pooling
    features = backbone.encode(images(2, 3, 64, 64))
    (features.tokens.sum() + features.global_token.sum()).backward()
    for parameter in backbone.parameters():
        assert parameter.requires_grad == (parameter.grad is not None)
    assert not build_backbone(VIT, args=TINY_VIT, image_size=64).unused_parameters


def test_building_does_not_change_batch_norm_statistics():
    backbone = build_backbone("resnet50", args=TINY_RESNET, image_size=64)
    assert backbone.training
    assert backbone.model.bn1.num_batches_tracked == 0
    assert torch.equal(backbone.model.bn1.running_var, torch.ones(64))


def test_weights_depend_on_the_seed_only():
    torch.manual_seed(5)
    first = build_backbone(VIT, args=TINY_VIT, image_size=64, seed=3).state_dict()
    state = torch.get_rng_state()
    second = build_backbone(VIT, args=TINY_VIT, image_size=64, seed=3, drop_path=0.2).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    other = build_backbone(VIT, args=TINY_VIT, image_size=64, seed=4).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["model.blocks.0.attn.qkv.weight"], other["model.blocks.0.attn.qkv.weight"])


def test_class_token_and_position_embedding_start_at_two_hundredths():
    model = build_backbone(VIT, args={"depth": 1}).model
    for embedding in (model.cls_token, model.pos_embed):
        assert embedding.std().item() == pytest.approx(0.02, rel=0.1)


def noise_of(backbone, rows: int) -> torch.Tensor:
    return torch.rand(rows, backbone.num_drop_path_sites, generator=torch.Generator().manual_seed(0))


def test_drop_path_sites_and_rates_are_those_of_timm():
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64, drop_path=0.3)
    # Two branches per block; timm's first block, of rate 0, has none.
    assert backbone.drop_path_rates == pytest.approx((0.15, 0.15, 0.3, 0.3))
    assert build_backbone(VIT, args=TINY_VIT, image_size=64).num_drop_path_sites == 0


def test_a_dropped_branch_is_skipped_and_a_kept_one_scaled():
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64, drop_path=0.5)
    batch = images(2, 3, 64, 64)
    noise = torch.tensor([[0.9, 0.9, 0.9, 0.2], [0.1, 0.25, 0.5, 0.49]])
    model = backbone.model
    embedded = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: embedded.append(inputs[0]))
    features = backbone.encode(batch, drop_path_noise=noise)
    x = model.blocks[0](embedded[0])
    for block, columns, rate in zip(model.blocks[1:], (noise[:, :2], noise[:, 2:]), (0.25, 0.5), strict=True):
        kept = (columns >= rate).float() / (1 - rate)
        x = x + kept[:, 0, None, None] * block.attn(block.norm1(x))
        x = x + kept[:, 1, None, None] * block.mlp(block.norm2(x))
    expected = model.norm(x)
    torch.testing.assert_close(features.tokens, expected[:, 1:])
    torch.testing.assert_close(features.global_token, expected[:, 0])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        (VIT, TINY_VIT),
        ("convnext_tiny", {**TINY_CONVNEXT, "ls_init_value": 1.0}),
        ("resnet50", {**TINY_RESNET, "zero_init_last": False}),
    ],
)
def test_drop_path_depends_on_the_sample_only(name, args):
    backbone = build_backbone(name, args=args, image_size=64, drop_path=0.5).eval()
    batch, noise = images(4, 3, 64, 64), noise_of(backbone, 4)
    whole = backbone.encode(batch, drop_path_noise=noise).tokens
    halves = [
        backbone.encode(half, drop_path_noise=numbers).tokens
        for half, numbers in zip(batch.split(2), noise.split(2), strict=True)
    ]
    torch.testing.assert_close(torch.cat(halves), whole)
    assert not torch.allclose(backbone.encode(batch).tokens, whole)


def test_without_noise_nothing_is_dropped_and_nothing_random_is_used():
    dropping = build_backbone(VIT, args=TINY_VIT, image_size=64, drop_path=0.5).train()
    plain = build_backbone(VIT, args=TINY_VIT, image_size=64)
    batch = images(2, 3, 64, 64)
    state = torch.get_rng_state()
    dropping.encode(batch, drop_path_noise=noise_of(dropping, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(dropping.encode(batch).tokens, plain.encode(batch).tokens)


def test_noise_is_reset_after_a_failed_call():
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64, drop_path=0.9)
    batch = images(2, 3, 64, 64)
    expected = backbone.encode(batch).tokens

    def fail(*_: object) -> None:
        raise MemoryError

    last = [module for module in backbone.modules() if isinstance(module, torch.nn.LayerNorm)][-1]
    failing = last.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        backbone.encode(batch, drop_path_noise=torch.zeros(2, 4))
    failing.remove()
    assert torch.equal(backbone.encode(batch).tokens, expected)
    assert torch.equal(backbone.encode(batch.double()).tokens, expected)  # for any float type of the images


def test_a_copy_has_its_own_noise():
    student = build_backbone(VIT, args=TINY_VIT, image_size=64, drop_path=0.5)
    teacher = copy.deepcopy(student)
    batch, noise = images(2, 3, 64, 64), noise_of(student, 2)
    expected = student.encode(batch, drop_path_noise=noise).tokens
    assert torch.equal(teacher.encode(batch, drop_path_noise=noise).tokens, expected)
    other = student.encode(batch, drop_path_noise=1 - noise).tokens
    assert torch.equal(teacher.encode(batch, drop_path_noise=1 - noise).tokens, other)
    assert not torch.equal(other, expected)


@pytest.mark.parametrize(
    ("name", "args"), [(VIT, {**TINY_VIT, "depth": 2}), ("resnet18", {**TINY_RESNET, "zero_init_last": False})]
)
def test_a_backbone_compiles_into_one_graph_keeps_its_names_and_takes_any_size(name, args):
    backbone = build_backbone(name, args=args, image_size=64, drop_path=0.5).eval()
    names, fingerprint = list(backbone.state_dict()), backbone.fingerprint()
    backbone.compile(backend="eager", fullgraph=True)
    assert list(backbone.state_dict()) == names
    assert backbone.fingerprint() == fingerprint
    for shape in ((2, 3, 64, 64), (3, 3, 64, 64), (2, 3, 128, 96)):
        batch = images(*shape)
        noise = noise_of(backbone, shape[0])
        found, expected = backbone(batch, drop_path_noise=noise), backbone.encode(batch, drop_path_noise=noise)
        torch.testing.assert_close(found.tokens, expected.tokens)
        assert found.grid == expected.grid
    torch.testing.assert_close(backbone(batch).tokens, backbone.encode(batch).tokens)
    whole = copy.deepcopy(backbone)  # a copy is not compiled, and computes the same
    torch.testing.assert_close(whole(batch).tokens, backbone.encode(batch).tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_graph_does_not_overwrite_earlier_features():
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64).cuda().eval()
    backbone.compile("reduce-overhead")
    batches = [images(2, 3, 64, 64).cuda() + shift for shift in range(5)]
    with torch.no_grad():
        found = [backbone(batch) for batch in batches]
        for features, batch in zip(found, batches, strict=True):
            torch.testing.assert_close(features.tokens, backbone.encode(batch).tokens, rtol=1e-3, atol=1e-3)


def test_attention_stays_fused():
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64)
    assert all(module.fused_attn for module in backbone.modules() if isinstance(module, Attention))


@pytest.mark.parametrize(
    ("shape", "noise", "words"),
    [
        ((2, 1, 64, 64), None, r"images must be \(B, 3, H, W\)"),
        ((3, 64, 64), None, r"images must be \(B, 3, H, W\)"),
        ((1, 3, 64, 225), None, "use 224 or 240"),
        ((1, 3, 9, 64), None, "use 16"),
        ((2, 3, 64, 64), (2, 3), r"drop_path_noise .*\(2, 4\)"),
    ],
)
def test_inputs_of_another_shape_are_refused(shape, noise, words):
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64, drop_path=0.5)
    with pytest.raises(ValueError, match=words):
        backbone.encode(torch.zeros(shape), drop_path_noise=None if noise is None else torch.zeros(noise))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (VIT, {"image_size": 225}, "use 224 or 240"),
        ("halonet_h1", {"image_size": 64}, "256"),
        ("vit_smal_patch16_224", {}, VIT),
        (f"{VIT}.dino", {}, "pretrained="),
        (VIT, {"args": {"dephts": 3}}, "dephts"),
        (VIT, {"args": {"img_size": 64}}, "use image_size"),
        (VIT, {"args": {"attn_drop_rate": 0.1}}, "attn_drop_rate.*use drop_path"),
        (VIT, {"args": {"embed_dim": 65}}, "embed_dim"),
        (VIT, {"drop_path": -0.1}, "drop_path"),
        (VIT, {"drop_path": 1.0}, "drop_path"),
        ("mixer_s32_224", {}, "vision transformer"),
        ("hiera_tiny_224", {"args": {"embed_dim": 16, "stages": (1, 1, 1, 1)}}, "tokens"),
    ],
)
def test_networks_that_cannot_be_built_are_refused_with_the_way_out(name, options, words):
    with pytest.raises(ValueError, match=words):
        build_backbone(name, **options)


@pytest.mark.parametrize(
    ("name", "args", "grid"),
    [
        ("caformer_s18", {}, (3, 2)),
        ("naflexvit_base_patch16_gap", {"depth": 1, "embed_dim": 32, "num_heads": 2}, (6, 4)),
    ],
)
def test_networks_that_name_unexpected_arguments_in_a_list_are_built(name, args, grid):
    backbone = build_backbone(name, args=args, image_size=64).eval()
    assert backbone.takes_any_size
    features = backbone.encode(torch.zeros(2, 3, 96, 64))
    assert features.grid == grid
    assert features.tokens.shape[:2] == (2, grid[0] * grid[1])
    torch.testing.assert_close(features.global_token, features.tokens.mean(dim=1))


def test_the_fingerprint_changes_only_if_the_features_change():
    def build(**options):
        return build_backbone(VIT, args=TINY_VIT, image_size=32, **options)

    first = build().fingerprint()
    assert build(drop_path=0.1).train().fingerprint() == first
    changed = {first}
    for change in (
        lambda backbone: backbone.model.blocks[0].mlp.fc1.bias.data[0].add_(1e-6),
        lambda backbone: backbone.model.cls_token.data.neg_(),
        lambda backbone: setattr(backbone, "mean", (0.5, 0.5, 0.5)),
        lambda backbone: setattr(backbone, "std", (0.5, 0.5, 0.5)),
        lambda backbone: backbone.set_numerics(Numerics(norm_eps=1e-5)),
        lambda backbone: backbone.double(),
    ):
        backbone = build()
        change(backbone)
        changed.add(backbone.fingerprint())
    others = (build(seed=1), build_backbone(VIT, args={**TINY_VIT, "num_heads": 4}, image_size=32))
    assert len(changed | {other.fingerprint() for other in others}) == 9


def test_the_fingerprint_ignores_tensors_that_encode_does_not_read():
    backbone = build_backbone("mobilenetv3_small_050", image_size=64)
    before = backbone.fingerprint()
    assert "conv_head.weight" in backbone.unused_parameters
    backbone.model.conv_head.weight.data.fill_(2)
    assert backbone.fingerprint() == before


@pytest.mark.parametrize(
    ("name", "args"), [(VIT, TINY_VIT), ("resnet18", {"channels": (8, 8, 8, 8)}), ("convnext_tiny", TINY_CONVNEXT)]
)
def test_a_layer_after_the_features_is_in_timms_place(name, args, tmp_path):
    backbone = build_backbone(name, args=args, image_size=64).eval()
    plain = backbone.encode(images(2, 3, 64, 96))
    weight, bias = torch.randn(5, backbone.embed_dim), torch.randn(5)
    backbone.set_readout(weight, bias)
    features = backbone.encode(images(2, 3, 64, 96))
    assert backbone.embed_dim == 5
    torch.testing.assert_close(features.tokens, plain.tokens @ weight.T + bias)
    torch.testing.assert_close(features.global_token, plain.global_token @ weight.T + bias)
    torch.testing.assert_close(features.global_token, backbone.model(images(2, 3, 64, 96)))
    assert backbone.readout is not None
    assert not backbone.readout.weight.requires_grad
    with pytest.raises(ValueError, match=f"must have {plain.tokens.shape[2]} input channels, got .* shape \\(3, 4\\)"):
        backbone.set_readout(torch.zeros(3, 4), torch.zeros(3))

    save_backbone(backbone, tmp_path)
    assert load_backbone(tmp_path).fingerprint() == backbone.fingerprint()
    about = json.loads((tmp_path / "backbone.json").read_text())
    model = timm.create_model(about["name"], **about["args"]).eval()
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "backbone.safetensors"))
    torch.testing.assert_close(model(images(2, 3, 64, 96)), features.global_token)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        (VIT, TINY_VIT),
        (VIT, {**TINY_VIT, "class_token": False, "global_pool": "avg"}),
        ("vit_small_patch16_dinov3", TINY_VIT),
        ("beit_base_patch16_224", TINY_VIT),
        ("beitv2_base_patch16_224", {**TINY_VIT, "use_shared_rel_pos_bias": True, "use_rel_pos_bias": False}),
    ],
)
def test_the_first_blocks_are_a_separate_network(name, args, tmp_path):
    backbone = build_backbone(name, args=args, image_size=64).eval()
    backbone.set_numerics(Numerics(norm_eps=1e-3))
    backbone.mean = (0.4, 0.5, 0.6)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    batch = images(2, 3, 64, 64)
    tokens = backbone.encode(batch, layers=2).tokens[..., : backbone.embed_dim]
    backbone.set_readout(torch.randn(5, 64), torch.zeros(5))
    shorter = first_blocks(backbone, 2).eval()
    torch.testing.assert_close(shorter.encode(batch).tokens, tokens)
    assert (shorter.depth, shorter.args["depth"], shorter.mean) == (2, 2, backbone.mean)
    save_backbone(shorter, tmp_path)
    loaded = load_backbone(tmp_path).eval()
    assert loaded.fingerprint() == shorter.fingerprint()
    torch.testing.assert_close(loaded.encode(batch).tokens, tokens)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"has blocks 1 to 3 to choose from, got {count}"):
            first_blocks(backbone, count)


def test_networks_that_cannot_be_shortened_are_refused():
    resnet = build_backbone("resnet18", args={"channels": (8, 8, 8, 8)})
    with pytest.raises(ValueError, match="resnet18 has no transformer blocks to choose from, got 1"):
        first_blocks(resnet, 1)
    shared = build_backbone("vit_small_patch16_rope_mixed_224", args=TINY_VIT, image_size=64)
    with pytest.raises(ValueError, match=r"cannot be shortened, because all blocks share rope\.freqs"):
        first_blocks(shared, 2)


def test_a_dilated_network_has_the_same_weights_and_a_finer_grid():
    backbone = build_backbone("resnet18", args=TINY_RESNET, image_size=64).eval()
    finer = with_stride(backbone, 16).eval()
    assert (backbone.patch_size, finer.patch_size) == (32, 16)
    own, dilated = backbone.model.state_dict(), finer.model.state_dict()
    assert all(value.equal(own[key]) for key, value in dilated.items())
    batch = images(1, 3, 64, 64)
    args: dict[str, Any] = {**TINY_RESNET, "output_stride": 16, "num_classes": 0}
    reference: Any = timm.create_model("resnet18", **args).eval()
    reference.load_state_dict(own)
    torch.testing.assert_close(finer.encode(batch).tokens, reference.forward_features(batch).flatten(2).mT)
    with pytest.raises(ValueError, match=r"resnet18 cannot have an output stride of 5: "):
        with_stride(backbone, 5)
    with pytest.raises(ValueError, match=r"cannot have an output stride of 8: .* has no argument 'output_stride'"):
        with_stride(build_backbone(VIT, args=TINY_VIT), 8)


READABLE = [
    (VIT, TINY_VIT),
    ("beit_base_patch16_224", TINY_VIT),
    ("resnet18", {"channels": (8, 8, 8, 8)}),
    ("efficientnet_lite0", {"output_stride": 16}),
]


@pytest.mark.parametrize(("name", "args"), READABLE)
def test_removing_the_layer_after_the_features_restores_them(name, args):
    backbone = build_backbone(name, args=args, image_size=64).eval()
    plain, fingerprint, dim = backbone.encode(images(1, 3, 64, 64)).tokens, backbone.fingerprint(), backbone.embed_dim
    backbone.set_readout(torch.randn(5, dim), torch.randn(5))
    backbone.remove_readout()
    assert (backbone.readout, backbone.embed_dim, backbone.args) == (None, dim, args)
    assert backbone.fingerprint() == fingerprint
    torch.testing.assert_close(backbone.encode(images(1, 3, 64, 64)).tokens, plain)
    assert not any("head" in key or "fc." in key for key in backbone.unused_parameters)


def test_the_fingerprint_changes_with_the_layer_after_the_features():
    def build(weight, bias, frozen=False):
        backbone = build_backbone(VIT, args=TINY_VIT, image_size=32).requires_grad_(not frozen)
        backbone.set_readout(weight, bias)
        return backbone.fingerprint()

    one, zero = torch.ones(5, 64), torch.zeros(5)
    first = build(one, zero)
    assert first == build(one, zero, frozen=True)
    others = {build(2 * one, zero), build(one, zero + 1), build(one[:3], zero[:3])}
    assert len(others | {first, build_backbone(VIT, args=TINY_VIT, image_size=32).fingerprint()}) == 5


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "deit_tiny_distilled_patch16_224"])
def test_networks_whose_classifier_reads_other_features_reject_a_layer(name):
    backbone = build_backbone(name, image_size=64)
    before = backbone.fingerprint()
    with pytest.raises(ValueError, match=f"{name} does not support a linear layer .*: use another network"):
        backbone.set_readout(torch.randn(5, backbone.embed_dim), torch.zeros(5))
    assert (backbone.readout, backbone.fingerprint()) == (None, before)


def test_a_layer_after_the_features_reads_the_last_block_only():
    backbone = build_backbone(VIT, args=TINY_VIT, image_size=64)
    backbone.set_readout(torch.randn(5, 64), torch.zeros(5))
    with pytest.raises(ValueError, match=r"layers must be 1, got 2: vit_small_patch16_224 has a linear layer after"):
        backbone.encode(images(1, 3, 64, 64), layers=2)
