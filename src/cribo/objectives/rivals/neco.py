"""NeCo (Pariza et al. 2025): student and teacher must rank the neighbours of a patch in the same order.

In the overlap of two crops, student and teacher compare the same places with the same patches of other images, or of
earlier batches in a queue. A differentiable sorting network ranks these references by similarity, and the student
learns the teacher's ranks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.base.bounds import above, at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch, Sample
from cribo.method import Crops, sample_crops
from cribo.method.blocks import rows_per_block
from cribo.method.precision import in_float32
from cribo.objectives.banks import RowQueue
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.crops import (
    CropSampler,
    augmented_crops,
    check_local_crops,
    concatenate_crops,
    crop_noise,
    multi_crop,
)
from cribo.objectives.mlp import make_head, seeded_weights
from cribo.objectives.overlap import align_overlap, overlap_area, overlap_boxes
from cribo.objectives.rivals.sorting import SortingKind, SortingNetwork
from cribo.objectives.self_distillation import Network, StudentTeacher
from cribo.objectives.trunk import encode, encode_frozen

Similarity = Literal["cosine", "euclidean"]

LEAST_OVERLAP = 0.01
"""Smallest overlap of a local and a global crop, as a share of the image; twice as much for the global crops."""

_LOCAL_SIZE = 98
_CROP_ATTEMPTS = 100
_QUEUED_PATCHES = 10  # of each global crop of an image


class OverlappingCrops(CropSampler):
    """Transform of an image into overlapping global and local crops, with the boxes of the overlaps.

    Crops are redrawn until each overlaps both global crops by more than `LEAST_OVERLAP` of the image, and the global
    crops each other by twice as much. After a hundred draws, the second global crop is the first, and local crops are
    centred on the overlap of the global ones.

    A batch also contains `boxes` (B, V, V, 4), the overlaps of all pairs of crops as in `overlap_boxes`, global crops
    first, and `flips` (B, V).
    """

    def draw_crops(self, height: int, width: int, generator: torch.Generator) -> list[Crops]:
        """Draw the global crops and the local ones."""
        views = self._draw_global(height, width, generator)
        return [views, self._draw_local(height, width, generator, views)]

    def places(self, crops: Crops, generator: torch.Generator) -> Sample:
        """Return the overlaps."""
        return {"boxes": overlap_boxes(crops), "flips": crops.flips}

    def _draw_global(self, height: int, width: int, generator: torch.Generator) -> Crops:
        for _ in range(_CROP_ATTEMPTS):
            views = self.sets[0].draw(height, width, generator)
            if overlap_area(views)[0, 1] > 2 * LEAST_OVERLAP * height * width:
                return views
        views = self.sets[0].draw(height, width, generator)
        return Crops(views.boxes[[0, 0]], views.flips)

    def _draw_local(self, height: int, width: int, generator: torch.Generator, views: Crops) -> Crops:
        recipe, count = self.sets[1].recipe, self.sets[1].count
        accepted: list[Crops] = []
        for _ in range(_CROP_ATTEMPTS):
            pair = sample_crops(height, width, recipe, generator=generator)
            area = overlap_area(concatenate_crops([views, pair]))[:2, 2:]
            overlaps = (area > LEAST_OVERLAP * height * width).all(dim=0)
            accepted.append(Crops(pair.boxes[overlaps], pair.flips[overlaps]))
            if sum(len(crops.flips) for crops in accepted) >= count:
                return concatenate_crops(accepted, limit=count)
        pair = sample_crops(height, width, recipe, generator=generator)
        boxes = _centred(pair.boxes[:1], views, (height, width))
        centred = Crops(boxes.expand(count, -1), pair.flips[:1].expand(count))
        return concatenate_crops([*accepted, centred], limit=count)


def _centred(boxes: Int[Tensor, "n 4"], views: Crops, size: tuple[int, int]) -> Int[Tensor, "n 4"]:
    """Move boxes to the centre of the overlap of two views, inside the image."""
    start = views.boxes[:, :2].amax(dim=0)
    end = (views.boxes[:, :2] + views.boxes[:, 2:]).amin(dim=0)
    sides = boxes[:, 2:]
    places = ((start + end - sides) // 2).clamp_min(0).minimum(torch.tensor(size) - sides)
    return torch.cat((places, sides), dim=1)


class NeCo(StudentTeacher):
    """Consistency of patch neighbours, for pretrained networks with patch tokens or a feature map.

    Reads `views` (the global crops; the others differ in size and area), `backbone`, `head` (its MLP), `optim`, and
    `objects.group_size`: without a queue, the references of a patch are drawn from the images of its group.

    The released code draws references from the whole batch of a device, or for DINOv2 from a queue, to which it adds
    the batch before the losses; here, the batch is added after the step, so that results do not depend on micro-batches
    and devices. It updates the teacher before the optimiser's step, and computes boxes for 98 pixels in local crops
    where the network sees 96. It resizes crops bilinearly and never flips them: `views.interpolation` bilinear and
    `views.flip` 0.

    Args:
        setting: the run.
        local_crops: number of local crops per image.
        local_size: side of a local crop in pixels. [98, or the next lower multiple of the patch size]
        local_area: (low, high) share of the image that a local crop covers.
        grid: an overlap is divided into grid x grid patches, and each is compared with as many references.
        similarity: order of the references: `cosine` similarity, or `euclidean` distance.
        sorting: sorting network: `bitonic`, or `odd_even`, whose ranks are softer.
        queue: number of patches of each global crop in the queue, to which each image adds ten, drawn at random; 0 for
            none.
        own_teacher_head: start the teacher's head from random weights of its own, as in the released code; otherwise it
            is a copy of the student's, and the loss starts at its lower bound.
        steepness: (student, teacher) steepness of the sorting networks; larger values give harder ranks. The released
            code has 100 for both. From random weights, give the teacher a larger value: with equal ones, all references
            become equally similar.

    Raises:
        ConfigError: a value out of range.
    """

    columns = Columns(
        labels={"neco": "NeCo", "rank_entropy": "entropy of the teacher's ranks"},
        progress={"rank_entropy": "entropy {:.2f}"},
    )
    # optim.lr is the rate of the head, which starts from random weights. With that of the preset `adapt`, 1e-4, both
    # parts have the released rates.
    lr_factors = {"backbone.": 0.1}

    student: Network
    teacher: Network

    def __init__(
        self,
        setting: Setting,
        *,
        local_crops: Annotated[int, at_least(1)] = 4,
        local_size: int | None = None,
        local_area: tuple[float, float] = (0.05, 0.25),
        grid: Annotated[int, at_least(2)] = 7,
        similarity: Similarity = "cosine",
        sorting: SortingKind = "bitonic",
        queue: Annotated[int, at_least(0)] = 0,
        own_teacher_head: bool = False,
        steepness: tuple[Annotated[float, above(0)], Annotated[float, above(0)]] = (100.0, 100.0),
    ) -> None:
        super().__init__(setting)
        options = setting.options
        self.student = Network(setting.build_backbone(), options.head, levels={}, seed=options.seed)
        self.teacher = self.student.make_teacher()
        if own_teacher_head:
            with seeded_weights(options.seed, purpose=4):
                head = make_head(self.student.backbone.embed_dim, options.head)
            self.teacher.head = head.requires_grad_(False)
        backbone, recipe = self.student.backbone, setting.options.views
        if local_size is None:
            local_size = max(1, _LOCAL_SIZE // backbone.patch_size) * backbone.patch_size
        check_local_crops(local_size, local_area, backbone, views=recipe.size)
        for name, high, least in (
            ("views.area", recipe.area[1], 2 * LEAST_OVERLAP),
            ("objective.args.local_area", local_area[1], LEAST_OVERLAP),
        ):
            if high <= least:
                raise ConfigError(
                    f"{name} must end above {least:g} for crops that overlap by that share of the image, got {high:g}"
                )
        self.grid = grid
        self.similarity: Similarity = similarity
        self.student_sorting = SortingNetwork(grid**2, sorting, steepness=steepness[0])
        self.teacher_sorting = SortingNetwork(grid**2, sorting, steepness=steepness[1])
        self.images_per_group = setting.options.objects.group_size
        # A row has a patch of each global crop.
        self.queue = RowQueue(queue, 2 * options.head.bottleneck_dim) if queue else None
        self._queued: list[Float[Tensor, "r 2*e"]] = []  # of the step's micro-batches
        # Local crops differ in size and area only.
        sets = multi_crop(
            recipe, count=local_crops, size=local_size, area=local_area, blur=recipe.blur, solarise=recipe.solarise
        )
        # `order` (B, P, n): a random number for each of the n patches of an overlap in each of P pairs of crops.
        numbers = {"order": partial(torch.rand, (len(crop_pairs(2 + local_crops)), grid**2))}
        if queue:  # `queued` (B, 2, 10): patches of both global crops for the queue
            numbers["queued"] = partial(_draw_patches, (recipe.size // backbone.patch_size) ** 2)
        self.crops = OverlappingCrops(*sets, drop_path_sites=backbone.num_drop_path_sites, numbers=numbers)

    def samples(self) -> OverlappingCrops:
        """Return the transform to crops that overlap."""
        return self.crops

    def forward(self, batch: Batch, step: Step) -> Output:
        """Cross-entropy between the teacher's and the student's ranks over all pairs of a global and another crop.

        Raises:
            ValueError: the batch is not a whole number of groups.
        """
        self.image_groups(len(batch))  # raises errors before any work
        backbone, config = self.student.backbone, self.options.backbone
        parts = augmented_crops(batch, self.options.views, backbone)
        inputs = [encode_frozen(self.teacher.backbone, views, config) for views in parts]
        with torch.no_grad():
            features = encode(self.teacher.backbone, inputs[0])
            teacher = _maps(self.teacher, features.tokens, features.grid, len(batch))
        students: list[Float[Tensor, "b e h w"]] = []
        for views, noise in zip(inputs, crop_noise(batch), strict=True):
            features = encode(backbone, views, drop_path_noise=noise)
            students += _maps(self.student, features.tokens, features.grid, len(batch))
        boxes = batch["boxes"]
        pairs = aligned_pairs(teacher, students, boxes[:, :2], boxes[:, :, :2], batch["flips"], grid=self.grid)
        if self.queue is not None:
            self._queued.append(_queue_rows(teacher, batch["queued"]))
        networks = self.student_sorting, self.teacher_sorting
        losses, entropies = neighbour_losses(
            *pairs, self._references(pairs[0], batch["order"]), networks, similarity=self.similarity
        )
        return Output({"neco": losses.mean()}, {"rank_entropy": entropies.mean()})

    def _references(self, teacher: Float[Tensor, "p b n e"], order: Float[Tensor, "b p n"]) -> Float[Tensor, "p b n e"]:
        """Draw the references of each image and pair of crops from the queue, or while it is empty from its group."""
        if self.queue is None or not len(self.queue):
            grouped = order.unflatten(0, (-1, self.images_per_group))  # (groups, images, P, n)
            return references_of(teacher, grouped.permute(2, 0, 1, 3).flatten(2).argsort(dim=-1, stable=True))
        rows = self.queue.read().to(teacher.dtype).unflatten(1, (2, -1)).transpose(0, 1)  # (2, entries, E)
        drawn = (order.transpose(0, 1) * len(self.queue)).long()  # (P, B, n)
        crops = torch.tensor([first for first, _ in crop_pairs(self.crops.sets[1].count + 2)], device=drawn.device)
        return rows[crops[:, None, None], drawn]

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Add the patches of all ranks to the queue, in the order of the batch, and update the teacher."""
        if self.queue is not None:
            rows, self._queued = torch.cat(self._queued), []
            self.queue.push(step.gather(rows).flatten(0, 1))
        super().after_step(step)


def _draw_patches(patches: int, *, generator: torch.Generator) -> Int[Tensor, "2 k"]:
    """Draw patches of two global crops for the queue."""
    return torch.stack([torch.randperm(patches, generator=generator)[:_QUEUED_PATCHES] for _ in range(2)])


def _queue_rows(maps: Float[Tensor, "2 b e h w"], drawn: Int[Tensor, "b 2 k"]) -> Float[Tensor, "r 2*e"]:
    """Return the drawn patches of each image, those of both crops side by side."""
    patches = maps.flatten(3).permute(1, 0, 3, 2)  # (B, 2, N, E)
    chosen = patches.gather(2, drawn[..., None].expand(-1, -1, -1, patches.shape[3]))
    return chosen.transpose(1, 2).flatten(2).flatten(0, 1)


def _maps(network: Network, tokens: Tensor, grid: tuple[int, int], images: int) -> Float[Tensor, "v b e h w"]:
    """Return the embeddings of all patches as maps of V crops."""
    return network.head(tokens).unflatten(0, (-1, images)).transpose(2, 3).unflatten(3, grid)


def crop_pairs(crops: int) -> list[tuple[int, int]]:
    """Return the pairs of a global crop, 0 or 1, and another crop.

    Example:
        >>> crop_pairs(3)
        [(0, 1), (0, 2), (1, 0), (1, 2)]
    """
    return [(first, other) for first in (0, 1) for other in range(crops) if other != first]


@in_float32
def aligned_pairs(
    teacher: Float[Tensor, "2 b e h w"],
    students: Sequence[Float[Tensor, "b e s s"]],
    teacher_boxes: Float[Tensor, "b 2 v 4"],
    student_boxes: Float[Tensor, "b v 2 4"],
    flips: Bool[Tensor, "b v"],
    *,
    grid: int,
) -> tuple[Float[Tensor, "p b n e"], Float[Tensor, "p b n e"]]:
    """Align the teacher's maps of global crops and the student's maps of other crops on their overlaps.

    Args:
        teacher: (2, B, E, h, w) the teacher's maps of the global crops.
        students: V maps (B, E, s, s) of the student, global crops first.
        teacher_boxes: (B, 2, V, 4) overlap of each global crop and each crop, (x1, y1, x2, y2) in fractions of the
            global crop.
        student_boxes: (B, V, 2, 4) the same overlaps in fractions of each crop.
        flips: (B, V) whether a crop is mirrored.
        grid: an overlap is divided into grid x grid patches.

    Returns:
        (P, B, n, E) teacher's and student's rows of the n = grid^2 patches, for each of `crop_pairs`.

    Source: as in the released code, apart from flips.
    """
    pairs = crop_pairs(len(students))
    return (
        torch.stack([align_overlap(teacher[g], teacher_boxes[:, g, v], flips[:, g], grid) for g, v in pairs]),
        torch.stack([align_overlap(students[v], student_boxes[:, v, g], flips[:, v], grid) for g, v in pairs]),
    )


def references_of(teacher: Float[Tensor, "p b n e"], order: Int[Tensor, "p k m"]) -> Float[Tensor, "p b n e"]:
    """Return the references of each image: n of the teacher's rows of its group, which no other image gets.

    Args:
        teacher: (P, B, n, E) the teacher's rows.
        order: (P, k, m) a permutation of the m = B n / k rows of each of k groups, which deals them to the images.
    """
    rows = teacher.reshape(*order.shape, teacher.shape[-1])
    return rows.gather(2, order[..., None].expand_as(rows)).view_as(teacher)


@in_float32
def neighbour_losses(
    teacher: Float[Tensor, "p b n e"],
    student: Float[Tensor, "p b n e"],
    references: Float[Tensor, "p b n e"],
    networks: tuple[SortingNetwork, SortingNetwork],
    *,
    similarity: Similarity = "cosine",
) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]]:
    """Cross-entropy between the teacher's and the student's ranks of the same references, for P pairs of crops.

    Args:
        teacher: (P, B, n, E) the teacher's rows, any scale.
        student: (P, B, n, E) the student's rows of the same patches.
        references: (P, B, n, E) rows of the teacher with which those of each image are compared.
        networks: networks of student and teacher that sort n numbers.
        similarity: what references are sorted by, in ascending order.

    Returns:
        (P,) losses, and (P,) the entropies of the teacher's ranks, which are lower bounds of the losses.

    Source: Pariza et al. 2025; details as in the released code.
    """
    numbers = [similarities(each, references, similarity).flatten(0, 2) for each in (student, teacher)]

    entropies = _InBlocks.apply(*numbers, *networks)
    assert isinstance(entropies, Tensor)
    losses, least = entropies.view(2, len(teacher), -1).mean(dim=2)
    return losses, least.detach()


def rank_entropies(
    student: Float[Tensor, "r n"], teacher: Float[Tensor, "r n"], networks: tuple[SortingNetwork, SortingNetwork]
) -> Float[Tensor, "2 r"]:
    """Cross-entropy between the teacher's and the student's ranks of each row, and entropy of the teacher's ranks.

    Args:
        student: (R, n) similarities of each of the student's rows to its n references.
        teacher: (R, n) those of the teacher's rows.
        networks: networks of student and teacher that sort n numbers.

    Returns:
        (2, R) means over the references.
    """
    ranks, targets = (network(numbers)[1] for network, numbers in zip(networks, (student, teacher), strict=True))
    return torch.stack([-(targets * other.log()).sum(dim=2).mean(dim=1) for other in (ranks, targets)])


class _InBlocks(torch.autograd.Function):
    """Entropies and gradients of each block of rows in turn, so that only one block's matrices are in memory.

    Takes half of the time of `torch.utils.checkpoint`, which keeps a graph for each block. These fragment the heap: for
    5,880 rows of 49 numbers, a process on a CPU grew by 900 MiB instead of 130.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, student_network: SortingNetwork, teacher_network: SortingNetwork
    ) -> Float[Tensor, "2 r"]:
        # Each layer of the network saves about half of a matrix (n, n) for each row.
        size = rows_per_block(len(student_network.comparators) * student_network.count**2 // 2, student.device)
        values, gradients = [], []
        with torch.set_grad_enabled(ctx.needs_input_grad[0]):
            for own, other in zip(student.split(size), teacher.split(size), strict=True):
                own = own.detach().requires_grad_(ctx.needs_input_grad[0])
                entropies = rank_entropies(own, other, (student_network, teacher_network))
                values.append(entropies.detach())
                if ctx.needs_input_grad[0]:
                    gradients += torch.autograd.grad(entropies[0].sum(), own)
        ctx.save_for_backward(*([torch.cat(gradients)] if gradients else []))
        return torch.cat(values, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradients[0][0][:, None] * own, None, None, None


def similarities(
    rows: Float[Tensor, "*b n e"], references: Float[Tensor, "*b m e"], similarity: Similarity
) -> Float[Tensor, "*b n m"]:
    """Return the cosine similarity or the Euclidean distance of each row and each reference."""
    if similarity == "cosine":
        return F.normalize(rows, dim=-1) @ F.normalize(references, dim=-1).transpose(-2, -1)
    # The matrix product that cdist uses by default loses the digits of small distances.
    return torch.cdist(rows, references, compute_mode="donot_use_mm_for_euclid_dist")
