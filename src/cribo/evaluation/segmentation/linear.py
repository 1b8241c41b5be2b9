"""Linear segmentation: a linear layer on frozen patch tokens (paper, section 4.2), for several learning rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from cribo.base.errors import ConfigError
from cribo.data.labelled.crops import WholeImages
from cribo.data.randomness import keyed_generator
from cribo.evaluation.protocol import Outcome
from cribo.evaluation.run import Run
from cribo.evaluation.segmentation.config import LinearSettings
from cribo.evaluation.segmentation.inference import Inference
from cribo.evaluation.segmentation.rules import PAPER, Rules
from cribo.evaluation.segmentation.training import (
    SegmentationModule,
    SegmentationTraining,
    follow_rules,
    outcome,
    preparation,
    rows_of,
    train,
)
from cribo.features.config import MEAN_COLOUR
from cribo.features.encoder import open_backbone
from cribo.models import Backbone

_HEAD = 0x6C696E65  # key of these draws, distinct from other uses of the seed
_STD = 0.01


@dataclass(frozen=True, kw_only=True)
class Linear(LinearSettings, SegmentationTraining):
    """Linear segmentation: a linear head on frozen features."""

    def prepare(self, run: Run) -> Self:
        """Set all settings that are None, and open the backbone with the drop path of the variant."""
        settings = super().prepare(run)
        run.prepared = open_frozen(settings, run)
        return settings

    def used(self, run: Run) -> dict[str, Any]:
        """Return the settings, with the number of layers that provide tokens."""
        return {**super().used(run), "layers": run.source.layers}

    def measure(self, run: Run) -> Outcome:
        """Train and score all heads on the prepared backbone."""
        backbone: Backbone = run.prepared
        module = LinearSegmentation(
            backbone,
            classes=len(run.data.train.classes),
            layers=run.source.layers,
            learning_rates=self.learning_rates,
            steps=self.iterations,
            inference=self.windows,
            rules=self.rules,
            seed=self.seed,
        )
        device = train(module, self, run, sites=backbone.num_drop_path_sites, folder=run.folder, label="linear heads")
        rows, best = rows_of(dict(zip(self.learning_rates, module.confusions, strict=True)), run)
        module.eval().to(device)
        val, images = run.data.val, WholeImages(run.data.val, preparation(self, run))

        def segment(index: int) -> UInt8[Tensor, "h w"]:
            height, width = val.labels(index).shape
            return module.segment(images[index].pixels.to(device), (height, width))[best].cpu()

        return outcome(rows, segment, run, device=device)

    def places(self, folder: Path) -> dict[str, Any]:
        """Return the path of the training curves."""
        return {"curves": folder / "tensorboard"}


class LinearSegmentation(SegmentationModule):
    """Linear heads on the tokens of a frozen backbone, one for each learning rate, trained in one pass.

    A head is MMSegmentation's `FCNHead` without convolutions: one linear layer, whose weights are drawn with a standard
    deviation of 0.01, equal for all rates, and whose bias is 0. Heads share features and crops but no parameters, and
    Adam is element-wise, so that each head trains as if alone. The backbone stays in evaluation mode (except for drop
    path), has no gradients, and is not saved in checkpoints.

    Args:
        backbone: backbone of the tokens, frozen in place.
        classes: C, number of classes.
        layers: number of last blocks whose tokens are concatenated.
        learning_rates: learning rate of each head, all different.
        steps: total number of training steps.
        inference: inference mode, whole images or windows.
        rules: rules of the variant.
        seed: seed of the initial weights.

    Example:
        >>> from cribo.models import build_backbone
        >>> backbone = build_backbone("resnet10t", image_size=64)
        >>> module = LinearSegmentation(backbone, classes=5, learning_rates=(1e-3, 1e-4), steps=10)
        >>> module.logits(torch.zeros(2, 3, 64, 96)).shape
        torch.Size([2, 2, 5, 2, 3])
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: int,
        layers: int = 1,
        learning_rates: Sequence[float],
        steps: int,
        inference: Inference | None = None,
        rules: Rules = PAPER,
        seed: int = 0,
    ) -> None:
        super().__init__(
            backbone.requires_grad_(False),
            classes=classes,
            heads=[f"{rate:g}" for rate in learning_rates],
            steps=steps,
            inference=inference or Inference(),
            rules=rules,
        )
        self.layers = layers
        self.learning_rates = tuple(learning_rates)
        self.heads = nn.ModuleList(linear_head(backbone.embed_dim * layers, classes, seed) for _ in learning_rates)
        self.train(self.training)

    def logits(
        self, images: Float[Tensor, "b chans h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "heads b c rows columns"]:
        """Return the logits of each class on the grid of patches, for each head."""
        with torch.no_grad():
            features = self.backbone.encode(
                images, self.layers, normalised_layers=self.rules.normalised_layers, drop_path_noise=drop_path_noise
            )
        return torch.stack([head(features.tokens).mT.unflatten(2, features.grid) for head in self.heads])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return one parameter group per head, with its learning rate."""
        return [
            {"params": list(head.parameters()), "lr": rate}
            for head, rate in zip(self.heads, self.learning_rates, strict=True)
        ]

    def train(self, mode: bool = True) -> "LinearSegmentation":
        """Set the mode of the heads; the backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the frozen backbone from the checkpoint."""
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if not name.startswith("backbone.")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the weights of the current backbone to the loaded state."""
        super().on_load_checkpoint(checkpoint)
        own = {name: value for name, value in self.state_dict().items() if name.startswith("backbone.")}
        checkpoint["state_dict"] = {**own, **checkpoint["state_dict"]}


def open_frozen(settings: LinearSettings, run: Run) -> Backbone:
    """Return the backbone with the normalisation and drop path of the variant.

    Raises:
        ConfigError, ValueError: the backbone has no drop path, and a rate above 0 is set.
    """
    backbone = run.backbone
    if settings.drop_path > 0:
        if run.source.source == MEAN_COLOUR:
            raise ConfigError(f"{MEAN_COLOUR} has no drop path: use --drop_path 0, got {settings.drop_path:g}")
        backbone = open_backbone(run.source, drop_path=settings.drop_path, in_chans=run.backbone.in_chans)
    follow_rules(settings.rules, backbone)
    return backbone


def linear_head(dim: int, classes: int, seed: int) -> nn.Linear:
    """Return a linear layer with MMSegmentation's initialisation, which depends on the seed only."""
    head = nn.Linear(dim, classes)
    with torch.no_grad():
        head.weight.normal_(std=_STD, generator=keyed_generator(_HEAD, seed))
        head.bias.zero_()
    return head
