"""Some images of a run as a trained backbone sees them: their view pairs, clusters, objects, and matches."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from cribo.data.images import ImageSource
from cribo.data.randomness import keyed_generator
from cribo.data.samples import Batch, SampleDataset
from cribo.drawing import paint_regions, region_colour
from cribo.method import NO_MATCH, MemoryBank
from cribo.models import Backbone, normalise
from cribo.objectives.cribo import Objects, ViewPairs, find_objects, label_tokens
from cribo.objectives.options import ObjectiveOptions


def view_picture(pairs: Batch, image: int, view: int) -> np.ndarray:
    """One view, (H, W, 3) in 0-1, without photometric changes."""
    return pairs["views"][image, view].permute(1, 2, 0).numpy() / 255


def enlarge_labels(
    labels: Int[Tensor, " n"], grid: tuple[int, int], size: tuple[int, int]
) -> Int[Tensor, "height width"]:
    """The cluster of every pixel of one view, whose tokens have `labels`."""
    return F.interpolate(labels.view(1, 1, *grid).float(), size=size, mode="nearest")[0, 0].long()


@dataclass
class ObjectSample:
    """Some images as a backbone sees them: `pairs` and their `objects`, as in a training step."""

    pairs: Batch
    objects: Objects
    grid: tuple[int, int]

    def view(self, image: int, view: int) -> np.ndarray:
        """One view, (H, W, 3) in 0-1, without photometric changes."""
        return view_picture(self.pairs, image, view)

    def label_map(self, image: int, view: int) -> Int[Tensor, "h w"]:
        """The cluster of every pixel of one view."""
        height, width = self.pairs["views"].shape[-2:]
        return enlarge_labels(self.objects.labels[image, view], self.grid, (height, width))


def open_pairs(source: ImageSource, backbone: Backbone, options: ObjectiveOptions) -> SampleDataset:
    """The view pairs of images, as CrIBo sees them with these options."""
    side = options.views.size // backbone.patch_size
    transform = ViewPairs(
        options.views,
        grid=(side, side),
        num_objects=options.objects.num_objects,
        drop_path_sites=0,  # nothing is trained
    )
    return SampleDataset(source, transform, seed=options.seed)


def sample_pairs(dataset: SampleDataset, options: ObjectiveOptions, *, count: int) -> Batch:
    """The view pairs of up to `count` images drawn from the data; the same at every call.

    Raises:
        DataError: images cannot be read.
    """
    order = torch.randperm(len(dataset), generator=keyed_generator(options.seed)).tolist()[:count]
    # An epoch that training never sees: these views are nobody's memory of a step.
    return dataset.__getitems__([(options.optim.epochs, image) for image in order])


@torch.no_grad()
def cluster_pairs(backbone: Backbone, pairs: Batch, options: ObjectiveOptions, *, batch_size: int = 32) -> Objects:
    """The clusters and objects of view pairs, on the host; the backbone is left as it was.

    Args:
        backbone: on the device to use.
        pairs: on the host.
        options: how to cluster.
        batch_size: images that are encoded at once.
    """
    device = next(backbone.parameters()).device
    training = backbone.training
    backbone.eval()
    found: list[Objects] = []
    try:
        for start in range(0, len(pairs), batch_size):
            part = pairs.narrow(start, min(start + batch_size, len(pairs))).to(device)
            images = normalise(part["views"].flatten(0, 1).float() / 255, mean=backbone.mean, std=backbone.std)
            tokens = backbone.encode(images).tokens.unflatten(0, (len(part), 2)).float()
            labels = label_tokens(tokens, part, options.objects)
            objects = find_objects(tokens, labels, part, options.objects.num_objects)
            found.append(
                Objects(
                    teacher=objects.teacher.cpu(),
                    labels=objects.labels.cpu(),
                    rows=objects.rows.cpu() + start,
                    clusters=objects.clusters.cpu(),
                    images=objects.images.cpu(),
                    counts=objects.counts,
                )
            )
    finally:
        backbone.train(training)
    return Objects(
        teacher=torch.cat([part.teacher for part in found], dim=1),
        labels=torch.cat([part.labels for part in found]),
        rows=torch.cat([part.rows for part in found]),
        clusters=torch.cat([part.clusters for part in found]),
        images=torch.cat([part.images for part in found]),
        counts=[count for part in found for count in part.counts],
    )


def sample_objects(backbone: Backbone, source: ImageSource, options: ObjectiveOptions, *, count: int) -> ObjectSample:
    """Cluster the view pairs of up to `count` images drawn from a collection."""
    pairs = sample_pairs(open_pairs(source, backbone, options), options, count=count)
    side = options.views.size // backbone.patch_size
    return ObjectSample(pairs, cluster_pairs(backbone, pairs, options), (side, side))


@dataclass(frozen=True)
class SampleMatch:
    """An object of a query and the nearest object of another image.

    Attributes:
        cluster: of the query's object.
        colour: of both, in 0-1.
        image, other: which image of the sample the nearest object lies in, and its cluster there.
        consistent: whether the match is cycle-consistent, and so a valid one.
    """

    cluster: int
    colour: tuple[float, float, float]
    image: int
    other: int
    consistent: bool


def match_sample(sample: ObjectSample, queries: int, *, objects: int) -> list[list[SampleMatch]]:
    """The largest objects of the first views of some images, each with its nearest one in the first views of others.

    Args:
        sample: its first `queries` images ask, the others are the memory bank.
        queries: how many images ask.
        objects: how many objects of each, at most, the largest first.

    Returns:
        the matches of each query; objects that find none are left out.
    """
    found = sample.objects
    in_gallery = found.rows >= queries
    gallery = in_gallery.nonzero().flatten()
    asked = (~in_gallery).nonzero().flatten()
    bank = MemoryBank(
        num_images=max(1, len(sample.pairs)), num_objects=max(found.counts, default=1) or 1, dim=found.teacher.shape[2]
    )
    # The ring does not wrap, so that its slots count the rows of the gallery.
    bank.push(found.teacher[:, in_gallery], found.images[in_gallery], found.counts[queries:])
    matches = bank.match(found.teacher[:, asked], found.images[asked])
    result: list[list[SampleMatch]] = []
    for image in range(queries):
        labels = sample.objects.labels[image, 0]
        own = (found.rows[asked] == image).nonzero().flatten().tolist()
        own.sort(key=lambda row: -int((labels == found.clusters[asked[row]]).sum()))
        shown = own[:objects]
        slots = [int(matches.nearest[0, row]) for row in shown]
        result.append(
            [
                SampleMatch(
                    cluster=int(found.clusters[asked[row]]),
                    colour=region_colour(number, len(shown)),
                    image=int(found.rows[gallery[slot]]),
                    other=int(found.clusters[gallery[slot]]),
                    consistent=bool(matches.valid[0, row]),
                )
                for number, (row, slot) in enumerate(zip(shown, slots, strict=True))
                if slot != NO_MATCH
            ]
        )
    return result


def paint_query(sample: ObjectSample, image: int, matches: list[SampleMatch]) -> np.ndarray:
    """A query's first view with its objects in their colours, (H, W, 3) in 0-1."""
    colours = {match.cluster: match.colour for match in matches}
    return paint_regions(sample.view(image, 0), sample.label_map(image, 0), colours, tint=0.5)


def paint_match(sample: ObjectSample, match: SampleMatch) -> np.ndarray:
    """The view in which a match was found, with the nearest object in the query object's colour."""
    return paint_regions(
        sample.view(match.image, 0), sample.label_map(match.image, 0), {match.other: match.colour}, tint=0.15
    )
