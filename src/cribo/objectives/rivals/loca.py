"""LOCA (Caron et al. 2022): predict where patches of query crops lie in a reference crop, and their clusters.

The student encodes a large query crop, of which most patches are dropped, and small ones. A position head
compares their patches with the teacher's features of a few patches of the reference crop and predicts the position of
each in its grid. The student also predicts the teacher's cluster of the reference patch at the same place; Sinkhorn
balances these clusters.
"""

import math
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.layers.mlp import Mlp
from timm.layers.weight_init import lecun_normal_
from torch import Tensor, nn

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch, Sample
from cribo.method import Crops, SelfDistillation, ViewRecipe
from cribo.method.blocks import in_blocks, rows_per_block
from cribo.method.precision import in_float32
from cribo.models import Backbone
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.config import HeadConfig
from cribo.objectives.crops import (
    CropSampler,
    CropSet,
    augmented_crops,
    check_local_crops,
    crop_noise,
    multi_crop,
)
from cribo.objectives.mlp import seeded_weights
from cribo.objectives.rivals.dropping import accept_drops, gather_tokens
from cribo.objectives.self_distillation import Network, StudentTeacher
from cribo.objectives.sinkhorn import sinkhorn_centre
from cribo.objectives.trunk import encode, encode_frozen

_NO_PLACE = -1
_CROP_ATTEMPTS = 100


class ReferenceAndQueries(CropSampler):
    """Transform of an image into a reference crop and query crops, with the places of their patches in the reference.

    The first global crop is the reference, which is not mirrored; the second one and the local crops are queries. A
    batch also contains `reference_kept` (B, s), consecutive patches of the reference, `query_kept` (B, k), random
    patches of the second global crop, and `places` (B, k + V n), the index in the grid of the reference of each of
    these patches and of the n patches of each local crop, or -1 (see `reference_places`).

    Args:
        sets: sets of global and local crops.
        drop_path_sites: number of uniform random numbers to draw per crop.
        patch_size: side of a patch in pixels.
        reference_kept: s, number of patches of the reference.
        query_kept: k, number of patches of the second global crop.
    """

    def __init__(
        self, *sets: CropSet, drop_path_sites: int, patch_size: int, reference_kept: int, query_kept: int
    ) -> None:
        super().__init__(*sets, drop_path_sites=drop_path_sites)
        self.patch_size = patch_size
        self.reference_kept = reference_kept
        self.query_kept = query_kept

    def draw_crops(self, height: int, width: int, generator: torch.Generator) -> list[Crops]:
        """Draw the global crops and the local ones."""
        views, local = (
            crops_of_uniform_height(height, width, each.recipe, count=each.count, generator=generator)
            for each in self.sets
        )
        return [Crops(views.boxes, views.flips & torch.tensor([False, True])), local]

    def places(self, crops: Crops, generator: torch.Generator) -> Sample:
        """Draw the patches that are kept, and return the places of queries in the reference."""
        size, local_size = (each.recipe.size for each in self.sets)
        grid = size // self.patch_size
        kept = torch.randperm(grid**2, generator=generator)[: self.query_kept]
        offset = torch.randint(grid**2 - self.reference_kept + 1, (1,), generator=generator)
        find = partial(reference_places, crops.boxes[0], patch_size=self.patch_size, reference_grid=grid)
        random = find(Crops(crops.boxes[1:2], crops.flips[1:2]), size=size)[0, kept]
        focal = find(Crops(crops.boxes[2:], crops.flips[2:]), size=local_size)
        return {
            "reference_kept": offset + torch.arange(self.reference_kept),
            "query_kept": kept,
            "places": torch.cat((random, focal.flatten())),
        }


def crops_of_uniform_height(
    height: int, width: int, recipe: ViewRecipe, *, count: int, generator: torch.Generator
) -> Crops:
    """Draw random crops whose height, instead of their area, is uniformly distributed.

    The aspect ratio is drawn first, then a height between those of the smallest and the largest area. Small crops are
    more frequent than if the area were uniform. If none of 100 shapes fits, the crop is the whole image.

    Args:
        height: of the image.
        width: of the image.
        recipe: ranges of area and aspect ratio, and the probability of a flip.
        count: V, number of crops.
        generator: source of the random numbers.

    Source: the released code, whose crops are those of TensorFlow's `sample_distorted_bounding_box`.

    Example:
        >>> recipe, generator = ViewRecipe(area=(0.05, 0.32)), torch.Generator().manual_seed(0)
        >>> crops_of_uniform_height(375, 500, recipe, count=9, generator=generator).boxes.shape
        torch.Size([9, 4])
    """
    boxes = [_box_of_uniform_height(height, width, recipe, generator) for _ in range(count)]
    return Crops(torch.tensor(boxes), torch.rand(count, generator=generator) < recipe.flip)


def _box_of_uniform_height(
    height: int, width: int, recipe: ViewRecipe, generator: torch.Generator
) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a crop."""
    smallest, largest = (share * height * width for share in recipe.area)
    for _ in range(_CROP_ATTEMPTS):
        shape, *place = torch.rand(4, dtype=torch.float64, generator=generator).tolist()
        aspect = recipe.aspect[0] + shape * (recipe.aspect[1] - recipe.aspect[0])
        tallest = min(round(math.sqrt(largest / aspect)), height, int((width + 0.5) / aspect))
        lowest = min(round(math.sqrt(smallest / aspect)), tallest)
        crop_height = lowest + int(place[0] * (tallest - lowest + 1))
        crop_width = round(crop_height * aspect)
        if 0 < crop_width <= width and smallest <= crop_height * crop_width <= largest:
            top, left = int(place[1] * (height - crop_height + 1)), int(place[2] * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    return 0, 0, height, width


def reference_places(
    reference: Int[Tensor, " 4"], queries: Crops, *, size: int, patch_size: int, reference_grid: int
) -> Int[Tensor, "v n"]:
    """Return the index of the reference patch at the place of each patch of V query crops, or -1 outside the reference.

    The place of a patch is the pixel of the source image that nearest-neighbour resizing puts at its centre.

    Args:
        reference: (4,) top, left, height, width of the reference crop, which is not mirrored.
        queries: V crops in pixels of the same image.
        size: side of the query crops in pixels, after resizing.
        patch_size: side of a patch in pixels.
        reference_grid: number of patches along each side of the reference.

    Returns:
        (V, n) indices in row-major order, for the n patches of each crop.

    Source: released code, in exact integer arithmetic.

    Example:
        >>> queries = Crops(torch.tensor([[16, 0, 32, 32]]), torch.tensor([False]))
        >>> reference_places(torch.tensor([0, 0, 32, 32]), queries, size=32, patch_size=16, reference_grid=2)
        tensor([[ 2,  3, -1, -1]])
    """
    centres = 2 * patch_size * torch.arange(size // patch_size) + patch_size + 1  # in half pixels of the crop

    def along(axis: int) -> Int[Tensor, "v g"]:
        start, length = queries.boxes[:, axis, None], queries.boxes[:, axis + 2, None]
        pixels = start + centres * length // (2 * size) - reference[axis]
        index = (2 * pixels + 1) * reference_grid // (2 * reference[axis + 2])
        return index.where((pixels >= 0) & (pixels < reference[axis + 2]), _NO_PLACE)

    rows, columns = along(0)[:, :, None], along(1)[:, None]
    columns = torch.where(queries.flips[:, None, None], columns.flip(2), columns)
    return (rows * reference_grid + columns).where((rows >= 0) & (columns >= 0), _NO_PLACE).flatten(1)


class PositionHead(nn.Module):
    """Predict the position of query patches in the reference: a block of cross-attention, a norm and a linear layer.

    Args:
        dim: D, channels of the patches.
        positions: P, number of patches of the reference.
        heads: number of attention heads, a divisor of D.
        hidden_dim: width of the block's MLP.

    Source: LOCA; initial weights as in the released code.
    """

    def __init__(self, dim: int, positions: int, *, heads: int, hidden_dim: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.query_norm, self.reference_norm, self.mlp_norm, self.norm = (norm(dim) for _ in range(4))
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = Mlp(dim, hidden_dim)
        self.predict = nn.Linear(dim, positions)
        for projection in self.attention.in_proj_weight.detach().chunk(3):
            nn.init.xavier_uniform_(projection)  # together, they would be smaller
        lecun_normal_(self.predict.weight)
        nn.init.zeros_(self.predict.bias)
        for layer in (self.attention.out_proj, self.mlp.fc1, self.mlp.fc2):
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, queries: Float[Tensor, "b q d"], reference: Float[Tensor, "b s d"]) -> Float[Tensor, "b q p"]:
        """Return the logits of each query's position, given some patches of the reference of the same image."""
        keys = self.reference_norm(reference)
        tokens = queries + self.attention(self.query_norm(queries), keys, keys, need_weights=False)[0]
        tokens = tokens + self.mlp(self.mlp_norm(tokens))
        return self.predict(self.norm(tokens))


@in_float32
def position_loss(logits: Float[Tensor, "r p"], places: Int[Tensor, " r"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of the predicted positions over the patches with a place; 0 without any.

    Args:
        logits: (R, P) logits of the query patches' positions.
        places: (R,) position of each, or -1 outside the reference.

    Source: LOCA, with the mean of the released code.
    """
    total = F.cross_entropy(logits, places, ignore_index=_NO_PLACE, reduction="sum")
    return total / (places != _NO_PLACE).sum().clamp_min(1)


@in_float32
def cluster_losses(
    student: Float[Tensor, "r e"], teacher: Float[Tensor, "r e"], places: Int[Tensor, " r"], level: SelfDistillation
) -> Float[Tensor, "2"]:
    """Cross-entropy of the clusters, and negative entropy of the mean prediction (me-max).

    The cross-entropy is a mean over the patches with a place, 0 without any; the mean prediction is over all patches.
    The logits are computed in blocks of rows, and again in the backward pass.

    Args:
        student: (R, E) the student's embeddings of the query patches.
        teacher: (R, E) the teacher's embeddings of the reference patches at the same places; not used without a place.
        places: (R,) position in the reference of each query patch, or -1.
        level: prototypes, centre and temperatures.

    Returns:
        (2,) both losses.

    Source: LOCA; me-max after Assran et al. 2022, in natural logarithms.
    """
    found = (places != _NO_PLACE).to(student.dtype)
    weights = found / found.sum().clamp_min(1)

    def of_block(student: Tensor, teacher: Tensor, weights: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, " l"]]:
        targets = ((teacher @ level.teacher_prototypes.T - level.centre) / level.teacher_temperature).softmax(dim=1)
        logits = (student @ level.student_prototypes.T / level.student_temperature).log_softmax(dim=1)
        return -weights @ (targets * logits).sum(dim=1), logits.exp().sum(dim=0)

    size = rows_per_block(len(level.student_prototypes), student.device)
    entropies, masses = zip(*in_blocks(of_block, student, teacher, weights, size=size), strict=True)
    mean = torch.stack(masses).sum(dim=0) / len(student)
    return torch.stack((torch.stack(entropies).sum(), -torch.special.entr(mean).sum()))


class LOCANetwork(Network):
    """Backbone, projection head, prototypes, and position head.

    Args:
        backbone: network whose patches are compared.
        config: sizes of the projection head, and the number of prototypes.
        positions: number of patches of the reference.
        seed: the only source of the heads' random weights.
    """

    def __init__(self, backbone: Backbone, config: HeadConfig, *, positions: int, seed: int) -> None:
        super().__init__(backbone, config, levels={"cluster": config.prototypes}, seed=seed)
        dim = backbone.embed_dim
        heads = math.gcd(dim, backbone.key_heads or 1)  # a readout changes D
        with seeded_weights(seed, purpose=3):
            self.position = PositionHead(dim, positions, heads=heads, hidden_dim=4 * dim)


class LOCA(StudentTeacher):
    """Prediction of the position and of the cluster of query patches in a reference crop.

    Reads `views` (the reference and the large query; `flip` applies to queries), `backbone`, `head`, `losses`
    (temperatures of the clusters), `optim`, and `objects.group_size`: targets are balanced over the reference patches
    of each group of images, and all means are over the query patches of a group. In the released code, a group is the
    images of one device, except that Sinkhorn and me-max use those of all devices. `losses.centring` is not read.

    As in the released code, stochastic depth applies to the teacher, too, and positions are added to queries. Differs
    from it in this: the patches that are kept are drawn for each image rather than once for the batch; crops are
    resized with antialiasing; brightness is scaled rather than shifted, and contrast changed about the mean of the
    image rather than of each channel; the heads' GELU is exact rather than approximated by tanh; biases do not decay;
    and the network resizes its position embedding for small queries in its own way, bicubically unless it starts from
    the released weights. The network may have a [CLS] token.

    Args:
        setting: the run.
        local_crops: number of small queries per image.
        local_size: side of a small query in pixels.
        local_area: (low, high) share of the image that a small query covers.
        reference_ratio: share of the reference's patches that the position head reads: consecutive ones.
        query_ratio: share of the large query's patches that the student encodes: random ones.

    Raises:
        ConfigError: the network cannot drop patches or has too few of them, or a value out of range.
    """

    columns = Columns(
        labels={
            "position": "position of patches",
            "cluster": "cluster of patches",
            "me_max": "negative entropy of the mean cluster",
            "position_accuracy": "correct positions",
        },
        progress={"position_accuracy": "{:.0%} correct positions"},
    )

    student: LOCANetwork
    teacher: LOCANetwork

    def __init__(
        self,
        setting: Setting,
        *,
        local_crops: Annotated[int, at_least(1)] = 9,
        local_size: int = 96,
        local_area: tuple[float, float] = (0.05, 0.32),
        reference_ratio: float = 0.2,
        query_ratio: float = 0.357,
    ) -> None:
        super().__init__(setting)
        options = setting.options
        backbone = setting.build_backbone()
        self.keep = accept_drops(backbone, "LOCA")
        patch_size, views = backbone.patch_size, options.views.size
        side = views // patch_size
        if side < 2:
            raise ConfigError(
                f"LOCA requires a grid of at least 2x2 patches, but {backbone.name} has patches of {patch_size} "
                f"pixels: set views.size to at least {2 * patch_size}, got {views}"
            )
        check_local_crops(local_size, local_area, backbone, views=views)
        self.crops = ReferenceAndQueries(
            *multi_crop(options.views, count=local_crops, size=local_size, area=local_area),
            drop_path_sites=backbone.num_drop_path_sites,
            patch_size=patch_size,
            reference_kept=_kept("reference_ratio", reference_ratio, side**2),
            query_kept=_kept("query_ratio", query_ratio, side**2),
        )
        self.images_per_group = options.objects.group_size
        self.student = LOCANetwork(backbone, options.head, positions=side**2, seed=options.seed)
        self.teacher = self.student.make_teacher()

    def samples(self) -> ReferenceAndQueries:
        """Return the transform to a reference and queries."""
        return self.crops

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the losses of the query patches of each group of images, and their mean over groups.

        Raises:
            ValueError: the batch is not a whole number of groups.
        """
        self.image_groups(len(batch))  # raises errors before any work
        views, focal = augmented_crops(batch, self.options.views, self.student.backbone)
        reference, random = views.chunk(2)
        return self.compare(reference, random, focal, batch, step)

    def compare(
        self,
        reference: Float[Tensor, "b c h w"],
        random: Float[Tensor, "b c h w"],
        focal: Float[Tensor, "vb c s s"],
        batch: Batch,
        step: Step,
    ) -> Output:
        """Return the losses of normalised crops.

        Args:
            reference: (B, C, S, S) reference crops.
            random: (B, C, S, S) large queries.
            focal: (VB, C, s, s) small queries, crop after crop.
            batch: kept patches, places and drop path noise of the images.
            step: sets the temperatures.
        """
        student, teacher, places = self.student, self.teacher, batch["places"]
        views_noise, focal_noise = crop_noise(batch)
        reference_noise, random_noise = views_noise.chunk(2) if views_noise is not None else (None, None)
        with torch.no_grad():
            patches = self._patches(teacher, reference, reference_noise)
            targets = teacher.head(patches)
            seen = gather_tokens(patches, batch["reference_kept"])
            targets_of_queries = gather_tokens(targets, places.clamp_min(0))
        with self.keep.only(batch["query_kept"]):
            kept = self._patches(student, random, random_noise)
        others = self._patches(student, focal, focal_noise).unflatten(0, (-1, len(batch)))
        queries = torch.cat((kept, others.transpose(0, 1).flatten(1, 2)), dim=1)
        positions, embeddings = student.position(queries, seen), student.head(queries)

        def of_group(rows: slice) -> Float[Tensor, "3"]:
            found = places[rows].flatten()
            position = position_loss(positions[rows].flatten(0, 1), found)
            level = self.level(targets[rows], step)
            clusters = (embeddings[rows].flatten(0, 1), targets_of_queries[rows].flatten(0, 1))
            return torch.cat((position[None], cluster_losses(*clusters, found, level)))

        losses = torch.stack([of_group(rows) for rows in self.image_groups(len(batch))]).mean(dim=0)
        correct = (positions.detach().argmax(dim=2) == places).sum()
        return Output(
            dict(zip(("position", "cluster", "me_max"), losses, strict=True)),
            {"position_accuracy": (correct, (places != _NO_PLACE).sum())},
        )

    def _patches(
        self, network: LOCANetwork, images: Tensor, noise: Float[Tensor, "b sites"] | None
    ) -> Float[Tensor, "b n d"]:
        """Encode images; return their patches."""
        inputs = encode_frozen(network.backbone, images, self.options.backbone)
        return encode(network.backbone, inputs, drop_path_noise=noise).tokens

    def level(self, targets: Float[Tensor, "b n e"], step: Step) -> SelfDistillation:
        """Return prototypes and temperatures, and the centre that balances the clusters of a group's reference patches.

        Args:
            targets: (B, N, E) the teacher's embeddings of all reference patches.
            step: sets the temperatures.
        """
        prototypes, temperature = self.teacher.prototypes("cluster").weight, self.teacher_temperature(step)
        return SelfDistillation(
            self.student.prototypes("cluster").weight,
            prototypes,
            sinkhorn_centre(targets.flatten(0, 1), prototypes, temperature=temperature),
            self.options.losses.student_temperature,
            temperature,
        )

    def schedules(self, step: Step) -> dict[str, float]:
        """Return the teacher's momentum and temperature."""
        return {**super().schedules(step), "teacher_temperature": self.teacher_temperature(step)}


def _kept(name: str, ratio: float, patches: int) -> int:
    """Return the number of patches of a share."""
    kept = round(patches * ratio)
    if not 0 < kept <= patches:
        raise ConfigError(f"objective.args.{name} must keep 1 to {patches} of {patches} patches, got {ratio}")
    return kept
