"""iBOT, against the values of its released code and its definition."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.objectives import golden
from tests.objectives.conftest import batch_of
from tests.objectives.literal import MOMENTUM, assert_steps_are, follow, linear, unequal
from torch import Tensor

from cribo.data.samples import Batch
from cribo.method import Centre, ProjectionHead, PrototypeLayer, SelfDistillation
from cribo.objectives import Setting, Step
from cribo.objectives.crops import augmented_crops
from cribo.objectives.rivals.dino import dino_loss
from cribo.objectives.rivals.ibot import IBOT, BlockMasks, draw_block_mask, masked_patch_loss
from cribo.pretraining import PretrainConfig

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)


# ------------------------------------------------------------------ the released code


@pytest.mark.parametrize("path", golden.cases("ibot_loss"), ids=lambda path: path.stem)
def test_golden_losses_and_gradients(path: Path) -> None:
    case = golden.load(path)
    masks = case["masks"].flatten(2)
    images = masks.shape[1]
    students = {name: case[f"student_{name}"].requires_grad_() for name in ("cls", "patches", "local_cls")}
    temperature = float(case["teacher_temperatures"][case["epoch"]])
    targets = ((case["teacher_cls"] - case["centre_before"]) / temperature).softmax(dim=-1).unflatten(0, (2, images))
    logits = torch.cat((students["cls"], students["local_cls"])).unflatten(0, (-1, images)) / 0.1
    cls = dino_loss(targets, logits)
    # With identity prototypes, embeddings are logits.
    identity = torch.eye(case["student_patches"].shape[2], dtype=logits.dtype)
    own = float(case["teacher_patch_temperatures"][case["epoch"]])
    level = SelfDistillation(identity, identity, case["patch_centre_before"].flatten(), 0.1, own)
    rows = masks.flatten(0, 1).bool()
    patches = masked_patch_loss(students["patches"][rows], case["teacher_patches"][rows], masks.bool(), level)
    assert cls.item() == pytest.approx(case["cls_loss"], rel=1e-6)
    assert patches.item() == pytest.approx(case["patch_loss"], rel=1e-6)
    (cls + patches).backward()
    for name, value in students.items():
        torch.testing.assert_close(value.grad, case[f"student_{name}_grad"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("path", golden.cases("ibot_loss"), ids=lambda path: path.stem)
@pytest.mark.parametrize(("rows", "prefix"), [("teacher_cls", ""), ("teacher_patches", "patch_")])
def test_golden_centres(path: Path, rows: str, prefix: str) -> None:
    case = golden.load(path)
    logits = case[rows].flatten(0, -2)
    centre = Centre(logits.shape[1]).to(logits.dtype)
    centre.value.copy_(case[f"{prefix}centre_before"].flatten())
    centre.update(logits.sum(dim=0), torch.tensor(len(logits)), torch.eye(logits.shape[1], dtype=logits.dtype))
    torch.testing.assert_close(centre.value, case[f"{prefix}centre_after"].flatten(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("path", golden.cases("ibot_head"), ids=lambda path: path.stem)
def test_golden_head(path: Path) -> None:
    case = golden.load(path)
    layers = [name for name in case if name.startswith("mlp") and name.endswith("weight")]
    hidden, dim = case[layers[0]].shape
    size = len(case[layers[-1]])
    head = ProjectionHead(dim, hidden_dim=hidden, bottleneck_dim=size, num_layers=len(layers)).double()
    head.load_state_dict({name: value for name, value in case.items() if name.startswith("mlp")})
    last = PrototypeLayer(size, len(case["last_layer.weight_v"])).double()
    last.load_state_dict({"direction": case["last_layer.weight_v"], "gain": case["last_layer.weight_g"]})
    expected = torch.cat((case["cls_logits"][:, None], case["patch_logits"]), dim=1)
    torch.testing.assert_close(last(head(case["tokens"])), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", golden.cases("ibot_masks"), ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["mixed", "fixed"])
def test_golden_distribution_of_masks(path: Path, kind: str, tiny: Tiny) -> None:
    case = golden.load(path)
    side = case[kind].shape[-1]
    objective = make(tiny, {"views.size": 8 * side}, mask_ratio=(0.1, 0.5) if kind == "mixed" else (0.3, 0.3))
    probability = 0.5 if kind == "mixed" else 1.0
    masks_of = objective.crops.numbers["masks"]
    assert isinstance(masks_of, BlockMasks)
    masks_of = dataclasses.replace(masks_of, probability=probability)
    generator = torch.Generator().manual_seed(0)
    masks = torch.stack([masks_of.draw(generator) for _ in range(1500)]).unflatten(1, (side, side))
    share = masks.flatten(1).double().mean(dim=1)
    expected = case[f"{kind}_fraction"]
    quantiles = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    assert float((share == 0).double().mean()) == pytest.approx(float((expected == 0).double().mean()), abs=0.04)
    own, other = (each[each > 0].quantile(quantiles) for each in (share, expected))
    torch.testing.assert_close(own, other, rtol=0, atol=0.025)
    # Neighbours are masked together as often: blocks have the same sizes and shapes.
    for axis in (1, 2):
        own_pairs, pairs = (pairs_along(each.bool(), axis) for each in (masks, case[kind]))
        assert own_pairs == pytest.approx(pairs, abs=0.03)
    middle = slice(side // 2 - side // 7, side // 2 + side // 7)
    own_middle, in_middle = (float(each[:, middle, middle].double().mean()) for each in (masks, case[kind]))
    assert own_middle == pytest.approx(in_middle, abs=0.05)


def pairs_along(masks: Tensor, axis: int) -> float:
    """Return the share of masked patches whose next patch along an axis is also masked."""
    length = masks.shape[axis] - 1
    first, second = masks.narrow(axis, 0, length), masks.narrow(axis, 1, length)
    return float((first & second).sum() / first.sum())


# ------------------------------------------------------------------ masks


def test_a_ratio_of_zero_masks_nothing_and_small_grids_work() -> None:
    generator = torch.Generator().manual_seed(0)
    assert not draw_block_mask((14, 14), 0.0, generator=generator).any()
    for grid in ((2, 2), (1, 1), (4, 4), (3, 9)):
        for _ in range(20):
            assert draw_block_mask(grid, 0.5, generator=generator).sum() <= 0.5 * grid[0] * grid[1]


# ------------------------------------------------------------------ the objective


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> IBOT:
    return IBOT(Setting(tiny(changes), 36, 4), **{"local_crops": 3, "local_size": 16, **args})


def logits(network: Any, tokens: Tensor) -> Tensor:
    return network.image_prototypes(network.head(tokens))


def test_forward_is_the_definition(tiny: Tiny) -> None:
    """With a loop over views and images; the student's masked patches are replaced before the positions are added."""
    objective = make(tiny, {"backbone.drop_path": 0.0}).double()
    student, teacher = objective.student, objective.teacher
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        objective.patch_centre.value += torch.randn(32, generator=generator)
        student.get_parameter("mask_token").normal_(generator=generator)
    batch = batch_of(objective, 6)
    output = objective(batch, STEP)
    temperature = objective.schedules(STEP)["teacher_temperature"]
    views = augmented_crops(batch, objective.options.views, objective.exported())[0].unflatten(0, (2, 6)).double()
    masks = batch["masks"]
    assert (masks.sum(dim=2) == 0).any()
    assert (masks.sum(dim=2) > 0).any()
    terms = []
    for view in range(2):
        for image in range(6):
            masked = masks[image, view]
            if not masked.any():
                terms.append(torch.zeros((), dtype=torch.float64))
                continue
            seen = views[view, image][None]
            model = student.backbone.model
            embedded = model.patch_embed(seen).clone()
            embedded.view(1, -1, 32)[0, masked] = student.get_parameter("mask_token")
            tokens = model.norm(model.blocks(model._pos_embed(embedded)))[0, 1:]
            target = logits(teacher, teacher.backbone(seen).tokens)[0] - objective.patch_centre.value
            predicted = F.log_softmax(logits(student, tokens)[masked] / 0.1, dim=-1)
            terms.append(-((target[masked] / temperature).softmax(dim=-1) * predicted).sum(dim=1).mean())
    torch.testing.assert_close(output.losses["mim"], torch.stack(terms).mean())


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, Tensor]:
    """Compute the loss of [CLS] for each pair of different crops, and that of the masked patches of each image."""
    student, teacher, images = objective.student, objective.teacher, len(batch)
    views, local = (part.double() for part in augmented_crops(batch, objective.options.views, student.backbone))
    masks, temperature = batch["masks"].transpose(0, 1), linear(0.04, 0.07, 3, step)
    with torch.no_grad():
        features = teacher.backbone(views)
        objective.seen = {"image": logits(teacher, features.global_token), "patch": logits(teacher, features.tokens)}
        targets, patch_targets = (
            ((objective.seen[name] - getattr(objective, f"{name}_centre").value) / temperature).softmax(dim=-1)
            for name in ("image", "patch")
        )
    model = student.backbone.model
    embedded = model.patch_embed(views)  # (2B, h, w, D)
    masked = masks.reshape(*embedded.shape[:3], 1)
    embedded = torch.where(masked, student.get_parameter("mask_token"), embedded)
    tokens = model.norm(model.blocks(model._pos_embed(embedded)))
    of_cls = torch.cat((logits(student, tokens[:, 0]), logits(student, student.backbone(local).global_token)))
    cls = [
        -(target * (own / 0.1).log_softmax(dim=-1)).sum(dim=-1).mean()
        for first, target in enumerate(targets.split(images))
        for second, own in enumerate(of_cls.split(images))
        if first != second
    ]
    of_patches = (logits(student, tokens[:, 1:]) / 0.1).log_softmax(dim=-1)
    entropies = -(patch_targets * of_patches).sum(dim=-1).unflatten(0, (2, images))
    terms = [
        entropies[view, image][masks[view, image]].mean() if masks[view, image].any() else torch.zeros(()).double()
        for view in range(2)
        for image in range(images)
    ]
    return {"cls": torch.stack(cls).mean(), "mim": torch.stack(terms).mean()}


def written_update(objective: Any, step: Step) -> None:
    for name, rows in objective.seen.items():
        centre = getattr(objective, f"{name}_centre").value
        centre.copy_(0.8 * centre + 0.2 * rows.flatten(0, -2).mean(dim=0))
    follow(objective, step)


@pytest.mark.parametrize("network", [{}, {"backbone.train_blocks": 1}], ids=["all blocks", "frozen blocks"])
def test_two_steps_are_those_written_out(tiny: Tiny, network: dict[str, Any]) -> None:
    losses = {"losses.centre_momentum": 0.8, "losses.teacher_temperature": (0.04, 0.07)}
    changes = {"backbone.drop_path": 0.0, "optim.momentum": MOMENTUM, "losses.teacher_temperature_epochs": 3}
    objective = make(tiny, {**changes, **losses, "losses.student_temperature": 0.1, **network})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        objective.student.get_parameter("mask_token").normal_(generator=generator)
        for centre in (objective.image_centre, objective.patch_centre):
            centre.value += torch.randn(32, generator=generator)
    unequal(objective)
    batches = [batch_of(objective, 6, first) for first in (0, 6)]
    assert 0 < int(batches[0]["masks"].any(dim=2).sum()) < 12
    assert_steps_are(objective, batches, written_losses, written_update, tolerance=1e-6)


def test_masks_change_only_the_student_and_its_global_crops(tiny: Tiny) -> None:
    objective = make(tiny, {"backbone.drop_path": 0.0})
    batch = batch_of(objective)
    output = objective(batch, STEP)
    output.losses["mim"].backward()
    assert objective.student.get_parameter("mask_token").grad is not None
    batch["masks"].zero_()
    again = objective(batch, STEP)
    assert again.losses["mim"] == 0
    assert again.losses["cls"] != output.losses["cls"]
    assert torch.equal(*objective.embeddings["patch"])


def test_frozen_blocks_freeze_the_mask_token(tiny: Tiny) -> None:
    objective = make(tiny, {"backbone.train_blocks": 1})
    output = objective(batch_of(objective), STEP)
    (output.losses["cls"] + output.losses["mim"]).backward()
    trained = {name for name, value in objective.student.named_parameters() if value.grad is not None}
    assert "mask_token" not in trained
    assert {name for name in trained if "blocks.0" in name} == set()
    assert any("blocks.1" in name for name in trained)
