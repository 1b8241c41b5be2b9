"""Average of the weights of two networks."""

import copy

import torch

from cribo.models import Backbone


def averaged(backbone: Backbone, other: Backbone, share: float) -> Backbone:
    """Average the weights of two backbones (WiSE-FT; Wortsman et al. 2022).

    Args:
        backbone: the backbone to copy; weights whose shapes differ, such as a resized position embedding, are kept.
        other: a backbone of the same architecture.
        share: weight of `other` in the average, 0 to 1.
    """
    result, state = copy.deepcopy(backbone), other.model.state_dict()
    with torch.no_grad():
        for key, own in result.model.state_dict().items():
            if own.is_floating_point() and own.shape == state[key].shape:
                own.lerp_(state[key].to(own.device), share)
    return result
