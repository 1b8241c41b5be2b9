"""Sample view pairs of a run's images, with a backbone's clusters, objects and matches."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, UInt8
from torch import Tensor

from cribo.base.colours import Colour, distinct_colours
from cribo.base.painting import as_picture, outline_region, paint_regions
from cribo.data.randomness import keyed_generator
from cribo.data.samples import Batch, SampleDataset
from cribo.data.sources.images import ImageSource
from cribo.method import NO_MATCH, MemoryBank, pool_objects
from cribo.models import Backbone, evaluation_mode, normalise
from cribo.objectives.config import ObjectiveOptions
from cribo.objectives.objects import Objects, find_objects, label_tokens
from cribo.objectives.views import ViewPairs

_ENCODED_AT_ONCE = 32


def sample_pairs(source: ImageSource, backbone: Backbone, options: ObjectiveOptions, *, count: int) -> Batch:
    """Return the view pairs of up to `count` images drawn from a collection; the same in every call.

    Raises:
        DataError: images cannot be read.
    """
    side = options.views.size // backbone.patch_size
    transform = ViewPairs(
        options.views,
        grid=(side, side),
        num_objects=options.objects.num_objects,
        drop_path_sites=0,  # no student
    )
    order = torch.randperm(len(source), generator=keyed_generator(options.seed)).tolist()[:count]
    # An epoch after the last gives views that training has not used.
    dataset = SampleDataset(source, transform, seed=options.seed)
    return dataset.__getitems__([(options.optim.epochs, image) for image in order])


@torch.no_grad()
def cluster_pairs(backbone: Backbone, pairs: Batch, options: ObjectiveOptions) -> Objects:
    """Return the clusters and objects of view pairs, on the host; the backbone is not changed.

    Args:
        backbone: network, on the device to use.
        pairs: view pairs, on the host.
        options: options of the clustering.
    """
    device = next(backbone.parameters()).device
    found: list[tuple[Tensor, ...]] = []
    with evaluation_mode(backbone):
        for start in range(0, len(pairs), _ENCODED_AT_ONCE):
            part = pairs.narrow(start, min(start + _ENCODED_AT_ONCE, len(pairs))).to(device)
            images = normalise(part["views"].flatten(0, 1).float() / 255, mean=backbone.mean, std=backbone.std)
            tokens = backbone.encode(images).tokens.unflatten(0, (len(part), 2)).float()
            labels = label_tokens(tokens, part, options.objects)
            pooled, kept = pool_objects(tokens, labels, options.objects.num_objects)
            found.append((pooled.cpu(), kept.cpu(), labels.cpu()))
    pooled, kept, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return find_objects(pooled, kept, labels, pairs.images)


@dataclass
class ObjectSample:
    """View pairs of some images and their objects, as in a training step."""

    pairs: Batch
    objects: Objects
    grid: tuple[int, int]

    def view(self, image: int, view: int) -> UInt8[np.ndarray, "h w 3"]:
        """Return one view as a picture, (H, W, 3), without photometric augmentation."""
        return as_picture(self.pairs["views"][image, view].numpy())

    def clusters(self, image: int, view: int) -> Int[Tensor, "h w"]:
        """Return the cluster of each pixel of a view."""
        return enlarge_labels(self.objects.labels[image, view], self.grid, self.pairs["views"].shape[-2:])

    def painted(self, image: int, view: int, colours: Mapping[int, Colour]) -> UInt8[np.ndarray, "h w 3"]:
        """Return one view with the given clusters coloured and the others grey."""
        return paint_regions(self.view(image, view), self.clusters(image, view).numpy(), colours)

    def object_colours(self, image: int) -> dict[int, Colour]:
        """Return a colour for each cluster of an image that is an object."""
        clusters = self.objects.clusters[self.objects.rows == image].tolist()
        return dict(zip(clusters, distinct_colours(len(clusters)), strict=True))


def enlarge_labels(labels: Int[Tensor, " n"], grid: tuple[int, int], size: tuple[int, ...]) -> Int[Tensor, "h w"]:
    """Upsample the labels of one view's tokens to its pixels, (H, W) = `size`."""
    return F.interpolate(labels.view(1, 1, *grid).float(), size=size, mode="nearest")[0, 0].long()


def sample_objects(backbone: Backbone, source: ImageSource, options: ObjectiveOptions, *, count: int) -> ObjectSample:
    """Cluster the view pairs of up to `count` images drawn from a collection."""
    pairs = sample_pairs(source, backbone, options, count=count)
    side = options.views.size // backbone.patch_size
    return ObjectSample(pairs, cluster_pairs(backbone, pairs, options), (side, side))


@dataclass(frozen=True)
class Neighbour:
    """Nearest object of another image.

    Attributes:
        cluster: cluster of the query object.
        picture: the found object's view, with the object outlined in the query object's colour.
        colour: colour of both objects.
        consistent: whether the match is cycle-consistent.
    """

    cluster: int
    picture: UInt8[np.ndarray, "h w 3"]
    colour: Colour
    consistent: bool


def match_sample(
    sample: ObjectSample, queries: int, *, objects: int
) -> list[tuple[UInt8[np.ndarray, "h w 3"], list[Neighbour]]]:
    """Match the largest objects of some images with the objects of the others, in their first views.

    Args:
        sample: objects of the images; the first `queries` images are matched with the others.
        queries: number of query images.
        objects: maximum number of objects per query, the largest first.

    Returns:
        For each query image, its view with coloured objects, and their neighbours, the largest object first.
        Objects without a match are omitted.
    """
    found = sample.objects
    in_gallery = found.rows >= queries
    gallery = in_gallery.nonzero().flatten()
    bank = MemoryBank(
        num_images=max(1, len(sample.pairs)), num_objects=max(found.counts, default=1) or 1, dim=found.teacher.shape[2]
    )
    # The ring does not wrap around, so slots are rows of the gallery.
    bank.push(found.teacher[:, in_gallery], found.images[in_gallery], found.counts[queries:])
    # The queries' rows come first.
    matches = bank.match(found.teacher[:, ~in_gallery], found.images[~in_gallery])
    result = []
    for image in range(queries):
        own = (found.rows == image).nonzero().flatten().tolist()
        own.sort(key=lambda row: -int((found.labels[found.rows[row], 0] == found.clusters[row]).sum()))
        neighbours: list[Neighbour] = []
        for row, colour in zip(own[:objects], distinct_colours(objects), strict=False):
            slot = int(matches.nearest[0, row])
            if slot == NO_MATCH:
                continue
            other = gallery[slot]
            image_of = int(found.rows[other])
            inside = (sample.clusters(image_of, 0) == found.clusters[other]).numpy()
            picture = outline_region(sample.view(image_of, 0), inside, colour)
            neighbours.append(Neighbour(int(found.clusters[row]), picture, colour, bool(matches.valid[0, row])))
        colours = {neighbour.cluster: neighbour.colour for neighbour in neighbours}
        result.append((sample.painted(image, 0, colours), neighbours))
    return result
