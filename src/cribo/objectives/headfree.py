"""Losses on the features, without projection head and prototypes. None of them is in the paper."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.method.bank import MemoryBank
from cribo.method.blocks import in_blocks, rows_per_block
from cribo.method.matching import NO_MATCH, Rows, similarities
from cribo.method.precision import at_least_float32, in_float32


@in_float32
def cosine_distance(student: Float[Tensor, "*r d"], target: Float[Tensor, "*r d"]) -> Float[Tensor, "*r"]:
    """1 - cosine similarity of each row and its target."""
    return 1 - F.cosine_similarity(student, target, dim=-1)


def mean_or_zero(values: Float[Tensor, "*n"]) -> Float[Tensor, ""]:
    """Return the mean of all values; 0, attached to the graph, if there are none."""
    return values.sum() / max(values.numel(), 1)


@in_float32
def gram_loss(student: Float[Tensor, "b n d"], target: Float[Tensor, "b n d"]) -> Float[Tensor, ""]:
    """Mean squared difference between the Gram matrices of student and target: the patches' cosine similarities.

    Features may change as long as the similarities between the patches of a view stay the same.

    Args:
        student: (B, N, D) patches of B views.
        target: (B, N, D) patches of the same views; D may differ.

    Source: Gram anchoring (DINOv3, Simeoni et al. 2025).

    Example:
        >>> patches, rotation = torch.randn(2, 9, 4), torch.linalg.qr(torch.randn(4, 4)).Q
        >>> bool(gram_loss(patches @ rotation, patches) < 1e-10)
        True
    """
    student, target = F.normalize(student, dim=-1), F.normalize(target, dim=-1)
    return (student @ student.mT - target @ target.mT).square().mean()


@in_float32
def soft_neighbour_loss(
    student: Float[Tensor, "2 r d"],
    teacher: Float[Tensor, "2 r d"],
    images: Int[Tensor, " r"],
    bank: MemoryBank,
    *,
    neighbours: int,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.05,
) -> Float[Tensor, ""]:
    """Cross-entropy between the teacher's and the student's softmax over similarities to a bank's rows.

    For each row of one view, the teacher's distribution is the softmax of its cosine similarities to its m nearest
    neighbours in the bank of that view. The student's distribution is that of the same row in the other view, over the
    same neighbours. Rows without a neighbour do not count. Not in the paper; related to NeCo (Pariza et al. 2025),
    which sorts neighbours, and to the retrieval of Hummingbird (Balazevic et al. 2023).

    Args:
        student: (2, R, D) objects or patches of both views of one group of images, row-aligned, any scale.
        teacher: (2, R, D) the teacher's rows of the same objects or patches.
        images: (R,) image of each row; the bank's rows of the same image are excluded.
        bank: memory bank of earlier teacher rows.
        neighbours: m, the number of neighbours.
        student_temperature: temperature of the student's softmax.
        teacher_temperature: temperature of the teacher's softmax; lower values give sharper targets.

    Returns:
        The mean of both views' means.

    Example:
        >>> bank = MemoryBank(num_images=10, num_objects=2, dim=8)
        >>> bank.push(torch.randn(2, 4, 8), torch.tensor([0, 0, 1, 1]), counts=[2, 2])
        >>> student = torch.randn(2, 3, 8, requires_grad=True)
        >>> loss = soft_neighbour_loss(student, torch.randn(2, 3, 8), torch.tensor([0, 5, 6]), bank, neighbours=2)
        >>> loss.backward()
    """
    rows = bank.rows
    means: list[Tensor] = []
    for view in (0, 1):
        cosines, places = top_rows(teacher[view], rows, view, images, neighbours)

        def of_block(queries: Tensor, cosines: Tensor, places: Tensor, view: int = view) -> Float[Tensor, " block"]:
            found = places != NO_MATCH
            directions = at_least_float32(rows.values[view, places]).masked_fill(~found[..., None], 0)
            own = torch.einsum("rd,rmd->rm", F.normalize(queries, dim=-1), directions)
            return _cross_entropy(own / student_temperature, cosines / teacher_temperature, found)

        size = rows_per_block(neighbours * student.shape[2], student.device)
        entropies = torch.cat(in_blocks(of_block, student[1 - view], cosines, places, size=size))
        means.append(entropies.sum() / (places[:, 0] != NO_MATCH).sum().clamp_min(1))
    return torch.stack(means).mean()


@torch.no_grad()
def top_rows(
    queries: Float[Tensor, "r d"], rows: Rows, view: int, images: Int[Tensor, " r"], count: int
) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
    """Find the `count` rows of a view with the greatest cosine similarity to each query; see `nearest_rows`.

    Returns:
        (R, count) similarities, descending, and (R, count) indices of rows. If there are fewer rows, the remaining
        similarities are -inf and their indices `NO_MATCH`.
    """
    best = queries.new_full((len(queries), count), -torch.inf)
    nearest = torch.full_like(best, NO_MATCH, dtype=torch.long)
    for start, similarity in similarities(queries, rows, view, images):
        values, found = similarity.topk(min(count, similarity.shape[1]), dim=1)
        best, places = torch.cat((best, values), dim=1).topk(count, dim=1)
        nearest = torch.cat((nearest, found + start), dim=1).gather(1, places)
    return best, nearest.where(best > -torch.inf, NO_MATCH)


def _cross_entropy(
    student: Float[Tensor, "r m"], teacher: Float[Tensor, "r m"], found: Bool[Tensor, "r m"]
) -> Float[Tensor, " r"]:
    """H(p_teacher, p_student) of each row's logits, over the neighbours found."""
    nothing = torch.finfo(student.dtype).min
    targets = teacher.masked_fill(~found, nothing).softmax(dim=-1) * found
    return -(targets * student.masked_fill(~found, nothing).log_softmax(dim=-1)).sum(dim=-1)
