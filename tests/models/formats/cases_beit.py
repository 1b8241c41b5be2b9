"""Cases of BEiT, and of SimMIM's ViT, which has the same architecture."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from . import cases
from .architectures import Outputs, beit, beit_state, resize_beit
from .cases import HALF, OPTIMISER, VIT_SIZES, Network, case, junk, save, shrink_embeddings, under

Writer = Callable[[Path], tuple[Path, Network, None]]
SIDE, LARGER = 4, 6
ONE_SIZE: Any = {"sizes": ((16 * SIDE, 16 * SIDE),)}
RESIZED: Any = {"sizes": ((16 * LARGER, 16 * LARGER),), "options": {"image_size": 16 * LARGER}}


def randomise(module: nn.Module) -> None:
    """Randomise a network, with position biases as large as learned ones."""
    cases.randomise(module, 1)
    shrink_embeddings(module)
    with torch.no_grad():
        for key, value in module.state_dict().items():
            if key.endswith("relative_position_bias_table"):
                value.mul_(20)


# ------------------------------------------------------------------------------------------------------- original


def finetuned(folder: Path, *, side: int = SIDE, **options: bool) -> tuple[Path, Network, None]:
    state = beit_state(1, shared=False, mean_pooling=True, side=SIDE, **options)
    path = save(folder, {"model": {**state, **junk("head.weight", "head.bias")}, "optimizer": OPTIMISER, "epoch": 1})
    return path, partial(beit, state if side == SIDE else resize_beit(state, SIDE, side)), None


def pretrained(folder: Path, *, side: int = SIDE, **options: bool) -> tuple[Path, Network, None]:
    state = beit_state(1, shared=True, mean_pooling=False, side=SIDE, **options)
    path = save(folder, {"model": {**state, **junk("lm_head.weight", "lm_head.bias")}, "optimizer": OPTIMISER})
    return path, partial(beit, state if side == SIDE else resize_beit(state, SIDE, side)), None


case("BEiT", mean=HALF, **ONE_SIZE)(finetuned)
case("BEiT", "resized at loading", mean=HALF, **RESIZED)(partial(finetuned, side=LARGER))
case("BEiT", "pretraining", mean=HALF, **ONE_SIZE)(pretrained)
case("BEiT", "pretraining, resized at loading", mean=HALF, **RESIZED)(partial(pretrained, side=LARGER))
case("BEiT", "absolute positions, resized at loading", mean=HALF, positions="bicubic", **RESIZED)(
    partial(finetuned, side=LARGER, absolute=True)
)
case("BEiT", "pretraining, absolute positions, resized at loading", mean=HALF, positions="bicubic", **RESIZED)(
    partial(pretrained, side=LARGER, absolute=True)
)


@case("BEiT", "timm's", mean=HALF, sizes=((48, 48),))
def beit_of_timm(folder: Path):
    model: Any = timm.create_model("beitv2_large_patch16_224", embed_dim=64, depth=2, num_heads=4, img_size=48).eval()
    randomise(model)

    @torch.no_grad()
    def encode(images: Tensor) -> Outputs:
        tokens = model.forward_features(images)
        return model.forward_head(tokens, pre_logits=True), model.fc_norm(tokens[:, 1:])

    return save(folder, model.state_dict()), encode, None


@case("SimMIM", **ONE_SIZE)
def simmim(folder: Path):
    state = beit_state(1, shared=True, mean_pooling=False, side=SIDE)
    model = {**under("encoder.", state), **junk("decoder.0.weight", "decoder.0.bias")}
    content = {"model": model, "optimizer": OPTIMISER, "lr_scheduler": {}, "max_accuracy": 0.0, "epoch": 1}
    return save(folder, content), partial(beit, state), None


# --------------------------------------------------------------------------------------------------- Hugging Face


def hugging_face(kind: str = "BeitModel", *, bare: bool = False, **options: Any) -> Writer:
    """A folder as `save_pretrained` writes it, or `bare` tensors with the names that transformers 5 has in memory."""

    def write(folder: Path) -> tuple[Path, Network, None]:
        import transformers

        settings: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        settings |= {"intermediate_size": 128, "image_size": 48, "vocab_size": 16, **options}
        source: Any = getattr(transformers, kind)(transformers.BeitConfig(**settings)).eval()
        randomise(source)
        encoder = getattr(source, "beit", source)

        @torch.no_grad()
        def encode(images: Tensor) -> Outputs:
            output = encoder(images)
            tokens = output.last_hidden_state
            if encoder is not source:  # the last norm is outside the encoder
                tokens = source.layernorm(tokens)
                return tokens[:, 0], tokens[:, 1:]
            # With `use_mean_pooling` the norm is of the mean; each token gets the same norm.
            norm = getattr(source.pooler, "layernorm", None)
            return output.pooler_output, tokens[:, 1:] if norm is None else norm(tokens[:, 1:])

        if not bare:
            source.save_pretrained(folder)
            return folder, encode, None
        return save(folder, under("beit." if encoder is source else "", source.state_dict())), encode, None

    return write


EACH: Any = {"use_relative_position_bias": True}
SHARED: Any = {"use_shared_relative_position_bias": True}
WITH_CLS: Any = {**EACH, "use_absolute_position_embeddings": True, "use_mean_pooling": False}
MASKED: Any = {**SHARED, "use_mask_token": True}
# Biases are resized to each image; the last size differs from training only in height.
_hugging_face = partial(case, mean=HALF, norm_eps=1e-12, sizes=(*VIT_SIZES, (96, 48)))

_hugging_face("Hugging Face BEiT")(hugging_face(**EACH))
_hugging_face("Hugging Face BEiT", "shared biases")(hugging_face(**SHARED))
_hugging_face("Hugging Face BEiT", "bare tensors")(hugging_face(bare=True, **EACH))
_hugging_face("Hugging Face BEiT", "bare tensors, shared biases")(hugging_face(bare=True, **SHARED))
case("Hugging Face BEiT", "[CLS], absolute positions", mean=HALF, norm_eps=1e-12, sizes=((48, 48),))(
    hugging_face(**WITH_CLS)
)
case(
    "Hugging Face BEiT",
    "[CLS], absolute positions, resized at loading",
    mean=HALF,
    norm_eps=1e-12,
    positions="bicubic",
    sizes=((80, 80),),
    options={"image_size": 80},
)(hugging_face(**WITH_CLS))

MASKED_ROW = "Hugging Face BEiT, masked image modelling"
_hugging_face(MASKED_ROW)(hugging_face("BeitForMaskedImageModeling", **MASKED))
_hugging_face(MASKED_ROW, "bare tensors")(hugging_face("BeitForMaskedImageModeling", bare=True, **MASKED))
