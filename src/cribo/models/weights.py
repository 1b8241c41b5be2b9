"""Weights on disk: anybody's files into a backbone, a backbone into files that plain timm reads."""

import contextlib
import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import timm
import torch
from timm.layers.activations import GELUTanh, QuickGELU
from timm.models import Beit, VisionTransformer, load_state_dict_from_hf
from torch import Tensor

from cribo.files import Damaged, check_archive, sync, write_beside
from cribo.models.backbone import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    RESERVED_ARGS,
    Backbone,
    Numerics,
    build_backbone,
    is_import_path,
    nearest_names,
)
from cribo.models.formats.architecture import Architecture, infer_architecture, whose_fixed_positions
from cribo.models.formats.beside import (
    as_of_detectron2,
    as_of_mmsegmentation,
    as_trained_by_dino,
    expecting,
    read_yaml,
    resnet_strides,
    whole_network_near,
)
from cribo.models.formats.distributed import METADATA
from cribo.models.formats.reading import ORBAX_FILES, flatten, read_json, read_weights
from cribo.models.formats.recognising import NetworkName, Recognised, first_keys, recognise, required_keys
from cribo.models.formats.table import SHARD, Expected
from cribo.models.positions import Resizing, resize_positions, resize_relative_positions

WEIGHTS_FILE = "backbone.safetensors"
DESCRIPTION_FILE = "backbone.json"

_logger = logging.getLogger(__name__)

_FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar", ".npz", ".msgpack")
_HUB_FILE = "pytorch_model.bin"  # timm prefers the model.safetensors beside it
# What a folder holds that is laid out as on the Hugging Face hub, and one of a run that was interrupted.
_HUB_WEIGHTS, _HUB_CONFIG, _HUB_IMAGES = ("model.safetensors", _HUB_FILE), "config.json", "preprocessor_config.json"
_OPEN_CLIP_CONFIG = "open_clip_config.json"
_CHECKPOINTS = "checkpoints/step=*.ckpt"


@dataclass(frozen=True)
class LoadedWeights:
    """Where the weights of a backbone came from, key by key.

    Attributes:
        source: the file or the timm name.
        format: what it was recognised as, such as `MoCo v3`.
        network: `teacher` or `student`; None where the source holds one network.
        part: the prefix of the network's keys in the file, such as `teacher/module.backbone.`; empty for all of it.
        used: the keys that were used.
        dropped: the keys that were left out on purpose, by what they are (head, decoder, student, ...).
        resampled: parameters that were resized to the backbone's patch or image size.
        notes: what a user should know, such as a position embedding that the original resizes in another way.
    """

    source: str
    format: str
    network: NetworkName | None = None
    part: str = ""
    used: tuple[str, ...] = ()
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    resampled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for people."""
        network = f", its {self.network}" if self.network else ""
        part = f" ({self.part})" if self.part else ""
        left_out = ", ".join(f"{len(keys)} keys of {group}" for group, keys in self.dropped.items())
        resampled = f"; resized {', '.join(self.resampled)}" if self.resampled else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"{self.source}: {self.format}{network}{part}, {len(self.used)} keys used; left out "
            f"{left_out or 'nothing'}{resampled}{notes}"
        )


def load_backbone(
    source: str | Path,
    *,
    name: str | None = None,
    args: Mapping[str, Any] | None = None,
    pretrained: bool = True,
    image_size: int | None = None,
    network: NetworkName = "teacher",
    positions: Resizing | None = None,
    ignore: Sequence[str] = (),
    trust: bool = False,
    drop_path: float = 0.0,
    seed: int = 0,
) -> Backbone:
    """Load a backbone from anybody's weights; `backbone.loaded` says what was used of them.

    Args:
        source: a run folder or its `backbone.safetensors`; a timm name, with or without a tag, for its pretrained
            weights; a checkpoint of one of the projects in `cribo.models.formats`; or a folder as on the Hugging
            Face hub (`config.json` beside `model.safetensors`). Files are recognised by their content.
        name: timm's name of a file's architecture, where its weights do not show it (any but ViT, DINOv3, ResNet).
        args: arguments of timm's constructor that a file's weights do not show, such as `num_heads`.
        pretrained: False builds a timm name with random weights.
        image_size: pixels; the size to which the position embedding is resized. None: the size it has.
        network: of a teacher and a student in one file, the one to take.
        positions: how the position embedding is resized to images of another size than in training; None: as the
            project that wrote the weights does it, or as timm does where the file does not show whose they are.
        ignore: patterns of keys of a file to leave out, where nothing else explains them.
        trust: run the code that a checkpoint may hold beside its tensors, and import the network of your own that it
            names. Only where you trust its maker.
        drop_path: as in `build_backbone`; weights do not keep it.
        seed: of random weights.

    Raises:
        FileNotFoundError: no such file, or half of a pair.
        ValueError: a file that is damaged, of no known format or of another architecture; keys that nothing explains;
            an unknown timm name or one without weights; arguments that do not go together.
        ConnectionError: timm's weights are not in its cache and cannot be fetched.
        ImportError: a checkpoint of JAX in Flax's format, and msgpack is not installed.

    Example:
        >>> backbone = load_backbone("vit_tiny_patch16_224", pretrained=False, image_size=64)
        >>> backbone.embed_dim, backbone.image_size, backbone.loaded
        (192, 64, None)
    """
    path = _as_path(source)
    if path is None:
        if name is not None:
            raise ValueError(f"name={name!r} is for files, and {str(source)!r} is a timm name itself: leave it out")
        return _build_from_timm(
            str(source), args, pretrained=pretrained, image_size=image_size, drop_path=drop_path, seed=seed
        )
    if not pretrained:
        raise ValueError(f"pretrained=False is for timm names, and {source} is a file of weights: give a name")
    path, notes = _file_of(path)
    if _is_saved(path):
        for option, value in (("name", name), ("args", args)):
            if value:
                raise ValueError(f"{option}={value!r} does not go with {path}, which says what its network is")
        return _load_saved(path, image_size=image_size, drop_path=drop_path, trust=trust)
    with _naming(path):
        return _load_foreign(
            path,
            notes,
            name=name,
            args=args,
            image_size=image_size,
            network=network,
            positions=positions,
            ignore=ignore,
            trust=trust,
            drop_path=drop_path,
        )


def _load_foreign(
    path: Path,
    notes: tuple[str, ...],
    *,
    name: str | None,
    args: Mapping[str, Any] | None,
    image_size: int | None,
    network: NetworkName,
    positions: Resizing | None,
    ignore: Sequence[str],
    trust: bool,
    drop_path: float,
) -> Backbone:
    content = read_weights(path, trust=trust)
    architecture = _declared_architecture(content, path, name, args)
    backbone = None
    if architecture is not None:
        backbone = _build(architecture, image_size, drop_path, trust=trust)
    recognised = _recognise(content, path, network=network, backbone=backbone, ignore=ignore)
    if backbone is None:
        try:
            architecture = infer_architecture(recognised.state, **_hidden_arguments(content, recognised, path, args))
        except ValueError as error:
            raise ValueError(f"{path} ({recognised.format}): {error}") from error
        architecture = architecture._replace(args={**architecture.args, **(args or {})})
        backbone = _build(architecture, image_size, drop_path, trust=trust)
        notes += architecture.notes
        if _is_resnet_of_mmsegmentation(recognised) and resnet_strides(content, path) is None:
            notes += _stride_notes(recognised, architecture)
    else:
        _check_hidden_arguments(backbone, recognised, path)
    try:
        _adopt(backbone, recognised, str(path), notes, positions=positions)
    except ValueError as error:
        raise ValueError(f"{error}{_nearer_name(content, path, backbone, network)}") from error
    return backbone


def _nearer_name(content: Mapping[str, Any], path: Path, backbone: Backbone, network: NetworkName) -> str:
    """The network that a file holds, where another one was named: the end of an error message."""
    try:
        recognised = _recognise(content, path, network=network, backbone=None, ignore=())
        found = infer_architecture(recognised.state, **_hidden_arguments(content, recognised, path, None))
    except ValueError:
        return ""
    if (found.name, found.args) == (backbone.name, backbone.args):
        return ""
    arguments = f" with {found.args}" if found.args else ""
    return f"; the file holds a {found.name}{arguments}: give that name, or none"


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Every error names the file, and one of a shard names the whole network if that is near."""
    try:
        yield
    except ValueError as error:
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        if SHARD in message and (whole := whole_network_near(path)):
            message += f"; {whole} may be it"
        if message == str(error):
            raise
        raise ValueError(message) from error


def load_pretrained(
    backbone: Backbone,
    source: str | Path,
    *,
    network: NetworkName = "teacher",
    positions: Resizing | None = None,
    ignore: Sequence[str] = (),
    trust: bool = False,
) -> LoadedWeights:
    """Load weights into a backbone: all of them, or none and an error.

    Args:
        backbone: its architecture must be the one of the weights; image size and patch size may differ
            (position embedding and patch projection are resampled).
        source: a file or folder as in `load_backbone`, `"timm"` for timm's default weights of the architecture, or a
            timm name with its tag, such as `vit_small_patch16_224.dino`.
        network: as in `load_backbone`.
        positions: as in `load_backbone`.
        ignore: as in `load_backbone`.
        trust: run the code that a checkpoint may hold beside its tensors. Only where you trust its maker.

    Returns:
        What was used and what was left out; also logged, and kept as `backbone.loaded`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is damaged, of no known format or of another architecture, an unknown timm name.
        ConnectionError: timm's weights are not in its cache and cannot be fetched.
    """
    path = None if str(source) == "timm" else _as_path(source)
    if path is None:
        return _load_from_timm(backbone, backbone.name if str(source) == "timm" else str(source))
    path, notes = _file_of(path)
    with _naming(path):
        content = read_weights(path, trust=trust)
        recognised = _recognise(content, path, network=network, backbone=backbone, ignore=ignore)
    _check_hidden_arguments(backbone, recognised, path)
    description = path.with_name(DESCRIPTION_FILE)
    if _is_saved(path) and description.is_file():
        about = _read_description(description)
        return _adopt(backbone, _as_described(recognised, about), str(path), notes, numerics=numerics_of(about))
    return _adopt(backbone, recognised, str(path), notes, positions=positions)


_HOW_TO_LOAD = (
    "import json, timm, safetensors.torch; about = json.load(open('backbone.json')); "
    "model = timm.create_model(about['name'], **about['args']); "
    "model.load_state_dict(safetensors.torch.load_file('backbone.safetensors'))"
)
_HOW_TO_SET_EPS = "; [setattr(m, 'eps', about['norm_eps']) for m in model.modules() if type(m).__name__ == 'LayerNorm']"
_HOW_TO_SET_FINAL_EPS = "; model.head.norm.eps = about['final_norm_eps']"
_HOW_TO_SET_PERIODS = "; import torch; model.rope.periods = torch.tensor(about['rope_periods'])"
_HOW_TO_DILATE = (
    "; import torch; stages = [s for s in (model.layer2, model.layer3, model.layer4) if max(s[0].conv2.stride) == 1]; "
    "[(setattr(s[0].conv2, 'dilation', (2 ** i,) * 2), setattr(s[0].conv2, 'padding', (2 ** i,) * 2)) "
    "for i, s in enumerate(stages, 1)]"
)


def describe(backbone: Backbone) -> dict[str, Any]:
    """All but the weights of a backbone: what builds it again and what feeds it, as JSON holds it."""
    arguments = dict(backbone.arguments)
    if timm.is_model(backbone.name):
        # timm's functions for images (`resolve_data_config`) take mean and deviation from the network's configuration.
        arguments["pretrained_cfg_overlay"] = {"mean": list(backbone.mean), "std": list(backbone.std)}
    return {
        "name": backbone.name,
        "args": arguments,
        "image_size": backbone.image_size,
        "patch_size": backbone.patch_size,
        "embed_dim": backbone.embed_dim,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        **asdict(backbone.numerics),
    }


def numerics_of(about: Mapping[str, Any]) -> Numerics:
    """Of what `describe` wrote; older descriptions have only an epsilon, or not even that."""
    known = {field.name: about[field.name] for field in fields(Numerics) if field.name in about}
    if known.get("rope_periods") is not None:
        known["rope_periods"] = tuple(known["rope_periods"])
    return Numerics(**known)


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
            **describe(backbone),
            "timm": timm.__version__,
            "torch": str(torch.__version__),
            "sha256": _sha256(new_weights),
            "how_to_load": _HOW_TO_LOAD
            + (_HOW_TO_SET_EPS if backbone.numerics.norm_eps is not None else "")
            + (_HOW_TO_SET_FINAL_EPS if backbone.numerics.final_norm_eps is not None else "")
            + (_HOW_TO_SET_PERIODS if backbone.numerics.rope_periods is not None else "")
            + (_HOW_TO_DILATE if backbone.numerics.dilate_entries else ""),
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


# ------------------------------------------------------------------------------------------------ finding the file


def _as_path(source: str | Path) -> Path | None:
    """The path that `source` is, or None where it can only be a timm name."""
    path = Path(source)
    is_path = isinstance(source, Path) or path.exists() or path.suffix in _FILE_SUFFIXES or len(path.parts) > 1
    return path if is_path else None


def _file_of(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The file of weights that a path stands for, and what a user should know about the choice."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"no weights at {path}: give a file, a run folder, or a timm name without slashes")
        return path, ()
    if (path / WEIGHTS_FILE).is_file():
        return path / WEIGHTS_FILE, ()
    for name in _HUB_WEIGHTS:
        if (path / name).is_file():
            return path / name, ()
    if _is_read_whole(path):
        return path, ()
    distributed = [folder for folder in path.glob("ckpt/*") if _is_read_whole(folder) and folder.name.isdecimal()]
    if distributed:
        last = max(distributed, key=lambda folder: int(folder.name))
        return last, (f"took the last checkpoint of the training, {last.relative_to(path)}",)
    damaged: list[str] = []
    for checkpoint in sorted(path.glob(_CHECKPOINTS), reverse=True):
        try:
            check_archive(checkpoint)
        except (Damaged, OSError) as error:
            damaged.append(f"{checkpoint.name} cannot be used: {error}")
        else:
            return checkpoint, (f"the run has not finished; this is its last checkpoint, {checkpoint.stem}", *damaged)
    raise FileNotFoundError(
        f"no backbone at {path}{''.join(f' ({reason})' for reason in damaged)}: give a folder that holds "
        f"{WEIGHTS_FILE} (a run), or config.json and "
        f"{_HUB_WEIGHTS[0]} (the Hugging Face hub), or .metadata (torch.distributed.checkpoint), or give a file"
    )


def _is_read_whole(folder: Path) -> bool:
    """Whether a folder is a checkpoint itself: of torch.distributed.checkpoint, or of Orbax."""
    return any((folder / name).exists() for name in (METADATA, *ORBAX_FILES))


# -------------------------------------------------------------------------------- what is known beside the weights


def _declared_architecture(
    content: Mapping[str, Any], path: Path, name: str | None, args: Mapping[str, Any] | None
) -> Architecture | None:
    """The architecture where something names it: the caller, a run's checkpoint, or timm's file on the hub."""
    if name is not None:
        size = timm.get_pretrained_cfg_value(name, "input_size") if timm.is_model(name) else None
        return Architecture(name, dict(args or {}), size[-1] if size else 224)
    if isinstance(run := content.get("cribo"), Mapping) and isinstance(config := run.get("config"), Mapping):
        backbone = config["backbone"]
        return Architecture(backbone["name"], {**(backbone["args"] or {}), **(args or {})}, config["views"]["size"])
    config = _read_beside(path, _HUB_CONFIG)
    # Other programs write a config.json with an `architecture` as well.
    if isinstance(timm_name := config.get("architecture"), str) and timm.is_model(timm_name):
        declared = {key: value for key, value in config.get("model_args", {}).items() if key not in RESERVED_ARGS}
        size = config.get("pretrained_cfg", {}).get("input_size", (3, 224, 224))
        return Architecture(timm_name, {**declared, **(args or {})}, size[-1])
    return None


def _recognise(
    content: Mapping[str, Any],
    path: Path,
    *,
    network: NetworkName,
    backbone: Backbone | None,
    ignore: Sequence[str],
) -> Recognised:
    """Find the network in a file; the files beside it know more of it than its keys do."""
    tensors = flatten(content)
    if not tensors:
        raise ValueError(f"{path} holds no tensors, only {first_keys(content) or 'nothing'}: give a file of weights")
    recognised = recognise(tensors, str(path), network=network, backbone=backbone, ignore=ignore)
    if recognised.format == "cribo run":
        return _as_in_run(recognised, content.get("cribo", {}))
    if recognised.format == "Segmenter":
        variant = (_read_beside(path, "variant.yml").get("net_kwargs") or {}).get("normalization")
        return expecting(recognised, mean=IMAGENET_MEAN, std=IMAGENET_STD) if variant == "deit" else recognised
    if recognised.format == "detectron2":
        return as_of_detectron2(recognised, path)
    if _is_resnet_of_mmsegmentation(recognised):
        recognised = as_of_mmsegmentation(recognised, content, path)
    if recognised.format in ("DINOv2 or DINOv3 training", "DINOv2", "DINOv3"):
        return as_trained_by_dino(recognised, path)
    config, images = _hub_config(path), _read_beside(path, _HUB_IMAGES)
    images = {**config.get("pretrained_cfg", {}), **images}
    mean, std = images.get("image_mean", images.get("mean")), images.get("image_std", images.get("std"))
    notes = recognised.notes
    if mean is None and "Hugging Face" in recognised.format:
        notes = (
            f"no {_HUB_IMAGES} lies beside it: took a mean of {recognised.expected.mean or IMAGENET_MEAN} for images",
            *notes,
        )
    eps = "norm_eps" if recognised.expected.final_norm_eps is None else "final_norm_eps"
    return expecting(
        replace(recognised, notes=notes),
        **{eps: config.get("layer_norm_eps")},
        mean=mean and tuple(mean),
        std=std and tuple(std),
        act_layer=_activation_of(config, path),
    )


# What transformers leaves out of the nested configuration of an image tower.
_TOWER_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip": {"hidden_act": "quick_gelu", "num_attention_heads": 12, "layer_norm_eps": 1e-5},
    "siglip": {"hidden_act": "gelu_pytorch_tanh", "num_attention_heads": 12, "layer_norm_eps": 1e-6},
}


def _hub_config(path: Path) -> dict[str, Any]:
    """The configuration beside a file in transformers' words; of an image tower, where it has a text tower, too."""
    if path.name.startswith("open_clip") and (config := _read_beside(path, _OPEN_CLIP_CONFIG)):
        return _from_open_clip_config(config)
    config = _read_beside(path, _HUB_CONFIG)
    defaults = _TOWER_DEFAULTS.get(str(config.get("model_type")))
    if defaults is not None and isinstance(tower := config.get("vision_config"), Mapping):
        return {**config, **defaults, **tower}
    return config or _from_open_clip_config(_read_beside(path, _OPEN_CLIP_CONFIG))


def _from_open_clip_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of open_clip's own networks; its towers of timm are as timm has them."""
    about, images = config.get("model_cfg", {}), config.get("preprocess_cfg", {})
    tower = about.get("vision_cfg", {})
    found: dict[str, Any] = {"pretrained_cfg": {key: images[key] for key in ("mean", "std") if key in images}}
    if not about or "timm_model_name" in tower:
        return found
    approximate = tower.get("act_kwargs", {}).get("approximate") == "tanh"
    found["hidden_act"] = "quick_gelu" if about.get("quick_gelu") else "gelu_pytorch_tanh" if approximate else "gelu"
    found["layer_norm_eps"] = tower.get("norm_kwargs", {}).get("eps", 1e-5)
    if isinstance(width := tower.get("width", 768), int):
        found["num_attention_heads"] = width // tower.get("head_width", 64)
    return found


def _activation_of(config: Mapping[str, Any], path: Path) -> str | None:
    # Gated MLPs of these projects keep their own activation.
    if "hidden_act" not in config or config.get("use_swiglu_ffn") or config.get("use_gated_mlp"):
        return None
    if config["hidden_act"] not in _HUB_ACTIVATIONS:
        raise ValueError(
            f"{path.with_name(_HUB_CONFIG)} has hidden_act {config['hidden_act']!r}: it must be one of "
            f"{', '.join(_HUB_ACTIVATIONS)}"
        )
    return _HUB_ACTIVATIONS[config["hidden_act"]]


def _as_in_run(recognised: Recognised, run: Mapping[str, Any]) -> Recognised:
    if "backbone" in run:
        return _as_described(recognised, run["backbone"])
    if not run.get("config", {}).get("backbone", {}).get("pretrained"):
        return recognised
    note = "the checkpoint does not say which normalisation its weights expect: took ImageNet's"
    return replace(recognised, notes=(*recognised.notes, note))


def _hidden_arguments(
    content: Mapping[str, Any], recognised: Recognised, path: Path, args: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What weights do not show of a network, as far as its project, the file, one beside it or the caller says."""
    config, args = _hub_config(path), args or {}
    for option in ("downsample_in_bottleneck", "downsample_in_first_stage"):
        if config.get(option):
            raise ValueError(f"{path.with_name(_HUB_CONFIG)} has {option} set: timm has no such ResNet")
    options = content.get("args", content.get("hyper_parameters"))
    options = options if isinstance(options, Mapping) else getattr(options, "__dict__", {})
    arch = content.get("arch", options.get("arch"))
    if _is_resnet_of_mmsegmentation(recognised) and (strides := resnet_strides(content, path)):
        arch = f"resnet_{strides.output_stride}s"
    return {
        "heads": recognised.expected.heads,
        "num_heads": args.get("num_heads", config.get("num_attention_heads", recognised.num_heads)),
        "act_layer": args.get("act_layer", recognised.expected.act_layer),
        "assumed_act_layer": recognised.expected.assumed_act_layer,
        "arch": arch if isinstance(arch, str) else None,
    }


_HUB_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


def _is_resnet_of_mmsegmentation(recognised: Recognised) -> bool:
    return "MMSegmentation" in recognised.format and "layer1.0.conv1.weight" in recognised.state


def _stride_notes(recognised: Recognised, architecture: Architecture) -> tuple[str, ...]:
    if "output_stride" in architecture.args:
        return ()
    can_dilate = "layer1.0.conv3.weight" in recognised.state and "avg_down" not in architecture.args
    way_out = ": args={'output_stride': 8}" if can_dilate else ""
    return (
        "the file does not say which strides and dilations its ResNet has: took an output stride of 32; most of "
        f"MMSegmentation's have 8{way_out}",
    )


def _check_hidden_arguments(backbone: Backbone, recognised: Recognised, path: Path) -> None:
    """Weights fit a network with other heads or another activation, and give features that mean nothing."""
    num_heads = recognised.num_heads or recognised.expected.heads.get(backbone.embed_dim)
    expected = {"num_heads": num_heads, "act_layer": recognised.expected.act_layer}
    block = backbone.model.blocks[0] if hasattr(backbone.model, "blocks") else None
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    activation = {GELUTanh: "gelu_tanh", QuickGELU: "quick_gelu"}.get(type(getattr(mlp, "act", None)))
    has = {
        "num_heads": getattr(attention, "num_heads", None),
        "act_layer": activation or (backbone.args.get("act_layer", "gelu") if mlp is not None else None),
    }
    for argument, value in expected.items():
        if value is not None and has[argument] not in (None, value):
            raise ValueError(
                f"{path} is of {recognised.format}, whose networks of this width have {argument} {value}, the backbone "
                f"has {has[argument]}: build it with args={{{argument!r}: {value!r}}}"
            )


def _read_beside(path: Path, name: str) -> dict[str, Any]:
    beside = path.with_name(name)
    if not beside.is_file():
        return {}
    if beside.suffix == ".json":
        return read_json(beside)
    return read_yaml(beside)


# ---------------------------------------------------------------------------------------------------- our own files


def _is_saved(path: Path) -> bool:
    """Whether a file is of `save_backbone`, under whatever name."""
    description = path.with_name(DESCRIPTION_FILE)
    if path.is_dir():
        return False
    if path.name == WEIGHTS_FILE or not description.is_file():
        return path.name == WEIGHTS_FILE
    return read_json(description).get("sha256") == _sha256(path)


def _load_saved(path: Path, *, image_size: int | None, drop_path: float, trust: bool) -> Backbone:
    """What `save_backbone` wrote."""
    description = path.with_name(DESCRIPTION_FILE)
    if not description.is_file():
        raise FileNotFoundError(
            f"{path} has no {DESCRIPTION_FILE} beside it: copy it from the run, or build the backbone by name with "
            f"pretrained={str(path)!r}"
        )
    about = _read_description(description)
    if _sha256(path) != about["sha256"]:
        raise ValueError(
            f"{path} is not the file that {description} describes (sha256 differs): copy both again from one run"
        )
    args = {key: value for key, value in about["args"].items() if key not in RESERVED_ARGS}
    backbone = _build(Architecture(about["name"], args, about["image_size"]), image_size, drop_path, trust=trust)
    recognised = recognise(flatten(read_weights(path)), str(path), backbone=backbone)
    described = replace(_as_described(recognised, about), format="cribo backbone", notes=())
    _adopt(backbone, described, str(path), numerics=numerics_of(about))
    return backbone


def _as_described(recognised: Recognised, about: Mapping[str, Any]) -> Recognised:
    """With what a description says that the weights expect; older ones say nothing of epsilon."""
    numerics = numerics_of(about)
    expected = Expected(
        norm_eps=numerics.norm_eps,
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        positions=numerics.positions,
        rope_coordinates=numerics.rope_coordinates,
    )
    return replace(recognised, expected=expected, rope_periods=numerics.rope_periods, notes=())


def _build(
    architecture: Architecture,
    image_size: int | None,
    drop_path: float,
    *,
    seed: int | None = None,
    trust: bool = False,
) -> Backbone:
    """A network whose weights come next, or random ones if a seed is given."""
    module = architecture.name.rpartition(".")[0]
    if is_import_path(architecture.name) and module not in sys.modules and not trust:
        raise ValueError(
            f"the weights say that their network is {architecture.name}, which is code that nothing has imported yet: "
            f"import {module} first, or allow it with --trust (trust=True in Python)"
        )
    return build_backbone(
        architecture.name,
        args=architecture.args,
        image_size=image_size or architecture.image_size,
        drop_path=drop_path,
        seed=seed or 0,
        initialise=seed is not None,
    )


# ------------------------------------------------------------------------------------------------------------- timm


def _build_from_timm(
    source: str,
    args: Mapping[str, Any] | None,
    *,
    pretrained: bool,
    image_size: int | None,
    drop_path: float,
    seed: int,
) -> Backbone:
    architecture = source.partition(".")[0]
    if not timm.is_model(architecture):
        raise ValueError(f"{source!r} is neither a file nor a timm name{nearest_names(architecture)}")
    if pretrained:
        _check_tag(source)
    size = timm.get_pretrained_cfg_value(source if pretrained else architecture, "input_size") or (3, 224, 224)
    inferred = Architecture(architecture, dict(args or {}), size[-1])
    backbone = _build(inferred, image_size, drop_path, seed=None if pretrained else seed)
    if pretrained:
        _load_from_timm(backbone, source)
    return backbone


def _check_tag(name: str) -> None:
    architecture, _, tag = name.partition(".")
    tags = [full for full in timm.list_pretrained() if full.partition(".")[0] == architecture]
    if not tags:
        raise ValueError(f"timm has no pretrained weights of {architecture}: give a file, or use random weights")
    if tag and name not in tags:
        raise ValueError(f"timm has no weights {name!r}: it has {', '.join(tags)}")


def _load_from_timm(backbone: Backbone, name: str) -> LoadedWeights:
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise ValueError(f"pretrained={name!r} is neither a file nor a timm name{nearest_names(architecture)}")
    if architecture != backbone.name:
        raise ValueError(f"{name!r} holds weights of {architecture}, the backbone is {backbone.name}")
    _check_tag(name)
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
    source = f"{architecture}.{config.tag}" if config.tag else architecture
    recognised = recognise(flatten(content), source, backbone=backbone)
    # timm's own network is what its weights expect, epsilon and activation included.
    expected = Expected(mean=tuple(config.mean), std=tuple(config.std))
    recognised = replace(recognised, format="timm", expected=expected, notes=())
    return _adopt(backbone, recognised, source)


# ------------------------------------------------------------------------------------------------------ all or none


def _adopt(
    backbone: Backbone,
    recognised: Recognised,
    source: str,
    notes: tuple[str, ...] = (),
    *,
    positions: Resizing | None = None,
    numerics: Numerics | None = None,
) -> LoadedWeights:
    """Load what was found in a file, with what its weights expect of images and network, and keep the record."""
    expected = recognised.expected
    if numerics is None:
        numerics = Numerics(
            norm_eps=expected.norm_eps,
            final_norm_eps=expected.final_norm_eps,
            positions=positions or _original_resizing(recognised) or "timm",
            rope_periods=recognised.rope_periods,
            rope_coordinates=expected.rope_coordinates or "separate",
            dilate_entries=bool(expected.dilate_entries),
            windows=expected.windows or "timm",
            relative_positions=(positions != "timm" and expected.relative_positions) or "timm",
        )
    state, resampled = _fit(recognised.state, backbone, source, numerics)
    _load_all_or_nothing(backbone, state, source, recognised.used)
    backbone.mean, backbone.std = expected.mean or IMAGENET_MEAN, expected.std or IMAGENET_STD
    backbone.set_numerics(numerics)
    resized: tuple[str, ...] = ()
    if "pos_embed" in state and isinstance(backbone.model, VisionTransformer):
        if positions is not None:
            resized = (f"positions are resized to other sizes as asked ({positions})",)
        elif numerics.positions != "timm":
            resized = (f"positions are resized to other sizes as the original does ({numerics.positions})",)
        elif _original_resizing(recognised) is None:
            resized = (_UNKNOWN_RESIZING,)
    backbone.loaded = LoadedWeights(
        source,
        format=recognised.format,
        network=recognised.network,
        part=recognised.part,
        used=recognised.used,
        dropped=recognised.dropped,
        resampled=resampled,
        notes=(*notes, *recognised.notes, *resized),
    )
    _logger.info("%s", backbone.loaded)
    return backbone.loaded


_UNKNOWN_RESIZING = (
    "nothing in the file shows whose weights these are, so positions are resized to other sizes as timm does: for "
    "those of DINO, iBOT and networks trained from them, give --backbone.positions bicubic_offset (positions=)"
)


def _original_resizing(recognised: Recognised) -> Resizing | None:
    """How the original resizes positions; None where nothing shows whose the weights are."""
    if recognised.positions is not None:
        return recognised.positions
    state, resizing = recognised.state, recognised.expected.positions
    if resizing is None and "pos_embed" in state:
        side = math.isqrt(state["pos_embed"].shape[1])
        # Encoders under timm's names, which nothing else distinguishes.
        project = whose_fixed_positions(state["pos_embed"][:, -side * side :])
        return {"MAE": "bicubic", "MoCo v3": "timm", None: None}[project]
    # DINOv2's networks with registers resize as timm does, whoever trained them further.
    return "timm" if "reg_token" in state and resizing in ("bicubic", "bicubic_offset") else resizing


def _fit(
    state: dict[str, Tensor], backbone: Backbone, source: str, numerics: Numerics
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Resize the position embedding; let timm rename foreign keys and resample the rest, where its family can."""
    shapes = {key: value.shape for key, value in state.items()}
    state = _with_resized_positions(state, backbone, numerics.positions)
    if numerics.relative_positions != "timm" and isinstance(backbone.model, Beit):
        state = _with_resized_biases(state, backbone, numerics.relative_positions)
    checkpoint_filter = getattr(sys.modules[type(backbone.model).__module__], "checkpoint_filter_fn", None)
    fitted = state
    if checkpoint_filter is not None:
        try:
            fitted = checkpoint_filter(dict(state), backbone.model)
        except Exception as error:  # each family's filter has its own ways to fail on another family's file
            raise ValueError(
                f"{source} does not fit {backbone.name}: timm's filter failed ({type(error).__name__}: {error})"
            ) from error
    resampled = (key for key, value in fitted.items() if key in shapes and shapes[key] != value.shape)
    return fitted, tuple(resampled)


def _with_resized_positions(state: dict[str, Tensor], backbone: Backbone, resizing: Resizing) -> dict[str, Tensor]:
    own = getattr(backbone.model, "pos_embed", None)
    if not (isinstance(own, Tensor) and "pos_embed" in state and isinstance(backbone.model, VisionTransformer | Beit)):
        return state
    is_without_prefix = getattr(backbone.model, "no_embed_class", False)
    prefix = 0 if is_without_prefix else backbone.model.num_prefix_tokens
    side = math.isqrt(max(state["pos_embed"].shape[1] - prefix, 0))
    if side == 0 or side * side + prefix != state["pos_embed"].shape[1]:
        return state  # timm's filter or the check of shapes says what is wrong
    grid = backbone.model.patch_embed.grid_size
    resized = resize_positions(state["pos_embed"], (side, side), grid, resizing, prefix_tokens=prefix)
    return {**state, "pos_embed": resized}


def _with_resized_biases(
    state: dict[str, Tensor], backbone: Backbone, how: Literal["geometric_spline", "bilinear"]
) -> dict[str, Tensor]:
    grid = backbone.model.patch_embed.grid_size
    state = dict(state)
    for key in (key for key in state if key.endswith("relative_position_bias_table")):
        side = (math.isqrt(len(state[key]) - 3) + 1) // 2
        state[key] = resize_relative_positions(state[key], (side, side), grid, how)
    return state


def _load_all_or_nothing(backbone: Backbone, state: Mapping[str, Tensor], source: str, keys: Sequence[str]) -> None:
    """Check every key, shape and value, then load; `keys` are the names in the file, for messages."""
    own = backbone.model.state_dict()
    reshaped = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape and key not in backbone.unused_parameters
    ]
    unexpected = [_name_in_file(key, keys) for key in state if key not in own]
    problems = [
        f"{len(keys)} keys {what}: {first_keys(keys)}"
        for what, keys in (
            ("missing", sorted(required_keys(backbone) - state.keys(), key=list(own).index)),
            ("of another shape", reshaped),
            ("that are not finite", [key for key in own if key in state and not _is_finite(state[key])]),
            ("unexpected", unexpected),
        )
        if keys
    ]
    if problems:
        arguments = f" with {backbone.args}" if backbone.args else ""
        way_out = ": leave them out with --backbone.ignore PATTERN (ignore= in Python)" if unexpected else ""
        raise ValueError(
            f"{source} does not fit {backbone.name}{arguments}; nothing was loaded; {'; '.join(problems)}{way_out}"
        )
    usable = {key: state[key] for key in own if key in state and state[key].shape == own[key].shape}
    backbone.model.load_state_dict({**own, **usable})


def _is_finite(value: Tensor) -> bool:
    """Whether all values are; a sum, which takes a tenth of the time, shows it unless it overflows."""
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def _name_in_file(key: str, keys: Sequence[str]) -> str:
    return next((name for name in keys if name.endswith(key)), key)


def _read_description(path: Path) -> dict[str, Any]:
    content = read_json(path)
    missing = {"name", "args", "image_size", "mean", "std", "sha256"} - set(content)
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it is not a description of a backbone")
    return content


def _save_tensors(state: Mapping[str, Tensor], path: Path, stands_for: Path) -> None:
    try:
        safetensors.torch.save_file(dict(state), path)
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {stands_for}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
