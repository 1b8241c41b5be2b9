"""Controls of CrIBo for studies: labels in place of clusters or of the matching criterion, and random pairs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from torch import Tensor

from cribo.base.errors import ConfigError, DataError, MissingData
from cribo.data.labelled.label_maps import IGNORE_INDEX, class_indices
from cribo.data.randomness import keyed_generator
from cribo.data.reading import read_values
from cribo.data.samples import Batch, LazyImage, Sample, SampleDataset
from cribo.data.sources.images import FilesBelow
from cribo.method import Matches
from cribo.method.matching import NO_MATCH
from cribo.objectives.banks import object_bank
from cribo.objectives.base import Setting, Step
from cribo.objectives.cribo import CrIBo
from cribo.objectives.objects import Objects, RowPairs
from cribo.objectives.pairs import Found
from cribo.objectives.pictures import draw_bootstrapping
from cribo.objectives.views import ViewPairs

UNLABELLED = 255
"""Class of pixels without a label."""

_PAIRS = 3  # purpose of the keyed draw


class _SizedImage(LazyImage):
    """An image that keeps the full size (height, width) with which it was read."""

    size = (0, 0)

    def load_reduced(self, reduction: Callable[[int, int], int]) -> tuple[UInt8[Tensor, "c h w"], int]:
        def noted(height: int, width: int) -> int:
            self.size = (height, width)
            return reduction(height, width)

        return super().load_reduced(noted)


class LabelledViewPairs(ViewPairs):
    """Transform of a labelled image into two views: those of `ViewPairs`, and `classes` (B, 2, N).

    The class of a patch is that of the pixel at its centre, from 0 to 254, or 255 without a label.

    Args:
        of: the transform to extend.
        folder: folder of the label maps, PNG images with the names of the images; None if the collection has labels.
    """

    def __init__(self, of: ViewPairs, folder: Path | None) -> None:
        recipe = of.sets[0].recipe
        super().__init__(recipe, grid=of.grid, num_objects=of.num_objects, drop_path_sites=of.drop_path_sites)
        self.folder = folder
        self._files = None if folder is None else FilesBelow(folder)

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Cut the views and read the classes of their patches."""
        sized = _SizedImage(image.source, image.index)
        sample = super().__call__(sized, generator)
        labels = image.labels() if self.folder is None else _read(self._file(image.name))
        height, width = labels.shape
        if (height, width) != sized.size:
            raise DataError(
                f"the labels of {image.name} have {width} x {height} pixels, but the image {sized.size[1]} x "
                f"{sized.size[0]}: they must be equal"
            )
        x, y = sample["coordinates"].unbind(dim=-1)
        rows, columns = (place.long().clamp(0, side - 1) for place, side in ((y, height), (x, width)))
        return {**sample, "classes": labels[rows, columns].long()}

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        assert self._files is not None
        label_map = PurePosixPath(name).with_suffix(".png")
        found = self._files.find(str(label_map))
        if found is None:
            raise DataError(
                f"{self.folder / label_map} does not exist: objective.args.labels must have a label map for each image"
            )
        return self.folder / found


@dataclass
class ClassifiedObjects(Objects):
    """Objects with their classes.

    Attributes:
        classes: (2, R, 255) whether a class occurs among the object's patches in each view.
    """

    classes: Bool[Tensor, "2 r 255"]


class SupervisedCrIBo(CrIBo):
    """CrIBo with labels in place of the clustering, of the matching criterion, or of both (paper table 11).

    With labels as clusters, the objects of an image are its classes; of more than K classes, the last ones are one
    object. With labels as the criterion, a match is a positive pair if the same classes occur in object and neighbour.
    Objects without a labelled patch have no positive pairs.

    Args:
        setting: the run.
        clusters: use labels in place of the clustering.
        matches: use labels in place of the criterion.
        labels: folder of label maps with the names of the images; by default the labels of the collection itself,
            which synthetic scenes have.

    Raises:
        ConfigError: neither clusters nor matches.
        MissingData: the folder does not exist.
    """

    def __init__(
        self, setting: Setting, *, clusters: bool = True, matches: bool = True, labels: str | None = None
    ) -> None:
        super().__init__(setting)
        if not (clusters or matches):
            raise ConfigError("objective.args must set clusters, matches or both: otherwise, use the objective cribo")
        self.labels = None if labels is None else Path(labels).expanduser()
        if self.labels is not None and not self.labels.is_dir():
            raise MissingData(
                f"objective.args.labels must be a folder of label maps, got {labels}: make it with cribo study "
                "labels from annotations in COCO's format (docs/studies.md)"
            )
        if setting.options.backbone.cache_trunk is not None:
            raise ConfigError("backbone.cache_trunk does not keep labels: remove it")
        self.uses_labels = {"clusters": clusters, "matches": matches}
        if matches:
            self.criterion = "none"  # `match` compares the classes
        self.class_bank = object_bank(setting.options, setting.num_images)

    def callbacks(self, folder: Path, dataset: SampleDataset) -> Iterable[Callback]:
        """Return the callback that records clusters, unless they are labels."""
        return () if self.uses_labels["clusters"] else super().callbacks(folder, dataset)

    def figures(self, rows: Sequence[dict[str, float]], dataset: SampleDataset) -> dict[str, Figure]:
        """Draw the share of objects with a match; pictures of clusters and matches would not show the labels."""
        if sum("bootstrapping_ratio" in row for row in rows) < 2:
            return {}
        return {"bootstrapping_ratio": draw_bootstrapping({"": rows})}

    def samples(self) -> ViewPairs:
        """Return the transform to view pairs with the classes of their patches."""
        return LabelledViewPairs(super().samples(), self.labels)

    def label_tokens(self, tokens: Float[Tensor, "b 2 n d"], batch: Batch) -> Int[Tensor, "b 2 n"]:
        """Return the cluster of each token: its class, numbered within the image."""
        if not self.uses_labels["clusters"]:
            return super().label_tokens(tokens, batch)
        numbered = [classes.unique(return_inverse=True)[1] for classes in batch["classes"]]
        return torch.stack(numbered).clamp(max=self.options.objects.num_objects - 1)

    def find_objects(self, tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], batch: Batch) -> Objects:
        """Return the objects with their classes."""
        objects = super().find_objects(tokens, labels, batch)
        own = objects.labels[objects.rows] == objects.clusters[:, None, None]  # (R, 2, N)
        counts = torch.zeros(len(own), 2, UNLABELLED + 1, dtype=torch.long, device=own.device)
        counts.scatter_add_(2, batch["classes"][objects.rows], own.long())
        found = ClassifiedObjects(**vars(objects), classes=counts[..., :UNLABELLED].transpose(0, 1) > 0)
        if self.options.needs_bank:
            self.class_bank.allocate(_as_rows(found).teacher)
        return found

    def match(self, objects: Objects, step: Step) -> Matches:
        """Return the nearest neighbours of objects in the bank, and whether they have the same classes."""
        matches = super().match(objects, step)
        if not self.uses_labels["matches"]:
            return matches
        assert isinstance(objects, ClassifiedObjects)
        assert self.class_bank.bank is not None
        slots, own = matches.nearest.clamp(min=0), objects.classes
        classes = torch.stack([self.class_bank.bank.objects(view, slots[view]) > 0 for view in (0, 1)])
        same = (classes == own).all(dim=2) & own.any(dim=2)
        return Matches(matches.nearest, matches.valid & same)

    def push(self, parts: Sequence[Found], step: Step) -> None:
        """Push the objects of a step and their classes."""
        super().push(parts, step)
        images = torch.cat([found.batch_images for found in parts])
        objects = [found.objects for found in parts if isinstance(found.objects, ClassifiedObjects)]
        self.class_bank.push([_as_rows(each) for each in objects], images, step)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the banks' states."""
        return {**super().get_extra_state(), "class_bank": self.class_bank.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Store the banks' states."""
        super().set_extra_state(state)
        self.class_bank.load_state_dict(state["class_bank"])


class RandomPairsCrIBo(CrIBo):
    """CrIBo whose positive pairs across images are random: every object with one of another image in the bank."""

    def match(self, objects: Objects, step: Step) -> Matches:
        """Return a random object of another image in the bank for each object, the same one for both views."""
        assert self.bank is not None
        slots = torch.tensor([slot for part in self.bank.rows.parts for slot in range(part.start, part.stop)]).long()
        images = self.bank.image_ids(slots).cpu()
        nearest = torch.full((objects.images.shape[0],), NO_MATCH)
        first = 0
        for count in objects.counts:
            own = slice(first, first := first + count)
            if count and len(others := slots[images != (image := int(objects.images[own.start]))]):
                generator = keyed_generator(self.options.seed, _PAIRS, step.number, image)
                nearest[own] = others[torch.randint(len(others), (count,), generator=generator)]
        nearest = nearest.to(objects.images.device).expand(2, -1)
        return Matches(nearest, nearest != NO_MATCH)


def _read(path: Path) -> UInt8[Tensor, "h w"]:
    return class_indices(IGNORE_INDEX).read(read_values(path), str(path)).labels


def _as_rows(objects: ClassifiedObjects) -> RowPairs:
    """Return the classes as rows for a bank."""
    return RowPairs(objects.classes.to(objects.teacher.dtype), objects.images, objects.counts)
