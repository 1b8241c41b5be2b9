"""Load backbones from this project's runs, checkpoints of other projects, timm, and Hugging Face folders.

One record, `Weights`, goes through six functions: `locate`, `read`, `recognise`, `architecture`, `build`, `adopt`.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.layers.activations import GELUTanh, QuickGELU
from timm.models import VisionTransformer
from timm.models._pretrained import PretrainedCfg

from cribo.base.errors import Damaged, InputError
from cribo.base.files import check_archive, nearest_path
from cribo.models.backbone import IMAGENET_MEAN, IMAGENET_STD, RESERVED_ARGS, RGB, Backbone, repeated
from cribo.models.building import build_network, check_network, untrained
from cribo.models.channels import inflation_note
from cribo.models.config import NetworkName
from cribo.models.fitting import fit, load_all_or_nothing, original_resizing
from cribo.models.formats import recognising
from cribo.models.formats.architecture import Architecture, infer_architecture
from cribo.models.formats.beside import HUB_CONFIG, WeightFile
from cribo.models.formats.distributed import METADATA, SHARD
from cribo.models.formats.reading import ORBAX_FILES, flatten, read_weights
from cribo.models.formats.recognised import Expected, Recognised
from cribo.models.formats.training_configs import find_whole_network, named_stride, stride_notes
from cribo.models.hub.download import WEIGHT_SUFFIXES, WEIGHTS, Download, download, hub_name, suggested_name
from cribo.models.hub.timm_weights import check_timm_name, download_timm, timm_weights
from cribo.models.licences import README, Licence, licences_of, log_licences, read_licence, timm_licence
from cribo.models.numerics import Numerics
from cribo.models.origin import LoadedWeights
from cribo.models.positions import Resizing
from cribo.models.saving import (
    DESCRIBED,
    DESCRIPTION_FILE,
    TIMM_TAG,
    WEIGHTS_FILE,
    apply_description,
    reserve_readout,
    saved_description,
)

_logger = logging.getLogger(__name__)

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
        args: arguments of timm's constructor (`depth`, `embed_dim`, `num_heads`, `output_stride`, ...); for images of
            C channels, `in_chans`.
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
    request = Request(name, args, pretrained, image_size, network, positions, ignore, trust, drop_path, seed)
    weights = locate(source, request)
    with _naming(weights):
        build(weights)  # by a timm name, so that wrong arguments are reported before a download
        if weights.path is None and not pretrained:
            return weights.network
        read(weights)
        build(weights)  # as declared by the caller or beside the weights: its names of tensors count
        recognise(weights)
        build(weights)  # as inferred from the weights
        with _naming_nearer(weights):
            adopt(weights)
    return weights.network if pretrained else untrained(weights.network, seed=seed, drop_path=drop_path)


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
    request = Request(network=network, positions=positions, ignore=ignore, trust=trust)
    weights = _of_timm(backbone.name, request) if str(source) == "timm" else locate(source, request)
    weights.backbone = backbone
    with _naming(weights), _readout_kept(backbone):
        read(weights)
        recognise(weights)
        adopt(weights)
    assert backbone.loaded is not None
    return backbone.loaded


# ------------------------------------------------------------------------------------------------------ the record


class Request(NamedTuple):
    """What the caller states about weights: the arguments of `load_backbone`."""

    name: str | None = None
    args: Mapping[str, Any] | None = None
    pretrained: bool = True
    image_size: int | None = None
    network: NetworkName = "teacher"
    positions: Resizing | None = None
    ignore: Sequence[str] = ()
    trust: bool = False
    drop_path: float = 0.0
    seed: int = 0


@dataclass
class Weights:
    """Weights on their way from a source into a network; each function adds what it finds.

    Attributes:
        request: what the caller states.
        source: name to show: the file, that on the hub, or timm's.
        path: file or folder; None for timm's names.
        notes: notes for the user.
        revision, readme: commit and README.md of the repository on the hub.
        of_timm: timm's configuration of its weights.
        file: the file with its content, after `read`.
        content: the content, nested as saved, after `read`.
        is_saved: whether the file was written by `save_backbone`, by its name or its description.
        about: description of the backbone by this package (`cribo.models.saving.describe`), if there is one.
        about_file: the file that contains the description.
        recognised: the network found in the content, after `recognise`.
        backbone: the network, after `build`.
    """

    request: Request
    source: str
    path: Path | None = None
    notes: tuple[str, ...] = ()
    revision: str | None = None
    readme: Path | None = None
    of_timm: PretrainedCfg | None = None
    file: WeightFile | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] | None = None
    about_file: Path = Path()
    recognised: Recognised | None = None
    backbone: Backbone | None = None

    def __post_init__(self) -> None:
        self.is_saved = self.path is not None and self.path.name == WEIGHTS_FILE

    @property
    def network(self) -> Backbone:
        """The network, which has been built."""
        assert self.backbone is not None
        return self.backbone


@contextlib.contextmanager
def _naming(weights: Weights) -> Iterator[None]:
    """Add the source to errors, and to errors about shards the path of a whole network, if found nearby."""
    try:
        yield
    except ValueError as error:
        if weights.path is None or weights.is_saved:
            raise
        message = str(error).replace(str(weights.path), weights.source)
        message = message if weights.source in message else f"{weights.source}: {message}"
        if SHARD in message and (whole := find_whole_network(weights.path)):
            message += f"; {whole} may be the whole network"
        if message == str(error):
            raise
        raise InputError(message) from error


@contextlib.contextmanager
def _readout_kept(backbone: Backbone) -> Iterator[None]:
    """Restore the layer after the features if weights, with or without one, cannot be loaded."""
    before = backbone.readout
    try:
        yield
    except BaseException:
        backbone.remove_readout()
        if before is not None:
            backbone.set_readout(before.weight, before.bias)
        raise


# --------------------------------------------------------------------------------------------------------------- locate


def locate(source: str | Path | Download, request: Request) -> Weights:
    """Find the file of a source, and download it if it is on the hub; other names are timm's."""
    if not isinstance(source, Download):
        name = hub_name(source)
        source = source if name is None else download(name)
    if isinstance(source, Download):
        return Weights(request, str(source.name), source.path, revision=source.commit, readme=source.readme)
    path = Path(source)
    if isinstance(source, Path) or path.exists() or path.suffix in WEIGHT_SUFFIXES or len(path.parts) > 1:
        file, notes = _file_of(path)
        return Weights(request, str(file), file, notes)
    if request.name is not None:
        raise InputError(f"name={request.name!r} applies to files, but {source!r} is a timm name: remove it")
    return _of_timm(source, request)


def _of_timm(name: str, request: Request) -> Weights:
    check_timm_name(name)
    return Weights(request, name, of_timm=timm_weights(name) if request.pretrained else None)


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


# ----------------------------------------------------------------------------------------------------------------- read


def read(weights: Weights) -> None:
    """Read the content of a file, and the description of its backbone by this package; download weights of timm."""
    if weights.of_timm is not None:
        name, tag = weights.source.partition(".")[0], weights.of_timm.tag
        if weights.backbone is not None and name != weights.backbone.name:
            raise InputError(f"{weights.source!r} has weights of {name}, but the backbone is {weights.backbone.name}")
        weights.content = download_timm(weights.source, weights.of_timm)
        weights.source = f"{name}.{tag}" if tag else name
        return
    path = weights.path
    assert path is not None
    saved = saved_description(path)
    weights.content = read_weights(path, trust=weights.request.trust)
    weights.file = WeightFile(path, weights.content)
    if saved is not None:
        weights.is_saved, weights.about, weights.about_file = True, saved, path.with_name(DESCRIPTION_FILE)
    elif isinstance(run := weights.content.get("cribo"), Mapping):
        weights.about, weights.about_file = run.get("backbone"), path
    else:
        about = weights.file.config.get(DESCRIBED)
        weights.about = about if isinstance(about, Mapping) else None
        weights.about_file = path.with_name(HUB_CONFIG)


# ------------------------------------------------------------------------------------------------------------ recognise


def recognise(weights: Weights) -> None:
    """Find the network in the content by its keys, and what it expects by descriptions and configurations."""
    request, backbone, source = weights.request, weights.backbone, str(weights.path or weights.source)
    tensors = flatten(weights.content)
    if not tensors:
        first = recognising.first_keys(weights.content) or "nothing"
        raise InputError(f"{source} contains no tensors, only {first}: give a weight file")
    # Files of `save_backbone` and of timm contain one network.
    network: NetworkName = "teacher" if weights.is_saved or weights.of_timm is not None else request.network
    if network == "student" and any(".lora_A." in key for key in tensors):
        raise InputError(f"{source}: the student has LoRA adapters: use the teacher, which follows its merged weights")
    if backbone is not None:
        reserve_readout(backbone, _readout_width(weights))
    found = recognising.recognise(tensors, source, network=network, backbone=backbone, ignore=request.ignore)
    weights.recognised = _with_expectations(weights, replace(found, output_stride=named_stride(weights.content)))
    if backbone is not None:
        _check_hidden_arguments(backbone, weights.recognised, source)


def _readout_width(weights: Weights) -> int:
    """Return the channels of the layer after the features in this package's checkpoints or timm folders; 0 if none.

    Classifiers in other projects' weights are not part of a backbone.
    """
    if weights.file is None:
        return 0
    if weights.about is not None and weights.about_file.name != HUB_CONFIG:
        return weights.about.get("args", {}).get("num_classes", 0)
    config = weights.file.config
    is_own = config.get("pretrained_cfg", {}).get("tag") == TIMM_TAG
    return config.get("num_classes", 0) if is_own else 0


def _with_expectations(weights: Weights, found: Recognised) -> Recognised:
    """Add what weights expect: as timm or a description states, otherwise by configurations in and beside the file."""
    if weights.file is None:
        assert weights.of_timm is not None
        # Weights from timm expect timm's own network, including epsilon and activation.
        expected = Expected(mean=tuple(weights.of_timm.mean), std=tuple(weights.of_timm.std))
        return replace(found, format="timm", expected=expected, notes=())
    if weights.about is not None:
        found = apply_description(found, weights.about)
        return replace(found, format="cribo backbone") if weights.is_saved else found
    found = found.configure(found, weights.file)
    name = weights.file.path.stem
    if weights.backbone is not None and weights.backbone.name == name and found.expected.mean is None:
        images = timm.get_pretrained_cfg(name)  # the file has the name of timm's own weights
        found = found if images is None else found.expecting(mean=images.mean, std=images.std)
    return found


def _check_hidden_arguments(backbone: Backbone, recognised: Recognised, source: str) -> None:
    """Check heads, activation and strides: weights load with wrong ones, but give meaningless features."""
    stride = recognised.output_stride
    if stride not in (None, 32, backbone.patch_size):  # a network of stride 32 may be dilated on purpose
        raise InputError(
            f"{source} is a ResNet with an output stride of {stride}, the backbone has {backbone.patch_size}: build "
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
                f"{source} is from {recognised.format}, which has {argument} {value} at this width, but the backbone "
                f"has {has[argument]}: build it with args={{{argument!r}: {value!r}}}"
            )


# --------------------------------------------------------------------------------------------------------- architecture


def architecture(weights: Weights) -> Architecture | None:
    """Name the network: by its timm name, by what declares it, or by its tensors; None if it is not known yet."""
    if weights.path is None:
        name = weights.source.partition(".")[0]
        size = _own_size(weights.source if weights.request.pretrained else name)
        return Architecture(name, dict(weights.request.args or {}), size)
    if weights.file is None:
        return None
    if weights.is_saved:
        return _described(weights)
    return _declared(weights.request, weights.file) if weights.recognised is None else _inferred(weights)


def _described(weights: Weights) -> Architecture:
    """Return the architecture in the description beside a file of `save_backbone`."""
    about, name, args = weights.about, weights.request.name, weights.request.args
    if args:
        raise InputError(f"args={args!r} cannot be combined with {weights.source}, which specifies its network")
    if about is None:
        raise FileNotFoundError(
            f"{weights.path} has no {DESCRIPTION_FILE} beside it: copy it from the run, or build the backbone by name "
            f"with pretrained={str(weights.path)!r}"
        )
    if name not in (None, about["name"]):
        raise InputError(
            f"name={name!r} cannot be combined with {weights.source}, which specifies its network {about['name']}"
        )
    own = {key: value for key, value in about["args"].items() if key not in RESERVED_ARGS}
    return Architecture(about["name"], own, about["image_size"])


def _declared(request: Request, file: WeightFile) -> Architecture | None:
    """Find the architecture: from the caller, the checkpoint, the timm config in its folder, or the file name."""
    name, args, config = request.name, dict(request.args or {}), file.config
    if name is not None:
        return Architecture(name, args, _own_size(name))
    if isinstance(run := file.content.get("cribo"), Mapping) and isinstance(settings := run.get("config"), Mapping):
        backbone, described = settings["backbone"], run.get("backbone") or {}
        channels = {key: value for key, value in described.get("args", {}).items() if key == "in_chans"}
        own = {**(backbone["args"] or {}), **channels, **args}
        return Architecture(backbone["name"], own, settings["views"]["size"])
    # Other programs also write a config.json with an `architecture`.
    if isinstance(timm_name := config.get("architecture"), str) and timm.is_model(timm_name):
        declared = {key: value for key, value in config.get("model_args", {}).items() if key not in RESERVED_ARGS}
        size = config.get("pretrained_cfg", {}).get("input_size", (3, 224, 224))
        return Architecture(timm_name, {**declared, **args}, size[-1])
    if _is_named_after_its_network(file.content, file.path):
        return Architecture(file.path.stem, args, _own_size(file.path.stem))
    return None


def _own_size(name: str) -> int:
    """Return the image size of a timm name; 224 for other networks."""
    size = timm.get_pretrained_cfg_value(name, "input_size") if timm.is_model(name) else None
    return size[-1] if size else 224


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


def _inferred(weights: Weights) -> Architecture:
    """Infer the architecture from the recognised tensors, and from what the caller, format and configuration add."""
    args = dict(weights.request.args or {})
    found = _infer(weights, args)
    found = found._replace(args={**found.args, **args})
    assert weights.recognised is not None
    return found._replace(notes=(*found.notes, *stride_notes(weights.recognised, found)))


def _infer(weights: Weights, args: Mapping[str, Any]) -> Architecture:
    file, recognised = weights.file, weights.recognised
    assert file is not None
    assert recognised is not None
    for option in ("downsample_in_bottleneck", "downsample_in_first_stage"):
        if file.tower.get(option):
            raise InputError(f"{file.path.with_name(HUB_CONFIG)} has {option} set: timm has no such ResNet")
    try:
        return infer_architecture(
            recognised.state,
            heads=recognised.expected.heads,
            num_heads=args.get("num_heads", file.tower.get("num_attention_heads", recognised.num_heads)),
            act_layer=args.get("act_layer", recognised.expected.act_layer),
            assumed_act_layer=recognised.expected.assumed_act_layer,
            output_stride=recognised.output_stride,
        )
    except ValueError as error:
        raise InputError(f"{file.path} ({recognised.format}): {error}") from error


# ---------------------------------------------------------------------------------------------------------------- build


def build(weights: Weights) -> None:
    """Build the network with uninitialised weights, once its architecture is known; with random ones if none are read.

    Custom code requires `trust`, or the same name from the caller.
    """
    if weights.backbone is not None or (found := architecture(weights)) is None:
        return
    request = weights.request
    named_by = weights.about_file if weights.is_saved else weights.source
    check_network(found.name, named_by, trust=request.trust, given=request.name)
    initialise = weights.path is None and not request.pretrained
    weights.backbone = build_network(
        found.name,
        args=found.args,
        image_size=request.image_size or found.image_size,
        drop_path=request.drop_path,
        seed=request.seed if initialise else 0,
        initialise=initialise,
    )
    weights.notes += found.notes


# ---------------------------------------------------------------------------------------------------------------- adopt


def adopt(weights: Weights) -> None:
    """Load the weights, all or none; set the normalisation, numerics, licences and `loaded` of the backbone."""
    recognised, backbone, wanted = weights.recognised, weights.network, weights.request.positions
    assert recognised is not None
    expected, original = recognised.expected, original_resizing(recognised)
    numerics = recognised.numerics or Numerics(
        norm_eps=expected.norm_eps,
        final_norm_eps=expected.final_norm_eps,
        positions=original or "timm",
        rope_periods=recognised.rope_periods,
        rope_coordinates=expected.rope_coordinates or "separate",
        dilate_entries=bool(expected.dilate_entries),
        windows=expected.windows or "timm",
        relative_positions=(wanted != "timm" and expected.relative_positions) or "timm",
    )
    if wanted is not None:
        numerics = replace(numerics, positions=wanted)
    state, resampled = fit(recognised.state, backbone, weights.source, numerics)
    load_all_or_nothing(backbone, state, weights.source, recognised.used)
    backbone.mean = repeated(expected.mean or IMAGENET_MEAN, backbone.in_chans)
    backbone.std = repeated(expected.std or IMAGENET_STD, backbone.in_chans)
    backbone.set_numerics(numerics)
    notes = [*weights.notes, *recognised.notes]
    of_rgb = (key for key in resampled if recognised.state[key].ndim == 4 and recognised.state[key].shape[1] == RGB)
    if backbone.in_chans != RGB and any(of_rgb):
        notes.append(inflation_note(backbone.in_chans))
    if "pos_embed" in state and isinstance(backbone.model, VisionTransformer):
        if wanted is not None:
            notes.append(f"positions are resized to other sizes as requested ({wanted})")
        elif numerics.positions != "timm":
            notes.append(f"positions are resized to other sizes as the original does ({numerics.positions})")
        elif original is None:
            notes.append(_UNKNOWN_RESIZING)
    if backbone.readout is not None:
        notes.append(f"they include a linear layer after the features, of {backbone.embed_dim} channels")
    repository = hub_name(weights.source)
    backbone.loaded = LoadedWeights(
        weights.source,
        format=recognised.format,
        network=recognised.network,
        part=recognised.part,
        used=recognised.used,
        dropped=recognised.dropped,
        resampled=resampled,
        notes=tuple(notes),
        revision=weights.revision,
        parent=recognised.parent if repository is None else repository.repo,
    )
    backbone.licences = _licences(weights)
    backbone.pixels = _pixels(weights.about)
    _logger.info("%s", backbone.loaded)
    log_licences(backbone.licences)


_UNKNOWN_RESIZING = (
    "for other image sizes, its position embedding is resized as timm does, because the file does not say which "
    "project trained it; if that was DINO, iBOT or DINOv2, add --backbone.positions bicubic_offset for exact features"
)


def _pixels(about: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return how the images of the training were read, as a description states it."""
    stated = (about or {}).get("pixels")
    return stated if isinstance(stated, Mapping) else None


def _licences(weights: Weights) -> tuple[Licence, ...]:
    """Return the licences of weights: as timm or a description states, and as in the header of a README.md nearby."""
    if weights.path is None:
        assert weights.of_timm is not None
        return (timm_licence(weights.source, weights.of_timm.license, weights.of_timm.hf_hub_id),)
    readmes = filter(None, (weights.path.with_name(README), weights.readme))
    stated = read_licence(readmes, weights.source, weights.revision)
    about: Mapping[str, Any] = weights.about or {}
    if isinstance(run := weights.content.get("cribo"), Mapping) and "licences" not in about and "config" in run:
        is_random = not run["config"]["backbone"].get("pretrained")
        about = {"licences": ()} if is_random else about
    return licences_of(about, stated, weights.about_file)


@contextlib.contextmanager
def _naming_nearer(weights: Weights) -> Iterator[None]:
    """Add to an error the network in the file, if it is another than the caller, or something else, has named."""
    try:
        yield
    except ValueError as error:
        if weights.file is None or weights.is_saved:
            raise
        try:
            found = _infer(weights, {})
        except (ValueError, KeyError):  # of weights that are not complete
            raise error from None
        if (found.name, found.args) == (weights.network.name, weights.network.args):
            raise
        arguments = f" with {found.args}" if found.args else ""
        raise InputError(f"{error}; the file contains a {found.name}{arguments}: give that name, or none") from error
