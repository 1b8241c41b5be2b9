"""Base of CrIBo and view alignment: what the teacher finds in view pairs, banks of it, and optional terms."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cribo.data.samples import Batch
from cribo.method import Matches, pool_objects
from cribo.models.config import CompileMode
from cribo.objectives.banks import PatchBank, object_bank
from cribo.objectives.base import Step
from cribo.objectives.objects import (
    Objects,
    check_objects,
    find_clustering,
    find_criterion,
    find_objects,
    label_tokens,
)
from cribo.objectives.points import GRID, Points, find_points
from cribo.objectives.self_distillation import StudentTeacher
from cribo.objectives.terms import (
    Anchor,
    NeighbourDistance,
    ObjectDistance,
    PointDistance,
    SoftNeighbours,
    Term,
)
from cribo.objectives.views import ViewPairs, view_pairs
from cribo.training.timing import part


@dataclass
class Found:
    """What the teacher finds in a batch.

    Attributes:
        batch_images: (B,) index of each image in the collection.
        objects: the objects; None if no loss reads them.
        matches: matches of the objects; None if no loss reads them in this step.
        points: points of the views' overlap; None if no loss reads them.
    """

    batch_images: Int[Tensor, " b"]
    objects: Objects | None = None
    matches: Matches | None = None
    points: Points | None = None


class PairObjective(StudentTeacher):
    """Base of objectives on view pairs, with objects, points, banks and terms, which `use_pairs` creates.

    Reads `views`, `objects`, and of `losses` the options of the terms.

    Attributes:
        terms: the terms, by name.
        reads: what the losses read; see `Term.reads`.
        grid: (h, w) patches of a view.
        object_bank: bank of objects.
        patch_bank: bank of features at points.
        cluster: the clustering.
        criterion: the criterion for positive pairs.
        found: what was found in the micro-batches of the step so far.
    """

    def use_pairs(
        self, terms: Collection[str], *, reads: Collection[str] = (), points: int = GRID, from_epoch: int = 0
    ) -> None:
        """Create terms and banks; called after student and teacher are created and `images_per_group` is set.

        Args:
            terms: names of the terms.
            reads: what the objective's own losses read; see `Term.reads`.
            points: number of points along each side of the overlap of two views.
            from_epoch: first epoch that reads the banks.

        Raises:
            ConfigError: options that cannot be combined.
        """
        options, losses, size = self.options, self.options.losses, self.images_per_group
        side = options.views.size // self.exported().patch_size
        self.grid, self.points_side, self.from_epoch = (side, side), points, from_epoch
        self.object_bank = object_bank(options, self.setting.num_images)
        self.patch_bank = PatchBank(options, on="patch_neighbours" in terms)
        self.cluster, self.criterion = find_clustering(options.objects), find_criterion(options.objects)
        objects, patches = self.object_bank, self.patch_bank
        makers = {
            "cross_view": lambda: ObjectDistance(size),
            "cross_image": lambda: NeighbourDistance(objects, size),
            "points": PointDistance,
            "object_neighbours": lambda: SoftNeighbours(
                "objects", objects, losses, group_size=size, from_epoch=from_epoch
            ),
            "patch_neighbours": lambda: SoftNeighbours(
                "points", patches, losses, group_size=size, from_epoch=from_epoch
            ),
            "anchor": lambda: Anchor(self.exported(), losses.anchor_kind),
        }
        self.found: list[Found] = []
        self.terms: dict[str, Term] = {name: make() for name, make in makers.items() if name in terms}
        self.anchor = self.terms.get("anchor")  # the only term with a state
        self.reads = {*reads, *(each for term in self.terms.values() for each in term.reads)}
        if "objects" in self.reads:
            check_objects(options, tokens=2 * side**2, with_bank="object_bank" in self.reads)

    def samples(self) -> ViewPairs:
        """Return the transform to view pairs."""
        clusters = self.options.objects.num_objects if "objects" in self.reads else 0
        return view_pairs(self.options.views, self.student.backbone, num_objects=clusters)

    # --------------------------------------------------- 3.2.1 coherent image regions, 3.2.2 cross-image matchings

    @torch.no_grad()
    def find(self, found: Found, tokens: Float[Tensor, "b 2 n d"], batch: Batch, step: Step) -> None:
        """Find what the losses read in the teacher's tokens, and add it to `found`."""
        self.found.append(found)
        if "points" in self.reads:
            with part("patch losses"):
                found.points = find_points(tokens, batch, grid=self.grid, side=self.points_side)
        if "objects" in self.reads:
            with part("clustering"):
                labels = self.label_tokens(tokens, batch)
            with part("pooling"):
                found.objects = self.find_objects(tokens, labels, batch)
            if "object_bank" in self.reads:
                self.object_bank.allocate(found.objects.teacher)
            if "matches" in self.reads and step.epoch >= self.from_epoch:
                with part("retrieval"):
                    found.matches = self.match(found.objects, step)

    def label_tokens(self, tokens: Float[Tensor, "b 2 n d"], batch: Batch) -> Int[Tensor, "b 2 n"]:
        """Return the cluster of each of the teacher's tokens."""
        return label_tokens(tokens, batch, self.options.objects, self.cluster)

    def find_objects(self, tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], batch: Batch) -> Objects:
        """Return the objects of the teacher's tokens."""
        return find_objects(*pool_objects(tokens, labels, self.options.objects.num_objects), labels, batch.images)

    def match(self, objects: Objects, step: Step) -> Matches:
        """Return the nearest neighbours of objects in the bank, and whether they are positive pairs."""
        return self.object_bank.match(objects, group_size=self.images_per_group, criterion=self.criterion)

    # ------------------------------------------------------------------------------ update after a step, checkpoints

    def after_step(self, step: Step) -> None:
        """Update centres and teacher, and push the step's objects and points to their banks."""
        super().after_step(step)
        found, self.found = self.found, []
        self.push(found, step)

    @part("bank update")
    def push(self, parts: Sequence[Found], step: Step) -> None:
        """Push the objects and points of a step's micro-batches to their banks."""
        images = torch.cat([found.batch_images for found in parts])
        self.object_bank.push([found.objects for found in parts if found.objects is not None], images, step)
        self.patch_bank.push_points([found.points for found in parts if found.points is not None], images, step)

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile both networks and the clustering."""
        super().compile_parts(mode)
        self.cluster = torch.compile(self.cluster)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the banks' states. Banks are not buffers because distributed wrappers must not broadcast them."""
        return {"bank": self.object_bank.state_dict(), "patch_bank": self.patch_bank.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Store the banks' states, to be restored when the banks are allocated."""
        self.object_bank.load_state_dict(state["bank"])
        self.patch_bank.load_state_dict(state.get("patch_bank"))  # older checkpoints have none
