"""Weights on disk: other projects' files into a backbone, a backbone into files that plain timm reads."""

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.models import load_state_dict_from_hf
from torch import Tensor

from cribo.files import sync, write_beside
from cribo.models.backbone import RESERVED_ARGS, Backbone, build_backbone, nearest_names

WEIGHTS_FILE = "backbone.safetensors"
DESCRIPTION_FILE = "backbone.json"

_logger = logging.getLogger(__name__)

# Where checkpoints keep their state, the preferred first: the teacher is the network that is evaluated.
_STATE_KEYS = ("teacher", "state_dict_ema", "model_ema", "state_dict", "model", "student")
_PREFIXES = ("module.", "_orig_mod.", "teacher.", "model.", "student.", "backbone.", "encoder.")
# What sits on top of a backbone in a checkpoint, and is left out on purpose.
_HEAD_PREFIXES = (
    "head",
    "fc.",
    "fc_norm.",
    "classifier.",
    "projection",
    "projector",
    "predictor",
    "prototypes",
    "last_layer",
    "decoder",
    "mask_token",
    "masked_embed",
    "queue",
)
_FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar")
_HUB_FILE = "pytorch_model.bin"  # timm prefers the model.safetensors beside it
_LISTED = 8


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_pretrained` took from its source.

    Attributes:
        source: the file or the timm name.
        taken: the part of the file that was used, such as `teacher/module.backbone.`; empty for all of it.
        ignored: keys of the file that belong to no backbone (heads, another network).
        resampled: parameters that were resized to the network's patch or image size.
    """

    source: str
    taken: str
    ignored: tuple[str, ...]
    resampled: tuple[str, ...]


def load_pretrained(backbone: Backbone, source: str | Path) -> LoadedWeights:
    """Load weights into a backbone: all of them, or none and an error.

    Args:
        backbone: its architecture must be the one of the weights; image size and patch size may differ
            (position embedding and patch projection are resampled as timm does it).
        source: a file (`.safetensors`, or `.pth`/`.pt`, read without executing code in it), a folder that
            `save_backbone` wrote, `"timm"` for timm's default weights of the architecture, or a timm name
            with its tag, such as `vit_small_patch16_224.dino`. Of two networks in a file, the teacher.

    Returns:
        What was used and what was left out; also logged.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is damaged or of another architecture, an unknown timm name.
        ConnectionError: timm's weights are not in its cache and cannot be fetched.
    """
    path = Path(source)
    if str(source) == "timm" or not (path.exists() or path.suffix in _FILE_SUFFIXES or len(path.parts) > 1):
        return _load_from_timm(backbone, str(source))
    if path.is_dir():
        path = path / WEIGHTS_FILE
    loaded = _take(backbone, _read(path), str(path))
    description = path.with_name(DESCRIPTION_FILE)
    if path.name == WEIGHTS_FILE and description.is_file():
        _set_normalisation(backbone, _read_description(description))
    return loaded


def save_backbone(backbone: Backbone, folder: str | Path) -> Path:
    """Write `backbone.safetensors` and `backbone.json`, which plain timm can load without this package.

    Both files are written under other names and moved into place when they are complete, so that a full disk
    or a kill while writing leaves an older pair as it was.

    Args:
        backbone: any device or precision.
        folder: created where missing.

    Returns:
        The path of `backbone.safetensors`.

    Raises:
        ValueError: the backbone was built with arguments that JSON cannot hold.
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    # Clones, because safetensors refuses tensors that share memory.
    state = {key: value.detach().cpu().contiguous().clone() for key, value in backbone.model.state_dict().items()}
    try:
        json.dumps(backbone.arguments)
    except TypeError as error:
        raise ValueError(
            f"the arguments of {backbone.name} cannot be written as JSON ({error}): give names where timm "
            f'takes them (norm_layer="layernorm"), got {backbone.args}'
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    weights, description = folder / WEIGHTS_FILE, folder / DESCRIPTION_FILE
    new_weights = write_beside(weights, lambda path: _save_tensors(state, path, weights))
    new_description = None
    try:
        content = {
            "name": backbone.name,
            "args": backbone.arguments,
            "image_size": backbone.image_size,
            "patch_size": backbone.patch_size,
            "embed_dim": backbone.embed_dim,
            "mean": list(backbone.mean),
            "std": list(backbone.std),
            "timm": timm.__version__,
            "torch": str(torch.__version__),
            "sha256": _sha256(new_weights),
            "how_to_load": (
                "import json, timm, safetensors.torch; about = json.load(open('backbone.json')); "
                "model = timm.create_model(about['name'], **about['args']); "
                "model.load_state_dict(safetensors.torch.load_file('backbone.safetensors'))"
            ),
        }
        text = json.dumps(content, indent=2) + "\n"
        new_description = write_beside(description, lambda path: path.write_text(text, encoding="utf-8"))
        new_weights.replace(weights)
        new_description.replace(description)
    finally:
        for leftover in filter(None, (new_weights, new_description)):
            leftover.unlink(missing_ok=True)
    sync(folder)
    return weights


def load_backbone(path: str | Path, *, drop_path: float = 0.0) -> Backbone:
    """Rebuild a backbone that `save_backbone` wrote.

    Args:
        path: the folder, or the `backbone.safetensors` in it.
        drop_path: as in `build_backbone`; weights do not keep it.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: they are damaged, or do not belong together.
    """
    path = Path(path)
    weights = path / WEIGHTS_FILE if path.is_dir() else path
    description = weights.with_name(DESCRIPTION_FILE)
    if not weights.is_file():
        raise FileNotFoundError(f"no backbone at {weights}: give a folder that holds {WEIGHTS_FILE}")
    if not description.is_file():
        raise FileNotFoundError(
            f"{weights} has no {DESCRIPTION_FILE} beside it: copy it from the run, or build the backbone by "
            f"name with pretrained={str(weights)!r}"
        )
    content = _read_description(description)
    if _sha256(weights) != content["sha256"]:
        raise ValueError(
            f"{weights} is not the file that {description} describes (sha256 differs): copy both again from one run"
        )
    backbone = build_backbone(
        content["name"],
        args={key: value for key, value in content["args"].items() if key not in RESERVED_ARGS},
        image_size=content["image_size"],
        drop_path=drop_path,
    )
    _load_all_or_nothing(backbone, _tensors(_read(weights)), str(weights))
    _set_normalisation(backbone, content)
    return backbone


def _load_from_timm(backbone: Backbone, source: str) -> LoadedWeights:
    name = backbone.name if source == "timm" else source
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise ValueError(f"pretrained={source!r} is neither a file nor a timm name{nearest_names(architecture)}")
    if architecture != backbone.name:
        raise ValueError(f"{source!r} holds weights of {architecture}, the backbone is {backbone.name}")
    tags = [full for full in timm.list_pretrained() if full.partition(".")[0] == architecture]
    if not tags:
        raise ValueError(f"timm has no pretrained weights of {architecture}: give a file")
    if tag and name not in tags:
        raise ValueError(f"timm has no weights {name!r}: it has {', '.join(tags)}")
    config = timm.get_pretrained_cfg(name)
    # `custom_load` speaks of the file behind the URL, unless it is "hf".
    hub = config.hf_hub_id if config and str(config.custom_load) != "hf" else None
    url = config.url if config and not config.custom_load and isinstance(config.url, str) else None
    if config is None or not (hub or url):
        raise ValueError(f"the weights {name!r} are in no format of PyTorch: give a file")
    try:
        if hub:
            content = load_state_dict_from_hf(hub, config.hf_hub_filename or _HUB_FILE)
        else:
            content = torch.hub.load_state_dict_from_url(str(url), map_location="cpu", weights_only=True)
    except Exception as error:  # the errors of the hub's client have no common base
        place = f"https://huggingface.co/{hub}" if hub else url
        raise ConnectionError(
            f"cannot fetch the weights {name!r} ({type(error).__name__}: {error}). Without a network: "
            f"download their file (model.safetensors) from {place} on another machine, and pass its path"
        ) from error
    loaded = _take(backbone, content, name)
    backbone.mean, backbone.std = config.mean, config.std
    return loaded


def _take(backbone: Backbone, content: Mapping[str, Any], source: str) -> LoadedWeights:
    """Find the backbone in what a file holds and load it."""
    state, taken = _find_state(content, source)
    state, prefix, ignored = _strip_prefixes(state, backbone)
    state, resampled = _fit(state, backbone, source)
    extra = _load_all_or_nothing(backbone, state, source)
    taken = "/".join(part for part in (taken, prefix) if part)
    loaded = LoadedWeights(source, taken, (*ignored, *extra), resampled)
    _logger.info(
        "%s: took %s; left out %d keys of heads or other networks; resampled %s",
        source,
        taken or "the whole file",
        len(loaded.ignored),
        ", ".join(resampled) or "nothing",
    )
    return loaded


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: copy or download it again")
    try:
        if path.suffix == ".safetensors":
            content: Any = safetensors.torch.load_file(path)
        else:
            # Training scripts keep their options beside the weights; a namespace runs no code.
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in its reader
        first_line = str(error).partition("\n")[0]
        if "Weights only load failed" in first_line and "GLOBAL" in str(error):
            raise ValueError(
                f"{path} holds Python objects beside its tensors and is not read, because that could run "
                "code in it: save only its state dict, where you trust it"
            ) from error
        raise ValueError(
            f"{path} is damaged or is no file of weights ({type(error).__name__}: {first_line[:200]}): copy "
            "or download it again"
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a state dict")
    return content


def _tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}


def _find_state(content: Mapping[str, Any], source: str) -> tuple[dict[str, Tensor], str]:
    """Descend to the state dict; the second value says by which keys."""
    taken: list[str] = []
    while True:
        key = next((key for key in _STATE_KEYS if isinstance(content.get(key), Mapping) and content[key]), None)
        if key is None:
            break
        content = content[key]
        taken.append(key)
    state = _tensors(content)
    if not state:
        found = ", ".join(str(key) for key in list(content)[:_LISTED]) or "nothing"
        raise ValueError(
            f"{source} has no state dict: expected tensors, or one of {', '.join(_STATE_KEYS)}; it holds {found}"
        )
    return state, "/".join(taken)


def _strip_prefixes(state: dict[str, Tensor], backbone: Backbone) -> tuple[dict[str, Tensor], str, tuple[str, ...]]:
    """Peel off the names of wrappers; keys outside of them belong to other networks and are left out."""
    own = tuple(backbone.model.state_dict())
    stripped, ignored = "", []
    while True:
        prefix = next(
            (
                prefix
                for prefix in _PREFIXES
                if any(key.startswith(prefix) for key in state) and not any(key.startswith(prefix) for key in own)
            ),
            None,
        )
        if prefix is None:
            return state, stripped, tuple(ignored)
        ignored += [stripped + key for key in state if not key.startswith(prefix)]
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        stripped += prefix


def _fit(state: dict[str, Tensor], backbone: Backbone, source: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Let timm rename foreign keys and resample embeddings, where the family has a filter for that."""
    checkpoint_filter = getattr(sys.modules[type(backbone.model).__module__], "checkpoint_filter_fn", None)
    if checkpoint_filter is None:
        return state, ()
    shapes = {key: value.shape for key, value in state.items()}
    try:
        fitted: dict[str, Tensor] = checkpoint_filter(dict(state), backbone.model)
    except Exception as error:  # each family's filter has its own ways to fail on another family's file
        raise ValueError(
            f"{source} does not fit {backbone.name}: timm's filter failed ({type(error).__name__}: {error})"
        ) from error
    resampled = (key for key, value in fitted.items() if key in shapes and shapes[key] != value.shape)
    return fitted, tuple(resampled)


def _load_all_or_nothing(backbone: Backbone, state: Mapping[str, Tensor], source: str) -> tuple[str, ...]:
    """Check every key and shape, then load; returns the keys that were left out as parts of heads."""
    own = backbone.model.state_dict()
    # A file without a head lacks what `encode` never reads; old files lack batch norm's counters.
    missing = [
        key
        for key in own
        if key not in state and key not in backbone.unused_parameters and not key.endswith("num_batches_tracked")
    ]
    reshaped = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape and key not in backbone.unused_parameters
    ]
    extra = [key for key in state if key not in own]
    unexpected = [key for key in extra if not key.startswith(_HEAD_PREFIXES)]
    problems = [
        f"{len(keys)} keys {what}: {_first(keys)}"
        for what, keys in (("missing", missing), ("of another shape", reshaped), ("unexpected", unexpected))
        if keys
    ]
    if problems:
        arguments = f" with {backbone.args}" if backbone.args else ""
        raise ValueError(f"{source} does not fit {backbone.name}{arguments}; nothing was loaded; {'; '.join(problems)}")
    usable = {key: state[key] for key in own if key in state and state[key].shape == own[key].shape}
    backbone.model.load_state_dict({**own, **usable})
    return tuple(extra)


def _first(keys: Iterable[str]) -> str:
    keys = list(keys)
    return ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")


def _read_description(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        missing = {"name", "args", "image_size", "mean", "std", "sha256"} - set(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): copy it again from the run") from error
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it is not a description of a backbone")
    return content


def _set_normalisation(backbone: Backbone, description: Mapping[str, Any]) -> None:
    backbone.mean, backbone.std = tuple(description["mean"]), tuple(description["std"])


def _save_tensors(state: Mapping[str, Tensor], path: Path, stands_for: Path) -> None:
    try:
        safetensors.torch.save_file(dict(state), path)
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {stands_for}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
