"""Formats of other projects' weights: one row per project and per naming of a network's tensors.

A file is recognised by its keys only. A `Project` describes the networks and other tensors in its files, with their
prefixes; a `Naming` describes the names of one network's tensors. What the weights expect (normalisation, epsilon,
resizing of positions) comes from the project first, then from the naming.

The rows are in `formats.yaml`, with facts from each project's public repository. To add a format: a row there, the
functions that it names in a file of their own, if its tensors or configurations need code, and a case in
tests/models/formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, resources
from typing import Any

import yaml

from cribo.models.formats import naming
from cribo.models.formats.distributed import SHARD
from cribo.models.formats.hub import hub
from cribo.models.formats.naming import Rename, State
from cribo.models.formats.recognised import Configure, Expected

Rules = tuple[tuple[str, str], ...]
"""(group, pattern): matching keys belong to the group and are ignored."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What all rows have.

    Attributes:
        name: display name.
        source: public repository or code.
        needs: patterns, each of which must match some key.
        dropped: rules for keys that are ignored.
        expected: see `Expected`.
        configure: function that applies the configurations in the file and beside it.
    """

    name: str
    source: str = ""
    needs: tuple[str, ...] = ()
    dropped: Rules = ()
    expected: Expected = field(default_factory=Expected)
    configure: Configure = hub


@dataclass(frozen=True, kw_only=True)
class Project(Row):
    """Networks and other tensors in a project's files.

    Attributes:
        teacher, student: patterns of the prefixes of the two networks; None if the project has no such network.
        adapt: function that changes a network's tensors, under timm's names, if the project uses them differently.
    """

    teacher: str | None
    student: str | None = None
    adapt: Rename = naming.unchanged


@dataclass(frozen=True, kw_only=True)
class Naming(Row):
    """Names of one network's tensors; `needs` and `dropped` are for its keys without their prefix.

    Attributes:
        anchor: pattern of a key that each network of this naming has exactly once.
        rename: function that renames the network's tensors to timm's names, in steps.
        count_heads: function that returns the number of attention heads, if the tensors show it.
        is_nested: whether the keys of one network contain slashes, as in Flax.
    """

    anchor: str = ""
    rename: Rename = naming.unchanged
    count_heads: Callable[[State], int | None] = lambda state: None
    is_nested: bool = False


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
    values |= {key: _function(row[key]) for key in ("count_heads", "adapt", "configure") if key in row}
    values |= {"rename": naming.in_steps(map(_step, row["rename"]))} if "rename" in row else {}
    items = (rules[item] if isinstance(item, str) else item for item in row.get("dropped", ()))
    values["dropped"] = tuple(rule for item in items for rule in item.items())
    values["expected"] = Expected(**_with_tuples(row.get("expected", {})))
    return values


def _step(step: str | Mapping[str, str]) -> Rename:
    return _function(step) if isinstance(step, str) else partial(naming.substitute, step)


def _function(name: str) -> Any:
    """Return a function of a module in this folder, such as `naming.from_vit`."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"cribo.models.formats.{module}"), function)


def _with_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


_FILE = yaml.safe_load((resources.files("cribo.models.formats") / "formats.yaml").read_text(encoding="utf-8"))
PROJECTS = tuple(Project(**_values(row, _FILE["rules"])) for row in _FILE["projects"])
NAMINGS = tuple(Naming(**_values(row, _FILE["rules"])) for row in _FILE["namings"])
OWN = Naming(**_values(_FILE["own"], _FILE["rules"]))
"""Timm's names, for networks built before their weights are read."""
