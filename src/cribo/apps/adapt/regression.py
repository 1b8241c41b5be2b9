"""Closed form of distillation: the linear layer that best predicts a teacher's patches from a student's."""

import copy
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.apps.adapt.encoding import encode
from cribo.data import ImageSource
from cribo.data.config import spread
from cribo.features.whitening import Moments
from cribo.models import Backbone
from cribo.models.licences import with_teacher
from cribo.objectives.distill import at_common_grid
from cribo.pretraining.agreement import readable

_IMAGES = 300
_HELD_OUT = 5  # every fifth image
_PENALTIES = (0.01, 0.1, 1.0, 10.0)  # in units of the mean variance of the student's channels


def predict_teacher(
    students: Sequence[Backbone],
    teacher: Backbone,
    images: ImageSource,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[Backbone, float]]:
    """Copy each student, and add the linear layer that predicts the teacher's patches by ridge regression.

    All networks see whole images, each at the size at which it has about 432 patches. The penalty is the one that
    predicts left-out images best.

    Args:
        students: networks to copy, on their device; a readout is replaced.
        teacher: network whose features are predicted.
        images: unlabelled images; up to 300 of them are read, evenly spaced.
        progress: called with the number of processed images and their total.

    Returns:
        Each copy, and the share of the variance of the teacher's patches in left-out images that it predicts, apart
        from a constant.

    Raises:
        ValueError: a student does not support a linear layer after its features.
        DataError: no image can be read.
    """
    copies = [copy.deepcopy(student) for student in students]
    for plain in copies:
        plain.remove_readout()
        plain.licences = with_teacher(plain.licences, teacher.licences)
    moments = [[Moments(plain.embed_dim + teacher.embed_dim) for _ in range(2)] for plain in copies]
    indices = spread(len(images), _IMAGES)
    for done, (_, pixels) in enumerate(readable(images, indices), start=1):
        target = encode(teacher, pixels)
        for plain, (fitted, left_out) in zip(copies, moments, strict=True):
            rows = [tokens[0].cpu() for tokens in at_common_grid(encode(plain, pixels), target)]
            (fitted if done % _HELD_OUT else left_out).update(torch.cat(rows, dim=1))
        progress(done, len(indices))
    shares = [_add_layer(plain, *own) for plain, own in zip(copies, moments, strict=True)]
    return list(zip(copies, shares, strict=True))


def _add_layer(student: Backbone, fitted: Moments, left_out: Moments) -> float:
    """Add the layer with the best penalty, and return the share of variance that it explains."""
    checked, dim = left_out if left_out.count else fitted, student.embed_dim
    layers = [_ridge(fitted, dim, penalty) for penalty in _PENALTIES]
    shares = [_explained(checked, weight) for weight in layers]
    best = max(range(len(layers)), key=shares.__getitem__)
    weight = layers[best]
    bias = fitted.mean[dim:] - weight @ fitted.mean[:dim]
    student.set_readout(weight.float(), bias.float())
    return shares[best]


def _ridge(moments: Moments, dim: int, penalty: float) -> Float[Tensor, "e d"]:
    """Solve the regression of the channels after `dim` on those before."""
    covariance = moments.covariance
    inputs = covariance[:dim, :dim]
    ridge = penalty * inputs.diagonal().mean() * torch.eye(dim, dtype=inputs.dtype)
    return torch.linalg.solve(inputs + ridge, covariance[:dim, dim:]).T


def _explained(moments: Moments, weight: Float[Tensor, "e d"]) -> float:
    """Return the share of the targets' variance that a linear layer explains."""
    dim = weight.shape[1]
    inputs, cross, targets = (
        moments.covariance[:dim, :dim],
        moments.covariance[:dim, dim:],
        moments.covariance[dim:, dim:],
    )
    residual = targets.trace() - 2 * (weight * cross.T).sum() + ((weight @ inputs) * weight).sum()
    return float(1 - residual / targets.trace())
