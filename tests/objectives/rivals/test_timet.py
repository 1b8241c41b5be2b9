"""TimeT: values of the released code, the sample of a clip, and training on moving scenes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests.objectives.golden import cases, load
from tests.objectives.literal import MOMENTUM, assert_steps_are, unequal
from torch import Tensor

from cribo.base.errors import DataError
from cribo.data.samples import Batch, SampleDataset
from cribo.data.scenes import Scenes
from cribo.data.sources.clips import Clips
from cribo.data.sources.images import open_images
from cribo.method import ViewRecipe
from cribo.objectives import Setting, Step
from cribo.objectives.crops import augmented
from cribo.objectives.rivals.timet import (
    ClipFrames,
    TimeT,
    assignment_loss,
    balanced_assignments,
    propagate_assignments,
)
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]


@pytest.mark.parametrize("path", cases("timet_sinkhorn"), ids=lambda path: path.stem)
def test_golden_assignments(path: Path) -> None:
    golden = load(path)
    scores: Tensor = golden["scores"]
    for rounds in (3, 10):
        # Rows of the identity as prototypes: the embeddings are the scores.
        identity = torch.eye(scores.shape[1]).to(scores)
        found = balanced_assignments(scores, identity, temperature=golden["epsilon"], rounds=rounds)
        torch.testing.assert_close(found, golden[f"assignments_{rounds}"].to(found.dtype), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("path", [*cases("timet_no_teacher"), *cases("timet_teacher")], ids=lambda path: path.stem)
def test_golden_loss_and_gradient(path: Path) -> None:
    golden = load(path)
    clips, frames = golden["assignments_first"].shape[0], len(golden["features"]) // len(golden["assignments_first"])
    projected = F.normalize(golden["projected"].requires_grad_(), dim=-1).unflatten(0, (clips, -1))
    prototypes = golden["prototypes"].requires_grad_()
    # With a teacher, only the assignments of the first frame are the teacher's.
    teacher = F.normalize(golden.get("teacher_projected", golden["projected"]), dim=-1).unflatten(0, (clips, -1))
    assignments = balanced_assignments(
        teacher[:, 0].flatten(0, 1).detach(),
        golden.get("teacher_prototypes", prototypes).detach(),
        temperature=0.05,
        rounds=10,
    ).unflatten(0, (clips, -1))
    torch.testing.assert_close(assignments, golden["assignments_first"], rtol=1e-4, atol=1e-6)
    features = golden["features"].unflatten(0, (clips, frames))
    side = golden["targets"].shape[-1]
    found = propagate_assignments(assignments, features, side=side, neighbours=5, radius=6, temperature=0.1)
    torch.testing.assert_close(found.mT.unflatten(3, (side, side)), golden["propagated"], rtol=1e-4, atol=1e-5)
    targets = found[:, -1].argmax(dim=-1)
    assert torch.equal(targets, golden["targets"].flatten(1))
    loss = assignment_loss(projected[:, -1], prototypes, targets, temperature=0.1)
    torch.testing.assert_close(loss, torch.tensor(golden["loss"]).to(loss.dtype), rtol=1e-5, atol=1e-6)
    loss.backward()
    for name in ("projected", "prototypes"):
        torch.testing.assert_close(golden[name].grad, golden[f"{name}_grad"], rtol=1e-4, atol=1e-7)


# ------------------------------------------------------------------ the step, written out

SIDE, FRAMES, NEIGHBOURS, RADIUS = 4, 10, 3, 1  # frame 10 does not read frame 2


def written_losses(objective: TimeT, batch: Batch, step: Step) -> dict[str, Tensor]:
    """Compute the loss of the released code, patch by patch. Pairs of clips are balanced, not a device's batch."""
    student, teacher = objective.student, objective.teacher
    frames = augmented(batch, "frames", objective.options.views, student.backbone).double()
    with torch.no_grad():
        first = F.normalize(teacher.head(teacher.backbone(frames[:, 0]).tokens), dim=-1)
        scores = first @ F.normalize(teacher.prototypes("patch").direction, dim=-1).T
        assignments = []
        for group in scores.split(2):
            plan = (group.flatten(0, 1) / 0.05).exp()
            for _ in range(10):
                plan = plan / plan.sum(dim=0)
                plan = plan / plan.sum(dim=1, keepdim=True)
            assignments.append(plan.unflatten(0, (2, SIDE**2)))
        features = torch.stack([F.normalize(student.backbone(frames[:, f]).tokens, dim=-1) for f in range(FRAMES)], 1)
        targets = torch.stack(
            [propagated(*clip) for clip in zip(torch.cat(assignments), features, strict=True)]
        ).argmax(dim=-1)
    last = F.normalize(student.head(student.backbone(frames[:, -1]).tokens), dim=-1)
    logits = last @ F.normalize(student.prototypes("patch").direction, dim=-1).T / 0.1
    chosen = logits.log_softmax(dim=-1).gather(2, targets[..., None])
    return {"timet": -chosen.mean()}


def propagated(assignments: Tensor, features: Tensor) -> Tensor:
    """Propagate the assignments (N, K) of the first frame of a clip to the last, by features (F, N, D)."""
    labels = [assignments]
    for frame in range(1, FRAMES):
        sources = sorted({0, *range(max(0, frame - 7), frame)})
        rows = []
        for patch in range(SIDE**2):
            near = [
                other
                for other in range(SIDE**2)
                if max(abs(patch // SIDE - other // SIDE), abs(patch % SIDE - other % SIDE)) <= RADIUS
            ]
            cosines = torch.cat([features[source, near] @ features[frame, patch] for source in sources])
            of_near = torch.cat([labels[source][near] for source in sources])
            values, places = cosines.topk(NEIGHBOURS)
            weights = (values / 0.1).exp()
            rows.append((weights[:, None] * of_near[places]).sum(dim=0) / weights.sum())
        labels.append(torch.stack(rows))
    return labels[-1]


def test_two_steps_are_those_written_out(tiny: Tiny) -> None:
    changes = {
        "backbone.drop_path": 0.0,
        "objects.group_size": 2,
        "head.prototypes": 6,
        "losses.student_temperature": 0.1,
    }
    setting = Setting(tiny({**changes, "optim.momentum": MOMENTUM}), 8, 4)
    objective = unequal(TimeT(setting, frames=FRAMES, neighbours=NEIGHBOURS, radius=RADIUS))
    dataset = SampleDataset(Clips(Scenes(8, size=40, frames=12)), objective.samples(), seed=0)
    batches = [dataset.__getitems__([(0, clip) for clip in range(start, start + 4)]) for start in (0, 4)]
    assert_steps_are(objective, batches, written_losses)


def test_the_student_is_exported(tiny: Tiny) -> None:
    objective = TimeT(Setting(tiny(), 8, 4))
    assert objective.exported() is objective.student.backbone


# ------------------------------------------------------------------ samples


class Still:
    """A video whose frames are all the same."""

    def __init__(self, scenes: Scenes, frames: int) -> None:
        self.scenes, self.frames = scenes, frames

    def __len__(self) -> int:
        return self.frames

    def load(self, index: int) -> Tensor:
        return self.scenes.load(0)

    def name(self, index: int) -> str:
        return f"video/{index}.png"


class Brightening:
    """A video of uniform frames, each brighter than the one before; names do not sort in their order."""

    def __len__(self) -> int:
        return 12

    def load(self, index: int) -> Tensor:
        return torch.full((3, 24, 24), 10 * int(self.name(index).split("/")[1].removesuffix(".png")), dtype=torch.uint8)

    def name(self, index: int) -> str:
        return f"video/{sorted(map(str, range(12)))[index]}.png"


def sample_of(clips: Clips, recipe: ViewRecipe, *, frames: int = 3, epoch: int = 0, index: int = 0):
    return SampleDataset(clips, ClipFrames(recipe, frames=frames, drop_path_sites=0), seed=0)[epoch, index]


def test_the_frames_of_a_sample_share_crop_flip_and_colours() -> None:
    moving = Clips(Scenes(2, size=40, frames=6))
    recipe = ViewRecipe(size=16, area=(0.2, 0.3), jitter=1.0, blur=(1.0, 1.0))
    batch = sample_of(moving, recipe)
    assert batch["frames"].shape == (1, 3, 3, 16, 16)
    photometric = batch["photometric"]
    assert photometric.hue.unique().numel() == photometric.brightness.unique().numel() == 1
    assert photometric.sigma.unique().numel() == 3
    frames = sample_of(Clips(Still(Scenes(1, size=40), 6)), recipe)["frames"][0]
    assert torch.equal(frames[0], frames[1])
    assert torch.equal(frames[0], frames[2])


def test_frames_are_in_temporal_order_at_random_times() -> None:
    orders = set()
    for epoch in range(20):
        frames = sample_of(Clips(Brightening()), ViewRecipe(size=16), epoch=epoch)["frames"][0]
        values = [int(frame[0, 8, 8]) for frame in frames]
        assert values == sorted(values)
        assert len(set(values)) == 3
        orders.add(tuple(values))
    assert len(orders) > 10


def write_video(folder: Path, sizes: list[int]) -> None:
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        frame = Scenes(1, size=40, frames=8).load(number)[:, :size, :size]
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(folder / f"frame{number}.png")


def test_a_frame_of_another_size_is_reported_by_its_name(tmp_path: Path) -> None:
    write_video(tmp_path / "a", [40, 40, 30, 40])
    write_video(tmp_path / "b", 4 * [40])
    batch = sample_of(Clips(open_images(tmp_path)), ViewRecipe(size=16), frames=4)
    assert batch.unreadable[0].name == "a/frame2.png"
    assert "30 x 30 pixels, but another frame of its clip 40 x 40" in batch.unreadable[0].reason
    assert int(batch.images) == 1


def test_short_videos_are_found_before_training(tiny: Tiny, tmp_path: Path) -> None:
    for name, frames in (("a", 5), ("b", 1)):
        write_video(tmp_path / "videos" / name, frames * [40])
    changes = {"data.root": str(tmp_path / "videos"), "objective.name": "timet", "optim.batch_size": 2}
    with pytest.raises(DataError, match=r"at least 4 frames, .* but 1 of 2 have fewer: the first, of b/frame0.png,"):
        pretrain(tiny({**changes, "objects.group_size": 2}), out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_folders_that_are_no_collection_of_clips(tiny: Tiny, tmp_path: Path) -> None:
    write_video(tmp_path / "videos" / "a", 8 * [40])
    changes = {"data.root": str(tmp_path / "videos"), "objective.name": "timet", "objects.group_size": 2}
    with pytest.raises(DataError, match=r"1 clip of up to 32 frames, fewer than one batch of 8: lower data\.video"):
        pretrain(tiny(changes), out=tmp_path / "runs")
    (tmp_path / "videos" / "b.mp4").touch()
    with pytest.raises(DataError, match="contains both video files and images: choose one"):
        pretrain(tiny(changes), out=tmp_path / "runs")
