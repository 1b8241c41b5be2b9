"""Semantic correspondence: keypoints are matched by nearest features, and scored by PCK."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from cribo.base.colours import rgb
from cribo.base.console import Phases, Progress, no_progress
from cribo.base.drawing import marker_handle
from cribo.data.labelled.correspondence import Pair, PairedImages
from cribo.data.reading import image_size
from cribo.evaluation.config import require_whole_patches, square
from cribo.evaluation.correspondence.config import CorrespondenceSettings
from cribo.evaluation.pictures import RIGHT, WRONG, Overlay, Page, Picture, Row, box, line, point, write_pages
from cribo.evaluation.protocol import Outcome, PatchProtocol
from cribo.evaluation.run import Run
from cribo.features.extraction import EncodedView, PatchFeatures

_SIDE = 768  # of the square images in DIFT
_CHANNELS = 64  # number of channels upsampled at once


@dataclass(frozen=True, kw_only=True)
class Correspondence(CorrespondenceSettings, PatchProtocol):
    """Semantic correspondence by nearest features, as in DIFT's `eval_spair.py`."""

    def prepare(self, run: Run) -> Self:
        """Set the image size."""
        backbone = run.backbone
        side = _SIDE if backbone.takes_any_size else backbone.image_size
        settings = self.decided({"size": square(side, backbone.patch_size)})
        require_whole_patches(settings.size, backbone.patch_size)
        return settings

    def measure(self, run: Run) -> Outcome:
        """Match and score the keypoints of all pairs."""
        images = run.data.val
        features = run.patches(
            images, size=self.size, interpolation=self.interpolation, precision=self.precision, unit=False
        )
        with Phases(run.console) as progress:
            matches = match_pairs(features, images, device=run.devices[0], progress=progress)
        page = partial(pairs_page, matches=matches, images=images, alpha=self.alphas[0])
        return Outcome(
            rows=[row(matches, images, alpha) for alpha in self.alphas],
            classes=images.categories,
            write=lambda _, folder: write_pages(
                folder, "pairs", range(len(images.pairs)), page, number=run.num_pictures
            ),
        )


@torch.no_grad()
def match_pairs(
    features: PatchFeatures,
    images: PairedImages,
    *,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> list[Float[Tensor, "k 2"]]:
    """Match the keypoints of each source image in its target image.

    Args:
        features: patch features of all images.
        images: paired images.
        device: device of the matching.
        progress: progress callback.

    Returns:
        (k, 2) tensors, one per pair: x and y in pixels of the target.
    """
    matches: dict[int, Tensor] = {}
    order = sorted(range(len(images.pairs)), key=lambda number: images.pairs[number].target)
    for index, numbers in groupby(order, key=lambda number: images.pairs[number].target):
        size = image_size(images.path(index))
        target = _feature_map(features, index, device)
        norms = upsampled_norms(target, size)
        for number in numbers:
            pair = images.pairs[number]
            source = _feature_map(features, pair.source, device)
            points = features_at(source, pair.source_points.to(device), image_size(images.path(pair.source)))
            matches[number] = nearest_pixels(points, target, norms).cpu()
            progress("points of the pairs", len(matches), len(order))
    return [matches[number] for number in range(len(order))]


def features_at(
    features: Float[Tensor, "d h w"], points: Float[Tensor, "k 2"], size: tuple[int, int]
) -> Float[Tensor, "k d"]:
    """Return bilinearly interpolated features of unit length at the pixels of points.

    Equivalent to upsampling the feature map to the image, (D, height, width), and indexing it at [:, y, x].

    Args:
        features: feature map of an image.
        points: x and y in pixels.
        size: height and width of the image.
    """
    height, width = size
    last = points.new_tensor([width - 1, height - 1])
    pixels = points.floor().minimum(last)
    places = 2 * (pixels + 0.5) / (last + 1) - 1
    found = F.grid_sample(features[None], places[None, None], padding_mode="border", align_corners=False)
    return F.normalize(found[0, :, 0].T, dim=1)


def upsampled_norms(features: Float[Tensor, "d h w"], size: tuple[int, int]) -> Float[Tensor, "height width"]:
    """Return the L2 norms of the bilinearly upsampled features at all pixels."""
    parts = (F.interpolate(part[None], size=size, mode="bilinear")[0] for part in features.split(_CHANNELS))
    return sum((part.square().sum(dim=0) for part in parts), start=features.new_zeros(size)).sqrt()


def nearest_pixels(
    points: Float[Tensor, "k d"], target: Float[Tensor, "d h w"], norms: Float[Tensor, "height width"]
) -> Float[Tensor, "k 2"]:
    """Return x and y of the pixel with the highest cosine for each point.

    Args:
        points: features of the points.
        target: feature map of the target image.
        norms: `upsampled_norms` of the target.
    """
    # Inner products commute with upsampling.
    products = torch.einsum("kd,dhw->khw", points, target)
    cosines = F.interpolate(products[None], size=norms.shape, mode="bilinear")[0] / norms.clamp_min(1e-12)
    best = cosines.flatten(1).argmax(dim=1)
    return torch.stack((best % norms.shape[1], best // norms.shape[1]), dim=1).float()


def are_correct(pair: Pair, found: Float[Tensor, "k 2"], alpha: float) -> Bool[Tensor, " k"]:
    """Return whether points are within `alpha` times the longer side of the object's box of the ground truth."""
    left, top, right, bottom = pair.box
    return (found - pair.target_points).norm(dim=1) <= alpha * max(right - left, bottom - top)


def row(matches: Sequence[Float[Tensor, "k 2"]], images: PairedImages, alpha: float) -> dict[str, Any]:
    """Return the row of a result.

    PCK per image averages the fraction of correct points over pairs; PCK per point is the fraction over all points.
    """
    correct = [are_correct(pair, found, alpha).double() for pair, found in zip(images.pairs, matches, strict=True)]

    def per_image(parts: Sequence[Tensor]) -> float:
        return float(torch.stack([part.mean() for part in parts]).mean())

    def of(category: str) -> list[Tensor]:
        return [part for part, pair in zip(correct, images.pairs, strict=True) if pair.category == category]

    return {
        "alpha": alpha,
        "pck_image": per_image(correct),
        "pck_point": float(torch.cat(correct).mean()),
        "per_class": {category: per_image(of(category)) for category in images.categories},
        "per_class_point": {category: float(torch.cat(of(category)).mean()) for category in images.categories},
    }


def _feature_map(features: PatchFeatures, index: int, device: torch.device | str) -> Float[Tensor, "d h w"]:
    view = EncodedView(index)
    return features.features(view).to(device).float().T.unflatten(1, features.grid(view))


def pairs_page(
    numbers: Sequence[int], matches: Sequence[Float[Tensor, "k 2"]], images: PairedImages, *, alpha: float
) -> Page:
    """Return a page with the points of each source and their matches in the target, with lines to the ground truth.

    Args:
        numbers: indices of the pairs, at least one.
        matches: matched points in the target of each pair.
        images: paired images.
        alpha: threshold of correct points.
    """

    def row_of(number: int) -> Row:
        pair, found = images.pairs[number], matches[number]
        correct = are_correct(pair, found, alpha).tolist()
        sources: list[Overlay] = []
        targets: list[Overlay] = [box(pair.box, "white", line_width=0.8)]
        points = (part.tolist() for part in (pair.source_points, pair.target_points, found))
        for source, target, match, is_right in zip(*points, correct, strict=True):
            colour = rgb(RIGHT if is_right else WRONG)
            sources.append(point(source, colour))
            targets += line(target, match, colour), point(target, "none", size=6), point(match, colour)
        pictures = Picture(images.load(pair.source), sources), Picture(images.load(pair.target), targets)
        return Row(pair.name, f"{sum(correct)} of {len(correct)} points correct", pictures)

    handles = [
        marker_handle(f"correct, within {alpha:g} of the box", rgb(RIGHT), "white"),
        marker_handle("wrong", rgb(WRONG), "white"),
        marker_handle("ground truth", "none", "0.4"),
    ]
    return Page(("source", "target"), list(map(row_of, numbers)), handles)
