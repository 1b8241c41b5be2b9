"""The formats of other projects' weights: how each is recognised, which network is taken, and what is left out.

A file is recognised by its keys alone. Its *layout* is which networks it holds under which prefixes, and what lies
beside them; the *dialect* of a network is how its keys are named (`dialects`). Each network is found by one key that
every network of its dialect has. Then every key of the file is used, or is dropped on purpose under a name (head,
decoder, student, ...), or is an error.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from cribo.models.backbone import IMAGENET_MEAN, IMAGENET_STD, Backbone
from cribo.models.dialects import (
    BICUBIC_OFFSET,
    BILINEAR_PLAIN,
    DIALECTS,
    HALF,
    OWN,
    Dialect,
    Rules,
    State,
)

NetworkName = Literal["teacher", "student"]


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
        num_heads: attention heads, where the file shows them.
        heads: attention heads by width, where they are not the usual ones.
        act_layer, norm_eps: what the network has, where it is not what timm's has.
        mean, std: the normalisation that the weights expect.
        notes: what a user should know.
    """

    format: str
    network: NetworkName | None
    part: str
    state: State
    used: tuple[str, ...]
    dropped: dict[str, tuple[str, ...]]
    num_heads: int | None
    heads: Mapping[int, int]
    act_layer: str | None
    norm_eps: float | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...]


_TRAINING = (
    r"^(optim\w*|\w*sched\w*|\w*scaler\w*|amp|loops|callbacks|opt_state|rng\w*|meta\w*|message_hub|hyper_parameters|"
    r"args|config|global_step|step|iteration|epoch|ema_state|state)(/|$)"
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
        dropped=(("queue", r"^cribo/bank/|^state_dict/_extra_state/"), ("training state", r"^cribo/")),
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
    tensors: Mapping[str, Tensor], source: str, *, network: NetworkName = "teacher", backbone: Backbone | None = None
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
    if len(originals) < len(tensors):
        twice = set(tensors) - set(originals.values())
        raise ValueError(f"{source} holds keys that only wrappers tell apart: {first_keys(sorted(twice))}")
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
        num_heads=dialect.count_heads(state),
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
    found: Mapping[str, Dialect], layout: Layout | None, network: NetworkName, source: str
) -> tuple[str, NetworkName | None]:
    """The prefix of the network to take, and which of the two it is."""
    if layout is not None:
        roles: dict[NetworkName, str | None] = {"teacher": layout.teacher, "student": layout.student}
        by_role = {
            role: [prefix for prefix in found if pattern is not None and re.fullmatch(pattern, prefix)]
            for role, pattern in roles.items()
        }
    else:
        teachers = [prefix for prefix in found if re.search(_TEACHER_LIKE, prefix)]
        by_role = {"teacher": teachers, "student": [prefix for prefix in found if prefix not in teachers]}
    named = ", ".join(repr(prefix) for prefix in found)
    if len(found) == 1 and network == "student" and not any("student" in prefix for prefix in by_role["student"]):
        raise ValueError(
            f"{source} holds one network, under the prefix {named}, and no student: leave network as it is"
        )
    if len(by_role[network]) == 1:
        is_only = len(found) == 1 and (layout is None or layout.student is None)
        return by_role[network][0], None if is_only else network
    if network == "teacher" and not by_role["teacher"] and len(by_role["student"]) == 1:
        return by_role["student"][0], None if layout is None else "student"
    raise ValueError(
        f"{source} holds several networks and does not say which is the {network}: under the prefixes {named}; save "
        "the one you want in a file of its own"
    )


_USED, _UNKNOWN = "", "?"


def _group(
    key: str,
    prefix: str,
    found: Mapping[str, Dialect],
    layout: Layout | None,
    own: Collection[str],
    taken: NetworkName | None,
) -> str:
    """What a key belongs to: the network that is taken, a group that is dropped, or nothing that is known."""
    if re.search(_TRAINING, key):
        return "training state"
    # One prefix may begin with another: the longer one names the network.
    owner = max((each for each in found if key.startswith(each)), key=len, default=None)
    if owner is not None and owner != prefix:
        is_student = layout is not None and layout.student is not None and re.fullmatch(layout.student, owner)
        return "student" if is_student else "teacher" if taken == "student" else "other network"
    rules = layout.dropped if layout else ()
    if owner == prefix:
        inner = key.removeprefix(prefix)
        if inner in own:
            return _USED
        return _first_match(found[prefix].dropped, inner) or _first_match(rules, key) or _USED
    return _first_match((*rules, *_BESIDE), key) or _UNKNOWN


def _first_match(rules: Rules, key: str) -> str | None:
    return next((group for group, pattern in rules if re.search(pattern, key)), None)


def _notes(
    by_precedence: Sequence[Layout | Dialect], state: State, taken: NetworkName | None, network: NetworkName
) -> Iterator[str]:
    if taken is not None and taken != network:
        yield f"the file holds no {network}, so its {taken} was taken"
    note = next((part.note for part in by_precedence if part.note), None)
    # DINOv2's networks with registers resize their position embedding as timm does.
    if note and not any(key.endswith("register_tokens") for key in state):
        yield note
