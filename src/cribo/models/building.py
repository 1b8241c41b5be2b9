"""Build backbones by name."""

import contextlib
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import timm
import torch
from timm.layers.drop import DropPath
from timm.layers.weight_init import trunc_normal_
from timm.models import Beit, Eva, VisionTransformer
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from cribo.base.bounds import at_least, below
from cribo.base.errors import InputError
from cribo.base.trust import check_import, import_by_path
from cribo.models import networks
from cribo.models.backbone import RESERVED_ARGS, Backbone


def build_network(
    name: str,
    *,
    args: Mapping[str, Any] | None = None,
    image_size: int = 224,
    drop_path: float = 0.0,
    seed: int = 0,
    initialise: bool = True,
) -> Backbone:
    """Build a backbone with random weights; arguments and errors as in `build_backbone`."""
    args = dict(args or {})
    _check_name(name)
    _check_args(name, args)
    (at_least(0) & below(1)).check(drop_path=drop_path)
    at_least(1).check(image_size=image_size)
    if not initialise and (backbone := _build_empty(name, args, image_size, drop_path)) is not None:
        return backbone
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed the GPU's generators.
        torch.default_generator.manual_seed(seed)
        model, arguments = _create(name, args, image_size, drop_path)
        _initialise_embeddings(model)
        return Backbone(model, name, arguments, image_size)


def first_blocks(backbone: Backbone, count: int) -> Backbone:
    """Return the same network without its last blocks: the final norm follows block `count`.

    It has no drop path, and no readout, which would expect the features of the last block.

    Raises:
        ValueError: the network has no or fewer transformer blocks, or parameters shared by all blocks.
    """
    if not isinstance(backbone.model, VisionTransformer | Eva | Beit):
        raise InputError(
            f"{backbone.name} has no transformer blocks to choose from, got {count}: use all of it, or a vision "
            "transformer"
        )
    if not 1 <= count <= backbone.depth:
        raise InputError(f"{backbone.name} has blocks 1 to {backbone.depth} to choose from, got {count}")
    state = backbone.model.state_dict()
    shorter = _changed(backbone, depth=count)
    own = shorter.model.state_dict()
    for key, value in own.items():
        if state[key].shape != value.shape:
            raise InputError(f"{backbone.name} cannot be shortened, because all blocks share {key}: use all of them")
    shorter.model.load_state_dict({key: state[key] for key in own})
    return shorter


def with_stride(backbone: Backbone, stride: int) -> Backbone:
    """Return the same convolutional network with another output stride: later stages are dilated, not downsampled.

    It has no drop path, and no readout.

    Raises:
        ValueError: the network does not support this stride.
    """
    try:
        dilated = _changed(backbone, output_stride=stride)
    except ValueError as error:
        raise InputError(f"{backbone.name} cannot have an output stride of {stride}: {error}") from error
    if dilated.patch_size != stride:
        raise InputError(f"{backbone.name} cannot have an output stride of {stride}, only {dilated.patch_size}")
    state = backbone.model.state_dict()
    dilated.model.load_state_dict({key: state[key] for key in dilated.model.state_dict()})
    return dilated


def untrained(backbone: Backbone, *, seed: int = 0, drop_path: float = 0.0) -> Backbone:
    """Return the same network with random weights, for a baseline; it has no readout.

    Example:
        >>> first = build_network("resnet18", args={"channels": (8, 8, 8, 8)}, seed=1)
        >>> untrained(first).name, untrained(first).fingerprint() == first.fingerprint()
        ('resnet18', False)
    """
    return build_again(backbone, {}, drop_path=drop_path, seed=seed)


def build_again(backbone: Backbone, changes: Mapping[str, Any], **options: Any) -> Backbone:
    """Build the same network with some arguments changed, and its normalisation; `options` are for `build_network`."""
    again = build_network(backbone.name, args={**backbone.args, **changes}, image_size=backbone.image_size, **options)
    if again.in_chans == backbone.in_chans:
        again.mean, again.std = backbone.mean, backbone.std
    again.set_numerics(backbone.numerics)
    return again


def _changed(backbone: Backbone, **changes: Any) -> Backbone:
    """Build the same network with some arguments changed, without weights."""
    changed = build_again(backbone, changes, initialise=False)
    changed.loaded, changed.licences, changed.pixels = backbone.loaded, backbone.licences, backbone.pixels
    return changed.to(next(backbone.parameters()))


class _SkipInPlace(TorchFunctionMode):
    """Skip in-place operations on meta tensors, which would take seconds without any effect."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        changes_values = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        target = args[0] if args else (kwargs or {}).get("tensor")  # torch.nn.init passes it as a keyword
        if changes_values and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **(kwargs or {}))


def _build_empty(name: str, args: Mapping[str, Any], image_size: int, drop_path: float) -> Backbone | None:
    """Build a backbone with uninitialised parameters; None if the network does not support it."""
    if is_import_path(name) and name not in BUILT_IN_NETWORKS:
        return None
    with torch.device("meta"), _SkipInPlace():
        model, arguments = _create(name, args, image_size, drop_path)
    computed: list[Any] = [module for module in model.modules() if module._non_persistent_buffers_set]
    if not all(hasattr(module, "init_non_persistent_buffers") for module in computed):
        return None
    model.to_empty(device="cpu")
    for module in computed:
        module.init_non_persistent_buffers()
    backbone = Backbone(model, name, arguments, image_size)
    for key, value in model.state_dict().items():  # buffers that weights may lack
        if key in backbone.unused_parameters or key.endswith("num_batches_tracked"):
            value.zero_()
    return backbone


def _create(name: str, args: Mapping[str, Any], image_size: int, drop_path: float) -> tuple[nn.Module, dict[str, Any]]:
    """Build the network; also return the arguments that build it again, without drop path."""
    if is_import_path(name):
        return _create_own(name, args, drop_path), dict(args)
    rate: dict[str, Any] = {"drop_path_rate": drop_path} if drop_path > 0 else {}
    # Networks accept one of the three, which can only be found by trying; failure is immediate.
    for size_args in ({"img_size": image_size, "dynamic_img_size": True}, {"img_size": image_size}, {}):
        try:
            arguments: dict[str, Any] = {**args, **size_args, "num_classes": 0}
            with limited_size():
                return timm.create_model(name, pretrained=False, **arguments, **rate), arguments
        except (TypeError, AssertionError, ValueError, RuntimeError) as error:
            unknown = re.search(r"unexpected keyword argument(?:\(s\): \[)?\W*(\w+)", str(error))
            if unknown and unknown[1] in size_args:
                continue
            if unknown and unknown[1] == "drop_path_rate":
                raise InputError(f"{name} has no drop path: use drop_path=0, got {drop_path}") from error
            if unknown:
                raise InputError(f"{name} has no argument {unknown[1]!r}: see timm's documentation") from error
            raise InputError(f"{name} cannot be built with {dict(args)} at {image_size} pixels: {error}") from error
    raise AssertionError("the last attempt sets no size argument")


_MOST_TENSORS, _MOST_NUMBERS, _MOST_IN_BUFFERS = 10_000, 2**34, 2**30
"""Limits of the parameters and buffers of a network, above those of any that has been published."""


@contextlib.contextmanager
def limited_size() -> Iterator[None]:
    """Stop building a network that would take hours or all memory: a few bytes in a file can describe one.

    Raises:
        InputError: the network has more parameters than any that has been published.
    """
    tensors = numbers = in_buffers = 0

    def count(module: nn.Module, name: str, value: Tensor | None) -> None:
        nonlocal tensors, numbers, in_buffers
        if value is None:
            return
        tensors += 1
        if isinstance(value, nn.Parameter):
            numbers += value.numel()
        else:
            in_buffers += value.numel()
        for found, limit, what in (
            (tensors, _MOST_TENSORS, "tensors"),
            (numbers, _MOST_NUMBERS, "parameters"),
            (in_buffers, _MOST_IN_BUFFERS, "numbers in buffers"),
        ):
            if found > limit:
                raise InputError(f"it would have {found} or more {what}, the limit is {limit}")

    hooks = register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _create_own(name: str, args: Mapping[str, Any], drop_path: float) -> nn.Module:
    factory = import_by_path(name, "backbone.name")
    if not callable(factory) or (inspect.isclass(factory) and not issubclass(factory, nn.Module)):
        raise InputError(f"{name} must be a subclass of torch.nn.Module, or a function that returns one")
    try:
        model = factory(**args)
    except TypeError as error:
        raise InputError(f"{name} cannot be called with {dict(args)}: {error}") from error
    if not (isinstance(model, nn.Module) and hasattr(model, "forward_features")):
        raise InputError(
            f"{name} must return a module whose forward_features(images) is a feature map (B, D, h, w), got "
            f"{type(model).__name__}"
        )
    if drop_path > 0 and not any(isinstance(part, DropPath) for part in model.modules()):
        raise InputError(f"{name} has no drop path: use drop_path=0, got {drop_path}")
    return model


def _initialise_embeddings(model: nn.Module) -> None:
    for key in ("cls_token", "pos_embed"):
        embedding = getattr(model, key, None)
        if isinstance(embedding, nn.Parameter):
            trunc_normal_(embedding, std=0.02)


def is_import_path(name: str) -> bool:
    """Whether a name is the import path of a custom network, such as my_package.my_network.

    Example:
        >>> is_import_path("my_package.my_network"), is_import_path("vit_small_patch16_224.dino")
        (True, False)
    """
    return "." in name and not timm.is_model(name.partition(".")[0])


BUILT_IN_NETWORKS = {
    f"{networks.__name__}.{network.__name__}"
    for network in (networks.resnet_with_stem, networks.vit_with_convolutional_stem, networks.Capi)
}
"""Import paths of the networks in `cribo.models.networks`."""


def check_network(name: str, file: object, *, trust: bool, given: str | None) -> None:
    """Check that the network that a file names may be built.

    Raises:
        Untrusted: it is custom code, and the user neither trusts the file nor has given the same name.
    """
    if not isinstance(name, str):
        raise InputError(f"{file} must name its network by a string, got {name!r}")
    if is_import_path(name) and name not in BUILT_IN_NETWORKS:
        check_import(name, file, "--backbone.architecture", trust=trust, given=() if given is None else (given,))


def nearest_names(name: str) -> str:
    """Return the timm names most similar to `name`, as the end of an error message.

    Example:
        >>> nearest_names("dinov2_vits14_reg"), nearest_names("dino_vitb8")
        (': did you mean vit_small_patch14_reg4_dinov2?', ': did you mean vit_base_patch8_224.dino?')
    """
    if own := _name_of_dino(name):
        return f": did you mean {own}?"
    near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
    return f": did you mean {', '.join(near)}?" if near else ": timm.list_models() lists them"


_SIZES = {"s": "small", "b": "base", "l": "large", "g": "giant", "h": "huge", "7b": "7b"}


def _name_of_dino(name: str) -> str | None:
    """Return timm's name of a network that DINO, DINOv2 or DINOv3 publish under another name in torch.hub."""
    found = re.fullmatch(r"dino(v2|v3|)[_-]vit_?([sblgh]|7b)_?(\d+)(plus)?([_-]reg)?\d?([_-]lc)?", name.lower())
    if found is None:
        return None
    version, size, patch, plus, registers = found.groups()[:5]
    timm_name = f"vit_{_SIZES[size]}{'_plus' if plus else ''}_patch{patch}{'_reg4' if registers else ''}"
    timm_name += f"_dino{version}" if version else "_224"
    return None if not timm.is_model(timm_name) else timm_name if version else f"{timm_name}.dino"


def _check_name(name: str) -> None:
    if is_import_path(name):
        return
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise InputError(f"unknown backbone {name!r}{nearest_names(architecture)}")
    if tag:
        raise InputError(f"{name!r} names pretrained weights: use name={architecture!r} and pretrained={name!r}")


def _check_args(name: str, args: Mapping[str, Any]) -> None:
    for key, value in args.items():
        if key in RESERVED_ARGS:
            raise InputError(f"the argument {key!r} of {name} is set by build_backbone: {RESERVED_ARGS[key]}")
        if key.endswith("drop_rate") and value:
            raise InputError(
                f"the argument {key!r} of {name} must be 0, got {value}: dropout draws from the global "
                "generator, so runs would not be reproducible; use drop_path"
            )
