"""TimeT (Salehi et al. 2023): cluster assignments that are propagated through time, for pretrained networks.

The patches of a clip's first frame are assigned to prototypes, balanced over a group of clips. The assignments follow
the patches to the last frame by the similarity of their features, and the last frame's patches must predict them.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cribo.base.bounds import at_least
from cribo.base.errors import UnreadableImage
from cribo.data.photometric import sample_photometric
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.features.propagation import LabelledFrame, label_frame
from cribo.method import Crops, ViewRecipe
from cribo.method.precision import in_float32
from cribo.models import Backbone
from cribo.models.lora import has_adapters
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.config import Temperature
from cribo.objectives.crops import CropSampler, CropSet, augmented, load_for_crops
from cribo.objectives.self_distillation import Network, StudentTeacher
from cribo.objectives.trunk import encode, encode_frozen
from cribo.objectives.views import drop_path_noise

_SINKHORN_ROUNDS = 10
_PREVIOUS_FRAMES = 7


class ClipFrames(CropSampler):
    """Transform of a clip into frames at random times, with one crop, flip and colour jitter.

    A batch contains `frames` (B, F, C, S, S) in 8 bits, in temporal order, `photometric` with parameters (B, F), of
    which only the sigma of the blur differs between the frames of a clip, and `drop_path_noise` (B, 1, sites).

    Args:
        recipe: distribution of the crop and of the photometric operations; of pairs, the first value applies.
        frames: F, number of frames.
        drop_path_sites: number of uniform random numbers to draw per clip.
    """

    def __init__(self, recipe: ViewRecipe, *, frames: int, drop_path_sites: int) -> None:
        super().__init__(CropSet("frames", recipe, 1), drop_path_sites=drop_path_sites)
        self.frames = frames

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Decode frames of the clip, reduced as far as the crop allows, and draw the other random numbers.

        Raises:
            UnreadableImage: a frame cannot be read, or has another size than the first one.
        """
        clip = image.frames
        first: list[tuple[int, int, list[Crops]]] = []

        def draw(height: int, width: int, frame: LazyImage) -> list[tuple[Crops, int]]:
            if not first:
                first.append((height, width, self.draw_crops(height, width, generator)))
            if (height, width) != first[0][:2]:
                sizes = f"{width} x {height} pixels, but another frame of its clip {first[0][1]} x {first[0][0]}"
                raise UnreadableImage(frame.name, f"the frame has {sizes}: frames of a video must have one size")
            return self.sized(first[0][2])

        views = []
        for place in sorted(torch.randperm(len(clip), generator=generator)[: self.frames].tolist()):
            pixels, crops, _ = load_for_crops(clip[place], partial(draw, frame=clip[place]))
            views.append(self.cut(pixels, crops)["frames"])
        return {"frames": torch.cat(views), **self.photometric(generator), **self.draw(generator)}

    def photometric(self, generator: torch.Generator) -> Sample:
        """Draw the parameters of a clip, with a sigma for each frame."""
        recipe = self.sets[0].recipe
        drawn = sample_photometric(recipe, generator=generator).select(torch.zeros(self.frames, dtype=torch.long))
        low, high = recipe.blur_sigma
        sigma = low + (high - low) * torch.rand(self.frames, generator=generator)
        return {"photometric": drawn._replace(sigma=sigma.where(drawn.sigma > 0, 0.0))}


@torch.no_grad()
@in_float32
def balanced_assignments(
    embeddings: Float[Tensor, "r e"], prototypes: Float[Tensor, "k e"], *, temperature: float, rounds: int
) -> Float[Tensor, "r k"]:
    """Assign rows softly to prototypes, all of which get about the same share (Sinkhorn-Knopp, as in SwAV).

    Args:
        embeddings: (R, E) of unit length.
        prototypes: (K, E) of unit length.
        temperature: of the cosines.
        rounds: number of rounds of scaling columns, then rows.

    Returns:
        (R, K); rows sum to 1.

    Example:
        >>> rows, prototypes = (F.normalize(torch.randn(n, 8), dim=1) for n in (64, 4))
        >>> balanced_assignments(rows, prototypes, temperature=0.05, rounds=10).shape
        torch.Size([64, 4])
    """
    logits = F.linear(embeddings, prototypes) / temperature
    for _ in range(rounds):
        logits = logits - logits.logsumexp(dim=0)
        logits = logits.log_softmax(dim=1)
    return logits.exp()


@torch.no_grad()
@in_float32
def propagate_assignments(
    assignments: Float[Tensor, "b n k"],
    features: Float[Tensor, "b f n d"],
    *,
    side: int,
    neighbours: int,
    radius: int,
    temperature: float,
) -> Float[Tensor, "b later n k"]:
    """Propagate the assignments of the first frame of each clip from frame to frame.

    Args:
        assignments: (B, N, K) of the patches of the first frame.
        features: (B, F, N, D) features of all frames, any scale.
        side: number of patches along each side of a frame.
        neighbours: number of nearest patches, over the first frame and up to seven previous ones.
        radius: maximum distance of a nearest patch in rows and in columns.
        temperature: of the weights of nearest patches.

    Returns:
        (B, F - 1, N, K) of the later frames; patches sum to 1.

    Source: TimeT, with the numbers of the released code.
    """
    first, *later = F.normalize(features, dim=-1).unflatten(2, (side, side)).unbind(dim=1)
    sources = [LabelledFrame(first, assignments.unflatten(1, (side, side)))]
    for frame in later:
        near = [sources[0], *sources[1:][-_PREVIOUS_FRAMES:]]
        labels = label_frame(frame, near, neighbours=neighbours, radius=radius, temperature=temperature)
        sources.append(LabelledFrame(frame, labels))
    return torch.stack([source.labels.flatten(1, 2) for source in sources[1:]], dim=1)


@in_float32
def assignment_loss(
    embeddings: Float[Tensor, "b n e"],
    prototypes: Float[Tensor, "k e"],
    targets: Int[Tensor, "b n"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Cross-entropy of the last frame's patches with the prototypes that were propagated to them, mean over patches.

    Args:
        embeddings: (B, N, E) of unit length.
        prototypes: (K, E) of unit length.
        targets: (B, N) prototype of each patch.
        temperature: of the cosines.

    Source: TimeT; hard targets, as in the released code.
    """
    logits = F.linear(embeddings, prototypes) / temperature
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TimeT(StudentTeacher):
    """Temporal consistency of dense cluster assignments, for pretrained networks and videos.

    Reads `views` (one crop for all frames of a clip), `backbone`, `head` (its MLP; the number of prototypes), `optim`,
    `losses.student_temperature`, and `objects.group_size`: assignments are balanced over the clips of a group.

    The released code updates its teacher in the wrong direction, so that it is in effect the student; `optim.momentum
    [0, 0]` makes the teacher equal to the student. It balances the assignments over the clips of a device, applies only
    one of the four operations of the colour jitter, resizes a frame before it is cropped, too, keeps the final norm
    frozen, renormalises prototypes after each step, where here the last layer normalises them, and has a head whose
    last hidden layer has half the width.

    Args:
        setting: the run; its items are clips.
        frames: number of frames, at random times of a clip.
        neighbours: number of nearest patches whose assignments are averaged.
        radius: maximum distance of a nearest patch, in patches.
        propagation_temperature: temperature of the weights of nearest patches.
        assignment_temperature: temperature of the first frame's assignments.

    Raises:
        ConfigError: a value out of range.
    """

    columns = Columns(
        labels={"timet": "TimeT, last frame", "prototypes": "share of the prototypes that are targets"},
        progress={"prototypes": "{:.0%} of prototypes"},
    )
    clip_frames = 4
    # optim.lr is the rate of the head, which starts from random weights.
    lr_factors = {"backbone.": 0.1}

    student: Network
    teacher: Network

    def __init__(
        self,
        setting: Setting,
        *,
        frames: Annotated[int, at_least(2)] = 4,
        neighbours: Annotated[int, at_least(1)] = 5,
        radius: Annotated[int, at_least(0)] = 6,
        propagation_temperature: Temperature = 0.1,
        assignment_temperature: Temperature = 0.05,
    ) -> None:
        super().__init__(setting)
        options = setting.options
        self.clip_frames = frames
        self.images_per_group = options.objects.group_size
        self.neighbours, self.radius = neighbours, radius
        self.propagation_temperature, self.assignment_temperature = propagation_temperature, assignment_temperature
        head = replace(options.head, train_gain=False)  # prototypes have unit length
        levels = {"patch": head.prototypes}
        self.student = Network(setting.build_backbone(), head, levels=levels, seed=options.seed)
        self.teacher = self.student.make_teacher()
        self.side = options.views.size // self.student.backbone.patch_size
        self.uses_all_parameters = not options.optim.freeze_backbone_epochs

    def exported(self) -> Backbone:
        """Return the student's backbone, as the released code saves it; with LoRA, the teacher's without adapters."""
        return self.teacher.backbone if has_adapters(self.student.backbone) else self.student.backbone

    def samples(self) -> ClipFrames:
        """Return the transform to frames of a clip."""
        sites = self.student.backbone.num_drop_path_sites
        return ClipFrames(self.options.views, frames=self.clip_frames, drop_path_sites=sites)

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the loss of the last frames."""
        student, teacher, config = self.student, self.teacher, self.options.backbone
        first, *between, last = (encode_frozen(teacher.backbone, views, config) for views in self._views(batch))
        with torch.no_grad():
            embeddings = teacher.head(encode(teacher.backbone, first).tokens)
            features = [encode(student.backbone, inputs).tokens for inputs in (first, *between)]
        tokens = encode(student.backbone, last, drop_path_noise=drop_path_noise(batch)).tokens
        assignments = self._assign(embeddings)
        propagated = propagate_assignments(
            assignments,
            torch.stack([*features, tokens.detach()], dim=1),
            side=self.side,
            neighbours=self.neighbours,
            radius=self.radius,
            temperature=self.propagation_temperature,
        )
        targets = propagated[:, -1].argmax(dim=-1)
        loss = assignment_loss(
            student.head(tokens),
            student.prototypes("patch").weight,
            targets,
            temperature=self.options.losses.student_temperature,
        )
        return Output({"timet": loss}, {"prototypes": self._share_of_prototypes(targets, assignments.shape[2])})

    def _views(self, batch: Batch) -> list[Float[Tensor, "b c h w"]]:
        """Return the frames of all clips, augmented and normalised; frame after frame."""
        return list(augmented(batch, "frames", self.options.views, self.student.backbone).unbind(dim=1))

    def _assign(self, embeddings: Float[Tensor, "b n e"]) -> Float[Tensor, "b n k"]:
        """Assign the first frames' patches to the teacher's prototypes, balanced within each group of clips."""
        prototypes = self.teacher.prototypes("patch").weight
        temperature = self.assignment_temperature
        groups = [
            balanced_assignments(
                embeddings[rows].flatten(0, 1), prototypes, temperature=temperature, rounds=_SINKHORN_ROUNDS
            )
            for rows in self.image_groups(len(embeddings))
        ]
        return torch.cat(groups).unflatten(0, embeddings.shape[:2])

    def _share_of_prototypes(self, targets: Int[Tensor, "b n"], prototypes: int) -> tuple[Tensor, int]:
        """Return the number of prototypes that are targets in each group, and their number, summed over groups."""
        groups = targets.unflatten(0, (-1, self.images_per_group)).flatten(1)
        used = torch.zeros(len(groups), prototypes, device=targets.device).scatter_(1, groups, 1.0)
        return used.sum(), used.numel()
