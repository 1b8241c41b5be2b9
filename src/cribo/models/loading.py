"""Load backbones from this project's runs, checkpoints of other projects, timm, and Hugging Face folders."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.layers.activations import GELUTanh, QuickGELU
from timm.models import load_state_dict_from_hf

from cribo.base.errors import Damaged, InputError
from cribo.base.files import check_archive, nearest_path
from cribo.models.adopting import adopt, build
from cribo.models.backbone import IMAGENET_MEAN, IMAGENET_STD, RESERVED_ARGS, Backbone
from cribo.models.building import build_network, nearest_names, untrained
from cribo.models.config import NetworkName
from cribo.models.formats.architecture import Architecture, infer_architecture
from cribo.models.formats.distributed import METADATA
from cribo.models.formats.hub import HUB_CONFIG, HUB_IMAGES, activation_of, hub_config, image_normalisation, read_beside
from cribo.models.formats.reading import ORBAX_FILES, flatten, read_weights
from cribo.models.formats.recognising import Recognised, first_keys, recognise
from cribo.models.formats.table import SHARD, Expected
from cribo.models.formats.training_configs import (
    apply_detectron2_config,
    apply_dino_config,
    apply_mmsegmentation_config,
    find_whole_network,
    named_stride,
    with_expected,
)
from cribo.models.hub.download import WEIGHT_SUFFIXES, WEIGHTS, Download, download, hub_name, suggested_name
from cribo.models.licences import README, Licence, licences_of, read_licence, timm_licence
from cribo.models.origin import LoadedWeights
from cribo.models.positions import Resizing
from cribo.models.saving import (
    DESCRIBED,
    DESCRIPTION_FILE,
    TIMM_TAG,
    WEIGHTS_FILE,
    apply_description,
    is_saved,
    load_saved,
    read_description,
    reserve_readout,
)

_HUB_FILE = "pytorch_model.bin"  # timm prefers the model.safetensors beside it

# Files in the folder of an interrupted run.
_CHECKPOINTS = "checkpoints/step=*.ckpt"


def build_backbone(
    name: str,
    *,
    args: Mapping[str, Any] | None = None,
    pretrained: str | None = None,
    image_size: int = 224,
    drop_path: float = 0.0,
    seed: int = 0,
    initialise: bool = True,
) -> Backbone:
    """Build a backbone by its timm name.

    Args:
        name: timm name, such as `vit_small_patch16_224`, `vit_base_patch14_reg4_dinov2`, `resnet50`, `convnext_tiny`;
            or the import path of a custom function or class, called with `args`, that returns a module whose
            `forward_features(images)` is a feature map (B, D, h, w).
        args: arguments of timm's constructor (`depth`, `embed_dim`, `num_heads`, `output_stride`, ...).
        pretrained: initial weights: a file, `"timm"`, or a timm name with its tag (`load_pretrained`). If None, weights
            are random: [CLS] and position embedding from a truncated normal of 0.02, the rest as in timm.
        image_size: size in pixels for which the position embedding is stored; it is interpolated for others.
        drop_path: rate of the last residual branch; rates increase linearly with depth, from 0.
        seed: seed of the random weights, which depend on nothing else.
        initialise: if False, tensors are uninitialised, for callers that load weights next: building a large network
            spends most of its time on random numbers.

    Raises:
        ValueError: unknown name or argument, a network without dense features, or an unsupported size or rate.

    Example:
        >>> small = {"depth": 6, "embed_dim": 192, "num_heads": 3}
        >>> backbone = build_backbone("vit_small_patch16_224", args=small)
        >>> backbone.embed_dim, backbone.patch_size
        (192, 16)
    """
    backbone = build_network(
        name, args=args, image_size=image_size, drop_path=drop_path, seed=seed, initialise=initialise
    )
    if pretrained is not None:
        load_pretrained(backbone, pretrained)
    return backbone


def load_backbone(
    source: str | Path | Download,
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
    """Load a backbone from any supported weights; `backbone.loaded` records which keys were used.

    Args:
        source: a run folder or its `backbone.safetensors`; a timm name, with or without a tag, for its pretrained
            weights; a checkpoint of one of the projects in `cribo.models.formats`; a folder as on the Hugging
            Face hub (`config.json` beside `model.safetensors`); or a repository there, `hf://owner/name`,
            `hf://owner/name@revision` or `hf://owner/name/path` (or its `cribo.models.hub.download.Download`). Files
            are recognised by their content.
        name: timm's name of a file's architecture, if its weights do not show it (any but ViT, DINOv3, ResNet); for
            weights of a custom network, its import path, which allows it to be imported.
        args: arguments of timm's constructor that a file's weights do not show, such as `num_heads`.
        pretrained: if False, build the network of a timm name or file with random weights.
        image_size: size in pixels to which the position embedding is resized; by default, it is not resized.
        network: network to load from a file with a teacher and a student.
        positions: method of resizing the position embedding for other image sizes than in training. By default, the
            method of the project that wrote the weights, or timm's if the file does not show the project.
        ignore: patterns of keys of a file to ignore if they match no other rule.
        trust: allow code in a checkpoint to run, and import the custom network that it names, which is refused
            otherwise unless `name` is the same path. Use only with files from a trusted source.
        drop_path: as in `build_backbone`; not stored with weights.
        seed: seed of random weights.

    Raises:
        FileNotFoundError: the file, or one file of a pair, does not exist.
        Untrusted: a file names code, and `trust` is not set.
        ValueError: the file is damaged, of unknown format or of another architecture; it has unexpected keys; the timm
            name is unknown or has no weights; arguments cannot be combined; or the repository does not exist, is
            private or gated, or contains no weights.
        ConnectionError: weights are not cached and cannot be downloaded.
        ImportError: the file is a Flax checkpoint and msgpack is not installed.

    Example:
        >>> backbone = load_backbone("vit_tiny_patch16_224", pretrained=False, image_size=64)
        >>> backbone.embed_dim, backbone.image_size, backbone.loaded
        (192, 64, None)
    """
    place = _locate(source)
    if place is None:
        if name is not None:
            raise InputError(f"name={name!r} applies to files, but {str(source)!r} is a timm name: remove it")
        return _build_from_timm(
            str(source), args, pretrained=pretrained, image_size=image_size, drop_path=drop_path, seed=seed
        )
    if is_saved(place.path):
        if args:
            raise InputError(f"args={args!r} cannot be combined with {place.source}, which specifies its network")
        loaded = load_saved(
            place.path,
            place.source,
            image_size=image_size,
            positions=positions,
            drop_path=drop_path,
            trust=trust,
            name=name,
            revision=place.revision,
            stated=_stated_licence(place),
        )
    else:
        with _naming(place):
            loaded = _load_foreign(
                place,
                name=name,
                args=args,
                image_size=image_size,
                network=network,
                positions=positions,
                ignore=ignore,
                trust=trust,
                drop_path=drop_path,
            )
    return loaded if pretrained else untrained(loaded, seed=seed, drop_path=drop_path)


def _load_foreign(
    place: "_Place",
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
    path, notes = place.path, place.notes
    content = read_weights(path, trust=trust)
    architecture = _declared_architecture(content, path, name, args)
    backbone = None
    if architecture is not None:
        backbone = build(architecture, image_size, drop_path, trust=trust, file=place.source, given=name)
        reserve_readout(backbone, _readout_width(content, path))
    recognised = _recognise(content, path, network=network, backbone=backbone, ignore=ignore)
    if architecture is not None and architecture.name == path.stem and recognised.expected.mean is None:
        images = timm.get_pretrained_cfg(path.stem)  # the file has the name of timm's own weights
        if images is not None:
            recognised = with_expected(recognised, mean=images.mean, std=images.std)
    if backbone is None:
        try:
            architecture = infer_architecture(recognised.state, **_hidden_arguments(recognised, path, args))
        except ValueError as error:
            raise InputError(f"{path} ({recognised.format}): {error}") from error
        architecture = architecture._replace(args={**architecture.args, **(args or {})})
        backbone = build(architecture, image_size, drop_path, trust=trust, file=place.source)
        notes += architecture.notes
        if _is_resnet_of_mmsegmentation(recognised) and recognised.output_stride is None:
            notes += _stride_notes(recognised, architecture)
    else:
        _check_hidden_arguments(backbone, recognised, path)
    try:
        adopt(
            backbone,
            recognised,
            place.source,
            notes,
            positions=positions,
            licences=_licences(place, content),
            revision=place.revision,
        )
    except ValueError as error:
        raise InputError(f"{error}{_nearer_name(content, path, backbone, network)}") from error
    return backbone


def _nearer_name(content: Mapping[str, Any], path: Path, backbone: Backbone, network: NetworkName) -> str:
    """Return an error suffix that names the network in the file; empty if it is the requested one or unknown."""
    try:
        recognised = _recognise(content, path, network=network, backbone=None, ignore=())
        found = infer_architecture(recognised.state, **_hidden_arguments(recognised, path, None))
    except ValueError:
        return ""
    if (found.name, found.args) == (backbone.name, backbone.args):
        return ""
    arguments = f" with {found.args}" if found.args else ""
    return f"; the file contains a {found.name}{arguments}: give that name, or none"


@contextlib.contextmanager
def _naming(place: "_Place") -> Iterator[None]:
    """Add the source to errors, and to errors about shards the path of a whole network, if found nearby."""
    try:
        yield
    except ValueError as error:
        message = str(error).replace(str(place.path), place.source)
        message = message if place.source in message else f"{place.source}: {message}"
        if SHARD in message and (whole := find_whole_network(place.path)):
            message += f"; {whole} may be the whole network"
        if message == str(error):
            raise
        raise InputError(message) from error


def load_pretrained(
    backbone: Backbone,
    source: str | Path,
    *,
    network: NetworkName = "teacher",
    positions: Resizing | None = None,
    ignore: Sequence[str] = (),
    trust: bool = False,
) -> LoadedWeights:
    """Load weights into a backbone, all or none; return and log the used and ignored keys.

    Args:
        backbone: network of the weights' architecture; image size and patch size may differ (position embedding and
            patch projection are resampled).
        source: a file or folder as in `load_backbone`, `"timm"` for timm's default weights of the architecture, or a
            timm name with its tag, such as `vit_small_patch16_224.dino`.
        network: as in `load_backbone`.
        positions: as in `load_backbone`.
        ignore: as in `load_backbone`.
        trust: allow code in a checkpoint to run. Use only with files from a trusted source.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, of unknown format or of another architecture, or the timm name is unknown.
        ConnectionError: weights are not cached and cannot be downloaded.
    """
    place = None if str(source) == "timm" else _locate(source)
    if place is None:
        return _load_from_timm(backbone, backbone.name if str(source) == "timm" else str(source))
    path = place.path
    with _naming(place):
        content = read_weights(path, trust=trust)
    description = path.with_name(DESCRIPTION_FILE)
    about = read_description(description) if is_saved(path) and description.is_file() else None
    width = about["args"].get("num_classes", 0) if about is not None else _readout_width(content, path)
    if about is None:
        licences = _licences(place, content)
    else:
        licences = licences_of(about, _stated_licence(place), description)
    with _readout_of_weights(backbone, width):
        with _naming(place):
            recognised = _recognise(content, path, network=network, backbone=backbone, ignore=ignore)
        _check_hidden_arguments(backbone, recognised, path)
        if about is not None:
            recognised = apply_description(recognised, about)
        return adopt(
            backbone,
            recognised,
            place.source,
            place.notes,
            positions=positions,
            licences=licences,
            revision=place.revision,
        )


@contextlib.contextmanager
def _readout_of_weights(backbone: Backbone, width: int) -> Iterator[None]:
    """Add a layer after the features for weights; restore the previous layer if they cannot be loaded."""
    before = backbone.readout
    reserve_readout(backbone, width)
    try:
        yield
    except BaseException:
        backbone.remove_readout()
        if before is not None:
            backbone.set_readout(before.weight, before.bias)
        raise


# ------------------------------------------------------------------------------------------------ finding the file


class _Place(NamedTuple):
    """A file or folder of weights; `source` is the name to show, `revision` and `readme` those of a repository."""

    path: Path
    source: str
    notes: tuple[str, ...] = ()
    revision: str | None = None
    readme: Path | None = None


def _locate(source: str | Path | Download) -> _Place | None:
    """Find the file of a source, and download it if it is on the hub; None if it can only be a timm name."""
    if not isinstance(source, Download):
        name = hub_name(source)
        source = source if name is None else download(name)
    if isinstance(source, Download):
        return _Place(source.path, str(source.name), revision=source.commit, readme=source.readme)
    path = _as_path(source)
    if path is None:
        return None
    file, notes = _file_of(path)
    return _Place(file, str(file), notes)


def _as_path(source: str | Path) -> Path | None:
    """Return `source` as a path; None if it can only be a timm name."""
    path = Path(source)
    is_path = isinstance(source, Path) or path.exists() or path.suffix in WEIGHT_SUFFIXES or len(path.parts) > 1
    return path if is_path else None


def _file_of(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Find the weights in a file or folder; also return notes on the choice for the user."""
    if not path.is_dir():
        if not path.exists():
            hub = suggested_name(path)
            near = nearest_path(path)
            raise FileNotFoundError(
                f"no weights at {path}: "
                + ("" if near is None else f"did you mean {near}? Otherwise, ")
                + "give a file, a run folder, or a timm name without slashes"
                + (f"; for the Hugging Face hub, write {hub}" if hub is not None else "")
            )
        return path, ()
    for name in WEIGHTS:
        if (path / name).is_file():
            return path / name, ()
    if _is_read_whole(path):
        return path, ()
    distributed = [folder for folder in path.glob("ckpt/*") if _is_read_whole(folder) and folder.name.isdecimal()]
    if distributed:
        last = max(distributed, key=lambda folder: int(folder.name))
        return last, (f"using the last checkpoint of the training, {last.relative_to(path)}",)
    damaged: list[str] = []
    for checkpoint in sorted(path.glob(_CHECKPOINTS), reverse=True):
        try:
            check_archive(checkpoint)
        except (Damaged, OSError) as error:
            damaged.append(f"{checkpoint.name} cannot be used: {error}")
        else:
            return checkpoint, (f"the run has not finished; using its last checkpoint, {checkpoint.stem}", *damaged)
    raise FileNotFoundError(
        f"no backbone at {path}{''.join(f' ({reason})' for reason in damaged)}: give a folder with "
        f"{WEIGHTS_FILE} (a run), or config.json and "
        f"{WEIGHTS[1]} (the Hugging Face hub), or .metadata (torch.distributed.checkpoint), or give a file"
    )


def _is_read_whole(folder: Path) -> bool:
    """Whether the folder itself is a checkpoint, of torch.distributed.checkpoint or Orbax."""
    return any((folder / name).exists() for name in (METADATA, *ORBAX_FILES))


# -------------------------------------------------------------------------------- what is known beside the weights


def _declared_architecture(
    content: Mapping[str, Any], path: Path, name: str | None, args: Mapping[str, Any] | None
) -> Architecture | None:
    """Find the architecture: from the caller, the checkpoint, the timm config in its folder, or the file name."""
    if name is not None:
        size = timm.get_pretrained_cfg_value(name, "input_size") if timm.is_model(name) else None
        return Architecture(name, dict(args or {}), size[-1] if size else 224)
    if isinstance(run := content.get("cribo"), Mapping) and isinstance(config := run.get("config"), Mapping):
        backbone = config["backbone"]
        return Architecture(backbone["name"], {**(backbone["args"] or {}), **(args or {})}, config["views"]["size"])
    config = read_beside(path, HUB_CONFIG)
    # Other programs also write a config.json with an `architecture`.
    if isinstance(timm_name := config.get("architecture"), str) and timm.is_model(timm_name):
        declared = {key: value for key, value in config.get("model_args", {}).items() if key not in RESERVED_ARGS}
        size = config.get("pretrained_cfg", {}).get("input_size", (3, 224, 224))
        return Architecture(timm_name, {**declared, **(args or {})}, size[-1])
    if _is_named_after_its_network(content, path):
        size = timm.get_pretrained_cfg_value(path.stem, "input_size")
        return Architecture(path.stem, dict(args or {}), size[-1] if size else 224)
    return None


def _is_named_after_its_network(content: Mapping[str, Any], path: Path) -> bool:
    """Whether a file has the name and exactly the keys of a timm network (with or without its classifier).

    Other than ResNets, convolutional networks do not show their architecture otherwise.
    """
    if not timm.is_model(path.stem) or path.stem.startswith(("vit_", "deit", "resnet")):
        return False
    with torch.device("meta"):
        own = set(timm.create_model(path.stem, num_classes=0).state_dict())
    classifier = {"classifier", "head", "fc"}
    return own == {key for key in content if key.partition(".")[0] not in classifier or key in own}


def _licences(place: _Place, content: Mapping[str, Any]) -> tuple[Licence, ...]:
    """Return the licences of weights: as described by this package, and as in the header of a README.md nearby."""
    stated = _stated_licence(place)
    if isinstance(run := content.get("cribo"), Mapping):
        about = run.get("backbone", {})
        if "licences" not in about and "config" in run and not run["config"]["backbone"].get("pretrained"):
            about = {"licences": ()}  # random weights
        return licences_of(about, stated, place.path)
    about = read_beside(place.path, HUB_CONFIG).get(DESCRIBED)
    return licences_of(about if isinstance(about, Mapping) else {}, stated, place.path.with_name(HUB_CONFIG))


def _stated_licence(place: _Place) -> Licence:
    """Return the licence in the README.md of the folder or repository."""
    return read_licence(filter(None, (place.path.with_name(README), place.readme)), place.source, place.revision)


def _readout_width(content: Mapping[str, Any], path: Path) -> int:
    """Return the channels of the layer after the features in this package's checkpoints or timm folders; 0 if none.

    Classifiers in other projects' weights are not part of a backbone.
    """
    if isinstance(run := content.get("cribo"), Mapping):
        return run.get("backbone", {}).get("args", {}).get("num_classes", 0)
    config = read_beside(path, HUB_CONFIG)
    is_own = config.get("pretrained_cfg", {}).get("tag") == TIMM_TAG
    return config.get("num_classes", 0) if is_own else 0


def _recognise(
    content: Mapping[str, Any],
    path: Path,
    *,
    network: NetworkName,
    backbone: Backbone | None,
    ignore: Sequence[str],
) -> Recognised:
    """Recognise the network in a file by its keys and by configuration files beside it."""
    tensors = flatten(content)
    if not tensors:
        raise InputError(f"{path} contains no tensors, only {first_keys(content) or 'nothing'}: give a weight file")
    if network == "student" and any(".lora_A." in key for key in tensors):
        raise InputError(f"{path}: the student has LoRA adapters: use the teacher, which follows its merged weights")
    recognised = recognise(tensors, str(path), network=network, backbone=backbone, ignore=ignore)
    recognised = replace(recognised, output_stride=named_stride(content))
    if recognised.format == "cribo run":
        return _as_in_run(recognised, content.get("cribo", {}))
    if recognised.format == "Segmenter":
        variant = (read_beside(path, "variant.yml").get("net_kwargs") or {}).get("normalization")
        return with_expected(recognised, mean=IMAGENET_MEAN, std=IMAGENET_STD) if variant == "deit" else recognised
    if recognised.format == "detectron2":
        return apply_detectron2_config(recognised, path)
    if _is_resnet_of_mmsegmentation(recognised):
        recognised = apply_mmsegmentation_config(recognised, content, path)
    if recognised.format in ("DINOv2 or DINOv3 training", "DINOv2", "DINOv3"):
        return apply_dino_config(recognised, path)
    config = hub_config(path)
    if isinstance(about := config.get(DESCRIBED), Mapping):
        return apply_description(recognised, about)
    mean, std = image_normalisation(path, config, recognised.expected)
    notes = recognised.notes
    if mean is None and "Hugging Face" in recognised.format:
        notes = (
            f"no {HUB_IMAGES} beside it: assumed a mean of {recognised.expected.mean or IMAGENET_MEAN} for images",
            *notes,
        )
    eps = "norm_eps" if recognised.expected.final_norm_eps is None else "final_norm_eps"
    return with_expected(
        replace(recognised, notes=notes),
        **{eps: config.get("layer_norm_eps")},
        mean=mean,
        std=std,
        act_layer=activation_of(config, path),
    )


def _as_in_run(recognised: Recognised, run: Mapping[str, Any]) -> Recognised:
    if "backbone" in run:
        return apply_description(recognised, run["backbone"])
    if not run.get("config", {}).get("backbone", {}).get("pretrained"):
        return recognised
    note = "the checkpoint does not specify the normalisation that its weights expect: assumed ImageNet's"
    return replace(recognised, notes=(*recognised.notes, note))


def _hidden_arguments(recognised: Recognised, path: Path, args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return arguments of `infer_architecture` that weights do not show, from format, configuration or caller."""
    config, args = hub_config(path), args or {}
    for option in ("downsample_in_bottleneck", "downsample_in_first_stage"):
        if config.get(option):
            raise InputError(f"{path.with_name(HUB_CONFIG)} has {option} set: timm has no such ResNet")
    return {
        "heads": recognised.expected.heads,
        "num_heads": args.get("num_heads", config.get("num_attention_heads", recognised.num_heads)),
        "act_layer": args.get("act_layer", recognised.expected.act_layer),
        "assumed_act_layer": recognised.expected.assumed_act_layer,
        "output_stride": recognised.output_stride,
    }


def _is_resnet_of_mmsegmentation(recognised: Recognised) -> bool:
    return "MMSegmentation" in recognised.format and "layer1.0.conv1.weight" in recognised.state


def _stride_notes(recognised: Recognised, architecture: Architecture) -> tuple[str, ...]:
    if "output_stride" in architecture.args:
        return ()
    can_dilate = "layer1.0.conv3.weight" in recognised.state and "avg_down" not in architecture.args
    way_out = ": args={'output_stride': 8}" if can_dilate else ""
    return (
        "the file does not specify the strides and dilations of its ResNet: assumed an output stride of 32; most of "
        f"MMSegmentation's have 8{way_out}",
    )


def _check_hidden_arguments(backbone: Backbone, recognised: Recognised, path: Path) -> None:
    """Check heads, activation and strides: weights load with wrong ones, but give meaningless features."""
    stride = recognised.output_stride
    if stride not in (None, 32, backbone.patch_size):  # a network of stride 32 may be dilated on purpose
        raise InputError(
            f"{path} is a ResNet with an output stride of {stride}, the backbone has {backbone.patch_size}: build "
            f"it with args={{'output_stride': {stride}}}"
        )
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
            raise InputError(
                f"{path} is from {recognised.format}, which has {argument} {value} at this width, but the backbone "
                f"has {has[argument]}: build it with args={{{argument!r}: {value!r}}}"
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
        near = nearest_path(Path(source)) if Path(source).suffix else None  # other names are rather those of networks
        advice = nearest_names(architecture) if near is None else f": did you mean the file {near}?"
        raise InputError(f"{source!r} is neither a file nor a timm name{advice}")
    if pretrained:
        _check_tag(source)
    size = timm.get_pretrained_cfg_value(source if pretrained else architecture, "input_size") or (3, 224, 224)
    inferred = Architecture(architecture, dict(args or {}), size[-1])
    backbone = build(inferred, image_size, drop_path, seed=None if pretrained else seed, file=source)
    if pretrained:
        _load_from_timm(backbone, source)
    return backbone


def _check_tag(name: str) -> None:
    architecture, _, tag = name.partition(".")
    tags = [full for full in timm.list_pretrained() if full.partition(".")[0] == architecture]
    if not tags:
        raise InputError(f"timm has no pretrained weights of {architecture}: give a file, or use random weights")
    if tag and name not in tags:
        raise InputError(f"timm has no weights {name!r}: it has {', '.join(tags)}")


def _load_from_timm(backbone: Backbone, name: str) -> LoadedWeights:
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise InputError(f"pretrained={name!r} is neither a file nor a timm name{nearest_names(architecture)}")
    if architecture != backbone.name:
        raise InputError(f"{name!r} has weights of {architecture}, but the backbone is {backbone.name}")
    _check_tag(name)
    config = timm.get_pretrained_cfg(name)
    # `custom_load` refers to the file at the URL, unless it is "hf".
    hub = config.hf_hub_id if config and str(config.custom_load) != "hf" else None
    url = config.url if config and not config.custom_load and isinstance(config.url, str) else None
    if config is None or not (hub or url):
        raise InputError(f"the weights {name!r} are not in a PyTorch format: give a file")
    try:
        if hub:
            content = load_state_dict_from_hf(hub, config.hf_hub_filename or _HUB_FILE, weights_only=True)
        else:
            content = torch.hub.load_state_dict_from_url(str(url), map_location="cpu", weights_only=True)
    except Exception as error:  # the hub client's errors have no common base class
        place = f"https://huggingface.co/{hub}" if hub else url
        raise ConnectionError(
            f"cannot download the weights {name!r} ({type(error).__name__}: {error}). Without a network: "
            f"download their file (model.safetensors) from {place} on another machine, and pass its path"
        ) from error
    source = f"{architecture}.{config.tag}" if config.tag else architecture
    recognised = recognise(flatten(content), source, backbone=backbone)
    # Weights from timm expect timm's own network, including epsilon and activation.
    expected = Expected(mean=tuple(config.mean), std=tuple(config.std))
    recognised = replace(recognised, format="timm", expected=expected, notes=())
    return adopt(backbone, recognised, source, licences=(timm_licence(source, config.license, config.hf_hub_id),))
