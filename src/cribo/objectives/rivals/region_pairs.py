"""Stage 2 of ORL: the regions of all images, the nearest images of each, and pairs of similar regions.

Images are processed in parts; each part is written to a file once it is complete.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cribo.base.console import Progress
from cribo.base.errors import ConfigError, DataError, FolderError, UnreadableImage
from cribo.base.files import remove_parts, write_whole
from cribo.base.job import Job
from cribo.data.batches import Batches, unchanged
from cribo.data.config import spread
from cribo.data.randomness import keyed_generator
from cribo.data.samples import Batch, LazyImage, Sample, SampleDataset
from cribo.data.sources.collection import sampled_hash
from cribo.data.sources.images import ImageSource
from cribo.features.search import TensorKeys, nearest
from cribo.method import Crops, cut_views
from cribo.models import evaluation_mode, normalise
from cribo.objectives.base import Stages
from cribo.objectives.rivals.byol import PredictiveNetwork
from cribo.objectives.rivals.regions import number_of_pairs, pair_regions, select_regions, selective_search

_ABOUT, _PAIRS = "about.json", "pairs.safetensors"
_SMALLEST_PART = 128  # images
_MOST_PARTS = 100  # they are open at the same time
_FIRST_TRIED = 32  # images that are searched before stage 1
_CENTRE = 0.875  # side of the central crop: 224 of 256 pixels
_EPOCH = -1  # training does not use it


class DrawnRegions(NamedTuple):
    """Random regions of an image, as boxes (top, left, height, width) in pixels.

    Attributes:
        region: a region of the image.
        own: the image's region of a pair.
        neighbour: index of the neighbour.
        other: the neighbour's region of the pair.
    """

    region: Int[Tensor, "4"]
    own: Int[Tensor, "4"]
    neighbour: int
    other: Int[Tensor, "4"]


@dataclass(frozen=True)
class RegionPairs:
    """Regions of N images, the J nearest images of each, and pairs of similar regions.

    Attributes:
        boxes: (R, 4) regions of all images, image after image: top, left, height, width in pixels.
        counts: (N,) number of regions of each image; 0 if it could not be read.
        neighbours: (N, J) indices of the nearest images, nearest first.
        pairs: (P, J, 2) pairs of each image with its neighbours, `number_of_pairs` for each, image after image: indices
            (own region, neighbour's region) among the regions of their images.
    """

    boxes: Int[Tensor, "r 4"]
    counts: Int[Tensor, " n"]
    neighbours: Int[Tensor, "n j"]
    pairs: Int[Tensor, "p j 2"]

    @cached_property
    def _first(self) -> Int[Tensor, " n1"]:
        """Index of the first region of each image."""
        return _starts(self.counts)

    @cached_property
    def _first_pair(self) -> Int[Tensor, " n1"]:
        """Index of the first pair of each image."""
        return _starts(torch.tensor([number_of_pairs(count) if count else 0 for count in self.counts.tolist()]))

    def regions(self, image: int) -> Int[Tensor, "r 4"]:
        """Return the regions of an image."""
        return self.boxes[self._first[image] : self._first[image + 1]]

    def draw(self, image: int, *, generator: torch.Generator) -> DrawnRegions | None:
        """Draw a region of an image, and a pair with one of its neighbours; None if the image could not be read."""
        regions, pairs = self.regions(image), self.pairs[self._first_pair[image] : self._first_pair[image + 1]]
        if not len(regions):
            return None
        draws = torch.rand(3, dtype=torch.float64, generator=generator)
        lengths = torch.tensor([len(regions), len(pairs), self.neighbours.shape[1]])
        region, pair, place = (draws * lengths).long().tolist()
        own, other = pairs[pair, place].tolist()
        neighbour = int(self.neighbours[image, place])
        return DrawnRegions(regions[region], regions[own], neighbour, self.regions(neighbour)[other])


@dataclass(frozen=True)
class RegionSearch:
    """Transform of an image into its regions, cut out, and a central crop.

    A sample contains `boxes` (R, 4), and `views` (1 + R, C, S, S) in 8 bits, the central crop first. If no region has
    the minimum size, R is 1: the first region of any size.

    Attributes:
        size: S, side of the views in pixels.
        min_side: minimum height and width of a region in pixels.
        most: maximum number of regions.
    """

    size: int
    min_side: int
    most: int

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Decode the image, search it, and cut the views."""
        pixels = image.load()
        found = selective_search(pixels, generator=generator)
        selected = select_regions(found, min_side=self.min_side, most=self.most)
        boxes = selected if len(selected) else found[:1]
        lengths = torch.tensor(pixels.shape[1:])
        side = max(1, round(_CENTRE * int(lengths.min())))
        centre = torch.cat(((lengths - side) // 2, torch.tensor([side, side])))
        crops = Crops(torch.cat((centre[None], boxes)), torch.zeros(1 + len(boxes), dtype=torch.bool))
        return {
            "boxes": boxes,
            "views": cut_views(pixels, crops, self.size),
        }


def find_pairs(
    network: PredictiveNetwork, search: RegionSearch, stages: Stages, *, neighbours: int, seed: int
) -> RegionPairs:
    """Find the regions, neighbours and pairs of all images, or load those that were found before.

    Neighbours have the largest cosine of the projections of central crops, paired regions that of the features of the
    backbone, both in evaluation mode. Directions of features are stored in half precision until pairs are complete.

    Args:
        network: network of stage 1.
        search: search of an image's regions.
        stages: files and images of the run.
        neighbours: J, number of neighbours of an image.
        seed: seed of the order of regions.

    Raises:
        DataError: too few images can be read.
        FolderError: the files were created with another network, other images or other settings.

    Source: ORL (Xie et al. 2021), stage 2.
    """
    folder, source = stages.folder / "regions", stages.source
    about = {
        "weights": network.backbone.fingerprint(),
        "search": asdict(search),
        "neighbours": neighbours,
        "seed": seed,
        "images": len(source),
        "first image": source.name(0),
        "last image": source.name(len(source) - 1),
        "content": sampled_hash(source),
    }

    def begin() -> None:
        advice = f"Delete {folder} to search the images again, or start a new run"
        with Job(folder, "regions", resume=True).open(about, advice=advice):
            remove_parts(folder)

    stages.on_rank_0(begin)
    if not (folder / _PAIRS).is_file():
        size = max(_SMALLEST_PART, -(-len(source) // _MOST_PARTS))
        parts = {
            folder / f"{start:08d}.safetensors": range(start, min(start + size, len(source)))
            for start in range(0, len(source), size)
        }
        own = list(parts)[stages.rank :: stages.world_size]
        with stages.progress() as progress:
            _search(network, search, stages, {path: parts[path] for path in own}, seed, progress)
            stages.wait()
            stages.on_rank_0(lambda: _write_pairs(folder, list(parts), size, neighbours, progress))
    try:
        with safe_open(folder / _PAIRS, "pt") as file:
            stages.seconds[folder.name] = float(file.metadata()["seconds"])
        return RegionPairs(**load_file(folder / _PAIRS))
    except SafetensorError as error:
        raise FolderError(f"{folder / _PAIRS} is damaged: delete {folder} to search the images again") from error


def require_regions(search: RegionSearch, source: ImageSource, *, seed: int) -> None:
    """Check that one of up to 32 images, evenly spaced, has a region of the minimum size.

    Raises:
        ConfigError: none has.
    """
    tried = spread(len(source), min(_FIRST_TRIED, len(source)))
    for image in tried:
        try:
            found = selective_search(source.load(image), generator=keyed_generator(seed, image))
        except UnreadableImage:
            continue
        if len(select_regions(found, min_side=search.min_side, most=1)):
            return
    raise ConfigError(
        f"none of {len(tried)} images has a region of at least {search.min_side} x {search.min_side} pixels: set "
        f"objective.args.min_side to less than {search.min_side}"
    )


def _search(
    network: PredictiveNetwork,
    search: RegionSearch,
    stages: Stages,
    parts: Mapping[Path, range],
    seed: int,
    progress: Progress,
) -> None:
    """Write the missing ones of some parts: regions, their features, and the images' projections."""
    missing = {path: images for path, images in parts.items() if not path.is_file()}
    # One image per batch, since the numbers of regions differ.
    keys = [[(_EPOCH, image)] for images in missing.values() for image in images]
    dataset = SampleDataset(stages.source, search, seed=seed)
    batches = iter(Batches(dataset, unchanged, batch_sampler=keys, workers=stages.workers))
    total = sum(map(len, parts.values()))
    done = total - len(keys)
    for path, images in missing.items():
        began, found = time.perf_counter(), []
        for image in images:
            found.append(_encode(network, next(batches), image))
            done += 1
            progress("regions", done, total)
        content = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        seconds = {"seconds": str(time.perf_counter() - began)}
        write_whole(path, lambda part, content=content, seconds=seconds: save_file(content, part, seconds))


@torch.no_grad()
def _encode(network: PredictiveNetwork, batch: Batch, image: int) -> dict[str, Tensor]:
    """Return the regions of an image, their features, and its projection; no regions if it could not be read."""
    backbone = network.backbone
    device = next(network.parameters()).device
    with evaluation_mode(network):
        views = batch["views"][0].to(device).float() / 255
        features = backbone.encode(normalise(views, mean=backbone.mean, std=backbone.std)).global_token
        projection = network.projector(features[:1])
    regions = slice(0, None if int(batch.images[0]) == image else 0)  # unreadable images are replaced by others
    boxes = batch["boxes"][0][regions]
    return {
        "boxes": boxes.int(),
        "counts": torch.tensor([len(boxes)]),
        "features": F.normalize(features[1:].float(), dim=1)[regions].half().cpu(),
        "projections": projection.float().cpu(),
    }


def _write_pairs(folder: Path, paths: Sequence[Path], size: int, neighbours: int, progress: Progress) -> None:
    """Find neighbours and pairs, write the result, and remove the parts, which have `size` images each."""
    began = time.perf_counter()
    parts = [safe_open(path, "pt") for path in paths]
    boxes, counts, projections = (
        torch.cat([part.get_tensor(name) for part in parts]) for name in ("boxes", "counts", "projections")
    )
    found = nearest_images(projections, counts > 0, neighbours)
    first = _starts(counts).tolist()

    def features(image: int) -> Tensor:
        offset = first[image // size * size]
        rows = parts[image // size].get_slice("features")
        return rows[first[image] - offset : first[image + 1] - offset].float()

    pairs = []
    for image in counts.nonzero()[:, 0].tolist():
        own = features(image)
        pairs.append(torch.stack([pair_regions(own, features(other)) for other in found[image].tolist()], dim=1))
        progress("pairs of regions", image + 1, len(counts))
    content = {"boxes": boxes, "counts": counts, "neighbours": found, "pairs": torch.cat(pairs)}
    seconds = time.perf_counter() - began + sum(float(part.metadata()["seconds"]) for part in parts)
    write_whole(folder / _PAIRS, lambda part: save_file(content, part, {"seconds": str(seconds)}))
    for path in paths:
        path.unlink()


def nearest_images(projections: Tensor, readable: Tensor, neighbours: int) -> Int[Tensor, "n j"]:
    """Return the images with the most similar projections to each image; 0 for images that are not readable.

    Args:
        projections: (N, E) a projection of each image.
        readable: (N,) whether an image can be a neighbour, and has neighbours.
        neighbours: J, number of neighbours.

    Raises:
        DataError: fewer than J + 1 images are readable.
    """
    images = readable.nonzero()[:, 0]
    if len(images) <= neighbours:
        raise DataError(
            f"{neighbours} neighbours require at least {neighbours + 1} readable images, found {len(images)}: add "
            "images, or reduce objective.args.neighbours"
        )
    rows = F.normalize(projections[images], dim=1)
    found = nearest(rows, TensorKeys(rows), neighbours + 1).rows
    others = found != torch.arange(len(rows))[:, None]
    others &= others.cumsum(dim=1) <= neighbours  # an image is not among its own neighbours if others equal it
    result = torch.zeros(len(readable), neighbours, dtype=torch.long)
    result[images] = images[found[others].unflatten(0, (-1, neighbours))]
    return result


def _starts(counts: Int[Tensor, " n"]) -> Int[Tensor, " n1"]:
    """Return the index of the first of each image's rows, and the number of rows."""
    return F.pad(counts.cumsum(dim=0), (1, 0))
