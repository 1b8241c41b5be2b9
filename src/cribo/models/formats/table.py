"""Formats of other projects' weights: one row per project and per naming of a network's tensors.

A file is recognised by its keys only. A `Project` describes the networks and other tensors in its files, with their
prefixes; a `Naming` describes the names of one network's tensors. What the weights expect (normalisation, epsilon,
resizing of positions) comes from the project first, then from the naming.

Facts are from each project's public repository, given in its row. To add a format: a row here, a function in `naming`
if its names are new, and a case in tests/models/formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cribo.models.formats import naming
from cribo.models.formats.naming import State
from cribo.models.positions import RelativeResizing, Resizing, Windows

Rules = tuple[tuple[str, str], ...]
"""(group, pattern): matching keys belong to the group and are ignored."""

HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Expected:
    """Numerics and images that weights expect; None means timm's values, or ImageNet's normalisation.

    Attributes:
        norm_eps: epsilon of the layer norms.
        final_norm_eps: epsilon of the last norm, if different.
        mean, std: normalisation of images.
        act_layer: activation of the MLPs, by timm's name.
        assumed_act_layer: activation to assume if the project has several and files do not show it.
        positions: see `Numerics`.
        rope_coordinates: see `Numerics`.
        heads: number of attention heads by width, if unusual.
        dilate_entries: see `Numerics`.
        windows: see `Numerics`.
        relative_positions: see `Numerics`.
        note: note for the user.
    """

    norm_eps: float | None = None
    final_norm_eps: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    act_layer: str | None = None
    assumed_act_layer: str | None = None
    positions: Resizing | None = None
    rope_coordinates: Literal["separate", "max", "min"] | None = None
    heads: Mapping[int, int] = field(default_factory=dict)
    dilate_entries: bool | None = None
    windows: Windows | None = None
    relative_positions: RelativeResizing | None = None
    note: str | None = None

    def over(self, other: "Expected") -> "Expected":
        """Return these values, with the other's where None."""
        return replace(other, **{name: value for name, value in vars(self).items() if value not in (None, {})})


@dataclass(frozen=True)
class Project:
    """Networks and other tensors in a project's files.

    Attributes:
        name: display name.
        source: public repository.
        signs: patterns, each of which must match some key of the file.
        teacher, student: patterns of the prefixes of the two networks; None if the project has no such network.
        dropped: rules for keys outside the network, in addition to `BESIDE`.
        expected: see `Expected`.
        adapt: function that changes a network's tensors, under timm's names, if the project uses them differently.
    """

    name: str
    source: str
    signs: tuple[str, ...]
    teacher: str | None
    student: str | None = None
    dropped: Rules = ()
    expected: Expected = Expected()
    adapt: Callable[[State], State] = naming.unchanged


@dataclass(frozen=True)
class Naming:
    """Names of one network's tensors.

    Attributes:
        name: display name.
        source: code that defines the names.
        anchor: pattern of a key that each network of this naming has exactly once.
        needs: patterns, each of which must match some key of the network.
        rename: function that renames the network's tensors to timm's names.
        dropped: rules for keys of the network that are ignored.
        count_heads: function that returns the number of attention heads, if the tensors show it.
        is_nested: whether the keys of one network contain slashes, as in Flax.
        expected: see `Expected`.
    """

    name: str
    source: str
    anchor: str
    rename: Callable[[State], State]
    needs: tuple[str, ...] = ()
    dropped: Rules = ()
    count_heads: Callable[[State], int | None] = lambda state: None
    is_nested: bool = False
    expected: Expected = Expected()


TRAINING = (
    r"^(optim\w*|\w*sched\w*|\w*scaler\w*|amp|loops|callbacks|opt_state|rng\w*|meta\w*|message_hub|hyper_parameters|"
    r"args|config|global_step|step|iteration|epoch|ema_state|state)(/|$)"
)
"""Keys of training state, in any project."""

METRICS = ("metric", r"(^|[./])(best_\w+|\w*acc[15]?|\w*miou\w*|class_weights?|\w*metrics?|n_averaged)([./]|$)")
"""Keys of training statistics, anywhere in a file."""

BESIDE: Rules = (
    (
        "text encoder",
        r"^([\w/]+/)?(text|text_model|transformer|token_embedding|positional_embedding|ln_final|text_projection|logit_scale|"
        r"logit_bias)(\.|$)",
    ),
    ("queue", r"(^|[./])\w*queue\w*$"),
    ("loss", r"(^|[./])\w*(loss|criterion)\w*[./]"),
    ("centre", r"(^|[./])(centers?|centres?|\w+_centre(\.\w+)?)$"),
    ("projection", r"^([\w/]+[./])?visual_projection\."),
    METRICS,
    ("decoder", r"(^|[./])\w*decoder\w*([./]|$)"),
    (
        "head",
        r"(^|[./])(\w*heads?|neck|\w*projectors?|projection\w*|predictor\w*|\w*prototypes?|fc\d*|classifier|pooler)"
        r"(\.\d+)?([./]|$)",
    ),
)
"""Tensors that many projects store beside their networks; patterns match whole keys."""

SHARD = (
    "contains one rank's part of a sharded network (FSDP): use the whole network, such as the "
    "eval/training_<step>/teacher_checkpoint.pth of DINOv2 and DINOv3, or a folder of torch.distributed.checkpoint"
)
REFUSED: tuple[tuple[str, str], ...] = (
    (r"(^|[./])_?flat_params?(_\d+)?$|\.parametrizations\.\w+\.original$", SHARD),
    (
        r"(^|[./])patch_generator\.embedder\.weight$",
        "is a RADIO checkpoint; it crops its positions to the image's aspect ratio: load timm's copy by name, such as "
        "vit_large_patch16_radio_v3.c_radio",
    ),
    (
        r"^visual_model\.head\.|^(text_model\.)?backbone\.token_embedding\.",
        "is a dino.txt checkpoint, with vision head and text encoder but without the image network: use the "
        "weights of the DINOv2 or DINOv3 network that it was trained with",
    ),
    (
        r"(^|/)res2_0_branch2a_w$",
        "is a Caffe2 network, with strides in the first convolution of a block; no network of timm has them there, "
        "so features would differ",
    ),
)
"""Known files that cannot be loaded: a pattern of a distinctive key, and the reason. Sources:
github.com/NVlabs/RADIO, github.com/facebookresearch/dinov2 (`hub/dinotxt.py`), github.com/facebookresearch/detectron2
(`checkpoint/c2_model_loading.py`), github.com/facebookresearch/capi (`fsdp.py`)."""

_DETECTRON2 = "github.com/facebookresearch/detectron2, detectron2/modeling/backbone/resnet.py"
_OFFSET = Expected(positions="bicubic_offset")

_TOWER_PROJECTS: tuple[Project, ...] = (
    Project(
        "SimMIM",
        "github.com/microsoft/SimMIM (models/simmim.py)",
        signs=(r"(^|/)encoder\.mask_token$", r"(^|/)decoder\.0\.weight$"),
        teacher=r"([\w/]+/)?encoder\.",
        expected=Expected(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), note=""),
    ),
    # The state of its TorchScript archives; once loaded into its own module, it has open_clip's format.
    Project(
        "OpenAI CLIP",
        "github.com/openai/CLIP (clip/model.py)",
        signs=(r"(^|/)input_resolution$", r"(^|/)visual\.class_embedding$"),
        teacher=r"([\w/]+/)?visual\.",
        dropped=(("text encoder", r"(^|/)(input_resolution|context_length|vocab_size)$"),),
        expected=Expected(act_layer="quick_gelu"),
    ),
    # SigLIP's loss has a bias in addition to its temperature.
    Project(
        "open_clip SigLIP, tower of timm",
        "github.com/mlfoundations/open_clip (timm_model.py)",
        signs=(r"(^|[./])visual\.trunk\.", r"(^|[./])logit_bias$"),
        teacher=r"([\w/]+/)?visual\.trunk\.",
        expected=Expected(mean=HALF, std=HALF),
    ),
    Project(
        "open_clip, tower of timm",
        "github.com/mlfoundations/open_clip (timm_model.py)",
        signs=(r"(^|[./])visual\.trunk\.", r"(^|[./])logit_scale$"),
        teacher=r"([\w/]+/)?visual\.trunk\.",
        expected=Expected(mean=_CLIP_MEAN, std=_CLIP_STD),
    ),
)

PROJECTS: tuple[Project, ...] = (
    *_TOWER_PROJECTS,
    Project(
        "cribo run",
        "this project",
        signs=(r"^state_dict/(teacher|student)\.backbone\.model\.", r"^cribo/|image_prototypes"),
        teacher=r"state_dict/teacher\.backbone\.model\.",
        student=r"state_dict/student\.backbone\.model\.",
        dropped=(("queue", r"^cribo/bank/|^state_dict/_extra_state/"), ("training state", r"^cribo/")),
        expected=Expected(positions="timm"),
    ),
    Project(
        "CrIBo",
        "github.com/tileb1/CrIBo",
        signs=(r"^(centroids|cls|cpv)_queue_cpu$", r"^(teacher|student)/"),
        teacher=r"teacher/backbone\.",
        student=r"student/backbone\.",
        expected=_OFFSET,
    ),
    Project(
        "CrIBo or CrOC",
        "github.com/stegmuel/CrOC",
        signs=(r"^(teacher|student)/head\.last_layer_c\.",),
        teacher=r"teacher/backbone\.",
        student=r"student/backbone\.",
        expected=_OFFSET,
    ),
    Project(
        "iBOT",
        "github.com/bytedance/ibot",
        signs=(r"^student/backbone\.masked_embed$|^ibot_loss/|^(teacher|student)/head\.last_layer2\.",),
        teacher=r"teacher/backbone\.",
        student=r"student/backbone\.",
        expected=_OFFSET,
    ),
    Project(
        "DINOv2 or DINOv3 training",
        "github.com/facebookresearch/dinov2, /dinov3",
        signs=(r"^(model/)?(teacher|student|model_ema)[./](dino_head|ibot_head)\.",),
        teacher=r"(model/)?(teacher|model_ema)[./]backbone\.",
        student=r"(model/)?student[./]backbone\.",
        dropped=(("other network", r"^(model/)?gram_teacher\."),),
    ),
    Project(
        "DINO",
        "github.com/facebookresearch/dino",
        signs=(r"^(teacher|student)/head\.(mlp|last_layer)",),
        teacher=r"teacher/backbone\.",
        student=r"student/backbone\.",
        expected=_OFFSET,
    ),
    Project(
        "MoCo v3",
        "github.com/facebookresearch/moco-v3",
        signs=(r"(^|/)(momentum|base)_encoder\.", r"(^|/)(predictor|momentum_encoder)\."),
        teacher=r"(\w+/)?momentum_encoder\.",
        student=r"(\w+/)?base_encoder\.",
        # Its ViT-S has 12 heads of 32 channels; every other ViT-S has 6. It supports a single image size.
        expected=Expected(heads={384: 12}, positions="timm"),
    ),
    Project(
        "SlotCon",
        "github.com/CVMI-Lab/SlotCon",
        signs=(r"(^|/)encoder_k\.", r"(^|/)grouping_[qk]\.slot_embed\.weight$"),
        teacher=r"(\w+/)?encoder_k\.",
        student=r"(\w+/)?encoder_q\.",
        dropped=(("prototypes", r"(^|/)grouping_[qk]\."), ("head", r"(^|/)(projector_[qk]|predictor_slot)\.")),
        expected=Expected(dilate_entries=True),  # of resnet50_16s (models/resnet.py)
    ),
    Project(
        "DenseCL",
        "github.com/WXinlong/DenseCL",
        signs=(r"(^|/)encoder_k\.0\.", r"(^|/)queue2$"),
        teacher=r"(\w+/)?encoder_k\.0\.",
        student=r"(\w+/)?encoder_q\.0\.",
        dropped=(("head", r"(^|/)encoder_[qk]\.1\."),),
    ),
    Project(
        "MoCo",
        "github.com/facebookresearch/moco",
        signs=(r"(^|/)encoder_q\.", r"(^|/)queue$"),
        teacher=r"(\w+/)?encoder_k\.(0\.)?",
        student=r"(\w+/)?encoder_q\.(0\.)?",
        dropped=(("head", r"(^|/)encoder_[qk]\.(1|fc)\."),),
    ),
    Project(
        "ORL or BYOL",
        "github.com/Jiahao000/ORL",
        signs=(r"(^|/)target_net\.0\.",),
        teacher=r"(\w+/)?target_net\.0\.",
        student=r"(\w+/)?online_net\.0\.",
        dropped=(("head", r"(^|/)(target|online)_net\.1\."),),
    ),
    Project(
        "TimeT",
        "github.com/SMSD75/Timetuning",
        signs=(r"(^|[./])feature_extractor\.backbone\.",),
        teacher=r"([\w/]+[./])?teacher\.backbone\.",
        student=r"([\w/]+[./])?feature_extractor\.backbone\.",
        expected=_OFFSET,
    ),
    Project(
        "NeCo or Leopart",
        "github.com/vpariza/NeCo, github.com/MkuuWaUjinga/leopart",
        signs=(
            r"^(state_dict/)?(model|teacher)\.cls_token$",
            r"^(state_dict/)?(model|teacher)\.(projection_head|prototypes)\.|(^|[./])preds_miou",
        ),
        teacher=r"(state_dict/)?teacher\.",
        student=r"(state_dict/)?model\.",
        dropped=(("metric", r"(^|[./])\w*miou\w*\."),),
        expected=_OFFSET,
    ),
    # With mask transformer or linear decoder; the encoder keeps a classifier head.
    Project(
        "Segmenter",
        "github.com/rstrudel/segmenter",
        signs=(
            r"^(\w+/)?encoder\.patch_embed\.",
            r"^(\w+/)?decoder\.(cls_emb|proj_dec\.weight|head\.weight)$",
            r"^(\w+/)?encoder\.head\.|^(\w+/)?decoder\.cls_emb$",
        ),
        teacher=r"(\w+/)?encoder\.",
        expected=Expected(norm_eps=1e-5, mean=HALF, std=HALF, positions="bilinear"),
    ),
    # Its mask transformer has class embeddings; its initial networks expect images of mean 0.5.
    Project(
        "MMSegmentation Segmenter",
        "github.com/open-mmlab/mmsegmentation",
        signs=(r"^(\w+/)?backbone\.", r"^(\w+/)?decode_head\.cls_emb$"),
        teacher=r"(\w+/)?backbone\.",
        expected=Expected(mean=HALF, std=HALF),
    ),
    # Its blocks never read [CLS] (`with_cls_token=False` in configs/_base_/models/setr_mla.py).
    Project(
        "MMSegmentation SETR-MLA",
        "github.com/open-mmlab/mmsegmentation",
        signs=(r"^(\w+/)?backbone\.layers\.0\.attn\.", r"^(\w+/)?neck\.mla\."),
        teacher=r"(\w+/)?backbone\.",
        expected=Expected(positions="bilinear"),
        adapt=naming.without_cls_token,
    ),
    Project(
        "MMSegmentation SETR",
        "github.com/open-mmlab/mmsegmentation",
        signs=(r"^(\w+/)?backbone\.layers\.0\.attn\.", r"^(\w+/)?decode_head\.up_convs\."),
        teacher=r"(\w+/)?backbone\.",
        expected=Expected(positions="bilinear"),
    ),
    # Its norms have mmcv's default epsilon (configs/_base_/models/dpt_vit-b16.py).
    Project(
        "MMSegmentation DPT",
        "github.com/open-mmlab/mmsegmentation",
        signs=(r"^(\w+/)?backbone\.layers\.0\.attn\.", r"^(\w+/)?decode_head\.reassemble_blocks\."),
        teacher=r"(\w+/)?backbone\.",
        expected=Expected(norm_eps=1e-5),
    ),
    Project(
        "MMSegmentation",
        "github.com/open-mmlab/mmsegmentation",
        signs=(r"^(\w+/)?backbone\.", r"^(\w+/)?(decode_head|auxiliary_head)\."),
        teacher=r"(\w+/)?backbone\.",
        dropped=(("decoder", r"^(\w+/)?backbone\.fpn\d\."),),
    ),
    # Checkpoints of its trainings. Networks converted for it have bare names and are recognised by their naming.
    Project(
        "detectron2",
        _DETECTRON2,
        signs=(r"^(\w+/)?backbone\.(bottom_up\.)?res2\.0\.conv1\.norm\.",),
        teacher=r"(\w+/)?backbone\.(bottom_up\.)?",
        dropped=(
            ("decoder", r"^(\w+/)?backbone\.(fpn_\w+|top_block)\."),
            ("head", r"^(\w+/)?(proposal_generator|roi_heads)\."),
            ("normalisation", r"^(\w+/)?pixel_(mean|std)$"),
        ),
    ),
    Project(
        "LOCA",
        "github.com/google-research/scenic/tree/main/scenic/projects/loca",
        signs=(r"(^|/)ToTokenSequence_0/embedding/kernel$",),
        teacher=r"(ema_params/(params/)?)?",
        student=r"(params/)+",
    ),
    Project(
        "MAE",
        "github.com/facebookresearch/mae",
        signs=(r"(^|/)decoder_blocks\.0\.", r"(^|/)decoder_pred\.weight$"),
        teacher=r"(\w+/)?",
        expected=Expected(positions="bicubic"),
    ),
)

_MASK: Rules = (("mask token", r"^(mask_token|masked_embed|embeddings\.mask_token)$"),)
# A head stored with its network.
_HEAD: Rules = (
    ("head", r"^(\w*head\w*|fc|classifier|pooler|pre_logits|projection_head|projector|predictor|prototypes)[./]"),
    ("head", r"^(head|fc)\d*[./]"),
)
# Decoders at the same level as the encoder.
_DECODER: Rules = (("decoder", r"^decoder_\w+([./]|$)"),)

_RESNET_HEAD = ("head", r"^(fc\w*|head\w*|projector|projection_head|prototypes)\.")

_PATCHES = r"patch_embed\.proj\.weight"
_HF_PATCHES = r"embeddings\.patch_embeddings\.projection\.weight"
_TRANSFORMERS = "github.com/huggingface/transformers"

_DINOV3 = Naming(
    "DINOv3",
    "github.com/facebookresearch/dinov3",
    _PATCHES,
    naming.from_dinov3,
    needs=(r"^blocks\.0\.ls1\.gamma$", r"^(storage_tokens|rope_embed\.periods)$"),
    dropped=(*_MASK, *_HEAD, ("norm of local crops", r"^local_cls_norm\.")),
    count_heads=naming.count_heads_of_dinov3,
)
# Weights do not show whether they were trained on web or satellite images, which are normalised differently. Among the
# released ones, the satellite ViT-L and both ViT-7B have a norm of local crops, and only ViT-7B has no attention bias.
_DINOV3_SATELLITE = replace(
    _DINOV3,
    name="DINOv3 SAT-493M",
    needs=(*_DINOV3.needs, r"^local_cls_norm\.", r"^blocks\.0\.attn\.qkv\.bias$"),
    expected=Expected(
        mean=(0.430, 0.411, 0.296),
        std=(0.213, 0.156, 0.143),
        note="assumed the normalisation of satellite images, for which all released weights of this form are",
    ),
)
_DINOV3_EITHER = replace(
    _DINOV3,
    needs=(*_DINOV3.needs, r"^local_cls_norm\."),
    expected=Expected(
        note="assumed ImageNet's normalisation; if these are the weights for satellite images (SAT-493M), load timm's "
        "copy by name instead"
    ),
)

# Image towers trained with a text tower.
_CLIP = Expected(norm_eps=1e-5, mean=_CLIP_MEAN, std=_CLIP_STD)
_SIGLIP = Expected(norm_eps=1e-6, mean=HALF, std=HALF)
_HF_TOWER = r"embeddings\.patch_embedding\.weight"
_BUFFERS: Rules = (("buffer", r"(^|\.)(position_ids|relative_position_index|relative_coords_table|attn_mask)$"),)
_TOWERS: tuple[Naming, ...] = (
    # The default activation is GELU; weights of OpenAI, DFN and MetaCLIP have configurations with quick_gelu.
    Naming(
        "open_clip",
        "github.com/mlfoundations/open_clip (transformer.py; pos_embed.py resizes as timm does)",
        r"conv1\.weight",
        naming.from_open_clip,
        needs=(r"^class_embedding$", r"^positional_embedding$", r"^transformer\.resblocks\.0\."),
        dropped=(("projection", r"^proj$"),),
        expected=replace(_CLIP, assumed_act_layer="gelu"),
    ),
    Naming(
        "Hugging Face CLIP",
        f"{_TRANSFORMERS} (clip)",
        _HF_TOWER,
        naming.from_huggingface_clip,
        needs=(r"^embeddings\.class_embedding$", r"^pre_layrnorm\.weight$"),
        dropped=_BUFFERS,
        expected=replace(
            _CLIP,
            assumed_act_layer="quick_gelu",
            positions="bicubic",
            note="tokens are after the final norm (post_layernorm); last_hidden_state of transformers is before it",
        ),
    ),
    Naming(
        "Hugging Face SigLIP",
        f"{_TRANSFORMERS} (siglip)",
        _HF_TOWER,
        naming.from_huggingface_siglip,
        needs=(r"^embeddings\.patch_embedding\.bias$", r"^encoder\.layers\.0\.layer_norm1\.weight$"),
        dropped=_BUFFERS,
        expected=replace(_SIGLIP, act_layer="gelu_tanh", positions="bicubic"),
    ),
    # Also open_clip's, whose SigLIP has timm's network as `visual.trunk`.
    Naming(
        "timm SigLIP",
        "github.com/huggingface/pytorch-image-models (vision_transformer.py)",
        _PATCHES,
        naming.unchanged,
        needs=(r"^attn_pool\.latent$", r"^blocks\.0\.norm1\.weight$", r"^pos_embed$"),
        dropped=_HEAD,
        expected=replace(_SIGLIP, assumed_act_layer="gelu"),
    ),
    # timm has networks of both activations with this naming, so none is assumed.
    Naming(
        "timm CLIP",
        "github.com/huggingface/pytorch-image-models (vision_transformer.py)",
        _PATCHES,
        naming.unchanged,
        needs=(r"^norm_pre\.weight$", r"^blocks\.0\.norm1\.weight$", r"^pos_embed$"),
        dropped=_HEAD,
        expected=_CLIP,
    ),
)

_TIMM = "github.com/huggingface/pytorch-image-models"
_SWIN = Expected(norm_eps=1e-5, windows="original")
_PYRAMIDS: tuple[Naming, ...] = (
    Naming(
        "ConvNeXt",
        "github.com/facebookresearch/ConvNeXt, /ConvNeXt-V2 (models/convnext.py, convnextv2.py)",
        r"downsample_layers\.0\.0\.weight",
        naming.from_convnext,
        needs=(r"^stages\.0\.0\.dwconv\.weight$",),
        dropped=_HEAD,
        expected=Expected(norm_eps=1e-6),
    ),
    Naming(
        "Hugging Face ConvNeXt",
        f"{_TRANSFORMERS} (convnext, convnextv2)",
        r"embeddings\.patch_embeddings\.weight",
        naming.from_huggingface_convnext,
        needs=(r"^encoder\.stages\.0\.layers\.0\.dwconv\.weight$",),
        dropped=_HEAD,
        # Its configuration specifies the last norm only.
        expected=Expected(norm_eps=1e-6, final_norm_eps=1e-12),
    ),
    Naming(
        "timm ConvNeXt",
        f"{_TIMM} (convnext.py)",
        r"stem\.0\.weight",
        naming.unchanged,
        needs=(r"^stages\.0\.blocks\.0\.conv_dw\.weight$",),
        dropped=(("head", r"^head\.fc\."),),
    ),
    Naming(
        "Hugging Face ResNet",
        f"{_TRANSFORMERS} (resnet)",
        r"embedder\.embedder\.convolution\.weight",
        naming.from_huggingface_resnet,
        dropped=_HEAD,
    ),
    Naming(
        "Swin",
        "github.com/microsoft/Swin-Transformer (models/swin_transformer.py)",
        _PATCHES,
        naming.from_swin,
        needs=(r"^layers\.0\.blocks\.0\.attn\.relative_position_bias_table$", r"^layers\.0\.downsample\."),
        dropped=(*_MASK, *_HEAD, *_BUFFERS),
        expected=_SWIN,
    ),
    Naming(
        "timm Swin",
        f"{_TIMM} (swin_transformer.py)",
        _PATCHES,
        naming.unchanged,
        needs=(r"^layers\.0\.blocks\.0\.attn\.relative_position_bias_table$",),
        dropped=(*_HEAD, *_BUFFERS),
    ),
    Naming(
        "Hugging Face Swin",
        f"{_TRANSFORMERS} (swin)",
        _HF_PATCHES,
        naming.from_huggingface_swin,
        needs=(r"^encoder\.layers\.0\.blocks\.0\.layernorm_before\.weight$",),
        dropped=(*_MASK, *_HEAD, *_BUFFERS),
        expected=_SWIN,
    ),
)

_HF_BEIT = Expected(
    norm_eps=1e-12,
    mean=HALF,
    std=HALF,
    positions="bicubic",
    relative_positions="bilinear",
    note="tokens are after the last norm; if it is the pooler's, last_hidden_state of transformers is before it",
)
_BEITS: tuple[Naming, ...] = (
    # Its fine-tuning resizes both kinds of positions when loading weights; its networks support a single image size.
    Naming(
        "BEiT",
        "github.com/microsoft/unilm/tree/master/beit (modeling_finetune.py, run_class_finetuning.py)",
        _PATCHES,
        naming.unchanged,
        needs=(r"^blocks\.0\.norm1\.weight$", r"(^rel_pos_bias|\.attn)\.relative_position_bias_table$"),
        dropped=(*_MASK, *_HEAD, *_BUFFERS),
        count_heads=naming.count_heads_of_beit,
        expected=Expected(
            norm_eps=1e-6,
            mean=HALF,
            std=HALF,
            positions="bicubic",
            relative_positions="geometric_spline",
            note="assumed an image mean of 0.5, as in BEiT; BEiT v2 and the fine-tuned networks of SimMIM have "
            "ImageNet's",
        ),
    ),
    Naming(
        "Hugging Face BEiT",
        f"{_TRANSFORMERS} (beit)",
        _HF_PATCHES,
        naming.from_huggingface_beit,
        needs=(
            r"relative_position_bias_table$",
            r"^(encoder\.)?layers?\.0\.layernorm_before\.weight$",
            r"^(pooler\.)?layernorm\.weight$",
        ),
        dropped=(*_MASK, *_BUFFERS),
        count_heads=naming.count_heads_of_beit,
        expected=_HF_BEIT,
    ),
    # BeitForMaskedImageModeling has the last norm beside the network.
    Naming(
        "Hugging Face BEiT, masked image modelling",
        f"{_TRANSFORMERS} (beit)",
        r"beit\.embeddings\.patch_embeddings\.projection\.weight",
        naming.from_huggingface_beit,
        needs=(r"relative_position_bias_table$", r"^layernorm\.weight$"),
        dropped=(("mask token", r"embeddings\.mask_token$"), *_HEAD, *_BUFFERS),
        count_heads=naming.count_heads_of_beit,
        expected=replace(_HF_BEIT, note=None),
    ),
)

NAMINGS: tuple[Naming, ...] = (
    *_BEITS,
    *_TOWERS,
    *_PYRAMIDS,
    _DINOV3_SATELLITE,
    _DINOV3_EITHER,
    _DINOV3,
    Naming(
        "timm DINOv3",
        "github.com/huggingface/pytorch-image-models",
        _PATCHES,
        naming.unchanged,
        needs=(r"^blocks\.0\.gamma_1$", r"^blocks\.0\.attn\.qkv\.weight$", r"^reg_token$"),
        dropped=_HEAD,
    ),
    Naming(
        "DINOv2",
        "github.com/facebookresearch/dinov2",
        _PATCHES,
        naming.from_dinov2,
        needs=(r"^blocks\.0\.(\d+\.)?ls1\.gamma$", r"^(mask_token|register_tokens|blocks\.0\.\d+\.norm1\.weight)$"),
        dropped=(*_MASK, *_HEAD),
        expected=_OFFSET,
    ),
    Naming(
        "timm ViT",
        "github.com/huggingface/pytorch-image-models",
        _PATCHES,
        naming.from_vit,
        needs=(r"^blocks\.0\.norm1\.weight$", r"^pos_embed$"),
        dropped=(*_MASK, *_HEAD, *_DECODER),
    ),
    Naming(
        "Hugging Face DINOv2",
        f"{_TRANSFORMERS} (dinov2, dinov2_with_registers)",
        _HF_PATCHES,
        naming.from_huggingface,
        needs=(r"\.layer_scale1\.lambda1$",),
        dropped=(*_MASK, *_HEAD),
        expected=Expected(positions="bicubic"),
    ),
    Naming(
        "Hugging Face ViT",
        f"{_TRANSFORMERS} (vit)",
        _HF_PATCHES,
        naming.from_huggingface,
        needs=(r"\.layernorm_before\.weight$", r"^embeddings\.position_embeddings$"),
        dropped=(*_MASK, *_HEAD),
        expected=Expected(norm_eps=1e-12, mean=HALF, std=HALF, positions="bicubic"),
    ),
    Naming(
        "Hugging Face DINOv3",
        f"{_TRANSFORMERS} (dinov3_vit)",
        r"embeddings\.patch_embeddings\.weight",
        naming.from_huggingface_dinov3,
        needs=(r"\.layer_scale1\.lambda1$",),
        dropped=(*_MASK, *_HEAD),
    ),
    Naming(
        "MMSegmentation ViT",
        "github.com/open-mmlab/mmsegmentation",
        r"patch_embed\.projection\.weight",
        naming.from_mmsegmentation,
        needs=(r"^layers\.0\.attn\.attn\.in_proj_weight$",),
        expected=Expected(positions="bicubic"),
    ),
    Naming(
        "LOCA",
        "github.com/google-research/scenic/tree/main/scenic/projects/loca",
        r"ToTokenSequence_0/embedding/kernel",
        naming.from_flax,
        dropped=(
            ("position predictor", r"^(cross_attention_block|final_norm|position_predictor)/"),
            ("head", r"^projection_head_for_clustering_prediction/"),
        ),
        count_heads=naming.count_heads_of_flax,
        is_nested=True,
        expected=Expected(act_layer="gelu_tanh", positions="bilinear_antialiased"),
    ),
    Naming(
        "JAX ViT",
        "github.com/google-research/vision_transformer",
        r"embedding/kernel",
        naming.from_flax,
        needs=(r"^Transformer/encoderblock_0/",),
        dropped=(("head", r"^(head|pre_logits|output_projection)/"),),
        count_heads=naming.count_heads_of_flax,
        is_nested=True,
        expected=Expected(act_layer="gelu_tanh", mean=HALF, std=HALF, positions="bilinear_corners"),
    ),
    Naming(
        "ResNet",
        "github.com/pytorch/vision",
        r"layer1\.0\.conv1\.weight",
        naming.unchanged,
        needs=(r"^conv1\.(0\.)?weight$", r"^bn1\.running_mean$"),
        dropped=(_RESNET_HEAD,),
    ),
    Naming(
        "MMSegmentation ResNetV1c",
        "github.com/open-mmlab/mmsegmentation, mmseg/models/backbones/resnet.py",
        r"stem\.0\.weight",
        naming.from_resnet_v1c,
        needs=(r"^stem\.7\.running_mean$", r"^layer1\.0\.conv1\.weight$"),
        dropped=(_RESNET_HEAD,),
    ),
    Naming(
        "detectron2",
        _DETECTRON2,
        r"stem\.conv1\.weight",
        naming.from_detectron2,
        needs=(r"^stem\.conv1\.norm\.running_mean$", r"^res2\.0\.conv1\.norm\.weight$"),
        dropped=(("head", r"^(stem\.)?(fc|linear)\."),),
    ),
    Naming(
        "XCiT",
        "github.com/facebookresearch/xcit, github.com/facebookresearch/dino",
        r"patch_embed\.proj\.0\.0\.weight",
        naming.unchanged,
        needs=(r"^blocks\.0\.attn\.temperature$", r"^cls_attn_blocks\.0\.gamma1$"),
        dropped=_HEAD,
    ),
    Naming(
        "CAPI",
        "github.com/facebookresearch/capi, model.py",
        r"registers",
        naming.unchanged,
        needs=(r"^encoder\.blocks\.0\.residual1\.fn\.rope\.freqs$", r"^patch_embed\.weight$"),
        dropped=(*_MASK, ("decoder", r"^(decoder|dec_norm)\.")),
    ),
    Naming(
        "ViT with a convolutional stem",
        "github.com/facebookresearch/moco-v3, vits.py (vit_conv_small, vit_conv_base)",
        r"patch_embed\.proj\.0\.weight",
        naming.unchanged,
        needs=(r"^patch_embed\.proj\.12\.weight$", r"^blocks\.0\.norm1\.weight$", r"^pos_embed$"),
        dropped=_HEAD,
    ),
)

OWN = Naming("timm", "", "", naming.unchanged, dropped=(*_MASK, *_HEAD, *_DECODER), is_nested=True)
"""Timm's names, for networks built before their weights are read."""
