"""Plain versions of the method's formulas: what the package is tested and measured against.

Nothing here is clever: the clustering forms the (B, T, T, K) tensor of distances to the members of every
cluster, the search holds all similarities at once, the loss lets autograd keep all logits. All compute in the
type of their inputs, so tests run them in float64 and the benchmark in float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import functional as classic

from cribo.method import Photometric


def positional_cost(coordinates: Tensor, members: Tensor) -> Tensor:
    """Cost (B, T, K) of tokens at (B, T, 2) to clusters with members (B, T, K), 1 for a member and 0 else."""
    differences = coordinates[:, :, None] - coordinates[:, None]
    distances = differences.square().sum(dim=-1).sqrt()
    counts = (members[:, None] > 0) & (distances > 0)[..., None]  # (B, T, T, K): token, member, cluster
    nearest = distances[..., None].where(counts, torch.inf).amin(dim=2)
    cost = nearest.where(nearest.isfinite(), 0)
    cost = cost.where(cost != 0, cost.mean(dim=(1, 2), keepdim=True))
    highest = cost.amax(dim=(1, 2), keepdim=True)
    return cost / highest.where(highest > 0, 1)


def unit_scale(cost: Tensor) -> Tensor:
    """The cost (B, T, K) of each image scaled affinely to [0, 1]."""
    lowest, highest = cost.amin(dim=(1, 2), keepdim=True), cost.amax(dim=(1, 2), keepdim=True)
    return (cost - lowest) / (highest - lowest).where(highest > lowest, 1)


def transport_plan(cost: Tensor, cluster_mass: Tensor, iterations: int = 5, sharpness: float = 20.0) -> Tensor:
    """Sinkhorn-Knopp on exp(-sharpness * cost): the whole matrix (B, T, K) is scaled, rows first."""
    plan = torch.exp(-sharpness * cost)
    plan = plan / plan.sum(dim=(1, 2), keepdim=True)
    for _ in range(iterations):
        plan = plan / plan.sum(dim=2, keepdim=True) / plan.shape[1]
        plan = plan / plan.sum(dim=1, keepdim=True) * cluster_mass[:, None]
    return plan


def clustering_plans(
    tokens: Tensor,
    coordinates: Tensor,
    initial_tokens: Tensor,
    *,
    position_weight: float,
    marginals: str = "adaptive",
    iterations: int = 5,
    sinkhorn_iterations: int = 5,
    sharpness: float = 20.0,
) -> list[tuple[Tensor, Tensor]]:
    """The transport plan (B, T, K) of every round and the column marginals (B, K) that it was made for."""
    num_objects = initial_tokens.shape[1]
    tokens = F.normalize(tokens, dim=-1)
    members = F.one_hot(initial_tokens, tokens.shape[1]).mT.to(tokens.dtype)
    cluster_mass = torch.full_like(members[:, 0], 1 / num_objects)
    plans = []
    for _ in range(iterations):
        centroids = F.normalize(members.mT @ tokens, dim=-1)
        cost = -tokens @ centroids.mT
        if position_weight:
            cost = cost + position_weight * positional_cost(coordinates, members)
        plan = transport_plan(unit_scale(cost), cluster_mass, sinkhorn_iterations, sharpness)
        plans.append((plan, cluster_mass))
        members = F.one_hot(plan.argmax(dim=-1), num_objects).to(tokens.dtype)
        if marginals == "adaptive":
            sizes = members.sum(dim=1) + 0.01
            cluster_mass = sizes / sizes.sum(dim=1, keepdim=True)
    return plans


def cluster(tokens: Tensor, coordinates: Tensor, initial_tokens: Tensor, **options) -> Tensor:
    """Labels (B, T): the arg-max cluster of each token in the last plan."""
    return clustering_plans(tokens, coordinates, initial_tokens, **options)[-1][0].argmax(dim=-1)


def search(queries: Tensor, bank: Tensor) -> Tensor:
    """Row of the bank most similar to each query, from all similarities (R, M) at once; rows of unit length."""
    return (queries @ bank.T).argmax(dim=1)


def prototype_loss(
    student: Tensor,
    teacher: Tensor,
    student_prototypes: Tensor,
    teacher_prototypes: Tensor,
    centre: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Mean cross-entropy of rows; autograd keeps logits and probabilities of all of them."""
    with torch.no_grad():
        logits = teacher @ teacher_prototypes.T
        target = ((logits - centre) / teacher_temperature).softmax(dim=-1)
    log_student = (student @ student_prototypes.T / student_temperature).log_softmax(dim=-1)
    return -(target * log_student).sum(dim=-1).mean()


def photometric(view: Tensor, parameters: Photometric, row: int, *, solarise_threshold: float = 128) -> Tensor:
    """One 8-bit view (3, H, W) through torchvision's classic transforms one by one; floats, not yet normalised."""
    x = view.float() / 255
    operations = (
        lambda x: classic.adjust_brightness(x, float(parameters.brightness[row])),
        lambda x: classic.adjust_contrast(x, float(parameters.contrast[row])),
        lambda x: classic.adjust_saturation(x, float(parameters.saturation[row])),
        lambda x: classic.adjust_hue(x, float(parameters.hue[row])),
    )
    if float(parameters.brightness[row]) != 1:  # no jitter was drawn otherwise
        for operation in parameters.order[row].tolist():
            x = operations[operation](x)
    if parameters.greyscale[row]:
        x = classic.rgb_to_grayscale(x, num_output_channels=3)
    if (sigma := float(parameters.sigma[row])) > 0:
        x = classic.gaussian_blur(x, [2 * math.ceil(3 * sigma) + 1] * 2, [sigma, sigma])
    if parameters.solarise[row]:
        x = classic.solarize(x, solarise_threshold / 255)
    return x
