"""Cases of the image towers of CLIP and SigLIP."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from .architectures import Outputs, State, open_clip, open_clip_state, quick_gelu
from .cases import HALF, OPTIMISER, RESNET_SIZES, Network, case, junk, randomise, save, shrink_embeddings, under

Writer = Callable[[Path], tuple[Path, Network, None]]
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)

# --------------------------------------------------------------------------------------------------- Hugging Face


def hugging_face_tower(kind: str, *, bare: bool = False, **options: Any) -> Writer:
    """A network of transformers, `CLIPModel` or another `kind`.

    It is saved by `save_pretrained`, or as `bare` tensors: under a prefix, as files were until transformers 5, and with
    the numbers of positions.
    """

    def write(folder: Path) -> tuple[Path, Network, None]:
        import transformers

        vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"image_size": 48, "patch_size": 16, **options}
        family = "CLIP" if kind.startswith("CLIP") else "Siglip"
        if "Vision" in kind:
            config = getattr(transformers, f"{family}VisionConfig")(**vision)
        else:
            text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
            both = {"vision_config": vision, "text_config": {**text, "vocab_size": 10}}
            config = getattr(transformers, f"{family}Config")(**both)
        source: Any = getattr(transformers, kind)(config).eval()
        randomise(source, 1)
        shrink_embeddings(source)
        tower = getattr(source, "vision_model", source)

        @torch.no_grad()
        def encode(images: Tensor) -> Outputs:
            output = tower(images, interpolate_pos_encoding=True)
            tokens = output.last_hidden_state
            if family == "CLIP":  # its norm is applied to [CLS] only; here, to each token
                return output.pooler_output, tower.post_layernorm(tokens[:, 1:])
            return tokens.mean(1) if output.pooler_output is None else output.pooler_output, tokens

        if not bare:
            source.save_pretrained(folder)
            return folder, encode, None
        tensors = source.state_dict()
        if source is tower:
            tensors = under("vision_model.", {**tensors, "embeddings.position_ids": torch.arange(10)[None]})
        return save(folder, tensors), encode, None

    return write


_hugging_face_clip = partial(case, "Hugging Face CLIP", mean=CLIP_MEAN, norm_eps=1e-5, positions="bicubic")
_hugging_face_clip()(hugging_face_tower("CLIPModel"))
_hugging_face_clip("gelu")(hugging_face_tower("CLIPModel", hidden_act="gelu"))
_hugging_face_clip("image tower")(hugging_face_tower("CLIPVisionModel"))
_hugging_face_clip("image tower with its projection")(hugging_face_tower("CLIPVisionModelWithProjection"))
_hugging_face_clip("bare tensors")(hugging_face_tower("CLIPVisionModel", bare=True, num_attention_heads=2))

_hugging_face_siglip = partial(case, "Hugging Face SigLIP", mean=HALF, positions="bicubic")
_hugging_face_siglip()(hugging_face_tower("SiglipModel"))
_hugging_face_siglip("image tower")(hugging_face_tower("SiglipVisionModel"))
_hugging_face_siglip("without its pooling")(hugging_face_tower("SiglipVisionModel", vision_use_head=False))
_hugging_face_siglip("bare tensors")(hugging_face_tower("SiglipModel", bare=True, num_attention_heads=2))


# ------------------------------------------------------------------------------------------- open_clip and OpenAI

# The classes `CLIP`, with the text encoder's tensors without a prefix, and `CustomTextCLIP`.
TEXT = {
    "logit_scale": torch.tensor(1.0),
    **junk("positional_embedding", "text_projection", "token_embedding.weight", "ln_final.weight"),
    **junk("transformer.resblocks.0.ln_1.weight", "transformer.resblocks.0.attn.in_proj_weight"),
}
SIGLIP_TEXT = {
    "logit_scale": torch.tensor(1.0),
    "logit_bias": torch.tensor(-10.0),
    **junk("text.positional_embedding", "text.text_projection", "text.token_embedding.weight", "text.ln_final.weight"),
    **junk("text.transformer.resblocks.0.ln_1.weight"),
}


def clip(tower: State) -> State:
    return {**TEXT, **under("visual.", tower)}


_open_clip = partial(case, "open_clip", norm_eps=1e-5, positions="timm")


@_open_clip(mean=CLIP_MEAN)
def open_clip_training(folder: Path):
    tower = open_clip_state(1)
    content = {"epoch": 1, "name": "run", "state_dict": under("module.", clip(tower)), "optimizer": OPTIMISER}
    return save(folder, content, "epoch_1.pt"), partial(open_clip, tower, heads=2, activation=F.gelu), None


@_open_clip("layer scale", mean=CLIP_MEAN)
def open_clip_layer_scale(folder: Path):
    tower = open_clip_state(1, scale=True)
    return save(folder, clip(tower)), partial(open_clip, tower, heads=2, activation=F.gelu), None


@_open_clip("with its configuration", mean=HALF)
def open_clip_configured(folder: Path):
    tower = open_clip_state(1)
    vision = {"image_size": 48, "layers": 2, "width": 128, "head_width": 32, "patch_size": 16}
    config = {
        "model_cfg": {"embed_dim": 16, "quick_gelu": True, "vision_cfg": vision, "text_cfg": {}},
        "preprocess_cfg": {"mean": HALF, "std": (0.25, 0.25, 0.25)},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    path = folder / "open_clip_model.safetensors"
    safetensors.torch.save_file(clip(tower), path)
    return path, partial(open_clip, tower, heads=4, activation=quick_gelu), None


@case("OpenAI CLIP", mean=CLIP_MEAN, norm_eps=1e-5, positions="timm")
def openai_clip(folder: Path):
    """Its own code supports only the training size; other sizes are compared with open_clip's resizing."""
    tower = open_clip_state(1)
    numbers = {"input_resolution": torch.tensor(48), "context_length": torch.tensor(77), "vocab_size": torch.tensor(5)}
    network = partial(open_clip, tower, heads=2, activation=quick_gelu)
    return save(folder, {**clip(tower), **numbers}), network, None


# ------------------------------------------------------------------------------------------------------------ timm


def timm_tower(name: str, prefix: str = "", beside: State | None = None, **options: Any) -> Writer:
    """A network of timm, alone or under open_clip's prefix with the other tensors of its file."""

    def write(folder: Path) -> tuple[Path, Network, None]:
        model: Any = timm.create_model(name, num_classes=0, **options).eval()
        randomise(model, 1)
        shrink_embeddings(model)
        path = save(folder, {**(beside or {}), **under(prefix, model.state_dict())})

        @torch.no_grad()
        def encode(images: Tensor) -> Outputs:
            features = model.forward_features(images)
            pooled = model.forward_head(features, pre_logits=True)
            if features.ndim == 4:  # the last norm, after pooling, is also applied to each position
                return pooled, model.head.norm(features).flatten(2).mT
            return pooled, features[:, model.num_prefix_tokens :]

        return path, encode, None

    return write


vit_of_timm = partial(timm_tower, embed_dim=128, depth=2, num_heads=2, img_size=48, dynamic_img_size=True)

QUICK_GELU, TANH = ({"args": {"act_layer": name}} for name in ("quick_gelu", "gelu_tanh"))
_timm_clip = partial(case, "timm CLIP", mean=CLIP_MEAN, norm_eps=1e-5, positions="timm")
_timm_clip(options=QUICK_GELU)(vit_of_timm("vit_base_patch16_clip_quickgelu_224"))
_timm_clip("gelu", options={"args": {"act_layer": "gelu"}})(vit_of_timm("vit_base_patch16_clip_224"))

_timm_siglip = partial(case, "timm SigLIP", mean=HALF, positions="timm")
_timm_siglip()(vit_of_timm("vit_base_patch16_siglip_224"))
_timm_siglip("tanh, as the caller says", options=TANH)(
    vit_of_timm("vit_base_patch16_siglip_224", act_layer="gelu_tanh")
)

_open_clip_siglip = partial(case, "open_clip SigLIP, tower of timm", mean=HALF, positions="timm")
_open_clip_siglip()(vit_of_timm("vit_base_patch16_siglip_224", "visual.trunk.", SIGLIP_TEXT))
_open_clip_siglip("average pooling")(vit_of_timm("vit_base_patch16_siglip_gap_224", "visual.trunk.", SIGLIP_TEXT))

_open_clip_timm = partial(case, "open_clip, tower of timm", mean=CLIP_MEAN)
_beside = {**TEXT, **junk("visual.head.proj.weight")}
_open_clip_timm("ConvNeXt", sizes=RESNET_SIZES)(
    timm_tower("convnext_tiny", "visual.trunk.", _beside, dims=(16, 24, 32, 40), depths=(1, 2, 1, 1))
)
_open_clip_timm("ViT with average pooling", positions="timm")(
    vit_of_timm("vit_medium_patch16_gap_256", "visual.trunk.", _beside)
)
