"""Linear segmentation: one linear layer on frozen patch tokens (paper, section 4.2), for several learning rates."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cribo.arguments import ConfigError
from cribo.data.randomness import keyed_generator
from cribo.evaluation.protocol import Outcome
from cribo.evaluation.runner import Run
from cribo.evaluation.segmentation.inference import Inference
from cribo.evaluation.segmentation.module import SegmentationModule, follow_rules
from cribo.evaluation.segmentation.outcome import outcome, rows_of, training_crops, whole_images
from cribo.evaluation.segmentation.protocol import Linear
from cribo.evaluation.segmentation.rules import PAPER, Rules
from cribo.evaluation.training import fit
from cribo.models import Backbone
from cribo.retrieval.encoders import open_backbone
from cribo.retrieval.source import MEAN_COLOUR

_HEAD = 0x6C696E65  # keeps its draws apart from others of the same seed
_STD = 0.01


class LinearSegmentation(SegmentationModule):
    """Linear heads on the tokens of a frozen backbone, one for each learning rate, trained in one pass.

    A head is MMSegmentation's `FCNHead` without convolutions: one linear layer, its weights drawn with a standard
    deviation of 0.01, the same for each rate, its bias 0. Heads share features and crops but no parameters, and Adam is
    element-wise: each is trained as it would be alone. The backbone stays in evaluation mode, but for drop path if it
    has any, gets no gradient, and is not part of checkpoints.

    Args:
        backbone: gives the tokens.
        classes: C.
        layers: number of its last blocks whose tokens are concatenated.
        learning_rates: of each head, all different.
        steps: of the whole training.
        inference: how images are scored, whole or in windows.
        rules: of the variant.
        seed: of the weights.

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
        self, images: Float[Tensor, "b 3 h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "heads b c rows columns"]:
        """The logits of each class on the grid of patches, by each head."""
        with torch.no_grad():
            features = self.backbone.encode(
                images, self.layers, normalised_layers=self.rules.normalised_layers, drop_path_noise=drop_path_noise
            )
        return torch.stack([head(features.tokens).mT.unflatten(2, features.grid) for head in self.heads])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The heads, each with its learning rate."""
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
        """Leave out the backbone, which does not change."""
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if not name.startswith("backbone.")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the backbone of this process."""
        super().on_load_checkpoint(checkpoint)
        own = {name: value for name, value in self.state_dict().items() if name.startswith("backbone.")}
        checkpoint["state_dict"] = {**own, **checkpoint["state_dict"]}


def open_frozen(settings: Linear, run: Run) -> Backbone:
    """Return the backbone that the heads are trained on, with the normalisation and the drop path of the variant.

    Raises:
        ConfigError, ValueError: it has no drop path, and a rate above 0 is set.
    """
    backbone = run.backbone
    if settings.drop_path > 0:
        if run.source.source == MEAN_COLOUR:
            raise ConfigError(f"{MEAN_COLOUR} has no drop path: give --drop_path 0, got {settings.drop_path:g}")
        backbone = open_backbone(run.source, drop_path=settings.drop_path)
    follow_rules(settings.rules, backbone)
    return backbone


def train_heads(settings: Linear, run: Run) -> Outcome:
    """Train the heads of an evaluation on the prepared backbone, and score them."""
    backbone: Backbone = run.prepared
    module = LinearSegmentation(
        backbone,
        classes=len(run.data.train.classes),
        layers=run.source.layers,
        learning_rates=settings.learning_rates,
        steps=settings.iterations,
        inference=settings.windows,
        rules=settings.rules,
        seed=settings.seed,
    )
    trainer = fit(
        module,
        train=training_crops(settings, run, backbone.num_drop_path_sites),
        validation=whole_images(settings, run),
        batch_size=settings.batch_size,
        steps=settings.iterations,
        seed=settings.seed,
        folder=run.folder,
        label="linear heads",
        runtime=run.runtime,
        console=run.console,
    )
    rows, best = rows_of(dict(zip(settings.learning_rates, module.confusions, strict=True)), run)
    device = trainer.strategy.root_device
    return outcome(settings, rows, module.to(device), best, run, device=device)


def linear_head(dim: int, classes: int, seed: int) -> nn.Linear:
    """Return a linear layer with MMSegmentation's initial weights, which depend on the seed alone."""
    head = nn.Linear(dim, classes)
    with torch.no_grad():
        head.weight.normal_(std=_STD, generator=keyed_generator(_HEAD, seed))
        head.bias.zero_()
    return head
