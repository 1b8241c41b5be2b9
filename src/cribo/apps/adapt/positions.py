"""Directions of patch features that depend on the position in the image, found without content.

A vision transformer adds the position of a patch to its features, so distant patches at the same place are more similar
than their content. The features of images of noise vary with the position only; their principal directions can be
removed from the features of other images by a projection, a linear layer in closed form.

Source: INSID3 (Visual Inference Lab 2026) removes the directions of one image without content, for correspondence.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.apps.adapt.encoding import PATCHES
from cribo.data.randomness import keyed_generator
from cribo.features.grid import encoding_size
from cribo.features.whitening import Moments
from cribo.models import Backbone
from cribo.pretraining.agreement import encode_pixels

SHARES = (1 / 24, 1 / 6)
"""Candidate numbers of removed directions, as shares of the channels: 16 and 64 of 384."""

_NOISE_IMAGES = 16


def position_directions(backbone: Backbone) -> Float[Tensor, "d d"]:
    """Return the principal directions of the features' mean at each position of images of noise.

    Args:
        backbone: the backbone, on its device, without readout.

    Returns:
        (D, D) orthonormal rows, of descending variance over the positions, in float64.
    """
    size = encoding_size(1, 1, backbone.patch_size, fixed=backbone.fixed_size, patches=PATCHES)
    mean = 0.0
    for number in range(_NOISE_IMAGES):
        noise = torch.rand(1, 3, *size, generator=keyed_generator(number))
        mean = mean + encode_pixels(backbone, noise).tokens[0].double().cpu() / _NOISE_IMAGES
    moments = Moments(backbone.embed_dim)
    moments.update(mean)
    return torch.linalg.eigh(moments.covariance).eigenvectors.T.flip(0)
