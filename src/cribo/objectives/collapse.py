"""Detection of collapse in self-distillation: metrics of the teacher, and advice."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.method import NO_MATCH, Matches, SelfDistillation

# Number of rows to measure: enough for a mean, few compared with the batch.
_ROWS = 256


def measure_collapse(
    tokens: Float[Tensor, "b 2 n d"],
    matches: Matches | None,
    levels: Mapping[str, tuple[Float[Tensor, "2 r e"], SelfDistillation]],
) -> dict[str, float]:
    """Return metrics of collapse by column name; values that are not finite are omitted.

    Args:
        tokens: the teacher's tokens.
        matches: matches of the batch's objects.
        levels: the teacher's embeddings of each level, and the `SelfDistillation` that maps them to probabilities.
    """
    found: dict[str, float] = {}
    for name, (embeddings, level) in levels.items():
        of_mean, mean_of = prototype_entropy(embeddings.flatten(0, 1)[:_ROWS], level)
        found |= {f"{name}_entropy_of_mean": float(of_mean), f"{name}_mean_entropy": float(mean_of)}
    found["feature_std"] = feature_std(tokens.flatten(0, 2))
    if matches is not None:
        matched = matches.nearest[matches.nearest != NO_MATCH]
        if matched.numel():
            found["distinct_neighbours"] = matched.unique().numel() / matched.numel()
    return {name: value for name, value in found.items() if math.isfinite(value)}


def feature_std(rows: Float[Tensor, "r d"]) -> float:
    """Return the spread of the rows' directions: 1 if they are uniformly distributed, 0 if all are equal."""
    directions = F.normalize(rows.float(), dim=-1)
    return float(directions.std(dim=0).mean() * directions.shape[1] ** 0.5)


def prototype_entropy(
    embeddings: Float[Tensor, "r e"], level: SelfDistillation
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the entropy of the mean teacher distribution, and the mean entropy, as fractions of ln L.

    Near 0, the first indicates that all rows share one prototype; near 1, the second indicates that every row is
    uniform. Both are collapse.
    """
    logits = F.linear(embeddings, level.teacher_prototypes) - level.centre
    p = (logits / level.teacher_temperature).softmax(dim=-1)
    scale = 1 / torch.log(torch.tensor(float(p.shape[1])))
    mean = p.mean(dim=0)
    of_mean = -(mean * mean.clamp_min(1e-12).log()).sum() * scale
    mean_of = -(p * p.clamp_min(1e-12).log()).sum(dim=1).mean() * scale
    return of_mean, mean_of


def collapse_advice(
    row: Mapping[str, float], *, cross_image: bool, needs_objects: bool, prototypes: int
) -> dict[str, str]:
    """Return advice for each problem found in a row of metrics, by name.

    Args:
        row: one row of metrics.
        cross_image: whether L_ci^o should be active at this step.
        needs_objects: whether any loss uses objects.
        prototypes: L, number of prototypes.
    """
    advice = {}
    few = 1.5 / math.log(prototypes)  # entropy of about four prototypes, as a fraction of ln L
    for level in ("image", "object"):
        if row.get(f"{level}_entropy_of_mean", 1.0) < few:
            advice[f"{level} prototypes"] = (
                f"collapse: the teacher assigns nearly all {level}s to a few prototypes. Raise optim.momentum, "
                "lower optim.lr, or try losses.centring sinkhorn"
            )
        elif row.get(f"{level}_mean_entropy", 0.0) > 0.99:
            advice[f"{level} uniform"] = (
                f"the teacher's {level} distributions are uniform, so the loss has no signal. Lower "
                "losses.teacher_temperature, raise optim.lr, or try losses.centring sinkhorn"
            )
    if row.get("feature_std", 1.0) < 0.05:
        advice["features"] = (
            f"collapse: all patches have nearly the same feature (spread {row['feature_std']:.3f} of 1). Lower "
            "optim.lr, or raise optim.warmup_epochs or optim.freeze_last_layers_epochs"
        )
    if row.get("distinct_neighbours", 1.0) < 0.02:
        advice["neighbours"] = (
            f"collapse: all objects have the same few neighbours ({row['distinct_neighbours']:.1%} distinct). "
            "Use a larger objects.bank_images, or start losses.cross_image_from_epoch later"
        )
    if needs_objects and row.get("objects_per_image", 1.0) == 0:
        advice["no objects"] = (
            "no cluster has tokens in both views, so there are no objects. Raise the lower end of "
            "views.area, lower objects.num_objects, or lower objects.position_weight"
        )
    elif cross_image and row.get("bootstrapping_ratio", 1.0) == 0:
        advice["no bootstrapping"] = (
            "no match is cycle-consistent: the bootstrapping ratio stays at 0. Lower objects.num_objects or "
            "objects.group_size, raise objects.bank_images, or wait: untrained features rarely match"
        )
    return advice
