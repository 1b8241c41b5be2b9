"""The formats of other projects' weights: how each is recognised, which network is taken, what its keys mean.

A file is recognised by its keys alone, in two steps. Its *dialect* is how the keys of a network are named; each
network in the file is found by one key that every network of the dialect has (its patch embedding or stem). Its
*layout* is which networks lie in the file, under which prefixes, and what lies beside them. Every key of the file
then is used, or dropped on purpose under a name (head, decoder, student, ...), or is an error.

The keys of a dialect are renamed to those of timm. Facts about each project (names, heads, normalisation, epsilon
of its layer norms, how it interpolates its position embedding) are from its public repository.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cribo.models.backbone import IMAGENET_MEAN, IMAGENET_STD, Backbone

Network = Literal["teacher", "student"]
State = dict[str, Tensor]
Rules = tuple[tuple[str, str], ...]

HALF = (0.5, 0.5, 0.5)

# How originals resize their position embedding where timm's way (bicubic, antialiased) gives other features than
# theirs on images of another size than in training. Relative L2 difference of the embedding, for the fixed
# sine-cosine embedding of MAE at 14x14 patches, resized to 28x28 / 32x32 / 7x7.
BICUBIC_OFFSET = (
    "the original resizes its position embedding bicubically with a scale that is off by 0.1 patches and without "
    "antialiasing, timm without the offset and with antialiasing: features differ on images of another size"
)
BICUBIC_PLAIN = (
    "the original resizes its position embedding bicubically without antialiasing, timm with: features differ on "
    "images smaller than in training"
)
BILINEAR_PLAIN = (
    "the original resizes its position embedding bilinearly, timm bicubically with antialiasing: features differ on "
    "images of another size"
)
BILINEAR_ANTIALIASED = (
    "the original resizes its position embedding bilinearly with antialiasing, timm bicubically: features differ on "
    "images of another size"
)


@dataclass(frozen=True)
class Dialect:
    """How a project names the keys of one network.

    Attributes:
        name: for people.
        anchor: the key by which a network of this dialect is found, as a pattern.
        needs: patterns, each of which some key of the network matches.
        rename: makes timm's keys of the network's own.
        dropped: (group, pattern of keys within the network) that are left out on purpose.
        norm_eps: epsilon of its layer norms, where it is not what timm's network has.
        mean, std: the normalisation of its images; None: ImageNet's.
        act_layer: of its MLPs, where it is not the exact GELU.
        note: what a user should know of every network of this dialect.
    """

    name: str
    anchor: str
    rename: Callable[[State], State]
    needs: tuple[str, ...] = ()
    dropped: Rules = ()
    norm_eps: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    act_layer: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Layout:
    """Which networks a project's file holds, and what beside them.

    Attributes:
        name: for people.
        signs: patterns, each of which some key of the file matches.
        teacher, student: patterns of the prefixes under which the two networks lie; None: it has no such network.
        dropped: (group, pattern of keys outside of the network) beside those that many projects share.
        heads: attention heads by width, where they are not the usual ones.
        norm_eps, mean, std, note: as in `Dialect`, and before it.
    """

    name: str
    signs: tuple[str, ...]
    teacher: str | None
    student: str | None
    dropped: Rules = ()
    heads: Mapping[int, int] = field(default_factory=dict)
    norm_eps: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    note: str | None = None


@dataclass(frozen=True)
class Recognised:
    """The network that was found in a file, under timm's keys.

    Attributes:
        format: name of the layout, or of the dialect where the file holds one network and nothing else.
        network: which one was taken; None where the file holds one only.
        part: its prefix in the file.
        state: its tensors under timm's keys.
        used: the keys of the file that were used.
        dropped: the keys of the file that were left out on purpose, by group.
        heads: attention heads by width, where they are not the usual ones.
        act_layer, norm_eps: what the network has, where it is not what timm's has.
        mean, std: the normalisation that the weights expect.
        notes: what a user should know.
    """

    format: str
    network: Network | None
    part: str
    state: State
    used: tuple[str, ...]
    dropped: dict[str, tuple[str, ...]]
    heads: Mapping[int, int]
    act_layer: str | None
    norm_eps: float | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...]


# ------------------------------------------------------------------------------------------ dialects: keys to timm


def _substitute(state: State, *rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> State:
    renamed: State = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        if key in renamed:
            raise ValueError(f"two keys of the file stand for {key}: it holds parts of two formats")
        renamed[key] = value
    return renamed


def _fold(state: State, token: str, positions: int) -> State:
    """Make `token` timm's registers, and add the first `positions` position embeddings to [CLS] and registers."""
    state = dict(state)
    position = state.pop("pos_embed")
    tokens = torch.cat([state["cls_token"], state.pop(token)], dim=1)
    tokens[:, :positions] += position[:, :positions]
    state["cls_token"], state["reg_token"] = tokens[:, :1], tokens[:, 1:]
    state["pos_embed"] = position[:, positions:]
    return state


def _from_vit(state: State) -> State:
    state = _substitute(state, (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"))
    return _fold(state, "dist_token", 2) if "dist_token" in state else state


def _from_dinov2(state: State) -> State:
    state = _substitute(
        state,
        (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # trained in chunks, whose blocks keep their number
        (r"\.mlp\.w12\.", ".mlp.fc1."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    )
    return _fold(state, "register_tokens", 1) if "register_tokens" in state else state


def _from_dinov3(state: State) -> State:
    state = dict(state)
    _check_rotation(state)
    masks = {key: state.pop(key) for key in list(state) if key.endswith("qkv.bias_mask")}
    for key in [key for key in state if key.endswith("qkv.bias")]:
        query, middle, value = state.pop(key).chunk(3)
        if f"{key}_mask" not in masks and middle.any():
            raise ValueError(f"{key} has a bias of the attention keys, which DINOv3 in timm has not")
        block = key.removesuffix("qkv.bias")
        state[f"{block}q_bias"], state[f"{block}v_bias"] = query, value
    return _substitute(
        state,
        (r"\.ls([12])\.gamma$", r".gamma_\1"),
        (r"^storage_tokens$", "reg_token"),
        (r"\.mlp\.w1\.", ".mlp.fc1_g."),
        (r"\.mlp\.w2\.", ".mlp.fc1_x."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    )


def _check_rotation(state: State) -> None:
    """DINOv3's file holds the periods of its rotary embedding; timm's network computes them."""
    periods = state.pop("rope_embed.periods", None)
    if periods is None:
        return
    expected = 100.0 ** (torch.arange(len(periods)) / len(periods))
    if not torch.allclose(periods.float(), expected, rtol=0.02):
        raise ValueError(
            "rope_embed.periods are not those of a rotary embedding with base 100, which is what DINOv3 in timm has: "
            f"they run from {periods.min():.3g} to {periods.max():.3g}"
        )


_HF_RULES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # The names in files, and those in memory since transformers 5.
    (r"^(?:model\.|encoder\.)?layers?\.(\d+)\.", r"blocks.\1."),
    (r"^embeddings\.(cls_token|register_tokens)$", r"\1"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.(?:projection\.)?(weight|bias)$", r"patch_embed.proj.\1"),
    (r"\.attention\.(?:attention\.)?(?:(query|key|value)|([qkv])_proj)\.", lambda m: f".attn.{(m[1] or m[2])[0]}."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"^(blocks\.\d+)\.(?:intermediate\.dense|mlp\.weights_in|mlp\.fc1)\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.(?:output\.dense|mlp\.weights_out|mlp\.fc2|mlp\.down_proj)\.", r"\1.mlp.fc2."),
    (r"\.(?:layernorm_before|norm1)\.", ".norm1."),
    (r"\.(?:layernorm_after|norm2)\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)


def _from_huggingface(state: State) -> State:
    state = _substitute(state, *_HF_RULES)
    for kind in ("weight", "bias"):
        state = _join(state, f".attn.{{}}.{kind}", "qkv", f".attn.qkv.{kind}")
        state = _join(state, f".mlp.{{}}.{kind}", ("gate_proj", "up_proj"), f".mlp.fc1.{kind}")
    return _fold(state, "register_tokens", 1) if "register_tokens" in state else state


def _from_huggingface_dinov3(state: State) -> State:
    state = _substitute(
        state,
        *_HF_RULES,
        (r"\.ls([12])\.gamma$", r".gamma_\1"),
        (r"\.attn\.([qv])\.bias$", r".attn.\1_bias"),
        (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
        (r"^register_tokens$", "reg_token"),
    )
    gated = any(".mlp.fc1_g." in key for key in state)
    state = _substitute(state, (r"\.mlp\.up_proj\.", ".mlp.fc1_x." if gated else ".mlp.fc1."))
    if "reg_token" in state and not state["reg_token"].numel():
        del state["reg_token"]
    return _join(state, ".attn.{}.weight", "qkv", ".attn.qkv.weight")


def _join(state: State, pattern: str, parts: Sequence[str], name: str) -> State:
    """Put the parts of each block that a project keeps apart under one name, where it has all of them."""
    state = dict(state)
    first, *others = (pattern.format(part) for part in parts)
    for key in [key for key in state if key.endswith(first)]:
        block = key.removesuffix(first)
        if all(block + other in state for other in others):
            state[block + name] = torch.cat([state.pop(key), *(state.pop(block + other) for other in others)])
    return state


def _from_mmsegmentation(state: State) -> State:
    return _substitute(
        state,
        (r"^layers\.", "blocks."),
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
        (r"^ln1\.", "norm."),
        (r"\.ln([12])\.", r".norm\1."),
        (r"\.attn\.attn\.in_proj_", ".attn.qkv."),
        (r"\.attn\.attn\.out_proj\.", ".attn.proj."),
        (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
        (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    )


def _from_flax(state: State) -> State:
    """JAX keeps kernels as (in, out), attention by head, and numbers the modules of a block in two ways."""
    state = _substitute(
        state,
        (r"^(?:Transformer/)?encoderblock_(\d+)/", r"blocks.\1."),
        (r"^(?:Transformer/)?encoder_norm/", "norm."),
        (r"^(?:ToTokenSequence_0/)?embedding/", "patch_embed.proj."),
        (r"^(?:ToTokenSequence_0|Transformer)/posembed_input(?:/pos_embedding)?$", "pos_embed"),
        (r"^cls$", "cls_token"),
        (r"\.LayerNorm_0/", ".norm1."),
        (r"\.LayerNorm_[12]/", ".norm2."),
        (r"\.MultiHeadDotProductAttention_[01]/(query|key|value)/", lambda m: f".attn.{m[1][0]}."),
        (r"\.MultiHeadDotProductAttention_[01]/out/", ".attn.proj."),
        (r"\.MlpBlock_[0-3]/Dense_0/", ".mlp.fc1."),
        (r"\.MlpBlock_[0-3]/Dense_1/", ".mlp.fc2."),
        (r"\.scale$", ".weight"),
    )
    state = {key.replace(".kernel", ".weight"): _from_kernel(key, value) for key, value in state.items()}
    state["pos_embed"] = state["pos_embed"].flatten(1, -2)
    for kind in ("weight", "bias"):
        state = _join(state, f".attn.{{}}.{kind}", "qkv", f".attn.qkv.{kind}")
    return state


def _from_kernel(key: str, value: Tensor) -> Tensor:
    if re.search(r"\.attn\.[qkv]\.bias$", key):
        return value.flatten()
    if not key.endswith(".kernel"):
        return value
    if key == "patch_embed.proj.kernel":
        return value.permute(3, 2, 0, 1)
    return (value.flatten(0, -2) if ".attn.proj." in key else value.flatten(1)).T


def _same(state: State) -> State:
    return state


_MASK: Rules = (("mask token", r"^(mask_token|masked_embed|embeddings\.mask_token)$"),)
# The head of a network that is kept with it.
_HEAD: Rules = (
    ("head", r"^(\w*head\w*|fc|classifier|pooler|pre_logits|projection_head|projector|predictor|prototypes)[./]"),
    ("head", r"^(head|fc)\d*[./]"),
)
# Decoders that lie beside the encoder without a name of their own in front of it.
_DECODER: Rules = (("decoder", r"^decoder_\w+([./]|$)"),)

_PATCH_EMBEDDING = r"patch_embed\.proj\.weight"
_HF_EMBEDDING = r"embeddings\.patch_embeddings\.projection\.weight"

DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        "DINOv3",
        _PATCH_EMBEDDING,
        _from_dinov3,
        needs=(r"^blocks\.0\.ls1\.gamma$", r"^(storage_tokens|rope_embed\.periods)$"),
        dropped=(*_MASK, *_HEAD, ("norm of local crops", r"^local_cls_norm\.")),
    ),
    Dialect(
        "timm DINOv3",
        _PATCH_EMBEDDING,
        _same,
        needs=(r"^blocks\.0\.gamma_1$", r"^blocks\.0\.attn\.qkv\.weight$", r"^reg_token$"),
        dropped=_HEAD,
    ),
    Dialect(
        "DINOv2",
        _PATCH_EMBEDDING,
        _from_dinov2,
        needs=(r"^blocks\.0\.(\d+\.)?ls1\.gamma$", r"^(mask_token|register_tokens|blocks\.0\.\d+\.norm1\.weight)$"),
        dropped=(*_MASK, *_HEAD),
        note=BICUBIC_OFFSET,
    ),
    Dialect(
        "timm ViT",
        _PATCH_EMBEDDING,
        _from_vit,
        needs=(r"^blocks\.0\.norm1\.weight$", r"^pos_embed$"),
        dropped=(*_MASK, *_HEAD, *_DECODER),
    ),
    Dialect(
        "Hugging Face DINOv2",
        _HF_EMBEDDING,
        _from_huggingface,
        needs=(r"\.layer_scale1\.lambda1$",),
        dropped=(*_MASK, *_HEAD),
        note=BICUBIC_PLAIN,
    ),
    Dialect(
        "Hugging Face ViT",
        _HF_EMBEDDING,
        _from_huggingface,
        needs=(r"\.layernorm_before\.weight$",),
        dropped=(*_MASK, *_HEAD),
        norm_eps=1e-12,
        mean=HALF,
        std=HALF,
        note=BICUBIC_PLAIN,
    ),
    Dialect(
        "Hugging Face DINOv3",
        r"embeddings\.patch_embeddings\.weight",
        _from_huggingface_dinov3,
        needs=(r"\.layer_scale1\.lambda1$",),
        dropped=(*_MASK, *_HEAD),
    ),
    Dialect(
        "MMSegmentation ViT",
        r"patch_embed\.projection\.weight",
        _from_mmsegmentation,
        needs=(r"^layers\.0\.attn\.attn\.in_proj_weight$",),
        note=BICUBIC_PLAIN,
    ),
    Dialect(
        "LOCA",
        r"ToTokenSequence_0/embedding/kernel",
        _from_flax,
        dropped=(
            ("position predictor", r"^(cross_attention_block|final_norm|position_predictor)/"),
            ("head", r"^projection_head_for_clustering_prediction/"),
        ),
        act_layer="gelu_tanh",
        note=BILINEAR_ANTIALIASED,
    ),
    Dialect(
        "JAX ViT",
        r"embedding/kernel",
        _from_flax,
        needs=(r"^Transformer/encoderblock_0/",),
        dropped=(("head", r"^(head|pre_logits|output_projection)/"),),
        act_layer="gelu_tanh",
        mean=HALF,
        std=HALF,
    ),
    Dialect(
        "ResNet",
        r"layer1\.0\.conv1\.weight",
        _same,
        needs=(r"^conv1\.weight$", r"^bn1\.running_mean$"),
        dropped=(("head", r"^(fc\w*|head\w*|projector|projection_head|prototypes)\."),),
    ),
)

# The names of timm, for networks that are built before their weights are read.
OWN = Dialect("timm", "", _same, dropped=(*_MASK, *_HEAD, *_DECODER))

# ------------------------------------------------------------------- layouts: networks, and what lies beside them

_TRAINING = (
    r"^(optim\w*|lr_sched\w*|scheduler\w*|\w*scaler\w*|amp|loops|callbacks|opt_state|rng\w*|metadata|global_step|step|"
    r"iteration|epoch|ema_state|state)(/|$)"
)
# What lies beside the networks of many projects; patterns of whole keys.
_BESIDE: Rules = (
    (
        "text encoder",
        r"^(text|text_model|transformer|token_embedding|positional_embedding|ln_final|text_projection|logit_scale|"
        r"logit_bias)(\.|$)",
    ),
    ("queue", r"(^|[./])\w*queue\w*$"),
    ("loss", r"(^|[./])\w*(loss|criterion)\w*[./]"),
    ("centre", r"(^|[./])(centers?|centres?|\w+_centre(\.\w+)?)$"),
    ("decoder", r"(^|[./])\w*decoder\w*([./]|$)"),
    (
        "head",
        r"(^|[./])(\w*heads?|neck|\w*projectors?|projection\w*|predictor\w*|\w*prototypes?|fc\d*|classifier|pooler)"
        r"(\.\d+)?([./]|$)",
    ),
)

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "cribo run",
        signs=(r"^state_dict/(teacher|student)\.backbone\.model\.", r"^cribo/|image_prototypes"),
        teacher=r"state_dict/teacher\.backbone\.model\.",
        student=r"state_dict/student\.backbone\.model\.",
        dropped=(("queue", r"^cribo/bank/"), ("training state", r"^cribo/")),
    ),
    Layout(
        "CrIBo",
        signs=(r"^(centroids|cls|cpv)_queue_cpu$", r"^(teacher|student)/"),
        teacher=r"teacher/backbone\.",
        student=r"student/backbone\.",
        note=BICUBIC_OFFSET,
    ),
    Layout(
        "CrIBo or CrOC",
        signs=(r"^(teacher|student)/head\.last_layer_c\.",),
        teacher=r"teacher/backbone\.",
        student=r"student/backbone\.",
        note=BICUBIC_OFFSET,
    ),
    Layout(
        "iBOT",
        signs=(r"^student/backbone\.masked_embed$|^ibot_loss/|^(teacher|student)/head\.last_layer2\.",),
        teacher=r"teacher/backbone\.",
        student=r"student/backbone\.",
        note=BICUBIC_OFFSET,
    ),
    Layout(
        "DINOv2 or DINOv3 training",
        signs=(r"^(model/)?(teacher|student|model_ema)[./](dino_head|ibot_head)\.",),
        teacher=r"(model/)?(teacher|model_ema)[./]backbone\.",
        student=r"(model/)?student[./]backbone\.",
        dropped=(("other network", r"^(model/)?gram_teacher\."),),
    ),
    Layout(
        "DINO",
        signs=(r"^(teacher|student)/head\.(mlp|last_layer)",),
        teacher=r"teacher/backbone\.",
        student=r"student/backbone\.",
        note=BICUBIC_OFFSET,
    ),
    Layout(
        "MoCo v3",
        signs=(r"(^|/)(momentum|base)_encoder\.", r"(^|/)(predictor|momentum_encoder)\."),
        teacher=r"(\w+/)?momentum_encoder\.",
        student=r"(\w+/)?base_encoder\.",
        heads={384: 12},  # its ViT-S has 12 heads of 32 channels, where every other ViT-S has 6
    ),
    Layout(
        "SlotCon",
        signs=(r"(^|/)encoder_k\.", r"(^|/)grouping_[qk]\.slot_embed\.weight$"),
        teacher=r"(\w+/)?encoder_k\.",
        student=r"(\w+/)?encoder_q\.",
        dropped=(("prototypes", r"(^|/)grouping_[qk]\."), ("head", r"(^|/)(projector_[qk]|predictor_slot)\.")),
    ),
    Layout(
        "DenseCL",
        signs=(r"(^|/)encoder_k\.0\.", r"(^|/)queue2$"),
        teacher=r"(\w+/)?encoder_k\.0\.",
        student=r"(\w+/)?encoder_q\.0\.",
        dropped=(("head", r"(^|/)encoder_[qk]\.1\."),),
    ),
    Layout(
        "MoCo",
        signs=(r"(^|/)encoder_q\.", r"(^|/)queue$"),
        teacher=r"(\w+/)?encoder_k\.(0\.)?",
        student=r"(\w+/)?encoder_q\.(0\.)?",
        dropped=(("head", r"(^|/)encoder_[qk]\.(1|fc)\."),),
    ),
    Layout(
        "ORL or BYOL",
        signs=(r"(^|/)target_net\.0\.",),
        teacher=r"(\w+/)?target_net\.0\.",
        student=r"(\w+/)?online_net\.0\.",
        dropped=(("head", r"(^|/)(target|online)_net\.1\."),),
    ),
    Layout(
        "TimeT",
        signs=(r"(^|[./])feature_extractor\.backbone\.",),
        teacher=r"([\w/]+[./])?teacher\.backbone\.",
        student=r"([\w/]+[./])?feature_extractor\.backbone\.",
        note=BICUBIC_OFFSET,
    ),
    Layout(
        "NeCo or Leopart",
        signs=(
            r"^(state_dict/)?(model|teacher)\.cls_token$",
            r"^(state_dict/)?(model|teacher)\.(projection_head|prototypes)\.|(^|[./])preds_miou",
        ),
        teacher=r"(state_dict/)?teacher\.",
        student=r"(state_dict/)?model\.",
        dropped=(("metric", r"(^|[./])\w*miou\w*\."),),
        note=BICUBIC_OFFSET,
    ),
    Layout(
        "Segmenter",
        signs=(r"^(\w+/)?encoder\.patch_embed\.", r"^(\w+/)?decoder\."),
        teacher=r"(\w+/)?encoder\.",
        student=None,
        norm_eps=1e-5,
        mean=HALF,
        std=HALF,
        note=BILINEAR_PLAIN,
    ),
    # Its mask transformer keeps class embeddings; the networks it is trained from expect images of mean 0.5.
    Layout(
        "MMSegmentation Segmenter",
        signs=(r"^(\w+/)?backbone\.", r"^(\w+/)?decode_head\.cls_emb$"),
        teacher=r"(\w+/)?backbone\.",
        student=None,
        mean=HALF,
        std=HALF,
    ),
    Layout(
        "MMSegmentation",
        signs=(r"^(\w+/)?backbone\.", r"^(\w+/)?(decode_head|auxiliary_head)\."),
        teacher=r"(\w+/)?backbone\.",
        student=None,
        dropped=(("decoder", r"^(\w+/)?backbone\.fpn\d\."),),
    ),
    Layout(
        "LOCA",
        signs=(r"(^|/)ToTokenSequence_0/embedding/kernel$",),
        teacher=r"(ema_params/(params/)?)?",
        student=r"(params/)+",
    ),
    Layout(
        "MAE",
        signs=(r"(^|/)decoder_blocks\.0\.", r"(^|/)decoder_pred\.weight$"),
        teacher=r"(\w+/)?",
        student=None,
    ),
)

# Names that say that a network is the one to evaluate.
_TEACHER_LIKE = r"(^|[./_])(teacher|ema|model_ema|ema_params|momentum\w*|target\w*)([./_]|$)"
_WRAPPERS = r"(^|[./])(?:(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+"
_LISTED = 8


def recognise(
    tensors: Mapping[str, Tensor], source: str, *, network: Network = "teacher", backbone: Backbone | None = None
) -> Recognised:
    """Find a network in a file, account for every key, and rename the network's to timm's.

    Args:
        tensors: every tensor of the file, by path (`reading.flatten`).
        source: names the file in errors.
        network: of a teacher and a student, the one to take. Without a teacher in the file, its student is taken.
        backbone: the one that the weights are for, where it is known: keys that it has keep their name, and a file
            in no known dialect is taken to be its own.

    Raises:
        ValueError: no format fits, the file holds several networks of which none is named as the teacher, it has no
            network of the kind that was asked for, or it has keys that no rule explains.
    """
    own = dict.fromkeys(backbone.model.state_dict()) if backbone is not None else {}
    # Wrappers of parallel training and compilation stand anywhere in a key and say nothing.
    originals = {re.sub(_WRAPPERS, r"\1", key): key for key in tensors}
    layout = next((layout for layout in LAYOUTS if _shows(layout.signs, originals)), None)
    found = _networks(originals, own)
    if not found:
        raise ValueError(
            f"{source} holds no network in a format that is known{_like(layout)}; its first keys are "
            f"{first_keys(originals) or 'none'}: give the timm name of its architecture, if it has one"
        )
    prefix, taken = _choose(found, layout, network, source)
    groups = {key: _group(key, prefix, found, layout, own, taken) for key in originals}
    unknown = [originals[key] for key, group in groups.items() if group == _UNKNOWN]
    dialect = found[prefix]
    if unknown:
        raise ValueError(
            f"{source} looks like {layout.name if layout else dialect.name}, but {len(unknown)} of its keys belong to "
            f"nothing that is known there: {first_keys(unknown)}; nothing was loaded"
        )
    used = [key for key, group in groups.items() if group == _USED]
    state = {key.removeprefix(prefix): tensors[originals[key]] for key in used}
    is_own = backbone is not None and required_keys(backbone) <= state.keys()
    by_precedence = [part for part in (layout, dialect) if part is not None]
    return Recognised(
        format=by_precedence[0].name,
        network=taken,
        part=originals[used[0]].removesuffix(used[0].removeprefix(prefix)),
        state=state if is_own else dialect.rename(state),
        used=tuple(originals[key] for key in used),
        dropped={
            name: tuple(originals[key] for key, group in groups.items() if group == name)
            for name in dict.fromkeys(group for group in groups.values() if group != _USED)
        },
        heads=layout.heads if layout else {},
        act_layer=dialect.act_layer,
        norm_eps=next((part.norm_eps for part in by_precedence if part.norm_eps), None),
        mean=next((part.mean for part in by_precedence if part.mean), IMAGENET_MEAN),
        std=next((part.std for part in by_precedence if part.std), IMAGENET_STD),
        notes=tuple(_notes(by_precedence, state, taken, network)),
    )


def first_keys(keys: Iterable[str]) -> str:
    """The first few keys, for an error message."""
    keys = list(keys)
    return ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")


def _shows(signs: Iterable[str], keys: Iterable[str]) -> bool:
    return all(any(re.search(sign, key) for key in keys) for sign in signs)


def _like(layout: Layout | None) -> str:
    return f", though its other keys are those of {layout.name}" if layout else ""


def required_keys(backbone: Backbone) -> set[str]:
    """The keys that weights must have: old files lack the counters of batch norms, and heads are not read."""
    return {
        key
        for key in backbone.model.state_dict()
        if key not in backbone.unused_parameters and not key.endswith("num_batches_tracked")
    }


def _networks(keys: Collection[str], own: Collection[str]) -> dict[str, Dialect]:
    """The networks in a file: the prefix of each, and how its keys are named."""
    keys = [key for key in keys if not re.search(_TRAINING, key)]  # optimisers keep copies of every weight
    found: dict[str, Dialect] = {}
    for dialect in DIALECTS:
        for prefix in _prefixes(dialect.anchor, keys):
            inner = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
            if prefix not in found and _shows(dialect.needs, inner):
                found[prefix] = dialect
    if found or not own:
        return found
    for name in own:
        if prefixes := _prefixes(re.escape(name), keys):
            return dict.fromkeys(prefixes, OWN)
    # Names of another library, which timm may know how to read; they lie under one key or none.
    containers = {key.partition("/")[0] + "/" for key in keys if "/" in key}
    return dict.fromkeys(containers if len(containers) == 1 else {""}, OWN) if keys else {}


def _prefixes(anchor: str, keys: Iterable[str]) -> list[str]:
    matches = (re.fullmatch(rf"(.*[./])?{anchor}", key) for key in keys)
    return [match[1] or "" for match in matches if match]


def _choose(
    found: Mapping[str, Dialect], layout: Layout | None, network: Network, source: str
) -> tuple[str, Network | None]:
    """The prefix of the network to take, and which of the two it is."""
    if layout is not None:
        roles: dict[Network, str | None] = {"teacher": layout.teacher, "student": layout.student}
        by_role = {
            role: [prefix for prefix in found if pattern is not None and re.fullmatch(pattern, prefix)]
            for role, pattern in roles.items()
        }
    else:
        teachers = [prefix for prefix in found if re.search(_TEACHER_LIKE, prefix)]
        by_role = {"teacher": teachers, "student": [prefix for prefix in found if prefix not in teachers]}
    other: Network = "student" if network == "teacher" else "teacher"
    if len(by_role[network]) == 1:
        is_only = len(found) == 1 and (layout is None or layout.student is None)
        return by_role[network][0], None if is_only else network
    if network == "teacher" and not by_role["teacher"] and len(by_role["student"]) == 1:
        return by_role["student"][0], None if layout is None else other
    named = ", ".join(prefix or "(no prefix)" for prefix in found)
    if network == "student" and not by_role["student"]:
        raise ValueError(f"{source} holds no student beside the network under {named}: take the teacher")
    raise ValueError(
        f"{source} holds several networks and does not say which is the {network}: {named}; save the one you want in a "
        "file of its own"
    )


_USED, _UNKNOWN = "", "?"


def _group(
    key: str,
    prefix: str,
    found: Mapping[str, Dialect],
    layout: Layout | None,
    own: Collection[str],
    taken: Network | None,
) -> str:
    """What a key belongs to: the network that is taken, a group that is dropped, or nothing that is known."""
    if re.search(_TRAINING, key):
        return "training state"
    for other in sorted(found, key=len, reverse=True):
        # A network without a prefix of its own must not swallow those beside it.
        if other != prefix and key.startswith(other) and len(other) > len(prefix) * key.startswith(prefix):
            is_student = layout is not None and layout.student is not None and re.fullmatch(layout.student, other)
            return "student" if is_student else "teacher" if taken == "student" else "other network"
    rules = layout.dropped if layout else ()
    if key.startswith(prefix):
        inner = key.removeprefix(prefix)
        if inner in own:
            return _USED
        return _first_match(found[prefix].dropped, inner) or _first_match(rules, key) or _USED
    return _first_match((*rules, *_BESIDE), key) or _UNKNOWN


def _first_match(rules: Rules, key: str) -> str | None:
    return next((group for group, pattern in rules if re.search(pattern, key)), None)


def _notes(
    by_precedence: Sequence[Layout | Dialect], state: State, taken: Network | None, network: Network
) -> Iterator[str]:
    if taken is not None and taken != network:
        yield f"the file holds no {network}, so its {taken} was taken"
    note = next((part.note for part in by_precedence if part.note), None)
    # DINOv2's networks with registers resize their position embedding as timm does.
    if note and "register_tokens" not in state:
        yield note
