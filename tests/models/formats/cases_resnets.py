"""Cases of the ResNets of MMSegmentation, detectron2, SwAV and Hugging Face."""

import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .architectures import Outputs, State, resnet, resnet_state
from .cases import RESNET_SIZES, Network, case, junk, mmsegmentation, randomise, save, under

# ------------------------------------------------------------------------------------------------- MMSegmentation


@case("MMSegmentation ResNetV1c", sizes=RESNET_SIZES, norm_eps=None)
def resnet_v1c(folder: Path):
    """The initial network of MMSegmentation's trainings (open-mmlab://resnet50_v1c)."""
    state = resnet_state(1, has_deep_stem=True)
    content = {"meta": {}, "state_dict": {**state, **junk("fc.weight", "fc.bias")}}
    return save(folder, content), partial(resnet, state), None


def config_of_mmcv(strides: str, dilations: str, rest: str) -> dict[str, str]:
    """Configuration as saved by MMCV, in its original order."""
    text = (
        "norm_cfg = dict(type='SyncBN', requires_grad=True)\nmodel = dict(\n    type='EncoderDecoder',\n"
        "    pretrained=None,\n    backbone=dict(\n        type='ResNetV1c',\n        depth=50,\n"
        f"        dilations={dilations},\n        strides={strides},\n        norm_cfg=dict(type='SyncBN'),\n"
        f"        style='pytorch'{rest}),\n    decode_head=dict(type='ASPPHead', dilations=(1, 12, 24, 36)))\n"
    )
    return {"config": text}


def config_of_mmengine(strides: str, dilations: str, rest: str) -> dict[str, str]:
    """Configuration as saved by MMEngine: sorted, one number per line."""
    strides, dilations = (re.sub(r"(\d),?", r"\n            \1,", numbers) for numbers in (strides, dilations))
    first = f"        {rest.removeprefix(', ')},\n" if rest else ""
    text = (
        "model = dict(\n    auxiliary_head=dict(type='FCNHead'),\n    backbone=dict(\n"
        f"{first}        depth=50,\n        dilations={dilations},\n        strides={strides},\n"
        "        style='pytorch',\n        type='ResNetV1c'),\n"
        "    data_preprocessor=dict(mean=[\n        123.675,\n    ]),\n    decode_head=dict(\n        dilations=(\n"
        "            1,\n            12,\n        ),\n        type='ASPPHead'))\n"
    )
    return {"cfg": text}


BY_8, BY_16, BY_32 = (
    ("(1, 2, 1, 1)", "(1, 1, 2, 4)"),
    ("(1, 2, 2, 1)", "(1, 1, 1, 2)"),
    ("(1, 2, 2, 2)", "(1, 1, 1, 1)"),
)
CONTRACTS = ", contract_dilation=True"


def trained_by_mmsegmentation(
    folder: Path, meta: dict[str, str], dilations: str, *, is_beside: bool = False, **form: bool
) -> tuple[Path, Network, None]:
    """With the configuration in the file, or beside it."""
    state = resnet_state(1, has_deep_stem=form.get("has_deep_stem", True), averages=form.get("averages", False))
    content = mmsegmentation(state, "auxiliary_head.conv_seg.weight")
    (config,) = meta.values()
    if is_beside:
        (folder / "pspnet.py").write_text(config)
    else:
        content["meta"] |= meta
    numbers = tuple(int(number) for number in re.findall(r"\d+", dilations))
    network = partial(resnet, state, dilations=numbers, contracts="contract_dilation=True" in config)
    return save(folder, content), network, None


for about, config, (strides, dilations), rest, options in (
    ("ResNetV1c", config_of_mmcv, BY_32, CONTRACTS, {}),
    ("ResNetV1c by 8", config_of_mmcv, BY_8, CONTRACTS, {}),
    ("ResNetV1c by 8, MMEngine", config_of_mmengine, BY_8, CONTRACTS, {}),
    ("ResNetV1c by 16", config_of_mmengine, BY_16, CONTRACTS, {}),
    ("ResNetV1c by 8, contract_dilation left out", config_of_mmengine, BY_8, "", {}),
    ("ResNetV1c by 8, contract_dilation=False", config_of_mmcv, BY_8, ", contract_dilation=False", {}),
    ("ResNetV1c by 16, contract_dilation left out", config_of_mmcv, BY_16, "", {}),
    (
        "ResNetV1c by 8, contract_dilation left out, configuration beside",
        config_of_mmengine,
        BY_8,
        "",
        {"is_beside": True},
    ),
    ("ResNet by 8, contract_dilation left out", config_of_mmcv, BY_8, "", {"has_deep_stem": False}),
    ("ResNetV1d", config_of_mmcv, BY_32, CONTRACTS, {"averages": True}),
):
    write = partial(trained_by_mmsegmentation, meta=config(strides, dilations, rest), dilations=dilations, **options)
    case("MMSegmentation", about, sizes=RESNET_SIZES, norm_eps=None)(write)


@case(
    "MMSegmentation",
    "ResNetV1c by 8, as the caller says",
    sizes=RESNET_SIZES,
    norm_eps=None,
    options={"args": {"output_stride": 8}},
)
def resnet_v1c_of_the_caller(folder: Path):
    state = resnet_state(1, has_deep_stem=True)
    return save(folder, mmsegmentation(state)), partial(resnet, state, dilations=(1, 1, 2, 4), contracts=True), None


# ----------------------------------------------------------------------------------------------------- detectron2


def with_names_of_detectron2(state: State) -> State:
    """Rename torchvision's modules (`tools/convert-torchvision-to-d2.py`); norms are inside convolutions."""
    renamed = {}
    for key, value in state.items():
        if key.endswith("num_batches_tracked"):
            continue
        key = re.sub(r"^(conv1|bn1)\.", r"stem.\1.", key)
        key = re.sub(r"^layer(\d)", lambda match: f"res{int(match[1]) + 1}", key)
        key = re.sub(r"\bbn(\d)", r"conv\1.norm", key)
        renamed[key.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")] = value
    return renamed


def converted_for_detectron2(folder: Path, protocol: int) -> tuple[Path, Network, None]:
    """A pickle of NumPy arrays."""
    state = resnet_state(1)
    arrays = {key: value.numpy() for key, value in with_names_of_detectron2(state).items()}
    content = {"model": {**arrays, "stem.fc.weight": torch.ones(3, 3).numpy()}, "__author__": "DenseCL"}
    (folder / "r50.pkl").write_bytes(pickle.dumps({**content, "matching_heuristics": True}, protocol))
    return folder / "r50.pkl", partial(resnet, state), None


for about, protocol in (("", 2), ("a newer pickle", 4)):
    case("detectron2", about, sizes=RESNET_SIZES, norm_eps=None)(partial(converted_for_detectron2, protocol=protocol))

PIXEL_MEAN, PIXEL_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
OF_PIXELS = tuple(value / 255 for value in PIXEL_MEAN)
CONFIG = "INPUT:\n  FORMAT: {}\nMODEL:\n  PIXEL_MEAN: {}\n  PIXEL_STD: {}\n  RESNETS:\n    STRIDE_IN_1X1: false\n"


def trained_by_detectron2(folder: Path, prefix: str, colours: str) -> tuple[Path, Network, None]:
    state = resnet_state(1)
    rest = junk(
        "proposal_generator.rpn_head.conv.weight",
        "proposal_generator.anchor_generator.cell_anchors.0",
        "roi_heads.box_head.fc1.weight",
        "roi_heads.box_predictor.cls_score.weight",
        "sem_seg_head.predictor.weight",
        "pixel_mean",
        "pixel_std",
    )
    if "bottom_up" in prefix:
        rest |= junk("backbone.fpn_lateral2.weight", "backbone.fpn_output5.bias", "backbone.top_block.p6.weight")
    content = {"model": {**under(prefix, with_names_of_detectron2(state)), **rest}, "iteration": 3}
    order = -1 if colours == "BGR" else 1
    (folder / "config.yaml").write_text(CONFIG.format(colours, [*PIXEL_MEAN[::order]], [*PIXEL_STD[::order]]))

    def encode(images: Tensor) -> Outputs:
        return resnet(state, images.flip(1) if colours == "BGR" else images)

    return save(folder, content, "model_final.pth"), encode, None


for about, prefix, colours in (
    ("trained, with a feature pyramid", "backbone.bottom_up.", "RGB"),
    ("trained on BGR images, with a feature pyramid", "backbone.bottom_up.", "BGR"),
    ("trained on BGR images", "backbone.", "BGR"),
):
    case("detectron2", about, sizes=RESNET_SIZES, norm_eps=None, mean=OF_PIXELS)(
        partial(trained_by_detectron2, prefix=prefix, colours=colours)
    )


# ------------------------------------------------------------------------------------------------------------ SwAV


def wide_resnet_of_swav(folder: Path, stem: int) -> tuple[Path, Network, None]:
    """RN50w2 and RN50w4 also multiply the channels of the stem, which has 64 in other ResNets."""
    state = resnet_state(1, stem=stem)
    content = under("module.", {**state, **junk("projection_head.0.weight", "prototypes.weight")})
    return save(folder, content, "swav_RN50w2_400ep_pretrain.pth.tar"), partial(resnet, state), None


for stem in (128, 256):
    case("ResNet", f"SwAV's, a stem of {stem} channels", sizes=RESNET_SIZES, norm_eps=None)(
        partial(wide_resnet_of_swav, stem=stem)
    )


# --------------------------------------------------------------------------------------------------- Hugging Face


def huggingface_resnet(is_classifier: bool, **options: Any) -> Callable[[Path], tuple[Path, Network, None]]:
    """A folder as `save_pretrained` writes it, or one file without its configuration."""

    def write(folder: Path) -> tuple[Path, Network, None]:
        import transformers

        model: Any = transformers.ResNetModel(transformers.ResNetConfig(depths=[1, 2, 1, 1], **options)).eval()
        randomise(model, 1, std=0.01)
        if is_classifier:
            path = save(folder, {**under("resnet.", model.state_dict()), **junk("classifier.1.weight")})
        else:
            path = folder
            model.save_pretrained(folder)
        model.double()

        @torch.no_grad()
        def encode(images: Tensor) -> Outputs:
            output = model(images.double())
            return output.pooler_output.flatten(1), output.last_hidden_state.flatten(2).mT

        return path, encode, None

    return write


for about, options in (
    ("", {"hidden_sizes": [32, 64, 96, 128]}),
    ("basic blocks", {"hidden_sizes": [8, 16, 24, 32], "layer_type": "basic"}),
):
    case("Hugging Face ResNet", about, sizes=RESNET_SIZES, norm_eps=None)(huggingface_resnet(False, **options))
    about = ", ".join(filter(None, (about, "classifier without configuration")))
    case("Hugging Face ResNet", about, sizes=RESNET_SIZES, norm_eps=None)(huggingface_resnet(True, **options))
