"""Segmenter: a backbone and a mask transformer, trained end to end."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from cribo.evaluation.segmentation.inference import Inference
from cribo.evaluation.segmentation.mask_transformer import MaskTransformer
from cribo.evaluation.segmentation.module import SegmentationModule
from cribo.evaluation.segmentation.rules import PAPER, Rules
from cribo.models import Backbone


class Segmenter(nn.Module):
    """Segmentation network: a backbone and a mask transformer on the tokens of its last block.

    Args:
        backbone: backbone of the tokens.
        decoder: mask transformer for tokens of the backbone's width.

    Example:
        >>> import torch
        >>> from cribo.models import build_backbone
        >>> backbone = build_backbone("resnet18", args={"channels": (8, 8, 8, 16)})
        >>> segmenter = Segmenter(backbone, MaskTransformer(backbone.embed_dim, classes=5))
        >>> segmenter(torch.zeros(1, 3, 64, 96)).shape
        torch.Size([1, 5, 2, 3])
    """

    def __init__(self, backbone: Backbone, decoder: MaskTransformer) -> None:
        super().__init__()
        self.backbone, self.decoder = backbone, decoder

    @property
    def num_drop_path_sites(self) -> int:
        """Number of residual branches with drop path, those of the backbone first."""
        return self.backbone.num_drop_path_sites + self.decoder.num_drop_path_sites

    def forward(
        self, images: Float[Tensor, "b 3 h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "b k rows columns"]:
        """Return the scores of each class in each patch.

        Args:
            images: images normalised with the backbone's `mean` and `std`; H and W are multiples of its `patch_size`.
            drop_path_noise: (B, num_drop_path_sites) uniform random numbers, as in `Backbone.encode`.
        """
        noise: tuple[Tensor | None, Tensor | None] = (None, None)
        if drop_path_noise is not None:
            of_backbone, of_decoder = drop_path_noise.tensor_split((self.backbone.num_drop_path_sites,), dim=1)
            noise = of_backbone, of_decoder
        features = self.backbone(images, drop_path_noise=noise[0])
        return self.decoder(features.tokens, features.grid, drop_path_noise=noise[1])


class SegmenterFinetuning(SegmentationModule):
    """Module that trains backbone and decoder with one learning rate.

    Batch norms use batch statistics (synchronised over GPUs), as in MMSegmentation and in pretraining, which untrained
    networks require. Parameters that `encode` does not use are not changed.

    Args:
        segmenter: network, trained in place.
        learning_rate: initial learning rate.
        steps: total number of training steps.
        inference: inference mode, whole images or windows.
        rules: rules of the variant.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        *,
        learning_rate: float,
        steps: int,
        inference: Inference | None = None,
        rules: Rules = PAPER,
    ) -> None:
        super().__init__(
            segmenter.backbone,
            classes=segmenter.decoder.classes,
            heads=[f"{learning_rate:g}"],
            steps=steps,
            inference=inference or Inference(),
            rules=rules,
        )
        self.decoder = segmenter.decoder
        self.learning_rate = learning_rate

    @property
    def segmenter(self) -> Segmenter:
        """The network."""
        return Segmenter(self.backbone, self.decoder)

    def logits(
        self, images: Float[Tensor, "b 3 h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "1 b c rows columns"]:
        """Return the scores of each class on the grid of patches."""
        return self.segmenter(images, drop_path_noise=drop_path_noise)[None]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return all trainable parameters as one group."""
        return [{"params": [part for part in self.parameters() if part.requires_grad], "lr": self.learning_rate}]
