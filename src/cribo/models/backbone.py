"""Dense features from timm's networks with patch tokens or a feature map, by one method, `encode`."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import ModelCard, ModelHubMixin
from jaxtyping import Float
from timm.layers.attention import Attention
from timm.layers.drop import DropPath
from timm.models import Beit, ConvNeXt, Eva, NaFlexVit, VisionTransformer, Xcit
from timm.models.beit import Attention as BeitAttention
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor, nn

from cribo.base.errors import InputError
from cribo.base.job import Job
from cribo.models import networks
from cribo.models.checkpointing import DropPathNoise, set_checkpointing
from cribo.models.config import CUDA_GRAPH_MODES, Checkpointing, CompileMode, NormalisedLayers
from cribo.models.linear import use_onednn
from cribo.models.masking import Mask, MaskedEmbedding
from cribo.models.numerics import Numerics, apply_numerics, norm_epsilons
from cribo.models.positions import RelativePositions, RelativeResizing

if TYPE_CHECKING:
    from cribo.models.licences import Licence
    from cribo.models.origin import LoadedWeights
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RGB = 3
"""Number of channels of the images of most networks."""

# Arguments that build_backbone sets itself, with what to use instead.
RESERVED_ARGS = {
    "img_size": "use image_size",
    "dynamic_img_size": "it is always on if the network has it",
    "num_classes": "a backbone has no classifier; set_readout adds a linear layer",
    "drop_path_rate": "use drop_path",
    "pretrained": "use the argument `pretrained` of build_backbone",
    "checkpoint_path": "use the argument `pretrained` of build_backbone",
    "pretrained_cfg": "use the argument `pretrained` of build_backbone",
    "pretrained_cfg_overlay": "use the argument `pretrained` of build_backbone",
    "features_only": "encode returns the features",
}


class Features(NamedTuple):
    """Features of a batch of images.

    Attributes:
        global_token: (B, D), one vector per image.
        tokens: (B, N, D * layers), in row-major order from the top left of the image; N = h * w.
        grid: (h, w), number of rows and columns of tokens.
    """

    global_token: Float[Tensor, "b d"]
    tokens: Float[Tensor, "b n c"]
    grid: tuple[int, int]


class Trunk(NamedTuple):
    """Output of the first blocks of a vision transformer, prefix tokens first, with its grid (h, w)."""

    tokens: Float[Tensor, "b t d"]
    grid: tuple[int, int]
    blocks: int


def normalise(
    images: Float[Tensor, "*b c h w"],
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Float[Tensor, "*b c h w"]:
    """Subtract the channels' mean and divide by their standard deviation; images in 0-1."""
    # A tensor that is created on a GPU waits for it.
    shift, scale = (torch.tensor(each, dtype=images.dtype).to(images.device, non_blocking=True) for each in (mean, std))
    return (images - shift[:, None, None]) / scale[:, None, None]


def repeated(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """Return a value for each channel of an image: those of RGB images, repeated cyclically.

    >>> repeated((1, 2, 3), 5)
    (1, 2, 3, 1, 2)
    """
    return tuple(values[channel % len(values)] for channel in range(in_chans))


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode, and restore its mode on exit."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


class KeyedDropPath(nn.Module):
    """Stochastic depth whose random numbers come from the caller, one per sample and site.

    Replaces timm's `DropPath`, which draws from the global generator, so that a sample's dropped branches do not
    depend on the batch, the device or the worker that processes it.
    """

    def __init__(self, rate: float, site: int, noise: DropPathNoise) -> None:
        super().__init__()
        self.rate = rate
        self.site = site
        self.noise = noise

    def forward(self, branch: Float[Tensor, "b *rest"]) -> Float[Tensor, "b *rest"]:
        """Drop the branch of samples whose number is below the rate, and scale it up for the others."""
        if self.noise.value is None:
            return branch
        kept = (self.noise.value[:, self.site] >= self.rate).to(branch.dtype) / (1.0 - self.rate)
        return branch * kept.view(-1, *(1,) * (branch.ndim - 1))

    def extra_repr(self) -> str:
        """Return rate and site, for the printed network."""
        return f"rate={self.rate:.3f}, site={self.site}"


class Backbone(nn.Module, ModelHubMixin):
    """Timm network as a dense feature extractor; use `build_backbone` to create one by name.

    Vision transformers return [CLS] and their patch tokens after the final norm. Without a [CLS] token, and for
    convolutional networks, the global token is the mean of the tokens; networks with attention pooling (SigLIP) or
    with their last norm after the pooling (MAE fine-tuned, ConvNeXt) use their own pooling. Parameters that `encode`
    never reads have `requires_grad=False`.

    Attributes:
        model: the timm network, with timm's own parameter names.
        name: timm's name of the architecture.
        arguments: the keyword arguments with which `timm.create_model(name, ...)` builds the same network.
        image_size: size in pixels for which the position embedding is stored.
        takes_any_size: whether images of other sizes can be encoded.
        in_chans: C, channels of an image; 3 unless the network was built with `args={"in_chans": C}`.
        embed_dim: D, channels of a token.
        patch_size: pixels per token along each side; the output stride of a convolutional network.
        readout: linear layer after the features (`set_readout`), or None.
        depth: number of blocks whose tokens can be requested (`layers` of `encode`); 1 for a feature map.
        num_drop_path_sites: number of residual branches that can be dropped.
        drop_path_rates: drop probability of each of these branches.
        mean: mean of each channel (of values in 0-1) that the weights expect.
        std: standard deviation of each channel that the weights expect.
        numerics: numerics that the weights expect, such as epsilon (`set_numerics`).
        checkpointing: activations that blocks save for the backward pass (`set_checkpointing`).
        loaded: origin of the weights; None for random ones.
        licences: licences of the weights from which the backbone was made; empty for random ones.
        pixels: channels and range with which the images of its training were read, by the names of their options
            (`cribo.data.config.PixelOptions`); None without any.
    """

    def __init__(self, model: nn.Module, name: str, arguments: Mapping[str, Any], image_size: int) -> None:
        super().__init__()
        self.model: Any = model  # timm's networks have no typed base
        self.name = name
        self.arguments = dict(arguments)
        self.image_size = image_size
        self.in_chans: int = self.arguments.get("in_chans", RGB)
        self.mean: tuple[float, ...] = repeated(IMAGENET_MEAN, self.in_chans)
        self.std: tuple[float, ...] = repeated(IMAGENET_STD, self.in_chans)
        self.numerics = Numerics()
        self._own_epsilons = norm_epsilons(model)
        self._positions: RelativePositions | None = None
        self.loaded: LoadedWeights | None = None
        self.licences: tuple[Licence, ...] = ()
        self.pixels: Mapping[str, Any] | None = None
        self._is_transformer = isinstance(model, VisionTransformer | Eva | Beit)
        is_sequence = isinstance(model, Xcit | NaFlexVit)
        self.takes_any_size = "img_size" not in arguments or is_sequence or _has_argument(model, "dynamic_img_size")
        self.depth = len(self.model.blocks) if self._is_transformer else 1
        if self._is_transformer or is_sequence:
            self.patch_size = _transformer_patch_size(model, name)
        elif isinstance(model, networks.Capi):
            self.patch_size = model.patch_size
        else:
            self.patch_size = _map_stride(
                model, name, self.in_chans, _PROBE_SIZE if self.takes_any_size else image_size
            )
            # Convolutions in channels-last layout are 1.5 times as fast on CPUs, and also faster on GPUs in 16 bits.
            model.to(memory_format=torch.channels_last)
        _check_divisible((image_size,), self.patch_size)
        self._masked: MaskedEmbedding | None = None
        self._noise = DropPathNoise()
        self.drop_path_rates = replace_drop_path(model, self._noise)
        use_onednn(model)
        self.checkpointing: Checkpointing = "none"
        self._replays = False
        self.embed_dim, self.unused_parameters = self._probe()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name in self.unused_parameters:
                parameter.requires_grad_(False)

    @property
    def fixed_size(self) -> int | None:
        """Side in pixels of the square images that the network requires; None if it takes any size."""
        return None if self.takes_any_size else self.image_size

    @property
    def num_drop_path_sites(self) -> int:
        """Number of residual branches that can be dropped: those with a rate above 0."""
        return len(self.drop_path_rates)

    @property
    def args(self) -> dict[str, Any]:
        """Value of `args` with which `build_backbone` builds the same network."""
        return {key: value for key, value in self.arguments.items() if key not in RESERVED_ARGS}

    def set_numerics(self, numerics: Numerics) -> None:
        """Set the numerics that the weights expect.

        Raises:
            ValueError: periods or coordinates for a network without DINOv3's rotary embedding, or of another length.
        """
        apply_numerics(self.model, numerics, before=self.numerics, own_epsilons=self._own_epsilons)
        if isinstance(self.model, Beit):
            self._set_relative_positions(numerics.relative_positions)
        self.numerics = numerics

    def _set_relative_positions(self, how: RelativeResizing) -> None:
        """Set the resizing of BEiT's biases; Hugging Face's resizes them in each call, for images of any size."""
        is_any_size = how == "bilinear" and self.model.pos_embed is None
        self._positions = RelativePositions(self.model) if is_any_size else None
        self.takes_any_size = is_any_size
        self.model.patch_embed.strict_img_size = not is_any_size
        for module in self.model.modules():
            if getattr(module, "relative_position_bias_table", None) is None:
                continue
            name = "_get_rel_pos_bias" if isinstance(module, BeitAttention) else "forward"
            vars(module).pop(name, None)
            if self._positions is not None:
                vars(module)[name] = partial(self._positions.bias, module)

    def set_readout(self, weight: Float[Tensor, "e d"], bias: Float[Tensor, " e"]) -> None:
        """Add a linear layer after the features, instead of timm's classifier: tokens become (B, N, E).

        Equivalent in plain timm: `model.get_classifier()(model.forward_features(images))`. The layer is not trained.

        Raises:
            ValueError: the network is not timm's or has another kind of classifier, or the layer expects another number
                of channels.
        """
        width = self.readout.in_features if self.readout is not None else self.embed_dim
        if weight.shape != (len(bias), width):
            raise InputError(f"the layer must have {width} input channels, got a weight of shape {tuple(weight.shape)}")
        like = next(self.parameters())
        if not hasattr(self.model, "reset_classifier"):
            raise InputError(f"{self.name} does not support a linear layer after its features: use a network of timm")
        self.model.reset_classifier(len(bias))
        layer = self.model.get_classifier()
        if not isinstance(layer, nn.Linear) or layer.in_features != width:
            self.model.reset_classifier(0)
            raise InputError(
                f"{self.name} does not support a linear layer after its features: its classifier has other layers or "
                "several heads: use another network, such as a vision transformer, ResNet, ConvNeXt or EfficientNet"
            )
        layer.to(like).requires_grad_(False)
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        self.arguments["num_classes"] = self.embed_dim = len(bias)

    def remove_readout(self) -> None:
        """Remove the layer after the features, so that tokens are (B, N, D) again; no-op without one."""
        if self.readout is not None:
            self.embed_dim = self.readout.in_features
            self.model.reset_classifier(0)
            self.arguments["num_classes"] = 0

    @property
    def readout(self) -> nn.Linear | None:
        """Linear layer after the features (`set_readout`), or None."""
        return self.model.get_classifier() if self.arguments.get("num_classes") else None

    def set_checkpointing(self, mode: Checkpointing) -> None:
        """Set activation checkpointing: save memory by recomputing blocks in the backward pass.

        Results and gradients stay the same, including drop path. Passes without gradients are not affected.

        Args:
            mode: `none`; `selective` saves the outputs of matrix products and attention and recomputes the rest, which
                is cheap; `blocks` saves only each block's input and recomputes the whole block, a third more work.

        Raises:
            ValueError: the network has no transformer blocks.
        """
        if mode != "none" and not self._is_transformer:
            raise InputError(
                f"{self.name} has no transformer blocks to checkpoint, got {mode!r}: use 'none', and smaller "
                "micro-batches to save memory"
            )
        if self._is_transformer:
            set_checkpointing(self.model.blocks, mode, self._noise)
        self.checkpointing = mode

    @property
    def has_class_token(self) -> bool:
        """Whether the global token is a [CLS] token of transformer blocks."""
        model = self.model
        if not self._is_transformer or model.cls_token is None:
            return False
        return getattr(model, "attn_pool", None) is None and not isinstance(model.norm, nn.Identity)

    def accept_masks(self) -> None:
        """Prepare the network for the argument `mask`; call it before `compile`.

        Raises:
            ValueError: the network has no patch embedding.
        """
        if not self._is_transformer:
            raise InputError(
                f"{self.name} has no patch embedding and cannot mask patches: use a vision transformer, such as "
                "vit_small_patch16_224"
            )
        self._masked = self.model.patch_embed.forward = MaskedEmbedding(self.model.patch_embed)

    def _set_mask(self, mask: Mask | None) -> None:
        if self._masked is not None:
            self._masked.mask = mask
        elif mask is not None:
            raise InputError("mask requires a backbone that accepts masks: call accept_masks first")

    def fingerprint(self) -> str:
        """Return a hash of the features: equal for equal network, weights and normalisation, on any device.

        SHA-256, in hexadecimal, of timm's name and arguments, image size, normalisation, numerics and every tensor
        that `encode` reads (name, dtype, shape, bytes). Drop path and the origin of the weights are ignored.

        Example:
            >>> from cribo.models import build_backbone
            >>> small = {"channels": (8, 8, 8, 8)}
            >>> first, other = (build_backbone("resnet18", args=small, seed=seed) for seed in (0, 1))
            >>> first.fingerprint() == build_backbone("resnet18", args=small, drop_path=0.1).fingerprint()
            True
            >>> first.fingerprint() == other.fingerprint()
            False
        """
        about = [self.name, self.arguments, self.image_size, self.mean, self.std, asdict(self.numerics)]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
        for key, value in sorted(self.model.state_dict().items()):
            if key not in self.unused_parameters:
                digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def encode(
        self,
        images: Float[Tensor, "b c h w"],
        layers: int = 1,
        *,
        normalised_layers: NormalisedLayers = "all",
        drop_path_noise: Float[Tensor, "b sites"] | None = None,
        mask: Mask | None = None,
    ) -> Features:
        """Encode normalised images as a global token and a grid of tokens each.

        Args:
            images: (B, C, H, W) of any float type, normalised with `mean` and `std`; H and W multiples of `patch_size`.
            layers: number of last blocks whose tokens are concatenated along the channels, the last block last. The
                global token is always the last block's.
            normalised_layers: apply the final norm to `all` of these layers, or only to the `last`.
            drop_path_noise: (B, num_drop_path_sites) uniform numbers in [0, 1). A residual branch is dropped for a
                sample if its number is below the site's rate; kept branches are divided by the probability of being
                kept. If None, nothing is dropped, even in training mode.
            mask: patches to replace by a mask token; requires `accept_masks`.

        Raises:
            ValueError: the image size is not supported, `layers` is out of range, or the network accepts no masks.

        Example:
            >>> from cribo.models import build_backbone
            >>> backbone = build_backbone("vit_small_patch16_224", image_size=64)
            >>> features = backbone.encode(torch.zeros(2, 3, 64, 96))
            >>> features.tokens.shape, features.grid
            (torch.Size([2, 24, 384]), (4, 6))
        """
        self._check(images, layers, drop_path_noise)
        images = images.to(next(self.parameters()).dtype)
        self._noise.value = drop_path_noise
        self._set_mask(mask)
        try:
            if self._is_transformer:
                features = self._encode_tokens(images, layers, normalised_layers)
            elif isinstance(self.model, Xcit | NaFlexVit):
                features = self._encode_sequence(images)
            else:
                features = self._encode_map(images)
            return self._read_out(features)
        finally:
            self._noise.value = None
            self._set_mask(None)

    def check_layers(self, layers: int) -> None:
        """Check that `encode` can return the tokens of this many blocks.

        Raises:
            ValueError: it cannot.
        """
        if not 1 <= layers <= self.depth:
            if not self._is_transformer:
                raise InputError(
                    f"{self.name} returns one feature map, so layers must be 1, got {layers}: only the blocks "
                    "of a vision transformer share one grid"
                )
            raise InputError(f"layers must be 1 to {self.depth}, the blocks of {self.name}, got {layers}")
        if layers > 1 and self.readout is not None:
            raise InputError(
                f"layers must be 1, got {layers}: {self.name} has a linear layer after its features, which reads the "
                "last block only"
            )

    def encode_blank(self) -> Features:
        """Return the features of one small black image, with gradients, in evaluation mode."""
        size = self.image_size
        if self.takes_any_size:
            size = self.patch_size * (1 if self._is_transformer else 2)
        # In evaluation mode, so that batch norms neither use nor record the statistics of one image.
        with evaluation_mode(self.model), torch.enable_grad():
            return self.encode(torch.zeros(1, self.in_chans, size, size, device=next(self.parameters()).device))

    def forward(
        self,
        images: Float[Tensor, "b c h w"],
        layers: int = 1,
        *,
        drop_path_noise: Float[Tensor, "b sites"] | None = None,
        mask: Mask | None = None,
    ) -> Features:
        """Same as `encode`, for wrappers that call modules (DistributedDataParallel, compile)."""
        return self.encode(images, layers, drop_path_noise=drop_path_noise, mask=mask)

    def compile(self, mode: CompileMode = "default", **kwargs: Any) -> None:
        """Compile calls of the backbone, in place; `encode` is not compiled, for images of any size.

        Names in state dicts do not change, and copies are not compiled. A second image size recompiles the backbone,
        then for any size.

        Args:
            mode: mode of `torch.compile`. `reduce-overhead` and `max-autotune` replay CUDA graphs: features computed
                without gradients are copied from the graph's memory, which the next replay overwrites; those with
                gradients are read by their backward pass before that.
            **kwargs: further arguments of `torch.compile`.
        """
        self._replays = mode in CUDA_GRAPH_MODES
        super().compile(mode=mode, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Features:
        """Call `forward`, compiled if `compile` was called."""
        features: Features = super().__call__(*args, **kwargs)
        if self._replays and not torch.is_grad_enabled():
            return Features(features.global_token.clone(), features.tokens.clone(), features.grid)
        return features

    # ------------------------------------------------------------------------------------------ Hugging Face hub

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        **model_kwargs: Any,
    ) -> "Backbone":
        """Load a backbone from the Hugging Face hub or a folder, in evaluation mode.

        Args:
            pretrained_model_name_or_path: owner/name, a name such as hf://owner/name, or any source of `load_backbone`.
            force_download: download again.
            token: token of the hub; by default that of `hf auth login` or HF_TOKEN.
            cache_dir: cache to use instead of the hub's own.
            local_files_only: use the cache only.
            revision: branch, tag or commit.
            **model_kwargs: further arguments of `load_backbone`.

        Raises:
            ValueError: as for `load_backbone`.
        """
        return _hub_methods().load(
            pretrained_model_name_or_path,
            model_kwargs,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            force=force_download,
            local=local_files_only,
        )

    def save_pretrained(self, save_directory: str | Path, *, overwrite: bool = False, **options: Any) -> str | None:
        """Save weights, configuration and model card in timm's layout, as `cribo export --to timm` without its check.

        Args:
            save_directory: folder to write, as a whole.
            overwrite: replace an export in this folder.
            **options: as in `huggingface_hub.ModelHubMixin`, such as `push_to_hub=True` and `repo_id`.

        Raises:
            FolderError: the folder contains files, and `overwrite` is not set or they are no export.
            InputError: the network is not timm's; or, with `push_to_hub=True`, `repo_id` is missing or cannot be
                written.
        """
        folder = Path(save_directory)
        if options.pop("push_to_hub", False):
            repo = options.pop("repo_id", None)
            if repo is None:
                raise InputError("push_to_hub=True requires repo_id, owner/name; nothing was written")
            checked = {name: options.get(name) for name in ("private", "token")}
            _hub_methods().require_publishable(repo, overwrite=overwrite, **checked)
            self.save_pretrained(folder, overwrite=overwrite)
            return self.push_to_hub(repo, overwrite=overwrite, **options)
        advice = "choose another folder, or replace it with overwrite=True"
        write = super().save_pretrained
        Job(folder, "export", overwrite=overwrite, advice=advice).create(
            lambda part: write(part, config=options.get("config"), model_card_kwargs=options.get("model_card_kwargs"))
        )
        return None

    def push_to_hub(self, repo_id: str, *, overwrite: bool = False, **options: Any) -> str:
        """Upload the files of `save_pretrained` to the Hugging Face hub in one commit; return its address.

        Args:
            repo_id: owner/name; created if it does not exist.
            overwrite: replace the weights in the repository, and the files that describe them, in a new commit; earlier
                commits are kept.
            **options: as in `huggingface_hub.ModelHubMixin`, such as `private=True` or `token`.

        Raises:
            InputError: the token is missing or may not write, or the repository contains files and `overwrite` is not
                set.
            ConnectionError: the hub cannot be reached; nothing was committed.
        """
        return _hub_methods().push(self, repo_id, super().push_to_hub, overwrite=overwrite, options=options)

    def generate_model_card(self, *args: Any, repo_id: str | None = None, **kwargs: Any) -> ModelCard:
        """Return the model card; `repo_id` is the repository from which its code loads the backbone."""
        return _hub_methods().card(self, repo_id)

    def _save_pretrained(self, save_directory: Path) -> None:
        _hub_methods().write_timm_layout(self, save_directory)

    # ---------------------------------------------------------------------------------------------------- encoding

    def _encode_tokens(self, images: Tensor, layers: int, normalised_layers: NormalisedLayers) -> Features:
        model = self.model
        grid = (images.shape[2] // self.patch_size, images.shape[3] // self.patch_size)
        if self._positions is not None:
            self._positions.grid = grid
        has_prefix = model.num_prefix_tokens > 0
        blocks = model.forward_intermediates(
            images,
            indices=layers,
            return_prefix_tokens=has_prefix,
            norm=normalised_layers == "all",
            output_fmt="NLC",
            intermediates_only=True,
        )
        blocks = [block if has_prefix else (block, None) for block in blocks]
        if normalised_layers == "last":
            patches, prefix = blocks[-1]
            blocks[-1] = model.norm(patches), None if prefix is None else model.norm(prefix)
        return self._pool(blocks, grid, normalised_layers)

    def _pool(
        self,
        blocks: Sequence[tuple[Tensor, Tensor | None]],
        grid: tuple[int, int],
        normalised_layers: NormalisedLayers = "all",
    ) -> Features:
        """Return features from the blocks' patch and prefix tokens, after the model's norm."""
        model = self.model
        # Networks with average pooling have their final norm after the pooling, in `fc_norm`.
        late_norm = model.fc_norm if isinstance(model.norm, nn.Identity) else nn.Identity()
        patches, prefix = blocks[-1]
        earlier_norm = late_norm if normalised_layers == "all" else nn.Identity()
        tokens = [*(earlier_norm(earlier) for earlier, _ in blocks[:-1]), late_norm(patches)]
        if getattr(model, "attn_pool", None) is not None:
            global_token = model.attn_pool(tokens[-1])
        elif model.cls_token is None or prefix is None or not isinstance(late_norm, nn.Identity):
            global_token = late_norm(patches.mean(dim=1))
        else:
            global_token = prefix[:, 0]
        return Features(global_token, tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=-1), grid)

    def encode_trunk(self, images: Float[Tensor, "b c h w"], blocks: int, *, mask: Mask | None = None) -> "Trunk":
        """Run the first blocks of a vision transformer without drop path, for `encode_rest`.

        Raises:
            ValueError: the network is not timm's VisionTransformer, `blocks` is out of range, the image size is not
                supported, or the network accepts no masks.
        """
        model = self.model
        if not isinstance(model, VisionTransformer):
            raise InputError(
                f"{self.name} cannot be split after a block: use a vision transformer (timm's VisionTransformer)"
            )
        if not 0 <= blocks <= self.depth:
            raise InputError(f"blocks must be 0 to {self.depth}, the blocks of {self.name}, got {blocks}")
        self._check(images, 1, None)
        self._set_mask(mask)
        try:
            tokens = model.patch_embed(images.to(next(self.parameters()).dtype))
        finally:
            self._set_mask(None)
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(tokens)))
        grid = (images.shape[2] // self.patch_size, images.shape[3] // self.patch_size)
        return self.continue_trunk(Trunk(tokens, grid, 0), blocks)

    def continue_trunk(self, trunk: "Trunk", blocks: int) -> "Trunk":
        """Run the following blocks without drop path, up to a total of `blocks`."""
        return Trunk(self.model.blocks[trunk.blocks : blocks](trunk.tokens), trunk.grid, blocks)

    @property
    def has_attention(self) -> bool:
        """Whether `attention_inputs` is available for the last block, as in timm's VisionTransformer."""
        if not isinstance(self.model, VisionTransformer):
            return False
        return hasattr(getattr(self.model.blocks[-1], "attn", None), "qkv")

    @property
    def key_heads(self) -> int | None:
        """Number of heads of `head_keys` in the last block; None if the network has no such keys."""
        attention = self.model.blocks[-1].attn if self.has_attention else None
        return attention.num_heads if isinstance(attention, Attention) else None

    def attention_inputs(
        self, trunk: "Trunk"
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t d"], Float[Tensor, "b t d"]]:
        """Return queries, keys and values of the block after a trunk; prefix tokens first, heads side by side.

        They are computed without hooks, which do not run in compiled networks. They precede the norm of queries and
        keys that some networks have.
        """
        block: Any = self.model.blocks[trunk.blocks]
        attention = block.attn
        tokens = trunk.tokens if isinstance(block, ResPostBlock) else block.norm1(trunk.tokens)
        return attention.qkv(tokens).chunk(3, dim=-1)

    def head_keys(self, trunk: "Trunk") -> Float[Tensor, "b heads t d"]:
        """Return the keys of each head of the block after a trunk, as they enter attention; prefix tokens first."""
        attention: Any = self.model.blocks[trunk.blocks].attn
        _, keys, _ = self.attention_inputs(trunk)
        return attention.k_norm(keys.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2))

    def encode_rest(self, trunk: "Trunk", *, drop_path_noise: Float[Tensor, "b sites"] | None = None) -> Features:
        """Return the features of `encode` from the output of the first blocks."""
        model = self.model
        self._noise.value = drop_path_noise
        try:
            tokens = model.norm(model.blocks[trunk.blocks :](trunk.tokens))
        finally:
            self._noise.value = None
        prefix = model.num_prefix_tokens
        features = self._pool([(tokens[:, prefix:], tokens[:, :prefix] if prefix else None)], trunk.grid)
        return self._read_out(features)

    def _read_out(self, features: Features) -> Features:
        if self.readout is None:
            return features
        return Features(self.readout(features.global_token), self.readout(features.tokens), features.grid)

    def _encode_sequence(self, images: Tensor) -> Features:
        """Encode with NaFlexViT, or with XCiT: its [CLS] joins the patches only in the last blocks."""
        prefix = self.model.num_prefix_tokens if isinstance(self.model, NaFlexVit) else 1
        sequence: Any = self.model.forward_features(images)
        tokens = sequence[:, prefix:]
        grid = (images.shape[2] // self.patch_size, images.shape[3] // self.patch_size)
        has_class_token = isinstance(self.model, Xcit) or self.model.embeds.cls_token is not None
        return Features(sequence[:, 0] if has_class_token else tokens.mean(dim=1), tokens, grid)

    def _encode_map(self, images: Tensor) -> Features:
        feature_map = self.model.forward_features(images.contiguous(memory_format=torch.channels_last))
        if getattr(self.model, "output_fmt", "NCHW") == "NHWC":
            feature_map = feature_map.permute(0, 3, 1, 2)
        global_token = feature_map.mean(dim=(2, 3))
        # ConvNeXt applies its last norm in the head, to the mean; here it is also applied to each token.
        head: Any = getattr(self.model, "head", None)
        if isinstance(self.model, ConvNeXt) and hasattr(head, "norm"):
            norm = head.norm
            feature_map, global_token = norm(feature_map), norm(global_token[:, :, None, None]).flatten(1)
        grid = (feature_map.shape[2], feature_map.shape[3])
        return Features(global_token, feature_map.flatten(2).transpose(1, 2), grid)

    def _check(self, images: Tensor, layers: int, drop_path_noise: Tensor | None) -> None:
        if images.ndim != 4 or images.shape[1] != self.in_chans:
            raise InputError(f"images must be (B, {self.in_chans}, H, W), got {tuple(images.shape)}")
        height, width = images.shape[2], images.shape[3]
        _check_divisible((height, width), self.patch_size)
        if not self.takes_any_size and (height, width) != (self.image_size, self.image_size):
            raise InputError(
                f"{self.name} was built for {self.image_size}x{self.image_size} images and accepts no other size, "
                f"got {height}x{width}: build it with that image_size, or choose a vision transformer or a "
                "convolutional network"
            )
        self.check_layers(layers)
        expected = (images.shape[0], self.num_drop_path_sites)
        if drop_path_noise is not None and tuple(drop_path_noise.shape) != expected:
            raise InputError(
                f"drop_path_noise must be (B, num_drop_path_sites) = {expected}, got {tuple(drop_path_noise.shape)}"
            )
        if drop_path_noise is not None and getattr(self.model, "grad_checkpointing", False):
            # When a block is recomputed in the backward pass, the noise is no longer available.
            raise InputError(
                "drop path noise cannot be combined with timm's gradient checkpointing: use set_checkpointing"
            )

    def _probe(self) -> tuple[int, frozenset[str]]:
        """Return D, and the parameters that do not affect the features."""
        features = self.encode_blank()
        used = {id(leaf) for leaf in _leaves(features.global_token) | _leaves(features.tokens)}
        unused = (name for name, parameter in self.model.named_parameters() if id(parameter) not in used)
        return features.tokens.shape[-1], frozenset(unused)


def _hub_methods() -> Any:
    """Return the module with the methods for the hub, which builds on this one: it cannot be imported before."""
    return import_module("cribo.models.hub.methods")


def _has_argument(model: nn.Module, argument: str) -> bool:
    """Whether a network declares an argument; Swin, at least until timm 1.0.26, accepts and ignores any."""
    return any(argument in inspect.signature(kind.__init__).parameters for kind in type(model).__mro__)


def replace_drop_path(model: nn.Module, noise: DropPathNoise) -> tuple[float, ...]:
    """Replace each of timm's drop paths by a `KeyedDropPath`, and return their rates by site."""
    rates: list[float] = []
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, DropPath):
                rate = float(child.drop_prob or 0.0)
                setattr(parent, child_name, KeyedDropPath(rate, len(rates), noise))
                rates.append(rate)
    return tuple(rates)


def drop_feed_forward_only(network: Any) -> None:
    """Restrict the drop path of a network of timm's blocks to feed-forward branches, in place."""
    rates = list(network.drop_path_rates)
    for block in network.modules():
        if isinstance(path := getattr(block, "drop_path1", None), KeyedDropPath):
            path.rate = rates[path.site] = 0.0
    network.drop_path_rates = tuple(rates)


def _transformer_patch_size(model: Any, name: str) -> int:
    embed: Any = model.embeds if isinstance(model, NaFlexVit) else model.patch_embed
    ratio = embed.feat_ratio(as_scalar=False) if hasattr(embed, "feat_ratio") else embed.patch_size
    ratio = (ratio, ratio) if isinstance(ratio, int) else ratio
    if ratio[0] != ratio[1]:
        raise InputError(f"the patches of {name} must be square, got {ratio[0]}x{ratio[1]}")
    return int(ratio[0])


# A multiple of every network's output stride.
_PROBE_SIZE = 128
_SUPPORTED = (
    ": use a vision transformer (timm's VisionTransformer and Eva families) or a network whose "
    "forward_features returns a feature map (ResNet, ConvNeXt, Swin, ...)"
)


def _map_stride(model: Any, name: str, in_chans: int, size: int) -> int:
    """Measure the pixels per position of the feature map: timm's own values ignore removed stages."""
    try:
        with evaluation_mode(model), torch.no_grad():
            output = model.forward_features(torch.zeros(1, in_chans, size, size))
    except AssertionError as error:  # timm checks sizes by assertions, often without a message
        reason = f" ({error})" if str(error) else ""
        own = getattr(model, "pretrained_cfg", None)  # only of timm's networks
        use = f"its own size, {own['input_size'][-1]}, or a multiple of it" if own else "a size that it accepts"
        raise InputError(f"{name} does not encode images of {size}x{size} pixels{reason}: use {use}") from error
    if not isinstance(output, Tensor) or output.ndim != 4:
        kind = type(output).__name__
        if isinstance(output, Tensor):
            kind = f"a {output.ndim}-dimensional tensor"
            kind += ", tokens whose places in the image it does not give," if output.ndim == 3 else ""
        raise InputError(f"{name} returns {kind} instead of a feature map{_SUPPORTED}")
    is_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    height, width = output.shape[1:3] if is_last else output.shape[2:4]
    if height != width or size % height:
        raise InputError(f"{name} returns a {height}x{width} map of a {size}-pixel image, no regular grid{_SUPPORTED}")
    return size // height


def _check_divisible(sizes: Sequence[int], patch_size: int) -> None:
    for size in sizes:
        if size % patch_size or size < 1:
            below, above = size // patch_size * patch_size, (size // patch_size + 1) * patch_size
            use = f"{below} or {above}" if below else f"{above}"
            raise InputError(f"image size {size} is not divisible by the patch size {patch_size}: use {use}")


def _leaves(output: Tensor) -> set[Tensor]:
    """Return the parameters on which `output` depends, from the graph, without a backward pass."""
    leaves: set[Tensor] = set()
    pending: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        pending.extend(source for source, _ in node.next_functions)
    return leaves
