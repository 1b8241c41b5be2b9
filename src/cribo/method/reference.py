"""One training step of CrIBo, unoptimised: section 3 of the paper in the paper's order.

Start here to learn the method. The tests compare the fast code of `cribo.method` with this file, and the benchmarks
use it as their baseline. All computations use the type of the inputs. Equation numbers are the paper's; docs/method.md
explains the choices where the paper and its released recipe differ.
"""

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

# ------------------------------------------------------------ 3.2.1 Semantically coherent image regions (appendix B)


def cluster(
    tokens: Float[Tensor, "t d"],
    coordinates: Float[Tensor, "t 2"],
    initial_tokens: Int[Tensor, " k"],
    *,
    position_weight: float,
    marginals: str = "adaptive",
    iterations: int = 5,
    sinkhorn_iterations: int = 5,
    sharpness: float = 20.0,
) -> Int[Tensor, " t"]:
    """Cluster the T = 2N tokens of both views of one image jointly into K clusters."""
    num_objects = len(initial_tokens)
    z = F.normalize(tokens, dim=1)  # (T, D)
    members = F.one_hot(initial_tokens, len(z)).T.to(z)  # (T, K): each initial token is its cluster's only member
    cluster_mass = torch.full_like(members[0], 1 / num_objects)  # (K,)
    labels = initial_tokens
    for _ in range(iterations):
        centroids = F.normalize(members.T @ z, dim=1)  # (K, D), eq. 15; zero for an empty cluster
        cost = -z @ centroids.T  # (T, K), eq. 12
        if position_weight > 0:
            cost = cost + position_weight * positional_cost(coordinates, members)  # eq. 16
        cost = (cost - cost.min()) / (cost.max() - cost.min()).clamp_min(torch.finfo(cost.dtype).tiny)  # to [0, 1]
        labels = transport_plan(cost, cluster_mass, sinkhorn_iterations, sharpness).argmax(dim=1)  # eq. 13
        members = F.one_hot(labels, num_objects).to(z)
        if marginals == "adaptive":
            sizes = members.sum(dim=0) + 0.01
            cluster_mass = sizes / sizes.sum()
    return labels


def positional_cost(coordinates: Float[Tensor, "t 2"], members: Float[Tensor, "t k"]) -> Float[Tensor, "t k"]:
    """Eq. 17: the distance from each token to the nearest other member of each cluster, divided by the maximum."""
    distances = (coordinates[:, None] - coordinates).square().sum(dim=-1).sqrt()  # (T, T)
    counted = (members > 0) & (distances > 0)[..., None]  # (T, T, K): token, member, cluster
    cost = distances[..., None].where(counted, torch.inf).amin(dim=1)  # (T, K)
    cost = cost.where(cost.isfinite(), 0)
    cost = cost.where(cost != 0, cost.mean())  # no other member: the mean over all entries, zeros included
    return cost / cost.max().clamp_min(torch.finfo(cost.dtype).tiny)


def transport_plan(
    cost: Float[Tensor, "t k"], cluster_mass: Float[Tensor, " k"], iterations: int, sharpness: float
) -> Float[Tensor, "t k"]:
    """Q* of eq. 13 by Sinkhorn-Knopp: rows scaled to 1/T, then columns to the mass of their cluster (eq. 14)."""
    plan = torch.exp(-sharpness * cost)
    plan = plan / plan.sum()
    for _ in range(iterations):
        plan = plan / plan.sum(dim=1, keepdim=True) / len(plan)
        plan = plan / plan.sum(dim=0) * cluster_mass
    return plan


def pool(
    tokens: Float[Tensor, "2 n d"], labels: Int[Tensor, "2 n"], num_objects: int
) -> tuple[Float[Tensor, "2 k d"], Bool[Tensor, " k"]]:
    """Eq. 1: the mean of each cluster's tokens in each view, and whether a cluster has tokens in both views."""
    members = F.one_hot(labels, num_objects).to(tokens)  # (2, N, K)
    sizes = members.sum(dim=1)  # (2, K)
    return members.mT @ tokens / sizes.clamp_min(1)[..., None], (sizes > 0).all(dim=0)


# ------------------------------------------------------------------------------- 3.2.2 Cross-image object matchings


def nearest(
    queries: Float[Tensor, "r d"], rows: Float[Tensor, "m d"], allowed: Bool[Tensor, "r m"] | None = None
) -> Int[Tensor, " r"]:
    """Eq. 2: the row with the greatest cosine similarity to each query."""
    similarity = F.normalize(queries, dim=1) @ F.normalize(rows, dim=1).T  # (R, M)
    return (similarity if allowed is None else similarity.where(allowed, -torch.inf)).argmax(dim=1)


def match(
    objects: Float[Tensor, "2 r d"],
    images: Int[Tensor, " r"],
    bank: Float[Tensor, "2 m d"],
    bank_images: Int[Tensor, " m"],
) -> tuple[Int[Tensor, "2 r"], Bool[Tensor, "2 r"]]:
    """Return each object's nearest row of another image in its view's bank, and whether its cycle closes (eq. 4)."""
    found = torch.zeros(objects.shape[:2], dtype=torch.long)
    consistent = torch.zeros(objects.shape[:2], dtype=torch.bool)
    allowed = images[:, None] != bank_images  # (R, M)
    if allowed.any():
        for i, j in ((0, 1), (1, 0)):
            found[i] = nearest(objects[i], bank[i], allowed)
            jumped = bank[j, found[i]]  # (R, D), eq. 3: the neighbour's row in the other view's bank
            back = nearest(jumped, objects[j])  # the nearest object of the batch in the other view ...
            consistent[i] = allowed.any(dim=1) & (back == torch.arange(len(back)))  # ... is, by eq. 3, the start
    return found, consistent


# -------------------------------------------------------------------------- 3.2.3 Self-supervised training objectives


def cross_entropy(
    teacher: Float[Tensor, "r l"],
    student: Float[Tensor, "r l"],
    centre: Float[Tensor, " l"],
    teacher_temperature: float,
    student_temperature: float = 0.1,
) -> Float[Tensor, ""]:
    """H(p_t, p_s) from logits (eq. 5), averaged over rows; 0 if there are no rows."""
    p_teacher = ((teacher.detach() - centre) / teacher_temperature).softmax(dim=1)
    terms = -(p_teacher * (student / student_temperature).log_softmax(dim=1)).sum(dim=1)
    return terms.sum() / max(len(terms), 1)


class Reference:
    """Student, teacher, the pair of memory banks and the centres, updated by each step.

    Both networks have a `backbone` (global tokens (B, D) and tokens (B, N, D)), a `head` (embeddings), and the last
    layers `image_prototypes` and `object_prototypes` (logits). `clustering` are options of `cluster`.
    """

    def __init__(self, student: Any, teacher: Any, *, num_objects: int, bank_images: int, **clustering: Any) -> None:
        self.student, self.teacher = student, teacher
        self.num_objects, self.clustering = num_objects, clustering
        self.bank: deque[tuple[int, Tensor]] = deque(maxlen=bank_images)  # image and objects (2, n, D)
        self.image_centre = self.object_centre = torch.zeros_like(teacher.image_prototypes.weight[:, 0])  # (L,)

    def losses(
        self,
        views: Float[Tensor, "b 2 3 h w"],
        coordinates: Float[Tensor, "b 2 n 2"],
        initial_tokens: Int[Tensor, "b k"],
        images: Int[Tensor, " b"],
        *,
        teacher_temperature: float,
        cross_image: bool = True,
    ) -> dict[str, Float[Tensor, ""]]:
        """Return the three losses of one group of images, then update the banks and centres with it."""
        with torch.no_grad():
            t_global, t_tokens, *_ = self.teacher.backbone(views.flatten(0, 1))  # (2B, D), (2B, N, D)
        s_global, s_tokens, *_ = self.student.backbone(views.flatten(0, 1))
        t_objects, s_objects = [], []  # of each image (2, n, D)
        t_pairs, s_pairs = (tokens.unflatten(0, (-1, 2)) for tokens in (t_tokens, s_tokens))  # (B, 2, N, D)
        for t_pair, s_pair, xy, start in zip(t_pairs, s_pairs, coordinates, initial_tokens, strict=True):
            labels = cluster(t_pair.flatten(0, 1), xy.flatten(0, 1), start, **self.clustering).unflatten(0, (2, -1))
            objects, kept = pool(t_pair, labels, self.num_objects)
            t_objects.append(objects[:, kept])
            s_objects.append(pool(s_pair, labels, self.num_objects)[0][:, kept])
        t, s = torch.cat(t_objects, dim=1), torch.cat(s_objects, dim=1)  # (2, R, D)
        t_global, s_global = (z.unflatten(0, (-1, 2)).transpose(0, 1) for z in (t_global, s_global))  # (2, B, D)
        f_t, f_s = self.teacher, self.student
        t_image, s_image = (f.image_prototypes(f.head(z)) for f, z in ((f_t, t_global), (f_s, s_global)))  # (2, B, L)
        t_object, s_object = (f.object_prototypes(f.head(z)) for f, z in ((f_t, t), (f_s, s)))  # (2, R, L)

        level_g, level_o = ((c, teacher_temperature) for c in (self.image_centre, self.object_centre))
        directions = ((0, 1), (1, 0))  # each loss is the mean of both
        losses = {
            "image": sum(cross_entropy(t_image[i], s_image[j], *level_g) for i, j in directions) / 2,  # eq. 10
            "cross_view": sum(cross_entropy(t_object[i], s_object[j], *level_o) for i, j in directions) / 2,  # eq. 6
            "cross_image": 0 * s.sum(),
        }
        if cross_image and self.bank:
            bank = torch.cat([objects for _, objects in self.bank], dim=1)  # (2, M, D)
            bank_images = torch.tensor([image for image, objects in self.bank for _ in objects[0]])  # (M,)
            object_images = images.repeat_interleave(torch.tensor([len(objects[0]) for objects in t_objects]))  # (R,)
            found, consistent = match(t, object_images, bank, bank_images)
            for i, valid in enumerate(consistent):  # eq. 8: each direction is the mean over its Z_i valid pairs
                neighbours = self.teacher.object_prototypes(self.teacher.head(bank[i, found[i, valid]]))
                terms = cross_entropy(neighbours, s_object[1 - i, valid], *level_o)
                losses["cross_image"] = losses["cross_image"] + terms / 2
        self.bank.extend(zip(images.tolist(), t_objects, strict=True))
        self.image_centre = 0.9 * self.image_centre + 0.1 * t_image.flatten(0, 1).mean(dim=0).detach()
        if t.numel():
            self.object_centre = 0.9 * self.object_centre + 0.1 * t_object.flatten(0, 1).mean(dim=0).detach()
        return losses

    def step(self, optimizer: torch.optim.Optimizer, momentum: float, **batch: Any) -> dict[str, Tensor]:
        """Update the student by the sum of the losses (eq. 11), and the teacher as its moving average."""
        losses = self.losses(**batch)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                theirs.mul_(momentum).add_((1 - momentum) * ours)
        return losses
