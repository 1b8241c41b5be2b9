"""Formats of other projects' weights: one row per project and per naming of a network's tensors.

A file is recognised by its keys only. A `Project` describes the networks and other tensors in its files, with their
prefixes; a `Naming` describes the names of one network's tensors. What the weights expect (normalisation, epsilon,
resizing of positions) comes from the project first, then from the naming.

The rows are in `formats.yaml`, with facts from each project's public repository. To add a format: a row there, a
function in `naming` if its names are new, and a case in tests/models/formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

import yaml

from cribo.models.formats import naming
from cribo.models.formats.naming import State
from cribo.models.positions import RelativeResizing, Resizing, Windows

Rules = tuple[tuple[str, str], ...]
"""(group, pattern): matching keys belong to the group and are ignored."""


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
        needs: patterns, each of which must match some key of the file.
        teacher, student: patterns of the prefixes of the two networks; None if the project has no such network.
        dropped: rules for keys outside the network, in addition to `BESIDE`.
        expected: see `Expected`.
        adapt: function that changes a network's tensors, under timm's names, if the project uses them differently.
    """

    name: str
    source: str
    needs: tuple[str, ...]
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
    rename: Callable[[State], State] = naming.unchanged
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


def _values(row: Mapping[str, Any], rules: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return the fields of a row: lists as tuples, names of functions and rules replaced by what they refer to."""
    values = _with_tuples(row)
    values |= {key: getattr(naming, row[key]) for key in ("rename", "count_heads", "adapt") if key in row}
    items = (rules[item] if isinstance(item, str) else item for item in row.get("dropped", ()))
    values["dropped"] = tuple(rule for item in items for rule in item.items())
    values["expected"] = Expected(**_with_tuples(row.get("expected", {})))
    return values


def _with_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


_FILE = yaml.safe_load((resources.files("cribo.models.formats") / "formats.yaml").read_text(encoding="utf-8"))
PROJECTS = tuple(Project(**_values(row, _FILE["rules"])) for row in _FILE["projects"])
NAMINGS = tuple(Naming(**_values(row, _FILE["rules"])) for row in _FILE["namings"])
OWN = Naming(**_values(_FILE["own"], _FILE["rules"]), source="", anchor="")
"""Timm's names, for networks built before their weights are read."""
