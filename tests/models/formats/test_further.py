"""Errors and notes of ResNets, CAPI and Swin; their features are tested by cases."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from tests.models.formats.architectures import State, resnet_state
from tests.models.formats.cases import junk, mmsegmentation, save, under
from tests.models.formats.cases_pyramids import swin_state
from tests.models.formats.cases_resnets import CONFIG, with_names_of_detectron2
from tests.models.formats.cases_transformers import capi_state

from cribo.models import load_backbone
from cribo.models.formats.architecture import infer_architecture

# ------------------------------------------------------------------------------------------------- MMSegmentation

BY_8 = "dilations=(1, 1, 2, 4), strides=(1, 2, 1, 1)"


def pspnet(folder: Path, state: State, settings: str) -> Path:
    content = mmsegmentation(state)
    content["meta"]["cfg"] = f"model = dict(backbone=dict(type='ResNetV1c', {settings}), decode_head=dict())"
    return save(folder, content, "pspnet.pth")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("dilations=(1, 1, 2, 4)", r"strides \(1, 2, 2, 2\), dilations \(1, 1, 2, 4\)"),
        (f"{BY_8}, multi_grid=(1, 2, 4)", r"multi_grid \(1, 2, 4\)"),
        (f"{BY_8}, style='caffe'", "style 'caffe'"),
    ],
)
def test_strides_and_dilations_that_timm_does_not_have_are_refused(tmp_path: Path, settings: str, message: str):
    path = pspnet(tmp_path, resnet_state(1, has_deep_stem=True), settings)
    with pytest.raises(ValueError, match=rf"pspnet\.pth.*{message}.*no ResNet of timm"):
        load_backbone(path)


def test_a_dilated_resnet_d_is_refused(tmp_path: Path):
    path = pspnet(tmp_path, resnet_state(1, has_deep_stem=True, averages=True), BY_8)
    with pytest.raises(ValueError, match=r"pspnet\.pth.*timm's dilated ResNet-D has average pooling in its shortcuts"):
        load_backbone(path)


def test_a_dilated_resnet_of_basic_blocks_is_refused(tmp_path: Path):
    state = timm.create_model("resnet18", channels=(8, 8, 8, 8), num_classes=0).state_dict()
    with pytest.raises(ValueError, match=r"pspnet\.pth.*dilates the first convolution of a block, timm both"):
        load_backbone(pspnet(tmp_path, state, BY_8))


@pytest.mark.parametrize("text", [None, "_base_ = './pspnet.py'\nmodel = dict(backbone=dict(depth=101))"])
def test_a_resnet_without_its_whole_configuration_has_a_note(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "config.py").write_text(text)
    backbone = load_backbone(save(tmp_path, mmsegmentation(resnet_state(1, has_deep_stem=True))))
    assert backbone.patch_size == 32
    assert "does not specify the strides and dilations of its ResNet" in str(backbone.loaded)


# ----------------------------------------------------------------------------------------------------- detectron2


@pytest.mark.parametrize("prefix", ["backbone.bottom_up.", "backbone."])
def test_a_network_trained_by_detectron2_needs_its_configuration(tmp_path: Path, prefix: str):
    content = {"model": under(prefix, with_names_of_detectron2(resnet_state(1)))}
    path = save(tmp_path, content, "model_final.pth")
    with pytest.raises(ValueError, match=r"model_final\.pth .*config\.yaml .*channel order"):
        load_backbone(path)
    config = CONFIG.format("BGR", [103.53, 116.28, 123.675], [1.0, 2.0, 4.0])
    # As in Caffe: strides in another convolution.
    (tmp_path / "config.yaml").write_text(config.replace("STRIDE_IN_1X1: false", "STRIDE_IN_1X1: true"))
    with pytest.raises(ValueError, match=r"STRIDE_IN_1X1.*no network of timm"):
        load_backbone(path)
    (tmp_path / "config.yaml").write_text(f"{config}    RES5_DILATION: 2\n")
    with pytest.raises(ValueError, match="RES5_DILATION 2: only 1 is supported"):
        load_backbone(path)
    (tmp_path / "config.yaml").write_text(config)
    assert load_backbone(path).std == (4 / 255, 2 / 255, 1 / 255)


def test_a_network_converted_for_detectron2_has_a_note(tmp_path: Path):
    path = save(tmp_path, with_names_of_detectron2(resnet_state(1)))
    assert "assumed RGB images with ImageNet's normalisation" in str(load_backbone(path).loaded)


# ---------------------------------------------------------------------------------------------------------- others


def test_capi_has_a_note_on_its_global_token(tmp_path: Path):
    path = save(tmp_path, {**under("backbone.", capi_state(1)), **junk("head.last_layer.weight_g")})
    assert "global token is the mean of the patch tokens" in str(load_backbone(path).loaded)


def test_a_resnet_that_timm_does_not_have_is_refused(tmp_path: Path):
    settings: dict[str, Any] = {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]}
    config = transformers.ResNetConfig(**settings, downsample_in_bottleneck=True)
    transformers.ResNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="downsample_in_bottleneck set: timm has no such ResNet"):
        load_backbone(tmp_path)


def test_swin_refuses_maps_smaller_than_a_window(tmp_path: Path):
    backbone = load_backbone(save(tmp_path, swin_state(1)))
    assert backbone.image_size == 64
    with pytest.raises(ValueError, match=r"a 3x4 map, smaller than a window of 4"):
        backbone.encode(torch.zeros(1, 3, 48, 64))


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "swin_base_patch4_window12_384", "convnext_base", "convnextv2_huge"]
)
def test_networks_with_a_name_are_recognised(name: str):
    found = infer_architecture(timm.create_model(name, device="meta", num_classes=0).state_dict())
    assert (found.name, found.args) == (name, {})
