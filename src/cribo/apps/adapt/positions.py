"""Directions of patch features that depend on the position in the image, found without content.

A vision transformer adds the position of a patch to its features, so patches at the same place are more similar than
their content. The features of an image of one colour vary with the position only. Their principal directions can be
removed from the features of other images by a projection, a linear layer in closed form.

Source: INSID3 (github.com/visinf/INSID3), for the correspondence and segmentation of images by DINOv3.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from cribo.apps.adapt.encoding import PATCHES
from cribo.features.grid import encoding_size
from cribo.features.whitening import Moments
from cribo.models import Backbone
from cribo.pretraining.agreement import encode_pixels

SHARES = (1 / 24, 1 / 6)
"""Candidate numbers of removed directions, as shares of the channels: 16 and 64 of 384."""


def position_directions(backbone: Backbone) -> Float[Tensor, "d d"]:
    """Return the principal directions of the features of an image of the mean colour.

    Args:
        backbone: the backbone, on its device, without readout.

    Returns:
        (D, D) orthonormal rows, of descending variance over the positions, in float64.
    """
    size = encoding_size(1, 1, backbone.patch_size, fixed=backbone.fixed_size, patches=PATCHES)
    image = torch.tensor(backbone.mean)[None, :, None, None].expand(-1, -1, *size)
    moments = Moments(backbone.embed_dim)
    moments.update(normalize(encode_pixels(backbone, image).tokens[0].float().cpu(), dim=-1))
    return torch.linalg.eigh(moments.covariance).eigenvectors.T.flip(0)
