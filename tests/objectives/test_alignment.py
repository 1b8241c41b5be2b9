"""Alignment of views, against its definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.objectives.conftest import batch_of
from tests.objectives.literal import MOMENTUM, assert_steps_are, unequal

from cribo.data.samples import Batch
from cribo.method import MemoryBank, patch_coordinates, pool_objects
from cribo.models import load_backbone
from cribo.objectives import Setting, Step
from cribo.objectives.alignment import Alignment
from cribo.objectives.headfree import soft_neighbour_loss
from cribo.objectives.objects import Objects, find_objects, label_tokens
from cribo.objectives.points import find_points, overlap_points, sample_tokens
from cribo.objectives.views import normalised_views
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(0, steps_per_epoch=4, total_steps=12)


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> Alignment:
    return Alignment(Setting(tiny({"backbone.drop_path": 0.0, **(changes or {})}), 36, 4), **args)


def test_points_of_both_views_are_the_same_points_of_the_image() -> None:
    """If features are patch coordinates, they are equal at all points of the overlap."""
    boxes = torch.tensor([[[0, 0, 64, 64], [20, 8, 64, 48]], [[5, 7, 30, 90], [0, 30, 64, 64]]])
    flips = torch.tensor([[False, True], [True, False]])
    coordinates = patch_coordinates(boxes, flips, (4, 6))
    places, overlapping = overlap_points(coordinates, 3)
    found = sample_tokens(coordinates, (4, 6), places)
    assert overlapping.tolist() == [True, True]
    torch.testing.assert_close(found[:, 0], found[:, 1])
    assert len(found[0, 0].unique(dim=0)) == 9


def test_views_without_overlap_are_ignored(tiny: Tiny) -> None:
    objective = make(tiny)
    batch = batch_of(objective)
    batch["coordinates"][1:, 1] += 1000
    output = objective(batch, STEP)
    count, total = output.metrics["overlapping"]
    assert (int(count), total) == (1, 4)
    alone = batch_of(objective, 1)
    torch.testing.assert_close(output.losses["points"], objective(alone, STEP).losses["points"])
    batch["coordinates"][0, 1] += 1000
    assert objective(batch, STEP).losses["points"] == 0


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, torch.Tensor]:
    """Compute the cosine distance of student and teacher at each of the same 3 x 3 points of the image."""
    views = normalised_views(batch, objective.options.views, objective.student.backbone).double()
    student, teacher = (
        network.backbone(views).tokens.unflatten(0, (-1, 2)) for network in (objective.student, objective.teacher)
    )
    distances = []
    for image, centres in enumerate(batch["coordinates"].double()):
        low, high = centres.amin(dim=1).amax(dim=0), centres.amax(dim=1).amin(dim=0)
        if (low >= high).any():
            continue
        for row in range(3):
            for column in range(3):
                place = low + (high - low) * (torch.tensor([column, row]).double() + 0.5) / 3
                for view in (0, 1):
                    own = interpolated(student[image, view], centres[view], place)
                    other = interpolated(teacher[image, 1 - view], centres[1 - view], place)
                    distances.append(1 - F.cosine_similarity(own, other.detach(), dim=0))
    return {"points": torch.stack(distances).mean()}


def interpolated(tokens: torch.Tensor, centres: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Interpolate bilinearly at positions that are given in patches."""
    spacing = (centres[5] - centres[0]).abs()  # to the next column and row of 4 x 4 patches
    weights = (1 - (centres - place).abs() / spacing).clamp_min(0).prod(dim=1)
    return weights @ tokens


def test_two_steps_are_those_written_out(tiny: Tiny) -> None:
    objective = unequal(make(tiny, {"optim.momentum": MOMENTUM}, grid=3))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]

    assert_steps_are(objective, batches, written_losses, tolerance=1e-5)


ALL = dict.fromkeys(("points", "cross_view", "cross_image", "object_neighbours", "patch_neighbours"), 1.0)
ALIGNMENT = {"objective.name": "alignment", "objective.args": ALL}


def with_banks(tiny: Tiny, **args: float) -> tuple[Alignment, Batch]:
    """Create an objective with different student and teacher, fill its bank from four images, and draw others."""
    objective = make(tiny, {"losses.neighbours": 3}, **args)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in objective.student.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    objective(batch_of(objective), STEP)
    objective.after_step(Step(0, 1, 10**9))  # with the first step's momentum
    return objective, batch_of(objective, first=4)


def rows_of(objective: Alignment, batch: Batch) -> tuple[torch.Tensor, Objects, torch.Tensor]:
    """Return the teacher's tokens and objects, and the student's objects."""
    views = normalised_views(batch, objective.options.views, objective.exported())
    student = objective.student.get_submodule("backbone")
    teacher, own = (network(views).tokens.unflatten(0, (-1, 2)) for network in (objective.exported(), student))
    labels = label_tokens(teacher, batch, objective.options.objects)
    objects = find_objects(*pool_objects(teacher, labels, 5), labels, batch.images)
    return teacher, objects, objects.features(own)


def test_objects_match_those_of_the_other_view(tiny: Tiny) -> None:
    objective, batch = with_banks(tiny, points=0, cross_view=1)
    _, objects, student = rows_of(objective, batch)
    both = [1 - F.cosine_similarity(student[view], objects.teacher[1 - view], dim=1).mean() for view in (0, 1)]
    loss = objective(batch, STEP).losses["cross_view"]
    assert len(objects.rows) > 4
    torch.testing.assert_close(loss, (both[0] + both[1]) / 2)


def test_objects_match_their_neighbours_in_the_bank(tiny: Tiny) -> None:
    objective, batch = with_banks(tiny, points=0, cross_image=1)
    bank = objective.object_bank.bank
    assert bank is not None
    assert bank.images_held == 4
    _, objects, student = rows_of(objective, batch)
    matches = bank.match(objects.teacher, objects.images)
    means = []
    for view in (0, 1):
        valid = matches.valid[view]
        neighbours = bank.objects(view, matches.nearest[view, valid])
        assert len(neighbours)
        means.append(1 - F.cosine_similarity(student[1 - view, valid], neighbours, dim=1).mean())
    output = objective(batch, STEP)
    torch.testing.assert_close(output.losses["cross_image"], (means[0] + means[1]) / 2)
    assert output.metrics["bootstrapping_ratio"] == (matches.valid.sum(), matches.valid.numel())


def test_soft_neighbours_of_objects_and_points(tiny: Tiny) -> None:
    objective, batch = with_banks(tiny, points=0, object_neighbours=1, patch_neighbours=1, grid=3)
    objects_of, patches_of = objective.object_bank.bank, objective.patch_bank.bank
    assert objects_of is not None
    assert patches_of is not None
    assert len(patches_of) == 4 * 8  # the views of all four images overlap
    teacher, objects, student = rows_of(objective, batch)
    losses = objective(batch, STEP).losses
    wanted = soft_neighbour_loss(student, objects.teacher, objects.images, objects_of, neighbours=3)
    torch.testing.assert_close(losses["object_neighbours"], wanted)
    points = find_points(teacher, batch, grid=objective.grid, side=3)
    views = normalised_views(batch, objective.options.views, objective.exported())
    own = objective.student.get_submodule("backbone")(views).tokens.unflatten(0, (-1, 2))
    wanted = soft_neighbour_loss(points.features(own), points.teacher, points.images, patches_of, neighbours=3)
    torch.testing.assert_close(losses["patch_neighbours"], wanted)


def test_a_loss_with_weight_0_is_not_computed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("computed")

    objective, batch = with_banks(tiny, cross_view=1)
    monkeypatch.setattr(MemoryBank, "match", refuse)
    monkeypatch.setattr("cribo.objectives.terms.soft_neighbour_loss", refuse)
    assert set(objective(batch, STEP).losses) == {"points", "cross_view"}
    assert objective.object_bank.bank is None
    objective, batch = with_banks(tiny)
    monkeypatch.setattr("cribo.objectives.pairs.label_tokens", refuse)
    assert set(objective(batch, STEP).losses) == {"points"}
    assert make(tiny, points=0, patch_neighbours=0.5).weights == {"patch_neighbours": 0.5}


def test_a_resumed_run_restores_its_banks(tiny: Tiny, resumed_state: Callable[..., dict[str, Any]]) -> None:
    config = tiny({**ALIGNMENT, "losses.neighbours": 4, "losses.anchor": 1.0, "runtime.checkpoint_every": 5})
    assert resumed_state(config)["_extra_state"]["patch_bank"]["counts"].sum() > 0


def test_all_losses_train_in_half_precision_and_parts_of_a_batch(tiny: Tiny, tmp_path: Any) -> None:
    changes = {"losses.neighbours": 4, "losses.anchor": 0.5, "backbone.train_blocks": 1, "backbone.drop_path": 0.2}
    half = {"runtime.precision": "bf16-mixed", "optim.micro_batches": 2}
    losses = pretrain(tiny({**ALIGNMENT, **changes, **half}), out=tmp_path).summary["losses"]
    assert losses.keys() >= {*ALL, "anchor"}
    assert all(0 < losses[name] < 10 for name in ALL)


def test_patches_in_the_bank_do_not_depend_on_micro_batches(tiny: Tiny) -> None:
    objective, _ = with_banks(tiny, points=0, patch_neighbours=1)
    split, _ = with_banks(tiny, points=0, patch_neighbours=1)
    batch = batch_of(objective)
    objective(batch, STEP)
    for part in batch.split(2):
        split(part, STEP)
    states = []
    for each in (objective, split):
        each.after_step(STEP)
        state = each.patch_bank.state_dict()
        assert state is not None
        states.append(state["rows"])
    torch.testing.assert_close(*states)


CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "efficientnet_lite0": {},
    "resnet18": {"layers": [1, 1, 1, 0], "channels": [8, 8, 16, 16]},
    "convnext_atto": {"dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
}


def convolutional(tiny: Tiny, name: str, **changes: Any) -> PretrainConfig:
    network = {"backbone.name": name, "backbone.args": CONVOLUTIONAL[name], "backbone.drop_path": 0.0}
    return tiny({**network, "views.size": 64, "objective.name": "alignment", "optim.lr": 1e-3, **changes})


def test_batch_norms_keep_the_statistics_of_the_pretrained_weights(tiny: Tiny, tmp_path: Any) -> None:
    score = {"score.root": "scenes", "score.images": (4, 2), "score.every_epochs": 1, "score.neighbours": 5}
    config = convolutional(tiny, "efficientnet_lite0", **{**score, "data.scenes.size": 96})
    before = Alignment(Setting(config, 36, 4)).exported().state_dict()
    after = load_backbone(pretrain(config, out=tmp_path).folder).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.endswith("conv_pw.weight") for name in changed)
    assert any(".bn1.weight" in name for name in changed)
    assert not any("running" in name or "num_batches" in name for name in changed)


@pytest.mark.parametrize(
    ("name", "frozen", "trained"),
    [
        (
            "efficientnet_lite0",
            ("conv_stem", "bn1", "blocks.0", "blocks.4"),
            ("blocks.5", "blocks.6", "conv_head", "bn2"),
        ),
        ("resnet18", ("conv1", "bn1", "layer1"), ("layer2", "layer3")),
        ("convnext_atto", ("stem", "stages.0", "stages.1"), ("stages.2", "stages.3", "head")),
    ],
)
def test_only_the_last_stages_of_a_convolutional_network_are_trained(
    tiny: Tiny, name: str, frozen: tuple[str, ...], trained: tuple[str, ...]
) -> None:
    config = convolutional(tiny, name, **{"backbone.train_blocks": 2})
    objective = Alignment(Setting(config, 36, 4))
    batch = batch_of(objective)
    objective(batch, STEP).losses["points"].backward()
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for key, parameter in objective.student.get_submodule("backbone.model").named_parameters():
        part = next(part for part in (*frozen, *trained, "blocks.", "other") if key.startswith(part) or part == "other")
        found[parameter.grad is not None].add(part)
    assert found[False] >= set(frozen)
    assert found[True] == set(trained)
