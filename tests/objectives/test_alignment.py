"""Alignment of views by its definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cribo.arguments import ConfigError
from cribo.data.samples import Batch, SampleDataset
from cribo.data.scenes import Scenes
from cribo.method import patch_coordinates
from cribo.models import load_backbone
from cribo.objectives import Setting, Step
from cribo.objectives.alignment import Alignment, overlap_points, sample_tokens
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(0, steps_per_epoch=4, total_steps=12)


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> Alignment:
    return Alignment(Setting(tiny({"backbone.drop_path": 0.0, **(changes or {})}), 36, 4), **args)


def batch_of(objective: Alignment, count: int = 4) -> Batch:
    dataset = SampleDataset(Scenes(8, size=40), objective.samples(), seed=0)
    return dataset.__getitems__([(0, image) for image in range(count)])


def test_points_of_both_views_are_the_same_places_of_the_image() -> None:
    """Features that are the coordinates of their patches are the same wherever both views show a place."""
    boxes = torch.tensor([[[0, 0, 64, 64], [20, 8, 64, 48]], [[5, 7, 30, 90], [0, 30, 64, 64]]])
    flips = torch.tensor([[False, True], [True, False]])
    coordinates = patch_coordinates(boxes, flips, (4, 6))
    places, overlapping = overlap_points(coordinates, 3)
    found = sample_tokens(coordinates, (4, 6), places)
    assert overlapping.tolist() == [True, True]
    torch.testing.assert_close(found[:, 0], found[:, 1])
    assert len(found[0, 0].unique(dim=0)) == 9


def test_views_without_an_overlap_do_not_count(tiny: Tiny) -> None:
    objective = make(tiny)
    batch = batch_of(objective)
    batch["coordinates"][1:, 1] += 1000
    output = objective(batch, STEP)
    count, total = output.metrics["overlapping"]
    assert (int(count), total) == (1, 4)
    alone = batch_of(objective, 1)
    torch.testing.assert_close(output.losses["alignment"], objective(alone, STEP).losses["alignment"])
    batch["coordinates"][0, 1] += 1000
    assert objective(batch, STEP).losses["alignment"] == 0


def test_a_shared_trunk_changes_nothing(tiny: Tiny) -> None:
    whole = make(tiny)
    shared = make(tiny, {"backbone.train_blocks": 1})
    shared.load_state_dict(whole.state_dict())
    batch = batch_of(whole)
    losses = [objective(batch, STEP).losses["alignment"] for objective in (whole, shared)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    first, second = (dict(objective.student.named_parameters()) for objective in (whole, shared))
    trained = [name for name, parameter in second.items() if parameter.requires_grad]
    assert any("blocks.1." in name for name in trained)
    assert not any("blocks.0." in name or "patch_embed" in name or "pos_embed" in name for name in trained)
    for name in trained:
        torch.testing.assert_close(first[name].grad, second[name].grad)


def test_training_changes_the_last_blocks_alone(tiny: Tiny, tmp_path: Any) -> None:
    config = tiny({"objective.name": "alignment", "backbone.train_blocks": 1, "backbone.drop_path": 0.0})
    before = Alignment(Setting(config, 36, 4)).exported().state_dict()
    run = pretrain(config, out=tmp_path)
    after = load_backbone(run.folder).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("blocks.1." in name or ".norm." in name for name in changed)


def test_more_blocks_than_there_are_cannot_be_trained(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"backbone.train_blocks must be 1 to 2, .*, got 3"):
        make(tiny, {"backbone.train_blocks": 3})
