"""Joint-space clustering on a GPU: three kernels a round, each of which reads what it needs once.

Tokens are read twice a round, for the similarities and for the centroids; everything else is of the size (B, K, T) or
smaller and stays in the cache. Sums run in a fixed order, so that the same input gives the same labels. The plain
version is `cribo.method.clustering`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from cribo.method.clustering import EMPTY_CLUSTER_SIZE, Marginals

_TRANSPORT_TILE = 16384  # 32 numbers a thread of 16 warps: what fits into registers several times over
_SMALLEST_NORM = tl.constexpr(1e-12)  # that of torch.nn.functional.normalize
_SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def centroid_kernel(
    tokens,
    inverse_norms,
    members,
    firsts,
    centroids,
    num_tokens: tl.constexpr,
    dim: tl.constexpr,
    num_objects: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
):
    """Normalised sum of the normalised tokens of one cluster of one image; zero for an empty one.

    Members are the tokens of an image sorted by cluster; those of cluster k are at firsts[k] to firsts[k + 1].
    """
    image, cluster = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(firsts + image * (num_objects + 1) + cluster)
    end = tl.load(firsts + image * (num_objects + 1) + cluster + 1)
    channel = tl.arange(0, block_d)
    total = tl.zeros([block_d], tl.float32)
    for start in range(first, end, block_m):
        place = start + tl.arange(0, block_m)
        row = image * num_tokens + tl.load(members + image * num_tokens + place, mask=place < end, other=0)
        scale = tl.load(inverse_norms + row, mask=place < end, other=0.0)
        wanted = (place < end)[:, None] & (channel < dim)[None, :]
        values = tl.load(tokens + row[:, None] * dim + channel[None, :], mask=wanted, other=0.0).to(tl.float32)
        total += tl.sum(values * scale[:, None], axis=0)
    norm = tl.maximum(tl.sqrt(tl.sum(total * total, axis=0)), _SMALLEST_NORM)
    tl.store(centroids + (image * num_objects + cluster) * dim + channel, total / norm, mask=channel < dim)


@triton.jit
def cost_kernel(
    tokens,
    inverse_norms,
    centroids,
    coordinates,
    firsts,
    member_coordinates,
    cosines,
    nearest,
    num_tokens: tl.constexpr,
    dim: tl.constexpr,
    num_objects: tl.constexpr,
    positional: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
    block_k: tl.constexpr,
):
    """What some tokens of an image have to do with its clusters: cosines, and distances to the nearest other member.

    The distance is infinite where there is no such member; one of exactly 0 does not count.
    """
    image, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * block_t + tl.arange(0, block_t)
    first_cluster = tl.program_id(2) * block_k
    cluster, channel = first_cluster + tl.arange(0, block_k), tl.arange(0, block_d)
    products = tl.zeros([block_t, block_k], tl.float32)
    for start in range(0, dim, block_d):
        inside = start + channel < dim
        a = tl.load(
            tokens + (image * num_tokens + token)[:, None] * dim + (start + channel)[None, :],
            mask=(token < num_tokens)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            centroids + (image * num_objects + cluster)[None, :] * dim + (start + channel)[:, None],
            mask=(cluster < num_objects)[None, :] & inside[:, None],
            other=0.0,
        )
        # Three products in the tensor cores' 19 bits come as near as float32 itself.
        products = tl.dot(a.to(tl.float32), b, products, input_precision="tf32x3")
    scale = tl.load(inverse_norms + image * num_tokens + token, mask=token < num_tokens, other=0.0)
    target = (image * num_objects + cluster)[None, :] * num_tokens + token[:, None]
    tl.store(
        cosines + target,
        products * scale[:, None],
        mask=(token < num_tokens)[:, None] & (cluster < num_objects)[None, :],
    )
    if positional:
        x = tl.load(coordinates + image * 2 * num_tokens + token, mask=token < num_tokens, other=0.0)
        y = tl.load(coordinates + (image * 2 + 1) * num_tokens + token, mask=token < num_tokens, other=0.0)
        member_x = member_coordinates + image * 2 * num_tokens
        for one in range(first_cluster, min(first_cluster + block_k, num_objects)):
            first = tl.load(firsts + image * (num_objects + 1) + one)
            end = tl.load(firsts + image * (num_objects + 1) + one + 1)
            least = tl.full([block_t], float("inf"), tl.float32)
            # Unrolled, so that loads do not wait for each other.
            for place in tl.range(first, end, loop_unroll_factor=4):  # type: ignore[reportGeneralTypeIssues]
                horizontal = x - tl.load(member_x + place)
                vertical = y - tl.load(member_x + num_tokens + place)
                square = horizontal * horizontal + vertical * vertical
                least = tl.minimum(least, tl.where(square > 0, square, float("inf")))
            tl.store(
                nearest + (image * num_objects + one) * num_tokens + token, tl.sqrt(least), mask=token < num_tokens
            )


@triton.jit
def _cost(cosines, nearest, target, inside, position_weight, mean, highest, positional: tl.constexpr):
    """Total cost of a tile: semantic, and positional with the mean where there is no nearest member."""
    cost = -tl.load(cosines + target, mask=inside, other=0.0)
    if positional:
        distance = tl.load(nearest + target, mask=inside, other=0.0)
        cost += position_weight * (tl.where(distance < float("inf"), distance, mean) / highest)
    return cost


@triton.jit
def transport_kernel(
    cosines,
    nearest,
    coordinates,
    cluster_mass,
    labels,
    members,
    firsts,
    member_coordinates,
    position_weight,
    sharpness,
    empty_cluster_size,
    num_tokens: tl.constexpr,
    num_objects: tl.constexpr,
    positional: tl.constexpr,
    adaptive: tl.constexpr,
    iterations: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
):
    """Sinkhorn-Knopp of one image on its scaled cost, the labels, and what the next round starts from.

    The plan is never written down: each pass makes it anew from costs in the cache, a tile of all clusters by
    block_t tokens at a time. Writes labels, the tokens sorted by cluster with their coordinates, where each cluster
    begins, and the next round's column marginals.
    """
    image, cluster, column_of_tile = tl.program_id(0).to(tl.int64), tl.arange(0, block_k), tl.arange(0, block_t)
    base = (image * num_objects + cluster)[:, None] * num_tokens
    mean, furthest = 0.0, 0.0
    if positional:
        total = tl.zeros([block_k], tl.float32)
        for start in range(0, num_tokens, block_t):
            token = start + column_of_tile
            inside = (cluster < num_objects)[:, None] & (token < num_tokens)[None, :]
            distance = tl.load(nearest + base + token[None, :], mask=inside, other=0.0)
            distance = tl.where(distance < float("inf"), distance, 0.0)
            total += tl.sum(distance, axis=1)
            furthest = tl.maximum(furthest, tl.max(distance))
        mean = tl.sum(total, axis=0) / (num_objects * num_tokens)  # the missing count as zeros
        furthest = tl.maximum(furthest, _SMALLEST_NORMAL)

    lowest, highest = float("inf"), -float("inf")
    for start in range(0, num_tokens, block_t):
        token = start + column_of_tile
        inside = (cluster < num_objects)[:, None] & (token < num_tokens)[None, :]
        cost = _cost(cosines, nearest, base + token[None, :], inside, position_weight, mean, furthest, positional)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, cost, float("inf"))))
        highest = tl.maximum(highest, tl.max(tl.where(inside, cost, -float("inf"))))
    extent = tl.maximum(highest - lowest, _SMALLEST_NORMAL)

    mass = tl.load(cluster_mass + image * num_objects + cluster, mask=cluster < num_objects, other=0.0)
    column = tl.where(cluster < num_objects, 1.0, 0.0)
    for _ in range(iterations):
        weight = tl.zeros([block_k], tl.float32)
        for start in range(0, num_tokens, block_t):
            token = start + column_of_tile
            inside = (cluster < num_objects)[:, None] & (token < num_tokens)[None, :]
            cost = _cost(cosines, nearest, base + token[None, :], inside, position_weight, mean, furthest, positional)
            kernel = tl.where(inside, tl.exp(-sharpness * ((cost - lowest) / extent)), 0.0)
            row = tl.where(token < num_tokens, (1.0 / num_tokens) / tl.sum(kernel * column[:, None], axis=0), 0.0)
            weight += tl.sum(kernel * row[None, :], axis=1)
        column = tl.where(cluster < num_objects, mass / weight, 0.0)

    sizes = tl.zeros([block_k], tl.int32)
    for start in range(0, num_tokens, block_t):
        token = start + column_of_tile
        inside = (cluster < num_objects)[:, None] & (token < num_tokens)[None, :]
        cost = _cost(cosines, nearest, base + token[None, :], inside, position_weight, mean, furthest, positional)
        plan = tl.exp(-sharpness * ((cost - lowest) / extent)) * column[:, None]
        plan = tl.where(plan == plan, plan, float("inf"))  # as in torch, the first NaN is the largest
        label = tl.argmax(tl.where((cluster < num_objects)[:, None], plan, -1.0), axis=0)
        tl.store(labels + image * num_tokens + token, label.to(tl.int64), mask=token < num_tokens)
        sizes += tl.sum(((label[None, :] == cluster[:, None]) & inside).to(tl.int32), axis=1)
    following = tl.cumsum(sizes, axis=0)
    tl.store(firsts + image * (num_objects + 1) + cluster + 1, following, mask=cluster < num_objects)
    if adaptive:
        share = tl.where(cluster < num_objects, sizes.to(tl.float32) + empty_cluster_size, 0.0)
        tl.store(
            cluster_mass + image * num_objects + cluster, share / tl.sum(share, axis=0), mask=cluster < num_objects
        )

    tl.debug_barrier()  # labels are read back by other threads than wrote them
    begun = following - sizes
    for start in range(0, num_tokens, block_t):
        token = start + column_of_tile
        label = tl.load(labels + image * num_tokens + token, mask=token < num_tokens, other=-1)
        own = (label[None, :] == cluster[:, None]).to(tl.int32)
        place = tl.sum(own * (begun[:, None] + tl.cumsum(own, axis=1) - 1), axis=0)
        begun += tl.sum(own, axis=1)
        tl.store(members + image * num_tokens + place, token, mask=token < num_tokens)
        if positional:
            x = tl.load(coordinates + image * 2 * num_tokens + token, mask=token < num_tokens, other=0.0)
            y = tl.load(coordinates + (image * 2 + 1) * num_tokens + token, mask=token < num_tokens, other=0.0)
            tl.store(member_coordinates + image * 2 * num_tokens + place, x, mask=token < num_tokens)
            tl.store(member_coordinates + (image * 2 + 1) * num_tokens + place, y, mask=token < num_tokens)


class _Tiles:
    """The sizes of the kernels' tiles for tokens (T, D) and K clusters."""

    def __init__(self, num_tokens: int, dim: int, num_objects: int) -> None:
        clusters = max(16, triton.next_power_of_2(num_objects))
        block_d = triton.next_power_of_2(dim)
        self.centroid = {"block_m": max(1, 8192 // block_d), "block_d": block_d}
        self.cost = {"block_t": 64, "block_d": 32, "block_k": min(64, clusters)}
        self.cost_grid = (triton.cdiv(num_tokens, 64), triton.cdiv(num_objects, self.cost["block_k"]))
        block_t = max(16, min(triton.next_power_of_2(num_tokens), _TRANSPORT_TILE // clusters))
        self.transport = {"block_t": block_t, "block_k": clusters}
        self.transport_warps = min(16, max(1, block_t * clusters // 1024))


def transport_labels(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    initial_tokens: Int[Tensor, "b k"],
    *,
    position_weight: float,
    marginals: Marginals,
    iterations: int,
    sinkhorn_iterations: int,
    sharpness: float,
) -> Int[Tensor, "b t"]:
    """`cribo.method.clustering.transport_labels`; beyond 1024 clusters the tiles leave the registers."""
    (batch, num_tokens, dim), num_objects = tokens.shape, initial_tokens.shape[1]
    labels = initial_tokens.new_empty((batch, num_tokens))
    if batch == 0:
        return labels
    tokens, coordinates = tokens.contiguous(), coordinates.float().mT.contiguous()
    inverse_norms = 1 / torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float32).clamp_min(1e-12)
    centroids = inverse_norms.new_empty((batch, num_objects, dim))
    cosines = inverse_norms.new_empty((batch, num_objects, num_tokens))
    positional = position_weight > 0
    nearest = torch.empty_like(cosines) if positional else cosines
    cluster_mass = inverse_norms.new_full((batch, num_objects), 1 / num_objects)
    # In the first round each initial token is the only member of its cluster.
    members = initial_tokens.new_empty((batch, num_tokens), dtype=torch.int32)
    members[:, :num_objects] = initial_tokens
    firsts = torch.arange(num_objects + 1, dtype=torch.int32, device=tokens.device).repeat(batch, 1)
    member_coordinates = torch.empty_like(coordinates)
    member_coordinates[:, :, :num_objects] = coordinates.gather(2, initial_tokens[:, None].expand(-1, 2, -1))
    tiles = _Tiles(num_tokens, dim, num_objects)
    sizes = {"num_tokens": num_tokens, "num_objects": num_objects}
    make_centroids: Any = centroid_kernel
    make_costs: Any = cost_kernel
    transport: Any = transport_kernel
    with torch.cuda.device_of(tokens):
        for _ in range(iterations):
            make_centroids[(batch, num_objects)](
                tokens, inverse_norms, members, firsts, centroids, dim=dim, **sizes, **tiles.centroid
            )
            make_costs[(batch, *tiles.cost_grid)](
                *(tokens, inverse_norms, centroids, coordinates, firsts, member_coordinates, cosines, nearest),
                dim=dim,
                positional=positional,
                **sizes,
                **tiles.cost,
            )
            transport[(batch,)](
                *(cosines, nearest, coordinates, cluster_mass, labels, members, firsts, member_coordinates),
                *(float(position_weight), float(sharpness), EMPTY_CLUSTER_SIZE),
                positional=positional,
                adaptive=marginals == "adaptive",
                iterations=sinkhorn_iterations,
                **sizes,
                **tiles.transport,
                num_warps=tiles.transport_warps,
            )
    return labels
