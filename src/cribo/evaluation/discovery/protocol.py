"""Object discovery with LOST and TokenCut, scored by CorLoc."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import box_iou

from cribo.base.colours import rgb
from cribo.base.console import Phases, Progress, no_progress
from cribo.base.devices import resolve_workers
from cribo.base.drawing import line_handle, marker_handle
from cribo.base.errors import InputError
from cribo.base.files import write_json
from cribo.data.batches import Batches
from cribo.evaluation.discovery.config import DiscoverySettings
from cribo.evaluation.pictures import RIGHT, WRONG, Overlay, Page, Picture, Row, box, point, write_pages
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.results import EvaluationResult
from cribo.evaluation.run import Run
from cribo.features.patches import resize_image
from cribo.models import Backbone, evaluation_mode, normalise

log = logging.getLogger(__name__)
_MANY = 0.5  # share of images found as a whole above which a warning is logged
BOXES = "boxes.json"
"""File of the boxes found."""

_ANNOTATED = "#F0E442"
_TITLES = {"lost": "LOST", "tokencut": "TokenCut"}

FOUND = 0.5
"""Minimum IoU of a correctly found object."""

_PARTS = ("queries", "keys", "values")
_MAX_PATCHES = 10_000  # per image, since similarities and eigenvectors take gigabytes
EDGE = 1e-5
"""Weight of an edge between dissimilar patches in TokenCut's graph."""


@dataclass(frozen=True, kw_only=True)
class Discovery(DiscoverySettings, Protocol):
    """Object discovery with LOST and TokenCut on frozen features."""

    def prepare(self, run: Run) -> Self:
        """Set the features."""
        if self.size is not None and not run.backbone.takes_any_size:
            side = run.backbone.image_size
            raise InputError(
                f"size cannot be set for {run.backbone.name}, which only accepts images of {side} x {side} pixels, got "
                f"{self.size}: omit --size"
            )
        attention = run.backbone.has_attention
        # Keys do not pass through a linear readout, such as that of an adapted network.
        own = attention and run.backbone.readout is None
        settings = self.decided({"features": "keys" if own else "tokens"})
        if settings.features != "tokens" and not attention:
            raise InputError(
                f"features must be tokens for {run.backbone.name}, since the {settings.features} of its last layer "
                "are not accessible: use --features tokens"
            )
        return settings

    def measure(self, run: Run) -> Outcome:
        """Find an object in each image, and compare it with the annotated boxes."""
        import scipy

        images = run.data.val
        with Phases(run.console) as progress:
            found = discover(
                run.backbone.to(run.devices[0]),
                images,
                self,
                workers=resolve_workers(run.runtime.workers),
                progress=progress,
            )
        for name, part in found.items():
            if part.whole > _MANY * len(images):
                log.warning(
                    "%s found the whole image in %d of %d images, since the %s of their patches are too similar, or "
                    "too different, to separate an object: CorLoc then measures the data set, not the network. Use %s",
                    name,
                    part.whole,
                    len(images),
                    self.features,
                    self._alternative(name, run),
                )

        def write(result: EvaluationResult, folder: Path) -> None:
            write_json(folder / BOXES, {method: _named_boxes(part, images) for method, part in found.items()})
            page = partial(objects_page, found=found, images=images)
            write_pages(folder, "objects", range(len(images)), page, number=run.num_pictures)

        return Outcome(
            rows=[
                {"method": name, "corloc": part.corloc, "found": int(part.right.sum()), "whole_image": part.whole}
                for name, part in found.items()
            ],
            classes=(),
            packages={"scipy": scipy.__version__},
            write=write,
        )

    def _alternative(self, method: str, run: Run) -> str:
        """Return the settings with which a method may find parts of images."""
        settings = ["another --threshold"] if method == "tokencut" else []
        if run.backbone.has_attention:
            settings.insert(0, "--features tokens" if self.features == "values" else "--features values")
        return " or ".join(settings) or "another network"

    def places(self, folder: Path) -> dict[str, Any]:
        """Return the path of the boxes."""
        return {"boxes": folder / BOXES}


@dataclass(frozen=True)
class FoundObject:
    """An object on the grid of patches.

    Attributes:
        mask: patches of the object, a connected component (4-connectivity).
        seed: row and column of the seed patch.
    """

    mask: Bool[np.ndarray, "h w"]
    seed: tuple[int, int]

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the mask in patches; right and bottom are exclusive."""
        rows, columns = (np.flatnonzero(self.mask.any(axis=axis)) for axis in (1, 0))
        return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def lost(features: Float[Tensor, "n d"], grid: tuple[int, int], *, candidates: int = 100) -> FoundObject:
    """Find an object with LOST (Siméoni et al. 2021, section 3).

    The seed is the patch with the fewest similar patches (inner product above 0). It is expanded by those of the
    `candidates` patches with the fewest similar patches that are similar to the seed. Patches whose inner products with
    the expanded seed have a sum above 0 belong to objects; the connected component of the seed is returned.

    Args:
        features: patch features, row by row, not normalised.
        grid: (h, w).
        candidates: number of candidates for the expansion of the seed, k in the paper.
    """
    similarity = features @ features.T
    degree = (similarity.clone().fill_diagonal_(0) > 0).sum(dim=1)
    order = degree.argsort(stable=True)
    seed, near = order[0], order[:candidates]
    joined = near[similarity[seed, near] > 0]
    belongs = similarity[joined].sum(dim=0).view(grid) > 0
    return _object(belongs.cpu().numpy(), divmod(int(seed), grid[1]))


def tokencut(features: Float[Tensor, "n d"], grid: tuple[int, int], *, threshold: float = 0.2) -> FoundObject:
    """Find an object with TokenCut (Wang et al. 2022, section 3).

    Patches with a cosine above `threshold` are connected by an edge of weight 1, all others by 1e-5. The normalised cut
    of this graph is the second eigenvector of (D - E) y = λ D y, split at its mean. The object is on the side of the
    patch with the largest absolute value, its seed, and contains it.

    Where all pairs of patches are similar, or none is, all cuts are equal and the object is the whole image. Every
    vector with a sum of 0 is then an eigenvector; the one that a solver returns depends on its algorithm, the order of
    the patches and the shape of the grid, but not on the image.

    Args:
        features: patch features, row by row.
        grid: (h, w).
        threshold: τ in the paper.
    """
    from scipy.linalg import eigh

    unit = F.normalize(features.double(), dim=1)
    similar = unit @ unit.T > threshold
    if similar.all() or similar.sum() <= len(similar):
        return FoundObject(np.ones(grid, dtype=bool), (0, 0))
    edges = torch.where(similar, 1.0, EDGE).cpu().numpy()
    scale = 1 / np.sqrt(edges.sum(axis=1))
    # Symmetric form of the generalised eigenvalue problem, whose eigenvectors are D^(1/2) y.
    laplacian = np.eye(len(edges)) - scale[:, None] * edges * scale
    vector = scale * eigh(laplacian, subset_by_index=[1, 1])[1][:, 0]
    seed = int(np.abs(vector).argmax())
    side = vector > vector.mean()
    return _object((side if side[seed] else ~side).reshape(grid), divmod(seed, grid[1]))


def _object(belongs: Bool[np.ndarray, "h w"], seed: tuple[int, int]) -> FoundObject:
    """Return the connected component of the seed among the patches that belong to objects."""
    from scipy.ndimage import label

    belongs[seed] = True  # the sum of LOST is 0 if the seed's features are 0
    components = np.empty(belongs.shape, dtype=np.int32)
    label(belongs, output=components)
    return FoundObject(components == components[seed], seed)


@dataclass(frozen=True)
class Discovered:
    """Objects found by a method.

    Attributes:
        boxes: (n, 4) left, top, right and bottom in pixels of each image.
        right: (n,) whether the IoU with any annotated object is at least 0.5.
        objects: objects on the grid of patches.
        patches: (n, 2) height and width of a patch in pixels of each image.
    """

    boxes: Float64[Tensor, "n 4"]
    right: Bool[Tensor, " n"]
    objects: list[FoundObject]
    patches: Float64[Tensor, "n 2"]

    @property
    def corloc(self) -> float:
        """Fraction of images with a correctly found object."""
        return float(self.right.double().mean())

    @property
    def whole(self) -> int:
        """Number of images whose object is the whole image."""
        return sum(bool(part.mask.all()) for part in self.objects)


@torch.no_grad()
def discover(
    backbone: Backbone, images: Any, settings: DiscoverySettings, *, workers: int = 0, progress: Progress = no_progress
) -> Mapping[str, Discovered]:
    """Find one object in each image with each method.

    Args:
        backbone: the network, on its device.
        images: an ImageSource with `boxes(index)`; each image must have an object that is not a crowd.
        settings: settings of the protocol after `prepare`.
        workers: number of worker processes that read images.
        progress: progress callback.

    Returns:
        Found objects, by method.

    Raises:
        InputError: an image has too many patches, or features are not finite.
        UnreadableImage: an image is corrupt.
    """
    methods = {
        "lost": partial(lost, candidates=settings.candidates),
        "tokencut": partial(tokencut, threshold=settings.threshold),
    }
    found: dict[str, list[FoundObject]] = {method: [] for method in settings.methods}
    boxes: dict[str, list[Tensor]] = {method: [] for method in settings.methods}
    patches: list[tuple[float, ...]] = []
    loader = Batches(_Resized(images, settings.size, backbone), itemgetter(0), workers=workers)
    for index, (pixels, size) in enumerate(loader):
        features, grid = _features(backbone, torch.from_numpy(pixels), settings.features, images.name(index))
        patches.append(tuple(backbone.patch_size * own / new for own, new in zip(size, pixels.shape[1:], strict=True)))
        for method in settings.methods:
            part = methods[method](features, grid)
            found[method].append(part)
            boxes[method].append(_corners(part, patches[-1], size))
        progress("objects", index + 1, len(images))
    return {
        method: Discovered(
            torch.stack(boxes[method]),
            torch.tensor([_is_found(box, images.boxes(index)) for index, box in enumerate(boxes[method])]),
            found[method],
            torch.tensor(patches, dtype=torch.float64),
        )
        for method in settings.methods
    }


def _features(
    backbone: Backbone, pixels: UInt8[Tensor, "c h w"], kind: str, name: str
) -> tuple[Float[Tensor, "n d"], tuple[int, int]]:
    """Return the patch features of an image, padded to whole patches with the mean colour, and their grid."""
    patch = backbone.patch_size
    height, width = (math.ceil(side / patch) for side in pixels.shape[1:])
    if height * width > _MAX_PATCHES:
        raise InputError(
            f"{name} must have at most {_MAX_PATCHES:,} patches, got {height} x {width}: reduce --size to "
            f"{int(patch * _MAX_PATCHES**0.5)}"
        )
    device = next(backbone.parameters()).device
    image = normalise(pixels.to(device).float()[None] / 255, mean=backbone.mean, std=backbone.std)
    image = F.pad(image, (0, width * patch - image.shape[3], 0, height * patch - image.shape[2]))
    with evaluation_mode(backbone):
        if kind == "tokens":
            features = backbone.encode(image).tokens[0]
        else:
            parts = backbone.attention_inputs(backbone.encode_trunk(image, backbone.depth - 1))
            features = parts[_PARTS.index(kind)][0, backbone.model.num_prefix_tokens :]
    if not features.isfinite().all():
        raise InputError(f"the features of the backbone for {name} are not finite")
    return features.float(), (height, width)


def _corners(part: FoundObject, patch: tuple[float, ...], size: tuple[int, int]) -> Float64[Tensor, " 4"]:
    """Return the box of an object in pixels of its image, clipped to exclude the padding."""
    left, top, right, bottom = part.box
    corners = left * patch[1], top * patch[0], min(right * patch[1], size[1]), min(bottom * patch[0], size[0])
    return torch.tensor(corners, dtype=torch.float64)


def _is_found(box: Float64[Tensor, " 4"], boxes: Any) -> bool:
    return bool((box_iou(box[None], boxes.corners[~boxes.crowd]) >= FOUND).any())


class _Resized(Dataset[Any]):
    """Images resized to a longer side or the fixed input size of a network, with their original sizes."""

    def __init__(self, images: Any, size: int | None, backbone: Backbone) -> None:
        self.images, self.size = images, size
        self.only = None if backbone.takes_any_size else backbone.image_size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[UInt8[np.ndarray, "c h w"], tuple[int, int]]:
        image = self.images.load(index)
        height, width = image.shape[1:]
        target = height, width
        if self.only is not None:
            target = self.only, self.only
        elif self.size is not None:
            scale = self.size / max(height, width)
            target = max(1, round(height * scale)), max(1, round(width * scale))
        if target != (height, width):
            image = resize_image(image, target, "bilinear")
        return image.numpy(), (height, width)


def objects_page(indices: Sequence[int], found: Mapping[str, Discovered], images: Any) -> Page:
    """Return a page of annotated objects, and the objects found by each method: patches in blue, box and seed.

    Args:
        indices: indices of the images, at least one.
        found: found objects, by method.
        images: images of the objects.
    """

    def row_of(index: int) -> Row:
        image, boxes = images.load(index), images.boxes(index)
        annotated = zip(boxes.corners.tolist(), boxes.crowd.tolist(), strict=True)
        pictures = [
            Picture(image, [box(corners, _ANNOTATED, dashed=crowd) for corners, crowd in annotated]),
            *(Picture(image, _overlays(part, index)) for part in found.values()),
        ]
        verdicts = (f"{_TITLES[name]} {'right' if part.right[index] else 'wrong'}" for name, part in found.items())
        return Row(images.name(index), ", ".join(verdicts), pictures)

    handles = [
        line_handle("annotated object", _ANNOTATED),
        line_handle("found, IoU ≥ 0.5", rgb(RIGHT)),
        line_handle("not an object", rgb(WRONG)),
        marker_handle("seed", "white", "black"),
    ]
    return Page(("objects", *(_TITLES[name] for name in found)), list(map(row_of, indices)), handles)


def _named_boxes(discovered: Discovered, images: Any) -> dict[str, list[float]]:
    """Return the boxes of `boxes.json`, by the name of their image."""
    boxes = discovered.boxes.tolist()
    return {images.name(index): [round(side, 2) for side in each] for index, each in enumerate(boxes)}


def _overlays(discovered: Discovered, index: int) -> list[Overlay]:
    """Return patches, box and seed of the object in an image."""
    part, (down, across) = discovered.objects[index], discovered.patches[index].tolist()
    height, width = part.mask.shape
    tint = np.zeros((height, width, 4))
    tint[part.mask] = (0.1, 0.4, 1.0, 0.45)
    extent = -0.5, width * across - 0.5, height * down - 0.5, -0.5
    row, column = part.seed
    return [
        lambda axes: axes.imshow(tint, extent=extent, interpolation="nearest"),
        box(discovered.boxes[index].tolist(), rgb(RIGHT if discovered.right[index] else WRONG)),
        point(((column + 0.5) * across - 0.5, (row + 0.5) * down - 0.5), "white", edge="black", size=4),
    ]
