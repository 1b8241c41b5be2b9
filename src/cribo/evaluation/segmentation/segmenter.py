"""Segmenter: a backbone and a mask transformer, one network that is trained from end to end."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from cribo.evaluation.segmentation.mask_transformer import MaskTransformer
from cribo.models import Backbone, build_backbone, describe
from cribo.models.backbone import RESERVED_ARGS


class Segmenter(nn.Module):
    """Scores of each class in each patch of an image, by a backbone and a mask transformer on its tokens.

    Args:
        backbone: whose last block's tokens are decoded.
        decoder: takes tokens of the backbone's width.

    Example:
        >>> import torch
        >>> backbone = build_backbone("resnet18", args={"channels": (8, 8, 8, 16)})
        >>> segmenter = Segmenter(backbone, MaskTransformer(backbone.embed_dim, classes=5))
        >>> segmenter(torch.zeros(1, 3, 64, 96)).shape
        torch.Size([1, 5, 2, 3])
    """

    def __init__(self, backbone: Backbone, decoder: MaskTransformer) -> None:
        super().__init__()
        self.backbone = backbone
        self.decoder = decoder

    @property
    def num_drop_path_sites(self) -> int:
        """How many residual branches can be dropped, the backbone's and then the decoder's."""
        return self.backbone.num_drop_path_sites + self.decoder.num_drop_path_sites

    def forward(
        self, images: Float[Tensor, "b 3 h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "b k rows columns"]:
        """The scores of each class in each patch.

        Args:
            images: normalised with the backbone's `mean` and `std`; H and W multiples of its `patch_size`.
            drop_path_noise: (B, num_drop_path_sites) uniform numbers, as `Backbone.encode` takes them; None: nothing
                is dropped.
        """
        noise: tuple[Tensor | None, Tensor | None] = (None, None)
        if drop_path_noise is not None:
            of_backbone, of_decoder = drop_path_noise.tensor_split((self.backbone.num_drop_path_sites,), dim=1)
            noise = of_backbone, of_decoder
        features = self.backbone(images, drop_path_noise=noise[0])
        return self.decoder(features.tokens, features.grid, drop_path_noise=noise[1])


def describe_segmenter(segmenter: Segmenter) -> dict[str, Any]:
    """What builds the same network again, as JSON holds it: all but its weights."""
    decoder = segmenter.decoder
    return {
        "backbone": describe(segmenter.backbone),
        "decoder": {
            "classes": decoder.classes,
            "width": decoder.width,
            "layers": len(decoder.blocks),
            "heads": decoder.heads,
        },
    }


def rebuild_segmenter(about: dict[str, Any]) -> Segmenter:
    """The network that `describe_segmenter` described, with random weights and without drop path."""
    of_backbone = about["backbone"]
    backbone = build_backbone(
        of_backbone["name"],
        args={name: value for name, value in of_backbone["args"].items() if name not in RESERVED_ARGS},
        image_size=of_backbone["image_size"],
    )
    backbone.mean, backbone.std = tuple(of_backbone["mean"]), tuple(of_backbone["std"])
    backbone.set_norm_eps(of_backbone["norm_eps"])
    return Segmenter(backbone, MaskTransformer(backbone.embed_dim, **about["decoder"]))
